package image

import (
	"errors"
	"os"
	"strings"
)

// Unpacking does not wait for the disk: a sync of the file system also writes what every sandbox has written, which can
// take minutes. Instead the record of a layer names the boot of the host in which it was unpacked, until one sync in the
// background has settled it. Within that boot the layer is whole, whatever happens to the daemon. After another boot an
// unsettled layer may hold files without content: Open throws it away, and its images want to be pulled again.

// bootID names this boot of the host; without one no unsettled layer is trusted by a later daemon.
func bootID() string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "unknown"
	}
	return strings.TrimSpace(string(id))
}

// dropUnsettled removes the layers that an earlier boot did not settle.
func (s *Store) dropUnsettled() error {
	for _, short := range s.unsettled() {
		var r layerRecord
		path := s.path("layers", short)
		if err := readRecord(path+recordExt, &r); err != nil || (r.Boot == s.boot && s.boot != "unknown") {
			continue
		}
		s.o.Log.Warn("dropping a layer that was not on disk when the host went down", "layer", r.DiffID)
		// The directory goes first: it must not outlive what says that it cannot be trusted.
		if err := errors.Join(os.RemoveAll(path), removeFile(path+recordExt)); err != nil {
			return err
		}
	}
	return nil
}

// unsettled lists the short names of layers whose record names a boot.
func (s *Store) unsettled() []string {
	entries, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return nil
	}
	var out []string
	for _, e := range entries {
		short, ok := strings.CutSuffix(e.Name(), recordExt)
		var r layerRecord
		if ok && readRecord(s.path("layers", e.Name()), &r) == nil && r.Boot != "" {
			out = append(out, short)
		}
	}
	return out
}

// settle starts the background sync unless one is under way, which then goes round again. Close waits for it.
func (s *Store) settle() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.settleAgain = true
	if s.settling || s.closed {
		return
	}
	s.settling = true
	s.background.Go(func() {
		for {
			s.mu.Lock()
			if !s.settleAgain || s.closed {
				s.settling = false
				s.mu.Unlock()
				return
			}
			s.settleAgain = false
			s.mu.Unlock()
			if err := s.settleNow(); err != nil {
				s.o.Log.Warn("layers not synced to disk", "err", err)
			}
		}
	})
}

func (s *Store) settleNow() error {
	shorts := s.unsettled()
	if len(shorts) == 0 {
		return nil
	}
	d, err := os.Open(s.path("layers"))
	if err != nil {
		return err
	}
	defer d.Close()
	if err := s.o.syncfs(int(d.Fd())); err != nil {
		return err
	}
	s.records.Lock()
	defer s.records.Unlock()
	for _, short := range shorts {
		r, err := s.readLayer(short)
		if err != nil {
			continue // freed meanwhile
		}
		r.Boot = ""
		if err := s.writeRecord(s.path("layers", short+recordExt), r); err != nil {
			return err
		}
	}
	return nil
}

// Close ends the background work of the store. It does not end pulls: their callers do.
func (s *Store) Close() {
	s.mu.Lock()
	s.closed = true
	s.mu.Unlock()
	s.background.Wait()
}

//go:build linux

package oci

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"time"

	"github.com/useshards/shard/internal/provider"
)

// A runtime needs memory of its own to save a machine and to bring it back, several times what the objects of its kernel take:
// in a machine that is full it would run out, and the machine be lost. So its bound is raised while the guest stands still.
const (
	saveFactor = 7 // times the sentry's own memory; a save took 6 at most
	loadFactor = 20
	lentMost   = 384 << 20 // bytes beyond that, for what is saved of deleted files
	lentPIDs   = 512
	// takeBackEvery is how often a machine that still uses what was lent is looked at.
	takeBackEvery = time.Second
)

// lend raises the machine's bounds until takeBack: n bytes are expected to be used, at least. It refuses what the host has not.
func (i *Instance) lend(n int64) error {
	if free, err := hostMemory(); err == nil && n > free {
		return &provider.RefusedError{Reason: fmt.Sprintf("the host has %d MiB of free memory, and this may need %d MiB", free>>20, n>>20)}
	}
	i.bounds.Lock()
	defer i.bounds.Unlock()
	i.lent = true
	l := i.p.flavour.limits(i.spec.Resources)
	if l.MemoryMax > 0 {
		l.MemoryMax, l.MemoryHigh = l.MemoryMax+n+lentMost, l.MemoryHigh+n+lentMost
	}
	l.PIDs += lentPIDs
	_, err := i.group.Bound(l)
	return err
}

// takeBack gives the machine its own bounds again, as soon as it uses no more, and until then none above what it uses.
func (i *Instance) takeBack() {
	i.bounds.Lock()
	i.lent = false
	i.bounds.Unlock()
	own := i.p.flavour.limits(i.spec.Resources)
	try := func() bool {
		i.bounds.Lock()
		defer i.bounds.Unlock()
		if i.lent {
			return true // it will be taken back anew
		}
		settled, err := i.group.Bound(own)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			i.p.opt.Log.Error("bound a machine", "sandbox", i.spec.ID, "err", err)
		}
		return settled || err != nil
	}
	if try() {
		return
	}
	i.owned.Go(func() {
		for {
			select {
			case <-i.quit:
				return
			case <-i.done:
				return
			case <-time.After(takeBackEvery):
			}
			if try() {
				return
			}
		}
	})
}

// ownMemory is what a process has of its own, in bytes: no shared memory and no files, so nothing of a guest.
func ownMemory(pid int) (int64, error) {
	return kilobytes("/proc/"+strconv.Itoa(pid)+"/status", "RssAnon:")
}

// hostMemory is what the host has to spare, in bytes.
func hostMemory() (int64, error) { return kilobytes("/proc/meminfo", "MemAvailable:") }

// kilobytes reads a line of a file of proc that counts kB, as bytes.
func kilobytes(file, key string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	for line := range bytes.Lines(b) {
		if rest, ok := bytes.CutPrefix(line, []byte(key)); ok {
			n, err := strconv.ParseInt(string(bytes.TrimSpace(bytes.TrimSuffix(bytes.TrimSpace(rest), []byte("kB")))), 10, 64)
			return n << 10, err
		}
	}
	return 0, fmt.Errorf("%s has no %s", file, key)
}

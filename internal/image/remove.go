package image

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"

	"github.com/useshards/shard"
)

// Remove forgets a reference, and frees the image if that was its last name. holders names who uses a digest; it may be
// nil, and must not call the store. A held image is refused with in_use; with force the reference goes, its files stay
// for the holders until a later Remove or Prune, and a warning says so.
func (s *Store) Remove(ref string, force bool, holders func(digest string) []string) (warnings []string, err error) {
	full, err := ParseReference(ref)
	if err != nil {
		return nil, err
	}
	warnings, err = s.removeRef(full, force, holders)
	if err != nil {
		return nil, err
	}
	s.freeLayers()
	return warnings, nil
}

func (s *Store) removeRef(full string, force bool, holders func(digest string) []string) (warnings []string, err error) {
	s.records.Lock()
	defer s.records.Unlock()
	path := s.path("refs", fileName(full))
	var r refRecord
	switch err := readRecord(path, &r); {
	case errors.Is(err, fs.ErrNotExist):
		return nil, shard.Errorf(shard.CodeNotFound, "image %s is not on this host", full)
	case err != nil: // a damaged record holds nothing back
		s.o.Log.Warn("removing a damaged image reference", "image", full, "err", err)
		return nil, removeFile(path)
	}
	good, _, err := s.refs()
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(good, func(o refRecord) bool { return o.Digest == r.Digest && o.Reference != full }) {
		return nil, removeFile(path) // the image keeps its other names
	}
	var who []string
	if holders != nil {
		who = holders(r.Digest)
	}
	held := len(who) > 0 || s.isHeld(r.Digest)
	if held && !force {
		e := shard.Errorf(shard.CodeInUse, "image %s is in use: remove what was made from it first, or remove it with force", full)
		e.Holders = who
		return nil, e
	}
	if err := removeFile(path); err != nil {
		return nil, err
	}
	if held {
		return []string{fmt.Sprintf("image %s is still in use: its files are kept until nothing uses them, then image prune frees them", full)}, nil
	}
	return nil, removeFile(s.imagePath(r.Digest))
}

// Prune removes every image that inUse does not claim and no Acquire holds, and returns the references removed; images
// without one appear by digest. inUse may be nil and must not call the store.
func (s *Store) Prune(inUse func(digest string) bool) (removed []string, err error) {
	removed, err = s.pruneRecords(inUse)
	s.freeLayers()
	return removed, err
}

func (s *Store) pruneRecords(inUse func(digest string) bool) (removed []string, err error) {
	s.records.Lock()
	defer s.records.Unlock()
	removed = []string{}
	good, bad, err := s.refs()
	if err != nil {
		return removed, err
	}
	free := func(digest string) bool { return !s.isHeld(digest) && (inUse == nil || !inUse(digest)) }
	for _, r := range good {
		if !free(r.Digest) {
			continue
		}
		if err := removeFile(s.path("refs", fileName(r.Reference))); err != nil {
			return removed, err
		}
		removed = append(removed, r.Reference)
	}
	for file := range bad {
		if err := removeFile(s.path("refs", file)); err != nil {
			return removed, err
		}
	}
	entries, err := os.ReadDir(s.path("manifests"))
	if err != nil {
		return removed, err
	}
	for _, e := range entries {
		digest := "sha256:" + strings.TrimSuffix(e.Name(), recordExt)
		if !free(digest) {
			continue
		}
		if err := removeFile(s.path("manifests", e.Name())); err != nil {
			return removed, err
		}
		if !slices.ContainsFunc(good, func(r refRecord) bool { return r.Digest == digest }) {
			removed = append(removed, digest)
		}
	}
	slices.Sort(removed)
	return removed, nil
}

func removeFile(path string) error {
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// freeLayers deletes the layers that no image and no pull needs. While a record of an image cannot be read nobody knows
// its layers, so nothing is freed. Failures are logged: what stays is found again the next time.
func (s *Store) freeLayers() {
	trash, err := s.condemnLayers()
	if err != nil {
		s.o.Log.Warn("layers not freed", "err", err)
	}
	for _, dir := range trash {
		if err := os.RemoveAll(dir); err != nil {
			s.o.Log.Warn("layer not deleted", "err", err)
		}
	}
}

// condemnLayers moves the layers to be freed out of the store, under tmp.
func (s *Store) condemnLayers() (trash []string, err error) {
	s.records.Lock()
	defer s.records.Unlock()
	needed := map[string]bool{}
	images, err := os.ReadDir(s.path("manifests"))
	if err != nil {
		return nil, err
	}
	for _, e := range images {
		r, err := s.readImage("sha256:" + strings.TrimSuffix(e.Name(), recordExt))
		if err != nil {
			return nil, err
		}
		for _, short := range r.Layers {
			needed[short] = true
		}
	}
	layers, err := os.ReadDir(s.path("layers"))
	if err != nil {
		return nil, err
	}
	for _, e := range layers {
		short := strings.TrimSuffix(e.Name(), recordExt)
		if needed[short] {
			continue
		}
		dir, err := s.condemn(e, short)
		if err != nil {
			return trash, err
		}
		if dir != "" {
			trash = append(trash, dir)
		}
	}
	return trash, nil
}

// condemn moves one entry away unless a pull has pinned its layer; under mu, so that none pins it meanwhile.
func (s *Store) condemn(e fs.DirEntry, short string) (dir string, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.pinned[short] > 0 {
		return "", nil
	}
	if !e.IsDir() {
		return "", removeFile(s.path("layers", e.Name()))
	}
	parent, err := os.MkdirTemp(s.path("tmp"), "trash-")
	if err != nil {
		return "", err
	}
	err = os.Rename(s.path("layers", e.Name()), parent+"/fs")
	return parent, err
}

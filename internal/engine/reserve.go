package engine

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The reserve is a file in the root that holds room on the host's disk, in bytes, for a start: when nothing else is left, a
// stopped sandbox comes up all the same, so that its files can be taken out of it. It is made again when the disk has several
// times as much.
const (
	reserveName = ".reserve"
	reserveSize = 64 << 20
	reserveAt   = 8 * reserveSize
)

// keepReserve makes the reserve where it is missing and there is room.
func (e *Engine) keepReserve() error {
	path := filepath.Join(e.Root, reserveName)
	if info, err := os.Lstat(path); err == nil && info.Size() == reserveSize {
		return nil
	}
	var disk unix.Statfs_t
	if err := unix.Statfs(e.Root, &disk); err != nil || disk.Bavail*uint64(disk.Bsize) < reserveAt {
		return err
	}
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	err = unix.Fallocate(int(f.Fd()), 0, 0, reserveSize)
	if err = errors.Join(err, f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// spendReserve gives the room of the reserve back to the disk; false if there is none.
func (e *Engine) spendReserve() bool {
	err := os.Remove(filepath.Join(e.Root, reserveName))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		e.Log.Warn("free the reserve of the disk", "err", err)
	}
	return err == nil
}

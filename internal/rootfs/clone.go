//go:build linux

package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The ioctls that stop and resume all writing to a file system; x/sys has no names for them.
const (
	fiFreeze = 0xC0045877
	fiThaw   = 0xC0045878
)

// Clone copies the disk of the sandbox in fromDir to toDir, which must exist and have no disk. If the source is mounted its
// writers wait until the copy is done, which is at once where the host's file system shares blocks, and else takes as
// long as copying what the disk holds. On failure nothing is left. Sweep and Unmount release a source whose daemon was
// killed during the copy.
func (m *Manager) Clone(ctx context.Context, fromDir, toDir string) (err error) {
	disk, err := openDisk(fromDir)
	if err == nil {
		defer disk.Close()
		if err := unix.IoctlSetInt(int(disk.Fd()), fiFreeze, 0); err != nil {
			return fmt.Errorf("hold the sandbox's disk still: %w", err)
		}
		defer func() {
			if terr := thaw(disk); terr != nil {
				err = errors.Join(err, fmt.Errorf("release the sandbox's disk: %w", terr))
			}
		}()
	} else if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := copySparse(ctx, filepath.Join(fromDir, diskFile), filepath.Join(toDir, diskFile)); err != nil {
		return fmt.Errorf("copy the sandbox's disk: %w", err)
	}
	return nil
}

// release thaws the sandbox's disk, if it is mounted and frozen.
func release(sandboxDir string) error {
	disk, err := openDisk(sandboxDir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	defer disk.Close()
	return thaw(disk)
}

func thaw(disk *os.File) error {
	if err := unix.IoctlSetInt(int(disk.Fd()), fiThaw, 0); err != nil && !errors.Is(err, unix.EINVAL) { // EINVAL: not frozen
		return err
	}
	return nil
}

// openDisk opens the root of the sandbox's mounted disk; fs.ErrNotExist if it is not mounted. A directory that is no
// mount must not pass: freezing it would freeze the host.
func openDisk(sandboxDir string) (*os.File, error) {
	disk, err := os.OpenFile(filepath.Join(sandboxDir, diskDir), os.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	var inside, outside unix.Stat_t
	err = errors.Join(unix.Fstat(int(disk.Fd()), &inside), unix.Stat(sandboxDir, &outside))
	if err == nil && inside.Dev == outside.Dev {
		err = fs.ErrNotExist
	}
	if err != nil {
		disk.Close()
		return nil, err
	}
	return disk, nil
}

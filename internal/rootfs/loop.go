//go:build linux

package rootfs

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// attach puts a free loop device over the file at path and returns it open. The kernel frees the device by itself once
// neither the returned file nor a mount uses it, also when this process is killed.
func attach(ctx context.Context, path string) (*os.File, error) {
	backing, err := os.OpenFile(path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, err
	}
	defer backing.Close()
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		return nil, fmt.Errorf("the host has no loop devices, load the kernel module loop: %w", err)
	}
	defer control.Close()

	config := unix.LoopConfig{Fd: uint32(backing.Fd()), Size: sectorSize(path)}
	copy(config.Info.File_name[:len(config.Info.File_name)-1], path)
	for {
		n, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
		loop, err := os.OpenFile(fmt.Sprintf("/dev/loop%d", n), os.O_RDWR, 0)
		if err != nil {
			return nil, fmt.Errorf("open a loop device: %w", err)
		}
		// Direct I/O keeps the host from caching every block twice; not every file system has it.
		config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR | unix.LO_FLAGS_DIRECT_IO
		err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		if errors.Is(err, unix.EINVAL) {
			config.Info.Flags = unix.LO_FLAGS_AUTOCLEAR
			err = unix.IoctlLoopConfigure(int(loop.Fd()), &config)
		}
		if err == nil {
			return loop, nil
		}
		loop.Close()
		if !errors.Is(err, unix.EBUSY) {
			return nil, fmt.Errorf("configure a loop device: %w", err)
		}
		// Somebody else took the device between the two calls.
		if err := pause(ctx, time.Millisecond); err != nil {
			return nil, fmt.Errorf("find a free loop device: %w", err)
		}
	}
}

// sectorSize is the block size for a loop device over path: the smallest that direct I/O on the host's disk can do, since
// guests expect to align their own direct I/O to 512 bytes.
func sectorSize(path string) uint32 {
	const least, most = 512, 4096
	var stx unix.Statx_t
	if unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_DIOALIGN, &stx) != nil || stx.Mask&unix.STATX_DIOALIGN == 0 {
		return least
	}
	return min(max(stx.Dio_offset_align, least), most)
}

// attached says whether some loop device still stands over path.
func attached(path string) (bool, error) {
	files, err := filepath.Glob("/sys/block/loop*/loop/backing_file")
	if err != nil {
		return false, err
	}
	for _, file := range files {
		// A device that is freed between the two calls reads as absent.
		if name, err := os.ReadFile(file); err == nil && strings.TrimSuffix(string(name), "\n") == path {
			return true, nil
		}
	}
	return false, nil
}

// awaitDetached waits until no loop device stands over path, or ctx ends. udev and friends open fresh devices for a moment, and
// such an opener delays the kernel's own freeing.
func awaitDetached(ctx context.Context, path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	for {
		busy, err := attached(path)
		if err != nil || !busy {
			return err
		}
		if err := pause(ctx, 5*time.Millisecond); err != nil {
			return fmt.Errorf("the disk's loop device is still in use, perhaps by a mount in another namespace: %w", err)
		}
	}
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

//go:build linux

// Package rootfs makes a bounded, writable root directory over read-only image layers.
//
// Each sandbox owns one sparse file, disk.img, that holds a journal-less ext4; the kernel's overlay file system puts that
// disk above the layers. The size of the file is the bound: past it the guest sees ENOSPC, and nothing else on the host
// fills up. All state is on disk and in the kernel's mount table, so a daemon that was killed finds everything again.
//
// In a sandbox's directory:
//
//	disk.img  the disk; its blocks are what the sandbox costs the host
//	disk/     where the disk is mounted, with upper/, work/ and spare/ inside (only while mounted)
//	rootfs/   the writable root (only while mounted)
//
// The package knows directories and sizes. It must not know images, sandboxes' records, providers or networks. Calls for
// one sandbox directory must not overlap (the engine's lock sees to it); calls for different ones may.
package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
	"golang.org/x/sync/singleflight"
	"golang.org/x/sys/unix"
)

const (
	// DefaultDiskMiB is the bound of a disk that nobody chose a size for, and the size that is kept ready.
	DefaultDiskMiB = 10240
	// MinDiskMiB is the smallest disk on which ext4 has room for files.
	MinDiskMiB = 1
	// MaxLayers is how many layers an image may have.
	MaxLayers = 127
)

// The entries of a sandbox's directory that belong to this package.
const (
	diskFile = "disk.img"
	diskDir  = "disk"
	rootDir  = "rootfs"
)

// Options of a Manager.
type Options struct {
	// Log receives what no caller is told: repairs, lazy unmounts, a pool that cannot fill. nil discards.
	Log *slog.Logger
}

// Manager makes, mounts and removes disks below one directory.
type Manager struct {
	dir       string
	templates string
	log       *slog.Logger

	busyTimeout   time.Duration // for a mount whose last user is just ending, before it is detached lazily
	detachTimeout time.Duration // for the kernel to free a loop device

	making  singleflight.Group     // one mkfs per size at a time
	version atomic.Pointer[string] // of mkfs, once known
	level   atomic.Int64           // disks in the pool
	ready   chan string            // a prepared disk of DefaultDiskMiB
	cancel  context.CancelFunc     // ends the owner of ready
	done    sync.WaitGroup
}

// Open prepares a Manager for the sandbox directories below dir, which must be private to the daemon (0700). It removes
// what an earlier daemon left half made in dir/templates and begins to fill the pool of ready disks. Close it.
func Open(dir string, o Options) (*Manager, error) {
	m := &Manager{dir: filepath.Clean(dir), templates: filepath.Join(dir, "templates"), log: o.Log, ready: make(chan string),
		busyTimeout: 3 * time.Second, detachTimeout: 5 * time.Second}
	if m.log == nil {
		m.log = slog.New(slog.DiscardHandler)
	}
	if err := os.MkdirAll(m.templates, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of disk templates: %w", err)
	}
	if err := m.removeScratch(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	m.cancel = cancel
	m.done.Go(func() { m.fillPool(ctx) })
	return m, nil
}

// Close ends the pool and removes its disks. Mounted roots stay mounted.
func (m *Manager) Close() error {
	m.cancel()
	m.done.Wait()
	return m.removeScratch()
}

// Create makes sandboxDir/disk.img with a bound of diskMiB. sandboxDir must exist and have no disk yet. A bound that ext4
// or the host's file system cannot hold is refused with invalid_request. On failure nothing is left.
func (m *Manager) Create(ctx context.Context, sandboxDir string, diskMiB int64) error {
	if err := m.checkSize(sandboxDir, diskMiB); err != nil {
		return err
	}
	path := filepath.Join(sandboxDir, diskFile)
	if _, err := os.Lstat(path); !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("create disk: %s is in the way (%w)", path, errors.Join(err, fs.ErrExist))
	}
	if diskMiB == DefaultDiskMiB {
		select {
		case disk := <-m.ready:
			if err := os.Rename(disk, path); err == nil {
				return nil
			}
			_ = os.Remove(disk) // sandboxDir is on another file system: copy instead
		default:
		}
	}
	template, err := m.template(diskMiB)
	if err != nil {
		return err
	}
	if err := copySparse(ctx, template, path); err != nil {
		return fmt.Errorf("copy the disk template: %w", err)
	}
	return nil
}

// checkSize refuses a bound that cannot be kept. A sparse disk may promise more than is free now, but not more than
// the host could ever give.
func (m *Manager) checkSize(sandboxDir string, diskMiB int64) error {
	if diskMiB < MinDiskMiB {
		return shard.Invalidf("a disk of %d MiB is too small: the minimum is %d MiB", diskMiB, MinDiskMiB)
	}
	var st unix.Statfs_t
	if err := unix.Statfs(sandboxDir, &st); err != nil {
		return fmt.Errorf("look up the file system of the sandbox's directory: %w", err)
	}
	if most := int64(st.Blocks) * st.Bsize >> 20; diskMiB > most {
		return shard.Invalidf("a disk of %d MiB does not fit on the host, whose file system has %d MiB", diskMiB, most)
	}
	return nil
}

// Usage is how many bytes of the host the sandbox's disk takes now: about what was written to it and not removed.
func (m *Manager) Usage(sandboxDir string) (bytes int64, err error) {
	var st unix.Stat_t
	if err := unix.Lstat(filepath.Join(sandboxDir, diskFile), &st); err != nil {
		return 0, fmt.Errorf("look up the size of the disk: %w", err)
	}
	return st.Blocks * 512, nil
}

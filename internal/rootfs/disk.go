//go:build linux

package rootfs

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard"
	"golang.org/x/sys/unix"
)

const (
	poolSize     = 2
	maxTemplates = 16                     // sizes are chosen by clients: without a cap the cache could fill the host
	mkfsTimeout  = 2 * time.Minute        // 10 GiB take 7 ms
	poolRest     = 250 * time.Millisecond // refilling writes to the host's disk: let the taker have it first
	poolRetry    = time.Minute
)

// Names in the templates directory. Scratch and ready files never outlive their daemon.
const (
	templatePrefix = "ext4-"
	scratchPrefix  = "scratch-"
	readyPrefix    = "ready-"
)

// template returns the path of an empty disk of this size, made at first use. Others may wait for the same template, so
// it is made whatever becomes of the caller's context.
func (m *Manager) template(diskMiB int64) (string, error) {
	path, err, _ := m.making.Do(strconv.FormatInt(diskMiB, 10), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.Background(), mkfsTimeout)
		defer cancel()
		return m.makeTemplate(ctx, diskMiB)
	})
	if err != nil {
		return "", err
	}
	return path.(string), nil
}

func (m *Manager) makeTemplate(ctx context.Context, diskMiB int64) (string, error) {
	version, err := m.mkfsVersion(ctx)
	if err != nil {
		return "", err
	}
	path := filepath.Join(m.templates, fmt.Sprintf("%s%s-%d.img", templatePrefix, version, diskMiB))
	if _, err := os.Stat(path); err == nil {
		return path, nil
	}
	content, err := os.MkdirTemp(m.templates, scratchPrefix)
	if err != nil {
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	defer os.RemoveAll(content)
	if err := errors.Join(makeOverlayDirs(content), keepSpare(content)); err != nil {
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	f, err := os.CreateTemp(m.templates, scratchPrefix)
	if err != nil {
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	defer os.Remove(f.Name())
	defer f.Close()
	if err := f.Truncate(diskMiB << 20); err != nil {
		if errors.Is(err, unix.EFBIG) {
			return "", shard.Invalidf("a disk of %d MiB does not fit on the host: its file system holds no file of that size", diskMiB)
		}
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	// No journal: it would cost 4 MB per sandbox and protect only against a crash of the host, for which e2fsck is enough.
	// No resize inode: disks never grow in place. lazy_itable_init: a hole reads as zeros already, see mountOptions.
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-q", "-F", "-b", "4096", "-m", "0", "-O", "^has_journal,^resize_inode",
		"-E", "lazy_itable_init=1,nodiscard,root_owner=0:0", "-d", content, f.Name()).CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4 of a disk of %d MiB: %w: %s", diskMiB, err, clip(out))
	}
	if err := f.Sync(); err != nil {
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	m.dropTemplates(maxTemplates - 1)
	if err := os.Rename(f.Name(), path); err != nil {
		return "", fmt.Errorf("make a disk template: %w", err)
	}
	return path, nil
}

// dropTemplates removes all but the newest templates. One that is being copied lives on until the copy ends.
func (m *Manager) dropTemplates(keep int) {
	entries, _ := os.ReadDir(m.templates)
	type old struct {
		path string
		at   time.Time
	}
	var list []old
	for _, e := range entries {
		if info, err := e.Info(); err == nil && strings.HasPrefix(e.Name(), templatePrefix) {
			list = append(list, old{filepath.Join(m.templates, e.Name()), info.ModTime()})
		}
	}
	slices.SortFunc(list, func(a, b old) int { return b.at.Compare(a.at) })
	for i := keep; i < len(list); i++ {
		_ = os.Remove(list[i].path)
	}
}

// mkfsVersion is part of a template's name, so that an upgrade of the tool makes new templates.
func (m *Manager) mkfsVersion(ctx context.Context) (string, error) {
	if v := m.version.Load(); v != nil {
		return *v, nil
	}
	out, err := exec.CommandContext(ctx, "mkfs.ext4", "-V").CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("mkfs.ext4 does not run, install e2fsprogs: %w", err)
	}
	// "mke2fs 1.47.0 (5-Feb-2023)"
	fields := strings.Fields(string(out))
	if len(fields) < 2 {
		return "", fmt.Errorf("mkfs.ext4 -V says %s: no version", clip(out))
	}
	version := strings.Map(func(r rune) rune {
		if r == '.' || r >= '0' && r <= '9' || r >= 'a' && r <= 'z' {
			return r
		}
		return '_'
	}, fields[1])
	m.version.Store(&version)
	return version, nil
}

// fillPool keeps poolSize disks of the default size ready: one in hand for each of its workers. It ends with ctx.
func (m *Manager) fillPool(ctx context.Context) {
	var workers []chan struct{}
	for range poolSize {
		ended := make(chan struct{})
		workers = append(workers, ended)
		go func() {
			defer close(ended)
			for m.offerDisk(ctx) {
			}
		}()
	}
	for _, ended := range workers {
		<-ended
	}
}

// offerDisk prepares one disk and waits until somebody takes it; false: ctx has ended.
func (m *Manager) offerDisk(ctx context.Context) bool {
	path, err := m.readyDisk(ctx)
	if err != nil {
		if ctx.Err() == nil {
			m.log.Debug("no disk can be kept ready", "error", err)
		}
		return pause(ctx, poolRetry) == nil
	}
	m.level.Add(1)
	select {
	case m.ready <- path:
		m.level.Add(-1)
		return pause(ctx, poolRest) == nil
	case <-ctx.Done():
		m.level.Add(-1)
		return false // Close removes the file
	}
}

// Ready is how many disks of the default size are prepared for the next Create.
func (m *Manager) Ready() int { return int(m.level.Load()) }

func (m *Manager) readyDisk(ctx context.Context) (string, error) {
	if err := m.checkSize(m.templates, DefaultDiskMiB); err != nil {
		return "", err
	}
	template, err := m.template(DefaultDiskMiB)
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp(m.templates, readyPrefix)
	if err != nil {
		return "", err
	}
	defer f.Close()
	// Synced, or the loop device would have to wait for it.
	if err := errors.Join(copyData(ctx, template, f), f.Sync()); err != nil {
		_ = os.Remove(f.Name())
		return "", err
	}
	return f.Name(), nil
}

// removeScratch removes what only lives as long as a daemon.
func (m *Manager) removeScratch() error {
	entries, err := os.ReadDir(m.templates)
	if err != nil {
		return fmt.Errorf("read the directory of disk templates: %w", err)
	}
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), scratchPrefix) || strings.HasPrefix(e.Name(), readyPrefix) {
			if err := os.RemoveAll(filepath.Join(m.templates, e.Name())); err != nil {
				return fmt.Errorf("remove an old disk: %w", err)
			}
		}
	}
	return nil
}

// copySparse copies the file from to the new file to, holes included. On failure nothing is left.
func copySparse(ctx context.Context, from, to string) error {
	f, err := os.OpenFile(to, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	err = copyData(ctx, from, f)
	if err = errors.Join(err, f.Close()); err != nil {
		_ = os.Remove(to)
	}
	return err
}

// copyData makes the empty file dst equal to the file from: by sharing its blocks where the file system can, else by
// copying inside the kernel what is not a hole.
func copyData(ctx context.Context, from string, dst *os.File) error {
	src, err := os.Open(from)
	if err != nil {
		return err
	}
	defer src.Close()
	if unix.IoctlFileClone(int(dst.Fd()), int(src.Fd())) == nil {
		return nil
	}
	size, err := src.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if err := dst.Truncate(size); err != nil {
		return err
	}
	for at := int64(0); at < size; {
		data, err := unix.Seek(int(src.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			return nil // nothing but a hole follows
		}
		if err != nil {
			return fmt.Errorf("look for data: %w", err)
		}
		hole, err := unix.Seek(int(src.Fd()), data, unix.SEEK_HOLE)
		if err != nil {
			return fmt.Errorf("look for a hole: %w", err)
		}
		if err := copyRange(ctx, src, dst, data, hole); err != nil {
			return err
		}
		at = hole
	}
	return nil
}

// copyRange copies the bytes [from, to) to the same place in dst.
func copyRange(ctx context.Context, src, dst *os.File, from, to int64) error {
	const chunk = 64 << 20 // so that a cancelled context is noticed
	in, out := from, from
	for in < to {
		if err := ctx.Err(); err != nil {
			return err
		}
		n, err := unix.CopyFileRange(int(src.Fd()), &in, int(dst.Fd()), &out, int(min(to-in, chunk)), 0)
		switch {
		case errors.Is(err, unix.EINTR):
		case errors.Is(err, unix.EXDEV) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EOPNOTSUPP):
			_, err := io.Copy(io.NewOffsetWriter(dst, out), io.NewSectionReader(src, in, to-in))
			return err
		case err != nil:
			return fmt.Errorf("copy disk data: %w", err)
		case n == 0:
			return fmt.Errorf("copy disk data: %w", io.ErrUnexpectedEOF)
		}
	}
	return nil
}

// clip bounds a tool's output for an error text.
func clip(out []byte) string {
	const most = 512
	s := strings.TrimSpace(string(out))
	if len(s) > most {
		s = s[:most] + "…"
	}
	return strconv.Quote(s)
}

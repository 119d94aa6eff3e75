//go:build linux

package rootfs

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// host is a Manager with sandboxes and layers in a directory of the test's own.
type host struct {
	*Manager
	t   *testing.T
	dir string
	log *bytes.Buffer
}

// newHost skips where the kernel has not what it takes, and demands at the end that no mount and no loop device is left.
func newHost(t *testing.T) *host {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounts need root")
	}
	for _, tool := range []string{"mkfs.ext4", "e2fsck"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("needs e2fsprogs: ", err)
		}
	}
	kernel, err := os.ReadFile("/proc/filesystems")
	if err != nil || !strings.Contains(string(kernel), "\toverlay\n") || !strings.Contains(string(kernel), "\text4\n") {
		t.Skip("the kernel has no overlay or no ext4: ", err)
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		t.Skip("no loop devices: ", err)
	}
	h := &host{t: t, dir: filepath.Join(t.TempDir(), "with space, comma: and colon"), log: &bytes.Buffer{}}
	var lock sync.Mutex
	h.Manager, err = Open(h.dir, Options{Log: slog.New(slog.NewTextHandler(writer(func(b []byte) (int, error) {
		lock.Lock()
		defer lock.Unlock()
		return h.log.Write(b)
	}), nil))})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := h.Sweep(context.Background(), func(string) bool { return false }); err != nil {
			t.Error("sweep:", err)
		}
		if err := h.Close(); err != nil {
			t.Error("close:", err)
		}
		h.wantMounts(0)
		entries, _ := os.ReadDir(h.templates)
		for _, e := range entries {
			if !strings.HasPrefix(e.Name(), templatePrefix) {
				t.Error("left:", e.Name())
			}
		}
	})
	return h
}

type writer func([]byte) (int, error)

func (w writer) Write(b []byte) (int, error) { return w(b) }

// wantMounts counts mounts and loop devices below the test's directory.
func (h *host) wantMounts(sandboxes int) {
	h.t.Helper()
	mounts, err := mountsBelow(h.dir)
	if err != nil {
		h.t.Fatal(err)
	}
	loops := 0
	files, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, f := range files {
		if b, err := os.ReadFile(f); err == nil && strings.HasPrefix(string(b), h.dir) {
			loops++
		}
	}
	if len(mounts) != 2*sandboxes || loops != sandboxes {
		h.t.Errorf("%d mounts and %d loop devices for %d sandboxes: %q", len(mounts), loops, sandboxes, mounts)
	}
}

func (h *host) sandbox(name string, diskMiB int64) string {
	h.t.Helper()
	dir := filepath.Join(h.dir, "sandboxes", name)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		h.t.Fatal(err)
	}
	if err := h.Create(h.t.Context(), dir, diskMiB); err != nil {
		h.t.Fatal(err)
	}
	return dir
}

func (h *host) mount(dir string, layers ...string) (root string) {
	h.t.Helper()
	root, err := h.Mount(h.t.Context(), dir, h.layers(), layers)
	if err != nil {
		h.t.Fatal(err)
	}
	return root
}

func (h *host) unmount(dir string) {
	h.t.Helper()
	if err := h.Unmount(h.t.Context(), dir); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) layers() string { return filepath.Join(h.dir, "layers") }

// layer makes a layer of files, path → text.
func (h *host) layer(name string, files map[string]string) {
	h.t.Helper()
	must(h.t, os.MkdirAll(filepath.Join(h.layers(), name), 0o755))
	for path, text := range files {
		path = filepath.Join(h.layers(), name, path)
		must(h.t, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o755))
	}
}

func must(t *testing.T, errs ...error) {
	t.Helper()
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		return "error: " + err.Error()[strings.LastIndex(err.Error(), ": ")+2:]
	}
	return string(b)
}

// hash is over every path, mode, link count, xattr and content below dir.
func hash(t *testing.T, dir string) string {
	t.Helper()
	h := sha256.New()
	must(t, filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		var st unix.Stat_t
		must(t, unix.Lstat(path, &st))
		xattrs := make([]byte, 4096)
		n, _ := unix.Llistxattr(path, xattrs)
		fmt.Fprintln(h, path, st.Mode, st.Uid, st.Nlink, st.Mtim, st.Size, xattrs[:max(n, 0)])
		if e.Type().IsRegular() {
			f, err := os.Open(path)
			must(t, err)
			defer f.Close()
			if flags, err := unix.IoctlGetInt(int(f.Fd()), unix.FS_IOC_GETFLAGS); err == nil {
				fmt.Fprintln(h, flags)
			}
			_, err = io.Copy(h, f)
			must(t, err)
		}
		return nil
	}))
	return fmt.Sprintf("%x", h.Sum(nil))
}

func TestFilesSurvive(t *testing.T) {
	h := newHost(t)
	h.layer("base", map[string]string{"etc/motd": "image"})
	dir := h.sandbox("a", 64)
	for round := range 3 {
		if on, err := h.Mounted(dir); on || err != nil {
			t.Fatal(on, err)
		}
		root := h.mount(dir, "base")
		if on, err := h.Mounted(dir); !on || err != nil {
			t.Fatal(on, err)
		}
		if again := h.mount(dir, "base"); again != root {
			t.Error("a second mount is at", again)
		}
		h.wantMounts(1)
		if info, err := os.Stat(root); err != nil || info.Mode().Perm() != 0o755 {
			t.Error(info.Mode(), err)
		}
		if got := read(t, filepath.Join(root, "etc/motd")); got != "image" {
			t.Error(got)
		}
		for i := range round { // nothing was synced by the test
			if got := read(t, filepath.Join(root, fmt.Sprint("kept", i))); got != strings.Repeat("x", 1<<20) {
				t.Errorf("round %d: file %d has %d bytes: %.30s", round, i, len(got), got)
			}
		}
		must(t, os.WriteFile(filepath.Join(root, fmt.Sprint("kept", round)), bytes.Repeat([]byte("x"), 1<<20), 0o644))
		h.unmount(dir)
		h.unmount(dir)
		h.wantMounts(0)
		if clean, err := isClean(filepath.Join(dir, diskFile)); !clean || err != nil {
			t.Error("the disk was not left clean:", err)
		}
	}
	if strings.Contains(h.log.String(), "cleanly") {
		t.Error("a clean disk was checked:", h.log)
	}
	if n, err := h.Usage(dir); err != nil || n < 3<<20 || n > 16<<20 {
		t.Error("usage", n, err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 1 {
		t.Error("left beside the disk:", entries, err)
	}
}

// TestFullDisk is case 114.
func TestFullDisk(t *testing.T) {
	h := newHost(t)
	h.layer("base", map[string]string{"bin/sh": "image", "big": strings.Repeat("x", 1<<20)})
	dir := h.sandbox("a", 32)
	root := h.mount(dir, "base")
	var before, full, after unix.Statfs_t
	must(t, unix.Statfs(root, &before))
	if mib := int64(before.Blocks) * before.Bsize >> 20; mib < 28 || mib > 32 {
		t.Errorf("df shows %d MiB of 32", mib)
	}
	big := filepath.Join(root, "fill")
	f, err := os.Create(big)
	must(t, err)
	for err == nil {
		_, err = f.Write(make([]byte, 1<<20))
	}
	if err = errors.Join(err, f.Close()); !errors.Is(err, unix.ENOSPC) {
		t.Error("past the bound:", err)
	}
	if err := os.WriteFile(filepath.Join(root, "big"), nil, 0o755); err != nil && !errors.Is(err, unix.ENOSPC) {
		t.Error(err) // truncation of an image file needs little or no room
	}
	must(t, unix.Statfs(root, &full))
	if got := read(t, filepath.Join(root, "bin/sh")); got != "image" {
		t.Error("read on a full disk:", got)
	}
	if _, err := os.ReadDir(root); err != nil {
		t.Error(err)
	}
	if used, err := h.Usage(dir); err != nil || used > 33<<20 {
		t.Error("the host holds", used, err)
	}
	// Stop and start while full.
	h.unmount(dir)
	root = h.mount(dir, "base")
	must(t, os.Remove(filepath.Join(root, "fill")))
	must(t, unix.Statfs(root, &after))
	if after.Bfree <= full.Bfree+5000 {
		t.Errorf("free blocks: %d before, %d full, %d after rm", before.Bfree, full.Bfree, after.Bfree)
	}
	must(t, os.WriteFile(filepath.Join(root, "again"), make([]byte, 10<<20), 0o644))
	must(t, os.Remove(filepath.Join(root, "again")))
	h.unmount(dir)
	if used, err := h.Usage(dir); err != nil || used > 8<<20 {
		t.Error("rm gives nothing back to the host, which holds", used, err)
	}
}

// TestManyLayers: 127 of them, with whiteouts and opaque directories, under long names.
func TestManyLayers(t *testing.T) {
	h := newHost(t)
	var layers []string // topmost first
	for i := range MaxLayers {
		name := fmt.Sprintf("sha256-%064d", i)
		layers = append([]string{name}, layers...)
		h.layer(name, map[string]string{fmt.Sprint("own/", i): fmt.Sprint(i), "last": fmt.Sprint(i), fmt.Sprint("gone/", i): "x", fmt.Sprint("opaque/", i): "x"})
		path := filepath.Join(h.layers(), name)
		switch i {
		case 60: // removes what 59 brought
			must(t, unix.Mknod(filepath.Join(path, "own/59"), unix.S_IFCHR, 0))
		case 100:
			must(t, unix.Setxattr(filepath.Join(path, "opaque"), "trusted.overlay.opaque", []byte("y"), 0))
		case 126:
			must(t, os.RemoveAll(filepath.Join(path, "gone")), unix.Mknod(filepath.Join(path, "gone"), unix.S_IFCHR, 0))
		}
	}
	root := h.mount(h.sandbox("a", 64), layers...)
	for path, want := range map[string]string{"last": "126", "own/0": "0", "own/126": "126", "own/58": "58",
		"own/59": "error: no such file or directory", "gone": "error: no such file or directory", "opaque/99": "error: no such file or directory", "opaque/100": "x"} {
		if got := read(t, filepath.Join(root, path)); got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(root, "own")); err != nil || len(entries) != MaxLayers-1 {
		t.Error(len(entries), err)
	}
	// A directory of the image can be renamed, which an overlay does not do by default.
	must(t, os.Rename(filepath.Join(root, "own"), filepath.Join(root, "moved")))
	if got := read(t, filepath.Join(root, "moved/7")); got != "7" {
		t.Error(got)
	}
	dir := filepath.Dir(root)
	h.unmount(dir)
	if got := read(t, filepath.Join(h.mount(dir, layers...), "moved/7")); got != "7" {
		t.Error("after a restart:", got)
	}
	h.unmount(dir)
	if _, err := h.Mount(t.Context(), dir, h.layers(), append(layers, layers[0])); err == nil {
		t.Error("128 layers are mounted")
	}
}

// TestBaseIsNeverWritten is case 169.
func TestBaseIsNeverWritten(t *testing.T) {
	h := newHost(t)
	files := map[string]string{}
	for _, how := range []string{"write", "truncate", "mmap", "link", "chattr", "direct", "mode", "rename", "remove"} {
		files["bin/"+how] = strings.Repeat(how, 2000)
	}
	h.layer("base", files)
	a, b := h.mount(h.sandbox("a", 64), "base"), h.mount(h.sandbox("b", 64), "base")
	before := hash(t, h.layers())
	at := func(how string) string { return filepath.Join(a, "bin", how) }
	open := func(how string, flags int) *os.File {
		f, err := os.OpenFile(at(how), os.O_RDWR|flags, 0)
		must(t, err)
		t.Cleanup(func() { f.Close() })
		return f
	}
	_, err := open("write", 0).WriteAt([]byte("evil"), 10)
	must(t, err, os.Truncate(at("truncate"), 3))
	mapped := open("mmap", 0)
	mem, err := unix.Mmap(int(mapped.Fd()), 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	must(t, err)
	copy(mem, "evil")
	must(t, unix.Msync(mem, unix.MS_SYNC), unix.Munmap(mem), mapped.Close())
	must(t, os.Link(at("link"), at("link2")), os.WriteFile(at("link2"), []byte("evil"), 0o755))
	const noAtime = 0x80 // FS_NOATIME_FL
	if f := open("chattr", 0); unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, noAtime) == nil {
		t.Cleanup(func() { _ = unix.IoctlSetPointerInt(int(f.Fd()), unix.FS_IOC_SETFLAGS, 0) })
	}
	if f, err := os.OpenFile(at("direct"), os.O_RDWR|unix.O_DIRECT, 0); err == nil {
		block, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // aligned
		must(t, err)
		n, err := unix.Pwrite(int(f.Fd()), block[:512], 512) // as a guest that expects sectors of 512 bytes
		t.Log("direct write of 512 bytes:", n, err)
		n, err = unix.Pwrite(int(f.Fd()), block, 0)
		if n != 4096 {
			t.Error("direct write:", n, err)
		}
		must(t, unix.Munmap(block), f.Close())
	} else {
		t.Log("no direct I/O on an overlay here:", err)
	}
	must(t, os.Chmod(at("mode"), 0o4777), os.Rename(at("rename"), filepath.Join(a, "elsewhere")), os.Remove(at("remove")))
	syncFS(a)
	if after := hash(t, h.layers()); after != before {
		t.Error("the layer has changed")
	}
	for path, text := range files {
		if got := read(t, filepath.Join(b, path)); got != text {
			t.Errorf("the other sandbox sees a changed %s: %.40q", path, got)
		}
	}
	if got := read(t, at("mmap")); !strings.HasPrefix(got, "evil") {
		t.Errorf("the writer does not see its own write: %.20q", got)
	}
	c := h.mount(h.sandbox("c", 64), "base")
	for path, text := range files {
		if got := read(t, filepath.Join(c, path)); got != text {
			t.Errorf("a new sandbox sees a changed %s", path)
		}
	}
}

func TestFailuresLeaveNothing(t *testing.T) {
	h := newHost(t)
	h.layer("base", nil)
	h.layer("file", map[string]string{"x": ""})
	must(t, os.Symlink("/", filepath.Join(h.layers(), "link")))
	dir := h.sandbox("a", 16)
	for _, layers := range [][]string{nil, {"missing"}, {"base", "missing"}, {".."}, {"../sandboxes"}, {"/"}, {"link"}, {"file/x"}, {"base", ""}} {
		if _, err := h.Mount(t.Context(), dir, h.layers(), layers); err == nil {
			t.Errorf("layers %q are mounted", layers)
		}
		h.wantMounts(0)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	other := filepath.Join(h.dir, "sandboxes", "b")
	must(t, os.MkdirAll(other, 0o700))
	if err := h.Create(ctx, other, 77); err == nil {
		t.Error("created although cancelled")
	}
	if err := h.Create(t.Context(), dir, 16); !errors.Is(err, fs.ErrExist) {
		t.Error("a disk is replaced:", err)
	}
	if entries, err := os.ReadDir(other); err != nil || len(entries) > 0 {
		t.Error(entries, err)
	}
	if _, err := h.Mount(t.Context(), other, h.layers(), []string{"base"}); !errors.Is(err, fs.ErrNotExist) {
		t.Error("mounted without a disk:", err)
	}
	if err := h.Unmount(t.Context(), filepath.Join(h.dir, "nowhere")); err != nil {
		t.Error("unmount of nothing:", err)
	}
	h.mount(dir, "base")
	h.wantMounts(1)
}

func TestConcurrentSandboxes(t *testing.T) {
	h := newHost(t)
	h.layer("base", map[string]string{"x": "image"})
	var wg sync.WaitGroup
	for i := range 20 {
		wg.Go(func() {
			dir := filepath.Join(h.dir, "sandboxes", fmt.Sprint(i))
			size := int64(DefaultDiskMiB)
			if i%2 == 0 {
				size = 64
			}
			if err := errors.Join(os.MkdirAll(dir, 0o700), h.Create(t.Context(), dir, size)); err != nil {
				t.Error(err)
				return
			}
			for range 2 {
				root, err := h.Mount(t.Context(), dir, h.layers(), []string{"base"})
				if err != nil {
					t.Error(err)
					return
				}
				own := filepath.Join(root, "own")
				if got := read(t, own); got != fmt.Sprint(i) && got != "error: no such file or directory" {
					t.Error("another sandbox's file:", got)
				}
				if err := os.WriteFile(own, []byte(fmt.Sprint(i)), 0o644); err != nil {
					t.Error(err)
				}
				if err := h.Unmount(t.Context(), dir); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	h.wantMounts(0)
}

// TestNewDaemon: another Manager takes over what a killed one left.
func TestNewDaemon(t *testing.T) {
	h := newHost(t)
	h.layer("base", nil)
	kept, lost, half := h.sandbox("kept", 16), h.sandbox("lost", 16), h.sandbox("half", 16)
	for _, dir := range []string{kept, lost} {
		h.mount(dir, "base")
	}
	must(t, h.mountDisk(t.Context(), half)) // killed before the overlay
	must(t, os.WriteFile(filepath.Join(h.templates, readyPrefix+"1"), nil, 0o600), os.WriteFile(filepath.Join(h.templates, scratchPrefix+"1"), nil, 0o600))

	must(t, h.Close())
	next, err := Open(h.dir, Options{})
	must(t, err)
	h.Manager = next
	for _, name := range []string{readyPrefix + "1", scratchPrefix + "1"} {
		if _, err := os.Stat(filepath.Join(h.templates, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Error(name, "is left")
		}
	}
	h.mount(half, "base")
	h.wantMounts(3)
	must(t, next.Sweep(t.Context(), func(dir string) bool { return dir == kept }))
	if on, err := next.Mounted(kept); !on || err != nil {
		t.Error("a wanted root was swept", err)
	}
	h.wantMounts(1)
	h.unmount(kept)
}

// TestBusyMount: a process on the host that sits in the root, and a mount that something made inside.
func TestBusyMount(t *testing.T) {
	h := newHost(t)
	h.busyTimeout, h.detachTimeout = 100*time.Millisecond, time.Second
	h.layer("base", nil)
	dir := h.sandbox("a", 16)
	root := h.mount(dir, "base")
	inner := filepath.Join(root, "inner")
	must(t, os.Mkdir(inner, 0o755), unix.Mount("tmpfs", inner, "tmpfs", 0, ""))
	h.unmount(dir)
	h.wantMounts(0)

	root = h.mount(dir, "base")
	f, err := os.Create(filepath.Join(root, "open"))
	must(t, err)
	defer f.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := h.Unmount(ctx, dir); !errors.Is(err, context.Canceled) {
		t.Error("a cancelled unmount of a busy root:", err)
	}
	h.wantMounts(1)
	if err := h.Unmount(t.Context(), dir); err == nil {
		t.Error("unmounted although a file is open")
	}
	if !strings.Contains(h.log.String(), "lazily") {
		t.Error("nothing in the log:", h.log)
	}
	// Two mounts of one disk would destroy it.
	if _, err := h.Mount(t.Context(), dir, h.layers(), []string{"base"}); err == nil {
		t.Error("mounted a second time")
	}
	must(t, f.Close())
	h.detachTimeout = time.Minute
	h.unmount(dir)
	h.mount(dir, "base")
}

// TestOtherNamespace: a copy of the mounts in another namespace, which every service with private mounts has, does not
// keep the disk.
func TestOtherNamespace(t *testing.T) {
	h := newHost(t)
	h.layer("base", nil)
	dir := h.sandbox("a", 16)
	h.mount(dir, "base")
	cmd := exec.Command("sleep", "300")
	cmd.SysProcAttr = &unix.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	must(t, cmd.Start())
	defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
	h.unmount(dir)
	h.wantMounts(0)
}

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{`/a\040b`: "/a b", `\134`: `\`, `/a\12`: `/a\12`, `\999x`: `\999x`, "": ""} {
		if got := unescape(in); got != want {
			t.Errorf("unescape(%q) = %q, want %q", in, got, want)
		}
	}
}

//go:build linux

package rootfs

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"golang.org/x/sys/unix"
)

// TestDirtyDisk: a disk as a crash of the host leaves it.
func TestDirtyDisk(t *testing.T) {
	h := newHost(t)
	h.layer("base", nil)
	dir := h.sandbox("a", 256) // two groups: the second one has a copy of the superblock
	root := h.mount(dir, "base")
	must(t, os.WriteFile(filepath.Join(root, "synced"), []byte("kept"), 0o644))
	syncFS(root)
	must(t, os.WriteFile(filepath.Join(root, "unsynced"), make([]byte, 5<<20), 0o644))
	crashed := filepath.Join(h.dir, "sandboxes", "crashed")
	must(t, os.MkdirAll(crashed, 0o700))
	must(t, copySparse(t.Context(), filepath.Join(dir, diskFile), filepath.Join(crashed, diskFile)))
	h.unmount(dir)
	if clean, err := isClean(filepath.Join(crashed, diskFile)); clean || err != nil {
		t.Fatal("the copy of a mounted disk is clean", err)
	}
	root = h.mount(crashed, "base")
	if got := read(t, filepath.Join(root, "synced")); got != "kept" {
		t.Error(got)
	}
	if !strings.Contains(h.log.String(), "mode=-p") {
		t.Error("no check in the log:", h.log)
	}
	h.unmount(crashed)

	// Damage that -p does not dare to repair, and then a superblock that only its backups can replace.
	disk := filepath.Join(crashed, diskFile)
	for _, request := range []string{"clri /upper", "set_super_value checksum 0"} {
		for _, r := range []string{"set_super_value state 0", request} {
			if out, err := exec.Command("debugfs", "-w", "-R", r, disk).CombinedOutput(); err != nil {
				t.Fatalf("debugfs: %v: %s", err, out)
			}
		}
		root = h.mount(crashed, "base")
		must(t, os.WriteFile(filepath.Join(root, "usable"), nil, 0o644))
		h.unmount(crashed)
	}
	if !strings.Contains(h.log.String(), "mode=-y") {
		t.Error("no repair in the log:", h.log)
	}
	f, err := os.OpenFile(disk, os.O_RDWR, 0)
	must(t, err)
	_, err = f.WriteAt([]byte{0}, 1024+0x3A) // a torn write
	must(t, err, f.Close())
	root = h.mount(crashed, "base")
	must(t, os.WriteFile(filepath.Join(root, "usable"), nil, 0o644))
	h.unmount(crashed)

	// Not a file system at all.
	must(t, os.WriteFile(filepath.Join(crashed, diskFile), make([]byte, 1<<20), 0o600))
	if _, err := h.Mount(t.Context(), crashed, h.layers(), []string{"base"}); err == nil {
		t.Error("zeros are mounted")
	}
	must(t, os.WriteFile(filepath.Join(crashed, diskFile), nil, 0o600))
	if _, err := h.Mount(t.Context(), crashed, h.layers(), []string{"base"}); err == nil {
		t.Error("an empty disk is mounted")
	}
	h.wantMounts(0)
}

func TestSizes(t *testing.T) {
	h := newHost(t)
	h.layer("base", nil)
	var st unix.Statfs_t
	must(t, unix.Statfs(h.dir, &st))
	most := int64(st.Blocks) * st.Bsize >> 20
	for _, bad := range []int64{-1, 0, most + 1, 16777088, 1 << 43, 1<<63 - 1} {
		dir := filepath.Join(h.dir, "bad")
		must(t, os.MkdirAll(dir, 0o700))
		err := h.Create(t.Context(), dir, bad)
		if shard.CodeOf(err) != shard.CodeInvalidRequest || strings.Contains(err.Error(), h.dir) {
			t.Errorf("%d MiB: %v", bad, err)
		}
	}
	sizes := []int64{MinDiskMiB, 2, 3, 127, 128, 129, 130, 511, 512, 513, DefaultDiskMiB}
	if most < 16<<20 {
		sizes = append(sizes, most)
	}
	for _, mib := range sizes {
		dir := h.sandbox(fmt.Sprint(mib), mib)
		root := h.mount(dir, "base")
		must(t, os.WriteFile(filepath.Join(root, "file"), make([]byte, 100_000), 0o644))
		h.unmount(dir)
		if out, err := exec.Command("e2fsck", "-fn", filepath.Join(dir, diskFile)).CombinedOutput(); err != nil {
			t.Errorf("%d MiB: %v: %s", mib, err, out)
		}
		if info, err := os.Stat(filepath.Join(dir, diskFile)); err != nil || info.Size() != mib<<20 {
			t.Error(mib, err)
		}
		if used, err := h.Usage(dir); err != nil || used > 40<<20 {
			t.Errorf("%d MiB: an empty disk costs the host %d bytes, %v", mib, used, err)
		}
		must(t, os.Remove(filepath.Join(dir, diskFile)))
	}
	// Clients choose sizes: the cache of templates is bounded.
	for mib := range int64(maxTemplates + 5) {
		h.sandbox(fmt.Sprint("t", mib), 20+mib)
	}
	entries, err := filepath.Glob(strings.NewReplacer("[", `\[`).Replace(h.templates) + "/" + templatePrefix + "*")
	if err != nil || len(entries) > maxTemplates {
		t.Error(len(entries), "templates", err)
	}
}

func TestClone(t *testing.T) {
	h := newHost(t)
	h.layer("base", map[string]string{"x": "image"})
	dir := h.sandbox("a", 64)
	must(t, os.Mkdir(filepath.Join(dir, diskDir), 0o700)) // not a mount: the host must not be frozen
	must(t, os.MkdirAll(filepath.Join(h.dir, "sandboxes", "early"), 0o700), h.Clone(t.Context(), dir, filepath.Join(h.dir, "sandboxes", "early")))

	root := h.mount(dir, "base")
	stop, stopped := make(chan struct{}), make(chan int)
	go func() { // a guest that goes on writing, each file whole before the next
		for n := 0; ; n++ {
			select {
			case <-stop:
				stopped <- n
				return
			default:
			}
			if err := os.WriteFile(filepath.Join(root, fmt.Sprint(n)), []byte(fmt.Sprint(n)), 0o644); err != nil {
				t.Error(err)
			}
		}
	}()
	var copies []string
	for i := range 3 {
		to := filepath.Join(h.dir, "sandboxes", fmt.Sprint("copy", i))
		must(t, os.MkdirAll(to, 0o700), os.WriteFile(filepath.Join(root, "before"), []byte(fmt.Sprint(i)), 0o644), h.Clone(t.Context(), dir, to))
		copies = append(copies, to)
	}
	close(stop)
	if n := <-stopped; n == 0 {
		t.Error("the guest wrote nothing")
	}
	for i, to := range copies {
		root := h.mount(to, "base")
		if got := read(t, filepath.Join(root, "before")); got != fmt.Sprint(i) {
			t.Error(got)
		}
		if entries, err := os.ReadDir(root); err != nil || len(entries) < 2 {
			t.Error(entries, err)
		}
		must(t, os.WriteFile(filepath.Join(root, "own"), nil, 0o644))
	}
	if _, err := os.Stat(filepath.Join(root, "own")); err == nil {
		t.Error("the source sees a copy's file")
	}
	if err := h.Clone(t.Context(), dir, copies[0]); !errors.Is(err, fs.ErrExist) {
		t.Error("a disk is replaced:", err)
	}
	must(t, os.WriteFile(filepath.Join(root, "after"), nil, 0o644)) // the failure has released it

	// A daemon that is killed during the copy leaves the source frozen.
	freeze := func() {
		disk, err := openDisk(dir)
		must(t, err)
		defer disk.Close()
		must(t, unix.IoctlSetInt(int(disk.Fd()), fiFreeze, 0))
	}
	freeze()
	must(t, h.Sweep(t.Context(), func(string) bool { return true }))
	must(t, os.WriteFile(filepath.Join(root, "thawed"), nil, 0o644))
	freeze()
	h.unmount(dir)
}

func TestPool(t *testing.T) {
	h := newHost(t)
	dir := filepath.Join(h.dir, "a")
	must(t, os.MkdirAll(dir, 0o700))
	ready := func() (n int) {
		entries, _ := os.ReadDir(h.templates)
		for _, e := range entries {
			if strings.HasPrefix(e.Name(), readyPrefix) {
				n++
			}
		}
		return n
	}
	for end := time.Now().Add(30 * time.Second); ready() < poolSize; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the pool does not fill")
		}
	}
	must(t, h.Create(t.Context(), dir, DefaultDiskMiB))
	if info, err := os.Stat(filepath.Join(dir, diskFile)); err != nil || info.Size() != DefaultDiskMiB<<20 || info.Mode() != 0o600 {
		t.Error(info, err)
	}
}

func TestCopySparse(t *testing.T) {
	dir := t.TempDir()
	for name, parts := range map[string]map[int64]string{"empty": {}, "hole": {1 << 20: ""}, "head": {0: "x", 9 << 20: ""},
		"tail": {7<<20 + 1: "tail"}, "mixed": {3: "a", 5 << 20: strings.Repeat("b", 70_000), 20 << 20: "c", 21 << 20: ""}} {
		from, to := filepath.Join(dir, name), filepath.Join(dir, name+".copy")
		f, err := os.Create(from)
		must(t, err)
		var size int64
		for at, text := range parts {
			_, err := f.WriteAt([]byte(text), at)
			must(t, err)
			size = max(size, at+int64(len(text)))
		}
		must(t, f.Truncate(size), f.Close(), copySparse(t.Context(), from, to))
		if !slices.Equal([]byte(read(t, from)), []byte(read(t, to))) {
			t.Errorf("%s: the copy differs", name)
		}
		var a, b unix.Stat_t
		must(t, unix.Stat(from, &a), unix.Stat(to, &b))
		if b.Blocks > a.Blocks {
			t.Errorf("%s: the copy has %d blocks, the file %d", name, b.Blocks, a.Blocks)
		}
	}
	if err := copySparse(t.Context(), filepath.Join(dir, "missing"), filepath.Join(dir, "new")); err == nil {
		t.Error("copied nothing")
	}
	if _, err := os.Stat(filepath.Join(dir, "new")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a failed copy is left")
	}
}

// BenchmarkDisk is what a create and a removal of a sandbox cost here.
func BenchmarkDisk(b *testing.B) {
	for _, size := range []int64{DefaultDiskMiB, 2048} {
		b.Run(fmt.Sprint(size, "MiB"), func(b *testing.B) {
			dir := b.TempDir()
			m, err := Open(dir, Options{})
			if err != nil {
				b.Fatal(err)
			}
			defer m.Close()
			layers := filepath.Join(dir, "layers")
			if err := os.MkdirAll(filepath.Join(layers, "base"), 0o755); err != nil {
				b.Fatal(err)
			}
			var spent [3]time.Duration
			n := 0
			for b.Loop() {
				n++
				box := filepath.Join(dir, fmt.Sprint(n))
				_ = os.Mkdir(box, 0o700)
				time.Sleep(20 * time.Millisecond) // the pool fills in the pauses
				t0 := time.Now()
				err := m.Create(b.Context(), box, size)
				t1 := time.Now()
				_, err2 := m.Mount(b.Context(), box, layers, []string{"base"})
				t2 := time.Now()
				err3 := m.Unmount(b.Context(), box)
				t3 := time.Now()
				if err := errors.Join(err, err2, err3, os.RemoveAll(box)); err != nil {
					b.Fatal(err)
				}
				spent[0] += t1.Sub(t0)
				spent[1] += t2.Sub(t1)
				spent[2] += t3.Sub(t2)
			}
			for i, name := range []string{"create-ms", "mount-ms", "unmount-ms"} {
				b.ReportMetric(spent[i].Seconds()*1000/float64(n), name)
			}
		})
	}
}

// TestSpoiled: a disk of which writes were lost is checked before it is used again, although ext4 knows nothing of it.
func TestSpoiled(t *testing.T) {
	h := newHost(t)
	h.layer("base", map[string]string{"a": "1"})
	dir := h.sandbox("spoiled", 16)
	must(t, os.WriteFile(filepath.Join(h.mount(dir, "base"), "kept"), []byte("2"), 0o644))
	h.unmount(dir)
	file := filepath.Join(dir, diskFile)
	must(t, spoil(file))
	if clean, err := isClean(file); clean || err != nil {
		t.Fatal("a spoiled disk is clean", err)
	}
	if got := read(t, filepath.Join(h.mount(dir, "base"), "kept")); got != "2" {
		t.Errorf("the file holds %q", got)
	}
	if !strings.Contains(h.log.String(), "has been checked") {
		t.Error("the disk was not checked:", h.log)
	}
	h.unmount(dir)
	if clean, err := isClean(file); !clean || err != nil {
		t.Error("the checked disk is not clean", err)
	}
}

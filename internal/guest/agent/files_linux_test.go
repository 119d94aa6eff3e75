package agent

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

var (
	rootCreds = creds{}
	nobody    = creds{uid: 65534, gid: 65534, groups: []uint32{12345}}
)

// guestDir is a directory that every user can enter; the tests switch users for real.
func guestDir(t testing.TB) string {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("the agent runs as root; this test does not")
	}
	dir := t.TempDir()
	for _, d := range []string{filepath.Dir(dir), dir} {
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func put(args guest.PutArgs, c creds, body io.Reader) error {
	u, err := beginPut(args, c)
	if err != nil {
		return err
	}
	return u.receive(body)
}

func putBytes(path string, body string) error {
	return put(guest.PutArgs{Path: guest.Path(path), Size: int64(len(body))}, rootCreds, strings.NewReader(body))
}

func get(path string) ([]byte, error) {
	d, err := openGet(path)
	if err != nil {
		return nil, err
	}
	defer d.Close()
	var out bytes.Buffer
	err = d.send(&out)
	return out.Bytes(), err
}

func list(path string) ([]shard.FileEntry, error) {
	dir, names, err := openDir(path)
	if err != nil {
		return nil, err
	}
	defer closeAll(dir)
	var out bytes.Buffer
	if err := writeEntries(&out, dir, names); err != nil {
		return nil, err
	}
	var entries []shard.FileEntry
	for dec := json.NewDecoder(&out); ; {
		var e shard.FileEntry
		if err := dec.Decode(&e); err == io.EOF {
			return entries, nil
		} else if err != nil {
			return nil, err
		}
		entries = append(entries, e)
	}
}

func wantCode(t *testing.T, what string, err error, code shard.Code, text string) {
	t.Helper()
	if shard.CodeOf(err) != code || code != "" && !strings.Contains(err.Error(), text) {
		t.Errorf("%s: %v (code %q), want %q with %q", what, err, shard.CodeOf(err), code, text)
	}
}

func wantNames(t *testing.T, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if fmt.Sprint(names) != fmt.Sprint(want) {
		t.Errorf("%s holds %q, want %q", dir, names, want)
	}
}

func write(t testing.TB, path, body string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(body), 0o644); err != nil {
		t.Fatal(err)
	}
}

func wantFile(t testing.TB, path, body string) {
	t.Helper()
	got, err := os.ReadFile(path)
	if err != nil || string(got) != body {
		t.Errorf("%s: %q, %v; want %q", path, got, err, body)
	}
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func TestPutSizes(t *testing.T) { // case 31
	dir := guestDir(t)
	for _, size := range []int{0, 1, 4095, 4096, 18432, 65535, 65537, 4<<20 - 1, 4 << 20, 4<<20 + 1, 8<<20 + 1, 100 << 20} {
		body := make([]byte, size)
		for i := 0; i < size; i += 1 + i/3 {
			body[i] = byte(i) | 1
		}
		path := filepath.Join(dir, "f")
		args := guest.PutArgs{Path: guest.Path(path), Size: int64(size)}
		if err := put(args, rootCreds, bytes.NewReader(body)); err != nil {
			t.Fatalf("%d bytes: %v", size, err)
		}
		got, err := get(path)
		if err != nil || sha256.Sum256(got) != sha256.Sum256(body) {
			t.Fatalf("%d bytes: %d came back, %v", size, len(got), err)
		}
		if size == 0 {
			must(t, os.Remove(path))
			continue
		}
		before, _ := os.Stat(path)
		wantCode(t, "short", put(args, rootCreds, bytes.NewReader(body[1:])), shard.CodeInvalidRequest, "ended before")
		wantCode(t, "long", put(args, rootCreds, io.MultiReader(bytes.NewReader(body), strings.NewReader("x"))), shard.CodeInvalidRequest, "longer")
		if err := put(args, rootCreds, io.MultiReader(bytes.NewReader(body[:size/2]), iotest.ErrReader(errGone))); !errors.Is(err, errGone) {
			t.Errorf("cut: %v", err)
		}
		if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
			t.Errorf("a failed put changed the file: %v", err)
		}
		wantNames(t, dir, "f")
	}
}

func TestPutReplacesNothingButTheName(t *testing.T) {
	dir := guestDir(t)
	path := filepath.Join(dir, "f")
	write(t, path, "old")
	must(t, os.Chmod(path, 0o4777))
	must(t, os.Link(path, filepath.Join(dir, "g")))
	must(t, putBytes(path, "new"))
	wantFile(t, path, "new")
	wantFile(t, filepath.Join(dir, "g"), "old")
	if info, _ := os.Stat(path); info.Mode() != 0o644 {
		t.Errorf("mode %v", info.Mode())
	}
}

func TestLinksOnTheWay(t *testing.T) { // case 26
	dir := guestDir(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Mkdir(in("etc"), 0o755))
	must(t, os.Symlink(in("etc"), in("l")))
	must(t, os.Symlink("l", in("m")))
	must(t, os.Symlink(in("loop"), in("loop")))
	must(t, os.Symlink("etc/new", in("nowhere")))
	must(t, os.Symlink("../../"+filepath.Base(dir)+"/etc/canary", in("etc/again")))

	must(t, putBytes(in("m/canary"), "1"))
	wantFile(t, in("etc/canary"), "1")
	must(t, putBytes(in("m/again"), "2"))
	wantFile(t, in("etc/canary"), "2")
	must(t, putBytes(in("nowhere"), "3"))
	wantFile(t, in("etc/new"), "3")
	wantNames(t, in("etc"), "again", "canary", "new")
	if got, err := get(in("l/canary")); err != nil || string(got) != "2" {
		t.Errorf("get: %q, %v", got, err)
	}
	if e, err := statPath(in("l")); err != nil || e.Type != "symlink" {
		t.Errorf("stat: %+v, %v", e, err)
	}
	if e, err := list(in("l")); err != nil || len(e) != 3 || e[0].Name != "again" || e[0].Type != "symlink" {
		t.Errorf("list: %+v, %v", e, err)
	}
	must(t, mkdir(guest.MkdirArgs{Path: guest.Path(in("l/d"))}, rootCreds))
	must(t, remove(guest.RemoveArgs{Path: guest.Path(in("l/d"))}, rootCreds, nil))

	_, _, terr := openTar(in("loop/x"))
	_, lerr := list(in("loop"))
	_, gerr := get(in("loop"))
	for what, err := range map[string]error{"put": putBytes(in("loop"), ""), "put below": putBytes(in("loop/x"), ""), "get": gerr,
		"list": lerr, "tar": terr, "mkdir": mkdir(guest.MkdirArgs{Path: guest.Path(in("loop/x")), Parents: true}, rootCreds),
		"remove below": remove(guest.RemoveArgs{Path: guest.Path(in("loop/x"))}, rootCreds, nil)} {
		wantCode(t, what, err, shard.CodeInvalidRequest, "loop")
	}
	must(t, remove(guest.RemoveArgs{Path: guest.Path(in("l"))}, rootCreds, nil))
	wantFile(t, in("etc/canary"), "2")
	wantCode(t, "a link with a slash", remove(guest.RemoveArgs{Path: guest.Path(in("m") + "/")}, rootCreds, nil), shard.CodeInvalidRequest, "not a directory")
}

func TestOwnerAndRights(t *testing.T) { // case 37
	dir := guestDir(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	must(t, os.Mkdir(in("open"), 0o777))
	must(t, os.Chmod(in("open"), 0o777))
	must(t, os.Mkdir(in("closed"), 0o755))
	must(t, os.Mkdir(in("secret"), 0o700))
	mode := uint32(0o640)
	owned := func(path string, want os.FileMode) {
		t.Helper()
		info, err := os.Lstat(path)
		must(t, err)
		st := info.Sys().(*syscall.Stat_t)
		if info.Mode() != want || st.Uid != nobody.uid || st.Gid != nobody.gid {
			t.Errorf("%s: %v of %d:%d, want %v of nobody", path, info.Mode(), st.Uid, st.Gid, want)
		}
	}
	write := func(path string, parents bool) error {
		return put(guest.PutArgs{Path: guest.Path(path), Mode: &mode, Parents: parents}, nobody, strings.NewReader(""))
	}
	must(t, write(in("open/a/b/f"), true))
	owned(in("open/a/b/f"), 0o640)
	owned(in("open/a/b"), os.ModeDir|0o755)
	owned(in("open/a"), os.ModeDir|0o755)
	wantCode(t, "no parents", write(in("open/c/f"), false), shard.CodeNotFound, "make it first")
	wantCode(t, "root's", write(in("closed/f"), false), shard.CodeInvalidRequest, "permission denied")
	wantCode(t, "root's parents", write(in("closed/x/f"), true), shard.CodeInvalidRequest, "permission denied")
	wantCode(t, "secret", write(in("secret/x/f"), true), shard.CodeInvalidRequest, "permission denied")

	all := uint32(0o777)
	must(t, mkdir(guest.MkdirArgs{Path: guest.Path(in("open/d//")), Mode: &all}, nobody))
	owned(in("open/d"), os.ModeDir|0o777)
	wantCode(t, "again", mkdir(guest.MkdirArgs{Path: guest.Path(in("open/d"))}, nobody), shard.CodeInvalidRequest, "exists")
	must(t, mkdir(guest.MkdirArgs{Path: guest.Path(in("open/d")), Parents: true}, nobody))
	owned(in("open/d"), os.ModeDir|0o777)
	wantCode(t, "over a file", mkdir(guest.MkdirArgs{Path: guest.Path(in("open/a/b/f")), Parents: true}, nobody), shard.CodeInvalidRequest, "exists")
	wantCode(t, "remove", remove(guest.RemoveArgs{Path: guest.Path(in("closed"))}, nobody, nil), shard.CodeInvalidRequest, "permission denied")
	must(t, remove(guest.RemoveArgs{Path: guest.Path(in("open/a")), Recursive: true}, nobody, nil))
	wantNames(t, dir, "closed", "open", "secret")
}

func TestRightsStayOnTheirThread(t *testing.T) {
	dir := guestDir(t)
	must(t, os.Chmod(dir, 0o700))
	path := filepath.Join(dir, "f")
	write(t, path, "")
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			for range 50 {
				if i%2 == 0 {
					if err := nobody.do(func() error { _, err := lstatat(unix.AT_FDCWD, path); return err }); err != unix.EACCES {
						t.Errorf("nobody: %v", err)
					}
				} else if _, err := lstatat(unix.AT_FDCWD, path); err != nil {
					t.Errorf("root: %v", err)
				}
			}
		})
	}
	wg.Wait()
	tasks, err := filepath.Glob("/proc/self/task/*/status")
	must(t, err)
	for _, task := range tasks {
		status, err := os.ReadFile(task)
		if err == nil && (!strings.Contains(string(status), "\nUid:\t0\t0\t0\t0\n") || strings.Contains(string(status), "12345")) {
			t.Errorf("%s keeps somebody's rights", task)
		}
	}
	want := errors.New("what f said")
	if err := nobody.do(func() error { return want }); err != want {
		t.Error(err)
	}
}

func TestOddPaths(t *testing.T) { // case 39
	guestDir(t)
	for _, path := range []string{"", ".", "a", "a/../b", "./x", "/a\x00b", "/" + strings.Repeat("a/", 2500), "/" + strings.Repeat("a", 256), "/..", "/", "//", "/.", "/proc/.", "/dev/null/x", "/nonesuch/../etc"} {
		_, _, terr := openTar(path)
		errs := map[string]error{"put": putBytes(path, ""), "tar": terr,
			"remove": remove(guest.RemoveArgs{Path: guest.Path(path), Recursive: true}, rootCreds, nil),
			"mkdir":  mkdir(guest.MkdirArgs{Path: guest.Path(path)}, rootCreds)}
		if !strings.HasPrefix(path, "/") || strings.ContainsAny(path, "\x00") || len(path) > 255 {
			_, errs["stat"] = statPath(path)
			_, errs["get"] = get(path)
			_, errs["list"] = list(path)
			_, errs["untar"] = beginUntar(guest.UntarArgs{Path: guest.Path(path)}, rootCreds)
		}
		for what, err := range errs {
			if code := shard.CodeOf(err); code != shard.CodeInvalidRequest && code != shard.CodeNotFound {
				t.Errorf("%s of %.40q: %v", what, path, err)
			}
		}
	}
	for _, path := range []string{"/../../etc/passwd", "//etc//passwd", "/etc/./passwd", "/etc/../etc/passwd"} {
		if _, err := get(path); err != nil {
			t.Errorf("get %q: %v", path, err)
		}
		if e, err := statPath(path); err != nil || e.Type != "file" {
			t.Errorf("stat %q: %+v, %v", path, e, err)
		}
	}
	if e, err := statPath("/tmp/"); err != nil || e.Type != "dir" {
		t.Errorf("stat /tmp/: %+v, %v", e, err)
	}
	for _, path := range []string{"//etc", "/etc/", "/../etc"} {
		if _, err := list(path); err != nil {
			t.Errorf("list %q: %v", path, err)
		}
	}
	must(t, mkdir(guest.MkdirArgs{Path: "/", Parents: true}, rootCreds))
}

func TestOddNames(t *testing.T) { // case 33
	dir := guestDir(t)
	names := []string{"a\tb", "a\nb", "b\\c", "plain", strings.Repeat("x", 255), "\xff\xfe", "ü"}
	for _, name := range names {
		must(t, putBytes(dir+"/"+name, name))
	}
	entries, err := list(dir)
	must(t, err)
	if len(entries) != len(names) {
		t.Fatalf("%d entries", len(entries))
	}
	for _, e := range entries {
		name := e.Name
		if e.NameBytes != nil {
			name = string(e.NameBytes)
			if e.Name != "\uFFFD" || name != "\xff\xfe" {
				t.Errorf("%q is shown as %q", name, e.Name)
			}
		}
		if got, err := get(dir + "/" + name); err != nil || string(got) != name {
			t.Errorf("get %q: %q, %v", name, got, err)
		}
		must(t, remove(guest.RemoveArgs{Path: guest.Path(dir + "/" + name)}, rootCreds, nil))
	}
	wantNames(t, dir)
}

func TestNotPlainFiles(t *testing.T) { // case 35
	dir := guestDir(t)
	in := func(name string) string { return filepath.Join(dir, name) }
	if got, err := get("/proc/cpuinfo"); err != nil || len(got) == 0 {
		t.Errorf("/proc/cpuinfo: %d bytes, %v", len(got), err)
	}
	must(t, unix.Mkfifo(in("fifo"), 0o666))
	l, err := net.Listen("unix", in("socket"))
	must(t, err)
	defer l.Close()
	for path, text := range map[string]string{"/dev/zero": "a character device", in("fifo"): "a fifo", in("socket"): "a socket", dir: "a directory"} {
		_, err := get(path)
		wantCode(t, "get", err, shard.CodeInvalidRequest, text)
		if path == dir {
			wantCode(t, "put", putBytes(path, ""), shard.CodeInvalidRequest, text)
			continue
		}
		if e, err := statPath(path); err != nil || e.Type != "other" {
			t.Errorf("stat %s: %+v, %v", path, e, err)
		}
		_, _, err = openTar(path)
		wantCode(t, "tar", err, shard.CodeInvalidRequest, text)
		wantCode(t, "put", putBytes(path, ""), shard.CodeInvalidRequest, text)
	}
	_, err = list(in("fifo"))
	wantCode(t, "list", err, shard.CodeInvalidRequest, "not a directory")
	_, a, err := openTar("/proc/self/")
	must(t, err)
	wantCode(t, "tar of proc", a.write(io.Discard), shard.CodeInvalidRequest, "proc")
	must(t, remove(guest.RemoveArgs{Path: guest.Path(in("fifo"))}, rootCreds, nil))
	for path, text := range map[string]string{"/": "end the path", "/proc": "mount point", "/dev": "mount point", "/proc/..": "end the path"} {
		wantCode(t, path, remove(guest.RemoveArgs{Path: guest.Path(path), Recursive: true}, rootCreds, nil), shard.CodeInvalidRequest, text)
	}
}

func mountTmpfs(t *testing.T, at, options string, flags uintptr) {
	t.Helper()
	must(t, os.MkdirAll(at, 0o755))
	if err := unix.Mount("shard-test", at, "tmpfs", flags, options); err != nil {
		t.Skip("cannot mount here: ", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
}

func TestFullAndReadOnly(t *testing.T) {
	dir := guestDir(t)
	mountTmpfs(t, dir+"/small", "size=1m", 0)
	mountTmpfs(t, dir+"/ro", "", unix.MS_RDONLY)
	big := strings.Repeat("x", 2<<20)
	wantCode(t, "full", putBytes(dir+"/small/f", big), shard.CodeInvalidRequest, "no space left")
	wantNames(t, dir+"/small")
	wantCode(t, "read-only", putBytes(dir+"/ro/f", ""), shard.CodeInvalidRequest, "read-only")
	wantCode(t, "a size no file has", put(guest.PutArgs{Path: guest.Path(dir + "/f"), Size: 1 << 62}, rootCreds, strings.NewReader("")), shard.CodeInvalidRequest, "ended before")
	wantCode(t, "a negative size", put(guest.PutArgs{Path: guest.Path(dir + "/f"), Size: -1}, rootCreds, strings.NewReader("")), shard.CodeInvalidRequest, "negative")
}

func TestRemoveStopsAtMounts(t *testing.T) {
	dir := guestDir(t)
	mountTmpfs(t, dir+"/d/mnt", "", 0)
	write(t, dir+"/d/mnt/canary", "c")
	for _, path := range []string{"/d", "/d/mnt"} {
		wantCode(t, path, remove(guest.RemoveArgs{Path: guest.Path(dir + path), Recursive: true}, rootCreds, nil), shard.CodeInvalidRequest, "mount point")
	}
	wantFile(t, dir+"/d/mnt/canary", "c")
	// The same file system mounted twice: only the kernel's mark tells.
	must(t, os.MkdirAll(dir+"/e/bind", 0o755))
	must(t, os.MkdirAll(dir+"/src", 0o755))
	write(t, dir+"/src/canary", "c")
	must(t, unix.Mount(dir+"/src", dir+"/e/bind", "", unix.MS_BIND, ""))
	t.Cleanup(func() { _ = unix.Unmount(dir+"/e/bind", unix.MNT_DETACH) })
	wantCode(t, "bind", remove(guest.RemoveArgs{Path: guest.Path(dir + "/e"), Recursive: true}, rootCreds, nil), shard.CodeInvalidRequest, "mount point")
	wantFile(t, dir+"/src/canary", "c")
}

func TestRemoveTrees(t *testing.T) {
	dir := guestDir(t)
	canary := filepath.Join(dir, "canary")
	must(t, os.Mkdir(canary, 0o755))
	write(t, canary+"/f", "c")
	// Deeper than any path, and wider than one read of a directory.
	fd, err := openat(unix.AT_FDCWD, dir, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	must(t, err)
	for i := range 3000 {
		must(t, unix.Mkdirat(fd, "dddd", 0o755))
		if i%500 == 0 {
			must(t, unix.Symlinkat(canary, fd, "link"))
		}
		next, err := openat(fd, "dddd", unix.O_RDONLY|unix.O_DIRECTORY, 0)
		must(t, err)
		closeAll(fd)
		fd = next
	}
	closeAll(fd)
	for i := range 3000 {
		write(t, fmt.Sprintf("%s/dddd/%04d", dir, i), "")
	}
	args := guest.RemoveArgs{Path: guest.Path(dir + "/dddd")}
	wantCode(t, "not recursive", remove(args, rootCreds, nil), shard.CodeInvalidRequest, "recursive")
	args.Recursive = true
	gone := make(chan struct{})
	close(gone)
	if err := remove(args, rootCreds, gone); !errors.Is(err, errGone) {
		t.Errorf("given up: %v", err)
	}
	must(t, remove(args, rootCreds, nil))
	wantNames(t, dir, "canary", "link")
	wantFile(t, canary+"/f", "c")
	wantCode(t, "again", remove(args, rootCreds, nil), shard.CodeNotFound, "")
}

// TestRemoveAgainstSwaps lets a guest exchange directories of the tree for links to a canary while it is removed.
func TestRemoveAgainstSwaps(t *testing.T) {
	dir := guestDir(t)
	canary := filepath.Join(dir, "canary")
	must(t, os.MkdirAll(canary+"/sub", 0o755))
	write(t, canary+"/sub/f", "c")
	tree := filepath.Join(dir, "tree")
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		link := filepath.Join(dir, "swap")
		_ = os.Symlink(canary, link)
		for !stop.Load() {
			for i := range 8 {
				d := fmt.Sprintf("%s/%d", tree, i)
				_ = unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, d, unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(unix.AT_FDCWD, link, unix.AT_FDCWD, d, unix.RENAME_EXCHANGE)
			}
		}
	})
	for range 150 {
		for i := range 8 {
			_ = os.MkdirAll(fmt.Sprintf("%s/%d/sub", tree, i), 0o755)
			_ = os.WriteFile(fmt.Sprintf("%s/%d/sub/g", tree, i), nil, 0o644)
		}
		_ = remove(guest.RemoveArgs{Path: guest.Path(tree), Recursive: true}, rootCreds, nil)
		if got, err := os.ReadFile(canary + "/sub/f"); err != nil || string(got) != "c" {
			t.Fatal("the canary is gone: ", err)
		}
	}
	stop.Store(true)
	wg.Wait()
}

func BenchmarkPut(b *testing.B) {
	dir := guestDir(b)
	body := make([]byte, 200<<20)
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		args := guest.PutArgs{Path: guest.Path(dir + "/f"), Size: int64(len(body))}
		if err := put(args, rootCreds, chunks{bytes.NewReader(body)}); err != nil {
			b.Fatal(err)
		}
	}
}

// chunks gives what a stream gives: at most one frame's data at a time.
type chunks struct{ r io.Reader }

func (c chunks) Read(p []byte) (int, error) { return c.r.Read(p[:min(len(p), guest.MaxData)]) }

func BenchmarkGet(b *testing.B) {
	dir := guestDir(b)
	body := bytes.Repeat([]byte("shard"), 40<<20)
	if err := os.WriteFile(dir+"/f", body, 0o644); err != nil {
		b.Fatal(err)
	}
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		d, err := openGet(dir + "/f")
		if err != nil {
			b.Fatal(err)
		}
		if err := d.send(io.Discard); err != nil {
			b.Fatal(err)
		}
		d.Close()
	}
}

package agent

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

func untar(path string, c creds, r io.Reader) error {
	x, err := beginUntar(guest.UntarArgs{Path: guest.Path(path)}, c)
	if err != nil {
		return err
	}
	return x.extract(r)
}

func tarOf(path string, w io.Writer) error {
	_, a, err := openTar(path)
	if err != nil {
		return err
	}
	return a.write(w)
}

// makeTar writes headers with their contents (in Linkname of a file, for shortness) as a tar.
func makeTar(t testing.TB, headers ...tar.Header) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, h := range headers {
		body := ""
		if h.Typeflag == tar.TypeReg {
			body, h.Linkname = h.Linkname, ""
			h.Size = int64(len(body))
		}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		must(t, tw.WriteHeader(&h))
		_, err := io.WriteString(tw, body)
		must(t, err)
	}
	must(t, tw.Close())
	return out.Bytes()
}

func reg(name, body string) tar.Header {
	return tar.Header{Typeflag: tar.TypeReg, Name: name, Linkname: body, Mode: 0o644}
}
func dirEntry(name string) tar.Header { return tar.Header{Typeflag: tar.TypeDir, Name: name} }
func symlink(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: to}
}
func hardlink(name, to string) tar.Header {
	return tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: to}
}

func TestRoundTrip(t *testing.T) { // case 29
	dir := guestDir(t)
	src := dir + "/src"
	must(t, os.MkdirAll(src+"/empty", 0o755))
	must(t, os.MkdirAll(src+"/sticky", 0o755))
	must(t, os.Chmod(src+"/sticky", os.ModeSticky|0o777))
	write(t, src+"/file", "contents")
	must(t, os.Chown(src+"/file", 1234, 1234))
	must(t, os.Chmod(src+"/file", os.ModeSetuid|0o755))
	must(t, os.Link(src+"/file", src+"/hard"))
	must(t, os.Symlink(strings.Repeat("t/", 2000), src+"/long"))
	must(t, os.Symlink("/etc/passwd", src+"/absolute"))
	write(t, src+"/"+strings.Repeat("n", 255), "")
	write(t, src+"/\xff odd", "odd")
	must(t, unix.Setxattr(src+"/file", "user.colour", []byte("red\x00blue"), 0))
	caps := []byte{1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0}
	must(t, unix.Setxattr(src+"/file", "security.capability", caps, 0))
	must(t, unix.Mkfifo(src+"/fifo", 0o644))
	must(t, os.Mkdir(src+"/readonly", 0o755))
	write(t, src+"/readonly/f", "")
	must(t, os.Chmod(src+"/readonly", 0o555))
	when := time.Unix(1234567890, 123456789)
	for _, name := range []string{"file", "empty", "readonly/f", "readonly", ""} {
		must(t, os.Chtimes(src+"/"+name, when, when))
	}

	var packed bytes.Buffer
	must(t, tarOf(src, &packed))
	var names []string
	for tr := tar.NewReader(bytes.NewReader(packed.Bytes())); ; {
		h, err := tr.Next()
		if err == io.EOF {
			break
		}
		must(t, err)
		names = append(names, h.Name)
		if h.Name == "src/file" && (h.PAXRecords["SCHILY.xattr.security.capability"] != string(caps) || h.Uid != 1234) {
			t.Errorf("file: %+v", h)
		}
	}
	want := []string{"src/", "src/absolute", "src/empty/", "src/file", "src/hard", "src/long", "src/" + strings.Repeat("n", 255), "src/readonly/", "src/readonly/f", "src/sticky/", "src/\xff odd"}
	if fmt.Sprint(names) != fmt.Sprint(want) {
		t.Errorf("the tar holds %q", names)
	}

	must(t, os.Mkdir(dir+"/dst", 0o755))
	must(t, os.Chown(dir+"/dst", int(nobody.uid), int(nobody.gid)))
	must(t, untar(dir+"/dst", nobody, bytes.NewReader(packed.Bytes())))
	dst := dir + "/dst/src"
	wantNames(t, dst, "absolute", "empty", "file", "hard", "long", strings.Repeat("n", 255), "readonly", "sticky", "\xff odd")
	stat := func(name string) (os.FileInfo, *syscall.Stat_t) {
		info, err := os.Lstat(dst + "/" + name)
		must(t, err)
		return info, info.Sys().(*syscall.Stat_t)
	}
	for name, mode := range map[string]os.FileMode{"": os.ModeDir | 0o755, "file": os.ModeSetuid | 0o755, "readonly": os.ModeDir | 0o555, "sticky": os.ModeDir | os.ModeSticky | 0o777, "long": os.ModeSymlink | 0o777} {
		if info, st := stat(name); info.Mode() != mode || st.Uid != nobody.uid || st.Gid != nobody.gid {
			t.Errorf("%q: %v of %d:%d, want %v of nobody", name, info.Mode(), st.Uid, st.Gid, mode)
		}
	}
	for _, name := range []string{"file", "empty", "readonly/f", "readonly", ""} {
		if info, _ := stat(name); !info.ModTime().Equal(when) {
			t.Errorf("%q: modified %v, want %v", name, info.ModTime(), when)
		}
	}
	file, _ := stat("file")
	if hard, st := stat("hard"); !os.SameFile(file, hard) || st.Nlink != 2 {
		t.Error("the hard link is gone")
	}
	wantFile(t, dst+"/hard", "contents")
	wantFile(t, dst+"/\xff odd", "odd")
	if link, err := os.Readlink(dst + "/long"); err != nil || len(link) != 4000 {
		t.Errorf("long link: %d bytes, %v", len(link), err)
	}
	value := make([]byte, 100)
	if n, err := unix.Getxattr(dst+"/file", "user.colour", value); err != nil || string(value[:n]) != "red\x00blue" {
		t.Errorf("user.colour: %q, %v", value[:max(n, 0)], err)
	}
	if _, err := unix.Getxattr(dst+"/file", "security.capability", value); err != unix.ENODATA {
		t.Errorf("a file capability came with the tar: %v", err)
	}

	// A tar that is cut anywhere is refused.
	again := func(r io.Reader) error {
		must(t, os.RemoveAll(dst))
		return untar(dir+"/dst", nobody, r)
	}
	for _, n := range []int{0, 100, 512, packed.Len() / 2, packed.Len() - 1025, packed.Len() - 1024, packed.Len() - 512, packed.Len() - 1} {
		err := again(bytes.NewReader(packed.Bytes()[:n]))
		wantCode(t, fmt.Sprintf("cut at %d of %d", n, packed.Len()), err, shard.CodeInvalidRequest, "cut")
	}
	err := again(io.MultiReader(bytes.NewReader(packed.Bytes()[:1000]), iotest.ErrReader(errGone)))
	if err != errGone {
		t.Errorf("a stream that ends: %v", err)
	}
	must(t, again(io.MultiReader(bytes.NewReader(packed.Bytes()), bytes.NewReader(make([]byte, 10240)))))
	wantCode(t, "two tars", again(io.MultiReader(bytes.NewReader(packed.Bytes()), bytes.NewReader(packed.Bytes()))), shard.CodeInvalidRequest, "follows")
}

func TestTarOfOneThing(t *testing.T) {
	dir := guestDir(t)
	must(t, os.Mkdir(dir+"/d", 0o755))
	write(t, dir+"/d/f", "x")
	must(t, os.Symlink("d", dir+"/l"))
	for path, want := range map[string]string{"/d/f": "[f]", "/l": "[l]", "/l/": "[l/ l/f]", "/d/": "[d/ d/f]"} {
		var out bytes.Buffer
		must(t, tarOf(dir+path, &out))
		var names []string
		for tr := tar.NewReader(&out); ; {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			must(t, err)
			names = append(names, h.Name)
		}
		if fmt.Sprint(names) != want {
			t.Errorf("%s: %v, want %s", path, names, want)
		}
	}
	wantCode(t, "missing", tarOf(dir+"/none", io.Discard), shard.CodeNotFound, "none")
	wantCode(t, "/", tarOf("/", io.Discard), shard.CodeInvalidRequest, "archived")
}

// shrinking truncates a file when its header has been written.
type shrinking struct {
	bytes.Buffer
	path string
}

func (s *shrinking) Write(p []byte) (int, error) {
	_ = os.Truncate(s.path, 10)
	return s.Buffer.Write(p)
}

func TestShrinkingFileCutsTheTar(t *testing.T) {
	dir := guestDir(t)
	must(t, os.Mkdir(dir+"/d", 0o755))
	write(t, dir+"/d/f", strings.Repeat("x", 4<<20))
	out := &shrinking{path: dir + "/d/f"}
	wantCode(t, "tar", tarOf(dir+"/d", out), shard.CodeInvalidRequest, "shorter")
	wantCode(t, "untar", untar(dir+"/x", rootCreds, &out.Buffer), shard.CodeInvalidRequest, "cut")
}

func TestUntarRefusals(t *testing.T) {
	dir := guestDir(t)
	write(t, dir+"/canary", "c")
	must(t, os.Mkdir(dir+"/out", 0o777))
	for name, c := range map[string]struct {
		entries []tar.Header
		text    string
	}{
		"absolute":             {[]tar.Header{reg("/abs", "")}, "absolute"},
		"climbs":               {[]tar.Header{reg("a/../../x", "")}, `".."`},
		"dots":                 {[]tar.Header{reg("a/..", "")}, `".."`},
		"under a climbing":     {[]tar.Header{symlink("l", "../out"), reg("l/x", "")}, "leads out"},
		"under an absolute":    {[]tar.Header{symlink("l", dir+"/out"), reg("l/x", "")}, "leads out"},
		"under a chain":        {[]tar.Header{dirEntry("a/b"), symlink("a/b/up", "../.."), symlink("l", "a/b/up/.."), reg("l/out/x", "")}, "leads out"},
		"directory at a link":  {[]tar.Header{symlink("l", "../out"), dirEntry("l")}, "leads out"},
		"loop":                 {[]tar.Header{symlink("l", "l"), reg("l/x", "")}, "loop"},
		"hard link out":        {[]tar.Header{hardlink("h", "../canary")}, `".."`},
		"hard link absolute":   {[]tar.Header{hardlink("h", dir+"/canary")}, "absolute"},
		"hard link not in tar": {[]tar.Header{hardlink("h", "there")}, "no file of this tar"},
		"hard link to dir":     {[]tar.Header{dirEntry("d"), hardlink("h", "d")}, "no file of this tar"},
		"hard link to link":    {[]tar.Header{reg("f", ""), symlink("f", "../canary"), hardlink("h", "f")}, "no file of this tar"},
		"device":               {[]tar.Header{{Typeflag: tar.TypeChar, Name: "null", Devmajor: 1, Devminor: 3}}, "device"},
		"block device":         {[]tar.Header{{Typeflag: tar.TypeBlock, Name: "sda"}}, "device"},
		"fifo":                 {[]tar.Header{{Typeflag: tar.TypeFifo, Name: "p"}}, "fifo"},
		"file over dir":        {[]tar.Header{dirEntry("d"), reg("d", "")}, "is a directory"},
		"dir over file":        {[]tar.Header{reg("f", ""), dirEntry("f")}, "a file of that name"},
		"below a file":         {[]tar.Header{reg("f", ""), reg("f/x", "")}, "not a directory"},
		"the top as a file":    {[]tar.Header{reg(".", "")}, "not a directory"},
	} {
		target := dir + "/target"
		for _, c2 := range []creds{rootCreds, nobody} {
			must(t, os.Mkdir(target, 0o777))
			must(t, os.Chmod(target, 0o777))
			write(t, target+"/there", "")
			err := untar(target, c2, bytes.NewReader(makeTar(t, c.entries...)))
			wantCode(t, name, err, shard.CodeInvalidRequest, c.text)
			if err != nil && !strings.Contains(err.Error(), "entry") {
				t.Errorf("%s: the entry is not named: %v", name, err)
			}
			must(t, os.RemoveAll(target))
		}
		wantNames(t, dir+"/out")
		wantFile(t, dir+"/canary", "c")
	}
}

func TestUntarIntoWhatIsThere(t *testing.T) {
	dir := guestDir(t)
	must(t, os.MkdirAll(dir+"/kept/real", 0o750))
	must(t, os.Symlink("real", dir+"/kept/link"))
	must(t, os.Symlink("../kept/real", dir+"/kept/over"))
	write(t, dir+"/kept/real/f", "old")
	must(t, untar(dir+"/kept", rootCreds, bytes.NewReader(makeTar(t, dirEntry("./"), dirEntry("link"), reg("link/f", "new"), reg("implied/deep/g", ""), dirEntry("implied")))))
	wantFile(t, dir+"/kept/real/f", "new")
	for name, mode := range map[string]os.FileMode{"": 0o750, "real": 0o750, "implied": 0o755, "implied/deep": 0o755} {
		if info, err := os.Stat(dir + "/kept/" + name); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%q: %v, %v", name, info.Mode(), err)
		}
	}
	wantCode(t, "over", untar(dir+"/kept", rootCreds, bytes.NewReader(makeTar(t, reg("over/f", "")))), shard.CodeInvalidRequest, "leads out")
	must(t, untar(dir+"/made", rootCreds, bytes.NewReader(makeTar(t, tar.Header{Typeflag: tar.TypeDir, Name: ".", Mode: 0o700}, reg("f", "x")))))
	if info, err := os.Stat(dir + "/made"); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("made: %v", err)
	}
	wantCode(t, "missing parent", untar(dir+"/no/where", rootCreds, bytes.NewReader(makeTar(t))), shard.CodeNotFound, "")
	wantCode(t, "a file", untar(dir+"/made/f", rootCreds, bytes.NewReader(makeTar(t))), shard.CodeInvalidRequest, "not a directory")
	wantCode(t, "no rights", untar(dir+"/made", nobody, bytes.NewReader(makeTar(t, reg("g", "")))), shard.CodeInvalidRequest, "permission denied")
	wantCode(t, "no tar", untar(dir+"/made", rootCreds, strings.NewReader(strings.Repeat("x", 2000))), shard.CodeInvalidRequest, "not a tar")
}

// TestSparse packs and unpacks a file of 9 GiB of which one MiB is not a hole.
func TestSparse(t *testing.T) { // case 30
	dir := guestDir(t)
	const size, data = 9 << 30, 1 << 20
	must(t, os.Mkdir(dir+"/s", 0o755))
	f, err := os.Create(dir + "/s/big")
	must(t, err)
	tail := bytes.Repeat([]byte("tail"), data/4)
	must(t, f.Truncate(size))
	_, err = f.WriteAt(tail, size-data)
	must(t, err)
	must(t, f.Close())

	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	r, w := io.Pipe()
	go func() { w.CloseWithError(tarOf(dir+"/s", w)) }()
	must(t, untar(dir+"/d", rootCreds, r))
	runtime.ReadMemStats(&after)
	if grew := after.TotalAlloc - before.TotalAlloc; grew > 64<<20 {
		t.Errorf("%d MiB were allocated for it", grew>>20)
	}
	got, err := os.Open(dir + "/d/s/big")
	must(t, err)
	defer got.Close()
	info, err := got.Stat()
	must(t, err)
	end := make([]byte, data)
	if _, err := got.ReadAt(end, size-data); err != nil || !bytes.Equal(end, tail) || info.Size() != size {
		t.Errorf("%d bytes, %v", info.Size(), err)
	}
	origin, err := os.Stat(dir + "/s/big")
	must(t, err)
	if on, was := info.Sys().(*syscall.Stat_t).Blocks*512, origin.Sys().(*syscall.Stat_t).Blocks*512; on > was+16<<20 { // gVisor counts holes
		t.Errorf("%d MiB on the disk, %d before", on>>20, was>>20)
	}
}

// TestUntarAgainstSwaps lets a guest exchange a directory of the target for a link to a canary meanwhile.
func TestUntarAgainstSwaps(t *testing.T) {
	dir := guestDir(t)
	canary := dir + "/canary"
	must(t, os.Mkdir(canary, 0o755))
	must(t, os.MkdirAll(dir+"/t/a/b", 0o755))
	must(t, os.Symlink(canary, dir+"/swap"))
	packed := makeTar(t, dirEntry("a"), dirEntry("a/b"), reg("a/b/f", "x"), reg("a/f", "y"), hardlink("a/b/h", "a/f"), symlink("a/b/s", "f"), reg("a/b/c/d/f", "z"))
	var stop atomic.Bool
	var wg sync.WaitGroup
	wg.Go(func() {
		for !stop.Load() {
			for _, d := range []string{"/t/a", "/t/a/b", "/t/a/b/c"} {
				_ = unix.Renameat2(unix.AT_FDCWD, dir+"/swap", unix.AT_FDCWD, dir+d, unix.RENAME_EXCHANGE)
				_ = unix.Renameat2(unix.AT_FDCWD, dir+"/swap", unix.AT_FDCWD, dir+d, unix.RENAME_EXCHANGE)
			}
		}
	})
	for range 600 {
		_ = untar(dir+"/t", rootCreds, bytes.NewReader(packed))
	}
	stop.Store(true)
	wg.Wait()
	wantNames(t, canary)
}

// checkOutside untars into dir/t, where a canary and a link to it stand, and fails when anything outside changed.
func checkOutside(t rapid.TB, dir string, packed []byte) {
	target := filepath.Join(dir, "t")
	_ = os.RemoveAll(target)
	_ = os.Mkdir(target, 0o755)
	_ = os.WriteFile(dir+"/c/f", []byte("c"), 0o644)
	before, _ := os.Stat(dir + "/c")
	_ = os.Symlink("../c", target+"/b")
	_ = untar(target, rootCreds, bytes.NewReader(packed))
	after, err := os.Stat(dir + "/c")
	body, err2 := os.ReadFile(dir + "/c/f")
	st, err3 := os.Stat(dir + "/c/f")
	names, err4 := os.ReadDir(dir)
	if err != nil || err2 != nil || err3 != nil || err4 != nil || string(body) != "c" || len(names) != 2 ||
		!after.ModTime().Equal(before.ModTime()) || st.Mode() != 0o644 || st.Sys().(*syscall.Stat_t).Nlink != 1 {
		t.Fatalf("something outside changed: %v %v %v %v %q %v", err, err2, err3, err4, body, names)
	}
}

// TestUntarStaysInside tries tars of a few names that are links, directories and files of each other.
func TestUntarStaysInside(t *testing.T) {
	dir := guestDir(t)
	must(t, os.Mkdir(dir+"/c", 0o755))
	name := rapid.Map(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "f", "..", ".", ""}), 1, 4), func(parts []string) string { return strings.Join(parts, "/") })
	rapid.Check(t, func(rt *rapid.T) {
		var out bytes.Buffer
		tw := tar.NewWriter(&out)
		for range rapid.IntRange(1, 8).Draw(rt, "entries") {
			h := &tar.Header{Typeflag: rapid.SampledFrom([]byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink}).Draw(rt, "type"),
				Name: name.Draw(rt, "name"), Mode: 0o777}
			if h.Typeflag == tar.TypeSymlink || h.Typeflag == tar.TypeLink {
				h.Linkname = name.Draw(rt, "link")
				if rapid.IntRange(0, 9).Draw(rt, "absolute") == 0 {
					h.Linkname = dir + "/c"
				}
			}
			_ = tw.WriteHeader(h)
		}
		_ = tw.Close()
		checkOutside(rt, dir, out.Bytes())
	})
}

func FuzzUntar(f *testing.F) {
	dir := guestDir(f)
	must(f, os.Mkdir(dir+"/c", 0o755))
	f.Add(makeTar(f, reg("a", "x"), symlink("l", "../c"), reg("l/f", "")))
	f.Add(makeTar(f, dirEntry("d"), reg("d/f", "x"), hardlink("d/h", "d/f"), reg("b/f", "y")))
	f.Add(makeTar(f, tar.Header{Typeflag: tar.TypeReg, Name: strings.Repeat("n/", 200) + "f", Format: tar.FormatPAX, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "b"}}))
	f.Fuzz(func(t *testing.T, packed []byte) {
		if len(packed) < 1<<20 {
			checkOutside(t, dir, packed)
		}
	})
}

func benchTree(b *testing.B, files, size int) string {
	dir := guestDir(b)
	body := make([]byte, size)
	for i := range body {
		body[i] = byte(rand.Uint32())
	}
	for i := range files {
		sub := fmt.Sprintf("%s/s/%d", dir, i/100)
		must(b, os.MkdirAll(sub, 0o755))
		must(b, os.WriteFile(fmt.Sprintf("%s/%d", sub, i), body, 0o644))
	}
	b.SetBytes(int64(files * size))
	return dir
}

func BenchmarkTar(b *testing.B) {
	dir := benchTree(b, 4, 50<<20)
	for b.Loop() {
		must(b, tarOf(dir+"/s", io.Discard))
	}
}

func BenchmarkUntar(b *testing.B) {
	for _, c := range []struct {
		name        string
		files, size int
		creds       creds
	}{{"large", 4, 50 << 20, rootCreds}, {"small", 5000, 1000, rootCreds}, {"small-nobody", 5000, 1000, nobody}} {
		b.Run(c.name, func(b *testing.B) {
			dir := benchTree(b, c.files, c.size)
			var packed bytes.Buffer
			must(b, tarOf(dir+"/s", &packed))
			must(b, os.Chmod(dir, 0o777))
			must(b, os.RemoveAll(dir+"/s"))
			for b.Loop() {
				must(b, untar(dir, c.creds, chunks{bytes.NewReader(packed.Bytes())}))
				b.StopTimer()
				must(b, os.RemoveAll(dir+"/s"))
				b.StartTimer()
			}
		})
	}
}

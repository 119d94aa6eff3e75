package hostfs

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func write(t testing.TB, path, body string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(body), 0o644))
}

func wantFile(t testing.TB, path, body string) {
	t.Helper()
	if got, err := os.ReadFile(path); err != nil || string(got) != body {
		t.Errorf("%s: %q, %v; want %q", path, got, err, body)
	}
}

func wantNames(t testing.TB, dir string, want ...string) {
	t.Helper()
	entries, err := os.ReadDir(dir)
	must(t, err)
	var names []string
	for _, e := range entries {
		names = append(names, e.Name())
	}
	if fmt.Sprintf("%q", names) != fmt.Sprintf("%q", want) {
		t.Errorf("%s holds %q, want %q", dir, names, want)
	}
}

// entry is one member of a tar that a test makes; to is a file's contents or a link's target.
type entry struct {
	kind     byte
	name, to string
	mode     int64
}

func makeTar(t testing.TB, entries ...entry) []byte {
	t.Helper()
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, e := range entries {
		h := &tar.Header{Typeflag: e.kind, Name: e.name, Mode: e.mode, Uid: 4321, Gid: 4321}
		if h.Mode == 0 {
			h.Mode = 0o755
		}
		if e.kind == tar.TypeReg {
			h.Size = int64(len(e.to))
		} else {
			h.Linkname = e.to
		}
		must(t, tw.WriteHeader(h))
		if e.kind == tar.TypeReg {
			_, err := io.WriteString(tw, e.to)
			must(t, err)
		}
	}
	must(t, tw.Close())
	return out.Bytes()
}

func TestRoundTrip(t *testing.T) { // case 29
	dir := t.TempDir()
	src, dst := dir+"/src", dir+"/dst"
	must(t, os.MkdirAll(src+"/empty", 0o755))
	must(t, os.MkdirAll(src+"/readonly", 0o755))
	must(t, os.MkdirAll(src+"/sticky", 0o755))
	must(t, os.Chmod(src+"/sticky", fs.ModeSticky|0o777))
	must(t, os.Mkdir(dst, 0o755))
	write(t, src+"/file", "contents")
	must(t, os.Chmod(src+"/file", fs.ModeSetuid|0o755))
	must(t, os.Link(src+"/file", src+"/hard"))
	must(t, os.Symlink("file", src+"/link"))
	must(t, os.Symlink("nowhere", src+"/readonly/dangling"))
	write(t, src+"/\xff odd\n", "odd")
	write(t, src+"/"+strings.Repeat("n", 255), "")
	must(t, syscall.Mkfifo(src+"/fifo", 0o644))
	must(t, os.Chmod(src+"/readonly", 0o555))
	t.Cleanup(func() { _ = os.Chmod(src+"/readonly", 0o755); _ = os.Chmod(dst+"/new/readonly", 0o755) })
	when := time.Unix(1234567890, 123456789)
	must(t, os.Chtimes(src+"/file", when, when))
	must(t, os.Chtimes(src+"/empty", when, when))

	var packed bytes.Buffer
	var skipped []string
	must(t, Pack(t.Context(), &packed, src, "top", PackOptions{Skipped: func(name, _ string) { skipped = append(skipped, name) }}))
	if fmt.Sprint(skipped) != "[top/fifo]" {
		t.Errorf("skipped: %q", skipped)
	}
	must(t, Unpack(t.Context(), bytes.NewReader(packed.Bytes()), dst, UnpackOptions{Name: "new"}))
	wantNames(t, dst, "new")
	wantNames(t, dst+"/new", "empty", "file", "hard", "link", strings.Repeat("n", 255), "readonly", "sticky", "\xff odd\n")
	for name, mode := range map[string]fs.FileMode{"file": 0o755, "readonly": fs.ModeDir | 0o555, "sticky": fs.ModeDir | fs.ModeSticky | 0o777} {
		if info, err := os.Stat(dst + "/new/" + name); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v; want %v", name, info.Mode(), err, mode)
		}
	}
	file, err := os.Stat(dst + "/new/file")
	must(t, err)
	if hard, err := os.Stat(dst + "/new/hard"); err != nil || !os.SameFile(file, hard) || !file.ModTime().Equal(when) {
		t.Errorf("hard: %v; modified %v", err, file.ModTime())
	}
	if info, err := os.Stat(dst + "/new/empty"); err != nil || !info.ModTime().Equal(when) {
		t.Errorf("empty: %v", err)
	}
	wantFile(t, dst+"/new/link", "contents")
	wantFile(t, dst+"/new/\xff odd\n", "odd")
	for _, n := range []int{0, 511, 512, packed.Len() / 2, packed.Len() - 1024, packed.Len() - 1} {
		cut := t.TempDir()
		if err := Unpack(t.Context(), bytes.NewReader(packed.Bytes()[:n]), cut, UnpackOptions{}); shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), "cut") {
			t.Errorf("cut at %d: %v", n, err)
		}
		_ = os.Chmod(cut+"/top/readonly", 0o755)
	}

	// Contents alone, and one file.
	packed.Reset()
	must(t, Pack(t.Context(), &packed, src, ".", PackOptions{}))
	must(t, os.Mkdir(dir+"/inside", 0o700))
	must(t, Unpack(t.Context(), &packed, dir+"/inside", UnpackOptions{Name: "."}))
	wantFile(t, dir+"/inside/file", "contents")
	if info, err := os.Stat(dir + "/inside"); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("the target's mode changed: %v, %v", info.Mode(), err)
	}
	t.Cleanup(func() { _ = os.Chmod(dir+"/inside/readonly", 0o755) })
	packed.Reset()
	must(t, Pack(t.Context(), &packed, src+"/file", "one", PackOptions{}))
	must(t, Unpack(t.Context(), &packed, dst, UnpackOptions{Name: "two"}))
	wantFile(t, dst+"/two", "contents")
}

func TestUnpackRefusals(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/canary", "c")
	must(t, os.Mkdir(dir+"/out", 0o755))
	const r, d, s, h = tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeLink
	for name, c := range map[string]struct {
		entries []entry
		opts    UnpackOptions
		text    string
	}{
		"absolute":            {entries: []entry{{r, "/abs", "", 0}}, text: "absolute"},
		"climbs":              {entries: []entry{{r, "a/../../x", "", 0}}, text: `".."`},
		"absolute link":       {entries: []entry{{s, "l", dir + "/out", 0}}, text: "absolute"},
		"climbing link":       {entries: []entry{{s, "l", "../out", 0}}, text: "outside"},
		"deep climbing link":  {entries: []entry{{s, "a/b/l", "../../../out", 0}}, text: "outside"},
		"chain":               {entries: []entry{{s, "a/b/up", "../..", 0}, {s, "l", "a/b/up/..", 0}}, text: "leads out"},
		"chain, other order":  {entries: []entry{{s, "l", "a/b/up/../out", 0}, {s, "a/b/up", "../..", 0}}, text: "leads out"},
		"through a chain":     {entries: []entry{{s, "a/b/up", "../..", 0}, {s, "l", "a/b/up/../out", 0}, {r, "l/x", "", 0}}, text: "leads out"},
		"chain in a cut tar":  {entries: []entry{{s, "a/b/up", "../..", 0}, {s, "l", "a/b/up/..", 0}, {r, "/x", "", 0}}, text: "leads out"},
		"under a link there":  {entries: []entry{{r, "there/x", "", 0}}, text: "leads out"},
		"hard link out":       {entries: []entry{{h, "h", "../canary", 0}}, text: `".."`},
		"hard link there":     {entries: []entry{{h, "h", "old", 0}}, text: "no file of this tar"},
		"hard link by a link": {entries: []entry{{h, "h", "there/../canary", 0}}, text: `".."`},
		"device":              {entries: []entry{{tar.TypeChar, "n", "", 0}}, text: "device"},
		"fifo":                {entries: []entry{{tar.TypeFifo, "p", "", 0}}, text: "fifo"},
		"dir over file":       {entries: []entry{{d, "old", "", 0}}, text: "directory"},
		"another tree":        {entries: []entry{{d, "a", "", 0}, {r, "b", "", 0}}, opts: UnpackOptions{Name: "x"}, text: "not in the tree"},
		"a file as contents":  {entries: []entry{{r, "a", "", 0}}, opts: UnpackOptions{Name: "."}, text: "not a directory"},
		"link as contents":    {entries: []entry{{d, "a", "", 0}, {s, "a/l", "../a", 0}}, opts: UnpackOptions{Name: "."}, text: "outside"},
	} {
		target := t.TempDir()
		write(t, target+"/old", "old")
		must(t, os.Symlink(dir+"/out", target+"/there"))
		err := Unpack(t.Context(), bytes.NewReader(makeTar(t, c.entries...)), target, c.opts)
		if shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), c.text) || !strings.Contains(err.Error(), "entry") {
			t.Errorf("%s: %v, want %q", name, err, c.text)
		}
		wantNames(t, dir+"/out")
		wantFile(t, dir+"/canary", "c")
		checkInside(t, target, "there")
	}
}

// checkInside fails when a link below dir, other than skip, leads out of it.
func checkInside(t rapid.TB, dir, skip string) {
	real, err := filepath.EvalSymlinks(dir)
	if err != nil {
		t.Fatal(err)
	}
	_ = filepath.WalkDir(real, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type() == fs.ModeSymlink && d.Name() != skip {
			if to, err := filepath.EvalSymlinks(path); err == nil && to != real && !strings.HasPrefix(to, real+"/") {
				t.Fatalf("%s leads to %s", path, to)
			}
		}
		return nil
	})
}

func TestUnpackBounds(t *testing.T) {
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	must(t, tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "big", Size: MaxBytes + 1, Mode: 0o644}))
	if err := Unpack(t.Context(), &out, t.TempDir(), UnpackOptions{}); shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), "64 GiB") {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Unpack(ctx, bytes.NewReader(makeTar(t, entry{tar.TypeReg, "f", "x", 0})), t.TempDir(), UnpackOptions{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	full := errors.New("full")
	r := io.MultiReader(bytes.NewReader(makeTar(t, entry{tar.TypeReg, "f", "x", 0})[:512]), errReader{full})
	dir := t.TempDir()
	if err := Unpack(t.Context(), r, dir, UnpackOptions{}); !errors.Is(err, full) {
		t.Error(err)
	}
	wantNames(t, dir)
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func TestUnpackOwner(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	dir := t.TempDir()
	packed := makeTar(t, entry{tar.TypeReg, "a/f", "x", 0o4755}, entry{tar.TypeSymlink, "a/l", "f", 0}, entry{tar.TypeDir, "a/d", "", 0})
	must(t, Unpack(t.Context(), bytes.NewReader(packed), dir, UnpackOptions{Owner: &Owner{1234, 1235}}))
	for _, name := range []string{"a", "a/f", "a/l", "a/d"} {
		info, err := os.Lstat(dir + "/" + name)
		must(t, err)
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 1234 || st.Gid != 1235 || info.Mode()&fs.ModeSetuid != 0 {
			t.Errorf("%s: %v of %d:%d", name, info.Mode(), st.Uid, st.Gid)
		}
	}
}

func TestPackShrinking(t *testing.T) {
	path := t.TempDir() + "/f"
	write(t, path, strings.Repeat("x", 1<<20))
	var out bytes.Buffer
	err := Pack(t.Context(), writerFunc(func(p []byte) (int, error) {
		_ = os.Truncate(path, 10)
		return out.Write(p)
	}), path, "f", PackOptions{})
	if err == nil || !strings.Contains(err.Error(), "shrank") {
		t.Fatal(err)
	}
	if err := Unpack(t.Context(), &out, t.TempDir(), UnpackOptions{}); err == nil || !strings.Contains(err.Error(), "cut") {
		t.Error(err)
	}
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(p []byte) (int, error) { return f(p) }

// TestSparse moves a file of 9 GiB of which one MiB is not a hole.
func TestSparse(t *testing.T) { // case 30
	dir := t.TempDir()
	const size, data = 9 << 30, 1 << 20
	f, err := os.Create(dir + "/big")
	must(t, err)
	must(t, f.Truncate(size))
	tail := bytes.Repeat([]byte("tail"), data/4)
	_, err = f.WriteAt(tail, size-data)
	must(t, err)
	must(t, f.Close())
	r, w := io.Pipe()
	go func() { w.CloseWithError(Pack(t.Context(), w, dir+"/big", "big", PackOptions{})) }()
	must(t, Unpack(t.Context(), r, dir, UnpackOptions{Name: "copy"}))
	got, err := os.Open(dir + "/copy")
	must(t, err)
	defer got.Close()
	info, _ := got.Stat()
	end := make([]byte, data)
	if _, err := got.ReadAt(end, size-data); err != nil || !bytes.Equal(end, tail) || info.Size() != size {
		t.Errorf("%d bytes, %v", info.Size(), err)
	}
}

// unpackBesideCanary unpacks into dir/t, where a link to a canary stands, and fails when anything outside changed or a
// link leads out.
func unpackBesideCanary(t rapid.TB, dir string, packed []byte, opts UnpackOptions) {
	target := dir + "/t"
	_ = filepath.WalkDir(target, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			_ = os.Chmod(path, 0o700)
		}
		return nil
	})
	_ = os.RemoveAll(target)
	_ = os.Mkdir(target, 0o755)
	_ = os.WriteFile(dir+"/c/f", []byte("c"), 0o644)
	_ = os.Symlink("../c", target+"/b")
	before, _ := os.Stat(dir + "/c")
	_ = Unpack(context.Background(), bytes.NewReader(packed), target, opts)
	after, err := os.Stat(dir + "/c")
	body, err2 := os.ReadFile(dir + "/c/f")
	st, err3 := os.Stat(dir + "/c/f")
	names, err4 := os.ReadDir(dir)
	if err != nil || err2 != nil || err3 != nil || err4 != nil || string(body) != "c" || len(names) != 2 ||
		!after.ModTime().Equal(before.ModTime()) || st.Mode() != 0o644 || st.Sys().(*syscall.Stat_t).Nlink != 1 {
		t.Fatalf("something outside changed: %v %v %v %v %q %v", err, err2, err3, err4, body, names)
	}
	if link, err := os.Readlink(target + "/b"); err == nil && link == "../c" {
		checkInside(t, target, "b")
	} else {
		checkInside(t, target, "")
	}
}

// TestUnpackStaysInside tries tars of a few names that are links, directories and files of each other.
func TestUnpackStaysInside(t *testing.T) {
	dir := t.TempDir()
	must(t, os.Mkdir(dir+"/c", 0o755))
	part := rapid.SampledFrom([]string{"a", "b", "d", "f"})
	name := rapid.Map(rapid.SliceOfN(part, 1, 4), func(parts []string) string { return strings.Join(parts, "/") })
	to := rapid.Map(rapid.SliceOfN(rapid.SampledFrom([]string{"a", "b", "d", "f", "..", "..", "."}), 1, 5), func(parts []string) string { return strings.Join(parts, "/") })
	rapid.Check(t, func(rt *rapid.T) {
		var out bytes.Buffer
		tw := tar.NewWriter(&out)
		for range rapid.IntRange(1, 10).Draw(rt, "entries") {
			h := &tar.Header{Typeflag: rapid.SampledFrom([]byte{tar.TypeReg, tar.TypeDir, tar.TypeSymlink, tar.TypeSymlink, tar.TypeLink}).Draw(rt, "type"),
				Name: name.Draw(rt, "name"), Mode: 0o777}
			switch h.Typeflag {
			case tar.TypeSymlink:
				h.Linkname = to.Draw(rt, "to")
			case tar.TypeLink:
				h.Linkname = name.Draw(rt, "of")
			}
			_ = tw.WriteHeader(h)
		}
		_ = tw.Close()
		unpackBesideCanary(rt, dir, out.Bytes(), UnpackOptions{Name: rapid.SampledFrom([]string{"", "", ".", "new"}).Draw(rt, "as")})
	})
}

func FuzzUnpack(f *testing.F) {
	dir := f.TempDir()
	must(f, os.Mkdir(dir+"/c", 0o755))
	f.Add(makeTar(f, entry{tar.TypeReg, "a", "x", 0}, entry{tar.TypeSymlink, "l", "../c", 0}, entry{tar.TypeReg, "l/f", "", 0}))
	f.Add(makeTar(f, entry{tar.TypeDir, "d", "", 0}, entry{tar.TypeReg, "d/f", "x", 0}, entry{tar.TypeLink, "d/h", "d/f", 0}, entry{tar.TypeReg, "b/f", "y", 0}))
	f.Fuzz(func(t *testing.T, packed []byte) {
		if len(packed) < 1<<20 {
			unpackBesideCanary(t, dir, packed, UnpackOptions{})
		}
	})
}

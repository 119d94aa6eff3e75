package image

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
	"runtime"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"
	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

// unpackAll unpacks tars as the layers of one image, bottom first.
func unpackAll(t testing.TB, s *Store, tars ...[]byte) (*Image, error) {
	t.Helper()
	b := &build{s: s, f: newFlight(func() {}), fetch: func(context.Context, int, func(int64)) error { return nil }}
	var diffs []string
	for _, data := range tars {
		diffs = append(diffs, digestOf(data))
	}
	for i, chain := range chainIDs(diffs) {
		b.sources = append(b.sources, &layerSource{diffID: diffs[i], chain: chain, digest: diffs[i], size: int64(len(tars[i])),
			open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(tars[i])), nil }})
	}
	if err := b.run(context.Background()); err != nil {
		return nil, err
	}
	return s.publishImage(b.f, refRecord{Version: recordVersion, Reference: "x.test/x:1", Digest: digestOf([]byte(fmt.Sprint(diffs)))}, &v1.ConfigFile{}, b.sources)
}

func mustUnpack(t testing.TB, tars ...[]byte) string {
	t.Helper()
	img, err := unpackAll(t, newStore(t, nil), tars...)
	if err != nil {
		t.Fatal(err)
	}
	return mountLayers(t, img)
}

func names(t testing.TB, root string) string {
	t.Helper()
	var out []string
	for _, line := range tree(t, root) {
		name, _, _ := strings.Cut(line, " ")
		out = append(out, strings.Trim(name, `"`))
	}
	return strings.Join(out, " ")
}

// Case 40: the marker of an opaque directory before and after its siblings, and without an entry for the directory.
func TestOpaque(t *testing.T) {
	lower := tarOf(t, e{name: "a/"}, e{name: "a/b/"}, e{name: "a/b/foo", body: "x"}, e{name: "a/c"}, e{name: "keep"})
	for name, upper := range map[string][]byte{
		"marker first":        tarOf(t, e{name: "a/"}, e{name: "a/.wh..wh..opq"}, e{name: "a/new"}),
		"marker last":         tarOf(t, e{name: "a/"}, e{name: "a/new"}, e{name: "a/.wh..wh..opq"}),
		"no directory":        tarOf(t, e{name: "a/.wh..wh..opq"}, e{name: "a/new"}),
		"deleted then new":    tarOf(t, e{name: ".wh.a"}, e{name: "a/"}, e{name: "a/new"}),
		"new then deleted":    tarOf(t, e{name: "a/"}, e{name: "a/new"}, e{name: ".wh.a"}),
		"deleted and implied": tarOf(t, e{name: ".wh.a"}, e{name: "a/new"}),
		"with aufs records":   tarOf(t, e{name: ".wh..wh.plnk/"}, e{name: ".wh..wh.plnk/1.2"}, e{name: ".wh..wh.aufs"}, e{name: "a/.wh..wh..opq"}, e{name: "a/new"}),
	} {
		t.Run(name, func(t *testing.T) {
			if got := names(t, mustUnpack(t, lower, upper)); got != ". a a/new keep" {
				t.Errorf("got %s", got)
			}
		})
	}
}

func TestWhiteouts(t *testing.T) {
	lower := tarOf(t, e{name: "a"}, e{name: "b"}, e{name: "d/"}, e{name: "d/x"}, e{name: "d/y"}, e{name: "e/"}, e{name: "e/x"})
	upper := tarOf(t, e{name: ".wh.a"}, e{name: "b", body: "new"}, e{name: ".wh.b"}, e{name: "d/.wh.x"}, e{name: ".wh.e"}, e{name: ".wh.nothing"})
	top := tarOf(t, e{name: "e/"}, e{name: "e/z"})
	root := mustUnpack(t, lower, upper, top)
	if got := names(t, root); got != ". b d d/y e e/z" {
		t.Errorf("got %s", got)
	}
	if got := string(must(os.ReadFile(filepath.Join(root, "b")))); got != "new" {
		t.Errorf("a whiteout took a file of its own layer: %q", got)
	}
	for _, bad := range []string{".wh.", ".wh..", ".wh..."} {
		if _, err := unpackAll(t, newStore(t, nil), tarOf(t, e{name: "d/" + bad})); err == nil {
			t.Errorf("whiteout %q is taken", bad)
		}
	}
}

func TestAttributes(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("owners need root")
	}
	capability := "\x01\x00\x00\x02\x00\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"
	odd := "bad\xff\xfename\nnew\tline"
	long := strings.Repeat("n", 255)
	data := tarOf(t,
		e{name: "./", mode: 0o751, uid: 7, gid: 8},
		e{name: "suid", body: "x", mode: 0o6755, uid: 1234, gid: 4321},
		e{name: "sticky/", mode: 0o1777},
		e{name: "none", mode: 0o0001},
		e{name: "cap", body: "x", mode: 0o755, uid: 3, pax: map[string]string{"SCHILY.xattr.security.capability": capability, "SCHILY.xattr.user.k": "v\x01"}},
		e{name: "bad", pax: map[string]string{"SCHILY.xattr.trusted.overlay.metacopy": "", "SCHILY.xattr.security.selinux": "x", "SCHILY.xattr.user.overlay.opaque": "y"}},
		e{name: "hard", typ: tar.TypeLink, link: "suid"},
		e{name: "soft", typ: tar.TypeSymlink, link: "../../../../etc/passwd", uid: 5},
		e{name: "pipe", typ: tar.TypeFifo, mode: 0o622},
		e{name: "null", typ: tar.TypeChar}, e{name: "disk", typ: tar.TypeBlock},
		e{name: long + "/" + long + "/f", body: "deep"})
	// The writer of the standard library wants UTF-8 in PAX; a plain header takes any byte.
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	if err := w.WriteHeader(&tar.Header{Name: odd, Typeflag: tar.TypeReg, Mode: 0o644, Format: tar.FormatGNU, ModTime: time.Unix(1234567890, 0)}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	root := mustUnpack(t, data, buf.Bytes())
	stat := func(name string) *syscall.Stat_t {
		t.Helper()
		var st syscall.Stat_t
		if err := syscall.Lstat(filepath.Join(root, name), &st); err != nil {
			t.Fatal(err)
		}
		return &st
	}
	for name, want := range map[string]string{"suid": "106755 1234:4321", "sticky": "41777 0:0", "none": "100001 0:0", "cap": "100755 3:0",
		"soft": "120777 5:0", "pipe": "10622 0:0", "hard": "106755 1234:4321"} {
		st := stat(name)
		if got := fmt.Sprintf("%o %d:%d", st.Mode, st.Uid, st.Gid); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if a, b := stat("suid"), stat("hard"); a.Ino != b.Ino || a.Nlink != 2 {
		t.Error("the hard link is a copy")
	}
	if st := stat(odd); st.Mtim.Sec != 1234567890 {
		t.Errorf("time %v", st.Mtim)
	}
	for _, name := range []string{"null", "disk"} {
		if _, err := os.Lstat(filepath.Join(root, name)); err == nil {
			t.Errorf("device %s was made", name)
		}
	}
	xattr := func(name, key string) string {
		v := make([]byte, 256)
		n, err := unix.Lgetxattr(filepath.Join(root, name), key, v)
		if err != nil {
			return err.Error()
		}
		return string(v[:n])
	}
	if got := xattr("cap", "security.capability"); got != capability {
		t.Errorf("capability %q", got)
	}
	if got := xattr("cap", "user.k"); got != "v\x01" {
		t.Errorf("user attribute %q", got)
	}
	if string(must(os.ReadFile(filepath.Join(root, long, long, "f")))) != "deep" {
		t.Error("long names")
	}
}

// Attributes of what a layer only implies, and hard links to what it does not hold, come from the layers below.
func TestLeansOnLowerLayers(t *testing.T) {
	lower := tarOf(t, e{name: "./", mode: 0o750, uid: 9}, e{name: "tmp/", mode: 0o1777, uid: 5}, e{name: "opt/", mode: 0o700}, e{name: "opt/tool", body: "tool", mode: 0o4711, uid: 6},
		e{name: "opt/link", typ: tar.TypeSymlink, link: "tool"})
	upper := tarOf(t, e{name: "tmp/f"}, e{name: "opt/x/y"}, e{name: "t1", typ: tar.TypeLink, link: "opt/tool"}, e{name: "t2", typ: tar.TypeLink, link: "/opt/tool"},
		e{name: "t3", typ: tar.TypeLink, link: "t1"}, e{name: "l", typ: tar.TypeLink, link: "opt/link"})
	img, err := unpackAll(t, newStore(t, nil), lower, upper)
	if err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	for name, want := range map[string]string{".": "40750 9", "tmp": "41777 5", "opt": "40700 0", "opt/x": "40755 0", "t1": "104711 6", "t2": "104711 6", "t3": "104711 6"} {
		if err := syscall.Lstat(filepath.Join(img.Layers[0], name), &st); err != nil {
			t.Fatal(err)
		}
		if got := fmt.Sprintf("%o %d", st.Mode, st.Uid); got != want {
			t.Errorf("%s: %s, want %s", name, got, want)
		}
	}
	if st.Nlink != 3 && st.Mode&unix.S_IFREG != 0 {
		t.Errorf("the three links have %d names", st.Nlink)
	}
	if got, err := os.Readlink(filepath.Join(img.Layers[0], "l")); err != nil || got != "tool" {
		t.Errorf("link to a link: %q %v", got, err)
	}
	_, err = unpackAll(t, newStore(t, nil), lower, tarOf(t, e{name: ".wh.opt"}, e{name: "t", typ: tar.TypeLink, link: "nosuch"}))
	wantCode(t, err, shard.CodeInvalidRequest, "no such file")
}

// No link of a layer leads out of it.
func TestEscape(t *testing.T) {
	canaryDir := t.TempDir()
	canary := filepath.Join(canaryDir, "canary")
	if err := os.WriteFile(canary, []byte("untouched"), 0o640); err != nil {
		t.Fatal(err)
	}
	before := tree(t, canaryDir)
	up := strings.Repeat("../", 30)
	for name, entries := range map[string][]e{
		"dots":              {{name: up + canary[1:], body: "bad"}},
		"absolute":          {{name: canary, body: "bad"}},
		"absolute link":     {{name: "l", typ: tar.TypeSymlink, link: canaryDir}, {name: "l/canary", body: "bad"}},
		"relative link":     {{name: "l", typ: tar.TypeSymlink, link: up + canaryDir[1:]}, {name: "l/canary", body: "bad"}, {name: "l/new", body: "bad"}},
		"link as a file":    {{name: "l", typ: tar.TypeSymlink, link: canary}, {name: "l", body: "bad"}},
		"hard link":         {{name: "h", typ: tar.TypeLink, link: up + canary[1:]}},
		"hard link by link": {{name: "l", typ: tar.TypeSymlink, link: canaryDir}, {name: "h", typ: tar.TypeLink, link: "l/canary"}, {name: "h", body: "bad"}},
		"whiteout":          {{name: "l", typ: tar.TypeSymlink, link: canaryDir}, {name: "l/.wh.canary"}},
		"opaque":            {{name: "l", typ: tar.TypeSymlink, link: canaryDir}, {name: "l/.wh..wh..opq"}},
		"chmod by link":     {{name: "l", typ: tar.TypeSymlink, link: canaryDir}, {name: "l/", mode: 0o777, uid: 77}},
		"proc":              {{name: "l", typ: tar.TypeSymlink, link: "/proc/self/root"}, {name: "l" + canary, body: "bad"}},
		"chain":             {{name: "a", typ: tar.TypeSymlink, link: "b"}, {name: "b", typ: tar.TypeSymlink, link: up}, {name: "a" + canary, body: "bad"}},
		"loop":              {{name: "a", typ: tar.TypeSymlink, link: "b"}, {name: "b", typ: tar.TypeSymlink, link: "a"}, {name: "a/x", body: "bad"}},
		"in the middle":     {{name: "d/"}, {name: "d/x"}, {name: "d", typ: tar.TypeSymlink, link: canaryDir}, {name: "d/canary", body: "bad"}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := unpackAll(t, newStore(t, nil), tarOf(t, entries...)) // may fail or not
			t.Log(err)
			if diff := cmp.Diff(before, tree(t, canaryDir)); diff != "" {
				t.Errorf("the host was changed:\n%s", diff)
			}
			if got := string(must(os.ReadFile(canary))); got != "untouched" {
				t.Errorf("canary: %q", got)
			}
		})
	}
}

func TestSparse(t *testing.T) {
	// GNU sparse format 1.0 in PAX: 1 GiB with 4 KiB of data at its end, as tar -S makes it.
	const logical = 900 << 20
	sparseMap := fmt.Sprintf("1\n%d\n4096\n", logical-4096)
	body := sparseMap + strings.Repeat("\x00", 512-len(sparseMap)) + strings.Repeat("x", 4096)
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	// archive/tar does not write sparse files: the records go in under a private name and are renamed in the bytes.
	h := &tar.Header{Name: "GNUSparseFile.0/f", Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body)), Format: tar.FormatPAX, PAXRecords: map[string]string{
		"XXX.sparse.major": "1", "XXX.sparse.minor": "0", "XXX.sparse.name": "f", "XXX.sparse.realsize": fmt.Sprint(logical)}}
	if err := w.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(w, body)
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	data := bytes.ReplaceAll(buf.Bytes(), []byte("XXX.sparse"), []byte("GNU.sparse"))
	img, err := unpackAll(t, newStore(t, nil), data)
	if err != nil {
		t.Fatal(err)
	}
	var st syscall.Stat_t
	if err := syscall.Stat(filepath.Join(img.Layers[0], "f"), &st); err != nil {
		t.Fatal(err)
	}
	if st.Size != logical || st.Blocks > 1024 {
		t.Errorf("size %d, %d blocks", st.Size, st.Blocks)
	}
	// What a sparse file claims to be counts too, at once.
	bomb := bytes.ReplaceAll(data, []byte(fmt.Sprint(logical)), []byte("943718400"))
	bomb = bytes.ReplaceAll(bomb, []byte(fmt.Sprintf("realsize=%d", logical)), []byte("realsize=999999999"))
	s := newStore(t, nil)
	s.limits.base, s.limits.ratio = 1<<20, 10
	_, err = unpackAll(t, s, bomb)
	wantCode(t, err, shard.CodeInvalidRequest, "bomb")
}

// generated is an endless tar of empty files or one of zeros, compressed as it is read.
func compressed(t testing.TB, write func(w *tar.Writer) error) []byte {
	t.Helper()
	var buf bytes.Buffer
	z := must(zstd.NewWriter(&buf, zstd.WithEncoderLevel(zstd.SpeedFastest)))
	w := tar.NewWriter(z)
	if err := write(w); err != nil {
		t.Fatal(err)
	}
	_ = z.Close()
	return buf.Bytes()
}

// Case 45: little that becomes huge.
func TestBombs(t *testing.T) {
	zeros := compressed(t, func(w *tar.Writer) error {
		if err := w.WriteHeader(&tar.Header{Name: "zeros", Typeflag: tar.TypeReg, Size: 200 << 30, Mode: 0o644}); err != nil {
			return err
		}
		chunk := make([]byte, 1<<20)
		for range 64 { // the header promises 200 GiB, which is enough
			if _, err := w.Write(chunk); err != nil {
				return err
			}
		}
		return nil
	})
	files := compressed(t, func(w *tar.Writer) error {
		for i := range 60_000 {
			if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("d%d/f%d", i%100, i), Typeflag: tar.TypeReg, Mode: 0o644}); err != nil {
				return err
			}
		}
		return w.Close()
	})
	data := compressed(t, func(w *tar.Writer) error {
		body := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
		for i := range 64 {
			if err := w.WriteHeader(&tar.Header{Name: fmt.Sprintf("f%d", i), Typeflag: tar.TypeReg, Mode: 0o644, Size: int64(len(body))}); err != nil {
				return err
			}
			if _, err := w.Write(body); err != nil {
				return err
			}
		}
		return w.Close()
	})
	t.Logf("zeros %d bytes, files %d, data %d", len(zeros), len(files), len(data))
	r := newRegistry(t)
	for name, tc := range map[string]struct {
		packed []byte
		set    func(s *Store)
	}{
		"zeros":       {zeros, func(*Store) {}},
		"stream":      {data, func(s *Store) { s.limits.base, s.limits.ratio = 8<<20, 20 }},
		"files":       {files, func(s *Store) { s.limits.base, s.limits.ratio = 4<<20, 20 }},
		"of an image": {data, func(s *Store) { s.limits.image = 16 << 20; s.limits.base = 1 << 40 }},
	} {
		t.Run(name, func(t *testing.T) {
			s := newStore(t, r)
			tc.set(s)
			good := plainLayer(t, e{name: "good"})
			ref := r.push(t, "bomb/"+strings.ReplaceAll(name, " ", ""), "latest", makeImage(t, runtime.GOARCH, v1.Config{}, good, testLayer{[]byte("?"), tc.packed}))
			start := time.Now()
			_, err := s.Pull(context.Background(), ref, nil)
			wantCode(t, err, shard.CodeInvalidRequest, "decompression bomb", digestOf(tc.packed))
			t.Logf("refused after %v", time.Since(start))
			if got := leftovers(t, s, "tmp", "blobs", "layers", "manifests", "refs"); len(got) > 0 {
				t.Errorf("left over: %v", got)
			}
			if _, err := s.Import(context.Background(), bytes.NewReader(tc.packed), "b:1", ImportOptions{}, nil); shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Errorf("import: %v", err)
			}
			if got := leftovers(t, s, "tmp", "layers"); len(got) > 0 {
				t.Errorf("left over: %v", got)
			}
		})
	}
}

// A host whose disk is at its reserve refuses in words, and the disk is as before.
func TestDiskReserve(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("needs a mount")
	}
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64m"); err != nil {
		t.Skip("no tmpfs:", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, unix.MNT_DETACH) })
	r := newRegistry(t)
	s := openStore(t, dir, Options{Insecure: []string{r.host}})
	body := strings.Repeat("0123456789abcdef", 80<<16)
	_, err := s.Pull(context.Background(), r.push(t, "large", "latest", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "f", body: body}))), nil)
	wantCode(t, err, shard.CodeInternal, "disk is too full")
	_, err = s.Pull(context.Background(), r.push(t, "large", "packed", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "f", body: noise(70 << 20)}))), nil)
	wantCode(t, err, shard.CodeInternal, "disk is too full")
	_, err = s.Import(context.Background(), bytes.NewReader(tarOf(t, e{name: "f", body: noise(70 << 20)})), "a:1", ImportOptions{}, nil)
	wantCode(t, err, shard.CodeInternal, "disk is too full")
	if got := leftovers(t, s, "tmp", "blobs", "layers"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
}

// The outcome of our unpacker under overlayfs is what comes of laying the layers one over the other in one directory.
func TestLikeLaidOver(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("owners need root")
	}
	rapid.Check(t, func(rt *rapid.T) {
		paths := []string{"a", "b", "a/x", "a/y", "b/x", "a/x/1", "a/x/2", "b/x/1", "a/y/d/1"}
		dir := must(os.MkdirTemp(t.TempDir(), "case"))
		want := filepath.Join(dir, "want")
		if err := os.Mkdir(want, 0o755); err != nil {
			rt.Fatal(err)
		}
		isDir := map[string]bool{} // of all layers so far
		var tars [][]byte
		for range rapid.IntRange(1, 4).Draw(rt, "layers") {
			var es []e
			made := map[string]bool{}
			for _, p := range paths {
				parent := filepath.Dir(p)
				if parent != "." && !isDir[parent] {
					continue
				}
				if parent != "." && !made[parent] { // as tools do: a directory comes before what is in it
					continue
				}
				switch rapid.SampledFrom([]string{"none", "file", "dir", "dir", "opaque", "whiteout"}).Draw(rt, p) {
				case "file":
					es = append(es, e{name: p, body: rapid.StringN(0, 20, -1).Draw(rt, "body"), mode: 0o600 + int64(len(tars)), uid: len(tars)})
					delete(isDir, p)
				case "dir":
					es = append(es, e{name: p + "/", mode: 0o700 + int64(len(tars)), gid: 3})
					isDir[p], made[p] = true, true
				case "opaque":
					es = append(es, e{name: p + "/", mode: 0o755}, e{name: p + "/.wh..wh..opq"})
					isDir[p], made[p] = true, true
				case "whiteout":
					es = append(es, e{name: parent + "/.wh." + filepath.Base(p)})
					delete(isDir, p)
				}
			}
			tars = append(tars, tarOf(t, es...))
			if err := lay(want, es); err != nil {
				rt.Fatal(err)
			}
		}
		s := openStore(t, filepath.Join(dir, "store"), Options{})
		img, err := unpackAll(t, s, tars...)
		if err != nil {
			rt.Fatal(err)
		}
		if diff := cmp.Diff(tree(t, want)[1:], tree(t, mountLayers(t, img))[1:]); diff != "" {
			rt.Fatalf("laid over (-) and unpacked (+) differ:\n%s", diff)
		}
	})
}

// lay lays a layer over what is in dir, as the image specification says in the plainest words: a whiteout removes, an opaque one
// empties its directory, and what comes replaces what is there, but a directory a directory.
func lay(dir string, layer []e) error {
	for _, x := range layer {
		at := filepath.Join(dir, x.name)
		in, base := filepath.Split(at)
		var err error
		switch name, white := strings.CutPrefix(base, ".wh."); {
		case base == ".wh..wh..opq":
			inside, _ := filepath.Glob(in + "*")
			for _, p := range inside {
				err = errors.Join(err, os.RemoveAll(p))
			}
		case white:
			err = os.RemoveAll(in + name)
		case strings.HasSuffix(x.name, "/"):
			if st, e := os.Lstat(at); e == nil && !st.IsDir() {
				err = os.Remove(at)
			}
			err = errors.Join(err, os.MkdirAll(at, 0o700), os.Chown(at, x.uid, x.gid), os.Chmod(at, fs.FileMode(x.mode)))
		default:
			err = errors.Join(os.RemoveAll(at), os.WriteFile(at, []byte(x.body), 0o600), os.Chown(at, x.uid, x.gid), os.Chmod(at, fs.FileMode(x.mode)),
				os.Chtimes(at, time.Time{}, time.Unix(0, 0)))
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// Whatever bytes a layer has, unpacking them ends, stays inside and leaves nothing.
func FuzzUnpack(f *testing.F) {
	f.Add(tarOf(f, e{name: "a/"}, e{name: "a/.wh..wh..opq"}, e{name: "l", typ: tar.TypeSymlink, link: "/a"}, e{name: "l/f", body: "x"}))
	f.Add(tarOf(f, e{name: "h", typ: tar.TypeLink, link: "nosuch"}, e{name: ".wh.h"}, e{name: "h/x/y"}))
	f.Add(gz(f, tarOf(f, e{name: "../x", body: "y"})))
	f.Add([]byte{0x1f, 0x8b, 8})
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<20 {
			return
		}
		s := openStore(t, filepath.Join(t.TempDir(), "in"), Options{})
		s.limits = limits{base: 8 << 20, ratio: 1, perEntry: 4 << 10, image: 8 << 20}
		src := &layerSource{diffID: digestOf(data), chain: digestOf(data), size: int64(len(data)),
			open: func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil }}
		fresh, err := s.unpackLayer(context.Background(), src, &atomic.Int64{})
		if err == nil {
			if err := fresh.commit(nil); err != nil && shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Fatal(err)
			}
			fresh.discard()
		} else if shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Fatal(err)
		}
		if got := leftovers(t, s, "tmp"); len(got) > 0 {
			t.Fatal(got)
		}
	})
}

func TestRootOpaque(t *testing.T) {
	lower := tarOf(t, e{name: "low"}, e{name: "d/"}, e{name: "d/x"})
	if got := names(t, mustUnpack(t, lower, tarOf(t, e{name: ".wh..wh..opq"}, e{name: "d/"}, e{name: "d/y"}))); got != ". d d/y" {
		t.Errorf("got %s", got)
	}
}

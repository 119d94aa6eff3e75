package tarstream

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/useshards/shard"
)

func all(r io.Reader) (entries []*Entry, err error) {
	tr := NewReader(r)
	for {
		e, err := tr.Next()
		if err == io.EOF {
			return entries, nil
		}
		if err != nil {
			return entries, err
		}
		entries = append(entries, e)
	}
}

func TestEntries(t *testing.T) {
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	for _, h := range []*tar.Header{
		{Typeflag: tar.TypeXGlobalHeader, Name: "pax_global_header", PAXRecords: map[string]string{"comment": "x"}},
		{Typeflag: tar.TypeDir, Name: "./", Mode: 0o1777},
		{Typeflag: tar.TypeReg, Name: ".//a/./b", Mode: 0o104755, PAXRecords: map[string]string{"SCHILY.xattr.user.a": "1", "SCHILY.xattr.security.capability": "2", "SCHILY.xattr.trusted.x": "3"}},
		{Typeflag: tar.TypeSymlink, Name: "l", Linkname: "/../x/"},
		{Typeflag: tar.TypeLink, Name: "h", Linkname: "./a//b"},
		{Typeflag: tar.TypeReg, Name: "\xff", Format: tar.FormatPAX},
	} {
		if err := tw.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
	}
	if err := tw.Close(); err != nil {
		t.Fatal(err)
	}
	entries, err := all(iotest.OneByteReader(&out))
	if err != nil || len(entries) != 5 {
		t.Fatal(len(entries), err)
	}
	for i, want := range []Entry{{Name: ".", Kind: Dir, Mode: 0o1777}, {Name: "a/b", Kind: File, Mode: 0o4755}, {Name: "l", Kind: Symlink, Link: "/../x/"}, {Name: "h", Kind: Hardlink, Link: "a/b"}, {Name: "\xff", Kind: File}} {
		if e := entries[i]; e.Name != want.Name || e.Kind != want.Kind || e.Link != want.Link || e.Mode != want.Mode {
			t.Errorf("%+v, want %+v", e, want)
		}
	}
	if x := entries[1].Xattrs; len(x) != 1 || x["user.a"] != "1" {
		t.Errorf("attributes: %v", x)
	}
}

// TestHoles gives a few hundred bytes that claim to be files of terabytes.
func TestHoles(t *testing.T) {
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	h := &tar.Header{Typeflag: tar.TypeReg, Name: "GNUSparseFile.0/big", Size: 512, Format: tar.FormatPAX, Mode: 0o644}
	if err := tw.WriteHeader(h); err != nil {
		t.Fatal(err)
	}
	body := make([]byte, 512)
	copy(body, "1\n17592186044416\n0\n")
	_, _ = tw.Write(body)
	_ = tw.Close()
	// archive/tar writes no sparse records: put them into the PAX header of a tar that has one.
	packed := withPAX(out.Bytes(), map[string]string{"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.name": "big", "GNU.sparse.realsize": "17592186044416"})
	tr := NewReader(bytes.NewReader(packed))
	e, err := tr.Next()
	if err != nil || e.Size != 1<<44 || e.Name != "big" {
		t.Fatal(e, err)
	}
	tr.given = maxHoles - 1<<20 // the test need not take so long
	err = Copy(discard{}, tr, e.Size, make([]byte, 1<<20), nil)
	if shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), "holes") {
		t.Error(err)
	}
}

// withPAX puts an extended header before the first entry of a tar.
func withPAX(packed []byte, records map[string]string) []byte {
	var body strings.Builder
	for k, v := range records {
		rest := " " + k + "=" + v + "\n"
		n := len(rest) + 2
		if n > 99 {
			n++
		}
		body.WriteString(strconv.Itoa(n) + rest)
	}
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "x", Size: int64(body.Len()), Mode: 0o644, Format: tar.FormatUSTAR})
	_, _ = io.WriteString(tw, body.String())
	_ = tw.Flush()
	head := out.Bytes()
	head[156] = 'x'
	var sum int64
	copy(head[148:156], "        ")
	for _, b := range head[:512] {
		sum += int64(b)
	}
	copy(head[148:156], fmt.Sprintf("%06o\x00 ", sum))
	return append(head, packed...)
}

type discard struct{}

func (discard) Write(p []byte) (int, error)    { return len(p), nil }
func (discard) Seek(int64, int) (int64, error) { return 0, nil }
func (discard) Truncate(int64) error           { return nil }

// TestCopyKeepsHoles moves bytes between files by Contents and Copy, in odd pieces.
func TestCopyKeepsHoles(t *testing.T) {
	dir := t.TempDir()
	for name, c := range map[string]struct {
		size int64
		data map[int64]string
	}{
		"empty":     {0, nil},
		"hole":      {5 << 20, nil},
		"ends":      {5<<20 + 1, map[int64]string{0: "first", 5 << 20: "l"}},
		"middle":    {8 << 20, map[int64]string{4<<20 - 3: "middle"}},
		"contents":  {10, map[int64]string{0: "0123456789"}},
		"many":      {20 << 20, map[int64]string{1: "a", 5 << 20: "b", 5<<20 + 70000: "c", 19 << 20: "d"}},
		"zero page": {4096, map[int64]string{0: string(make([]byte, 4096))}},
	} {
		src, err := os.Create(dir + "/" + name)
		if err != nil {
			t.Fatal(err)
		}
		if err := src.Truncate(c.size); err != nil {
			t.Fatal(err)
		}
		for off, s := range c.data {
			if _, err := src.WriteAt([]byte(s), off); err != nil {
				t.Fatal(err)
			}
		}
		dst, err := os.Create(dir + "/" + name + ".copy")
		if err != nil {
			t.Fatal(err)
		}
		r := Contents(src, int(src.Fd()), c.size, 0)
		if err := Copy(dst, r, c.size, make([]byte, 64<<10-7), nil); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if n, err := r.Read(make([]byte, 10)); n != 0 || err != io.EOF {
			t.Errorf("%s: %d bytes more, %v", name, n, err)
		}
		want, _ := os.ReadFile(src.Name())
		got, err := os.ReadFile(dst.Name())
		if err != nil || !bytes.Equal(got, want) || int64(len(got)) != c.size {
			t.Errorf("%s: another file came out: %d bytes, %v", name, len(got), err)
		}
		if err := Copy(dst, strings.NewReader("x"), 2, make([]byte, 10), nil); err != io.ErrUnexpectedEOF {
			t.Errorf("short: %v", err)
		}
		src.Close()
		dst.Close()
	}
}

func FuzzReader(f *testing.F) {
	var out bytes.Buffer
	tw := tar.NewWriter(&out)
	_ = tw.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: "a/b", Size: 1, Mode: 0o644})
	_, _ = tw.Write([]byte("x"))
	_ = tw.Close()
	f.Add(out.Bytes())
	f.Fuzz(func(t *testing.T, packed []byte) {
		entries, err := all(bytes.NewReader(packed))
		if err != nil && shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Fatal(err)
		}
		for _, e := range entries {
			if e.Name == "" || e.Name[0] == '/' || strings.Contains("/"+e.Name+"/", "/../") || strings.Contains(e.Name, "\x00") || e.Size < 0 {
				t.Fatalf("%+v", e)
			}
		}
		if err == nil { // then no shorter one is whole, and an error of the stream comes through
			trimmed := bytes.TrimRight(packed, "\x00")
			whole := (len(trimmed)+511)/512*512 + 1024
			if whole > len(packed) {
				t.Fatalf("%d bytes count as a whole tar", len(packed))
			}
			broken := errors.New("broken")
			if _, err := all(io.MultiReader(bytes.NewReader(packed), iotest.ErrReader(broken))); err != broken {
				t.Fatal(err)
			}
		}
	})
}

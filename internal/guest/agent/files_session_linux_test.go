package agent_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/hostfs"
)

func random(size int) []byte {
	b := make([]byte, size)
	for i := range b {
		b[i] = byte(rand.Uint32())
	}
	return b
}

func (b *box) put(s *guest.Session, path, body string) {
	b.t.Helper()
	b.must(guest.Put(b.ctx(), s, guest.PutArgs{Path: guest.Path(path), Size: int64(len(body))}, strings.NewReader(body)))
}

func (b *box) get(s *guest.Session, path string) []byte {
	b.t.Helper()
	_, r, err := guest.Get(b.ctx(), s, path)
	b.must(err)
	defer r.Close()
	body, err := io.ReadAll(r)
	b.must(err)
	return body
}

func code(t *testing.T, what string, err error, want shard.Code) {
	t.Helper()
	if shard.CodeOf(err) != want {
		t.Errorf("%s: %v, want %s", what, err, want)
	}
}

func TestFilesThroughASession(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	ctx := b.ctx()
	for _, size := range []int{0, 1, 65535, 65537, 8<<20 + 1} {
		body := random(size)
		b.must(guest.Put(ctx, s, guest.PutArgs{Path: "/tmp/f", Size: int64(size), User: "user"}, bytes.NewReader(body)))
		if got := b.get(s, "/tmp/f"); sha256.Sum256(got) != sha256.Sum256(body) {
			t.Errorf("%d bytes: %d came back", size, len(got))
		}
	}
	if e, err := guest.Stat(ctx, s, "/tmp/f"); err != nil || e.UID != 1000 || e.GID != 1001 || e.Type != "file" || e.Size != 8<<20+1 || e.Mode != 0o644 {
		t.Errorf("stat: %+v, %v", e, err)
	}
	b.must(guest.Mkdir(ctx, s, guest.MkdirArgs{Path: "/tmp/d/e", Parents: true, User: "user"}))
	code(t, "not mine", guest.Mkdir(ctx, s, guest.MkdirArgs{Path: "/etc/d", User: "user"}), shard.CodeInvalidRequest)
	code(t, "nobody", guest.Mkdir(ctx, s, guest.MkdirArgs{Path: "/tmp/x", User: "nosuch"}), shard.CodeInvalidRequest)
	b.put(s, "/tmp/d/\xff", "odd")
	b.put(s, "/tmp/d/100%", "percent")
	var names []string
	b.must(guest.List(ctx, s, "/tmp/d", func(e shard.FileEntry) error {
		name := e.Name
		if e.NameBytes != nil {
			name = string(e.NameBytes)
		}
		names = append(names, name)
		return nil
	}))
	if strings.Join(names, " ") != "100% e \xff" {
		t.Errorf("list: %q", names)
	}
	if got := b.get(s, "/tmp/d/\xff"); string(got) != "odd" {
		t.Errorf("odd name: %q", got)
	}
	stop := errors.New("enough")
	if err := guest.List(ctx, s, "/tmp/d", func(shard.FileEntry) error { return stop }); err != stop {
		t.Errorf("list: %v", err)
	}
	if got := b.get(s, "/proc/cpuinfo"); len(got) == 0 {
		t.Error("/proc/cpuinfo is empty")
	}
	for _, path := range []string{"/dev/zero", "/tmp/d", "/dev/pts/ptmx"} {
		_, _, err := guest.Get(ctx, s, path)
		code(t, path, err, shard.CodeInvalidRequest)
	}
	for _, path := range []string{"", ".", "a/../b", "/a\x00", "/" + strings.Repeat("x/", 2500)} {
		_, err := guest.Stat(ctx, s, path)
		code(t, path, err, shard.CodeInvalidRequest)
		_, _, err = guest.Tar(ctx, s, path)
		code(t, path, err, shard.CodeInvalidRequest)
		code(t, path, guest.Untar(ctx, s, guest.UntarArgs{Path: guest.Path(path)}, strings.NewReader("")), shard.CodeInvalidRequest)
	}
	for _, path := range []string{"/", "/proc", "/dev", "/dev/pts"} {
		code(t, path, guest.Remove(ctx, s, guest.RemoveArgs{Path: guest.Path(path), Recursive: true}), shard.CodeInvalidRequest)
	}

	// A client that breaks off leaves nothing, and the session goes on.
	broken := errors.New("the client is gone")
	err := guest.Put(ctx, s, guest.PutArgs{Path: "/tmp/d/cut", Size: 1 << 20}, io.MultiReader(bytes.NewReader(random(300<<10)), iotest.ErrReader(broken)))
	if err != broken {
		t.Errorf("a cut put: %v", err)
	}
	code(t, "a short put", guest.Put(ctx, s, guest.PutArgs{Path: "/tmp/d/cut", Size: 10}, strings.NewReader("x")), shard.CodeInvalidRequest)
	canceled, cancel := context.WithCancel(ctx)
	_, r, err := guest.Get(canceled, s, "/tmp/f")
	b.must(err)
	cancel()
	if _, err := io.Copy(io.Discard, r); err == nil {
		t.Error("a canceled get looks whole")
	}
	r.Close()
	b.eventually(func() bool { return len(b.names("tmp/d")) == 3 })

	b.must(guest.Remove(ctx, s, guest.RemoveArgs{Path: "/tmp/d", Recursive: true}))
	_, err = guest.Stat(ctx, s, "/tmp/d")
	code(t, "removed", err, shard.CodeNotFound)
}

func (b *box) names(dir string) []os.DirEntry {
	entries, err := os.ReadDir(filepath.Join(b.root, dir))
	b.must(err)
	return entries
}

// eventually waits for what the guest does after the host has given an operation up.
func (b *box) eventually(done func() bool) {
	b.t.Helper()
	for ctx := b.ctx(); !done(); {
		if ctx.Err() != nil {
			b.t.Fatal("it does not come true")
		}
	}
}

func TestTreesThroughASession(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	src, dst := t.TempDir(), t.TempDir()
	b.must(os.MkdirAll(src+"/a/b", 0o755))
	b.must(os.WriteFile(src+"/a/b/f", random(3<<20), 0o750))
	b.must(os.Link(src+"/a/b/f", src+"/a/h"))
	b.must(os.Symlink("b/f", src+"/a/l"))
	r, w := io.Pipe()
	go func() { w.CloseWithError(hostfs.Pack(b.ctx(), w, src, "tree", hostfs.PackOptions{})) }()
	b.must(guest.Untar(b.ctx(), s, guest.UntarArgs{Path: "/home/user", User: "root"}, r))
	if got := b.sh(s, "cd /home/user/tree/a && cat l | wc -c && stat -c '%h %a %u' h"); got != "3145728\n2 750 0\n" {
		// busybox of the box may lack stat: its absence is no failure of what is tested
		t.Logf("in the box: %q", got)
	}
	_, body, err := guest.Tar(b.ctx(), s, "/home/user/tree")
	b.must(err)
	b.must(hostfs.Unpack(b.ctx(), body, dst, hostfs.UnpackOptions{Name: "back"}))
	b.must(body.Close())
	want, _ := os.ReadFile(src + "/a/b/f")
	if got, err := os.ReadFile(dst + "/back/a/l"); err != nil || !bytes.Equal(got, want) {
		t.Errorf("%d bytes came back, %v", len(got), err)
	}
	code(t, "hostile", guest.Untar(b.ctx(), s, guest.UntarArgs{Path: "/tmp"}, strings.NewReader(strings.Repeat("x", 5<<20))), shard.CodeInvalidRequest)
	code(t, "cut", guest.Untar(b.ctx(), s, guest.UntarArgs{Path: "/tmp"}, strings.NewReader("")), shard.CodeInvalidRequest)
	_, _, err = guest.Tar(b.ctx(), s, "/")
	code(t, "tar of /", err, shard.CodeInvalidRequest)
	b.put(s, "/tmp/after", "x")
}

func BenchmarkFiles(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	body := random(200 << 20)
	args := guest.PutArgs{Path: "/tmp/f", Size: int64(len(body))}
	b.Run("put", func(b *testing.B) {
		b.SetBytes(args.Size)
		for b.Loop() {
			x.must(guest.Put(context.Background(), s, args, bytes.NewReader(body)))
		}
	})
	drain := func(open func() (shard.FileEntry, io.ReadCloser, error)) func(*testing.B) {
		return func(b *testing.B) {
			b.SetBytes(args.Size)
			for b.Loop() {
				_, r, err := open()
				x.must(err)
				n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{r}, make([]byte, 64<<10))
				if err != nil || n < args.Size {
					b.Fatal(n, err)
				}
				r.Close()
			}
		}
	}
	b.Run("get", drain(func() (shard.FileEntry, io.ReadCloser, error) { return guest.Get(context.Background(), s, "/tmp/f") }))
	b.Run("tar", drain(func() (shard.FileEntry, io.ReadCloser, error) { return guest.Tar(context.Background(), s, "/tmp/f") }))
	b.Run("untar", func(b *testing.B) {
		dir := b.TempDir()
		x.must(os.WriteFile(dir+"/f", body, 0o644))
		var packed bytes.Buffer
		x.must(hostfs.Pack(context.Background(), &packed, dir, "t", hostfs.PackOptions{}))
		b.SetBytes(args.Size)
		for b.Loop() {
			x.must(guest.Untar(context.Background(), s, guest.UntarArgs{Path: "/tmp"}, bytes.NewReader(packed.Bytes())))
		}
	})
}

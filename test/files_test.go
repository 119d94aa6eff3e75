package test

import (
	"archive/tar"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// TestCase026: links are resolved inside the sandbox, never on the host.
func TestCase026(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		host := t.TempDir() // a canary that exists on the host only
		canary := filepath.Join(host, "canary")
		if err := os.WriteFile(canary, []byte("host"), 0o600); err != nil {
			t.Fatal(err)
		}
		sh(t, d, id, fmt.Sprintf("ln -s /etc /tmp/l; ln -s /tmp/loop /tmp/loop; ln -s %s /tmp/out; ln -s ../../../../../../.. /tmp/up", host))
		local := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(local, []byte("from outside"), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Must("cp", local, id+":/tmp/l/shard-canary")
		if got := sh(t, d, id, "cat /etc/shard-canary"); got != "from outside" {
			t.Errorf("in the sandbox: %q", got)
		}
		if _, err := os.Lstat("/etc/shard-canary"); !errors.Is(err, fs.ErrNotExist) {
			t.Fatalf("/etc/shard-canary exists on the host (%v)", err)
		}
		for _, path := range []string{"/tmp/loop", "/tmp/loop/x"} {
			begin := time.Now()
			_, _, err := c.GetFile(t.Context(), id, path)
			if code := shard.CodeOf(err); code != shard.CodeInvalidRequest && code != shard.CodeNotFound {
				t.Errorf("read %s: %v", path, err)
			}
			if err := c.PutFile(t.Context(), id, "/tmp/loop/x", strings.NewReader("x"), 1, client.WriteOptions{}); err == nil {
				t.Error("a write through a loop of links succeeded")
			}
			if took := time.Since(begin); took > 20*time.Second {
				t.Errorf("a loop of links took %s", took)
			}
		}
		// The link to a host directory leads nowhere inside.
		if err := c.PutFile(t.Context(), id, "/tmp/out/canary", strings.NewReader("x"), 1, client.WriteOptions{}); err == nil {
			t.Error("a write through a dangling link succeeded")
		}
		if _, _, err := c.GetFile(t.Context(), id, "/tmp/out/canary"); err == nil {
			t.Error("a host file was read")
		}
		if err := c.PutFile(t.Context(), id, "/tmp/up/etc/up", strings.NewReader("x"), 1, client.WriteOptions{}); err != nil {
			t.Errorf("a link above / is / : %v", err)
		}
		if _, err := os.Lstat("/etc/up"); err == nil {
			t.Error("/etc/up exists on the host")
		}
		if err := c.RemoveFile(t.Context(), id, "/tmp/l", false); err != nil {
			t.Errorf("remove the link: %v", err)
		}
		sh(t, d, id, "test -d /etc && test ! -e /tmp/l")
		if got, err := os.ReadFile(canary); err != nil || string(got) != "host" {
			t.Errorf("the canary: %q, %v", got, err)
		}
	})
}

// TestCase029: a folder survives the round trip, or its loss is documented (docs/commands.md).
func TestCase029(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		dir := filepath.Join(t.TempDir(), "tree")
		write := func(name, body string, mode os.FileMode) {
			t.Helper()
			file := filepath.Join(dir, name)
			if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(file, []byte(body), 0o600); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(file, mode); err != nil {
				t.Fatal(err)
			}
		}
		when := time.Date(2001, 2, 3, 4, 5, 6, 0, time.UTC)
		write("a/file", "body", 0o640)
		write("a/exe", "#!/bin/sh\necho ran\n", 0o755)
		write("long/"+strings.Repeat("n", 255), "long name", 0o644)
		write("sp ace/ünï\ncode", "odd", 0o644)
		if err := os.Link(filepath.Join(dir, "a/file"), filepath.Join(dir, "a/hard")); err != nil {
			t.Fatal(err)
		}
		for _, name := range []string{"empty", "a/empty"} {
			if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := os.Symlink("file", filepath.Join(dir, "a/link")); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(filepath.Join(dir, "a/file"), when, when); err != nil {
			t.Fatal(err)
		}
		d.Must("cp", dir, id+":/tmp/")
		if got := sh(t, d, id, `cd /tmp/tree && cat a/file a/hard a/link && a/exe && stat -c '%a %Y' a/file && test -d empty && test -d a/empty && ls long | wc -c && test "$(stat -c %h a/file)" = 2 && echo linked`); got != fmt.Sprintf("bodybodybodyran\n640 %d\n256\nlinked", when.Unix()) {
			t.Errorf("in the sandbox: %q", got)
		}
		back := t.TempDir()
		d.Must("cp", id+":/tmp/tree", back+"/")
		diffTrees(t, dir, filepath.Join(back, "tree"))
		// Into a name that does not exist: the tree gets that name.
		d.Must("cp", id+":/tmp/tree", filepath.Join(back, "other"))
		diffTrees(t, dir, filepath.Join(back, "other"))
	})
}

// diffTrees compares names, kinds, ordinary mode bits, contents, link targets and times of files.
func diffTrees(t *testing.T, want, got string) {
	t.Helper()
	describe := func(root string) []string {
		var all []string
		err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err != nil {
				return err
			}
			rel, _ := filepath.Rel(root, path)
			line := fmt.Sprintf("%q %s", rel, info.Mode())
			switch {
			case info.Mode().IsRegular():
				body, err := os.ReadFile(path)
				if err != nil {
					return err
				}
				var st unix.Stat_t
				_ = unix.Lstat(path, &st)
				line += fmt.Sprintf(" %s links=%d %d", sum(body)[:8], st.Nlink, info.ModTime().Unix())
			case info.Mode()&fs.ModeSymlink != 0:
				target, _ := os.Readlink(path)
				line += " -> " + target
			}
			if rel != "." {
				all = append(all, line)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		return all
	}
	a, b := describe(want), describe(got)
	for _, line := range a {
		if !slices.Contains(b, line) {
			t.Errorf("after the round trip %s is missing", line)
		}
	}
	for _, line := range b {
		if !slices.Contains(a, line) {
			t.Errorf("after the round trip there is also %s", line)
		}
	}
}

// TestCase031: success means that the file is there, whole, at every size.
func TestCase031(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		dir := t.TempDir()
		for _, size := range []int{0, 1, 4095, 4096, 18432, 65535, 65536, 65537, 4<<20 - 1, 4 << 20, 4<<20 + 1, 8<<20 + 1, 100 << 20} {
			data := noise(size)
			if err := c.PutFile(t.Context(), id, "/tmp/put", bytes.NewReader(data), int64(size), client.WriteOptions{}); err != nil {
				t.Fatalf("put %d bytes: %v", size, err)
			}
			local, back := filepath.Join(dir, "local"), filepath.Join(dir, "back")
			if err := os.WriteFile(local, data, 0o600); err != nil {
				t.Fatal(err)
			}
			d.Must("cp", local, id+":/tmp/cp")
			want := sum(data)
			if got := sh(t, d, id, "sha256sum /tmp/put /tmp/cp | cut -c1-64"); got != want+"\n"+want {
				t.Errorf("%d bytes: hashes in the sandbox %q, want %s", size, got, want)
			}
			body, entry, err := c.GetFile(t.Context(), id, "/tmp/cp")
			if err != nil {
				t.Fatal(err)
			}
			got, err := io.ReadAll(body)
			_ = body.Close()
			if err != nil || sum(got) != want || entry.Size != int64(size) {
				t.Errorf("get %d bytes: %d bytes, %v, entry %+v", size, len(got), err, entry)
			}
			d.Must("cp", id+":/tmp/put", back)
			if got, err := os.ReadFile(back); err != nil || sum(got) != want {
				t.Errorf("cp out %d bytes: %d bytes, %v", size, len(got), err)
			}
		}
		// A body that is shorter than announced is no file.
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		defer cancel()
		if err := c.PutFile(ctx, id, "/tmp/short", bytes.NewReader(noise(10)), 20, client.WriteOptions{}); err == nil {
			t.Error("a short body was accepted")
		}
		if _, err := c.Stat(t.Context(), id, "/tmp/short"); shard.CodeOf(err) != shard.CodeNotFound {
			t.Errorf("after a short body: %v", err)
		}
		if got := sh(t, d, id, "ls -A /tmp | wc -l"); got != "2" {
			t.Errorf("the sandbox's /tmp holds %s entries: %s", got, sh(t, d, id, "ls -A /tmp"))
		}
		// Chunked bodies have no length.
		if got := call(t, d, "PUT", "/v0/sandboxes/"+id+"/files?path=/tmp/chunked", nil).Status; got != 204 && got != 400 {
			t.Errorf("an empty body: %d", got)
		}
	})
}

// TestCase030: sizes beyond 4 GiB.
func TestCase030(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--disk", "12GiB")
		const size = 4<<30 + 12345
		tail := noise(1 << 20)
		local := filepath.Join(t.TempDir(), "sparse")
		f, err := os.OpenFile(local, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := f.WriteAt(tail, size-int64(len(tail))); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = f.Close() }()
		body, err := os.Open(local)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = body.Close() }()
		c := connect(t, d)
		if err := c.PutFile(t.Context(), id, "/big", body, size, client.WriteOptions{}); err != nil {
			t.Fatal(err)
		}
		if got := sh(t, d, id, "stat -c %s /big; tail -c 1048576 /big | sha256sum | cut -c1-64"); got != fmt.Sprintf("%d\n%s", size, sum(tail)) {
			t.Errorf("in the sandbox: %q", got)
		}
		out, entry, err := c.GetFile(t.Context(), id, "/big")
		if err != nil || entry.Size != size {
			t.Fatalf("%+v, %v", entry, err)
		}
		defer func() { _ = out.Close() }()
		n, err := io.CopyN(io.Discard, out, size-int64(len(tail)))
		if err != nil {
			t.Fatalf("after %d bytes: %v", n, err)
		}
		if rest, err := io.ReadAll(out); err != nil || sum(rest) != sum(tail) {
			t.Errorf("the end: %d bytes, %v", len(rest), err)
		}
	}, "runc")
}

// TestCase033: names that are not UTF-8 do not disturb the others and can be used again.
func TestCase033(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, `mkdir /odd && cd /odd && echo 1 >plain && for n in "$(printf 'x\377y')" "$(printf 'new\nline')" "$(printf 'tab\t')" 'back\slash' `+strings.Repeat("l", 255)+`; do echo odd >"$n"; done`)
		list := decode[struct {
			Entries []shard.FileEntry `json:"entries"`
		}](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/ls?path=/odd", nil), 200)
		if len(list.Entries) != 6 {
			t.Errorf("%d entries are listed, want 6: %+v", len(list.Entries), list.Entries)
		}
		a := call(t, d, "GET", "/v0/sandboxes/"+id+"/files?path=/odd/x%ffy", nil)
		if a.Status != 200 || string(a.Body) != "odd\n" {
			t.Errorf("read a name with 0xFF: %d %q", a.Status, a.Body)
		}
		archive := call(t, d, "GET", "/v0/sandboxes/"+id+"/archive?path=/odd", nil)
		names := map[string]bool{}
		for r := tar.NewReader(bytes.NewReader(archive.Body)); ; {
			h, err := r.Next()
			if err != nil {
				break
			}
			names[h.Name] = true
		}
		for _, want := range []string{"odd/x\xffy", "odd/new\nline", "odd/tab\t", `odd/back\slash`, "odd/plain"} {
			if !names[want] {
				t.Errorf("the tar lacks %q: %v", want, names)
			}
		}
		if a := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/files?path=/odd/x%ffy", nil); a.Status != 204 {
			t.Errorf("remove a name with 0xFF: %d %s", a.Status, a.Body)
		}
		back := t.TempDir()
		d.Must("cp", id+":/odd", back)
		if got, err := os.ReadFile(filepath.Join(back, "odd", "new\nline")); err != nil || string(got) != "odd\n" {
			t.Errorf("cp out: %q, %v", got, err)
		}
	})
}

// TestCase035: things that are not plain files give an error or their content, in bounded time, and harm nothing.
func TestCase035(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, `mkfifo /tmp/fifo; mkdir /tmp/dir; nc -l -s 127.0.0.1 -p 1 >/dev/null 2>&1 & ln -s /nowhere /tmp/dangling`)
		get := func(path string) answer {
			return call(t, d, "GET", "/v0/sandboxes/"+id+"/files?path="+url.QueryEscape(path), nil)
		}
		if a := get("/proc/cpuinfo"); a.Status != 200 || !strings.Contains(string(a.Body), "processor") {
			t.Errorf("/proc/cpuinfo: %d, %d bytes", a.Status, len(a.Body))
		}
		for _, path := range []string{"/dev/zero", "/tmp/fifo", "/tmp/dir", "/dev/null"} {
			begin := time.Now()
			if got := get(path).code(t); got != shard.CodeInvalidRequest {
				t.Errorf("read %s: %s", path, got)
			}
			if took := time.Since(begin); took > 30*time.Second {
				t.Errorf("read %s took %s", path, took)
			}
		}
		for path, want := range map[string]string{"/tmp/fifo": "other", "/tmp/dir": "dir", "/dev/zero": "other", "/tmp/dangling": "symlink", "/etc/passwd": "file", "/": "dir"} {
			e, err := connect(t, d).Stat(t.Context(), id, path)
			if err != nil || e.Type != want {
				t.Errorf("stat %s: %+v, %v, want type %s", path, e, err, want)
			}
		}
		if got := call(t, d, "PUT", "/v0/sandboxes/"+id+"/files?path=/tmp/dir", "x").code(t); got != shard.CodeInvalidRequest {
			t.Errorf("write to a directory: %s", got)
		}
		for path, want := range map[string]string{"files?path=/proc/new": "kernel", "files?path=/tmp/f&mode=": "mode"} {
			if a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/"+path, "x"); a.code(t) != shard.CodeInvalidRequest || !strings.Contains(string(a.Body), want) {
				t.Errorf("PUT %s: %d %s", path, a.Status, a.Body)
			}
		}
		if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/archive?path=/proc/cpuinfo", nil); a.code(t) != shard.CodeInvalidRequest {
			t.Errorf("the tar of a file without a size: %d, %d bytes", a.Status, len(a.Body))
		}
		for _, path := range []string{"/", "/proc", "//", "/.", "/tmp/.."} {
			if a := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/files?recursive=true&path="+url.QueryEscape(path), nil); a.Status < 400 {
				t.Errorf("remove %q: %d", path, a.Status)
			}
		}
		if got := sh(t, d, id, "test -e /proc/self && cat /etc/hostname >/dev/null && echo fine"); got != "fine" {
			t.Errorf("afterwards: %q", got)
		}
	})
}

// TestCase037: owner and rights of what is written.
func TestCase037(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--user", "dev")
		put := func(query string) answer {
			return call(t, d, "PUT", "/v0/sandboxes/"+id+"/files?"+query, "x")
		}
		if a := put("path=/tmp/mine"); a.Status != 204 {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		if a := put("path=/tmp/new/dir/f&user=nobody&mode=640&parents=true"); a.Status != 204 {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		if got := sh(t, d, id, "cd /tmp && stat -c '%U %a' mine new new/dir new/dir/f"); got != "dev 644\nnobody 755\nnobody 755\nnobody 640" {
			t.Errorf("owners and rights: %q", got)
		}
		a := put("path=/root/f")
		if a.Status < 400 || a.Status == 500 {
			t.Errorf("a write into root's directory: %d %s", a.Status, a.Body)
		}
		if a := put("path=/root/f&user=root"); a.Status != 204 {
			t.Errorf("the same as root: %d %s", a.Status, a.Body)
		}
		if a := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/files?path=/root/f", nil); a.Status < 400 || a.Status == 500 {
			t.Errorf("a removal in root's directory: %d %s", a.Status, a.Body)
		}
		a = call(t, d, "POST", "/v0/sandboxes/"+id+"/mkdir", map[string]any{"path": "/tmp/a/b", "parents": true, "mode": "0711"})
		if a.Status != 204 || sh(t, d, id, "stat -c '%U %a' /tmp/a/b") != "dev 711" {
			t.Errorf("mkdir: %d %s", a.Status, a.Body)
		}
	})
}

// TestCase039: odd paths follow one rule in every route: resolved inside the sandbox, or refused.
func TestCase039(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for _, path := range []string{"", ".", "a/../b", "/../../etc/hostname", "//etc", "/tmp/", "/a\x00b", "/" + strings.Repeat("x", 5000), "rel", "/tmp/../../.."} {
			q := url.QueryEscape(path)
			for _, r := range [][2]string{{"GET", "files"}, {"GET", "ls"}, {"GET", "archive"}, {"HEAD", "files"}, {"DELETE", "files"}} {
				if r[0] == "DELETE" && (path == "/../../etc/hostname" || path == "//etc" || path == "/tmp/") {
					continue // valid names of real things
				}
				a := call(t, d, r[0], "/v0/sandboxes/"+id+"/"+r[1]+"?path="+q, nil)
				if a.Status >= 500 {
					t.Errorf("%s %s %.40q: %d %s", r[0], r[1], path, a.Status, a.Body)
				}
				if !strings.HasPrefix(path, "/") && a.Status != 400 {
					t.Errorf("%s %s %.40q: %d, want 400", r[0], r[1], path, a.Status)
				}
			}
		}
		a := call(t, d, "GET", "/v0/sandboxes/"+id+"/files?path="+url.QueryEscape("/../../etc/hostname"), nil)
		if name, err := os.ReadFile("/etc/hostname"); a.Status == 200 && err == nil && bytes.Equal(a.Body, name) && len(name) > 0 {
			t.Errorf("the host's file came back: %q", a.Body)
		}
	}, "runc")
}

// TestHostileArchive: what an upload must refuse leaves nothing outside the target.
func TestHostileArchive(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for name, h := range map[string]tar.Header{
			"absolute":         {Name: "/abs", Typeflag: tar.TypeReg},
			"dot dot":          {Name: "../esc", Typeflag: tar.TypeReg},
			"inner dot dot":    {Name: "a/../../esc", Typeflag: tar.TypeReg},
			"device":           {Name: "dev", Typeflag: tar.TypeBlock, Devmajor: 8},
			"fifo":             {Name: "fifo", Typeflag: tar.TypeFifo},
			"hard link out":    {Name: "hard", Typeflag: tar.TypeLink, Linkname: "../../etc/passwd"},
			"hard link absent": {Name: "hard", Typeflag: tar.TypeLink, Linkname: "nothere"},
		} {
			var buf bytes.Buffer
			w := tar.NewWriter(&buf)
			h.Mode = 0o644
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			_ = w.Close()
			a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/tmp", buf.Bytes(), "Content-Type", "application/x-tar")
			if a.Status != 400 {
				t.Errorf("%s: %d %s", name, a.Status, a.Body)
			}
		}
		// A link that leads out of the target, then an entry through it.
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		_ = w.WriteHeader(&tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: "/etc", Mode: 0o777})
		_ = w.WriteHeader(&tar.Header{Name: "l/evil", Typeflag: tar.TypeReg, Mode: 0o644})
		_ = w.Close()
		if a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/tmp", buf.Bytes(), "Content-Type", "application/x-tar"); a.Status != 400 {
			t.Errorf("through a link: %d %s", a.Status, a.Body)
		}
		if got := sh(t, d, id, "ls /esc /abs /etc/evil /tmp/dev /tmp/fifo 2>/dev/null | wc -l"); got != "0" {
			t.Errorf("%s of the refused entries exist", got)
		}
		// A tree that may not land on this host leaves nothing there, and takes nothing away.
		sh(t, d, id, "mkdir -p /out/a && echo 1 > /out/a/f && ln -s /etc /out/z")
		target := filepath.Join(t.TempDir(), "out")
		refused(t, d.Shard("cp", id+":/out", target), "absolute")
		if _, err := os.Lstat(target); !os.IsNotExist(err) {
			t.Errorf("a refused copy left %s (%v)", target, err)
		}
		if err := os.Mkdir(target, 0o755); err != nil {
			t.Fatal(err)
		}
		refused(t, d.Shard("cp", id+":/out/.", target), "absolute")
		if _, err := os.Lstat(target); err != nil {
			t.Errorf("a refused copy took a directory away: %v", err)
		}
		// A tar that is cut.
		if a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/tmp", buf.Bytes()[:700], "Content-Type", "application/x-tar"); a.Status < 400 {
			t.Errorf("a cut tar: %d", a.Status)
		}
	})
}

// TestCase114: a full disk is only a full disk.
func TestCase114(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--disk", "64MiB")
		r := d.Shard("exec", id, "sh", "-c", "dd if=/dev/zero of=/fill bs=1M 2>&1; stat -c %s /fill")
		if !strings.Contains(r.Stdout, "No space left on device") {
			t.Fatalf("filling the disk: %+v", r)
		}
		if got := sh(t, d, id, `df -m / | tail -1 | awk '{print ($2 > 32 && $2 <= 64)}'`); got != "1" {
			t.Errorf("df does not show the bound: %s", sh(t, d, id, "df -m /"))
		}
		local := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(local, noise(1<<20), 0o600); err != nil {
			t.Fatal(err)
		}
		refused(t, d.Shard("cp", local, id+":/more"), "space")
		if got := sh(t, d, id, "ls /more 2>/dev/null | wc -l; cat /etc/hostname >/dev/null && echo read"); got != "0\nread" {
			t.Errorf("on the full disk: %q", got)
		}
		d.Must("list")
		d.Must("stop", id)
		d.Must("start", id)
		if got := sh(t, d, id, "rm /fill && dd if=/dev/zero of=/again bs=1M count=20 2>/dev/null && stat -c %s /again"); got != "20971520" {
			t.Errorf("after rm: %q", got)
		}
		d.Must("exec", id, "sh", "-c", "dd if=/dev/zero of=/fill bs=1M 2>/dev/null; true")
		d.Must("remove", "--force", id)
	})
}

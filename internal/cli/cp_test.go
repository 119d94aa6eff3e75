package cli_test

import (
	"encoding/json"
	"errors"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/hostfs"
)

// serveFiles gives the sandbox the file routes, over the directory d.box.
func (d *daemon) serveFiles() {
	const box = " /v0/sandboxes/box/"
	at := func(r *http.Request) string { return d.box + r.FormValue("path") } // a final slash must stay
	refuse := func(w http.ResponseWriter, err error) {
		code := shard.CodeInvalidRequest
		if errors.Is(err, fs.ErrNotExist) {
			code = shard.CodeNotFound
		}
		fail(w, shard.Errorf(code, "box says: %s", filepath.Base(err.Error())))
	}
	stat := func(w http.ResponseWriter, p string) bool {
		info, err := os.Lstat(p)
		if err != nil {
			refuse(w, err)
			return false
		}
		e := shard.FileEntry{Type: "other", Size: info.Size(), Mode: uint32(info.Mode().Perm())}
		switch info.Mode().Type() {
		case 0:
			e.Type = "file"
		case fs.ModeDir:
			e.Type = "dir"
		case fs.ModeSymlink:
			e.Type = "symlink"
		}
		b, _ := json.Marshal(e)
		w.Header().Set("X-Shard-Stat", string(b))
		return true
	}
	d.mux.HandleFunc("HEAD"+box+"files", func(w http.ResponseWriter, r *http.Request) { stat(w, at(r)) })
	d.mux.HandleFunc("GET"+box+"files", func(w http.ResponseWriter, r *http.Request) {
		f, err := os.Open(at(r))
		if err != nil {
			refuse(w, err)
			return
		}
		defer f.Close()
		if stat(w, f.Name()) {
			_, _ = io.Copy(w, f)
		}
	})
	d.mux.HandleFunc("PUT"+box+"files", func(w http.ResponseWriter, r *http.Request) {
		mode, _ := strconv.ParseUint(r.FormValue("mode"), 8, 32)
		f, err := os.OpenFile(at(r), os.O_CREATE|os.O_TRUNC|os.O_WRONLY, fs.FileMode(mode))
		if err != nil {
			refuse(w, err)
			return
		}
		defer f.Close()
		if n, err := io.Copy(f, r.Body); err != nil || n != r.ContentLength {
			refuse(w, errors.New("short"))
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	d.mux.HandleFunc("POST"+box+"mkdir", func(w http.ResponseWriter, r *http.Request) {
		var req struct{ Path string }
		_ = json.NewDecoder(r.Body).Decode(&req)
		if err := os.MkdirAll(d.box+req.Path, 0o755); err != nil {
			refuse(w, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	d.mux.HandleFunc("PUT"+box+"archive", func(w http.ResponseWriter, r *http.Request) {
		if err := hostfs.Unpack(r.Context(), r.Body, at(r), hostfs.UnpackOptions{}); err != nil {
			refuse(w, err)
			return
		}
		w.WriteHeader(http.StatusNoContent)
	})
	d.mux.HandleFunc("GET"+box+"archive", func(w http.ResponseWriter, r *http.Request) {
		if stat(w, at(r)) {
			_ = hostfs.Pack(r.Context(), w, at(r), filepath.Base(r.FormValue("path")), hostfs.PackOptions{})
		}
	})
	d.answer("GET /v0/sandboxes/box", 200, `{"id":"a-a-0000","state":"running"}`)
	d.refuse("GET /v0/sandboxes/{id}", 404, shard.CodeNotFound, "there is no sandbox")
	d.refuse("HEAD /v0/sandboxes/nobox/files", 404, shard.CodeNotFound, "")
	d.refuse("PUT /v0/sandboxes/nobox/files", 404, shard.CodeNotFound, "there is no sandbox of that name")
}

// write makes files under dir: a name with a final slash is a directory, "a -> b" a link.
func write(t *testing.T, dir string, names ...string) {
	t.Helper()
	for _, n := range names {
		link, target, isLink := strings.Cut(n, " -> ")
		p := filepath.Join(dir, link)
		err := os.MkdirAll(filepath.Dir(p), 0o755)
		switch {
		case err != nil:
		case isLink:
			err = os.Symlink(target, p)
		case strings.HasSuffix(n, "/"):
			err = os.MkdirAll(p, 0o755)
		default:
			err = os.WriteFile(p, []byte(n), 0o640)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

// tree lists what is under dir, files with their content.
func tree(t *testing.T, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		name, _ := filepath.Rel(dir, p)
		switch d.Type() {
		case fs.ModeDir:
			name += "/"
		case fs.ModeSymlink:
			target, _ := os.Readlink(p)
			name += " -> " + target
		default:
			b, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			name += "=" + string(b)
		}
		out = append(out, name)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

// TestCpPlacement runs each copy in both directions: HERE is the side that is read, THERE the other.
func TestCpPlacement(t *testing.T) {
	have := []string{"f", "d/a", "d/s/b", "empty", "link -> f", "dlink -> d"}
	for _, tc := range []struct {
		src, dst string
		there    []string // before
		want     []string // after, without what was there
		says     string
	}{
		{src: "/f", dst: "/x", want: []string{"x=f"}},
		{src: "/f", dst: "/dir", there: []string{"dir/"}, want: []string{"dir/", "dir/f=f"}},
		{src: "/f", dst: "/new/", want: []string{"new/", "new/f=f"}},
		{src: "/f", dst: "/old", there: []string{"old"}, want: []string{"old=f"}},
		{src: "/link", dst: "/x", want: []string{"x=f"}},
		{src: "/f", dst: "/l", there: []string{"dir/", "l -> dir"}, want: []string{"dir/", "dir/f=f", "l -> dir"}},
		{src: "/d", dst: "/x", want: []string{"x/", "x/a=d/a", "x/s/", "x/s/b=d/s/b"}},
		{src: "/d", dst: "/dir", there: []string{"dir/"}, want: []string{"dir/", "dir/d/", "dir/d/a=d/a", "dir/d/s/", "dir/d/s/b=d/s/b"}},
		{src: "/d/.", dst: "/dir", there: []string{"dir/"}, want: []string{"dir/", "dir/a=d/a", "dir/s/", "dir/s/b=d/s/b"}},
		{src: "/dlink", dst: "/x", want: []string{"x/", "x/a=d/a", "x/s/", "x/s/b=d/s/b"}},
		{src: "/d", dst: "/old", there: []string{"old"}, want: []string{"old=old"}, says: "onto the file"},
		{src: "/none", dst: "/x", says: "does not exist"},
		{src: "/f/", dst: "/x", says: "not a directory"},
	} {
		for _, out := range []bool{false, true} {
			name := "in "
			if out {
				name = "out "
			}
			t.Run(name+tc.src+" to "+tc.dst, func(t *testing.T) {
				d := start(t)
				d.serveFiles()
				here, there := t.TempDir(), d.box
				src, dst := here+tc.src, "box:"+tc.dst
				if out {
					here, there = d.box, t.TempDir()
					src, dst = "box:"+tc.src, there+tc.dst
				}
				write(t, here, have...)
				write(t, there, tc.there...)
				got := run(t, d, "cp", src, dst)
				if tc.says == "" && (got.code != 0 || got.out+got.errs != "") {
					t.Errorf("got %+v", got)
				}
				if tc.says != "" && (got.code != 1 || !strings.Contains(got.errs, tc.says) || strings.Count(got.errs, "\n") != 1) {
					t.Errorf("got %+v, want %q", got, tc.says)
				}
				if diff := cmp.Diff(tc.want, tree(t, there)); diff != "" {
					t.Error(diff)
				}
			})
		}
	}
}

func TestCpKeepsModesAndOverwritesWhole(t *testing.T) {
	d := start(t)
	d.serveFiles()
	local := t.TempDir()
	write(t, local, "run.sh")
	if err := os.Chmod(local+"/run.sh", 0o751); err != nil {
		t.Fatal(err)
	}
	if got := run(t, d, "cp", local+"/run.sh", "box:/r"); got.code != 0 {
		t.Fatal(got)
	}
	if got := run(t, d, "cp", "box:/r", local+"/back"); got.code != 0 {
		t.Fatal(got)
	}
	info, err := os.Stat(local + "/back")
	if err != nil || info.Mode().Perm() != 0o751 {
		t.Errorf("%v, %v", info, err)
	}
	// A download that is cut leaves the target as it was and no temporary file.
	d.mux.HandleFunc("HEAD /v0/sandboxes/cut/files", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Shard-Stat", `{"type":"file"}`)
	})
	d.mux.HandleFunc("GET /v0/sandboxes/cut/files", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Shard-Stat", `{"type":"file"}`)
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	if got := run(t, d, "cp", "cut:/r", local+"/back"); got.code != 1 || !strings.Contains(got.errs, "before its answer was complete") {
		t.Errorf("got %+v", got)
	}
	if diff := cmp.Diff([]string{"back=run.sh", "run.sh=run.sh"}, tree(t, local)); diff != "" {
		t.Error(diff)
	}
}

func TestCpUnderSudo(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("only root can give files away")
	}
	t.Setenv("SUDO_UID", "12345")
	t.Setenv("SUDO_GID", "54321")
	d := start(t)
	d.serveFiles()
	write(t, d.box, "f", "d/a")
	local := t.TempDir()
	for _, args := range [][]string{{"box:/f", local + "/new/"}, {"box:/d", local + "/d"}} {
		if got := run(t, d, append([]string{"cp"}, args...)...); got.code != 0 {
			t.Fatal(got)
		}
	}
	for _, p := range []string{"new", "new/f", "d", "d/a"} {
		info, err := os.Lstat(filepath.Join(local, p))
		if err != nil {
			t.Fatal(err)
		}
		if st := info.Sys().(*syscall.Stat_t); st.Uid != 12345 || st.Gid != 54321 {
			t.Errorf("%s belongs to %d:%d", p, st.Uid, st.Gid)
		}
	}
}

func TestCpArguments(t *testing.T) {
	d := start(t)
	d.serveFiles()
	t.Chdir(t.TempDir())
	write(t, ".", "a:b", "dangling -> none/x")
	write(t, d.box, "f")
	if err := syscall.Mkfifo("fifo", 0o600); err != nil {
		t.Fatal(err)
	}
	for _, tc := range []struct {
		args []string
		says string
	}{
		{[]string{"a", "b"}, "neither"},
		{[]string{"box:/a", "box:/b"}, "both ends"},
		{[]string{"x:y", "box:/b"}, "begins with /"},
		{[]string{"A B:/x", "."}, "./ or /"},
		{[]string{"--user", "u", "box:/a", "b"}, "--user"},
		{[]string{"a"}, "too few"},
		{[]string{"none", "nobox:/x"}, `"none" does not exist on this host`}, // before anything is asked
		{[]string{"./a:b", "nobox:/x"}, "there is no sandbox of that name"},
		{[]string{"nobox:/x", "y"}, "there is no sandbox"},
		{[]string{"box:/f", "none/y"}, `the directory "none" does not exist on this host`},
		{[]string{"box:/f", "fifo"}, `"fifo" exists and is not a regular file`},
		{[]string{"box:/f", "dangling"}, `"dangling" exists and is not a regular file`},
	} {
		got := run(t, d, append([]string{"cp"}, tc.args...)...)
		if got.code != 1 || !strings.Contains(got.errs, tc.says) || !strings.HasPrefix(got.errs, "shard: ") {
			t.Errorf("%q: got %+v, want %q", tc.args, got, tc.says)
		}
	}
	if got := run(t, d, "cp", "./a:b", "box:/c"); got.code != 0 {
		t.Errorf("got %+v", got)
	}
	if got := tree(t, d.box); len(got) != 2 || got[0] != "c=a:b" {
		t.Errorf("got %q", got)
	}
}

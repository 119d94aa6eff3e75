package cli_test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// received is what an import sent.
type received struct {
	query string
	body  []byte
}

func serveImport(d *daemon) *received {
	got := &received{}
	d.mux.HandleFunc("POST /v0/images/import", func(w http.ResponseWriter, r *http.Request) {
		got.query = r.URL.Query().Encode()
		var err error
		if got.body, err = io.ReadAll(r.Body); err != nil {
			return
		}
		_, _ = io.WriteString(w, `{"event":{"status":"unpacking","layers":1}}`+"\n"+`{"image":{"reference":"index.docker.io/library/x:1","digest":"sha256:1"}}`+"\n")
	})
	return got
}

var imported = result{"index.docker.io/library/x:1\nsha256:1\n", "unpacking 1 layer\n", 0}

func TestImportTar(t *testing.T) {
	d := start(t)
	got := serveImport(d)
	dir := t.TempDir()
	plain, zipped := filepath.Join(dir, "a.tar"), filepath.Join(dir, "a.tar.gz")
	content := bytes.Repeat([]byte("tar"), 100_000)
	var gz bytes.Buffer
	zw := gzip.NewWriter(&gz)
	_, _ = zw.Write(content)
	_ = zw.Close()
	for file, b := range map[string][]byte{plain: content, zipped: gz.Bytes()} {
		if err := os.WriteFile(file, b, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{plain, zipped} {
		got.body = nil
		if r := run(t, d, "image", "import", "--env", "A=1", "--env", "B=2", "--workdir", "/w", "--user", "u", file, "x:1"); r != imported {
			t.Errorf("got %+v", r)
		}
		if got.query != "env=A%3D1&env=B%3D2&ref=x%3A1&user=u&workdir=%2Fw" || !bytes.Equal(got.body, content) {
			t.Errorf("%s: query %s, %d bytes", file, got.query, len(got.body))
		}
	}
	if err := os.Truncate(zipped, int64(gz.Len()/2)); err != nil {
		t.Fatal(err)
	}
	if r := run(t, d, "image", "import", zipped, "x:1"); r.code != 1 || !strings.Contains(r.errs, "unexpected EOF") || strings.Count(r.errs, "\n") != 1 {
		t.Errorf("a cut file: %+v", r)
	}
	if r := run(t, d, "image", "import", dir+"/none", "x:1"); r.code != 1 || !strings.Contains(r.errs, "does not exist on this host") {
		t.Errorf("got %+v", r)
	}
}

func TestImportDirectoryKeepsEverything(t *testing.T) {
	d := start(t)
	got := serveImport(d)
	dir := t.TempDir()
	root := filepath.Join(dir, "root")
	write(t, root, "bin/sh", "bin/ash -> sh", "empty/", "etc/passwd", "dangling -> /none")
	for _, err := range []error{
		os.Chmod(root, 0o755),
		os.Chmod(root+"/bin/sh", 0o755|os.ModeSetuid),
		os.Chmod(root+"/empty", 0o777|os.ModeSticky),
		os.Link(root+"/etc/passwd", root+"/etc/passwd-"),
		syscall.Mkfifo(root+"/fifo", 0o600),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	owner := os.Geteuid()
	if owner == 0 {
		owner = 1234
		if err := os.Chown(root+"/etc/passwd", owner, owner); err != nil {
			t.Fatal(err)
		}
	}
	hasAttr := unix.Setxattr(root+"/etc/passwd", "user.note", []byte("a\x00b"), 0) == nil && runtime.GOOS == "linux"
	if err := os.Symlink("root", dir+"/link"); err != nil {
		t.Fatal(err)
	}
	for _, source := range []string{root, root + "/", dir + "/link"} {
		if r := run(t, d, "image", "import", source, "x:1"); r != imported {
			t.Fatalf("got %+v", r)
		}
		var names []string
		tr := tar.NewReader(bytes.NewReader(got.body))
		for {
			h, err := tr.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, fmt.Sprintf("%s %c %04o %s", h.Name, h.Typeflag, h.Mode, h.Linkname))
			if h.Name == "etc/passwd" {
				b, _ := io.ReadAll(tr)
				if string(b) != "etc/passwd" || h.Uid != owner || h.Uname != "" {
					t.Errorf("%q, %+v", b, h)
				}
				if hasAttr && h.PAXRecords["SCHILY.xattr.user.note"] != "a\x00b" {
					t.Errorf("attributes: %q", h.PAXRecords)
				}
			}
		}
		want := []string{"./ 5 0755 ", "bin/ 5 0755 ", "bin/ash 2 0777 sh", "bin/sh 0 4755 ", "dangling 2 0777 /none", "empty/ 5 1777 ",
			"etc/ 5 0755 ", "etc/passwd 0 0640 ", "etc/passwd- 1 0640 etc/passwd"}
		if diff := cmp.Diff(want, names); diff != "" {
			t.Errorf("%s: %s", source, diff)
		}
	}
	// A daemon that refuses early is heard, and the packing ends.
	other := start(t)
	other.refuse("POST /v0/images/import", 400, "invalid_request", "the name is not valid")
	if r := run(t, other, "image", "import", root, "X"); r != (result{"", "shard: the name is not valid\n", 1}) {
		t.Errorf("got %+v", r)
	}
}

func TestCompletion(t *testing.T) {
	d := start(t)
	d.answer("GET /v0/sandboxes", 200, sandboxes(t))
	d.answer("GET /v0/images", 200, `{"images":[{"reference":"index.docker.io/library/alpine:3.20"},{"reference":"reg.io/a:1"}],"next":null}`)
	d.answer("GET /v0/providers", 200, `{"providers":[{"name":"gvisor","available":true},{"name":"runc"}]}`)
	for _, tc := range []struct {
		args string
		want []string
	}{
		{"exec ", []string{"web"}},
		{"start ", []string{"bold-fern-0002", "bold-fern-0003"}},
		{"pause ", []string{"web"}},
		{"resume ", []string{"bold-fern-0005"}},
		{"remove bold-fern-0002 ", []string{"web", "bold-fern-0003", "bold-fern-0004", "bold-fern-0005"}},
		{"cp ", []string{"web:"}},
		{"create ", []string{"alpine:3.20", "reg.io/a:1"}},
		{"create --provider ", []string{"gvisor"}},
		{"list --format ", []string{"json", "table"}},
	} {
		args := append([]string{"__complete"}, strings.Split(tc.args, " ")...)
		got := run(t, d, args...)
		var words []string
		for _, l := range strings.Split(got.out, "\n") {
			if word, _, _ := strings.Cut(l, "\t"); word != "" && !strings.HasPrefix(word, ":") {
				words = append(words, word)
			}
		}
		if diff := cmp.Diff(tc.want, words); diff != "" || got.code != 0 {
			t.Errorf("%s: code %d %s%s", tc.args, got.code, diff, got.errs)
		}
	}
	if got := runApp(t, newApp(strings.NewReader(""), nil, nil), "--root", t.TempDir(), "__complete", "exec", ""); got.code != 0 || !strings.HasPrefix(got.out, ":") {
		t.Errorf("without a daemon: %+v", got)
	}
}

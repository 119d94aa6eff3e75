package testenv

import (
	"archive/tar"
	"bytes"
	"debug/elf"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// Entry is one member of a layer. The type follows from the fields: Link makes a symbolic link, a name ending in /
// a directory, Header anything else.
type Entry struct {
	Name   string
	Body   string
	Mode   int64 // 0 is 0644, for a directory 0755
	Link   string
	UID    int
	GID    int
	Header *tar.Header // overrides all but Body
}

// Layer makes an image layer of entries, in their order and exactly as given, hostile names included.
func Layer(t testing.TB, entries ...Entry) v1.Layer {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, e := range entries {
		h := e.Header
		if h == nil {
			h = &tar.Header{Name: e.Name, Mode: e.Mode, Uid: e.UID, Gid: e.GID, Typeflag: tar.TypeReg, ModTime: time.Unix(1577836800, 0)}
			switch {
			case e.Link != "":
				h.Typeflag, h.Linkname, h.Mode = tar.TypeSymlink, e.Link, 0o777
			case strings.HasSuffix(e.Name, "/"):
				h.Typeflag = tar.TypeDir
				if e.Mode == 0 {
					h.Mode = 0o755
				}
			case e.Mode == 0:
				h.Mode = 0o644
			}
		}
		if h.Typeflag == tar.TypeReg && h.Size == 0 {
			h.Size = int64(len(e.Body))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatalf("layer entry %q: %v", h.Name, err)
		}
		if _, err := io.WriteString(w, e.Body); err != nil {
			t.Fatalf("layer entry %q: %v", h.Name, err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	data := buf.Bytes()
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil })
	if err != nil {
		t.Fatal(err)
	}
	return layer
}

// Image puts layers together for this machine's architecture.
func Image(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	t.Helper()
	img, err := mutate.AppendLayers(empty.Image, layers...)
	if err != nil {
		t.Fatal(err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	file = file.DeepCopy()
	file.Architecture, file.OS, file.Config = runtime.GOARCH, "linux", config
	file.Created = v1.Time{Time: time.Unix(1577836800, 0).UTC()}
	if img, err = mutate.ConfigFile(img, file); err != nil {
		t.Fatal(err)
	}
	return img
}

// busybox is the path of a statically linked busybox on this host, and the names it answers to.
var busybox = sync.OnceValues(func() (string, []string) {
	for _, at := range []string{"/usr/bin/busybox", "/bin/busybox"} {
		f, err := elf.Open(at)
		if err != nil {
			continue
		}
		static := true
		for _, p := range f.Progs {
			static = static && p.Type != elf.PT_INTERP
		}
		_ = f.Close()
		if !static {
			continue
		}
		out, err := exec.Command(at, "--list").Output()
		if err != nil {
			continue
		}
		return at, strings.Fields(string(out))
	}
	return "", nil
})

// BusyboxEntries are the files of a root that holds busybox under all its names, and the few files that every
// distribution has: a passwd with root, a user dev (1000:1000) and nobody.
func BusyboxEntries(t testing.TB) []Entry {
	t.Helper()
	at, applets := busybox()
	if at == "" {
		t.Fatal("there is no statically linked busybox on this host: install busybox-static (make deps)")
	}
	body, err := os.ReadFile(at)
	if err != nil {
		t.Fatal(err)
	}
	entries := []Entry{
		{Name: "bin/"}, {Name: "etc/"}, {Name: "root/", Mode: 0o700}, {Name: "tmp/", Mode: 0o1777}, {Name: "home/"},
		{Name: "home/dev/", UID: 1000, GID: 1000},
		{Name: "usr/"}, {Name: "usr/bin/"}, {Name: "var/"},
		{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/bin/sh\ndev:x:1000:1000::/home/dev:/bin/sh\nnobody:x:65534:65534::/:/bin/false\n"},
		{Name: "etc/group", Body: "root:x:0:\ndev:x:1000:\nstaff:x:50:dev\nnogroup:x:65534:\n"},
		{Name: "bin/busybox", Body: string(body), Mode: 0o755},
	}
	for _, applet := range applets {
		if applet != "busybox" {
			entries = append(entries, Entry{Name: path.Join("bin", applet), Link: "busybox"})
		}
	}
	return append(entries, Entry{Name: "usr/bin/env", Link: "/bin/busybox"})
}

// BusyboxConfig is the configuration of the busybox image.
func BusyboxConfig() v1.Config {
	return v1.Config{Env: []string{"PATH=/usr/local/bin:/usr/bin:/bin", "FROM_IMAGE=yes"}, Cmd: []string{"sh"}}
}

// Busybox is the image that most tests use: about 2 MB, one layer, all of busybox.
func Busybox(t testing.TB) v1.Image {
	t.Helper()
	return Image(t, BusyboxConfig(), Layer(t, BusyboxEntries(t)...))
}

// Archive writes an image in docker-archive format into the test's directory and returns its path.
func Archive(t testing.TB, ref string, img v1.Image) string {
	t.Helper()
	tag, err := name.NewTag(ref, name.WeakValidation)
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "image.tar")
	if err := tarball.WriteToFile(file, tag, img); err != nil {
		t.Fatalf("write %s: %v", file, err)
	}
	return file
}

// PythonArchive is the path of an image with Python, built from this distribution's packages and cached.
func PythonArchive(t testing.TB) string {
	t.Helper()
	at, err := pythonArchive()
	if err != nil {
		t.Skipf("demo/build-image cannot build the Python image here: %v", err)
	}
	return at
}

var pythonArchive = sync.OnceValues(func() (string, error) {
	cmd := exec.Command(filepath.Join(Module(), "demo", "build-image"))
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%w\n%s", err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
})

// PythonRef is the reference that the Python archive carries.
const PythonRef = "local/python:latest"

package image

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"sort"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// e is one entry of a test tar.
type e struct {
	name, body, link string
	typ              byte
	mode             int64
	uid, gid         int
	pax              map[string]string
}

func tarOf(t testing.TB, entries ...e) []byte {
	t.Helper()
	var buf bytes.Buffer
	w := tar.NewWriter(&buf)
	for _, x := range entries {
		if x.typ == 0 {
			x.typ = tar.TypeReg
			if strings.HasSuffix(x.name, "/") {
				x.typ = tar.TypeDir
			}
		}
		if x.mode == 0 {
			x.mode = 0o644
			if x.typ == tar.TypeDir {
				x.mode = 0o755
			}
		}
		h := &tar.Header{Name: x.name, Typeflag: x.typ, Mode: x.mode, Linkname: x.link, Uid: x.uid, Gid: x.gid, PAXRecords: x.pax}
		if x.pax != nil {
			h.Format = tar.FormatPAX
		}
		if x.typ == tar.TypeReg {
			h.Size = int64(len(x.body))
		}
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, x.body); err != nil && x.typ == tar.TypeReg {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func gz(t testing.TB, b []byte) []byte {
	var buf bytes.Buffer
	w := gzip.NewWriter(&buf)
	if _, err := w.Write(b); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buf.Bytes()
}

func zst(t testing.TB, b []byte) []byte {
	w, err := zstd.NewWriter(nil)
	if err != nil {
		t.Fatal(err)
	}
	return w.EncodeAll(b, nil)
}

func digestOf(b []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(b)) }

// testImage is an image made by hand, so that tests can make it wrong in any way.
type testImage struct {
	blobs    map[string][]byte
	manifest []byte
	digest   string
	layers   []string // digests of the compressed layers
}

type testLayer struct{ plain, packed []byte }

func plainLayer(t testing.TB, entries ...e) testLayer {
	b := tarOf(t, entries...)
	return testLayer{b, gz(t, b)}
}

func makeImage(t testing.TB, arch string, cfg v1.Config, layers ...testLayer) *testImage {
	t.Helper()
	im := &testImage{blobs: map[string][]byte{}}
	file := v1.ConfigFile{OS: "linux", Architecture: arch, Config: cfg, RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{}}}
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1, Layers: []v1.Descriptor{}}
	for _, l := range layers {
		d, _ := v1.NewHash(digestOf(l.packed))
		diff, _ := v1.NewHash(digestOf(l.plain))
		im.blobs[d.String()] = l.packed
		im.layers = append(im.layers, d.String())
		file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, diff)
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: types.OCILayer, Size: int64(len(l.packed)), Digest: d})
	}
	raw, err := json.Marshal(file)
	if err != nil {
		t.Fatal(err)
	}
	d, _ := v1.NewHash(digestOf(raw))
	im.blobs[d.String()] = raw
	m.Config = v1.Descriptor{MediaType: types.OCIConfigJSON, Size: int64(len(raw)), Digest: d}
	if im.manifest, err = json.Marshal(m); err != nil {
		t.Fatal(err)
	}
	im.digest = digestOf(im.manifest)
	return im
}

// testRegistry is a registry that counts and can be told to misbehave.
type testRegistry struct {
	*httptest.Server
	host string
	real http.Handler

	mu    sync.Mutex
	gets  map[string]int // requests of blobs by digest
	wrong func(w http.ResponseWriter, r *http.Request) bool
}

func newRegistry(t testing.TB) *testRegistry {
	r := &testRegistry{real: registry.New(registry.Logger(log.New(io.Discard, "", 0))), gets: map[string]int{}}
	r.Server = httptest.NewServer(r)
	r.host = strings.TrimPrefix(r.URL, "http://")
	t.Cleanup(r.Close)
	return r
}

func (r *testRegistry) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	wrong := r.wrong
	if _, digest, ok := strings.Cut(req.URL.Path, "/blobs/sha256:"); ok && req.Method == http.MethodGet {
		r.gets["sha256:"+digest]++
	}
	r.mu.Unlock()
	if wrong != nil && wrong(w, req) {
		return
	}
	r.real.ServeHTTP(w, req)
}

func (r *testRegistry) misbehave(f func(w http.ResponseWriter, r *http.Request) bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.wrong = f
}

func (r *testRegistry) blobGets(digest string) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.gets[digest]
}

// do sends a request to the registry past any misbehaviour.
func (r *testRegistry) do(t testing.TB, method, path, contentType string, body []byte) {
	t.Helper()
	req := httptest.NewRequest(method, path, bytes.NewReader(body))
	req.Header.Set("Content-Type", contentType)
	rec := httptest.NewRecorder()
	r.real.ServeHTTP(rec, req)
	if rec.Code >= 300 {
		t.Fatalf("%s %s: %d %s", method, path, rec.Code, rec.Body)
	}
}

func (r *testRegistry) push(t testing.TB, repo, tag string, im *testImage) string {
	t.Helper()
	for digest, data := range im.blobs {
		r.do(t, http.MethodPost, "/v2/"+repo+"/blobs/uploads/?digest="+digest, "application/octet-stream", data)
	}
	r.pushManifest(t, repo, tag, types.OCIManifestSchema1, im.manifest)
	return r.host + "/" + repo + ":" + tag
}

func (r *testRegistry) pushManifest(t testing.TB, repo, tag string, mt types.MediaType, data []byte) {
	t.Helper()
	r.do(t, http.MethodPut, "/v2/"+repo+"/manifests/"+tag, string(mt), data)
}

func openStore(t testing.TB, dir string, o Options) *Store {
	t.Helper()
	// Syncing the host's disk waits for everybody else on it; only a power cut could tell the difference.
	o.syncfs = func(int) error { return nil }
	s, err := Open(dir, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func newStore(t testing.TB, r *testRegistry) *Store {
	o := Options{}
	if r != nil {
		o.Insecure = []string{r.host}
	}
	return openStore(t, filepath.Join(t.TempDir(), "images"), o)
}

func pull(t testing.TB, s *Store, ref string) *Image {
	t.Helper()
	img, err := s.Pull(context.Background(), ref, nil)
	if err != nil {
		t.Fatalf("pull %s: %v", ref, err)
	}
	return img
}

// wantCode checks the code of an error and that its public text holds each of the words.
func wantCode(t testing.TB, err error, code shard.Code, words ...string) {
	t.Helper()
	if shard.CodeOf(err) != code {
		t.Fatalf("got %v (%s), want %s", err, shard.CodeOf(err), code)
	}
	text := publicText(err)
	for _, w := range words {
		if !strings.Contains(text, w) {
			t.Errorf("text %q lacks %q", text, w)
		}
	}
	if strings.Contains(text, os.TempDir()) {
		t.Errorf("text %q holds a host path", text)
	}
}

// mountLayers mounts the image with overlayfs and gives the merged root.
func mountLayers(t testing.TB, img *Image) string {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("mounting needs root")
	}
	base := t.TempDir()
	for _, d := range []string{"upper", "work", "merged"} {
		if err := os.Mkdir(filepath.Join(base, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	merged := filepath.Join(base, "merged")
	// Relative lower directories need the mount to be made from the layers' directory.
	names := make([]string, len(img.Layers))
	for i, l := range img.Layers {
		names[i] = filepath.Base(l)
	}
	opts := fmt.Sprintf("lowerdir=%s,upperdir=%s/upper,workdir=%s/work", strings.Join(names, ":"), base, base)
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread has a working directory of its own and ends here
		err := unix.Unshare(unix.CLONE_FS)
		if err == nil {
			err = unix.Chdir(filepath.Dir(img.Layers[0]))
		}
		if err == nil {
			err = unix.Mount("overlay", merged, "overlay", 0, opts)
		}
		done <- err
	}()
	if err := <-done; err != nil {
		t.Fatalf("mount %d layers: %v", len(names), err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(merged, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return merged
}

// tree describes every file below root: one line each.
func tree(t testing.TB, root string) []string {
	t.Helper()
	var out []string
	inodes := map[uint64]string{}
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		fi, err := d.Info()
		if err != nil {
			return err
		}
		st := fi.Sys().(*syscall.Stat_t)
		rel, _ := filepath.Rel(root, p)
		line := fmt.Sprintf("%q %v %d:%d", rel, fi.Mode(), st.Uid, st.Gid)
		switch {
		case fi.Mode().IsRegular():
			data, err := os.ReadFile(p)
			if err != nil {
				return err
			}
			line += fmt.Sprintf(" %d %x", len(data), sum(data)[:4])
			if st.Nlink > 1 {
				if first, ok := inodes[st.Ino]; ok {
					line += " = " + first
				} else {
					inodes[st.Ino] = rel
				}
			}
		case fi.Mode()&fs.ModeSymlink != 0:
			target, _ := os.Readlink(p)
			line += " -> " + target
		}
		if rel != "." && !fi.IsDir() {
			line += fmt.Sprintf(" @%d", fi.ModTime().Unix())
		}
		out = append(out, line)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	sort.Strings(out)
	return out
}

// leftovers lists what is in the store's directories for passing things.
func leftovers(t testing.TB, s *Store, dirs ...string) []string {
	t.Helper()
	s.background.Wait()
	var out []string
	for _, d := range dirs {
		entries, err := os.ReadDir(s.path(d))
		if err != nil {
			t.Fatal(err)
		}
		for _, x := range entries {
			out = append(out, d+"/"+x.Name())
		}
	}
	return out
}

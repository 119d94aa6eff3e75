package test

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPull: an image comes from a registry, once; create reports its progress, and what is here is not asked for again.
func TestPull(t *testing.T) {
	t.Parallel()
	d := testenv.Start(t, testenv.Options{})
	ref := d.Lab().Push("some/busybox:1", testenv.Busybox(t))
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		d.Shard("image", "remove", ref)
		a := call(t, d, "POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: ref, Provider: provider}, "Accept", "application/x-ndjson")
		events, last := lines(t, a)
		var told []string
		for _, e := range events {
			told = append(told, e.Status)
		}
		story := strings.Join(told, " ")
		for _, want := range []string{"pulling", "layer", "unpacking", "unpacked", "pulled"} {
			if !strings.Contains(story, want) {
				t.Errorf("the events %q lack %s", story, want)
			}
		}
		if last["sandbox"] == nil {
			t.Fatalf("the last line is %v", last)
		}
		id := strings.TrimSpace(d.Must("list", "-q"))
		if got := sh(t, d, id, "echo pulled"); got != "pulled" {
			t.Errorf("exec says %q", got)
		}
		d.Must("remove", "--force", id)

		out := d.Must("pull", ref)
		lines := strings.Split(out, "\n")
		if len(lines) != 2 || !strings.HasSuffix(lines[0], "some/busybox:1") || !strings.HasPrefix(lines[1], "sha256:") {
			t.Errorf("pull printed %q", out)
		}
		if list := d.Must("image", "list"); !strings.Contains(list, "some/busybox") || !strings.HasPrefix(list, "REFERENCE") {
			t.Errorf("image list: %q", list)
		}
		// Held while a sandbox is made from it, whatever the sandbox does.
		id = box(t, d, provider, ref)
		refused(t, d.Shard("image", "remove", ref), id)
		if a := call(t, d, "DELETE", "/v0/images/"+ref, nil); a.code(t) != shard.CodeInUse || !bytes.Contains(a.Body, []byte("holders")) {
			t.Errorf("removal of a held image: %s", a.Body)
		}
		if out := d.Must("image", "prune"); strings.Contains(out, "busybox") {
			t.Errorf("prune removed a held image: %q", out)
		}
		d.Must("remove", "--force", id)
		d.Must("image", "remove", ref)
		refused(t, d.Shard("image", "remove", ref), "busybox")
		// The create that pulls by the CLI says what it does, on stderr alone.
		r := d.Shard("create", "--provider", provider, ref)
		if r.Code != 0 || !shard.IsID(strings.TrimSpace(r.Stdout)) || r.Stderr == "" {
			t.Errorf("create with a pull: %+v", r)
		}
		d.Must("remove", "--force", strings.TrimSpace(r.Stdout))
	})
}

// flaky is a registry that can be slow, cut connections, or lie.
type flaky struct {
	http.Handler
	cut   atomic.Int64 // bytes of a blob after which the connection ends; 0 is never
	slow  atomic.Int64 // nanoseconds to wait before each 64 KiB of a blob
	lie   atomic.Bool  // flip a byte of every blob
	blobs atomic.Int64 // requests for blobs
}

func (f *flaky) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/") {
		f.blobs.Add(1)
		// As real registries do, and ggcr's does not: any range of a blob.
		whole := httptest.NewRecorder()
		plain := r.Clone(r.Context())
		plain.Header.Del("Range")
		f.Handler.ServeHTTP(whole, plain)
		if whole.Code == http.StatusOK {
			w.Header().Set("Content-Type", "application/octet-stream")
			http.ServeContent(&faulty{ResponseWriter: w, f: f, left: f.cut.Load()}, r, "", time.Time{}, bytes.NewReader(whole.Body.Bytes()))
			return
		}
	}
	f.Handler.ServeHTTP(w, r)
}

type faulty struct {
	http.ResponseWriter
	f    *flaky
	left int64
	at   int64
}

func (w *faulty) Write(p []byte) (int, error) {
	total := 0
	for len(p) > 0 {
		piece := p[:min(len(p), 64<<10)]
		if wait := w.f.slow.Load(); wait > 0 {
			time.Sleep(time.Duration(wait))
		}
		if w.left > 0 && w.at+int64(len(piece)) > w.left {
			panic(http.ErrAbortHandler)
		}
		if w.f.lie.Load() && w.at == 0 {
			piece = bytes.Clone(piece)
			piece[len(piece)/2] ^= 1
		}
		n, err := w.ResponseWriter.Write(piece)
		total, w.at = total+n, w.at+int64(n)
		if err != nil {
			return total, err
		}
		if flusher, ok := w.ResponseWriter.(http.Flusher); ok && w.f.slow.Load() > 0 {
			flusher.Flush()
		}
		p = p[len(piece):]
	}
	return total, nil
}

// serveFlaky runs such a registry in the lab and pushes an image into it.
func serveFlaky(t *testing.T, lab *testenv.Lab, img v1.Image) (*flaky, string) {
	t.Helper()
	f := &flaky{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	listener := lab.ListenWorld("tcp", "198.18.20.1:5000")
	lab.Name("flaky.lab.test", "198.18.20.1")
	server := &http.Server{Handler: f, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	var wg sync.WaitGroup
	wg.Go(func() { _ = server.Serve(listener) })
	t.Cleanup(func() { _ = server.Close(); wg.Wait() })
	ref := "flaky.lab.test:5000/some/image:1"
	tag, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		t.Fatal(err)
	}
	transport := &http.Transport{DialContext: lab.DialFromHost}
	defer transport.CloseIdleConnections()
	if err := remote.Write(tag, img, remote.WithTransport(transport)); err != nil {
		t.Fatal(err)
	}
	return f, ref
}

// TestCase043: a pull that is cut, killed or given up costs nothing but time.
func TestCase043(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--insecure-registry", "flaky.lab.test:5000"}})
	big := testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, testenv.BusyboxEntries(t)...),
		testenv.Layer(t, testenv.Entry{Name: "big", Body: string(noise(24 << 20))}))
	f, ref := serveFlaky(t, lab, big)
	images := filepath.Join(d.Root, "images")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		// The connection is cut every 4 MiB: what has come is not asked for again.
		f.cut.Store(4 << 20)
		f.blobs.Store(0)
		d.Must("remove", "--force", box(t, d, provider, ref))
		if n := f.blobs.Load(); n < 6 || n > 12 {
			t.Errorf("25 MiB in pieces of 4 took %d requests", n)
		}
		d.Must("image", "remove", ref)
		// Every connection is cut after 1000 bytes: the create gives up.
		f.cut.Store(1000)
		r := d.Shard("create", "--provider", provider, ref)
		if r.Code != 1 || r.Stdout != "" {
			t.Errorf("a create whose pull is cut: %+v", r)
		}
		onlyFailed(t, d)
		f.cut.Store(0)

		// The client goes away in the middle: the create is cancelled and leaves nothing.
		f.slow.Store(int64(30 * time.Millisecond))
		cmd := d.Command("create", "--provider", provider, ref)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second)
		_ = cmd.Process.Signal(os.Interrupt)
		if _ = cmd.Wait(); cmd.ProcessState.ExitCode() == 0 {
			t.Error("an interrupted create exits 0")
		}
		testenv.Eventually(t, "an interrupted create leaves nothing", func() (bool, string) {
			out := d.Must("list", "--all", "-q")
			return out == "" || state(t, d, out) == shard.StateFailed || state(t, d, out) == shard.StateRunning, out
		})
		if out := d.Must("list", "--all", "-q"); out != "" {
			d.Must("remove", "--force", out)
		}

		// The daemon is killed in the middle.
		for range 3 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Second)
			c := d.Client()
			_, _ = c.Pull(ctx, ref, nil)
			cancel()
			c.Close()
			c = d.Client()
			var cut sync.WaitGroup
			cut.Go(func() { _, _ = c.Pull(t.Context(), ref, nil) })
			time.Sleep(300 * time.Millisecond)
			d.Kill9()
			cut.Wait()
			c.Close()
			d.Restart()
		}
		f.slow.Store(0)

		// And then it just works.
		id := box(t, d, provider, ref)
		if got := sh(t, d, id, "stat -c %s /big"); got != fmt.Sprint(24<<20) {
			t.Errorf("the file has %s bytes", got)
		}
		d.Must("remove", "--force", id)
		d.Must("image", "remove", ref)
		d.Must("image", "prune")
		if size := diskUse(images); size > 4<<20 {
			t.Errorf("%d bytes are left below images/ with no image", size)
		}
	})
}

// onlyFailed checks what creates left whose image could not be had: records that say failed and why, and nothing else
// on this host. It removes them.
func onlyFailed(t *testing.T, d *testenv.Daemon) {
	t.Helper()
	list, err := connect(t, d).AllSandboxes(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range list.Sandboxes {
		if s.State != shard.StateFailed || s.FailedReason == "" || strings.Contains(s.FailedReason, d.Root) {
			t.Errorf("a failed create left %+v", s)
		}
		if left := testenv.Observe(s.ID); !left.Empty() {
			t.Errorf("a failed create left on the host:\n%s", left)
		}
		d.Must("remove", s.ID)
	}
}

// TestRegistryFaults: a registry that is down, lies, or does not know the image is one plain line.
func TestRegistryFaults(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--insecure-registry", "flaky.lab.test:5000", "--insecure-registry", "closed.lab.test:5000"}})
	f, ref := serveFlaky(t, lab, testenv.Busybox(t))
	lab.Name("closed.lab.test", "198.18.20.2")
	closed := lab.ListenWorld("tcp", "198.18.20.2:5000")
	_ = closed.Close()
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for what, ref := range map[string]string{
			"a registry that is down":        "closed.lab.test:5000/a/b:c",
			"a registry that does not exist": "nosuch.lab.test:5000/a/b:c",
			"an image it does not have":      "flaky.lab.test:5000/no/such:image",
			"a digest it does not have":      "flaky.lab.test:5000/some/image@sha256:" + strings.Repeat("0", 64),
			"HTTP where TLS is due":          "198.18.20.1:5000/some/image:1",
		} {
			for _, args := range [][]string{{"create", "--provider", provider, ref}, {"pull", ref}} {
				r := d.Shard(args...)
				if r.Code != 1 || r.Stdout != "" || !strings.HasPrefix(lastLine(r.Stderr), "shard:") {
					t.Errorf("%s: %s: %+v", what, args[0], r)
				}
			}
		}
		f.lie.Store(true)
		for _, args := range [][]string{{"create", "--provider", provider, ref}, {"pull", ref}} {
			if r := d.Shard(args...); r.Code != 1 || !strings.HasPrefix(lastLine(r.Stderr), "shard:") {
				t.Errorf("a registry that lies: %s: %+v", args[0], r)
			}
		}
		f.lie.Store(false)
		onlyFailed(t, d)
		if out := d.Must("image", "list"); strings.Count(out, "\n") != 0 {
			t.Errorf("the failed pulls left %q", out)
		}
		d.Must("pull", ref)
		d.Must("image", "remove", ref)
	}, "runc")
}

func lastLine(s string) string {
	lines := strings.Split(strings.TrimSuffix(s, "\n"), "\n")
	return lines[len(lines)-1]
}

// TestCase040: an opaque folder hides what is below and nothing of its own layer, wherever its mark stands.
func TestCase040(t *testing.T) {
	t.Parallel()
	d := start(t)
	base := testenv.Layer(t, append(testenv.BusyboxEntries(t), testenv.Entry{Name: "a/"}, testenv.Entry{Name: "a/b/"}, testenv.Entry{Name: "a/b/foo", Body: "x"},
		testenv.Entry{Name: "a/gone", Body: "x"}, testenv.Entry{Name: "c/"}, testenv.Entry{Name: "c/stays", Body: "x"}, testenv.Entry{Name: "c/gone", Body: "x"})...)
	mark, fresh := testenv.Entry{Name: "a/.wh..wh..opq"}, testenv.Entry{Name: "a/new", Body: "new"}
	whiteout := testenv.Entry{Name: "c/.wh.gone"}
	d.Import("test/before:1", testenv.Image(t, testenv.BusyboxConfig(), base, testenv.Layer(t, testenv.Entry{Name: "a/"}, mark, fresh, whiteout)))
	d.Import("test/after:1", testenv.Image(t, testenv.BusyboxConfig(), base, testenv.Layer(t, testenv.Entry{Name: "a/"}, fresh, mark, whiteout)))
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for _, ref := range []string{"test/before:1", "test/after:1"} {
			id := box(t, d, provider, ref)
			if got := sh(t, d, id, "cd / && find a c | sort | tr '\\n' ' '; find / -xdev -name '.wh.*' | wc -l"); got != "a a/new c c/stays 0" {
				t.Errorf("%s holds %q", ref, got)
			}
			// What was deleted can be made again, and stays deleted otherwise, also over a stop.
			sh(t, d, id, "mkdir a/b && echo y >a/b/bar && rm -r c && mkdir c")
			d.Must("stop", id)
			d.Must("start", id)
			if got := sh(t, d, id, "cd / && find a c | sort | tr '\\n' ' '"); got != "a a/b a/b/bar a/new c " {
				t.Errorf("%s after changes holds %q", ref, got)
			}
		}
	})
}

// bomb is a gzip layer whose one file has n zero bytes.
func bomb(t *testing.T, n int64) v1.Layer {
	t.Helper()
	file := filepath.Join(t.TempDir(), "layer.tar.gz")
	f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	z, _ := gzip.NewWriterLevel(f, gzip.BestSpeed)
	w := tar.NewWriter(z)
	if err := w.WriteHeader(&tar.Header{Name: "zeros", Mode: 0o644, Size: n, Typeflag: tar.TypeReg}); err != nil {
		t.Fatal(err)
	}
	zeros, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zeros.Close()
	if _, err := io.CopyN(w, zeros, n); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	_ = f.Close()
	layer, err := tarball.LayerFromFile(file)
	if err != nil {
		t.Fatal(err)
	}
	return layer
}

// TestCase045: a small layer that becomes huge does not fill the host.
func TestCase045(t *testing.T) {
	t.Parallel()
	d := testenv.Start(t, testenv.Options{})
	other := d.Lab().Push("some/busybox:1", testenv.Busybox(t))
	// 24 GiB compress to 24 MiB at a thousandth; the file system must never hold them.
	ref := d.Lab().Push("some/bomb:1", testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, testenv.BusyboxEntries(t)...), bomb(t, 24<<30)))
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		neighbour := box(t, d, provider, other)
		before := diskUse(d.Root)
		var most atomic.Int64
		stop := make(chan struct{})
		var wg sync.WaitGroup
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				case <-time.After(200 * time.Millisecond):
					most.Store(max(most.Load(), diskUse(d.Root)))
				}
			}
		})
		r := d.Shard("create", "--provider", provider, "--disk", "4GiB", ref)
		close(stop)
		wg.Wait()
		if r.Code != 1 || r.Stdout != "" || !strings.HasPrefix(lastLine(r.Stderr), "shard:") {
			t.Errorf("a create of a bomb: %+v", r)
		}
		t.Logf("it said %q; at most %d MiB more on disk", lastLine(r.Stderr), (most.Load()-before)>>20)
		if got := sh(t, d, neighbour, "echo fine"); got != "fine" {
			t.Errorf("the neighbour says %q", got)
		}
		if after := diskUse(d.Root); after > before+64<<20 {
			t.Errorf("%d MiB are left on disk", (after-before)>>20)
		}
		d.Must("remove", "--force", neighbour)
	}, "runc")
}

// TestCase048: references and platforms.
func TestCase048(t *testing.T) {
	t.Parallel()
	d := testenv.Start(t, testenv.Options{})
	lab := d.Lab()
	busybox := testenv.Layer(t, testenv.BusyboxEntries(t)...)
	of := func(arch string) v1.Image {
		img := testenv.Image(t, testenv.BusyboxConfig(), busybox, testenv.Layer(t, testenv.Entry{Name: "arch", Body: arch}))
		file, err := img.ConfigFile()
		if err != nil {
			t.Fatal(err)
		}
		file = file.DeepCopy()
		file.Architecture = arch
		if img, err = mutate.ConfigFile(img, file); err != nil {
			t.Fatal(err)
		}
		return img
	}
	index := func(archs ...string) v1.ImageIndex {
		var idx v1.ImageIndex = empty.Index
		for _, arch := range archs {
			idx = mutate.AppendManifests(idx, mutate.IndexAddendum{Add: of(arch), Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: arch}}})
		}
		return idx
	}
	foreign := "s390x"
	multi := lab.Push("some/multi:1", index("ppc64le", foreign, runtime.GOARCH))
	alien := lab.Push("some/alien:1", index("ppc64le", foreign))
	alone := lab.Push("some/alone:1", of(foreign))
	first := of(runtime.GOARCH)
	moved := lab.Push("some/moved:1", first)
	digest, err := first.Digest()
	if err != nil {
		t.Fatal(err)
	}
	pinned := lab.Registry() + "/some/moved@" + digest.String()

	var packed bytes.Buffer
	z, _ := zstd.NewWriter(&packed)
	plain, err := busybox.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(z, plain); err != nil {
		t.Fatal(err)
	}
	_ = z.Close()
	zlayer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(packed.Bytes())), nil }, tarball.WithMediaType(types.OCILayerZStd))
	if err != nil {
		t.Fatal(err)
	}
	zstandard := lab.Push("some/zstd:1", testenv.Image(t, testenv.BusyboxConfig(), zlayer))
	many := []v1.Layer{busybox, testenv.Layer(t)}
	for i := range 118 {
		many = append(many, testenv.Layer(t, testenv.Entry{Name: fmt.Sprintf("many/%d", i), Body: "x"}))
	}
	deep := lab.Push("some/deep:1", testenv.Image(t, testenv.BusyboxConfig(), many...))

	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		if got := sh(t, d, box(t, d, provider, multi), "cat /arch"); got != runtime.GOARCH {
			t.Errorf("the index gave %s", got)
		}
		for _, ref := range []string{alien, alone} {
			r := d.Shard("create", "--provider", provider, ref)
			if r.Code != 1 || !strings.Contains(r.Stderr, runtime.GOARCH) {
				t.Errorf("an image for another platform: %+v", r)
			}
		}
		if got := sh(t, d, box(t, d, provider, zstandard), "echo unpacked"); got != "unpacked" {
			t.Errorf("zstd: %q", got)
		}
		if got := sh(t, d, box(t, d, provider, deep), "ls /many | wc -l"); got != "118" {
			t.Errorf("120 layers: %q", got)
		}
		// A tag means what is on the host until somebody pulls; a digest means itself.
		lab.Push("some/moved:1", first)
		d.Shard("image", "remove", moved)
		one := box(t, d, provider, moved)
		second := testenv.Image(t, testenv.BusyboxConfig(), busybox, testenv.Layer(t, testenv.Entry{Name: "arch", Body: "second"}))
		lab.Push("some/moved:1", second)
		if got := sh(t, d, box(t, d, provider, moved), "cat /arch"); got != runtime.GOARCH {
			t.Errorf("create asked the registry about a tag that is here: %q", got)
		}
		d.Must("pull", moved)
		if got := sh(t, d, box(t, d, provider, moved), "cat /arch"); got != "second" {
			t.Errorf("after a pull the tag gives %q", got)
		}
		if got := sh(t, d, one, "cat /arch"); got != runtime.GOARCH {
			t.Errorf("the pull changed a sandbox: %q", got)
		}
		if got := sh(t, d, box(t, d, provider, pinned), "cat /arch"); got != runtime.GOARCH {
			t.Errorf("the digest gave %q", got)
		}
	})
}

// TestHostileImage: what a layer says about paths is never believed.
func TestHostileImage(t *testing.T) {
	t.Parallel()
	d := start(t)
	canary := filepath.Join(t.TempDir(), "canary")
	if err := os.WriteFile(canary, []byte("host"), 0o600); err != nil {
		t.Fatal(err)
	}
	busybox := testenv.BusyboxEntries(t)
	up := strings.Repeat("../", 12)
	for name, entries := range map[string][]testenv.Entry{
		"climbing":       {{Name: up + "tmp/shard-climbed", Body: "x"}},
		"absolute":       {{Name: "/tmp/shard-climbed", Body: "x"}},
		"through a link": {{Name: "l", Link: "/tmp"}, {Name: "l/shard-climbed", Body: "x"}},
		"link up":        {{Name: "l", Link: up + "tmp"}, {Name: "l/shard-climbed", Body: "x"}},
		"hard link":      {{Header: &tar.Header{Name: "h", Typeflag: tar.TypeLink, Linkname: up + canary, Mode: 0o644}}},
	} {
		t.Run(name, func(t *testing.T) {
			img := testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(slices.Clone(busybox), entries...)...))
			_ = d.Shard("image", "import", testenv.Archive(t, "test/hostile:1", img), "test/hostile:1")
			if r := d.Shard("create", "--provider", "runc", "test/hostile:1"); r.Code == 0 {
				id := strings.TrimSpace(r.Stdout)
				d.Shard("exec", id, "sh", "-c", "echo pwned >/h")
				d.Must("remove", "--force", id)
			}
			if _, err := os.Lstat("/tmp/shard-climbed"); err == nil {
				_ = os.Remove("/tmp/shard-climbed")
				t.Error("a file of the image was written to the host")
			}
			if got, err := os.ReadFile(canary); err != nil || string(got) != "host" {
				t.Errorf("the canary: %q, %v", got, err)
			}
			d.Shard("image", "remove", "--force", "test/hostile:1")
		})
	}
}

// TestOddRoots: what an image has where a runtime mounts, or where we write, is inside the sandbox whatever it is; and / has the
// mode and the owner that the image gives it, until the guest changes them.
func TestOddRoots(t *testing.T) {
	t.Parallel()
	d := start(t)
	host := t.TempDir()
	for name, entries := range map[string][]testenv.Entry{
		"proc": {{Name: "proc", Link: host}}, "sys": {{Name: "sys", Link: "/nowhere"}}, "dev": {{Name: "dev", Link: "../../../" + host}},
		"devfile": {{Name: "dev", Body: "x"}}, "etc": {{Name: "etc", Link: "/private/etc"}, {Name: "private/etc/"}}, "etcout": {{Name: "etc", Link: "../../../" + host}},
		"mode": {{Name: "./", Mode: 0o1751, UID: 7, GID: 8}},
	} {
		kept := slices.DeleteFunc(testenv.BusyboxEntries(t), func(e testenv.Entry) bool {
			first, _, _ := strings.Cut(e.Name, "/")
			return first == strings.TrimSuffix(entries[0].Name, "/")
		})
		ref := "test/odd-" + name + ":1"
		d.Import(ref, testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(entries, kept...)...)))
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for _, name := range []string{"proc", "sys", "dev", "devfile", "etc", "etcout"} {
			r := d.Shard("create", "--provider", provider, "test/odd-"+name+":1")
			if r.Code != 0 {
				t.Errorf("%s: %s", name, r.Stderr)
				continue
			}
			id := strings.TrimSpace(r.Stdout)
			if out := d.Must("exec", id, "sh", "-c", "test -e /proc/1/stat && test -d /sys/class && echo x >/dev/null && cat /etc/hostname"); out != id {
				t.Errorf("%s: the host name is %q", name, out)
			}
			d.Must("remove", "--force", id)
		}
		if left, err := os.ReadDir(host); err != nil || len(left) > 0 {
			t.Fatalf("something was written to the host: %v, %v", left, err)
		}
		id := box(t, d, provider, "test/odd-mode:1")
		if out := d.Must("exec", id, "stat", "-c", "%a %u %g", "/"); out != "1751 7 8" {
			t.Errorf("/ is %s", out)
		}
		d.Must("exec", id, "chmod", "711", "/")
		d.Must("stop", id)
		d.Must("start", id)
		if out := d.Must("exec", id, "stat", "-c", "%a %u %g", "/"); out != "711 7 8" {
			t.Errorf("after chmod, stop and start / is %s", out)
		}
	})
}

package image

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/useshards/shard"
)

func TestPullEndToEnd(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	cfg := v1.Config{Env: []string{"PATH=/bin", "A=b=c d", "broken", "E="}, WorkingDir: "/srv/app", User: "1000:name", Labels: map[string]string{"k": "v"}}
	im := makeImage(t, runtime.GOARCH, cfg,
		plainLayer(t, e{name: "./", mode: 0o711}, e{name: "bin/"}, e{name: "bin/sh", body: "one", mode: 0o4755}, e{name: "tmp/", mode: 0o1777}),
		plainLayer(t, e{name: "bin/sh2", body: "two"}))
	ref := r.push(t, "team/app", "1.0", im)

	var events []shard.Progress
	img, err := s.Pull(context.Background(), ref, func(p shard.Progress) { events = append(events, p) })
	if err != nil {
		t.Fatal(err)
	}
	if img.Digest != im.digest || img.Reference != ref || len(img.Layers) != 2 || img.Size <= 0 {
		t.Errorf("image %+v", img)
	}
	want := Config{Env: []string{"PATH=/bin", "A=b=c d", "E="}, Workdir: "/srv/app", User: "1000:name", Labels: map[string]string{"k": "v"}}
	if got, _ := json.Marshal(img.Config); string(got) != string(must(json.Marshal(want))) {
		t.Errorf("config %s", got)
	}
	var order []string
	for _, p := range events {
		if len(order) == 0 || order[len(order)-1] != p.Status {
			order = append(order, p.Status)
		}
	}
	if got := strings.Join(order, " "); got != "pulling layer unpacking unpacked pulled" {
		t.Errorf("order of events: %s", got)
	}
	if p := events[0]; p.Reference != ref || p.Digest != im.digest || p.Layers != 2 || p.Bytes == 0 {
		t.Errorf("pulling: %+v", p)
	}
	root := mountLayers(t, img)
	if fi, err := os.Stat(filepath.Join(root, "bin/sh")); err != nil || fi.Mode() != 0o755|os.ModeSetuid {
		t.Errorf("bin/sh: %v %v", fi, err)
	}
	if got := leftovers(t, s, "tmp", "blobs"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}

	// Again: the registry is asked, nothing is fetched.
	events = nil
	if _, err := s.Pull(context.Background(), ref, func(p shard.Progress) { events = append(events, p) }); err != nil {
		t.Fatal(err)
	}
	if len(events) != 1 || events[0] != (shard.Progress{Status: "cached", Reference: ref, Digest: im.digest}) {
		t.Errorf("events of a cached pull: %+v", events)
	}
	for d := range im.blobs {
		if n := r.blobGets(d); n != 1 {
			t.Errorf("blob %s was fetched %d times", d, n)
		}
	}
	for _, name := range []string{ref, im.digest, r.host + "/team/app@" + im.digest, ref + "@" + im.digest} {
		if got, err := s.Get(name); err != nil || got.Digest != im.digest {
			t.Errorf("Get(%s) = %v, %v", name, got, err)
		}
	}
	// A second image on the same base shares its layer on disk; a reopened store knows both.
	base := plainLayer(t, e{name: "./", mode: 0o711}, e{name: "bin/"}, e{name: "bin/sh", body: "one", mode: 0o4755}, e{name: "tmp/", mode: 0o1777})
	second := makeImage(t, runtime.GOARCH, v1.Config{}, base, plainLayer(t, e{name: "x"}))
	events = nil
	img2, err := s.Pull(context.Background(), r.push(t, "team/b", "latest", second), func(p shard.Progress) { events = append(events, p) })
	if err != nil || img2.Layers[1] != img.Layers[1] {
		t.Errorf("base not shared: %v %v %v", img2, img, err)
	}
	if !slices.ContainsFunc(events, func(p shard.Progress) bool { return p.Status == "layer" && p.Present }) {
		t.Errorf("no layer was reported as present: %+v", events)
	}
	s = openStore(t, s.dir, s.o)
	if list, warnings, err := s.List(); err != nil || len(list) != 2 || len(warnings) != 0 || list[0].Digest != im.digest || list[0].Broken != "" {
		t.Errorf("list %+v %v %v", list, warnings, err)
	}
}

func must[T any](v T, err error) T {
	if err != nil {
		panic(err)
	}
	return v
}

// Case 48: indexes, foreign platforms, digests, moved tags, zstd, empty layers, very many layers.
func TestPlatforms(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	mine := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "mine"}))
	other := makeImage(t, "s390x", v1.Config{}, plainLayer(t, e{name: "other"}))
	r.push(t, "p", "mine", mine)
	r.push(t, "p", "other", other)
	desc := func(im *testImage, os, arch, variant string) v1.Descriptor {
		return v1.Descriptor{MediaType: types.OCIManifestSchema1, Size: int64(len(im.manifest)), Digest: must(v1.NewHash(im.digest)),
			Platform: &v1.Platform{OS: os, Architecture: arch, Variant: variant}}
	}
	index := func(tag string, mt types.MediaType, ds ...v1.Descriptor) []byte {
		raw := must(json.Marshal(v1.IndexManifest{SchemaVersion: 2, MediaType: mt, Manifests: ds}))
		r.pushManifest(t, "p", tag, mt, raw)
		return raw
	}
	attest := desc(other, "unknown", "unknown", "")
	raw := index("multi", types.OCIImageIndex, desc(other, "linux", "s390x", ""), attest, desc(other, "windows", runtime.GOARCH, ""),
		desc(other, "linux", runtime.GOARCH, "v9"), desc(mine, "linux", runtime.GOARCH, ""))
	index("list", types.DockerManifestList, desc(other, "linux", "s390x", ""), desc(mine, "linux", runtime.GOARCH, ""))
	index("foreign", types.OCIImageIndex, desc(other, "linux", "s390x", ""), desc(other, "linux", "riscv64", ""), attest,
		desc(other, "evil", strings.Repeat("y", 500), ""), desc(other, "evil\x1b[2J", "y", ""))

	repo := r.host + "/p"
	for _, ref := range []string{repo + ":multi", repo + ":list", repo + "@" + digestOf(raw), repo + ":multi@" + digestOf(raw)} {
		if img := pull(t, s, ref); img.Digest != mine.digest {
			t.Errorf("%s: chose %s, want %s", ref, img.Digest, mine.digest)
		}
	}
	if got, err := s.Get(repo + "@" + digestOf(raw)); err != nil || got.Digest != mine.digest {
		t.Errorf("Get by the digest of the index: %v %v", got, err)
	}
	_, err := s.Pull(context.Background(), repo+":foreign", nil)
	wantCode(t, err, shard.CodeInvalidRequest, "linux/"+runtime.GOARCH, "linux/riscv64, linux/s390x")
	if text := publicText(err); strings.Contains(text, "evil") {
		t.Errorf("the message shows what is no platform: %s", text)
	}
	_, err = s.Pull(context.Background(), repo+":other", nil)
	wantCode(t, err, shard.CodeInvalidRequest, "linux/s390x")
	_, err = s.Pull(context.Background(), repo+":nosuch", nil)
	wantCode(t, err, shard.CodeNotFound, "has no image", "p:nosuch")
	_, err = s.Pull(context.Background(), repo+"@"+digestOf([]byte("x")), nil)
	wantCode(t, err, shard.CodeNotFound, "has no image")
	_, err = s.Get(repo + ":nosuch")
	wantCode(t, err, shard.CodeNotFound, "pull it first")

	r.pushManifest(t, "p", "schema1", types.DockerManifestSchema1Signed, []byte(`{"schemaVersion":1,"name":"p","fsLayers":[]}`))
	_, err = s.Pull(context.Background(), repo+":schema1", nil)
	wantCode(t, err, shard.CodeInvalidRequest, "schema 1")
	r.pushManifest(t, "p", "helm", types.OCIManifestSchema1, []byte(`{"schemaVersion":2,"config":{"mediaType":"application/vnd.cncf.helm.config.v1+json","size":2,"digest":"`+digestOf([]byte("{}"))+`"},"layers":[]}`))
	_, err = s.Pull(context.Background(), repo+":helm", nil)
	wantCode(t, err, shard.CodeInvalidRequest, "not a container image", "helm")
}

func TestMovedTag(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	old := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "old"}))
	young := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "new"}))
	ref := r.push(t, "app", "latest", old)
	pull(t, s, ref)
	r.push(t, "app", "latest", young)
	if img, err := s.Get(ref); err != nil || img.Digest != old.digest {
		t.Fatalf("Get follows the registry: %v %v", img, err)
	}
	if img := pull(t, s, ref); img.Digest != young.digest {
		t.Fatalf("pull does not move the tag: %v", img)
	}
	list, _, err := s.List()
	if err != nil || len(list) != 2 || list[0].Reference != ref || list[0].Digest != young.digest || list[1].Reference != r.host+"/app@"+old.digest {
		t.Errorf("list %+v %v", list, err)
	}
	if _, err := s.Get(old.digest); err != nil {
		t.Errorf("the old image is gone: %v", err)
	}
}

func TestLayerForms(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	plain := tarOf(t, e{name: "zstd"})
	raw := tarOf(t, e{name: "raw"})
	empty := tarOf(t)
	layers := []testLayer{{plain, zst(t, plain)}, {raw, raw}, {empty, gz(t, empty)}, {empty, gz(t, empty)},
		// A zstd stream may begin with a skippable frame.
		{plain, append([]byte{0x50, 0x2a, 0x4d, 0x18, 2, 0, 0, 0, 9, 9}, zst(t, plain)...)}}
	img := pull(t, s, r.push(t, "forms", "latest", makeImage(t, runtime.GOARCH, v1.Config{}, layers...)))
	root := mountLayers(t, img)
	for _, f := range []string{"zstd", "raw"} {
		if _, err := os.Stat(filepath.Join(root, f)); err != nil {
			t.Error(err)
		}
	}
	none := pull(t, s, r.push(t, "none", "latest", makeImage(t, runtime.GOARCH, v1.Config{})))
	if got := tree(t, mountLayers(t, none)); len(got) != 1 {
		t.Errorf("an image without layers shows %v", got)
	}
	xz := []byte{0xfd, '7', 'z', 'X', 'Z', 0, 0, 0, 0}
	_, err := s.Pull(context.Background(), r.push(t, "xz", "latest", makeImage(t, runtime.GOARCH, v1.Config{}, testLayer{xz, xz})), nil)
	wantCode(t, err, shard.CodeInvalidRequest, "gzip and zstd")
}

func TestManyLayers(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	var layers []testLayer
	for i := range maxLayers {
		layers = append(layers, plainLayer(t, e{name: fmt.Sprintf("f%03d", i)}, e{name: "same", body: strconv.Itoa(i)}))
	}
	start := time.Now()
	img := pull(t, s, r.push(t, "many", "latest", makeImage(t, runtime.GOARCH, v1.Config{}, layers...)))
	t.Logf("%d layers pulled in %v", len(layers), time.Since(start))
	root := mountLayers(t, img)
	if got := string(must(os.ReadFile(filepath.Join(root, "same")))); got != strconv.Itoa(maxLayers-1) {
		t.Errorf("topmost layer shows %q", got)
	}
	if n := len(must(os.ReadDir(root))); n != maxLayers+1 {
		t.Errorf("%d files", n)
	}
	layers = append(layers, plainLayer(t, e{name: "one-more"}))
	_, err := s.Pull(context.Background(), r.push(t, "many", "more", makeImage(t, runtime.GOARCH, v1.Config{}, layers...)), nil)
	wantCode(t, err, shard.CodeInvalidRequest, "128 layers")
}

// noise is data that does not compress.
func noise(n int) string {
	b := make([]byte, n)
	src := rand.NewChaCha8([32]byte{1})
	_, _ = src.Read(b)
	return string(b)
}

// Case 43: the connection is cut every now and then; the download goes on from where it was.
func TestResume(t *testing.T) {
	defer func(d time.Duration) { retryDelay = d }(retryDelay)
	retryDelay = time.Millisecond
	r := newRegistry(t)
	s := newStore(t, r)
	im := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "big", body: noise(9 << 20)}))
	ref := r.push(t, "big", "latest", im)
	var mu sync.Mutex
	var served int64
	var ranges []string
	r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
		if !strings.HasSuffix(req.URL.Path, im.layers[0]) {
			return false
		}
		data := im.blobs[im.layers[0]]
		from := 0
		mu.Lock()
		ranges = append(ranges, req.Header.Get("Range"))
		mu.Unlock()
		if h := req.Header.Get("Range"); h != "" {
			from = must(strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(h, "bytes="), "-")))
			w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(data)-1, len(data)))
		}
		w.Header().Set("Content-Length", strconv.Itoa(len(data)-from))
		if from > 0 {
			w.WriteHeader(http.StatusPartialContent)
		}
		n, _ := w.Write(data[from:min(len(data), from+2<<20)])
		mu.Lock()
		served += int64(n)
		mu.Unlock()
		return true // the server cuts the connection when less than promised was sent
	})
	pull(t, s, ref)
	mu.Lock()
	defer mu.Unlock()
	if int(served) > len(im.blobs[im.layers[0]])+4<<20 {
		t.Errorf("%d bytes were served for %d, ranges %q", served, len(im.blobs[im.layers[0]]), ranges)
	}
	if len(ranges) < 4 || ranges[1] == "" {
		t.Errorf("ranges asked for: %q", ranges)
	}
}

// A pull that is given up, or whose daemon dies, leaves a part from which a later daemon goes on, and nothing that adds up.
func TestInterruptedPull(t *testing.T) {
	defer func(d time.Duration) { retryDelay = d }(retryDelay)
	retryDelay = time.Millisecond
	r := newRegistry(t)
	s := newStore(t, r)
	im := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "small"}), plainLayer(t, e{name: "big", body: noise(4 << 20)}))
	ref := r.push(t, "big", "latest", im)
	big := im.blobs[im.layers[1]]
	for range 20 {
		ctx, cancel := context.WithCancel(context.Background())
		r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.HasSuffix(req.URL.Path, im.layers[1]) {
				return false
			}
			from := 0
			if h := req.Header.Get("Range"); h != "" {
				from = must(strconv.Atoi(strings.TrimSuffix(strings.TrimPrefix(h, "bytes="), "-")))
				w.Header().Set("Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, len(big)-1, len(big)))
				w.WriteHeader(http.StatusPartialContent)
			}
			_, _ = w.Write(big[from:min(len(big), from+100<<10)])
			w.(http.Flusher).Flush()
			<-req.Context().Done()
			return true
		})
		go func() { // the client goes once something has arrived
			for {
				if fi, err := os.Stat(s.blobPath(im.layers[1]) + partExt); err == nil && fi.Size() > 0 {
					time.Sleep(20 * time.Millisecond)
					cancel()
					return
				}
				time.Sleep(time.Millisecond)
			}
		}()
		_, err := s.Pull(ctx, ref, nil)
		cancel()
		if !errors.Is(err, context.Canceled) {
			t.Fatal(err)
		}
		if got := leftovers(t, s, "tmp"); len(got) > 0 {
			t.Fatalf("left over after a cancelled pull: %v", got)
		}
		// A killed daemon leaves more than that.
		if err := os.MkdirAll(s.path("tmp", "layer-x", "fs", "deep"), 0o755); err != nil {
			t.Fatal(err)
		}
		s = openStore(t, s.dir, s.o)
	}
	if got := leftovers(t, s, "tmp", "blobs"); len(got) != 2 { // the small layer and the part of the big one
		t.Errorf("left over after 20 rounds: %v", got)
	}
	part := must(os.Stat(s.blobPath(im.layers[1]) + partExt)).Size()
	r.misbehave(nil)
	small := r.blobGets(im.layers[0])
	img := pull(t, s, ref)
	if part == 0 || r.blobGets(im.layers[0]) != small {
		t.Errorf("the pull began anew: part %d, small layer fetched %d → %d", part, small, r.blobGets(im.layers[0]))
	}
	if got := string(must(os.ReadFile(filepath.Join(img.Layers[0], "big")))); got != noise(4<<20) {
		t.Error("content is wrong")
	}
	if got := leftovers(t, s, "tmp", "blobs"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
}

// A registry that lies is refused, whatever it lies about, and nothing of it stays.
func TestLies(t *testing.T) {
	defer func(d time.Duration) { retryDelay = d }(retryDelay)
	retryDelay = time.Millisecond
	good := plainLayer(t, e{name: "f", body: noise(300 << 10)})
	lies := map[string]func(im *testImage, w http.ResponseWriter) bool{
		"other content": func(im *testImage, w http.ResponseWriter) bool {
			data := slices.Clone(im.blobs[im.layers[0]])
			data[1000] ^= 1
			_, _ = w.Write(data)
			return true
		},
		"longer": func(im *testImage, w http.ResponseWriter) bool {
			_, _ = w.Write(append(slices.Clone(im.blobs[im.layers[0]]), 0))
			return true
		},
		"endless": func(im *testImage, w http.ResponseWriter) bool {
			for range 1 << 16 {
				if _, err := w.Write(make([]byte, 64<<10)); err != nil {
					return true
				}
			}
			return true
		},
		"shorter": func(im *testImage, w http.ResponseWriter) bool {
			_, _ = w.Write(im.blobs[im.layers[0]][:1000])
			return true
		},
	}
	for name, lie := range lies {
		t.Run(name, func(t *testing.T) {
			r := newRegistry(t)
			s := newStore(t, r)
			im := makeImage(t, runtime.GOARCH, v1.Config{}, good)
			ref := r.push(t, "lie", "latest", im)
			r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
				return strings.HasSuffix(req.URL.Path, im.layers[0]) && lie(im, w)
			})
			_, err := s.Pull(context.Background(), ref, nil)
			wantCode(t, err, shard.CodeInternal, r.host, "digest or size")
			if got := leftovers(t, s, "tmp", "blobs", "layers", "manifests", "refs"); len(got) > 0 {
				t.Errorf("left over: %v", got)
			}
			r.misbehave(nil)
			pull(t, s, ref)
		})
	}
	t.Run("truncated for ever", func(t *testing.T) {
		r := newRegistry(t)
		s := newStore(t, r)
		im := makeImage(t, runtime.GOARCH, v1.Config{}, good)
		ref := r.push(t, "lie", "latest", im)
		r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.HasSuffix(req.URL.Path, im.layers[0]) {
				return false
			}
			w.Header().Set("Content-Length", strconv.Itoa(len(im.blobs[im.layers[0]])))
			_, _ = w.Write(im.blobs[im.layers[0]][:1000])
			return true
		})
		_, err := s.Pull(context.Background(), ref, nil)
		wantCode(t, err, shard.CodeInternal, r.host, "cut")
	})
	t.Run("manifest", func(t *testing.T) {
		r := newRegistry(t)
		s := newStore(t, r)
		im := makeImage(t, runtime.GOARCH, v1.Config{}, good)
		r.push(t, "lie", "latest", im)
		r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.Contains(req.URL.Path, "/manifests/") {
				return false
			}
			_, _ = w.Write(append(slices.Clone(im.manifest), ' '))
			return true
		})
		_, err := s.Pull(context.Background(), r.host+"/lie@"+im.digest, nil)
		wantCode(t, err, shard.CodeInternal, "not the one")
	})
	t.Run("diff id", func(t *testing.T) {
		r := newRegistry(t)
		s := newStore(t, r)
		wrong := testLayer{plain: []byte("other"), packed: good.packed}
		_, err := s.Pull(context.Background(), r.push(t, "lie", "latest", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "ok"}), wrong)), nil)
		wantCode(t, err, shard.CodeInvalidRequest, "configuration")
		if got := leftovers(t, s, "tmp", "blobs", "layers", "manifests", "refs"); len(got) > 0 {
			t.Errorf("left over: %v", got)
		}
	})
}

func TestStall(t *testing.T) {
	defer func(a, b time.Duration) { stallTimeout, retryDelay = a, b }(stallTimeout, retryDelay)
	stallTimeout, retryDelay = 100*time.Millisecond, time.Millisecond
	r := newRegistry(t)
	s := newStore(t, r)
	im := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "f", body: noise(1 << 20)}))
	ref := r.push(t, "stall", "latest", im)
	var hung sync.Once
	r.misbehave(func(w http.ResponseWriter, req *http.Request) (done bool) {
		if strings.HasSuffix(req.URL.Path, im.layers[0]) {
			hung.Do(func() {
				_, _ = w.Write([]byte(noise(100)))
				w.(http.Flusher).Flush()
				<-req.Context().Done()
				done = true
			})
		}
		return done
	})
	pull(t, s, ref)
}

// Two pulls of one image share the work; each gets progress; one that gives up does not end the other's.
func TestSharedPull(t *testing.T) {
	r := newRegistry(t)
	s := newStore(t, r)
	im := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "a", body: noise(1 << 20)}), plainLayer(t, e{name: "b"}))
	ref := r.push(t, "shared", "latest", im)
	also := r.push(t, "other", "tag", im)
	// The registry is slow until all callers are there.
	gate := make(chan struct{})
	r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, im.layers[0]) {
			<-gate
		}
		return false
	})
	impatient, give := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	errs := make([]error, 6)
	seen := make([]int, 6)
	started := make(chan struct{}, 64)
	for i := range errs {
		wg.Go(func() {
			ctx, name := context.Background(), ref
			if i == 0 {
				ctx = impatient
			}
			if i == 5 {
				name = also
			}
			_, errs[i] = s.Pull(ctx, name, func(p shard.Progress) {
				if p.Status == "pulling" {
					started <- struct{}{}
				}
				seen[i]++
			})
		})
	}
	for range errs {
		<-started
	}
	give()
	close(gate)
	wg.Wait()
	for i, err := range errs {
		if i == 0 != errors.Is(err, context.Canceled) {
			t.Errorf("caller %d: %v", i, err)
		}
		if i > 0 && seen[i] < 4 {
			t.Errorf("caller %d saw %d events", i, seen[i])
		}
	}
	for _, d := range im.layers {
		if n := r.blobGets(d); n != 1 {
			t.Errorf("layer %s fetched %d times", d, n)
		}
	}
	// Alone, a caller that gives up ends the work before it returns.
	im2 := makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "c"}))
	ref2 := r.push(t, "shared", "two", im2)
	ctx, cancel := context.WithCancel(context.Background())
	r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
		if strings.HasSuffix(req.URL.Path, im2.layers[0]) {
			cancel()
			<-req.Context().Done()
			return true
		}
		return false
	})
	if _, err := s.Pull(ctx, ref2, nil); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	if len(s.flights) != 0 || len(s.held) != 0 || len(s.pinned) != 0 || len(s.blobUsers) != 0 {
		t.Errorf("still counted: %v %v %v %v", s.flights, s.held, s.pinned, s.blobUsers)
	}
}

func TestTimeout(t *testing.T) {
	r := newRegistry(t)
	s := openStore(t, t.TempDir(), Options{Insecure: []string{r.host}, Timeout: 50 * time.Millisecond})
	r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
		<-req.Context().Done()
		return true
	})
	_, err := s.Pull(context.Background(), r.host+"/x", nil)
	wantCode(t, err, shard.CodeInternal, "did not end within 50ms")
}

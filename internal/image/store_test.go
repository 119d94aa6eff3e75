package image

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/useshards/shard"
)

func threeImages(t *testing.T) (s *Store, r *testRegistry, a, b, c *Image) {
	r = newRegistry(t)
	s = newStore(t, r)
	base := plainLayer(t, e{name: "base"})
	a = pull(t, s, r.push(t, "a", "1", makeImage(t, runtime.GOARCH, v1.Config{}, base, plainLayer(t, e{name: "a"}))))
	b = pull(t, s, r.push(t, "b", "1", makeImage(t, runtime.GOARCH, v1.Config{}, base, plainLayer(t, e{name: "b"}))))
	c = pull(t, s, r.push(t, "c", "1", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "c"}))))
	return s, r, a, b, c
}

func TestRemove(t *testing.T) {
	s, r, a, b, _ := threeImages(t)
	nobody := func(string) []string { return nil }
	if _, err := s.Remove("nosuch", false, nobody); shard.CodeOf(err) != shard.CodeNotFound {
		t.Error(err)
	}
	_, err := s.Remove(a.Reference, false, func(d string) []string { return []string{"box-of-" + d[:9]} })
	wantCode(t, err, shard.CodeInUse, a.Reference)
	if got := err.(*shard.Error).Holders; len(got) != 1 {
		t.Errorf("holders %v", got)
	}
	// A create under way holds it too.
	_, release, err := s.Acquire(a.Digest)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Remove(a.Reference, false, nil); shard.CodeOf(err) != shard.CodeInUse {
		t.Error(err)
	}
	// Force takes the name; the files stay as long as somebody holds them.
	warnings, err := s.Remove(a.Reference, true, nil)
	if err != nil || len(warnings) != 1 {
		t.Errorf("%v %v", warnings, err)
	}
	if _, err := s.Get(a.Reference); shard.CodeOf(err) != shard.CodeNotFound {
		t.Error(err)
	}
	if img, err := s.Get(a.Digest); err != nil || len(img.Layers) != 2 {
		t.Errorf("%v %v", img, err)
	}
	release()
	release()
	if removed, err := s.Prune(func(d string) bool { return d != a.Digest }); err != nil || !slices.Equal(removed, []string{a.Digest}) {
		t.Errorf("pruned %v %v", removed, err)
	}
	if _, err := os.Stat(a.Layers[0]); !os.IsNotExist(err) {
		t.Errorf("the layer of a removed image is there: %v", err)
	}
	if _, err := os.Stat(b.Layers[1]); err != nil {
		t.Errorf("a shared layer went: %v", err)
	}
	// One of two names goes without asking anybody.
	also := r.push(t, "also", "1", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "c"})))
	pull(t, s, also)
	if _, err := s.Remove(also, false, func(string) []string { t.Error("holders asked"); return nil }); err != nil {
		t.Error(err)
	}
	if _, _, err := s.Acquire(digestOf(nil)); shard.CodeOf(err) != shard.CodeNotFound {
		t.Error(err)
	}
}

func TestPrune(t *testing.T) {
	s, _, a, b, c := threeImages(t)
	removed, err := s.Prune(func(d string) bool { return d == b.Digest })
	if err != nil || !slices.Equal(removed, []string{a.Reference, c.Reference}) {
		t.Errorf("removed %v %v", removed, err)
	}
	if img, err := s.Get(b.Reference); err != nil || len(img.Layers) != 2 {
		t.Errorf("%v %v", img, err)
	}
	if got := leftovers(t, s, "layers"); len(got) != 4 { // two layers and their records
		t.Errorf("layers %v", got)
	}
	if removed, err := s.Prune(nil); err != nil || len(removed) != 1 {
		t.Errorf("removed %v %v", removed, err)
	}
	if got := leftovers(t, s, "layers", "manifests", "refs", "tmp", "blobs"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
}

// One damaged record never hides another image, and a pull repairs it.
func TestDamage(t *testing.T) {
	damage := map[string]func(s *Store, img *Image) string{
		"reference": func(s *Store, img *Image) string { return s.path("refs", fileName(img.Reference)) },
		"image":     func(s *Store, img *Image) string { return s.imagePath(img.Digest) },
		"layer":     func(s *Store, img *Image) string { return img.Layers[0] + recordExt },
		"files":     func(s *Store, img *Image) string { return img.Layers[0] },
	}
	for what, path := range damage {
		for how, content := range map[string]string{"cut": `{"version":1,`, "gone": "", "binary": "\x00\x01", "newer": `{"version":99}`, "empty": `{"version":1}`} {
			if what == "files" && how != "gone" || what == "reference" && how == "gone" {
				continue // files are there or not; a reference that is gone is no damage
			}
			t.Run(what+" "+how, func(t *testing.T) {
				s, _, a, b, c := threeImages(t)
				s.background.Wait() // it writes the records of layers once more
				file := path(s, c)
				if err := os.RemoveAll(file); err != nil {
					t.Fatal(err)
				}
				if how != "gone" {
					if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
						t.Fatal(err)
					}
				}
				if what != "image" { // else nothing would be freed, and this shows that nothing is
					s = openStore(t, s.dir, s.o)
				}
				if _, err := s.Get(c.Reference); shard.CodeOf(err) != shard.CodeNotFound || !strings.Contains(err.Error(), "pull it") {
					t.Errorf("Get: %v", err)
				}
				list, _, err := s.List()
				if err != nil || len(list) != 3 || list[0].Broken != "" || list[1].Broken != "" || list[2].Broken == "" || list[2].Reference != c.Reference {
					t.Errorf("list %+v %v", list, err)
				}
				for _, img := range []*Image{a, b} {
					if _, err := s.Get(img.Reference); err != nil {
						t.Error(err)
					}
				}
				pull(t, s, c.Reference)
				if list, _, _ := s.List(); list[2].Broken != "" {
					t.Errorf("not repaired: %+v", list[2])
				}
				if err := os.RemoveAll(file); err != nil {
					t.Fatal(err)
				}
				if how != "gone" {
					if err := os.WriteFile(file, []byte(content), 0o600); err != nil {
						t.Fatal(err)
					}
					if _, err := s.Remove(c.Reference, false, nil); err != nil {
						t.Errorf("a damaged image cannot be removed: %v", err)
					}
				}
			})
		}
	}
}

// A layer that the host did not get to disk before it went down is not trusted.
func TestUnsettled(t *testing.T) {
	s, _, a, b, c := threeImages(t)
	s.Close() // waits for what is under way
	for _, img := range []*Image{a, b, c} {
		r, err := s.readLayer(filepath.Base(img.Layers[0]))
		if err != nil {
			t.Fatal(err)
		}
		switch img {
		case a: // this boot
			r.Boot = s.boot
		case b: // another
			r.Boot = "11111111-2222-3333-4444-555555555555"
		case c:
			r.Boot = ""
		}
		if err := s.writeRecord(img.Layers[0]+recordExt, r); err != nil {
			t.Fatal(err)
		}
	}
	s = openStore(t, s.dir, s.o)
	for _, img := range []*Image{a, c} {
		if _, err := s.Get(img.Reference); err != nil {
			t.Error(err)
		}
	}
	if _, err := s.Get(b.Reference); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("an unsettled layer of another boot is used: %v", err)
	}
	if _, err := os.Stat(b.Layers[0]); !os.IsNotExist(err) {
		t.Errorf("it is still there: %v", err)
	}
	pull(t, s, b.Reference)
	s.background.Wait()
	if got := s.unsettled(); len(got) > 0 {
		t.Errorf("not settled: %v", got)
	}
}

func layoutTar(t testing.TB, im *testImage, annotations map[string]string) []byte {
	index := must(json.Marshal(map[string]any{"schemaVersion": 2, "manifests": []any{map[string]any{
		"mediaType": "application/vnd.oci.image.manifest.v1+json", "digest": im.digest, "size": len(im.manifest), "annotations": annotations}}}))
	es := []e{{name: "oci-layout", body: `{"imageLayoutVersion":"1.0.0"}`}, {name: "blobs/"}, {name: "blobs/sha256/"}, {name: "index.json", body: string(index)},
		{name: "blobs/sha256/" + im.digest[7:], body: string(im.manifest)}}
	for d, data := range im.blobs {
		es = append(es, e{name: "blobs/sha256/" + d[7:], body: string(data)})
	}
	return tarOf(t, es...)
}

func savedTar(t testing.TB, cfg v1.Config, tag string, layers ...[]byte) []byte {
	file := v1.ConfigFile{OS: "linux", Architecture: runtime.GOARCH, Config: cfg}
	entry := map[string]any{"Config": "abc.json", "RepoTags": []string{tag}}
	var es []e
	var paths []string
	for i, l := range layers {
		file.RootFS.DiffIDs = append(file.RootFS.DiffIDs, must(v1.NewHash(digestOf(l))))
		p := fmt.Sprintf("l%d/layer.tar", i)
		paths = append(paths, p)
		if i > 0 && bytes.Equal(l, layers[i-1]) { // as docker did for equal layers
			es = append(es, e{name: p, typ: '2', link: fmt.Sprintf("../l%d/layer.tar", i-1)})
			continue
		}
		es = append(es, e{name: p, body: string(l)})
	}
	entry["Layers"] = paths
	es = append(es, e{name: "abc.json", body: string(must(json.Marshal(file)))}, e{name: "manifest.json", body: string(must(json.Marshal([]any{entry})))})
	return tarOf(t, es...)
}

func TestImport(t *testing.T) {
	layer := tarOf(t, e{name: "./", mode: 0o755}, e{name: "./bin/", mode: 0o755}, e{name: "./bin/tool", body: "tool", mode: 0o755})
	cfg := v1.Config{Env: []string{"A=1", "B=2"}, User: "7", WorkingDir: "/w"}
	im := makeImage(t, runtime.GOARCH, cfg, testLayer{layer, zst(t, layer)})
	s := newStore(t, nil)
	load := func(data []byte, ref string, o ImportOptions) *Image {
		t.Helper()
		var last string
		img, err := s.Import(context.Background(), bytes.NewReader(data), ref, o, func(p shard.Progress) { last = p.Status })
		if err != nil {
			t.Fatal(err)
		}
		if got := names(t, mountLayers(t, img)); got != ". bin bin/tool" || last != "pulled" {
			t.Errorf("files %s, last event %s", got, last)
		}
		if got := leftovers(t, s, "tmp", "blobs"); len(got) > 0 {
			t.Errorf("left over: %v", got)
		}
		return img
	}
	layout := layoutTar(t, im, map[string]string{"org.opencontainers.image.ref.name": "team/app:2"})
	img := load(layout, "", ImportOptions{})
	if img.Digest != im.digest || img.Reference != "index.docker.io/team/app:2" || img.Config.User != "7" {
		t.Errorf("layout: %+v", img)
	}
	img = load(gz(t, layout), "other:1", ImportOptions{Env: []string{"B=3", "C=4"}, Workdir: "/x", User: "u"})
	if img.Digest == im.digest || strings.Join(img.Config.Env, " ") != "A=1 B=3 C=4" || img.Config.User != "u" || img.Config.Workdir != "/x" {
		t.Errorf("layout with settings: %+v", img)
	}
	if first, err := s.Get("team/app:2"); err != nil || first.Config.User != "7" {
		t.Errorf("settings of one import changed another: %+v %v", first, err)
	}
	img = load(savedTar(t, cfg, "saved:3", layer, layer), "", ImportOptions{})
	if img.Reference != "index.docker.io/library/saved:3" || len(img.Layers) != 2 || img.Config.Workdir != "/w" {
		t.Errorf("saved: %+v", img)
	}
	a := load(layer, "root:1", ImportOptions{Env: []string{"X=y"}})
	b := load(zst(t, layer), "root:2", ImportOptions{Env: []string{"X=y"}})
	if a.Digest != b.Digest || a.Layers[0] != b.Layers[0] || a.Config.Env[0] != "X=y" || a.Created.IsZero() {
		t.Errorf("rootfs: %+v %+v", a, b)
	}

	bad := func(code shard.Code, data []byte, ref, words string, o ImportOptions) {
		t.Helper()
		_, err := s.Import(context.Background(), bytes.NewReader(data), ref, o, nil)
		wantCode(t, err, code, words)
		if got := leftovers(t, s, "tmp"); len(got) > 0 {
			t.Errorf("left over: %v", got)
		}
	}
	bad(shard.CodeInvalidRequest, layer, "", "no name", ImportOptions{})
	bad(shard.CodeInvalidRequest, layer, "a@"+im.digest, "tag", ImportOptions{})
	bad(shard.CodeInvalidRequest, layer, "a:1", "KEY=VALUE", ImportOptions{Env: []string{"X"}})
	bad(shard.CodeInvalidRequest, []byte("no tar at all, just text that goes on a bit"), "a:1", "tar", ImportOptions{})
	bad(shard.CodeInvalidRequest, nil, "a:1", "tar", ImportOptions{})
	bad(shard.CodeInvalidRequest, layer[:700], "a:1", "", ImportOptions{})
	bad(shard.CodeInvalidRequest, gz(t, layer)[:100], "a:1", "", ImportOptions{})
	foreign := makeImage(t, "s390x", cfg, testLayer{layer, layer})
	bad(shard.CodeInvalidRequest, layoutTar(t, foreign, nil), "a:1", "linux/s390x", ImportOptions{})
	broken := makeImage(t, runtime.GOARCH, cfg, testLayer{tarOf(t, e{name: "x"}), layer})
	bad(shard.CodeInvalidRequest, layoutTar(t, broken, nil), "a:1", "content is not", ImportOptions{})
	wrongBlob := makeImage(t, runtime.GOARCH, cfg, testLayer{layer, layer})
	for d := range wrongBlob.blobs {
		if d != wrongBlob.layers[0] {
			wrongBlob.blobs[d] = append(wrongBlob.blobs[d], ' ')
		}
	}
	bad(shard.CodeInvalidRequest, layoutTar(t, wrongBlob, nil), "a:1", "damaged", ImportOptions{})

	ctx, cancel := context.WithCancel(context.Background())
	cancel()
	if _, err := s.Import(ctx, bytes.NewReader(layer), "a:1", ImportOptions{}, nil); err == nil {
		t.Error("a cancelled import goes on")
	}
}

func FuzzImport(f *testing.F) {
	layer := tarOf(f, e{name: "f", body: "x"})
	im := makeImage(f, runtime.GOARCH, v1.Config{}, testLayer{layer, layer})
	f.Add(layoutTar(f, im, nil))
	f.Add(savedTar(f, v1.Config{}, "a:1", layer))
	f.Add(layer)
	f.Add(gz(f, layer))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<20 {
			return
		}
		s := openStore(t, filepath.Join(t.TempDir(), "in"), Options{})
		s.limits = limits{base: 8 << 20, ratio: 1, perEntry: 4 << 10, image: 8 << 20}
		if _, err := s.Import(context.Background(), bytes.NewReader(data), "a:1", ImportOptions{}, nil); err != nil && shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Fatal(err)
		}
		if got := leftovers(t, s, "tmp"); len(got) > 0 {
			t.Fatal(got)
		}
	})
}

// Case 43: a daemon killed at any moment of a pull or an unpacking leaves a store with which the next one goes on.
func TestKilled(t *testing.T) {
	if dir := os.Getenv("SHARD_TEST_STORE"); dir != "" {
		s := openStore(t, dir, Options{Insecure: []string{"127.0.0.1"}})
		_, err := s.Pull(context.Background(), os.Getenv("SHARD_TEST_REF"), nil)
		t.Log(err)
		return
	}
	r := newRegistry(t)
	var layers []testLayer
	for i := range 8 {
		es := []e{{name: fmt.Sprintf("big%d", i), body: noise(3<<20 + i)}}
		for j := range 300 {
			es = append(es, e{name: fmt.Sprintf("d%d/f%d", i, j), body: "x"})
		}
		layers = append(layers, plainLayer(t, es...))
	}
	im := makeImage(t, runtime.GOARCH, v1.Config{}, layers...)
	ref := r.push(t, "big", "1", im)
	dir := filepath.Join(t.TempDir(), "images")
	finished := 0
	for i := range 20 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), "SHARD_TEST_STORE="+dir, "SHARD_TEST_REF="+ref)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		timer := time.AfterFunc(time.Duration(15+i*8)*time.Millisecond, func() { _ = cmd.Process.Kill() })
		if cmd.Wait() == nil {
			finished++
		}
		timer.Stop()
	}
	t.Logf("%d of 20 finished before they were killed", finished)
	s := openStore(t, dir, Options{Insecure: []string{r.host}})
	if got := leftovers(t, s, "tmp"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
	if got := leftovers(t, s, "blobs"); len(got) > 8 {
		t.Errorf("blobs add up: %v", got)
	}
	root := mountLayers(t, pull(t, s, ref))
	for i := range 8 {
		if got := string(must(os.ReadFile(filepath.Join(root, fmt.Sprintf("big%d", i))))); got != noise(3<<20+i) {
			t.Errorf("big%d is wrong", i)
		}
		if n := len(must(os.ReadDir(filepath.Join(root, fmt.Sprintf("d%d", i))))); n != 300 {
			t.Errorf("d%d has %d files", i, n)
		}
	}
	if got := leftovers(t, s, "tmp", "blobs"); len(got) > 0 {
		t.Errorf("left over: %v", got)
	}
	if removed, err := s.Prune(nil); err != nil || len(removed) != 1 || len(leftovers(t, s, "layers")) > 0 {
		t.Errorf("%v %v", removed, err)
	}
}

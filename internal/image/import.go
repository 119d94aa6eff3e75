package image

import (
	"archive/tar"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// maxIndexed bounds the entries of an image archive that are remembered; an image needs a few hundred.
const maxIndexed = 20_000

// Import makes an image from a tar stream: an OCI layout, a docker save, or a root file system, plain or compressed
// with gzip or zstd. ref names it; when empty, the name inside the tar does. Several images in one archive are refused
// unless ref picks one by name. progress may be nil; it is called from the caller's goroutine.
func (s *Store) Import(ctx context.Context, r io.Reader, ref string, o ImportOptions, progress func(shard.Progress)) (*Image, error) {
	if err := shard.CheckEnv(o.Env); err != nil {
		return nil, err
	}
	if ref != "" {
		var err error
		if ref, err = ParseReference(ref); err != nil {
			return nil, err
		}
		if strings.Contains(ref, "@") {
			return nil, shard.Invalidf("an imported image is named by a tag, not by a digest: %s", ref)
		}
	}
	spool, err := os.CreateTemp(s.path("tmp"), "import-")
	if err != nil {
		return nil, fmt.Errorf("make the file for an import: %w", err)
	}
	defer func() { _ = spool.Close(); _ = os.Remove(spool.Name()) }()
	diff, err := s.spool(ctx, spool, r)
	if err != nil {
		return nil, err
	}
	a, err := indexArchive(ctx, spool, diff)
	if err != nil {
		return nil, importError(err)
	}
	p, err := s.detect(a, ref)
	if err != nil {
		return nil, err
	}
	if ref == "" {
		if ref = p.name; ref == "" {
			return nil, shard.Invalidf("the archive holds no name for its image: give one, such as app:1.0")
		}
		if ref, err = ParseReference(ref); err != nil {
			return nil, err
		}
	}
	p.override(o)
	f := newFlight(func() {})
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		defer close(f.done)
		if f.img, f.err = s.importImage(ctx, f, ref, p); f.err != nil {
			s.freeLayers()
		}
	}()
	if err := f.join(ctx, progress); err != nil {
		cancel()
		<-f.done
		return nil, fmt.Errorf("import %s: %w", ref, err)
	}
	return f.img, f.err
}

// importable is an image found in an archive.
type importable struct {
	name, digest string
	cfg          *v1.ConfigFile
	sources      []*layerSource
}

// override puts what the caller set over the image's own settings, which makes another image of it.
func (p *importable) override(o ImportOptions) {
	if len(o.Env) == 0 && o.Workdir == "" && o.User == "" {
		return
	}
	p.cfg.Config.Env = shard.MergeEnv(p.cfg.Config.Env, o.Env...)
	if o.Workdir != "" {
		p.cfg.Config.WorkingDir = o.Workdir
	}
	if o.User != "" {
		p.cfg.Config.User = o.User
	}
	p.digest = configDigest(p.cfg, p.sources)
}

func (s *Store) importImage(ctx context.Context, f *flight, ref string, p *importable) (*Image, error) {
	defer s.hold(p.digest)()
	defer s.pin(p.sources)()
	b := &build{s: s, f: f, ref: ref, digest: p.digest, sources: p.sources,
		fetch: func(context.Context, int, func(int64)) error { return nil }}
	var total int64
	for _, src := range p.sources {
		total += src.size
	}
	f.publish(shard.Progress{Status: "pulling", Reference: ref, Digest: p.digest, Layers: len(p.sources), Bytes: total})
	if err := b.run(ctx); err != nil {
		return nil, err
	}
	return s.publishImage(f, refRecord{Version: recordVersion, Reference: ref, Asked: p.digest, Digest: p.digest}, p.cfg, p.sources)
}

// spool writes the decompressed stream to f, and gives the digest of what went out.
func (s *Store) spool(ctx context.Context, f *os.File, r io.Reader) (diff string, err error) {
	in := &countReader{r: &ctxReader{ctx: ctx, r: r}}
	plain, closer, err := decompress(in)
	if err != nil {
		return "", importError(err)
	}
	defer closer()
	sum := sha256.New()
	buf := make([]byte, 256<<10)
	b := budget{limits: s.limits}
	for {
		n, err := plain.Read(buf)
		sum.Write(buf[:n])
		if _, e := f.Write(buf[:n]); e != nil {
			return "", importError(e)
		}
		if e := b.wrote(int(f.Fd()), int64(n)); e != nil {
			return "", importError(e)
		}
		if b.disk > s.limits.of(in.n) {
			return "", importError(errBomb)
		}
		if err == io.EOF {
			return fmt.Sprintf("sha256:%x", sum.Sum(nil)), nil
		}
		if err != nil {
			return "", importError(err)
		}
	}
}

type countReader struct {
	r io.Reader
	n int64
}

func (c *countReader) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.n += int64(n)
	return n, err
}

// importError is layerError for an archive.
func importError(err error) error {
	if _, ok := errors.AsType[*shard.Error](err); ok || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return errDiskFull(err)
	}
	if errors.Is(err, errBomb) {
		return shard.Wrap(shard.CodeInvalidRequest, err, "the archive is refused: it unpacks to far more than its compressed size warrants, like a decompression bomb")
	}
	if _, system := errors.AsType[unix.Errno](err); system {
		return fmt.Errorf("import: %w", err)
	}
	return shard.Wrap(shard.CodeInvalidRequest, err, "the archive cannot be read as a tar: %v", err)
}

// archive is a tar file whose regular files can be read by name.
type archive struct {
	f    *os.File
	size int64
	// diff is the digest of the whole file.
	diff    string
	files   map[string]span
	links   map[string]string
	entries int
}

type span struct{ at, size int64 }

// indexArchive reads through the tar once. Of a file with very many entries, which can only be a root file system,
// the rest is not remembered.
func indexArchive(ctx context.Context, f *os.File, diff string) (*archive, error) {
	size, err := f.Seek(0, io.SeekEnd)
	if err != nil {
		return nil, err
	}
	if _, err := f.Seek(0, io.SeekStart); err != nil {
		return nil, err
	}
	a := &archive{f: f, size: size, diff: diff, files: map[string]span{}, links: map[string]string{}}
	at := &countReader{r: &ctxReader{ctx: ctx, r: f}}
	for tr := tar.NewReader(seekless{at}); ; a.entries++ {
		hdr, err := tr.Next()
		if err == io.EOF {
			break
		}
		if err != nil {
			return nil, err
		}
		if len(a.files)+len(a.links) >= maxIndexed {
			continue
		}
		switch name := path.Clean("/" + hdr.Name); hdr.Typeflag {
		case tar.TypeReg:
			if hdr.PAXRecords["GNU.sparse.major"] == "" && hdr.PAXRecords["GNU.sparse.map"] == "" { // those do not lie in one piece
				a.files[name] = span{at.n, hdr.Size}
			}
		case tar.TypeSymlink:
			a.links[name] = path.Join(path.Dir(name), hdr.Linkname)
		case tar.TypeLink:
			a.links[name] = path.Clean("/" + hdr.Linkname)
		}
	}
	if a.entries == 0 {
		return nil, errors.New("it has no entries")
	}
	return a, nil
}

// seekless hides Seek, so that the count of bytes read stays the position in the file.
type seekless struct{ io.Reader }

// open gives the content of a file of the archive, through links as old docker saves have them.
func (a *archive) open(name string) (*io.SectionReader, bool) {
	name = path.Clean("/" + name)
	for range 8 {
		if sp, ok := a.files[name]; ok {
			return io.NewSectionReader(a.f, sp.at, sp.size), true
		}
		next, ok := a.links[name]
		if !ok {
			break
		}
		name = next
	}
	return nil, false
}

// read reads a small file of the archive.
func (a *archive) read(name string, most int64) ([]byte, bool) {
	r, ok := a.open(name)
	if !ok || r.Size() > most {
		return nil, false
	}
	data, err := io.ReadAll(r)
	return data, err == nil
}

// detect finds out by content what the archive is.
func (s *Store) detect(a *archive, ref string) (*importable, error) {
	if layout, ok := a.read("oci-layout", 1<<10); ok {
		var v struct {
			Version string `json:"imageLayoutVersion"`
		}
		if data, ok := a.read("index.json", maxManifest); ok && json.Unmarshal(layout, &v) == nil && v.Version != "" {
			return s.ociLayout(a, ref, data)
		}
	}
	if data, ok := a.read("manifest.json", maxManifest); ok {
		var saved []savedImage
		if json.Unmarshal(data, &saved) == nil && len(saved) > 0 && saved[0].Config != "" {
			return s.dockerSave(a, ref, saved)
		}
	}
	return s.rootfs(a), nil
}

func blobName(digest string) string { return "blobs/sha256/" + strings.TrimPrefix(digest, "sha256:") }

// verified reads a blob of a layout whose digest must be right.
func (a *archive) verified(digest string, most int64) ([]byte, error) {
	if !digestPattern.MatchString(digest) {
		return nil, shard.Invalidf("the archive names a part of it with a bad digest")
	}
	data, ok := a.read(blobName(digest), most)
	if !ok {
		return nil, shard.Invalidf("the archive lacks %s, or it is too large", digest)
	}
	if fmt.Sprintf("sha256:%x", sum(data)) != digest {
		return nil, shard.Invalidf("the archive is damaged: the content of %s is another", digest)
	}
	return data, nil
}

const refNameAnnotation = "org.opencontainers.image.ref.name"

// nameOf is the full name that a tool wrote beside a manifest: containerd's and Docker's, else the specification's.
func nameOf(d v1.Descriptor) string {
	for _, key := range []string{"io.containerd.image.name", refNameAnnotation} {
		if n := d.Annotations[key]; n != "" {
			return n
		}
	}
	return ""
}

func (s *Store) ociLayout(a *archive, ref string, data []byte) (*importable, error) {
	index, err := v1.ParseIndexManifest(bytes.NewReader(data))
	if err != nil {
		return nil, shard.Wrap(shard.CodeInvalidRequest, err, "the index.json of the archive cannot be read")
	}
	what := cmp.Or(ref, "archive")
	names := map[string]bool{}
	var named *v1.Descriptor
	for i, d := range index.Manifests {
		n := nameOf(d)
		if n != "" {
			names[n] = true
		}
		if full, err := ParseReference(n); err == nil && full == ref && named == nil {
			named = &index.Manifests[i]
		}
	}
	name := ""
	if named != nil {
		index.Manifests = []v1.Descriptor{*named}
		index.Manifests[0].Platform = nil
	} else if len(names) > 1 {
		return nil, several(names)
	}
	for n := range names {
		name = n
	}
	if len(index.Manifests) == 1 {
		index.Manifests[0].Platform = nil // what it leads to says it better
	}
	digest, err := s.choose(what, index)
	if err != nil {
		return nil, err
	}
	for range 3 {
		data, err := a.verified(digest, maxManifest)
		if err != nil {
			return nil, err
		}
		next, m, err := s.readManifest(what, data, "")
		if err != nil {
			return nil, err
		}
		if m == nil {
			digest = next
			continue
		}
		raw, err := a.verified(m.Config.Digest.String(), maxConfig)
		if err != nil {
			return nil, err
		}
		cfg, err := s.readConfig(what, raw, len(m.Layers))
		if err != nil {
			return nil, err
		}
		p := &importable{name: name, digest: digest, cfg: cfg}
		chains := chainIDs(diffIDs(cfg))
		for i, d := range m.Layers {
			r, ok := a.open(blobName(d.Digest.String()))
			if !ok {
				return nil, shard.Invalidf("the archive lacks layer %s", d.Digest)
			}
			p.sources = append(p.sources, section(r, cfg.RootFS.DiffIDs[i].String(), chains[i], d.Digest.String()))
		}
		p.sources = orEmpty(p.sources)
		return p, nil
	}
	return nil, shard.Invalidf("the archive is an index of indexes of indexes: that is more than is followed")
}

func several(names map[string]bool) error {
	var list []string
	for n := range names {
		list = append(list, n)
	}
	slices.Sort(list)
	return shard.Invalidf("the archive holds several images (%.300s): name the one to import", strings.Join(list, ", "))
}

// savedImage is one entry of the manifest.json of docker save.
type savedImage struct {
	Config   string
	RepoTags []string
	Layers   []string
}

func (s *Store) dockerSave(a *archive, ref string, saved []savedImage) (*importable, error) {
	what := cmp.Or(ref, "archive")
	names := map[string]bool{}
	pick := -1
	for i, im := range saved {
		for _, n := range im.RepoTags {
			names[n] = true
			if full, err := ParseReference(n); err == nil && full == ref {
				pick = i
			}
		}
	}
	switch {
	case pick >= 0:
	case len(saved) > 1:
		return nil, several(names)
	default:
		pick = 0
	}
	im := saved[pick]
	raw, ok := a.read(im.Config, maxConfig)
	if !ok {
		return nil, shard.Invalidf("the archive lacks the configuration of its image, or it is too large")
	}
	if len(im.Layers) > maxLayers {
		return nil, shard.Invalidf("the image has %d layers: at most %d can be mounted", len(im.Layers), maxLayers)
	}
	cfg, err := s.readConfig(what, raw, len(im.Layers))
	if err != nil {
		return nil, err
	}
	p := &importable{cfg: cfg}
	if len(im.RepoTags) > 0 {
		p.name = im.RepoTags[0]
	}
	chains := chainIDs(diffIDs(cfg))
	for i, file := range im.Layers {
		r, ok := a.open(file)
		if !ok {
			return nil, shard.Invalidf("the archive lacks layer %d of its image", i+1)
		}
		diff := cfg.RootFS.DiffIDs[i].String()
		p.sources = append(p.sources, section(r, diff, chains[i], diff))
	}
	// The archive has no manifest; the one that a push without compression would make gives the digest.
	p.digest = manifestDigest(raw, p.sources)
	p.sources = orEmpty(p.sources)
	return p, nil
}

// rootfs takes the whole archive as the only layer of an image.
func (s *Store) rootfs(a *archive) *importable {
	src := section(io.NewSectionReader(a.f, 0, a.size), a.diff, a.diff, a.diff)
	hash, _ := v1.NewHash(a.diff) // our own digest: always valid
	cfg := &v1.ConfigFile{OS: "linux", Architecture: s.o.Arch, Created: v1.Time{Time: time.Now().UTC().Truncate(time.Second)},
		RootFS: v1.RootFS{Type: "layers", DiffIDs: []v1.Hash{hash}}}
	p := &importable{cfg: cfg, sources: []*layerSource{src}}
	p.digest = configDigest(cfg, p.sources)
	return p
}

// configDigest is the digest of an image that we put together: the same content and settings give the same one, at any
// time.
func configDigest(cfg *v1.ConfigFile, sources []*layerSource) string {
	timeless := *cfg
	timeless.Created = v1.Time{}
	raw, _ := json.Marshal(timeless) // of strings and maps of strings: cannot fail
	return manifestDigest(raw, sources)
}

func section(r *io.SectionReader, diff, chain, digest string) *layerSource {
	return &layerSource{diffID: diff, chain: chain, digest: digest, size: r.Size(), open: func() (io.ReadCloser, error) {
		return io.NopCloser(io.NewSectionReader(r, 0, r.Size())), nil
	}}
}

// emptyDiff is the diff id of a tar without entries.
var emptyDiff = fmt.Sprintf("sha256:%x", sha256.Sum256(make([]byte, 1024)))

// orEmpty gives an image without layers an empty one: a root must have something to be mounted from.
func orEmpty(sources []*layerSource) []*layerSource {
	if len(sources) > 0 {
		return sources
	}
	return []*layerSource{{diffID: emptyDiff, chain: emptyDiff, digest: emptyDiff, open: func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(make([]byte, 1024))), nil
	}}}
}

func manifestDigest(config []byte, sources []*layerSource) string {
	m := v1.Manifest{SchemaVersion: 2, MediaType: types.OCIManifestSchema1}
	m.Config.MediaType, m.Config.Size = types.OCIConfigJSON, int64(len(config))
	m.Config.Digest, _, _ = v1.SHA256(bytes.NewReader(config))
	for _, src := range sources {
		h, _ := v1.NewHash(src.diffID) // checked when the configuration was read
		m.Layers = append(m.Layers, v1.Descriptor{MediaType: types.OCIUncompressedLayer, Size: src.size, Digest: h})
	}
	raw, _ := json.Marshal(m) // of strings and numbers: cannot fail
	return fmt.Sprintf("sha256:%x", sum(raw))
}

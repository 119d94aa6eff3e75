package image

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// Store is the set of images under one directory. Only one Store may have it open.
type Store struct {
	dir    string
	o      Options
	limits limits
	guard  *guard
	locks  keyed
	// boot names this boot of the host.
	boot string
	// background is what Close waits for.
	background sync.WaitGroup

	// records serialises changes of records and the sweeping of layers. It is taken before mu, and held over small
	// writes only: never over a download, an unpacking or the deletion of a tree.
	records sync.Mutex

	mu      sync.Mutex
	flights map[string]*flight
	// held counts by digest who must not lose the image; blobUsers likewise for blobs.
	held, blobUsers map[string]int
	// pinned counts by short name the layers of pulls under way.
	pinned map[string]int
	// The state of the background sync: one runs, another round is wanted, none may begin.
	settling, settleAgain, closed bool
}

// Open opens the store in dir, making it if needed, and clears away what a killed daemon left, except downloads that
// can be continued.
func Open(dir string, o Options) (*Store, error) {
	if o.Timeout == 0 {
		o.Timeout = 30 * time.Minute
	}
	o.Arch = hostArch(o.Arch)
	if o.syncfs == nil {
		o.syncfs = unix.Syncfs
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	if o.Keychain == nil {
		setHome()
		o.Keychain = authn.DefaultKeychain
	}
	dir, err := filepath.Abs(dir)
	if err != nil {
		return nil, err
	}
	s := &Store{dir: dir, o: o, limits: defaultLimits, guard: newGuard(o), flights: map[string]*flight{}, held: map[string]int{},
		blobUsers: map[string]int{}, pinned: map[string]int{}, boot: bootID()}
	if err := os.RemoveAll(s.path("tmp")); err != nil {
		return nil, fmt.Errorf("clear temporary files of images: %w", err)
	}
	for _, sub := range []string{"", "refs", "manifests", "layers", "blobs", "tmp"} {
		if err := os.MkdirAll(s.path(sub), 0o700); err != nil {
			return nil, fmt.Errorf("make the image store: %w", err)
		}
	}
	if err := s.dropUnsettled(); err != nil {
		return nil, fmt.Errorf("drop layers that never got to disk: %w", err)
	}
	s.sweepBlobs()
	s.freeLayers()
	s.settle()
	return s, nil
}

// LayersDir is the directory that holds every unpacked layer under its short name.
func (s *Store) LayersDir() string { return s.path("layers") }

// Get finds an image on the host by any reference that names it (name, name:tag, name@digest, or a bare digest);
// not_found when it is not there, or not whole.
func (s *Store) Get(ref string) (*Image, error) {
	if digestPattern.MatchString(ref) {
		return s.load(ref, ref)
	}
	full, err := ParseReference(ref)
	if err != nil {
		return nil, err
	}
	var r refRecord
	err = readRecord(s.path("refs", fileName(full)), &r)
	if err == nil && r.Reference == full {
		return s.load(full, r.Digest)
	}
	// The digest may have come to the host under a tag, as the index's or as the manifest's. It names content, so that
	// is the same image.
	if _, digest, ok := strings.Cut(full, "@"); ok {
		good, _, _ := s.refs()
		if i := slices.IndexFunc(good, func(r refRecord) bool { return r.Asked == digest }); i >= 0 {
			digest = good[i].Digest
		}
		return s.load(full, digest)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, shard.Wrap(shard.CodeNotFound, err, "the record of image %s is damaged: pull it again", full)
	}
	return nil, shard.Errorf(shard.CodeNotFound, "image %s is not on this host: pull it first", full)
}

// load reads an image by digest and checks that each of its layers is there.
func (s *Store) load(ref, digest string) (*Image, error) {
	r, err := s.readImage(digest)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, shard.Errorf(shard.CodeNotFound, "image %s is not on this host: pull it first", ref)
	}
	if err != nil {
		return nil, shard.Wrap(shard.CodeNotFound, err, "the record of image %s is damaged: pull it again", ref)
	}
	img := &Image{Reference: ref, Digest: digest, Created: r.Created, Config: r.Config}
	for _, short := range slices.Backward(r.Layers) {
		l, err := s.readLayer(short)
		if err != nil {
			return nil, shard.Wrap(shard.CodeNotFound, err, "a layer of image %s is missing on this host: pull it again", ref)
		}
		img.Size += l.Bytes
		img.Layers = append(img.Layers, s.path("layers", short))
		if l.Opaque {
			break
		}
	}
	return img, nil
}

// hold keeps the image of a digest, there or not yet, from being freed.
func (s *Store) hold(digest string) (release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[digest]++
	return sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held[digest]--; s.held[digest] == 0 {
			delete(s.held, digest)
		}
	})
}

func (s *Store) isHeld(digest string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[digest] > 0
}

// Acquire is Get by digest, and keeps the image from Remove and Prune until release is called, once or more often.
func (s *Store) Acquire(digest string) (img *Image, release func(), err error) {
	release = s.hold(digest)
	if img, err = s.Get(digest); err != nil {
		release()
		return nil, nil, err
	}
	return img, release, nil
}

// pin keeps layers that no record names yet from being freed.
func (s *Store) pin(sources []*layerSource) (unpin func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, src := range sources {
		s.pinned[shortName(src.chain)]++
	}
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, src := range sources {
			short := shortName(src.chain)
			if s.pinned[short]--; s.pinned[short] == 0 {
				delete(s.pinned, short)
			}
		}
	}
}

// commitImage records an image and what names it.
func (s *Store) commitImage(img imageRecord, ref refRecord) error {
	s.records.Lock()
	defer s.records.Unlock()
	if err := s.writeRecord(s.imagePath(img.Digest), img); err != nil {
		return err
	}
	return s.setRefLocked(ref)
}

// setRef makes a reference mean a digest.
func (s *Store) setRef(ref refRecord) error {
	s.records.Lock()
	defer s.records.Unlock()
	return s.setRefLocked(ref)
}

func (s *Store) setRefLocked(ref refRecord) error {
	path := s.path("refs", fileName(ref.Reference))
	var old refRecord
	if err := readRecord(path, &old); err == nil {
		if old == ref {
			return nil
		}
		if err := s.keepNamed(old, ref); err != nil {
			return err
		}
	}
	return s.writeRecord(path, ref)
}

// keepNamed gives the image that a moved tag leaves behind the name repository@digest, unless it has another.
func (s *Store) keepNamed(old, moved refRecord) error {
	if old.Digest == moved.Digest {
		return nil
	}
	good, _, err := s.refs()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(good, func(r refRecord) bool { return r.Digest == old.Digest && r.Reference != old.Reference }) {
		return nil
	}
	r, err := parse(old.Reference)
	if err != nil {
		return nil
	}
	name := r.Context().Name() + "@" + old.Digest
	return s.writeRecord(s.path("refs", fileName(name)), refRecord{Version: recordVersion, Reference: name, Asked: old.Digest, Digest: old.Digest})
}

// List gives a record for each reference, sorted; what cannot be read has Broken set. warnings tell of damage that
// belongs to no reference.
func (s *Store) List() (images []shard.Image, warnings []string, err error) {
	good, bad, err := s.refs()
	if err != nil {
		return nil, nil, fmt.Errorf("list images: %w", err)
	}
	images = []shard.Image{}
	named := map[string]bool{}
	for _, r := range good {
		named[r.Digest] = true
		img, err := s.load(r.Reference, r.Digest)
		if err != nil {
			images = append(images, shard.Image{Reference: r.Reference, Digest: r.Digest, Broken: publicText(err)})
			continue
		}
		images = append(images, shard.Image{Reference: r.Reference, Digest: r.Digest, Size: img.Size, Created: img.Created})
	}
	for _, file := range slices.Sorted(maps.Keys(bad)) {
		s.o.Log.Warn("unreadable image reference", "file", file, "err", bad[file])
		ref, ok := refOfFile(file)
		if !ok {
			warnings = append(warnings, fmt.Sprintf("the record %s of an image reference is damaged", shard.Quote(file)))
			continue
		}
		images = append(images, shard.Image{Reference: ref, Broken: "the record of this reference is damaged: pull it again, or remove it"})
	}
	slices.SortFunc(images, func(a, b shard.Image) int { return strings.Compare(a.Reference, b.Reference) })
	entries, err := os.ReadDir(s.path("manifests"))
	if err != nil {
		return nil, nil, fmt.Errorf("list images: %w", err)
	}
	for _, e := range entries {
		digest := "sha256:" + strings.TrimSuffix(e.Name(), recordExt)
		if named[digest] {
			continue
		}
		if _, err := s.readImage(digest); err != nil && !errors.Is(err, fs.ErrNotExist) {
			warnings = append(warnings, fmt.Sprintf("the record %s of an image is damaged: image prune removes it", shard.Quote(e.Name())))
		}
	}
	return images, warnings, nil
}

func publicText(err error) string {
	if e, ok := errors.AsType[*shard.Error](err); ok {
		return e.Message
	}
	return "it cannot be read: pull it again"
}

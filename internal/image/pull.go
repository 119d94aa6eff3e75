package image

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sync/errgroup"

	"github.com/useshards/shard"
)

// parallel is how many layers of one image are downloaded and unpacked at once.
const parallel = 3

// Pull asks the registry what ref means, brings what the host lacks, and names the image ref. Pulls of the same
// reference or layers share the work: each caller gets the progress from the beginning, the work ends when the last
// caller's context does. progress may be nil; it is called from the caller's goroutine.
func (s *Store) Pull(ctx context.Context, ref string, progress func(shard.Progress)) (*Image, error) {
	full, err := ParseReference(ref)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	f := s.flights[full]
	if f == nil {
		fctx, cancel := context.WithTimeoutCause(context.WithoutCancel(ctx), s.o.Timeout,
			shard.Wrap(shard.CodeInternal, context.DeadlineExceeded, "the pull of %s did not end within %s", full, s.o.Timeout))
		f = newFlight(cancel)
		s.flights[full] = f
		go func() {
			f.img, f.err = s.pull(fctx, full, f)
			cancel()
			s.mu.Lock()
			if s.flights[full] == f {
				delete(s.flights, full)
			}
			s.mu.Unlock()
			close(f.done)
		}()
	}
	f.waiters++
	s.mu.Unlock()

	err = f.join(ctx, progress)
	s.mu.Lock()
	f.waiters--
	last := f.waiters == 0
	if last && s.flights[full] == f {
		delete(s.flights, full) // whoever comes now begins anew
	}
	s.mu.Unlock()
	if err != nil {
		if last {
			f.cancel()
			<-f.done // nothing of the pull outlives its last caller
		}
		return nil, fmt.Errorf("pull %s: %w", full, err)
	}
	return f.img, f.err
}

// pull is the work of one flight.
func (s *Store) pull(ctx context.Context, full string, f *flight) (*Image, error) {
	img, err := s.pullFrom(ctx, full, f)
	s.sweepBlobs()
	if err == nil {
		return img, nil
	}
	if hopeless(err) {
		s.freeLayers() // else they are kept for the next attempt
	}
	if cause := context.Cause(ctx); cause != nil {
		if _, ok := errors.AsType[*shard.Error](cause); ok { // the time bound, in words
			return nil, cause
		}
	}
	s.o.Log.Warn("pull failed", "image", full, "err", err)
	return nil, err
}

func (s *Store) pullFrom(ctx context.Context, full string, f *flight) (*Image, error) {
	r, ref, err := s.connect(ctx, full)
	if err != nil {
		return nil, err
	}
	res, err := s.resolve(ctx, r, ref)
	if err != nil {
		return nil, err
	}
	rec := refRecord{Version: recordVersion, Reference: full, Asked: res.asked, Digest: res.digest}
	release := s.hold(res.digest)
	defer release()
	if img, err := s.load(full, res.digest); err == nil {
		if err := s.setRef(rec); err != nil {
			return nil, err
		}
		f.publish(shard.Progress{Status: "cached", Reference: full, Digest: res.digest})
		return img, nil
	}
	cfg, err := s.config(ctx, r, ref, res.manifest)
	if err != nil {
		return nil, err
	}
	sources := s.remoteLayers(res.manifest, cfg)
	defer s.pin(sources)()
	if err := s.room(sources); err != nil {
		return nil, err
	}
	total := res.manifest.Config.Size
	digests := make([]string, len(sources))
	for i, src := range sources {
		total += src.size
		digests[i] = src.digest
	}
	f.publish(shard.Progress{Status: "pulling", Reference: full, Digest: res.digest, Layers: len(sources), Bytes: total})
	b := &build{s: s, f: f, ref: full, digest: res.digest, sources: sources,
		fetch: func(ctx context.Context, i int, had func(int64)) error {
			if i == len(res.manifest.Layers) {
				return nil // the empty layer of an image without any
			}
			return s.download(ctx, r, ref, res.manifest.Layers[i], had)
		}}
	releaseBlobs := s.useBlobs(digests)
	err = b.run(ctx)
	// After a cut the blobs are worth keeping; not when they did their work, or never will.
	releaseBlobs(err == nil || hopeless(err))
	if err != nil {
		return nil, err
	}
	return s.publishImage(f, rec, cfg, sources)
}

// hopeless says that what was downloaded is no use for another attempt.
func hopeless(err error) bool { return errors.Is(err, errContent) || errors.Is(err, errNoRoom) }

// remoteLayers describes the layers of a manifest, bottom first.
func (s *Store) remoteLayers(m *v1.Manifest, cfg *v1.ConfigFile) []*layerSource {
	sources := make([]*layerSource, len(m.Layers))
	chains := chainIDs(diffIDs(cfg))
	for i, d := range m.Layers {
		digest := d.Digest.String()
		sources[i] = &layerSource{diffID: cfg.RootFS.DiffIDs[i].String(), chain: chains[i], digest: digest, size: d.Size,
			open: func() (io.ReadCloser, error) { return os.Open(s.blobPath(digest)) }}
	}
	return orEmpty(sources)
}

func diffIDs(cfg *v1.ConfigFile) []string {
	ids := make([]string, len(cfg.RootFS.DiffIDs))
	for i, d := range cfg.RootFS.DiffIDs {
		ids[i] = d.String()
	}
	return ids
}

// room refuses an image whose compressed layers alone would not fit.
func (s *Store) room(sources []*layerSource) error {
	var need int64
	for _, src := range sources {
		if ok, err := s.hasLayer(src.chain); err == nil && !ok {
			need += src.size
		}
	}
	d, err := os.Open(s.dir)
	if err != nil {
		return err
	}
	defer d.Close()
	if left, err := roomLeft(int(d.Fd())); err == nil && need > 0 && left < need {
		return errDiskFull(fmt.Errorf("%d bytes left above the reserve, %d needed", left, need))
	}
	return nil
}

// build brings the layers of one image into the store: layers are fetched and unpacked side by side, and committed from
// the bottom up, since a layer may need those below it.
type build struct {
	s           *Store
	f           *flight
	ref, digest string
	sources     []*layerSource
	// fetch brings the compressed bytes of layer i to the host.
	fetch func(ctx context.Context, i int, had func(int64)) error
	// imageBytes is what all layers have unpacked to.
	imageBytes atomic.Int64
	// fetched counts layers whose bytes are here; committed those that are part of the store. Guarded by mu.
	mu                 sync.Mutex
	fetched, committed int
	toldUnpacking      bool
	told               int
}

// run works on every layer. A layer's lock is held from before its download until its commit, so that pulls that share
// a layer share its work. That cannot deadlock: layers are begun from the bottom up, a lock is named by a chain id, and
// two pulls that meet at one chain id have all layers below it in common; the lowest layer not yet committed can go on.
func (b *build) run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	slots := make(chan struct{}, parallel)
	below := make(chan struct{})
	close(below)
	for i := range b.sources {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			return cmp.Or(g.Wait(), ctx.Err())
		}
		free := sync.OnceFunc(func() { <-slots })
		mine, done := below, make(chan struct{})
		below = done
		g.Go(func() error {
			defer free()
			if err := b.layer(ctx, i, free, mine); err != nil {
				return err
			}
			close(done)
			return nil
		})
	}
	return g.Wait()
}

// layer makes sure that layer i is in the store. free gives up the slot; below is closed when the layer below is in.
func (b *build) layer(ctx context.Context, i int, free func(), below <-chan struct{}) error {
	src := b.sources[i]
	unlock, err := b.s.locks.lock(ctx, "layer "+src.chain)
	if err != nil {
		return err
	}
	defer unlock()
	there, err := b.s.hasLayer(src.chain)
	if err != nil {
		return err
	}
	var fresh *freshLayer
	if there {
		b.f.publishLayer(i, true, shard.Progress{Status: "layer", Digest: src.digest, Bytes: src.size, Present: true})
		b.note(1, 0)
	} else {
		report := func(last bool) func(int64) {
			return func(n int64) {
				b.f.publishLayer(i, last, shard.Progress{Status: "layer", Digest: src.digest, Bytes: n})
			}
		}
		if err := b.fetch(ctx, i, report(false)); err != nil {
			return err
		}
		report(true)(src.size)
		b.note(1, 0)
		if fresh, err = b.s.unpackLayer(ctx, src, &b.imageBytes); err != nil {
			return err
		}
		defer fresh.discard()
	}
	free()
	select {
	case <-below:
	case <-ctx.Done():
		return ctx.Err()
	}
	if fresh != nil {
		if err := fresh.commit(b.lower(i)); err != nil {
			return err
		}
	}
	b.note(0, 1)
	return nil
}

// lower gives the directories of the layers below i, topmost first.
func (b *build) lower(i int) []string {
	dirs := make([]string, i)
	for j := range i {
		dirs[i-1-j] = b.s.path("layers", shortName(b.sources[j].chain))
	}
	return dirs
}

// note counts, and tells of unpacking only once everything is fetched, so that clients see one phase after the other
// although the work overlaps.
func (b *build) note(fetched, committed int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.fetched += fetched
	b.committed += committed
	if b.fetched < len(b.sources) {
		return
	}
	if !b.toldUnpacking {
		b.toldUnpacking = true
		b.f.publish(shard.Progress{Status: "unpacking", Reference: b.ref, Digest: b.digest, Layers: len(b.sources)})
	}
	for ; b.told < b.committed; b.told++ {
		b.f.publish(shard.Progress{Status: "unpacked", Digest: b.sources[b.told].digest, Layer: b.told + 1, Layers: len(b.sources)})
	}
}

// publishImage writes the records of an image whose layers are all in the store. Its digest is held by the caller.
func (s *Store) publishImage(f *flight, ref refRecord, cfg *v1.ConfigFile, sources []*layerSource) (*Image, error) {
	rec := imageRecord{Version: recordVersion, Digest: ref.Digest, Created: cfg.Created.Time.UTC(), Config: s.settings(ref.Reference, cfg)}
	if rec.Created.Unix() <= 0 {
		rec.Created = time.Now().UTC().Truncate(time.Second) // reproducible images have no date
	}
	for _, src := range sources {
		rec.Layers = append(rec.Layers, shortName(src.chain))
	}
	if err := s.commitImage(rec, ref); err != nil {
		return nil, err
	}
	img, err := s.load(ref.Reference, ref.Digest)
	if err != nil {
		return nil, fmt.Errorf("read the image that was just written: %w", err)
	}
	s.settle()
	f.publish(shard.Progress{Status: "pulled", Reference: ref.Reference, Digest: ref.Digest})
	return img, nil
}

// settings takes over what a sandbox uses; entries of the environment that no program could be given are left out.
func (s *Store) settings(ref string, cfg *v1.ConfigFile) Config {
	c := Config{Workdir: cfg.Config.WorkingDir, User: cfg.Config.User, Labels: cfg.Config.Labels}
	for _, kv := range cfg.Config.Env {
		if err := shard.CheckEnv([]string{kv}); err != nil {
			s.o.Log.Warn("environment entry of an image left out", "image", ref, "err", err)
			continue
		}
		c.Env = append(c.Env, kv)
	}
	return c
}

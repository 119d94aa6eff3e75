package image

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/durable"
)

const (
	partExt = ".part"
	// Blobs that no pull is using are kept to be continued, this long and this much in all.
	keepBlobs     = 7 * 24 * time.Hour
	keepBlobBytes = 10 << 30
	// A download gives up after this many attempts in a row that brought less than worthwhile bytes each.
	maxAttempts = 5
	worthwhile  = 1 << 20
)

// stallTimeout is how long a download may bring nothing before the connection is given up.
var stallTimeout = 60 * time.Second

// retryDelay is the first pause between two attempts; it doubles.
var retryDelay = 500 * time.Millisecond

var errStalled = errors.New("the download stalled")

func (s *Store) blobPath(digest string) string {
	return s.path("blobs", strings.TrimPrefix(digest, "sha256:"))
}

// useBlobs keeps the blobs of a pull from being swept until release, which can delete those that no other pull uses.
func (s *Store) useBlobs(digests []string) (release func(remove bool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, d := range digests {
		s.blobUsers[d]++
	}
	return func(remove bool) {
		s.mu.Lock()
		defer s.mu.Unlock()
		for _, d := range digests {
			if s.blobUsers[d]--; s.blobUsers[d] > 0 {
				continue
			}
			delete(s.blobUsers, d)
			if remove { // under the lock, so that a pull that begins now cannot have found the file
				_ = os.Remove(s.blobPath(d))
				_ = os.Remove(s.blobPath(d) + partExt)
			}
		}
	}
}

// sweepBlobs deletes unused blobs that are too old or too many, oldest first.
func (s *Store) sweepBlobs() {
	entries, err := os.ReadDir(s.path("blobs"))
	if err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	var idle []fs.FileInfo
	for _, e := range entries {
		if fi, err := e.Info(); err == nil && s.blobUsers["sha256:"+strings.TrimSuffix(e.Name(), partExt)] == 0 {
			idle = append(idle, fi)
		}
	}
	slices.SortFunc(idle, func(a, b fs.FileInfo) int { return b.ModTime().Compare(a.ModTime()) })
	var kept int64
	for _, fi := range idle {
		if kept += fi.Size(); kept > keepBlobBytes || time.Since(fi.ModTime()) > keepBlobs {
			_ = os.Remove(s.path("blobs", fi.Name()))
		}
	}
}

// download brings a blob to its path, continuing what an earlier pull left. had is called with the bytes on the host.
func (s *Store) download(ctx context.Context, r *remote, ref name.Reference, d v1.Descriptor, had func(int64)) error {
	digest := d.Digest.String()
	unlock, err := s.locks.lock(ctx, "blob "+digest)
	if err != nil {
		return err
	}
	defer unlock()
	if fi, err := os.Lstat(s.blobPath(digest)); err == nil && fi.Mode().IsRegular() && fi.Size() == d.Size {
		had(d.Size)
		return nil
	}
	part := s.blobPath(digest) + partExt
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("open part of blob: %w", err)
	}
	defer f.Close()
	b := &blobWriter{f: f, sum: sha256.New(), size: d.Size, had: had}
	if err := b.recover(ctx); err != nil {
		return fmt.Errorf("read part of blob: %w", err)
	}
	resumed := b.at > 0
	best := b.at // a registry that refuses ranges and always cuts brings nothing new
	for failures := 0; ; {
		err := r.fetch(ctx, digest, b)
		if err == nil && fmt.Sprintf("sha256:%x", b.sum.Sum(nil)) != digest {
			if err = b.restart(); err != nil {
				return err
			}
			if resumed { // the old part may be what is wrong
				resumed = false
				continue
			}
			err = fmt.Errorf("%w: digest", errLies)
		}
		if err == nil {
			break
		}
		if errors.Is(err, errLies) {
			_ = os.Remove(part)
			return lie(ref, "layer %s does not have the digest or size that the manifest names", digest)
		}
		if failures++; b.at-best >= worthwhile {
			failures = 1
		}
		best = max(best, b.at)
		if ctx.Err() != nil || !worthRetrying(err) || failures >= maxAttempts {
			return registryError(ctx, ref, err)
		}
		s.o.Log.Warn("download interrupted", "image", ref.Name(), "layer", digest, "at", b.at, "err", scrub(err))
		if err := sleep(ctx, retryDelay<<(failures-1)); err != nil {
			return registryError(ctx, ref, err)
		}
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("sync blob: %w", err)
	}
	if err := os.Rename(part, s.blobPath(digest)); err != nil {
		return err
	}
	return durable.SyncDir(s.path("blobs"))
}

func worthRetrying(err error) bool {
	if _, ok := errors.AsType[*shard.Error](err); ok {
		return false
	}
	if te, ok := errors.AsType[*transport.Error](err); ok {
		return te.StatusCode >= 500 || te.StatusCode == http.StatusTooManyRequests || te.StatusCode == http.StatusRequestTimeout
	}
	return !errors.Is(err, errPlainHTTP) && !errors.Is(err, unix.ENOSPC)
}

func sleep(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// fetch asks for what b still lacks and writes it. An error leaves b in a state from which fetch can go on.
func (r *remote) fetch(ctx context.Context, digest string, b *blobWriter) error {
	if b.at == b.size {
		return nil
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	header := http.Header{}
	if b.at > 0 {
		header.Set("Range", fmt.Sprintf("bytes=%d-", b.at))
	}
	resp, err := r.get(ctx, "blobs", digest, header)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	switch {
	case resp.StatusCode == http.StatusOK:
		if b.at > 0 { // no ranges here
			if err := b.restart(); err != nil {
				return err
			}
		}
		if resp.ContentLength >= 0 && resp.ContentLength != b.size {
			return fmt.Errorf("%w: %d bytes instead of %d", errLies, resp.ContentLength, b.size)
		}
	case resp.StatusCode == http.StatusPartialContent && b.at > 0:
		if from, ok := rangeStart(resp.Header.Get("Content-Range")); !ok || from != b.at {
			return errors.Join(fmt.Errorf("asked for bytes from %d, got %q", b.at, resp.Header.Get("Content-Range")), b.restart())
		}
	case resp.StatusCode == http.StatusRequestedRangeNotSatisfiable && b.at > 0:
		return errors.Join(errors.New("the range was refused"), b.restart())
	default:
		return transport.CheckError(resp, http.StatusOK)
	}
	stall := time.AfterFunc(stallTimeout, func() { cancel(errStalled) })
	defer stall.Stop()
	buf := make([]byte, 128<<10)
	for {
		n, err := resp.Body.Read(buf)
		if n > 0 {
			stall.Reset(stallTimeout)
			if int64(n) > b.size-b.at {
				return fmt.Errorf("%w: more than %d bytes", errLies, b.size)
			}
			if err := b.write(buf[:n]); err != nil {
				return err
			}
		}
		switch {
		case err == io.EOF && b.at < b.size:
			return io.ErrUnexpectedEOF
		case err == io.EOF:
			return nil
		case err != nil && errors.Is(context.Cause(ctx), errStalled):
			return errStalled
		case err != nil:
			return err
		}
	}
}

func rangeStart(header string) (int64, bool) {
	rest, ok := strings.CutPrefix(header, "bytes ")
	from, _, ok2 := strings.Cut(rest, "-")
	n, err := strconv.ParseInt(from, 10, 64)
	return n, ok && ok2 && err == nil
}

// blobWriter is a file that grows to size, with the digest of what is in it.
type blobWriter struct {
	f    *os.File
	sum  hash.Hash
	at   int64
	size int64
	had  func(int64)
}

// recover takes in what the file holds already.
func (b *blobWriter) recover(ctx context.Context) error {
	fi, err := b.f.Stat()
	if err != nil {
		return err
	}
	if fi.Size() > b.size {
		return b.restart()
	}
	n, err := io.Copy(b.sum, &ctxReader{ctx: ctx, r: b.f})
	b.at = n
	b.had(n)
	return err
}

func (b *blobWriter) restart() error {
	b.sum.Reset()
	b.at = 0
	_, err := b.f.Seek(0, io.SeekStart)
	return cmp.Or(err, b.f.Truncate(0))
}

func (b *blobWriter) write(p []byte) error {
	n, err := b.f.WriteAt(p, b.at)
	b.sum.Write(p[:n])
	b.at += int64(n)
	b.had(b.at)
	if errors.Is(err, unix.ENOSPC) {
		return errDiskFull(err)
	}
	return err
}

// ctxReader reads until ctx ends.
type ctxReader struct {
	ctx context.Context
	r   io.Reader
}

func (c *ctxReader) Read(p []byte) (int, error) {
	if err := c.ctx.Err(); err != nil {
		return 0, err
	}
	return c.r.Read(p)
}

package image

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync/atomic"

	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// limits say how much a layer may become. An honest layer grows by 2 to 10 in unpacking, a text-only one by 50.
type limits struct {
	// A layer may unpack to base + ratio × its compressed size, in bytes, where each entry counts perEntry more.
	base, ratio, perEntry int64
	// image bounds all layers of an image together.
	image int64
}

var defaultLimits = limits{base: 1 << 30, ratio: 200, perEntry: 4 << 10, image: maxImage}

// of gives the bound for a layer or archive of this many compressed bytes.
func (l limits) of(compressed int64) int64 {
	return min(l.base+l.ratio*min(compressed, maxImage), l.image)
}

// errBomb says that a layer unpacks to more than its bound, errContent that it can never be unpacked, however often it
// is downloaded.
var (
	errBomb    = errors.New("it unpacks to more than is allowed")
	errContent = errors.New("the content is at fault")
	errNoRoom  = errors.New("no room on the disk")
)

func errDiskFull(cause error) error {
	return shard.Wrap(shard.CodeInternal, errors.Join(errNoRoom, cause), "the host's disk is too full for this image: free some space, for example with shard image prune")
}

// roomLeft is how many bytes images may still take on the file system of fd. They leave free 2 GiB of the
// host's disk, or 5 % of a small one, and 2 % of the inodes.
func roomLeft(fd int) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		return 0, err
	}
	if st.Files > 0 && st.Ffree < st.Files/50 {
		return 0, nil
	}
	return int64(st.Bavail)*st.Bsize - min(2<<30, int64(st.Blocks)*st.Bsize/20), nil
}

// budget counts what one layer costs while it is unpacked.
type budget struct {
	limits
	limit int64
	// stream is what came out of the decompressor, logical what the files add up to (holes too), entries how many.
	stream, logical, entries int64
	// image is what all layers of the image have come to.
	image *atomic.Int64
	// disk is what the layer takes on the host; checkedAt its value when the free space was last looked at.
	disk, checkedAt int64
}

func (b *budget) check(add int64) error {
	if max(b.stream, b.logical)+b.entries*b.perEntry > b.limit || b.image.Add(add) > b.limits.image {
		return errBomb
	}
	return nil
}

// entry charges one entry of size logical bytes before it is made.
func (b *budget) entry(fd int, size, extra int64) error {
	b.entries++
	b.logical += size + extra
	if b.logical < 0 {
		return errBomb
	}
	if err := b.check(b.perEntry); err != nil {
		return err
	}
	return b.wrote(fd, b.perEntry)
}

// wrote tells of bytes that took room on the host's disk, fd being somewhere on it.
func (b *budget) wrote(fd int, n int64) error {
	if b.disk += n; b.disk-b.checkedAt < 32<<20 {
		return nil
	}
	b.checkedAt = b.disk
	left, err := roomLeft(fd)
	if err == nil && left <= 0 {
		err = errDiskFull(errors.New("unpacking would use up the reserve"))
	}
	return err
}

// countStream charges the decompressed bytes that are read through it.
type countStream struct {
	r io.Reader
	b *budget
}

func (c *countStream) Read(p []byte) (int, error) {
	n, err := c.r.Read(p)
	c.b.stream += int64(n)
	if e := c.b.check(int64(n)); e != nil {
		return 0, e
	}
	return n, err
}

// decompress looks at the first bytes of r, not at what anybody says of them.
func decompress(r io.Reader) (out io.Reader, closer func(), err error) {
	br := bufio.NewReaderSize(r, 128<<10)
	head, err := br.Peek(6)
	if err != nil && err != io.EOF {
		return nil, nil, err
	}
	switch {
	case bytes.HasPrefix(head, []byte{0x1f, 0x8b}):
		z, err := gzip.NewReader(br)
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", errEntry, err)
		}
		return z, func() { z.Close() }, nil
	case bytes.HasPrefix(head, []byte{0x28, 0xb5, 0x2f, 0xfd}), len(head) >= 4 && head[0]&0xf0 == 0x50 && bytes.Equal(head[1:4], []byte{0x2a, 0x4d, 0x18}):
		z, err := zstd.NewReader(br, zstd.WithDecoderConcurrency(1), zstd.WithDecoderMaxWindow(128<<20), zstd.WithDecoderLowmem(true))
		if err != nil {
			return nil, nil, fmt.Errorf("%w: %w", errEntry, err)
		}
		return z, z.Close, nil
	case bytes.HasPrefix(head, []byte{0xfd, '7', 'z', 'X', 'Z', 0}), bytes.HasPrefix(head, []byte("BZh")):
		return nil, nil, fmt.Errorf("%w: it is compressed with xz or bzip2; gzip and zstd are supported", errEntry)
	}
	return br, func() {}, nil
}

// layerSource is one layer to build.
type layerSource struct {
	diffID, chain string
	// digest and size are those of the compressed layer; digest is for messages and progress only.
	digest string
	size   int64
	// open gives the compressed bytes, once they are on the host.
	open func() (io.ReadCloser, error)
}

// freshLayer is a layer unpacked under tmp, not yet part of the store.
type freshLayer struct {
	s   *Store
	src *layerSource
	tmp string
	u   *unpacker
	b   *budget
}

// unpackLayer unpacks a layer under tmp and verifies its diff id.
func (s *Store) unpackLayer(ctx context.Context, src *layerSource, image *atomic.Int64) (_ *freshLayer, err error) {
	tmp, err := os.MkdirTemp(s.path("tmp"), "layer-")
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = os.RemoveAll(tmp)
		}
	}()
	root := filepath.Join(tmp, "fs")
	if err := os.Mkdir(root, 0o755); err != nil {
		return nil, err
	}
	in, err := src.open()
	if err != nil {
		return nil, err
	}
	defer in.Close()
	plain, closer, err := decompress(&ctxReader{ctx: ctx, r: in})
	if err != nil {
		return nil, layerError(src, err)
	}
	defer closer()
	f := &freshLayer{s: s, src: src, tmp: tmp, b: &budget{limits: s.limits, limit: s.limits.of(src.size), image: image}}
	diff := sha256.New()
	stream := io.TeeReader(&countStream{plain, f.b}, diff)
	if f.u, err = unpack(ctx, root, stream, f.b); err != nil {
		return nil, layerError(src, err)
	}
	// The digest is of the whole stream, also of what comes after the end of the archive.
	_, err = io.Copy(io.Discard, stream)
	if err == nil && fmt.Sprintf("sha256:%x", diff.Sum(nil)) != src.diffID {
		err = fmt.Errorf("%w: its content is not what the image's configuration names", errEntry)
	}
	if err != nil {
		unix.Close(f.u.root)
		return nil, layerError(src, err)
	}
	if f.u.dropped > 0 {
		s.o.Log.Info("device nodes of an image left out", "layer", src.digest, "count", f.u.dropped)
	}
	return f, nil
}

// layerError puts the failure of a layer into words for clients, where it is the image's fault or the disk's.
func layerError(src *layerSource, err error) error {
	switch {
	case errors.Is(err, errBomb):
		return shard.Wrap(shard.CodeInvalidRequest, errors.Join(errContent, err), "layer %s is refused: it unpacks to far more than its %s compressed warrant, like a decompression bomb",
			src.digest, kib(src.size))
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EDQUOT):
		return errDiskFull(err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	if _, ok := errors.AsType[*shard.Error](err); ok {
		return err
	}
	// What is neither marked as the archive's fault nor the system's comes from the decompressor or the tar reader.
	if _, system := errors.AsType[unix.Errno](err); system && !errors.Is(err, errEntry) {
		return fmt.Errorf("unpack layer %s: %w", src.digest, err)
	}
	return shard.Wrap(shard.CodeInvalidRequest, errors.Join(errContent, err), "layer %s cannot be unpacked: %v", src.digest, err)
}

func kib(n int64) string { return fmt.Sprintf("%d KiB", (n+1023)>>10) }

// commit makes the layer part of the store. lower are the directories of the layers below, topmost first. It is called
// with the layer's lock held; discard must follow.
func (f *freshLayer) commit(lower []string) error {
	s := f.s
	if err := f.u.finish(lower); err != nil {
		return layerError(f.src, err)
	}
	rec := layerRecord{Version: recordVersion, Chain: f.src.chain, DiffID: f.src.diffID, Boot: s.boot, Bytes: f.b.disk, Opaque: isOpaque(f.u.root)}
	// The record goes first, and to disk: a directory under its final name can then always be told to be whole or not.
	dir := s.path("layers", shortName(f.src.chain))
	if err := s.writeRecord(dir+recordExt, rec); err != nil {
		return layerError(f.src, err)
	}
	if err := os.Rename(filepath.Join(f.tmp, "fs"), dir); err != nil && !errors.Is(err, unix.ENOTEMPTY) && !errors.Is(err, unix.EEXIST) {
		return err
	}
	return nil
}

// discard removes what is left under tmp, after commit or without it.
func (f *freshLayer) discard() {
	unix.Close(f.u.root)
	_ = os.RemoveAll(f.tmp)
}

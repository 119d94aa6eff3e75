// Package tarstream reads tars from anyone and moves file contents without growing: what the agent inside a sandbox and
// the client outside have in common when they unpack what the other side sent. It decides which entries are admissible
// at all; it opens no file and knows no target directory.
package tarstream

import (
	"archive/tar"
	"bufio"
	"bytes"
	"errors"
	"io"
	"path"
	"strings"
	"time"

	"github.com/useshards/shard"
)

// MaxEntries is how many entries one tar may hold.
const MaxEntries = 1 << 20

// XattrPrefix is what the name of an extended attribute has before it in a PAX record.
const XattrPrefix = "SCHILY.xattr."

// maxPath is Linux' PATH_MAX; maxPadding is how many zero bytes may follow the end of a tar (writers pad to a record);
// maxHoles is how much longer than the tar its sparse files may be in all, since a hole of any size costs one line.
const (
	maxPath    = 4096
	maxPadding = 16 << 20
	maxHoles   = 64 << 30
)

// Kind is what an entry makes.
type Kind int

// The kinds of entries that are admissible.
const (
	File Kind = iota
	Dir
	Symlink
	Hardlink
)

// Entry is one member of a tar.
type Entry struct {
	// Name is relative, clean and slash-separated, of any bytes but NUL; it never holds "..". "." is the target itself.
	Name string
	Kind Kind
	// Link is what a symlink holds, as it stands; for a hard link the Name of another entry.
	Link string
	// Size is the length of a file in bytes.
	Size int64
	// Mode holds the low twelve bits.
	Mode uint32
	// ModTime has the resolution that the tar has.
	ModTime time.Time
	// Xattrs are the extended attributes of the user namespace; others are dropped.
	Xattrs map[string]string
}

// Reader reads a tar from a stream. Whatever is wrong with the tar is a *shard.Error (invalid_request) that names the
// entry; an error of the stream itself is returned as it is.
type Reader struct {
	src     *source
	tr      *tar.Reader
	entries int
	name    string // of the current entry, quoted
	given   int64  // bytes of contents
}

// source counts the stream below a tar.Reader and remembers how it ended.
type source struct {
	r    *bufio.Reader
	read int64
	err  error
}

func (s *source) Read(p []byte) (int, error) {
	n, err := s.r.Read(p)
	s.read += int64(n)
	if err != nil {
		s.err = err
	}
	return n, err
}

// NewReader makes a Reader of r.
func NewReader(r io.Reader) *Reader {
	src := &source{r: bufio.NewReaderSize(r, 64<<10)}
	return &Reader{src: src, tr: tar.NewReader(src)}
}

// Next returns the next entry. It returns io.EOF only when the end mark of the tar was seen, nothing but zeros followed
// it, and the stream has ended: a tar that was cut never looks whole.
func (r *Reader) Next() (*Entry, error) {
	for {
		hdr, err := r.tr.Next()
		if err == io.EOF && r.src.err == nil {
			return nil, r.finish()
		}
		if err != nil {
			return nil, r.explain(err)
		}
		if hdr.Typeflag == tar.TypeXGlobalHeader {
			continue
		}
		if r.entries++; r.entries > MaxEntries {
			return nil, shard.Invalidf("the tar has more than %d entries: send it in parts", MaxEntries)
		}
		r.name = shard.Quote(hdr.Name)
		return entry(hdr)
	}
}

// Read reads the current entry's contents, exactly its Size.
func (r *Reader) Read(p []byte) (int, error) {
	n, err := r.tr.Read(p)
	if r.given += int64(n); r.given-r.src.read > maxHoles {
		return 0, shard.Invalidf("the tar's sparse files, up to entry %s, have more than %d GiB of holes", r.name, int64(maxHoles>>30))
	}
	if err != nil && err != io.EOF {
		err = r.explain(err)
	}
	return n, err
}

// explain says what an error of the tar.Reader means.
func (r *Reader) explain(err error) error {
	switch {
	case r.src.err != nil && r.src.err != io.EOF:
		return r.src.err
	case r.src.err == io.EOF || errors.Is(err, io.ErrUnexpectedEOF):
		return shard.Invalidf("the tar was cut: it ends before its end mark")
	case r.name == "":
		return shard.Invalidf("this is not a tar: its first header cannot be read")
	default:
		return shard.Invalidf("the tar cannot be read after the entry %s: a header is damaged", r.name)
	}
}

// finish reads what follows the end mark.
func (r *Reader) finish() error {
	for total := 0; ; {
		chunk, err := r.src.r.Peek(1)
		if len(chunk) > 0 {
			chunk, _ = r.src.r.Peek(r.src.r.Buffered())
			if !zero(chunk) {
				return shard.Invalidf("something follows the end mark of the tar: send one tar only")
			}
			if total += len(chunk); total > maxPadding {
				return shard.Invalidf("more than %d bytes follow the end mark of the tar", maxPadding)
			}
			_, _ = r.src.r.Discard(len(chunk))
		}
		if err != nil {
			return err
		}
	}
}

// entry turns a header into an Entry, or says why it is not admissible.
func entry(hdr *tar.Header) (*Entry, error) {
	name, err := clean(hdr.Name)
	if err != nil {
		return nil, Refuse(hdr.Name, "%s", err)
	}
	e := &Entry{Name: name, Size: hdr.Size, Mode: uint32(hdr.Mode & 0o7777), ModTime: hdr.ModTime}
	switch hdr.Typeflag {
	case tar.TypeReg, tar.TypeRegA, tar.TypeCont, tar.TypeGNUSparse: // old writers still make TypeRegA
		e.Kind = File
		if strings.HasSuffix(hdr.Name, "/") {
			e.Kind = Dir
		}
	case tar.TypeDir:
		e.Kind = Dir
	case tar.TypeSymlink:
		e.Kind, e.Link = Symlink, hdr.Linkname
		if e.Link == "" || len(e.Link) >= maxPath || strings.IndexByte(e.Link, 0) >= 0 {
			return nil, Refuse(hdr.Name, "is a symbolic link whose target is empty, too long or holds a NUL")
		}
	case tar.TypeLink:
		e.Kind = Hardlink
		if e.Link, err = clean(hdr.Linkname); err != nil {
			return nil, Refuse(hdr.Name, "is a hard link to %s, which %s", shard.Quote(hdr.Linkname), err)
		}
	case tar.TypeChar, tar.TypeBlock:
		return nil, Refuse(hdr.Name, "is a device node")
	case tar.TypeFifo:
		return nil, Refuse(hdr.Name, "is a fifo")
	default:
		return nil, Refuse(hdr.Name, "has an unknown type, %q", hdr.Typeflag)
	}
	if e.Kind != File {
		e.Size = 0
	}
	if e.Name == "." && e.Kind != Dir {
		return nil, Refuse(hdr.Name, "names the target directory itself, and is not a directory")
	}
	for key, value := range hdr.PAXRecords {
		if attr, ok := strings.CutPrefix(key, XattrPrefix); ok && strings.HasPrefix(attr, "user.") {
			if e.Xattrs == nil {
				e.Xattrs = map[string]string{}
			}
			e.Xattrs[attr] = value
		}
	}
	return e, nil
}

// Refuse is the error for an entry that cannot be taken.
func Refuse(name, format string, args ...any) error {
	return shard.Invalidf("the tar's entry %s "+format, append([]any{shard.Quote(name)}, args...)...)
}

// clean makes a name of a tar relative and clean, or says why it is not admissible.
func clean(name string) (string, error) {
	switch {
	case name == "":
		return "", errors.New("has no name")
	case name[0] == '/':
		return "", errors.New("has an absolute name")
	case len(name) > maxPath:
		return "", errors.New("has a name of more than 4096 bytes")
	case strings.IndexByte(name, 0) >= 0:
		return "", errors.New("has a NUL in its name")
	}
	for part := range strings.SplitSeq(name, "/") {
		if part == ".." {
			return "", errors.New(`has ".." in its name`)
		}
	}
	return path.Clean(name), nil
}

// WriteSeekTruncater is what Copy writes to.
type WriteSeekTruncater interface {
	io.Writer
	io.Seeker
	Truncate(size int64) error
}

// Copy writes exactly size bytes of src to dst, which is empty, through buf, and leaves holes where whole reads are
// zeros, so that sparse files stay sparse and cost nothing. A src that ends early is io.ErrUnexpectedEOF. progress, when
// not nil, hears how far the file has come.
func Copy(dst WriteSeekTruncater, src io.Reader, size int64, buf []byte, progress func(done int64) error) error {
	var done int64
	hole := false
	for done < size {
		n, err := src.Read(buf[:min(int64(len(buf)), size-done)])
		if chunk := buf[:n]; n > 0 {
			if hole = n >= 4096 && zero(chunk); hole {
				_, werr := dst.Seek(int64(n), io.SeekCurrent)
				if werr != nil {
					return werr
				}
			} else if _, werr := dst.Write(chunk); werr != nil {
				return werr
			}
			done += int64(n)
			if progress != nil {
				if perr := progress(done); perr != nil {
					return perr
				}
			}
		}
		if err == io.EOF && done < size {
			return io.ErrUnexpectedEOF
		}
		if err != nil && err != io.EOF {
			return err
		}
	}
	if hole {
		return dst.Truncate(size)
	}
	return nil
}

// zeros is what zero compares with.
var zeros [64 << 10]byte

func zero(p []byte) bool {
	for len(p) > 0 {
		n := min(len(p), len(zeros))
		if !bytes.Equal(p[:n], zeros[:n]) {
			return false
		}
		p = p[n:]
	}
	return true
}

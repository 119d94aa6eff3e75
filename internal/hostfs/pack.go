package hostfs

import (
	"archive/tar"
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path"
	"slices"
	"strings"
	"syscall"

	"github.com/useshards/shard/internal/tarstream"
)

// PackOptions are what a caller may want to hear while packing.
type PackOptions struct {
	// Skipped hears of each file that a tar for a sandbox cannot hold (sockets, fifos, devices), by its path in the tar.
	Skipped func(name, why string)
}

// Pack writes the host's file, link or directory src to w as a tar whose top entry is called name; with name "." src
// must be a directory and its contents are the top. A src with a trailing slash is followed when it is a link, all
// other links stay links. Hard links within the tree, times, user attributes (on Linux), permission bits and sticky are
// kept; owner, setuid and setgid are not. A file that shrinks while it is read ends the tar without its end mark.
func Pack(ctx context.Context, w io.Writer, src, name string, opts PackOptions) error {
	if name == "" || name == ".." || strings.Contains(name, "/") {
		return fmt.Errorf("pack: %q is not one name", name)
	}
	out := bufio.NewWriterSize(w, 64<<10)
	p := &packer{ctx: ctx, opts: opts, tw: tar.NewWriter(out), buf: make([]byte, 256<<10), linked: map[fileID]string{}}
	if err := p.top(src, name); err != nil {
		return err
	}
	if err := p.tw.Close(); err != nil {
		return err
	}
	return out.Flush()
}

type packer struct {
	ctx    context.Context
	opts   PackOptions
	tw     *tar.Writer
	buf    []byte
	linked map[fileID]string // files with several names that were packed, by the first of them
}

// fileID tells files apart on one host.
type fileID struct{ dev, ino uint64 }

func idOf(info fs.FileInfo) fileID {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return fileID{}
	}
	return fileID{uint64(st.Dev), st.Ino} // Dev is 32 bits wide on darwin
}

func (p *packer) top(src, name string) error {
	info, err := os.Lstat(src)
	if err != nil {
		return err
	}
	if info.IsDir() {
		root, err := os.OpenRoot(src)
		if err != nil {
			return err
		}
		defer root.Close()
		return p.dir(root, ".", name)
	}
	if name == "." {
		return fmt.Errorf("pack %s: not a directory", src)
	}
	parent, base := path.Split(strings.TrimRight(src, "/"))
	if parent == "" {
		parent = "."
	}
	root, err := os.OpenRoot(parent)
	if err != nil {
		return err
	}
	defer root.Close()
	return p.entry(root, base, name)
}

// dir packs the directory at in root under the name that it has in the tar, and what is in it in lexical order.
func (p *packer) dir(root *os.Root, at, name string) error {
	if err := p.ctx.Err(); err != nil {
		return err
	}
	f, err := root.Open(at)
	if err != nil {
		return err
	}
	info, names, err := readDir(f)
	if err != nil {
		return err
	}
	if err := p.header(info, name+"/", "", info.xattrs); err != nil {
		return err
	}
	for _, n := range names {
		if err := p.entry(root, path.Join(at, n), path.Join(name, n)); err != nil {
			return err
		}
	}
	return nil
}

type dirInfo struct {
	fs.FileInfo
	xattrs map[string]string
}

// readDir reads and closes a directory.
func readDir(f *os.File) (dirInfo, []string, error) {
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return dirInfo{}, nil, err
	}
	names, err := f.Readdirnames(-1)
	slices.Sort(names)
	return dirInfo{info, xattrs(f)}, names, err
}

func (p *packer) entry(root *os.Root, at, name string) error {
	info, err := root.Lstat(at)
	if errors.Is(err, fs.ErrNotExist) && at != path.Base(at) {
		return nil // removed since its directory was read
	}
	if err != nil {
		return err
	}
	switch info.Mode().Type() {
	case fs.ModeDir:
		return p.dir(root, at, name)
	case fs.ModeSymlink:
		link, err := root.Readlink(at)
		if err != nil {
			return err
		}
		return p.header(info, name, link, nil)
	case 0:
		return p.file(root, at, name)
	default:
		if p.opts.Skipped != nil {
			p.opts.Skipped(name, "it is neither a file, a directory nor a link")
		}
		return nil
	}
}

func (p *packer) file(root *os.Root, at, name string) error {
	f, err := root.OpenFile(at, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return err
	}
	if !info.Mode().IsRegular() {
		return fmt.Errorf("pack %s: it was replaced while it was read", name)
	}
	if st, ok := info.Sys().(*syscall.Stat_t); ok && st.Nlink > 1 {
		id := idOf(info)
		if first, packed := p.linked[id]; packed {
			return p.write(&tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: first, ModTime: info.ModTime(), Mode: bits(info.Mode())}, nil)
		}
		p.linked[id] = name
	}
	if err := p.header(info, name, "", xattrs(f)); err != nil {
		return err
	}
	held := info.Size()
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		held = st.Blocks * 512
	}
	body := tarstream.Contents(f, int(f.Fd()), info.Size(), held)
	for left := info.Size(); left > 0; {
		if err := p.ctx.Err(); err != nil {
			return err
		}
		n, err := body.Read(p.buf[:min(int64(len(p.buf)), left)])
		if err == io.EOF {
			return fmt.Errorf("pack %s: it shrank while it was read", name)
		}
		if err != nil {
			return err
		}
		if _, err := p.tw.Write(p.buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	return nil
}

// header writes the header of a file, directory or symbolic link.
func (p *packer) header(info fs.FileInfo, name, link string, attrs map[string]string) error {
	h := &tar.Header{Typeflag: tar.TypeReg, Name: name, Linkname: link, ModTime: info.ModTime(), Mode: bits(info.Mode())}
	switch {
	case info.IsDir():
		h.Typeflag = tar.TypeDir
	case link != "":
		h.Typeflag = tar.TypeSymlink
	default:
		h.Size = info.Size()
	}
	return p.write(h, attrs)
}

func (p *packer) write(h *tar.Header, attrs map[string]string) error {
	h.Format = tar.FormatPAX // for names of any bytes, times in nanoseconds, any size
	for key, value := range attrs {
		if h.PAXRecords == nil {
			h.PAXRecords = map[string]string{}
		}
		h.PAXRecords[tarstream.XattrPrefix+key] = value
	}
	return p.tw.WriteHeader(h)
}

// bits is the part of a mode that cp keeps.
func bits(m fs.FileMode) int64 {
	out := int64(m.Perm())
	if m&fs.ModeSticky != 0 {
		out |= 0o1000
	}
	return out
}

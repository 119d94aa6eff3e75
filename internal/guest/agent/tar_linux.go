package agent

import (
	"archive/tar"
	"bufio"
	"errors"
	"io"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/tarstream"
)

// archive is a tar operation that has begun: what is packed is known and can be read.
type archive struct {
	dir  int // the directory that holds the top entry
	base string
	st   unix.Stat_t // of the top entry

	tw     *tar.Writer
	buf    *[copyBuffer]byte
	linked map[nodeID]*linkedFile
}

// linkedFile is a file with several names, of which left were not met yet.
type linkedFile struct {
	first string
	left  uint64
}

// openTar begins the tar of a file, a directory or a link; a link with a slash behind it is followed. Links in the tree
// stay links.
func openTar(p string) (shard.FileEntry, *archive, error) {
	fail := func(err error) (shard.FileEntry, *archive, error) { return shard.FileEntry{}, nil, err }
	if err := guest.CheckPath(p); err != nil {
		return fail(err)
	}
	what := shard.Quote(p)
	parent, base, slash := split(p)
	if dotted(base) {
		return fail(shard.Invalidf("%s cannot be archived: end the path with the name of a file or directory, and not with /, . or ..", what))
	}
	dir, err := openDirs(unix.AT_FDCWD, parent, false)
	if err != nil {
		return fail(fileError(what, err))
	}
	a := &archive{dir: dir, base: base, linked: map[nodeID]*linkedFile{}}
	flags := unix.AT_SYMLINK_NOFOLLOW
	if slash {
		flags, a.base = 0, base+"/."
	}
	err = unix.Fstatat(dir, a.base, &a.st, flags)
	if err == nil {
		kind := a.st.Mode & unix.S_IFMT
		if kind == unix.S_IFREG && kernelMade(dir) {
			a.close()
			return fail(shard.Invalidf("%s is made up by the kernel (proc or sysfs) and cannot be archived: get it as a file", what))
		}
		switch kind {
		case unix.S_IFREG, unix.S_IFDIR, unix.S_IFLNK:
			return entryOf(&a.st), a, nil
		}
		err = shard.Invalidf("%s is %s and cannot be archived", what, typeName(a.st.Mode))
	}
	a.close()
	return fail(fileError(what, err))
}

func (a *archive) close() { closeAll(a.dir); a.dir = -1 }

// write packs everything: entries in lexical order below one top entry, named as the path ends. Only a complete tar has
// its end mark. Sockets, fifos and devices are left out, as no client would take them.
func (a *archive) write(w io.Writer) error {
	defer a.close()
	out := bufio.NewWriterSize(w, 64<<10)
	a.tw, a.buf = tar.NewWriter(out), buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(a.buf)
	name := strings.TrimSuffix(a.base, "/.")
	var err error
	if a.st.Mode&unix.S_IFMT == unix.S_IFDIR {
		err = a.tree(name)
	} else {
		err = a.leaf(a.dir, a.base, name, &a.st)
	}
	if err != nil {
		return err
	}
	if err := a.tw.Close(); err != nil {
		return err
	}
	return out.Flush()
}

// level is one directory on the way from the top to where the walk is.
type level struct {
	id    nodeID
	name  string   // in the tar
	names []string // still to do
}

// tree packs the top directory. Like removeTree it holds one descriptor, whatever the depth.
func (a *archive) tree(name string) error {
	cur, err := openat(a.dir, a.base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return fileError(shard.Quote(name), err)
	}
	defer func() { closeAll(cur) }()
	top, err := a.enter(cur, name, 0)
	if err != nil {
		return err
	}
	stack := []level{top}
	for len(stack) > 0 {
		l := &stack[len(stack)-1]
		if len(l.names) == 0 {
			if stack = stack[:len(stack)-1]; len(stack) == 0 {
				return nil
			}
			up, err := goUp(cur, stack[len(stack)-1].id)
			if err == errSwapped {
				return shard.Invalidf("%s was moved while it was read: try again", shard.Quote(l.name))
			}
			if err != nil {
				return fileError(shard.Quote(l.name), err)
			}
			closeAll(cur)
			cur = up
			continue
		}
		base := l.names[0]
		l.names = l.names[1:]
		name := path.Join(l.name, base)
		st, err := lstatat(cur, base)
		if err == nil && st.Mode&unix.S_IFMT != unix.S_IFDIR {
			err = a.leaf(cur, base, name, &st)
		} else if err == nil {
			var child int
			if child, err = openat(cur, base, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0); err == nil {
				var below level
				if below, err = a.enter(child, name, l.id.dev); err != nil {
					closeAll(child)
					return err
				}
				closeAll(cur)
				cur = child
				stack = append(stack, below)
			}
		}
		if err != nil && !errors.Is(err, unix.ENOENT) { // gone since its directory was read
			return fileError(shard.Quote(name), err)
		}
	}
	return nil
}

// enter writes the header of an open directory and reads its names. parent is the device of the directory above.
func (a *archive) enter(fd int, name string, parent uint64) (level, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	if err == nil && uint64(st.Dev) != parent { // the width of Dev differs
		if kernelMade(fd) {
			return level{}, shard.Invalidf("%s holds what the kernel makes up (proc or sysfs) and cannot be archived", shard.Quote(name))
		}
	}
	if err == nil && len(name) > 4096 {
		return level{}, shard.Invalidf("%s is nested too deeply: its path is longer than 4096 bytes", shard.Quote(name))
	}
	l := level{id: nodeID{uint64(st.Dev), st.Ino}, name: name} // as above
	if err == nil {
		l.names, err = readNames(fd)
	}
	if err == nil {
		err = a.header(&st, &tar.Header{Typeflag: tar.TypeDir, Name: name + "/"}, fd)
	}
	if err != nil {
		return level{}, fileError(shard.Quote(name), err)
	}
	return l, nil
}

// leaf packs what is not a directory. ENOENT says that it is gone.
func (a *archive) leaf(dir int, base, name string, st *unix.Stat_t) error {
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		link, err := readlinkat(dir, base)
		if err != nil {
			return err
		}
		return a.header(st, &tar.Header{Typeflag: tar.TypeSymlink, Name: name, Linkname: link}, -1)
	case unix.S_IFREG:
		return a.file(dir, base, name)
	}
	return nil
}

func (a *archive) file(dir int, base, name string) error {
	fd, err := openat(dir, base, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	f := file(fd)
	defer f.Close()
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return shard.Invalidf("%s was replaced while it was read: try again", shard.Quote(name))
	}
	if st.Nlink > 1 {
		id := nodeID{uint64(st.Dev), st.Ino} // the width of Dev differs
		if l := a.linked[id]; l != nil {
			if l.left--; l.left == 0 {
				delete(a.linked, id)
			}
			return a.header(&st, &tar.Header{Typeflag: tar.TypeLink, Name: name, Linkname: l.first}, -1)
		}
		a.linked[id] = &linkedFile{name, uint64(st.Nlink) - 1} // 32 bits wide on arm64
	}
	if err := a.header(&st, &tar.Header{Typeflag: tar.TypeReg, Name: name, Size: st.Size}, fd); err != nil {
		return err
	}
	body := contents(f, &st)
	for left := st.Size; left > 0; {
		n, err := body.Read(a.buf[:min(int64(len(a.buf)), left)])
		if err == io.EOF {
			return shard.Invalidf("%s became shorter while it was read: try again", shard.Quote(name))
		}
		if err != nil {
			return fileError(shard.Quote(name), err)
		}
		if _, err := a.tw.Write(a.buf[:n]); err != nil {
			return err
		}
		left -= int64(n)
	}
	return nil
}

// header completes h from st and the attributes of fd (none for -1), and writes it.
func (a *archive) header(st *unix.Stat_t, h *tar.Header, fd int) error {
	h.Format = tar.FormatPAX // names of any bytes, times in nanoseconds, any size
	h.Mode = int64(st.Mode & 0o7777)
	h.Uid, h.Gid = int(st.Uid), int(st.Gid)
	h.ModTime = time.Unix(st.Mtim.Unix())
	if fd >= 0 {
		h.PAXRecords = xattrsOf(fd)
	}
	return a.tw.WriteHeader(h)
}

// xattrsOf reads the attributes that the tar keeps, as PAX records. A file system without attributes has none.
func xattrsOf(fd int) map[string]string {
	n, err := unix.Flistxattr(fd, nil)
	if err != nil || n == 0 {
		return nil
	}
	list := make([]byte, n)
	if n, err = unix.Flistxattr(fd, list); err != nil {
		return nil
	}
	var records map[string]string
	for name := range strings.SplitSeq(strings.TrimSuffix(string(list[:n]), "\x00"), "\x00") {
		if !strings.HasPrefix(name, "user.") && name != "security.capability" || strings.Contains(name, "=") {
			continue // a record's key cannot hold "="
		}
		size, err := unix.Fgetxattr(fd, name, nil)
		if err != nil {
			continue
		}
		value := make([]byte, size)
		if size, err = unix.Fgetxattr(fd, name, value); err != nil {
			continue
		}
		if records == nil {
			records = map[string]string{}
		}
		records[tarstream.XattrPrefix+name] = string(value[:size])
	}
	return records
}

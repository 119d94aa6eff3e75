package agent

import (
	"errors"
	"hash/maphash"
	"io"
	"path"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/tarstream"
)

// errLeaves is a symbolic link that leads, or may lead, out of the target directory.
var errLeaves = errors.New("leads out of the target directory through a symbolic link")

// extraction is an untar that has begun. All it makes is made with the user's rights, below root, on paths of which no
// component is followed by the kernel when it is a link.
type extraction struct {
	c    creds
	root int // the target directory, O_PATH

	buf    *[copyBuffer]byte
	parent string // the directory of the entry before, and
	dir    int    // its descriptor; -1 for none

	seed  maphash.Seed
	files map[uint64]uint64 // by hash of the name (names would be many bytes): the inode of each file of this tar
	made  map[string]int    // directories made by this tar: position in order
	order []madeDir
}

// madeDir is a directory whose attributes are set when nothing more lands in it.
type madeDir struct {
	name  string
	id    nodeID
	entry *tarstream.Entry // nil: the tar does not list it
}

// beginUntar opens the target directory; when only the last part of its path is missing, it is made.
func beginUntar(args guest.UntarArgs, c creds) (*extraction, error) {
	p := string(args.Path)
	if err := guest.CheckPath(p); err != nil {
		return nil, err
	}
	x := &extraction{c: c, root: -1, dir: -1, seed: maphash.MakeSeed(), files: map[uint64]uint64{}, made: map[string]int{}}
	err := c.do(func() (err error) {
		if x.root, err = openDirs(unix.AT_FDCWD, p, false); err != unix.ENOENT {
			return err
		}
		parent, base, _ := split(p)
		if dotted(base) {
			return err
		}
		dir, err := openDirs(unix.AT_FDCWD, parent, false)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		if err := makeDir(dir, base, 0o755); err != nil && err != unix.EEXIST {
			return err
		}
		x.root, err = openat(dir, base, unix.O_PATH|unix.O_DIRECTORY, 0)
		if id, ierr := idOf(x.root); err == nil && ierr == nil {
			x.made["."] = 0
			x.order = append(x.order, madeDir{name: ".", id: id})
		}
		return err
	})
	if err != nil {
		x.close()
		return nil, putError(shard.Quote(p), err)
	}
	return x, nil
}

func (x *extraction) close() {
	closeAll(x.root, x.dir)
	x.root, x.dir = -1, -1
}

// extract lands every entry of the tar r. After an error what has landed stays, without the attributes of directories.
func (x *extraction) extract(r io.Reader) error {
	defer x.close()
	x.buf = buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(x.buf)
	tr := tarstream.NewReader(r)
	for {
		e, err := tr.Next()
		if err == io.EOF {
			return x.finishDirs()
		}
		if err != nil {
			return err
		}
		switch e.Kind {
		case tarstream.Dir:
			err = x.c.do(func() error { return x.directory(e) })
		case tarstream.File:
			err = x.file(e, tr)
		case tarstream.Symlink:
			err = x.c.do(func() error { return x.symlink(e) })
		case tarstream.Hardlink:
			err = x.c.do(func() error { return x.hardlink(e) })
		}
		if err != nil {
			return entryError(e.Name, err)
		}
	}
}

func entryError(name string, err error) error {
	switch {
	case err == errLeaves:
		return tarstream.Refuse(name, "%s", err)
	case err == errSwapped:
		return tarstream.Refuse(name, "was changed by someone else while the tar was unpacked: try again")
	}
	return fileError("the tar's entry "+shard.Quote(name), err)
}

// file writes a file under a temporary name and renames it.
func (x *extraction) file(e *tarstream.Entry, contents io.Reader) error {
	temp := tempName()
	f, dir := file(-1), -1
	err := x.c.do(func() (err error) {
		if dir, err = x.open(path.Dir(e.Name)); err != nil {
			return err
		}
		fd, err := openat(dir, temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		f = file(fd)
		return err
	})
	if err != nil {
		return err
	}
	defer f.Close()
	err = tarstream.Copy(f, contents, e.Size, x.buf[:], f.startWriting())
	return x.c.do(func() error {
		var id nodeID
		if err == nil {
			setXattrs(int(f), e.Xattrs)
			err = setTimes(dir, temp, e.ModTime)
		}
		if err == nil {
			err = unix.Fchmod(int(f), e.Mode) // last: writing clears setuid
		}
		if err == nil {
			id, err = idOf(int(f))
		}
		return x.place(e.Name, dir, temp, &id, err)
	})
}

// place renames what was made as temp, when making it went well; else it removes temp. id is that of a file, and nil
// for a link.
func (x *extraction) place(name string, dir int, temp string, id *nodeID, err error) error {
	if err == nil {
		err = unix.Renameat(dir, temp, dir, path.Base(name))
	}
	if err != nil {
		_ = unix.Unlinkat(dir, temp, 0)
		return err
	}
	if key := x.key(name); id != nil {
		x.files[key] = id.ino
	} else {
		delete(x.files, key)
	}
	return nil
}

func (x *extraction) key(name string) uint64 { return maphash.String(x.seed, name) }

func (x *extraction) symlink(e *tarstream.Entry) error {
	dir, err := x.open(path.Dir(e.Name))
	if err != nil {
		return err
	}
	temp := tempName()
	if err := unix.Symlinkat(e.Link, dir, temp); err != nil {
		return err
	}
	return x.place(e.Name, dir, temp, nil, setTimes(dir, temp, e.ModTime))
}

// hardlink gives a file of this tar another name. What stands at the file's name may have been swapped meanwhile, so
// the new name is checked before it counts.
func (x *extraction) hardlink(e *tarstream.Entry) error {
	ino, known := x.files[x.key(e.Link)]
	if !known {
		return tarstream.Refuse(e.Name, "is a hard link to %s, which is no file of this tar before it", shard.Quote(e.Link))
	}
	from, err := x.walk(path.Dir(e.Link), false)
	if err != nil {
		return err
	}
	defer unix.Close(from)
	dir, err := x.open(path.Dir(e.Name))
	if err != nil {
		return err
	}
	temp := tempName()
	if err := unix.Linkat(from, path.Base(e.Link), dir, temp, 0); err != nil {
		return err
	}
	st, err := lstatat(dir, temp)
	if err == nil && (st.Ino != ino || st.Mode&unix.S_IFMT != unix.S_IFREG) {
		err = errSwapped
	}
	err = x.place(e.Name, dir, temp, &nodeID{ino: ino}, err)
	_ = unix.Unlinkat(dir, temp, 0) // a rename onto another name of the same file leaves both
	return err
}

// directory makes a directory, or takes one that is there as it is.
func (x *extraction) directory(e *tarstream.Entry) error {
	if e.Name != "." {
		dir, err := x.open(path.Dir(e.Name))
		if err != nil {
			return err
		}
		switch err := makeDir(dir, path.Base(e.Name), 0o700); err {
		case nil:
			return x.note(dir, e.Name, e)
		case unix.EEXIST:
			fd, err := x.walk(e.Name, false) // a directory, or a link to one inside
			closeAll(fd)
			if err == unix.ENOTDIR {
				return tarstream.Refuse(e.Name, "is a directory, and a file of that name is there")
			}
			if err != nil {
				return err
			}
		default:
			return err
		}
	}
	if i, ok := x.made[e.Name]; ok {
		x.order[i].entry = e
	}
	return nil
}

// note remembers a directory that was made.
func (x *extraction) note(dir int, name string, e *tarstream.Entry) error {
	st, err := lstatat(dir, path.Base(name))
	if err != nil {
		return err
	}
	made := madeDir{name, nodeID{uint64(st.Dev), st.Ino}, e} // the width of Dev differs
	x.made[name] = len(x.order)
	x.order = append(x.order, made)
	return nil
}

// finishDirs sets what directories have in the tar, innermost first, so that a read-only one was still writable before.
func (x *extraction) finishDirs() error {
	for len(x.order) > 0 {
		var failed string
		err := x.c.do(func() error { // a batch: a thread for each would be slow
			last := x.order[max(0, len(x.order)-256):]
			x.order = x.order[:len(x.order)-len(last)]
			for _, d := range slices.Backward(last) {
				if d.entry == nil {
					continue
				}
				if err := x.finishDir(d); err != nil {
					failed = d.name
					return err
				}
			}
			return nil
		})
		if err != nil {
			return entryError(failed, err)
		}
	}
	return nil
}

func (x *extraction) finishDir(d madeDir) error {
	at, err := x.walk(d.name, false)
	if err != nil {
		return err
	}
	defer unix.Close(at)
	fd, err := openat(at, ".", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if id, err := idOf(fd); err != nil || id != d.id {
		return errSwapped
	}
	setXattrs(fd, d.entry.Xattrs)
	if err := setTimes(fd, ".", d.entry.ModTime); err != nil {
		return err
	}
	return unix.Fchmod(fd, d.entry.Mode)
}

// open is walk with making, for directories that entries land in. The descriptor stays x's, until the next open.
func (x *extraction) open(name string) (int, error) {
	if x.dir >= 0 && x.parent == name {
		return x.dir, nil
	}
	fd, err := x.walk(name, true)
	if err != nil {
		return -1, err
	}
	closeAll(x.dir)
	x.dir, x.parent = fd, name
	return fd, nil
}

// walk opens the directory name below root (O_PATH), and with making makes what is missing on the way, 0755. The
// kernel follows no link on it: links are read here, and those that climb out of root, or begin at /, are refused. A
// guest that swaps directories for links meanwhile can only make it stop. (openat2 would do this; gVisor has none.)
func (x *extraction) walk(name string, making bool) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY | unix.O_NOFOLLOW
	cur, err := openat(x.root, ".", flags, 0)
	if err != nil {
		return -1, err
	}
	todo, links := strings.Split(name, "/"), 0
	var done []string // the real components from root to cur
	for len(todo) > 0 {
		part := todo[0]
		todo = todo[1:]
		next := -1
		switch part {
		case "", ".":
			continue
		case "..": // again from root: what is above cur by now is not to be trusted
			if len(done) == 0 {
				closeAll(cur)
				return -1, errLeaves
			}
			todo, done = append(slices.Clone(done[:len(done)-1]), todo...), nil
			next, err = openat(x.root, ".", flags, 0)
		default:
			next, err = openat(cur, part, flags, 0)
			if err == unix.ENOENT && making {
				if err = makeDir(cur, part, 0o755); err == nil {
					err = x.note(cur, path.Join(append(done, part)...), nil)
				}
				if err == nil || err == unix.EEXIST {
					next, err = openat(cur, part, flags, 0)
				}
			}
			if err == unix.ENOTDIR || err == unix.ELOOP {
				link, lerr := readlinkat(cur, part)
				switch links++; {
				case lerr != nil:
					err = unix.ENOTDIR
				case links > maxLinks:
					err = unix.ELOOP
				case strings.HasPrefix(link, "/"):
					err = errLeaves
				default:
					todo = append(strings.Split(link, "/"), todo...)
					err = nil
					continue
				}
			}
			done = append(done, part)
		}
		closeAll(cur)
		if err != nil {
			closeAll(next)
			return -1, err
		}
		cur = next
	}
	return cur, nil
}

func setTimes(dir int, name string, mtime time.Time) error {
	stamp := unix.Timespec{Sec: mtime.Unix(), Nsec: int64(mtime.Nanosecond())}
	return unix.UtimesNanoAt(dir, name, []unix.Timespec{{Nsec: unix.UTIME_OMIT}, stamp}, unix.AT_SYMLINK_NOFOLLOW)
}

// setXattrs sets what the file system takes.
func setXattrs(fd int, attrs map[string]string) {
	for name, value := range attrs {
		_ = unix.Fsetxattr(fd, name, []byte(value), 0)
	}
}

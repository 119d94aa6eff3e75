package agent

import (
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/tarstream"
)

const (
	copyBuffer = 128 << 10
	maxLinks   = 40        // symbolic links on one path, as in the kernel
	maxNames   = 1_000_000 // entries of one directory that list and tar take: they sort, so they hold all names at once
	writeBack  = 8 << 20   // bytes after which the kernel is asked to begin writing, so that fsync has little left
)

// The times that RFC 3339 can write, years 1 to 9999; a file's may be others.
const (
	firstSecond = -62135596800
	lastSecond  = 253402300799
)

// buffers are copyBuffer bytes each.
var buffers = sync.Pool{New: func() any { return new([copyBuffer]byte) }}

// file is an open descriptor of something that cannot make the agent wait: a regular file or a directory.
type file int

func (f file) Read(p []byte) (int, error) {
	n, err := retry(func() (int, error) { return unix.Read(int(f), p) })
	if err != nil {
		return 0, err
	}
	if n == 0 && len(p) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (f file) Write(p []byte) (int, error) {
	done := 0
	for done < len(p) {
		n, err := retry(func() (int, error) { return unix.Write(int(f), p[done:]) })
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (f file) Seek(offset int64, whence int) (int64, error) { return unix.Seek(int(f), offset, whence) }
func (f file) Truncate(size int64) error                    { return unix.Ftruncate(int(f), size) }
func (f file) Close() error                                 { return unix.Close(int(f)) }

// startWriting returns a progress function for tarstream.Copy that makes the kernel write while more arrives.
func (f file) startWriting() func(int64) error {
	var begun int64
	return func(done int64) error {
		if done-begun >= writeBack {
			_ = unix.SyncFileRange(int(f), begun, done-begun, unix.SYNC_FILE_RANGE_WRITE) // only a hint
			begun = done
		}
		return nil
	}
}

func retry(call func() (int, error)) (int, error) {
	for {
		n, err := call()
		if err != unix.EINTR {
			return n, err
		}
	}
}

// openat opens name in the directory dir, never as somebody's controlling terminal and never for children.
func openat(dir int, name string, flags int, mode uint32) (int, error) {
	return retry(func() (int, error) { return unix.Openat(dir, name, flags|unix.O_CLOEXEC|unix.O_NOCTTY, mode) })
}

func lstatat(dir int, name string) (st unix.Stat_t, err error) {
	err = unix.Fstatat(dir, name, &st, unix.AT_SYMLINK_NOFOLLOW)
	return st, err
}

// readlinkat reads a symbolic link; EINVAL says that it is none.
func readlinkat(dir int, name string) (string, error) {
	buf := make([]byte, 4097)
	n, err := unix.Readlinkat(dir, name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// tempName is a name that nobody can foresee.
func tempName() string { return ".shard-" + rand.Text() + ".tmp" }

// fileError says what a failed system call means to the client; what names the thing, quoted. Errors that are no errno
// pass as they are. The files are the guest's, so whatever it does to them is the client's to hear, never an internal
// error.
func fileError(what string, err error) error {
	errno, ok := errors.AsType[unix.Errno](err)
	if !ok {
		return err
	}
	reason := errno.Error()
	switch errno {
	case unix.ENOENT:
		return shard.Errorf(shard.CodeNotFound, "%s does not exist in the sandbox", what)
	case unix.EACCES, unix.EPERM:
		reason = "permission denied in the sandbox"
	case unix.ENOSPC, unix.EDQUOT:
		reason = "no space left on the sandbox's disk"
	case unix.EROFS:
		reason = "it is on a read-only file system"
	case unix.ELOOP:
		reason = "too many symbolic links: they form a loop"
	case unix.ENOTDIR:
		reason = "a part of the path is not a directory"
	case unix.EISDIR:
		reason = "it is a directory"
	case unix.EEXIST:
		reason = "it exists"
	case unix.ENOTEMPTY:
		reason = "the directory is not empty: remove it recursively"
	case unix.ENAMETOOLONG:
		reason = "the name is too long"
	case unix.EFBIG:
		reason = "the file system cannot hold a file of that size"
	case unix.EBUSY, unix.ETXTBSY:
		reason = "it is in use or a mount point"
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return shard.Errorf(shard.CodeInternal, "%s: the sandbox is out of memory or open files", what)
	}
	return shard.Invalidf("%s: %s", what, reason)
}

// typeName names what is not a regular file.
func typeName(mode uint32) string {
	switch mode & unix.S_IFMT {
	case unix.S_IFDIR:
		return "a directory"
	case unix.S_IFLNK:
		return "a symbolic link"
	case unix.S_IFIFO:
		return "a fifo"
	case unix.S_IFSOCK:
		return "a socket"
	case unix.S_IFCHR:
		return "a character device"
	case unix.S_IFBLK:
		return "a block device"
	default:
		return "of an unknown type"
	}
}

// entryOf is st as clients see it, without a name.
func entryOf(st *unix.Stat_t) shard.FileEntry {
	e := shard.FileEntry{Type: "other", Size: st.Size, Mode: st.Mode & 0o7777, UID: st.Uid, GID: st.Gid,
		MTime: time.Unix(min(max(st.Mtim.Sec, firstSecond), lastSecond), st.Mtim.Nsec).UTC()}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFREG:
		e.Type = "file"
	case unix.S_IFDIR:
		e.Type = "dir"
	case unix.S_IFLNK:
		e.Type = "symlink"
	}
	return e
}

// split takes the last part off an absolute path, or off a link's text: dir is the rest (never ""), slash says that base
// must be a directory because a slash follows it. A base that is "", "." or ".." names a directory by another name.
func split(p string) (dir, base string, slash bool) {
	trimmed := strings.TrimRight(p, "/")
	slash = trimmed != p
	i := strings.LastIndexByte(trimmed, '/')
	dir, base = trimmed[:i+1], trimmed[i+1:]
	if dir == "" && strings.HasPrefix(p, "/") {
		dir = "/"
	} else if dir == "" {
		dir = "."
	}
	return dir, base, slash
}

func dotted(base string) bool { return base == "" || base == "." || base == ".." }

// statPath is the stat operation.
func statPath(path string) (shard.FileEntry, error) {
	if err := guest.CheckPath(path); err != nil {
		return shard.FileEntry{}, err
	}
	st, err := lstatat(unix.AT_FDCWD, path)
	if err != nil {
		return shard.FileEntry{}, fileError(shard.Quote(path), err)
	}
	return entryOf(&st), nil
}

// download is a get operation that has begun. Reading goes on to the end of the file, whatever its size says: files
// in /proc say 0.
type download struct {
	io.Reader
	io.Closer
	entry shard.FileEntry
	path  string
}

// openGet opens a regular file for the get operation.
func openGet(path string) (*download, error) {
	fail := func(err error) (*download, error) { return nil, err }
	if err := guest.CheckPath(path); err != nil {
		return fail(err)
	}
	// Opening a device may do things: look first. The look is repeated on what was opened.
	var st unix.Stat_t
	if err := unix.Fstatat(unix.AT_FDCWD, path, &st, 0); err != nil {
		return fail(fileError(shard.Quote(path), err))
	}
	notRegular := func() error {
		return shard.Invalidf("%s is %s, not a regular file", shard.Quote(path), typeName(st.Mode))
	}
	if st.Mode&unix.S_IFMT != unix.S_IFREG {
		return fail(notRegular())
	}
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_NONBLOCK, 0)
	if err == nil {
		err = unix.Fstat(fd, &st)
	}
	switch {
	case err != nil:
		closeAll(fd)
		return fail(fileError(shard.Quote(path), err))
	case st.Mode&unix.S_IFMT != unix.S_IFREG:
		closeAll(fd)
		return fail(notRegular())
	}
	return &download{contents(file(fd), &st), file(fd), entryOf(&st), path}, nil
}

func contents(f file, st *unix.Stat_t) io.Reader {
	return tarstream.Contents(f, int(f), st.Size, st.Blocks*512)
}

// send copies the file to w.
func (d *download) send(w io.Writer) error {
	buf := buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(buf)
	for {
		n, err := d.Read(buf[:])
		if n > 0 {
			if _, err := w.Write(buf[:n]); err != nil {
				return err
			}
		}
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return fileError(shard.Quote(d.path), err)
		}
	}
}

func closeAll(fds ...int) {
	for _, fd := range fds {
		if fd >= 0 {
			_ = unix.Close(fd)
		}
	}
}

// readNames reads a directory's entries in the order of their bytes; at most maxNames.
func readNames(dir int) ([]string, error) {
	buf := buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(buf)
	var names []string
	for {
		n, err := retry(func() (int, error) { return unix.ReadDirent(dir, buf[:]) })
		if err != nil {
			return nil, err
		}
		if n <= 0 {
			break
		}
		_, _, names = unix.ParseDirent(buf[:n], -1, names)
		if len(names) > maxNames {
			return nil, shard.Invalidf("a directory has more than %d entries: too many to sort", maxNames)
		}
	}
	slices.Sort(names)
	return names, nil
}

// openDir opens a directory for the list operation, and reads its names.
func openDir(path string) (int, []string, error) {
	if err := guest.CheckPath(path); err != nil {
		return -1, nil, err
	}
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err == unix.ENOTDIR {
		return -1, nil, shard.Invalidf("%s is not a directory", shard.Quote(path))
	}
	var names []string
	if err == nil {
		names, err = readNames(fd)
	}
	if err != nil {
		closeAll(fd)
		return -1, nil, fileError(shard.Quote(path), err)
	}
	return fd, names, nil
}

// writeEntries writes one line of JSON for each name; what has gone meanwhile is left out.
func writeEntries(w io.Writer, dir int, names []string) error {
	out := make([]byte, 0, 64<<10)
	for _, name := range names {
		st, err := lstatat(dir, name)
		if err != nil {
			if err == unix.ENOENT {
				continue
			}
			return fileError(shard.Quote(name), err)
		}
		e := entryOf(&st)
		if e.Name = name; !utf8.ValidString(name) {
			e.Name, e.NameBytes = strings.ToValidUTF8(name, "\uFFFD"), []byte(name)
		}
		line, err := json.Marshal(e)
		if err != nil {
			return err
		}
		if len(out)+len(line)+1 > cap(out) {
			if _, err := w.Write(out); err != nil {
				return err
			}
			out = out[:0]
		}
		out = append(append(out, line...), '\n')
	}
	_, err := w.Write(out)
	return err
}

// makeDir makes the directory name in dir with exactly this mode, whatever the umask is. A setgid bit that the
// directory inherits stays.
func makeDir(dir int, name string, mode uint32) error {
	if err := unix.Mkdirat(dir, name, 0o700); err != nil {
		return err
	}
	fd, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil {
		return err
	}
	if mode |= st.Mode & unix.S_ISGID; st.Mode&0o7777 == mode {
		return nil
	}
	return unix.Fchmod(fd, mode)
}

// openDirs opens the directory path (O_PATH), relative to at or absolute. With parents it makes what is missing, 0755.
func openDirs(at int, path string, parents bool) (int, error) {
	const flags = unix.O_PATH | unix.O_DIRECTORY
	fd, err := openat(at, path, flags, 0)
	if err != unix.ENOENT || !parents {
		return fd, err
	}
	start := "."
	if strings.HasPrefix(path, "/") {
		start = "/"
	}
	cur, err := openat(at, start, flags, 0)
	for part := range strings.SplitSeq(path, "/") {
		if err != nil {
			break
		}
		if part == "" {
			continue
		}
		var next int
		if next, err = openat(cur, part, flags, 0); err == unix.ENOENT {
			if err = makeDir(cur, part, 0o755); err == nil || err == unix.EEXIST { // EEXIST: another did, or a link to nowhere
				next, err = openat(cur, part, flags, 0)
			}
		}
		closeAll(cur)
		cur = next
	}
	if err != nil {
		return -1, err
	}
	return cur, nil
}

// upload is a put that has begun: the file is there under a temporary name.
type upload struct {
	c    creds
	args guest.PutArgs
	what string // for messages
	mode uint32
	dir  int
	base string
	temp string
	f    file
}

// beginPut checks the arguments and makes the temporary file, so that most refusals come before the contents.
func beginPut(args guest.PutArgs, c creds) (*upload, error) {
	u := &upload{c: c, args: args, what: shard.Quote(string(args.Path)), dir: -1, f: -1, mode: 0o644, temp: tempName()}
	if err := guest.CheckPath(string(args.Path)); err != nil {
		return nil, err
	}
	if args.Size < 0 {
		return nil, shard.Invalidf("the size of %s is negative", u.what)
	}
	if args.Mode != nil {
		u.mode = *args.Mode
	}
	if u.mode > 0o777 {
		return nil, shard.Invalidf("the mode of %s is more than 0777", u.what)
	}
	err := c.do(func() (err error) {
		if u.dir, u.base, err = target(string(args.Path), args.Parents); err != nil {
			return err
		}
		fd, err := openat(u.dir, u.temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW, 0o600)
		u.f = file(fd)
		return err
	})
	if err != nil {
		if kernelMade(u.dir) {
			err = shard.Invalidf("%s: nothing can be made there, since the kernel makes up what that directory holds (proc or sysfs)", u.what)
		}
		closeAll(u.dir)
		return nil, putError(u.what, err)
	}
	return u, nil
}

// kernelMade says whether what an open directory or file is in holds what the kernel makes up: sizes say nothing there.
func kernelMade(fd int) bool {
	var fs unix.Statfs_t
	return fd >= 0 && unix.Fstatfs(fd, &fs) == nil && (fs.Type == unix.PROC_SUPER_MAGIC || fs.Type == unix.SYSFS_MAGIC)
}

// putError is fileError for a write, where what does not exist is a directory on the way.
func putError(what string, err error) error {
	if errors.Is(err, unix.ENOENT) {
		return shard.Errorf(shard.CodeNotFound, "the directory of %s does not exist in the sandbox: make it first", what)
	}
	return fileError(what, err)
}

// target finds where a write to path lands: a directory (O_PATH) and the name in it. The last part is followed while it
// is a symbolic link, as any program that opens the path would. What is there must be a regular file or nothing.
func target(path string, parents bool) (dir int, base string, err error) {
	at := unix.AT_FDCWD
	for range maxLinks {
		parent, base, slash := split(path)
		if slash || dotted(base) {
			closeAll(at)
			return -1, "", unix.EISDIR
		}
		dir, err := openDirs(at, parent, parents)
		closeAll(at)
		if err != nil {
			return -1, "", err
		}
		st, err := lstatat(dir, base)
		switch {
		case err == unix.ENOENT || err == nil && st.Mode&unix.S_IFMT == unix.S_IFREG:
			return dir, base, nil
		case err == nil && st.Mode&unix.S_IFMT != unix.S_IFLNK:
			closeAll(dir)
			return -1, "", shard.Invalidf("%s is %s, not a regular file", shard.Quote(path), typeName(st.Mode))
		case err == nil:
			path, err = readlinkat(dir, base)
		}
		if err != nil {
			closeAll(dir)
			return -1, "", err
		}
		at, parents = dir, false // links are followed, not filled in
	}
	closeAll(at)
	return -1, "", unix.ELOOP
}

// receive writes the contents and puts the file in place; without it, or on an error, nothing is left.
func (u *upload) receive(r io.Reader) error {
	defer u.close()
	buf := buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(buf)
	err := tarstream.Copy(u.f, r, u.args.Size, buf[:], u.f.startWriting())
	if err == io.ErrUnexpectedEOF {
		return shard.Invalidf("the contents of %s ended before the %d bytes that were announced", u.what, u.args.Size)
	}
	if err == nil {
		switch n, rerr := r.Read(buf[:1]); {
		case n > 0:
			return shard.Invalidf("the contents of %s are longer than the %d bytes that were announced", u.what, u.args.Size)
		case rerr != nil && rerr != io.EOF:
			return rerr
		}
		err = unix.Fsync(int(u.f))
	}
	if err == nil {
		err = u.c.do(func() error {
			if err := unix.Fchmod(int(u.f), u.mode); err != nil {
				return err
			}
			return unix.Renameat(u.dir, u.temp, u.dir, u.base)
		})
	}
	if err != nil {
		return putError(u.what, err)
	}
	u.temp = ""
	return nil
}

// close gives up what receive did not finish.
func (u *upload) close() {
	if u.dir < 0 {
		return
	}
	if u.temp != "" {
		_ = u.c.do(func() error { return unix.Unlinkat(u.dir, u.temp, 0) })
	}
	closeAll(u.dir, int(u.f))
	u.dir, u.f = -1, -1
}

// mkdir is the mkdir operation.
func mkdir(args guest.MkdirArgs, c creds) error {
	what := shard.Quote(string(args.Path))
	if err := guest.CheckPath(string(args.Path)); err != nil {
		return err
	}
	mode := uint32(0o755)
	if args.Mode != nil {
		mode = *args.Mode
	}
	if mode > 0o777 {
		return shard.Invalidf("the mode of %s is more than 0777", what)
	}
	parent, base, _ := split(string(args.Path))
	err := c.do(func() error {
		if dotted(base) { // names a directory that is there, or is not
			fd, err := openDirs(unix.AT_FDCWD, string(args.Path), args.Parents)
			closeAll(fd)
			if err == nil && !args.Parents {
				err = unix.EEXIST
			}
			return err
		}
		dir, err := openDirs(unix.AT_FDCWD, parent, args.Parents)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		if err = makeDir(dir, base, mode); err == unix.EEXIST && args.Parents {
			var st unix.Stat_t
			if unix.Fstatat(dir, base, &st, 0) == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
				return nil
			}
		}
		return err
	})
	if err != nil {
		return putError(what, err)
	}
	return nil
}

package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// An own unpacker, where containerd's archive.Apply would do for most images, because of what a layer on its own (not
// applied over its parents) needs: directories that the tar only implies take their attributes from the layers below,
// hard links may point into them, a directory that was deleted and made anew hides what was there, holes stay holes,
// device nodes are left out, and every entry is counted. Tests compare the outcome with archive.Apply.
//
// Every name is resolved by the kernel inside the layer's root (openat2, RESOLVE_IN_ROOT), and the last component is
// never followed; so no link, absolute or with .., leads out.

const (
	whPrefix = ".wh."
	whOpaque = ".wh..wh..opq"
	xOpaque  = "trusted.overlay.opaque"
	// maxLinks bounds the links to targets that are not in the layer, which are kept in memory.
	maxLinks = 100_000
)

// errEntry marks a fault of the archive itself.
var errEntry = errors.New("bad entry in the layer")

type unpacker struct {
	ctx  context.Context
	root int // directory of the layer
	b    *budget
	tr   *tar.Reader
	buf  []byte

	// implied maps the inode of each directory that has had no entry of its own to its path.
	implied map[uint64]string
	// dirs are the directories whose times are set at the end, when nothing changes in them any more.
	dirs []dirTime
	// whiteouts are the paths at which one was made.
	whiteouts []string
	// links are hard links whose target is not in this layer: it may be below.
	links []pendingLink
	// dropped counts the device nodes that were left out.
	dropped int

	// The parent of the last entry, since entries come in bunches.
	lastName string
	lastFD   int
}

type dirTime struct {
	path  string
	mtime unix.Timespec
}

type pendingLink struct{ name, target string }

// unpack applies the tar stream r to the empty directory dir, in the form in which overlayfs expects a lower layer:
// whiteouts as character devices 0:0, opaque directories by attribute. finish must follow.
func unpack(ctx context.Context, dir string, r io.Reader, b *budget) (*unpacker, error) {
	root, err := unix.Open(dir, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
	if err != nil {
		return nil, &os.PathError{Op: "open", Path: dir, Err: err}
	}
	u := &unpacker{ctx: ctx, root: root, b: b, tr: tar.NewReader(r), buf: make([]byte, 256<<10), implied: map[uint64]string{}, lastFD: -1}
	defer u.forgetParent()
	var st unix.Stat_t
	if err = unix.Fstat(root, &st); err == nil {
		u.implied[st.Ino] = "/"
		err = u.run()
	}
	if err != nil {
		unix.Close(root)
		return nil, err
	}
	return u, nil
}

func (u *unpacker) run() error {
	for {
		if err := u.ctx.Err(); err != nil {
			return err
		}
		hdr, err := u.tr.Next()
		if err == io.EOF {
			return nil
		}
		if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) {
			return fmt.Errorf("%w: %w", errEntry, err)
		}
		if err != nil {
			return err
		}
		if err := u.entry(hdr); err != nil {
			switch errno, _ := errors.AsType[unix.Errno](err); errno {
			case unix.ENAMETOOLONG, unix.EINVAL, unix.ENOTDIR, unix.ELOOP, unix.EMLINK, unix.EEXIST, unix.E2BIG, unix.ENOENT:
				err = fmt.Errorf("%w: %w", errEntry, err)
			}
			return fmt.Errorf("entry %.200q: %w", hdr.Name, err)
		}
	}
}

// entry takes an entry in, unless it is one to pass over.
func (u *unpacker) entry(hdr *tar.Header) error {
	extra := int64(0)
	for k, v := range hdr.PAXRecords {
		extra += int64(len(k) + len(v))
	}
	if err := u.b.entry(u.root, hdr.Size, extra); err != nil {
		return err
	}
	if hdr.Uid < 0 || hdr.Gid < 0 || int64(hdr.Uid) >= 1<<32-1 || int64(hdr.Gid) >= 1<<32-1 {
		return fmt.Errorf("%w: owner %d:%d", errEntry, hdr.Uid, hdr.Gid)
	}
	dir, base := path.Split(path.Clean("/" + hdr.Name))
	if strings.Contains(dir, "/"+whPrefix) || (strings.HasPrefix(base, whPrefix+whPrefix) && base != whOpaque) {
		return nil // bookkeeping of aufs
	}
	switch hdr.Typeflag {
	case tar.TypeChar, tar.TypeBlock:
		// A sandbox gets its devices from its provider, never from an image; and 0:0 would read as a whiteout.
		u.dropped++
		return nil
	case tar.TypeReg, tar.TypeRegA, tar.TypeDir, tar.TypeSymlink, tar.TypeLink, tar.TypeFifo, tar.TypeGNUSparse, tar.TypeCont: // old tars hold TypeRegA
	case tar.TypeXGlobalHeader:
		return nil
	default:
		return fmt.Errorf("%w: type %q", errEntry, hdr.Typeflag)
	}
	if base == "" { // the root itself
		if hdr.Typeflag != tar.TypeDir {
			return fmt.Errorf("%w: the root is not a directory", errEntry)
		}
		return u.directory(u.root, ".", "/", hdr)
	}
	return u.place(dir, base, hdr)
}

// place puts an entry with a name into a directory.
func (u *unpacker) place(dir, base string, hdr *tar.Header) error {
	name := dir + base
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	if strings.HasPrefix(base, whPrefix) {
		return u.whiteout(pfd, base)
	}
	// What is there already gives way, except a directory to a directory. A whiteout that a directory replaces was
	// meant for the lower one, which therefore must not show through.
	opaque := false
	var st unix.Stat_t
	switch err := unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == unix.ENOENT:
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT == unix.S_IFDIR && hdr.Typeflag == tar.TypeDir:
	default:
		if hdr.Typeflag == tar.TypeLink && path.Clean("/"+hdr.Linkname) == name {
			return nil // a link to itself
		}
		opaque = isWhiteout(&st)
		if err := removeAt(pfd, base); err != nil {
			return err
		}
		u.forgetParent() // it may have been below
		if pfd, err = u.parent(dir); err != nil {
			return err
		}
	}
	switch hdr.Typeflag {
	case tar.TypeDir:
		if err := unix.Mkdirat(pfd, base, 0o700); err != nil && err != unix.EEXIST {
			return err
		}
		if opaque {
			if err := setOpaque(pfd, base); err != nil {
				return err
			}
		}
		return u.directory(pfd, base, name, hdr)
	case tar.TypeSymlink:
		if err := unix.Symlinkat(hdr.Linkname, pfd, base); err != nil {
			return err
		}
	case tar.TypeFifo:
		if err := unix.Mknodat(pfd, base, unix.S_IFIFO|0o600, 0); err != nil {
			return err
		}
	case tar.TypeLink:
		return u.link(pfd, base, name, hdr.Linkname)
	default:
		return u.regular(pfd, base, hdr)
	}
	return u.attributes(pfd, base, hdr)
}

// regular writes a file, leaving holes where there are zeros.
func (u *unpacker) regular(pfd int, base string, hdr *tar.Header) error {
	fd, err := unix.Openat(pfd, base, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	var at int64
	sparse := false
	for {
		n, err := io.ReadFull(u.tr, u.buf)
		for p := u.buf[:n]; len(p) > 0; {
			block := p[:min(len(p), 32<<10)]
			p = p[len(block):]
			if sparse = allZero(block); !sparse {
				if err := pwriteAll(fd, block, at); err != nil {
					return err
				}
				if err := u.b.wrote(u.root, int64(len(block))); err != nil {
					return err
				}
			}
			at += int64(len(block))
		}
		if err == io.EOF || err == io.ErrUnexpectedEOF {
			if at != hdr.Size {
				return io.ErrUnexpectedEOF
			}
			break
		}
		if err != nil {
			return err
		}
		if err := u.ctx.Err(); err != nil {
			return err
		}
	}
	if sparse {
		if err := unix.Ftruncate(fd, at); err != nil {
			return err
		}
	}
	return u.attributes(pfd, base, hdr)
}

func pwriteAll(fd int, p []byte, at int64) error {
	for len(p) > 0 {
		n, err := unix.Pwrite(fd, p, at)
		if err == unix.EINTR {
			continue
		}
		if err != nil {
			return err
		}
		p, at = p[n:], at+int64(n)
	}
	return nil
}

var zeros [32 << 10]byte

func allZero(p []byte) bool { return string(p) == string(zeros[:len(p)]) }

// directory gives an existing directory the attributes of its entry.
func (u *unpacker) directory(pfd int, base, name string, hdr *tar.Header) error {
	var st unix.Stat_t
	if err := unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	delete(u.implied, st.Ino)
	u.dirs = append(u.dirs, dirTime{name, timespec(hdr.ModTime)})
	return u.attributes(pfd, base, hdr)
}

// link makes a hard link, now or, when its target is not in this layer, in finish.
func (u *unpacker) link(pfd int, base, name, target string) error {
	target = path.Clean("/" + target)
	tdir, tbase := path.Split(target)
	tfd, err := u.open(tdir, unix.O_PATH|unix.O_DIRECTORY)
	if err == nil {
		err = unix.Linkat(tfd, tbase, pfd, base, 0)
		unix.Close(tfd)
	}
	if err == unix.EPERM {
		return fmt.Errorf("%w: hard link to a directory", errEntry)
	}
	if err != unix.ENOENT && err != unix.ENOTDIR {
		return err
	}
	if len(u.links) == maxLinks {
		return fmt.Errorf("%w: too many hard links to missing files", errEntry)
	}
	u.links = append(u.links, pendingLink{name, target})
	return nil
}

// whiteout hides what the layers below have, and nothing that this layer has.
func (u *unpacker) whiteout(pfd int, base string) error {
	if base == whOpaque {
		return setOpaque(pfd, ".")
	}
	hidden := strings.TrimPrefix(base, whPrefix)
	if hidden == "" || hidden == "." || hidden == ".." {
		return fmt.Errorf("%w: whiteout of %q", errEntry, hidden)
	}
	var st unix.Stat_t
	switch err := unix.Fstatat(pfd, hidden, &st, unix.AT_SYMLINK_NOFOLLOW); {
	case err == unix.ENOENT:
		where, err := u.pathOf(pfd)
		if err != nil {
			return err
		}
		u.whiteouts = append(u.whiteouts, path.Join(where, hidden))
		return unix.Mknodat(pfd, hidden, unix.S_IFCHR, 0)
	case err != nil:
		return err
	case st.Mode&unix.S_IFMT == unix.S_IFDIR:
		return setOpaque(pfd, hidden)
	}
	return nil
}

// isWhiteout: no other character device gets into a layer.
func isWhiteout(st *unix.Stat_t) bool { return st.Mode&unix.S_IFMT == unix.S_IFCHR }

func setOpaque(pfd int, name string) error {
	return setxattrAt(pfd, name, xOpaque, []byte("y"))
}

// attributes sets owner, extended attributes, mode and time of a fresh inode, in the order in which none undoes another.
func (u *unpacker) attributes(pfd int, base string, hdr *tar.Header) error {
	if err := unix.Fchownat(pfd, base, hdr.Uid, hdr.Gid, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return err
	}
	if hdr.Typeflag != tar.TypeSymlink {
		for key, value := range hdr.PAXRecords {
			key, ok := strings.CutPrefix(key, "SCHILY.xattr.")
			if !ok || !keepXattr(key) || (hdr.Typeflag == tar.TypeFifo && strings.HasPrefix(key, "user.")) {
				continue
			}
			err := setxattrAt(pfd, base, key, []byte(value))
			if err == unix.ENOSPC && len(value) > 2<<10 {
				err = unix.E2BIG // ext4 has a block for them, and says so in this way
			}
			if err != nil && err != unix.ENOTSUP {
				return fmt.Errorf("attribute %.80q: %w", key, err)
			}
		}
		if err := unix.Fchmodat(pfd, base, uint32(hdr.Mode)&0o7777, 0); err != nil {
			return err
		}
	}
	if hdr.Typeflag == tar.TypeDir {
		return nil // its time comes at the end
	}
	t := timespec(hdr.ModTime)
	return unix.UtimesNanoAt(pfd, base, []unix.Timespec{t, t}, unix.AT_SYMLINK_NOFOLLOW)
}

// keepXattr: what belongs to the files. The rest belongs to the host that built the image (security labels) or would
// speak to overlayfs in our name (trusted.overlay.*, user.overlay.*).
func keepXattr(key string) bool {
	switch key {
	case "security.capability", "system.posix_acl_access", "system.posix_acl_default":
		return true
	}
	return strings.HasPrefix(key, "user.") && !strings.HasPrefix(key, "user.overlay.")
}

// setxattrAt goes through /proc because there is no setxattrat before Linux 6.13. The last component is never a
// symbolic link: callers set attributes only on what they just made.
func setxattrAt(pfd int, base, key string, value []byte) error {
	return unix.Lsetxattr(fmt.Sprintf("/proc/self/fd/%d/%s", pfd, base), key, value, 0)
}

func removeAt(pfd int, base string) error {
	err := unix.Unlinkat(pfd, base, 0)
	if err == unix.EISDIR || err == unix.EPERM {
		return os.RemoveAll(fmt.Sprintf("/proc/self/fd/%d/%s", pfd, base))
	}
	return err
}

func timespec(t time.Time) unix.Timespec {
	// What ext4 can hold, and no more: a file system may refuse the rest.
	const latest = 1<<34 - 1
	switch s := t.Unix(); {
	case s < 0:
		return unix.Timespec{}
	case s > latest:
		return unix.Timespec{Sec: latest}
	default:
		return unix.Timespec{Sec: s, Nsec: int64(t.Nanosecond())}
	}
}

// open opens a path inside the layer, following links as if the layer were the whole world.
func (u *unpacker) open(p string, flags uint64) (int, error) { return openIn(u.root, p, flags) }

func openIn(root int, p string, flags uint64) (int, error) {
	if p = strings.TrimPrefix(p, "/"); p == "" {
		p = "."
	}
	for {
		fd, err := unix.Openat2(root, p, &unix.OpenHow{Flags: flags | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
		if err == unix.EINTR || err == unix.EAGAIN {
			continue
		}
		return fd, err
	}
}

func (u *unpacker) forgetParent() {
	if u.lastFD >= 0 {
		unix.Close(u.lastFD)
	}
	u.lastFD, u.lastName = -1, ""
}

// parent opens the directory of an entry, making what is missing. The descriptor stays the unpacker's.
func (u *unpacker) parent(dir string) (int, error) {
	if u.lastFD >= 0 && u.lastName == dir {
		return u.lastFD, nil
	}
	fd, err := u.makeDir(path.Clean(dir), 0)
	if err != nil {
		return -1, err
	}
	u.forgetParent()
	u.lastFD, u.lastName = fd, dir
	return fd, nil
}

// makeDir opens a directory, making it and those above as needed; also through a link that leads to nothing yet.
func (u *unpacker) makeDir(p string, depth int) (int, error) {
	fd, err := u.open(p, unix.O_PATH|unix.O_DIRECTORY)
	if (err != unix.ENOENT && err != unix.ENOTDIR) || p == "/" {
		return fd, err
	}
	if depth > 255 {
		return -1, unix.ELOOP
	}
	dir, base := path.Split(p)
	pfd, err := u.makeDir(path.Clean(dir), depth+1)
	if err != nil {
		return -1, err
	}
	defer unix.Close(pfd)
	where, err := u.pathOf(pfd)
	if err != nil {
		return -1, err
	}
	if err := u.b.entry(u.root, 0, 0); err != nil {
		return -1, err
	}
	var st unix.Stat_t
	opaque := false
	if err := unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err == nil {
		switch {
		case st.Mode&unix.S_IFMT == unix.S_IFLNK:
			target, err := readlinkAt(pfd, base)
			if err != nil {
				return -1, err
			}
			if !path.IsAbs(target) {
				target = path.Join(where, target)
			}
			return u.makeDir(path.Clean("/"+target), depth+1)
		case isWhiteout(&st):
			opaque = true
			if err := unix.Unlinkat(pfd, base, 0); err != nil {
				return -1, err
			}
		default:
			return -1, unix.ENOTDIR
		}
	}
	if err := unix.Mkdirat(pfd, base, 0o755); err != nil {
		return -1, err
	}
	if err := unix.Fchmodat(pfd, base, 0o755, 0); err != nil {
		return -1, err
	}
	if opaque {
		if err := setOpaque(pfd, base); err != nil {
			return -1, err
		}
	}
	if err := unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil {
		return -1, err
	}
	u.implied[st.Ino] = path.Join(where, base)
	return unix.Openat(pfd, base, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
}

// pathOf gives the path of a directory inside the layer.
func (u *unpacker) pathOf(fd int) (string, error) {
	root, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", u.root))
	if err != nil {
		return "", err
	}
	p, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd))
	return path.Clean("/" + strings.TrimPrefix(p, root)), err
}

func readlinkAt(fd int, name string) (string, error) {
	buf := make([]byte, 4097)
	n, err := unix.Readlinkat(fd, name, buf)
	if err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

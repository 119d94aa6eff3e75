package image

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"strings"

	"golang.org/x/sys/unix"
)

// finish completes a layer with what depends on the layers below, whose directories are given topmost first: whiteouts
// of nothing, the attributes of directories that the tar only implied, and hard links to files of lower layers. Then it
// sets the times of directories. It does not write to disk yet.
func (u *unpacker) finish(lower []string) error {
	if len(u.links) > 0 || len(u.implied) > 0 || len(u.whiteouts) > 0 {
		below, err := openLayers(lower)
		defer below.close()
		if err != nil {
			return err
		}
		for _, p := range u.whiteouts {
			if err := u.dropIdle(below, p); err != nil {
				return fmt.Errorf("whiteout of %.200q: %w", p, err)
			}
		}
		copies := map[string]string{} // target below → its copy here
		for _, l := range u.links {
			if u.linkHere(l.name, l.target) || u.linkHere(l.name, copies[l.target]) {
				continue
			}
			copies[l.target] = l.name
			if err := u.linkBelow(below, l); err != nil && !errors.Is(err, unix.EEXIST) { // a later entry took the name
				return fmt.Errorf("hard link %.200q to %.200q: %w", l.name, l.target, err)
			}
		}
		for _, p := range u.implied {
			if err := u.inherit(below, p); err != nil {
				return fmt.Errorf("directory %.200q: %w", p, err)
			}
		}
	}
	u.forgetParent()
	for _, d := range u.dirs {
		fd, err := u.open(d.path, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
		if err != nil {
			continue // replaced since by something else
		}
		err = setMtime(fd, d.mtime)
		unix.Close(fd)
		if err != nil {
			return err
		}
	}
	return nil
}

func setMtime(fd int, t unix.Timespec) error {
	return unix.UtimesNanoAt(unix.AT_FDCWD, fmt.Sprintf("/proc/self/fd/%d", fd), []unix.Timespec{t, t}, 0)
}

// layers are the open roots of the layers below, topmost first.
type layers []int

func openLayers(dirs []string) (layers, error) {
	var l layers
	for _, d := range dirs {
		fd, err := unix.Open(d, unix.O_DIRECTORY|unix.O_RDONLY|unix.O_CLOEXEC|unix.O_NOFOLLOW, 0)
		if err != nil {
			return l, &os.PathError{Op: "open", Path: d, Err: err}
		}
		l = append(l, fd)
	}
	return l, nil
}

func (l layers) close() {
	for _, fd := range l {
		unix.Close(fd)
	}
}

// find opens (O_PATH) what the layers together show at p, or gives ENOENT. p has no links in it but maybe the last.
func (l layers) find(p string) (int, error) {
	for _, root := range l {
		fd, err := findIn(root, p)
		if err != unix.ENOENT {
			return fd, err
		}
	}
	return -1, unix.ENOENT
}

// errHidden says that a layer hides whatever is at the path in those below it.
var errHidden = errors.New("hidden")

func findIn(root int, p string) (int, error) {
	fd, err := unix.Openat(root, ".", unix.O_PATH|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	hidden := false
	for name := range strings.SplitSeq(strings.Trim(p, "/"), "/") {
		if name == "" {
			break
		}
		hidden = hidden || isOpaque(fd)
		next, err := unix.Openat(fd, name, unix.O_PATH|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		unix.Close(fd)
		if err == unix.ENOENT && hidden || err == unix.ENOTDIR {
			return -1, errHidden
		}
		if err != nil {
			return -1, err
		}
		fd = next
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || isWhiteout(&st) {
		unix.Close(fd)
		return -1, errHidden
	}
	return fd, nil
}

// inherit gives an implied directory the attributes that the layers below show for it; without any it stays root's, 0755.
func (u *unpacker) inherit(below layers, p string) error {
	src, err := below.find(p)
	if err != nil {
		if err == unix.ENOENT || err == errHidden {
			return nil
		}
		return err
	}
	defer unix.Close(src)
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return err
	}
	dst, err := u.open(p, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return nil // replaced since by something else
	}
	defer unix.Close(dst)
	u.dirs = append(u.dirs, dirTime{p, st.Mtim})
	return copyAttributes(src, dst, &st)
}

func copyAttributes(src, dst int, st *unix.Stat_t) error {
	from, to := fmt.Sprintf("/proc/self/fd/%d", src), fmt.Sprintf("/proc/self/fd/%d", dst)
	if err := unix.Chown(to, int(st.Uid), int(st.Gid)); err != nil {
		return err
	}
	names := make([]byte, 64<<10)
	n, err := unix.Listxattr(from, names)
	if err != nil && err != unix.ENOTSUP {
		return err
	}
	for key := range strings.SplitSeq(string(names[:max(n, 0)]), "\x00") {
		if key == "" || !keepXattr(key) {
			continue
		}
		value := make([]byte, 64<<10)
		n, err := unix.Getxattr(from, key, value)
		if err != nil {
			return err
		}
		if err := unix.Setxattr(to, key, value[:n], 0); err != nil {
			return err
		}
	}
	return unix.Chmod(to, st.Mode&0o7777)
}

// dropIdle removes a whiteout that hides nothing. Overlayfs shows such a one: a directory that it has not merged with
// another is listed as it is.
func (u *unpacker) dropIdle(below layers, p string) error {
	dir, base := path.Split(p)
	pfd, err := u.open(dir, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
	if err != nil {
		return nil // replaced since by something else
	}
	defer unix.Close(pfd)
	var st unix.Stat_t
	if err := unix.Fstatat(pfd, base, &st, unix.AT_SYMLINK_NOFOLLOW); err != nil || !isWhiteout(&st) {
		return nil
	}
	idle := false
	for d := path.Clean(dir); !idle && d != "/"; d = path.Dir(d) {
		fd, err := u.open(d, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW)
		if err != nil {
			return err
		}
		idle = isOpaque(fd)
		unix.Close(fd)
	}
	if !idle {
		src, err := below.find(p)
		switch err {
		case nil:
			unix.Close(src)
			return nil
		case unix.ENOENT, errHidden:
		default:
			return err
		}
	}
	return unix.Unlinkat(pfd, base, 0)
}

func isOpaque(fd int) bool {
	v := make([]byte, 1)
	n, err := unix.Getxattr(fmt.Sprintf("/proc/self/fd/%d", fd), xOpaque, v)
	return err == nil && n == 1 && v[0] == 'y'
}

// linkHere makes a hard link to what has become part of this layer, and says whether it did.
func (u *unpacker) linkHere(name, target string) bool {
	if target == "" {
		return false
	}
	tdir, tbase := path.Split(target)
	tfd, err := u.open(tdir, unix.O_PATH|unix.O_DIRECTORY)
	if err != nil {
		return false
	}
	defer unix.Close(tfd)
	dir, base := path.Split(name)
	pfd, err := u.parent(dir)
	return err == nil && unix.Linkat(tfd, tbase, pfd, base, 0) == nil
}

// linkBelow makes a hard link whose target is a file of a lower layer. A link cannot cross layers: the file is copied.
func (u *unpacker) linkBelow(below layers, l pendingLink) error {
	src, err := below.find(l.target)
	if err != nil {
		if err == unix.ENOENT || err == errHidden {
			err = fmt.Errorf("%w: no such file in the layer or below it", errEntry)
		}
		return err
	}
	defer unix.Close(src)
	dir, base := path.Split(l.name)
	pfd, err := u.parent(dir)
	if err != nil {
		return err
	}
	var st unix.Stat_t
	if err := unix.Fstat(src, &st); err != nil {
		return err
	}
	if err := u.b.entry(u.root, st.Size, 0); err != nil {
		return err
	}
	switch st.Mode & unix.S_IFMT {
	case unix.S_IFLNK:
		target, err := readlinkAt(src, "")
		if err != nil {
			return err
		}
		if err := unix.Symlinkat(target, pfd, base); err != nil {
			return err
		}
		return unix.Fchownat(pfd, base, int(st.Uid), int(st.Gid), unix.AT_SYMLINK_NOFOLLOW)
	case unix.S_IFREG:
	default:
		return fmt.Errorf("%w: it is not a file", errEntry)
	}
	in, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", src))
	if err != nil {
		return err
	}
	defer in.Close()
	fd, err := unix.Openat(pfd, base, unix.O_RDWR|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return err
	}
	out := os.NewFile(uintptr(fd), base)
	defer out.Close()
	n, err := io.Copy(out, &ctxReader{ctx: u.ctx, r: in})
	if err != nil {
		return err
	}
	if err := u.b.wrote(u.root, n); err != nil {
		return err
	}
	if err := copyAttributes(src, fd, &st); err != nil {
		return err
	}
	return setMtime(fd, st.Mtim)
}

//go:build linux

package rootfs

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// ErrNotPlain says that a path in a root is no regular file, or a larger one than was asked for, or lies behind links that
// lead nowhere.
var ErrNotPlain = errors.New("not a plain file of a moderate size")

// openIn opens a path below a mounted root the way a process inside would, whatever links its owner laid: none leads out.
// Nothing may run in the root meanwhile.
func openIn(root, path string, flags int) (*os.File, error) {
	dir, err := unix.Open(root, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, &fs.PathError{Op: "open", Path: "the root", Err: err}
	}
	defer unix.Close(dir)
	if flags&unix.O_PATH == 0 {
		flags |= unix.O_NONBLOCK | unix.O_NOCTTY // a pipe there must not hold us
	}
	for {
		fd, err := unix.Openat2(dir, path, &unix.OpenHow{Flags: uint64(flags | unix.O_CLOEXEC),
			Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV})
		switch err {
		case nil:
			return os.NewFile(uintptr(fd), path), nil
		case unix.EINTR, unix.EAGAIN: // something was renamed somewhere meanwhile
			continue
		case unix.ENOENT, unix.ENOTDIR:
			return nil, &fs.PathError{Op: "open", Path: path, Err: fs.ErrNotExist}
		case unix.ELOOP, unix.EXDEV, unix.ENXIO:
			return nil, ErrNotPlain
		}
		return nil, &fs.PathError{Op: "open", Path: path, Err: err}
	}
}

// ReadFile reads a regular file of at most most bytes in a mounted root in which nothing runs. A missing one is
// fs.ErrNotExist, any other than asked for ErrNotPlain.
func ReadFile(root, path string, most int64) ([]byte, error) {
	f, err := openIn(root, path, unix.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > most {
		return nil, ErrNotPlain
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = ErrNotPlain
	}
	return data, err
}

// ReplaceFile gives an existing regular file in a mounted root in which nothing runs another content, in one step that
// survives a crash. Owner and mode stay.
func ReplaceFile(root, path string, data []byte) error {
	old, err := openIn(root, path, unix.O_PATH)
	if err != nil {
		return err
	}
	defer old.Close()
	var was unix.Stat_t
	if err := unix.Fstat(int(old.Fd()), &was); err != nil {
		return fmt.Errorf("look at a file in the root: %w", err)
	}
	// Where the links led: its directory takes the new file.
	at, err := os.Readlink("/proc/self/fd/" + strconv.Itoa(int(old.Fd())))
	if err != nil {
		return fmt.Errorf("look where a file of the root lies: %w", err)
	}
	real, err := filepath.EvalSymlinks(root)
	if err != nil {
		return err
	}
	at, inside := strings.CutPrefix(at, real)
	if was.Mode&unix.S_IFMT != unix.S_IFREG || !inside || !filepath.IsAbs(at) {
		return ErrNotPlain
	}
	dir, err := openIn(root, filepath.Dir(at), unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer dir.Close()
	return put(dir, filepath.Base(at), data, was)
}

// AddFile puts a file that everybody may read into a directory of a mounted root in which nothing runs, in one step that survives a
// crash; an older one goes. Where there is no such directory it is fs.ErrNotExist, where something else has the name ErrNotPlain.
func AddFile(root, dir, name string, data []byte) error {
	d, err := openIn(root, dir, unix.O_RDONLY|unix.O_DIRECTORY)
	if err != nil {
		return err
	}
	defer d.Close()
	var old, owner unix.Stat_t
	if err := unix.Fstatat(int(d.Fd()), name, &old, unix.AT_SYMLINK_NOFOLLOW); err == nil && old.Mode&unix.S_IFMT == unix.S_IFDIR {
		return ErrNotPlain
	}
	if err := unix.Fstat(int(d.Fd()), &owner); err != nil {
		return fmt.Errorf("look at a directory in the root: %w", err)
	}
	owner.Mode = 0o644
	return put(d, name, data, owner)
}

// put writes a file with the owner and the mode of like.
func put(dir *os.File, name string, data []byte, like unix.Stat_t) error {
	const temp = ".shard-new"
	_ = unix.Unlinkat(int(dir.Fd()), temp, 0) // of a daemon that was killed
	fd, err := unix.Openat(int(dir.Fd()), temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o600)
	if errors.Is(err, unix.EEXIST) { // the guest's directory
		return ErrNotPlain
	}
	if err != nil {
		return &fs.PathError{Op: "create", Path: "a file in the root", Err: err}
	}
	f := os.NewFile(uintptr(fd), temp)
	_, err = f.Write(data)
	err = errors.Join(err, f.Chown(int(like.Uid), int(like.Gid)), f.Chmod(fs.FileMode(like.Mode&0o777)), f.Sync(), f.Close())
	if err == nil {
		err = unix.Renameat(int(dir.Fd()), temp, int(dir.Fd()), name)
	}
	if err == nil {
		return dir.Sync()
	}
	_ = unix.Unlinkat(int(dir.Fd()), temp, 0)
	return fmt.Errorf("replace a file in the root: %w", err)
}

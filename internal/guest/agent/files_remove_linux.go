package agent

import (
	"errors"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// remove is the remove operation: a link, never what it leads to; a directory with what is in it only if asked. gone
// ends it early.
func remove(args guest.RemoveArgs, c creds, gone <-chan struct{}) error {
	path := string(args.Path)
	if err := guest.CheckPath(path); err != nil {
		return err
	}
	parent, base, slash := split(path)
	if dotted(base) {
		return shard.Invalidf("%s cannot be removed: end the path with the name of what is to go, and not with /, . or ..", shard.Quote(path))
	}
	err := c.do(func() error {
		dir, err := openDirs(unix.AT_FDCWD, parent, false)
		if err != nil {
			return err
		}
		defer unix.Close(dir)
		st, err := lstatat(dir, base)
		switch {
		case err != nil:
			return err
		case st.Mode&unix.S_IFMT != unix.S_IFDIR && slash:
			return unix.ENOTDIR
		case st.Mode&unix.S_IFMT != unix.S_IFDIR:
			return unix.Unlinkat(dir, base, 0)
		}
		if err := notMount(dir, base, path); err != nil {
			return err
		}
		err = unix.Unlinkat(dir, base, unix.AT_REMOVEDIR)
		if args.Recursive && (err == unix.ENOTEMPTY || err == unix.EEXIST) {
			return removeTree(dir, base, gone)
		}
		return err
	})
	if err != nil {
		return fileError(shard.Quote(path), err)
	}
	return nil
}

// notMount refuses the directory name in dir when something is mounted there: what it holds is not the sandbox's disk.
// Where the kernel does not mark the roots of mounts, another device tells most of them.
func notMount(dir int, name, shown string) error {
	var in, at unix.Statx_t
	if err := unix.Statx(dir, name, unix.AT_SYMLINK_NOFOLLOW, unix.STATX_BASIC_STATS, &at); err != nil {
		return err
	}
	if err := unix.Statx(dir, "", unix.AT_EMPTY_PATH, unix.STATX_BASIC_STATS, &in); err != nil {
		return err
	}
	if at.Attributes&at.Attributes_mask&unix.STATX_ATTR_MOUNT_ROOT != 0 || at.Dev_major != in.Dev_major || at.Dev_minor != in.Dev_minor {
		return shard.Invalidf("%s is a mount point and cannot be removed", shard.Quote(shown))
	}
	return nil
}

// nodeID tells whether a descriptor still is what it was taken for.
type nodeID struct{ dev, ino uint64 }

func idOf(fd int) (nodeID, error) {
	var st unix.Stat_t
	err := unix.Fstat(fd, &st)
	return nodeID{uint64(st.Dev), st.Ino}, err // the width of Dev differs
}

var errSwapped = errors.New("it was moved")

// goUp opens the directory above fd, which must be want.
func goUp(fd int, want nodeID) (int, error) {
	up, err := openat(fd, "..", unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return -1, err
	}
	if id, err := idOf(up); err != nil || id != want {
		closeAll(up)
		return -1, errSwapped
	}
	return up, nil
}

// removeTree removes the directory name in dir with everything in it. It holds one descriptor however deep the tree is:
// it goes down without following links and up by "..", and makes sure each time that this is where it came from. So
// a guest that swaps a directory for a link, or moves one elsewhere, can only make it stop.
func removeTree(dir int, name string, gone <-chan struct{}) error {
	type step struct {
		id    nodeID // of the directory that child is in
		child string
	}
	cur, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	if err != nil {
		return err
	}
	defer func() { closeAll(cur) }()
	changed := shard.Invalidf("%s was changed while it was removed: try again", shard.Quote(name))
	buf := make([]byte, 32<<10)
	var above []step
	for {
		down, err := removeBatch(cur, buf, gone)
		switch {
		case err != nil:
			return err
		case down != "":
			id, err := idOf(cur)
			if err != nil {
				return err
			}
			next, err := openat(cur, down, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
			if err == unix.ENOENT || err == unix.ENOTDIR || err == unix.ELOOP {
				continue // no longer the directory that it was
			}
			if err != nil {
				return err
			}
			above = append(above, step{id, down})
			closeAll(cur)
			cur = next
			continue
		case len(above) == 0:
			return unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
		}
		last := above[len(above)-1]
		up, err := goUp(cur, last.id)
		if err == errSwapped {
			return changed
		}
		if err != nil {
			return err
		}
		closeAll(cur)
		cur, above = up, above[:len(above)-1]
		if err := unix.Unlinkat(cur, last.child, unix.AT_REMOVEDIR); err != nil && err != unix.ENOENT {
			return err
		}
	}
}

// removeBatch removes what it can of the directory dir: down is a directory in it that is not empty, or "" when dir is.
func removeBatch(dir int, buf []byte, gone <-chan struct{}) (down string, err error) {
	if _, err := unix.Seek(dir, 0, 0); err != nil {
		return "", err
	}
	for {
		select {
		case <-gone:
			return "", errGone
		default:
		}
		n, err := retry(func() (int, error) { return unix.ReadDirent(dir, buf) })
		if err != nil || n <= 0 {
			return "", err
		}
		_, _, names := unix.ParseDirent(buf[:n], -1, nil)
		for _, name := range names {
			err := unix.Unlinkat(dir, name, 0)
			if err == unix.EISDIR {
				if err = notMount(dir, name, name); err == nil {
					err = unix.Unlinkat(dir, name, unix.AT_REMOVEDIR)
				}
			}
			switch err {
			case nil, unix.ENOENT:
			case unix.ENOTEMPTY, unix.EEXIST:
				return name, nil
			default:
				return "", fileError(shard.Quote(name), err)
			}
		}
	}
}

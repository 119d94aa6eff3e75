package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/container"
)

const (
	// savedDeleted bounds what is saved of deleted files that are open, in bytes: gVisor puts them into the sentry's memory,
	// where each byte takes twenty, and writes them back to the disk when it restores.
	savedDeleted = 16 << 20
	// nameRoom is how long the name of a deleted file may be: a restore makes it again under a longer one when another file has
	// the name meanwhile.
	nameRoom = 255 - len(".tmp-gvisor-restore-0123456789abcdef")
)

// unsavable says what of the files that a stopped sandbox has open gVisor would not save, or not bring back as it was, or at the
// price of the sandbox; "" is nothing. It looks at the descriptors of the sentry, which has one for every file in use. Of a file
// with several names it may have one by a name that was deleted although nobody uses that; once it was saved, it has none but
// those in use.
func unsavable(c *container.Container, saved bool) (string, error) {
	fds := fmt.Sprintf("/proc/%d/fd", c.SandboxPid())
	entries, err := os.ReadDir(fds)
	if err != nil {
		return "", err
	}
	root, err := unix.Open(c.Spec.Root.Path, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err != nil {
		return "", err
	}
	defer func() { _ = unix.Close(root) }()
	type file struct{ dev, ino uint64 }
	seen := map[file]bool{}
	var total, free int64
	for _, e := range entries {
		var st, now unix.Stat_t
		path, err := os.Readlink(filepath.Join(fds, e.Name()))
		if errors.Is(err, unix.ENAMETOOLONG) { // only a guest's is so long
			path, err = "/root/...", unix.Stat(filepath.Join(fds, e.Name()), &st)
			if st.Nlink == 0 {
				path += " (deleted)"
			}
		}
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", err
		}
		// The sentry's own files lie outside of the guest's root.
		name, deleted := strings.CutSuffix(path, " (deleted)")
		name, guests := strings.CutPrefix(name, "/root/")
		if !guests || !deleted {
			continue
		}
		if err := unix.Stat(filepath.Join(fds, e.Name()), &st); err != nil {
			return "", err
		}
		if seen[file{st.Dev, st.Ino}] {
			continue
		}
		seen[file{st.Dev, st.Ino}] = true
		if statIn(root, strings.TrimPrefix(path, "/root/"), &now) == nil && now.Dev == st.Dev && now.Ino == st.Ino {
			continue // that is its name
		}
		switch kind := st.Mode & unix.S_IFMT; {
		case kind != unix.S_IFREG && kind != unix.S_IFDIR:
			return fmt.Sprintf("a program holds %q, which was deleted and is neither a file nor a directory", "/"+name), nil
		case len(filepath.Base(name)) > nameRoom && (kind == unix.S_IFDIR || st.Nlink == 0):
			return fmt.Sprintf("a program holds %q, which was deleted, and whose name is longer than %d bytes", "/"+name, nameRoom), nil
		case kind == unix.S_IFREG && st.Nlink > 0 && !saved:
			continue
		case kind == unix.S_IFREG && st.Nlink > 0:
			return fmt.Sprintf("a program holds %q, which was deleted, while the file has another name", "/"+name), nil
		case kind == unix.S_IFREG:
			var disk unix.Statfs_t
			if err := unix.Statfs(filepath.Join(fds, e.Name()), &disk); err != nil {
				return "", err
			}
			total, free = total+min(st.Size, savedDeleted+1), int64(disk.Bavail)*disk.Bsize
		}
		if total > savedDeleted {
			return fmt.Sprintf("its programs hold deleted files of more than %d MiB, %q among them", savedDeleted>>20, "/"+name), nil
		}
	}
	if total > 0 && free < total {
		return fmt.Sprintf("its programs hold deleted files of %d MiB, for which its disk has no room when it is resumed", total>>20+1), nil
	}
	return "", nil
}

// statIn looks at a path that a guest has made, and does not leave its root on the way.
func statIn(root int, path string, st *unix.Stat_t) error {
	fd, err := unix.Openat2(root, path, &unix.OpenHow{Flags: unix.O_PATH | unix.O_NOFOLLOW | unix.O_CLOEXEC,
		Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS})
	if err != nil {
		return err
	}
	return errors.Join(unix.Fstat(fd, st), unix.Close(fd))
}

package agent

import (
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// watched is one directory with an inotify watch. Its path is that of its parent and its name, so that a directory
// that moves takes everything below along.
type watched struct {
	wd       int32
	ino      uint64
	parent   *watched // nil at the root
	name     string
	children map[string]*watched
	// seen are the names that a scan has reported and whose own event may still be in the kernel's queue: each is told
	// once. It is emptied when the queue was.
	seen map[string]bool
}

// place is a name in a directory.
type place struct {
	dir  *watched
	name string // "" is dir itself
}

// below tells whether a directory is top or in it.
func (n *watched) below(top *watched) bool {
	for ; n != nil; n = n.parent {
		if n == top {
			return true
		}
	}
	return false
}

// node is the directory that the picture has at a place.
func (p place) node() *watched { return p.dir.children[p.name] }

// drop ends the watches of a directory that has left the tree, and of all below.
func (w *watcher) drop(n *watched) {
	n.unlink()
	for _, child := range n.children {
		w.drop(child)
	}
	if w.dirs[n.wd] == n {
		w.in.remove(n.wd)
		delete(w.dirs, n.wd)
	}
}

func (n *watched) unlink() {
	if n.parent != nil {
		delete(n.parent.children, n.name)
		n.parent = nil
	}
}

// put puts a directory at a place of the picture where none is.
func (n *watched) put(at place) {
	n.unlink()
	n.parent, n.name = at.dir, at.name
	if at.dir.children == nil {
		at.dir.children = map[string]*watched{}
	}
	at.dir.children[at.name] = n
}

// move moves a directory, which replaces what was at its new place, and tells so.
func (w *watcher) move(n *watched, to place) {
	w.tellMoved(place{n, ""}, to, true)
	if w.blind {
		w.blind, w.astray = false, true // what has been out of sight may have come back
	}
	if n.parent != nil {
		delete(n.parent.seen, n.name)
	}
	n.unlink() // it may be below the one that it replaces
	if old := to.node(); old != nil {
		w.drop(old)
	}
	n.put(to)
}

func (w *watcher) rootPath() string {
	if w.root == "" {
		return "/"
	}
	return w.root
}

// path is that of a place. One that no operation could take is not ok: what has one is not reported and not watched.
func (w *watcher) path(at place) (path string, ok bool) {
	size := len(w.root)
	var parts []string
	if at.name != "" {
		parts = append(parts, at.name)
		size += 1 + len(at.name)
	}
	n := at.dir
	for ; n.parent != nil; n = n.parent {
		parts = append(parts, n.name)
		size += 1 + len(n.name)
	}
	if n != w.top {
		return "", false // it has left the tree
	}
	if size >= unix.PathMax {
		w.blind = true
		return "", false
	}
	b := append(make([]byte, 0, size), w.root...)
	for i := len(parts) - 1; i >= 0; i-- {
		b = append(append(b, '/'), parts[i]...)
	}
	if len(b) == 0 {
		return "/", true
	}
	return string(b), true
}

// open opens a watched directory, and makes sure that it is the one: a path may lead elsewhere by now, through links
// that were put in its way too.
func (w *watcher) open(n *watched) (int, error) {
	path, ok := w.path(place{n, ""})
	if !ok {
		return -1, unix.ENAMETOOLONG
	}
	fd, err := openat(unix.AT_FDCWD, path, unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return -1, err
	}
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Dev != w.dev || st.Ino != n.ino {
		closeAll(fd)
		return -1, errMoved
	}
	return fd, nil
}

// sync makes the picture anew, at the beginning and after events were lost. It reports nothing.
func (w *watcher) sync() error {
	w.later, w.astray, w.silent = map[place]bool{}, false, true
	defer func() { w.silent = false }()
	fd, err := openat(unix.AT_FDCWD, w.rootPath(), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return errRootGone
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Dev != w.dev || st.Nlink == 0 {
		return errRootGone
	}
	wd, err := w.in.add(fd)
	switch {
	case err != nil:
		return err
	case w.top != nil && w.top.wd != wd:
		return errRootGone
	}
	for old := range w.dirs {
		if old != wd {
			w.in.remove(old)
		}
	}
	w.top = &watched{wd: wd, ino: st.Ino}
	w.dirs = map[int32]*watched{wd: w.top}
	return w.scan(w.top)
}

// saw notes that a name has been reported, though its own event may still come.
func (w *watcher) saw(at place) {
	if at.dir.seen == nil {
		at.dir.seen = map[string]bool{}
		w.scanned = append(w.scanned, at.dir)
	}
	at.dir.seen[at.name] = true
}

// postpone leaves a place for the time after the next move.
func (w *watcher) postpone(at place) {
	switch {
	case !at.dir.below(w.top): // it has left the tree meanwhile
	case len(w.later) < maxLater:
		w.later[at] = true
	default:
		w.astray = true
	}
}

// look makes the picture of a directory right, and that of the client, who has been told of the name or not. It is false
// when none was found, because there is none or because that cannot be known yet; nothing is changed then.
func (w *watcher) look(at place, told bool) (bool, error) {
	dir, err := w.open(at.dir)
	if err != nil {
		w.postpone(at)
		return false, nil
	}
	defer unix.Close(dir)
	n, fresh, err := w.lookIn(dir, at, told)
	if err == nil && fresh {
		err = w.scan(n)
	}
	return n != nil, err
}

// lookIn is look in the open directory dir; a link is no directory. One that was not watched until now is fresh: it is
// to be scanned.
func (w *watcher) lookIn(dir int, at place, told bool) (n *watched, fresh bool, err error) {
	if _, ok := w.path(at); !ok {
		return nil, false, nil
	}
	fd, err := openat(dir, at.name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	switch err {
	case nil:
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return nil, false, err
	default:
		return nil, false, nil
	}
	defer unix.Close(fd)
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Dev != w.dev || st.Nlink == 0 {
		return nil, false, nil
	}
	wd, err := w.in.add(fd)
	if err != nil {
		return nil, false, err
	}
	n, old := w.dirs[wd], at.node()
	switch {
	case n != nil && n == old:
		if !told {
			w.tell(shard.FileCreated, at, true)
		}
	case n != nil && at.dir.below(n):
		if !w.settled { // else a mount shows the tree a directory above
			w.postpone(at)
		}
		return nil, false, nil
	case n != nil:
		w.move(n, at)
		err = w.retry(n)
	case len(w.dirs) >= maxWatchedDirs:
		w.in.remove(wd)
		return nil, false, shard.Invalidf("%s holds more than %d directories, which is the most: watch a smaller tree, or not recursively",
			shard.Quote(w.rootPath()), maxWatchedDirs)
	default:
		if old != nil {
			w.drop(old)
			w.tell(shard.FileDeleted, at, true)
		}
		if old != nil || !told {
			w.tell(shard.FileCreated, at, true)
		}
		n, fresh = &watched{wd: wd, ino: st.Ino}, true
		w.dirs[wd] = n
		n.put(at)
	}
	if !w.silent {
		w.saw(at)
	}
	return n, fresh, err
}

// scan watches the directories below n, and reports all that it finds as new.
func (w *watcher) scan(n *watched) error {
	if !w.recursive {
		return nil
	}
	for queue := []*watched{n}; len(queue) > 0; queue = queue[1:] {
		n := queue[0]
		dir, err := w.open(n)
		if err != nil {
			w.postpone(place{n, ""})
			continue
		}
		err = eachEntry(dir, func(name string, isDir bool) error {
			at := place{n, name}
			told := n.seen[name]
			if isDir {
				child, fresh, err := w.lookIn(dir, at, told)
				if fresh {
					queue = append(queue, child)
				}
				if err != nil || child != nil {
					return err
				}
			}
			if !told && !w.silent {
				w.saw(at)
				w.tell(shard.FileCreated, at, isDir)
			}
			return nil
		})
		closeAll(dir)
		if err != nil {
			return err
		}
	}
	return nil
}

package agent

import (
	"errors"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	maxWatches     = 16   // watch operations at once: each holds one of the kernel's few inotify instances
	maxWatchedDirs = 8192 // directories of one watch
	maxLater       = 256  // places of one watch that could not be looked at yet
)

var watchSlots = make(chan struct{}, maxWatches)

// watch is the watch operation. It does not take a slot of the file operations, since it may last for days.
func watch(r *request) error {
	var args guest.WatchArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	select {
	case watchSlots <- struct{}{}:
		defer func() { <-watchSlots }()
	default:
		return shard.Errorf(shard.CodeExecLimit, "%d directories are watched in the sandbox, which is the most: end a watch first", maxWatches)
	}
	w, err := newWatcher(string(args.Path), args.Recursive)
	if err != nil {
		return err
	}
	defer w.in.Close()
	if err := r.Head(nil); err != nil {
		return err
	}
	ended := make(chan error, 1)
	go func() { ended <- w.run() }()
	for {
		select {
		case <-w.out.ready:
			if _, err = r.Write(w.out.take()); err == nil {
				continue
			}
		case err := <-ended:
			if _, werr := r.Write(w.out.take()); werr != nil {
				return werr
			}
			return err
		case <-r.Gone():
			err = errGone
		}
		w.in.Close()
		<-ended
		return err
	}
}

// watcher turns inotify events of a tree into FileEvents. Only run's goroutine touches it, but for out.
//
// An event names a place, not a directory, and names are reused faster than events are read. So an event about a
// directory is taken as a hint to look at its place, and what is there is known by its watch, which is the kernel's own
// identity of it. Two things make the picture right, whatever happens meanwhile:
//   - The client is told of every change of the picture, in the same order, so both agree at all times. Nothing is below
//     a path for the client unless a directory is at that path in the picture.
//   - After the last event of a place, that place is looked at. What was believed of it before does not matter then.
type watcher struct {
	root      string // as asked for, without slashes at its end
	recursive bool
	dev       uint64 // the root's file system: others are not entered
	in        *notifier
	out       outbox
	top       *watched
	dirs      map[int32]*watched
	silent    bool           // nothing is reported: the client is going to list the tree
	settled   bool           // no event is left that could explain what is odd
	scanned   []*watched     // those with seen
	later     map[place]bool // to be looked at again: a directory above has moved, and that event is still to come
	astray    bool           // more were left for later than are remembered
	blind     bool           // something was too deep to be reported
}

var (
	errRootGone = errors.New("the watched directory is gone")
	errMoved    = errors.New("another directory is at this path now")
)

// newWatcher sets all watches; what changes from then on is not missed.
func newWatcher(path string, recursive bool) (*watcher, error) {
	if err := guest.CheckPath(path); err != nil {
		return nil, err
	}
	what := shard.Quote(path)
	w := &watcher{root: strings.TrimRight(path, "/"), recursive: recursive, dirs: map[int32]*watched{}}
	w.out.init(w.rootPath())
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return nil, fileError(what, err)
	}
	if st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return nil, shard.Invalidf("%s is %s, not a directory", what, typeName(st.Mode))
	}
	w.dev = st.Dev
	var err error
	if w.in, err = newNotifier(); err == nil {
		if err = w.sync(); err == nil {
			return w, nil
		}
		w.in.Close()
	}
	switch {
	case errors.Is(err, unix.ENOSPC), errors.Is(err, unix.EMFILE):
		return nil, shard.Errorf(shard.CodeExecLimit, "%s cannot be watched: the kernel has no more watches for this user "+
			"(sysctl fs.inotify.max_user_watches and max_user_instances)", what)
	case errors.Is(err, errRootGone):
		return nil, shard.Errorf(shard.CodeNotFound, "%s does not exist in the sandbox any more", what)
	}
	return nil, fileError(what, err)
}

// run reports events until the root is gone (nil), the tree is too large, or the notifier is closed.
func (w *watcher) run() error {
	for {
		e, err := w.in.next(w.drained)
		if err == nil {
			err = w.handle(e)
		}
		switch {
		case err == nil:
		case errors.Is(err, errRootGone):
			w.out.add(shard.FileDeleted, w.rootPath(), "", true)
			return nil
		case errors.Is(err, unix.ENOSPC):
			return shard.Errorf(shard.CodeExecLimit, "%s: the kernel has no more watches for this user (sysctl fs.inotify.max_user_watches)",
				shard.Quote(w.rootPath()))
		default:
			return fileError(shard.Quote(w.rootPath()), err)
		}
	}
}

// drained is called when every event that was in the kernel's queue has been handled.
func (w *watcher) drained() error {
	for _, n := range w.scanned {
		n.seen = nil
	}
	w.scanned = nil
	if w.astray {
		return w.recover()
	}
	w.settled = true
	err := w.retry(w.top)
	w.settled = false
	if err != nil || len(w.later) == 0 {
		return err
	}
	fd, err := w.open(w.top)
	closeAll(fd)
	if err != nil {
		return errRootGone // the event that we wait for was above the root, and will not come
	}
	return nil
}

// recover makes the tree right again and says that events are missing, after the sync: a list made then misses nothing.
func (w *watcher) recover() error {
	err := w.sync()
	w.out.add(shard.FileOverflow, w.rootPath(), "", false)
	return err
}

// retry takes up what was left for later in a directory and below.
func (w *watcher) retry(top *watched) error {
	var ready []place
	for p := range w.later {
		if p.dir.below(top) {
			ready = append(ready, p)
			delete(w.later, p)
		} else if !p.dir.below(w.top) {
			delete(w.later, p)
		}
	}
	for _, p := range ready {
		var err error
		switch {
		case !p.dir.below(w.top):
		case p.name == "":
			err = w.scan(p.dir)
		default:
			err = w.behind(p)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func (w *watcher) handle(e inotifyEvent) error {
	if e.mask&unix.IN_Q_OVERFLOW != 0 {
		return w.recover()
	}
	n := w.dirs[e.wd]
	if n == nil {
		return nil // of a directory that has left the tree
	}
	if e.name == "" {
		if n == w.top && e.mask&(unix.IN_DELETE_SELF|unix.IN_MOVE_SELF|unix.IN_UNMOUNT|unix.IN_IGNORED) != 0 {
			return errRootGone
		}
		if e.mask&unix.IN_IGNORED != 0 {
			delete(w.dirs, n.wd) // its place is told of by the event of its parent
		}
		return nil
	}
	at, dir := place{n, e.name}, e.mask&unix.IN_ISDIR != 0
	switch {
	case e.mask&unix.IN_MOVED_FROM != 0:
		to, paired, err := w.in.pair(e)
		if err != nil {
			return err
		}
		if target := w.dirs[to.wd]; paired && target != nil {
			return w.moved(at, place{target, to.name}, dir)
		}
		w.gone(at, dir)
		return w.behind(at)
	case e.mask&unix.IN_DELETE != 0:
		w.gone(at, dir)
	case e.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		return w.appeared(at, dir, e.mask&unix.IN_MOVED_TO != 0)
	case e.mask&(unix.IN_MODIFY|unix.IN_ATTRIB) != 0:
		w.tell(shard.FileModified, at, dir)
	}
	return nil
}

// gone handles a name that has left a directory.
func (w *watcher) gone(at place, dir bool) {
	delete(at.dir.seen, at.name)
	if n := at.node(); n != nil {
		w.drop(n)
	}
	w.tell(shard.FileDeleted, at, dir)
}

// appeared handles a name that has come into a directory. What it replaced is another than what the client may know.
func (w *watcher) appeared(at place, dir, replaced bool) error {
	known := at.dir.seen[at.name]
	delete(at.dir.seen, at.name)
	if dir && w.recursive {
		found, err := w.look(at, known)
		if err != nil || found || known {
			return err
		}
	}
	switch {
	case !known:
		w.tell(shard.FileCreated, at, dir)
	case replaced:
		w.tell(shard.FileModified, at, dir)
	}
	return nil
}

// moved handles a move within the tree.
func (w *watcher) moved(from, to place, dir bool) error {
	node, known := from.node(), to.dir.seen[to.name]
	delete(from.dir.seen, from.name)
	var err error
	switch {
	case dir && w.recursive:
		err = w.movedDir(from, to, known)
	case node != nil: // a directory that has come to the old name since
		err = w.appeared(to, dir, true)
	case known: // the scan has reported what it found at the new place, which may have been what this replaced
		w.gone(from, dir)
		err = w.appeared(to, dir, true)
	default:
		if n := to.node(); n != nil {
			w.drop(n)
		}
		w.tellMoved(from, to, dir)
	}
	if err != nil {
		return err
	}
	return w.behind(from)
}

// movedDir handles the move of a directory. It leaves what is at the old place in the picture if that is another one.
func (w *watcher) movedDir(from, to place, known bool) error {
	delete(to.dir.seen, to.name)
	node := from.node()
	if node == nil { // it was not found there in time, or has been found at its new place
		w.tell(shard.FileDeleted, from, true)
	}
	found, err := w.look(to, known)
	switch {
	case err != nil || found:
	case node != nil && !to.dir.below(node): // it has moved on, or cannot be looked at yet: the event is to be believed
		w.move(node, to)
		err = w.retry(node)
	case !known:
		w.tell(shard.FileCreated, to, true)
	}
	return err
}

// behind looks at a place that something has left: another thing may be there, and no event of it to come, since the
// kernel tells of an exchange of two names as of a move there and back.
func (w *watcher) behind(at place) error {
	node := at.node()
	dir, err := w.open(at.dir)
	if err != nil {
		if node != nil {
			w.gone(at, true)
		}
		w.postpone(at)
		return nil
	}
	defer unix.Close(dir)
	st, err := lstatat(dir, at.name)
	isDir := err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR
	if isDir && w.recursive {
		n, fresh, err := w.lookIn(dir, at, node != nil || at.dir.seen[at.name])
		if err == nil && fresh {
			err = w.scan(n)
		}
		if err != nil || n != nil {
			return err
		}
	}
	if node != nil && at.node() == node {
		w.gone(at, true)
	}
	if err == nil && !at.dir.seen[at.name] {
		w.saw(at)
		w.tell(shard.FileCreated, at, isDir)
	}
	return nil
}

// tell reports something at a place.
func (w *watcher) tell(kind string, at place, dir bool) {
	if path, ok := w.path(at); ok && !w.silent {
		w.out.add(kind, path, "", dir)
	}
}

func (w *watcher) tellMoved(from, to place, dir bool) {
	fromPath, ok := w.path(from)
	toPath, toOK := w.path(to)
	switch {
	case w.silent:
	case ok && toOK:
		w.out.add(shard.FileMoved, toPath, fromPath, dir)
	case ok:
		w.out.add(shard.FileDeleted, fromPath, "", dir)
	case toOK:
		w.out.add(shard.FileCreated, toPath, "", dir)
	}
}

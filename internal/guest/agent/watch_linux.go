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
	maxLater       = 256  // directories of one watch that could not be opened yet
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

// watched is one directory with an inotify watch. Its path is that of its parent and its name, so that a directory
// that moves takes everything below along.
type watched struct {
	wd       int32
	ino      uint64
	parent   *watched // nil at the root
	name     string
	children map[string]*watched
	round    int // of the last sync that saw it
	// seen are the names that a scan has reported and whose own event may still be in the kernel's queue: each is told
	// once. It is emptied when the queue was.
	seen map[string]bool
}

// watcher turns inotify events of a tree into FileEvents. Only run's goroutine touches it, but for out.
type watcher struct {
	root      string // as asked for, without slashes at its end
	recursive bool
	dev       uint64 // the root's file system: others are not entered
	in        *notifier
	out       outbox
	top       *watched
	dirs      map[int32]*watched
	round     int
	syncing   bool
	scanned   []*watched // those with seen
	later     []unopened
	astray    bool // more were left for later than are remembered
}

// unopened is work on a directory that could not be opened: one above it has moved, and that event is still to come.
type unopened struct {
	dir    *watched
	name   string // of the new directory in dir; "" is dir itself, to be scanned
	report bool
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
	if err := w.retry(); err != nil || len(w.later) == 0 {
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

// retry takes up the directories that could not be opened.
func (w *watcher) retry() error {
	again := w.later
	w.later = nil
	for _, l := range again {
		var err error
		switch {
		case w.dirs[l.dir.wd] != l.dir:
		case l.name == "":
			err = w.scan(l.dir, l.report)
		default:
			err = w.enter(l.dir, l.name)
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
			w.unlink(n)
			w.forget(n)
		}
		return nil
	}
	dir := e.mask&unix.IN_ISDIR != 0
	path, ok := w.path(n, e.name)
	switch {
	case e.mask&unix.IN_MOVED_FROM != 0:
		to, paired, err := w.in.pair(e)
		if err != nil {
			return err
		}
		if target := w.dirs[to.wd]; paired && target != nil {
			return w.moved(n, e.name, target, to.name, dir)
		}
		w.gone(n, e.name)
		if ok {
			w.out.add(shard.FileDeleted, path, "", dir)
		}
	case e.mask&unix.IN_DELETE != 0:
		w.gone(n, e.name)
		if ok {
			w.out.add(shard.FileDeleted, path, "", dir)
		}
	case e.mask&(unix.IN_CREATE|unix.IN_MOVED_TO) != 0:
		known := n.seen[e.name]
		delete(n.seen, e.name)
		if ok && !known {
			w.out.add(shard.FileCreated, path, "", dir)
		}
		if dir && (!known || n.children[e.name] == nil) {
			return w.enter(n, e.name)
		}
	case e.mask&(unix.IN_MODIFY|unix.IN_ATTRIB) != 0 && ok:
		w.out.add(shard.FileModified, path, "", dir)
	}
	return nil
}

// moved handles a move within the tree.
func (w *watcher) moved(from *watched, fromName string, to *watched, toName string, dir bool) error {
	fromPath, fromOK := w.path(from, fromName)
	toPath, toOK := w.path(to, toName)
	node, known := from.children[fromName], to.seen[toName]
	if node != nil && to.below(node) {
		// Nothing moves into itself: node has come to the old name after this, and a scan found it there before its event.
		if w.gone(to, toName); toOK && !known {
			w.out.add(shard.FileCreated, toPath, "", dir)
		}
		return w.enter(to, toName)
	}
	delete(from.seen, fromName)
	delete(to.seen, toName)
	switch {
	case dir && known && node == nil: // the scan that found it there has reported that
		if fromOK {
			w.out.add(shard.FileDeleted, fromPath, "", true)
		}
		return nil
	case known && !dir: // the scan has reported what it found at the new place, which may have been what this replaced
		if fromOK {
			w.out.add(shard.FileDeleted, fromPath, "", false)
		}
		if toOK {
			w.out.add(shard.FileModified, toPath, "", false)
		}
		return nil
	case fromOK && toOK:
		w.out.add(shard.FileMoved, toPath, fromPath, dir)
	case fromOK:
		w.out.add(shard.FileDeleted, fromPath, "", dir)
	case toOK:
		w.out.add(shard.FileCreated, toPath, "", dir)
	}
	if !dir {
		return nil
	}
	if node != nil {
		w.place(node, to, toName)
		if err := w.retry(); err != nil { // what waited for this
			return err
		}
	}
	// Names are reused faster than events are read: node may be a later directory than the one that has moved. If so,
	// attach finds another here.
	return w.enter(to, toName)
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

// gone notes that a name is no longer in a directory.
func (w *watcher) gone(parent *watched, name string) {
	delete(parent.seen, name)
	if n := parent.children[name]; n != nil {
		w.drop(n)
	}
}

// drop ends the watches of a directory that has left the tree, and of all below.
func (w *watcher) drop(n *watched) {
	w.unlink(n)
	for _, child := range n.children {
		child.parent = nil
		w.drop(child)
	}
	w.in.remove(n.wd)
	w.forget(n)
}

func (w *watcher) unlink(n *watched) {
	if n.parent != nil && n.parent.children[n.name] == n {
		delete(n.parent.children, n.name)
	}
}

func (w *watcher) forget(n *watched) {
	if w.dirs[n.wd] == n {
		delete(w.dirs, n.wd)
	}
}

// place puts a directory at its place in the tree.
func (w *watcher) place(n, parent *watched, name string) {
	w.unlink(n)
	n.parent, n.name = parent, name
	if parent == nil {
		return
	}
	if parent.children == nil {
		parent.children = map[string]*watched{}
	}
	parent.children[name] = n
}

func (w *watcher) rootPath() string {
	if w.root == "" {
		return "/"
	}
	return w.root
}

// path is that of a name in a directory; "" means the directory itself. A path that no operation could take is not ok:
// what has one is not reported and not watched.
func (w *watcher) path(n *watched, name string) (path string, ok bool) {
	size := len(w.root)
	var parts []string
	if name != "" {
		parts = append(parts, name)
		size += 1 + len(name)
	}
	for ; n != nil && n.parent != nil; n = n.parent {
		parts = append(parts, n.name)
		if size += 1 + len(n.name); size >= unix.PathMax {
			return "", false
		}
	}
	if size >= unix.PathMax {
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
	path, ok := w.path(n, "")
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

// sync watches the whole tree, from nothing or after events were lost, and forgets what is no longer in it. It reports
// nothing.
func (w *watcher) sync() error {
	w.round++
	w.later, w.astray, w.syncing = nil, false, true
	defer func() { w.syncing = false }()
	fd, err := openat(unix.AT_FDCWD, w.rootPath(), unix.O_RDONLY|unix.O_DIRECTORY, 0)
	if err != nil {
		return errRootGone
	}
	n, _, err := w.attach(nil, "", fd)
	closeAll(fd)
	switch {
	case err != nil:
		return err
	case n == nil || w.top != nil && n != w.top:
		return errRootGone
	}
	w.top = n
	if err := w.scan(n, false); err != nil {
		return err
	}
	for _, n := range w.dirs {
		if n.round != w.round {
			w.drop(n)
		}
	}
	return nil
}

// replace drops the directory that is not at its place any more, since another is.
func (w *watcher) replace(parent *watched, name string) {
	if parent == nil || parent.children[name] == nil || w.syncing {
		return
	}
	w.drop(parent.children[name])
	w.saw(parent, name)
	if path, ok := w.path(parent, name); ok {
		w.out.add(shard.FileDeleted, path, "", true)
		w.out.add(shard.FileCreated, path, "", true)
	}
}

// saw notes that a name has been reported, though its own event may still come.
func (w *watcher) saw(n *watched, name string) {
	if n.seen == nil {
		n.seen = map[string]bool{}
		w.scanned = append(w.scanned, n)
	}
	n.seen[name] = true
}

// postpone leaves work for the time after the next move.
func (w *watcher) postpone(u unopened) {
	if len(w.later) < maxLater {
		w.later = append(w.later, u)
	} else {
		w.astray = true
	}
}

// enter watches a directory that has appeared, and reports what is in it already.
func (w *watcher) enter(parent *watched, name string) error {
	if !w.recursive {
		return nil
	}
	dir, err := w.open(parent)
	if err != nil {
		w.postpone(unopened{parent, name, true})
		return nil
	}
	defer unix.Close(dir)
	n, at, err := w.attachIn(dir, parent, name)
	if err != nil || at != dirFresh {
		return err
	}
	return w.scan(n, true)
}

// What attach found a directory to be.
type standing int

const (
	dirAbsent standing = iota // not to be watched: gone again, unreadable, or on another file system
	dirFresh                  // to be scanned
	dirKnown                  // watched already, at this place
	dirMoved                  // watched already, at another place until now, which is reported
)

// attachIn is attach for a name in the open directory dir; a link is no directory.
func (w *watcher) attachIn(dir int, parent *watched, name string) (*watched, standing, error) {
	if _, ok := w.path(parent, name); !ok {
		return nil, dirAbsent, nil
	}
	fd, err := openat(dir, name, unix.O_RDONLY|unix.O_DIRECTORY|unix.O_NOFOLLOW, 0)
	switch err {
	case nil:
	case unix.EMFILE, unix.ENFILE, unix.ENOMEM:
		return nil, dirAbsent, err
	default:
		return nil, dirAbsent, nil
	}
	defer unix.Close(fd)
	return w.attach(parent, name, fd)
}

// attach sets the watch of an open directory.
func (w *watcher) attach(parent *watched, name string, fd int) (*watched, standing, error) {
	var st unix.Stat_t
	if err := unix.Fstat(fd, &st); err != nil || st.Dev != w.dev || st.Nlink == 0 {
		return nil, dirAbsent, nil
	}
	wd, err := w.in.add(fd)
	if err != nil {
		return nil, dirAbsent, err
	}
	n := w.dirs[wd]
	if n == nil {
		if len(w.dirs) >= maxWatchedDirs {
			w.in.remove(wd)
			return nil, dirAbsent, shard.Invalidf("%s holds more than %d directories, which is the most: watch a smaller tree, or not recursively",
				shard.Quote(w.rootPath()), maxWatchedDirs)
		}
		n = &watched{wd: wd, ino: st.Ino, round: w.round}
		w.dirs[wd] = n
		w.replace(parent, name)
		w.place(n, parent, name)
		return n, dirFresh, nil
	}
	if parent.below(n) {
		return nil, dirAbsent, nil // a mount shows the tree a directory above
	}
	if n.round != w.round { // a sync looks at everything anew
		n.round = w.round
		w.place(n, parent, name)
		return n, dirFresh, nil
	}
	if n.parent == parent && n.name == name {
		return n, dirKnown, nil
	}
	from, told := w.path(n, "")
	w.unlink(n) // it may be below the one that it replaces
	w.replace(parent, name)
	w.place(n, parent, name)
	if !told {
		return n, dirFresh, nil // its old path was too long to be reported
	}
	w.saw(parent, name)
	if path, ok := w.path(n, ""); ok {
		w.out.add(shard.FileMoved, path, from, true)
	}
	return n, dirMoved, nil
}

// scan watches the directories below n. report says that what it finds is new, and to be told.
func (w *watcher) scan(n *watched, report bool) error {
	if !w.recursive {
		return nil
	}
	for queue := []*watched{n}; len(queue) > 0; queue = queue[1:] {
		n := queue[0]
		dir, err := w.open(n)
		if err != nil {
			w.postpone(unopened{n, "", report})
			continue
		}
		err = eachEntry(dir, func(name string, isDir bool) error {
			at := dirAbsent
			if isDir {
				child, found, err := w.attachIn(dir, n, name)
				if err != nil {
					return err
				}
				if at = found; at == dirFresh {
					queue = append(queue, child)
				}
			}
			if path, ok := w.path(n, name); report && ok && at <= dirFresh && !n.seen[name] {
				w.saw(n, name)
				w.out.add(shard.FileCreated, path, "", isDir)
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

package agent

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unicode/utf8"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

const (
	inotifyBuffer = 64 << 10
	maxPending    = 1 << 20               // bytes of events that wait for the host; more are dropped, and that is said
	maxAhead      = 4096                  // events that are read in search of the other half of a move
	pairTime      = 20 * time.Millisecond // for the other half to come; the kernel writes both at once

	// IN_DELETE_SELF and IN_MOVE_SELF matter for the root alone. IN_EXCL_UNLINK: a file without a name has no path.
	watchMask = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO | unix.IN_MODIFY | unix.IN_ATTRIB |
		unix.IN_DELETE_SELF | unix.IN_MOVE_SELF | unix.IN_ONLYDIR | unix.IN_EXCL_UNLINK
)

// inotifyEvent is one event of the kernel.
type inotifyEvent struct {
	wd           int32
	mask, cookie uint32
	name         string
}

// notifier is an inotify instance. Close may be called from anywhere; the rest belongs to one goroutine.
type notifier struct {
	*os.File
	raw   syscall.RawConn
	buf   []byte
	queue []inotifyEvent
}

func newNotifier() (*notifier, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "inotify")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	return &notifier{File: f, raw: raw, buf: make([]byte, inotifyBuffer)}, nil
}

// add watches an open directory. The way through /proc is the only one that cannot be led elsewhere by a rename.
func (n *notifier) add(dir int) (wd int32, err error) {
	cerr := n.raw.Control(func(fd uintptr) {
		_, err = retry(func() (int, error) {
			d, err := unix.InotifyAddWatch(int(fd), "/proc/self/fd/"+strconv.Itoa(dir), watchMask)
			wd = int32(d)
			return d, err
		})
	})
	return wd, errors.Join(cerr, err)
}

// remove ends a watch, if the kernel has not done so already.
func (n *notifier) remove(wd int32) {
	_ = n.raw.Control(func(fd uintptr) { _, _ = unix.InotifyRmWatch(int(fd), uint32(wd)) })
}

// next waits for an event. Before it waits, and every event so far has been handed out, it calls drained.
func (n *notifier) next(drained func() error) (inotifyEvent, error) {
	if len(n.queue) == 0 {
		if err := n.fill(drained); err != nil {
			return inotifyEvent{}, err
		}
	}
	e := n.queue[0]
	n.queue = n.queue[1:]
	return e, nil
}

// pair finds the other half of a move, and takes it out of the queue. There is none when the new place is not watched.
func (n *notifier) pair(from inotifyEvent) (to inotifyEvent, found bool, err error) {
	const structure = unix.IN_CREATE | unix.IN_DELETE | unix.IN_MOVED_FROM | unix.IN_MOVED_TO
	looked := 0
	for {
		for ; looked < len(n.queue); looked++ {
			e := n.queue[looked]
			if e.mask&unix.IN_MOVED_TO != 0 && e.cookie == from.cookie {
				n.queue = slices.Delete(n.queue, looked, looked+1)
				return e, true, nil
			}
			// The kernel holds the directory's lock until both halves are written.
			if e.mask&unix.IN_Q_OVERFLOW != 0 || e.wd == from.wd && e.mask&structure != 0 || looked >= maxAhead {
				return to, false, nil
			}
		}
		_ = n.SetReadDeadline(time.Now().Add(pairTime))
		err := n.fill(nil)
		_ = n.SetReadDeadline(time.Time{})
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return to, false, nil
		}
		if err != nil {
			return to, false, err
		}
	}
}

// fill waits until the kernel has events, and puts them in the queue.
func (n *notifier) fill(drained func() error) error {
	var size int
	var failed error
	err := n.raw.Read(func(fd uintptr) bool {
		size, failed = retry(func() (int, error) { return unix.Read(int(fd), n.buf) })
		if failed != unix.EAGAIN {
			return true
		}
		if drained != nil {
			if failed = drained(); failed != nil {
				return true
			}
			drained = nil
		}
		return false
	})
	if err == nil {
		err = failed
	}
	if err != nil {
		return err
	}
	for b := n.buf[:size]; len(b) >= unix.SizeofInotifyEvent; {
		order := binary.NativeEndian
		e := inotifyEvent{wd: int32(order.Uint32(b)), mask: order.Uint32(b[4:]), cookie: order.Uint32(b[8:])}
		end := unix.SizeofInotifyEvent + int(order.Uint32(b[12:]))
		if end > len(b) {
			break
		}
		name, _, _ := bytes.Cut(b[unix.SizeofInotifyEvent:end], []byte{0})
		e.name = string(name)
		n.queue = append(n.queue, e)
		b = b[end:]
	}
	return nil
}

// eachEntry calls f for every name in an open directory, in the directory's order.
func eachEntry(dir int, f func(name string, isDir bool) error) error {
	buf := buffers.Get().(*[copyBuffer]byte)
	defer buffers.Put(buf)
	for {
		n, err := retry(func() (int, error) { return unix.ReadDirent(dir, buf[:]) })
		if err == unix.ENOENT || err == nil && n <= 0 {
			return nil // ENOENT: the directory itself has been removed
		}
		if err != nil {
			return err
		}
		// struct linux_dirent64: inode 8, offset 8, record length 2, type 1, name.
		for b := buf[:n]; len(b) > 19; {
			size := int(binary.NativeEndian.Uint16(b[16:]))
			if size <= 19 || size > len(b) {
				break
			}
			kind := b[18]
			raw, _, _ := bytes.Cut(b[19:size], []byte{0})
			name := string(raw)
			b = b[size:]
			if name == "." || name == ".." {
				continue
			}
			if kind == unix.DT_UNKNOWN {
				if st, err := lstatat(dir, name); err == nil && st.Mode&unix.S_IFMT == unix.S_IFDIR {
					kind = unix.DT_DIR
				}
			}
			if err := f(name, kind == unix.DT_DIR); err != nil {
				return err
			}
		}
	}
}

// outbox holds events until the host has room for them, so that the watcher never waits for the host.
type outbox struct {
	root  string
	ready chan struct{} // holds a token when there is something to take

	mu   sync.Mutex
	buf  []byte
	last map[string]string // the type of the newest event of each path in buf
	lost bool
}

func (o *outbox) init(root string) {
	o.root, o.ready, o.last = root, make(chan struct{}, 1), map[string]string{}
}

// add appends one line. A change of what the host is yet to hear of as new or changed is no news.
func (o *outbox) add(kind, path, from string, isDir bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if kind == shard.FileModified && (o.last[path] == shard.FileModified || o.last[path] == shard.FileCreated) {
		return
	}
	if o.lost {
		return
	}
	line := eventLine(kind, path, from, isDir)
	if o.lost = len(o.buf)+len(line) > maxPending; !o.lost {
		o.buf = append(o.buf, line...)
		if kind == shard.FileMoved && isDir {
			clear(o.last) // it is by path, and other things are at these paths now
		}
		o.last[path] = kind
		if from != "" {
			o.last[from] = kind
		}
	}
	select {
	case o.ready <- struct{}{}:
	default:
	}
}

// take empties the outbox. When something was dropped, it ends with an overflow.
func (o *outbox) take() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	out := o.buf
	if o.lost {
		out = append(out, eventLine(shard.FileOverflow, o.root, "", false)...)
	}
	o.buf, o.lost = nil, false
	clear(o.last)
	return out
}

func eventLine(kind, path, from string, isDir bool) []byte {
	e := shard.FileEvent{Type: kind, IsDir: isDir, Time: time.Now().UTC().Truncate(time.Microsecond)}
	e.Path, e.PathBytes = speakable(path)
	e.From, e.FromBytes = speakable(from)
	line, _ := json.Marshal(e) // always encodes
	return append(line, '\n')
}

// speakable is a name as JSON can hold it, and its real bytes when these are others.
func speakable(name string) (string, []byte) {
	if utf8.ValidString(name) {
		return name, nil
	}
	return strings.ToValidUTF8(name, "\uFFFD"), []byte(name)
}

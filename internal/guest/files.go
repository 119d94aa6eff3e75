package guest

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"strings"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
)

// How long a file operation may stand still: while data flows either way, and at its end, when the guest may have much
// to write to its disk or to remove. Variables because tests cannot wait so long.
var (
	idleLimit = time.Minute
	workLimit = 10 * time.Minute
)

const (
	maxEntries = 1_000_000 // entries of one directory, as in the agent
	maxLine    = 8 << 10   // bytes of one entry: a name has 255 at most
)

// CheckPath refuses what no file operation takes as a path in a sandbox. Everything else is the sandbox's kernel's to
// resolve, "..", links and doubled slashes included, so it can never leave the sandbox.
func CheckPath(path string) error {
	switch {
	case path == "":
		return shard.Invalidf("the path is empty: give an absolute path in the sandbox")
	case len(path) > 4096:
		return shard.Invalidf("the path is %d bytes long: at most 4096 are possible", len(path))
	case path[0] != '/':
		return shard.Invalidf("the path %s is not absolute: begin it with /", shard.Quote(path))
	case strings.IndexByte(path, 0) >= 0:
		return shard.Invalidf("the path %s holds a NUL", shard.Quote(path))
	}
	return nil
}

// Put writes a file: exactly args.Size bytes of r. Nothing is visible in the guest unless it returns nil. A client that
// gives nothing for a minute ends it when r has SetReadDeadline, as the body of a request has through
// http.ResponseController; otherwise r itself must not block for ever.
func Put(ctx context.Context, s *Session, args PutArgs, r io.Reader) error {
	return send(ctx, s, OpPut, string(args.Path), args, r)
}

// Untar unpacks the tar r in the guest. r is bounded as in Put.
func Untar(ctx context.Context, s *Session, args UntarArgs, r io.Reader) error {
	return send(ctx, s, OpUntar, string(args.Path), args, r)
}

// Get opens a regular file in the guest. The entry has no name, and its size is only what the guest says. The reader
// ends with io.EOF only when the file came whole; it must be closed, and read without long pauses.
func Get(ctx context.Context, s *Session, path string) (shard.FileEntry, io.ReadCloser, error) {
	return receive(ctx, s, OpGet, path)
}

// Tar packs what is at path in the guest; a link is packed as a link unless a slash follows it. The reader is as
// with Get, and gives what a hostile guest says is a tar.
func Tar(ctx context.Context, s *Session, path string) (shard.FileEntry, io.ReadCloser, error) {
	return receive(ctx, s, OpTar, path)
}

// Stat describes a path in the guest; a link is not followed.
func Stat(ctx context.Context, s *Session, path string) (shard.FileEntry, error) {
	var e shard.FileEntry
	err := call(ctx, s, idleLimit, OpStat, path, PathArgs{Path(path)}, &e)
	return checkEntry(e), err
}

// Mkdir makes a directory in the guest.
func Mkdir(ctx context.Context, s *Session, args MkdirArgs) error {
	return call(ctx, s, idleLimit, OpMkdir, string(args.Path), args, nil)
}

// Remove removes a path in the guest.
func Remove(ctx context.Context, s *Session, args RemoveArgs) error {
	return call(ctx, s, workLimit, OpRemove, string(args.Path), args, nil)
}

// List calls each with every entry of a directory in the guest, sorted by name, until it returns an error. When List
// fails before each was called, nothing was listed at all.
func List(ctx context.Context, s *Session, path string, each func(shard.FileEntry) error) error {
	r, err := open(ctx, s, OpList, path, nil)
	if err != nil {
		return err
	}
	defer r.Close()
	lines := bufio.NewReaderSize(r, maxLine)
	for n := 0; ; n++ {
		line, err := lines.ReadSlice('\n')
		if err == io.EOF && len(line) == 0 {
			return nil
		}
		if err != nil && err != io.EOF && err != bufio.ErrBufferFull {
			return err
		}
		var e shard.FileEntry
		if err != nil || n == maxEntries || json.Unmarshal(line, &e) != nil || !validName(e) {
			return violation("a listing that is none")
		}
		if err := each(checkEntry(e)); err != nil {
			return err
		}
	}
}

// validName says whether a directory can hold what e is called.
func validName(e shard.FileEntry) bool {
	name := e.Name
	if e.NameBytes != nil {
		if name = string(e.NameBytes); strings.ToValidUTF8(name, "\uFFFD") != e.Name || name == e.Name {
			return false
		}
	}
	return name != "" && name != "." && name != ".." && len(name) <= 255 && !strings.ContainsAny(name, "/\x00")
}

// checkEntry makes what the guest says of a file admissible.
func checkEntry(e shard.FileEntry) shard.FileEntry {
	switch e.Type {
	case "file", "dir", "symlink":
	default:
		e.Type = "other"
	}
	e.Mode &= 0o7777
	e.Size = max(e.Size, 0)
	e.MTime = e.MTime.UTC()
	return e
}

// watch ends an operation's context when nothing has moved for a time.
type watch struct {
	ctx     context.Context
	cancel  context.CancelFunc
	timer   *time.Timer
	limit   time.Duration
	expired atomic.Bool
}

func newWatch(ctx context.Context, limit time.Duration) *watch {
	w := &watch{limit: limit}
	w.ctx, w.cancel = context.WithCancel(ctx)
	w.timer = time.AfterFunc(limit, func() {
		w.expired.Store(true)
		w.cancel()
	})
	return w
}

// moved says that something has moved.
func (w *watch) moved() { w.timer.Reset(w.limit) }

func (w *watch) stop() {
	w.timer.Stop()
	w.cancel()
}

// explain gives the operation's error, which is the watch's when that ended it.
func (w *watch) explain(err error) error {
	if err == nil || err == io.EOF || !w.expired.Load() {
		return err
	}
	return shard.Errorf(shard.CodeTimeout, "nothing moved for %v: the transfer was ended", w.limit)
}

func call(ctx context.Context, s *Session, limit time.Duration, op, path string, args, head any) error {
	if err := CheckPath(path); err != nil {
		return err
	}
	w := newWatch(ctx, limit)
	defer w.stop()
	return w.explain(s.Call(w.ctx, op, args, head))
}

// send carries out an operation that takes r.
func send(ctx context.Context, s *Session, op, path string, args any, r io.Reader) error {
	if err := CheckPath(path); err != nil {
		return err
	}
	w := newWatch(ctx, idleLimit)
	defer w.stop()
	st, err := s.Open(w.ctx, op, args, nil)
	if err != nil {
		return w.explain(err)
	}
	defer st.Close()
	bounded, _ := r.(interface{ SetReadDeadline(time.Time) error })
	if bounded != nil {
		over, done := make(chan struct{}), make(chan struct{})
		defer func() { close(over); <-done }() // so that it cuts nothing that is read later
		go func() {                            // whoever waits for the client must not miss that the sandbox has gone
			defer close(done)
			select {
			case <-s.Done():
				_ = bounded.SetReadDeadline(time.Unix(1, 0))
			case <-over:
			}
		}()
	}
	buf := chunks.Get().(*[MaxData]byte)
	defer chunks.Put(buf)
	for {
		if bounded != nil {
			if err := bounded.SetReadDeadline(time.Now().Add(idleLimit)); err != nil {
				return err
			}
		}
		if err := s.Err(); err != nil { // behind the new deadline
			return err
		}
		n, rerr := r.Read(buf[:])
		if n > 0 {
			w.moved()
			if _, err := st.Write(buf[:n]); err == io.ErrClosedPipe {
				return violation("an operation that ended well before its data")
			} else if err != nil {
				return w.explain(err)
			}
			w.moved()
		}
		if rerr == io.EOF {
			break
		}
		if rerr != nil {
			if err := s.Err(); err != nil {
				return err
			}
			return w.explain(rerr)
		}
	}
	w.limit = workLimit
	w.moved()
	return w.explain(st.Finish())
}

func receive(ctx context.Context, s *Session, op, path string) (shard.FileEntry, io.ReadCloser, error) {
	var e shard.FileEntry
	r, err := open(ctx, s, op, path, &e)
	if err != nil {
		return shard.FileEntry{}, nil, err
	}
	e.Name, e.NameBytes = "", nil
	return checkEntry(e), r, nil
}

// open begins an operation that gives data.
func open(ctx context.Context, s *Session, op, path string, head any) (*watchedStream, error) {
	if err := CheckPath(path); err != nil {
		return nil, err
	}
	w := newWatch(ctx, idleLimit)
	st, err := s.Open(w.ctx, op, PathArgs{Path(path)}, head)
	if err != nil {
		w.stop()
		return nil, w.explain(err)
	}
	return &watchedStream{st, w}, nil
}

// watchedStream is a stream that is read; it ends when nobody reads, or nothing comes.
type watchedStream struct {
	st *Stream
	w  *watch
}

func (r *watchedStream) Read(p []byte) (int, error) {
	n, err := r.st.Read(p)
	if n > 0 {
		r.w.moved()
	}
	return n, r.w.explain(err)
}

func (r *watchedStream) Close() error {
	err := r.st.Close()
	r.w.stop()
	return err
}

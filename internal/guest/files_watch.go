package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"io"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/useshards/shard"
)

// maxEvent bounds the line of one event, in bytes: two paths of 4096, each as JSON text (six bytes for one) and base64.
const maxEvent = 64 << 10

// Watcher reads the changes below a directory in the guest. It is for one goroutine, but for Close.
type Watcher struct {
	st     *Stream
	cancel context.CancelFunc
	root   string
	lines  *bufio.Reader
}

// Watch begins to watch a directory in the guest; when it returns, nothing is missed any more. ctx bounds the whole watch,
// which must be closed.
func Watch(ctx context.Context, s *Session, args WatchArgs) (*Watcher, error) {
	if err := CheckPath(string(args.Path)); err != nil {
		return nil, err
	}
	begin := newWatch(ctx, idleLimit)
	defer begin.timer.Stop() // a watch may be silent for days, but not its beginning
	st, err := s.Open(begin.ctx, OpWatch, args, nil)
	if err != nil {
		begin.stop()
		return nil, begin.explain(err)
	}
	return &Watcher{st, begin.cancel, strings.TrimRight(string(args.Path), "/"), bufio.NewReaderSize(st, maxEvent)}, nil
}

// Overflow is the event that says that events below root are missing.
func Overflow(root string) shard.FileEvent {
	e := shard.FileEvent{Type: shard.FileOverflow, Path: root, Time: time.Now().UTC().Truncate(time.Microsecond)}
	if trimmed := strings.TrimRight(root, "/"); trimmed != "" {
		e.Path = trimmed
	}
	if !utf8.ValidString(e.Path) {
		e.Path, e.PathBytes = strings.ToValidUTF8(e.Path, "\uFFFD"), []byte(e.Path)
	}
	return e
}

// Next waits for events, and returns those that have come. io.EOF says that the directory is gone, which the last event
// has told. A watcher that nobody reads makes the guest drop events and say so.
func (w *Watcher) Next() ([]shard.FileEvent, error) {
	var events []shard.FileEvent
	for {
		line, err := w.lines.ReadSlice('\n')
		switch {
		case err == io.EOF && len(line) == 0:
			return nil, io.EOF
		case err != nil && err != io.EOF && err != bufio.ErrBufferFull:
			return nil, err
		}
		var e shard.FileEvent
		if err != nil || json.Unmarshal(line, &e) != nil || !w.valid(&e) {
			return nil, violation("a file event that is none")
		}
		events = append(events, e)
		// A line that is not complete yet would make us wait with those that are.
		if rest, _ := w.lines.Peek(w.lines.Buffered()); bytes.IndexByte(rest, '\n') < 0 {
			return events, nil
		}
	}
}

// Close ends the watch.
func (w *Watcher) Close() {
	_ = w.st.Close()
	w.cancel()
}

// valid says whether an event can be of this watch.
func (w *Watcher) valid(e *shard.FileEvent) bool {
	e.Time = e.Time.UTC()
	path, ok := spoken(e.Path, e.PathBytes)
	if !ok || !w.holds(path) || e.Time.Year() < 1 || e.Time.Year() > 9999 {
		return false
	}
	isRoot := len(path) <= len(w.root) || path == "/"
	switch e.Type {
	case shard.FileCreated, shard.FileModified:
		return !isRoot && e.From == "" && e.FromBytes == nil
	case shard.FileDeleted:
		return e.From == "" && e.FromBytes == nil
	case shard.FileMoved:
		from, ok := spoken(e.From, e.FromBytes)
		return ok && !isRoot && w.holds(from)
	case shard.FileOverflow:
		return isRoot && e.From == "" && e.FromBytes == nil
	}
	return false
}

// holds says whether a path is the watched one, or one below it.
func (w *Watcher) holds(path string) bool {
	rest, ok := strings.CutPrefix(path, w.root)
	if !ok || len(path) > 4096 || strings.IndexByte(rest, 0) >= 0 {
		return false
	}
	if rest == "" || w.root == "" && rest == "/" {
		return path != ""
	}
	if rest[0] != '/' {
		return false
	}
	for part := range strings.SplitSeq(rest[1:], "/") {
		if part == "" || part == "." || part == ".." {
			return false
		}
	}
	return true
}

// spoken gives the real bytes of a name that came as text, and as bytes when the text cannot hold it.
func spoken(text string, real []byte) (string, bool) {
	if real == nil {
		return text, true
	}
	return string(real), strings.ToValidUTF8(string(real), "\uFFFD") == text && string(real) != text
}

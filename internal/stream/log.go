package stream

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
)

// The files of a log: what is appended goes to logFile; when that is full it becomes oldFile, and the oldFile before is
// gone. nextFile is the new logFile on its way. Each begins with a line that says which byte of the log comes first, so
// that a daemon that was killed at any moment knows from the files alone where the log ends.
const (
	logFile  = "log"
	oldFile  = "log.1"
	nextFile = "log.next"

	logHead   = "shard log from byte %020d\n"
	logHeadAt = 41 // bytes of that line
)

// MaxLog is how large each of the two files of a log may become, in bytes.
const MaxLog = 16 << 20

// maxBehind is how far a holding reader may be behind before the program waits for it. What it has not read is then in
// the files for sure: at least MaxLog bytes are, and a window is under way.
const maxBehind = MaxLog / 2

// Log is what a process wrote over all its runs, bounded: the newest MaxLog bytes at least, twice as many at most. Its
// positions count bytes from the beginning of time.
type Log struct {
	dir  string
	base int64 // before load: what Base is to say

	mu      sync.Mutex
	open    bool     // the fields below are true
	f       *os.File // nil while the log is empty
	start   int64    // position of the first byte in f
	end     int64
	old     *os.File // nil when there is none
	oldest  int64    // position of the first byte in old, or start
	readers map[*LogReader]bool
	writer  *LogWriter
	got     int64 // bytes of the output that now fills the log, the lost ones included
	changed chan struct{}
	idle    bool // the files are closed when the last reader goes
	gone    bool
}

// NewLog takes up the log in dir, which is made with the first byte. The output that fills it began at position base.
func NewLog(dir string, base int64) *Log {
	return &Log{dir: dir, base: base, idle: true, readers: map[*LogReader]bool{}, changed: make(chan struct{})}
}

// load opens the files, once. The caller holds mu.
func (l *Log) load() error {
	switch {
	case l.gone:
		return ErrClosed
	case l.open:
		return nil
	}
	path := func(name string) string { return filepath.Join(l.dir, name) }
	old, oldStart, oldEnd, err := openLog(path(oldFile))
	if err != nil {
		return err
	}
	f, start, end, err := openLog(path(logFile))
	if err == nil && f == nil && old != nil { // killed between two renames
		if err = os.Rename(path(nextFile), path(logFile)); err == nil {
			f, start, end, err = openLog(path(logFile))
		} else if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
	}
	if err != nil {
		if old != nil {
			old.Close()
		}
		return err
	}
	if f == nil {
		start, end = oldEnd, oldEnd
	}
	if old != nil && oldEnd != start { // a host that crashed kept one and not the other
		old.Close()
		old = nil
	}
	l.f, l.start, l.end, l.old, l.oldest = f, start, end, old, start
	if old != nil {
		l.oldest = oldStart
	}
	l.got = max(end-l.base, 0)
	l.open = true
	return nil
}

// openLog opens a file of a log; nil when there is none, or one that a crash of the host spoiled.
func openLog(path string) (f *os.File, start, end int64, err error) {
	f, err = os.OpenFile(path, os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, 0, 0, nil
	}
	if err != nil {
		return nil, 0, 0, fmt.Errorf("open a log: %w", err)
	}
	var head [logHeadAt]byte
	_, err = f.ReadAt(head[:], 0)
	if err == nil {
		_, err = fmt.Sscanf(string(head[:]), logHead, &start)
	}
	info, statErr := f.Stat()
	if err != nil || statErr != nil || start < 0 {
		f.Close()
		return nil, 0, 0, nil
	}
	return f, start, start + info.Size() - logHeadAt, nil
}

// create makes an empty file of a log that begins at start.
func (l *Log) create(name string, start int64) (*os.File, error) {
	path := filepath.Join(l.dir, name)
	_ = os.Remove(path)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("make a log: %w", err)
	}
	if _, err := fmt.Fprintf(f, logHead, start); err != nil {
		f.Close()
		_ = os.Remove(path)
		return nil, fmt.Errorf("begin a log: %w", err)
	}
	return f, nil
}

// LogWriter fills a log with the output of one process, in one session. Its methods do nothing any more once the log has
// another.
type LogWriter struct {
	l       *Log
	was     int64 // what the log had of the output before
	pending int   // bytes to acknowledge
	ack     func(n int)
}

// Begin makes the writer for the output of a new process, and says at which position it begins.
func (l *Log) Begin() (w *LogWriter, base int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.load(); err != nil {
		return nil, 0, err
	}
	l.writer = &LogWriter{l: l, was: l.got}
	l.got, l.idle = 0, false
	return l.writer, l.end, nil
}

// Resume makes the writer for the output that fills the log already, and says how many bytes of it have been taken.
func (l *Log) Resume() (w *LogWriter, got int64, err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.load(); err != nil {
		return nil, 0, err
	}
	l.idle = false
	l.writer = &LogWriter{l: l}
	return l.writer, l.got, nil
}

// Cancel takes Begin back: the process never ran.
func (w *LogWriter) Cancel() {
	l := w.l
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.writer == w {
		l.writer, l.got = nil, w.was
		l.wake()
	}
}

// Skip says that n bytes of the output never come, or that -n came that were not counted: what was acknowledged and could
// not be written is not known to the next daemon.
func (w *LogWriter) Skip(n int64) {
	w.l.mu.Lock()
	defer w.l.mu.Unlock()
	if w.l.writer == w {
		w.l.got += n
		w.l.wake()
	}
}

// Append adds p. When it fails, only a part of p, or nothing, is in the log, and the rest is lost: a full disk must not
// stop the program.
func (w *LogWriter) Append(p []byte) error {
	l := w.l
	l.mu.Lock()
	if l.writer != w {
		l.mu.Unlock()
		return nil
	}
	w.pending += len(p)
	err := l.load()
	for rest := p; len(rest) > 0 && err == nil; {
		if l.f == nil {
			if err = os.MkdirAll(l.dir, 0o700); err == nil {
				l.f, err = l.create(logFile, l.end)
			}
			continue
		}
		room := MaxLog - logHeadAt - (l.end - l.start)
		if room <= 0 {
			err = l.rotate()
			continue
		}
		var n int
		n, err = l.f.WriteAt(rest[:min(int64(len(rest)), room)], logHeadAt+l.end-l.start)
		l.end += int64(n)
		rest = rest[n:]
	}
	l.got += int64(len(p))
	tell := l.takeAck()
	l.wake()
	l.mu.Unlock()
	tell()
	if err != nil {
		return fmt.Errorf("append to a log: %w", err)
	}
	return nil
}

// rotate begins a new file. The caller holds mu.
func (l *Log) rotate() error {
	f, err := l.create(nextFile, l.end)
	if err != nil {
		return err
	}
	path := func(name string) string { return filepath.Join(l.dir, name) }
	if err := os.Rename(path(logFile), path(oldFile)); err != nil {
		f.Close()
		return err
	}
	if l.old != nil {
		l.old.Close()
	}
	l.old, l.oldest = l.f, l.start
	l.f, l.start = f, l.end
	return os.Rename(path(nextFile), path(logFile))
}

// OnAck names the function that is told how many bytes of the program's output are safe here, so that the program may
// write as many more. It is called without locks held, from here, from Append and from a reader's methods.
func (w *LogWriter) OnAck(ack func(n int)) {
	w.l.mu.Lock()
	w.ack = ack
	tell := w.l.takeAck()
	w.l.mu.Unlock()
	tell()
}

// takeAck works out what may be acknowledged now. The caller holds mu, and calls what it gets without.
func (l *Log) takeAck() func() {
	w := l.writer
	if w == nil || w.pending == 0 || w.ack == nil {
		return func() {}
	}
	for r := range l.readers {
		if r.hold && l.end-r.pos > maxBehind {
			return func() {}
		}
	}
	n, ack := w.pending, w.ack
	w.pending = 0
	return func() { ack(n) }
}

func (l *Log) wake() {
	close(l.changed)
	l.changed = make(chan struct{})
}

// Got is how many bytes of the output that fills the log have been taken, and Base the position at which it began.
func (l *Log) Got() (got, base int64) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.load() != nil {
		return 0, l.base
	}
	got, base = l.got, l.end-l.got
	l.rest()
	return got, base
}

// Rest ends the writer, and lets go of the files until they are needed again.
func (l *Log) Rest() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.writer, l.idle = nil, true
	l.rest()
}

// rest closes the files if nobody uses them. The caller holds mu.
func (l *Log) rest() {
	if l.open && l.idle && !l.gone && len(l.readers) == 0 && l.writer == nil {
		l.base = l.end - l.got
		l.close()
	}
}

func (l *Log) close() {
	if l.f != nil {
		l.f.Close()
	}
	if l.old != nil {
		l.old.Close()
	}
	l.open, l.f, l.old = false, nil, nil
}

// Close ends every reader and lets go of the files; removing them is the caller's.
func (l *Log) Close() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.gone {
		return
	}
	l.gone = true
	l.close()
	l.wake()
}

// Snapshot reads the log as it is now, however it grows meanwhile. The caller closes it.
func (l *Log) Snapshot() (io.ReadCloser, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.load(); err != nil {
		return nil, err
	}
	s := &snapshot{}
	var parts []io.Reader
	for _, part := range []struct {
		name   string
		has    bool
		length int64
	}{{oldFile, l.old != nil, l.start - l.oldest}, {logFile, l.f != nil, l.end - l.start}} {
		if !part.has {
			continue
		}
		f, err := os.Open(filepath.Join(l.dir, part.name))
		if err != nil {
			s.Close()
			return nil, fmt.Errorf("read a log: %w", err)
		}
		s.files = append(s.files, f)
		parts = append(parts, io.NewSectionReader(f, logHeadAt, part.length))
	}
	s.Reader = io.MultiReader(parts...)
	l.rest()
	return s, nil
}

type snapshot struct {
	io.Reader
	files []*os.File
}

func (s *snapshot) Close() error {
	var errs []error
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	return errors.Join(errs...)
}

// LogReader follows a log. It is for one goroutine.
type LogReader struct {
	l    *Log
	hold bool
	pos  int64
	buf  []byte
}

// Follow reads from position from, or the oldest byte that is there. With hold the program waits for the reader, instead
// of leaving out what the reader has not read when the log drops it.
func (l *Log) Follow(from int64, hold bool) (*LogReader, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.load(); err != nil {
		return nil, err
	}
	r := &LogReader{l: l, hold: hold, pos: min(max(from, l.oldest), l.end), buf: make([]byte, 1+maxFrame)}
	l.readers[r] = true
	return r, nil
}

// Next returns the next bytes as a message of the API's byte streams: 1 and then at most 64 KiB, valid until the next
// call. At the end of the log it returns nil and what is closed when there is more.
func (r *LogReader) Next() (message []byte, more <-chan struct{}, err error) {
	l := r.l
	l.mu.Lock()
	message, err = r.read()
	more = l.changed
	tell := l.takeAck()
	l.mu.Unlock()
	tell()
	return message, more, err
}

func (r *LogReader) read() ([]byte, error) {
	l := r.l
	if l.gone {
		return nil, ErrClosed
	}
	r.pos = max(r.pos, l.oldest)
	f, start, end := l.f, l.start, l.end
	if r.pos < l.start {
		f, start, end = l.old, l.oldest, l.start
	}
	n := min(end-r.pos, maxFrame)
	if n == 0 {
		return nil, nil
	}
	r.buf[0] = 1
	message := r.buf[:1+n]
	if _, err := f.ReadAt(message[1:], logHeadAt+r.pos-start); err != nil {
		return nil, fmt.Errorf("read a log: %w", err)
	}
	r.pos += n
	return message, nil
}

// Close ends the reader; the program no longer waits for it.
func (r *LogReader) Close() {
	l := r.l
	l.mu.Lock()
	delete(l.readers, r)
	l.rest()
	tell := l.takeAck()
	l.mu.Unlock()
	tell()
}

package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// A sandbox's decisions are lines of JSON in journalFile; when that is full it becomes oldJournal, and the oldJournal before
// is gone.
const (
	journalFile = "egress.jsonl"
	oldJournal  = "egress.jsonl.1"
	// maxJournal bounds each, in bytes.
	maxJournal = 8 << 20
	// maxLine bounds a decision, in bytes.
	maxLine = 16 << 10
)

// MaxDecisions is how many decisions a reader is given at most before what comes live.
const MaxDecisions = 10_000

// How many decisions a second note writes down for each source, and how many at once after a pause.
const (
	noteRate  = 200
	noteBurst = 1000
)

// journal is the log of one sandbox. It writes at once and from the caller's goroutine: who floods waits for itself.
type journal struct {
	tally *tally
	dir   string

	mu      sync.Mutex
	f       *os.File // nil while nobody writes
	size    int64
	serial  uint64 // of the file that is written to
	changed chan struct{}
	closed  bool
	bounds  map[string]*bound // by source
}

// bound is the measure of one source.
type bound struct {
	tokens  float64
	last    time.Time
	skipped int
}

// journal returns the log of a sandbox, whether or not it runs.
func (e *Enforcer) journal(id string) *journal {
	e.mu.Lock()
	defer e.mu.Unlock()
	j := e.journals[id]
	if j == nil {
		j = &journal{dir: e.cfg.Dir(id), tally: &e.tally, changed: make(chan struct{}), bounds: map[string]*bound{}}
		e.journals[id] = j
	}
	return j
}

// Forget ends the readers of a sandbox's log, which is about to be removed. Idempotent.
func (e *Enforcer) Forget(id string) {
	e.mu.Lock()
	j := e.journals[id]
	delete(e.journals, id)
	e.mu.Unlock()
	if j != nil {
		j.close()
	}
}

// tally counts decisions by source and verdict, in all sandboxes, whether or not they were written down.
type tally struct {
	mu   sync.Mutex
	seen map[[2]string]int64
}

func (t *tally) count(d shard.EgressDecision) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.seen == nil {
		t.seen = make(map[[2]string]int64)
	}
	t.seen[[2]string{d.Source, d.Verdict}]++
}

// Verdicts returns how many decisions there were since the daemon began, by source and verdict.
func (e *Enforcer) Verdicts() map[[2]string]int64 {
	e.tally.mu.Lock()
	defer e.tally.mu.Unlock()
	return maps.Clone(e.tally.seen)
}

// Record writes down a decision about a sandbox. When it fails, what was decided must not be done: nothing goes unseen.
func (e *Enforcer) Record(id string, d shard.EgressDecision) error { return e.journal(id).write(d) }

// write writes every decision down, or says why not.
func (j *journal) write(d shard.EgressDecision) error {
	j.tally.count(d)
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.append(d)
}

// note is write for decisions that a sandbox can cause by the thousands: those above a rate are counted.
func (j *journal) note(d shard.EgressDecision) {
	j.tally.count(d)
	j.mu.Lock()
	defer j.mu.Unlock()
	now := time.Now()
	b := j.bounds[d.Source]
	if b == nil {
		b = &bound{tokens: noteBurst, last: now}
		j.bounds[d.Source] = b
	}
	b.tokens = min(noteBurst, b.tokens+now.Sub(b.last).Seconds()*noteRate)
	b.last = now
	if b.tokens < 1 || j.append(d) != nil {
		b.skipped++
		return
	}
	b.tokens--
}

// count writes down how many decisions note left out.
func (j *journal) count() {
	j.mu.Lock()
	defer j.mu.Unlock()
	for source, b := range j.bounds {
		if b.skipped == 0 {
			continue
		}
		d := shard.EgressDecision{Source: source, Verdict: shard.EgressDeny, Rule: shard.EgressRuleLimit,
			Reason: fmt.Sprintf("%d more decisions, allowed and denied, were not written down", b.skipped)}
		if j.append(d) == nil {
			b.skipped = 0
		}
	}
}

// append needs mu.
func (j *journal) append(d shard.EgressDecision) error {
	if j.closed {
		return errors.New("the egress log is closed")
	}
	d.Time = time.Now().UTC()
	line, err := json.Marshal(d)
	if err != nil || len(line) >= maxLine {
		return fmt.Errorf("encode a decision of %d bytes: %w", len(line), err)
	}
	line = append(line, '\n')
	if err := j.ready(int64(len(line))); err != nil {
		return err
	}
	n, err := j.f.Write(line)
	if err != nil {
		// Half a line would spoil the next.
		if n > 0 {
			_ = j.f.Truncate(j.size)
		}
		return fmt.Errorf("write a decision: %w", err)
	}
	j.size += int64(n)
	close(j.changed)
	j.changed = make(chan struct{})
	return nil
}

// ready makes room for n more bytes.
func (j *journal) ready(n int64) error {
	if j.f != nil && j.size+n > maxJournal {
		_ = j.f.Close()
		j.f = nil
		if err := os.Rename(filepath.Join(j.dir, journalFile), filepath.Join(j.dir, oldJournal)); err != nil {
			return fmt.Errorf("begin a new file of decisions: %w", err)
		}
		j.serial++
	}
	if j.f != nil {
		return nil
	}
	f, err := os.OpenFile(filepath.Join(j.dir, journalFile), os.O_RDWR|os.O_CREATE|os.O_APPEND|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return fmt.Errorf("open the file of decisions: %w", err)
	}
	size, err := f.Seek(0, io.SeekEnd)
	if err == nil && size > 0 { // the host may have ended in the middle of a line
		last := make([]byte, 1)
		if _, err = f.ReadAt(last, size-1); err == nil && last[0] != '\n' {
			_, err = f.Write([]byte{'\n'})
			size++
		}
	}
	if err != nil {
		_ = f.Close()
		return fmt.Errorf("read the file of decisions: %w", err)
	}
	j.f, j.size = f, size
	if size+n > maxJournal {
		return j.ready(n)
	}
	return nil
}

// rest lets go of the file until the next decision.
func (j *journal) rest() {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.f != nil {
		_ = j.f.Close()
		j.f = nil
	}
}

func (j *journal) close() {
	j.rest()
	j.mu.Lock()
	defer j.mu.Unlock()
	if !j.closed {
		j.closed = true
		close(j.changed)
	}
}

// Follower reads the decisions of one sandbox. It is for one goroutine.
type Follower struct {
	j      *journal
	f      *os.File
	serial uint64
	at     int64
}

// Decisions returns the newest decisions about a sandbox, each as JSON, oldest first; how many older ones were left out; and
// a reader of those that come later, which the caller closes.
func (e *Enforcer) Decisions(id string) (newest []json.RawMessage, cut int, live *Follower, err error) {
	j := e.journal(id)
	j.mu.Lock()
	defer j.mu.Unlock()
	live = &Follower{j: j, serial: j.serial}
	for _, name := range []string{oldJournal, journalFile} {
		f, err := openJournal(filepath.Join(j.dir, name))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		var data []byte
		if err == nil {
			data, err = io.ReadAll(io.LimitReader(f, maxJournal+maxLine))
		}
		if err != nil {
			if f != nil {
				_ = f.Close()
			}
			return nil, 0, nil, fmt.Errorf("read decisions: %w", err)
		}
		for line := range bytes.Lines(data) {
			if line = bytes.TrimSpace(line); json.Valid(line) {
				newest = append(newest, line)
			}
		}
		if name == journalFile {
			live.f, live.at = f, int64(len(data))
		} else {
			_ = f.Close()
		}
	}
	if cut = len(newest) - MaxDecisions; cut > 0 {
		newest = newest[cut:]
	}
	return newest, max(cut, 0), live, nil
}

func openJournal(path string) (*os.File, error) {
	return os.OpenFile(path, os.O_RDONLY|unix.O_NOFOLLOW, 0)
}

// Next waits for the next decisions. io.EOF says that the log is being removed.
func (r *Follower) Next(ctx context.Context) ([]json.RawMessage, error) {
	for {
		r.j.mu.Lock()
		closed, changed, serial, lost := r.j.closed, r.j.changed, r.j.serial, error(nil)
		if r.f == nil && !closed {
			name := journalFile
			if r.serial+1 == serial {
				name = oldJournal
			} else {
				r.serial = serial // what was between is gone
			}
			if r.f, lost = openJournal(filepath.Join(r.j.dir, name)); errors.Is(lost, fs.ErrNotExist) {
				lost = nil
			}
		}
		r.j.mu.Unlock()
		if lost != nil {
			return nil, fmt.Errorf("read decisions: %w", lost)
		}
		if r.f != nil {
			lines, err := r.lines()
			if err != nil || len(lines) > 0 {
				return lines, err
			}
			if r.serial < serial { // it was complete before this look
				_ = r.f.Close()
				r.f, r.at = nil, 0
				r.serial++
				continue
			}
		}
		if closed {
			return nil, io.EOF
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// lines reads the whole lines that are there, some at a time.
func (r *Follower) lines() ([]json.RawMessage, error) {
	buf := make([]byte, 4*maxLine)
	n, err := r.f.ReadAt(buf, r.at)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("read decisions: %w", err)
	}
	end := bytes.LastIndexByte(buf[:n], '\n') + 1
	r.at += int64(end)
	var out []json.RawMessage
	for line := range bytes.Lines(buf[:end]) {
		if line = bytes.TrimSpace(line); json.Valid(line) {
			out = append(out, line)
		}
	}
	return out, nil
}

// Close ends the reader.
func (r *Follower) Close() {
	if r.f != nil {
		_ = r.f.Close()
		r.f = nil
	}
}

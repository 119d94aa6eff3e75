package agent

import (
	"encoding/json"
	"errors"
	"io"
	"sync"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// handler carries out one operation, in a goroutine of its own. It ends when it returns: nil becomes Done, an error
// becomes the Failure of Head (when Head was not sent yet) or of Done. A *shard.Error keeps its code and message; any
// other error becomes internal with its text. A handler that returns nil without Head has an empty one.
//
// When the host resets the stream or the session is lost, Read and Write fail with errGone and Gone is closed; the
// handler should then give up, undo what is half made, and return.
type handler func(r *request) error

// handlers are the file operations by name; files.go puts its own in with an init function. At most maxFileOps of
// them run at once in a session.
var handlers = map[string]handler{}

// errGone ends a handler whose host no longer listens.
var errGone = errors.New("the host gave the operation up")

// request is one stream as the agent sees it. Its methods belong to the handler, except those in lower case that the
// session's reader calls.
type request struct {
	s    *session
	id   uint32
	op   string
	args json.RawMessage
	gone chan struct{} // closed at Reset and when the session is lost
	// dialed is the connection of a dial, which was begun before its handler ran.
	dialed *dialed

	mu     sync.Mutex // guards what follows, up to isGone; taken before an inbox's
	cond   sync.Cond
	in     *inbox  // Data from the host
	out    *output // of a command: credit goes there
	credit int     // otherwise, bytes that may be sent
	isGone bool
	cut    func() // called when the request ends, if set

	after    func() // called when Done was sent
	headSent bool
	chunk    []byte // that Read hands out
	rest     []byte // of it
}

// Args decodes the operation's arguments into v.
func (r *request) Args(v any) error {
	if len(r.args) == 0 {
		return nil
	}
	if err := json.Unmarshal(r.args, v); err != nil {
		return shard.Wrap(shard.CodeInvalidRequest, err, "the arguments of %s are not valid", r.op)
	}
	return nil
}

// Head sends the first answer; it is sent once, before any Write. body nil is an empty one.
func (r *request) Head(body any) error {
	head := guest.Head{}
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		head.Body = raw
	}
	r.headSent = true
	return r.s.writeJSON(r.id, guest.TypeHead, head)
}

// Gone is closed when the host no longer wants the operation.
func (r *request) Gone() <-chan struct{} { return r.gone }

// Read reads the host's Data: io.EOF at its EOF, errGone when the stream was reset or the session lost.
func (r *request) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	if len(r.rest) == 0 {
		chunk, err := r.in.pop()
		if err != nil {
			return 0, err
		}
		r.chunk, r.rest = chunk, chunk
	}
	n := copy(p, r.rest)
	if r.rest = r.rest[n:]; len(r.rest) == 0 {
		recycle(r.chunk)
		r.chunk = nil
	}
	r.in.consumed(n)
	return n, nil
}

// Write sends p as Data, and waits while the host has no room. It keeps nothing of p.
func (r *request) Write(p []byte) (int, error) {
	if !r.headSent {
		if err := r.Head(nil); err != nil {
			return 0, err
		}
	}
	done := 0
	for done < len(p) {
		n, err := r.take(min(len(p)-done, guest.MaxData))
		if err != nil {
			return done, err
		}
		if err := r.s.writeData(r.id, 0, p[done:done+n]); err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

// take waits for credit and takes at most n of it.
func (r *request) take(n int) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for r.credit == 0 && !r.isGone {
		r.cond.Wait()
	}
	if r.isGone {
		return 0, errGone
	}
	n = min(n, r.credit)
	r.credit -= n
	return n, nil
}

// giveBack returns credit that take took and nobody used.
func (r *request) giveBack(n int) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.credit += n
}

// finish sends what the handler's result means, and frees the stream.
func (r *request) finish(done guest.Done, err error) {
	done.Err = failureOf(err)
	if !r.headSent {
		_ = r.s.writeJSON(r.id, guest.TypeHead, guest.Head{Err: done.Err})
	}
	r.s.forget(r)
	_ = r.s.writeJSON(r.id, guest.TypeDone, done)
	r.end()
	if r.after != nil {
		r.after()
	}
}

// addCredit is the host's Credit. An error means that the host broke the protocol.
func (r *request) addCredit(n int) error {
	r.mu.Lock()
	out := r.out
	if out == nil {
		defer r.mu.Unlock()
		if r.credit += n; r.credit > guest.Window {
			return errProtocol
		}
		r.cond.Broadcast()
		return nil
	}
	r.mu.Unlock()
	return out.ack(n)
}

// end marks the request as given up by the host, or finished; it may be called more than once.
func (r *request) end() {
	r.mu.Lock()
	if r.isGone {
		r.mu.Unlock()
		return
	}
	r.isGone = true
	close(r.gone)
	r.cond.Broadcast()
	r.in.detach(r)
	out, cut := r.out, r.cut
	r.mu.Unlock()
	if out != nil {
		out.wake()
	}
	if cut != nil {
		cut()
	}
}

// onEnd lets the end of the request call cut, which must not wait; it is called at once when the end was before.
func (r *request) onEnd(cut func()) {
	r.mu.Lock()
	gone := r.isGone
	r.cut = cut
	r.mu.Unlock()
	if gone {
		cut()
	}
}

// feed makes in the stream's inbox, and says how many bytes it has taken so far.
func (r *request) feed(in *inbox) int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.in == in {
		return 0
	}
	r.in.close()
	r.in = in
	if r.isGone {
		return 0
	}
	return in.adopt(r)
}

// inbox is where the stream's Data goes.
func (r *request) inbox() *inbox {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.in
}

// failureOf is err as the protocol carries it; nil is nil.
func failureOf(err error) *guest.Failure {
	if err == nil {
		return nil
	}
	f := &guest.Failure{Code: string(shard.CodeInternal), Message: err.Error()}
	if e, ok := errors.AsType[*shard.Error](err); ok {
		f.Code, f.Message, f.ExitCode = string(e.Code), e.Message, e.ExitCode
	}
	return f
}

var (
	_ io.Reader = (*request)(nil)
	_ io.Writer = (*request)(nil)
)

package agent

import (
	"io"
	"sync"

	"github.com/useshards/shard/internal/guest"
)

// inbox queues the Data that the host sends on one stream until its handler takes it. What the handler has consumed is
// credited to the host, so the queue holds at most guest.Window bytes. The inbox of a command outlives the stream: it
// is detached when the session is lost and adopted by the stream that resumes the command.
type inbox struct {
	mu      sync.Mutex
	cond    sync.Cond
	lasting bool     // a command's: losing the stream leaves the queue as it is
	owner   *request // gets the credit; nil while no stream is attached
	queue   [][]byte
	room    int   // bytes that the host may still send
	window  int   // what room began with; a dial's grows
	stale   int   // bytes taken from earlier streams and not consumed yet; they are not credited
	pending int   // consumed and not credited yet
	total   int64 // bytes taken, over all streams
	eof     bool
	closed  bool
}

func newInbox(owner *request) *inbox {
	b := &inbox{owner: owner, room: guest.Window, window: guest.Window}
	b.cond.L = &b.mu
	return b
}

// push takes ownership of p. It never waits.
func (b *inbox) push(owner *request, p []byte) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner != owner || b.closed {
		return nil // crossed the end of the stream
	}
	if b.room -= len(p); b.room < 0 || b.eof {
		return errProtocol
	}
	b.total += int64(len(p))
	b.queue = append(b.queue, p)
	b.cond.Broadcast()
	return nil
}

func (b *inbox) pushEOF(owner *request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner == owner {
		b.eof = true
		b.cond.Broadcast()
	}
}

// pop waits for the next chunk: io.EOF after the host's EOF, errGone when no more can come.
func (b *inbox) pop() ([]byte, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for {
		switch {
		case b.closed:
			return nil, errGone
		case len(b.queue) > 0:
			p := b.queue[0]
			b.queue[0] = nil
			b.queue = b.queue[1:]
			return p, nil
		case b.eof:
			return nil, io.EOF
		}
		b.cond.Wait()
	}
}

// consumed credits n bytes to the host, a quarter of the window at a time.
func (b *inbox) consumed(n int) {
	b.mu.Lock()
	old := min(n, b.stale)
	b.stale -= old
	b.pending += n - old
	owner, credit := b.owner, b.pending
	if owner == nil || credit < b.window/4 || b.eof {
		b.mu.Unlock()
		return
	}
	b.pending = 0
	if keepsUp := len(b.queue) == 0; keepsUp && b.window < guest.Window {
		if owner.s.grown.Add(int64(b.window)) <= maxGrown {
			credit += b.window
			b.window *= 2
		} else {
			owner.s.grown.Add(-int64(b.window))
		}
	}
	b.room += credit
	b.mu.Unlock()
	owner.s.writeCredit(owner.id, credit)
}

// shrink gives back what the window has grown by: the stream is over.
func (b *inbox) shrink(s *session) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.grown.Add(guest.DialWindow - int64(b.window))
	b.window = guest.DialWindow
}

// detach lets go of owner: a command's queue waits for another, any other ends.
func (b *inbox) detach(owner *request) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.owner != owner {
		return
	}
	b.owner = nil
	if !b.lasting {
		b.closed = true
		b.queue = nil
		b.cond.Broadcast()
		return
	}
	b.pending, b.stale = 0, 0
	for _, p := range b.queue {
		b.stale += len(p)
	}
}

// keep makes the inbox one that outlives its stream; when the stream is gone already, another takes its place.
func (b *inbox) keep() *inbox {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.closed {
		b = newInbox(nil)
	}
	b.lasting = true
	return b
}

// adopt makes owner the stream that feeds the queue, and says how many bytes were taken so far.
func (b *inbox) adopt(owner *request) int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.owner, b.room = owner, guest.Window
	return b.total
}

// close drops what is queued and ends pop.
func (b *inbox) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	b.queue = nil
	b.cond.Broadcast()
}

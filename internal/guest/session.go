package guest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
)

const (
	maxStale   = 64 << 20         // bytes of earlier sessions that Connect skips
	maxStreams = 1024             // open at once in one session, dials not counted; the agent's bound too
	writeTime  = 15 * time.Second // the agent always reads: when it does not take a frame for so long, it is sick
	ackNow     = Window / 8       // acknowledged bytes that are told at once; fewer wait for ackSoon
	ackSoon    = 2 * time.Millisecond
)

// ErrLost says that the channel to the guest ended, or that the session was closed.
var ErrLost = errors.New("the channel to the guest is lost")

// ErrQuiesced is an ErrLost too: it says that the session ended for a checkpoint.
var ErrQuiesced = fmt.Errorf("%w: the guest stands still", ErrLost)

// Conn is what a session needs of a net.Conn.
type Conn interface {
	io.ReadWriteCloser
	SetDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// Session is the host's side of one session with shard-init. All methods may be called from several goroutines.
type Session struct {
	conn   Conn
	frames *frameReader
	done   chan struct{} // closed when the session has ended
	wait   sync.WaitGroup

	// writing holds one token, taken for the time of one frame. The goroutine that reads frames never takes it: so what
	// the guest sends is always read, and no two sides can wait for each other.
	writing chan struct{}
	out     []byte

	mu      sync.Mutex // never held over I/O; comes before a stream's
	streams map[uint32]*Stream
	last    uint32
	dials   int  // of the streams
	quiet   bool // a checkpoint is near
	err     error

	grown atomic.Int64 // bytes that the windows of dials have grown by

	acks   sync.Mutex
	due    map[*Stream]int // bytes to credit
	resets []uint32        // streams to reset
	timed  bool            // a flush is under way
	flush  chan struct{}
}

// Connect greets the agent on conn, which the session owns from then on, even when it fails.
// It skips what an earlier session left in the channel.
func Connect(ctx context.Context, conn Conn, token [TokenSize]byte) (*Session, error) {
	s := &Session{conn: conn, frames: newFrameReader(conn), done: make(chan struct{}), writing: make(chan struct{}, 1),
		streams: map[uint32]*Stream{}, due: map[*Stream]int{}, flush: make(chan struct{}, 1)}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	err := s.greet(token)
	if !stop() && ctx.Err() != nil {
		err = ctx.Err()
	}
	if err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("greet shard-init: %w", err)
	}
	s.wait.Go(s.read)
	s.wait.Go(s.credit)
	return s, nil
}

func (s *Session) greet(token [TokenSize]byte) error {
	var epoch [EpochSize]byte
	_, _ = rand.Read(epoch[:])
	hello := append(append([]byte(HostMagic), token[:]...), epoch[:]...)
	if _, err := s.conn.Write(hello); err != nil {
		return err
	}
	answer := append([]byte(GuestMagic), epoch[:]...)
	r := s.frames.r
	for skipped := 0; ; {
		if _, err := r.Peek(len(answer)); err != nil {
			return unexpected(err)
		}
		b, _ := r.Peek(r.Buffered())
		if i := bytes.Index(b, answer); i >= 0 {
			_, _ = r.Discard(i + len(answer))
			return nil
		}
		n, _ := r.Discard(len(b) - len(answer) + 1)
		if skipped += n; skipped > maxStale {
			return violation("no answer to the hello in %d bytes", maxStale)
		}
	}
}

// Done is closed when the session has ended.
func (s *Session) Done() <-chan struct{} { return s.done }

// Err says why the session ended: an ErrProtocol or ErrLost. It is nil before Done.
func (s *Session) Err() error {
	select {
	case <-s.done:
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.err
	default:
		return nil
	}
}

// Close ends the session and waits for its goroutines. Commands in the guest run on. It must not be called from a Sink.
func (s *Session) Close() error {
	s.end(ErrLost)
	s.wait.Wait()
	return nil
}

// Call carries out an operation that has no data. head, when not nil, gets the decoded answer. When ctx ends first the
// operation is given up.
func (s *Session) Call(ctx context.Context, op string, args, head any) error {
	st, err := s.Open(ctx, op, args, head)
	if err != nil {
		return err
	}
	return st.finish()
}

// Quiesce prepares the guest for a checkpoint. When it returns nil the agent has read all that was sent and holds no
// channel but the one that PID 1 was born with; the session sends nothing any more and is only good for Close.
func (s *Session) Quiesce(ctx context.Context) error {
	if err := s.lock(ctx); err != nil { // and kept: half a frame in the agent's hands would spoil the next hello
		return err
	}
	s.mu.Lock()
	s.quiet = true
	s.mu.Unlock()
	payload, err := json.Marshal(Open{Op: OpQuiesce})
	st := s.newStream(nil)
	if err == nil {
		err = s.enter(st, payload)
	}
	var head QuiesceHead
	if err == nil {
		err = st.await(ctx, &head)
	}
	if err == nil {
		err = st.finish()
	}
	if err != nil {
		s.unlock()
		return err
	}
	if head.Closes {
		select {
		case <-s.done:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	return nil
}

// end ends the session once.
func (s *Session) end(err error) {
	s.mu.Lock()
	if s.err != nil {
		s.mu.Unlock()
		return
	}
	if s.quiet && errors.Is(err, ErrLost) {
		err = ErrQuiesced
	}
	s.err = err
	s.mu.Unlock()
	_ = s.conn.Close() // ends read, which ends the streams
	close(s.done)
}

// read handles the guest's frames until the session ends.
func (s *Session) read() {
	defer func() {
		s.mu.Lock()
		streams, err := s.streams, s.err
		s.streams = nil
		s.mu.Unlock()
		for _, st := range streams {
			st.end(err)
		}
	}()
	for {
		f, err := s.frames.next()
		if err == nil {
			err = s.take(f)
		} else if !errors.Is(err, ErrProtocol) {
			err = fmt.Errorf("%w: %w", ErrLost, err)
		}
		if err != nil {
			s.end(err)
			return
		}
	}
}

// take handles one frame. Whatever is for no open stream is a violation: the agent answers each stream with one Done,
// and says nothing after it.
func (s *Session) take(f frame) error {
	s.mu.Lock()
	st := s.streams[f.Stream]
	s.mu.Unlock()
	if st == nil {
		return violation("a frame of type %d for stream %d, which is not open", f.Type, f.Stream)
	}
	switch f.Type {
	case TypeHead:
		var head Head
		if err := json.Unmarshal(f.payload, &head); err != nil {
			return violation("a head that is not JSON")
		}
		return st.takeHead(head)
	case TypeData:
		return st.takeData(f.payload)
	case TypeCredit:
		return st.takeCredit(binary.BigEndian.Uint32(f.payload))
	case TypeDone:
		var done Done
		if err := json.Unmarshal(f.payload, &done); err != nil {
			return violation("a done that is not JSON")
		}
		if err := st.takeDone(done); err != nil {
			return err
		}
		s.mu.Lock()
		delete(s.streams, f.Stream)
		if st.dial {
			s.dials--
		}
		s.mu.Unlock()
		if st.dial {
			st.shrink()
		}
	case TypeEOF:
		st.takeEOF()
	}
	return nil
}

// open enters a new stream and sends its Open. Ids grow in the order in which Opens are sent.
func (s *Session) open(ctx context.Context, st *Stream, op string, args any) error {
	open := Open{Op: op}
	if args != nil {
		raw, err := json.Marshal(args)
		if err != nil {
			return shard.Wrap(shard.CodeInvalidRequest, err, "the arguments cannot be sent to the sandbox")
		}
		open.Args = raw
	}
	payload, err := json.Marshal(open)
	if err != nil {
		return err
	}
	if len(payload) > MaxOpen {
		return shard.Errorf(shard.CodeInvalidRequest, "the request is too large for the sandbox: %d bytes, at most %d", len(payload), MaxOpen)
	}
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()
	return s.enter(st, payload)
}

// enter gives st its id and sends its Open. The caller holds the lock.
func (s *Session) enter(st *Stream, payload []byte) error {
	var err error
	s.mu.Lock()
	switch {
	case s.err != nil:
		err = s.err
	case st.dial && s.dials >= MaxDials:
		err = shard.Errorf(shard.CodeExecLimit, "the sandbox has %d connections", MaxDials)
	case !st.dial && len(s.streams)-s.dials >= maxStreams:
		err = shard.Errorf(shard.CodeExecLimit, "the sandbox has %d operations under way", maxStreams)
	default:
		s.last++
		st.id = s.last
		s.streams[st.id] = st
		if st.dial {
			s.dials++
		}
	}
	s.mu.Unlock()
	if err != nil {
		return err
	}
	return s.send(TypeOpen, st.id, payload)
}

func (s *Session) lock(ctx context.Context) error {
	select {
	case s.writing <- struct{}{}:
		return nil
	case <-s.done:
		return s.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (s *Session) unlock() { <-s.writing }

// send writes one frame. The caller holds the lock.
func (s *Session) send(t Type, stream uint32, payload []byte) error {
	if cap(s.out) < HeaderSize+len(payload) {
		s.out = make([]byte, HeaderSize, max(HeaderSize+len(payload), 512))
	}
	s.out = s.out[:HeaderSize]
	Header{len(payload), t, stream}.Put(s.out)
	s.out = append(s.out, payload...)
	_ = s.conn.SetWriteDeadline(time.Now().Add(writeTime))
	_, err := s.conn.Write(s.out)
	if cap(s.out) > HeaderSize+MaxData {
		s.out = nil // a large Open is rare
	}
	if err == nil {
		return nil
	}
	s.end(fmt.Errorf("%w: %w", ErrLost, err))
	return s.Err()
}

func (s *Session) write(ctx context.Context, t Type, stream uint32, payload []byte) error {
	if err := s.lock(ctx); err != nil {
		return err
	}
	defer s.unlock()
	return s.send(t, stream, payload)
}

// acknowledge credits n bytes of st to the guest, soon: many small ones become one frame. It never waits.
func (s *Session) acknowledge(st *Stream, n int) {
	s.acks.Lock()
	s.due[st] += n
	now := s.due[st] >= ackNow
	later := !now && !s.timed
	if later {
		s.timed = true
	}
	s.acks.Unlock()
	switch {
	case now:
		s.flushAcks()
	case later:
		time.AfterFunc(ackSoon, s.flushAcks)
	}
}

// abandon resets a stream, soon. It never waits.
func (s *Session) abandon(id uint32) {
	s.acks.Lock()
	s.resets = append(s.resets, id)
	s.acks.Unlock()
	s.flushAcks()
}

func (s *Session) flushAcks() {
	select {
	case s.flush <- struct{}{}:
	default:
	}
}

// credit sends what was acknowledged and what was given up, until the session ends.
func (s *Session) credit() {
	due := map[*Stream]int{}
	for {
		select {
		case <-s.done:
			return
		case <-s.flush:
		}
		s.acks.Lock()
		s.due, due = due, s.due
		resets := s.resets
		s.resets, s.timed = nil, false
		s.acks.Unlock()
		for _, id := range resets {
			if s.write(context.Background(), TypeReset, id, nil) != nil {
				return
			}
		}
		for st, n := range due {
			if !st.granted(n) {
				continue
			}
			var b [4]byte
			binary.BigEndian.PutUint32(b[:], uint32(n))
			if s.write(context.Background(), TypeCredit, st.id, b[:]) != nil {
				return
			}
		}
		clear(due)
	}
}

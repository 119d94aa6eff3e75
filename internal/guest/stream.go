package guest

import (
	"context"
	"encoding/json"
	"io"
	"sync"

	"github.com/useshards/shard"
)

// Stream is one operation with data. It reads what the guest sends and writes what the guest is to get; both sides are
// flow-controlled, so a slow one holds up nothing but itself.
type Stream struct {
	s    *Session
	id   uint32
	sink Sink        // takes the data instead of Read, for the output of a command
	stop func() bool // ends the watch of the context

	headed chan struct{} // closed when Head or the end is there

	mu      sync.Mutex
	cond    sync.Cond
	head    json.RawMessage
	gotHead bool
	queue   [][]byte
	rest    []byte // of the first chunk, what Read did not hand out yet
	base    []byte // the chunk that rest is part of
	room    int    // bytes that the guest may still send
	read    int    // bytes read and not acknowledged yet
	credit  int    // bytes that the host may still send
	eof     bool   // CloseWrite was called
	reset   bool   // what still comes is dropped
	err     error  // why the stream ended, when it failed
	exit    *Exit
	isEnded bool

	dial     bool // a connection to the guest
	guestEOF bool // the guest's half of it has ended
	window   int  // of it: what the guest may have sent and not been credited for
}

// chunks holds buffers of MaxData bytes, so that a transfer does not leave one behind per frame.
var chunks = sync.Pool{New: func() any { return new([MaxData]byte) }}

func (s *Session) newStream(sink Sink) *Stream {
	st := &Stream{s: s, sink: sink, headed: make(chan struct{}), room: Window, credit: Window}
	st.cond.L = &st.mu
	return st
}

// Open starts an operation and waits for the guest's first answer, which is decoded into head when that is not nil.
// ctx bounds the whole stream: when it ends, the operation is given up and everything fails with the context's error.
// The caller must read the stream to its end or Close it.
func (s *Session) Open(ctx context.Context, op string, args, head any) (*Stream, error) {
	st := s.newStream(nil)
	if err := st.start(ctx, op, args, head); err != nil {
		return nil, err
	}
	return st, nil
}

// start opens the stream and waits for its head.
func (st *Stream) start(ctx context.Context, op string, args, head any) error {
	if err := st.s.open(ctx, st, op, args); err != nil {
		return err
	}
	return st.await(ctx, head)
}

// await waits for the head.
func (st *Stream) await(ctx context.Context, head any) error {
	st.stop = context.AfterFunc(ctx, func() { st.giveUp(ctx.Err()) })
	<-st.headed
	st.mu.Lock()
	raw, got, err := st.head, st.gotHead, st.err
	st.mu.Unlock()
	switch {
	case err != nil:
	case !got:
		err = violation("an operation that ended without a head")
	case head != nil:
		if json.Unmarshal(raw, head) != nil {
			err = violation("a head of another type")
			st.s.end(err)
		}
	}
	if err != nil {
		st.stop()
		st.giveUp(err)
	}
	return err
}

// Read reads what the guest sends. io.EOF means that the operation ended well; any other error is why it did not.
func (st *Stream) Read(p []byte) (int, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for len(st.rest) == 0 {
		switch {
		case st.reset:
			return 0, st.err
		case len(st.queue) > 0:
			st.base, st.rest = st.queue[0], st.queue[0]
			st.queue = st.queue[1:]
			continue
		case st.isEnded && st.err != nil:
			return 0, st.err
		case st.isEnded:
			return 0, io.EOF
		case len(p) == 0:
			return 0, nil
		}
		st.cond.Wait()
	}
	n := copy(p, st.rest)
	st.rest = st.rest[n:]
	if len(st.rest) == 0 {
		recycle(st.base)
		st.base, st.rest = nil, nil
	}
	if st.read += n; st.read >= Window/4 && !st.isEnded {
		st.s.acknowledge(st, st.read)
		st.read = 0
	}
	return n, nil
}

// Write sends p to the guest, and waits while the guest has no room. When the operation has ended, it fails with why,
// or with io.ErrClosedPipe when it ended well.
func (st *Stream) Write(p []byte) (int, error) { return st.write(context.Background(), p) }

func (st *Stream) write(ctx context.Context, p []byte) (int, error) {
	if ctx.Done() != nil {
		defer context.AfterFunc(ctx, func() {
			st.mu.Lock()
			defer st.mu.Unlock()
			st.cond.Broadcast()
		})()
	}
	done := 0
	for done < len(p) {
		n, err := st.takeSendCredit(ctx, min(len(p)-done, MaxData))
		if err == nil {
			err = st.s.write(ctx, TypeData, st.id, p[done:done+n])
			if err != nil {
				st.mu.Lock()
				st.credit += n // nothing was sent: a frame goes out whole or ends the session
				st.mu.Unlock()
			}
		}
		if err != nil {
			return done, err
		}
		done += n
	}
	return done, nil
}

func (st *Stream) takeSendCredit(ctx context.Context, n int) (int, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for {
		switch {
		case st.err != nil:
			return 0, st.err
		case st.isEnded || st.eof:
			return 0, io.ErrClosedPipe
		case ctx.Err() != nil:
			return 0, ctx.Err()
		case st.credit > 0:
			n = min(n, st.credit)
			st.credit -= n
			return n, nil
		}
		st.cond.Wait()
	}
}

// CloseWrite tells the guest that no more data comes.
func (st *Stream) CloseWrite() error {
	st.mu.Lock()
	over := st.eof || st.isEnded
	st.eof = true
	st.mu.Unlock()
	if over {
		return nil
	}
	return st.s.write(context.Background(), TypeEOF, st.id, nil)
}

// Finish ends the writing side, drops what still comes and waits for the end of the operation: nil when it ended well.
func (st *Stream) Finish() error {
	if err := st.CloseWrite(); err != nil {
		return err
	}
	return st.finish()
}

func (st *Stream) finish() error {
	_, err := io.Copy(io.Discard, readerOnly{st})
	st.stop()
	return err
}

// readerOnly hides everything but Read from io.Copy.
type readerOnly struct{ io.Reader }

// Close gives the operation up if it has not ended. It does not wait for the guest, and always succeeds.
func (st *Stream) Close() error {
	st.stop()
	st.giveUp(io.ErrClosedPipe)
	return nil
}

// giveUp ends the stream on this side with err, and tells the guest; what the guest still sends for it is dropped. A
// sink is not told: whoever gives up knows.
func (st *Stream) giveUp(err error) {
	st.mu.Lock()
	if st.isEnded {
		st.mu.Unlock()
		return
	}
	st.reset = true
	st.drop()
	st.close(err)
	st.mu.Unlock()
	st.s.abandon(st.id)
}

// drop frees what was not read. The caller holds mu.
func (st *Stream) drop() {
	for _, c := range st.queue {
		recycle(c)
	}
	st.queue, st.rest, st.base = nil, nil, nil
}

// close marks the stream as ended with err, nil when it ended well. The caller holds mu.
func (st *Stream) close(err error) {
	st.isEnded, st.err = true, err
	if !st.gotHead {
		close(st.headed)
	}
	st.cond.Broadcast()
}

// end ends the stream. Only the goroutine that reads for the session calls it, and so only that one calls a sink.
func (st *Stream) end(err error) {
	st.mu.Lock()
	if st.isEnded {
		st.mu.Unlock()
		return
	}
	started := st.gotHead && st.err == nil
	st.close(err)
	st.mu.Unlock()
	switch {
	case st.sink == nil || !started:
	case err == nil:
		st.sink.Exited(*st.exit)
	default:
		st.sink.Broken(err)
	}
}

func (st *Stream) takeHead(head Head) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.reset {
		return nil
	}
	if st.gotHead {
		return violation("a second head")
	}
	st.gotHead = true
	st.head = head.Body
	if head.Err != nil {
		st.err = head.Err.public()
	}
	close(st.headed)
	return nil
}

func (st *Stream) takeData(p []byte) error {
	var channel byte
	if st.sink != nil {
		if len(p) == 0 || p[0] != ChannelStdout && p[0] != ChannelStderr {
			return violation("output without a channel")
		}
		channel, p = p[0], p[1:]
	}
	if len(p) > MaxData {
		return violation("%d bytes of data in one frame", len(p))
	}
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.reset {
		return nil
	}
	if !st.gotHead || st.err != nil {
		return violation("data before the head, or after a refusal")
	}
	if st.room -= len(p); st.room < 0 {
		return violation("more data than the window")
	}
	if len(p) == 0 {
		return nil
	}
	if st.sink != nil {
		st.mu.Unlock()
		st.sink.Output(channel, p)
		st.mu.Lock()
		return nil
	}
	st.queue = append(st.queue, chunkOf(p))
	st.cond.Broadcast()
	return nil
}

// chunkOf copies p, which lies in the buffer of the session's reader.
func chunkOf(p []byte) []byte {
	if len(p) <= MaxData/4 {
		return append([]byte(nil), p...)
	}
	c := chunks.Get().(*[MaxData]byte)
	return c[:copy(c[:], p)]
}

func recycle(c []byte) {
	if cap(c) == MaxData {
		chunks.Put((*[MaxData]byte)(c[:MaxData]))
	}
}

// granted notes that the guest may send n more bytes, and says whether to tell it.
func (st *Stream) granted(n int) bool {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.isEnded {
		return false
	}
	st.room += n
	return true
}

func (st *Stream) takeCredit(n uint32) error {
	st.mu.Lock()
	defer st.mu.Unlock()
	if n > Window || st.credit+int(n) > Window {
		return violation("more credit than the window")
	}
	st.credit += int(n)
	st.cond.Broadcast()
	return nil
}

func (st *Stream) takeDone(done Done) error {
	st.mu.Lock()
	if !st.gotHead && !st.reset {
		st.mu.Unlock()
		return violation("a done before the head")
	}
	err := st.err
	if err == nil && done.Err != nil {
		err = done.Err.public()
	}
	if err == nil && st.sink != nil && !st.reset {
		if done.Exit == nil || done.Exit.Code < 0 || done.Exit.Code > 255 || done.Exit.Signal < 0 || done.Exit.Signal > 127 {
			st.mu.Unlock()
			return violation("a command that ended without an exit")
		}
		st.exit = done.Exit
	}
	st.mu.Unlock()
	st.end(err)
	return nil
}

// guestCodes are the codes that the agent may give; another becomes internal.
var guestCodes = map[shard.Code]bool{
	shard.CodeInvalidRequest: true, shard.CodeNotFound: true, shard.CodeUnsupported: true, shard.CodeInUse: true,
	shard.CodeExecExited: true, shard.CodeExecRunning: true, shard.CodeBodyTooLarge: true, shard.CodeCommandNotStarted: true,
	shard.CodeExecLimit: true, shard.CodeSandboxNotRunning: true, shard.CodeNameTaken: true, CodeConnectionRefused: true,
}

package guest

import (
	"context"
	"errors"
	"io"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

const (
	// MaxDials is how many connections to the guest a session carries at once, beside its other streams.
	MaxDials = 10240
	// DialWindow is the initial credit of each direction of a dial's stream, in bytes: thousands of connections whose
	// readers stand still must not fill the memory of either side. While a reader keeps up, the receiver doubles the
	// window, up to Window, by crediting more than was read.
	DialWindow = 32 << 10
	// maxGrown bounds what all windows of a session have grown by, in bytes.
	maxGrown = 64 << 20
	// lookEvery is how often a connection that is not read is asked whether it was reset.
	lookEvery = time.Second
)

// CodeConnectionRefused says that nothing listens on the port that was dialled.
const CodeConnectionRefused shard.Code = "connection_refused"

// DialArgs names a TCP port of the guest's 127.0.0.1.
type DialArgs struct {
	Port int `json:"port"`
}

// Duplex is a socket whose halves end one by one.
type Duplex interface {
	io.Writer
	syscall.Conn
	CloseWrite() error
	SetDeadline(time.Time) error
	SetReadDeadline(time.Time) error
	SetWriteDeadline(time.Time) error
}

// Dial begins a connection to a TCP port of the guest's 127.0.0.1, and does not wait for it: what is sent at once is there
// with it, a round trip sooner. Connected waits. ctx bounds the dial only. Relay carries bytes, and Close cuts the connection.
func (s *Session) Dial(ctx context.Context, port int) (*Stream, error) {
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	st := s.newStream(nil)
	st.dial, st.room, st.credit, st.window = true, DialWindow, DialWindow, DialWindow
	if err := s.open(ctx, st, OpDial, DialArgs{Port: port}); err != nil {
		return nil, err
	}
	st.stop = context.AfterFunc(ctx, func() {
		select {
		case <-st.headed:
		default:
			st.giveUp(ctx.Err())
		}
	})
	return st, nil
}

// Connected waits until what was dialled is connected; a CodeConnectionRefused says that nothing listens there.
func (st *Stream) Connected() error {
	<-st.headed
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.err
}

// Relay passes bytes between a dialled stream and conn until both sides have ended, each at its own time. It fails with why
// the dial failed or the connection broke off, or when ctx ends, and leaves it to the caller to close both.
func (st *Stream) Relay(ctx context.Context, conn Duplex) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	cut := func() {
		_ = st.Close()
		_ = conn.SetDeadline(time.Unix(1, 0))
	}
	defer context.AfterFunc(ctx, cut)()
	passed := make(chan error, 1)
	go func() {
		err := st.passTo(conn)
		if err == nil {
			_ = conn.CloseWrite() // fails when the client has gone, of which sendFrom hears
			err = st.finish()
		}
		if err != nil {
			cut()
		}
		_ = conn.SetReadDeadline(time.Unix(1, 0)) // a stream that has ended takes no more
		passed <- err
	}()
	failed := st.sendFrom(raw) // here, since what the client says first is there by now
	if err = <-passed; err == nil {
		err = failed
	}
	return err
}

// sendFrom sends what can be read from a connection until its end, and then the end. It reads only what the guest has room
// for, and holds no memory while there is nothing to read. A connection that breaks off cuts the one to the guest.
func (st *Stream) sendFrom(c syscall.RawConn) error {
	for {
		room, err := st.roomFor(c)
		if err != nil {
			return err
		}
		var chunk *[MaxData]byte
		var n int
		var failed error
		err = c.Read(func(fd uintptr) bool {
			chunk = chunks.Get().(*[MaxData]byte)
			for {
				n, failed = syscall.Read(int(fd), chunk[:room])
				if failed != syscall.EINTR {
					break
				}
			}
			if failed == syscall.EAGAIN {
				chunks.Put(chunk)
				return false
			}
			return true
		})
		if err == nil {
			err = failed
		}
		if err != nil {
			st.giveUp(err)
			return err
		}
		st.mu.Lock()
		st.credit += room - max(n, 0)
		st.mu.Unlock()
		if n <= 0 {
			chunks.Put(chunk)
			return st.CloseWrite()
		}
		err = st.s.write(context.Background(), TypeData, st.id, chunk[:n])
		chunks.Put(chunk)
		if err != nil {
			return err
		}
	}
}

// roomFor waits until the guest has room. The connection is not read meanwhile, so it looks now and then whether it was reset.
func (st *Stream) roomFor(c syscall.RawConn) (int, error) {
	for {
		st.mu.Lock()
		full := st.credit == 0
		st.mu.Unlock()
		if !full {
			return st.takeSendCredit(context.Background(), MaxData)
		}
		ctx, cancel := context.WithTimeout(context.Background(), lookEvery)
		context.AfterFunc(ctx, func() {
			st.mu.Lock()
			defer st.mu.Unlock()
			st.cond.Broadcast()
		})
		room, err := st.takeSendCredit(ctx, MaxData)
		late := errors.Is(err, context.DeadlineExceeded)
		cancel()
		if !late {
			return room, err
		}
		if WasReset(c) {
			st.giveUp(syscall.ECONNRESET)
		}
	}
}

// WasReset says whether the connection is broken. That both its halves were closed in order does not count.
func WasReset(c syscall.RawConn) (reset bool) {
	_ = c.Control(func(fd uintptr) {
		p := []unix.PollFd{{Fd: int32(fd)}}
		n, _ := unix.Poll(p, 0)
		reset = n > 0 && p[0].Revents&unix.POLLERR != 0
	})
	return reset
}

// passTo writes what the guest sends until the guest's end of it, which is nil; any other error is why it broke off. A
// writer that fails cuts the connection to the guest.
func (st *Stream) passTo(w io.Writer) error {
	for {
		chunk, err := st.next()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		n, err := w.Write(chunk)
		recycle(chunk)
		if err != nil {
			st.giveUp(err)
			return err
		}
		st.passed(n)
	}
}

// next waits for what the guest sends. The caller recycles it.
func (st *Stream) next() ([]byte, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	for {
		switch {
		case st.reset:
			return nil, st.err
		case len(st.queue) > 0:
			chunk := st.queue[0]
			st.queue[0] = nil
			if st.queue = st.queue[1:]; len(st.queue) == 0 {
				st.queue = nil
			}
			return chunk, nil
		case st.isEnded && st.err != nil:
			return nil, st.err
		case st.isEnded || st.guestEOF:
			return nil, io.EOF
		}
		st.cond.Wait()
	}
}

// passed credits n bytes that were passed on, a quarter of the window at a time, and more when the window may grow.
func (st *Stream) passed(n int) {
	st.mu.Lock()
	st.read += n
	if st.read < st.window/4 || st.isEnded || st.guestEOF {
		st.mu.Unlock()
		return
	}
	grant := st.read
	st.read = 0
	if keepsUp := len(st.queue) == 0; keepsUp && st.window < Window {
		if st.s.grown.Add(int64(st.window)) <= maxGrown {
			grant += st.window
			st.window *= 2
		} else {
			st.s.grown.Add(-int64(st.window))
		}
	}
	small := st.window < Window
	st.mu.Unlock()
	st.s.acknowledge(st, grant)
	if small {
		st.s.flushAcks()
	}
}

// takeEOF is the guest's end of a connection. Of other operations it says nothing that Done will not.
func (st *Stream) takeEOF() {
	st.mu.Lock()
	defer st.mu.Unlock()
	if st.dial {
		st.guestEOF = true
		st.cond.Broadcast()
	}
}

// shrink gives back what the window of an ended stream has grown by.
func (st *Stream) shrink() {
	st.mu.Lock()
	defer st.mu.Unlock()
	st.s.grown.Add(DialWindow - int64(st.window))
	st.window = DialWindow
}

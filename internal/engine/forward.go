package engine

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	"github.com/useshards/shard"
)

// forward listens on one host port while its sandbox runs, and passes each connection on to the sandbox. Nothing that
// happens to a connection ends the forward.
type forward struct {
	sb     *sandbox
	ctx    context.Context // ends with the forward
	cancel context.CancelFunc
	wg     sync.WaitGroup // what it runs

	mu       sync.Mutex // never held over more than a bind
	want     shard.PortForward
	listener *net.TCPListener // nil while the port is taken
	err      error            // why
	conns    map[*connection]struct{}
	closed   bool
}

// connection is one of a forward.
type connection struct {
	tcp    *net.TCPConn
	ctx    context.Context // ends when the connection is cut
	cancel context.CancelFunc
	free   func() // gives its slots back
}

// forward begins to serve l; without one it tries again until it has one.
func (sb *sandbox) forward(want shard.PortForward, l *net.TCPListener, err error) *forward {
	f := &forward{sb: sb, want: want, listener: l, err: err, conns: make(map[*connection]struct{})}
	f.ctx, f.cancel = context.WithCancel(context.Background())
	f.wg.Go(f.run)
	return f
}

func (f *forward) status() (listening bool, why string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.err != nil {
		why = reason(f.err)
	}
	return f.listener != nil, why
}

// change makes the forward another one of the same host port. Connections that the new one would not have are cut: all of
// them when they lead elsewhere, those from outside when it is public no longer. On failure it is as it was.
func (f *forward) change(want shard.PortForward) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	old := f.want
	if want.Public != old.Public {
		if f.listener != nil {
			_ = f.listener.Close() // both at once cannot be bound
		}
		l, err := bind(want)
		if err != nil {
			if f.listener != nil {
				f.listener, f.err = bind(old)
			}
			return err
		}
		f.listener, f.err = l, nil
	}
	f.want = want
	for c := range f.conns {
		local, _ := c.tcp.LocalAddr().(*net.TCPAddr)
		if want.GuestPort != old.GuestPort || !want.Public && (local == nil || !local.IP.IsLoopback()) {
			c.cancel()
		}
	}
	return nil
}

// close ends the listening and every connection, and waits for what it runs.
func (f *forward) close() {
	f.mu.Lock()
	f.closed = true
	if f.listener != nil {
		_ = f.listener.Close()
	}
	f.mu.Unlock()
	f.cancel()
	f.wg.Wait()
}

// run accepts connections, and listens again whenever that is due.
func (f *forward) run() {
	for {
		f.mu.Lock()
		l := f.listener
		f.mu.Unlock()
		if l != nil {
			if c, guestPort := f.accept(l); c != nil {
				f.wg.Go(f.run) // takes the next: this one is served at once, without waiting for a goroutine to wake
				f.serve(c, guestPort)
				return
			}
		}
		f.mu.Lock()
		taken, closed := f.listener == nil, f.closed
		f.mu.Unlock()
		if closed {
			return
		}
		if !taken {
			continue // it was changed
		}
		select {
		case <-f.ctx.Done():
			return
		case <-time.After(listenRetry):
		}
		f.mu.Lock()
		if f.listener == nil && !f.closed {
			if f.listener, f.err = bind(f.want); f.listener != nil {
				f.sb.e.Log.Info("listens on a port that was taken", "sandbox", f.sb.id, "port", f.want.HostPort)
			}
		}
		f.mu.Unlock()
	}
}

// accept takes one connection; nil when l is closed. One for which there is no slot waits, and those behind it in the
// kernel's queue.
func (f *forward) accept(l *net.TCPListener) (c *connection, guestPort int) {
	all, own := f.sb.e.ports.all(), f.sb.forwards.connections()
	wait := time.Duration(0)
	for {
		tcp, err := l.AcceptTCP()
		if errors.Is(err, net.ErrClosed) {
			return nil, 0
		}
		if err != nil { // out of descriptors, or a connection that went away before it was taken
			wait = min(max(2*wait, 5*time.Millisecond), time.Second)
			f.sb.e.Log.Warn("accept a connection", "sandbox", f.sb.id, "err", err)
			select {
			case <-f.ctx.Done():
				return nil, 0
			case <-time.After(wait):
			}
			continue
		}
		wait = 0
		if !take(f.ctx, own) {
			abort(tcp)
			return nil, 0
		}
		if !take(f.ctx, all) {
			<-own
			abort(tcp)
			return nil, 0
		}
		free := func() { <-all; <-own }
		if c, guestPort = f.admit(l, tcp, free); c != nil {
			return c, guestPort
		}
		free()
		abort(tcp)
	}
}

// take waits for a slot until ctx ends.
func take(ctx context.Context, slots chan struct{}) bool {
	select {
	case slots <- struct{}{}:
		return true
	default:
	}
	select {
	case slots <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

// admit enters a connection, unless it came by a listener that was replaced.
func (f *forward) admit(l *net.TCPListener, tcp *net.TCPConn, free func()) (c *connection, guestPort int) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed || f.listener != l {
		return nil, 0
	}
	c = &connection{tcp: tcp, free: free}
	c.ctx, c.cancel = context.WithCancel(f.ctx)
	f.conns[c] = struct{}{}
	return c, f.want.GuestPort
}

// serve carries one connection. Where it breaks off on one side, the other sees a reset: half a transfer must not look whole.
func (f *forward) serve(c *connection, guestPort int) {
	defer func() {
		f.mu.Lock()
		delete(f.conns, c)
		f.mu.Unlock()
		c.cancel()
		c.free()
	}()
	if err := f.relay(c, guestPort); err != nil {
		abort(c.tcp)
		f.sb.e.Log.Debug("a forwarded connection broke off", "sandbox", f.sb.id, "guest_port", guestPort, "err", err)
		return
	}
	_ = c.tcp.Close()
}

// abort closes a connection with a reset.
func abort(tcp *net.TCPConn) {
	_ = tcp.SetLinger(0)
	_ = tcp.Close()
}

// relay dials the sandbox and passes bytes both ways until both sides have ended.
func (f *forward) relay(c *connection, guestPort int) error {
	ctx, cancel := context.WithTimeout(c.ctx, dialTime)
	defer cancel()
	l, err := f.sb.dial(ctx, guestPort)
	if err != nil {
		return err
	}
	defer l.close()
	return l.relay(c.ctx, c.tcp)
}

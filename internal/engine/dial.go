package engine

import (
	"context"
	"net"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// Dialled is a connection to a port of a sandbox that belongs to no forward: a caller asked for it. It counts among the
// sandbox's connections and ends with them.
type Dialled struct {
	stream *guest.Stream
	ctx    context.Context // ends when the sandbox's ports close
	free   func()
}

// Dial connects to a TCP port of a sandbox's 127.0.0.1. ctx bounds the dial only. Who may is the caller's business.
func (e *Engine) Dial(ctx context.Context, ref string, guestPort int) (*Dialled, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	open := sb.forwards.context()
	if open == nil {
		if err := sb.allows(shard.VerbExec); err != nil {
			return nil, err
		}
		return nil, shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just starting or ending", sb.ref())
	}
	all, own := e.ports.all(), sb.forwards.connections()
	if !take(ctx, own) {
		return nil, tooMany(sb)
	}
	if !take(ctx, all) {
		<-own
		return nil, tooMany(sb)
	}
	d := &Dialled{ctx: open, free: func() { <-all; <-own }}
	session, err := sb.session(ctx)
	if err == nil {
		d.stream, err = session.Dial(ctx, guestPort)
	}
	switch {
	case err == nil:
		return d, nil
	case shard.CodeOf(err) == guest.CodeConnectionRefused:
		err = shard.Wrap(shard.CodeNoProcess, err, "nothing listens on port %d of sandbox %q", guestPort, sb.ref())
	case ctx.Err() != nil:
		err = shard.Wrap(shard.CodeTimeout, err, "port %d of sandbox %q does not take a connection", guestPort, sb.ref())
	}
	d.free()
	return nil, err
}

func tooMany(sb *sandbox) error {
	return shard.Errorf(shard.CodeExecLimit, "sandbox %q has as many connections as it may have, or the daemon has: try again later", sb.ref())
}

// Close ends the connection. It must be called, once.
func (d *Dialled) Close() {
	_ = d.stream.Close()
	d.free()
}

// Duplex is a socket whose halves end one by one.
type Duplex interface {
	net.Conn
	syscall.Conn
	CloseWrite() error
}

// Pass carries bytes both ways until both sides have ended, each at its own time, or until the sandbox's ports close.
func (d *Dialled) Pass(conn Duplex) error {
	raw, err := conn.SyscallConn()
	if err != nil {
		return err
	}
	cut := func() {
		_ = d.stream.Close()
		_ = conn.SetDeadline(time.Unix(1, 0))
	}
	defer context.AfterFunc(d.ctx, cut)()
	sent := make(chan error, 1)
	go func() { sent <- d.stream.SendFrom(raw) }()
	if err = d.stream.PassTo(conn); err == nil {
		_ = conn.CloseWrite()
		err = d.stream.Wait()
	}
	if err != nil {
		cut()
	}
	_ = conn.SetReadDeadline(time.Unix(1, 0)) // a stream that has ended takes no more
	if failed := <-sent; err == nil {
		err = failed
	}
	return err
}

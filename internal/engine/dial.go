package engine

import (
	"context"
	"errors"
	"net"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// link is a connection to a port of a sandbox's 127.0.0.1.
type link struct {
	ports *portTable
	tcp   *net.TCPConn  // where the guest uses a network stack of this kernel
	agent *guest.Stream // elsewhere
}

// dial begins a connection to a TCP port of the sandbox's 127.0.0.1: connected waits for it. ctx bounds the dial only. A direct
// connection takes a slot of all connections beside the caller's, for its descriptor.
func (sb *sandbox) dial(ctx context.Context, port int) (*link, error) {
	l := &link{ports: &sb.e.ports}
	p, err := sb.e.providerNamed(sb.record().Sandbox.Provider)
	if err != nil {
		return nil, err
	}
	if n, ok := p.(provider.Networked); ok && n.SharesLoopback() {
		if !take(ctx, l.ports.all()) {
			return nil, ctx.Err()
		}
		if l.tcp, err = sb.e.Net.DialLoopback(ctx, sb.id, port); err != nil {
			<-l.ports.all()
			return nil, err
		}
		return l, nil
	}
	session, err := sb.session(ctx)
	if err != nil {
		return nil, err
	}
	if l.agent, err = session.Dial(ctx, port); err != nil {
		return nil, err
	}
	return l, nil
}

// connected waits for the end of the dial.
func (l *link) connected() error {
	if l.tcp != nil {
		return nil
	}
	return l.agent.Connected()
}

func (l *link) close() {
	if l.tcp == nil {
		_ = l.agent.Close()
		return
	}
	_ = l.tcp.Close()
	<-l.ports.all()
}

// relay passes bytes both ways until both sides have ended, each at its own time, or until ctx ends. Whatever breaks off shows
// to the guest as a reset: half a transfer must not look whole.
func (l *link) relay(ctx context.Context, conn guest.Duplex) error {
	if l.tcp == nil {
		return l.agent.Relay(ctx, conn)
	}
	ctx, cut := context.WithCancel(ctx)
	defer cut()
	defer context.AfterFunc(ctx, func() {
		_ = l.tcp.SetDeadline(time.Unix(1, 0))
		_ = conn.SetDeadline(time.Unix(1, 0))
	})()
	pass := func(to, from guest.Duplex) error {
		err := l.ports.pass(ctx, to, from)
		if err != nil {
			cut()
		}
		return err
	}
	sent := make(chan error, 1)
	go func() { sent <- pass(l.tcp, conn) }()
	err := pass(conn, l.tcp)
	if failed := <-sent; err == nil {
		err = failed
	}
	if err != nil {
		_ = l.tcp.SetLinger(0)
	}
	return err
}

// Dialled is a connection to a port of a sandbox that belongs to no forward: a caller asked for it. It counts among the
// sandbox's connections and ends with them.
type Dialled struct {
	link *link
	ctx  context.Context // ends when the sandbox's ports close
	free func()
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
	d.link, err = sb.dial(ctx, guestPort)
	if err == nil {
		if err = d.link.connected(); err == nil {
			return d, nil
		}
		d.link.close()
	}
	switch {
	case shard.CodeOf(err) == guest.CodeConnectionRefused, errors.Is(err, syscall.ECONNREFUSED):
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
	d.link.close()
	d.free()
}

// Pass carries bytes both ways until both sides have ended, each at its own time, or until the sandbox's ports close.
func (d *Dialled) Pass(conn guest.Duplex) error { return d.link.relay(d.ctx, conn) }

package egress

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

// Alerts of TLS (RFC 8446, section 6) by which a client hears why it is refused before anything is encrypted.
const (
	alertAccessDenied     = 49
	alertInternalError    = 80
	alertUnrecognizedName = 112
)

// recordHandshake is the first byte of a TLS handshake.
const recordHandshake = 22

// sniffed takes a connection to port 443: apart where something inside must be seen, else through untouched.
func (p *Proxy) sniffed(g *guestConn) {
	_ = g.SetDeadline(time.Now().Add(headTime))
	name, seen, err := sniff(g)
	if len(seen) == 0 || errors.Is(err, errHeld) {
		_ = g.Close() // a look whether somebody is here, or more than there is room for
		return
	}
	g.seen = seen
	_ = g.SetDeadline(time.Time{})
	sub, ok := p.o.Subject(g.client.sandbox)
	if !ok {
		_ = g.Close()
		return
	}
	if err != nil {
		reason := "the connection does not start with a TLS handshake"
		if seen[0] == recordHandshake {
			reason = "the TLS handshake cannot be read, or names its host (SNI) in a form that TLS forbids, such as with a final dot"
		}
		p.drop(g, "", alertUnrecognizedName, &refusal{rule: shard.EgressRuleDefault, addr: g.dest, reason: reason})
		return
	}
	host, err := policy.Host(name)
	if err != nil {
		p.drop(g, "", alertUnrecognizedName, &refusal{rule: shard.EgressRuleDefault, addr: g.dest, reason: "the TLS connection names no host (SNI)"})
		return
	}
	if sub.inspects(host) {
		p.toTLS.give(p.ctx, g)
		return
	}
	t := g.client.trunkUnder(p, sub.Policy)
	if t == nil {
		_ = g.Close()
		return
	}
	way, refused := p.way(p.ctx, g, t, host, g.dest)
	switch {
	case refused != nil && len(sub.Secrets) > 0:
		p.toTLS.give(p.ctx, g) // judged again there, and answered in words
	case refused != nil && refused.status == 403:
		p.drop(g, host, alertAccessDenied, refused)
	case refused != nil:
		p.drop(g, host, alertUnrecognizedName, refused)
	default:
		p.through(g, host, way)
	}
}

// drop refuses a connection by an alert.
func (p *Proxy) drop(g *guestConn, host string, alert byte, r *refusal) {
	p.note(g, host, *r)
	_ = g.SetDeadline(time.Now().Add(time.Second))
	_, _ = g.Write([]byte{21, 3, 3, 0, 2, 2, alert})
	_ = g.Close()
}

// through connects to the host and copies bytes both ways, of which the proxy can read none.
func (p *Proxy) through(g *guestConn, host string, way route) {
	if err := p.record(g, host, way, ""); err != nil {
		p.o.Log.Error("a decision of the proxy could not be recorded", "sandbox", g.client.sandbox, "err", err)
		p.drop(g, host, alertInternalError, &refusal{silent: true})
		return
	}
	ctx, cancel := context.WithTimeout(p.ctx, dialTime)
	conn, err := p.connect(ctx, way.addrs, g.port)
	cancel()
	if err != nil {
		r := failure(err)
		p.drop(g, host, alertInternalError, &r)
		return
	}
	_ = conn.SetWriteDeadline(time.Now().Add(dialTime))
	_, err = conn.Write(g.seen)
	_ = conn.SetWriteDeadline(time.Time{})
	g.seen = nil
	g.heading.end(g.client, false)
	if err != nil {
		_ = conn.Close()
		p.drop(g, host, alertInternalError, &refusal{silent: true})
		return
	}
	exchangeBytes(g, conn)
}

// exchangeBytes copies both ways until both sides have ended, or one has failed, and closes both. It passes an end on, so that
// a side that has said all can still listen.
func exchangeBytes(g *guestConn, host net.Conn) {
	var group sync.WaitGroup
	// The connections themselves, so that the kernel moves the bytes.
	one := func(to, from net.Conn) {
		_, err := io.Copy(to, from)
		if half, ok := to.(interface{ CloseWrite() error }); err == nil && ok && half.CloseWrite() == nil {
			return
		}
		_ = g.Close()
		_ = host.Close()
	}
	group.Go(func() { one(host, g.Conn) })
	one(g.Conn, host)
	group.Wait()
	_ = g.Close()
	_ = host.Close()
}

// certificate is what the proxy shows of itself as the host that a client asked for.
func (p *Proxy) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	host, err := policy.Host(hello.ServerName)
	if err != nil {
		return nil, err
	}
	return p.o.CA.Leaf(host)
}

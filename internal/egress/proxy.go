package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

// The ports on each gateway's address on which the proxy listens.
const (
	PlainPort = netns.ProxyPlainPort
	TLSPort   = netns.ProxyTLSPort
)

const (
	// maxConns bounds the connections of one sandbox to the proxy, and those of the proxy for it, each.
	maxConns = 1024
	// maxHeld bounds what the proxy holds in memory of one sandbox's requests and answers, in bytes.
	maxHeld = 32 << 20
	// headTime bounds the wait for a ClientHello, a TLS handshake, the head of a request; dialTime a way to a host.
	headTime = 10 * time.Second
	dialTime = 10 * time.Second
	// idleTime is how long a connection is kept between requests.
	idleTime = 60 * time.Second
	// stallTime is how long data may wait for a side that takes none. It is long: a sandbox may be paused, and a program
	// may think before it reads on.
	stallTime = 15 * time.Minute
	// endTime bounds the wait for requests that were under way when the proxy ended.
	endTime = 5 * time.Second
	// maxHead bounds the head of a request, in bytes; maxAnswerHead that of an answer.
	maxHead, maxAnswerHead = 64 << 10, 64 << 10
)

// Recorder is the decision log. A request that it does not take is refused.
type Recorder interface {
	Record(sandbox string, d shard.EgressDecision) error
}

// Subject is what the proxy knows of a sandbox.
type Subject struct {
	// Policy is what its requests are judged by: the same pointer as long as it is the same policy.
	Policy *policy.Compiled
	// Secrets are those that it has now. TLS to where one of their values may go is taken apart, for which the sandbox must
	// trust the CA; with any, a refusal is answered inside TLS too, so that programs can read it.
	Secrets []secret.Secret
}

// inspects says whether TLS to a host is taken apart.
func (s *Subject) inspects(host string) bool {
	return slices.ContainsFunc(s.Secrets, func(one secret.Secret) bool { return one.For(host) })
}

// ProxyOptions are what a Proxy works with. All but Misused, Roots, Dial and Log are needed.
type ProxyOptions struct {
	// Subject finds a sandbox by its id. It is asked for every request and must be fast.
	Subject func(sandbox string) (Subject, bool)
	// Resolve looks a host up for a sandbox. host is as policy.Host returns it.
	Resolve  func(ctx context.Context, sandbox, host string) ([]netip.Addr, error)
	Recorder Recorder
	// Misused hears that a sandbox sent the placeholder of a secret where its value must not go; nil: nobody does.
	Misused func(sandbox, name, host, reason string)
	CA      *CA
	// Roots verify hosts where TLS is taken apart; nil is this host's trust store.
	Roots *x509.CertPool
	// Dial connects to an address that may be connected to; nil is a socket of this host, which refuses addresses that are
	// this host's own, private, or of no single host.
	Dial func(ctx context.Context, addr netip.AddrPort) (net.Conn, error)
	Log  *slog.Logger
}

// Proxy carries the web traffic of sandboxes and judges each request. Create it with NewProxy.
type Proxy struct {
	o          ProxyOptions
	reachable  func(netip.Addr) error // what Dial would refuse
	plain, tls *http.Server
	toPlain    *handoff
	toTLS      *handoff
	maxConns   int          // of one sandbox
	maxOpen    int          // of all
	open       atomic.Int64 // of sandboxes and, for their requests, to hosts
	watches    secret.Watches
	ctx        context.Context // ends with the proxy
	cancel     context.CancelFunc
	group      sync.WaitGroup

	mu      sync.Mutex // nothing is called while it is held
	clients map[string]*client
}

// NewProxy starts a proxy that serves nobody yet. Close ends it.
func NewProxy(o ProxyOptions) *Proxy {
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	check := func(netip.Addr) error { return nil }
	if o.Dial == nil {
		o.Dial, check = dialHost, reachable
	}
	p := &Proxy{o: o, reachable: check, maxConns: maxConns, maxOpen: connections(), clients: map[string]*client{}, toPlain: newHandoff(), toTLS: newHandoff()}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	p.plain, p.tls = p.server(80), p.server(443)
	p.plain.Protocols = new(http.Protocols)
	p.plain.Protocols.SetHTTP1(true)
	p.plain.Protocols.SetUnencryptedHTTP2(true) // gRPC without TLS starts with HTTP/2 at once
	p.tls.TLSConfig = &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: p.certificate, NextProtos: []string{"h2", "http/1.1"}}
	p.group.Go(func() { _ = p.plain.Serve(p.toPlain) })
	p.group.Go(func() { _ = p.tls.ServeTLS(p.toTLS, "", "") })
	return p
}

// Link is one family of addresses of a sandbox: its own, and the host's end.
type Link struct{ Addr, Gateway netip.Addr }

// Add listens for a sandbox: on its gateways' PlainPort for what it sends to port 80 of anywhere, on TLSPort for port 443.
// Connections from another address than the sandbox's are closed. A sandbox that was added before is forgotten first.
func (p *Proxy) Add(sandbox string, links ...Link) error {
	p.Forget(sandbox)
	c := &client{proxy: p, sandbox: sandbox, conns: map[*guestConn]struct{}{}, hosts: map[*hostConn]struct{}{}}
	for _, link := range links {
		c.addrs = append(c.addrs, link.Addr)
		for _, port := range []uint16{PlainPort, TLSPort} {
			l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(link.Gateway, port)))
			if err != nil {
				c.end()
				return notListening("the web traffic", err)
			}
			c.listeners = append(c.listeners, l)
		}
	}
	p.mu.Lock()
	if p.clients == nil || p.clients[sandbox] != nil {
		p.mu.Unlock()
		c.end()
		return errors.New("the proxy has ended, or the sandbox was added twice at once")
	}
	p.clients[sandbox] = c
	for pair := range slices.Chunk(c.listeners, 2) {
		p.group.Go(func() { p.accept(c, pair[0], 80, func(g *guestConn) { p.toPlain.give(p.ctx, g) }) })
		p.group.Go(func() { p.accept(c, pair[1], 443, p.sniffed) })
	}
	p.mu.Unlock()
	return nil
}

// Forget ends a sandbox's connections and no longer listens for it. Idempotent.
func (p *Proxy) Forget(sandbox string) {
	p.mu.Lock()
	c := p.clients[sandbox]
	delete(p.clients, sandbox)
	p.mu.Unlock()
	if c != nil {
		c.end()
	}
}

// Close ends all connections and waits until nothing runs any more.
func (p *Proxy) Close() error {
	p.mu.Lock()
	all := p.clients
	p.clients = nil
	p.mu.Unlock()
	p.cancel()
	for _, c := range all {
		c.end()
	}
	// Their connections are gone: what still runs for them ends by itself.
	ctx, cancel := context.WithTimeout(context.Background(), endTime)
	defer cancel()
	err := errors.Join(p.plain.Shutdown(ctx), p.tls.Shutdown(ctx))
	p.group.Wait()
	return err
}

// accept hands every connection of the sandbox to handle, in a goroutine of its own.
func (p *Proxy) accept(c *client, l net.Listener, port uint16, handle func(*guestConn)) {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // out of descriptors, or the peer is gone
			p.o.Log.Warn("the proxy could not accept a connection", "sandbox", c.sandbox, "err", err)
			select {
			case <-p.ctx.Done():
			case <-time.After(20 * time.Millisecond):
			}
			continue
		}
		if g := p.admit(c, conn, port); g != nil {
			p.group.Go(func() { handle(g) })
		}
	}
}

// admit counts a connection. nil: it was closed.
func (p *Proxy) admit(c *client, conn net.Conn, port uint16) *guestConn {
	if !slices.Contains(c.addrs, addrOf(conn.RemoteAddr())) {
		_ = conn.Close() // a program of this host
		return nil
	}
	g := &guestConn{Conn: conn, client: c, port: port, dest: originalDestination(conn)}
	g.heading.begin()
	added, ended := c.add(g)
	if added {
		tune(conn)
		return g
	}
	if !ended {
		p.limited(g, "the sandbox has too many connections to the proxy")
	}
	_ = conn.Close()
	return nil
}

// limited writes down that a connection ends because its sandbox has too much under way, once a second.
func (p *Proxy) limited(g *guestConn, reason string) {
	if g.client.mayReport() {
		p.note(g, "", refusal{rule: shard.EgressRuleLimit, reason: reason})
	}
}

// client is what the proxy holds of one sandbox.
type client struct {
	proxy     *Proxy
	sandbox   string
	addrs     []netip.Addr
	listeners []net.Listener

	mu       sync.Mutex // a leaf
	conns    map[*guestConn]struct{}
	ended    bool
	reported time.Time // when limited was last recorded
	held     int       // bytes, of maxHeld
	stuck    int       // bytes, of maxStuck
	upstream int       // connections for requests
	hosts    map[*hostConn]struct{}
	trunk    *trunk
}

// most is how many connections each way a sandbox may have now: never more than are left for all others, so that some sandboxes
// together leave none without any.
func (p *Proxy) most() int { return min(p.maxConns, p.maxOpen-int(p.open.Load())) }

func (c *client) add(g *guestConn) (added, ended bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || len(c.conns) >= c.proxy.most() {
		return false, c.ended
	}
	c.conns[g] = struct{}{}
	c.proxy.open.Add(1)
	return true, false
}

func (c *client) mayReport() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if time.Since(c.reported) < time.Second {
		return false
	}
	c.reported = time.Now()
	return true
}

func (c *client) remove(g *guestConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.conns, g)
	c.proxy.open.Add(-1)
}

func (c *client) end() {
	for _, l := range c.listeners {
		_ = l.Close()
	}
	c.mu.Lock()
	c.ended = true
	conns, t := c.conns, c.trunk
	c.conns, c.trunk = map[*guestConn]struct{}{}, nil
	hosts := slices.Collect(maps.Keys(c.hosts))
	c.mu.Unlock()
	for g := range conns {
		_ = g.Close()
	}
	for _, h := range hosts { // one that takes nothing would keep its requests
		_ = h.Close()
	}
	if t != nil {
		t.close()
	}
}

func (c *client) gone() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ended
}

// hold takes n bytes of the sandbox's share; false where they are not left.
func (c *client) hold(n int) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held+n > maxHeld {
		return false
	}
	c.held += n
	return true
}

func (c *client) release(n int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held -= n
}

// stick counts bytes that wait for the sandbox to take answers, and returns how many there are.
func (c *client) stick(n int) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.stuck += n
	return c.stuck
}

// guestConn is a connection of a sandbox.
type guestConn struct {
	net.Conn
	client *client
	port   uint16 // 80 or 443
	// dest is where the sandbox sent it: its claim, to be judged as one.
	dest netip.Addr
	// seen is what was read of it already.
	seen    []byte
	once    sync.Once
	heading heading
}

func (g *guestConn) Read(b []byte) (int, error) {
	if len(g.seen) > 0 {
		n := copy(b, g.seen)
		g.seen = g.seen[n:]
		return n, nil
	}
	n, err := g.Conn.Read(b)
	if !g.heading.read(g.client, n) {
		g.client.proxy.limited(g, errHeld.Error())
		// Of this kind net/http closes the connection without a word: there is no request yet that one could be about.
		return 0, &net.OpError{Op: "read", Net: "tcp", Err: errHeld}
	}
	return n, err
}

func (g *guestConn) Write(b []byte) (int, error) {
	g.heading.write(g.client, true)
	defer g.heading.write(g.client, false)
	return g.Conn.Write(b)
}

// CloseWrite lets net/http end a connection without a reset while the other side still sends, so that it can read why.
func (g *guestConn) CloseWrite() error {
	if half, ok := g.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (g *guestConn) Close() error {
	err := net.ErrClosed
	g.once.Do(func() {
		g.client.remove(g)
		g.heading.close(g.client)
		err = g.Conn.Close()
	})
	return err
}

// handoff is a listener whose connections were accepted elsewhere.
type handoff struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHandoff() *handoff {
	return &handoff{conns: make(chan net.Conn), done: make(chan struct{})}
}

func (h *handoff) give(ctx context.Context, c net.Conn) {
	select {
	case h.conns <- c:
	case <-h.done:
		_ = c.Close()
	case <-ctx.Done():
		_ = c.Close()
	}
}

func (h *handoff) Accept() (net.Conn, error) {
	select {
	case c := <-h.conns:
		return c, nil
	case <-h.done:
		return nil, net.ErrClosed
	}
}

func (h *handoff) Close() error   { h.once.Do(func() { close(h.done) }); return nil }
func (h *handoff) Addr() net.Addr { return &net.TCPAddr{} }

func addrOf(a net.Addr) netip.Addr {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

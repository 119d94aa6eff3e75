// Package gate is shard serve: the door to the daemon's socket from a network. It reads the head of a request, finds its
// route in shard.Routes, asks the token for the route's scope, and then passes bytes both ways without looking at them.
// It runs without privileges, in a process of its own. It knows heads, tokens and limits; it must not know what a
// request does: the engine, records and bodies are the daemon's.
package gate

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

const (
	// headTime bounds a connection until its head is read and judged, the TLS handshake included.
	headTime = 10 * time.Second
	// drainTime bounds the wait for requests under way when the gate closes.
	drainTime = 10 * time.Second
	// maxPending bounds the connections of one source address that have not shown a token yet.
	maxPending = 32
	// minTotal is the least bound of connections in all, and spareFiles are descriptors that no connection may take.
	minTotal, spareFiles = 32, 64
	// patrol is how often open connections are checked against the ledger.
	patrol = time.Second
)

// Options say what to serve, to whom.
type Options struct {
	// Root is the daemon's data directory.
	Root string
	// Listen is HOST:PORT.
	Listen string
	// SigningKey is the file of the key that tokens are signed with, their ledger beside it; "" is the root's own.
	SigningKey string
	// CertFile and KeyFile are PEM files, read again when they change.
	CertFile, KeyFile string
	// SelfSigned serves TLS under a CA of our own, made below the root.
	SelfSigned bool
	// Insecure allows an address that others can reach, without TLS.
	Insecure bool
	// AllowHosts are more names in Host headers to answer to, and AllowOrigins the web origins whose pages may call.
	AllowHosts, AllowOrigins []string
	// Preview is the domain of preview addresses, or, behind a proxy, the origin that browsers see; "" for none.
	Preview string
	Log     *slog.Logger
}

// Gate is a listening shard serve.
type Gate struct {
	o        Options
	socket   string
	book     *token.Book
	listener *net.TCPListener
	tls      *tls.Config
	certs    certificates
	// total bounds the connections in all, patience is headTime but in tests.
	total    int
	patience time.Duration
	preview  *preview // nil without preview addresses

	wg sync.WaitGroup // the connections

	// mu guards what follows; nothing is done under it that can wait.
	mu      sync.Mutex
	closing bool
	conns   map[*conn]struct{}
	pending map[netip.Prefix]int
	turned  int // connections closed for a limit since the last patrol
}

// Run serves until ctx ends. SIGHUP makes it read its certificate again.
func Run(ctx context.Context, o Options) error {
	g, err := Listen(o)
	if err != nil {
		return err
	}
	hangups, done := make(chan os.Signal, 1), make(chan struct{})
	signal.Notify(hangups, syscall.SIGHUP)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-hangups:
				g.Reload()
			case <-done:
				return
			}
		}
	})
	err = g.Serve(ctx)
	signal.Stop(hangups)
	close(done)
	wg.Wait()
	return err
}

// Listen checks the options, reads keys and certificates, and binds the address.
func Listen(o Options) (_ *Gate, err error) {
	keyFile := o.SigningKey
	if keyFile == "" {
		keyFile = token.DefaultKeyFile(o.Root)
	}
	g := &Gate{o: o, socket: filepath.Join(o.Root, "shard.sock"), patience: headTime, conns: make(map[*conn]struct{}), pending: make(map[netip.Prefix]int)}
	if g.book, err = token.Open(keyFile, o.SigningKey == ""); err != nil {
		return nil, err
	}
	addr, err := net.ResolveTCPAddr("tcp", o.Listen)
	if err != nil {
		return nil, shard.Invalidf("cannot listen on %s: write an address of this host and a port, such as 127.0.0.1:7850", shard.Quote(o.Listen))
	}
	if g.certs, err = loadCertificates(o, addr); err != nil {
		return nil, err
	}
	if g.certs != nil {
		g.tls = &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) { return g.certs.current() }}
	}
	if g.tls == nil && !addr.IP.IsLoopback() {
		if !o.Insecure {
			return nil, shard.Invalidf("%s can be reached by others, and without TLS they can read and use every token: give --tls-cert and --tls-key, or --tls-self-signed, or --insecure where a network that you trust makes up for it", o.Listen)
		}
		o.Log.Warn("serving without TLS on an address that others can reach: tokens can be read on the way", "address", o.Listen)
	}
	network := "tcp"
	if addr.IP.To4() != nil {
		network = "tcp4" // 0.0.0.0 is not asking for IPv6
	}
	if g.listener, err = net.ListenTCP(network, addr); err != nil {
		return nil, fmt.Errorf("listen on %s: %w", o.Listen, err)
	}
	g.total = connectionLimit()
	if o.Preview != "" {
		if g.preview, err = newPreview(g, o.Preview); err != nil {
			g.listener.Close()
			return nil, err
		}
	}
	return g, nil
}

// connectionLimit is half of the descriptors that this process may have, each connection having two ends.
func connectionLimit() int {
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		return minTotal
	}
	return max(minTotal, (int(min(limit.Cur, 1<<30))-spareFiles)/2)
}

// Addr is the address that is served.
func (g *Gate) Addr() net.Addr { return g.listener.Addr() }

// Reload reads the certificate again.
func (g *Gate) Reload() {
	if g.certs == nil {
		return
	}
	if err := g.certs.reload(); err != nil {
		g.o.Log.Error("the certificate could not be read again; the old one stays", "err", err)
		return
	}
	g.o.Log.Info("certificate read again")
}

// Serve serves until ctx ends, then lets requests under way finish within drainTime. Streams end at once.
func (g *Gate) Serve(ctx context.Context) error {
	scheme := "http"
	if g.tls != nil {
		scheme = "https"
	}
	g.o.Log.Info("shard serve listens", "url", scheme+"://"+g.Addr().String(), "connections", g.total)
	patrolled := make(chan struct{})
	end := make(chan struct{})
	go func() { defer close(patrolled); g.patrol(end) }()
	var previews sync.WaitGroup
	if g.preview != nil {
		g.o.Log.Info("previews of ports are below", "url", g.preview.origin.String())
		previews.Go(g.preview.run)
		previews.Go(func() { g.preview.announce(end) })
	}
	stop := context.AfterFunc(ctx, func() { g.listener.Close() })
	err := g.accept()
	if !stop() {
		err = nil
	}
	g.listener.Close()
	g.drain()
	close(end)
	<-patrolled
	previews.Wait()
	return err
}

func (g *Gate) accept() error {
	for wait := time.Millisecond; ; {
		nc, err := g.listener.AcceptTCP()
		switch {
		case errors.Is(err, net.ErrClosed):
			return nil
		case err != nil:
			// Most likely out of descriptors; those of ended connections come back.
			g.o.Log.Error("accept a connection", "err", err)
			time.Sleep(wait)
			wait = min(2*wait, time.Second)
			continue
		}
		wait = time.Millisecond
		c := &conn{gate: g, Conn: nc, raw: nc, source: sourceOf(nc)}
		if !g.admit(c) {
			_ = nc.SetLinger(0) // closed at once, and nothing of it is kept in the kernel
			nc.Close()
			continue
		}
		g.wg.Go(func() {
			defer g.leave(c)
			c.serve()
		})
	}
}

// sourceOf is the client's address. One IPv6 host has a whole /64 to call from.
func sourceOf(nc *net.TCPConn) netip.Prefix {
	addr, _ := nc.RemoteAddr().(*net.TCPAddr)
	ip := addr.AddrPort().Addr().Unmap().WithZone("")
	bits := 64
	if ip.Is4() {
		bits = 32
	}
	prefix, _ := ip.Prefix(bits)
	return prefix
}

// admit counts a new connection, unless a limit is reached.
func (g *Gate) admit(c *conn) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closing || len(g.conns) >= g.total || g.pending[c.source] >= maxPending {
		g.turned++
		return false
	}
	g.conns[c] = struct{}{}
	g.pending[c.source]++
	c.isPending = true
	return true
}

// passed ends a connection's time as one of an unknown client. It says no when the gate is closing.
func (g *Gate) passed(c *conn, grant *token.Grant) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unpend(c)
	c.grant = grant
	return !g.closing
}

func (g *Gate) unpend(c *conn) {
	if !c.isPending {
		return
	}
	c.isPending = false
	if g.pending[c.source]--; g.pending[c.source] == 0 {
		delete(g.pending, c.source)
	}
}

func (g *Gate) leave(c *conn) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.unpend(c)
	delete(g.conns, c)
}

// patrol closes connections whose token was revoked or has expired, until end is closed.
func (g *Gate) patrol(end <-chan struct{}) {
	tick := time.NewTicker(patrol)
	defer tick.Stop()
	defer g.reportTurned()
	var problem string
	for {
		select {
		case <-end:
			return
		case <-tick.C:
		}
		view := g.book.View()
		if now := problemOf(view); now != problem {
			problem = now
			if now != "" {
				g.o.Log.Error("the ledger of tokens has a problem", "problem", now)
			}
		}
		var fallen []*conn
		g.mu.Lock()
		for c := range g.conns {
			if c.grant != nil && !view.Standing(c.grant, time.Now()) {
				fallen = append(fallen, c)
			}
		}
		g.mu.Unlock()
		for _, c := range fallen {
			if c.abort() {
				g.o.Log.Info("connection ended: its token is no longer good", "subject", c.grant.Name)
			}
		}
		g.reportTurned()
	}
}

// reportTurned logs how many connections a limit has ended: one line for all, or a flood would fill the log.
func (g *Gate) reportTurned() {
	g.mu.Lock()
	turned := g.turned
	g.turned = 0
	g.mu.Unlock()
	if turned > 0 {
		g.o.Log.Warn("connections were closed: too many", "count", turned, "most", g.total, "most_without_token", maxPending)
	}
}

func problemOf(v *token.View) string {
	switch {
	case errors.Is(v.Problem, os.ErrNotExist):
		return "it is not there: nobody has access until a token is minted"
	case v.Problem != nil:
		return v.Problem.Error()
	case v.Broken > 0:
		return fmt.Sprintf("%d of its lines are no records of tokens and give no access", v.Broken)
	}
	return ""
}

// drain ends streams and unknown clients at once, and the rest when they are done or drainTime is over.
func (g *Gate) drain() {
	g.mu.Lock()
	g.closing = true
	g.mu.Unlock()
	g.each(func(c *conn) bool { return c.isPending || c.stream.Load() })
	if g.preview != nil {
		ctx, cancel := context.WithTimeout(context.Background(), drainTime)
		defer cancel()
		var closed sync.WaitGroup
		closed.Go(func() { g.preview.close(ctx) })
		defer closed.Wait()
	}
	done := make(chan struct{})
	go func() { g.wg.Wait(); close(done) }()
	late := time.NewTimer(drainTime)
	defer late.Stop()
	select {
	case <-done:
		return
	case <-late.C:
	}
	g.each(func(*conn) bool { return true })
	<-done
}

// each aborts the connections that fit.
func (g *Gate) each(fit func(*conn) bool) {
	var found []*conn
	g.mu.Lock()
	for c := range g.conns {
		if fit(c) {
			found = append(found, c)
		}
	}
	g.mu.Unlock()
	for _, c := range found {
		c.abort()
	}
}

// conn is one client's connection, with one request.
type conn struct {
	net.Conn // what is spoken over: raw or TLS on it
	gate     *Gate
	raw      *net.TCPConn
	source   netip.Prefix
	// isPending and grant are guarded by gate.mu.
	isPending bool
	grant     *token.Grant
	daemon    atomic.Pointer[net.UnixConn]
	// cancel ends the request of a browser.
	cancel atomic.Pointer[context.CancelFunc]
	// stream says that the connection was upgraded, aborted that it was ended from outside.
	stream, aborted atomic.Bool
}

// abort closes both ends, whatever is going on, and says whether that is news.
func (c *conn) abort() bool {
	news := !c.aborted.Swap(true)
	c.raw.Close()
	if d := c.daemon.Load(); d != nil {
		d.Close()
	}
	if cancel := c.cancel.Load(); cancel != nil {
		(*cancel)()
	}
	return news
}

// hostAllowed is the guard against pages that reach us under a name of their own: see guard.
func (g *Gate) hostAllowed(c *conn, hostport string) bool {
	host := strings.ToLower(hostname(hostport))
	local, _ := c.raw.LocalAddr().(*net.TCPAddr)
	if ip, err := netip.ParseAddr(host); err == nil {
		if ip = ip.Unmap(); ip.IsLoopback() || ip == local.AddrPort().Addr().Unmap().WithZone("") {
			return true
		}
	}
	listen, _, _ := net.SplitHostPort(g.o.Listen)
	if host == "localhost" || host != "" && strings.EqualFold(host, listen) && !g.unspecified() {
		return true
	}
	for _, allowed := range g.o.AllowHosts {
		if strings.EqualFold(host, hostname(allowed)) {
			return true
		}
	}
	// A browser takes our certificate for no other name than its own.
	return g.certs != nil && host != "" && g.certs.covers(host)
}

// unspecified says whether all addresses of this host are listened on.
func (g *Gate) unspecified() bool { return g.listener.Addr().(*net.TCPAddr).IP.IsUnspecified() }

// hostname is a host without port and brackets.
func hostname(hostport string) string {
	if host, _, err := net.SplitHostPort(hostport); err == nil {
		return host
	}
	return strings.TrimSuffix(strings.TrimPrefix(hostport, "["), "]")
}

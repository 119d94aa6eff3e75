package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/netip"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

// What one request holds in memory, in bytes, each as the protocol bounds it: the buffers of copying, what an HTTP/2 client
// may send before it is passed on, and what an HTTP/2 host may send before the sandbox takes it.
const (
	copyBuffer   = 32 << 10
	streamWindow = 64 << 10
	answerWindow = 256 << 10
	// scratch is what HTTP/2 reads a body into that goes to a host which takes frames of that size, as most do; a shorter body takes
	// its length. trailersShare is about what trailers can take of a client that announces them.
	scratch       = 512 << 10
	trailersShare = 8 * maxHead
)

// maxTries bounds how often a request takes a connection. A host of HTTP/2 can say that it has not looked at a request, which
// net/http then sends again, at once and for ever.
const maxTries = 4

var (
	errManyConns = errors.New("the sandbox has too many connections through the proxy")
	errNoAnswer  = errors.New("the host's answer is none")
	errHeld      = errors.New("the sandbox has too much under way through the proxy")
	errUnsteady  = errors.New("the host ends its connections instead of answering")
)

// exchange is one request on its way, in its context.
type exchange struct {
	guest *guestConn
	trunk *trunk
	route route
	host  string // "" with an address
	named string // the host as decisions name it
	held  int
	// carried are the secrets whose values the request has.
	carried []secret.Secret
}

type (
	exchangeKey struct{}
	guestKey    struct{}
)

// hold takes n more bytes of the sandbox's share, until the exchange has ended.
func (x *exchange) hold(n int) error {
	if !x.guest.client.hold(n) {
		return errHeld
	}
	x.held += n
	return nil
}

func (p *Proxy) server(port uint16) *http.Server {
	forward := p.forwarder()
	return &http.Server{
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { p.request(w, r, port, forward) }),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			return context.WithValue(ctx, guestKey{}, c)
		},
		ReadHeaderTimeout:            headTime,
		DisableGeneralOptionsHandler: true, // OPTIONS * is the host's to answer
		// Neither bodies nor answers have a time: streams last as long as both sides want. A side that is gone or takes
		// nothing is found by the kernel (tune).
		IdleTimeout:    idleTime,
		MaxHeaderBytes: maxHead,
		ConnState: func(c net.Conn, state http.ConnState) {
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			if state == http.StateIdle { // what comes next is a head again
				c.(*guestConn).heading.begin()
			}
		},
		// Each connection keeps a buffer for the largest frame that came, which by itself may be of 1 MiB.
		HTTP2: &http.HTTP2Config{MaxConcurrentStreams: 128, MaxReceiveBufferPerStream: streamWindow,
			MaxReceiveBufferPerConnection: 4 * streamWindow, MaxReadFrameSize: 16 << 10},
		ErrorLog: slog.NewLogLogger(p.o.Log.Handler(), slog.LevelDebug),
	}
}

// request judges one request and passes it on.
func (p *Proxy) request(w http.ResponseWriter, r *http.Request, port uint16, forward http.Handler) {
	g := r.Context().Value(guestKey{}).(*guestConn)
	sub, ok := p.o.Subject(g.client.sandbox)
	if !ok {
		panic(http.ErrAbortHandler) // the sandbox went
	}
	// Before any answer: one that an HTTP/2 client does not take keeps the request in memory.
	x := &exchange{guest: g}
	defer func() { g.client.release(x.held) }()
	share := copyBuffer + headSize(r.Header, len(r.RequestURI), len(r.Host))
	if r.ProtoMajor == 2 {
		share += streamWindow
	}
	g.heading.end(g.client, r.ProtoMajor == 2)
	if r.ProtoMajor == 2 && len(r.Trailer) > 0 {
		share += trailersShare
	}
	held := x.hold(share)
	host, dest, ok := target(r.Host, port)
	label := host
	if host == "" && ok {
		label = dest.String()
	}
	switch {
	case held != nil:
		r.Header, r.Trailer = nil, nil // it may be long until a client takes the answer
		p.deny(w, g, label, refusal{status: 503, rule: shard.EgressRuleLimit, reason: errHeld.Error(), bare: r.ProtoMajor == 2})
		return
	case r.Method == http.MethodConnect:
		answer(w, refusal{status: 400, reason: "CONNECT is not served: connect to the host itself"}, r.Host, port)
		return
	case !ok:
		answer(w, refusal{status: 400, reason: "the request does not name a host at this port"}, r.Host, port)
		return
	case !oneHost(r, host, dest, port):
		answer(w, refusal{status: 400, reason: "the header Host of the request does not name the host that the request is for, or is there twice"}, label, port)
		return
	case r.URL.Opaque != "": // http:http://other.example/ would go on as a URL, which names a host of its own
		answer(w, refusal{status: 400, reason: "the request asks for what is neither a path nor a URL with a host"}, label, port)
		return
	case r.TLS != nil && !names(r.TLS, host):
		answer(w, refusal{status: 400, reason: "the request names another host than its TLS connection does"}, r.Host, port)
		return
	}
	if host != "" {
		dest = g.dest
	}
	t := g.client.trunkUnder(p, sub.Policy)
	if t == nil {
		panic(http.ErrAbortHandler)
	}
	x.trunk, x.host, x.named = t, host, label
	reason, refused := p.insert(x, r, sub.Secrets)
	var way route
	if refused == nil {
		way, refused = p.way(r.Context(), g, t, host, dest)
	}
	if refused != nil {
		refused.about = reason
		p.deny(w, g, label, *refused)
		return
	}
	if err := p.record(g, label, way, reason); err != nil {
		p.o.Log.Error("a decision of the proxy could not be recorded", "sandbox", g.client.sandbox, "err", err)
		answer(w, refusal{status: 503, reason: "the decision could not be recorded, so the request was not sent"}, label, port)
		return
	}
	x.route = way
	// Only WebSockets change the protocol. After another upgrade, to HTTP/2 above all, requests would go by unjudged.
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		r.Header.Del("Upgrade")
	}
	if r.ProtoMajor == 1 {
		_ = http.NewResponseController(w).EnableFullDuplex() // an answer may come before the request has ended
	}
	forward.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x)))
}

// names says whether a TLS connection was made to the host.
func names(state *tls.ConnectionState, host string) bool {
	name, err := policy.Host(state.ServerName)
	return err == nil && name == host
}

// oneHost says whether a header Host, which HTTP/2 has beside :authority, names the same as that, and takes it away.
func oneHost(r *http.Request, host string, dest netip.Addr, port uint16) bool {
	beside := r.Header["Host"]
	delete(r.Header, "Host")
	if len(beside) == 0 {
		return true
	}
	name, addr, ok := target(beside[0], port)
	return len(beside) == 1 && ok && name == host && addr == dest
}

func (p *Proxy) deny(w http.ResponseWriter, g *guestConn, host string, r refusal) {
	p.note(g, host, r)
	answer(w, r, host, g.port)
}

// answer is a refusal as programs read it. It has left when answer returns, or will not: until then it is of the sandbox's share.
func answer(w http.ResponseWriter, r refusal, host string, port uint16) {
	body, err := json.Marshal(struct {
		Host   string `json:"host"`
		Port   uint16 `json:"port"`
		Rule   string `json:"rule,omitempty"`
		Text   string `json:"rule_text,omitempty"`
		Reason string `json:"reason"`
	}{host, port, r.rule, r.text, r.reason})
	if err != nil {
		panic(http.ErrAbortHandler)
	}
	w.Header().Set("Content-Type", "application/json")
	body = append(body, '\n')
	_, http2 := w.(http.Pusher)
	if http2 && !r.bare {
		w.Header().Set("Content-Length", strconv.Itoa(len(body)))
		rc := http.NewResponseController(w)
		_ = rc.SetWriteDeadline(time.Now().Add(headTime)) // of this stream alone
		defer func() { _ = rc.Flush() }()
	}
	w.WriteHeader(r.status)
	if !r.bare {
		_, _ = w.Write(body)
	}
}

func (p *Proxy) forwarder() http.Handler {
	return &httputil.ReverseProxy{
		FlushInterval: -1, // what a host sends is passed on at once
		BufferPool:    &buffers{},
		ErrorLog:      log.New(io.Discard, "", 0), // errors quote what hosts send, in which a value may be
		Transport:     roundTripper(p.roundTrip),
		Rewrite:       rewrite,
		ModifyResponse: func(resp *http.Response) error {
			x := resp.Request.Context().Value(exchangeKey{}).(*exchange)
			switch code := resp.StatusCode; {
			case code < 100, code > 999: // no status: net/http would panic
				return errNoAnswer
			case code == http.StatusNoContent, code == http.StatusNotModified:
				resp.Header.Del("Content-Length") // of what does not come, which clients of HTTP/2 wait for
			}
			share := headSize(resp.Header)
			if resp.ProtoMajor == 2 {
				share += answerWindow
			}
			if err := x.hold(share); err != nil {
				return err
			}
			if x.guest.port == 443 {
				resp.Header.Del("Alt-Svc") // it would lead around the proxy, without the values
			}
			if len(x.carried) > 0 {
				return p.watch(resp, x)
			}
			return nil
		},
		ErrorHandler: func(w http.ResponseWriter, r *http.Request, err error) {
			x := r.Context().Value(exchangeKey{}).(*exchange)
			if r.Context().Err() != nil {
				panic(http.ErrAbortHandler) // the sandbox hung up
			}
			refused := failure(err)
			// Not err: it quotes what the host sent, in which a value may be.
			p.o.Log.Debug("a request of the proxy failed", "sandbox", x.guest.client.sandbox, "host", x.named, "reason", refused.reason)
			p.deny(w, x.guest, x.named, refused)
		},
	}
}

// rewrite makes the request that the host gets: what the sandbox sent, less what belongs to its connection.
func rewrite(pr *httputil.ProxyRequest) {
	x := pr.In.Context().Value(exchangeKey{}).(*exchange)
	pr.Out.URL.Scheme = "http"
	if x.guest.port == 443 {
		pr.Out.URL.Scheme = "https"
	}
	authority := x.host
	if authority == "" {
		if authority = x.route.addrs[0].String(); x.route.addrs[0].Is6() {
			authority = "[" + authority + "]"
		}
	}
	// The name that was judged is the name that is sent, whatever else the request line said.
	pr.Out.URL.Host, pr.Out.Host = authority, authority
	pr.Out.URL.User = nil
	pr.Out.URL.RawQuery = pr.In.URL.RawQuery
	for _, name := range []string{"Forwarded", "X-Forwarded-For", "X-Forwarded-Host", "X-Forwarded-Proto"} {
		if v, ok := pr.In.Header[name]; ok {
			pr.Out.Header[name] = v
		}
	}
	// The map that the server fills when the body has ended.
	pr.Out.Trailer = pr.In.Trailer
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func (p *Proxy) roundTrip(r *http.Request) (*http.Response, error) {
	x := r.Context().Value(exchangeKey{}).(*exchange)
	var w *secret.Watch // of answers before the answer
	if len(x.carried) > 0 {
		w = p.watches.Of(x.carried)
	}
	tr, http2 := x.trunk.https, r.URL.Scheme == "http" && r.ProtoMajor == 2
	if http2 {
		tr = x.trunk.h2c
	}
	if x.route.claimed {
		// Kept connections are found by name, and this address is not the name's.
		tr = tr.Clone()
		tr.DisableKeepAlives = true
	}
	var conn *hostConn
	defer func() {
		if conn != nil {
			conn.heading.end(conn.client, http2)
		}
	}()
	outer, tries := httptrace.ContextClientTrace(r.Context()), 0
	ctx, give := context.WithCancelCause(untraced{r.Context()})
	up := &upload{ReadCloser: r.Body, size: scratch}
	if r.ContentLength >= 0 {
		up.size = int(min(r.ContentLength, scratch))
	}
	r = r.WithContext(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{
		GotConn: func(got httptrace.GotConnInfo) {
			one := got.Conn
			if t, ok := one.(*tls.Conn); ok {
				http2 = t.ConnectionState().NegotiatedProtocol == "h2"
				one = t.NetConn()
			}
			if conn, _ = one.(*hostConn); conn != nil {
				conn.heading.begin()
				if http2 && !up.begin(conn) {
					give(errHeld)
				}
			}
			if http2 || !got.Reused { // of HTTP/1.1 there may be many, kept and meanwhile closed
				tries++
			}
			if tries > maxTries {
				give(errUnsteady)
			}
		},
		Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			if code == http.StatusSwitchingProtocols {
				return errNoAnswer // over HTTP/2, where it has no meaning, and to clients of HTTP/1.1 it would have one
			}
			if w != nil {
				w.Header(h)
			}
			return outer.Got1xxResponse(code, h)
		},
	}))
	if r.Body != nil && r.Body != http.NoBody {
		r.Body = up
	}
	resp, err := tr.RoundTrip(r)
	if why := context.Cause(ctx); err != nil && (why == errUnsteady || why == errHeld) {
		err = why
	}
	return resp, err
}

// untraced is a context in which nobody listens to what becomes of a request, so that who listens next decides what they hear.
type untraced struct{ context.Context }

func (u untraced) Value(key any) any {
	v := u.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return nil
	}
	return v
}

// trunk is the proxy's side towards hosts for one sandbox under one policy: no connection outlives the policy under which
// its address was judged, and none is shared, since some carry a login.
type trunk struct {
	policy     *policy.Compiled
	https, h2c *http.Transport // https speaks plain HTTP/1.1 too

	mu     sync.Mutex // a leaf
	routes map[routeKey]remembered
}

// trunkUnder is the client's trunk under a policy; nil when the client has ended.
func (c *client) trunkUnder(p *Proxy, under *policy.Compiled) *trunk {
	c.mu.Lock()
	if c.ended || c.trunk != nil && c.trunk.policy == under {
		defer c.mu.Unlock()
		return c.trunk
	}
	old := c.trunk
	t := &trunk{policy: under, routes: map[routeKey]remembered{}, https: p.transport(c), h2c: p.transport(c)}
	t.https.Protocols = new(http.Protocols)
	t.https.Protocols.SetHTTP1(true)
	t.https.Protocols.SetHTTP2(true)
	t.h2c.Protocols = new(http.Protocols)
	t.h2c.Protocols.SetUnencryptedHTTP2(true)
	c.trunk = t
	c.mu.Unlock()
	if old != nil {
		old.close()
	}
	return t
}

func (t *trunk) close() {
	t.https.CloseIdleConnections()
	t.h2c.CloseIdleConnections()
}

func (p *Proxy) transport(c *client) *http.Transport {
	return &http.Transport{
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			x := ctx.Value(exchangeKey{}).(*exchange)
			if !c.take() {
				return nil, errManyConns
			}
			ctx, cancel := context.WithTimeout(ctx, dialTime)
			defer cancel()
			conn, err := p.connect(ctx, x.route.addrs, x.guest.port)
			if err != nil {
				c.give(nil)
				return nil, err
			}
			return c.keep(conn)
		},
		TLSClientConfig:        &tls.Config{RootCAs: p.o.Roots, MinVersion: tls.VersionTLS12},
		TLSHandshakeTimeout:    headTime,
		DisableCompression:     true, // bytes are passed on as they are
		MaxIdleConns:           128,
		MaxIdleConnsPerHost:    64,
		IdleConnTimeout:        idleTime,
		ExpectContinueTimeout:  time.Second,
		MaxResponseHeaderBytes: maxAnswerHead,
		// No bound on the wait for an answer: programs wait minutes for some, and end the wait by hanging up.
		HTTP2: &http.HTTP2Config{MaxReceiveBufferPerStream: answerWindow, MaxReceiveBufferPerConnection: 4 * answerWindow,
			SendPingTimeout: idleTime, PingTimeout: headTime, WriteByteTimeout: idleTime},
	}
}

// take counts one more connection to a host; false where there are too many.
func (c *client) take() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || c.upstream >= c.proxy.most() {
		return false
	}
	c.upstream++
	c.proxy.open.Add(1)
	return true
}

// keep makes a connection to a host end with the client.
func (c *client) keep(conn net.Conn) (net.Conn, error) {
	h := &hostConn{Conn: conn, client: c}
	c.mu.Lock()
	ended := c.ended
	if !ended {
		c.hosts[h] = struct{}{}
	}
	c.mu.Unlock()
	if ended {
		_ = h.Close()
		return nil, net.ErrClosed
	}
	return h, nil
}

func (c *client) give(h *hostConn) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.hosts, h)
	c.upstream--
	c.proxy.open.Add(-1)
}

// buffers are those of copying, of one size.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if p, ok := b.pool.Get().(*[]byte); ok {
		return *p
	}
	return make([]byte, copyBuffer)
}

func (b *buffers) Put(p []byte) { b.pool.Put(&p) }

// failure says to a program why a host could not be asked.
func failure(err error) refusal {
	r := refusal{status: 502, silent: true, reason: "the request to the host failed"}
	var bad *tls.CertificateVerificationError
	var network net.Error
	var alert tls.AlertError
	var record tls.RecordHeaderError
	switch {
	case errors.Is(err, errManyConns), errors.Is(err, errHeld):
		return refusal{status: 503, rule: shard.EgressRuleLimit, reason: rootOf(err).Error()}
	case errors.Is(err, errLocal):
		return refusal{status: 403, rule: shard.EgressRuleLocal, reason: errLocal.Error()}
	case errors.As(err, &bad):
		return refusal{status: 502, rule: shard.EgressRuleCertificate, reason: "the host's certificate is not valid: " + fault(bad.Err)}
	case errors.Is(err, secret.ErrUnwatchable), errors.Is(err, errUnsteady):
		r.reason = err.Error()
	case errors.As(err, &alert), errors.As(err, &record):
		r.reason = "TLS with the host failed: " + rootOf(err).Error()
	case errors.Is(err, syscall.ECONNREFUSED):
		r.reason = "the host refused the connection"
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH):
		r.reason = "there is no way to the host"
	case errors.As(err, &network) && network.Timeout(), errors.Is(err, context.DeadlineExceeded):
		r.reason = "the host did not answer in time"
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		r.reason = "the host closed the connection"
	}
	return r
}

// fault says what is wrong with a certificate in our own words: those of the error quote it, and a host puts into it what it likes.
func fault(err error) string {
	if invalid, ok := errors.AsType[x509.CertificateInvalidError](err); ok && invalid.Reason == x509.Expired {
		return "it has expired, or is not valid yet"
	}
	if _, ok := errors.AsType[x509.HostnameError](err); ok {
		return "it is for other names"
	}
	if _, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "it is signed by an authority that this host does not know"
	}
	return "it may not be used for this"
}

func rootOf(err error) error {
	for {
		next := errors.Unwrap(err)
		if next == nil {
			return err
		}
		err = next
	}
}

package gate

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/http/httputil"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

const (
	// idleTime is how long a browser's connection may stay open between two requests.
	idleTime = 60 * time.Second
	// maxIdle bounds the connections to sandboxes that are kept for the next request: they come out of spareFiles.
	maxIdle = 32
)

// preview serves ports of sandboxes at names of their own, <port>-<sandbox>.<domain>, to browsers. What is below the domain
// never reaches the API, and nothing else reaches a sandbox. Here net/http reads the requests, since a browser wants to keep
// its connections; each is judged anew, and written anew for the sandbox, so that what two parsers could read in two ways
// does not get there.
type preview struct {
	gate *Gate
	// origin is scheme, domain and port as browsers see them, domain its host alone.
	origin *url.URL
	domain string

	server    *http.Server
	proxy     *httputil.ReverseProxy
	transport *http.Transport // to sandboxes
	daemon    *http.Client

	visitors chan net.Conn
	closing  chan struct{}
}

// newPreview reads where browsers see the previews: a domain served by the gate itself, or an origin that a proxy serves.
func newPreview(g *Gate, where string) (*preview, error) {
	_, port, _ := net.SplitHostPort(g.listener.Addr().String())
	origin, err := shard.PreviewOrigin(where, g.o.CertFile != "" || g.o.SelfSigned, port)
	if err != nil {
		return nil, err
	}
	p := &preview{gate: g, origin: origin, domain: origin.Hostname(), visitors: make(chan net.Conn), closing: make(chan struct{})}
	p.daemon = &http.Client{Timeout: dialTime, Transport: &http.Transport{DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return p.dialDaemon(ctx) }}}
	p.transport = &http.Transport{DialContext: p.dialSandbox, DisableCompression: true, MaxIdleConns: maxIdle, MaxIdleConnsPerHost: maxIdle / 2,
		IdleConnTimeout: idleTime / 2, MaxResponseHeaderBytes: 4 * maxHead, ReadBufferSize: 16 << 10, WriteBufferSize: 16 << 10}
	http1 := new(http.Protocols)
	http1.SetHTTP1(true)
	p.transport.Protocols = http1
	logger := slog.NewLogLogger(g.o.Log.Handler(), slog.LevelDebug)
	p.proxy = &httputil.ReverseProxy{Transport: finalOnly{p.transport}, Rewrite: p.rewriteRequest, ModifyResponse: p.rewriteAnswer, ErrorHandler: p.failed,
		FlushInterval: -1, BufferPool: new(buffers), ErrorLog: logger}
	p.server = &http.Server{Handler: p, DisableGeneralOptionsHandler: true, ReadHeaderTimeout: headTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHead, ErrorLog: logger, Protocols: http1,
		ConnContext: func(ctx context.Context, nc net.Conn) context.Context {
			v := nc.(*visitor)
			ctx, cancel := context.WithCancel(ctx)
			v.conn.cancel.Store(&cancel)
			return context.WithValue(ctx, visitorKey{}, v.conn)
		}}
	return p, nil
}

// previewDomain is the domain in the option, before it is known to be one.
func previewDomain(where string) string {
	if _, rest, found := strings.Cut(where, "://"); found {
		where = rest
	}
	return strings.ToLower(hostname(where))
}

type (
	visitorKey struct{}
	visitKey   struct{}
)

// buffers are those with which answers are copied.
type buffers struct{ pool sync.Pool }

func (b *buffers) Get() []byte {
	if buf, ok := b.pool.Get().(*[]byte); ok {
		return *buf
	}
	return make([]byte, bigBuffer)
}

func (b *buffers) Put(buf []byte) { b.pool.Put(&buf) }

// owns says whether a request for this host is a matter of previews: all below the domain, but for names of the API's own.
func (p *preview) owns(hostport string) bool {
	if p == nil {
		return false
	}
	host := strings.TrimSuffix(strings.ToLower(hostname(hostport)), ".")
	return strings.HasSuffix(host, "."+p.domain) &&
		!slices.ContainsFunc(p.gate.o.AllowHosts, func(allowed string) bool { return strings.EqualFold(host, hostname(allowed)) })
}

// run serves the visitors that are handed over, until close.
func (p *preview) run() { _ = p.server.Serve(p) }

// close ends idle connections at once, and waits for requests under way as long as ctx says.
func (p *preview) close(ctx context.Context) {
	_ = p.server.Shutdown(ctx)
	_ = p.server.Close()
	p.transport.CloseIdleConnections()
}

// Accept implements net.Listener.
func (p *preview) Accept() (net.Conn, error) {
	select {
	case c := <-p.visitors:
		return c, nil
	case <-p.closing:
		return nil, net.ErrClosed
	}
}

// Close implements net.Listener; the server calls it once.
func (p *preview) Close() error {
	close(p.closing)
	return nil
}

// Addr implements net.Listener.
func (p *preview) Addr() net.Addr { return p.gate.Addr() }

// visitor is the connection of a browser, from its first head on.
type visitor struct {
	replayed
	conn *conn
	once sync.Once
	gone chan struct{}
}

// visit hands the connection over, and waits for its end.
func (p *preview) visit(c *conn, first []byte) {
	v := &visitor{replayed: replayed{Conn: c.Conn, first: first}, conn: c, gone: make(chan struct{})}
	_ = c.raw.SetDeadline(time.Time{})
	select {
	case p.visitors <- v:
		<-v.gone
	case <-p.closing:
	}
}

// Write cuts a client that takes nothing.
func (v *visitor) Write(b []byte) (int, error) {
	_ = v.conn.raw.SetWriteDeadline(time.Now().Add(stallTime))
	return v.Conn.Write(b)
}

// CloseWrite lets the server end its side before it closes.
func (v *visitor) CloseWrite() error { return closeWrite(v.Conn) }

func (v *visitor) Close() error {
	v.once.Do(func() { close(v.gone) })
	return v.Conn.Close()
}

// visit is one request of a browser, admitted.
type visit struct {
	conn *conn
	// ref is the sandbox in the host's name, sandbox its id.
	ref, sandbox string
	port         int
	// keyed says that Authorization holds an API key, which no sandbox may see.
	keyed  bool
	grant  *token.Grant
	status int
}

// ServeHTTP implements http.Handler.
func (p *preview) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	start := time.Now()
	c := r.Context().Value(visitorKey{}).(*conn)
	log := p.gate.o.Log.With("remote", c.raw.RemoteAddr().String(), "method", r.Method, "route", "preview")
	v, done, refusal := p.admit(w, r, c)
	switch {
	case refusal != nil:
		log.Info("request refused", "status", refusal.status)
		refusal.send(w, r)
		return
	case done:
		return
	case !p.gate.passed(c, v.grant):
		(&page{status: http.StatusServiceUnavailable, title: "This server is stopping", text: "Try again in a moment."}).send(w, r)
		return
	}
	log = log.With("subject", v.grant.Name, "sandbox", v.sandbox, "port", v.port)
	defer func() { log.Info("request", "status", v.status, "ms", time.Since(start).Milliseconds()) }()
	p.proxy.ServeHTTP(w, r.WithContext(context.WithValue(r.Context(), visitKey{}, v)))
}

// admit judges a request. It says why it is refused, or that it is answered, or whose port it is for.
func (p *preview) admit(w http.ResponseWriter, r *http.Request, c *conn) (v *visit, done bool, refusal *page) {
	if !strings.HasPrefix(r.RequestURI, "/") || r.Method == http.MethodConnect || r.Method == http.MethodTrace {
		return nil, false, &page{status: http.StatusBadRequest, title: "This request has no path", text: "Ask for a path of this host."}
	}
	ref, port, ok := p.target(r.Host)
	if !ok {
		return nil, false, &page{status: http.StatusMisdirectedRequest, title: "There is no such address",
			text: "Addresses of previews look like this: " + p.origin.Scheme + "://3000-SANDBOX." + p.origin.Host + "/"}
	}
	v = &visit{conn: c, ref: ref, port: port}
	if signed, clean, found := cutLink(r.URL.RawQuery); found {
		return nil, true, p.enter(w, r, v, signed, clean)
	}
	key := p.gate.bearer(r.Header.Values("Authorization"))
	v.keyed = p.gate.holdsKey(r)
	link := p.linkOf(r, v)
	switch {
	case link != nil:
		// The cookie goes along with whatever any page makes the browser send.
		if !p.ownPage(r, v) {
			return nil, false, &page{status: http.StatusForbidden, title: "Another site's page asked for this",
				text: "A page of another site, or of another sandbox, may only lead here with a plain link."}
		}
		v.grant = link.Grant
		return v, false, nil
	case key == nil:
		return nil, false, needsLink(v)
	case !shard.ScopesAllow(key.Scopes, token.LinkScope):
		return nil, false, &page{status: http.StatusForbidden, title: "This API key may not", text: "It lacks the scope " + token.LinkScope + "."}
	}
	sb, err := p.lookUp(r.Context(), ref)
	if err != nil {
		return nil, false, pageOf(err, v)
	}
	if !slices.ContainsFunc(sb.Ports, func(f shard.PortForward) bool { return f.GuestPort == port }) {
		return nil, false, &page{status: http.StatusForbidden, title: "Nobody has asked for this port",
			text: "An API key reaches the ports that are forwarded: shard port add " + ref + " " + portText(port) + ". Or ask for a link: shard port url " + ref + " " + portText(port)}
	}
	v.sandbox, v.grant = sb.ID, key
	return v, false, nil
}

// target takes a Host apart. Only the form that a browser writes counts.
func (p *preview) target(hostport string) (ref string, port int, ok bool) {
	host := strings.ToLower(hostport)
	if at := strings.LastIndexByte(host, ':'); at >= 0 {
		if digits := host[at+1:]; digits == "" || len(digits) > 5 || strings.Trim(digits, "0123456789") != "" {
			return "", 0, false
		}
		host = host[:at]
	}
	label, ok := strings.CutSuffix(host, "."+p.domain)
	if !ok {
		return "", 0, false
	}
	return shard.ParsePreviewLabel(label)
}

// enter is the first visit: the link becomes a cookie of this host alone, and goes out of the address, which people copy.
func (p *preview) enter(w http.ResponseWriter, r *http.Request, v *visit, signed, clean string) *page {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return &page{status: http.StatusBadRequest, title: "A link is for a browser to open", text: "Open it with GET."}
	}
	link, err := p.gate.book.CheckLink(signed)
	if err != nil {
		return needsLink(v)
	}
	if !v.fits(link) {
		return &page{status: http.StatusForbidden, title: "This link is for another address", text: "It opens the one port of the one sandbox that it was made for, at the address with the sandbox's id."}
	}
	cookie := &http.Cookie{Name: p.cookieName(), Value: signed, Path: "/", HttpOnly: true, Secure: p.origin.Scheme == "https", SameSite: http.SameSiteLaxMode,
		Expires: link.Expires}
	h := w.Header()
	h.Set("Set-Cookie", cookie.String())
	h.Set("Cache-Control", "no-store")
	h.Set("Referrer-Policy", "no-referrer")
	to := p.address(v.ref, v.port) + r.URL.EscapedPath()
	if clean != "" {
		to += "?" + clean
	}
	h.Set("Location", to)
	w.WriteHeader(http.StatusSeeOther)
	return nil
}

// linkOf is the link in the request's cookies that opens this address, nil when there is none. Another host could plant
// cookies of our name in plain HTTP, so each is tried; the bound of a head bounds them.
func (p *preview) linkOf(r *http.Request, v *visit) *token.Link {
	for _, cookie := range r.CookiesNamed(p.cookieName()) {
		if link, err := p.gate.book.CheckLink(cookie.Value); err == nil && v.fits(link) {
			v.sandbox = link.Sandbox
			return link
		}
	}
	return nil
}

// fits says whether a link is for the address that is visited. Not by the sandbox's name: what a page leaves in a browser, a
// service worker above all, would be there when another sandbox has the name.
func (v *visit) fits(link *token.Link) bool { return link.Port == v.port && link.Sandbox == v.ref }

// cookieName is that of the cookie that holds a link. With TLS its name makes browsers take it from this host alone.
func (p *preview) cookieName() string {
	if p.origin.Scheme == "https" {
		return "__Host-shard-preview"
	}
	return "shard-preview"
}

// address is the origin of a port's preview.
func (p *preview) address(ref string, port int) string {
	return p.origin.Scheme + "://" + shard.PreviewLabel(ref, port) + "." + p.origin.Host
}

// ownPage says whether the request comes from a page of this sandbox, or from no page, or just leads a person here.
func (p *preview) ownPage(r *http.Request, v *visit) bool {
	from, site := r.Header.Values("Origin"), r.Header.Get("Sec-Fetch-Site")
	if len(from) == 1 && from[0] == "null" && site == "same-origin" {
		return true // a form on a page that wants no referrer
	}
	if len(from) == 0 {
		if site == "" { // over plain HTTP browsers do not say
			u, err := url.Parse(r.Header.Get("Referer"))
			if err != nil || !p.owns(u.Host) {
				return err == nil
			}
			_, ok := p.localOrigin(r.Header.Get("Referer"), v)
			return ok
		}
		if site != "same-site" && site != "cross-site" {
			return true
		}
		if r.Header.Get("Sec-Fetch-Mode") == "navigate" && r.Header.Get("Sec-Fetch-Dest") == "document" && r.Method == http.MethodGet {
			return true
		}
		from = r.Header.Values("Referer")
	}
	if len(from) != 1 {
		return false
	}
	_, ok := p.localOrigin(from[0], v)
	return ok
}

// holdsKey says whether Authorization holds an API key of ours in whatever form.
func (g *Gate) holdsKey(r *http.Request) bool {
	valid := func(text string) bool { _, err := g.book.Check(text); return err == nil }
	user, password, _ := r.BasicAuth()
	return valid(user) || valid(password) || slices.ContainsFunc(r.Header.Values("Authorization"), func(value string) bool {
		return slices.ContainsFunc(strings.Fields(value), valid)
	})
}

// finalOnly drops what a server says before its answer: nothing of it would be rewritten, and a browser needs none of it.
type finalOnly struct{ *http.Transport }

func (t finalOnly) RoundTrip(r *http.Request) (*http.Response, error) {
	return t.Transport.RoundTrip(r.WithContext(untraced{r.Context()}))
}

// untraced hides the hook by which the proxy would pass such answers on.
type untraced struct{ context.Context }

func (c untraced) Value(key any) any {
	v := c.Context.Value(key)
	if _, ok := v.(*httptrace.ClientTrace); ok {
		return nil
	}
	return v
}

// bearer is what the API key in an Authorization header gives, nil when it holds none of ours.
func (g *Gate) bearer(values []string) *token.Grant {
	if len(values) != 1 {
		return nil
	}
	scheme, text, ok := strings.Cut(values[0], " ")
	if !ok || !strings.EqualFold(scheme, "Bearer") {
		return nil
	}
	grant, err := g.book.Check(text)
	if err != nil {
		return nil
	}
	return grant
}

// failed answers when the sandbox did not.
func (p *preview) failed(w http.ResponseWriter, r *http.Request, err error) {
	v := r.Context().Value(visitKey{}).(*visit)
	if errors.Is(err, context.Canceled) {
		panic(http.ErrAbortHandler) // nobody is there to read an answer
	}
	refusal := pageOf(err, v)
	v.status = refusal.status
	if v.status == http.StatusBadGateway {
		p.gate.o.Log.Debug("a preview failed", "sandbox", v.sandbox, "port", v.port, "err", err)
	}
	refusal.send(w, r)
}

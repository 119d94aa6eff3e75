package gate

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
)

const (
	web   = "amber-otter-0001" // a sandbox named web, which forwards guest port 3000
	other = "bold-raven-0002"
)

// saw is what the program in the sandbox saw of a request.
type saw struct {
	Method, Host, URI string
	Header            http.Header
	Body              int64
}

// previewRig is a gate with previews before a daemon with two sandboxes.
type previewRig struct {
	*rig
	roots *x509.CertPool
	// guest is the program behind port 3000 of both sandboxes, dials how often it was dialled.
	guest *httptest.Server
	dials atomic.Int64
	down  atomic.Bool // the sandboxes do not run
}

func newPreviewRig(t *testing.T, o Options) *previewRig {
	t.Helper()
	o.Preview = "preview.test"
	o.SelfSigned = true
	r := &previewRig{rig: newRig(t, o), roots: x509.NewCertPool()}
	pem, err := os.ReadFile(filepath.Join(r.root, "auth/tls/ca.crt"))
	if err != nil || !r.roots.AppendCertsFromPEM(pem) {
		t.Fatal(err)
	}
	r.guest = httptest.NewServer(http.HandlerFunc(r.program))
	t.Cleanup(r.guest.Close)
	r.mu.Lock()
	r.special = r.sandboxes
	r.mu.Unlock()
	return r
}

// sandboxes is the part of the daemon that knows sandboxes.
func (r *previewRig) sandboxes(w http.ResponseWriter, req *http.Request) bool {
	refuse := func(code shard.Code, text string) bool {
		w.WriteHeader(code.Status())
		_ = json.NewEncoder(w).Encode(shard.ErrorBody{Error: shard.ErrorDetail{Code: code, Message: text}})
		return true
	}
	route, params := shard.MatchRoute(req.Method, req.URL.EscapedPath())
	switch {
	case route == nil:
		return false
	case route.Path == "/v0/sandboxes/{id}":
		sb := shard.Inspection{Sandbox: shard.Sandbox{ID: web, Name: "web", Ports: []shard.PortForward{{HostPort: 9000, GuestPort: 3000}}}}
		switch params["id"] {
		case web, "web", "amber-otter":
		case other:
			sb = shard.Inspection{Sandbox: shard.Sandbox{ID: other}}
		default:
			return refuse(shard.CodeNotFound, "there is no such sandbox")
		}
		_ = json.NewEncoder(w).Encode(sb)
		return true
	case route.Path == "/v0/sandboxes/{id}/dial/{guest_port}":
		r.dials.Add(1)
		switch {
		case len(req.Header[shard.ScopesHeader]) > 0:
			return refuse(shard.CodeForbidden, "local")
		case r.down.Load():
			return refuse(shard.CodeSandboxNotRunning, `sandbox "web" is stopped`)
		case params["id"] != web && params["id"] != other:
			return refuse(shard.CodeNotFound, "there is no such sandbox")
		case params["guest_port"] != "3000":
			return refuse(shard.CodeNoProcess, "nothing listens")
		}
		guest, err := net.Dial("tcp", r.guest.Listener.Addr().String())
		if err != nil {
			return refuse(shard.CodeInternal, err.Error())
		}
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return true
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
		go func() { _, _ = io.Copy(guest, conn); guest.Close() }()
		_, _ = io.Copy(conn, guest)
		conn.Close()
		return true
	}
	return false
}

// program is what runs in the sandboxes.
func (r *previewRig) program(w http.ResponseWriter, req *http.Request) {
	switch req.URL.Path {
	case "/cookies":
		for _, c := range []string{"plain=1; Path=/", "wide=1; Domain=preview.test; Secure", "odd=1;domain = .preview.test;HttpOnly", "__Host-shard-preview=evil; Secure; Path=/", "shard-preview=evil"} {
			w.Header().Add("Set-Cookie", c)
		}
		w.Header().Set("Clear-Site-Data", `"cookies"`)
		w.Header().Set("Alt-Svc", `h3=":443"`)
	case "/early":
		w.Header().Set("Set-Cookie", "wide=1; Domain=preview.test; Secure")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("Set-Cookie")
		_, _ = io.WriteString(w, "late")
	case "/redirect":
		w.Header()["Location"] = []string{req.URL.Query().Get("to")}
		w.Header().Set("Access-Control-Allow-Origin", req.Header.Get("Origin"))
		w.WriteHeader(http.StatusFound)
	case "/events":
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: first\n\n")
		_ = http.NewResponseController(w).Flush()
		<-req.Context().Done()
	case "/echo":
		ws, err := websocket.Accept(w, req, nil) // which compares Origin with Host, as servers do
		if err != nil {
			return
		}
		defer ws.CloseNow()
		for {
			kind, data, err := ws.Read(context.Background())
			if err != nil || ws.Write(context.Background(), kind, data) != nil {
				return
			}
		}
	case "/file":
		http.ServeContent(w, req, "file.txt", time.Time{}, strings.NewReader("0123456789"))
	case "/zip":
		w.Header().Set("Content-Encoding", req.Header.Get("Accept-Encoding"))
		w.Header().Set("Content-Security-Policy", "frame-ancestors 'self'")
		_, _ = w.Write(zipped)
	case "/big":
		_, _ = io.CopyN(w, zeroes{}, 32<<20)
	case "/cut":
		_, _ = io.WriteString(w, "some")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	default:
		n, _ := io.Copy(io.Discard, req.Body)
		_ = json.NewEncoder(w).Encode(saw{req.Method, req.Host, req.RequestURI, req.Header, n})
	}
}

// zipped stands for an answer that only its reader can take apart.
var zipped = []byte{0x1f, 0x8b, 0x08, 0, 0xff, 0xfe}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// browser is an HTTP client with TLS that finds every name at the gate, follows nothing, and keeps no cookies by itself.
func (r *previewRig) browser() *http.Client {
	t := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: r.roots}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", r.addr())
	}}
	r.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Timeout: wait, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (r *previewRig) port() string { _, port, _ := net.SplitHostPort(r.addr()); return port }

// at is the address of a port's preview.
func (r *previewRig) at(label string) string { return "https://" + label + ".preview.test:" + r.port() }

// link asks the API for a link.
func (r *previewRig) link(key, ref, port, query string) (*shard.PortLink, *answer) {
	r.t.Helper()
	conn := tls.Client(r.dial("127.0.0.1"), &tls.Config{RootCAs: r.roots, ServerName: "localhost"})
	defer conn.Close()
	got := r.raw(conn, request("POST", "/v0/sandboxes/"+ref+"/links/"+port+query, key))
	if got == nil || got.status != 201 {
		return nil, got
	}
	var l shard.PortLink
	if err := json.Unmarshal([]byte(got.body), &l); err != nil {
		r.t.Fatal(err)
	}
	return &l, got
}

// cookie opens a link as a browser does, and is the cookie that it gets.
func (r *previewRig) cookie(link string) string {
	r.t.Helper()
	resp, body := r.get(r.browser(), "GET", link)
	c := resp.Header.Get("Set-Cookie")
	if resp.StatusCode != 303 || c == "" {
		r.t.Fatalf("open a link: %d %s", resp.StatusCode, body)
	}
	value, _, _ := strings.Cut(c, ";")
	return value
}

// get sends a request with headers as "Name: value", and reads the answer.
func (r *previewRig) get(b *http.Client, method, url string, headers ...string) (*http.Response, string) {
	r.t.Helper()
	req, err := http.NewRequestWithContext(r.t.Context(), method, url, nil)
	if err != nil {
		r.t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		if name == "Host" {
			req.Host = value
		}
		req.Header.Add(name, value)
	}
	resp, err := b.Do(req)
	if err != nil {
		r.t.Fatalf("%s %s: %v", method, url, err)
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp, string(body)
}

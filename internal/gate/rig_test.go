package gate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

// wait bounds every wait of the tests: two busy cores must never fail one.
const wait = 60 * time.Second

// rig is a gate before a real HTTP server on a unix socket, which stands for the daemon.
type rig struct {
	t    *testing.T
	root string
	gate *Gate
	book *token.Book
	log  lockedBuffer
	// stop ends the gate and waits for it.
	stop func()
	// release lets requests to /slow answers go on.
	release chan struct{}

	mu   sync.Mutex
	seen []*http.Request
	// special answers before the daemon does, if it says so.
	special func(http.ResponseWriter, *http.Request) bool
}

type lockedBuffer struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

func (b *lockedBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.Write(p)
}

func (b *lockedBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.buf.String()
}

func newRig(t *testing.T, o Options, tune ...func(*Gate)) *rig {
	t.Helper()
	r := &rig{t: t, root: t.TempDir(), release: make(chan struct{})}
	var err error
	if r.book, err = token.Open(token.DefaultKeyFile(r.root), true); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", filepath.Join(r.root, "shard.sock"))
	if err != nil {
		t.Fatal(err)
	}
	daemon := &http.Server{Handler: http.HandlerFunc(r.answer), ReadHeaderTimeout: wait}
	served := make(chan struct{})
	go func() { defer close(served); _ = daemon.Serve(l) }()
	t.Cleanup(func() { _ = daemon.Close(); <-served })
	o.Root = r.root
	o.Log = slog.New(slog.NewJSONHandler(&r.log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if o.Listen == "" {
		o.Listen = "127.0.0.1:0"
	}
	if r.gate, err = Listen(o); err != nil {
		t.Fatal(err)
	}
	for _, f := range tune {
		f(r.gate)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- r.gate.Serve(ctx) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	t.Cleanup(r.stop)
	return r
}

// answer is the daemon. The sandbox's name in the path says what it does.
func (r *rig) answer(w http.ResponseWriter, req *http.Request) {
	r.mu.Lock()
	r.seen = append(r.seen, req)
	special := r.special
	r.mu.Unlock()
	if special != nil && special(w, req) {
		return
	}
	switch {
	case strings.Contains(req.URL.Path, "/echo/exec/"):
		ws, err := websocket.Accept(w, req, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			return
		}
		defer ws.CloseNow()
		ws.SetReadLimit(32 << 20)
		for {
			kind, data, err := ws.Read(context.Background())
			if err != nil || ws.Write(context.Background(), kind, data) != nil {
				return
			}
		}
	case strings.Contains(req.URL.Path, "/slow"):
		rc := http.NewResponseController(w)
		_, _ = io.WriteString(w, "first ")
		_ = rc.Flush()
		select {
		case <-r.release:
		case <-req.Context().Done():
			return
		}
		_, _ = io.WriteString(w, "last")
	case strings.Contains(req.URL.Path, "/early"):
		w.WriteHeader(http.StatusRequestEntityTooLarge)
		_, _ = io.WriteString(w, "too much")
	case strings.Contains(req.URL.Path, "/dead"):
		panic(http.ErrAbortHandler)
	case strings.Contains(req.URL.Path, "/missing"):
		w.WriteHeader(http.StatusNotFound)
		_, _ = io.WriteString(w, "missing")
	default:
		n, err := io.Copy(io.Discard, req.Body)
		if err != nil {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		fmt.Fprintf(w, "%d", n)
	}
}

// requests are those that reached the daemon.
func (r *rig) requests() []*http.Request {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]*http.Request{}, r.seen...)
}

func (r *rig) mint(d time.Duration, scopes ...string) string {
	r.t.Helper()
	if len(scopes) == 0 {
		scopes = []string{shard.ScopeAll}
	}
	text, _, err := r.book.Mint("tester", d, scopes)
	if err != nil {
		r.t.Fatal(err)
	}
	return text
}

func (r *rig) addr() string { return r.gate.Addr().String() }

// dial connects from an address of its own, so that tests do not share the bound on unknown clients.
func (r *rig) dial(from string) *net.TCPConn {
	r.t.Helper()
	d := net.Dialer{Timeout: wait, LocalAddr: &net.TCPAddr{IP: net.ParseIP(from)}}
	conn, err := d.DialContext(r.t.Context(), "tcp", r.addr())
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(func() { conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(wait))
	return conn.(*net.TCPConn)
}

// raw sends bytes and reads one answer, nil when the connection was closed without one.
func (r *rig) raw(conn net.Conn, text string) *answer {
	r.t.Helper()
	_, _ = io.WriteString(conn, text)
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return nil
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	a := &answer{status: resp.StatusCode, body: string(body), header: resp.Header, close: resp.Close}
	var e shard.ErrorBody
	_ = json.Unmarshal(body, &e)
	a.code = e.Error.Code
	return a
}

type answer struct {
	status int
	code   shard.Code
	body   string
	header http.Header
	close  bool
}

// ask sends one request with a token on a connection of its own.
func (r *rig) ask(method, path, text string, headers ...string) *answer {
	r.t.Helper()
	conn := r.dial("127.0.0.1")
	defer conn.Close()
	return r.raw(conn, request(method, path, text, headers...))
}

func request(method, path, text string, headers ...string) string {
	head := method + " " + path + " HTTP/1.1\r\nHost: localhost\r\n"
	if text != "" {
		head += "Authorization: Bearer " + text + "\r\n"
	}
	for _, h := range headers {
		head += h + "\r\n"
	}
	return head + "\r\n"
}

// stream opens an echo through the gate.
func (r *rig) stream(text string) *websocket.Conn {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), wait)
	defer cancel()
	conn, resp, err := websocket.Dial(ctx, "ws://"+r.addr()+"/v0/sandboxes/echo/exec/1",
		&websocket.DialOptions{HTTPHeader: http.Header{"Authorization": {"Bearer " + text}}})
	if err != nil {
		r.t.Fatalf("%v %v", resp, err)
	}
	r.t.Cleanup(func() { _ = conn.CloseNow() })
	conn.SetReadLimit(32 << 20)
	return conn
}

// echo says whether the stream is alive.
func (r *rig) echo(ws *websocket.Conn, text string) error {
	ctx, cancel := context.WithTimeout(r.t.Context(), wait)
	defer cancel()
	if err := ws.Write(ctx, websocket.MessageBinary, []byte(text)); err != nil {
		return err
	}
	_, data, err := ws.Read(ctx)
	if err == nil && string(data) != text {
		return fmt.Errorf("the echo differs: %d bytes for %d", len(data), len(text))
	}
	return err
}

// ends waits until the stream is closed by the gate.
func (r *rig) ends(ws *websocket.Conn) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), wait)
	defer cancel()
	if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
		r.t.Errorf("the stream is still there: %v", err)
	}
}

func sourcePrefix(ip string) netip.Prefix {
	p, _ := netip.MustParseAddr(ip).Prefix(32)
	return p
}

package gate

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

const (
	// dialTime bounds the connect to the daemon's socket.
	dialTime = 5 * time.Second
	// stallTime is how long a client may take nothing of what it is sent.
	stallTime = 60 * time.Second
	// lingerTime is how long we go on reading after the answer, so that the client sees it before a reset.
	lingerTime = time.Second
	// smallBuffer and bigBuffer are how much is moved at once, in bytes: an idle stream costs little.
	smallBuffer, bigBuffer = 2 << 10, 64 << 10
)

// serve judges the connection's request and passes it on.
func (c *conn) serve() {
	log := c.gate.o.Log.With("remote", c.raw.RemoteAddr().String())
	start := time.Now()
	defer c.raw.Close()
	_ = c.raw.SetDeadline(start.Add(c.gate.patience))
	if c.gate.tls != nil {
		t := tls.Server(c.raw, c.gate.tls)
		if err := t.Handshake(); err != nil {
			log.Debug("no TLS", "err", err)
			if e, ok := errors.AsType[tls.RecordHeaderError](err); ok && e.Conn != nil {
				c.refuse(nil, bad("this server speaks TLS: write https:// in its address"))
			}
			return
		}
		c.Conn = t
	}
	h, rest, err := readHead(c.Conn, c.gate.preview != nil)
	if err != nil {
		refusal, ok := errors.AsType[*shard.Error](err)
		if !ok {
			log.Debug("no request", "err", err)
			return
		}
		log.Debug("bad request", "err", err)
		c.refuse(h, refusal)
		return
	}
	if c.gate.preview.owns(h.host) {
		c.gate.preview.visit(c, h.raw)
		return
	}
	route, params, grant, refusal := c.judge(h)
	if grant != nil {
		log = log.With("subject", grant.Name)
	}
	log = log.With("method", h.method, "route", routeName(route))
	if refusal != nil {
		log.Info("request refused", "status", refusal.Code.Status(), "code", refusal.Code)
		c.refuse(h, refusal)
		return
	}
	if !c.gate.passed(c, grant) {
		return
	}
	if route.Door {
		log.Info("request", "status", c.link(h, grant, params["id"], params["guest_port"]), "ms", time.Since(start).Milliseconds())
		return
	}
	dctx, cancel := context.WithTimeout(context.Background(), dialTime)
	d, err := (&net.Dialer{}).DialContext(dctx, "unix", c.gate.socket)
	cancel()
	if err != nil {
		log.Error("the daemon does not answer", "status", http.StatusBadGateway, "err", err)
		c.badGateway(h)
		return
	}
	r := &relay{conn: c, daemon: d.(*net.UnixConn), head: h}
	defer d.Close()
	c.daemon.Store(r.daemon)
	if c.aborted.Load() {
		return
	}
	_ = c.raw.SetDeadline(time.Time{})
	if r.send(slices.Concat(h.bytes(grant.Scopes), rest)) {
		if h.upgrade {
			r.handshake()
		} else {
			r.exchange(rest)
		}
	}
	if r.status == 0 && !c.aborted.Load() {
		r.status = http.StatusBadGateway
		c.badGateway(h)
	}
	log.Info("request", "status", r.status, "ms", time.Since(start).Milliseconds())
}

func routeName(r *shard.Route) string {
	if r == nil {
		return "unknown"
	}
	return r.Name()
}

// judge says which route the request is for and what its token gives, or why it is refused. An unknown client learns
// nothing about routes.
func (c *conn) judge(h *head) (*shard.Route, map[string]string, *token.Grant, *shard.Error) {
	if refusal := c.guard(h); refusal != nil {
		return nil, nil, nil, refusal
	}
	grant := c.gate.bearer(h.get("Authorization"))
	if grant == nil {
		return nil, nil, nil, shard.Errorf(shard.CodeUnauthorized, "the API key is missing or not valid here")
	}
	route, params := shard.MatchRoute(h.method, h.path())
	switch {
	case route == nil:
		return nil, nil, grant, shard.Errorf(shard.CodeForbidden, "there is no such route")
	case route.Local:
		return route, nil, grant, shard.Errorf(shard.CodeForbidden, "%s is there on the daemon's host only", route.Name())
	case !shard.ScopesAllow(grant.Scopes, route.Scope):
		return route, nil, grant, shard.Errorf(shard.CodeForbidden, "the API key lacks the scope %s, which %s needs", route.Scope, route.Name())
	}
	return route, params, grant, nil
}

// guard refuses what a web page could make a browser send: a page names its origin, and one that had its own name
// resolve to our address names itself as the host.
func (c *conn) guard(h *head) *shard.Error {
	if refusal := refusalOf(h.checkTarget(false)); refusal != nil {
		return refusal // it was read for a browser, and is no browser's
	}
	for _, origin := range h.get("Origin") {
		if !slices.ContainsFunc(c.gate.o.AllowOrigins, func(allowed string) bool { return strings.EqualFold(allowed, origin) }) {
			return shard.Errorf(shard.CodeForbidden, "pages of %s may not call: allow them with --allow-origin", shard.Quote(origin))
		}
	}
	if !c.gate.hostAllowed(c, h.host) {
		return shard.Errorf(shard.CodeForbidden, "this server does not go by the name %s: give it with --allow-host, or call it by its address", shard.Quote(hostname(h.host)))
	}
	return nil
}

// refuse answers with an error and ends the connection.
func (c *conn) refuse(h *head, e *shard.Error) {
	c.send(h, e.Code.Status(), shard.ErrorBody{Error: shard.ErrorDetail{Code: e.Code, Message: e.Message}})
}

// badGateway is the only answer whose status is not its code's.
func (c *conn) badGateway(h *head) {
	c.send(h, http.StatusBadGateway, shard.ErrorBody{Error: shard.ErrorDetail{Code: shard.CodeInternal, Message: "the daemon does not answer: look whether it runs on the server"}})
}

// send is an answer of the gate's own, after which the connection ends.
func (c *conn) send(h *head, status int, v any) {
	body, err := json.Marshal(v)
	if err != nil {
		return // our own types always encode
	}
	body = append(body, '\n')
	var b bytes.Buffer
	fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\nConnection: close\r\n", status, http.StatusText(status), len(body))
	if status == http.StatusUnauthorized {
		b.WriteString("WWW-Authenticate: Bearer\r\n")
	}
	b.WriteString("\r\n")
	if h == nil || h.method != http.MethodHead {
		b.Write(body)
	}
	_ = c.raw.SetDeadline(time.Now().Add(dialTime))
	if _, err := c.Write(b.Bytes()); err == nil {
		c.linger()
	}
}

// linger ends our side and reads on for a moment: closing with unread bytes would make the kernel send a reset, which
// can overtake the answer.
func (c *conn) linger() {
	_ = closeWrite(c.Conn)
	_ = c.raw.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.Copy(io.Discard, c.Conn)
}

func closeWrite(nc net.Conn) error {
	if w, ok := nc.(interface{ CloseWrite() error }); ok {
		return w.CloseWrite()
	}
	return nil
}

// relay passes bytes between a client and the daemon.
type relay struct {
	*conn
	daemon *net.UnixConn
	head   *head
	// status is the answer's, 0 before there is one.
	status int
}

// send passes bytes to the daemon. There is no bound on the time: a program that does not read its input may take hours.
func (r *relay) send(p []byte) bool {
	_, err := r.daemon.Write(p)
	return err == nil
}

// exchange is a request with one answer; rest is what was sent of its body. The client's end of file goes to the daemon,
// the daemon's to the client, and the daemon's is the end.
func (r *relay) exchange(rest []byte) {
	more := r.head.length
	if more != chunked {
		more -= int64(len(rest))
	}
	up := make(chan struct{})
	go func() {
		defer close(up)
		r.up(more)
	}()
	r.down(nil)
	r.end(up)
}

// end finishes after the daemon's last byte, and waits for the goroutine that reads the client.
func (r *relay) end(up <-chan struct{}) {
	if r.status != 0 {
		_ = closeWrite(r.Conn)
	}
	_ = r.raw.SetReadDeadline(time.Now().Add(lingerTime))
	if r.status == 0 || r.aborted.Load() {
		_ = r.raw.SetReadDeadline(time.Unix(1, 0)) // nobody waits: there was no answer, or no client
	}
	<-up
	if r.status == 0 {
		_ = r.raw.SetDeadline(time.Time{})
	}
}

// up passes a body of so many bytes to the daemon, or all there is when it is chunked; whatever else comes is dropped, so
// that the daemon never sees a byte that is not part of the request.
func (r *relay) up(more int64) {
	gone := false
	err := move(r.Conn, func(p []byte) error {
		if more >= 0 {
			p = p[:min(int64(len(p)), more)]
			more -= int64(len(p))
		}
		if len(p) > 0 && !gone {
			gone = !r.send(p) // the daemon has answered before the body's end; read on, so that the client gets to it
		}
		return nil
	})
	if err != nil {
		r.lost(err)
		return
	}
	_ = r.daemon.CloseWrite()
}

// lost ends the request of a client that broke off. A deadline is our own doing.
func (r *relay) lost(err error) {
	if ne, ok := errors.AsType[net.Error](err); !ok || !ne.Timeout() {
		_ = r.daemon.Close()
	}
}

// down passes the answer to the client, first what is given.
func (r *relay) down(first []byte) {
	pass := func(p []byte) error {
		if r.status == 0 || r.status == http.StatusContinue {
			r.status = statusOf(p)
		}
		_ = r.raw.SetWriteDeadline(time.Now().Add(stallTime))
		if _, err := r.Conn.Write(p); err != nil {
			r.abort()
			return err
		}
		return nil
	}
	if len(first) > 0 && pass(first) != nil {
		return
	}
	_ = move(r.daemon, pass)
}

// statusOf reads the status from the beginning of an answer; anything else counts as none that is known.
func statusOf(p []byte) int {
	if text, ok := bytes.CutPrefix(p, []byte("HTTP/1.1 ")); ok && len(text) >= 3 {
		if n, err := strconv.Atoi(string(text[:3])); err == nil {
			return n
		}
	}
	return http.StatusOK
}

// move reads until the end of file and gives each piece on. splice(2), which io.Copy would use between these sockets, saves
// a tenth of the processor time, but holds a pipe in each direction for as long as a stream is open: four descriptors
// more, where the bound of connections counts two. It also has no place for a deadline of each write.
func move(from net.Conn, to func([]byte) error) error {
	buf := make([]byte, smallBuffer)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if err := to(buf[:n]); err != nil {
				return err
			}
			if n == len(buf) && n < bigBuffer {
				buf = make([]byte, bigBuffer)
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}

// handshake is a request for a stream. Until the daemon has agreed with 101 not one byte of the client goes to it: the
// connection could otherwise carry a second request, with rights of its own choosing.
func (r *relay) handshake() {
	agreed, refused, up := make(chan struct{}), make(chan struct{}), make(chan struct{})
	go func() {
		defer close(up)
		r.input(agreed, refused)
	}()
	answer, err := r.answerHead()
	switch {
	case err != nil:
		close(refused)
	case statusOf(answer) != http.StatusSwitchingProtocols:
		close(refused)
		r.refusal(answer)
	default:
		r.stream.Store(true)
		if !r.gate.streaming() {
			close(refused)
			r.abort()
			break
		}
		close(agreed)
		r.down(answer)
	}
	r.end(up)
}

// streaming says whether a stream may begin: not when the gate is closing, which ends streams before it waits.
func (g *Gate) streaming() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return !g.closing
}

// input passes the client's bytes on once the stream is there.
func (r *relay) input(agreed, refused <-chan struct{}) {
	err := move(r.Conn, func(p []byte) error {
		select {
		case <-agreed:
		case <-refused:
			return nil
		}
		if !r.send(p) {
			return net.ErrClosed
		}
		return nil
	})
	if err != nil {
		r.lost(err)
		return
	}
	_ = r.daemon.CloseWrite()
}

// answerHead reads the head of the daemon's answer, and what came with it.
func (r *relay) answerHead() ([]byte, error) {
	var buf []byte
	piece := make([]byte, smallBuffer)
	for !bytes.Contains(buf, []byte("\r\n\r\n")) {
		n, err := r.daemon.Read(piece)
		buf = append(buf, piece[:n]...)
		if err != nil {
			return nil, err
		}
		if len(buf) > maxHead {
			return nil, errors.New("the answer's head has no end")
		}
	}
	return buf, nil
}

// refusal gives an answer other than 101 to the client and ends the connection, which the daemon would keep.
func (r *relay) refusal(answer []byte) {
	resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(bytes.NewReader(answer), r.daemon)), nil)
	if err != nil {
		return
	}
	defer resp.Body.Close()
	resp.Close = true
	r.status = resp.StatusCode
	_ = r.raw.SetWriteDeadline(time.Now().Add(stallTime))
	if resp.Write(r.Conn) != nil {
		r.abort()
	}
}

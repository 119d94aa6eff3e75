package gate

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

const (
	// announceEvery is how often the daemon hears where previews are: it forgets after three times of silence.
	announceEvery = 5 * time.Second
	// sandboxTime bounds the wait for a sandbox to take a connection; the daemon gives up before.
	sandboxTime = 35 * time.Second
)

// dialDaemon connects to the daemon's socket, in time.
func (p *preview) dialDaemon(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	c, err := (&net.Dialer{}).DialContext(ctx, "unix", p.gate.socket)
	if err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "look whether it runs on the server")
	}
	return c, nil
}

// ask has the daemon carry out a request of the gate's own, and decodes the answer.
func (p *preview) ask(ctx context.Context, method, path string, body, out any) error {
	var sent io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return err
		}
		sent = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://shard"+path, sent)
	if err != nil {
		return err
	}
	resp, err := p.daemon.Do(req)
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "look whether it runs on the server")
	}
	defer resp.Body.Close()
	if resp.StatusCode >= 300 {
		return refused(resp)
	}
	if out == nil {
		return nil
	}
	return json.NewDecoder(io.LimitReader(resp.Body, 1<<20)).Decode(out)
}

// refused is the error in the daemon's answer.
func refused(resp *http.Response) error {
	var body shard.ErrorBody
	if err := json.NewDecoder(io.LimitReader(resp.Body, 64<<10)).Decode(&body); err != nil || body.Error.Code == "" {
		return fmt.Errorf("the daemon answered %s", resp.Status)
	}
	return shard.Errorf(body.Error.Code, "%s", body.Error.Message)
}

func refusalOf(err error) *shard.Error {
	e, _ := errors.AsType[*shard.Error](err)
	return e
}

// lookUp is the sandbox that goes by exactly this id or name; the daemon also knows one by the beginning of its id.
func (p *preview) lookUp(ctx context.Context, ref string) (*shard.Inspection, error) {
	var sb shard.Inspection
	if err := p.ask(ctx, http.MethodGet, "/v0/sandboxes/"+url.PathEscape(ref), nil, &sb); err != nil {
		return nil, err
	}
	if sb.ID != ref && sb.Name != ref {
		return nil, shard.Errorf(shard.CodeNotFound, "there is no sandbox %q", ref)
	}
	return &sb, nil
}

// dialSandbox is the dial of the transport: address is the sandbox's id with the port.
func (p *preview) dialSandbox(ctx context.Context, _, address string) (net.Conn, error) {
	id, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	c, err := p.dialDaemon(ctx)
	if err != nil {
		return nil, err
	}
	ok := false
	defer func() {
		if !ok {
			_ = c.Close()
		}
	}()
	_ = c.SetDeadline(time.Now().Add(sandboxTime))
	stop := context.AfterFunc(ctx, func() { _ = c.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := fmt.Fprintf(c, "GET /v0/sandboxes/%s/dial/%s HTTP/1.1\r\nHost: shard\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n", id, port); err != nil {
		return nil, err
	}
	// What the sandbox says at once can be behind the daemon's answer.
	r := bufio.NewReader(c)
	resp, err := http.ReadResponse(r, nil)
	if err != nil {
		return nil, fmt.Errorf("the daemon's answer: %w", err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		return nil, refused(resp)
	}
	if !stop() {
		return nil, ctx.Err()
	}
	_ = c.SetDeadline(time.Time{})
	first, _ := r.Peek(r.Buffered())
	ok = true
	return &replayed{Conn: c, first: bytes.Clone(first)}, nil
}

// replayed is a connection of which something was read already.
type replayed struct {
	net.Conn
	first []byte
}

func (r *replayed) Read(b []byte) (int, error) {
	if len(r.first) > 0 {
		n := copy(b, r.first)
		r.first = r.first[n:]
		return n, nil
	}
	return r.Conn.Read(b)
}

// announce tells the daemon again and again where previews are, and, when end is closed, that they are no more: shard port url
// on the same host has no other way to know.
func (p *preview) announce(end <-chan struct{}) {
	tick := time.NewTicker(announceEvery)
	defer tick.Stop()
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		select {
		case <-end:
			cancel()
		case <-ctx.Done():
		}
	}()
	for said := ""; ; {
		now := ""
		if err := p.ask(ctx, http.MethodPut, "/v0/daemon/preview", shard.PreviewRequest{Origin: p.origin.String()}, nil); err != nil && ctx.Err() == nil {
			now = err.Error()
		}
		if now != "" && now != said {
			p.gate.o.Log.Warn("the daemon does not hear where previews are: shard port url on its host has no address", "err", now)
		}
		said = now
		select {
		case <-end:
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), announceEvery)
			_ = p.ask(ctx, http.MethodPut, "/v0/daemon/preview", shard.PreviewRequest{}, nil) // else the daemon forgets it by itself
			cancel()
			return
		case <-tick.C:
		}
	}
}

// link answers the one route that the gate answers itself.
func (c *conn) link(h *head, grant *token.Grant, ref, port string) int {
	l, err := c.gate.signLink(h, grant, ref, port)
	if e := refusalOf(err); e != nil {
		c.refuse(h, e)
		return e.Code.Status()
	}
	if err != nil {
		c.badGateway(h)
		return http.StatusBadGateway
	}
	c.send(h, http.StatusCreated, l)
	return http.StatusCreated
}

func (g *Gate) signLink(h *head, grant *token.Grant, ref, portText string) (*shard.PortLink, error) {
	if g.preview == nil {
		return nil, shard.Errorf(shard.CodeUnsupported, "this server has no preview addresses: start it with --preview-domain")
	}
	port, err := strconv.ParseUint(portText, 10, 16)
	if err != nil || port == 0 {
		return nil, shard.Invalidf("guest port %s is not a port: use 1 to %d", shard.Quote(portText), shard.MaxPort)
	}
	if h.length != 0 {
		return nil, shard.Invalidf("this request has no body")
	}
	_, query, _ := strings.Cut(h.target, "?")
	life := shard.DefaultLinkLife
	values, err := url.ParseQuery(query)
	for name, v := range values {
		n, perr := strconv.ParseInt(v[0], 10, 32)
		if name != "expires" || len(v) != 1 || perr != nil || n < 1 || n > int64(shard.MaxLinkLife/time.Second) {
			return nil, shard.Invalidf("the one query parameter here is expires, 1 to %d seconds", int64(shard.MaxLinkLife/time.Second))
		}
		life = time.Duration(n) * time.Second
	}
	if err != nil {
		return nil, shard.Invalidf("the query is not valid")
	}
	ctx, cancel := context.WithTimeout(context.Background(), dialTime)
	defer cancel()
	if err := shard.CheckRef("sandbox", ref); err != nil {
		return nil, err
	}
	var sb shard.Inspection
	if err := g.preview.ask(ctx, http.MethodGet, "/v0/sandboxes/"+url.PathEscape(ref), nil, &sb); err != nil {
		return nil, err
	}
	signed, expires, err := g.book.SignLink(grant, sb.ID, int(port), life)
	if err != nil {
		return nil, err
	}
	return shard.NewPortLink(g.preview.origin, sb.ID, int(port), signed, expires), nil
}

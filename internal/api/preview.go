package api

import (
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// previewLife is how long an origin of preview addresses is remembered: shard serve says it again every few seconds, so that
// neither process needs to know when the other one started.
const previewLife = 15 * time.Second

// previews is where a shard serve on this host has its preview addresses.
type previews struct {
	mu     sync.Mutex
	origin string
	said   time.Time
}

func (p *previews) get() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	if time.Since(p.said) > previewLife {
		return ""
	}
	return p.origin
}

func (a *API) putPreview(c *call) error {
	var req shard.PreviewRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	where := ""
	if req.Origin != "" {
		origin, err := shard.ParsePreviewOrigin(req.Origin)
		if err != nil {
			return err
		}
		where = origin.String()
	}
	a.previews.mu.Lock()
	a.previews.origin, a.previews.said = where, time.Now()
	a.previews.mu.Unlock()
	return c.noContent()
}

// link is a Door route: the daemon has no key.
func (a *API) link(*call) error {
	return shard.Errorf(shard.CodeUnsupported, "links are signed by shard serve: ask it, or run shard port url on the daemon's host")
}

// dial hands the connection over to a port of the sandbox. Until it has been told 101 the client says nothing, so that a
// refusal is an answer like any other.
func (a *API) dial(c *call) error {
	port, err := c.port("guest port", "guest_port")
	if err != nil {
		return err
	}
	if !strings.EqualFold(c.r.Header.Get("Upgrade"), "tcp") || !strings.EqualFold(c.r.Header.Get("Connection"), "upgrade") || c.r.ContentLength != 0 {
		return shard.Invalidf("this route needs Connection: Upgrade, Upgrade: tcp and no body")
	}
	dialled, err := a.Engine.Dial(c.r.Context(), c.param("id"), port)
	if err != nil {
		return err
	}
	defer dialled.Close()
	// The answer comes after the hijack: before it, net/http reads ahead, and would have the first byte of a quick client.
	conn, rw, err := http.NewResponseController(c.w).Hijack()
	if err != nil {
		return err
	}
	defer conn.Close()
	c.sent = true
	duplex, ok := conn.(guest.Duplex)
	if !ok || rw.Reader.Buffered() > 0 {
		return nil // it did not wait
	}
	if w, ok := c.w.(*statusWriter); ok {
		w.status = http.StatusSwitchingProtocols
	}
	_ = conn.SetDeadline(time.Now().Add(stalled))
	if _, err := conn.Write([]byte("HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")); err != nil {
		return nil
	}
	_ = conn.SetDeadline(time.Time{})
	a.recorder.streams.Add(1)
	defer a.recorder.streams.Add(-1)
	// How it ended is seen on both sides, and is nobody's failure here.
	_ = dialled.Pass(duplex)
	return nil
}

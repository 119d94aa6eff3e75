package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/engine"
)

// egressLog answers what was decided about a sandbox's traffic: as a list, or followed, as JSON lines or WebSocket text
// messages. A WebSocket's close says why the end came.
func (a *API) egressLog(c *call) error {
	follow, err := c.flag("follow")
	if err != nil {
		return err
	}
	if !follow {
		if upgrades(c.r) {
			return shard.Invalidf("a WebSocket carries a log that is followed: add follow=true")
		}
		decisions, cut, err := a.Engine.EgressLog(c.param("id"))
		if err != nil {
			return err
		}
		if cut > 0 {
			c.w.Header().Set("Shard-Egress-Cut", strconv.Itoa(cut))
		}
		return c.json(http.StatusOK, decisions)
	}
	f, cut, err := a.Engine.FollowEgressLog(c.param("id"))
	if err != nil {
		return err
	}
	defer f.Close()
	if cut > 0 {
		c.w.Header().Set("Shard-Egress-Cut", strconv.Itoa(cut))
	}
	c.sent = true
	if !upgrades(c.r) {
		return c.egressLines(f)
	}
	conn, err := websocket.Accept(c.w, c.r, &websocket.AcceptOptions{InsecureSkipVerify: true}) // as outputMessages says
	if err != nil {
		return nil
	}
	defer conn.CloseNow()
	// A client has nothing to say: its close, or a message, ends the log.
	if code, reason := a.egressMessages(conn.CloseRead(context.WithoutCancel(c.r.Context())), conn, f); code != 0 {
		_ = conn.Close(code, reason)
	}
	return nil
}

// egressLines writes a decision per line until the end; a failure is the last line.
func (c *call) egressLines(f *engine.EgressFollow) error {
	c.w.Header().Set("Content-Type", "application/x-ndjson")
	c.w.WriteHeader(http.StatusOK)
	w := deadlined{c.w}
	for {
		if w.flush() != nil {
			return nil
		}
		decisions, err := f.Next(c.r.Context())
		switch {
		case errors.Is(err, io.EOF), c.r.Context().Err() != nil:
			return nil
		case err != nil:
			_ = json.NewEncoder(w).Encode(shard.ErrorBody{Error: publicError(err)})
			return nil
		}
		for _, d := range decisions {
			if _, err := w.Write(append(d[:len(d):len(d)], '\n')); err != nil {
				return nil
			}
		}
	}
}

// egressMessages sends a decision per message, and says how to close; code 0 is not to.
func (a *API) egressMessages(ctx context.Context, conn *websocket.Conn, f *engine.EgressFollow) (code websocket.StatusCode, reason string) {
	send := func(d json.RawMessage) error {
		ctx, cancel := context.WithTimeout(ctx, stalled)
		defer cancel()
		return conn.Write(ctx, websocket.MessageText, d)
	}
	for {
		decisions, err := f.Next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return websocket.StatusNormalClosure, f.Reason()
		case ctx.Err() != nil:
			return 0, ""
		case err != nil:
			a.Log.Warn("the following of an egress log ended", "err", err)
			reason := publicError(err).Message
			return websocket.StatusInternalError, strings.ToValidUTF8(reason[:min(len(reason), maxReason)], "")
		}
		for _, d := range decisions {
			if send(d) != nil {
				return 0, ""
			}
		}
	}
}

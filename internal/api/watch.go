package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/engine"
)

// maxReason bounds the text of a WebSocket's close, in bytes (RFC 6455).
const maxReason = 123

// watch reports what changes below a directory, as JSON lines or WebSocket text messages. The answer begins when nothing
// is missed any more. It ends with the directory or the sandbox: a WebSocket then says why in its close.
func (a *API) watch(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	recursive, err := c.flag("recursive")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(c.r.Context())
	defer cancel()
	w, err := a.Engine.Watch(ctx, c.param("id"), path, recursive)
	if err != nil {
		return err
	}
	defer w.Close()
	c.sent = true
	if !upgrades(c.r) {
		return c.watchLines(ctx, w)
	}
	conn, err := websocket.Accept(c.w, c.r, nil)
	if err != nil {
		return nil // Accept has answered
	}
	defer conn.CloseNow()
	// A client has nothing to say: its close, or a message, ends the watch.
	context.AfterFunc(conn.CloseRead(context.WithoutCancel(ctx)), cancel)
	code, reason := a.watchMessages(ctx, conn, w)
	if code != 0 {
		_ = conn.Close(code, reason)
	}
	return nil
}

// watchLines writes one JSON object per line until the end; a failure is the last one.
func (c *call) watchLines(ctx context.Context, w *engine.FileWatch) error {
	c.w.Header().Set("Content-Type", "application/x-ndjson")
	c.w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(c.w)
	out := json.NewEncoder(c.w)
	if err := rc.Flush(); err != nil {
		return err
	}
	for {
		events, err := w.Next()
		_ = rc.SetWriteDeadline(time.Now().Add(stalled))
		switch {
		case errors.Is(err, io.EOF), ctx.Err() != nil:
			return nil
		case err != nil:
			if _, public := errors.AsType[*shard.Error](err); !public {
				return err // fail logs it, and cuts the answer
			}
			_ = out.Encode(shard.ErrorBody{Error: publicError(err)})
			return nil
		}
		for i := range events {
			if err := out.Encode(&events[i]); err != nil {
				return nil
			}
		}
		if err := rc.Flush(); err != nil {
			return nil
		}
		_ = rc.SetWriteDeadline(time.Time{})
	}
}

// watchMessages sends one JSON object per message, and says how to close; code 0 is not to.
func (a *API) watchMessages(ctx context.Context, conn *websocket.Conn, w *engine.FileWatch) (code websocket.StatusCode, reason string) {
	send := func(e *shard.FileEvent) error {
		data, err := json.Marshal(e)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, stalled)
		defer cancel()
		return conn.Write(ctx, websocket.MessageText, data)
	}
	for {
		events, err := w.Next()
		switch {
		case errors.Is(err, io.EOF):
			return websocket.StatusNormalClosure, w.Reason()
		case ctx.Err() != nil:
			return 0, ""
		case err != nil:
			a.Log.Warn("a watch of files ended", "err", err)
			reason := publicError(err).Message
			return websocket.StatusInternalError, strings.ToValidUTF8(reason[:min(len(reason), maxReason)], "")
		}
		for i := range events {
			if send(&events[i]) != nil {
				return 0, ""
			}
		}
	}
}

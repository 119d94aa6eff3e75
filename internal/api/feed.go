package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
)

// maxReason bounds the text of a WebSocket's close, in bytes (RFC 6455).
const maxReason = 123

// feed is what goes on until a sandbox, or what is looked at in it, ends: next waits for some, io.EOF is the end, and
// reason then says why. what names it in the daemon's log.
type feed[T any] struct {
	next   func(context.Context) ([]T, error)
	reason func() string
	what   string
}

// serveFeed answers with a feed, an object per line or per WebSocket text message. A failure is the last line; a WebSocket
// says why the end came in its close. cancel ends ctx, which the feed ends with.
func serveFeed[T any](ctx context.Context, cancel context.CancelFunc, a *API, c *call, f feed[T]) error {
	c.sent = true
	if !upgrades(c.r) {
		return followLines(ctx, c, f)
	}
	conn, err := websocket.Accept(c.w, c.r, &websocket.AcceptOptions{InsecureSkipVerify: true}) // as attach says
	if err != nil {
		return nil // Accept has answered
	}
	defer conn.CloseNow()
	// A client has nothing to say: its close, or a message, ends the feed.
	context.AfterFunc(conn.CloseRead(context.WithoutCancel(ctx)), cancel)
	if code, reason := followMessages(ctx, a, conn, f); code != 0 {
		_ = conn.Close(code, reason)
	}
	return nil
}

func followLines[T any](ctx context.Context, c *call, f feed[T]) error {
	c.w.Header().Set("Content-Type", "application/x-ndjson")
	c.w.WriteHeader(http.StatusOK)
	w := deadlined{c.w}
	out := json.NewEncoder(w)
	for {
		if w.flush() != nil {
			return nil
		}
		some, err := f.next(ctx)
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
		for i := range some {
			if out.Encode(&some[i]) != nil {
				return nil
			}
		}
	}
}

// followMessages says how to close; code 0 is not to.
func followMessages[T any](ctx context.Context, a *API, conn *websocket.Conn, f feed[T]) (code websocket.StatusCode, reason string) {
	send := func(v *T) error {
		data, err := json.Marshal(v)
		if err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(ctx, stalled)
		defer cancel()
		return conn.Write(ctx, websocket.MessageText, data)
	}
	for {
		some, err := f.next(ctx)
		switch {
		case errors.Is(err, io.EOF):
			return websocket.StatusNormalClosure, f.reason()
		case ctx.Err() != nil:
			return 0, ""
		case err != nil:
			a.Log.Warn(f.what+" ended", "err", err)
			reason := publicError(err).Message
			return websocket.StatusInternalError, strings.ToValidUTF8(reason[:min(len(reason), maxReason)], "")
		}
		for i := range some {
			if send(&some[i]) != nil {
				return 0, ""
			}
		}
	}
}

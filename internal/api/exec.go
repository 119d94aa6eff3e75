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

// The first byte of a stream's message (contract §3.5). Output messages carry the agent's channel, which is the same.
const (
	frameStdin       = 0x00
	frameExit        = 0x03
	frameStdinClosed = 0x04
	frameError       = 0x05
)

const (
	// maxMessage bounds what a client may send in one message.
	maxMessage = 1<<20 + 1
	// stalled is how long a client may take nothing before it is cut without a closing message.
	stalled = 30 * time.Second
)

func (a *API) exec(c *call) error {
	var req shard.ExecRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	rec, err := a.Engine.Exec(c.r.Context(), c.param("id"), req)
	if err != nil {
		return err
	}
	return c.json(201, rec)
}

func (a *API) listExecs(c *call) error {
	execs, err := a.Engine.ListExecs(c.param("id"))
	if err != nil {
		return err
	}
	items, next, err := page(c, execs, func(x shard.Exec) string { return x.ID })
	if err != nil {
		return err
	}
	return c.json(200, map[string]any{"execs": items, "next": next})
}

func (a *API) getExec(c *call) error {
	if upgrades(c.r) {
		return a.attach(c)
	}
	wait, err := c.flag("wait")
	if err != nil {
		return err
	}
	rec, err := a.Engine.GetExec(c.r.Context(), c.param("id"), c.param("exec"), wait)
	if err != nil {
		return err
	}
	return c.json(200, rec)
}

func (a *API) deleteExec(c *call) error {
	if err := a.Engine.DeleteExec(c.param("id"), c.param("exec")); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) killExec(c *call) error {
	var req struct {
		Signal string `json:"signal"`
	}
	if err := c.body(&req, true); err != nil {
		return err
	}
	switch req.Signal {
	case "":
		req.Signal = "TERM"
	case "TERM", "KILL":
	default:
		return shard.Invalidf("signal %s is not TERM or KILL", shard.Quote(req.Signal))
	}
	if err := a.Engine.KillExec(c.r.Context(), c.param("id"), c.param("exec"), req.Signal); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) resizeExec(c *call) error {
	var size shard.Size
	if err := c.body(&size, true); err != nil {
		return err
	}
	if err := a.Engine.ResizeExec(c.r.Context(), c.param("id"), c.param("exec"), size); err != nil {
		return err
	}
	return c.noContent()
}

// upgrades says whether the request asks for a WebSocket.
func upgrades(r *http.Request) bool {
	if !strings.EqualFold(r.Header.Get("Upgrade"), "websocket") {
		return false
	}
	for _, v := range strings.Split(r.Header.Get("Connection"), ",") {
		if strings.EqualFold(strings.TrimSpace(v), "upgrade") {
			return true
		}
	}
	return false
}

// attach carries the streams of a command: what is held, then live output, then one closing message. Its end leaves the
// command running.
func (a *API) attach(c *call) error {
	att, err := a.Engine.Attach(c.param("id"), c.param("exec"))
	if err != nil {
		return err
	}
	defer att.Close()
	c.sent = true // websocket.Accept answers, whatever comes of it
	conn, err := websocket.Accept(c.w, c.r, nil)
	if err != nil {
		return nil
	}
	defer conn.CloseNow()
	conn.SetReadLimit(maxMessage)
	ctx, cancel := context.WithCancel(context.WithoutCancel(c.r.Context()))
	input := make(chan struct{})
	go func() {
		defer close(input)
		defer cancel()
		readInput(ctx, conn, att)
	}()
	defer func() { cancel(); <-input }()
	if !writeOutput(ctx, conn, att) {
		return nil
	}
	_ = conn.Close(websocket.StatusNormalClosure, "")
	return nil
}

// readInput passes the client's messages to the program until the client goes.
func readInput(ctx context.Context, conn *websocket.Conn, att *engine.Attachment) {
	for {
		kind, p, err := conn.Read(ctx)
		if err != nil {
			return
		}
		switch {
		case kind == websocket.MessageBinary && len(p) > 0 && p[0] == frameStdin:
			err = att.Stdin(ctx, p[1:])
		case kind == websocket.MessageBinary && len(p) == 1 && p[0] == frameStdinClosed:
			err = att.CloseStdin()
		default:
			_ = conn.Close(websocket.StatusProtocolError, "a message is neither input nor its end")
			return
		}
		if err != nil && ctx.Err() != nil {
			return
		}
	}
}

// writeOutput sends a command's output and its closing message; false when the client has gone or stalls.
func writeOutput(ctx context.Context, conn *websocket.Conn, att *engine.Attachment) bool {
	send := func(p []byte) error {
		ctx, cancel := context.WithTimeout(ctx, stalled)
		defer cancel()
		return conn.Write(ctx, websocket.MessageBinary, p)
	}
	for {
		message, err := att.Next(ctx)
		switch {
		case err == nil:
			if send(message) != nil {
				return false
			}
			att.Consumed(len(message) - 1)
			continue
		case errors.Is(err, io.EOF):
			rec := att.Exit()
			if rec.ExitStatus == nil {
				return false
			}
			return send(closing(frameExit, struct {
				shard.ExitStatus
				LostBytes int64 `json:"lost_bytes,omitempty"`
			}{*rec.ExitStatus, rec.LostBytes})) == nil
		case ctx.Err() != nil:
			return false
		}
		return send(closing(frameError, shard.ErrorBody{Error: publicError(err)})) == nil
	}
}

func closing(frame byte, v any) []byte {
	data, _ := json.Marshal(v) // our own types always encode
	return append([]byte{frame}, data...)
}

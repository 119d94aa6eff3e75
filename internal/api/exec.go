package api

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"
	"syscall"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/engine"
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
	return c.json(200, shard.ExecList{Execs: items, Next: next})
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
	var req shard.KillRequest
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
	c.sent = true // websocket.Accept answers, whatever comes of it
	h := &hijacker{ResponseWriter: c.w, stall: stalled}
	// No page of another origin can send the token that `shard serve` asks for, so the origin says nothing.
	conn, err := websocket.Accept(h, c.r, &websocket.AcceptOptions{InsecureSkipVerify: true,
		OnPingReceived: func(context.Context, []byte) bool { return !h.conn.busy() }})
	if err != nil {
		att.Close(0)
		return nil
	}
	defer conn.CloseNow()
	conn.SetReadLimit(maxMessage)
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(c.r.Context()))
	input := make(chan error, 1)
	go func() {
		err := readInput(ctx, conn, h.conn, att)
		cancel(err)
		input <- err
	}()
	err = writeOutput(ctx, conn, att)
	switch {
	case err == nil && conn.Close(websocket.StatusNormalClosure, "") == nil:
		att.Close(0) // the client has answered the last message: it has read all
		cancel(nil)
		<-input
		return nil
	case errors.Is(err, syscall.EPIPE), errors.Is(err, syscall.ECONNRESET):
		// The client has gone. What it sent before may still be in the socket, and is read to the end.
		err = <-input
	default:
		_ = conn.CloseNow()
		cancel(nil)
		err = <-input
	}
	_ = conn.CloseNow()
	cancel(nil)
	att.Close(h.conn.left(err))
	return nil
}

// readInput passes the client's messages to the program until the client goes. A *shard.Error is for the client.
func readInput(ctx context.Context, conn *websocket.Conn, client *clientConn, att *engine.Attachment) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	for {
		kind, p, err := conn.Read(ctx)
		if err != nil {
			return err
		}
		stop := client.whileThere(cancel)
		switch {
		case kind == websocket.MessageBinary && len(p) > 0 && p[0] == shard.FrameStdin:
			err = att.Stdin(ctx, p[1:])
		case kind == websocket.MessageBinary && len(p) == 1 && p[0] == shard.FrameStdinClosed:
			err = att.CloseStdin(ctx)
		default:
			stop()
			_ = conn.Close(websocket.StatusProtocolError, "a message is neither input nor its end")
			return errMessage
		}
		stop()
		if err != nil {
			return err
		}
	}
}

var errMessage = errors.New("the client sent a message that is none")

var errNoExit = errors.New("the command has no exit")

// writeOutput sends a command's output and its closing message, at which the streams are free for another client. An error
// says that the client has gone or stalls.
func writeOutput(ctx context.Context, conn *websocket.Conn, att *engine.Attachment) error {
	send := func(p []byte) error { return conn.Write(context.Background(), websocket.MessageBinary, p) }
	for {
		message, err := att.Next(ctx)
		switch {
		case err == nil:
			if err := send(message); err != nil {
				return err
			}
			att.Consumed(len(message) - 1)
			continue
		case errors.Is(err, io.EOF):
			rec := att.Exit()
			if rec.ExitStatus == nil {
				return errNoExit
			}
			att.Release()
			return send(closing(shard.FrameExit, shard.ExitMessage{ExitStatus: *rec.ExitStatus, LostBytes: rec.LostBytes}))
		}
		if _, public := errors.AsType[*shard.Error](err); !public {
			return err
		}
		att.Release()
		return send(closing(shard.FrameError, shard.ErrorBody{Error: publicError(err)}))
	}
}

func closing(frame byte, v any) []byte {
	data, _ := json.Marshal(v) // our own types always encode
	return append([]byte{frame}, data...)
}

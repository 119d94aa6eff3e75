package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/engine"
)

func (a *API) runProcess(c *call) error {
	var req shard.RunRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	p, err := a.Engine.Run(c.r.Context(), c.param("id"), req)
	if err != nil {
		return err
	}
	return c.json(201, p)
}

func (a *API) listProcesses(c *call) error {
	processes, err := a.Engine.ListProcesses(c.param("id"))
	if err != nil {
		return err
	}
	return c.json(200, shard.ProcessList{Processes: processes})
}

func (a *API) getProcess(c *call) error {
	p, err := a.Engine.GetProcess(c.param("id"), c.param("name"))
	if err != nil {
		return err
	}
	return c.json(200, p)
}

func (a *API) killProcess(c *call) error {
	var req shard.KillProcessRequest
	if err := c.body(&req, true); err != nil {
		return err
	}
	p, err := a.Engine.KillProcess(c.r.Context(), c.param("id"), c.param("name"), req.Force)
	if err != nil {
		return err
	}
	return c.json(200, p)
}

// attachProcess carries the output of the current run, and of those that follow, and then the record; without an upgrade
// it waits for the end and answers with the record.
func (a *API) attachProcess(c *call) error {
	if !upgrades(c.r) {
		p, err := a.Engine.WaitProcess(c.r.Context(), c.param("id"), c.param("name"))
		if err != nil {
			return err
		}
		return c.json(200, p)
	}
	out, err := a.Engine.AttachProcess(c.param("id"), c.param("name"))
	if err != nil {
		return err
	}
	return c.outputMessages(out, func() (any, error) { return out.Process() })
}

func (a *API) processLogs(c *call) error {
	follow, err := c.follows()
	if err != nil {
		return err
	}
	if !follow {
		log, err := a.Engine.ProcessLog(c.param("id"), c.param("name"))
		if err != nil {
			return err
		}
		defer log.Close()
		c.plainText()
		// A body whose length is not told ends with its last chunk: a fault must cut it.
		if _, err := io.Copy(deadlined{c.w}, log); err != nil {
			panic(http.ErrAbortHandler)
		}
		return nil
	}
	out, err := a.Engine.FollowLog(c.r.Context(), c.param("id"), c.param("name"))
	if err != nil {
		return err
	}
	if upgrades(c.r) {
		return c.outputMessages(out, func() (any, error) { return shard.LogEnd{Reason: out.Reason()}, nil })
	}
	defer out.Close()
	c.plainText()
	w := deadlined{c.w}
	for {
		if err := w.flush(); err != nil {
			return nil
		}
		message, err := out.Next(c.r.Context())
		switch {
		case err == nil:
			if _, err := w.Write(message[1:]); err != nil {
				return nil
			}
		case errors.Is(err, io.EOF), c.r.Context().Err() != nil:
			return nil
		default:
			return err // fail logs it, and cuts the answer
		}
	}
}

func (c *call) plainText() {
	c.w.Header().Set("Content-Type", "text/plain; charset=utf-8")
	c.sent = true
	c.w.WriteHeader(http.StatusOK)
}

// deadlined writes to a client that must take something in time.
type deadlined struct{ w http.ResponseWriter }

func (d deadlined) Write(p []byte) (int, error) {
	_ = http.NewResponseController(d.w).SetWriteDeadline(time.Now().Add(stalled))
	return d.w.Write(p)
}

func (d deadlined) flush() error {
	rc := http.NewResponseController(d.w)
	_ = rc.SetWriteDeadline(time.Now().Add(stalled))
	return rc.Flush()
}

// outputMessages upgrades the request and carries a process's output, with last as the closing message. It closes out.
func (c *call) outputMessages(out *engine.Output, last func() (any, error)) error {
	defer out.Close()
	c.sent = true // websocket.Accept answers, whatever comes of it
	// No page of another origin can send the token that `shard serve` asks for, so the origin says nothing.
	conn, err := websocket.Accept(c.w, c.r, &websocket.AcceptOptions{InsecureSkipVerify: true})
	if err != nil {
		return nil
	}
	defer conn.CloseNow()
	// A client has nothing to say: its close, or a message, ends the stream.
	ctx := conn.CloseRead(context.WithoutCancel(c.r.Context()))
	send := func(p []byte) error {
		ctx, cancel := context.WithTimeout(ctx, stalled)
		defer cancel()
		return conn.Write(ctx, websocket.MessageBinary, p)
	}
	for {
		message, err := out.Next(ctx)
		if err == nil {
			if send(message) != nil {
				return nil
			}
			continue
		}
		var final []byte
		if errors.Is(err, io.EOF) {
			var v any
			if v, err = last(); err == nil {
				final = closing(shard.FrameExit, v)
			}
		}
		if ctx.Err() != nil {
			return nil
		}
		if final == nil {
			final = closing(shard.FrameError, shard.ErrorBody{Error: publicError(err)})
		}
		if send(final) == nil {
			_ = conn.Close(websocket.StatusNormalClosure, "")
		}
		return nil
	}
}

package engine

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// hold keeps the output for the first client that attaches, for at most stall.
func (c *Command) hold() {
	r, err := c.spool.Attach()
	if err != nil {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.first = r
	c.timer = time.AfterFunc(stall, func() {
		c.mu.Lock()
		mine := c.first == r
		if mine {
			c.first = nil
		}
		c.mu.Unlock()
		if mine {
			r.Close(0)
			c.sb.evict()
		}
	})
}

// Attachment is one client on the streams of a command.
type Attachment struct {
	c *Command
	r *stream.Reader
}

// Attach gives the streams of a command to one client; in_use while another has them.
func (e *Engine) Attach(ref, id string) (*Attachment, error) {
	c, err := e.command(ref, id)
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	r := c.first
	c.first = nil
	if r != nil {
		c.timer.Stop()
	}
	c.mu.Unlock()
	if r == nil {
		switch r, err = c.spool.Attach(); {
		case errors.Is(err, stream.ErrInUse):
			return nil, shard.Errorf(shard.CodeInUse, "another client is attached to command %s", id)
		case errors.Is(err, stream.ErrClosed):
			return nil, notFound("command", id)
		case err != nil:
			return nil, shard.Wrap(shard.CodeInternal, err, "the held output of command %s could not be read", id)
		}
	}
	return &Attachment{c: c, r: r}, nil
}

// Next returns the next output as a message, its channel in the first byte; io.EOF when the program has ended and all was
// read, and the reason when the command is no more. It waits until ctx ends.
func (a *Attachment) Next(ctx context.Context) (message []byte, err error) {
	message, err = a.r.Next(ctx.Done())
	if err == nil || err == io.EOF {
		return message, err
	}
	a.c.mu.Lock()
	gone := a.c.gone
	a.c.mu.Unlock()
	switch {
	case gone != nil:
		return nil, gone
	case ctx.Err() != nil:
		if cause, ok := errors.AsType[*shard.Error](context.Cause(ctx)); ok {
			return nil, cause
		}
		return nil, ctx.Err()
	case errors.Is(err, stream.ErrClosed):
		return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: attach again when it is back")
	}
	return nil, shard.Wrap(shard.CodeInternal, err, "the held output could not be read")
}

// Consumed says that n bytes of output were passed on to the client.
func (a *Attachment) Consumed(n int) { a.r.Consumed(n) }

// Release lets another client attach, once Next has said io.EOF.
func (a *Attachment) Release() { a.r.Release() }

// Close detaches the client. The command runs on. unread is how many of the bytes passed on the client may not have read.
func (a *Attachment) Close(unread int64) {
	a.r.Close(unread)
	if a.c.Ended() {
		a.c.sb.evict()
	}
}

// Exit waits for the end of the command, after Next said io.EOF.
func (a *Attachment) Exit() shard.Exec {
	<-a.c.done
	return a.c.Record()
}

// Stdin passes input to the program; it waits while the program does not read. Input for a program that has ended, has no
// input or closed its end is dropped. A *shard.Error says that input was lost.
func (a *Attachment) Stdin(ctx context.Context, p []byte) error {
	c := a.c
	if !c.stdin {
		return nil
	}
	for {
		cmd, err := c.attended(ctx)
		if cmd == nil || err != nil {
			return err
		}
		n, err := cmd.Write(ctx, p)
		c.mu.Lock()
		c.sent += int64(n)
		c.mu.Unlock()
		switch {
		case errors.Is(err, guest.ErrQuiesced): // the command is gone with it, or a pause has failed and all goes on
			p = p[n:]
			continue
		case errors.Is(err, guest.ErrLost), errors.Is(err, guest.ErrProtocol):
			return errInput
		}
		return ctx.Err() // otherwise the program takes no more
	}
}

// CloseStdin ends the program's input.
func (a *Attachment) CloseStdin(ctx context.Context) error {
	if !a.c.stdin {
		return nil
	}
	for {
		cmd, err := a.c.attended(ctx)
		if cmd == nil || err != nil {
			return err
		}
		err = cmd.CloseStdin()
		switch {
		case errors.Is(err, guest.ErrQuiesced):
			continue
		case err != nil && !a.c.Ended():
			return errInput
		}
		return nil
	}
}

var errInput = shard.Errorf(shard.CodeInternal, "the sandbox's agent broke off, and input was lost: attach again and look how far the command came")

// attended waits for a session that has the command; nil when the command has ended.
func (c *Command) attended(ctx context.Context) (*guest.Command, error) {
	for {
		c.mu.Lock()
		cmd, attending, lost := c.guest, c.attending, c.inputLost
		c.inputLost = false
		c.mu.Unlock()
		switch {
		case lost:
			return nil, errInput
		case cmd != nil:
			return cmd, nil
		}
		select {
		case <-attending:
		case <-c.done:
			return nil, nil
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

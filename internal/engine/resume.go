package engine

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// resumeCommands takes up the commands of a sandbox in a new session: each goes on behind the last byte that is held.
// What the agent has and no record names is ended. When the agent breaks off, the next session does the rest.
func (e *Engine) resumeCommands(sb *sandbox, session *guest.Session) {
	ctx, cancel := context.WithTimeout(e.ctx, execTime)
	defer cancel()
	sb.mu.Lock()
	commands := slices.Clone(sb.commands)
	sb.mu.Unlock()
	for _, c := range commands { // so that the agent's list, asked for next, has every one that was started
		select {
		case <-c.launched:
		case <-ctx.Done():
			e.giveUp(sb, session, "wait for a command to start", ctx.Err())
			return
		}
	}
	var head guest.ExecsHead
	if err := session.Call(ctx, guest.OpExecs, nil, &head); err != nil {
		e.giveUp(sb, session, "list the agent's commands", err)
		return
	}
	agents := make(map[string]guest.HeldExec, len(head.Execs))
	for _, h := range head.Execs {
		agents[h.ID] = h
	}
	for _, c := range commands {
		h, known := agents[c.rec.ID]
		switch {
		case c.isIn(session): // started just now
		case c.Ended():
			if known {
				_ = session.Call(ctx, guest.OpForget, guest.ForgetArgs{ID: c.rec.ID}, nil)
			}
		case !known: // stored, and never started
			e.lose(sb, c)
		default:
			if err := c.resume(ctx, session, h.Offset); err != nil {
				if _, refused := errors.AsType[*shard.Error](err); !refused {
					e.giveUp(sb, session, "resume a command", err)
					return
				}
				e.Log.Error("resume a command", "sandbox", sb.id, "exec", c.rec.ID, "err", err)
				e.lose(sb, c)
			}
		}
	}
	e.endStrangers(ctx, sb, session, head)
}

// giveUp ends a session that does not do what it is for, so that the watch makes another.
func (e *Engine) giveUp(sb *sandbox, session *guest.Session, what string, err error) {
	if e.ctx.Err() == nil {
		e.Log.Warn(what, "sandbox", sb.id, "err", err)
		_ = session.Close()
	}
}

// resume takes up one command. The agent holds its output from offset on.
func (c *Command) resume(ctx context.Context, session *guest.Session, offset int64) error {
	c.spool.Skip(offset)
	cmd, err := session.Resume(ctx, c.rec.ID, c.spool.Resume(), (*sink)(c))
	if err != nil {
		return err
	}
	c.attend(session, cmd)
	return nil
}

// isIn says whether a session has the command already.
func (c *Command) isIn(session *guest.Session) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session == session
}

// lose drops a command of which only the record is left.
func (e *Engine) lose(sb *sandbox, c *Command) {
	e.Log.Warn("a command was never started", "sandbox", sb.id, "exec", c.rec.ID)
	sb.leave(c)
	c.drop()
}

// reap ends the commands that the agent has and no record names, after a start of which the outcome is not known.
func (e *Engine) reap(sb *sandbox) {
	ctx, cancel := context.WithTimeout(e.ctx, execTime)
	defer cancel()
	session, err := sb.session(ctx)
	if err != nil {
		return // the next session does it
	}
	var head guest.ExecsHead
	if err := session.Call(ctx, guest.OpExecs, nil, &head); err == nil {
		e.endStrangers(ctx, sb, session, head)
	}
}

func (e *Engine) endStrangers(ctx context.Context, sb *sandbox, session *guest.Session, head guest.ExecsHead) {
	for _, h := range head.Execs {
		sb.mu.Lock()
		mine := slices.ContainsFunc(sb.commands, func(c *Command) bool { return c.rec.ID == h.ID })
		sb.mu.Unlock()
		if mine {
			continue
		}
		e.Log.Info("end a command that a pause or a failed start left", "sandbox", sb.id, "exec", h.ID)
		// First: to be taken up lets a command go on that a pause stopped.
		_ = session.Call(ctx, guest.OpSignal, guest.SignalArgs{ID: h.ID, Signal: "KILL"}, nil)
		s := &stranger{}
		cmd, err := session.Resume(ctx, h.ID, h.Offset, s)
		if err != nil {
			continue // it has just been forgotten, or the next session does it
		}
		s.attend(cmd, func() {
			e.wg.Go(func() {
				ctx, cancel := context.WithTimeout(e.ctx, execTime)
				defer cancel()
				_ = cmd.Forget(ctx)
			})
		})
	}
}

// stranger swallows the output of a command until its end, so that the agent can drop it.
type stranger struct {
	mu     sync.Mutex
	cmd    *guest.Command
	owed   int // bytes to acknowledge
	ended  bool
	forget func()
}

func (s *stranger) attend(cmd *guest.Command, forget func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cmd, s.forget = cmd, forget
	cmd.Ack(s.owed)
	if s.ended {
		forget()
	}
}

func (s *stranger) Output(_ byte, p []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd == nil {
		s.owed += len(p)
		return
	}
	s.cmd.Ack(len(p))
}

func (s *stranger) Exited(guest.Exit) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	if s.forget != nil {
		s.forget()
	}
}

func (*stranger) Broken(error) {}

// loadCommands reads the commands that an earlier daemon held for a sandbox, beside those that this one holds.
func (e *Engine) loadCommands(sb *sandbox) {
	entries, _ := os.ReadDir(filepath.Join(sb.dir, "execs"))
	for _, entry := range entries {
		id := entry.Name()
		sb.mu.Lock()
		held := slices.ContainsFunc(sb.commands, func(c *Command) bool { return c.rec.ID == id })
		sb.mu.Unlock()
		if held {
			continue
		}
		c, err := e.loadCommand(sb, id)
		if err != nil {
			e.Log.Warn("drop an unreadable command", "sandbox", sb.id, "exec", id, "err", err)
			_ = os.RemoveAll(filepath.Join(sb.dir, "execs", id))
			continue
		}
		sb.mu.Lock()
		sb.commands = append(sb.commands, c)
		sb.mu.Unlock()
	}
	sb.mu.Lock()
	slices.SortFunc(sb.commands, func(a, b *Command) int { return a.rec.StartedAt.Compare(b.rec.StartedAt) })
	sb.mu.Unlock()
	sb.evict()
}

func (e *Engine) loadCommand(sb *sandbox, id string) (*Command, error) {
	data, err := os.ReadFile(filepath.Join(sb.dir, "execs", id, "exec.json"))
	if err != nil {
		return nil, err
	}
	var h held
	for line := range bytes.Lines(data) {
		var next held
		if json.Unmarshal(line, &next) == nil { // else a daemon was killed, or the disk was full, in the middle of it
			h = next
		}
	}
	if h.Exec.ID != id {
		return nil, errors.New("the record is of another command")
	}
	c := sb.newCommand(h.Exec, h.TTY, h.Stdin)
	close(c.launched)
	if c.spool, err = stream.Open(filepath.Join(c.dir, "output"), outputWindow, outputPieces); err != nil {
		if h.Exec.State == shard.ExecExited {
			return nil, err
		}
		// The command runs: better without what it wrote so far than not at all. The agent says how much that is.
		e.Log.Error("the held output of a running command is lost", "sandbox", sb.id, "exec", id, "err", err)
		_ = os.Remove(filepath.Join(c.dir, "output"))
		c.spool = stream.New(filepath.Join(c.dir, "output"), outputWindow, outputPieces)
	}
	if h.Exec.State != shard.ExecExited {
		e.execs.Add(1)
		return c, nil
	}
	c.lost = max(0, h.Exec.LostBytes-c.spool.Lost())
	c.spool.Finish()
	close(c.done)
	return c, nil
}

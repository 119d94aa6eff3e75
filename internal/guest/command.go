package guest

import (
	"context"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/useshards/shard"
)

// Sink takes what comes of a command. Its methods are called one at a time, on the goroutine that reads for the whole
// session: they must not wait, and p is theirs only during the call. Calls may come before Exec or Resume has returned.
// Output never gives more than Window bytes that were not acknowledged, and Tail more at the end of a command. The last call is Exited or Broken; after Broken
// the command may run on, and Resume on a new session continues it.
type Sink interface {
	Output(channel byte, p []byte)
	Exited(Exit)
	Broken(error)
}

// Command is a command of the guest, as one session sees it.
type Command struct {
	ID string
	// Head is what the agent said when it started or resumed the command.
	Head ExecHead

	st *Stream
}

// Exec starts a command. A command_not_started or invalid_request means that it does not exist; after any other error
// the caller asks OpExecs, or tries Resume, to know. ctx bounds the start only. When Exec fails, sink gets no call any
// more, and none at all unless ctx ended.
func (s *Session) Exec(ctx context.Context, spec ExecSpec, sink Sink) (*Command, error) {
	spec.Tail = Tail
	return s.command(ctx, OpExec, spec.ID, spec, sink, Window+Tail)
}

// Resume continues a command that an earlier session started. The host holds the first offset bytes of its output;
// sink gets what comes behind them. ctx bounds the start only.
func (s *Session) Resume(ctx context.Context, id string, offset int64, sink Sink) (*Command, error) {
	return s.command(ctx, OpResume, id, ResumeArgs{ID: id, Offset: offset, Tail: Tail}, sink, Window+Tail)
}

// Run starts a named process under the agent's supervision; otherwise it is as Exec. The sink gets the output of all its
// runs; Exited says only that the agent no longer holds it.
func (s *Session) Run(ctx context.Context, spec ProcessSpec, sink Sink) (*Command, error) {
	return s.command(ctx, OpRun, spec.ID, spec, sink, Window)
}

// Follow continues the output of a process that an earlier session ran, at Head.Offset.
func (s *Session) Follow(ctx context.Context, id string, offset int64, sink Sink) (*Command, error) {
	return s.command(ctx, OpFollow, id, ResumeArgs{ID: id, Offset: offset}, sink, Window)
}

func (s *Session) command(ctx context.Context, op, id string, args any, sink Sink, room int) (*Command, error) {
	c := &Command{ID: id, st: s.newStream(sink)}
	c.st.room = room
	if err := c.st.start(ctx, op, args, &c.Head); err != nil {
		return nil, err
	}
	if !c.st.stop() {
		c.st.giveUp(ctx.Err())
		return nil, ctx.Err()
	}
	return c, nil
}

// Ack says that the caller holds n more bytes of output durably: the agent may forget them, and the command may write
// as many more. It never waits.
func (c *Command) Ack(n int) {
	if n > 0 {
		c.st.s.acknowledge(c.st, n)
	}
}

// Write sends input, and waits while the command does not take it. It returns how much was sent, so that after a lost
// session the caller can go on behind ExecHead.StdinBytes.
func (c *Command) Write(ctx context.Context, p []byte) (int, error) { return c.st.write(ctx, p) }

// CloseStdin ends the input.
func (c *Command) CloseStdin() error { return c.st.CloseWrite() }

// Signal sends TERM or KILL to the command's process group; exec_exited says that it has ended.
func (c *Command) Signal(ctx context.Context, signal string) error {
	return c.st.s.Call(ctx, OpSignal, SignalArgs{ID: c.ID, Signal: signal}, nil)
}

// Resize sets the size of the command's terminal.
func (c *Command) Resize(ctx context.Context, rows, cols uint16) error {
	return c.st.s.Call(ctx, OpResize, ResizeArgs{ID: c.ID, Rows: rows, Cols: cols}, nil)
}

// Forget lets the agent drop the ended command: the caller holds its exit and all of its output durably.
func (c *Command) Forget(ctx context.Context) error {
	return c.st.s.Call(ctx, OpForget, ForgetArgs{ID: c.ID}, nil)
}

// public is the failure as a client may see it: the guest is hostile, so its code is one that fits and its text short
// and plain.
func (f *Failure) public() *shard.Error {
	const most = 512
	text := strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return ' '
		}
		return r
	}, f.Message[:min(len(f.Message), most)])
	if len(text) > most {
		text = strings.ToValidUTF8(text[:most], "")
	}
	e := &shard.Error{Code: shard.Code(f.Code), Message: text}
	if !guestCodes[e.Code] {
		e.Code = shard.CodeInternal
	}
	if e.Code == shard.CodeCommandNotStarted {
		if e.ExitCode = 126; f.ExitCode == 127 {
			e.ExitCode = 127
		}
	}
	if e.Message == "" {
		e.Message = "the sandbox refused without saying why"
	}
	return e
}

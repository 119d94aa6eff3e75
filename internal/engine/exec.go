package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/store"
	"github.com/useshards/shard/internal/stream"
)

// Limits of commands (contract §4.2).
const (
	maxRunning       = 32  // in one sandbox
	maxRunningDaemon = 256 // in all
	maxEnded         = 32  // kept in one sandbox
	// stall is how long a client may take nothing before it is detached.
	stall = 30 * time.Second
)

// Command is one exec. Its record and held output are files, so that the next daemon has them too.
type Command struct {
	sb    *sandbox
	dir   string
	tty   bool
	spool *stream.Spool
	done  chan struct{} // closed when the command has ended, or is gone with its sandbox

	mu    sync.Mutex
	rec   shard.Exec
	guest *guest.Command // nil while there is no session
	gone  error          // why the command is no more, when it did not end by itself
	lost  int64          // bytes that could not be held
	first *stream.Reader // holds the output for the first attach
	timer *time.Timer    // ends that hold
}

// held is the file beside a command's output.
type held struct {
	Exec shard.Exec `json:"exec"`
	TTY  bool       `json:"tty"`
}

// Exec starts a command in a running sandbox. It answers when the program runs, or says why it does not.
func (e *Engine) Exec(ctx context.Context, ref string, req shard.ExecRequest) (*shard.Exec, error) {
	if err := shard.CheckCommand(req.Command); err != nil {
		return nil, err
	}
	if err := shard.CheckEnv(req.Env); err != nil {
		return nil, err
	}
	if err := checkWorkdir(req.Workdir); err != nil {
		return nil, err
	}
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	session, err := sb.session(ctx)
	if err != nil {
		return nil, err
	}
	rec := sb.record()
	id := make([]byte, 8)
	_, _ = rand.Read(id)
	c := &Command{sb: sb, tty: req.TTY, done: make(chan struct{}), rec: shard.Exec{ID: hex.EncodeToString(id), Sandbox: sb.id,
		Command: req.Command, State: shard.ExecRunning, StartedAt: time.Now().UTC().Truncate(time.Microsecond)}}
	c.dir = filepath.Join(sb.dir, "execs", c.rec.ID)
	c.spool = stream.New(filepath.Join(c.dir, "output"), guest.Window)
	if err := e.enter(sb, c); err != nil {
		return nil, err
	}
	if req.Attach {
		c.hold()
	}
	spec := guest.ExecSpec{ID: c.rec.ID, Argv: req.Command, Env: shard.MergeEnv(rec.Env, req.Env...),
		Workdir: guest.Path(or(req.Workdir, rec.Workdir)), User: or(req.User, rec.User), Stdin: req.Stdin, TTY: req.TTY}
	if req.Size != nil {
		spec.Rows, spec.Cols = req.Size.Rows, req.Size.Cols
	}
	launch, cancel := context.WithTimeout(ctx, execTime)
	defer cancel()
	err = os.MkdirAll(c.dir, 0o700)
	if err == nil {
		err = c.save()
	}
	if err != nil {
		err = shard.Wrap(shard.CodeInternal, err, "could not store the command: is the host's disk full?")
	} else if err = c.start(launch, session, spec); err != nil && launch.Err() != nil && ctx.Err() == nil {
		err = shard.Wrap(shard.CodeTimeout, err, "the command did not start within %d s", execTime/time.Second)
	}
	if err != nil {
		sb.leave(c)
		c.discard(err)
		_ = os.RemoveAll(c.dir)
		return nil, err
	}
	out := c.Record()
	return &out, nil
}

func or(a, b string) string {
	if a != "" {
		return a
	}
	return b
}

// enter counts a command in, and makes room among the ended ones.
func (e *Engine) enter(sb *sandbox, c *Command) error {
	if e.execs.Add(1) > maxRunningDaemon {
		e.execs.Add(-1)
		return shard.Errorf(shard.CodeExecLimit, "%d commands run under this daemon, which is the most: wait for one to end", maxRunningDaemon)
	}
	sb.mu.Lock()
	var evicted []*Command
	running, ended := 0, 0
	for _, o := range slices.Backward(sb.commands) {
		if !o.Ended() {
			running++
		} else if ended++; ended > maxEnded {
			evicted = append(evicted, o)
		}
	}
	if running >= maxRunning || sb.live == nil {
		dead := sb.live == nil
		sb.mu.Unlock()
		e.execs.Add(-1)
		if dead {
			return shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just ending", sb.ref())
		}
		return shard.Errorf(shard.CodeExecLimit, "%d commands run in sandbox %q, which is the most: wait for one to end", maxRunning, sb.ref())
	}
	sb.commands = slices.DeleteFunc(sb.commands, func(o *Command) bool { return slices.Contains(evicted, o) })
	sb.commands = append(sb.commands, c)
	sb.mu.Unlock()
	for _, o := range evicted {
		o.discard(notFound("command", o.rec.ID))
		_ = os.RemoveAll(o.dir)
	}
	return nil
}

func (sb *sandbox) leave(c *Command) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.commands = slices.DeleteFunc(sb.commands, func(o *Command) bool { return o == c })
}

// start asks the agent for the program.
func (c *Command) start(ctx context.Context, session *guest.Session, spec guest.ExecSpec) error {
	cmd, err := session.Exec(ctx, spec, (*sink)(c))
	if err != nil {
		return err
	}
	c.attend(cmd)
	return nil
}

// attend takes up the program in a session. It may have ended already.
func (c *Command) attend(cmd *guest.Command) {
	c.mu.Lock()
	c.guest = cmd
	ended := c.rec.State == shard.ExecExited
	c.mu.Unlock()
	c.spool.OnAck(cmd.Ack)
	if ended {
		c.forget(cmd)
	}
}

// forget lets the agent drop the ended command: its exit is stored here. It does not wait.
func (c *Command) forget(cmd *guest.Command) {
	c.sb.e.wg.Go(func() {
		ctx, cancel := context.WithTimeout(c.sb.e.ctx, execTime)
		defer cancel()
		_ = cmd.Forget(ctx) // or the next daemon does
	})
}

// sink takes the program's output from the session. Its methods must not wait.
type sink Command

// Output holds what the program wrote. What cannot be held is counted, and the program goes on.
func (s *sink) Output(channel byte, p []byte) {
	c := (*Command)(s)
	if err := c.spool.Append(channel, p); err != nil {
		c.mu.Lock()
		c.lost += int64(len(p))
		cmd := c.guest
		c.mu.Unlock()
		if cmd != nil {
			cmd.Ack(len(p))
		}
	}
}

// Exited stores how the program ended.
func (s *sink) Exited(exit guest.Exit) {
	c := (*Command)(s)
	status := shard.ExitStatus{Code: exit.Code}
	if exit.Signal != 0 {
		status.Code = 128 + exit.Signal
	}
	c.end(&status)
	if cmd := c.attended(); cmd != nil {
		c.forget(cmd)
	}
}

// Broken: the session is gone. The program may run on; the watch resumes it or ends the sandbox.
func (s *sink) Broken(error) {
	c := (*Command)(s)
	c.mu.Lock()
	c.guest = nil
	c.mu.Unlock()
}

// end stores the exit, then shows it.
func (c *Command) end(status *shard.ExitStatus) {
	c.mu.Lock()
	if c.rec.State == shard.ExecExited || c.gone != nil {
		c.mu.Unlock()
		return
	}
	now := time.Now().UTC().Truncate(time.Microsecond)
	c.rec.State, c.rec.ExitStatus, c.rec.ExitedAt = shard.ExecExited, status, &now
	c.mu.Unlock()
	if err := c.save(); err != nil {
		c.sb.e.Log.Error("store the end of a command", "sandbox", c.sb.id, "err", err)
	}
	c.spool.Finish()
	c.sb.e.execs.Add(-1)
	close(c.done)
}

// save writes the record beside the output. It need not survive the host: the command would not either.
func (c *Command) save() error {
	data, err := json.Marshal(held{Exec: c.Record(), TTY: c.tty})
	if err != nil {
		return err
	}
	return store.WriteVolatile(filepath.Join(c.dir, "exec.json"), data)
}

// discard ends a command that is no more, and everyone who waits for it.
func (c *Command) discard(why error) {
	c.mu.Lock()
	running := c.rec.State == shard.ExecRunning && c.gone == nil
	if c.gone == nil {
		c.gone = why
	}
	c.mu.Unlock()
	if running {
		c.sb.e.execs.Add(-1)
		close(c.done)
	}
	c.letGo()
}

// letGo frees what the daemon holds of a command.
func (c *Command) letGo() {
	c.mu.Lock()
	if c.timer != nil {
		c.timer.Stop()
	}
	c.mu.Unlock()
	_ = c.spool.Close()
}

// Ended says whether the program has ended.
func (c *Command) Ended() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.rec.State == shard.ExecExited || c.gone != nil
}

// Record is the public record as of now.
func (c *Command) Record() shard.Exec {
	c.mu.Lock()
	defer c.mu.Unlock()
	rec := c.rec
	rec.LostBytes = c.spool.Lost() + c.lost
	rec.Truncated = rec.LostBytes > 0
	return rec
}

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
			r.Close()
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
		case err != nil:
			return nil, notFound("command", id)
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
		return nil, ctx.Err()
	case errors.Is(err, stream.ErrClosed):
		return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: attach again when it is back")
	}
	return nil, shard.Wrap(shard.CodeInternal, err, "the held output could not be read")
}

// Consumed says that n bytes of output reached the client.
func (a *Attachment) Consumed(n int) { a.r.Consumed(n) }

// Close detaches the client. The command runs on.
func (a *Attachment) Close() { a.r.Close() }

// Exit waits for the end of the command, after Next said io.EOF.
func (a *Attachment) Exit() shard.Exec {
	<-a.c.done
	return a.c.Record()
}

// Stdin passes input to the program; it waits while the program does not read. Input for a program that has ended or
// closed its end is dropped.
func (a *Attachment) Stdin(ctx context.Context, p []byte) error {
	cmd := a.c.attended()
	if cmd == nil {
		return nil
	}
	_, err := cmd.Write(ctx, p)
	return err
}

// CloseStdin ends the program's input.
func (a *Attachment) CloseStdin() error {
	if cmd := a.c.attended(); cmd != nil {
		return cmd.CloseStdin()
	}
	return nil
}

func (c *Command) attended() *guest.Command {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.guest
}

// command finds a command of a sandbox.
func (e *Engine) command(ref, id string) (*Command, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	for _, c := range sb.commands {
		if c.rec.ID == id { // never changes
			return c, nil
		}
	}
	return nil, notFound("command", id)
}

// GetExec returns the record of a command. With wait it holds until the command has ended.
func (e *Engine) GetExec(ctx context.Context, ref, id string, wait bool) (*shard.Exec, error) {
	c, err := e.command(ref, id)
	if err != nil {
		return nil, err
	}
	if wait {
		select {
		case <-c.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-e.ctx.Done():
			return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: ask again when it is back")
		}
	}
	c.mu.Lock()
	gone := c.gone
	c.mu.Unlock()
	if gone != nil {
		return nil, gone
	}
	rec := c.Record()
	return &rec, nil
}

// ListExecs returns the commands held for a sandbox, in the order of their ids.
func (e *Engine) ListExecs(ref string) ([]shard.Exec, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	if err := shard.CheckVerb(sb.ref(), sb.record().Sandbox.State, shard.VerbExec); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	commands := slices.Clone(sb.commands)
	sb.mu.Unlock()
	out := make([]shard.Exec, len(commands))
	for i, c := range commands {
		out[i] = c.Record()
	}
	slices.SortFunc(out, func(a, b shard.Exec) int { return compare(a.ID, b.ID) })
	return out, nil
}

func compare(a, b string) int {
	switch {
	case a < b:
		return -1
	case a > b:
		return 1
	}
	return 0
}

// DeleteExec drops the record and the output of a command that has ended.
func (e *Engine) DeleteExec(ref, id string) error {
	c, err := e.command(ref, id)
	if err != nil {
		return err
	}
	if !c.Ended() {
		return shard.Errorf(shard.CodeExecRunning, "command %s still runs: kill it first", id)
	}
	c.sb.leave(c)
	c.discard(notFound("command", id))
	_ = os.RemoveAll(c.dir)
	return nil
}

// KillExec sends TERM or KILL to the process group of a command.
func (e *Engine) KillExec(ctx context.Context, ref, id, signal string) error {
	c, session, err := e.attended(ctx, ref, id)
	if err != nil {
		return err
	}
	if c.Ended() {
		return shard.Errorf(shard.CodeExecExited, "command %s has ended", id)
	}
	return e.endedMeanwhile(c, session.Call(ctx, guest.OpSignal, guest.SignalArgs{ID: id, Signal: signal}, nil))
}

// ResizeExec sets the size of a command's terminal.
func (e *Engine) ResizeExec(ctx context.Context, ref, id string, size shard.Size) error {
	c, session, err := e.attended(ctx, ref, id)
	if err != nil {
		return err
	}
	if !c.tty || c.Ended() {
		return shard.Errorf(shard.CodeNotFound, "command %s has no terminal, or has ended", id)
	}
	err = session.Call(ctx, guest.OpResize, guest.ResizeArgs{ID: id, Rows: size.Rows, Cols: size.Cols}, nil)
	if err = e.endedMeanwhile(c, err); shard.CodeOf(err) == shard.CodeExecExited {
		return notFound("command", id)
	}
	return err
}

func (e *Engine) attended(ctx context.Context, ref, id string) (*Command, *guest.Session, error) {
	c, err := e.command(ref, id)
	if err != nil {
		return nil, nil, err
	}
	session, err := c.sb.session(ctx)
	return c, session, err
}

// endedMeanwhile turns the agent's refusal into exec_exited when the command has just ended.
func (e *Engine) endedMeanwhile(c *Command, err error) error {
	if err == nil || (!c.Ended() && shard.CodeOf(err) != shard.CodeNotFound) {
		return err
	}
	return shard.Errorf(shard.CodeExecExited, "command %s has ended", c.rec.ID)
}

// resumeCommands takes up the commands of a sandbox in a new session: each goes on behind the last byte that is held.
func (e *Engine) resumeCommands(sb *sandbox, session *guest.Session) {
	sb.mu.Lock()
	commands := slices.Clone(sb.commands)
	sb.mu.Unlock()
	for _, c := range commands {
		if c.Ended() {
			continue
		}
		ctx, cancel := context.WithTimeout(e.ctx, execTime)
		cmd, err := session.Resume(ctx, c.rec.ID, c.spool.Resume(), (*sink)(c))
		cancel()
		switch {
		case err == nil:
			c.attend(cmd)
		case shard.CodeOf(err) == shard.CodeNotFound:
			// The agent does not know it: it was never started, or its exit was taken by a daemon that died before it
			// could store it.
			e.Log.Warn("a command was lost", "sandbox", sb.id, "exec", c.rec.ID)
			sb.leave(c)
			c.discard(notFound("command", c.rec.ID))
			_ = os.RemoveAll(c.dir)
		default:
			e.Log.Warn("resume a command", "sandbox", sb.id, "exec", c.rec.ID, "err", err)
		}
	}
}

// loadCommands reads the commands that an earlier daemon held for a sandbox.
func (e *Engine) loadCommands(sb *sandbox) {
	dir := filepath.Join(sb.dir, "execs")
	entries, _ := os.ReadDir(dir)
	for _, entry := range entries {
		c := &Command{sb: sb, dir: filepath.Join(dir, entry.Name()), done: make(chan struct{})}
		var h held
		data, err := os.ReadFile(filepath.Join(c.dir, "exec.json"))
		if err == nil {
			err = json.Unmarshal(data, &h)
		}
		if err == nil && h.Exec.ID != entry.Name() {
			err = errors.New("the record is of another command")
		}
		if err == nil {
			c.spool, err = stream.Open(filepath.Join(c.dir, "output"), guest.Window)
		}
		if err != nil {
			e.Log.Warn("drop an unreadable command", "sandbox", sb.id, "exec", entry.Name(), "err", err)
			_ = os.RemoveAll(c.dir)
			continue
		}
		c.rec, c.tty = h.Exec, h.TTY
		if c.rec.State == shard.ExecExited {
			c.spool.Finish()
			close(c.done)
		} else {
			e.execs.Add(1)
		}
		sb.commands = append(sb.commands, c)
	}
	slices.SortFunc(sb.commands, func(a, b *Command) int { return a.rec.StartedAt.Compare(b.rec.StartedAt) })
}

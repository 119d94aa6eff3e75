package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// Limits of commands.
const (
	maxRunning       = 32  // in one sandbox
	maxRunningDaemon = 256 // in all
	maxEnded         = 32  // kept in one sandbox
	maxWanted        = 256 // of these, kept beyond that while a client reads them or is to come
	// What the agent may have under way of a command's output.
	outputWindow = guest.Window + guest.Tail
	outputPieces = 2 * guest.Pieces
	// stall is how long output is held for the first client.
	stall = 30 * time.Second
)

// Command is one exec. Its record and held output are files, so that the next daemon has them too.
type Command struct {
	sb       *sandbox
	dir      string
	tty      bool
	stdin    bool
	spool    *stream.Spool
	launched chan struct{} // closed when the start has succeeded or failed: no client sees it before
	done     chan struct{} // closed when the command has ended and that is stored, or it is gone with its sandbox

	mu        sync.Mutex // comes after sandbox.mu
	rec       shard.Exec
	guest     *guest.Command // nil while there is no session
	session   *guest.Session // the last that had it
	attending chan struct{}  // closed when guest is set
	gone      error          // why the command is no more, when it did not end by itself
	lost      int64          // bytes that the record counts and the spool does not: an earlier daemon could not hold them
	sent      int64          // bytes of input
	inputLost bool           // input was under way when a session broke
	first     *stream.Reader // holds the output for the first attach
	timer     *time.Timer    // ends that hold
}

func (sb *sandbox) newCommand(rec shard.Exec, tty, stdin bool) *Command {
	return &Command{sb: sb, rec: rec, tty: tty, stdin: stdin, dir: filepath.Join(sb.dir, "execs", rec.ID),
		launched: make(chan struct{}), done: make(chan struct{}), attending: make(chan struct{})}
}

// held is the file beside a command's output.
type held struct {
	Exec  shard.Exec `json:"exec"`
	TTY   bool       `json:"tty"`
	Stdin bool       `json:"stdin"`
}

// Exec starts a command in a running sandbox. It answers when the program runs, or says why it does not. A client that
// goes away meanwhile does not end the start: the command is in the list.
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
	c := sb.newCommand(shard.Exec{ID: hex.EncodeToString(id), Sandbox: sb.id, Command: req.Command, State: shard.ExecRunning,
		StartedAt: time.Now().UTC().Truncate(time.Microsecond)}, req.TTY, req.Stdin)
	c.spool = stream.New(filepath.Join(c.dir, "output"), outputWindow, outputPieces)
	if err := e.enter(sb, c); err != nil {
		return nil, err
	}
	if req.Attach {
		c.hold()
	}
	spec := guest.ExecSpec{ID: c.rec.ID, Argv: req.Command, Env: shard.MergeEnv(rec.environment(), req.Env...),
		Workdir: guest.Path(cmp.Or(req.Workdir, rec.Workdir)), User: cmp.Or(req.User, rec.User), Stdin: req.Stdin, TTY: req.TTY}
	if req.Size != nil {
		spec.Rows, spec.Cols = req.Size.Rows, req.Size.Cols
	}
	if err = c.launch(context.WithoutCancel(ctx), session, spec); err != nil {
		sb.leave(c)
		c.discard(err)
		_ = os.RemoveAll(c.dir)
	}
	close(c.launched)
	if err != nil {
		return nil, err
	}
	out := c.Record()
	return &out, nil
}

// launch stores the record, then asks the agent for the program: so the next daemon knows of every command that the agent
// may have.
func (c *Command) launch(ctx context.Context, session *guest.Session, spec guest.ExecSpec) error {
	ctx, cancel := context.WithTimeout(ctx, execTime)
	defer cancel()
	// Not MkdirAll: a sandbox that is just being removed must not come back.
	err := os.Mkdir(filepath.Dir(c.dir), 0o700)
	if err == nil || errors.Is(err, fs.ErrExist) {
		err = os.Mkdir(c.dir, 0o700)
	}
	if err == nil {
		err = c.save(c.rec)
	}
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not store the command")
	}
	cmd, err := session.Exec(ctx, spec, (*sink)(c))
	if err == nil {
		c.attend(session, cmd)
		return nil
	}
	if _, refused := errors.AsType[*shard.Error](err); refused {
		return err
	}
	c.sb.e.wg.Go(func() { c.sb.e.reap(c.sb) }) // it may have been started all the same
	if ctx.Err() != nil {
		return shard.Wrap(shard.CodeTimeout, err, "the command did not start within %d s", execTime/time.Second)
	}
	return c.sb.explain(err)
}

// enter counts a command in.
func (e *Engine) enter(sb *sandbox, c *Command) error {
	if e.execs.Add(1) > maxRunningDaemon {
		e.execs.Add(-1)
		return shard.Errorf(shard.CodeExecLimit, "%d commands run under this daemon, which is the most: wait for one to end", maxRunningDaemon)
	}
	sb.mu.Lock()
	running := 0
	for _, o := range sb.commands {
		if !o.Ended() {
			running++
		}
	}
	dead := sb.live == nil
	if running < maxRunning && !dead {
		sb.commands = append(sb.commands, c)
		sb.mu.Unlock()
		return nil
	}
	sb.mu.Unlock()
	e.execs.Add(-1)
	if dead {
		return shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just ending", sb.ref())
	}
	return shard.Errorf(shard.CodeExecLimit, "%d commands run in sandbox %q, which is the most: wait for one to end", maxRunning, sb.ref())
}

// evict drops the commands that ended first, until as many are left as are kept. One that a client reads, or is to read
// soon, stays as long as there is any measure in it.
func (sb *sandbox) evict() {
	type old struct {
		c      *Command
		at     time.Time
		wanted bool
	}
	sb.mu.Lock()
	var ended []old
	for _, c := range sb.commands {
		if rec := c.Record(); rec.ExitedAt != nil {
			ended = append(ended, old{c, *rec.ExitedAt, c.spool.Attached()})
		}
	}
	slices.SortStableFunc(ended, func(a, b old) int { return b.at.Compare(a.at) })
	var evicted []*Command
	kept := 0
	for i, o := range ended {
		switch {
		case o.wanted && i < maxEnded+maxWanted:
		case kept < maxEnded:
			kept++
		default:
			evicted = append(evicted, o.c)
		}
	}
	sb.commands = slices.DeleteFunc(sb.commands, func(c *Command) bool { return slices.Contains(evicted, c) })
	sb.mu.Unlock()
	for _, c := range evicted {
		c.drop()
	}
}

func (sb *sandbox) leave(c *Command) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	sb.commands = slices.DeleteFunc(sb.commands, func(o *Command) bool { return o == c })
}

// drop deletes what is left of a command that no list names any more.
func (c *Command) drop() {
	c.discard(notFound("command", c.rec.ID))
	if err := os.RemoveAll(c.dir); err != nil {
		c.sb.e.Log.Error("delete a command", "sandbox", c.sb.id, "exec", c.rec.ID, "err", err)
	}
}

// attend takes up the program in a session. It may have ended already.
func (c *Command) attend(session *guest.Session, cmd *guest.Command) {
	c.mu.Lock()
	if c.guest == nil { // else the last session broke before it was taken up here
		close(c.attending)
	}
	c.guest, c.session = cmd, session
	if c.sent != cmd.Head.StdinBytes {
		c.inputLost = c.sent > cmd.Head.StdinBytes
		c.sent = cmd.Head.StdinBytes
	}
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
		_ = cmd.Forget(ctx) // or the next session does
	})
}

// sink takes the program's output from the session. Its methods must not wait.
type sink Command

// Output holds what the program wrote. What cannot be held is counted, and the program goes on.
func (s *sink) Output(channel byte, p []byte) {
	c := (*Command)(s)
	if err := c.spool.Append(channel, p); err != nil && !errors.Is(err, stream.ErrClosed) {
		c.sb.e.Log.Error("hold the output of a command: what comes now is lost", "sandbox", c.sb.id, "exec", c.rec.ID, "err", err)
	}
}

// Exited stores how the program ended, then shows it.
func (s *sink) Exited(exit guest.Exit) {
	c := (*Command)(s)
	status := shard.ExitStatus{Code: exit.Code}
	if exit.Signal != 0 {
		status.Code = 128 + exit.Signal
	}
	rec := c.Record()
	now := time.Now().UTC().Truncate(time.Microsecond)
	rec.State, rec.ExitStatus, rec.ExitedAt = shard.ExecExited, &status, &now
	err := c.save(rec)
	c.mu.Lock()
	if c.rec.State == shard.ExecExited || c.gone != nil {
		c.mu.Unlock()
		return
	}
	c.rec.State, c.rec.ExitStatus, c.rec.ExitedAt = rec.State, rec.ExitStatus, rec.ExitedAt
	cmd := c.guest
	c.mu.Unlock()
	c.spool.Finish()
	c.sb.e.execs.Add(-1)
	close(c.done)
	c.sb.e.wg.Go(c.sb.evict)
	if err != nil { // then the agent keeps it, for the next daemon
		c.sb.e.Log.Error("store the end of a command", "sandbox", c.sb.id, "exec", c.rec.ID, "err", err)
	} else if cmd != nil {
		c.forget(cmd)
	}
}

// Broken: the session is gone. The program may run on; the watch resumes it or ends the sandbox.
func (s *sink) Broken(error) {
	c := (*Command)(s)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.guest != nil {
		c.guest, c.attending = nil, make(chan struct{})
	}
}

// save adds the record, as it is now, to the file beside the output: the last whole line counts. It need not survive the
// host, since the command would not either; and to replace the file would make the file system write it out at once.
func (c *Command) save(rec shard.Exec) error {
	data, err := json.Marshal(held{Exec: rec, TTY: c.tty, Stdin: c.stdin})
	if err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.dir, "exec.json"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(slices.Concat([]byte("\n"), data, []byte("\n"))) // whatever a torn line before it ends with
	return errors.Join(err, f.Close())
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

// Ended says whether the program has ended, and all of that is stored.
func (c *Command) Ended() bool {
	select {
	case <-c.done:
		return true
	default:
		return false
	}
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

// command finds a command of a sandbox.
func (e *Engine) command(ref, id string) (*Command, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	for _, c := range sb.commands {
		if c.rec.ID == id && c.isLaunched() { // an id never changes
			return c, nil
		}
	}
	return nil, notFound("command", id)
}

func (c *Command) isLaunched() bool {
	select {
	case <-c.launched:
		return true
	default:
		return false
	}
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
	rec := c.Record()
	if gone != nil && rec.State == shard.ExecRunning {
		return nil, gone
	}
	return &rec, nil
}

// ListExecs returns the commands held for a sandbox, in the order of their ids.
func (e *Engine) ListExecs(ref string) ([]shard.Exec, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	if err := sb.allows(shard.VerbExec); err != nil {
		return nil, err
	}
	sb.mu.Lock()
	commands := slices.Clone(sb.commands)
	sb.mu.Unlock()
	out := make([]shard.Exec, 0, len(commands))
	for _, c := range commands {
		if c.isLaunched() {
			out = append(out, c.Record())
		}
	}
	slices.SortFunc(out, func(a, b shard.Exec) int { return strings.Compare(a.ID, b.ID) })
	return out, nil
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
	c.drop()
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
	return endedMeanwhile(c, session.Call(ctx, guest.OpSignal, guest.SignalArgs{ID: id, Signal: signal}, nil))
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
	if err = endedMeanwhile(c, err); shard.CodeOf(err) == shard.CodeExecExited {
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
func endedMeanwhile(c *Command, err error) error {
	if err == nil || (!c.Ended() && shard.CodeOf(err) != shard.CodeNotFound) {
		return c.sb.explain(err)
	}
	return shard.Errorf(shard.CodeExecExited, "command %s has ended", c.rec.ID)
}

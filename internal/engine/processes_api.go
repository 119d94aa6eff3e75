package engine

import (
	"context"
	"errors"
	"io"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// withProcesses finds a sandbox whose processes may be looked at: any but a failed one.
func (e *Engine) withProcesses(ref string) (*sandbox, error) {
	sb, err := e.find(ref)
	if err == nil && sb.record().Sandbox.State == shard.StateFailed {
		err = shard.Errorf(shard.CodeSandboxFailed, "sandbox %q has failed: it can only be inspected and removed", sb.ref())
	}
	return sb, err
}

// getProcess copies the record of a process.
func (sb *sandbox) getProcess(name string) (*shard.Process, error) {
	p := find(sb.record(), name)
	if p == nil {
		return nil, shard.Errorf(shard.CodeNoProcess, "there is no process %s in sandbox %q", shard.Quote(name), sb.ref())
	}
	out := *p
	return &out, nil
}

// ListProcesses returns the processes of a sandbox in the order of their first runs.
func (e *Engine) ListProcesses(ref string) ([]shard.Process, error) {
	sb, err := e.withProcesses(ref)
	if err != nil {
		return nil, err
	}
	return append([]shard.Process{}, sb.record().Sandbox.Processes...), nil
}

// GetProcess returns one process.
func (e *Engine) GetProcess(ref, name string) (*shard.Process, error) {
	sb, err := e.withProcesses(ref)
	if err != nil {
		return nil, err
	}
	return sb.getProcess(name)
}

// WaitProcess returns a process once it has ended and its policy does not start it again, or its sandbox went down.
func (e *Engine) WaitProcess(ctx context.Context, ref, name string) (*shard.Process, error) {
	sb, err := e.withProcesses(ref)
	if err != nil {
		return nil, err
	}
	return sb.waitProcess(ctx, name, func(*record, *shard.Process) bool { return false })
}

// waitProcess waits until a process is over, or enough says so.
func (sb *sandbox) waitProcess(ctx context.Context, name string, enough func(*record, *shard.Process) bool) (*shard.Process, error) {
	for {
		changed := sb.changes()
		if !sb.e.holds(sb) {
			return nil, notFound("sandbox", sb.ref())
		}
		rec := sb.record()
		p, err := sb.getProcess(name)
		if err != nil || !p.Status.Live() || enough(rec, p) {
			return p, err
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-sb.e.ctx.Done():
			return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: ask again when it is back")
		}
	}
}

// KillProcess ends a process for good, with TERM and 30 s later KILL, or with force by KILL at once. It answers when the
// process has ended; one that had ended already stays as it is. A pause meanwhile is an error: the process ends when its sandbox
// is resumed.
func (e *Engine) KillProcess(ctx context.Context, ref, name string, force bool) (*shard.Process, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	if err := sb.allows(shard.VerbKill); err != nil {
		return nil, err
	}
	rec := sb.record()
	p, err := sb.getProcess(name)
	if err != nil || !p.Status.Live() {
		return p, err
	}
	id := rec.Runs[name].ID
	session, err := sb.session(ctx)
	if err != nil {
		return nil, err
	}
	args := guest.KillArgs{ID: id, GraceMillis: stopGrace.Milliseconds()}
	if force {
		args.GraceMillis = 0
	}
	err = sb.explain(session.Call(ctx, guest.OpKill, args, nil))
	if shard.CodeOf(err) == shard.CodeNotFound {
		sb.lost(name, id)
		err = nil
	}
	if err != nil {
		return nil, err
	}
	p, err = sb.waitProcess(ctx, name, func(r *record, _ *shard.Process) bool {
		return r.Runs[name].ID != id || r.Sandbox.State == shard.StatePaused
	})
	if err == nil && p.Status.Live() && sb.record().Sandbox.State == shard.StatePaused {
		return nil, shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q was paused while process %q was ending", sb.ref(), name)
	}
	return p, err
}

// ProcessLog returns the log of a process as it is now. The caller closes it.
func (e *Engine) ProcessLog(ref, name string) (io.ReadCloser, error) {
	_, p, err := e.processLog(ref, name)
	if err != nil {
		return nil, err
	}
	return p.log.Snapshot()
}

func (e *Engine) processLog(ref, name string) (*sandbox, *process, error) {
	sb, err := e.withProcesses(ref)
	if err != nil {
		return nil, nil, err
	}
	if _, err := sb.getProcess(name); err != nil {
		return nil, nil, err
	}
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb, sb.process(name), nil
}

// Output follows what a process writes. It is for one goroutine.
type Output struct {
	sb     *sandbox
	name   string
	p      *process
	r      *stream.LogReader
	reason string
	last   *shard.Process
}

// FollowLog follows the whole log of a process, until the process or its sandbox ends. It waits for a pending sandbox.
func (e *Engine) FollowLog(ctx context.Context, ref, name string) (*Output, error) {
	if sb, err := e.find(ref); err == nil {
		if j := sb.pending(); j != nil {
			select {
			case <-j.done:
			case <-ctx.Done():
				return nil, ctx.Err()
			}
		}
	}
	return e.output(ref, name, false)
}

// AttachProcess follows the output of a process from the start of its current run. The process waits for a client that
// is slow.
func (e *Engine) AttachProcess(ref, name string) (*Output, error) { return e.output(ref, name, true) }

func (e *Engine) output(ref, name string, attach bool) (*Output, error) {
	sb, p, err := e.processLog(ref, name)
	if err != nil {
		return nil, err
	}
	from := int64(0)
	if attach {
		_, base := p.log.Got()
		from = base + sb.record().Runs[name].Start
	}
	r, err := p.log.Follow(from, attach)
	if err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "the log of process %q could not be read", name)
	}
	return &Output{sb: sb, name: name, p: p, r: r}, nil
}

// Next returns the next output as a message of the API's byte streams. io.EOF is the end: Reason and Process say which.
// It waits until ctx ends.
func (o *Output) Next(ctx context.Context) ([]byte, error) {
	for {
		changed := o.sb.changes()
		over := o.over() // before the look at the log: what came until then is in it
		message, more, err := o.r.Next()
		switch {
		case errors.Is(err, stream.ErrClosed):
			if o.sb.e.ctx.Err() != nil {
				return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: ask again when it is back")
			}
			o.reason = "removed"
			return nil, io.EOF
		case err != nil:
			return nil, shard.Wrap(shard.CodeInternal, err, "the log of process %q could not be read", o.name)
		case message != nil:
			return message, nil
		case over:
			return nil, io.EOF
		}
		select {
		case <-changed:
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-o.sb.e.ctx.Done():
			return nil, shard.Errorf(shard.CodeInternal, "the daemon is shutting down: ask again when it is back")
		}
	}
}

// over says whether nothing more can come, and notes why.
func (o *Output) over() bool {
	rec := o.sb.record()
	p := find(rec, o.name)
	switch {
	case !o.sb.e.holds(o.sb) || p == nil:
		o.reason = "removed"
	case p.Status.State == shard.ProcessStopped:
		o.reason = "stopped"
	case p.Status.Live():
		return false
	default:
		if got, _ := o.p.log.Got(); got < rec.Runs[o.name].End {
			return false
		}
		o.reason = "ended"
	}
	if p != nil {
		last := *p
		o.last = &last
	}
	return true
}

// Reason says why the output ended: ended, stopped or removed.
func (o *Output) Reason() string { return o.reason }

// Process is the record at the end; an error when it is gone.
func (o *Output) Process() (*shard.Process, error) {
	switch {
	case o.reason != "removed":
		return o.last, nil
	case o.sb.e.holds(o.sb):
		return nil, shard.Errorf(shard.CodeNoProcess, "process %q gave way to another", o.name)
	}
	return nil, notFound("sandbox", o.sb.ref())
}

// Close ends the following.
func (o *Output) Close() { o.r.Close() }

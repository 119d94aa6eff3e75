package engine

import (
	"context"
	"errors"
	"io"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// FileWatch reads the changes below a directory of one sandbox, for as long as the sandbox runs.
type FileWatch struct {
	ctx  context.Context // the caller's
	sb   *sandbox
	live *live // the machine that is watched: a later start is another one
	args guest.WatchArgs
	w    *guest.Watcher

	session *guest.Session
	reason  string
}

// Watch begins to watch a directory; when it returns, nothing is missed any more. ctx bounds the whole watch. The caller
// closes it.
func (e *Engine) Watch(ctx context.Context, ref, path string, recursive bool) (*FileWatch, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	f := &FileWatch{ctx: ctx, sb: sb, args: guest.WatchArgs{Path: guest.Path(path), Recursive: recursive}}
	sb.mu.Lock()
	f.live = sb.live
	sb.mu.Unlock()
	if err := f.open(); err != nil {
		return nil, sb.explain(err)
	}
	return f, nil
}

func (f *FileWatch) open() error {
	session, err := f.sb.session(f.ctx)
	if err != nil {
		return err
	}
	w, err := guest.Watch(f.ctx, session, f.args)
	if err == nil {
		f.session, f.w = session, w
	}
	return err
}

// Next waits for events. io.EOF is the end, and Reason says why; another error is a failure of the watch.
func (f *FileWatch) Next() ([]shard.FileEvent, error) {
	events, err := f.w.Next()
	switch {
	case err == nil:
		return events, nil
	case err == io.EOF:
		f.reason = shard.FileDeleted
		return nil, io.EOF
	case f.ctx.Err() != nil:
		return nil, f.ctx.Err()
	case !errors.Is(err, guest.ErrLost) && f.session.Err() == nil: // a session that is being closed has no Err yet
		return nil, err
	}
	return f.again()
}

// again takes the watch up in the next session with the same machine, or finds out what became of it.
func (f *FileWatch) again() ([]shard.FileEvent, error) {
	for {
		if f.reason = f.ended(); f.reason != "" {
			return nil, io.EOF
		}
		session, err := f.sb.session(f.ctx)
		if err == nil && session != f.session {
			if err = f.open(); err == nil {
				return []shard.FileEvent{guest.Overflow(string(f.args.Path))}, nil
			}
		}
		if e, ok := errors.AsType[*shard.Error](err); ok && e.Code != shard.CodeSandboxNotRunning && e.Code != shard.CodeSandboxFailed {
			return nil, err
		}
		select {
		case <-f.ctx.Done():
			return nil, f.ctx.Err()
		case <-f.sb.e.ctx.Done():
			return nil, shard.Errorf(shard.CodeInternal, "the daemon is stopping")
		case <-time.After(20 * time.Millisecond): // the end of a machine is stored a little after its channel's
		}
	}
}

// ended says what became of the machine: "" while it runs or its end is not stored yet.
func (f *FileWatch) ended() string { return f.sb.became(f.live) }

// became says what became of a machine of the sandbox: "" while it runs or its end is not stored yet.
func (sb *sandbox) became(was *live) string {
	if !sb.e.holds(sb) {
		return "removed"
	}
	rec := sb.record()
	sb.mu.Lock()
	now := sb.live
	sb.mu.Unlock()
	switch {
	case now != nil && was != nil && now.inst == was.inst: // after a pause that failed it is held anew
		return ""
	case now != nil && rec.ResumedAt != nil && rec.ResumedAt.After(*rec.Sandbox.StartedAt):
		return string(shard.StatePaused) // and resumed
	case now != nil:
		return string(shard.StateStopped) // and started again
	case rec.Sandbox.State == shard.StateRunning:
		return ""
	}
	return string(rec.Sandbox.State)
}

// Reason says why the watch ended: stopped, removed, failed or another state of the sandbox, or deleted when it was the
// directory.
func (f *FileWatch) Reason() string { return f.reason }

// Close ends the watch.
func (f *FileWatch) Close() { f.w.Close() }

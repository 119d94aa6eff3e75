package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/provider"
)

// A pause is begun when its intent is stored and done when the record says paused, which is stored while the saved machine
// stands still; until then the machine goes on whatever fails. A resume is the other way round: its machine runs before the
// record says so, and the next daemon takes up what it finds. Once it runs nothing takes it back, since from then on its
// files are no longer those that go with the memory that was saved.

const (
	// quiesceTime bounds the agent's preparation of a pause.
	quiesceTime = 20 * time.Second
	// resumeTime bounds a resume, most of which is reading memory from the disk.
	resumeTime = 10 * time.Minute
)

// priceOfStop is what a message that advises to stop the sandbox must add.
func (sb *sandbox) priceOfStop() string {
	if sb.record().Sandbox.State == shard.StatePaused {
		return ", which gives up its saved memory"
	}
	return ""
}

// checkpoint is where the memory of a paused sandbox lies.
func (sb *sandbox) checkpoint() string { return filepath.Join(sb.dir, "checkpoint") }

// dropCheckpoint removes a checkpoint that nobody can resume from any more.
func (sb *sandbox) dropCheckpoint() {
	if err := errors.Join(os.RemoveAll(sb.checkpoint()), os.RemoveAll(sb.usedCheckpoint())); err != nil {
		sb.e.Log.Warn("remove the saved memory of a sandbox", "sandbox", sb.id, "err", err)
	}
}

// usedCheckpoint is where a checkpoint lies that was resumed from, until it is gone.
func (sb *sandbox) usedCheckpoint() string { return sb.checkpoint() + ".used" }

// dropUsedCheckpoint is dropCheckpoint behind a resume, which does not wait: to free much takes the host a while.
func (sb *sandbox) dropUsedCheckpoint() {
	if err := os.Rename(sb.checkpoint(), sb.usedCheckpoint()); err != nil {
		sb.dropCheckpoint()
		return
	}
	sb.e.wg.Go(func() {
		if err := os.RemoveAll(sb.usedCheckpoint()); err != nil {
			sb.e.Log.Warn("remove the saved memory of a sandbox", "sandbox", sb.id, "err", err)
		}
	})
}

// interruptible begins what a stop and a forced removal may break off, which would have to wait for it else: done ends that. Its
// context's cause then has the code.
func (sb *sandbox) interruptible(ctx context.Context, code shard.Code) (_ context.Context, done func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	sb.mu.Lock()
	sb.giveUp = func() {
		cancel(shard.Errorf(code, "it was given up, since sandbox %q is to be stopped", sb.ref()))
	}
	sb.mu.Unlock()
	return ctx, func() {
		sb.mu.Lock()
		sb.giveUp = nil
		sb.mu.Unlock()
		cancel(nil)
	}
}

// interrupt breaks off a pause or a resume that is under way.
func (sb *sandbox) interrupt() {
	sb.mu.Lock()
	giveUp := sb.giveUp
	sb.mu.Unlock()
	if giveUp != nil {
		giveUp()
	}
}

// pauser is the sandbox's provider, if it can pause.
func (e *Engine) pauser(sb *sandbox) (provider.Pauser, error) {
	p, err := e.providerNamed(sb.record().Sandbox.Provider)
	if err != nil {
		return nil, err
	}
	pauser, can := p.(provider.Pauser)
	if !can {
		return nil, shard.Errorf(shard.CodeUnsupported, "provider %s of sandbox %q cannot save memory: pause and resume need another provider, such as gvisor",
			p.Name(), sb.ref())
	}
	return pauser, nil
}

// lockPauser takes a sandbox's verb lock, if its provider can pause, which is asked first.
func (e *Engine) lockPauser(ctx context.Context, ref string, verb shard.Verb) (*sandbox, provider.Pauser, func(), error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, nil, nil, err
	}
	p, err := e.pauser(sb)
	if err != nil {
		return nil, nil, nil, err
	}
	unlock, err := sb.lock(ctx, verb)
	return sb, p, unlock, err
}

// Pause saves memory and files of a running sandbox to the disk and ends its machine; commands in it end, named processes
// and what they started go on when it is resumed. A pause that fails leaves it running.
func (e *Engine) Pause(ctx context.Context, ref string) (*shard.Sandbox, error) {
	sb, p, unlock, err := e.lockPauser(ctx, ref, shard.VerbPause)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := e.pause(context.WithoutCancel(ctx), sb, p, ""); err != nil {
		return nil, err
	}
	s := sb.record().Sandbox
	return &s, nil
}

// pause does the work of Pause; why is "" when somebody asked for it. The caller holds the verb lock.
func (e *Engine) pause(ctx context.Context, sb *sandbox, p provider.Pauser, why string) error {
	if err := e.finish(ctx, sb); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "what was begun on sandbox %q before is not over: try again", sb.ref())
	}
	if err := sb.allows(shard.VerbPause); err != nil { // that may have been its end
		return err
	}
	sb.dropCheckpoint()
	if err := os.Mkdir(sb.checkpoint(), 0o700); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be paused and runs on", sb.ref())
	}
	if err := sb.update(func(r *record) { r.Intent = "pause" }); err != nil {
		sb.dropCheckpoint()
		return err
	}
	work, done := sb.interruptible(ctx, shard.CodeSandboxNotRunning)
	defer done()
	sb.closePorts()
	l := sb.halt()
	var err error
	if l == nil {
		err = shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just ending", sb.ref())
	} else if err = sb.quiesce(work, l); err == nil {
		err = p.Pause(work, l.inst, sb.checkpoint(), func() error {
			if err := e.Roots.Sync(sb.dir); err != nil {
				return err
			}
			return sb.update(func(r *record) {
				r.Sandbox.State, r.Sandbox.StoppedReason, r.Handle, r.Intent = shard.StatePaused, why, nil, "cleanup"
			})
		})
	}
	if err != nil {
		err = e.notPaused(ctx, sb, l, err)
		if given := context.Cause(work); given != nil {
			return shard.Wrap(shard.CodeOf(given), err, "sandbox %q was not paused: %s", sb.ref(), given)
		}
		return err
	}
	e.Log.Info("a sandbox was paused", "sandbox", sb.id, "why", why)
	e.endLive(sb, "the sandbox was paused")
	_ = l.inst.Close()
	ctx, cancel := context.WithTimeout(ctx, teardownTime)
	defer cancel()
	if err := e.finish(ctx, sb); err != nil {
		e.Log.Error("clean up behind a paused sandbox: it is tried again", "sandbox", sb.id, "err", err)
	}
	return nil
}

// quiesce prepares a machine that has no watch for its pause, and ends its session.
func (sb *sandbox) quiesce(ctx context.Context, l *live) (err error) {
	ctx, cancel := context.WithTimeout(ctx, quiesceTime)
	defer cancel()
	session := l.session
	if session == nil {
		if session, err = connect(ctx, l.inst, sb.record()); err != nil {
			return shard.Wrap(shard.CodeTimeout, err, "sandbox %q could not be paused: its agent does not answer", sb.ref())
		}
	}
	err = session.Quiesce(ctx)
	_ = session.Close()
	if e, refused := errors.AsType[*shard.Error](err); refused && e.Code == shard.CodeUnsupported {
		return &provider.RefusedError{Reason: e.Message}
	}
	if err != nil {
		return shard.Wrap(shard.CodeTimeout, err, "sandbox %q could not be paused: its agent does not answer", sb.ref())
	}
	return nil
}

// notPaused goes on with a machine that could not be paused, or stores that it is lost, and says why.
func (e *Engine) notPaused(ctx context.Context, sb *sandbox, l *live, err error) error {
	if l == nil {
		sb.learn(func(r *record) { r.Intent = "" })
		sb.dropCheckpoint()
		return err
	}
	if errors.Is(err, provider.ErrBusy) { // the next tick settles it
		_ = l.inst.Close()
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be paused, and stands still until what was begun is over: the daemon's log says why", sb.ref())
	}
	gone := false
	select {
	case <-l.inst.Done():
		gone = true
	default:
	}
	if gone && !errors.Is(err, provider.ErrLost) { // it ended before anything was saved
		e.bury(ctx, sb, l)
		_ = l.inst.Close()
		return shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q has just ended", sb.ref())
	}
	if !gone {
		sb.learn(func(r *record) { r.Intent = "" })
		sb.dropCheckpoint()
		e.enliven(sb, newLive(l.inst))
		why, refused := errors.AsType[*provider.RefusedError](err)
		switch {
		case refused:
			return shard.Wrap(shard.CodeUnsupported, err, "sandbox %q could not be paused and runs on: %s", sb.ref(), why.Reason)
		case errors.Is(err, syscall.ENOSPC):
			return shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be paused and runs on: there is no room for its memory", sb.ref())
		case errors.Is(err, provider.ErrForeign):
			return shard.Wrap(shard.CodeUnsupported, err, "sandbox %q was started by another version of its provider, and runs on: it can be paused once it was stopped and started", sb.ref())
		case shard.CodeOf(err) != shard.CodeInternal:
			return err
		}
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be paused and runs on: the daemon's log says why", sb.ref())
	}
	e.Log.Error("a sandbox was lost while it was paused", "sandbox", sb.id, "detail", l.inst.Exit().Detail, "err", err)
	ctx, cancel := context.WithTimeout(ctx, teardownTime)
	defer cancel()
	sb.learn(func(r *record) {
		r.Sandbox.State, r.Sandbox.FailedReason, r.Handle, r.Intent = shard.StateFailed, "it ended while it was being paused, and its memory is lost", nil, "cleanup"
		r.processesDown()
	})
	e.ports.free(sb.id)
	e.endLive(sb, "the sandbox was lost")
	_ = l.inst.Close()
	if err := e.finish(ctx, sb); err != nil {
		e.Log.Error("clean up after a sandbox that was lost: it is tried again", "sandbox", sb.id, "err", err)
	}
	return shard.Wrap(shard.CodeInternal, err, "sandbox %q ended while it was being paused: its memory is lost", sb.ref())
}

// Resume lets a paused sandbox go on where it stood, with its address and its processes.
func (e *Engine) Resume(ctx context.Context, ref string) (*shard.Sandbox, error) {
	sb, p, unlock, err := e.lockPauser(ctx, ref, shard.VerbResume)
	if err != nil {
		return nil, err
	}
	defer unlock()
	ctx = context.WithoutCancel(ctx)
	if err := e.finish(ctx, sb); err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "what was begun on sandbox %q before is not over: try again", sb.ref())
	}
	if err := sb.allows(shard.VerbResume); err != nil { // that may have been its resume
		return nil, err
	}
	rec := *sb.record()
	if _, err := e.provider(ctx, rec.Sandbox.Provider); err != nil {
		return nil, err
	}
	if _, err := os.Stat(sb.checkpoint()); err != nil {
		return nil, shard.Wrap(shard.CodeNoCheckpoint, err, "the saved memory of sandbox %q is missing: stop it, and start it with its files", sb.ref())
	}
	img, release, err := e.Images.Acquire(rec.Sandbox.Digest)
	if err != nil {
		return nil, shard.Wrap(shard.CodeNotFound, err, "the image of sandbox %q is no longer on this host: pull %s", sb.ref(), rec.Sandbox.Image)
	}
	defer release()
	work, done := sb.interruptible(ctx, shard.CodeSandboxNotPaused)
	defer done()
	inst, err := e.restore(work, sb, p, &rec, img)
	if errors.Is(err, syscall.ENOSPC) && e.spendReserve() {
		e.Log.Warn("the host's disk is full: what was kept in reserve is used for a resume", "sandbox", sb.id)
		inst, err = e.restore(work, sb, p, &rec, img)
	}
	if given := context.Cause(work); err != nil && given != nil {
		return nil, shard.Wrap(shard.CodeOf(given), err, "sandbox %q was not resumed: %s", sb.ref(), given)
	}
	if err != nil {
		return nil, err
	}
	if err := e.goOn(ctx, sb, inst); err != nil {
		return nil, err
	}
	s := sb.record().Sandbox
	return &s, nil
}

// restore starts the machine that was saved. The caller holds the verb lock. On failure the sandbox is paused as before.
func (e *Engine) restore(ctx context.Context, sb *sandbox, p provider.Pauser, rec *record, img *image.Image) (inst provider.Instance, err error) {
	ctx, cancel := context.WithTimeout(ctx, resumeTime)
	defer cancel()
	now := time.Now().UTC().Truncate(time.Microsecond)
	if err := sb.update(func(r *record) { r.Intent, r.ResumedAt = "resume", &now }); err != nil {
		return nil, err
	}
	var undo undo
	defer func() {
		if err == nil {
			return
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = shard.Wrap(shard.CodeTimeout, err, "sandbox %q did not resume within %d minutes", sb.ref(), resumeTime/time.Minute)
		}
		next := ""
		if undoErr := undo.run(ctx); undoErr != nil {
			e.Log.Error("undo of a failed resume: it is tried again", "sandbox", sb.id, "err", undoErr)
			next = "cleanup"
		}
		sb.learn(func(r *record) { r.Intent = next })
	}()
	spec, _, err := e.prepare(ctx, sb, rec, img, &undo)
	if err != nil {
		return nil, err
	}
	undo.push(func(ctx context.Context) error { return p.(provider.Provider).Destroy(ctx, spec) })
	var refused *provider.RefusedError
	inst, err = p.Resume(ctx, spec, sb.checkpoint())
	switch {
	case err == nil:
		return inst, nil
	case errors.Is(err, provider.ErrForeign):
		return nil, shard.Wrap(shard.CodeUnsupported, err, "sandbox %q was paused by another version of its provider, and its memory cannot be used any more: "+
			"stop it, and start it with its files", sb.ref())
	case errors.As(err, &refused):
		return nil, shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be resumed and stays paused: %s", sb.ref(), refused.Reason)
	case errors.Is(err, syscall.ENOSPC):
		return nil, shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be resumed and stays paused", sb.ref())
	}
	return nil, shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be resumed and stays paused (the daemon's log says why): try again, or stop it and start it with its files alone", sb.ref())
}

// goOn takes up a machine that goes on where it was paused. Whether that can be stored, and whether the agent answers, changes
// nothing any more: it runs. The caller holds the verb lock.
func (e *Engine) goOn(ctx context.Context, sb *sandbox, inst provider.Instance) error {
	l := newLive(inst)
	sb.mu.Lock()
	sb.live = l // who wants a session waits for it
	sb.mu.Unlock()
	sb.learn(func(r *record) {
		r.Sandbox.State, r.Sandbox.StoppedReason, r.Handle, r.Intent = shard.StateRunning, "", inst.Handle(), ""
	})
	e.Log.Info("a sandbox was resumed", "sandbox", sb.id)
	sb.dropUsedCheckpoint()
	defer e.attend(sb, l)
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	defer context.AfterFunc(e.ctx, cancel)() // Close waits for the watch
	session, err := connect(ctx, inst, sb.record())
	select {
	case <-inst.Done():
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q ended as soon as it was resumed: start it with its files", sb.ref())
	default:
	}
	if err != nil { // the watch finds out whether it answers later
		return shard.Wrap(shard.CodeTimeout, err, "sandbox %q was resumed, and its agent does not answer: if that stays so stop it, and start it with its files", sb.ref())
	}
	e.resumeProcesses(sb, session)
	e.resumeCommands(sb, session) // ends those that the pause ended
	sb.mu.Lock()
	l.session = session
	close(l.ready)
	sb.mu.Unlock()
	return nil
}

// settle finds out what became of a pause or a resume that an earlier daemon did not finish. The caller holds the verb lock, or
// is the only one there is. When it fails the intent stays, and the next tick tries again.
func (e *Engine) settle(ctx context.Context, sb *sandbox) error {
	rec := sb.record()
	p, err := e.pauser(sb)
	if err != nil {
		return err
	}
	handle, err := p.Settle(ctx, sb.spec(rec))
	switch {
	case err == nil:
		sb.learn(func(r *record) {
			r.Sandbox.State, r.Sandbox.StoppedReason, r.Handle, r.Intent = shard.StateRunning, "", handle, ""
		})
	case !errors.Is(err, provider.ErrGone):
		return fmt.Errorf("settle the %s: %w", rec.Intent, err)
	case rec.Intent == "resume": // and it stays paused
		sb.learn(func(r *record) { r.Intent = "cleanup" })
		return e.finish(ctx, sb)
	default: // the host went down, or it died: taking it up says which
		sb.learn(func(r *record) { r.Intent = "" })
	}
	sb.dropCheckpoint()
	return e.takeUp(ctx, sb)
}

package engine

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/useshards/shard"
)

// finish does what an intent says and its verb, or an earlier daemon, did not get done: it removes what the machine left. The
// caller holds the verb lock, or is the only one there is. When it fails the intent stays, and the next tick tries again.
func (e *Engine) finish(ctx context.Context, sb *sandbox) error {
	switch sb.record().Intent {
	case "":
		return nil
	case "remove":
		return e.remove(ctx, sb)
	case "pause", "resume":
		return e.settle(ctx, sb)
	}
	if err := e.teardown(ctx, sb); err != nil {
		return err
	}
	sb.learn(func(r *record) {
		if r.Intent == "stop" {
			stopped(r)
		}
		r.Intent, r.Handle = "", nil
	})
	if sb.record().Sandbox.State != shard.StatePaused {
		sb.dropCheckpoint()
	}
	return nil
}

// finishLater finishes what a verb left undone, or what a start of the daemon could not take up, unless another is at work.
func (e *Engine) finishLater(sb *sandbox) {
	if rec := sb.record(); rec.Intent == "" && rec.Sandbox.State != shard.StateUnresponsive {
		return
	}
	select {
	case sb.verb <- struct{}{}:
	default:
		return
	}
	e.wg.Go(func() {
		defer func() { <-sb.verb }()
		ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), teardownTime)
		defer cancel()
		if !e.holds(sb) {
			return
		}
		err := e.finish(ctx, sb)
		if err == nil && e.holds(sb) && sb.record().Sandbox.State == shard.StateUnresponsive {
			err = e.takeUp(ctx, sb)
		}
		if err != nil {
			e.Log.Warn("finish what was begun on a sandbox", "sandbox", sb.id, "intent", sb.record().Intent, "err", err)
		}
	})
}

// teardown removes what a machine and its commands leave on the host, except its files and its address. Idempotent.
func (e *Engine) teardown(ctx context.Context, sb *sandbox) error {
	rec := sb.record()
	var errs []error
	if err := os.RemoveAll(filepath.Join(sb.dir, "execs")); err != nil {
		errs = append(errs, err)
	}
	if p, err := e.providerNamed(rec.Sandbox.Provider); err != nil {
		errs = append(errs, err)
	} else if err := p.Destroy(ctx, sb.spec(rec)); err != nil {
		errs = append(errs, fmt.Errorf("provider %s: %w", p.Name(), err))
	}
	if err := e.Net.Detach(ctx, sb.id); err != nil {
		errs = append(errs, err)
	}
	if err := e.unenforce(ctx, sb.id); err != nil {
		errs = append(errs, err)
	}
	if err := e.Roots.Unmount(ctx, sb.dir); err != nil {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// deleteFiles deletes the record and the files, and gives back the address: in this order, since on a full disk only what was
// deleted makes room to write down that an address is free. A daemon that starts frees what no record holds.
func (e *Engine) deleteFiles(sb *sandbox) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(e.ctx), teardownTime)
	defer cancel()
	sb.put.Lock()
	sb.deleted = true
	sb.put.Unlock()
	if err := e.records.Delete(sb.id); err != nil {
		return err
	}
	return e.Net.Release(ctx, sb.id)
}

// deleteHollow deletes what is in the place of a record that could not be stored, now or later.
func (e *Engine) deleteHollow(id string) {
	if e.records.Delete(id) != nil {
		e.mu.Lock()
		e.hollow = append(e.hollow, id)
		e.mu.Unlock()
	}
}

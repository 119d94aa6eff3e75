package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sync/errgroup"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/provider"
)

// reconcile makes every record true: it finds out what runs, finishes stops and removes, and undoes creates and starts
// that an earlier daemon left half done.
func (e *Engine) reconcile(ctx context.Context) error {
	records, bad, hollow, err := e.records.All()
	if err != nil {
		return err
	}
	spared := make(map[string]bool) // what an unreadable record may stand for is not touched
	for _, u := range bad {
		spared[u.Key] = true
		e.damaged[u.Key] = u.Reason
		e.warnings = append(e.warnings, unreadable(u.Key, u.Reason))
		e.Log.Error("unreadable record", "sandbox", u.Key, "reason", u.Reason)
	}
	for _, id := range slices.SortedFunc(maps.Keys(records), func(a, b string) int {
		return cmp.Or(records[a].Sandbox.CreatedAt.Compare(records[b].Sandbox.CreatedAt), cmp.Compare(a, b))
	}) {
		records[id].recovered()
		e.add(e.newSandbox(id, records[id]))
	}
	alive := func(id string) bool {
		rec, ok := records[id]
		return spared[id] || ok && (rec.up() && (rec.Intent == "" || rec.Intent == "pause") || rec.Intent == "resume")
	}
	var running []string
	for id := range records {
		if alive(id) {
			running = append(running, id)
		}
	}
	// Rules first: nothing may be open that a policy closes.
	open := slices.DeleteFunc(slices.Clone(running), func(id string) bool {
		sb, known := e.sandboxes[id]
		return known && !e.enforceAgain(ctx, sb)
	})
	lost, err := e.Net.Recover(ctx, open)
	if err != nil {
		e.Log.Error("open the network of sandboxes again", "err", err)
	}
	if err := e.Net.Sweep(ctx, func(id string) (lease, attached bool) {
		_, known := records[id]
		return known || spared[id], alive(id)
	}); err != nil {
		e.Log.Error("sweep the network", "err", err)
	}
	g := new(errgroup.Group)
	g.SetLimit(8)
	for _, id := range slices.Clone(e.ids) {
		sb := e.sandboxes[id]
		g.Go(func() error {
			if err := e.reconcileOne(ctx, sb); err != nil {
				e.Log.Error("reconcile", "sandbox", sb.id, "err", err)
			}
			return nil
		})
	}
	_ = g.Wait()
	for _, id := range lost { // after a boot of the host they are gone themselves, which is no fault
		if sb := e.sandboxes[id]; sb != nil && sb.record().up() {
			e.Log.Error("a sandbox lost its network: stop and start it", "sandbox", id)
		}
	}
	for _, id := range hollow { // the record was not yet, or no longer, there
		if !shard.IsID(id) {
			e.Log.Warn("something that is no sandbox lies among them", "name", id)
			continue
		}
		if err := e.erase(ctx, id); err != nil {
			e.Log.Error("clean up a sandbox without a record", "sandbox", id, "err", err)
		}
	}
	up := func(id string) bool {
		if spared[id] {
			return true
		}
		sb, ok := e.sandboxes[id]
		return ok && (sb.record().up() || sb.record().Intent == "resume")
	}
	e.Roots.Sweep(ctx, func(dir string) bool { return up(filepath.Base(dir)) })
	if err := e.Cgroups.Sweep(ctx, up); err != nil {
		e.Log.Error("sweep cgroups", "err", err)
	}
	return nil
}

// erase removes everything of a sandbox of which only the id is known.
func (e *Engine) erase(ctx context.Context, id string) error {
	sb := e.newSandbox(id, &record{Sandbox: shard.Sandbox{ID: id}})
	var errs []error
	for _, p := range e.Providers {
		errs = append(errs, p.Destroy(ctx, sb.spec(sb.record())))
	}
	return errors.Join(append(errs, e.Net.Detach(ctx, id), e.Roots.Unmount(ctx, sb.dir), e.deleteFiles(sb))...)
}

// eraseDamaged removes a sandbox whose record cannot be read; false if ref is not the id of one.
func (e *Engine) eraseDamaged(ctx context.Context, ref string) (bool, error) {
	e.mu.Lock()
	why, ok := e.damaged[ref]
	e.mu.Unlock()
	if !ok {
		return false, nil
	}
	if err := e.erase(context.WithoutCancel(ctx), ref); err != nil {
		return true, shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be removed whole: try again", ref)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.damaged, ref)
	e.warnings = slices.DeleteFunc(e.warnings, func(w string) bool { return w == unreadable(ref, why) })
	return true, nil
}

func unreadable(id, why string) string {
	return fmt.Sprintf("the record of sandbox %q cannot be read: %s; mend it and restart the daemon, or remove the sandbox with force", id, why)
}

func (e *Engine) reconcileOne(ctx context.Context, sb *sandbox) error {
	rec := sb.record()
	switch {
	case rec.Intent == "remove":
	case rec.Sandbox.State == shard.StatePending || rec.Sandbox.State == shard.StateCreated:
		sb.learn(func(r *record) {
			r.Sandbox.State, r.Sandbox.FailedReason, r.Intent = shard.StateFailed, "the daemon restarted while it was created", "cleanup"
		})
	case rec.Intent == "" && rec.Sandbox.State == shard.StatePaused:
		if _, err := os.Stat(sb.checkpoint()); errors.Is(err, fs.ErrNotExist) {
			sb.learn(func(r *record) {
				r.Sandbox.State, r.Sandbox.StoppedReason = shard.StateStopped, "the daemon restarted and found no saved memory"
				r.processesDown()
			})
		}
		return nil
	case rec.Intent == "":
		sb.dropCheckpoint()
		if !rec.up() {
			return nil
		}
	}
	if sb.record().Intent != "" {
		return e.finish(ctx, sb)
	}
	return e.takeUp(ctx, sb)
}

// takeUp goes on with a machine that an earlier daemon left, or stores that it has ended. One of which neither is known, since this
// host or this version cannot say, is left to run: it is unresponsive, and the next tick tries again. The caller holds the verb
// lock, or is the only one there is.
func (e *Engine) takeUp(ctx context.Context, sb *sandbox) error {
	rec := sb.record()
	var inst provider.Instance
	p, err := e.providerNamed(rec.Sandbox.Provider)
	if err == nil {
		inst, err = p.Recover(ctx, sb.spec(rec), rec.Handle)
	}
	if err == nil {
		if rec.Sandbox.State != shard.StateRunning {
			sb.learn(func(r *record) { r.Sandbox.State = shard.StateRunning })
		}
		e.loadCommands(sb)
		e.enliven(sb, newLive(inst))
		return nil
	}
	if !errors.Is(err, provider.ErrGone) {
		if rec.Sandbox.State != shard.StateUnresponsive {
			e.Log.Error("a sandbox cannot be taken up; it is tried again", "sandbox", sb.id, "err", err)
			sb.learn(func(r *record) { r.Sandbox.State = shard.StateUnresponsive })
		}
		return nil
	}
	var exit provider.Exit
	if inst != nil {
		exit = inst.Exit()
		_ = inst.Close()
	}
	sb.learn(func(r *record) {
		ended(exit)(r)
		if !exit.OOM {
			r.Sandbox.StoppedReason = reasonGone
		}
	})
	return e.finish(ctx, sb)
}

package engine

import (
	"context"
	"time"

	"github.com/useshards/shard"
)

// A sandbox that the host ended for want of memory is started again: on the next tick, and when that
// happens again within steady of a start, after a wait that doubles from oomFirstWait to oomMostWait.
const (
	oomTick      = 5 * time.Second
	oomSteady    = 10 * time.Minute
	oomFirstWait = 10 * time.Second
	oomMostWait  = 5 * time.Minute
)

// oomKilled notes a kill in a record and says when to start the sandbox again.
func oomKilled(r *record, now time.Time) {
	if started := r.Sandbox.StartedAt; r.OOMInARow > 0 && started != nil && now.Sub(*started) >= oomSteady {
		r.OOMInARow = 0
	}
	wait := time.Duration(0)
	for i := range r.OOMInARow {
		if i == 0 {
			wait = oomFirstWait
		} else if wait *= 2; wait >= oomMostWait {
			wait = oomMostWait
			break
		}
	}
	r.OOMInARow++
	kills := 1
	if r.Sandbox.OOM != nil {
		kills += r.Sandbox.OOM.Kills
	}
	due := now.Add(wait)
	r.Sandbox.OOM = &shard.OOM{Kills: kills, KilledAt: now, RestartAt: &due}
	r.Sandbox.StoppedReason = reasonOOM
}

// callOff takes back a start that is due.
func callOff(r *record) {
	if r.Sandbox.OOM != nil && r.Sandbox.OOM.RestartAt != nil {
		oom := *r.Sandbox.OOM
		oom.RestartAt = nil
		r.Sandbox.OOM = &oom
	}
}

// restartDue says whether a start of the sandbox is due, now or later.
func restartDue(s *shard.Sandbox) bool {
	return s.State == shard.StateStopped && s.OOM != nil && s.OOM.RestartAt != nil
}

// hasCome says whether it is time for a start. One that is further away than any wait was set before the host's clock went back.
func hasCome(due, now time.Time) bool { return !now.Before(due) || due.Sub(now) > oomMostWait }

// restartLoop starts what is due, each tick, and makes up for what failed before: writes, cleanups, removals.
func (e *Engine) restartLoop() {
	tick := time.NewTicker(oomTick)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case now := <-tick.C:
			e.mu.Lock()
			hollow := e.hollow
			e.hollow = nil
			e.mu.Unlock()
			for _, id := range hollow {
				e.deleteHollow(id)
			}
			_ = e.keepReserve() // said at the start of the daemon
			for _, sb := range e.all() {
				sb.catchUp()
				e.finishLater(sb)
				s := &sb.record().Sandbox
				if restartDue(s) && hasCome(*s.OOM.RestartAt, now) {
					e.wg.Go(func() { e.restart(s.ID) })
				}
			}
		}
	}
}

func (e *Engine) restart(id string) {
	if _, err := e.start(e.ctx, id, func(s *shard.Sandbox) bool { return restartDue(s) }); err != nil {
		e.Log.Warn("start a sandbox that ran out of memory", "sandbox", id, "err", err)
	}
}

// stopDue is a stop of a sandbox that is down and due to start: it stays down.
func (e *Engine) stopDue(ctx context.Context, sb *sandbox) (*shard.Sandbox, error) {
	unlock, err := sb.lock(ctx, shard.VerbStart) // allowed exactly while it is stopped
	if err != nil {
		return nil, err
	}
	defer unlock()
	sb.learn(func(r *record) { callOff(r); r.StoppedByUser = true })
	s := sb.record().Sandbox
	return &s, nil
}

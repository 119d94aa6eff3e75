package engine

import (
	"testing"
	"time"

	"github.com/useshards/shard"
)

func TestOOMWaits(t *testing.T) {
	now := time.Date(2026, 1, 1, 0, 0, 0, 0, time.UTC)
	r := &record{Sandbox: shard.Sandbox{State: shard.StateStopped}}
	start := func() { at := now; r.Sandbox.StartedAt = &at }
	start()
	for i, want := range []time.Duration{0, 10, 20, 40, 80, 160, 300, 300, 300} {
		now = now.Add(time.Minute)
		oomKilled(r, now)
		if got := r.Sandbox.OOM.RestartAt.Sub(now); got != want*time.Second || r.Sandbox.OOM.Kills != i+1 {
			t.Errorf("kill %d waits %v, want %v s; record %+v", i+1, got, want, r.Sandbox.OOM)
		}
		now = *r.Sandbox.OOM.RestartAt
		start()
	}
	now = now.Add(oomSteady)
	oomKilled(r, now)
	if got := r.Sandbox.OOM.RestartAt.Sub(now); got != 0 {
		t.Errorf("after ten quiet minutes the wait is %v", got)
	}
	if !restartDue(&r.Sandbox) {
		t.Error("no start is due")
	}
	before := r.Sandbox.OOM
	callOff(r)
	if restartDue(&r.Sandbox) || before.RestartAt == nil {
		t.Error("a start that was called off is due, or a shared record was changed")
	}
}

// TestStartAfterClockChange: a host whose clock goes back by an hour does not wait that hour longer.
func TestStartAfterClockChange(t *testing.T) {
	now := time.Now()
	for due, want := range map[time.Duration]bool{-time.Hour: true, 0: true, time.Second: false, oomMostWait: false, oomMostWait + time.Second: true, time.Hour: true} {
		if got := hasCome(now.Add(due), now); got != want {
			t.Errorf("a start due in %s: %v, want %v", due, got, want)
		}
	}
}

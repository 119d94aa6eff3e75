package agent

import (
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	firstWait = time.Second      // before the first restart, unless the process has its own
	mostWait  = 60 * time.Second // a wait doubles up to it
	steady    = 10 * time.Second // a run of at least so long begins the count, and the waits, anew
)

// restarts works out what follows a run of a process.
type restarts struct {
	spec  shard.RestartSpec
	inRow int // restarts since a steady run
}

// after is what follows a run that ended so and lasted for ran: a state, and with restarting the wait before the next run.
func (r *restarts) after(exit guest.Exit, ran time.Duration) (state string, wait time.Duration) {
	failed := exit != guest.Exit{}
	switch policy := r.spec.Policy; {
	case policy == shard.RestartNo, policy == shard.RestartOnFailure && !failed:
		return shard.ProcessExited, 0
	}
	if ran >= steady {
		r.inRow = 0
	}
	if r.spec.Policy == shard.RestartOnFailure && r.spec.Retries > 0 && r.inRow >= r.spec.Retries {
		return shard.ProcessGaveUp, 0
	}
	wait = firstWait
	if r.spec.Backoff > 0 {
		wait = time.Duration(r.spec.Backoff * float64(time.Second))
	}
	for range r.inRow {
		if wait *= 2; wait >= mostWait {
			break
		}
	}
	r.inRow++
	return shard.ProcessRestarting, min(wait, mostWait)
}

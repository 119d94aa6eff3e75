package agent

import (
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// life is a process whose runs are made up: each lasts for a time and ends somehow.
type life struct {
	*process
	runs []madeUp
	at   []time.Duration // when each began, since the first
}

type madeUp struct {
	lasts time.Duration
	exit  guest.Exit
}

// live supervises made-up runs, the last of which repeats, and returns when the process is over or for has gone by. It is
// called in a bubble.
func live(spec shard.RestartSpec, lasts time.Duration, runs ...madeUp) *life {
	l := &life{process: &process{a: &agent{}, spec: guest.ProcessSpec{Restart: spec}, out: newOutput(), ends: make(chan struct{})}, runs: runs}
	l.a.sup.all = []*process{l.process}
	l.state.State = shard.ProcessRunning
	born := time.Now()
	begin := func() (<-chan guest.Exit, error) {
		run := l.runs[min(len(l.at), len(l.runs)-1)]
		l.at = append(l.at, time.Since(born))
		l.a.sup.mu.Lock()
		if len(l.at) > 1 {
			l.state.Restarts++
		}
		l.state.State = shard.ProcessRunning
		l.a.sup.mu.Unlock()
		ended := make(chan guest.Exit, 1)
		time.AfterFunc(run.lasts, func() { ended <- run.exit })
		return ended, nil
	}
	done := make(chan struct{})
	first, _ := begin()
	go func() { l.supervise(first, begin); close(done) }()
	select {
	case <-done:
	case <-time.After(lasts):
		l.a.sup.mu.Lock() // as kill does
		l.state.Killed = true
		close(l.ends)
		running := l.state.State == shard.ProcessRunning
		l.a.sup.mu.Unlock()
		if running {
			l.runs = []madeUp{{}}
		}
		<-done
	}
	return l
}

var failure = guest.Exit{Code: 1}

func TestWaitsDoubleUpToAMinute(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := live(shard.RestartSpec{Policy: shard.RestartAlways}, 10*time.Minute, madeUp{time.Second, failure})
		at := time.Duration(0)
		for i, wait := range []time.Duration{1, 2, 4, 8, 16, 32, 60, 60, 60} {
			if l.at[i] != at {
				t.Errorf("run %d began at %s, want %s", i, l.at[i], at)
			}
			at += time.Second + wait*time.Second
		}
		if l.state.State != shard.ProcessKilled || l.state.Restarts != len(l.at)-1 {
			t.Errorf("after a kill: %+v", l.state)
		}
	})
}

func TestSteadyRunBeginsAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		quick, long := madeUp{0, failure}, madeUp{steady, failure}
		l := live(shard.RestartSpec{Policy: shard.RestartOnFailure, Retries: 3, Backoff: 0.5}, time.Hour, quick, quick, quick, long, quick, quick, quick, quick)
		var want []time.Duration
		at := time.Duration(0)
		for _, wait := range []time.Duration{0, 500, 1000, 2000, 10500, 1000, 2000} {
			at += wait * time.Millisecond
			want = append(want, at)
		}
		if len(l.at) != len(want) || l.state.State != shard.ProcessGaveUp || l.state.Restarts != 6 {
			t.Fatalf("runs at %v, want %v: %+v", l.at, want, l.state)
		}
		for i := range want {
			if l.at[i] != want[i] {
				t.Errorf("run %d began at %s, want %s", i, l.at[i], want[i])
			}
		}
	})
}

func TestPolicies(t *testing.T) {
	signal := guest.Exit{Signal: 15}
	for _, c := range []struct {
		policy  string
		retries int
		exit    guest.Exit
		state   string
		runs    int
	}{
		{shard.RestartNo, 0, failure, shard.ProcessExited, 1},
		{shard.RestartNo, 0, guest.Exit{}, shard.ProcessExited, 1},
		{shard.RestartOnFailure, 0, guest.Exit{}, shard.ProcessExited, 1},
		{shard.RestartOnFailure, 1, signal, shard.ProcessGaveUp, 2},
		{shard.RestartOnFailure, 4, failure, shard.ProcessGaveUp, 5},
		{shard.RestartAlways, 0, guest.Exit{}, shard.ProcessKilled, 3}, // at 0, 1 and 3 s
		{shard.RestartUnlessStopped, 0, guest.Exit{}, shard.ProcessKilled, 3},
	} {
		synctest.Test(t, func(t *testing.T) {
			lasts := 5 * time.Second
			if c.state != shard.ProcessKilled {
				lasts = time.Hour
			}
			l := live(shard.RestartSpec{Policy: c.policy, Retries: c.retries}, lasts, madeUp{0, c.exit})
			if l.state.State != c.state || len(l.at) != c.runs || l.state.Exit == nil || *l.state.Exit != c.exit {
				t.Errorf("%s after %+v: %+v in %d runs", c.policy, c.exit, l.state, len(l.at))
			}
		})
	}
}

// TestWaitsAreBounded: whatever happens, a wait is never longer than a minute, nor shorter than the first; no more
// restarts follow each other than the cap allows.
func TestWaitsAreBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		r := restarts{spec: shard.RestartSpec{Policy: shard.RestartOnFailure, Retries: rapid.IntRange(0, 4).Draw(t, "retries"),
			Backoff: rapid.Float64Range(0, 60).Draw(t, "backoff")}}
		first := r.spec.Backoff
		if first == 0 {
			first = 1
		}
		inRow := 0
		for range rapid.IntRange(1, 200).Draw(t, "runs") {
			ran := time.Duration(rapid.Int64Range(0, int64(20*time.Second)).Draw(t, "ran"))
			if ran >= steady {
				inRow = 0
			}
			state, wait := r.after(failure, ran)
			if state == shard.ProcessGaveUp {
				if r.spec.Retries == 0 || inRow < r.spec.Retries {
					t.Fatalf("gave up after %d", inRow)
				}
				return
			}
			if inRow++; r.spec.Retries > 0 && inRow > r.spec.Retries {
				t.Fatalf("%d restarts in a row", inRow)
			}
			if wait > mostWait || wait < time.Duration(first*float64(time.Second)) {
				t.Fatalf("a wait of %s", wait)
			}
		}
	})
}

package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPauseProcesses: named processes stand still with their sandbox: states, counts and logs go on behind a pause as if there had
// been none, also for who follows a log, is attached or waits.
func TestPauseProcesses(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		restart := func(policy string, retries int, backoff float64) *shard.RestartSpec {
			return &shard.RestartSpec{Policy: policy, Retries: retries, Backoff: backoff}
		}
		process := func(name, script string, r *shard.RestartSpec) {
			mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", script}, Restart: r})
		}
		process("count", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.01; done", nil)
		process("flood", "i=0; while :; do seq $i $((i+999)); i=$((i+1000)); done", nil)
		// A run ends whenever a line is asked for, in a pipe that outlives it.
		process("crash", "test -p /ask || mkfifo /ask; echo run; read x <>/ask; exit 3", restart(shard.RestartOnFailure, 0, 0.05))
		process("waits", "echo x; exit 1", restart(shard.RestartAlways, 0, 60)) // until long after the test
		process("ends", "sleep 2; echo end; exit 4", restart(shard.RestartNo, 0, 0))
		process("killed", "sleep 600", nil)
		if _, err := c.KillProcess(t.Context(), id, "killed", true); err != nil {
			t.Fatal(err)
		}
		inState(t, c, id, "waits", shard.ProcessRestarting)
		crashes := 0
		crash := func() {
			t.Helper()
			crashes++
			sh(t, d, id, "while ! test -p /ask; do sleep 0.05; done; echo >/ask")
			testenv.Eventually(t, fmt.Sprintf("%d restarts", crashes), func() (bool, string) {
				p, err := c.Process(t.Context(), id, "crash")
				runs := strings.Count(logOf(t, c, id, "crash"), "run\n")
				return err == nil && p.Status.Restarts == crashes && runs == crashes+1, fmt.Sprintf("%+v, %v, %d runs", p, err, runs)
			})
		}
		crash()
		crash()

		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		defer func() { cancel(); wg.Wait() }()
		follow, err := c.ProcessLog(ctx, id, "count", true)
		if err != nil {
			t.Fatal(err)
		}
		var mu sync.Mutex
		var followed bytes.Buffer
		wg.Go(func() {
			_, _ = io.Copy(writerFunc(func(b []byte) (int, error) { mu.Lock(); defer mu.Unlock(); return followed.Write(b) }), follow)
		})
		soFar := func() string { mu.Lock(); defer mu.Unlock(); return followed.String() }
		attach := d.Command("run", id, "--name", "att", "--attach", "--restart", "no", "--", "sh", "-c", "echo one; read x <>/ask2; echo two; exit 7")
		sh(t, d, id, "mkfifo /ask2")
		var attached, complaint bytes.Buffer
		attach.Stdout, attach.Stderr = &attached, &complaint
		if err := attach.Start(); err != nil {
			t.Fatal(err)
		}
		waited := make(chan *shard.Process, 1)
		go func() { p, _ := c.WaitProcess(ctx, id, "ends"); waited <- p }()
		inState(t, c, id, "att", shard.ProcessRunning)
		logs(t, c, id, "att", "one\n")

		want := map[string]string{"count": "running", "flood": "running", "crash": "running", "waits": "restarting", "killed": "killed", "att": "running"}
		same := func(when string) {
			t.Helper()
			got := states(t, c, id)
			if delete(got, "ends"); !equal(got, want) { // which may have
				t.Errorf("%s: %v, want %v", when, got, want)
			}
		}
		steady := 0
		for round := range 3 {
			pause(t, c, id)
			if round == 1 {
				d.Stop()
				d.Restart()
			}
			same("paused")
			before, log := inspect(t, d, id), logOf(t, c, id, "count")
			if n, err := counted(log); err != nil || n < steady {
				t.Errorf("round %d, paused: %d lines, %v", round, n, err)
			}
			for _, name := range []string{"count", "killed", "waits"} {
				_, err := c.KillProcess(t.Context(), id, name, false)
				wantCode(t, err, shard.CodeSandboxNotRunning)
			}
			refused(t, d.Shard("kill", id, "count"), "paused", "resume")
			_, err := c.RunProcess(t.Context(), id, runs("late", "", "sleep", "600"))
			wantCode(t, err, shard.CodeSandboxNotRunning)
			if again := logOf(t, c, id, "count"); again != log {
				t.Errorf("round %d: the log grew from %d to %d bytes in a pause", round, len(log), len(again))
			}
			if r := d.Shard("logs", id, "crash"); r.Code != 0 || strings.Count(r.Stdout, "run\n") != crashes+1 {
				t.Errorf("round %d: shard logs in a pause: %+v", round, r)
			}
			if now := inspect(t, d, id); !equalJSON(now, before) {
				t.Errorf("round %d: refused verbs made of %+v: %+v", round, before, now)
			}
			resume(t, c, id)
			same("resumed")
			steady, _ = counted(log)
			testenv.Eventually(t, "the log goes on", func() (bool, string) {
				n, err := counted(logOf(t, c, id, "count"))
				return err == nil && n > steady, fmt.Sprintf("%d lines, %v", n, err)
			})
			crash()
			if round == 0 {
				testenv.Eventually(t, "who follows the log goes on", func() (bool, string) {
					n, err := counted(soFar()[:strings.LastIndexByte(soFar(), '\n')+1])
					return err == nil && n > steady, fmt.Sprintf("%d lines, %v", n, err)
				})
				sh(t, d, id, "echo >/ask2")
				if code := exitCode(t, "run --attach over a pause", attach); code != 7 || attached.String() != "one\ntwo\n" || complaint.Len() > 0 {
					t.Errorf("run --attach over a pause: %d, %q, %q", code, attached.String(), complaint.String())
				}
				want["att"] = "exited"
				if p := <-waited; p == nil || p.Status.Exit == nil || p.Status.Exit.Code != 4 {
					t.Errorf("who waited over a pause got %+v", p)
				}
				logs(t, c, id, "ends", "end\n")
			}
		}
		log := logOf(t, c, id, "flood")
		if len(log) < 16<<20 { // else its begin is gone
			if n, err := counted(log[:strings.LastIndexByte(log, '\n')+1]); err != nil {
				t.Errorf("much output: %d lines, %v", n, err)
			}
		} else {
			lines := strings.Split(log, "\n")
			lines = lines[1 : len(lines)-1]
			for i := 1; i < len(lines); i++ {
				var a, b int
				if _, err := fmt.Sscan(lines[i-1], &a); err != nil {
					t.Fatal(err)
				}
				if _, err := fmt.Sscan(lines[i], &b); err != nil || b != a+1 {
					t.Errorf("much output: %q behind %q", lines[i], lines[i-1])
					break
				}
			}
		}
		if p, err := c.KillProcess(t.Context(), id, "count", false); err != nil || p.Status.Exit == nil || p.Status.Exit.Signal != 15 || p.Status.Restarts != 0 {
			t.Errorf("kill after it all: %+v, %v", p, err)
		}
		if n, err := counted(logOf(t, c, id, "count")); err != nil {
			t.Errorf("the steady output at its end: %d lines, %v", n, err)
		}
		if log := logOf(t, c, id, "waits"); log != "x\n" {
			t.Errorf("what waits for its restart wrote %q", log)
		}

		// A stop of a paused sandbox: its processes are stopped, and return with the start.
		pause(t, c, id)
		d.Must("stop", id)
		for name, state := range map[string]string{"flood": "stopped", "crash": "stopped", "waits": "stopped", "count": "killed", "ends": "exited"} {
			if got := states(t, c, id)[name]; got != state {
				t.Errorf("a stop of a paused sandbox left %s %s, want %s", name, got, state)
			}
		}
		d.Must("start", id)
		inState(t, c, id, "waits", shard.ProcessRestarting)
		if p := inState(t, c, id, "flood", shard.ProcessRunning); p.Status.Restarts != 0 {
			t.Errorf("after a start: %+v", p.Status)
		}
	})
}

type writerFunc func([]byte) (int, error)

func (f writerFunc) Write(b []byte) (int, error) { return f(b) }

// TestPauseProcessEnds: processes that end, are started and are killed at the moment of a pause or a resume: what the record says is
// what became of them, and every restart is counted once.
func TestPauseProcessEnds(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		name := "quick"
		mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", "echo x >>/quick; sleep 0.05; exit 1"},
			Restart: &shard.RestartSpec{Policy: shard.RestartAlways, Backoff: 0.01}})
		for round := range 6 {
			code := 10 + round
			once := fmt.Sprintf("once%d", round)
			mustRun(t, c, id, runs(once, shard.RestartNo, "sh", "-c", fmt.Sprintf("sleep 0.%d; echo out; exit %d", round, code)))
			var wg sync.WaitGroup
			errs := make([]error, 6)
			for i := range errs {
				wg.Go(func() {
					time.Sleep(time.Duration(i*20) * time.Millisecond)
					_, errs[i] = c.RunProcess(t.Context(), id, runs(fmt.Sprintf("run%d", i), shard.RestartNo, "sleep", "600"))
				})
			}
			wg.Go(func() {
				p, err := c.KillProcess(t.Context(), id, "quick", round%2 == 0)
				if err == nil && p.Status.State != shard.ProcessKilled {
					t.Errorf("kill at a pause: %+v", p.Status)
				} else if err != nil {
					wantCode(t, err, shard.CodeSandboxNotRunning)
				}
			})
			time.Sleep(time.Duration(round*25) * time.Millisecond)
			pause(t, c, id)
			wg.Wait()
			ran := map[string]bool{}
			for i, err := range errs {
				if err == nil {
					ran[fmt.Sprintf("run%d", i)] = true
				} else {
					wantCode(t, err, shard.CodeSandboxNotRunning)
				}
			}
			inPause := states(t, c, id)
			resume(t, c, id)
			for i := range errs {
				name := fmt.Sprintf("run%d", i)
				if got := inPause[name]; ran[name] && got != shard.ProcessRunning || !ran[name] && got != "" && got != shard.ProcessKilled {
					t.Errorf("round %d: %s, of which the run said %v, was %q in the pause", round, name, errs[i], got)
				}
			}
			testenv.Eventually(t, "records and programs", func() (bool, string) {
				live := 0
				for name, state := range states(t, c, id) {
					if strings.HasPrefix(name, "run") && state == shard.ProcessRunning {
						live++
					}
				}
				programs := sh(t, d, id, "ps | grep -c '[s]leep 600' || true")
				return programs == fmt.Sprint(live) && live == len(ran), fmt.Sprintf("%d processes, %s programs, %d runs succeeded", live, programs, len(ran))
			})
			if p := over(t, c, id, once); p.Status.State != shard.ProcessExited || p.Status.Exit == nil || p.Status.Exit.Code != code {
				t.Errorf("round %d: it ended as %+v, want code %d", round, p.Status, code)
			}
			logs(t, c, id, once, "out\n")
			for name := range ran {
				if _, err := c.KillProcess(t.Context(), id, name, true); err != nil {
					t.Errorf("kill %s: %v", name, err)
				}
			}
			p, err := c.KillProcess(t.Context(), id, "quick", true)
			if err != nil || p.Status.State != shard.ProcessKilled {
				t.Fatalf("kill: %+v, %v", p, err)
			}
			wrote := sh(t, d, id, "wc -l </quick; rm /quick")
			if n := fmt.Sprint(p.Status.Restarts + 1); wrote != n && wrote != fmt.Sprint(p.Status.Restarts) { // the last may have been killed before its word
				t.Errorf("round %d: %d restarts, and it wrote %s times", round, p.Status.Restarts, wrote)
			}
			mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", "echo x >>/quick; sleep 0.05; exit 1"},
				Restart: &shard.RestartSpec{Policy: shard.RestartAlways, Backoff: 0.01}})
			testenv.Eventually(t, "it runs", func() (bool, string) { r := d.Shard("exec", id, "test", "-s", "/quick"); return r.Code == 0, r.Stderr })
		}
	})
}

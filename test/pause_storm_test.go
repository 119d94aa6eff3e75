package test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// TestPauseStorm: many clients do anything to a few sandboxes at once, pauses and resumes above all, and often give up half-way.
// Each refusal is a documented one, and every sandbox ends in a state that is true.
func TestPauseStorm(t *testing.T) {
	t.Parallel()
	const clients, verbs = 8, 30
	allowed := []shard.Code{"", shard.CodeNotFound, shard.CodeNoProcess, shard.CodeNameTaken, shard.CodeInUse, shard.CodeSandboxNotRunning,
		shard.CodeSandboxNotStopped, shard.CodeSandboxNotPaused, shard.CodeSandboxFailed, shard.CodeTimeout}
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		var wg sync.WaitGroup
		for w := range clients {
			rnd := rand.New(rand.NewPCG(8, uint64(w)))
			wg.Go(func() {
				for range verbs {
					box, process := fmt.Sprintf("s%d", rnd.IntN(2)), fmt.Sprintf("p%d", rnd.IntN(2))
					ctx, cancel := context.WithCancel(t.Context())
					if rnd.IntN(4) == 0 {
						time.AfterFunc(time.Duration(rnd.IntN(400))*time.Millisecond, cancel)
					}
					var verb string
					var err error
					switch rnd.IntN(5) {
					case 0:
						verb = "pause"
						_, err = c.Pause(ctx, box)
					case 1:
						verb = "resume"
						_, err = c.Resume(ctx, box)
					default:
						verb, err = storm(ctx, c, provider, box, process, rnd)
					}
					if code := shard.CodeOf(err); !slices.Contains(allowed, code) && ctx.Err() == nil {
						t.Errorf("%s: %v", verb, err)
					} else if code == shard.CodeSandboxFailed { // its create was cancelled
						_ = c.Remove(t.Context(), box, true)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		works(t, d, c, settled(t, c))
	})
}

// works checks that sandboxes are what their records say, and removes them; then nothing of them is left.
func works(t *testing.T, d *testenv.Daemon, c *client.Client, all []shard.Sandbox) {
	t.Helper()
	for _, s := range all {
		now := inspect(t, d, s.ID).State // a verb whose client gave up may have been under way
		testenv.Eventually(t, "no verb is under way", func() (bool, string) {
			was := now
			now = inspect(t, d, s.ID).State
			time.Sleep(300 * time.Millisecond)
			return now == was && now == inspect(t, d, s.ID).State, string(now)
		})
		switch now {
		case shard.StatePaused:
			resume(t, c, s.ID)
		case shard.StateStopped:
			d.Must("start", s.ID)
		case shard.StateFailed:
			if why := inspect(t, d, s.ID).FailedReason; !strings.Contains(why, "cancelled") {
				t.Errorf("sandbox %s failed: %s", s.ID, why)
			}
			d.Must("remove", "--force", s.ID)
			continue
		}
		sh(t, d, s.ID, "echo 1 >/storm && sync && cat /storm")
		pause(t, c, s.ID)
		resume(t, c, s.ID)
		sh(t, d, s.ID, "cat /storm")
		d.Must("remove", "--force", s.ID)
	}
	testenv.Eventually(t, "nothing is left", func() (bool, string) {
		left := d.Leftovers(false)
		return left.Empty(), left.String()
	})
}

// TestPauseAtOnce: a pause together with another verb, or with much of what clients do in a running sandbox. Each gets what it asked
// for or a clear error, and the sandbox is then what its record says.
func TestPauseAtOnce(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		together := func(verbs ...func() error) []error {
			errs := make([]error, len(verbs))
			var wg sync.WaitGroup
			for i, verb := range verbs {
				wg.Go(func() { errs[i] = verb() })
			}
			wg.Wait()
			return errs
		}
		later := func(round int, verb func() error) func() error {
			return func() error { time.Sleep(time.Duration(round*40) * time.Millisecond); return verb() }
		}
		one := func(errs []error, lost ...shard.Code) {
			t.Helper()
			won := 0
			for _, err := range errs {
				if err == nil {
					won++
				} else if !slices.Contains(lost, shard.CodeOf(err)) {
					t.Errorf("the loser was told: %v", err)
				}
			}
			if won < 1 {
				t.Errorf("nobody won: %v", errs)
			}
		}
		id := box(t, d, provider)
		verb := func(do func(context.Context, string) (*shard.Sandbox, error)) func() error {
			return func() error { _, err := do(t.Context(), id); return err }
		}
		for round := range 2 {
			// Two pauses, two resumes: one of each.
			errs := together(verb(c.Pause), later(round, verb(c.Pause)), verb(c.Pause))
			one(errs, shard.CodeSandboxNotRunning)
			if n := slices.Index(errs, nil); n < 0 || slices.Contains(errs[n+1:], nil) {
				t.Errorf("pauses at once: %v", errs)
			}
			errs = together(verb(c.Resume), later(round, verb(c.Resume)))
			one(errs, shard.CodeSandboxNotPaused)
			if errs[0] == nil && errs[1] == nil {
				t.Error("two resumes at once succeeded")
			}
			// A pause and its resume: the resume comes before or after it.
			one(together(verb(c.Pause), later(round, verb(c.Resume))), shard.CodeSandboxNotPaused)
			if state(t, d, id) == shard.StatePaused {
				resume(t, c, id)
			}
			// A stop: before or behind the pause.
			errs = together(verb(c.Pause), later(round, verb(c.Stop)))
			one(errs, shard.CodeSandboxNotRunning)
			if errs[1] != nil || state(t, d, id) != shard.StateStopped {
				t.Errorf("pause and stop at once: %v, and it is %s", errs, state(t, d, id))
			}
			d.Must("start", id)
			pause(t, c, id)
			errs = together(verb(c.Resume), later(round, verb(c.Stop)))
			one(errs, shard.CodeSandboxNotPaused)
			if errs[1] != nil || state(t, d, id) != shard.StateStopped {
				t.Errorf("resume and stop at once: %v, and it is %s", errs, state(t, d, id))
			}
			d.Must("start", id)
		}
		for round := range 3 {
			gone := box(t, d, provider)
			do := c.Pause
			if round == 2 {
				pause(t, c, gone)
				do = c.Resume
			}
			errs := together(func() error { _, err := do(t.Context(), gone); return err },
				later(round, func() error { return c.Remove(t.Context(), gone, true) }))
			one(errs, shard.CodeNotFound, shard.CodeSandboxNotRunning, shard.CodeSandboxNotPaused)
			_, err := c.Inspect(t.Context(), gone)
			wantCode(t, err, shard.CodeNotFound)
			if errs[1] != nil {
				t.Errorf("a forced removal at a pause: %v", errs[1])
			}
			testenv.Eventually(t, "nothing is left", func() (bool, string) {
				left := testenv.Observe(gone)
				return left.Empty(), left.String()
			})
		}

		// All that a running sandbox is used for, by many.
		d.Must("port", "add", id, "18130:80")
		allowed := []shard.Code{"", shard.CodeSandboxNotRunning, shard.CodeNotFound}
		ctx, cancel := context.WithCancel(t.Context())
		var wg sync.WaitGroup
		use := func(what string, once func(n int) error) {
			for w := range 3 {
				wg.Go(func() {
					for n := w; ctx.Err() == nil; n += 3 {
						if err := once(n); !slices.Contains(allowed, shard.CodeOf(err)) {
							t.Errorf("%s at a pause: %v", what, err)
						}
						time.Sleep(5 * time.Millisecond)
					}
				})
			}
		}
		use("exec", func(n int) error {
			_, s, err := c.Run(t.Context(), id, shard.ExecRequest{Command: script("echo hi; sleep 0.1"), TTY: n%2 == 0})
			if err != nil {
				return err
			}
			defer func() { _ = s.Close() }()
			_, err = s.Copy(io.Discard, io.Discard)
			return err
		})
		use("put", func(n int) error {
			const size = 300_000
			return c.PutFile(t.Context(), id, fmt.Sprintf("/f%d", n%3), strings.NewReader(strings.Repeat("x", size)), size, client.WriteOptions{})
		})
		use("archive", func(int) error {
			r, _, err := c.GetArchive(t.Context(), id, "/etc")
			if err == nil {
				_, _ = io.Copy(io.Discard, r) // may be cut
				_ = r.Close()
			}
			return err
		})
		use("run", func(n int) error {
			_, err := c.RunProcess(t.Context(), id, runs(fmt.Sprintf("p%d", n%3), shard.RestartNo, "true"))
			if shard.CodeOf(err) == shard.CodeNameTaken {
				err = nil
			}
			return err
		})
		use("port", func(int) error {
			if conn, err := d.Lab().DialFromHost(t.Context(), "tcp4", local(18130)); err == nil {
				_ = conn.SetDeadline(time.Now().Add(time.Minute))
				_, _ = io.ReadAll(conn)
				_ = conn.Close()
			}
			return nil
		})
		time.Sleep(200 * time.Millisecond)
		for range 3 {
			pause(t, c, id)
			resume(t, c, id)
			time.Sleep(50 * time.Millisecond)
		}
		cancel()
		wg.Wait()
		// A file is whole, or is not there.
		if got := sh(t, d, id, "cd /; for f in f0 f1 f2; do [ -e $f ] && wc -c <$f; done; ls -a / | grep -c shard-new || true"); strings.Trim(strings.ReplaceAll(got, "300000\n", ""), "0\n") != "" {
			t.Errorf("the files that were written: %q", got)
		}
		if list := execs(t, d, id, "").Execs; slices.ContainsFunc(list, func(e shard.Exec) bool { return e.State == shard.ExecRunning }) {
			testenv.Eventually(t, "no command is left running", func() (bool, string) {
				list := execs(t, d, id, "").Execs
				return !slices.ContainsFunc(list, func(e shard.Exec) bool { return e.State == shard.ExecRunning }), fmt.Sprintf("%+v", list)
			})
		}
		works(t, d, c, []shard.Sandbox{{ID: id}})
	})
}

// TestPauseTen: ten sandboxes are paused at once, and resumed at once: each has what was its own.
func TestPauseTen(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		ids := make([]string, 10)
		all := func(do func(i int)) {
			var wg sync.WaitGroup
			for i := range ids {
				wg.Go(func() { do(i) })
			}
			wg.Wait()
			if t.Failed() {
				t.FailNow()
			}
		}
		all(func(i int) {
			s, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Provider: provider, Name: fmt.Sprintf("ten%d", i)}, nil)
			if err == nil {
				_, err = c.RunProcess(t.Context(), s.ID, runs("count", "", "sh", "-c", fmt.Sprintf("me=%d; i=0; while :; do echo $me-$i; i=$((i+1)); sleep 0.05; done", i)))
			}
			if err != nil {
				t.Errorf("create: %v", err)
				return
			}
			ids[i] = s.ID
		})
		lines := func(i int) (n int) {
			for n, line := range strings.Split(strings.TrimSuffix(logOf(t, c, ids[i], "count"), "\n"), "\n") {
				if line != fmt.Sprintf("%d-%d", i, n) {
					t.Errorf("sandbox %d: line %d is %q", i, n, line)
				}
			}
			return strings.Count(logOf(t, c, ids[i], "count"), "\n")
		}
		all(func(i int) {
			if s, err := c.Pause(t.Context(), ids[i]); err != nil || s.State != shard.StatePaused {
				t.Errorf("pause: %+v, %v", s, err)
			}
		})
		testenv.Eventually(t, "nothing of ten paused sandboxes is on the host", func() (bool, string) {
			left := testenv.Observe(ids...)
			return left.Empty(), left.String()
		})
		before := make([]int, len(ids))
		for i := range ids {
			before[i] = lines(i)
		}
		all(func(i int) {
			if s, err := c.Resume(t.Context(), ids[i]); err != nil || s.State != shard.StateRunning {
				t.Errorf("resume: %+v, %v", s, err)
			}
		})
		for i := range ids {
			testenv.Eventually(t, "it goes on", func() (bool, string) { n := lines(i); return n > before[i], fmt.Sprint(n) })
			if got := sh(t, d, ids[i], "hostname"); got != fmt.Sprintf("ten%d", i) {
				t.Errorf("sandbox %d says that it is %s", i, got)
			}
		}
	})
}

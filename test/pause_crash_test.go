package test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// counting is a program that counts in its memory alone, and says each number in a file and in its log. Where memory and files
// stop agreeing, a number comes twice or is missing.
const counting = `i=0; while :; do i=$((i+1)); echo $i >>/count; echo $i; sleep 0.01; done`

// counts starts the program as the process "count" of a sandbox.
func counts(t *testing.T, d *testenv.Daemon, box string) {
	t.Helper()
	mustRun(t, connect(t, d), box, shard.RunRequest{Name: p("count"), Command: script(counting), Restart: &shard.RestartSpec{Policy: shard.RestartNo}})
	sh(t, d, box, "until [ -s /count ]; do sleep 0.1; done")
}

// countedOn checks what the program of counts has said so far, and that it goes on; it returns the last number.
func countedOn(t *testing.T, d *testenv.Daemon, box string) (last int) {
	t.Helper()
	check := func(where, text string) int {
		t.Helper()
		n := 0
		for line := range strings.Lines(text) {
			if !strings.HasSuffix(line, "\n") {
				break
			}
			if n++; strings.TrimSpace(line) != fmt.Sprint(n) {
				t.Fatalf("%s: where %d should come it says %q", where, n, line)
			}
		}
		return n
	}
	before := check("its file", sh(t, d, box, "cat /count")+"\n")
	testenv.Eventually(t, "the program counts on", func() (bool, string) {
		last = check("its file", sh(t, d, box, "cat /count")+"\n")
		return last > before, fmt.Sprint(last)
	})
	testenv.Eventually(t, "its log has what it said", func() (bool, string) {
		n := check("its log", logOf(t, connect(t, d), box, "count"))
		return n >= last, fmt.Sprintf("%d of %d", n, last)
	})
	if ps := inspect(t, d, box).Processes; len(ps) == 0 || ps[0].Status.State != shard.ProcessRunning || ps[0].Status.Restarts != 0 {
		t.Errorf("its process: %+v", ps)
	}
	return last
}

// cameTo waits until what was begun on a sandbox is over, and returns its state.
func cameTo(t *testing.T, d *testenv.Daemon, box string) (state shard.State) {
	t.Helper()
	testenv.Eventually(t, "what was begun is over", func() (bool, string) {
		record, err := os.ReadFile(recordFile(d, box))
		if err != nil {
			t.Fatal(err)
		}
		state = inspect(t, d, box).State
		over := !strings.Contains(string(record), `"intent"`)
		if over && state != shard.StateRunning && state != shard.StatePaused {
			t.Fatalf("it is %s: %s\n%s", state, record, d.Log())
		}
		return over, string(record)
	})
	return state
}

// tidy checks that of a sandbox there is on the host what its state needs, and nothing else.
func tidy(t *testing.T, d *testenv.Daemon, box string) {
	t.Helper()
	testenv.Eventually(t, "there is on the host what the sandbox needs, and no more", func() (bool, string) {
		left := testenv.Observe(box)
		_, err := os.Stat(filepath.Join(d.Root, "sandboxes", box, "checkpoint"))
		saved := err == nil
		if inspect(t, d, box).State == shard.StatePaused {
			return left.Empty() && saved, fmt.Sprintf("saved: %t\n%s", saved, left)
		}
		programs := 0
		for _, p := range left.Processes {
			if isProgram(p) {
				programs++
			}
		}
		return programs == 0 && !saved && len(left.Cgroups) > 0 && len(left.Mounts) > 0, fmt.Sprintf("saved: %t\n%s", saved, left)
	})
}

// killPrograms kills the programs of the runtime that are at work on a sandbox, and says how many there were.
func killPrograms(box string) (killed int) {
	for _, p := range testenv.Observe(box).Processes {
		var pid int
		if _, err := fmt.Sscan(p, &pid); err == nil && isProgram(p) && unix.Kill(pid, unix.SIGKILL) == nil {
			killed++
		}
	}
	return killed
}

func isProgram(process string) bool {
	return strings.Contains(process, " save ") || strings.Contains(process, " restore ") || strings.Contains(process, " settle ")
}

// TestKill9Pause: wherever in a pause or a resume the daemon dies, and with it at times the runtime's program, what it answered
// holds; the next one ends up with a sandbox that runs or is paused, in which memory and files agree, with its ports and its
// policy; and nothing else is left on the host.
func TestKill9Pause(t *testing.T) {
	t.Parallel()
	d := start(t)
	forbidden := d.Lab().CanaryInWorld("203.0.113.9:7000")
	forbidden.Control()
	put(t, d, "closed", "deny any")
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		const rounds = 12
		c := connect(t, d)
		type subject struct {
			id       string
			port     int
			was      shard.State
			last     int // number that was counted
			pausing  time.Duration
			resuming time.Duration
		}
		var subjects []*subject
		for _, much := range []bool{false, true} {
			s := &subject{port: 18200 + len(subjects), was: shard.StateRunning}
			s.id = box(t, d, provider, "--policy", "closed", "--port", fmt.Sprintf("%d:80", s.port))
			subjects = append(subjects, s)
			counts(t, d, s.id)
			for name, program := range map[string]string{
				"web":  "mkdir /www; echo here >/www/index.html; exec httpd -f -p 80 -h /www",
				"send": "while :; do nc -w 1 203.0.113.9 7000 </dev/null; echo x | nc -u -w 1 203.0.113.9 7000; sleep 0.1; done >/dev/null 2>&1",
			} {
				mustRun(t, c, s.id, shard.RunRequest{Name: p(name), Command: script(program)})
			}
			if much {
				mustRun(t, c, s.id, shard.RunRequest{Name: p("ballast"), Command: script("(head -c 150000000 /dev/urandom; touch /full; sleep 100000) | tail -c 150000000")})
				sh(t, d, s.id, "until [ -e /full ]; do sleep 0.1; done")
			}
			began := time.Now()
			pause(t, c, s.id)
			s.pausing, began = time.Since(began), time.Now()
			resume(t, c, s.id)
			s.resuming = time.Since(began)
		}
		for round := range rounds {
			var answers []chan error
			var within time.Duration
			for _, s := range subjects {
				verb, lasts := c.Pause, s.pausing
				if round%2 == 1 {
					verb, lasts = c.Resume, s.resuming
				}
				if want := []shard.State{shard.StateRunning, shard.StatePaused}[round%2]; s.was != want {
					if s.was = want; want == shard.StatePaused {
						pause(t, c, s.id)
					} else {
						resume(t, c, s.id)
					}
				}
				answered := make(chan error, 1)
				answers = append(answers, answered)
				within = max(within, lasts)
				go func() {
					_, err := verb(context.WithoutCancel(t.Context()), s.id)
					answered <- err
				}()
			}
			delay := rand.N(within * 3 / 2)
			time.Sleep(delay)
			d.Kill9()
			killed := 0
			if rand.IntN(3) == 0 {
				time.Sleep(rand.N(50 * time.Millisecond))
				killed = killPrograms(subjects[0].id) + killPrograms(subjects[1].id)
			}
			if rand.IntN(3) == 0 { // the next one dies while it boots
				dying := d.Command("daemon")
				if err := dying.Start(); err != nil {
					t.Fatal(err)
				}
				time.Sleep(rand.N(150 * time.Millisecond))
				_ = dying.Process.Kill()
				_ = dying.Wait()
			}
			d.Restart()
			for i, s := range subjects {
				err, was := <-answers[i], s.was
				s.was = cameTo(t, d, s.id)
				t.Logf("round %d: %s after %v was %s and is %s, with %d programs killed: %v", round, s.id, delay.Round(time.Millisecond), was, s.was, killed, err)
				if err == nil && s.was == was {
					t.Fatalf("round %d: a verb succeeded, and its sandbox is %s as before", round, was)
				}
				tidy(t, d, s.id)
				if s.was == shard.StatePaused {
					continue
				}
				n := countedOn(t, d, s.id)
				if n <= s.last {
					t.Fatalf("round %d: it counted to %d before, and is at %d", round, s.last, n)
				}
				s.last = n
				testenv.Eventually(t, "its port answers", func() (bool, string) {
					got, err := ask(t, d, local(s.port), "GET /index.html HTTP/1.0\r\n\r")
					return strings.Contains(got, "here"), fmt.Sprintf("%q, %v", got, err)
				})
			}
		}
		for _, s := range subjects {
			if s.was == shard.StatePaused {
				resume(t, c, s.id)
			}
			countedOn(t, d, s.id)
			pause(t, c, s.id)
			tidy(t, d, s.id)
			d.Must("stop", s.id)
			d.Must("start", s.id)
			if got := sh(t, d, s.id, "cat /www/index.html"); got != "here" {
				t.Errorf("its file after all: %q", got)
			}
		}
		if hits := forbidden.Hits(); len(hits) > 0 {
			t.Errorf("what the policy forbids was reached %d times: %s", len(hits), hits[0])
		}
	})
}

// TestPauseBrokenOff: a pause or a resume that hangs does not keep a sandbox from being stopped, or removed by force.
func TestPauseBrokenOff(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		for _, resume := range []bool{false, true} {
			for _, how := range []string{"stop", "remove"} {
				t.Run(fmt.Sprintf("%s/resume %t", how, resume), func(t *testing.T) {
					t.Parallel()
					for range 20 { // a machine that is quicker than we are is tried again
						if id, told, hung := hang(t, d, c, box(t, d, provider), resume); hung {
							brokenOff(t, d, id, how, resume, told)
							return
						}
					}
					t.Error("the moment to make it hang was missed each time")
				})
			}
		}
	})
}

// hang begins a pause or a resume and stops the machine's process in the middle of it, and says whether that was in time.
func hang(t *testing.T, d *testenv.Daemon, c *client.Client, id string, resume bool) (_ string, told chan error, hung bool) {
	t.Helper()
	dir := filepath.Join(d.Root, "sandboxes", id)
	sentry := func() (pid int) {
		text, _ := os.ReadFile(filepath.Join(dir, "bundle", "pid"))
		_, _ = fmt.Sscan(string(text), &pid)
		return pid
	}
	verb, begun := c.Pause, filepath.Join(dir, "checkpoint", "checkpoint.img")
	if resume {
		pause(t, c, id)
		verb, begun = c.Resume, filepath.Join(dir, "bundle", "pid")
	} else { // much to save takes long
		sh(t, d, id, "dd if=/dev/urandom of=/dev/shm/much bs=1M count=60 2>/dev/null")
	}
	told = make(chan error, 1)
	go func() { _, err := verb(t.Context(), id); told <- err }()
	for len(told) == 0 {
		if exists(t, begun) {
			if pid := sentry(); pid > 1 && unix.Kill(pid, unix.SIGSTOP) == nil {
				break
			}
		}
	}
	select {
	case err := <-told:
		if err != nil {
			t.Fatal(err)
		}
		if pid := sentry(); pid > 1 {
			_ = unix.Kill(pid, unix.SIGCONT)
		}
		return id, told, false
	case <-time.After(300 * time.Millisecond):
		return id, told, true
	}
}

func brokenOff(t *testing.T, d *testenv.Daemon, id, how string, resume bool, told chan error) {
	t.Helper()
	if how == "remove" {
		d.Must("remove", "--force", id)
		if left := testenv.Observe(id); !left.Empty() {
			t.Errorf("left on the host: %s", left)
		}
	} else {
		d.Must("stop", id)
		if s := state(t, d, id); s != shard.StateStopped {
			t.Errorf("it is %s", s)
		}
		d.Must("start", id)
		sh(t, d, id, "true")
	}
	want := shard.CodeSandboxNotRunning
	if resume {
		want = shard.CodeSandboxNotPaused
	}
	if err := <-told; shard.CodeOf(err) != want || !strings.Contains(err.Error(), "given up") {
		t.Errorf("what was broken off says %v", err)
	}
}

// TestPauseSentryKilled: a machine that dies in a pause is lost, which is said; in a resume it stays paused, or has ended.
func TestPauseSentryKilled(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		// during does a verb, kills the machine while the runtime's program is at it, and says whether that was in time.
		during := func(id string, verb func() error) (error, bool) {
			done := make(chan error, 1)
			go func() { done <- verb() }()
			for {
				select {
				case err := <-done:
					return err, false
				default:
				}
				program, sentry := false, 0
				for _, p := range testenv.Observe(id).Processes {
					if program = program || isProgram(p); strings.Contains(p, " runsc-sandbox ") {
						_, _ = fmt.Sscan(p, &sentry)
					}
				}
				if program && sentry != 0 && unix.Kill(sentry, unix.SIGKILL) == nil {
					return <-done, true
				}
			}
		}
		lost, ended := false, false
		for range 20 {
			if lost && ended {
				break
			}
			id := box(t, d, provider)
			counts(t, d, id)
			if !lost {
				err, killed := during(id, func() error { _, err := c.Pause(t.Context(), id); return err })
				if err != nil && !killed {
					t.Fatal(err)
				}
				if err != nil {
					var got *shard.Inspection
					testenv.Eventually(t, "a machine that was killed has ended", func() (bool, string) {
						got = inspect(t, d, id)
						return got.State == shard.StateFailed || got.State == shard.StateStopped, fmt.Sprintf("%+v, %v", got, err)
					})
					if got.State == shard.StateStopped { // it died before the pause began
						continue
					}
					lost = true
					if shard.CodeOf(err) != shard.CodeInternal || !strings.Contains(err.Error(), "memory is lost") || !strings.Contains(got.FailedReason, "paused") {
						t.Errorf("it was lost: %v, %q", err, got.FailedReason)
					}
					if _, err := c.Resume(t.Context(), id); shard.CodeOf(err) != shard.CodeSandboxFailed {
						t.Errorf("resume of what was lost: %v", err)
					}
					if left := testenv.Observe(id); !left.Empty() {
						t.Errorf("left on the host: %s", left)
					}
					continue
				}
			}
			if s := state(t, d, id); s == shard.StateStopped {
				continue
			} else if s == shard.StateRunning {
				pause(t, c, id)
			}
			for range 5 {
				err, killed := during(id, func() error { _, err := c.Resume(t.Context(), id); return err })
				if err == nil || !killed || !strings.Contains(err.Error(), "stays paused") {
					testenv.Eventually(t, "a machine that was killed when it ran has ended", func() (bool, string) {
						s := state(t, d, id)
						return !killed || s == shard.StateStopped, string(s)
					})
					break
				}
				ended = true
				if now := cameTo(t, d, id); now != shard.StatePaused {
					t.Fatalf("a resume that failed (%v) leaves it %s", err, now)
				}
				tidy(t, d, id)
			}
			if ended && state(t, d, id) == shard.StatePaused {
				resume(t, c, id)
				n := sh(t, d, id, "wc -l </count") // numbers can come twice: a guest that had just begun to run has changed its files
				testenv.Eventually(t, "the program counts on", func() (bool, string) { return sh(t, d, id, "wc -l </count") != n, n })
			}
		}
		if !lost || !ended {
			t.Errorf("lost %t, ended %t: nothing was killed in time", lost, ended)
		}
	})
}

// TestPauseDamaged: from memory that was damaged on the disk nothing goes on; that is said, and the files are there.
func TestPauseDamaged(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		sh(t, d, id, "echo mine >/file")
		dir := filepath.Join(d.Root, "sandboxes", id, "checkpoint")
		halve := func(name string) func() error {
			return func() error {
				info, err := os.Stat(filepath.Join(dir, name))
				if err == nil {
					err = os.Truncate(filepath.Join(dir, name), info.Size()/2)
				}
				return err
			}
		}
		flip := func(name string) func() error {
			return func() error {
				data, err := os.ReadFile(filepath.Join(dir, name))
				for i := len(data) / 4; i < len(data)/2; i++ {
					data[i] ^= 0x55
				}
				if err == nil {
					err = os.WriteFile(filepath.Join(dir, name), data, 0o600)
				}
				return err
			}
		}
		remove := func(name string) func() error {
			return func() error { return os.RemoveAll(filepath.Join(dir, name)) }
		}
		for _, damage := range []struct {
			what string
			do   func() error
			code shard.Code
			word string
		}{
			{"half a state", halve("checkpoint.img"), shard.CodeInternal, "stays paused"},
			{"another state", flip("checkpoint.img"), shard.CodeInternal, "stays paused"},
			{"no state", remove("checkpoint.img"), shard.CodeInternal, "stays paused"},
			{"half the pages", halve("pages.img"), shard.CodeInternal, "stays paused"},
			{"no pages", remove("pages.img"), shard.CodeInternal, "stays paused"},
			{"no list of pages", remove("pages_meta.img"), shard.CodeInternal, "stays paused"},
			{"another version", func() error {
				return errors.Join(halve("checkpoint.img")(), os.WriteFile(filepath.Join(dir, "version"), []byte("20200101"), 0o600))
			}, shard.CodeUnsupported, "another version"},
			{"nothing", remove(""), shard.CodeNoCheckpoint, "missing"},
			{"other pages", flip("pages.img"), "", ""}, // nothing says so: the guest goes on, or dies of it
		} {
			pause(t, c, id)
			if err := damage.do(); err != nil {
				t.Fatal(err)
			}
			_, err := c.Resume(t.Context(), id)
			if damage.code != "" {
				if shard.CodeOf(err) != damage.code || !strings.Contains(err.Error(), damage.word) {
					t.Errorf("%s: %v", damage.what, err)
				}
				if now := cameTo(t, d, id); now != shard.StatePaused {
					t.Errorf("%s: it is %s", damage.what, now)
				}
				if left := testenv.Observe(id); !left.Empty() {
					t.Errorf("%s: left on the host: %s", damage.what, left)
				}
			}
			if r := d.Shard("stop", id); r.Code != 0 && damage.code != "" {
				t.Fatalf("%s: stop: %s", damage.what, r.Stderr)
			}
			d.Must("start", id)
			if got := sh(t, d, id, "cat /file"); got != "mine" {
				t.Errorf("%s: its file: %q", damage.what, got)
			}
		}
	})
}

// TestPauseOrderly: a daemon that ends in order while it pauses or resumes waits for that for a while; the next one goes on
// with what there is.
func TestPauseOrderly(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		counts(t, d, id)
		for round := range 6 {
			verb, want := c.Pause, shard.StatePaused
			if cameTo(t, d, id) == shard.StatePaused {
				verb, want = c.Resume, shard.StateRunning
			}
			answered := make(chan error, 1)
			go func() { _, err := verb(context.WithoutCancel(t.Context()), id); answered <- err }()
			time.Sleep(rand.N(200 * time.Millisecond))
			d.Stop()
			err := <-answered
			d.Restart()
			now := cameTo(t, d, id)
			if err == nil && now != want {
				t.Fatalf("round %d: it was to be %s and is %s", round, want, now)
			}
			t.Logf("round %d: to be %s: %v, %s", round, want, err, now)
			tidy(t, d, id)
			if now == shard.StateRunning {
				countedOn(t, d, id)
			}
		}
	})
}

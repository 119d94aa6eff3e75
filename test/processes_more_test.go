package test

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// counted checks that a log counts from 0 without a gap or a line twice, and returns how far.
func counted(log string) (int, error) {
	lines := strings.Split(strings.TrimSuffix(log, "\n"), "\n")
	for i, line := range lines {
		if line != strconv.Itoa(i) {
			return i, fmt.Errorf("line %d is %q", i, line)
		}
	}
	return len(lines), nil
}

// TestKill9Processes: the supervisor goes on while no daemon is there, and the next daemon has every byte and every count.
func TestKill9Processes(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		count := func(pause string) []string {
			return []string{"sh", "-c", "i=0; while :; do echo $i; i=$((i+1)); " + pause + "; done"}
		}
		mustRun(t, c, id, runs("slow", "", count("sleep 0.02")...))
		mustRun(t, c, id, runs("quick", "", "sh", "-c", "seq 0 400000; touch /tmp/written; sleep 600")) // more than is held
		name := "crash"
		mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", "echo >>/tmp/runs; echo x; exit 1"},
			Restart: &shard.RestartSpec{Policy: shard.RestartOnFailure, Retries: 6, Backoff: 0.1}}) // 6.3 s of waits
		name = "late"
		mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", "sleep 1; echo late; exit 4"}, Restart: &shard.RestartSpec{Policy: "no"}})
		for round := range 4 {
			d.Kill9()
			time.Sleep(time.Duration(round) * 700 * time.Millisecond)
			d.Restart()
		}
		if p := over(t, c, id, "late"); p.Status.Exit == nil || p.Status.Exit.Code != 4 || logOf(t, c, id, "late") != "late\n" {
			t.Errorf("what ended under no daemon: %+v", p.Status)
		}
		if p := over(t, c, id, "crash"); p.Status.State != shard.ProcessGaveUp || p.Status.Restarts != 6 {
			t.Errorf("what was restarted under no daemon: %+v", p.Status)
		}
		if runs := sh(t, d, id, "wc -l </tmp/runs"); runs != "7" || logOf(t, c, id, "crash") != strings.Repeat("x\n", 7) {
			t.Errorf("it ran %s times and wrote %q", runs, logOf(t, c, id, "crash"))
		}
		testenv.Eventually(t, "the end of the long output", func() (bool, string) {
			log := logOf(t, c, id, "quick")
			return strings.HasSuffix(log, "400000\n"), fmt.Sprintf("%d bytes", len(log))
		})
		if n, err := counted(logOf(t, c, id, "quick")); err != nil || n != 400001 {
			t.Errorf("the long output: %d lines, %v", n, err)
		}
		n, err := counted(logOf(t, c, id, "slow"))
		if err != nil || n < 50 {
			t.Errorf("the steady output: %d lines, %v", n, err)
		}
		testenv.Eventually(t, "more of the steady output", func() (bool, string) {
			more, err := counted(logOf(t, c, id, "slow"))
			return err == nil && more > n, fmt.Sprintf("%d lines, %v", more, err)
		})
		// In an orderly end of the daemon nothing is lost either.
		d.Stop()
		d.Restart()
		if p, err := c.KillProcess(t.Context(), id, "slow", false); err != nil || p.Status.Restarts != 0 {
			t.Errorf("kill after it all: %+v, %v", p, err)
		}
		if n, err := counted(logOf(t, c, id, "slow")); err != nil {
			t.Errorf("the steady output at its end: %d lines, %v", n, err)
		}
	})
}

// TestKill9Run: wherever in a run the daemon dies, what runs in the sandbox afterwards is what the records say.
func TestKill9Run(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for round := range 12 {
			c := d.Client()
			ctx, cancel := context.WithCancel(t.Context())
			var wg sync.WaitGroup
			for i := range 4 {
				wg.Go(func() { _, _ = c.RunProcess(ctx, id, runs(fmt.Sprintf("r%d", i), "", "sleep", "600")) })
			}
			time.Sleep(time.Duration(round) * time.Millisecond)
			d.Kill9()
			cancel()
			wg.Wait()
			c.Close()
			d.Restart()
			c = connect(t, d)
			testenv.Eventually(t, "records and programs", func() (bool, string) {
				live := 0
				for _, state := range states(t, c, id) {
					if state == shard.ProcessRunning {
						live++
					}
				}
				programs := sh(t, d, id, "ps | grep -c '[s]leep 600' || true")
				return programs == strconv.Itoa(live), fmt.Sprintf("%d processes, %s programs", live, programs)
			})
			for name := range states(t, c, id) {
				if _, err := c.KillProcess(t.Context(), id, name, true); err != nil {
					t.Fatalf("kill %s: %v", name, err)
				}
			}
		}
	})
}

// TestRestartStorm: sixteen processes that crash at once, again and again: counts are exact, waits grow, and the daemon
// has little to do.
func TestRestartStorm(t *testing.T) {
	t.Parallel()
	// The waits are 0.05 s and its doubles, up to a minute: the tenth restart comes after 51 s, the fifteenth after 342 s.
	storm, most := 10*time.Second, 9
	if os.Getenv("SHARD_TEST_FULL") != "" {
		storm, most = 5*time.Minute, 14
	}
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		before := cpuTime(t, d.PID())
		for i := range shard.MaxProcesses {
			name := fmt.Sprintf("p%d", i)
			mustRun(t, c, id, shard.RunRequest{Name: &name, Command: []string{"sh", "-c", "echo x >>/tmp/" + name + "; echo out; exit 1"},
				Restart: &shard.RestartSpec{Policy: shard.RestartAlways, Backoff: 0.05}})
		}
		time.Sleep(storm)
		used := cpuTime(t, d.PID()) - before
		list, err := c.Processes(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list {
			if p.Status.Restarts < 1 || p.Status.Restarts > most || !p.Status.Live() {
				t.Errorf("%s after %s: %+v", p.Name, storm, p.Status)
			}
			killed, err := c.KillProcess(t.Context(), id, p.Name, true)
			if err != nil {
				t.Fatal(err)
			}
			runs := sh(t, d, id, "wc -l </tmp/"+p.Name)
			if want := strconv.Itoa(killed.Status.Restarts + 1); runs != want || logOf(t, c, id, p.Name) != strings.Repeat("out\n", killed.Status.Restarts+1) {
				t.Errorf("%s ran %s times, counted %s, and wrote %q", p.Name, runs, want, logOf(t, c, id, p.Name))
			}
		}
		t.Logf("the daemon used %s of processor time", used)
		if used > 8*time.Second {
			t.Errorf("the daemon used %s of processor time in %s", used, storm)
		}
	})
}

// cpuTime is the processor time that a process has used.
func cpuTime(t *testing.T, pid int) time.Duration {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := strings.Fields(string(raw[bytes.LastIndexByte(raw, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	return time.Duration(user+system) * 10 * time.Millisecond
}

// TestOnlyTheHostCommands: root in the sandbox finds no way to the supervisor, and cannot end it.
func TestOnlyTheHostCommands(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		p := mustRun(t, c, id, runs("web", "", "sh", "-c", "echo up; while :; do sleep 1; done"))
		fatal := "9 19"
		if provider == "gvisor" {
			fatal = "" // its PID 1 dies and stops as any process does: root can end its own sandbox, as it can by other means
		}
		for _, attempt := range []string{
			"for s in 1 2 3 15 10 12 17 18 20 " + fatal + "; do kill -$s 1; done; sleep 0.2; kill -0 1",
			"ls -l /proc/1/fd/ 2>&1 | grep -q socket && for f in /proc/1/fd/*; do printf 'shardA1\\n%032d%016d' 0 0 >$f; done; true",
			"for f in 0 3 4 5 6 7 8 9; do timeout 1 dd if=/proc/1/fd/$f bs=1 count=1 2>/dev/null; done; true",
			"/proc/1/exe attach </dev/null; true",
			"cat /proc/1/mem >/dev/null 2>&1; cat /proc/1/environ; true",
			"grep -o '@.*' /proc/net/unix | while read n; do echo x | timeout 1 nc local:$n; done 2>/dev/null; true",
		} {
			if r := d.Shard("exec", id, "sh", "-c", attempt); r.Code != 0 {
				t.Errorf("%s: %+v", attempt, r)
			}
		}
		// The supervisor is as it was: it starts the program again when the sandbox's root kills that, and not when we do.
		sh(t, d, id, "pkill -9 -f 'echo [u]p' || kill -9 $(ps | awk '/echo [u]p/{print $1}')")
		testenv.Eventually(t, "the restart", func() (bool, string) {
			now, err := c.Process(t.Context(), id, "web")
			return err == nil && now.Status.State == shard.ProcessRunning && now.Status.Restarts == 1, fmt.Sprintf("%+v %v", now, err)
		})
		if got, err := c.KillProcess(t.Context(), id, "web", false); err != nil || got.Status.Restarts != p.Status.Restarts+1 {
			t.Errorf("kill: %+v %v", got, err)
		}
	})
}

// TestProcessOutputHeld: a client that is attached gets every byte, however slow it is and whatever the log keeps.
func TestProcessOutputHeld(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		const lines = 10_000_000 // 79 MB
		mustRun(t, c, id, runs("big", shard.RestartNo, "sh", "-c", fmt.Sprintf("while ! test -e /tmp/go; do sleep 0.05; done; seq %d", lines)))
		s, err := c.AttachProcess(t.Context(), id, "big")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		sh(t, d, id, "touch /tmp/go")
		time.Sleep(time.Second) // takes nothing meanwhile
		n := counter{}
		p, err := s.Copy(&n)
		if err != nil || p.Status.Exit.Code != 0 || n.bad != 0 || n.lines != lines {
			t.Errorf("%+v, %v: %d lines of %d, line %d is wrong", p, err, n.lines, lines, n.bad)
		}
		// The same with the command line, and the log has the end.
		r := d.Command("run", "--attach", "--restart", "no", "--name", "cli", id, "seq", "2000000")
		out, err := r.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
		n = counter{}
		if _, err := io.Copy(&n, out); err != nil || n.lines != 2000000 || n.bad != 0 {
			t.Errorf("run --attach: %d lines, line %d is wrong, %v", n.lines, n.bad, err)
		}
		if err := r.Wait(); err != nil {
			t.Error(err)
		}
	})
}

// TestRunAttachLetsGo: Ctrl+C ends the command line, not the process.
func TestRunAttachLetsGo(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		cmd := d.Command("run", "--attach", id, "--name", "web", "sh", "-c", "echo up; exec sleep 600")
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || line != "up\n" {
			t.Errorf("%q, %v", line, err)
		}
		_ = cmd.Process.Signal(os.Interrupt)
		if err := cmd.Wait(); err != nil {
			t.Errorf("after Ctrl+C: %v", err)
		}
		if got := states(t, connect(t, d), id); got["web"] != shard.ProcessRunning {
			t.Errorf("the process is %v", got)
		}
	})
}

// counter checks that what is written to it counts from 1, one number a line.
type counter struct {
	lines, bad int
	rest       []byte
}

func (n *counter) Write(p []byte) (int, error) {
	n.rest = append(n.rest, p...)
	for {
		i := bytes.IndexByte(n.rest, '\n')
		if i < 0 {
			return len(p), nil
		}
		n.lines++
		if n.bad == 0 && string(n.rest[:i]) != strconv.Itoa(n.lines) {
			n.bad = n.lines
		}
		n.rest = n.rest[i+1:]
	}
}

// TestKill9Launch: a daemon that dies between the start of a process and its record leaves a launch. That is a process to the
// next one: it runs on, is started, or went down with its sandbox.
func TestKill9Launch(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		id = inspect(t, d, id).ID
		program := func(name string) []string {
			return []string{"sh", "-c", "echo " + name + " >>/root/starts; echo of " + name + "; exec sleep 600"}
		}
		mustRun(t, c, id, runs("held", "", program("held")...))
		mustRun(t, c, id, runs("other", "", "sleep", "600"))
		testenv.Eventually(t, "its output", func() (bool, string) {
			log := logOf(t, c, id, "held")
			return log == "of held\n", log
		})

		type object = map[string]any
		relaunch := func(more object) { // makes the record the one from before the end of these launches
			editRecord(t, d, id, func(rec map[string]any) {
				if already, ok := rec["launches"].(object); ok {
					maps.Copy(more, already)
				}
				sandbox, all := rec["sandbox"].(object), rec["runs"].(object)
				sandbox["processes"] = slices.DeleteFunc(sandbox["processes"].([]any), func(p any) bool {
					name, _ := p.(object)["name"].(string)
					if name != "held" {
						return false
					}
					run := all[name].(object)
					more[name] = object{"process": p, "run": object{"id": run["id"], "seq": 0, "base": run["base"], "start": 0, "end": 0}}
					delete(all, name)
					return true
				})
				if len(more) == 0 {
					t.Fatalf("the record names no process: %v", rec)
				}
				rec["launches"] = more
			})
		}
		launch := func(name, policy string) object {
			return object{
				"process": object{"name": name, "command": program(name), "restart": object{"policy": policy}, "killed": false,
					"status": object{"state": "running", "restarts": 0, "started_at": "2026-01-02T03:04:05Z"}},
				"run": object{"id": "never-" + name, "seq": 0, "base": 0, "start": 0, "end": 0},
			}
		}
		d.Kill9()
		relaunch(object{"never": launch("never", "unless-stopped"), "once": launch("once", "no")})
		d.Restart()
		c = connect(t, d)
		if p, err := c.Process(t.Context(), id, "held"); err != nil || !p.Status.Live() {
			t.Errorf("what runs is not seen at once: %+v, %v", p, err)
		}
		want := map[string]string{"held": shard.ProcessRunning, "other": shard.ProcessRunning, "never": shard.ProcessRunning, "once": shard.ProcessStopped}
		testenv.Eventually(t, "the processes of the next daemon", func() (bool, string) {
			got, starts := states(t, c, id), sh(t, d, id, "cat /root/starts")
			return maps.Equal(got, want) && starts == "held\nnever" && logOf(t, c, id, "held") == "of held\n" && logOf(t, c, id, "never") == "of never\n",
				fmt.Sprint(got, starts)
		})
		launches := func() bool {
			raw, err := os.ReadFile(recordFile(d, id))
			return err != nil || bytes.Contains(raw, []byte(`"launches"`))
		}
		testenv.Eventually(t, "a record without launches", func() (bool, string) { return !launches(), "" })
		if _, err := c.RunProcess(t.Context(), id, runs("once", "", "/nothing")); shard.CodeOf(err) != shard.CodeCommandNotStarted || launches() {
			t.Errorf("a launch that came to nothing: %v; it is in the record: %v", err, launches())
		}
		if got := states(t, c, id); !maps.Equal(got, want) {
			t.Errorf("after it: %v", got)
		}

		d.Kill9()
		relaunch(object{})
		killMachine(t, id)
		d.Restart()
		c = connect(t, d)
		testenv.Eventually(t, "the processes after the death of the sandbox", func() (bool, string) { // it is started for them
			if inspect(t, d, id).State != shard.StateRunning {
				return false, "the sandbox is down"
			}
			got, starts := states(t, c, id), sh(t, d, id, "sort /root/starts")
			return maps.Equal(got, want) && starts == "held\nheld\nnever\nnever", fmt.Sprint(got, starts)
		})
	})
}

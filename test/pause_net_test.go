package test

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestCase103: connections over a pause work afterwards or are reset, new ones work at once; ports of a paused sandbox do not listen,
// and are kept.
func TestCase103(t *testing.T) {
	t.Parallel()
	rest := 3 * time.Second
	if os.Getenv("SHARD_TEST_FULL") != "" {
		rest = 5 * time.Minute
	}
	d := ports(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider, "--port", "18120:8000")
		mustRun(t, c, id, runs("server", shard.RestartNo, "netserver", "127.0.0.1:8000"))
		logs(t, c, id, "server", "listening\n")
		sh(t, d, id, "mkfifo /out /in")
		mustRun(t, c, id, runs("out", shard.RestartNo, "sh", "-c", "exec nc "+testenv.LabEchoAddr+" 7 <>/out"))
		mustRun(t, c, id, runs("in", shard.RestartNo, "sh", "-c", "exec nc 127.0.0.1 8000 <>/in"))
		say := func(name, line string) { t.Helper(); sh(t, d, id, "echo "+line+" >/"+name) }
		say("in", "echo")
		for _, name := range []string{"out", "in"} {
			say(name, "one")
			logs(t, c, id, name, "one\n")
		}
		dialled, err := dialHost(t, d, local(18120))
		if err != nil {
			t.Fatal(err)
		}
		forwarded := bufio.NewReader(dialled)
		_, _ = io.WriteString(dialled, "echo\nhere\n")
		if line, err := forwarded.ReadString('\n'); line != "here\n" {
			t.Fatalf("through the port: %q, %v", line, err)
		}
		half, err := dialHost(t, d, local(18120)) // in the middle of a line
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(half, "ec")

		pause(t, c, id)
		for what, r := range map[string]io.Reader{"a connection through a port": forwarded, "another": half} {
			if rest, err := io.ReadAll(r); len(rest) > 0 || err != nil && strings.Contains(err.Error(), "timeout") {
				t.Errorf("%s over a pause: %q, %v", what, rest, err)
			}
		}
		unreachable(t, d, local(18120))
		putPort(t, d, id, 18121, 8000, false)
		putPort(t, d, id, 18122, 8000, false)
		if a := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/ports/18122", nil); a.Status != 204 {
			t.Errorf("remove a port of a paused sandbox: %d %s", a.Status, a.Body)
		}
		unreachable(t, d, local(18121))
		if got := listPorts(t, d, id); len(got) != 2 || got[0].Error != "" || got[1].Error != "" {
			t.Errorf("the ports of a paused sandbox: %+v", got)
		}
		// Nobody gets its host ports meanwhile.
		refused(t, d.Shard("create", "--provider", provider, "--port", "18120", image), "18120", id)
		time.Sleep(rest)

		resume(t, c, id)
		answers(t, d, local(18120))
		answers(t, d, local(18121))
		unreachable(t, d, local(18122))
		if got := sh(t, d, id, "echo new | nc -w 10 "+testenv.LabEchoAddr+" 7 | head -n 1; echo name | nc -w 10 echo.lab.test 7 | head -n 1"); got != "new\nname" {
			t.Errorf("new connections: %q", got)
		}
		say("in", "two")
		logs(t, c, id, "in", "one\ntwo\n")
		if p, err := c.Process(t.Context(), id, "out"); err != nil {
			t.Fatal(err)
		} else if p.Status.Live() {
			say("out", "two")
		}
		testenv.Eventually(t, "the outgoing connection works, or has ended", func() (bool, string) {
			p, err := c.Process(t.Context(), id, "out")
			if err != nil {
				t.Fatal(err)
			}
			log := logOf(t, c, id, "out")
			return log == "one\ntwo\n" || !p.Status.Live(), fmt.Sprintf("%+v, %q", p.Status, log)
		})
		if s := inspect(t, d, id); s.State != shard.StateRunning {
			t.Errorf("it is %+v", s)
		}
		// Once more, with what was made since.
		pause(t, c, id)
		unreachable(t, d, local(18121))
		d.Stop()
		d.Restart()
		unreachable(t, d, local(18121))
		resume(t, c, id)
		answers(t, d, local(18120))
		answers(t, d, local(18121))
		d.Must("stop", id)
		unreachable(t, d, local(18120))
	})
}

// pausePolicy: a policy that changes while a sandbox is paused holds from the first packet after the resume, of a program that sends
// without rest.
func pausePolicy(t *testing.T, d *testenv.Daemon, provider string, one, two *testenv.Canary) {
	c := connect(t, d)
	host := func(c *testenv.Canary) string { return c.Addr[:strings.IndexByte(c.Addr, ':')] }
	put(t, d, "pause-other", "deny any")
	policy := "pause-" + provider
	put(t, d, policy, "allow "+host(one), "deny any")
	id := box(t, d, provider, "--policy", policy, trustingPython)
	mustRun(t, c, id, runs("barrage", shard.RestartNo, "python3", "-c", barrage, host(one), host(two)))
	arrives := func(at *testenv.Canary) {
		t.Helper()
		testenv.Eventually(t, "packets arrive at "+at.Addr, func() (bool, string) {
			hits := at.Hits()
			has := func(network string) bool {
				return slices.ContainsFunc(hits, func(h string) bool { return strings.HasPrefix(h, network) })
			}
			return has("tcp") && has("udp"), fmt.Sprint(len(hits))
		})
	}
	for round := range 2 {
		arrives(one)
		if hits := two.Hits(); len(hits) > 0 {
			t.Fatalf("round %d: the policy is not kept to: %v", round, hits[0])
		}
		pause(t, c, id)
		if a := put(t, d, policy, "allow "+host(two), "deny any"); a.Status != 200 {
			t.Fatalf("put: %d %s", a.Status, a.Body)
		}
		for what, request := range map[string][2]string{"attach": {"PUT", "/policy"}, "detach": {"DELETE", "/policy"}} {
			var body any
			if what == "attach" {
				body = map[string]string{"policy": "pause-other"}
			}
			if a := call(t, d, request[0], "/v0/sandboxes/"+id+request[1], body); a.code(t) != shard.CodeSandboxLive {
				t.Errorf("%s in a pause: %d %s", what, a.Status, a.Body)
			}
		}
		refused(t, d.Shard("policy", "detach", id), "paused", "stop")
		if a := call(t, d, "DELETE", "/v0/policies/"+policy, nil); a.code(t) != shard.CodeInUse {
			t.Errorf("remove the policy of a paused sandbox: %d %s", a.Status, a.Body)
		}
		one.Control() // behind what was under way
		one.Control()
		resume(t, c, id)
		arrives(two)
		if hits := one.Hits(); len(hits) > 0 {
			t.Errorf("round %d: %d packets went where the new policy closes: %v", round, len(hits), hits[0])
		}
		two.Control()
		one, two = two, one
	}
	d.Must("remove", "--force", id)
}

// pauseSecret: a secret whose value changes while a sandbox is paused has the new one afterwards.
func pauseSecret(t *testing.T, d *testenv.Daemon, provider string, got *seen) {
	c := connect(t, d)
	name := "PAUSED_" + strings.ToUpper(provider)
	setSecret(t, d, "value-before", "--dest", "dest.lab.test", name)
	setSecret(t, d, "value-of-other", "--dest", "dest.lab.test", name+"_OTHER")
	id := box(t, d, provider, "--secret", name, trustingPython)
	sends := func(value string) {
		t.Helper()
		send(t, d, id, name, "https://dest.lab.test/seen")
		if last := got.last(); last != "dest.lab.test Bearer "+value {
			t.Errorf("the host got %q, want %q", last, value)
		}
	}
	sends("value-before")
	pause(t, c, id)
	if files := search(t, filepath.Join(d.Root, "sandboxes", id), "value-before"); len(files) > 0 {
		t.Errorf("with what is saved of the sandbox the value is in %q", files)
	}
	setSecret(t, d, "value-after", name)
	for _, verb := range []string{"grant", "ungrant"} {
		refused(t, d.Shard("secret", verb, id, name+"_OTHER"), "paused", "stop")
	}
	if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/secrets/"+name+"_OTHER", nil); a.code(t) != shard.CodeSandboxLive {
		t.Errorf("grant in a pause: %d %s", a.Status, a.Body)
	}
	if a := call(t, d, "DELETE", "/v0/secrets/"+name, nil); a.code(t) != shard.CodeInUse {
		t.Errorf("remove the secret of a paused sandbox: %d %s", a.Status, a.Body)
	}
	resume(t, c, id)
	sends("value-after")
}

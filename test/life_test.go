package test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestLife walks one sandbox through every verb, by the CLI.
func TestLife(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		name := "life-" + provider
		id := box(t, d, provider, "--name", name, "--env", "GREETING=hi there", "--workdir", "/srv/work", "--user", "dev", "--memory", "256MiB", "--disk", "1GiB")

		got := inspect(t, d, name)
		if got.ID != id || got.State != shard.StateRunning || got.Provider != provider || got.StartedAt == nil {
			t.Errorf("the record is %+v", got)
		}
		if want := (shard.Resources{MemoryMiB: 256, DiskMiB: 1024}); got.Resources != want {
			t.Errorf("resources %+v, want %+v", got.Resources, want)
		}
		if !strings.HasSuffix(got.Image, "test/busybox:latest") || !strings.HasPrefix(got.Digest, "sha256:") {
			t.Errorf("image %q, digest %q", got.Image, got.Digest)
		}

		// What a command finds: the sandbox's name, user, directory, environment; one exec's own override them.
		if got, want := sh(t, d, id, `hostname; id -u; pwd; echo "$GREETING $FROM_IMAGE $HOME"; umask`),
			name+"\n1000\n/srv/work\nhi there yes /home/dev\n0022"; got != want {
			t.Errorf("a command sees %q, want %q", got, want)
		}
		r := d.Shard("exec", "--env", "GREETING=no", "--workdir", "/tmp", "--user", "root", name, "sh", "-c", `id -u; pwd; echo "$GREETING $HOME"`)
		if want := "0\n/tmp\nno /root\n"; r.Stdout != want {
			t.Errorf("a command with options sees %q, want %q", r.Stdout, want)
		}

		// Exit codes are the command's own; a signal shows as 128+n.
		for script, want := range map[string]int{"exit 0": 0, "exit 7": 7, "kill -KILL $$": 137, "kill -TERM $$": 143} {
			if r := d.Shard("exec", id, "sh", "-c", script); r.Code != want || r.Stderr != "" {
				t.Errorf("%s: exit code %d, want %d; stderr %q", script, r.Code, want, r.Stderr)
			}
		}

		// Files outlive stop and start, memory does not.
		d.Must("exec", "--user", "root", id, "sh", "-c", "echo kept >/kept; sleep 1000 >/dev/null 2>&1 &")
		refused(t, d.Shard("start", id), "running")
		refused(t, d.Shard("remove", id), "force")
		if out := d.Must("stop", id); out != id {
			t.Errorf("stop printed %q, want the id", out)
		}
		if out := d.Must("list", "-q"); strings.Contains(out, id) {
			t.Errorf("list shows a stopped sandbox: %q", out)
		}
		if out := d.Must("list", "--all", "-q"); !strings.Contains(out, id) {
			t.Errorf("list --all does not show a stopped sandbox: %q", out)
		}
		refused(t, d.Shard("exec", id, "true"), "start")
		refused(t, d.Shard("stop", id), "stopped")
		if out := d.Must("start", id); out != id {
			t.Errorf("start printed %q, want the id", out)
		}
		if got := sh(t, d, id, "cat /kept; ps | grep -c '[s]leep 1000' || true"); got != "kept\n0" {
			t.Errorf("after a stop and a start: %q", got)
		}
		if out := d.Must("remove", "--force", name); out != id {
			t.Errorf("remove printed %q, want the id", out)
		}
		refused(t, d.Shard("inspect", id), id)
		if r := d.Shard("remove", "--force", name); r.Code != 0 || r.Stderr != "" {
			t.Errorf("a forced removal of a missing sandbox: exit code %d, %q", r.Code, r.Stderr)
		}
		if left := testenv.Observe(id); !left.Empty() {
			testenv.Eventually(t, "the sandbox is gone from the host", func() (bool, string) {
				left := testenv.Observe(id)
				return left.Empty(), left.String()
			})
		}
	})
}

// TestVerbsByState asks every verb of a sandbox in every state that can be reached on purpose, and compares with the
// table of the root package.
func TestVerbsByState(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		caps := decode[shard.Capabilities](t, call(t, d, "GET", "/v0/capabilities?provider="+provider, nil), 200)
		requests := map[shard.Verb][2]string{
			shard.VerbGet: {"GET", ""}, shard.VerbStart: {"POST", "/start"}, shard.VerbStop: {"POST", "/stop"},
			shard.VerbExec: {"GET", "/files?path=/etc/passwd"}, shard.VerbRemove: {"DELETE", ""},
		}
		if caps.Pause {
			requests[shard.VerbPause], requests[shard.VerbResume] = [2]string{"POST", "/pause"}, [2]string{"POST", "/resume"}
		}
		requests[shard.VerbForce] = [2]string{"DELETE", "?force=true"}
		if caps.Fork {
			requests[shard.VerbFork] = [2]string{"POST", "/fork"}
		}
		make := map[shard.State]func() string{
			shard.StateRunning: func() string { return box(t, d, provider) },
			shard.StateStopped: func() string { id := box(t, d, provider); d.Must("stop", id); return id },
			shard.StateFailed: func() string {
				// The registry does not exist: a plain create of an image that is not here fails later.
				a := call(t, d, "POST", "/v0/sandboxes", shard.CreateRequest{Image: "127.0.0.1:1/no/such:image", Provider: provider})
				s := decode[shard.Sandbox](t, a, http.StatusCreated)
				t.Cleanup(func() { d.Shard("remove", "--force", s.ID) })
				testenv.Eventually(t, "the create fails", func() (bool, string) {
					got := inspect(t, d, s.ID)
					return got.State == shard.StateFailed && got.FailedReason != "", string(got.State)
				})
				return s.ID
			},
		}
		if caps.Pause {
			make[shard.StatePaused] = func() string { id := box(t, d, provider); d.Must("pause", id); return id }
		}
		for state, makeOne := range make {
			for _, verb := range shard.Verbs {
				how, ok := requests[verb]
				if !ok {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s", state, verb), func(t *testing.T) {
					id := makeOne()
					want := shard.CodeOf(shard.CheckVerb(id, state, verb))
					a := call(t, d, how[0], "/v0/sandboxes/"+id+how[1], nil)
					switch {
					case want == "" && a.Status >= 300:
						t.Errorf("status %d, want success: %s", a.Status, a.Body)
					case want != "" && a.Status < 300:
						t.Errorf("status %d, want %s", a.Status, want)
					case want != "":
						if got := a.code(t); got != want {
							t.Errorf("code %s, want %s: %s", got, want, a.Body)
						}
						if now := inspect(t, d, id).State; now != state {
							t.Errorf("a refused %s moved the sandbox from %s to %s", verb, state, now)
						}
					}
				})
			}
		}
	})
}

// TestCase105 compares what a provider announces with what it does.
func TestCase105(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		caps := decode[shard.Capabilities](t, call(t, d, "GET", "/v0/capabilities?provider="+provider, nil), 200)
		id := box(t, d, provider)
		for verb, announced := range map[string]bool{"pause": caps.Pause, "resume": caps.Resume, "fork": caps.Fork} {
			if announced {
				continue
			}
			a := call(t, d, "POST", "/v0/sandboxes/"+id+"/"+verb, nil)
			if a.Status == http.StatusNotFound {
				t.Logf("%s: the route does not exist yet", verb)
				continue
			}
			if got := a.code(t); got != shard.CodeUnsupported {
				t.Errorf("%s: code %s, want unsupported", verb, got)
			}
		}
		if s := state(t, d, id); s != shard.StateRunning {
			t.Errorf("refused verbs left the sandbox %s", s)
		}
		if caps.Pause != caps.Resume {
			t.Errorf("one of pause and resume is announced: %+v", caps)
		}
		if caps.Pause {
			for _, step := range [][2]string{{"pause", string(shard.StatePaused)}, {"resume", string(shard.StateRunning)}} {
				if s := decode[shard.Sandbox](t, call(t, d, "POST", "/v0/sandboxes/"+id+"/"+step[0], nil), 200); string(s.State) != step[1] {
					t.Errorf("%s left the sandbox %s", step[0], s.State)
				}
			}
		}
		if !caps.Swap {
			a := call(t, d, "POST", "/v0/sandboxes", shard.CreateRequest{Image: image, Provider: provider, Resources: &shard.ResourcesRequest{SwapMiB: p(int64(1))}})
			if a.Status < 300 {
				t.Errorf("swap was accepted by a provider that has none: %s", a.Body)
			}
			if list := d.Must("list", "--all", "--quiet"); list != id {
				t.Errorf("a refused create left %s", list)
			}
		}
		for verb, announced := range map[string]bool{"create": caps.Create, "start": caps.Start, "stop": caps.Stop, "remove": caps.Remove, "port": caps.Port} {
			if !announced {
				t.Errorf("%s is announced as missing", verb)
			}
		}
		d.Must("port", "add", id, "18105:80")
		for _, verb := range []string{"stop", "start"} {
			d.Must(verb, id)
		}
		// The command line says the same.
		table := strings.Fields(d.Must("capabilities", "--provider", provider))
		for what, can := range map[string]bool{"create": caps.Create, "start": caps.Start, "stop": caps.Stop, "remove": caps.Remove, "pause": caps.Pause,
			"resume": caps.Resume, "fork": caps.Fork, "snapshot": caps.Snapshot, "port": caps.Port, "swap": caps.Swap} {
			at := slices.Index(table, what)
			if want := map[bool]string{true: "yes", false: "no"}[can]; at < 0 || at+1 >= len(table) || table[at+1] != want {
				t.Errorf("capabilities: %s is not %s: %q", what, want, table)
			}
		}
		d.Must("remove", "--force", id)
	})
}

// TestList checks formats, the hidden stopped ones and prune.
func TestList(t *testing.T) {
	t.Parallel()
	d := start(t, testenv.Options{Provider: "runc"})
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		one, two := box(t, d, provider, "--name", "one"), box(t, d, provider)
		d.Must("stop", two)

		r := d.Shard("list")
		lines := strings.Split(strings.TrimSpace(r.Stdout), "\n")
		if got := strings.Join(strings.Fields(lines[0]), " "); !strings.HasPrefix(got, "ID NAME IMAGE STATE UPTIME PROCESSES POLICY") {
			t.Errorf("the table's head is %q", got)
		}
		if len(lines) != 2 || !strings.Contains(lines[1], one) || !strings.Contains(lines[1], "running") {
			t.Errorf("the table is %q", r.Stdout)
		}
		if !strings.Contains(r.Stderr, "1") {
			t.Errorf("stderr does not count the hidden one: %q", r.Stderr)
		}
		var records []shard.Sandbox
		if err := json.Unmarshal([]byte(d.Must("list", "--all", "--format", "json")), &records); err != nil {
			t.Fatalf("list --format json: %v", err)
		}
		ids := []string{records[0].ID, records[1].ID}
		if want := []string{one, two}; !slices.Equal(slices.Sorted(slices.Values(ids)), slices.Sorted(slices.Values(want))) {
			t.Errorf("list --all gives %v, want %v", ids, want)
		}
		refused(t, d.Shard("prune"), "force")
		if out := d.Must("prune", "--force"); out != two {
			t.Errorf("prune printed %q, want %q", out, two)
		}
		if out := d.Must("list", "--all", "-q"); out != one {
			t.Errorf("after prune the list is %q, want %q", out, one)
		}
	}, "runc")
}

// TestCase95: an exact id, then an exact name, then a prefix of one id only; ambiguity is an error.
func TestCase95(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		a := box(t, d, provider)
		// A name equal to the beginning of another's id: the name wins over the prefix.
		b := box(t, d, provider, "--name", a[:6])
		if got := inspect(t, d, a).ID; got != a {
			t.Errorf("the id %s found %s", a, got)
		}
		if got := inspect(t, d, a[:6]).ID; got != b {
			t.Errorf("the name %s found %s, want %s", a[:6], got, b)
		}
		if got := inspect(t, d, a[:len(a)-1]).ID; got != a {
			t.Errorf("the prefix found %s, want %s", got, a)
		}
		refused(t, d.Shard("inspect", a[:3]))
		// The form of an id is no name, whoever it belongs to.
		refused(t, d.Shard("create", "--name", a, "--provider", provider, image), "name")
		// Words of the CLI are names like any other.
		for _, name := range []string{"exec", "list", "all"} {
			c := box(t, d, provider, "--name", name)
			if got := inspect(t, d, name).ID; got != c {
				t.Errorf("the name %s found %s, want %s", name, got, c)
			}
		}
	}, "runc")
}

// TestCase96: stop is bounded and can be repeated, whatever goes on meanwhile.
func TestCase96(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		t.Parallel()
		id := box(t, d, provider)
		c := connect(t, d)
		deaf := d.Command("exec", id, "sh", "-c", `trap "" TERM; echo ready; while :; do sleep 1; done`)
		out, err := deaf.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := deaf.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = out.Read(make([]byte, 16))
		begin := time.Now()
		first := make(chan error, 1)
		go func() { _, err := c.Stop(t.Context(), id); first <- err }()
		time.Sleep(200 * time.Millisecond)
		_, second := c.Stop(t.Context(), id)
		if err := <-first; err != nil {
			t.Errorf("stop: %v", err)
		}
		if code := shard.CodeOf(second); code != "" && code != shard.CodeSandboxNotRunning {
			t.Errorf("a second stop: %v", second)
		}
		if took := time.Since(begin); took > 90*time.Second {
			t.Errorf("stop took %s", took)
		}
		if exitCode(t, "the exec in a stopped sandbox", deaf) == 0 {
			t.Error("the exec in a stopped sandbox ended with exit code 0")
		}
		if s := state(t, d, id); s != shard.StateStopped {
			t.Errorf("the sandbox is %s", s)
		}
		if _, err := c.Start(t.Context(), id); err != nil {
			t.Errorf("start right after: %v", err)
		}
	})
}

// TestCase97: what was written and not synced is there after stop and start.
func TestCase97(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for round := range 3 {
			before := sh(t, d, id, fmt.Sprintf(`cd /root && rm -rf r && mkdir r && cd r && dd if=/dev/urandom of=big bs=1M count=48 2>/dev/null &&
				for i in $(seq 400); do echo "%d $i" >f$i; done; find . -type f | sort | xargs sha256sum | sha256sum`, round))
			d.Must("stop", id)
			d.Must("start", id)
			if after := sh(t, d, id, "cd /root/r && find . -type f | sort | xargs sha256sum | sha256sum"); after != before {
				t.Errorf("round %d: the files changed over stop and start", round)
			}
		}
	})
}

// TestCase93: a create that fails leaves nothing but, when the image had to be pulled, a record with the reason; its name is free.
func TestCase93(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		other := box(t, d, provider, "--port", "18093")
		before := d.Leftovers(false).String()
		lacks := "127.0.0.1:1/no/image:1" // nothing listens there
		for what, options := range map[string][]string{
			"image":  {lacks},
			"policy": {"--policy", "none", image},
			"secret": {"--secret", "NONE", image},
			"user":   {"--user", "nobody-there", image},
			"port":   {"--port", "18093", image},
			"memory": {"--memory", "1048576GiB", image},
		} {
			for range 2 { // the second time in the place of the first
				refused(t, d.Shard(append([]string{"create", "--provider", provider, "--name", "again"}, options...)...))
			}
			testenv.Eventually(t, what+": the host is as it was", func() (bool, string) {
				now := d.Leftovers(false).String()
				return now == before, "before:\n" + before + "\nnow:\n" + now
			})
		}
		refused(t, d.Shard("create", "--provider", provider, "--port", "18093", image), "18093", other) // who has it
		// What a user mistypes is no error of the daemon.
		refused(t, d.Shard("pull", lacks), "registry 127.0.0.1:1")
		if log := d.Log(); strings.Contains(log, `"level":"ERROR"`) {
			t.Errorf("the daemon's log holds an error:\n%s", log)
		}
		refused(t, d.Shard("create", "--provider", provider, "--name", "again", lacks), "registry 127.0.0.1:1")
		lost := inspect(t, d, "again")
		if lost.State != shard.StateFailed || !strings.Contains(lost.FailedReason, "registry 127.0.0.1:1") {
			t.Errorf("the record of the create that failed is %+v", lost)
		}
		d.Kill9()
		d.Restart()
		if got := inspect(t, d, "again"); got.ID != lost.ID || got.State != shard.StateFailed {
			t.Errorf("after a restart the name leads to %s, %s", got.ID, got.State)
		}
		// Of many that want the name one gets it.
		results := make(chan error, 8)
		for range cap(results) {
			go func() {
				_, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "again", Provider: provider}, nil)
				results <- err
			}()
		}
		won := 0
		for range cap(results) {
			if err := <-results; err == nil {
				won++
			} else {
				wantCode(t, err, shard.CodeNameTaken)
			}
		}
		if won != 1 || state(t, d, "again") != shard.StateRunning {
			t.Errorf("%d creates got the name, and it leads to a sandbox that is %s", won, state(t, d, "again"))
		}
		_, err := c.Inspect(t.Context(), lost.ID)
		wantCode(t, err, shard.CodeNotFound)
		d.Must("remove", "--force", "again", other)
	})
}

// TestCase94: of parallel creates of one name exactly one wins, and a removed name is free at once.
func TestCase94(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		type result struct {
			id  string
			err error
		}
		results := make(chan result, 50)
		for range cap(results) {
			go func() {
				s, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "x", Provider: provider}, nil)
				r := result{err: err}
				if err == nil {
					r.id = s.ID
				}
				results <- r
			}()
		}
		won := 0
		for range cap(results) {
			r := <-results
			if r.err == nil {
				won++
				continue
			}
			wantCode(t, r.err, shard.CodeNameTaken)
		}
		if won != 1 {
			t.Errorf("%d creates of one name succeeded, want 1", won)
		}
		list, err := c.AllSandboxes(t.Context(), true)
		if err != nil || len(list.Sandboxes) != 1 {
			t.Errorf("the list holds %d sandboxes, want 1 (%v)", len(list.Sandboxes), err)
		}
		for round := range 10 {
			if err := c.Remove(t.Context(), "x", true); err != nil {
				t.Fatalf("round %d: remove: %v", round, err)
			}
			if _, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "x", Provider: provider}, nil); err != nil {
				t.Fatalf("round %d: create again: %v", round, err)
			}
		}
		if err := c.Remove(t.Context(), "x", true); err != nil {
			t.Error(err)
		}
	})
}

// TestCase143: clients that disagree get documented codes and leave one consistent sandbox.
func TestCase143(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		verbs := []func() error{
			func() error { _, err := c.Start(t.Context(), id); return err },
			func() error { _, err := c.Stop(t.Context(), id); return err },
			func() error {
				e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"true"}})
				if err == nil {
					_, err = c.GetExec(t.Context(), id, e.ID)
				}
				return err
			},
			func() error { _, err := c.Inspect(t.Context(), id); return err },
			func() error { return c.Remove(t.Context(), id, false) },
		}
		allowed := []shard.Code{"", shard.CodeNotFound, shard.CodeSandboxNotRunning, shard.CodeSandboxNotStopped}
		done := make(chan error, 10)
		for i := range cap(done) {
			go func() {
				for j := range 8 {
					verb := verbs[(i*7+j*3)%4] // all but remove
					if err := verb(); !slices.Contains(allowed, shard.CodeOf(err)) {
						done <- err
						return
					}
				}
				done <- nil
			}()
		}
		for range cap(done) {
			if err := <-done; err != nil {
				t.Errorf("an undocumented answer: %v", err)
			}
		}
		switch s := state(t, d, id); s {
		case shard.StateRunning, shard.StateStopped:
		default:
			t.Errorf("the sandbox ended %s", s)
		}
		if err := c.Remove(t.Context(), id, true); err != nil {
			t.Errorf("remove: %v", err)
		}
		wantCode(t, c.Remove(t.Context(), id, true), shard.CodeNotFound)
	})
}

// TestCase132: forty sandboxes come and go, and everything is as before.
func TestCase132(t *testing.T) {
	d := start(t) // not parallel: it counts what the daemon holds
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		round := func() {
			id := strings.TrimSpace(d.Must("create", "--provider", provider, image))
			if out := d.Must("exec", id, "echo", "x"); out != "x" {
				t.Errorf("exec printed %q", out)
			}
			d.Must("remove", "--force", id)
		}
		for range 6 { // pools and caches fill
			round()
		}
		settle := func() testenv.Usage { time.Sleep(2 * time.Second); return testenv.UsageOf(d.PID()) }
		before := settle()
		for range 40 {
			round()
		}
		var after testenv.Usage
		testenv.Eventually(t, "descriptors, threads, mounts and namespaces are back", func() (bool, string) {
			after = settle()
			return after.Files <= before.Files+4 && after.Threads <= before.Threads+8 && after.Mounts <= before.Mounts+2 && after.Children <= before.Children+1,
				fmt.Sprintf("before %+v, after %+v", before, after)
		})
		if grown := after.MemoryKiB - before.MemoryKiB; grown > 40<<10 {
			t.Errorf("the daemon grew by %d KiB over 40 sandboxes", grown)
		}
		t.Logf("before %+v, after %+v", before, after)
	})
}

// TestWreckedSandboxStarts: whatever a sandbox made of its own files, it starts again, so that its files can be got at.
func TestWreckedSandboxStarts(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for name, wreck := range map[string]string{
			"etc leads to the kernel": "rm -rf /etc && ln -s /proc /etc",
			"etc is a device's":       "rm -rf /etc && mknod /etc p",
			"directories for files":   "rm -f /etc/resolv.conf && mkdir -p /etc/resolv.conf/x && rm -rf /srv && echo >/srv",
			"no user any more":        "rm -f /etc/passwd",
			"no inodes left":          "i=0; while true >/root/f$i; do i=$((i+1)); done 2>/dev/null; test $i -gt 500",
			"no blocks left":          "for bs in 64k 4k 1; do dd if=/dev/zero bs=$bs >>/big; done 2>/dev/null; test -s /big",
		} {
			id := box(t, d, provider, "--disk", "8MiB", "--user", "nobody", "--workdir", "/srv/work")
			if r := d.Shard("exec", "--user", "0", id, "sh", "-c", wreck); r.Code != 0 {
				t.Errorf("%s: %+v", name, r)
			}
			for range 2 {
				d.Must("stop", id)
				if r := d.Shard("start", id); r.Code != 0 {
					t.Errorf("%s: start: %s", name, r.Stderr)
				}
			}
			if r := d.Shard("exec", "--user", "0", "--workdir", "/", id, "echo", "here"); r.Stdout != "here\n" {
				t.Errorf("%s: exec: %+v", name, r)
			}
			d.Must("remove", "--force", id)
		}
	})
}

package test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// checkpointOf is where the saved memory of a sandbox lies.
func checkpointOf(d *testenv.Daemon, id string) string {
	return filepath.Join(d.Root, "sandboxes", id, "checkpoint")
}

// exists says whether there is a file.
func exists(t *testing.T, path string) bool {
	t.Helper()
	_, err := os.Lstat(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	return err == nil
}

// TestPausedHost: a paused sandbox has nothing of the host but files and its lease: no process, mount, loop device, cgroup, link or
// element of the firewall. Its saved memory is for root only, and goes when it is of no use any more.
func TestPausedHost(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		stays := box(t, d, provider) // so that what all share is there
		id := box(t, d, provider, "--name", "host", "--memory", "256MiB", "--port", "18110:80")
		address := func() string { return strings.Fields(sh(t, d, id, "grep 'host$' /etc/hosts | grep -v localhost"))[0] }
		was := address()
		elements := func() int { // of the firewall, and neighbours, with its address
			n := 0
			for _, what := range [][]string{{"nft", "list", "ruleset"}, {"ip", "neigh", "show", "nud", "permanent"}} {
				out, err := d.Lab().Command(what[0], what[1:]...).Output()
				if err != nil {
					t.Fatalf("%v: %v", what, err)
				}
				for _, word := range strings.FieldsFunc(string(out), func(r rune) bool { return strings.ContainsRune(" ,\n\t", r) }) {
					if word == was {
						n++
					}
				}
			}
			return n
		}
		if elements() == 0 {
			t.Errorf("the address %s of a running sandbox does not stand in the firewall", was)
		}
		mustRun(t, c, id, runs("web", "", "sleep", "600"))
		running := testenv.Observe(id)
		started := inspect(t, d, id).StartedAt

		paused := pause(t, c, id)
		if paused.StartedAt == nil || !paused.StartedAt.Equal(*started) || paused.Name != "host" || len(paused.Ports) != 1 {
			t.Errorf("the record of a paused sandbox is %+v", paused)
		}
		testenv.Eventually(t, "a paused sandbox has nothing of the host", func() (bool, string) {
			left, n := testenv.Observe(id), elements()
			return left.Empty() && n == 0, fmt.Sprintf("%d elements\n%s\nrunning: %s", n, left, running)
		})
		modes := 0
		if err := filepath.WalkDir(filepath.Join(d.Root, "sandboxes", id), func(path string, e fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := e.Info()
			if err == nil && strings.HasPrefix(path, checkpointOf(d, id)) {
				modes++
				if perm := info.Mode().Perm(); e.IsDir() && perm != 0o700 || !e.IsDir() && perm != 0o600 || info.Sys().(*syscall.Stat_t).Uid != 0 {
					t.Errorf("%s has mode %s", path, info.Mode())
				}
			}
			return err
		}); err != nil || modes < 3 {
			t.Errorf("the saved memory: %d files, %v", modes, err)
		}

		// What lists it, and how.
		if out := d.Must("list"); !strings.Contains(out, "paused") || !strings.Contains(out, id) {
			t.Errorf("list does not show a paused sandbox: %s", out)
		}
		if out := d.Must("inspect", id); !strings.Contains(out, `"state": "paused"`) {
			t.Errorf("inspect: %s", out)
		}
		if out := d.Must("ps", id); !strings.Contains(out, "running") {
			t.Errorf("ps: %s", out)
		}
		if ports := listPorts(t, d, id); len(ports) != 1 || ports[0].HostPort != 18110 {
			t.Errorf("the ports of a paused sandbox: %+v", ports)
		}
		for verb, code := range map[string]shard.Code{"start": shard.CodeSandboxNotStopped, "pause": shard.CodeSandboxNotRunning} {
			if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/"+verb, nil); a.code(t) != code {
				t.Errorf("%s of a paused sandbox: %s", verb, a.Body)
			}
		}
		refused(t, d.Shard("remove", id), "paused", "force")
		refused(t, d.Shard("image", "remove", image), "in use", "host")

		// Nobody gets its address meanwhile.
		other := box(t, d, provider)
		if got := sh(t, d, other, "cat /etc/hosts"); strings.Contains(got, was+"\t") {
			t.Errorf("the address %s of a paused sandbox was given to another: %s", was, got)
		}
		for _, ref := range []string{other, stays} {
			d.Must("remove", "--force", ref)
		}
		resume(t, c, id)
		if now := address(); now != was {
			t.Errorf("the address is %s after the resume, and was %s", now, was)
		}
		if exists(t, checkpointOf(d, id)) {
			t.Error("the saved memory is there after a resume")
		}
		for _, end := range []string{"stop", "remove"} {
			pause(t, c, id)
			if !exists(t, checkpointOf(d, id)) {
				t.Error("a paused sandbox has no saved memory")
			}
			if end == "stop" {
				s, err := c.Stop(t.Context(), id)
				if err != nil || s.State != shard.StateStopped || s.StoppedReason != "" {
					t.Errorf("stop of a paused sandbox: %+v, %v", s, err)
				}
				if exists(t, checkpointOf(d, id)) {
					t.Error("the saved memory is there after a stop")
				}
				_, err = c.Resume(t.Context(), id)
				wantCode(t, err, shard.CodeSandboxNotPaused)
				d.Must("start", id)
				pause(t, c, id)
				d.Must("image", "remove", "--force", image) // takes its name
				d.Must("image", "prune", "--force")
				resume(t, c, id)
				sh(t, d, id, "true")
				d.Import(image, testenv.Busybox(t))
			} else {
				d.Must("remove", "--force", id)
				if exists(t, filepath.Join(d.Root, "sandboxes", id)) {
					t.Error("something is left of a sandbox that was removed while it was paused")
				}
			}
		}
	})
}

// TestPausedRestart: a paused sandbox is paused for every daemon, and goes on under any; one whose saved memory is lost says so, and
// starts with its files.
func TestPausedRestart(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id, lost := box(t, d, provider), box(t, d, provider, "--name", "lost")
		count := "i=0; while :; do i=$((i+1)); echo $i >/count; sleep 0.02; done"
		for _, ref := range []string{id, lost} {
			mustRun(t, c, ref, runs("count", "", "sh", "-c", count))
			testenv.Eventually(t, "the program counts", func() (bool, string) { r := d.Shard("exec", ref, "test", "-s", "/count"); return r.Code == 0, r.Stderr })
			sh(t, d, ref, "echo kept >/kept") // and not synced
		}
		counts := func() (n int) {
			t.Helper()
			testenv.Eventually(t, "the count", func() (bool, string) {
				_, err := fmt.Sscan(sh(t, d, id, "cat /count"), &n)
				return err == nil, fmt.Sprint(err) // it may just be written
			})
			return n
		}
		last := counts()
		for round := range 2 {
			pause(t, c, id)
			before := inspect(t, d, id)
			for range 2 {
				d.Stop()
				d.Restart()
				if now := inspect(t, d, id); !equalJSON(now, before) {
					t.Errorf("round %d: another daemon made of %+v: %+v", round, before, now)
				}
				if left := testenv.Observe(id); !left.Empty() {
					t.Errorf("round %d: another daemon took up of a paused sandbox:\n%s", round, left)
				}
			}
			resume(t, c, id)
			testenv.Eventually(t, "the program counts on", func() (bool, string) { n := counts(); return n > last, fmt.Sprintf("%d, before %d", n, last) })
			if n := counts(); n > last+100_000 || n < last {
				t.Errorf("round %d: the program counts %d, behind %d", round, n, last)
			}
			last = counts()
		}

		pause(t, c, lost)
		if err := os.RemoveAll(checkpointOf(d, lost)); err != nil {
			t.Fatal(err)
		}
		refused(t, d.Shard("resume", "lost"), "lost", "memory", "missing", "stop")
		_, err := c.Resume(t.Context(), lost)
		wantCode(t, err, shard.CodeNoCheckpoint)
		if s := state(t, d, lost); s != shard.StatePaused {
			t.Errorf("the sandbox is %s", s)
		}
		again := func() {
			t.Helper()
			d.Must("start", lost)
			if got := sh(t, d, lost, "cat /kept"); got != "kept" {
				t.Errorf("its files: %q", got)
			}
			inState(t, c, lost, "count", shard.ProcessRunning)
		}
		d.Must("stop", lost)
		again()
		pause(t, c, lost)
		d.Stop()
		if err := os.RemoveAll(checkpointOf(d, lost)); err != nil {
			t.Fatal(err)
		}
		d.Restart()
		// An unless-stopped process brings its sandbox back, as after any end that nobody asked for.
		testenv.Eventually(t, "the sandbox returns with its files", func() (bool, string) {
			got := inspect(t, d, lost)
			return got.State == shard.StateRunning && got.Processes[0].Status.State == shard.ProcessRunning, fmt.Sprintf("%+v", got)
		})
		if got := sh(t, d, lost, "cat /kept"); got != "kept" {
			t.Errorf("its files: %q", got)
		}
		if _, err := c.KillProcess(t.Context(), lost, "count", true); err != nil {
			t.Fatal(err)
		}
		pause(t, c, lost)
		d.Stop()
		if err := os.RemoveAll(checkpointOf(d, lost)); err != nil {
			t.Fatal(err)
		}
		d.Restart()
		if got := inspect(t, d, lost); got.State != shard.StateStopped || !strings.Contains(got.StoppedReason, "memory") {
			t.Errorf("the next daemon, without its saved memory: %+v", got)
		}
		d.Must("start", lost)
	})
}

// TestPauseNames: several names on one command line are each done, and those that cannot be are told of at the end.
func TestPauseNames(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		one, two, down := box(t, d, provider, "--name", "one"), box(t, d, provider), box(t, d, provider, "--name", "down")
		d.Must("stop", down)
		want := func(r testenv.Result, stdout string, complaints ...string) {
			t.Helper()
			if r.Code != 1 || r.Stdout != stdout || strings.Count(r.Stderr, "shard: ") != len(complaints) {
				t.Errorf("%+v, want %q and %q", r, stdout, complaints)
			}
			for _, word := range complaints {
				if !strings.Contains(r.Stderr, word) {
					t.Errorf("stderr does not say %q: %s", word, r.Stderr)
				}
			}
		}
		want(d.Shard("pause", "one", "down", "nobody", two), one+"\n"+two+"\n", `"down" is stopped`, `"nobody"`)
		for _, id := range []string{one, two} {
			if s := state(t, d, id); s != shard.StatePaused {
				t.Errorf("it is %s", s)
			}
		}
		want(d.Shard("pause", "one"), "", `"one" is paused`)
		want(d.Shard("resume", two, "down", "one"), two+"\n"+one+"\n", `"down" is stopped`)
		want(d.Shard("resume", "one", "nobody"), "", `"one" is running`, `"nobody"`)
		if s := state(t, d, down); s != shard.StateStopped {
			t.Errorf("refused verbs left the sandbox %s", s)
		}
		if out := d.Must("pause", "one", two); out != one+"\n"+two {
			t.Errorf("pause printed %q", out)
		}
		if out := d.Must("stop", "one", two); out != one+"\n"+two {
			t.Errorf("stop printed %q", out)
		}
	})
}

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestExecFlood: as many commands as a daemon takes, all of which print for ever, some of them to clients that do not
// read: the daemon's memory and disk stay bounded, it answers, and what it held is gone with the sandboxes.
func TestExecFlood(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		const boxes, each = 8, 32
		c := connect(t, d)
		var ids []string
		for range boxes {
			ids = append(ids, box(t, d, provider, "--vcpus", "1"))
		}
		spare := box(t, d, provider)
		before := testenv.UsageOf(d.PID())
		held := func(id string) string { return filepath.Join(d.Root, "sandboxes", id, "execs") }
		all := make([][]string, boxes)
		var wg sync.WaitGroup
		for i, id := range ids {
			wg.Go(func() {
				for range each {
					e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"yes", "a line of output that nobody asked for"}})
					if err != nil {
						t.Errorf("command: %v", err)
						return
					}
					all[i] = append(all[i], e.ID)
				}
			})
		}
		wg.Wait()
		if t.Failed() {
			return
		}
		_, err := c.Exec(t.Context(), spare, shard.ExecRequest{Command: []string{"true"}})
		wantCode(t, err, shard.CodeExecLimit)
		_, err = c.Exec(t.Context(), ids[0], shard.ExecRequest{Command: []string{"true"}})
		wantCode(t, err, shard.CodeExecLimit)
		for i := range 16 { // they read nothing
			open(t, d, ids[i%boxes], all[i%boxes][i/boxes])
		}
		var most testenv.Usage
		for end := time.Now().Add(8 * time.Second); time.Now().Before(end); time.Sleep(time.Second) {
			u := testenv.UsageOf(d.PID())
			most.MemoryKiB, most.Threads, most.Files = max(most.MemoryKiB, u.MemoryKiB), max(most.Threads, u.Threads), max(most.Files, u.Files)
			if _, err := c.AllSandboxes(t.Context(), true); err != nil {
				t.Fatal(err)
			}
			if _, err := c.Stat(t.Context(), spare, "/etc/passwd"); err != nil {
				t.Errorf("a file in a quiet sandbox: %v", err)
			}
			if _, err := c.Stat(t.Context(), ids[0], "/etc/passwd"); err != nil {
				t.Errorf("a file in a loud sandbox: %v", err)
			}
			if _, err := c.GetExec(t.Context(), ids[1], all[1][0]); err != nil {
				t.Error(err)
			}
		}
		var disk int64
		for _, id := range ids {
			disk += diskUse(held(id))
		}
		t.Logf("the daemon: %d MiB at the start, %d MiB at most, %d threads, %d files; held on disk %d MiB", before.MemoryKiB>>10, most.MemoryKiB>>10, most.Threads, most.Files, disk>>20)
		if grown := most.MemoryKiB - before.MemoryKiB; grown > 160<<10 {
			t.Errorf("the daemon grew by %d MiB", grown>>10)
		}
		if disk > boxes*each*(9<<20+64<<10) {
			t.Errorf("%d MiB are held on disk", disk>>20)
		}
		// Two floods end by themselves when they are killed; the rest with their sandboxes.
		for _, exec := range all[0][:2] {
			if err := c.KillExec(t.Context(), ids[0], exec, "KILL"); err != nil {
				t.Errorf("kill: %v", err)
			}
			if rec := finished(t, d, ids[0], exec); rec.ExitStatus.Code != 137 {
				t.Errorf("after KILL: %+v", rec)
			}
		}
		d.Must("stop", ids[0])
		if _, err := os.Stat(held(ids[0])); !os.IsNotExist(err) {
			t.Errorf("after the stop there is still %s: %v", held(ids[0]), err)
		}
		for _, id := range ids {
			d.Must("remove", "--force", id)
		}
		if n, err := filepath.Glob(filepath.Join(d.Root, "sandboxes", "*", "execs", "*")); len(n) != 0 || err != nil {
			t.Errorf("left behind: %v", n)
		}
		// None of the 256 is counted any more.
		if e, err := c.Exec(t.Context(), spare, shard.ExecRequest{Command: []string{"true"}}); err != nil {
			t.Errorf("afterwards: %v", err)
		} else {
			finished(t, d, spare, e.ID)
		}
		testenv.Eventually(t, "files and threads are given back", func() (bool, string) {
			u := testenv.UsageOf(d.PID())
			return u.Files < before.Files+40, fmt.Sprintf("%+v, before %+v", u, before)
		})
	})
}

package test

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// smallDisk is a data directory on a file system of its own.
func smallDisk(t *testing.T, size string) (root string) {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "shd")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	at, file := filepath.Join(dir, "m"), filepath.Join(dir, "img")
	if err := os.Mkdir(at, 0o700); err != nil {
		t.Fatal(err)
	}
	host(t, "truncate", "-s", size, file)
	host(t, "mkfs.ext4", "-q", "-F", "-m", "0", file)
	host(t, "mount", "-o", "loop", file, at)
	t.Cleanup(func() {
		testenv.Eventually(t, "the small disk is unmounted", func() (bool, string) {
			err := unix.Unmount(at, 0)
			return err == nil, fmt.Sprint(err)
		})
	})
	root = filepath.Join(at, "r")
	if err := os.Mkdir(root, 0o700); err != nil {
		t.Fatal(err)
	}
	return root
}

// host runs a command on this host, which must succeed.
func host(t *testing.T, name string, args ...string) {
	t.Helper()
	if r := testenv.Run(t, exec.Command(name, args...)); r.Code != 0 {
		t.Fatalf("%s %s: %s%s", name, strings.Join(args, " "), r.Stdout, r.Stderr)
	}
}

// fill takes all that is left of a disk, until the function it returns is called.
func fill(t *testing.T, root string) (empty func()) {
	t.Helper()
	dir := filepath.Join(filepath.Dir(root), "full")
	script := `mkdir -p "$1" && cd "$1" && for bs in 4M 256k 4k; do dd if=/dev/zero of=$(mktemp -p . ) bs=$bs oflag=direct 2>/dev/null; done; sync -f .`
	testenv.Run(t, exec.Command("sh", "-c", script, "sh", dir))
	return func() { _ = os.RemoveAll(dir) }
}

// TestHostDiskFull: where the host's disk is full nothing new is made, and says so; everything can be stopped and removed; what
// happens meanwhile is not forgotten; and with room again all goes on.
func TestHostDiskFull(t *testing.T) {
	t.Parallel()
	d := start(t, testenv.Options{Root: smallDisk(t, "400M")})
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		for _, name := range []string{"stays", "stopped", "started", "removed", "killed", "old"} {
			box(t, d, provider, "--name", name, "--disk", "32MiB")
		}
		d.Must("run", "--name", "p", "stays", "sleep", "1000")
		d.Must("stop", "started")
		d.Must("stop", "old")
		empty := fill(t, d.Root)
		defer empty()

		full(t, d, "create", func() error {
			_, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "new", Provider: provider,
				Resources: &shard.ResourcesRequest{DiskMiB: p[int64](32)}}, nil)
			if err == nil {
				err = c.Remove(t.Context(), "new", true)
			}
			return err
		})
		full(t, d, "exec", func() error {
			_, err := c.Exec(t.Context(), "stays", shard.ExecRequest{Command: []string{"true"}})
			return err
		})
		full(t, d, "run", func() error {
			_, err := c.RunProcess(t.Context(), "stays", shard.RunRequest{Command: []string{"true"}, Name: p("q"), Restart: &shard.RestartSpec{Policy: shard.RestartNo}})
			return err
		})
		// What the host cannot keep is lost, but nothing else is. Whether the write itself fails is up to the guest's cache.
		_ = c.PutFile(t.Context(), "stopped", "/big", strings.NewReader(strings.Repeat("x", 8<<20)), 8<<20, client.WriteOptions{})
		if got, err := c.KillProcess(t.Context(), "stays", "p", true); err != nil || got.Status.State != shard.ProcessKilled {
			t.Errorf("kill: %+v, %v", got, err)
		}
		if _, err := c.Stop(t.Context(), "stopped"); err != nil {
			t.Errorf("stop: %v", err)
		}
		killMachine(t, inspect(t, d, "killed").ID)
		stoppedWhy := func() (bool, string) {
			got := inspect(t, d, "killed")
			return got.State == shard.StateStopped && got.StoppedReason != "", fmt.Sprintf("%+v", got)
		}
		testenv.Eventually(t, "the end of a sandbox is known", stoppedWhy)
		for _, gone := range []string{"removed", "old"} {
			if err := c.Remove(t.Context(), gone, gone == "removed"); err != nil {
				t.Errorf("remove %s: %v", gone, err)
			}
		}

		fill(t, d.Root) // what was removed had made room
		d.Kill9()
		d.Restart()
		if s := state(t, d, "stays"); s != shard.StateRunning {
			t.Errorf("after the restart a sandbox is %s", s)
		}
		testenv.Eventually(t, "the next daemon knows of the end", stoppedWhy)
		if s := state(t, d, "stopped"); s != shard.StateStopped {
			t.Errorf("after the restart a stopped sandbox is %s", s)
		}
		wantCode(t, func() error { _, err := c.Inspect(t.Context(), "removed"); return err }(), shard.CodeNotFound)

		empty()
		for _, name := range []string{"stays", "stopped", "started", "killed"} {
			if state(t, d, name) == shard.StateStopped {
				d.Must("start", name)
			}
			sh(t, d, name, "echo 1 >/after && sync && cat /after")
		}
		d.Kill9()
		d.Restart()
		testenv.Eventually(t, "the next daemon knows of the killed process", func() (bool, string) {
			got, err := c.Process(t.Context(), "stays", "p")
			return err == nil && got.Status.State == shard.ProcessKilled, fmt.Sprintf("%+v, %v", got, err)
		})
	})
}

// full tries something until the full disk makes it fail, which must be said. A file system finds room for a while.
func full(t *testing.T, d *testenv.Daemon, what string, try func() error) {
	t.Helper()
	testenv.Eventually(t, what+" fails on a full disk", func() (bool, string) {
		fill(t, d.Root)
		err := try()
		if err != nil && (shard.CodeOf(err) != shard.CodeInternal || !strings.Contains(err.Error(), "full")) {
			t.Fatalf("%s on a full disk: %v", what, err)
		}
		return err != nil, "it succeeds"
	})
}

// TestDescriptorsRunOut: at whichever step a daemon runs out of descriptors, nothing stays half made: what cannot be undone at
// once is undone later.
func TestDescriptorsRunOut(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		kept := box(t, d, provider, "--name", "kept")
		held := d.Leftovers(false)
		limit := func(soft uint64) (was uint64) {
			var old unix.Rlimit
			if err := unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, nil, &old); err != nil {
				t.Fatal(err)
			}
			if err := unix.Prlimit(d.PID(), unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: soft, Max: old.Max}, nil); err != nil {
				t.Fatal(err)
			}
			return old.Cur
		}
		failures := 0
		for spare := 0; spare < 16; spare += 2 {
			s, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "down", Provider: provider}, nil)
			if err == nil {
				_, err = c.Stop(t.Context(), s.ID)
			}
			if err != nil {
				t.Fatal(err)
			}
			open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
			if err != nil {
				t.Fatal(err)
			}
			was := limit(uint64(len(open) + spare))
			for _, try := range []func() error{
				func() error {
					_, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Name: "new", Provider: provider}, nil)
					return err
				},
				func() error {
					_, err := c.Exec(t.Context(), kept, shard.ExecRequest{Command: []string{"true"}})
					return err
				},
				func() error { _, err := c.Start(t.Context(), s.ID); return err },
				func() error { return c.Remove(t.Context(), s.ID, true) },
			} {
				if try() != nil {
					failures++
				}
			}
			limit(was)
			for _, name := range []string{"new", "down"} {
				testenv.Eventually(t, "with descriptors again "+name+" can be removed", func() (bool, string) {
					err := c.Remove(t.Context(), name, true)
					return err == nil || shard.CodeOf(err) == shard.CodeNotFound, fmt.Sprint(err)
				})
			}
		}
		if failures == 0 {
			t.Error("nothing failed: the limit was not felt")
		}
		testenv.Eventually(t, "nothing is left of what failed", func() (bool, string) {
			list, err := c.AllSandboxes(t.Context(), true)
			if err != nil {
				t.Fatal(err)
			}
			dirs, err := os.ReadDir(filepath.Join(d.Root, "sandboxes"))
			if err != nil {
				t.Fatal(err)
			}
			left := d.Leftovers(false)
			return len(list.Sandboxes) == 1 && len(dirs) == 1 && len(left.Mounts) == len(held.Mounts) && len(left.Loops) == len(held.Loops) &&
				len(left.Cgroups) == len(held.Cgroups), fmt.Sprintf("%d sandboxes, %d directories\n%s", len(list.Sandboxes), len(dirs), left)
		})
		sh(t, d, kept, "true")
		if err := c.Remove(t.Context(), kept, true); err != nil {
			t.Error(err)
		}
	})
}

// TestReserve: on a full disk of the host a stopped sandbox starts by what was kept for that, which is made again when there is room.
func TestReserve(t *testing.T) {
	t.Parallel()
	d := start(t, testenv.Options{Root: smallDisk(t, "1G")})
	reserve := filepath.Join(d.Root, ".reserve")
	kept := func() bool {
		info, err := os.Stat(reserve)
		return err == nil && info.Size() == 64<<20
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--disk", "32MiB")
		sh(t, d, id, "echo kept >/kept; sync")
		d.Must("stop", id)
		testenv.Eventually(t, "there is a reserve", func() (bool, string) { return kept(), "" })
		empty := fill(t, d.Root)
		defer empty()
		d.Must("start", id)
		if kept() {
			t.Error("the disk was not full")
		}
		if got := sh(t, d, id, "cat /kept"); got != "kept" {
			t.Errorf("its file: %q", got)
		}
		empty()
		testenv.Eventually(t, "there is a reserve again", func() (bool, string) { return kept(), "" })
	})
}

package test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPauseDiskFull: wherever in a pause the host's disk gets full the sandbox runs on, with its commands; a resume works all the
// same, or says so and works when there is room. What fails holds no room.
func TestPauseDiskFull(t *testing.T) {
	t.Parallel()
	d := start(t, testenv.Options{Root: smallDisk(t, "1G")})
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider, "--disk", "32MiB")
		// Nothing in it writes to its disk: what that loses is not what this test is about.
		mustRun(t, c, id, shard.RunRequest{Name: p("ballast"), Command: script("(head -c 60000000 /dev/urandom; touch /full; sleep 100000) | tail -c 60000000")})
		sh(t, d, id, "until [ -e /full ]; do sleep 0.1; done; rm /full; sync")
		mustRun(t, c, id, shard.RunRequest{Name: p("count"), Command: script("i=0; while :; do i=$((i+1)); echo $i >>/dev/shm/count; sleep 0.01; done")})
		sh(t, d, id, "until [ -s /dev/shm/count ]; do sleep 0.1; done")
		const check = `cp /dev/shm/count /dev/shm/seen; awk '$1 != NR { print "where " NR " should come there is " $1; exit }' /dev/shm/seen; echo checked`
		exec, err := c.Exec(t.Context(), id, shard.ExecRequest{Attach: true, Stdin: true, Command: script("while read x; do " + check + "; done")})
		if err != nil {
			t.Fatal(err)
		}
		stream, err := c.Attach(t.Context(), id, exec.ID)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = stream.Close() }()
		told := make(chan string, 100)
		go func() { _, _ = stream.Copy(lineWriter(told), lineWriter(told)) }()
		goesOn := func(when string) {
			t.Helper()
			if _, err := stream.Write([]byte("\n")); err != nil {
				t.Fatalf("%s: ask the attached command: %v", when, err)
			}
			select {
			case got := <-told:
				if got != "checked\n" {
					t.Errorf("%s: of the program that counts: %s", when, got)
				}
			case <-time.After(time.Minute):
				t.Fatalf("%s: the attached command says nothing", when)
			}
		}
		goesOn("before")
		free := func() int64 {
			var disk unix.Statfs_t
			if err := unix.Statfs(d.Root, &disk); err != nil {
				t.Fatal(err)
			}
			return int64(disk.Bfree) * disk.Bsize
		}
		reserve := filepath.Join(d.Root, ".reserve")
		testenv.Eventually(t, "there is a reserve", func() (bool, string) { _, err := os.Stat(reserve); return err == nil, "" })

		const mib = 1 << 20
		refused := 0
		for _, room := range []int64{0, 16384, mib, 8 * mib, 55 * mib} {
			empty := fillBut(t, d.Root, room)
			before := free()
			_, err := c.Pause(t.Context(), id)
			if err == nil {
				t.Errorf("with %d bytes of room a pause succeeds", room)
				empty()
				resume(t, c, id)
				continue
			}
			refused++
			if shard.CodeOf(err) != shard.CodeInternal || !strings.Contains(err.Error(), "full") {
				t.Errorf("with %d bytes of room a pause fails with %v", room, err)
			}
			if s := state(t, d, id); s != shard.StateRunning {
				t.Fatalf("with %d bytes of room a pause (%v) leaves it %s", room, err, s)
			}
			goesOn(fmt.Sprintf("after a pause with %d bytes of room", room))
			if now := free(); now < before-mib {
				t.Errorf("with %d bytes of room %d were free before the pause, and %d after it", room, before, now)
			}
			empty()
			tidy(t, d, id)
		}
		if refused == 0 {
			t.Error("no pause was refused")
		}
		_ = stream.Close()

		for _, room := range []int64{-1, 0, 8192, 65536} {
			pause(t, c, id)
			kept := room < 0
			if !kept {
				_ = os.Remove(reserve)
			}
			empty := fillBut(t, d.Root, room)
			_, err := c.Resume(t.Context(), id)
			t.Logf("a resume with a reserve (%t) or %d bytes of room: %v", kept, room, err)
			if err != nil {
				if kept || shard.CodeOf(err) != shard.CodeInternal || !strings.Contains(err.Error(), "full") {
					t.Errorf("a resume on a full disk, with a reserve: %t: %v", kept, err)
				}
				if s := state(t, d, id); s != shard.StatePaused {
					t.Fatalf("it is %s", s)
				}
				d.Kill9() // with a record that may be behind
				d.Restart()
				empty()
				resume(t, c, id)
			} else {
				d.Kill9()
				d.Restart()
				if s := cameTo(t, d, id); s != shard.StateRunning {
					t.Errorf("resumed on a full disk, and after a crash it is %s", s)
				}
				empty()
			}
			if got := sh(t, d, id, check); got != "checked" {
				t.Errorf("of the program that counts: %s", got)
			}
		}
	})
}

// fillBut takes all that is left of a disk but some bytes, until the function it returns is called.
func fillBut(t *testing.T, root string, room int64) (empty func()) {
	t.Helper()
	spare := filepath.Join(root, "spare")
	if room > 0 {
		f, err := os.Create(spare)
		if err == nil {
			err = errors.Join(unix.Fallocate(int(f.Fd()), 0, 0, room), f.Close())
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	empty = fill(t, root)
	_ = os.Remove(spare)
	return empty
}

// lineWriter passes on what is written, as far as somebody listens.
type lineWriter chan string

func (w lineWriter) Write(p []byte) (int, error) {
	select {
	case w <- string(p):
	default:
	}
	return len(p), nil
}

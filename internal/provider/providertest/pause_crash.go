//go:build linux

package providertest

import (
	"context"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/provider"
)

// counter is a machine with a program that counts in its memory alone and writes each number into a file, and with enough
// memory in use that to save it takes a while.
type counter struct {
	*box
	pauser provider.Pauser
	env    *Env
	saved  string // where pauses save
	first  int    // number that it wrote first, or 0 for any
	last   int    // how many numbers there were when they were last looked at
}

func newCounter(t testing.TB, p provider.Provider, env *Env) *counter {
	c := &counter{box: start(t, p, env.Spec(t, shard.Resources{})), pauser: p.(provider.Pauser), env: env, saved: t.TempDir(), first: 1}
	c.sh(`(i=0; while :; do i=$((i+1)); echo $i >>/count; sleep 0.01; done) </dev/null >/dev/null 2>&1 &
		((head -c 100000000 /dev/urandom; touch /full; sleep 100000) | tail -c 100000000) </dev/null >/dev/null 2>&1 &
		until [ -e /full ]; do sleep 0.1; done`)
	c.counts()
	return c
}

// counts checks that no number is missing or comes twice, and that the program goes on.
func (c *counter) counts() {
	c.Helper()
	before := c.last
	for deadline := time.Now().Add(patience); c.last <= before; time.Sleep(10 * time.Millisecond) {
		data, err := os.ReadFile(filepath.Join(c.spec.Root, "count"))
		if err != nil {
			c.Fatal(err)
		}
		lines := strings.Split(string(data), "\n")
		c.last = len(lines) - 1
		for i, line := range lines[:c.last] {
			if c.first == 0 {
				c.first, _ = strconv.Atoi(line)
			}
			if line != strconv.Itoa(c.first+i) {
				c.Fatalf("where %d should come the program wrote %q", c.first+i, line)
			}
		}
		if time.Now().After(deadline) {
			c.Fatalf("the program does not count on behind %d", before)
		}
	}
}

// quiesce is what precedes a pause.
func (c *counter) quiesce() {
	c.Helper()
	ctx, cancel := context.WithTimeout(c.Context(), patience)
	defer cancel()
	if err := c.session.Quiesce(ctx); err != nil {
		c.Fatalf("quiesce: %v", err)
	}
	_ = c.session.Close()
}

// while does work, and injures the part of the machine once it is there and a random part of most has passed; it returns what
// work did, and whether the injury was done before it had ended.
func (c *counter) while(part string, signal unix.Signal, most time.Duration, work func() error) (err error, injured int) {
	done := make(chan error, 1)
	go func() { done <- work() }()
	delay := rand.N(most)
	for {
		select {
		case err := <-done:
			return err, 0
		default:
		}
		parts := c.env.Parts(c.spec)
		if parts["program"] == 0 || parts[part] == 0 {
			continue
		}
		time.Sleep(delay)
		if unix.Kill(parts[part], signal) == nil {
			injured = parts[part]
		}
		return <-done, injured
	}
}

// pause saves the machine into a fresh directory, while something befalls it.
func (c *counter) pause(ctx context.Context, part string, signal unix.Signal, most time.Duration) (dir string, err error, injured int) {
	c.Helper()
	c.quiesce()
	dir, mkErr := os.MkdirTemp(c.saved, "")
	if mkErr != nil {
		c.Fatal(mkErr)
	}
	err, injured = c.while(part, signal, most, func() error {
		return c.pauser.Pause(ctx, c.inst, dir, func() error { return nil })
	})
	if left, _ := os.ReadDir(dir); err != nil && len(left) > 0 {
		c.Errorf("a pause that failed left %v", left)
	}
	return dir, err, injured
}

// paused removes what a saved machine left.
func (c *counter) paused() {
	c.Helper()
	c.ended()
	c.remove()
	if traces := c.env.Traces(c.spec); len(traces) != 0 {
		c.Errorf("left on the host by a paused machine: %q", traces)
	}
}

// resume goes on with the machine.
func (c *counter) resume(dir string) {
	c.Helper()
	inst, err := c.pauser.Resume(c.Context(), c.spec, dir)
	if err != nil {
		c.Fatalf("resume: %v", err)
	}
	c.inst = inst
	c.connect()
	c.counts()
}

// settled waits until the machine runs, as a daemon does that asks again and again.
func (c *counter) settled() {
	c.Helper()
	for deadline := time.Now().Add(patience); ; time.Sleep(100 * time.Millisecond) {
		handle, err := c.pauser.Settle(c.Context(), c.spec)
		if err == nil {
			if string(handle) != string(c.inst.Handle()) {
				c.Errorf("settled as %s, and it is %s", handle, c.inst.Handle())
			}
			return
		}
		if !errors.Is(err, provider.ErrBusy) || time.Now().After(deadline) {
			c.Fatalf("settle: %v", err)
		}
	}
}

// brokenPauses kills and stops what takes part in pauses and resumes, in the middle of them.
func brokenPauses(t *testing.T, p provider.Provider, env *Env) {
	if _, can := p.(provider.Pauser); !can {
		t.Skipf("provider %s does not pause", p.Name())
	}
	t.Run("program killed", func(t *testing.T) {
		t.Parallel()
		c := newCounter(t, p, env)
		failed := map[string]int{}
		for range 6 {
			dir, err, injured := c.pause(t.Context(), "program", unix.SIGKILL, 150*time.Millisecond)
			if err != nil {
				if injured == 0 || errors.Is(err, provider.ErrLost) {
					t.Fatalf("pause, with %d killed: %v", injured, err)
				}
				failed["pause"]++
				c.settled()
				c.connect()
				c.counts()
				c.quiesce()
				if err := c.pauser.Pause(t.Context(), c.inst, dir, func() error { return nil }); err != nil {
					t.Fatalf("pause again: %v", err)
				}
			}
			c.paused()
			err, injured = c.while("program", unix.SIGKILL, 300*time.Millisecond, func() error {
				inst, err := c.pauser.Resume(t.Context(), c.spec, dir)
				if err == nil {
					c.inst = inst
				}
				return err
			})
			if err == nil {
				c.connect()
				c.counts()
				continue
			}
			if injured == 0 {
				t.Fatalf("resume: %v", err)
			}
			failed["resume"]++
			if traces := env.Traces(c.spec); len(traces) != 0 {
				t.Errorf("left on the host by a resume that failed: %q", traces)
			}
			c.resume(dir)
		}
		t.Logf("failed: %v", failed)
	})

	t.Run("stopped", func(t *testing.T) {
		t.Parallel()
		c := newCounter(t, p, env)
		injured := 0
		for tries := 0; injured == 0; tries++ {
			ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
			dir, err, stopped := c.pause(ctx, "main", unix.SIGSTOP, 1)
			cancel()
			switch {
			case err == nil && tries < 50: // it was saved before
				c.paused()
				c.resume(dir)
			case stopped != 0 && errors.Is(err, provider.ErrBusy):
				injured = stopped
			default:
				t.Fatalf("a pause of a machine that hangs, %d: %v", stopped, err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.pauser.Settle(ctx, c.spec); !errors.Is(err, provider.ErrBusy) {
			t.Errorf("settle while it hangs: %v", err)
		}
		if err := unix.Kill(injured, unix.SIGCONT); err != nil {
			t.Fatal(err)
		}
		c.settled()
		c.connect()
		c.counts()
	})

	for _, part := range []string{"main", "helper"} {
		t.Run(part+" killed", func(t *testing.T) {
			t.Parallel()
			c := newCounter(t, p, env)
			for tries := 0; ; tries++ {
				dir, err, killed := c.pause(t.Context(), part, unix.SIGKILL, 50*time.Millisecond)
				c.paused()
				if killed != 0 && errors.Is(err, provider.ErrLost) {
					break
				}
				if err != nil || tries == 50 {
					t.Fatalf("pause, with %d killed: %v", killed, err)
				}
				c.resume(dir)
			}
			c.box = start(t, p, c.spec) // its files are there
			c.sh("tail -n1 /count; rm /count /full")
			c.remove()
			c = newCounter(t, p, env)
			dir, err, _ := c.pause(t.Context(), "", 0, 1)
			if err != nil {
				t.Fatalf("pause: %v", err)
			}
			c.paused()
			for range 3 {
				err, injured := c.while(part, unix.SIGKILL, 150*time.Millisecond, func() error {
					inst, err := c.pauser.Resume(t.Context(), c.spec, dir)
					if err == nil {
						c.inst = inst
					}
					return err
				})
				if err == nil { // it was killed at the very end, when it ran
					t.Logf("killed %d too late", injured)
					return
				}
				if traces := env.Traces(c.spec); len(traces) != 0 {
					t.Errorf("left on the host by a resume that failed: %q", traces)
				}
			}
			// A machine that died when its guest had just begun to run has changed its files: here they do not matter.
			if err := os.WriteFile(filepath.Join(c.spec.Root, "count"), nil, 0); err != nil {
				t.Fatal(err)
			}
			c.first, c.last = 0, 0
			c.resume(dir)
		})
	}
}

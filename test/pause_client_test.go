package test

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// TestPauseHangUp: a client that goes away ends neither the pause nor the resume that it asked for.
func TestPauseHangUp(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		// So much memory takes a while to be written and read.
		mustRun(t, c, id, shard.RunRequest{Name: p("full"), Command: script("dd if=/dev/urandom bs=128M count=1 iflag=fullblock 2>/dev/null | { head -c 1 >/dev/null; echo full; exec sleep 1000; }")})
		testenv.Eventually(t, "the memory is full", func() (bool, string) {
			log := logOf(t, c, id, "full")
			return log == "full\n", log
		})
		there := func(name string) bool {
			_, err := os.Stat(filepath.Join(d.Root, "sandboxes", id, name))
			return err == nil
		}
		// hangUp asks for a verb and goes away once that has begun: in the sandbox's directory there is first what it makes,
		// and in the end no more what it takes away.
		hangUp := func(verb func(*client.Client, context.Context, string) (*shard.Sandbox, error), makes, takes string, then shard.State) {
			t.Helper()
			ctx, cancel := context.WithCancel(t.Context())
			answered := make(chan error, 1)
			go func() {
				_, err := verb(c, ctx, id)
				answered <- err
			}()
			testenv.Eventually(t, "the verb begins", func() (bool, string) { return there(makes), makes })
			cancel()
			if err := <-answered; err != nil && !errors.Is(err, context.Canceled) {
				t.Errorf("it answered %v", err)
			}
			testenv.Eventually(t, "what was begun is done", func() (bool, string) {
				now := inspect(t, d, id).State
				return now == then && !there(takes), string(now)
			})
		}
		for range 2 {
			hangUp((*client.Client).Pause, "checkpoint", "bundle", shard.StatePaused)
			hangUp((*client.Client).Resume, "bundle", "checkpoint", shard.StateRunning)
			if log := logOf(t, c, id, "full"); log != "full\n" {
				t.Errorf("the process says %q", log)
			}
			sh(t, d, id, "pidof dd")
		}
	})
}

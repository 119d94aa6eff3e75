package test

import (
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// TestVerbStorm: many clients do anything to a few sandboxes at once, and often give up half-way. Each refusal is a documented
// one, every sandbox ends in a state that is true, and nothing stays behind.
func TestVerbStorm(t *testing.T) {
	t.Parallel()
	const clients, verbs = 12, 40
	allowed := []shard.Code{"", shard.CodeNotFound, shard.CodeNoProcess, shard.CodeNameTaken, shard.CodeInUse, shard.CodeSandboxNotRunning,
		shard.CodeSandboxNotStopped, shard.CodeSandboxFailed, shard.CodeTimeout}
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		var wg sync.WaitGroup
		for w := range clients {
			rnd := rand.New(rand.NewPCG(20, uint64(w)))
			wg.Go(func() {
				for range verbs {
					box, process := fmt.Sprintf("s%d", rnd.IntN(3)), fmt.Sprintf("p%d", rnd.IntN(3))
					ctx, cancel := context.WithCancel(t.Context())
					if rnd.IntN(3) == 0 {
						time.AfterFunc(time.Duration(rnd.IntN(400))*time.Millisecond, cancel)
					}
					verb, err := storm(ctx, c, provider, box, process, rnd)
					if code := shard.CodeOf(err); !slices.Contains(allowed, code) && ctx.Err() == nil {
						t.Errorf("%s: %v", verb, err)
					}
					cancel()
				}
			})
		}
		wg.Wait()
		for _, s := range settled(t, c) {
			if s.State == shard.StateStopped {
				d.Must("start", s.ID)
			}
			if s.State != shard.StateFailed {
				sh(t, d, s.ID, "echo 1 >/storm && sync && cat /storm")
			}
			d.Must("remove", "--force", s.ID)
		}
		testenv.Eventually(t, "nothing is left", func() (bool, string) {
			left := d.Leftovers(false)
			return left.Empty(), left.String()
		})
	})
}

// settled waits until no create is under way any more, whoever began it.
func settled(t *testing.T, c *client.Client) (all []shard.Sandbox) {
	t.Helper()
	since := time.Now()
	testenv.Eventually(t, "all creates have ended", func() (bool, string) {
		list, err := c.AllSandboxes(t.Context(), true)
		if err != nil {
			t.Fatal(err)
		}
		if slices.ContainsFunc(list.Sandboxes, func(s shard.Sandbox) bool { return s.State == shard.StatePending }) {
			since = time.Now()
		}
		all = list.Sandboxes
		return time.Since(since) > 2*time.Second, fmt.Sprintf("%+v", all)
	})
	return all
}

// storm does one thing at random.
func storm(ctx context.Context, c *client.Client, provider, box, process string, rnd *rand.Rand) (verb string, err error) {
	switch rnd.IntN(14) {
	case 0, 1:
		_, err = c.Create(ctx, shard.CreateRequest{Image: image, Name: box, Provider: provider}, nil)
		return "create", err
	case 2, 3:
		_, err = c.Start(ctx, box)
		return "start", err
	case 4:
		_, err = c.Stop(ctx, box)
		return "stop", err
	case 5:
		return "remove", c.Remove(ctx, box, rnd.IntN(2) == 0)
	case 6, 7:
		_, s, err := c.Run(ctx, box, shard.ExecRequest{Command: script("echo hi; sleep 0.2"), Stdin: true, TTY: rnd.IntN(2) == 0})
		if err == nil {
			_ = s.Close()
		}
		return "exec", err
	case 8:
		_, err = c.RunProcess(ctx, box, shard.RunRequest{Command: []string{"sleep", "1"}, Name: &process})
		return "run", err
	case 9:
		_, err = c.KillProcess(ctx, box, process, rnd.IntN(2) == 0)
		return "kill", err
	case 10:
		const size = 100_000
		return "put", c.PutFile(ctx, box, "/"+process, strings.NewReader(strings.Repeat("x", size)), size, client.WriteOptions{})
	case 11:
		r, _, err := c.GetArchive(ctx, box, "/etc")
		if err == nil {
			_, _ = io.Copy(io.Discard, r) // may be cut
			_ = r.Close()
		}
		return "archive", err
	case 12:
		host := 22100 + rnd.IntN(4)
		if rnd.IntN(2) == 0 {
			return "remove a port", c.RemovePort(ctx, box, host)
		}
		_, err = c.PutPort(ctx, box, shard.PortForward{HostPort: host, GuestPort: 80})
		return "port", err
	}
	_, err = c.Inspect(ctx, box)
	return "inspect", err
}

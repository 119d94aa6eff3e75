//go:build linux

package providertest

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// memory: a machine that needs more than its bound ends as a whole, says why, and starts again with its files.
func memory(t *testing.T, p provider.Provider, env *Env) {
	b := start(t, p, env.Spec(t, shard.Resources{MemoryMiB: 256}))
	b.sh("echo kept > /kept; sync")
	_, sink, err := b.begin(guest.ExecSpec{Argv: guest.Strings{"dd", "if=/dev/zero", "of=/dev/null", "bs=1G", "count=1"}})
	if err != nil {
		t.Fatal(err)
	}
	if exit := b.ended(); !exit.OOM {
		t.Errorf("exit is %+v, want out of memory", exit)
	}
	select {
	case <-sink.end:
	case <-time.After(patience):
		t.Error("the command's stream hangs")
	}
	b.remove()
	b = start(t, p, b.spec)
	if got := b.sh("cat /kept"); got != "kept" {
		t.Errorf("the file holds %q after the new start", got)
	}
	// Half of the bound can be used.
	b.sh("dd if=/dev/zero of=/dev/null bs=128M count=1 2>/dev/null")
}

// processes: a fork bomb is bounded, another machine works meanwhile, and the bomb can be ended.
func processes(t *testing.T, p provider.Provider, env *Env) {
	bomb := start(t, p, env.Spec(t, shard.Resources{MemoryMiB: 1024, VCPUs: 1}))
	other := start(t, p, env.Spec(t, shard.Resources{}))
	if _, _, err := bomb.begin(guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "b() { b | b & }; b; sleep 60"}}); err != nil {
		t.Fatal(err)
	}
	const most = 4096
	deadline := time.Now().Add(3 * time.Second)
	for time.Now().Before(deadline) {
		s, err := bomb.inst.Stats(t.Context())
		select {
		case <-bomb.inst.Done(): // it may burst
			deadline = time.Now()
		default:
			if err != nil {
				t.Fatal(err)
			}
		}
		if s.PIDs > most {
			t.Fatalf("%d processes, more than %d", s.PIDs, most)
		}
		if s.PIDs > most*9/10 {
			break
		}
		if got := other.sh("echo fine"); got != "fine" {
			t.Fatalf("another machine says %q", got)
		}
	}
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	if err := bomb.inst.Kill(ctx); err != nil {
		t.Fatalf("kill: %v", err)
	}
	bomb.remove()
	if traces := env.Traces(bomb.spec); len(traces) != 0 {
		t.Errorf("left on the host: %q", traces)
	}
}

// size: programs that measure the machine see its bounds, where the provider can show them.
func size(t *testing.T, p provider.Provider, env *Env) {
	if !env.ShowsBounds {
		t.Skip("a guest of this provider sees the host's CPUs and memory")
	}
	for _, r := range []shard.Resources{{VCPUs: 1, MemoryMiB: 192}, {VCPUs: 2, MemoryMiB: 1024}} {
		b := start(t, p, env.Spec(t, r))
		if got := b.sh("nproc"); got != fmt.Sprint(r.VCPUs) {
			t.Errorf("nproc says %s, want %d", got, r.VCPUs)
		}
		if got := b.sh("sed -n 's/^MemTotal: *//p' /proc/meminfo"); got != fmt.Sprintf("%d kB", r.MemoryMiB<<10) {
			t.Errorf("MemTotal is %s, want %d MiB", got, r.MemoryMiB)
		}
		b.remove()
	}
}

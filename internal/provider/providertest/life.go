//go:build linux

package providertest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// life follows one machine through stop and start, and looks for what it leaves.
func life(t *testing.T, p provider.Provider, env *Env) {
	spec := env.Spec(t, shard.Resources{})
	descriptors := openDescriptors(t)
	if traces := env.Traces(spec); len(traces) != 0 {
		t.Fatalf("there are traces before the start: %q", traces)
	}
	b := start(t, p, spec)
	if _, err := p.Start(t.Context(), spec); err == nil {
		t.Error("a machine that runs was started a second time")
	}
	b.sh("echo kept > /kept")
	if s, err := b.inst.Stats(t.Context()); err != nil || s.MemoryBytes <= 0 || s.PIDs <= 0 || s.CPUNanos <= 0 {
		t.Errorf("stats are %+v: %v", s, err)
	}
	if len(env.Traces(spec)) == 0 {
		t.Error("a running machine leaves no trace: the test cannot see any")
	}

	// A clean stop ends the programs, then the machine.
	_, sleeper, err := b.begin(guest.ExecSpec{Argv: guest.Strings{"sleep", "1000"}})
	if err != nil {
		t.Fatal(err)
	}
	if err := b.session.Call(t.Context(), guest.OpStop, guest.StopArgs{GraceMillis: 2000}, nil); err != nil {
		t.Fatalf("stop: %v", err)
	}
	if r := sleeper.wait(t); r.exit.Signal != 15 {
		t.Errorf("the program ended with %+v, want signal 15", r.exit)
	}
	if err := b.inst.Kill(t.Context()); err != nil {
		t.Fatalf("kill: %v", err)
	}
	if exit := b.ended(); exit.OOM {
		t.Error("a stopped machine counts as out of memory")
	}
	if err := b.inst.Kill(t.Context()); err != nil {
		t.Errorf("kill again: %v", err)
	}
	if _, err := b.inst.Dial(t.Context()); err == nil {
		t.Error("a machine that is gone can be dialled")
	}
	b.remove()
	if traces := env.Traces(spec); len(traces) != 0 {
		t.Errorf("left on the host after destroy: %q", traces)
	}
	b.remove() // idempotent
	if err := p.Destroy(t.Context(), env.Spec(t, shard.Resources{})); err != nil {
		t.Errorf("destroy of what never ran: %v", err)
	}

	// What it wrote is there when it starts again.
	b = start(t, p, spec)
	if got := b.sh("cat /kept"); got != "kept" {
		t.Errorf("the file holds %q after a new start", got)
	}
	b.remove()
	// Destroy alone ends a running machine.
	b = start(t, p, spec)
	b.remove()
	if traces := env.Traces(spec); len(traces) != 0 {
		t.Errorf("left on the host after destroy of a running machine: %q", traces)
	}
	if now := openDescriptors(t); len(now) > len(descriptors) {
		t.Errorf("open descriptors before: %q\nafter: %q", descriptors, now)
	}
}

// neighbours are started, used and removed at the same time; each has exactly its own.
func neighbours(t *testing.T, p provider.Provider, env *Env) {
	const boxes = 6
	var specs []provider.Spec
	for range boxes {
		specs = append(specs, env.Spec(t, shard.Resources{VCPUs: 1, MemoryMiB: 256}))
	}
	var all sync.WaitGroup
	for _, spec := range specs {
		all.Go(func() {
			t.Run("box", func(t *testing.T) {
				b := start(t, p, spec)
				own := guest.Strings{"PATH=/bin", "OWN=" + spec.ID}
				r := b.run(guest.ExecSpec{Env: own, Argv: guest.Strings{"sh", "-c", "echo $OWN; hostname; echo $OWN > /own; cat /own"}}, nil)
				if want := strings.Repeat(spec.ID+"\n", 3); r.out != want {
					t.Errorf("got %q, want %q", r.out, want)
				}
			})
		})
	}
	all.Wait()
	for _, spec := range specs {
		if traces := env.Traces(spec); len(traces) != 0 {
			t.Errorf("left on the host: %q", traces)
		}
	}
}

// openDescriptors lists what this process has open.
func openDescriptors(t testing.TB) (open []string) {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		if to, err := os.Readlink(filepath.Join("/proc/self/fd", e.Name())); err == nil {
			open = append(open, to)
		}
	}
	return open
}

// refusals are starts that cannot work; nothing may be left of them.
func refusals(t *testing.T, p provider.Provider, env *Env) {
	spoiled := func(spoil func(*provider.Spec)) provider.Spec {
		spec := env.Spec(t, shard.Resources{})
		spoil(&spec)
		return spec
	}
	for name, spec := range map[string]provider.Spec{
		"no root":      spoiled(func(s *provider.Spec) { s.Root = filepath.Join(s.Dir, "missing") }),
		"no namespace": spoiled(func(s *provider.Spec) { s.Netns = filepath.Join(s.Dir, "missing") }),
		"bad id":       spoiled(func(s *provider.Spec) { s.ID = "../../x" }),
	} {
		t.Run(name, func(t *testing.T) {
			if _, err := p.Start(t.Context(), spec); err == nil {
				t.Error("it started")
			}
			if traces := env.Traces(spec); name != "bad id" && len(traces) != 0 {
				t.Errorf("left on the host: %q", traces)
			}
		})
	}
	t.Run("hardly any memory", func(t *testing.T) {
		spec := env.Spec(t, shard.Resources{MemoryMiB: 1})
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		inst, err := p.Start(ctx, spec)
		if err == nil { // it may even work
			err = errors.Join(inst.Kill(ctx), p.Destroy(ctx, spec), inst.Close())
			if err != nil {
				t.Error(err)
			}
		}
		if ctx.Err() != nil {
			t.Error("it hangs")
		}
		if traces := env.Traces(spec); len(traces) != 0 {
			t.Errorf("left on the host: %q", traces)
		}
	})
	t.Run("cancelled", func(t *testing.T) {
		spec := env.Spec(t, shard.Resources{})
		ctx, cancel := context.WithTimeout(t.Context(), 15*time.Millisecond)
		defer cancel()
		inst, err := p.Start(ctx, spec)
		if err == nil {
			_ = inst.Kill(t.Context())
			_ = p.Destroy(t.Context(), spec)
			t.Skip("the machine started faster than it could be cancelled")
		}
		if !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("got %v", err)
		}
		if traces := env.Traces(spec); len(traces) != 0 {
			t.Errorf("left on the host: %q", traces)
		}
	})
}

// recovers drops all memory of a machine, as a daemon does that is killed, and finds it again.
func recovers(t *testing.T, p provider.Provider, env *Env) {
	const script = "i=0; while [ $i -lt 400 ]; do echo line $i; i=$((i+1)); usleep 5000; done; exit 7"
	b := start(t, p, env.Spec(t, shard.Resources{}))
	const id = "long-exec"
	_, first, err := b.begin(guest.ExecSpec{ID: id, Argv: guest.Strings{"sh", "-c", script}})
	if err != nil {
		t.Fatal(err)
	}
	for first.size() < 500 {
		select {
		case <-first.grown:
		case <-first.end:
			t.Fatalf("the command ended early: %v", first.broken)
		case <-time.After(patience):
			t.Fatal("no output")
		}
	}
	handle := b.inst.Handle()
	_ = b.session.Close()
	<-first.end
	b.letGo()

	b.p = env.Reopen(t)
	if b.inst, err = b.p.Recover(t.Context(), b.spec, handle); err != nil {
		t.Fatalf("recover: %v", err)
	}
	b.connect()
	var held guest.ExecsHead
	if err := b.session.Call(t.Context(), guest.OpExecs, nil, &held); err != nil {
		t.Fatal(err)
	}
	if len(held.Execs) != 1 || held.Execs[0].ID != id {
		t.Fatalf("the guest holds %+v", held)
	}
	second := newCollector()
	cmd, err := b.session.Resume(t.Context(), id, int64(first.size()), second)
	if err != nil {
		t.Fatalf("resume: %v", err)
	}
	second.follow(cmd)
	r := second.wait(t)
	var want strings.Builder
	for n := range 400 {
		fmt.Fprintln(&want, "line", n)
	}
	if got := first.out.String() + r.out; got != want.String() || r.exit.Code != 7 {
		t.Errorf("over both sessions came %d bytes, want %d; it ended with %+v", len(got), want.Len(), r.exit)
	}
	if err := cmd.Forget(t.Context()); err != nil {
		t.Errorf("forget: %v", err)
	}
	// A second loss of the channel is no harder than the first.
	_ = b.session.Close()
	b.connect()
	if got := b.sh("echo here"); got != "here" {
		t.Errorf("got %q", got)
	}

	if err := b.inst.Kill(t.Context()); err != nil {
		t.Fatal(err)
	}
	b.letGo()
	gone, err := env.Reopen(t).Recover(t.Context(), b.spec, handle)
	if !errors.Is(err, provider.ErrGone) {
		t.Fatalf("recover of a machine that is gone: %v", err)
	}
	if gone != nil {
		if exit := gone.Exit(); exit.OOM {
			t.Errorf("exit is %+v", exit)
		}
	}
	if _, err := p.Recover(t.Context(), b.spec, json.RawMessage(`{"v":99}`)); err == nil || errors.Is(err, provider.ErrGone) {
		t.Errorf("recover of a handle from the future: %v", err)
	}
}

// injuries makes machines sick. Whatever happens, they end within the patience of the suite and leave nothing.
func injuries(t *testing.T, p provider.Provider, env *Env) {
	for _, injury := range env.Injuries {
		t.Run(injury.Name, func(t *testing.T) {
			b := start(t, p, env.Spec(t, shard.Resources{}))
			_, sleeper, err := b.begin(guest.ExecSpec{Argv: guest.Strings{"sleep", "1000"}})
			if err != nil {
				t.Fatal(err)
			}
			injury.Do(t, b.inst)
			if !injury.Ends {
				ctx, cancel := context.WithTimeout(t.Context(), patience)
				defer cancel()
				if err := b.inst.Kill(ctx); err != nil {
					t.Fatalf("kill: %v", err)
				}
			}
			if exit := b.ended(); exit.OOM || exit.Detail == "" {
				t.Errorf("exit is %+v", exit)
			}
			select {
			case <-sleeper.end:
				if sleeper.broken == nil {
					t.Errorf("the command ended with %+v", sleeper.exit)
				}
			case <-time.After(patience):
				t.Error("the command's stream hangs")
			}
			b.remove()
			if traces := env.Traces(b.spec); len(traces) != 0 {
				t.Errorf("left on the host: %q", traces)
			}
			b = start(t, p, b.spec)
			b.sh("true")
		})
	}
}

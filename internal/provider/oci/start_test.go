//go:build linux

package oci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/provider"
)

// programs finds what make puts into bin/, and the host's runc.
func programs(t testing.TB) Programs {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	bin := filepath.Join(filepath.Dir(file), "..", "..", "..", "bin")
	p := Programs{Init: find([]string{bin}, "shard-init"), Runsc: find([]string{bin}, "shard-runsc"), Runc: find([]string{bin}, "runc")}
	if p.Runc == "" {
		p.Runc, _ = exec.LookPath("runc")
	}
	return p
}

// open makes a provider with directories and a parent group of its own, and skips where it does not work.
func open(t testing.TB, name string) *OCI {
	t.Helper()
	found := programs(t)
	group := fmt.Sprintf("shard-test-%08x", rand.Uint32())
	cgroups, err := cgroup.Open(group)
	if err != nil {
		t.Skipf("no control groups: %v", err)
	}
	run, err := os.MkdirTemp("", "shard-run-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		err := cgroups.Sweep(ctx, func(string) bool { return false })
		if err := errors.Join(err, cgroups.Close(), os.Remove(run)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("leftovers: %v", err)
		}
	})
	o := Options{Runtime: found.Runc, Init: found.Init, RunDir: run, Cgroups: cgroups, Log: slog.New(slog.NewTextHandler(t.Output(), nil))}
	if name == GVisor {
		o.Runtime = found.Runsc
	}
	p, err := New(name, o)
	if err != nil {
		t.Fatal(err)
	}
	if report := p.Probe(t.Context()); !report.Available {
		t.Skip(report.Reason)
	}
	return p
}

func eachFlavour(t *testing.T, test func(t *testing.T, p *OCI)) {
	for _, name := range []string{Runc, GVisor} {
		t.Run(name, func(t *testing.T) { test(t, open(t, name)) })
	}
}

// machine starts an empty machine and removes it at the end.
func machine(t testing.TB, p *OCI, spec provider.Spec) *Instance {
	t.Helper()
	dir := t.TempDir()
	if spec.ID == "" {
		spec.ID = fmt.Sprintf("test-box-%04x", rand.Uint32()&0xffff)
	}
	spec.Hostname, spec.Root, spec.Dir = spec.ID, filepath.Join(dir, "root"), dir
	if err := os.Mkdir(spec.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	i, err := p.Start(t.Context(), spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(t, i.(*Instance)) })
	return i.(*Instance)
}

func remove(t testing.TB, i *Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := errors.Join(i.Kill(ctx), i.p.Destroy(ctx, i.spec), i.Close()); err != nil {
		t.Error(err)
	}
}

func greet(t testing.TB, i *Instance) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	conn, err := i.Dial(ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := hello(ctx, conn); err != nil {
		t.Fatal(err)
	}
}

// BenchmarkStart is Start until the agent answers, and Kill until nothing is left.
func BenchmarkStart(b *testing.B) {
	for _, name := range []string{Runc, GVisor} {
		b.Run(name, func(b *testing.B) {
			p := open(b, name)
			var answered, removed []time.Duration
			for b.Loop() {
				begin := time.Now()
				i := machine(b, p, provider.Spec{})
				greet(b, i)
				answered = append(answered, time.Since(begin))
				begin = time.Now()
				remove(b, i)
				removed = append(removed, time.Since(begin))
			}
			report := func(what string, d []time.Duration) {
				slices.Sort(d)
				b.ReportMetric(float64(d[len(d)/2].Microseconds())/1000, what+"-p50-ms")
				b.ReportMetric(float64(d[len(d)*9/10].Microseconds())/1000, what+"-p90-ms")
			}
			report("start", answered)
			report("remove", removed)
		})
	}
}

func TestProbe(t *testing.T) {
	eachFlavour(t, func(t *testing.T, p *OCI) {
		if r := p.Probe(t.Context()); !r.Available || r.Version == "" || r.Reason != "" {
			t.Errorf("probe says %+v", r)
		}
		for _, spoil := range []func(*Options){
			func(o *Options) { o.Runtime = "" },
			func(o *Options) { o.Init = "" },
			func(o *Options) { o.Cgroups = nil },
			func(o *Options) { o.Runtime = "/bin/true" },
			func(o *Options) { o.Init = "/bin/busybox" },
		} {
			q := &OCI{flavour: p.flavour, opt: p.opt}
			spoil(&q.opt)
			if r := q.Probe(t.Context()); r.Available || r.Reason == "" {
				t.Errorf("probe says %+v of what cannot work", r)
			}
		}
	})
}

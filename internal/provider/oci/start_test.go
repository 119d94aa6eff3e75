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
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
	"github.com/useshards/shard/internal/provider/providertest"
	"github.com/useshards/shard/internal/testenv"
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
	o := Options{Runtime: found.Runc, Init: found.Init, RunDir: run, Cgroups: cgroups, Log: slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))}
	if name == shard.ProviderGVisor {
		o.Runtime = found.Runsc
	}
	p, err := New(name, o)
	if err != nil {
		t.Fatal(err)
	}
	if report := p.Probe(t.Context()); !report.Available {
		t.Skip(report.Reason)
	}
	if pausing, ok := p.(pauser); ok {
		return pausing.OCI
	}
	return p.(*OCI)
}

func eachFlavour(t *testing.T, test func(t *testing.T, p *OCI)) {
	for _, name := range []string{shard.ProviderRunc, shard.ProviderGVisor} {
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

// floor is the time that the runtime alone needs from its start until the agent answers, with everything of ours made
// ready beforehand.
func floor(b *testing.B, p *OCI) time.Duration {
	b.Helper()
	dir := b.TempDir()
	spec := provider.Spec{ID: "floor-box-0000", Hostname: "floor", Root: filepath.Join(dir, "root"), Dir: dir}
	group, err := p.opt.Cgroups.Create(spec.ID, p.flavour.limits(spec.Resources))
	if err != nil {
		b.Fatal(err)
	}
	i := &Instance{p: p, spec: spec, group: group, done: make(chan struct{})}
	defer remove(b, i)
	described, err := bundle(p.flavour, spec, p.opt.Init, group.OCIPath())
	if err != nil {
		b.Fatal(err)
	}
	if err := errors.Join(os.Mkdir(spec.Root, 0o755), os.Mkdir(p.stateDir(spec), 0o700), writeBundle(filepath.Join(dir, bundleName), described)); err != nil {
		b.Fatal(err)
	}
	stdin, err := p.flavour.channel(i)
	if err != nil {
		b.Fatal(err)
	}
	defer stdin.Close()
	cmd := p.command(b.Context(), spec, "run", "--detach", "--bundle", filepath.Join(dir, bundleName), runtimeID)
	cmd.Stdin = stdin
	begin := time.Now()
	if err := group.Start(cmd); err != nil {
		b.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		b.Fatal(err)
	}
	greet(b, i)
	took := time.Since(begin)
	close(i.done) // nobody watches this one
	return took
}

// BenchmarkStart is Start until the agent answers beside the runtime's own share of it, and Kill until nothing is left.
func BenchmarkStart(b *testing.B) {
	for _, name := range []string{shard.ProviderRunc, shard.ProviderGVisor} {
		b.Run(name, func(b *testing.B) {
			p := open(b, name)
			var alone, answered, removed []time.Duration
			for b.Loop() {
				alone = append(alone, floor(b, p))
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
			report("floor", alone)
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

func TestConformance(t *testing.T) {
	for _, name := range []string{shard.ProviderRunc, shard.ProviderGVisor} {
		t.Run(name, func(t *testing.T) {
			providertest.Run(t, func(t *testing.T) (provider.Provider, *providertest.Env) {
				p := open(t, name)
				return p.whole(), environment(p)
			})
		})
	}
}

// TestOrphanedStart destroys a machine whose start is under way in a daemon that is no more.
func TestOrphanedStart(t *testing.T) {
	eachFlavour(t, func(t *testing.T, p *OCI) {
		env := environment(p)
		for delay := time.Duration(0); delay < 100*time.Millisecond; delay += 30 * time.Millisecond {
			spec := env.Spec(t, shard.Resources{})
			ended := make(chan error)
			go func() {
				i, err := p.Start(context.WithoutCancel(t.Context()), spec)
				if err == nil {
					err = i.Close()
				}
				ended <- err
			}()
			time.Sleep(delay)
			// Another provider: it shares nothing with the first but the host.
			destroy := func() error {
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				return env.Reopen(t).Destroy(ctx, spec)
			}
			if err := destroy(); err != nil {
				t.Errorf("after %v: %v", delay, err)
			}
			<-ended // it may have made its group after Destroy looked; here, unlike after a kill, it goes on
			if err := destroy(); err != nil {
				t.Errorf("after %v, again: %v", delay, err)
			}
			if traces := env.Traces(spec); len(traces) != 0 {
				t.Errorf("after %v: left on the host: %q", delay, traces)
			}
		}
	})
}

// TestUpgradeWhilePaused: what a pause saved goes on when shard was installed anew meanwhile, with other programs in its place.
func TestUpgradeWhilePaused(t *testing.T) {
	eachFlavour(t, func(t *testing.T, p *OCI) {
		pausing, ok := p.whole().(provider.Pauser)
		if !ok {
			t.Skip("does not pause")
		}
		for _, shared := range []string{"", filepath.Join(t.TempDir(), "shared")} {
			program := filepath.Join(t.TempDir(), "shard-init")
			if err := copyProgram(p.opt.Init, program); err != nil {
				t.Fatal(err)
			}
			q := &OCI{flavour: p.flavour, opt: p.opt}
			q.opt.Init, q.opt.Shared = program, shared
			pausing = q.whole().(provider.Pauser)
			i := machine(t, q, provider.Spec{})
			token := [guest.TokenSize]byte{1}
			answers := func(i *Instance) {
				t.Helper()
				ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
				defer cancel()
				conn, err := i.Dial(ctx)
				if err != nil {
					t.Fatal(err)
				}
				session, err := guest.Connect(ctx, conn, token)
				if err != nil {
					t.Fatal(err)
				}
				if err := errors.Join(session.Call(ctx, guest.OpPing, nil, nil), session.Close()); err != nil {
					t.Fatal(err)
				}
			}
			answers(i)
			saved := t.TempDir()
			if err := pausing.Pause(t.Context(), i, saved, func() error { return nil }); err != nil {
				t.Fatal(err)
			}
			if err := errors.Join(q.Destroy(t.Context(), i.spec), i.Close()); err != nil {
				t.Fatal(err)
			}
			// Written over where it stands, which is the worst way.
			if err := copyProgram("/bin/busybox", program); err != nil {
				t.Fatal(err)
			}
			again, err := pausing.Resume(t.Context(), i.spec, saved)
			if err != nil {
				t.Fatal(err)
			}
			answers(again.(*Instance))
			remove(t, again.(*Instance))
		}
	})
}

// environment says how the suite finds its way around these providers.
func environment(p *OCI) *providertest.Env {
	env := &providertest.Env{
		Spec: func(t testing.TB, r shard.Resources) provider.Spec {
			dir := t.TempDir()
			spec := provider.Spec{ID: fmt.Sprintf("test-box-%04x", rand.Uint32()&0xffff), Root: filepath.Join(dir, "root"),
				Dir: filepath.Join(dir, "dir"), Netns: network(t), Resources: r}
			spec.Hostname = spec.ID
			if err := errors.Join(os.Mkdir(spec.Root, 0o755), os.Mkdir(spec.Dir, 0o700)); err != nil {
				t.Fatal(err)
			}
			for _, e := range testenv.BusyboxEntries(t) {
				place(t, spec.Root, e)
			}
			return spec
		},
		Put: func(t testing.TB, spec provider.Spec, name string, body []byte) {
			place(t, spec.Root, testenv.Entry{Name: name, Body: string(body), Mode: 0o755})
		},
		Reopen: func(t testing.TB) provider.Provider {
			again, err := New(p.Name(), p.opt)
			if err != nil {
				t.Fatal(err)
			}
			return again
		},
		Traces: func(spec provider.Spec) (found []string) {
			h := testenv.Observe(spec.ID)
			found = slices.Concat(h.Cgroups, h.Processes, h.Loops)
			for _, m := range h.Mounts {
				if m != spec.Netns {
					found = append(found, "mount "+m)
				}
			}
			if _, err := os.Stat(p.stateDir(spec)); err == nil {
				found = append(found, p.stateDir(spec))
			}
			return found
		},
		Parts: func(spec provider.Spec) map[string]int {
			parts := make(map[string]int)
			lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
			for _, at := range lines {
				line, _ := os.ReadFile(at)
				args := strings.Split(string(line), "\x00")
				if !strings.Contains(string(line), spec.ID) {
					continue
				}
				pid, _ := strconv.Atoi(strings.Split(at, "/")[2])
				switch {
				case args[0] == "runsc-sandbox":
					parts["main"] = pid
				case args[0] == "runsc-gofer":
					parts["helper"] = pid
				case slices.Contains(args, "save") || slices.Contains(args, "restore"):
					parts["program"] = pid
				}
			}
			return parts
		},
		SharedKernel: p.Name() == shard.ProviderRunc,
		ShowsBounds:  p.Name() == shard.ProviderGVisor,
	}
	signal := func(of func(handle) int, s unix.Signal) func(testing.TB, provider.Instance) {
		return func(t testing.TB, i provider.Instance) {
			if err := unix.Kill(of(i.(*Instance).handle), s); err != nil {
				t.Fatal(err)
			}
		}
	}
	first := func(h handle) int { return h.Main.PID }
	env.Injuries = []providertest.Injury{
		{Name: "main process killed", Do: signal(first, unix.SIGKILL), Ends: true},
		{Name: "main process stopped", Do: signal(first, unix.SIGSTOP)},
	}
	if p.Name() == shard.ProviderGVisor {
		gofer := func(h handle) int { return h.Helpers[0].PID }
		env.Injuries = append(env.Injuries,
			providertest.Injury{Name: "gofer killed", Do: signal(gofer, unix.SIGKILL), Ends: true},
			providertest.Injury{Name: "gofer stopped", Do: signal(gofer, unix.SIGSTOP)},
			providertest.Injury{Name: "sentry and gofer stopped", Do: func(t testing.TB, i provider.Instance) {
				signal(gofer, unix.SIGSTOP)(t, i)
				signal(first, unix.SIGSTOP)(t, i)
			}},
		)
	}
	return env
}

// place puts one entry of an image into a root.
func place(t testing.TB, root string, e testenv.Entry) {
	t.Helper()
	at := filepath.Join(root, e.Name)
	var err error
	switch mode := fs.FileMode(e.Mode) & 0o777; {
	case e.Link != "":
		err = os.Symlink(e.Link, at)
	case strings.HasSuffix(e.Name, "/"):
		if mode == 0 {
			mode = 0o755
		}
		err = errors.Join(os.MkdirAll(at, mode), os.Chmod(at, mode|fs.ModeSticky*fs.FileMode(e.Mode>>9&1)))
	default:
		if mode == 0 {
			mode = 0o644
		}
		err = os.WriteFile(at, []byte(e.Body), mode)
	}
	if err == nil {
		err = os.Lchown(at, e.UID, e.GID)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// network makes a namespace with lo up, at a path that the test's end removes.
func network(t testing.TB) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "netns")
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	made := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with this goroutine
		made <- func() error {
			if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
				return err
			}
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			lo, err := unix.NewIfreq("lo")
			if err != nil {
				return err
			}
			lo.SetUint16(unix.IFF_UP)
			if err := unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, lo); err != nil {
				return err
			}
			return unix.Mount(fmt.Sprintf("/proc/self/task/%d/ns/net", unix.Gettid()), path, "", unix.MS_BIND, "")
		}()
	}()
	if err := <-made; err != nil {
		t.Fatalf("make a network namespace: %v", err)
	}
	t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	return path
}

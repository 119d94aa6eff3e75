//go:build linux

package cgroup

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// helperEnv makes the test binary do one thing inside a group instead of testing.
const helperEnv = "SHARD_CGROUP_HELPER"

func TestMain(m *testing.M) {
	if what := os.Getenv(helperEnv); what != "" {
		helper(what)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

func helper(what string) {
	verb, arg, _ := strings.Cut(what, " ")
	switch verb {
	case "groups": // where was I born?
		b, _ := os.ReadFile("/proc/self/cgroup")
		os.Stdout.Write(b)
	case "hold": // until killed
		fmt.Println("here")
		time.Sleep(5 * time.Minute)
	case "alloc": // touch arg MiB
		mib, _ := strconv.Atoi(arg)
		b := make([]byte, mib<<20)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		fmt.Println("done", len(b))
	case "keep": // touch arg MiB until a line comes in, then give them back, until killed
		mib, _ := strconv.Atoi(arg)
		b, _ := unix.Mmap(-1, 0, mib<<20, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		for i := 0; i < len(b); i += 4096 {
			b[i] = 1
		}
		signals := make(chan os.Signal, 1)
		signal.Notify(signals, unix.SIGUSR1)
		fmt.Println("here")
		<-signals
		_ = unix.Munmap(b)
		time.Sleep(5 * time.Minute)
	case "child": // a child touches too much, we live on
		err := helperCommand("alloc " + arg).Run()
		fmt.Println("child:", err)
		time.Sleep(5 * time.Minute)
	case "bomb":
		fmt.Println("here")
		for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); {
			if helperCommand("bomb").Start() != nil {
				time.Sleep(time.Millisecond)
			}
		}
	case "spin":
		fmt.Println("here")
		for range 4 {
			go func() {
				for {
				}
			}()
		}
		time.Sleep(5 * time.Minute)
	}
}

func helperCommand(what string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), helperEnv+"="+what)
	return cmd
}

// newManager opens a parent group of the test's own and demands that nothing is left of it.
func newManager(t *testing.T) *Manager {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("control groups need root")
	}
	parent := fmt.Sprintf("shard-test-%d-%s", os.Getpid(), strings.ToLower(strings.ReplaceAll(t.Name(), "/", "-")))
	m, err := Open(parent)
	if err != nil {
		t.Skip("this host cannot bound groups: ", err)
	}
	cleanUp(t, m)
	return m
}

func cleanUp(t *testing.T, m *Manager) {
	t.Cleanup(func() {
		if err := m.Sweep(context.Background(), func(string) bool { return false }); err != nil {
			t.Error("sweep:", err)
		}
		if err := m.Close(); err != nil {
			t.Error("close:", err)
		}
		for _, base := range m.fs.bases() {
			if _, err := os.Stat(base); !errors.Is(err, fs.ErrNotExist) {
				t.Errorf("%s is left: %v", base, err)
			}
		}
	})
}

// start runs a helper in the group and waits for its first line.
func start(t *testing.T, g *Group, what string) (cmd *exec.Cmd, line string) {
	t.Helper()
	cmd = helperCommand(what)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	line, _ = bufio.NewReader(out).ReadString('\n')
	return cmd, strings.TrimSpace(line)
}

func create(t *testing.T, m *Manager, id string, l Limits) *Group {
	t.Helper()
	g, err := m.Create(id, l)
	if err != nil {
		t.Fatal(err)
	}
	return g
}

func bounded(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(30 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("never: ", what)
		}
	}
}

func TestLife(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	if _, err := m.Open("a"); !errors.Is(err, fs.ErrNotExist) {
		t.Error("a group that does not exist opens:", err)
	}
	g := create(t, m, "a", Limits{})
	if pids, err := g.Procs(); err != nil || len(pids) != 0 {
		t.Error(pids, err)
	}
	if _, err := m.Create("a", Limits{}); err != nil {
		t.Error("an empty leftover is not replaced:", err)
	}
	cmd, _ := start(t, g, "hold")
	if _, err := m.Create("a", Limits{}); !errors.Is(err, ErrBusy) {
		t.Error("a group in use is replaced:", err)
	}
	again, err := m.Open("a")
	if err != nil {
		t.Fatal(err)
	}
	if pids, err := again.Procs(); err != nil || !slices.Equal(pids, []int{cmd.Process.Pid}) {
		t.Error(pids, err)
	}
	if s, err := again.Stats(); err != nil || s.MemoryBytes <= 0 || s.PIDs < 1 || s.CPUNanos <= 0 {
		t.Errorf("%+v %v", s, err)
	}
	for range 3 {
		if err := m.Destroy(ctx, "a"); err != nil {
			t.Fatal(err)
		}
	}
	if err := cmd.Wait(); err == nil {
		t.Error("the process was not killed")
	}
	if err := g.Start(helperCommand("hold")); !errors.Is(err, fs.ErrNotExist) {
		t.Error("start in a group that is gone:", err)
	}
	if err := g.Kill(ctx); !errors.Is(err, fs.ErrNotExist) {
		t.Error("kill of a group that is gone:", err)
	}
}

func TestNames(t *testing.T) {
	m := newManager(t)
	for _, bad := range []string{"", ".", "..", "a/b", "/a", "a\x00", "a\n", strings.Repeat("a", 201)} {
		if _, err := Open(bad); err == nil {
			t.Errorf("Open(%q) passes", bad)
		}
		if _, err := m.Create(bad, Limits{}); err == nil {
			t.Errorf("Create(%q) passes", bad)
		}
		if err := m.Destroy(t.Context(), bad); err == nil {
			t.Errorf("Destroy(%q) passes", bad)
		}
	}
}

func TestBornInside(t *testing.T) {
	m := newManager(t)
	g := create(t, m, "a", Limits{})
	cmd := helperCommand("groups")
	var out strings.Builder
	cmd.Stdout = &out
	if err := g.Start(cmd); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	want := needed
	if m.Version() == 2 {
		want = []string{""}
	} else if _, ok := m.fs.(*v1).of["freezer"]; ok {
		want = append(slices.Clone(want), "freezer")
	}
	for line := range strings.Lines(out.String()) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		for c := range strings.SplitSeq(f[1], ",") {
			if i := slices.Index(want, c); i >= 0 && f[2] == g.OCIPath() {
				want = slices.Delete(slices.Clone(want), i, i+1)
			}
		}
	}
	if len(want) > 0 {
		t.Errorf("not in %s for %q:\n%s", g.OCIPath(), want, out.String())
	}
	// The thread that went in does not stay in, whichever it was, and the daemon's own groups are what they were.
	eventually(t, "the starting thread leaves", func() bool {
		for _, base := range m.fs.members() {
			if b, err := os.ReadFile(filepath.Join(base, "a", "cgroup.procs")); err != nil || len(b) > 0 {
				return false
			}
		}
		return true
	})
}

func TestManyStartsAtOnce(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	var wg sync.WaitGroup
	for i := range 16 {
		wg.Go(func() {
			id := fmt.Sprint("g", i)
			g, err := m.Create(id, Limits{PIDs: 64})
			if err != nil {
				t.Error(err)
				return
			}
			for range 2 {
				cmd := exec.Command("/bin/sleep", "300")
				if err := g.Start(cmd); err != nil {
					t.Error(err)
					return
				}
				defer func() { _ = cmd.Wait() }()
			}
			if pids, err := g.Procs(); err != nil || len(pids) != 2 {
				t.Error(pids, err)
			}
			if err := m.Destroy(ctx, id); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
}

func TestOutOfMemory(t *testing.T) {
	for _, what := range []string{"alloc 512", "child 512"} {
		t.Run(strings.Fields(what)[0], func(t *testing.T) {
			m, ctx := newManager(t), bounded(t)
			g := create(t, m, "a", Limits{MemoryMax: 64 << 20})
			w, err := g.OOM()
			if err != nil {
				t.Fatal(err)
			}
			cmd := helperCommand(what)
			if err := g.Start(cmd); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }()
			select {
			case <-w.C:
			case <-ctx.Done():
				t.Fatal("no event")
			}
			if w.Kills() < 1 {
				t.Error("the event came without a kill")
			}
			if err := m.Destroy(ctx, "a"); err != nil {
				t.Error(err)
			}
			if err := cmd.Wait(); err == nil {
				t.Error("the program ended well")
			}
			if err := w.Close(); err != nil {
				t.Error(err)
			}
			if w.Kills() < 1 {
				t.Error("the count is lost with the group")
			}
		})
	}
}

// A bound that is raised can be used, and one that is lowered below what is used ends nothing: it holds as soon as it can.
func TestBound(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	own := Limits{MemoryMax: 64 << 20, MemoryHigh: 48 << 20, PIDs: 200}
	raised := Limits{MemoryMax: 512 << 20, MemoryHigh: 400 << 20, PIDs: 300}
	g := create(t, m, "a", own)
	w, err := g.OOM()
	if err != nil {
		t.Fatal(err)
	}
	if settled, err := g.Bound(raised); err != nil || !settled {
		t.Fatalf("raised: %t, %v", settled, err)
	}
	cmd, line := start(t, g, "keep 200")
	if line != "here" {
		t.Fatalf("the program says %q", line)
	}
	if settled, err := g.Bound(own); err != nil || settled {
		t.Fatalf("lowered below what is used: %t, %v", settled, err)
	}
	if pids, err := g.Procs(); err != nil || len(pids) != 1 || w.Kills() > 0 {
		t.Fatalf("processes %v, %v, %d killed", pids, err, w.Kills())
	}
	if err := cmd.Process.Signal(unix.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the bound holds", func() bool {
		settled, err := g.Bound(own)
		if err != nil {
			t.Fatal(err)
		}
		return settled
	})
	hungry := helperCommand("alloc 200")
	if err := g.Start(hungry); err != nil {
		t.Fatal(err)
	}
	_ = hungry.Wait()
	select {
	case <-w.C:
	case <-ctx.Done():
		t.Error("past the bound nothing is killed")
	}
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

func TestWatchEnds(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	g := create(t, m, "a", Limits{MemoryMax: 64 << 20})
	w, err := g.OOM()
	if err != nil {
		t.Fatal(err)
	}
	cmd, line := start(t, g, "alloc 16")
	if err := cmd.Wait(); err != nil || line != fmt.Sprint("done ", 16<<20) {
		t.Errorf("16 MiB do not fit in 64: %q %v", line, err)
	}
	if err := m.Destroy(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if m.Version() == 1 { // v2 keeps silent about removal
		select {
		case _, more := <-w.C:
			if more {
				t.Error("an event without a kill")
			}
		case <-ctx.Done():
			t.Error("the watch does not end with the group")
		}
	}
	if err := w.Close(); err != nil || w.Kills() != 0 {
		t.Error(err, w.Kills())
	}
	if w, err := g.OOM(); err == nil {
		w.Close()
		t.Error("a watch of a group that is gone")
	}
}

func TestForkBomb(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	const most = 120 // a Go helper has about 6 threads
	g := create(t, m, "a", Limits{PIDs: most, CPUs: 1})
	start(t, g, "bomb")
	eventually(t, "the bomb reaches the bound", func() bool {
		s, err := g.Stats()
		if err != nil || s.PIDs > most {
			t.Fatal(s, err)
		}
		return s.PIDs > most-10
	})
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if pids, err := g.Procs(); err != nil || len(pids) != 0 {
		t.Error(pids, err)
	}
}

func TestCPUQuota(t *testing.T) {
	m := newManager(t)
	g := create(t, m, "a", Limits{CPUs: 1})
	start(t, g, "spin")
	// Of a busy host's CPUs the group must get more than its quota to notice it.
	stat, weight := filepath.Join(m.dirs("a")[0], "cpu.stat"), filepath.Join(m.fs.bases()[0], "cpu.weight")
	most := int64(10000)
	if f, ok := m.fs.(*v1); ok {
		stat, weight, most = filepath.Join(f.of["cpu"], "a", "cpu.stat"), filepath.Join(f.of["cpu"], "cpu.shares"), 262144
	}
	if err := writeInt(weight, most); err != nil {
		t.Fatal(err)
	}
	var st unix.CPUSet
	if unix.SchedGetaffinity(0, &st) == nil && st.Count() < 2 {
		t.Skip("one CPU cannot exceed a quota of one")
	}
	eventually(t, "the quota is felt", func() bool {
		b, err := os.ReadFile(stat)
		if err != nil {
			t.Fatal(err)
		}
		return keyed(b, "nr_throttled") > 3
	})
}

func TestDestroyFrozen(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	f, ok := m.fs.(*v1)
	if !ok || f.of["freezer"] == "" {
		t.Skip("no v1 freezer: elsewhere frozen processes die by themselves")
	}
	g := create(t, m, "a", Limits{})
	cmd, _ := start(t, g, "hold")
	if err := write(f.file("freezer", "a", "state"), "FROZEN"); err != nil {
		t.Fatal(err)
	}
	if err := m.Destroy(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Wait()
}

// TestHalfAGroup: what a crash of the daemon or of a runtime can leave is swept, processes and nested groups included.
func TestHalfAGroup(t *testing.T) {
	m, ctx := newManager(t), bounded(t)
	f, ok := m.fs.(*v1)
	if !ok {
		t.Skip("v2 groups have one directory")
	}
	keep := create(t, m, "keep", Limits{})
	kept, _ := start(t, keep, "hold")
	g := create(t, m, "a", Limits{})
	lost, _ := start(t, g, "hold")
	// The process is now in cpu only, and pids and memory have lost their directories.
	for _, c := range []string{"memory", "pids"} {
		if err := writeInt(filepath.Join(filepath.Dir(f.of[c]), "cgroup.procs"), int64(lost.Process.Pid)); err != nil {
			t.Fatal(err)
		}
		eventually(t, "rmdir", func() bool { return os.Remove(filepath.Join(f.of[c], "a")) == nil })
	}
	nested := filepath.Join(f.all[len(f.all)-1], "a", "x", "y") // where only a runtime would
	if err := os.MkdirAll(nested, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.Sweep(ctx, func(id string) bool { return id == "keep" }); err != nil {
		t.Fatal(err)
	}
	if err := lost.Wait(); err == nil {
		t.Error("the process lives")
	}
	if pids, err := keep.Procs(); err != nil || !slices.Equal(pids, []int{kept.Process.Pid}) {
		t.Error(pids, err)
	}
	if err := m.Close(); err != nil { // groups in use stay
		t.Fatal(err)
	}
	if _, err := m.Open("keep"); err != nil {
		t.Error(err)
	}
}

// TestFailureLeavesNothing: a bound that the kernel refuses.
func TestFailureLeavesNothing(t *testing.T) {
	m := newManager(t)
	if _, err := m.Create("a", Limits{PIDs: 1 << 62}); err == nil {
		t.Fatal("a bound of 2^62 processes is accepted")
	}
	for _, dir := range m.dirs("a") {
		if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is left", dir)
		}
	}
}

func TestNoParentDeathSignal(t *testing.T) {
	m := newManager(t)
	g := create(t, m, "a", Limits{})
	cmd := helperCommand("hold")
	cmd.SysProcAttr = &unix.SysProcAttr{Pdeathsig: unix.SIGKILL}
	if err := g.Start(cmd); err == nil {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		t.Error("started")
	}
}

func TestParseMounts(t *testing.T) {
	const table = `22 1 0:21 / /proc rw - proc proc rw
33 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw,relatime shared:9 - cgroup cgroup rw,cpu,cpuacct
34 31 0:30 /docker/x /mnt/a\040b ro - cgroup cgroup rw,memory
35 31 0:31 / /sys/fs/cgroup/systemd rw - cgroup systemd rw,name=systemd
36 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw,nsdelegate
37 31 0:38 / /again rw,relatime - cgroup2 cgroup2 rw,nsdelegate
broken
38 31 0:38 / - cgroup
`
	mounts := parseMounts([]byte(table))
	var got []string
	for _, m := range mounts {
		got = append(got, fmt.Sprint(m.point, "|", m.v2, "|", strings.Join(m.controllers, "+")))
	}
	want := []string{"/sys/fs/cgroup/cpu,cpuacct|false|cpu+cpuacct", "/mnt/a b|false|memory",
		"/sys/fs/cgroup/systemd|false|name=systemd", "/sys/fs/cgroup/unified|true|"}
	if !slices.Equal(got, want) {
		t.Errorf("got %q\nwant %q", got, want)
	}
	if !hasV1(mounts, "memory") || hasV1(mounts, "pids") {
		t.Error("hasV1")
	}
	if _, err := openV1(mounts[:1], "x"); err == nil || !strings.Contains(err.Error(), "memory") {
		t.Error("a host without the memory controller:", err)
	}
}

func FuzzParseMounts(f *testing.F) {
	f.Add([]byte(`33 31 0:29 / /a\04 rw - cgroup cgroup rw,cpu`))
	f.Fuzz(func(t *testing.T, b []byte) {
		for _, m := range parseMounts(b) {
			if m.v2 && m.controllers != nil {
				t.Error(m)
			}
		}
	})
}

// BenchmarkStart compares the two ways into a v1 group: one thread of ours by "tasks", and the child by "cgroup.procs".
// The kernel is only slow for the first move after a pause, so each round waits outside the clock.
func BenchmarkStart(b *testing.B) {
	m, err := Open(fmt.Sprintf("shard-bench-%d", os.Getpid()))
	if err != nil {
		b.Skip(err)
	}
	defer m.Close()
	defer m.Destroy(context.Background(), "a")
	g, err := m.Create("a", Limits{})
	if err != nil {
		b.Fatal(err)
	}
	run := func(b *testing.B, start func(*exec.Cmd) error) {
		for b.Loop() {
			b.StopTimer()
			time.Sleep(100 * time.Millisecond)
			cmd := exec.Command("/bin/sleep", "300")
			b.StartTimer()
			err := start(cmd)
			b.StopTimer()
			if err != nil {
				b.Fatal(err)
			}
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			b.StartTimer()
		}
	}
	b.Run("inside", func(b *testing.B) { run(b, g.Start) })
	b.Run("outside", func(b *testing.B) { run(b, (*exec.Cmd).Start) })
	b.Run("procs", func(b *testing.B) {
		run(b, func(cmd *exec.Cmd) error {
			err := cmd.Start()
			f, ok := m.fs.(*v1)
			if !ok || err != nil {
				return err
			}
			for _, base := range f.joined {
				err = errors.Join(err, writeInt(filepath.Join(base, "a", "cgroup.procs"), int64(cmd.Process.Pid)))
			}
			return err
		})
	})
}

// TestVanished: systemd on cgroup v1 removes empty groups that are not its own.
func TestVanished(t *testing.T) {
	m := newManager(t)
	f, ok := m.fs.(*v1)
	if !ok {
		t.Skip("only on v1 are groups taken away")
	}
	vanish := func(id string) {
		t.Helper()
		for _, c := range []string{"cpu", "cpuacct"} {
			for _, dir := range []string{filepath.Join(f.of[c], id), f.of[c]} {
				if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
					t.Fatal(err)
				}
			}
		}
	}
	vanish("a")
	g := create(t, m, "a", Limits{CPUs: 1, PIDs: 64, MemoryMax: 64 << 20})
	vanish("a")
	cmd, _ := start(t, g, "hold")
	for _, base := range m.fs.members() {
		pids, err := procsBelow(filepath.Join(base, "a"))
		pids = slices.DeleteFunc(pids, func(pid int) bool { return pid == os.Getpid() }) // the thread that started it may not have ended yet
		if err != nil || !slices.Equal(pids, []int{cmd.Process.Pid}) {
			t.Errorf("%s: %v, %v", base, pids, err)
		}
	}
	if quota, err := readInt(f.file("cpu", "a", "cfs_quota_us")); err != nil || quota != cpuPeriod.Microseconds() {
		t.Errorf("quota %d, %v", quota, err)
	}
}

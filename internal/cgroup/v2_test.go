//go:build linux

package cgroup

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"
)

// fakeV2 is a directory tree with the names of a v2 hierarchy and no kernel behind it: it shows which files are written
// with what, and nothing more.
func fakeV2(t *testing.T) (top string) {
	t.Log("this is a fake directory tree, not a kernel")
	top = t.TempDir()
	put(t, filepath.Join(top, "cgroup.controllers"), "cpuset cpu io memory pids\n")
	put(t, filepath.Join(top, "cgroup.subtree_control"), "pids\n")
	put(t, filepath.Join(top, "p", "cgroup.subtree_control"), "")
	for _, name := range []string{"memory.max", "memory.high", "memory.swap.max", "memory.oom.group", "cpu.max", "pids.max", "cgroup.kill"} {
		put(t, filepath.Join(top, "p", "a", name), "")
	}
	put(t, filepath.Join(top, "p", "a", "memory.events"), "low 0\nhigh 0\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n")
	return top
}

func put(t *testing.T, path, text string) {
	t.Helper()
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
}

func got(t *testing.T, path string) string {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestV2FakeTreeLimits(t *testing.T) {
	top := fakeV2(t)
	f, err := openV2At(top, "p")
	if err != nil {
		t.Fatal(err)
	}
	if s := got(t, filepath.Join(top, "cgroup.subtree_control")); !strings.HasPrefix(s, "+cpu +memory") || strings.Contains(s, "+pids") {
		t.Errorf("the root hands down %q", s)
	}
	if s := got(t, filepath.Join(top, "p", "cgroup.subtree_control")); s != "+cpu +memory +pids" {
		t.Errorf("the parent hands down %q", s)
	}
	if err := f.limit("a", Limits{MemoryMax: 1 << 30, MemoryHigh: 1 << 29, CPUs: 2, PIDs: 100}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"memory.max": "1073741824", "memory.high": "536870912", "memory.swap.max": "0",
		"memory.oom.group": "1", "cpu.max": "200000 100000", "pids.max": "100"} {
		if s := got(t, filepath.Join(top, "p", "a", name)); s != want {
			t.Errorf("%s is %q, want %q", name, s, want)
		}
	}
	if err := os.Remove(filepath.Join(top, "p", "a", "memory.swap.max")); err != nil {
		t.Fatal(err)
	}
	if err := f.limit("a", Limits{MemoryMax: 1 << 30}); err != nil {
		t.Error("a kernel without swap:", err)
	}
	if err := f.kill("a"); err != nil || got(t, filepath.Join(top, "p", "a", "cgroup.kill")) != "1" {
		t.Error("kill:", err)
	}
	put(t, filepath.Join(top, "p", "a", "memory.current"), "1000\n")
	put(t, filepath.Join(top, "p", "a", "memory.stat"), "anon 1\ninactive_file 300\nactive_file 5\n")
	put(t, filepath.Join(top, "p", "a", "cpu.stat"), "usage_usec 12\nuser_usec 1\n")
	put(t, filepath.Join(top, "p", "a", "pids.current"), "3\n")
	if s, err := f.stats("a"); err != nil || s != (Stats{MemoryBytes: 700, CPUNanos: 12000, PIDs: 3}) {
		t.Error(s, err)
	}
}

func TestV2FakeTreeOOM(t *testing.T) {
	top := fakeV2(t)
	f, err := openV2At(top, "p")
	if err != nil {
		t.Fatal(err)
	}
	events := filepath.Join(top, "p", "a", "memory.events")
	w, err := f.oom("a")
	if err != nil {
		t.Fatal(err)
	}
	if err := write(events, "low 0\nhigh 9\nmax 0\noom 0\noom_kill 0\noom_group_kill 0\n"); err != nil {
		t.Fatal(err)
	}
	if err := write(events, "low 0\nhigh 9\nmax 0\noom 1\noom_kill 3\noom_group_kill 1\n"); err != nil {
		t.Fatal(err)
	}
	select {
	case <-w.C:
	case <-time.After(30 * time.Second):
		t.Fatal("no event")
	}
	if err := w.Close(); err != nil || w.Kills() != 3 {
		t.Error(err, w.Kills())
	}
	if _, more := <-w.C; more {
		t.Error("an event too many")
	}
}

func TestV2FakeTreeMissing(t *testing.T) {
	top := fakeV2(t)
	put(t, filepath.Join(top, "cgroup.controllers"), "hugetlb pids cpu")
	if _, err := openV2At(top, "p"); err == nil || !strings.Contains(err.Error(), "no memory controller") {
		t.Error(err)
	}
	if _, err := openV2(nil, "p"); err == nil {
		t.Error("no hierarchy at all")
	}
}

// TestV2KernelWithoutControllers runs on a real cgroup2 mount what needs no controller there: this is all that a host
// whose controllers are bound to v1 can prove.
func TestV2KernelWithoutControllers(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("control groups need root")
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	mounts := parseMounts(table)
	at := slices.IndexFunc(mounts, func(m mount) bool { return m.v2 })
	if at < 0 {
		t.Skip("no cgroup2 is mounted")
	}
	parent := fmt.Sprintf("shard-test-%d-v2", os.Getpid())
	base := filepath.Join(mounts[at].point, parent)
	if err := os.Mkdir(base, 0o755); err != nil {
		t.Skip("cannot make groups in cgroup2: ", err)
	}
	m := &Manager{parent: parent, fs: &v2{base: base, oci: "/" + parent}}
	cleanUp(t, m)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()

	g := create(t, m, "a", Limits{})
	for range 2 {
		cmd, _ := start(t, g, "hold")
		pid := cmd.Process.Pid
		if pids, err := g.Procs(); err != nil || !slices.Contains(pids, pid) {
			t.Error(pids, err)
		}
		if in := got(t, fmt.Sprintf("/proc/%d/cgroup", pid)); !strings.Contains(in, "0::/"+parent+"/a\n") {
			t.Errorf("born in %s", in)
		}
	}
	if _, err := m.Create("a", Limits{}); !errors.Is(err, ErrBusy) {
		t.Error(err)
	}
	if err := os.Mkdir(filepath.Join(base, "a", "nested"), 0o755); err != nil {
		t.Error(err)
	}
	if err := g.Kill(ctx); err != nil {
		t.Fatal(err)
	}
	if err := m.Destroy(ctx, "a"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(base, "a")); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

package testenv

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Host is what carries one of a set of marks on this machine, by kind: each entry says what and where.
type Host struct {
	Mounts, Loops, Processes, Cgroups []string
}

// Observe looks for everything on this host that names one of the marks: a daemon's root, its sandboxes' ids.
// Zombies are not counted: orphans are reaped by this machine's PID 1 when it gets to it.
func Observe(marks ...string) Host {
	var h Host
	marked := func(s string) bool {
		return slices.ContainsFunc(marks, func(m string) bool { return m != "" && strings.Contains(s, m) })
	}
	mounts, _ := os.ReadFile("/proc/self/mountinfo")
	for line := range strings.Lines(string(mounts)) {
		if marked(line) {
			if fields := strings.Fields(line); len(fields) > 4 {
				h.Mounts = append(h.Mounts, fields[4])
			}
		}
	}
	backing, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range backing {
		if at, _ := os.ReadFile(file); marked(string(at)) {
			h.Loops = append(h.Loops, strings.Split(file, "/")[3]+" "+strings.TrimSpace(string(at)))
		}
	}
	processes, _ := filepath.Glob("/proc/[0-9]*")
	for _, dir := range processes {
		if p, ok := process(dir, marked); ok {
			h.Processes = append(h.Processes, p)
		}
	}
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() && marked(path) {
			h.Cgroups = append(h.Cgroups, path)
			return fs.SkipDir
		}
		return nil
	})
	return h
}

// process describes the process of a /proc directory if something that it shows is marked.
func process(dir string, marked func(string) bool) (string, bool) {
	read := func(name string) string { b, _ := os.ReadFile(filepath.Join(dir, name)); return string(b) }
	stat := read("stat")
	_, state, _ := strings.Cut(stat, ") ")
	pid := filepath.Base(dir)
	if state == "" || state[0] == 'Z' || state[0] == 'X' || pid == fmt.Sprint(os.Getpid()) {
		return "", false
	}
	cmdline := strings.ReplaceAll(strings.TrimRight(read("cmdline"), "\x00"), "\x00", " ")
	cwd, _ := os.Readlink(filepath.Join(dir, "cwd"))
	for _, shown := range []string{cmdline, cwd, read("cgroup"), read("environ")} {
		if marked(shown) {
			return pid + " " + cmdline, true
		}
	}
	return "", false
}

// Empty says whether nothing was found.
func (h Host) Empty() bool {
	return len(h.Mounts)+len(h.Loops)+len(h.Processes)+len(h.Cgroups) == 0
}

func (h Host) String() string {
	var b strings.Builder
	for _, kind := range []struct {
		name  string
		found []string
	}{{"mount", h.Mounts}, {"loop device", h.Loops}, {"process", h.Processes}, {"cgroup", h.Cgroups}} {
		for _, f := range kind.found {
			fmt.Fprintf(&b, "%s: %s\n", kind.name, f)
		}
	}
	return b.String()
}

// clear ends and unmounts what a failed test left, so that it does not disturb the next one. Best effort.
func (h Host) clear() {
	for _, p := range h.Processes {
		var pid int
		if _, err := fmt.Sscan(p, &pid); err == nil {
			_ = unix.Kill(pid, unix.SIGKILL)
		}
	}
	for _, m := range slices.Backward(h.Mounts) {
		_ = unix.Unmount(m, unix.MNT_DETACH)
	}
	for _, c := range h.Cgroups {
		var dirs []string
		_ = filepath.WalkDir(c, func(path string, d fs.DirEntry, err error) error {
			if err == nil && d.IsDir() {
				dirs = append(dirs, path)
			}
			return nil
		})
		for _, dir := range slices.Backward(dirs) {
			_ = os.Remove(dir)
		}
	}
}

// CgroupProcesses are the processes in the cgroups that carry a mark, as this host numbers them.
func CgroupProcesses(mark string) []int {
	seen := make(map[int]bool)
	_ = filepath.WalkDir("/sys/fs/cgroup", func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() || !strings.Contains(path, mark) {
			return nil
		}
		b, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		for _, field := range strings.Fields(string(b)) {
			if pid, err := strconv.Atoi(field); err == nil {
				seen[pid] = true
			}
		}
		return nil
	})
	return slices.Sorted(maps.Keys(seen))
}

// Usage is what one process holds. Mounts counts those of its mount namespace; MemoryKiB is its resident set.
type Usage struct {
	Files, Threads, Children, Mounts int
	MemoryKiB                        int64
}

// UsageOf reads the usage of a process.
func UsageOf(pid int) Usage {
	dir := fmt.Sprintf("/proc/%d", pid)
	count := func(name string) int { entries, _ := os.ReadDir(filepath.Join(dir, name)); return len(entries) }
	lines := func(name string) int {
		b, _ := os.ReadFile(filepath.Join(dir, name))
		return strings.Count(string(b), "\n")
	}
	u := Usage{Files: count("fd"), Threads: count("task"), Mounts: lines("mountinfo")}
	tasks, _ := filepath.Glob(dir + "/task/*/children")
	for _, task := range tasks {
		b, _ := os.ReadFile(task)
		u.Children += len(strings.Fields(string(b)))
	}
	status, _ := os.ReadFile(filepath.Join(dir, "status"))
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			_, _ = fmt.Sscan(rest, &u.MemoryKiB)
		}
	}
	return u
}

// CPUTime is what processes and their ended children have used of the CPUs.
func CPUTime(pids []int) time.Duration {
	const tick = time.Second / 100 // USER_HZ, the same on every Linux
	var total time.Duration
	for _, pid := range pids {
		b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		_, rest, _ := strings.Cut(string(b), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 15 {
			continue
		}
		for _, f := range fields[11:15] { // utime, stime, cutime, cstime
			n, _ := strconv.ParseInt(f, 10, 64)
			total += time.Duration(n) * tick
		}
	}
	return total
}

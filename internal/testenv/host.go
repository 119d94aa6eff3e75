package testenv

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

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

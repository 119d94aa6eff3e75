//go:build linux

package cgroup

import (
	"os"
	"path/filepath"
	"strings"
)

// Warm moves the daemon to the group in which it already is, and so makes the kernel wait for the grace period (10–20 ms)
// that the first of several moves in short order costs. A runtime that moves its own processes soon after, as runc must,
// then does not wait. Call it beside other work; that it fails is no harm.
func (m *Manager) Warm() {
	table, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		return
	}
	v1, _ := m.fs.(*v1)
	for line := range strings.Lines(string(table)) {
		// 8:pids:/system.slice/shard.service, or 0::/path on v2
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(fields) != 3 {
			continue
		}
		var base string
		switch {
		case v1 != nil && fields[1] == "pids":
			base = v1.of["pids"]
		case v1 == nil && fields[1] == "":
			base = m.fs.bases()[0]
		default:
			continue
		}
		_ = write(filepath.Join(filepath.Dir(base), fields[2], "cgroup.procs"), "0")
		return
	}
}

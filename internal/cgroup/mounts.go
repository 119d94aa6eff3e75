//go:build linux

package cgroup

import (
	"slices"
	"strings"
)

// mount is one mounted hierarchy.
type mount struct {
	point       string
	v2          bool
	controllers []string // v1 only; name=systemd and the like included
}

// parseMounts finds the cgroup mounts in the text of /proc/self/mountinfo.
func parseMounts(table []byte) []mount {
	var list []mount
	for line := range strings.Lines(string(table)) {
		// 33 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu,cpuacct
		left, right, ok := strings.Cut(strings.TrimSpace(line), " - ")
		l, r := strings.Fields(left), strings.Fields(right)
		if !ok || len(l) < 6 || len(r) < 3 {
			continue
		}
		m := mount{point: unescape(l[4]), v2: r[0] == "cgroup2"}
		if !m.v2 && r[0] != "cgroup" {
			continue
		}
		if !m.v2 {
			for o := range strings.SplitSeq(r[2], ",") {
				if o != "rw" && o != "ro" {
					m.controllers = append(m.controllers, o)
				}
			}
		}
		// A hierarchy that is mounted a second time is the same hierarchy.
		if !slices.ContainsFunc(list, func(o mount) bool { return o.v2 == m.v2 && slices.Equal(o.controllers, m.controllers) }) {
			list = append(list, m)
		}
	}
	return list
}

func hasV1(mounts []mount, controller string) bool {
	return slices.ContainsFunc(mounts, func(m mount) bool { return !m.v2 && slices.Contains(m.controllers, controller) })
}

// unescape undoes how the kernel writes what would part its fields or lines.
var unescape = strings.NewReplacer(`\040`, " ", `\011`, "\t", `\012`, "\n", `\134`, `\`).Replace

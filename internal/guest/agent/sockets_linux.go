package agent

import (
	"os"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// strandable names a process with a socket in a network namespace of its own, "" when there is none. gVisor saves such sockets but
// does not bring them back: those that listen are deaf, some end the sandbox when they are used, and a TCP listener among them
// keeps the whole sandbox from being restored. Sockets of one file system or one pair are well.
func strandable() string {
	const proc = "/proc/"
	own, err := os.Readlink(proc + "self/ns/net")
	if err != nil {
		return ""
	}
	var well map[string]bool
	pids, _ := os.ReadDir(proc)
	for _, pid := range pids {
		if _, err := strconv.Atoi(pid.Name()); err != nil {
			continue
		}
		tasks, _ := os.ReadDir(proc + pid.Name() + "/task")
		for _, task := range tasks {
			of := proc + pid.Name() + "/task/" + task.Name()
			if at, err := os.Readlink(of + "/ns/net"); err != nil || at == own {
				continue // it has ended
			}
			if well == nil {
				well = unixSockets()
			}
			fds, err := os.ReadDir(of + "/fd")
			hidden := os.IsPermission(err) // another user's: most likely it has some
			for _, fd := range fds {
				to, err := os.Readlink(of + "/fd/" + fd.Name())
				inode, socket := strings.CutPrefix(to, "socket:[")
				hidden = hidden || os.IsPermission(err) || socket && !well[strings.TrimSuffix(inode, "]")]
			}
			if hidden {
				name, _ := os.ReadFile(of + "/comm")
				return "process " + pid.Name() + " (" + strings.TrimSpace(string(name)) + ")"
			}
		}
	}
	return ""
}

// unixSockets are the inode numbers of all Unix sockets.
func unixSockets() map[string]bool {
	table, _ := os.ReadFile("/proc/net/unix")
	well := map[string]bool{}
	for line := range strings.Lines(string(table)) {
		if fields := strings.Fields(line); len(fields) > 6 {
			well[fields[6]] = true
		}
	}
	return well
}

// checkSockets refuses a checkpoint that would strand a process.
func checkSockets() error {
	if who := strandable(); who != "" {
		return shard.Errorf(shard.CodeUnsupported, "%s has sockets in a network namespace of its own, which cannot be saved", who)
	}
	return nil
}

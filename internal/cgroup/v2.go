//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
)

// v2 is a host with the one unified hierarchy.
type v2 struct {
	base string // the parent group's directory
	oci  string
}

var v2Controllers = []string{"cpu", "memory", "pids"}

func openV2(mounts []mount, parent string) (flavour, error) {
	at := slices.IndexFunc(mounts, func(m mount) bool { return m.v2 })
	if at < 0 {
		return nil, errors.New("no control groups are mounted: mount -t cgroup2 none /sys/fs/cgroup")
	}
	return openV2At(mounts[at].point, parent)
}

// openV2At makes the parent group directly below the mount point, wherever the daemon itself runs: an init system may
// end or rearrange the daemon's own group when it restarts the daemon, and sandboxes outlive that.
func openV2At(top, parent string) (flavour, error) {
	have, err := readWords(filepath.Join(top, "cgroup.controllers"))
	if err != nil {
		return nil, fmt.Errorf("read the cgroup v2 controllers: %w", err)
	}
	for _, c := range v2Controllers {
		if !slices.Contains(have, c) {
			return nil, fmt.Errorf("cgroup v2 at %s has no %s controller: in a container, delegate it; on a host, boot with systemd.unified_cgroup_hierarchy=1 or cgroup_no_v1=all", top, c)
		}
	}
	if err := enable(top); err != nil {
		return nil, err
	}
	base := filepath.Join(top, parent)
	if err := os.Mkdir(base, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, explain(err, base)
	}
	if err := enable(base); err != nil {
		return nil, err
	}
	return &v2{base: base, oci: "/" + parent}, nil
}

// enable hands the controllers to the groups below dir.
func enable(dir string) error {
	file := filepath.Join(dir, "cgroup.subtree_control")
	on, err := readWords(file)
	if err != nil {
		return fmt.Errorf("read which controllers %s hands down: %w", dir, err)
	}
	var missing []string
	for _, c := range v2Controllers {
		if !slices.Contains(on, c) {
			missing = append(missing, "+"+c)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	err = write(file, strings.Join(missing, " "))
	if !errors.Is(err, syscall.EBUSY) {
		if err != nil {
			return explain(err, filepath.Join(dir, "x"))
		}
		return nil
	}
	// In a container, dir looks like the root but is an ordinary group, which may hand controllers down only while no
	// process is in it. If that process is us, we move; others are not ours to move.
	pids, rerr := readPIDs(filepath.Join(dir, "cgroup.procs"))
	if rerr != nil || !slices.Equal(pids, []int{os.Getpid()}) {
		return fmt.Errorf("control group %s has other processes in it (%v) and so cannot hand controllers down: run the daemon in the host's cgroup namespace, or move them into a group below it: %w",
			dir, pids, errors.Join(err, rerr))
	}
	leaf := filepath.Join(dir, "shard-daemon")
	if err := os.Mkdir(leaf, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		return explain(err, leaf)
	}
	if err := writeInt(filepath.Join(leaf, "cgroup.procs"), int64(os.Getpid())); err != nil {
		return fmt.Errorf("move the daemon into a control group of its own: %w", err)
	}
	if err := write(file, strings.Join(missing, " ")); err != nil {
		return fmt.Errorf("hand controllers down from %s: %w", dir, err)
	}
	return nil
}

func readWords(file string) ([]string, error) {
	b, err := os.ReadFile(file)
	return strings.Fields(string(b)), err
}

func (f *v2) members() []string { return []string{f.base} }

func (f *v2) bases() []string { return []string{f.base} }

func (f *v2) ociBase() string { return f.oci }

func (f *v2) limit(id string, l Limits) error {
	dir := filepath.Join(f.base, id)
	type setting struct {
		file, value string
		optional    bool
	}
	var set []setting
	if l.MemoryMax > 0 {
		set = append(set, setting{"memory.max", strconv.FormatInt(l.MemoryMax, 10), false},
			setting{"memory.oom.group", "1", false},
			setting{"memory.swap.max", "0", true}) // absent where the kernel has no swap
	}
	if l.MemoryHigh > 0 {
		set = append(set, setting{"memory.high", strconv.FormatInt(l.MemoryHigh, 10), false})
	}
	if l.CPUs > 0 {
		us := cpuPeriod.Microseconds()
		set = append(set, setting{"cpu.max", fmt.Sprintf("%d %d", l.CPUs*us, us), false})
	}
	if l.PIDs > 0 {
		set = append(set, setting{"pids.max", strconv.FormatInt(l.PIDs, 10), false})
	}
	for _, s := range set {
		err := write(filepath.Join(dir, s.file), s.value)
		if err != nil && !(s.optional && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
	}
	return nil
}

func (f *v2) bound(id string, l Limits) (settled bool, err error) {
	dir := filepath.Join(f.base, id)
	if l.PIDs > 0 {
		if err := writeInt(filepath.Join(dir, "pids.max"), l.PIDs); err != nil {
			return false, err
		}
	}
	if l.MemoryMax <= 0 {
		return true, nil
	}
	// Of a group that uses more than memory.max the kernel kills what it cannot reclaim, and memory.high makes it crawl.
	s, err := f.stats(id)
	if err != nil {
		return false, err
	}
	settled = s.MemoryBytes <= l.MemoryMax
	if !settled {
		l.MemoryMax = s.MemoryBytes + slack
		l.MemoryHigh = l.MemoryMax
	}
	if err := writeInt(filepath.Join(dir, "memory.high"), l.MemoryHigh); err != nil {
		return false, err
	}
	return settled, writeInt(filepath.Join(dir, "memory.max"), l.MemoryMax)
}

func (f *v2) start(id string, cmd *exec.Cmd) error {
	dir, err := os.OpenFile(filepath.Join(f.base, id), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return fmt.Errorf("enter control group: %w", err)
	}
	defer dir.Close()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = true, int(dir.Fd())
	defer func() { cmd.SysProcAttr.UseCgroupFD, cmd.SysProcAttr.CgroupFD = false, 0 }() // the descriptor's number will be another's
	return cmd.Start()
}

func (f *v2) kill(id string) error {
	dir := filepath.Join(f.base, id)
	err := write(filepath.Join(dir, "cgroup.kill"), "1")
	if !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	// Before Linux 5.14. The right to fork goes first, then one round of signals reaches everything.
	if err := write(filepath.Join(dir, "pids.max"), "0"); err != nil {
		return err
	}
	pids, err := procsBelow(dir)
	for _, pid := range pids {
		if kerr := unix.Kill(pid, unix.SIGKILL); kerr != nil && !errors.Is(kerr, unix.ESRCH) {
			err = errors.Join(err, fmt.Errorf("kill process %d: %w", pid, kerr))
		}
	}
	return err
}

func (f *v2) stats(id string) (Stats, error) {
	dir := filepath.Join(f.base, id)
	var s Stats
	var errs [4]error
	s.MemoryBytes, errs[0] = readInt(filepath.Join(dir, "memory.current"))
	s.PIDs, errs[1] = readInt(filepath.Join(dir, "pids.current"))
	var cpu, memory []byte
	cpu, errs[2] = os.ReadFile(filepath.Join(dir, "cpu.stat"))
	memory, errs[3] = os.ReadFile(filepath.Join(dir, "memory.stat"))
	s.CPUNanos = keyed(cpu, "usage_usec") * 1000
	s.MemoryBytes = max(0, s.MemoryBytes-keyed(memory, "inactive_file"))
	return s, errors.Join(errs[:]...)
}

func (f *v2) oom(id string) (*OOMWatch, error) {
	path := filepath.Join(f.base, id, "memory.events")
	counter, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		counter.Close()
		return nil, fmt.Errorf("make an inotify descriptor: %w", err)
	}
	if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY); err != nil {
		unix.Close(fd)
		counter.Close()
		return nil, fmt.Errorf("watch memory.events: %w", err)
	}
	return newWatch(os.NewFile(uintptr(fd), "oom event"), counter, 4096, 0), nil
}

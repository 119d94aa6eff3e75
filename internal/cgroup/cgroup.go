//go:build linux

// Package cgroup gives each sandbox a control group of its own: bounds on memory, CPU and processes, a way to start
// programs inside it, to learn of an out-of-memory kill, and to end everything in it at once.
//
// cgroup v1 and v2 look the same from outside. All state is in the kernel's file system, so a daemon that was killed
// finds its groups again. The groups lie beside, not below, the daemon's own group: an init system that ends the
// daemon's group must not end the sandboxes.
//
// The package knows group names and numbers. It must not know sandboxes, providers or what runs in a group.
package cgroup

import (
	"bytes"
	"context"
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
	"time"
)

// ErrBusy says that a new group's name is held by a group with processes in it.
var ErrBusy = errors.New("the control group has processes in it")

// errVanished says that a hierarchy has lost a group before anything ran in it. systemd, on a host with cgroup v1, takes
// groups without processes away from hierarchies that none of its services needs, whosever they are and at any time.
var errVanished = fmt.Errorf("the control group is gone: %w", fs.ErrNotExist)

// vanishings is how often a group that vanishes is made again.
const vanishings = 20

const (
	emptyTimeout = 30 * time.Second       // for killed processes to be gone; one that dumps core or waits for a disk is slow
	pollEvery    = 5 * time.Millisecond   // the kernel has no event for an empty v1 group
	cpuPeriod    = 100 * time.Millisecond // the time over which a CPU quota counts
)

// Limits are the bounds of a group; 0 is none.
type Limits struct {
	MemoryMax  int64 // bytes, past which the kernel kills; swap does not extend it
	MemoryHigh int64 // bytes, past which the kernel slows down and reclaims (v1: only while the host is short of memory)
	CPUs       int64 // CPUs' worth of time
	PIDs       int64 // processes and threads
}

// Stats is what a group uses now.
type Stats struct {
	MemoryBytes int64 // without the file cache that the kernel would give back first
	CPUNanos    int64 // since the group was made
	PIDs        int64
}

// Manager makes groups below one parent group.
type Manager struct {
	parent string
	fs     flavour
}

// flavour is what differs between the versions of cgroups. dir is always the group's place below the parent.
type flavour interface {
	// members are the directories of the parent group in the hierarchies that a group is in. The first one's process
	// lists count.
	members() []string
	// bases are members, and after them where an OCI runtime may leave a group of the same name.
	bases() []string
	// ociBase is the parent group as an OCI runtime wants it named.
	ociBase() string
	// limit applies l to the group, whose directories exist.
	limit(id string, l Limits) error
	// bound is Group.Bound.
	bound(id string, l Limits) (settled bool, err error)
	// start starts cmd inside the group.
	start(id string, cmd *exec.Cmd) error
	// kill sends SIGKILL to everything in the group and keeps it from growing; fs.ErrNotExist if there is no group.
	kill(id string) error
	// oom opens a watch of the group.
	oom(id string) (*OOMWatch, error)
	stats(id string) (Stats, error)
}

// Open finds this host's control groups and makes the parent group, a plain name that is unique to the daemon's root.
// It says what is missing where the host cannot bound memory, CPU and processes.
func Open(parent string) (*Manager, error) {
	if err := checkName(parent); err != nil {
		return nil, err
	}
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil, fmt.Errorf("read the mount table: %w", err)
	}
	mounts := parseMounts(table)
	var f flavour
	if hasV1(mounts, "memory") {
		f, err = openV1(mounts, parent)
	} else {
		f, err = openV2(mounts, parent)
	}
	if err != nil {
		return nil, err
	}
	return &Manager{parent: parent, fs: f}, nil
}

// Version is 1 or 2.
func (m *Manager) Version() int {
	if _, ok := m.fs.(*v2); ok {
		return 2
	}
	return 1
}

// Close removes the parent group if no group is left in it; groups that exist live on.
func (m *Manager) Close() error {
	var errs []error
	for _, base := range m.fs.bases() {
		err := os.Remove(base)
		if err == nil || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EBUSY) || errors.Is(err, syscall.ENOTEMPTY) {
			continue
		}
		errs = append(errs, fmt.Errorf("remove the parent control group: %w", err))
	}
	return errors.Join(errs...)
}

// Create makes an empty group with these bounds. A leftover without processes is replaced, so that every count begins
// at zero; one with processes is ErrBusy. On failure nothing is left.
func (m *Manager) Create(id string, l Limits) (_ *Group, err error) {
	if err := checkName(id); err != nil {
		return nil, err
	}
	g := &Group{id: id, m: m, limits: &l}
	pids, err := g.Procs()
	if err == nil && len(pids) > 0 {
		return nil, fmt.Errorf("create control group %s: %w", id, ErrBusy)
	}
	if err == nil {
		if err := m.remove(id); err != nil {
			return nil, fmt.Errorf("replace an old control group: %w", err)
		}
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, m.remove(id))
		}
	}()
	for range vanishings {
		if err = m.make(id, l); !errors.Is(err, fs.ErrNotExist) {
			break
		}
	}
	if err != nil {
		return nil, err
	}
	return g, nil
}

// make makes what is missing of an empty group, and bounds it.
func (m *Manager) make(id string, l Limits) error {
	for _, base := range m.fs.members() {
		dir := filepath.Join(base, id)
		err := os.Mkdir(dir, 0o755)
		if errors.Is(err, fs.ErrNotExist) {
			_ = os.Mkdir(base, 0o755) // vanished, being empty
			err = os.Mkdir(dir, 0o755)
		}
		// A v1 hierarchy may hold the empty directory of an earlier, half removed group.
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return fmt.Errorf("create control group: %w", err)
		}
	}
	if err := m.fs.limit(id, l); err != nil {
		return fmt.Errorf("bound control group: %w", err)
	}
	return nil
}

// Open finds a group that exists, else the error is fs.ErrNotExist.
func (m *Manager) Open(id string) (*Group, error) {
	if err := checkName(id); err != nil {
		return nil, err
	}
	if _, err := os.Stat(m.dirs(id)[0]); err != nil {
		return nil, fmt.Errorf("open control group: %w", err)
	}
	return &Group{id: id, m: m}, nil
}

// Destroy ends every process in the group, waits until they are gone and removes the group from every hierarchy. It is
// idempotent, and done when the group does not exist.
func (m *Manager) Destroy(ctx context.Context, id string) error {
	if err := checkName(id); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, emptyTimeout)
	defer cancel()
	g := &Group{id: id, m: m}
	for {
		if err := g.Kill(ctx); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("destroy control group %s: %w", id, err)
		}
		// Besides processes, a thread of ours that started something inside keeps a v1 group busy for a moment.
		err := m.remove(id)
		if err == nil {
			return nil
		}
		if !errors.Is(err, syscall.EBUSY) {
			return fmt.Errorf("destroy control group %s: %w", id, err)
		}
		if pause(ctx, pollEvery) != nil {
			return fmt.Errorf("destroy control group %s: %w: %w", id, ctx.Err(), err)
		}
	}
}

// Sweep destroys every group that keep does not want, with whatever still runs in it. It goes on after a failure and
// joins the errors.
func (m *Manager) Sweep(ctx context.Context, keep func(id string) bool) error {
	seen := map[string]bool{}
	var errs []error
	for _, base := range m.fs.bases() {
		entries, err := os.ReadDir(base)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, fmt.Errorf("list control groups: %w", err))
		}
		for _, e := range entries {
			if id := e.Name(); e.IsDir() && !seen[id] {
				seen[id] = true
				if !keep(id) {
					errs = append(errs, m.Destroy(ctx, id))
				}
			}
		}
	}
	return errors.Join(errs...)
}

// dirs are the directories that the group may have, in every hierarchy.
func (m *Manager) dirs(id string) []string {
	bases := m.fs.bases()
	dirs := make([]string, len(bases))
	for i, base := range bases {
		dirs[i] = filepath.Join(base, id)
	}
	return dirs
}

// remove removes the group's directories, and those that something inside made below them. The error of a group with
// processes is EBUSY.
func (m *Manager) remove(id string) error {
	var errs []error
	for _, dir := range m.dirs(id) {
		errs = append(errs, removeTree(dir))
	}
	return errors.Join(errs...)
}

// removeTree is not os.RemoveAll, which would try to unlink the kernel's files.
func removeTree(dir string) error {
	err := os.Remove(dir) // an rmdir; the common case
	if err == nil || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if e.IsDir() {
			if err := removeTree(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	if err := os.Remove(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Group is one control group. It holds no resources.
type Group struct {
	id     string
	m      *Manager
	limits *Limits // nil for a group that was found
}

// OCIPath is what linux.cgroupsPath must say so that an OCI runtime joins exactly this group.
func (g *Group) OCIPath() string { return filepath.Join(g.m.fs.ociBase(), g.id) }

// Start is cmd.Start, but the process is inside the group from its first instruction, and so is all it starts. cmd must
// not ask for a parent-death signal: on v1 the thread that starts it ends at once.
func (g *Group) Start(cmd *exec.Cmd) error {
	if cmd.SysProcAttr != nil && cmd.SysProcAttr.Pdeathsig != 0 {
		return errors.New("start in control group: a parent-death signal would kill the process at once")
	}
	err := g.m.fs.start(g.id, cmd)
	for try := 0; errors.Is(err, errVanished) && g.limits != nil && g.somewhere() && try < vanishings; try++ {
		if err = g.m.make(g.id, *g.limits); err == nil || errors.Is(err, fs.ErrNotExist) {
			err = g.m.fs.start(g.id, cmd)
		}
	}
	return err
}

// somewhere says whether a hierarchy still has the group; else somebody destroyed it.
func (g *Group) somewhere() bool {
	return slices.ContainsFunc(g.m.fs.members(), func(base string) bool {
		_, err := os.Stat(filepath.Join(base, g.id))
		return err == nil
	})
}

// OOM begins to watch for kills for want of memory. Close the watch. Counts that the group had before are in Kills.
func (g *Group) OOM() (*OOMWatch, error) {
	w, err := g.m.fs.oom(g.id)
	if err != nil {
		return nil, fmt.Errorf("watch control group for lack of memory: %w", err)
	}
	return w, nil
}

// Kill ends everything in the group, and returns when it is gone or ctx ends. The group is spent: on some kernels nothing
// can start in it any more. Destroy it, and Create it for the next use.
func (g *Group) Kill(ctx context.Context) error {
	for {
		if err := g.m.fs.kill(g.id); err != nil {
			return fmt.Errorf("kill control group: %w", err)
		}
		pids, err := g.Procs()
		if errors.Is(err, fs.ErrNotExist) || err == nil && len(pids) == 0 {
			return nil
		}
		if err != nil {
			return fmt.Errorf("kill control group: %w", err)
		}
		if err := pause(ctx, pollEvery); err != nil {
			return fmt.Errorf("kill control group: %d processes are left: %w", len(pids), err)
		}
	}
}

// Bound changes the bounds on memory and processes of a group in use; the others stay. While the group uses more memory than l
// grants, and nothing of that can be reclaimed, it is bounded to what it uses, settled is false, and the caller tries again later.
func (g *Group) Bound(l Limits) (settled bool, err error) {
	if settled, err = g.m.fs.bound(g.id, l); err != nil {
		return false, fmt.Errorf("bound control group: %w", err)
	}
	return settled, nil
}

// slack is what a group that uses too much may use on top, in bytes, until its use is looked at again.
const slack = 32 << 20

// Procs lists the processes in the group and in groups below it.
func (g *Group) Procs() ([]int, error) {
	pids, err := procsBelow(g.m.dirs(g.id)[0])
	// v1 lists us while a thread of ours starts something inside.
	return slices.DeleteFunc(pids, func(pid int) bool { return pid == os.Getpid() }), err
}

// Stats reads what the group uses.
func (g *Group) Stats() (Stats, error) {
	s, err := g.m.fs.stats(g.id)
	if err != nil {
		return Stats{}, fmt.Errorf("read the use of control group: %w", err)
	}
	return s, nil
}

func procsBelow(dir string) ([]int, error) {
	pids, err := readPIDs(filepath.Join(dir, "cgroup.procs"))
	if err != nil {
		return nil, fmt.Errorf("list the processes of control group: %w", err)
	}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return pids, nil // removed just now
	}
	for _, e := range entries {
		if e.IsDir() {
			below, err := procsBelow(filepath.Join(dir, e.Name()))
			if err != nil && !errors.Is(err, fs.ErrNotExist) {
				return nil, err
			}
			pids = append(pids, below...)
		}
	}
	return pids, nil
}

func readPIDs(file string) ([]int, error) {
	b, err := os.ReadFile(file)
	if errors.Is(err, syscall.ENODEV) { // the group went between open and read
		err = fs.ErrNotExist
	}
	if err != nil {
		return nil, err
	}
	var pids []int
	for f := range bytes.FieldsSeq(b) {
		if pid, err := strconv.Atoi(string(f)); err == nil && pid > 0 { // 0: a process outside our PID namespace
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// readInt reads a file that holds one number; "max" is 0, which is how Limits writes it.
func readInt(file string) (int64, error) {
	b, err := os.ReadFile(file)
	if err != nil {
		return 0, err
	}
	s := strings.TrimSpace(string(b))
	if s == "max" {
		return 0, nil
	}
	return strconv.ParseInt(s, 10, 64)
}

// keyed reads the number after key in a "key value" file; 0 if it is not there.
func keyed(b []byte, key string) int64 {
	for line := range bytes.Lines(b) {
		k, v, _ := bytes.Cut(bytes.TrimSpace(line), []byte(" "))
		if string(k) == key {
			n, _ := strconv.ParseInt(string(v), 10, 64)
			return n
		}
	}
	return 0
}

// write writes one value, in the single write(2) that the kernel's files want. It never makes a file.
func write(file, value string) error {
	f, err := os.OpenFile(file, os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = f.WriteString(value)
	if err != nil {
		err = fmt.Errorf("write %q: %w", value, err)
	}
	return errors.Join(err, f.Close())
}

func writeInt(file string, n int64) error { return write(file, strconv.FormatInt(n, 10)) }

// checkName refuses what is not one plain directory name, before it becomes part of a path.
func checkName(name string) error {
	if name == "" || name == "." || name == ".." || strings.ContainsAny(name, "/\x00\n") || len(name) > 200 {
		return fmt.Errorf("%q is not a name for a control group", name)
	}
	return nil
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

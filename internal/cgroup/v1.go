//go:build linux

package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// needed are the v1 controllers that a group has to be in.
var needed = []string{"memory", "cpu", "pids", "cpuacct"}

// v1 is a host with one hierarchy per controller.
type v1 struct {
	parent string
	joined []string          // the parent group in each hierarchy that processes of a group must be in, memory's first
	all    []string          // the same in every hierarchy that is mounted: a runtime joins them all
	of     map[string]string // controller → the parent group in its hierarchy
}

func openV1(mounts []mount, parent string) (flavour, error) {
	f := &v1{parent: parent, of: map[string]string{}}
	for _, m := range mounts { // a hybrid host's v2 hierarchy too: no controllers, but a runtime may join it
		base := filepath.Join(m.point, parent)
		f.all = append(f.all, base)
		for _, c := range m.controllers {
			f.of[c] = base
		}
	}
	for _, c := range append(slices.Clone(needed), "freezer") {
		base, ok := f.of[c]
		switch {
		case !ok && c != "freezer":
			return nil, fmt.Errorf("the host's cgroup v1 has no %s controller: mount it at /sys/fs/cgroup/%s, or boot with cgroup v2", c, c)
		case ok && !slices.Contains(f.joined, base): // else mounted together with another one
			f.joined = append(f.joined, base)
		}
	}
	for i, base := range f.joined {
		if err := os.Mkdir(base, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
			for _, made := range f.joined[:i] {
				_ = os.Remove(made)
			}
			return nil, explain(err, base)
		}
	}
	// The hierarchy whose lists count comes first, and only those that exist follow.
	f.all = append(slices.Clone(f.joined), slices.DeleteFunc(f.all, func(b string) bool { return slices.Contains(f.joined, b) })...)
	return f, nil
}

// explain turns the two usual refusals into a sentence that says what to do.
func explain(err error, dir string) error {
	switch {
	case errors.Is(err, syscall.EROFS):
		return fmt.Errorf("control groups are mounted read-only at %s: run the daemon on the host, or in a privileged container: %w", filepath.Dir(dir), err)
	case errors.Is(err, syscall.EACCES), errors.Is(err, syscall.EPERM):
		return fmt.Errorf("the daemon may not make control groups in %s: run it as root: %w", filepath.Dir(dir), err)
	}
	return fmt.Errorf("make the parent control group: %w", err)
}

func (f *v1) members() []string { return f.joined }

func (f *v1) bases() []string { return f.all }

func (f *v1) ociBase() string { return "/" + f.parent }

func (f *v1) file(controller, id, name string) string {
	return filepath.Join(f.of[controller], id, controller+"."+name)
}

func (f *v1) limit(id string, l Limits) error {
	if l.MemoryMax > 0 {
		if err := writeInt(f.file("memory", id, "limit_in_bytes"), l.MemoryMax); err != nil {
			return err
		}
		// Memory and swap together: nothing is left for swap. Absent where the kernel does not count swap.
		err := writeInt(f.file("memory", id, "memsw.limit_in_bytes"), l.MemoryMax)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if l.MemoryHigh > 0 {
		if err := writeInt(f.file("memory", id, "soft_limit_in_bytes"), l.MemoryHigh); err != nil {
			return err
		}
	}
	if l.CPUs > 0 {
		if err := writeInt(f.file("cpu", id, "cfs_period_us"), cpuPeriod.Microseconds()); err != nil {
			return err
		}
		if err := writeInt(f.file("cpu", id, "cfs_quota_us"), l.CPUs*cpuPeriod.Microseconds()); err != nil {
			return err
		}
	}
	if l.PIDs > 0 {
		return writeInt(f.file("pids", id, "max"), l.PIDs)
	}
	return nil
}

func (f *v1) bound(id string, l Limits) (settled bool, err error) {
	if l.PIDs > 0 {
		if err := writeInt(f.file("pids", id, "max"), l.PIDs); err != nil {
			return false, err
		}
	}
	if l.MemoryMax <= 0 {
		return true, nil
	}
	if err := writeInt(f.file("memory", id, "soft_limit_in_bytes"), l.MemoryHigh); err != nil {
		return false, err
	}
	err = f.limitMemory(id, l.MemoryMax)
	if !errors.Is(err, unix.EBUSY) {
		return err == nil, err
	}
	use, err := readInt(f.file("memory", id, "usage_in_bytes"))
	if err != nil {
		return false, err
	}
	if err = f.limitMemory(id, max(use+slack, l.MemoryMax)); errors.Is(err, unix.EBUSY) {
		err = nil
	}
	return false, err
}

// limitMemory bounds memory, with and without swap, in the order that the kernel takes: alone it is never more than together.
// unix.EBUSY: the group uses more.
func (f *v1) limitMemory(id string, n int64) error {
	alone, together := f.file("memory", id, "limit_in_bytes"), f.file("memory", id, "memsw.limit_in_bytes")
	now, err := readInt(alone)
	if err != nil {
		return err
	}
	files := []string{alone, together}
	if n > now {
		files = []string{together, alone}
	}
	for _, file := range files {
		if err := writeInt(file, n); err != nil && !(file == together && errors.Is(err, fs.ErrNotExist)) {
			return err
		}
	}
	return nil
}

// start moves one thread of ours into the group, forks from it and lets the thread end. A move of a single thread by
// itself is cheap and leaves the daemon's other threads alone; the child inherits every hierarchy at birth.
func (f *v1) start(id string, cmd *exec.Cmd) error {
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		if unix.Gettid() != os.Getpid() {
			result <- f.startHere(id, cmd)
			return // still locked, so that the thread ends with this goroutine
		}
		// Go never ends the main thread, it would stay in the group. While this goroutine holds it, another goroutine is
		// sure to get another thread.
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread()
			result <- f.startHere(id, cmd)
		}()
		<-done
		runtime.UnlockOSThread()
	}()
	return <-result
}

func (f *v1) startHere(id string, cmd *exec.Cmd) error {
	for _, base := range f.joined {
		err := write(filepath.Join(base, id, "tasks"), "0")
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENODEV) {
			return errVanished
		}
		if err != nil {
			return fmt.Errorf("enter control group: %w", err)
		}
	}
	return cmd.Start()
}

// kill does not freeze: it takes away the right to fork, after which one round of signals reaches everything. A thread
// of ours that is about to start something inside then fails, where a frozen one would hang with the fork lock held.
func (f *v1) kill(id string) error {
	var errs []error
	if err := write(f.file("pids", id, "max"), "0"); err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	// In every hierarchy: what died while it was joining them may be in some only.
	killed := map[int]bool{os.Getpid(): true} // we are listed while a thread of ours is inside
	found := false
	for _, base := range f.all {
		pids, err := procsBelow(filepath.Join(base, id))
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		found = true
		errs = append(errs, err)
		for _, pid := range pids {
			if killed[pid] {
				continue
			}
			killed[pid] = true
			if err := unix.Kill(pid, unix.SIGKILL); err != nil && !errors.Is(err, unix.ESRCH) {
				errs = append(errs, fmt.Errorf("kill process %d: %w", pid, err))
			}
		}
	}
	if !found {
		return fs.ErrNotExist
	}
	// Something inside, or an operator, may have frozen it: frozen processes do not die.
	if _, ok := f.of["freezer"]; ok {
		if err := write(f.file("freezer", id, "state"), "THAWED"); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func (f *v1) stats(id string) (Stats, error) {
	var s Stats
	var errs [4]error
	s.MemoryBytes, errs[0] = readInt(f.file("memory", id, "usage_in_bytes"))
	s.CPUNanos, errs[1] = readInt(f.file("cpuacct", id, "usage"))
	s.PIDs, errs[2] = readInt(f.file("pids", id, "current"))
	detail, err := os.ReadFile(f.file("memory", id, "stat"))
	errs[3] = err
	s.MemoryBytes = max(0, s.MemoryBytes-keyed(detail, "total_inactive_file"))
	return s, errors.Join(errs[:]...)
}

// oom registers an eventfd, which the kernel signals when the group runs out of memory and when the group is removed.
func (f *v1) oom(id string) (*OOMWatch, error) {
	control, err := os.Open(f.file("memory", id, "oom_control"))
	if err != nil {
		return nil, err
	}
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		control.Close()
		return nil, fmt.Errorf("make an eventfd: %w", err)
	}
	event := os.NewFile(uintptr(fd), "oom event")
	line := fmt.Sprintf("%d %d", fd, control.Fd())
	if err := write(filepath.Join(f.of["memory"], id, "cgroup.event_control"), line); err != nil {
		event.Close()
		control.Close()
		return nil, err
	}
	// The event comes before the kill; the counter follows when a victim has been chosen.
	return newWatch(event, control, 8, time.Second), nil
}

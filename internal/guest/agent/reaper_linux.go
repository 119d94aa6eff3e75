package agent

import (
	"os"
	"os/signal"
	"strconv"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// reaper waits for every child of PID 1: the commands it started, and every orphan that the kernel hands it.
type reaper struct {
	mu       sync.Mutex // held from fork to registration, and while waiting: no child is reaped before it is known
	commands map[int]*command
	wake     chan os.Signal
}

func newReaper() *reaper {
	r := &reaper{commands: map[int]*command{}, wake: make(chan os.Signal, 1)}
	signal.Notify(r.wake, unix.SIGCHLD)
	return r
}

// run reaps for ever.
func (r *reaper) run() {
	for range r.wake {
		r.reap()
	}
}

// reap collects every child that has ended, and says whether any child is left.
func (r *reaper) reap() bool {
	for {
		var status unix.WaitStatus
		r.mu.Lock()
		pid, err := unix.Wait4(-1, &status, unix.WNOHANG, nil)
		c := r.commands[pid]
		if err == nil && pid > 0 {
			delete(r.commands, pid)
			if c != nil && c.over != nil {
				_ = unix.Kill(-pid, unix.SIGKILL) // under mu: the number is not used again so soon
			}
		}
		r.mu.Unlock()
		switch {
		case err == unix.EINTR:
		case err != nil:
			return false
		case pid == 0:
			return true
		case c != nil:
			c.ended(status)
		}
	}
}

// start forks and executes path as c.
func (r *reaper) start(c *command, path string, argv []string, attr *syscall.ProcAttr) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	pid, err := syscall.ForkExec(path, argv, attr)
	if err != nil {
		return err
	}
	c.pid = pid
	r.commands[pid] = c
	return nil
}

// signal sends sig to c's process group, and says whether c still ran.
func (r *reaper) signal(c *command, sig syscall.Signal) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.commands[c.pid] != c {
		return false
	}
	return unix.Kill(-c.pid, sig) == nil
}

// signalAll is signal for all that c runs: a shell at a terminal gives its jobs process groups of their own, in the session that
// it leads.
func (r *reaper) signalAll(c *command, sig syscall.Signal) (ran bool) {
	if c.tty == nil {
		return r.signal(c, sig)
	}
	if sig != unix.SIGCONT { // which the shell gets last, so that it never sees a job that has stopped
		if ran = r.signal(c, sig); !ran {
			return false
		}
	}
	known := map[int]bool{c.pid: true}
	for range 10 { // until it is signalled, a job may start others
		before := len(known)
		entries, _ := os.ReadDir("/proc")
		for _, e := range entries {
			pid, err := strconv.Atoi(e.Name())
			if err != nil {
				continue
			}
			if session, err := unix.Getsid(pid); err != nil || session != c.pid {
				continue
			}
			if group, err := unix.Getpgid(pid); err == nil && !known[group] {
				known[group] = true
				_ = unix.Kill(-group, sig)
			}
		}
		if len(known) == before {
			break
		}
	}
	if sig == unix.SIGCONT {
		ran = r.signal(c, sig)
	}
	return ran
}

// swallowSignals keeps signals that anyone in the sandbox can send from ending PID 1. A handler, not SIG_IGN: what is
// ignored stays ignored in every command.
func swallowSignals() {
	var all []os.Signal
	for n := syscall.Signal(1); n <= 64; n++ {
		switch n {
		case unix.SIGKILL, unix.SIGSTOP, unix.SIGCHLD, unix.SIGURG, unix.SIGPROF, 32, 33, 34:
		default:
			all = append(all, n)
		}
	}
	signal.Notify(make(chan os.Signal), all...)
}

//go:build linux

package oci

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"sync"

	"golang.org/x/sys/unix"
)

// process names one process of this host for good: a pid alone may mean another one tomorrow.
type process struct {
	PID int `json:"pid"`
	// StartTime is in clock ticks since the host booted, and Boot says which boot that was.
	StartTime uint64 `json:"start_time"`
	Boot      string `json:"boot"`
}

var errNoProcess = errors.New("no such process")

// bootID changes whenever the host boots.
var bootID = sync.OnceValues(func() (string, error) {
	b, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return "", fmt.Errorf("read the host's boot id: %w", err)
	}
	return string(bytes.TrimSpace(b)), nil
})

// startTime is when the process began, in clock ticks since the host booted; errNoProcess when it has ended.
func startTime(pid int) (uint64, error) {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return 0, errNoProcess
	}
	if err != nil {
		return 0, fmt.Errorf("read the start time of process %d: %w", pid, err)
	}
	return parseStat(b)
}

// parseStat finds field 22 of a stat file. It counts from behind the program's name, which may hold anything.
func parseStat(b []byte) (uint64, error) {
	const state, start = 0, 19 // fields 3 and 22
	fields := bytes.Fields(b[bytes.LastIndexByte(b, ')')+1:])
	if len(fields) <= start {
		return 0, fmt.Errorf("a stat file of %d fields", len(fields))
	}
	if s := fields[state]; bytes.Equal(s, []byte("Z")) || bytes.Equal(s, []byte("X")) {
		return 0, errNoProcess
	}
	t, err := strconv.ParseUint(string(fields[start]), 10, 64)
	if err != nil {
		return 0, fmt.Errorf("the start time in a stat file: %w", err)
	}
	return t, nil
}

// identify names the process that now has the pid.
func identify(pid int) (process, error) {
	boot, err := bootID()
	if err != nil {
		return process{}, err
	}
	t, err := startTime(pid)
	return process{PID: pid, StartTime: t, Boot: boot}, err
}

// open gives a pidfd of the process, or errNoProcess when it has ended.
func (p process) open() (*os.File, error) {
	boot, err := bootID()
	if err != nil {
		return nil, err
	}
	if p.PID <= 0 || p.Boot != boot {
		return nil, errNoProcess
	}
	// Non-blocking, so that Go's poller waits for it and no thread has to.
	fd, err := unix.PidfdOpen(p.PID, unix.PIDFD_NONBLOCK)
	if errors.Is(err, unix.ESRCH) || errors.Is(err, unix.EINVAL) {
		return nil, errNoProcess
	}
	if err != nil {
		return nil, fmt.Errorf("open process %d: %w", p.PID, err)
	}
	f := os.NewFile(uintptr(fd), "pidfd")
	// The descriptor is pinned to one process; if that has our start time, it is ours.
	if t, err := startTime(p.PID); err != nil || t != p.StartTime {
		_ = f.Close()
		if err == nil {
			err = errNoProcess
		}
		return nil, err
	}
	return f, nil
}

// wait returns nil once the process has ended, or an error when the pidfd was closed before.
func wait(pidfd *os.File) error {
	conn, err := pidfd.SyscallConn()
	if err != nil {
		return err
	}
	return conn.Read(ended)
}

// ended says whether the process of the pidfd has ended.
func ended(fd uintptr) bool {
	for {
		fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(fds, 0)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		return err != nil || n > 0
	}
}

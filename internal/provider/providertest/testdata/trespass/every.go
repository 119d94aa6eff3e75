package main

import (
	"fmt"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// Calls of the kernel's tracing trampolines, which it answers with SIGILL when anybody else makes them.
const (
	uretprobe = 335
	uprobe    = 336
)

// terminal are the system calls that would end or stop this program itself, whoever answers them.
var terminal = []uintptr{unix.SYS_EXIT, unix.SYS_EXIT_GROUP, unix.SYS_FORK, unix.SYS_VFORK, unix.SYS_CLONE, unix.SYS_CLONE3,
	unix.SYS_RT_SIGRETURN, unix.SYS_RESTART_SYSCALL, unix.SYS_SET_TID_ADDRESS, unix.SYS_SET_ROBUST_LIST, uretprobe, uprobe}

// every makes each system call there is with arguments that mean nothing, each on a thread of its own, which it leaves
// behind when the call does not return.
func every() {
	const last = 470
	returned := make(chan uintptr)
	count := 0
	for number := range uintptr(last) {
		if slices.Contains(terminal, number) {
			continue
		}
		go func() {
			runtime.LockOSThread() // never unlocked: what the call does to the thread ends with it
			const nonsense = ^uintptr(0)
			_, _, _ = unix.Syscall6(number, nonsense, nonsense, nonsense, nonsense, nonsense, nonsense)
			returned <- number
		}()
		select {
		case <-returned:
			count++
		case <-time.After(200 * time.Millisecond):
		}
	}
	fmt.Println(count, "system calls returned")
}

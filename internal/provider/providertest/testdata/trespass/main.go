// Command trespass runs in a sandbox and tries what only the host may do. It prints one line for each attempt: its name
// (with a star when it is harmless to whoever has a kernel of its own) and "allowed" or the error. With the argument every
// it makes every system call there is.
package main

import (
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

func main() {
	if len(os.Args) > 1 && os.Args[1] == "every" {
		every()
		return
	}
	runtime.LockOSThread()
	zeros := new([256]byte)
	name := func(s string) uintptr { p, _ := unix.BytePtrFromString(s); return uintptr(unsafe.Pointer(p)) }
	for _, try := range []struct {
		name string
		do   func() error
	}{
		{"mount a file system", func() error { return unix.Mount("x", "/tmp", "tmpfs", 0, "") }},
		{"bind the root elsewhere", func() error { return unix.Mount("/", "/tmp", "", unix.MS_BIND, "") }},
		{"make /proc/sys writable", func() error { return unix.Mount("", "/proc/sys", "", unix.MS_REMOUNT|unix.MS_BIND, "") }},
		{"unmount the mask of kcore", func() error { return unix.Unmount("/proc/kcore", unix.MNT_DETACH) }},
		{"open a file system", func() error { return call(unix.SYS_FSOPEN, name("tmpfs"), 0) }},
		{"change the root", func() error { return unix.PivotRoot("/", "/tmp") }},
		{"make a mount namespace", func() error { return unix.Unshare(unix.CLONE_NEWNS) }},
		{"make a user namespace*", func() error { return unix.Unshare(unix.CLONE_NEWUSER) }},
		{"enter a namespace of PID 1", func() error {
			fd, err := unix.Open("/proc/1/ns/mnt", unix.O_RDONLY, 0)
			if err != nil {
				return err
			}
			return unix.Setns(fd, 0)
		}},
		{"open a file by handle", func() error {
			_, err := unix.OpenByHandleAt(unix.AT_FDCWD, unix.NewFileHandle(1, make([]byte, 8)), 0)
			if err == unix.ESTALE {
				return nil
			}
			return err
		}},
		{"load a module", func() error { return unix.InitModule(zeros[:], "") }},
		{"remove a module", func() error { return unix.DeleteModule("loop", 0) }},
		{"load another kernel", func() error { return call(unix.SYS_KEXEC_LOAD, 0, 0, 0) }},
		{"reboot", func() error { return unix.Reboot(unix.LINUX_REBOOT_CMD_CAD_OFF) }},
		{"load a bpf program", func() error { return call(unix.SYS_BPF, unix.BPF_PROG_LOAD, uintptr(unsafe.Pointer(zeros)), 64) }},
		{"make a bpf map", func() error {
			attr := [16]uint32{unix.BPF_MAP_TYPE_ARRAY, 4, 4, 1}
			return call(unix.SYS_BPF, unix.BPF_MAP_CREATE, uintptr(unsafe.Pointer(&attr)), 64)
		}},
		{"count the host's events", func() error {
			attr := unix.PerfEventAttr{Type: unix.PERF_TYPE_SOFTWARE, Size: unix.PERF_ATTR_SIZE_VER5}
			_, err := unix.PerfEventOpen(&attr, -1, 0, -1, 0)
			return err
		}},
		{"handle page faults", func() error { return call(unix.SYS_USERFAULTFD, unix.O_CLOEXEC, 0) }},
		{"use io_uring*", func() error { return call(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(zeros)), 0) }},
		{"read the session's keys*", func() error { _, err := unix.KeyctlGetKeyringID(unix.KEY_SPEC_SESSION_KEYRING, false); return err }},
		{"add a key*", func() error {
			_, err := unix.AddKey("user", "shard", []byte("x"), unix.KEY_SPEC_SESSION_KEYRING)
			return err
		}},
		{"read the kernel's log*", func() error { _, err := unix.Klogctl(3, zeros[:]); return err }},
		{"silence the kernel's log", func() error { _, err := unix.Klogctl(6, nil); return err }},
		{"trace PID 1", func() error { return unix.PtraceAttach(1) }},
		{"seize PID 1", func() error { return unix.PtraceSeize(1) }},
		{"read PID 1's memory", func() error {
			local := []unix.Iovec{{Base: &zeros[0], Len: 1}}
			remote := []unix.RemoteIovec{{Base: 0x400000, Len: 1}}
			_, err := unix.ProcessVMReadv(1, local, remote, 0)
			return err
		}},
		{"take PID 1's channel", func() error {
			fd, err := unix.PidfdOpen(1, 0)
			if err != nil {
				return err
			}
			_, err = unix.PidfdGetfd(fd, 0, 0)
			return err
		}},
		{"open PID 1's channel", func() error { _, err := unix.Open("/proc/1/fd/0", unix.O_RDWR, 0); return err }},
		{"set the clock", func() error { return unix.Settimeofday(&unix.Timeval{Sec: 1}) }},
		{"rename the host*", func() error { return unix.Sethostname([]byte("x")) }},
		{"use ports", func() error { return call(unix.SYS_IOPL, 3) }},
		{"add swap", func() error { return call(unix.SYS_SWAPON, name("/etc/passwd"), 0) }},
		{"keep accounts", func() error { return unix.Acct("/etc/passwd") }},
		{"speak to the hypervisor", func() error { _, err := unix.Socket(unix.AF_VSOCK, unix.SOCK_STREAM, 0); return err }},
		{"use the kernel's ciphers*", func() error { _, err := unix.Socket(unix.AF_ALG, unix.SOCK_SEQPACKET, 0); return err }},
		{"raise the limit of open files", func() error {
			return unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: 1 << 20, Max: 1 << 20})
		}},
	} {
		outcome := "allowed"
		if err := try.do(); err != nil {
			outcome = err.Error()
		}
		fmt.Printf("%s: %s\n", try.name, outcome)
	}
}

func call(number uintptr, args ...uintptr) error {
	var a [3]uintptr
	copy(a[:], args)
	if _, _, errno := unix.Syscall(number, a[0], a[1], a[2]); errno != 0 {
		return errno
	}
	return nil
}

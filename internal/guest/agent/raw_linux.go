package agent

import (
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// System calls on sockets that never wait, of which Go's scheduler does not hear. What it hears of wakes its monitor
// thread, and that looks every 20 µs for a millisecond whether anybody waits: under gVisor, where each wake-up costs more
// than a call, that was a large part of a short exchange. Who writes much at once goes the usual way, since it is the
// monitor that keeps a busy goroutine from having the processor for itself.

// rawMost is how many bytes are written by one call of which the scheduler does not hear.
const rawMost = 16 << 10

// maxPieces is how many pieces one call writes.
const maxPieces = 3

// readRaw reads what is there: EAGAIN when nothing is, 0 bytes at the end.
func readRaw(fd uintptr, p []byte) (int, error) {
	return again(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall(unix.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	})
}

// writeRaw writes what there is room for: EAGAIN when there is none.
func writeRaw(fd uintptr, p []byte) (int, error) {
	return again(func() (uintptr, uintptr, unix.Errno) {
		if len(p) > rawMost {
			return unix.Syscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
		}
		return unix.RawSyscall(unix.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p)))
	})
}

// writevRaw is writeRaw of up to maxPieces pieces.
func writevRaw(fd uintptr, bufs [][]byte) (int, error) {
	var iov [maxPieces]unix.Iovec
	size := 0
	for i, b := range bufs {
		iov[i].Base = unsafe.SliceData(b)
		iov[i].SetLen(len(b))
		size += len(b)
	}
	return again(func() (uintptr, uintptr, unix.Errno) {
		if size > rawMost {
			return unix.Syscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&iov)), uintptr(len(bufs)))
		}
		return unix.RawSyscall(unix.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&iov)), uintptr(len(bufs)))
	})
}

// again repeats a call that a signal interrupted.
func again(call func() (uintptr, uintptr, unix.Errno)) (int, error) {
	for {
		switch n, _, errno := call(); errno {
		case 0:
			return int(n), nil
		case unix.EINTR:
		default:
			return 0, errno
		}
	}
}

// connectLoopback begins a connection to a port of 127.0.0.1.
func connectLoopback(port int) (fd int, err error) {
	fd, err = again(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall(unix.SYS_SOCKET, unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	})
	if err != nil {
		return -1, os.NewSyscallError("socket", err)
	}
	to := unix.RawSockaddrInet4{Family: unix.AF_INET, Addr: [4]byte{127, 0, 0, 1}}
	*(*[2]byte)(unsafe.Pointer(&to.Port)) = [2]byte{byte(port >> 8), byte(port)}
	_, _, errno := unix.RawSyscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&to)), unsafe.Sizeof(to))
	if errno != 0 && errno != unix.EINPROGRESS && errno != unix.EINTR {
		unix.Close(fd)
		return -1, os.NewSyscallError("connect", errno)
	}
	return fd, nil
}

// pollWrite waits for at most d until a socket can be written to or is broken, and returns what poll says of it.
func pollWrite(fd uintptr, d time.Duration) (events int16) {
	p := unix.PollFd{Fd: int32(fd), Events: unix.POLLOUT}
	wait := unix.NsecToTimespec(int64(d))
	_, _ = again(func() (uintptr, uintptr, unix.Errno) {
		return unix.RawSyscall6(unix.SYS_PPOLL, uintptr(unsafe.Pointer(&p)), 1, uintptr(unsafe.Pointer(&wait)), 0, 0, 0)
	})
	return p.Revents
}

// setNoDelay sends small pieces at once, whatever is still under way.
func setNoDelay(fd uintptr) {
	on := int32(1)
	_, _, _ = unix.RawSyscall6(unix.SYS_SETSOCKOPT, fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, uintptr(unsafe.Pointer(&on)), unsafe.Sizeof(on), 0)
}

// shutdownWrite ends the writing half.
func shutdownWrite(fd uintptr) error {
	if _, _, errno := unix.RawSyscall(unix.SYS_SHUTDOWN, fd, unix.SHUT_WR, 0); errno != 0 {
		return errno
	}
	return nil
}

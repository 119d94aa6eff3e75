package netns

import (
	"context"
	"fmt"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
)

// DialLoopback connects to a TCP port of 127.0.0.1 in the namespace of an attached sandbox, as a program in it would. It is
// of use where the sandbox's programs use the host's network stack. ctx bounds it; nothing of it waits on a thread, so a
// server that accepts nothing holds up nobody else.
func (n *Net) DialLoopback(ctx context.Context, id string, port int) (*net.TCPConn, error) {
	fd, err := socketIn(n.path(id))
	if err != nil {
		return nil, fmt.Errorf("a socket in the namespace of %s: %w", id, err)
	}
	f := os.NewFile(uintptr(fd), "connection")
	defer func() { _ = f.Close() }()
	if err := connectLoopback(ctx, f, port); err != nil {
		return nil, err
	}
	c, err := net.FileConn(f)
	if err != nil {
		return nil, err
	}
	return c.(*net.TCPConn), nil
}

// socketIn makes a TCP socket that belongs to the namespace at path, whoever uses it.
func socketIn(path string) (fd int, err error) {
	ns, err := os.Open(path)
	if err != nil {
		return -1, err
	}
	defer func() { _ = ns.Close() }()
	err = elsewhere(func() error {
		if err := unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
		return err
	})
	return fd, err
}

// connectLoopback connects a socket that does not block.
func connectLoopback(ctx context.Context, f *os.File, port int) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetDeadline(time.Unix(1, 0)) })()
	var failed error
	begun := false
	err = raw.Write(func(fd uintptr) bool {
		if !begun {
			begun = true
			failed = unix.Connect(int(fd), &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
			return failed != unix.EINPROGRESS && failed != unix.EINTR
		}
		if code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			if failed = err; err == nil {
				failed = unix.Errno(code)
			}
			return true
		}
		_, failed = unix.Getpeername(int(fd))
		return failed != unix.ENOTCONN // as long as it is under way
	})
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err != nil:
		return err
	case failed != nil:
		return os.NewSyscallError("connect", failed)
	}
	return nil
}

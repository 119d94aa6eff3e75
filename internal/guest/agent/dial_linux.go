package agent

import (
	"errors"
	"io"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// dial connects to a port of 127.0.0.1 and passes bytes both ways until both sides have ended. Whatever breaks off shows as
// a reset on the other side, so that half a transfer never looks whole. While nothing moves it holds two goroutines and no
// buffer.
func dial(r *request) error {
	var args guest.DialArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	if args.Port < 1 || args.Port > shard.MaxPort {
		return shard.Invalidf("%d is not a port: use 1 to %d", args.Port, shard.MaxPort)
	}
	c, err := dialLoopback(r, args.Port)
	if err != nil {
		return err
	}
	defer c.f.Close()
	defer r.in.shrink(r.s)
	received := make(chan error, 1)
	go func() {
		err := r.Head(nil)
		if err == nil {
			err = c.receive(r)
		}
		if err != nil {
			r.in.close()
			c.interrupt()
		}
		received <- err
	}()
	err = c.send(r) // what came with the dial goes before the Head: the server is at work while the host is told
	if failed := <-received; failed != nil {
		err = failed
	}
	if err != nil {
		c.reset()
		return shard.Wrap(shard.CodeInternal, err, "the connection broke off")
	}
	return nil
}

// dialed is a connected socket.
type dialed struct {
	f   *os.File
	raw syscall.RawConn
}

// dialLoopback connects; the end of the request interrupts it, and all that is done with the connection later.
func dialLoopback(r *request, port int) (*dialed, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	_ = unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NODELAY, 1)
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: port, Addr: [4]byte{127, 0, 0, 1}})
	pending := err == unix.EINPROGRESS || err == unix.EINTR
	if err != nil && !pending {
		unix.Close(fd)
		return nil, dialError(port, err)
	}
	c := &dialed{f: os.NewFile(uintptr(fd), "connection")}
	if c.raw, err = c.f.SyscallConn(); err == nil {
		r.onEnd(c.interrupt)
	}
	if err == nil && pending {
		var failed error
		err = c.raw.Write(func(fd uintptr) bool {
			code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
			switch {
			case err != nil:
				failed = err
			case code != 0:
				failed = unix.Errno(code)
			default:
				if _, err := unix.Getpeername(int(fd)); err == unix.ENOTCONN {
					return false
				}
			}
			return true
		})
		if failed != nil {
			err = failed
		}
	}
	if err != nil {
		c.f.Close()
		return nil, dialError(port, err)
	}
	return c, nil
}

func dialError(port int, err error) error {
	if errors.Is(err, unix.ECONNREFUSED) {
		return shard.Errorf(guest.CodeConnectionRefused, "nothing listens on port %d of the sandbox's 127.0.0.1", port)
	}
	return os.NewSyscallError("connect", err)
}

// interrupt makes everything that waits for the socket fail.
func (c *dialed) interrupt() { _ = c.f.SetDeadline(time.Unix(1, 0)) }

// reset makes the close of the socket a reset.
func (c *dialed) reset() {
	_ = c.raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptLinger(int(fd), unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1})
	})
}

// send passes on what the host sends, and its end.
func (c *dialed) send(r *request) error {
	for {
		chunk, err := r.in.pop()
		if err == io.EOF {
			var failed error
			if err := c.raw.Control(func(fd uintptr) { failed = unix.Shutdown(int(fd), unix.SHUT_WR) }); err != nil {
				return err
			}
			if failed == unix.ENOTCONN { // reset by the server: receive hears of it
				failed = nil
			}
			return failed
		}
		if err != nil {
			return err
		}
		err = c.write(chunk)
		n := len(chunk)
		recycle(chunk)
		if err != nil {
			return err // what the server still says is passed on
		}
		r.in.consumed(n)
	}
}

func (c *dialed) write(p []byte) error {
	var failed error
	err := c.raw.Write(func(fd uintptr) bool {
		for len(p) > 0 {
			n, err := unix.Write(int(fd), p)
			switch err {
			case nil:
				p = p[n:]
			case unix.EAGAIN:
				return false
			case unix.EINTR:
			default:
				failed = err
				return true
			}
		}
		return true
	})
	if failed != nil {
		err = failed
	}
	return err
}

// receive passes on what the server sends, and its end.
func (c *dialed) receive(r *request) error {
	for {
		room, err := r.take(guest.MaxData)
		if err != nil {
			return err
		}
		var buf *[guest.MaxData]byte
		var n int
		var failed error
		err = c.raw.Read(func(fd uintptr) bool {
			buf = payloads.Get().(*[guest.MaxData]byte)
			for {
				if n, failed = unix.Read(int(fd), buf[:room]); failed != unix.EINTR {
					break
				}
			}
			if failed == unix.EAGAIN {
				payloads.Put(buf)
				return false
			}
			return true
		})
		if err == nil {
			err = failed
		}
		if err != nil {
			return err
		}
		if n = max(n, 0); n > 0 {
			err = r.s.writeData(r.id, 0, buf[:n])
		}
		payloads.Put(buf)
		r.giveBack(room - n)
		switch {
		case err != nil:
			return err
		case n == 0:
			return r.s.c.write(r.s, guest.TypeEOF, r.id, 0, nil)
		}
	}
}

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

// handshake is how long a dial waits, with the agent's processor, for a connection to stand: on a loopback that takes about
// 100 µs, and to be woken for it as much again.
const handshake = 200 * time.Microsecond

// dial passes bytes between a port of 127.0.0.1 and the host, both ways until both sides have ended. Whatever breaks off shows as
// a reset on the other side, so that half a transfer never looks whole. While nothing moves it holds two goroutines and no
// buffer.
func dial(r *request) error {
	c := r.dialed
	if c.f != nil {
		defer c.f.Close()
	}
	if err := c.connected(r); err != nil {
		return err
	}
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
	err := c.send(r) // what came with the dial goes before the Head: the server is at work while the host is told
	if failed := <-received; failed != nil {
		err = failed
	}
	if err != nil {
		c.reset()
		return shard.Wrap(shard.CodeInternal, err, "the connection broke off")
	}
	return nil
}

// dialed is a socket that connects or is connected.
type dialed struct {
	port int
	f    *os.File // nil when it could not begin
	raw  syscall.RawConn
	err  error // why
}

// beginDial begins to connect. The session's reader calls it before anything else may run: when the handler does, the
// connection often stands, and what the host sent with the dial is there.
func beginDial(r *request) *dialed {
	var args guest.DialArgs
	c := &dialed{}
	if c.err = r.Args(&args); c.err != nil {
		return c
	}
	if c.port = args.Port; c.port < 1 || c.port > shard.MaxPort {
		c.err = shard.Invalidf("%d is not a port: use 1 to %d", c.port, shard.MaxPort)
		return c
	}
	fd, err := connectLoopback(c.port)
	if err != nil {
		c.err = c.explain(err)
		return c
	}
	c.f = os.NewFile(uintptr(fd), "connection")
	c.raw, c.err = c.f.SyscallConn()
	return c
}

// connected waits until the connection stands. The end of the request interrupts that, and all that is done with the
// connection later.
func (c *dialed) connected(r *request) error {
	if c.err != nil {
		return c.err
	}
	r.onEnd(c.interrupt)
	wait := handshake
	var failed error
	err := c.raw.Write(func(fd uintptr) bool {
		switch pollWrite(fd, wait) {
		case 0:
			wait = 0 // what follows wakes us
			return false
		case unix.POLLOUT:
			return true
		}
		if code, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR); err != nil || code != 0 {
			failed = os.NewSyscallError("connect", errors.Join(err, unix.Errno(code)))
		}
		return true
	})
	if failed != nil {
		err = failed
	}
	return c.explain(err)
}

func (c *dialed) explain(err error) error {
	if errors.Is(err, unix.ECONNREFUSED) {
		return shard.Errorf(guest.CodeConnectionRefused, "nothing listens on port %d of the sandbox's 127.0.0.1", c.port)
	}
	return err
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
	for first := true; ; first = false {
		chunk, err := r.in.pop()
		if err == io.EOF {
			var failed error
			if err := c.raw.Control(func(fd uintptr) { failed = shutdownWrite(fd) }); err != nil {
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
		if first { // before it nothing is under way that could hold it up
			_ = c.raw.Control(setNoDelay)
		}
	}
}

func (c *dialed) write(p []byte) error {
	var failed error
	err := c.raw.Write(func(fd uintptr) bool {
		for len(p) > 0 {
			n, err := writeRaw(fd, p)
			if err == unix.EAGAIN {
				return false
			}
			if failed = err; err != nil {
				return true
			}
			p = p[n:]
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
	var failed error
	err := c.raw.Read(func(fd uintptr) bool {
		for {
			room, err := r.take(guest.MaxData)
			if err != nil {
				failed = err
				return true
			}
			buf := payloads.Get().(*[guest.MaxData]byte)
			n, state := fill(fd, buf[:room])
			switch {
			case n > 0:
				failed = r.s.c.writeThen(r.s, guest.TypeData, r.id, 0, buf[:n], state == io.EOF)
			case state == io.EOF:
				failed = r.s.c.write(r.s, guest.TypeEOF, r.id, 0, nil)
			}
			payloads.Put(buf)
			r.giveBack(room - n)
			switch {
			case failed != nil || state == io.EOF:
				return true
			case state == unix.EAGAIN:
				return false
			case state != nil:
				failed = state
				return true
			}
		}
	})
	if failed != nil {
		err = failed
	}
	return err
}

// fill reads all that is there, as far as there is room in p, and says why it is not more: nil when p is full, else
// EAGAIN, io.EOF or what is wrong. So an end goes out with the last bytes.
func fill(fd uintptr, p []byte) (n int, err error) {
	for n < len(p) {
		m, err := readRaw(fd, p[n:])
		switch {
		case err != nil:
			return n, err
		case m == 0:
			return n, io.EOF
		}
		n += m
	}
	return n, nil
}

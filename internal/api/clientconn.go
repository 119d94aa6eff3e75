package api

import (
	"bufio"
	"encoding/base64"
	"errors"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// clientConn is the connection of an attached client. It cuts a client that takes nothing, however slow one may be that
// takes something, and knows how much of what was written the client may not have read. The daemon's clients come by a
// unix socket, which tells.
type clientConn struct {
	net.Conn
	raw   syscall.RawConn // nil when the connection is no socket
	stall time.Duration

	began atomic.Int64 // when the write under way began, in ns since 1970; 0 when there is none
	above atomic.Int64 // at most so many bytes were unread when the last write began, its own included

	close  sync.Once
	unread int64 // at the close, at most
}

func newClientConn(conn net.Conn, stall time.Duration) *clientConn {
	c := &clientConn{Conn: conn, stall: stall}
	if sc, ok := conn.(syscall.Conn); ok {
		c.raw, _ = sc.SyscallConn()
	}
	return c
}

// looks is how often a write looks, in the time that a client may take nothing, whether it does.
const looks = 8

// Write fails when the client has taken nothing for a time.
func (c *clientConn) Write(p []byte) (int, error) {
	defer c.began.Store(0)
	now := time.Now()
	c.began.Store(now.UnixNano())
	taken := now // when the client was last seen to have taken something
	full := int64(-1)
	for done := 0; ; {
		c.above.Store(c.queued() + int64(len(p)-done))
		_ = c.SetWriteDeadline(now.Add(min(c.stall/looks, c.stall-now.Sub(taken))))
		n, err := c.Conn.Write(p[done:])
		done += n
		if err == nil || !errors.Is(err, os.ErrDeadlineExceeded) {
			return done, err
		}
		// The socket is full now. What went into it before it was says nothing about the client.
		now = time.Now()
		queued := c.queued()
		switch {
		case full >= 0 && (n > 0 || queued < full):
			taken = now
		case now.Sub(taken) >= c.stall:
			return done, err
		}
		full = queued
	}
}

// busy says that a write has waited for the client for long. A pong that waited behind it would end the connection.
func (c *clientConn) busy() bool {
	began := c.began.Load()
	return began != 0 && time.Since(time.Unix(0, began)) > time.Second
}

// queued is how much of what was written the client has not read, as the kernel counts it: rather too much than too little.
func (c *clientConn) queued() (n int64) {
	c.control(func(fd int) {
		if v, err := unix.IoctlGetInt(fd, unix.TIOCOUTQ); err == nil {
			n = int64(v)
		}
	})
	return n
}

// Close notes what the client has left. A socket whose other end was closed with something in it says so, but not how much.
func (c *clientConn) Close() error {
	c.close.Do(func() {
		c.unread = c.queued()
		c.control(func(fd int) {
			if v, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err == nil && v == int(unix.ECONNRESET) {
				c.unread = c.above.Load()
			}
		})
	})
	return c.Conn.Close()
}

// left is at most how much of what was written the client will never read. err is how reading from it ended.
func (c *clientConn) left(err error) int64 {
	_ = c.Close()
	if errors.Is(err, syscall.ECONNRESET) {
		return c.above.Load()
	}
	return c.unread
}

// whileThere calls gone when the client goes away before stop is called. It is for the time in which nobody reads.
func (c *clientConn) whileThere(gone func()) (stop func()) {
	var stopped atomic.Bool
	var timer *time.Timer
	started := make(chan struct{})
	timer = time.AfterFunc(time.Second, func() {
		<-started
		if stopped.Load() {
			return
		}
		hung := false
		c.control(func(fd int) {
			fds := []unix.PollFd{{Fd: int32(fd)}} // a descriptor fits
			n, err := unix.Poll(fds, 0)
			hung = err == nil && n > 0 && fds[0].Revents&(unix.POLLHUP|unix.POLLERR) != 0
		})
		if hung {
			gone()
			return
		}
		timer.Reset(time.Second)
	})
	close(started)
	return func() { stopped.Store(true); timer.Stop() }
}

func (c *clientConn) control(f func(fd int)) {
	if c.raw != nil {
		_ = c.raw.Control(func(fd uintptr) { f(int(fd)) })
	}
}

// hijacker hands the connection of an upgraded request out as a clientConn.
type hijacker struct {
	http.ResponseWriter
	stall time.Duration
	conn  *clientConn
}

// Hijack implements http.Hijacker.
func (h *hijacker) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	conn, rw, err := http.NewResponseController(h.ResponseWriter).Hijack()
	if err != nil {
		return nil, nil, err
	}
	h.conn = newClientConn(conn, h.stall)
	rw.Writer.Reset(h.conn)
	return h.conn, rw, nil
}

// checkUpgrade refuses a handshake as every other request is refused; the WebSocket library would answer in plain text.
func checkUpgrade(r *http.Request) error {
	keys := r.Header.Values("Sec-WebSocket-Key")
	switch {
	case r.Header.Get("Sec-WebSocket-Version") != "13":
		return shard.Invalidf("Sec-WebSocket-Version must be 13")
	case !r.ProtoAtLeast(1, 1):
		return shard.Invalidf("a WebSocket needs HTTP/1.1")
	case len(keys) != 1:
		return shard.Invalidf("a WebSocket handshake has one Sec-WebSocket-Key")
	}
	if key, err := base64.StdEncoding.DecodeString(strings.TrimSpace(keys[0])); err != nil || len(key) != 16 {
		return shard.Invalidf("Sec-WebSocket-Key is not 16 bytes in base64")
	}
	return nil
}

package egress

import (
	"io"
	"net"
	"net/http"
	"sync"
)

// What comes on a connection before it makes sense, a ClientHello or the head of a request or an answer, waits in memory until
// it is whole, and as a head takes more there than it did on the wire: that of a field of 5 bytes is 100 and more. A connection
// has freeHead bytes of it for nothing, since all have a buffer; of each more headWeight are held.
const (
	freeHead   = 2 << 10
	headWeight = 16
	// usualHead is what a head that has been read has for nothing, so that a sandbox may have as many requests as connections;
	// fieldWeight is what a field of a head takes beside its bytes, with the copy of it that is passed on.
	usualHead, fieldWeight = 8 << 10, 256
)

// A client of HTTP/2 that takes nothing can have thousands of answers of the protocol itself (to pings and settings) wait for it, of
// which each takes stuckWeight as much as the question. What is read while a write waits is counted so, beyond freeStuck, and
// bounded for all connections of a sandbox; not by its share, since where that is used up requests are still answered.
const (
	freeStuck   = 16 << 10
	stuckWeight = 4
	maxStuck    = 8 << 20
)

// heading counts what was read of a connection since it was last said to begin.
type heading struct {
	mu      sync.Mutex // before that of the client
	on      bool
	http2   bool // it does not begin again: a connection has one head at a time, of a bounded size, and bodies beside it
	writing bool
	n       int
	held    int // of the share
	stuck   int // of maxStuck
}

func (h *heading) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.http2 {
		h.on, h.n = true, 0
	}
}

// read counts n more bytes; false where the sandbox has no more room for them.
func (h *heading) read(c *client, n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case h.on:
		h.n += n
		more := max(headWeight*(h.n-freeHead)-h.held, 0)
		if !c.hold(more) {
			return false
		}
		h.held += more
	case h.http2 && h.writing:
		h.n += n
		more := max(stuckWeight*(h.n-freeStuck)-h.stuck, 0)
		h.stuck += more
		return c.stick(more) <= maxStuck
	}
	return true
}

// write says that a write begins, or that it has ended.
func (h *heading) write(c *client, begins bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.writing = begins; h.http2 {
		c.stick(-h.stuck)
		h.n, h.stuck = 0, 0
	}
}

// end says that what was read makes sense now, and is held as what it is.
func (h *heading) end(c *client, http2 bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.http2 { // more than one request is under way
		return
	}
	c.release(h.held)
	h.on, h.http2, h.n, h.held = false, http2, 0, 0
}

// close gives back what is held of a connection that is gone.
func (h *heading) close(c *client) {
	h.mu.Lock()
	defer h.mu.Unlock()
	c.release(h.held)
	c.stick(-h.stuck)
	h.on, h.http2, h.held, h.stuck = false, false, 0, 0
}

// headSize is about what the head of a request or an answer takes in memory beyond the usual, in bytes; others are the lengths of
// its other parts.
func headSize(header http.Header, others ...int) int {
	n := -usualHead
	for _, one := range others {
		n += 2 * one
	}
	for name, values := range header {
		for _, v := range values {
			n += 2*(len(name)+len(v)) + fieldWeight
		}
	}
	return max(n, 0)
}

// hostConn is a connection to a host for requests. It counts, and so do the heads of answers on it.
type hostConn struct {
	net.Conn
	client  *client
	once    sync.Once
	heading heading

	mu      sync.Mutex // before that of the client
	writing bool
	late    int // of the share, until a write that waits has ended
}

func (h *hostConn) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if !h.heading.read(h.client, n) {
		return 0, errHeld
	}
	return n, err
}

func (h *hostConn) Write(b []byte) (int, error) {
	h.write(true)
	defer h.write(false)
	return h.Conn.Write(b)
}

func (h *hostConn) write(begins bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.writing = begins; h.late > 0 {
		h.client.release(h.late)
		h.late = 0
	}
}

// release gives back n bytes of the share that a body took which is no longer read: while a write waits, what it was read into may
// wait for its turn, whatever became of the request.
func (h *hostConn) release(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.writing {
		h.late += n
		return
	}
	h.client.release(n)
}

func (h *hostConn) Close() error {
	h.once.Do(func() {
		h.client.give(h)
		h.heading.close(h.client)
	})
	return h.Conn.Close()
}

// upload is the body of a request. While it lasts, what HTTP/2 reads it into is of the sandbox's share.
type upload struct {
	io.ReadCloser
	size int // of what it is read into

	mu    sync.Mutex
	conn  *hostConn // that of which the share is taken
	ended bool
}

// begin says that the body is read for a connection; false where the share has no room.
func (u *upload) begin(conn *hostConn) bool {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ReadCloser == nil || u.conn != nil || u.ended {
		return true
	}
	if !conn.client.hold(u.size) {
		return false
	}
	u.conn = conn
	return true
}

func (u *upload) Read(b []byte) (int, error) {
	n, err := u.ReadCloser.Read(b)
	if err != nil {
		u.end()
	}
	return n, err
}

func (u *upload) Close() error {
	u.end()
	return u.ReadCloser.Close()
}

func (u *upload) end() {
	u.mu.Lock()
	defer u.mu.Unlock()
	if u.ended = true; u.conn != nil {
		u.conn.release(u.size)
		u.conn = nil
	}
}

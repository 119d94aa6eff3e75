package egress

import (
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

// heading counts what was read of a connection since it was last said to begin.
type heading struct {
	mu      sync.Mutex // before that of the client
	on      bool
	never   bool // again: of HTTP/2 a connection has one head at a time, of a bounded size, and bodies beside it
	n, held int
}

func (h *heading) begin() {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.on, h.n = !h.never, 0
}

// read counts n more bytes; false where the sandbox has no more room for them.
func (h *heading) read(c *client, n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.on {
		return true
	}
	h.n += n
	more := headWeight*(h.n-freeHead) - h.held
	if more <= 0 {
		return true
	}
	if !c.hold(more) {
		return false
	}
	h.held += more
	return true
}

// end says that what was read makes sense now, and is held as what it is.
func (h *heading) end(c *client, http2 bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.never = h.never || http2
	c.release(h.held)
	h.on, h.n, h.held = false, 0, 0
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
}

func (h *hostConn) Read(b []byte) (int, error) {
	n, err := h.Conn.Read(b)
	if !h.heading.read(h.client, n) {
		return 0, errHeld
	}
	return n, err
}

func (h *hostConn) Close() error {
	h.once.Do(func() {
		h.client.give()
		h.heading.end(h.client, false)
	})
	return h.Conn.Close()
}

package agent

import (
	"bufio"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	maxStreams = 1024     // open at once in one session, dials not counted
	maxFileOps = 64       // file operations that run at once; more wait
	maxGrown   = 16 << 20 // bytes that the windows of dials may have grown by, together
	readBuffer = 4 << 10
)

var (
	errProtocol = errors.New("the host broke the protocol")
	errHello    = errors.New("a new hello on the same channel")
)

// conn is one byte channel to the host. Sessions may follow each other on it.
type conn struct {
	f   *os.File
	raw syscall.RawConn
	r   *bufio.Reader

	birth bool // the connected socket that PID 1 was born with: it is never closed

	mu     sync.Mutex // held over each frame's write: frames are never mixed
	cur    *session   // whose frames may be written
	header [guest.HeaderSize + 1]byte
	last   [guest.HeaderSize]byte
	iov    [maxPieces][]byte
}

// newConn makes a channel of a connected stream socket, which it owns from then on.
func newConn(fd int) (*conn, error) {
	if err := unix.SetNonblock(fd, true); err != nil {
		unix.Close(fd)
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "channel")
	raw, err := f.SyscallConn()
	if err != nil {
		f.Close()
		return nil, err
	}
	c := &conn{f: f, raw: raw}
	c.r = bufio.NewReaderSize(c, readBuffer)
	return c, nil
}

// Read implements io.Reader.
func (c *conn) Read(p []byte) (n int, err error) {
	var failed error
	err = c.raw.Read(func(fd uintptr) bool {
		n, failed = readRaw(fd, p)
		return failed != unix.EAGAIN
	})
	switch {
	case err != nil:
		return 0, err
	case failed != nil:
		return 0, failed
	case n == 0 && len(p) > 0:
		return 0, io.EOF
	}
	return n, nil
}

// readHello drops bytes until the host's magic, and returns what follows it.
func (c *conn) readHello() (token [guest.TokenSize]byte, epoch [guest.EpochSize]byte, err error) {
	for matched := 0; matched < len(guest.HostMagic); {
		b, err := c.r.ReadByte()
		switch {
		case err != nil:
			return token, epoch, err
		case b == guest.HostMagic[matched]:
			matched++
		case b == guest.HostMagic[0]: // the only place in the magic with this byte
			matched = 1
		default:
			matched = 0
		}
	}
	if _, err = io.ReadFull(c.r, token[:]); err == nil {
		_, err = io.ReadFull(c.r, epoch[:])
	}
	return token, epoch, err
}

// write sends one frame of s, or fails when s is no longer the channel's session.
func (c *conn) write(s *session, t guest.Type, stream uint32, channel byte, payload []byte) error {
	return c.writeThen(s, t, stream, channel, payload, false)
}

// writeThen is write, and with end the stream's end goes out behind the frame, at once.
func (c *conn) writeThen(s *session, t guest.Type, stream uint32, channel byte, payload []byte, end bool) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cur != s {
		return errGone
	}
	head := c.header[:guest.HeaderSize]
	n := len(payload)
	if channel != 0 {
		head = c.header[:]
		head[guest.HeaderSize] = channel
		n++
	}
	guest.Header{Size: n, Type: t, Stream: stream}.Put(head)
	var last []byte
	if end {
		last = c.last[:]
		guest.Header{Type: guest.TypeEOF, Stream: stream}.Put(last)
	}
	return c.writev(head, payload, last)
}

// writev writes the pieces. The caller holds mu.
func (c *conn) writev(pieces ...[]byte) error {
	left := c.iov[:copy(c.iov[:], pieces)]
	var failed error
	err := c.raw.Write(func(fd uintptr) bool {
		for {
			for len(left) > 0 && len(left[0]) == 0 {
				left = left[1:]
			}
			if len(left) == 0 {
				return true
			}
			n, err := writevRaw(fd, left)
			switch {
			case err == unix.EAGAIN:
				return false
			case err != nil:
				failed = err
				return true
			}
			for i := range left {
				done := min(n, len(left[i]))
				left[i] = left[i][done:]
				n -= done
			}
		}
	})
	clear(c.iov[:])
	if failed != nil {
		err = failed
	}
	return err
}

// session is the time between one hello and the next, or the loss of the channel.
type session struct {
	a    *agent
	c    *conn
	slot chan struct{} // one for each file operation that runs

	mu      sync.Mutex
	streams map[uint32]*request
	dials   int    // of the streams
	last    uint32 // the highest stream id so far: ids only grow, so none is used twice
	lost    bool

	grown atomic.Int64 // bytes that the windows of dials have grown by
}

func newSession(a *agent, c *conn) *session {
	return &session{a: a, c: c, slot: make(chan struct{}, maxFileOps), streams: map[uint32]*request{}}
}

// run reads frames until the channel ends or the host breaks the protocol. It never waits for anything but the next
// frame: what could block runs in the handlers' goroutines.
func (s *session) run() error {
	for {
		head, err := s.c.r.Peek(guest.HeaderSize)
		if err != nil {
			return err
		}
		if string(head[:len(guest.HostMagic)]) == guest.HostMagic {
			return errHello
		}
		h := guest.ParseHeader(head)
		most := 0
		switch h.Type {
		case guest.TypeOpen:
			most = guest.MaxOpen
		case guest.TypeData:
			most = guest.MaxData
		case guest.TypeCredit:
			most = 4
		case guest.TypeEOF, guest.TypeReset:
		default:
			return errProtocol
		}
		if h.Size > most || h.Type == guest.TypeCredit && h.Size != 4 {
			return errProtocol
		}
		s.c.r.Discard(guest.HeaderSize)
		payload := newPayload(h)
		if _, err := io.ReadFull(s.c.r, payload); err != nil {
			return err
		}
		if err := s.take(h.Type, h.Stream, payload); err != nil {
			return err
		}
	}
}

// newPayload is memory for a frame's payload. What is large and has come as Data is recycled by who consumes it.
func newPayload(h guest.Header) []byte {
	if h.Type == guest.TypeData && h.Size > guest.MaxData/4 {
		return payloads.Get().(*[guest.MaxData]byte)[:h.Size]
	}
	return make([]byte, h.Size)
}

// take handles one frame.
func (s *session) take(t guest.Type, id uint32, payload []byte) error {
	if t == guest.TypeOpen {
		return s.open(id, payload)
	}
	s.mu.Lock()
	r, known := s.streams[id], id <= s.last
	s.mu.Unlock()
	if !known {
		return errProtocol
	}
	if r == nil {
		return nil // the frame crossed our Done
	}
	switch t {
	case guest.TypeData:
		return r.inbox().push(r, payload)
	case guest.TypeCredit:
		n := binary.BigEndian.Uint32(payload)
		if n > guest.Window+guest.Tail {
			return errProtocol
		}
		return r.addCredit(int(n))
	case guest.TypeEOF:
		r.inbox().pushEOF(r)
	case guest.TypeReset:
		r.end()
	}
	return nil
}

// open starts the handler of a new stream.
func (s *session) open(id uint32, payload []byte) error {
	var open guest.Open
	if err := json.Unmarshal(payload, &open); err != nil {
		return errProtocol
	}
	r := &request{s: s, id: id, op: open.Op, args: open.Args, gone: make(chan struct{}), credit: guest.Window}
	r.cond.L = &r.mu
	r.in = newInbox(r)
	isDial := open.Op == guest.OpDial
	if isDial {
		r.credit, r.in.room, r.in.window = guest.DialWindow, guest.DialWindow, guest.DialWindow
	}
	if err := s.enter(r, isDial); err != nil {
		return err
	}
	if isDial {
		r.dialed = beginDial(r)
	}
	go s.handle(r)
	return nil
}

// enter takes a new stream in.
func (s *session) enter(r *request, isDial bool) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.lost || r.id <= s.last || isDial && s.dials >= guest.MaxDials || !isDial && len(s.streams)-s.dials >= maxStreams {
		return errProtocol
	}
	s.last = r.id
	s.streams[r.id] = r
	if isDial {
		s.dials++
	}
	return nil
}

func (s *session) handle(r *request) {
	if h, ok := s.a.ops[r.op]; ok {
		done, err := h(r)
		r.finish(done, err)
		return
	}
	h, ok := handlers[r.op]
	if !ok {
		r.finish(guest.Done{}, shard.Errorf(shard.CodeUnsupported, "shard-init knows no operation %s", shard.Quote(r.op)))
		return
	}
	s.slot <- struct{}{}
	err := h(r)
	<-s.slot
	r.finish(guest.Done{}, err)
}

// forget frees the stream's id.
func (s *session) forget(r *request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.streams, r.id)
	if r.op == guest.OpDial {
		s.dials--
	}
}

// lose ends every request of the session; commands run on.
func (s *session) lose() {
	s.c.f.SetWriteDeadline(time.Unix(1, 0)) // a writer may wait, with the lock, for a host that does not read
	s.c.mu.Lock()
	if s.c.cur == s {
		s.c.cur = nil
	}
	s.c.mu.Unlock()
	s.mu.Lock()
	s.lost = true
	all := make([]*request, 0, len(s.streams))
	for _, r := range s.streams {
		all = append(all, r)
	}
	s.mu.Unlock()
	for _, r := range all {
		r.end()
	}
}

func (s *session) writeJSON(id uint32, t guest.Type, v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return s.c.write(s, t, id, 0, raw)
}

// writeData sends p, at most guest.MaxData bytes; channel is 0 but for the output of a command.
func (s *session) writeData(id uint32, channel byte, p []byte) error {
	return s.c.write(s, guest.TypeData, id, channel, p)
}

func (s *session) writeCredit(id uint32, n int) {
	var b [4]byte
	binary.BigEndian.PutUint32(b[:], uint32(n))
	_ = s.c.write(s, guest.TypeCredit, id, 0, b[:])
}

// begin answers the hello and makes s the session whose frames go out.
func (c *conn) begin(s *session, epoch [guest.EpochSize]byte) error {
	c.f.SetWriteDeadline(time.Time{})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.cur = s
	return c.writev([]byte(guest.GuestMagic), epoch[:])
}

// Package stream holds what a command wrote until a client reads it: a bounded ring in a file, which survives the
// daemon, replays to one reader at a time, and counts every byte that no reader ever got. It also holds the message
// form of the API's byte streams. It knows nothing of sandboxes, sockets or the agent.
package stream

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sync"
)

// Held is how many of the newest bytes of one command are kept, both channels together.
const Held = 8 << 20

// The ring file: a header page, then ringSize bytes in which frames follow one another and wrap around. A frame is a
// uint32, the channel in the top byte and the length in the rest, and the bytes. A program that changes channels every
// few bytes pays with the room of the frame heads; then a little less than Held is kept, and the rest counted as lost.
const (
	magic      = "shardsp1"
	headerSize = 4096
	ringSize   = Held + 1<<20
	frameHead  = 4
	maxFrame   = 64 << 10
	// slack is room that is never used, so that no append overwrites what the header of the one before still counts as held.
	slack = maxFrame + frameHead
)

// ErrInUse says that another reader is attached.
var ErrInUse = errors.New("another client is attached")

// ErrClosed says that the spool was closed under the caller.
var ErrClosed = errors.New("the held output is gone")

// state is the header, written after each append, so that a daemon that is killed in between finds the ring as it was
// before, and asks the agent for the rest again. Positions count ring bytes from the beginning of time.
type state struct {
	Tail, Head int64 // ring positions of the oldest frame and behind the newest
	Last       int64 // ring position of the newest frame, which may still grow
	First      int64 // payload bytes before the oldest frame
	Floor      int64 // payload bytes before the oldest byte that counts as held: in the oldest frame or at its end
	End        int64 // payload bytes in all
	Seen       int64 // payload bytes that some reader got, or that lie before such
	Lost       int64 // payload bytes dropped unseen
}

// Spool is the held output of one command. One goroutine appends; any may use the rest.
type Spool struct {
	path     string
	underWay int64 // ring bytes that what is not acknowledged may take

	mu       sync.Mutex
	f        *os.File // nil until the first byte: most commands write little or nothing
	st       state
	tailLen  int // payload of the frame at st.Tail; -1 when not known
	lastLen  int // payload of the frame at st.Last; 0 when it may not grow
	lastChan byte
	scratch  []byte
	acked    int64
	ended    bool
	closed   bool
	failed   error
	reader   *Reader
	readers  int           // that were not closed
	changed  chan struct{} // closed and replaced when something a reader waits for changes
	ack      func(n int)
}

// New makes an empty spool. The file at path comes with the first byte of output. window is how many unacknowledged bytes
// the other side may have under way, in how many pieces of one channel.
func New(path string, window, pieces int) *Spool {
	underWay := int64(window) + int64(pieces+2*window/maxFrame)*frameHead
	return &Spool{path: path, underWay: underWay, tailLen: -1, changed: make(chan struct{})}
}

// Open takes up a file that an earlier daemon wrote; where there is none, nothing was written.
func Open(path string, window, pieces int) (*Spool, error) {
	s := New(path, window, pieces)
	f, err := os.OpenFile(path, os.O_RDWR, 0o600)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("open the file of held output: %w", err)
	}
	s.f = f
	var b [8 + 8*8]byte
	switch _, err := f.ReadAt(b[:], 0); {
	case err == io.EOF: // nothing was ever appended
		return s, nil
	case err != nil:
		f.Close()
		return nil, fmt.Errorf("read the header of held output: %w", err)
	case string(b[:8]) != magic:
		f.Close()
		return nil, errors.New("the file of held output is damaged")
	}
	for i, p := range s.st.fields() {
		*p = int64(binary.BigEndian.Uint64(b[8+8*i:]))
	}
	if st := s.st; st.Tail < 0 || st.Tail > st.Last || st.Last > st.Head || st.Head-st.Tail > ringSize ||
		st.First < 0 || st.First > st.Floor || st.Floor > st.End || st.Seen < 0 || st.Seen > st.End {
		f.Close()
		return nil, errors.New("the file of held output is damaged")
	}
	s.acked = s.st.End
	if err := s.mend(); err != nil {
		f.Close()
		return nil, err
	}
	return s, nil
}

// mend makes the newest frame end at the ring's head: a daemon that was killed while it let the frame grow may have
// written the new length and not the header.
func (s *Spool) mend() error {
	n := s.st.Head - s.st.Last - frameHead
	if s.st.Head == s.st.Last {
		return nil
	}
	if n < 0 || n > maxFrame {
		return errors.New("the file of held output is damaged")
	}
	var h [frameHead]byte
	if err := s.readRing(s.st.Last, h[:]); err != nil {
		return err
	}
	return s.writeRing(s.st.Last, binary.BigEndian.AppendUint32(nil, uint32(h[0])<<24|uint32(n)))
}

func (st *state) fields() [8]*int64 {
	return [8]*int64{&st.Tail, &st.Head, &st.Last, &st.First, &st.Floor, &st.End, &st.Seen, &st.Lost}
}

// Resume begins a new session with whatever writes the program's output: it goes on behind the offset returned, and what
// is held counts as acknowledged.
func (s *Spool) Resume() (offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ack, s.acked = nil, s.st.End
	return s.st.End
}

// OnAck names the function that is told how many more bytes of the program's output are safe here, so that the program
// may write as many more. It is called without locks held, from here, from Append, and from a reader's methods.
func (s *Spool) OnAck(ack func(n int)) {
	s.mu.Lock()
	s.ack = ack
	tell := s.takeAck()
	s.mu.Unlock()
	tell()
}

// Append takes the next bytes of the program's output. It never waits for a reader: the reader's share is bounded by
// what is acknowledged. Once the file cannot be written, because the host's disk is full or broken, what comes counts as
// lost, and the program goes on; the error says so once. After Close it takes nothing, and acknowledges nothing.
func (s *Spool) Append(channel byte, p []byte) error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return ErrClosed
	}
	var err error
	for len(p) > 0 {
		n := min(len(p), maxFrame)
		if s.failed == nil {
			s.failed = s.append(channel, p[:n])
			err = s.failed
		}
		if s.failed != nil {
			s.st.End += int64(n)
			s.st.Lost += int64(n)
		}
		p = p[n:]
	}
	tell := s.takeAck()
	s.wake()
	s.mu.Unlock()
	tell()
	return err
}

// Skip notes that the output before offset exists no more, neither here nor with whatever writes it: an earlier daemon
// could not hold it. What is held is dropped with it, since it lies before the gap.
func (s *Spool) Skip(offset int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if offset <= s.st.End {
		return
	}
	s.st.raise(offset)
	s.st.Tail, s.st.Last = s.st.Head, s.st.Head
	s.st.First, s.st.End, s.acked = offset, offset, offset
	s.tailLen, s.lastLen = -1, 0
	if r := s.reader; r != nil {
		r.pass(&s.st)
	}
	s.wake()
}

func (s *Spool) append(channel byte, p []byte) error {
	if s.f == nil {
		f, err := os.OpenFile(s.path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
		if err != nil {
			return fmt.Errorf("make the file of held output: %w", err)
		}
		s.f = f
	}
	st := s.st
	grow := s.lastLen > 0 && s.lastChan == channel && s.lastLen+len(p) <= maxFrame
	need := int64(len(p))
	if !grow {
		need += frameHead
	}
	floor := st.End + int64(len(p)) - Held
	if r := s.reader; r != nil { // it gets what it is owed: the ring has room for what is under way
		floor = min(floor, r.got)
	}
	st.raise(floor)
	for st.Tail < st.Last {
		if s.tailLen < 0 {
			_, n, err := s.frameAt(st.Tail, st.Head)
			if err != nil {
				return err
			}
			s.tailLen = n
		}
		n := s.tailLen
		end := st.First + int64(n)
		if full := st.Head-st.Tail+need > ringSize-slack; !full && end > st.Floor {
			break
		}
		st.raise(end)
		st.First = end
		st.Tail += frameHead + int64(n)
		s.tailLen = -1
		if r := s.reader; r != nil && r.pos < st.Tail { // only when a session broke while the reader was far behind
			r.pass(&st)
		}
	}
	length := len(p)
	if grow {
		length += s.lastLen
		if err := s.writeRing(st.Head, p); err != nil {
			return err
		}
		if err := s.writeRing(st.Last, binary.BigEndian.AppendUint32(nil, uint32(channel)<<24|uint32(length))); err != nil {
			return err
		}
	} else {
		s.scratch = binary.BigEndian.AppendUint32(s.scratch[:0], uint32(channel)<<24|uint32(length))
		s.scratch = append(s.scratch, p...)
		if err := s.writeRing(st.Head, s.scratch); err != nil {
			return err
		}
		st.Last = st.Head
		st.Head += frameHead
	}
	st.Head += int64(len(p))
	st.End += int64(len(p))
	if err := s.writeHeader(st); err != nil {
		return err
	}
	if st.Tail == st.Last {
		s.tailLen = length
	}
	s.st, s.lastLen, s.lastChan = st, length, channel
	return nil
}

// raise moves the floor up, and counts what no reader got.
func (st *state) raise(floor int64) {
	if floor <= st.Floor {
		return
	}
	if unseen := floor - max(st.Floor, st.Seen); unseen > 0 {
		st.Lost += unseen
	}
	st.Floor = floor
}

// frameAt reads the head of the frame at pos.
func (s *Spool) frameAt(pos, head int64) (channel byte, n int, err error) {
	var h [frameHead]byte
	if err := s.readRing(pos, h[:]); err != nil {
		return 0, 0, err
	}
	v := binary.BigEndian.Uint32(h[:])
	n = int(v & 0xffffff)
	if n > maxFrame || int64(n) > head-pos-frameHead {
		return 0, 0, errors.New("the file of held output is damaged")
	}
	return byte(v >> 24), n, nil
}

func (s *Spool) writeHeader(st state) error {
	var b [8 + 8*8]byte
	copy(b[:], magic)
	for i, p := range st.fields() {
		binary.BigEndian.PutUint64(b[8+8*i:], uint64(*p))
	}
	if _, err := s.f.WriteAt(b[:], 0); err != nil {
		return fmt.Errorf("hold output: %w", err)
	}
	return nil
}

func (s *Spool) writeRing(pos int64, p []byte) error {
	off := pos % ringSize
	first := min(int64(len(p)), ringSize-off)
	if _, err := s.f.WriteAt(p[:first], headerSize+off); err != nil {
		return fmt.Errorf("hold output: %w", err)
	}
	if rest := p[first:]; len(rest) > 0 {
		if _, err := s.f.WriteAt(rest, headerSize); err != nil {
			return fmt.Errorf("hold output: %w", err)
		}
	}
	return nil
}

func (s *Spool) readRing(pos int64, p []byte) error {
	off := pos % ringSize
	first := min(int64(len(p)), ringSize-off)
	if _, err := s.f.ReadAt(p[:first], headerSize+off); err != nil {
		return fmt.Errorf("read held output: %w", err)
	}
	if rest := p[first:]; len(rest) > 0 {
		if _, err := s.f.ReadAt(rest, headerSize); err != nil {
			return fmt.Errorf("read held output: %w", err)
		}
	}
	return nil
}

// takeAck works out what may be acknowledged now: everything, unless a reader is so far behind that what is under way
// could push out what it has not read.
func (s *Spool) takeAck() func() {
	n := s.st.End - s.acked
	if n <= 0 || s.ack == nil {
		return func() {}
	}
	if s.reader != nil && s.st.Head-s.reader.pos > ringSize-slack-s.underWay {
		return func() {}
	}
	s.acked = s.st.End
	ack := s.ack
	return func() { ack(int(n)) }
}

func (s *Spool) wake() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Finish says that there will be no more output.
func (s *Spool) Finish() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended = true
	s.ack = nil
	s.rest()
	s.wake()
}

// rest frees what an ended command's output does not need until somebody reads it: there may be thousands of them.
func (s *Spool) rest() {
	if !s.ended || s.readers > 0 || s.closed {
		return
	}
	s.scratch = nil
	if s.f != nil {
		_ = s.f.Close() // all of it was written: there is nothing to lose
		s.f = nil
	}
}

// End is how many bytes the program has written, as far as they arrived here.
func (s *Spool) End() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.st.End
}

// Lost is how many bytes were dropped before any reader got them.
func (s *Spool) Lost() int64 {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.st.Lost
}

// Close ends every reader and closes the file; removing it is the caller's.
func (s *Spool) Close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil
	}
	s.closed = true
	s.wake()
	if s.f == nil {
		return nil
	}
	return s.f.Close()
}

// Reader replays what is held and then follows. While it is attached nothing that it has not read is dropped: the
// program waits instead.
type Reader struct {
	s     *Spool
	pos   int64 // ring position of the frame to read next
	inner int   // bytes of that frame already read
	done  bool  // Close was called
	got   int64 // payload bytes that reached the client, or lie before the first that did
	sure  int64 // payload bytes that some client surely has, or that are counted as lost
	buf   []byte
}

// pass moves the reader over what was dropped before it read it.
func (r *Reader) pass(st *state) { r.pos, r.inner, r.got, r.sure = st.Tail, 0, st.First, st.First }

// Attach makes the spool's only reader, from the oldest byte held; ErrInUse when there is one already.
func (s *Spool) Attach() (*Reader, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case s.closed:
		return nil, ErrClosed
	case s.reader != nil:
		return nil, ErrInUse
	}
	if s.f == nil && s.st.Head > 0 {
		f, err := os.OpenFile(s.path, os.O_RDWR, 0o600)
		if err != nil {
			return nil, fmt.Errorf("open the file of held output: %w", err)
		}
		s.f = f
	}
	s.reader = &Reader{s: s, pos: s.st.Tail, inner: int(s.st.Floor - s.st.First), got: s.st.Floor, sure: s.st.Seen}
	s.readers++
	return s.reader, nil
}

// Attached says whether there is a reader.
func (s *Spool) Attached() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.reader != nil
}

// Next returns the next piece of output as a message of the API's byte streams: the channel in the first byte, then at
// most 64 KiB, valid until the next call. It waits for it until wait is closed (ErrClosed), and says io.EOF when the
// output has ended and all of it was read.
func (r *Reader) Next(wait <-chan struct{}) (message []byte, err error) {
	for {
		message, changed, err := r.next()
		if message != nil || err != nil {
			return message, err
		}
		select {
		case <-changed:
		case <-wait:
			return nil, ErrClosed
		}
	}
}

func (r *Reader) next() (message []byte, changed <-chan struct{}, err error) {
	s := r.s
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.reader != r {
		return nil, nil, ErrClosed
	}
	for r.pos < s.st.Head {
		channel, n, err := s.lastChan, s.lastLen, error(nil)
		if r.pos != s.st.Last || n == 0 {
			channel, n, err = s.frameAt(r.pos, s.st.Head)
		}
		if err != nil {
			return nil, nil, err
		}
		if r.inner >= n {
			if r.pos == s.st.Last { // it may still grow
				break
			}
			r.pos, r.inner = r.pos+frameHead+int64(n), 0
			continue
		}
		size := 1 + n - r.inner
		if size > cap(r.buf) { // most commands write little
			r.buf = make([]byte, min(4*size, 1+maxFrame))
		}
		message := r.buf[:size]
		message[0] = channel
		if err := s.readRing(r.pos+frameHead+int64(r.inner), message[1:]); err != nil {
			return nil, nil, err
		}
		r.inner = n
		return message, nil, nil
	}
	if s.ended {
		return nil, nil, io.EOF
	}
	return nil, s.changed, nil
}

// Consumed says that n of the bytes that Next returned were passed on to the client. It is stored at once, so that a
// daemon that is killed counts at most one message as lost that was not.
func (r *Reader) Consumed(n int) {
	s := r.s
	s.mu.Lock()
	r.got += int64(n)
	tell := func() {}
	if s.reader == r && !s.closed {
		if r.got > s.st.Seen {
			s.st.Seen = r.got
			s.note()
		}
		tell = s.takeAck()
	}
	s.mu.Unlock()
	tell()
}

// Release lets another reader attach after Next said io.EOF. Close is still to come, with what is known by then.
func (r *Reader) Release() {
	r.s.mu.Lock()
	defer r.s.mu.Unlock()
	if r.s.reader == r && r.s.ended {
		r.s.reader = nil
	}
}

// Close detaches the reader: another may attach, and the program no longer waits. unread is how many of the last bytes
// that were passed on may have stayed in a buffer on the way: they count as not read.
func (r *Reader) Close(unread int64) {
	s := r.s
	s.mu.Lock()
	tell := func() {}
	if !r.done {
		r.done = true
		s.readers--
		if sure := max(r.sure, r.got-max(unread, 0)); sure < s.st.Seen {
			s.st.Lost += max(0, min(s.st.Seen, s.st.Floor)-sure) // dropped since, as read
			s.st.Seen = sure
			s.note()
		}
		if s.reader == r {
			s.reader = nil
			tell = s.takeAck()
		}
		s.rest()
	}
	s.mu.Unlock()
	tell()
}

// note stores the counters alone. It is no failure of the output that it cannot.
func (s *Spool) note() {
	if s.f != nil && s.failed == nil && !s.closed {
		_ = s.writeHeader(s.st)
	}
}

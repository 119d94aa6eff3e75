package agent

import (
	"errors"
	"os"
	"sort"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/guest"
)

const (
	// After a command has ended, what it wrote itself is in its pipes and is read whatever it takes. A process that it
	// left behind may hold the pipes open: it is heard until it is silent for drainQuiet, at most drainMost in all.
	drainQuiet = 200 * time.Millisecond
	drainMost  = 2 * time.Second

	smallSlab = 4 << 10   // of a command that writes little; later ones have guest.MaxData
	largePipe = 256 << 10 // more would eat the kernel's budget of pipe pages, which all sandboxes share
)

// piece is output of one channel, contiguous in memory, and its offset.
type piece struct {
	offset  int64
	channel byte
	data    []byte
	slab    *slab
}

// slab is memory that pieces lie in, one behind the other.
type slab struct {
	buf    []byte
	used   int  // by the reader that fills it
	pieces int  // that are still held; guarded by output.mu
	full   bool // no more will come; guarded by output.mu
}

// payloads holds payloads of guest.MaxData bytes. Without it a transfer would keep the collector busy; it empties itself
// when nothing moves.
var payloads = sync.Pool{New: func() any { return new([guest.MaxData]byte) }}

// recycle gives a buffer back that nobody looks at any more, if it is one from payloads.
func recycle(b []byte) {
	if cap(b) == guest.MaxData {
		payloads.Put((*[guest.MaxData]byte)(b[:guest.MaxData]))
	}
}

// output is what a command, or a process over all its runs, has written and the host does not hold yet, at most
// guest.Window bytes and, after its end, tail more, in the order in which it was read. The lock comes before a request's. Offsets count the bytes of
// both channels.
type output struct {
	mu       sync.Mutex
	cond     sync.Cond
	pieces   []piece
	base     int64 // what the host holds: the offset of the first piece
	end      int64 // the offset behind the last piece
	reserved int   // room that readers have taken for a read in progress
	readers  int   // channels not at their end
	files    []*os.File
	ended    time.Time // when the command ended; zero before
	exit     guest.Exit
	tail     int
	sender   *request // the stream that the output goes to
	sent     int64    // by sender; base ≤ sent ≤ end
	lasting  bool     // a process's: it is over when it is closed, not when a run has ended
	closed   bool
}

func newOutput() *output {
	o := &output{}
	o.cond.L = &o.mu
	return o
}

// begin says that a run begins, which writes to files.
func (o *output) begin(files []*os.File) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.files, o.readers, o.ended = files, len(files), time.Time{}
}

// drain waits until all that the run that has ended wrote was read, and returns the offset behind it.
func (o *output) drain() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	for o.readers > 0 {
		o.cond.Wait()
	}
	return o.end
}

// close says that there will be no other run.
func (o *output) close() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.closed = true
	o.cond.Broadcast()
}

// over says whether no more output can come. The caller holds mu.
func (o *output) over() bool {
	if o.lasting {
		return o.closed
	}
	return !o.ended.IsZero() && o.readers == 0
}

// told says whether nothing is left to read, and nothing to send to a host that listens.
func (o *output) told() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.readers == 0 && (o.sender == nil || o.sent == o.end)
}

// follow reads f until its end and appends what comes to the output.
func (o *output) follow(f *os.File, channel byte) {
	defer func() {
		f.Close()
		o.mu.Lock()
		o.readers--
		o.cond.Broadcast()
		o.mu.Unlock()
	}()
	mem := &slab{buf: make([]byte, smallSlab)}
	defer func() { o.retire(mem) }()
	must := -1 // after the end of the command: bytes that it surely wrote itself and that were not read yet
	for {
		if len(mem.buf)-mem.used < len(mem.buf)/8 {
			if len(mem.buf) == smallSlab {
				grow(f)
			}
			o.retire(mem)
			mem = &slab{buf: payloads.Get().(*[guest.MaxData]byte)[:]}
		}
		room, ended := o.reserve(len(mem.buf)-mem.used, must)
		if !ended.IsZero() {
			if must < 0 {
				must = buffered(f)
			}
			if must == 0 && time.Since(ended) > drainMost {
				o.append(channel, mem, 0, room)
				return
			}
			f.SetReadDeadline(time.Now().Add(drainQuiet))
		}
		if room == 0 {
			continue
		}
		free := mem.buf[mem.used : mem.used+room]
		n, err := f.Read(free)
		if os.IsTimeout(err) {
			if ended.IsZero() {
				o.append(channel, mem, 0, room) // the command has just ended: read on under the rules above
				continue
			}
			n, err = readNow(f, free) // the deadline may have passed without a look
		}
		if errors.Is(err, unix.EIO) { // a terminal that is closed while the kernel looks says so before its last bytes
			n, err = readNow(f, free)
		}
		o.append(channel, mem, max(n, 0), room)
		if n <= 0 || err != nil {
			return
		}
		if must > 0 {
			must = max(must-n, 0)
		}
	}
}

// grow makes f's pipe larger, for a command that writes much; it is no error if the kernel will not.
func grow(f *os.File) {
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { _, _ = unix.FcntlInt(fd, unix.F_SETPIPE_SZ, largePipe) })
	}
}

// buffered is how many bytes wait in f.
func buffered(f *os.File) (n int) {
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) { n, _ = unix.IoctlGetInt(int(fd), unix.TIOCINQ) })
	}
	return n
}

// readNow reads what is there without waiting; 0 bytes when nothing is.
func readNow(f *os.File, p []byte) (n int, err error) {
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	err2 := raw.Control(func(fd uintptr) { n, err = unix.Read(int(fd), p) })
	if err == nil {
		err = err2
	}
	return n, err
}

// reserve waits for room of at most n bytes and takes it. Once the command has ended there may be none: then the caller
// finds out what it must read, -1 so far, and waits for no more than drainMost when that is nothing.
func (o *output) reserve(n, must int) (room int, ended time.Time) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		most, pieces := guest.Window, guest.Pieces
		switch {
		case o.ended.IsZero():
		case o.lasting:
			most += largePipe // the next run, and who waits for this one's end, must not depend on a host that reads
		default:
			most, pieces = most+o.tail, 2*pieces
		}
		if room = most - int(o.end-o.base) - o.reserved; room > 0 && len(o.pieces) < pieces {
			room = min(room, n)
			o.reserved += room
			return room, o.ended
		}
		if !o.ended.IsZero() && !o.lasting && must <= 0 {
			rest := time.Until(o.ended.Add(drainMost))
			if must < 0 || rest < 0 {
				return 0, o.ended
			}
			timer := time.AfterFunc(rest+time.Millisecond, o.wake)
			o.cond.Wait()
			timer.Stop()
			continue
		}
		o.cond.Wait()
	}
}

// append adds the n bytes behind what is used of mem, and gives the reserved room back.
func (o *output) append(channel byte, mem *slab, n, reserved int) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.reserved -= reserved
	if n > 0 {
		last := len(o.pieces) - 1
		if last >= 0 && o.pieces[last].slab == mem {
			p := &o.pieces[last]
			p.data = p.data[:len(p.data)+n]
		} else {
			o.pieces = append(o.pieces, piece{o.end, channel, mem.buf[mem.used : mem.used+n], mem})
			mem.pieces++
		}
		mem.used += n
		o.end += int64(n)
	}
	o.cond.Broadcast()
}

// retire says that mem gets no more pieces.
func (o *output) retire(mem *slab) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if mem.full = true; mem.pieces == 0 {
		recycle(mem.buf)
	}
}

// ack drops n bytes that the host holds now.
func (o *output) ack(n int) error {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.base+int64(n) > o.sent {
		return errProtocol
	}
	o.drop(n)
	return nil
}

// drop forgets the first n bytes. The caller holds mu.
func (o *output) drop(n int) {
	o.base += int64(n)
	i := 0
	for n > 0 {
		p := &o.pieces[i]
		if n < len(p.data) {
			p.data = p.data[n:]
			p.offset += int64(n)
			break
		}
		n -= len(p.data)
		if p.slab.pieces--; p.slab.pieces == 0 && p.slab.full {
			recycle(p.slab.buf)
		}
		*p = piece{}
		i++
	}
	o.pieces = o.pieces[i:]
	if len(o.pieces) == 0 {
		o.pieces = nil
	}
	o.cond.Broadcast()
}

// attach makes r the sender of what lies behind offset; the host holds what lies before, and takes tail bytes more than the
// window at the end.
func (o *output) attach(r *request, offset int64, tail int) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if offset < o.base || offset > o.end {
		return false
	}
	o.drop(int(offset - o.base))
	o.sent, o.sender, o.tail = offset, r, tail
	r.mu.Lock()
	r.out = o
	r.mu.Unlock()
	return true
}

// next waits for bytes to send; nil and an exit when all was sent and the command has ended, errGone when r is no
// longer the sender.
func (o *output) next(r *request) (piece, *guest.Exit, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for {
		select {
		case <-r.gone:
			return piece{}, nil, errGone
		default:
		}
		if o.sender != r {
			return piece{}, nil, errGone
		}
		credit := guest.Window - int(o.sent-o.base)
		if !o.ended.IsZero() {
			credit += o.tail
		}
		if o.sent < o.end && credit > 0 {
			p := o.pieces[sort.Search(len(o.pieces), func(i int) bool { return o.pieces[i].offset > o.sent })-1]
			skip := int(o.sent - p.offset)
			p.data = p.data[skip:min(len(p.data), skip+min(guest.MaxData, credit))]
			o.sent += int64(len(p.data))
			return p, nil, nil
		}
		if o.sent == o.end && o.over() {
			exit := o.exit
			return piece{}, &exit, nil
		}
		o.cond.Wait()
	}
}

// send sends what comes until the output is over, and how it ended.
func (o *output) send(r *request) (guest.Done, error) {
	for {
		p, exit, err := o.next(r)
		switch {
		case err != nil:
			return guest.Done{}, err
		case exit != nil:
			return guest.Done{Exit: exit}, nil
		}
		if err := r.s.writeData(r.id, p.channel, p.data); err != nil {
			return guest.Done{}, err
		}
	}
}

// finish notes how the command ended and makes its readers drain what is left.
func (o *output) finish(exit guest.Exit) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.exit, o.ended = exit, time.Now()
	for _, f := range o.files {
		f.SetReadDeadline(time.Unix(1, 0)) // before any reader can see ended and set its own
	}
	o.cond.Broadcast()
}

// wake makes next look again.
func (o *output) wake() {
	o.mu.Lock()
	o.cond.Broadcast()
	o.mu.Unlock()
}

// held is the offset of the first byte that the host does not hold.
func (o *output) held() int64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.base
}

// done says how the command ended, nil while it runs or output is left to read.
func (o *output) done() *guest.Exit {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended.IsZero() || o.readers > 0 {
		return nil
	}
	exit := o.exit
	return &exit
}

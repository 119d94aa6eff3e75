package secret

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// Opcodes of WebSocket frames (RFC 6455, 5.2): those from control on are whole in one frame, and may stand between the frames
// of a message.
const (
	opContinuation = 0
	opControl      = 8
	maxControl     = 125
)

// Frames is a WebSocket after its handshake, in which no extension was agreed on: what the host sends has placeholders for
// values, within each message however it is cut into frames. A frame of up to 32 KiB stays one; a longer one becomes several.
// What is written goes to the host as it is.
func (w *Watch) Frames(host io.ReadWriteCloser) io.ReadWriteCloser {
	return &frames{ReadWriteCloser: host, src: bufio.NewReader(host), r: w.Rewriter(), in: make([]byte, piece), w: w}
}

type frames struct {
	io.ReadWriteCloser
	src *bufio.Reader
	w   *Watch
	in  []byte
	buf []byte // of out
	out []byte
	err error

	r    Rewriter // of the message under way
	op   byte     // of its next frame to be sent
	open bool     // it has begun
	left uint64   // of the frame that is being read
	last bool     // that frame ends the message
}

// CloseWrite passes an end on.
func (f *frames) CloseWrite() error {
	if half, ok := f.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return errors.ErrUnsupported
}

func (f *frames) Read(p []byte) (int, error) {
	for len(f.out) == 0 {
		if f.err != nil {
			return 0, f.err
		}
		f.out, f.buf = nil, f.buf[:0]
		if f.err = f.next(); f.err == nil {
			f.out = f.buf
		}
	}
	n := copy(p, f.out)
	f.out = f.out[n:]
	return n, nil
}

// next reads a frame, or the next piece of one, and puts what becomes of it into buf.
func (f *frames) next() error {
	if f.left == 0 {
		return f.head()
	}
	return f.piece()
}

func (f *frames) head() error {
	var h [2]byte
	if _, err := io.ReadFull(f.src, h[:]); err != nil {
		return err
	}
	length := uint64(h[1] & 0x7f)
	var long [8]byte
	switch extra := map[uint64]int{126: 2, 127: 8}[length]; {
	case h[0]&0x70 != 0 || h[1]&0x80 != 0:
		return fmt.Errorf("%w: it has frames of a form that was not agreed on", ErrUnwatchable)
	case extra > 0:
		if _, err := io.ReadFull(f.src, long[8-extra:]); err != nil {
			return unexpected(err)
		}
		length = binary.BigEndian.Uint64(long[:])
	}
	op, fin := h[0]&15, h[0]&0x80 != 0
	if op >= opControl {
		if !fin || length > maxControl {
			return fmt.Errorf("%w: it has a control frame that is none", ErrUnwatchable)
		}
		if _, err := io.ReadFull(f.src, f.in[:length]); err != nil {
			return unexpected(err)
		}
		text := f.w.String(string(f.in[:length]))
		f.frame(op, true, []byte(text[:min(len(text), maxControl)]))
		return nil
	}
	if (op == opContinuation) != f.open || length >= 1<<63 {
		return fmt.Errorf("%w: its frames do not make messages", ErrUnwatchable)
	}
	if !f.open {
		f.op = op
	}
	f.open, f.left, f.last = true, length, fin
	return f.piece()
}

func (f *frames) piece() error {
	n := min(f.left, piece)
	if _, err := io.ReadFull(f.src, f.in[:n]); err != nil {
		return unexpected(err)
	}
	f.left -= n
	out := f.r.Append(nil, f.in[:n])
	end := f.last && f.left == 0
	if end {
		out = f.r.Flush(out)
		f.open = false
	}
	if end || len(out) > 0 {
		f.frame(f.op, end, out)
		f.op = opContinuation
	}
	return nil
}

// frame puts a frame into buf.
func (f *frames) frame(op byte, fin bool, payload []byte) {
	if fin {
		op |= 0x80
	}
	f.buf = append(f.buf, op)
	switch n := len(payload); {
	case n <= maxControl:
		f.buf = append(f.buf, byte(n))
	case n < 1<<16:
		f.buf = binary.BigEndian.AppendUint16(append(f.buf, 126), uint16(n))
	default:
		f.buf = binary.BigEndian.AppendUint64(append(f.buf, 127), uint64(n))
	}
	f.buf = append(f.buf, payload...)
}

// unexpected is an end within a frame.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

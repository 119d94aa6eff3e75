package guest

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// HeaderSize is the size of what comes before a frame's payload, in bytes.
const HeaderSize = 9

// Header is what comes before a frame's payload.
type Header struct {
	Size   int // of the payload
	Type   Type
	Stream uint32
}

// ParseHeader reads the header in the first HeaderSize bytes of b.
func ParseHeader(b []byte) Header {
	return Header{Size: int(binary.BigEndian.Uint32(b)), Type: Type(b[4]), Stream: binary.BigEndian.Uint32(b[5:])}
}

// Put writes the header into the first HeaderSize bytes of b.
func (h Header) Put(b []byte) {
	binary.BigEndian.PutUint32(b, uint32(h.Size))
	b[4] = byte(h.Type)
	binary.BigEndian.PutUint32(b[5:], h.Stream)
}

// ErrProtocol says that the guest sent what the protocol forbids; it ends the session.
var ErrProtocol = errors.New("the guest broke the protocol")

func violation(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrProtocol, fmt.Sprintf(format, args...))
}

// frame is one frame from the guest.
type frame struct {
	Header
	payload []byte // valid until the next one is read
}

// frameReader reads the guest's frames.
type frameReader struct {
	r       *bufio.Reader
	payload int // bytes of the last payload, to be skipped before the next frame
}

// readBuffer holds two data frames of the largest size, so that payloads are used where they were read.
const readBuffer = 2 * (HeaderSize + 1 + MaxData)

func newFrameReader(r io.Reader) *frameReader {
	return &frameReader{r: bufio.NewReaderSize(r, readBuffer)}
}

// next reads one frame. What is too large for its type is an ErrProtocol before any of it is read.
func (f *frameReader) next() (frame, error) {
	if f.payload > 0 {
		_, _ = f.r.Discard(f.payload) // it was peeked, so it is there
		f.payload = 0
	}
	b, err := f.r.Peek(HeaderSize)
	if err != nil {
		if err == io.EOF && len(b) > 0 {
			err = io.ErrUnexpectedEOF
		}
		return frame{}, err
	}
	h := ParseHeader(b)
	least, most := 0, 0
	switch h.Type {
	case TypeHead, TypeDone:
		most = MaxPayload
	case TypeData:
		most = MaxData + 1
	case TypeCredit:
		least, most = 4, 4
	case TypeEOF:
	default:
		return frame{}, violation("a frame of type %d", h.Type)
	}
	if h.Size < least || h.Size > most {
		return frame{}, violation("a frame of type %d with %d bytes", h.Type, h.Size)
	}
	_, _ = f.r.Discard(HeaderSize)
	if h.Size > readBuffer {
		large := make([]byte, h.Size)
		if _, err := io.ReadFull(f.r, large); err != nil {
			return frame{}, unexpected(err)
		}
		return frame{h, large}, nil
	}
	payload, err := f.r.Peek(h.Size)
	if err != nil {
		return frame{}, unexpected(err)
	}
	f.payload = h.Size
	return frame{h, payload}, nil
}

func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}

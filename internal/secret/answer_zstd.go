package secret

import (
	"bufio"
	"encoding/binary"
)

// maxZstdWindow is the bound of RFC 9659.
const maxZstdWindow = 8 << 20

// zstdFrames passes a zstd stream on, and takes memory for the window of each frame that asks for more than those before: the
// first says nothing about the others. It goes from head to head (RFC 8878, 3.1.1); what is wrong in between is the decoder's
// to say, which reads no further than it does, so nothing waits here that would not wait there.
type zstdFrames struct {
	src  *bufio.Reader
	hold func(int) error

	window int   // for which memory was taken
	left   int64 // bytes up to the next head
	// What is there: a block, or a frame.
	block, checked bool
}

func (z *zstdFrames) Read(p []byte) (int, error) {
	if z.left == 0 {
		var err error
		if z.block {
			err = z.blockHead()
		} else {
			err = z.frameHead()
		}
		if err != nil {
			return 0, err
		}
	}
	n, err := z.src.Read(p[:min(int64(len(p)), z.left)])
	z.left -= int64(n)
	return n, err
}

func (z *zstdFrames) frameHead() error {
	const magic, skippable = 0xfd2fb528, 0x184d2a50
	head, err := z.src.Peek(5)
	if len(head) == 0 {
		return err
	}
	z.left = int64(len(head))
	if len(head) < 5 {
		return nil // and then the end, or an error
	}
	switch m := binary.LittleEndian.Uint32(head); {
	case m&^0xf == skippable:
		if head, err = z.src.Peek(8); err != nil {
			return unexpected(err)
		}
		z.left = 8 + int64(binary.LittleEndian.Uint32(head[4:]))
		return nil
	case m != magic:
		return nil
	}
	// The descriptor says how long the rest of the head is.
	d := head[4]
	oneSegment := d&0x20 != 0
	dictionary := []int{0, 1, 2, 4}[d&3]
	content := []int{0, 2, 4, 8}[d>>6]
	at := 5
	switch {
	case !oneSegment:
		at++
	case content == 0:
		content = 1
	}
	if head, err = z.src.Peek(at + dictionary + content); err != nil {
		return unexpected(err)
	}
	var size uint64
	if oneSegment { // the size of all is that of the window
		var b [8]byte
		copy(b[:], head[at+dictionary:])
		size = binary.LittleEndian.Uint64(b[:])
		if content == 2 {
			size += 256
		}
	} else {
		size = 1 << (10 + head[5]>>3)
		size += size / 8 * uint64(head[5]&7)
	}
	z.left, z.block, z.checked = int64(len(head)), true, d&4 != 0
	if window := int(min(size, maxZstdWindow)); window > z.window { // the decoder refuses a wider one
		if err := z.hold(2 * (window - z.window)); err != nil {
			return err
		}
		z.window = window
	}
	return nil
}

func (z *zstdFrames) blockHead() error {
	head, err := z.src.Peek(3)
	if err != nil {
		return unexpected(err)
	}
	h := uint32(head[0]) | uint32(head[1])<<8 | uint32(head[2])<<16
	z.left = 3 + int64(h>>3)
	if h>>1&3 == 1 { // one byte, many times
		z.left = 3 + 1
	}
	if h&1 != 0 { // the last
		z.block = false
		if z.checked {
			z.left += 4
		}
	}
	return nil
}

package secret

import (
	"bufio"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zlib"
	"github.com/klauspost/compress/zstd"
)

// ErrUnwatchable is that an answer has a form in which values cannot be looked for.
var ErrUnwatchable = errors.New("the answer cannot be watched for the value that the request carried")

const (
	// piece is how much is read of an answer at once, in bytes.
	piece = 32 << 10
	// What decoders take, in bytes: the window that the coding has or that the stream asks for (of brotli 16 MiB at most), and
	// the rest.
	deflateMemory = 64 << 10
	codecMemory   = 1 << 20
)

// Header is Watch.String for headers or trailers, in place. One whose name holds a value is dropped.
func (w *Watch) Header(h map[string][]string) {
	for name, values := range h {
		if w.names(name) {
			delete(h, name)
			continue
		}
		for i, v := range values {
			values[i] = w.String(v)
		}
	}
}

// names says whether a header's name, in which the case of letters is lost, holds a value.
func (w *Watch) names(name string) bool {
	if len(name) < leastWatched {
		return false
	}
	name = strings.ToLower(name)
	return slices.ContainsFunc(w.lower, func(form string) bool { return strings.Contains(name, form) })
}

// Coding reads the values of Content-Encoding: "" for none, or the one coding that can be undone. Any other is ErrUnwatchable.
func Coding(values []string) (string, error) {
	coding := ""
	for name := range strings.SplitSeq(strings.Join(values, ","), ",") {
		switch name = strings.ToLower(strings.TrimSpace(name)); name {
		case "", "identity":
			continue
		case "x-gzip":
			name = "gzip"
		case "gzip", "deflate", "br", "zstd":
		default:
			return "", fmt.Errorf("%w: it has an encoding that is not known", ErrUnwatchable)
		}
		if coding != "" {
			return "", fmt.Errorf("%w: it is encoded twice", ErrUnwatchable)
		}
		coding = name
	}
	return coding, nil
}

// Body is the body of an answer without its coding, as Coding returns it, and with placeholders for values. Whatever is read of
// src can be read of it at once, but for what may be the beginning of a value. hold takes memory, in bytes, for as long as the
// answer lasts, or says why not. Reads and Close follow one another.
func (w *Watch) Body(src io.ReadCloser, coding string, hold func(int) error) io.ReadCloser {
	b := &body{ReadCloser: src, from: src, r: w.Rewriter(), in: make([]byte, piece)}
	if coding != "" {
		b.from = &decoded{src: bufio.NewReader(src), coding: coding, hold: hold}
	}
	return b
}

type body struct {
	io.ReadCloser
	from io.Reader
	r    Rewriter
	in   []byte
	buf  []byte // of out
	out  []byte
	err  error
}

func (b *body) Read(p []byte) (int, error) {
	for len(b.out) == 0 {
		if b.err != nil {
			return 0, b.err
		}
		var n int
		n, b.err = b.from.Read(b.in)
		b.buf = b.r.Append(b.buf[:0], b.in[:n])
		if b.err == io.EOF {
			b.buf = b.r.Flush(b.buf)
		}
		b.out = b.buf
	}
	n := copy(p, b.out)
	b.out = b.out[n:]
	return n, nil
}

// decoded undoes a coding. The decoder is made at the first read: an answer's head must not wait for its body.
type decoded struct {
	src    *bufio.Reader
	coding string
	hold   func(int) error
	dec    io.Reader
}

func (d *decoded) Read(p []byte) (n int, err error) {
	if d.dec == nil {
		if _, err := d.src.Peek(1); err != nil {
			return 0, err // an empty body, as some hosts answer with
		}
		if err := d.open(); err != nil {
			return 0, err
		}
	}
	n, err = d.dec.Read(p)
	if err == io.EOF && n > 0 {
		return n, nil // first what there is
	}
	if err == io.EOF {
		// What is behind is not part of the answer, but trailers come after it.
		if _, more := d.src.Peek(1); more != io.EOF {
			err = fmt.Errorf("%w: something follows its encoded body", ErrUnwatchable)
		}
	}
	return n, err
}

func (d *decoded) open() error {
	memory := deflateMemory
	var err error
	switch d.coding {
	case "br":
		var first []byte
		if first, err = d.src.Peek(1); err == nil {
			memory = codecMemory + brotliWindow(first[0])
		}
	case "zstd":
		memory = codecMemory
	}
	if err == nil {
		err = d.hold(memory)
	}
	if err != nil {
		return err
	}
	switch d.coding {
	case "gzip":
		d.dec, err = gzip.NewReader(d.src)
	case "deflate":
		// The name means zlib's format, and some hosts send what is inside it.
		var head []byte
		if head, err = d.src.Peek(2); err == nil && head[0]&15 == 8 && binary.BigEndian.Uint16(head)%31 == 0 {
			d.dec, err = zlib.NewReader(d.src)
		} else {
			d.dec, err = flate.NewReader(d.src), nil
		}
	case "br":
		d.dec = brotli.NewReader(d.src)
	case "zstd":
		var z *zstd.Decoder
		if z, err = zstd.NewReader(&zstdFrames{src: d.src, hold: d.hold}, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxZstdWindow)); err == nil {
			d.dec = z
		}
	}
	return err
}

// brotliWindow is the window that a brotli stream asks for in its first byte (RFC 7932, 9.1), in bytes.
func brotliWindow(b byte) int {
	switch {
	case b&1 == 0:
		return 1 << 16
	case b>>1&7 != 0:
		return 1 << (17 + b>>1&7)
	case b>>4&7 == 0:
		return 1 << 17
	}
	return 1 << (8 + b>>4&7)
}

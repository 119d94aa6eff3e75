package secret

import (
	"bufio"
	"bytes"
	"compress/zlib"
	"errors"
	"io"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/flate"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
)

const testValue = "sk-0123456789"

type flusher interface {
	io.WriteCloser
	Flush() error
}

// coders are those of the codings that can be undone, by name in Content-Encoding; "deflate, bare" is the other thing that is
// called deflate.
var coders = map[string]func(io.Writer) flusher{
	"gzip":          func(w io.Writer) flusher { return gzip.NewWriter(w) },
	"deflate":       func(w io.Writer) flusher { return zlib.NewWriter(w) },
	"deflate, bare": func(w io.Writer) flusher { f, _ := flate.NewWriter(w, 5); return f },
	"br":            func(w io.Writer) flusher { return brotli.NewWriterLevel(w, 5) },
	"zstd":          func(w io.Writer) flusher { z, _ := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1)); return z },
}

func noBound(int) error { return nil }

func TestEncodedBodies(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	text := strings.Repeat("some words, "+testValue+" and more. ", 5000)
	want := strings.ReplaceAll(text, testValue, "mock-API")
	for name, coder := range coders {
		t.Run(name, func(t *testing.T) {
			var coded bytes.Buffer
			enc := coder(&coded)
			_, err := io.WriteString(enc, text)
			if err = errors.Join(err, enc.Close()); err != nil {
				t.Fatal(err)
			}
			coding, _, _ := strings.Cut(name, ",")
			for how, src := range map[string]io.Reader{"whole": bytes.NewReader(coded.Bytes()), "in bytes": iotest.OneByteReader(bytes.NewReader(coded.Bytes())),
				"ending with data": iotest.DataErrReader(bytes.NewReader(coded.Bytes()))} {
				held := 0
				got, err := io.ReadAll(w.Body(io.NopCloser(src), coding, func(n int) error { held += n; return nil }))
				if err != nil || string(got) != want || held == 0 {
					t.Errorf("%s: %d bytes, want %d; held %d: %v", how, len(got), len(want), held, err)
				}
			}
			for how, data := range map[string][]byte{"cut off": coded.Bytes()[:coded.Len()/2], "damaged": append([]byte("\x1f\x8b\x00junk"), coded.Bytes()[20:]...)} {
				if _, err := io.ReadAll(w.Body(io.NopCloser(bytes.NewReader(data)), coding, noBound)); err == nil {
					t.Errorf("%s: no error", how)
				}
			}
			full := errors.New("full")
			if _, err := io.ReadAll(w.Body(io.NopCloser(bytes.NewReader(coded.Bytes())), coding, func(int) error { return full })); !errors.Is(err, full) {
				t.Errorf("without memory: %v", err)
			}
			if got, err := io.ReadAll(w.Body(io.NopCloser(strings.NewReader("")), coding, noBound)); err != nil || len(got) > 0 {
				t.Errorf("an empty body: %q, %v", got, err)
			}
		})
	}
}

// What a host has flushed is read at once, in every coding, but for what may be the beginning of a value.
func TestBodiesAreNotDelayed(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	coders[""] = func(w io.Writer) flusher { return plain{w} }
	defer delete(coders, "")
	for name, coder := range coders {
		t.Run(name, func(t *testing.T) {
			r, host := io.Pipe()
			coding, _, _ := strings.Cut(name, ",")
			read, got := w.Body(r, coding, noBound), make(chan string)
			done := make(chan error, 1)
			go func() {
				for {
					p := make([]byte, 4096)
					n, err := read.Read(p)
					if err != nil {
						close(got)
						done <- err
						return
					}
					got <- string(p[:n])
				}
			}()
			enc := coder(host)
			for _, c := range []struct{ in, out string }{{"event: 1\n", "event: 1\n"}, {"a " + testValue, "a mock-API"}, {"x sk-01", "x "}, {"23-", "sk-0123-"}} {
				if _, err := io.WriteString(enc, c.in); err != nil {
					t.Fatal(err)
				}
				if err := enc.Flush(); err != nil {
					t.Fatal(err)
				}
				out := ""
				for len(out) < len(c.out) {
					more, ok := <-got
					if out += more; !ok {
						break
					}
				}
				if out != c.out {
					t.Fatalf("%q arrived as %q, want %q", c.in, out, c.out)
				}
			}
			if err := errors.Join(enc.Close(), host.Close()); err != nil {
				t.Fatal(err)
			}
			if more := <-got; more != "" {
				t.Errorf("at the end %q", more)
			}
			if err := <-done; err != io.EOF {
				t.Error(err)
			}
		})
	}
}

type plain struct{ io.Writer }

func (plain) Flush() error { return nil }
func (plain) Close() error { return nil }

func TestWindows(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	for _, size := range []int{10, 1 << 16, 1 << 20} {
		var small, large bytes.Buffer
		for window, b := range map[int]*bytes.Buffer{18: &small, 22: &large} {
			enc := brotli.NewWriterOptions(b, brotli.WriterOptions{Quality: 4, LGWin: window})
			_, err := enc.Write(make([]byte, size))
			if err = errors.Join(err, enc.Close()); err != nil {
				t.Fatal(err)
			}
		}
		for coded, want := range map[*bytes.Buffer]int{&small: 1 << 18, &large: 1 << 22} {
			held := 0
			if _, err := io.Copy(io.Discard, w.Body(io.NopCloser(coded), "br", func(n int) error { held += n; return nil })); err != nil || held < want || held > want+codecMemory {
				t.Errorf("brotli of %d: held %d, want %d: %v", size, held, want, err)
			}
		}
	}
	var wide bytes.Buffer
	enc, err := zstd.NewWriter(&wide, zstd.WithWindowSize(16<<20), zstd.WithEncoderConcurrency(1))
	if err != nil {
		t.Fatal(err)
	}
	for range 300 {
		_, _ = enc.Write(make([]byte, 100<<10))
	}
	_ = enc.Close()
	if _, err := io.Copy(io.Discard, w.Body(io.NopCloser(&wide), "zstd", noBound)); err == nil {
		t.Error("a window of 16 MiB was given")
	}
}

// TestFramesOfZstd: memory is taken for the window of each frame, not of the first alone, and all frames are one body.
func TestFramesOfZstd(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	frame := func(window, size int, opts ...zstd.EOption) []byte {
		var b bytes.Buffer
		enc, err := zstd.NewWriter(&b, append(opts, zstd.WithWindowSize(window), zstd.WithEncoderConcurrency(1))...)
		if err != nil {
			t.Fatal(err)
		}
		text := strings.Repeat(testValue+" ", size/len(testValue)+1)
		_, err = io.WriteString(enc, text[:size/2])
		err = errors.Join(err, enc.Flush()) // else it becomes a single segment
		_, more := io.WriteString(enc, text[size/2:size])
		if err = errors.Join(err, more, enc.Close()); err != nil {
			t.Fatal(err)
		}
		return b.Bytes()
	}
	skipped := append([]byte{0x5a, 0x2a, 0x4d, 0x18, 5, 0, 0, 0}, "\x28\xb5\x2f\xfd\xff"...) // which looks like a frame
	empty := []byte{0x5f, 0x2a, 0x4d, 0x18, 0, 0, 0, 0}
	whole, err := zstd.NewWriter(nil, zstd.WithSingleSegment(true))
	if err != nil {
		t.Fatal(err)
	}
	single := whole.EncodeAll(bytes.Repeat([]byte("0"), 300<<10), nil)
	small, wide := frame(1<<10, 100), frame(8<<20, 100<<10, zstd.WithEncoderCRC(false))
	run := bytes.Clone(small[:4]) // a frame of one block: a byte, many times
	run = append(run, 0, 0, 1|1<<1|(100<<3&0xff), 100>>5, 0, 'x')
	for name, c := range map[string]struct {
		body   []byte
		window int // the widest
		length int
	}{
		"one":           {small, 1 << 10, 100},
		"then a wide":   {slices.Concat(small, wide), 8 << 20, 100 + 100<<10},
		"a wide first":  {slices.Concat(wide, small, wide), 8 << 20, 100 + 200<<10},
		"skipped":       {slices.Concat(skipped, small, empty, skipped, wide, skipped), 8 << 20, 100 + 100<<10},
		"single":        {slices.Concat(small, single), 300 << 10, 100 + 300<<10},
		"run":           {slices.Concat(run, small), 1 << 10, 200},
		"only skipped":  {skipped, 0, 0},
		"all in a heap": {slices.Repeat(slices.Concat(small, single, run), 20), 300 << 10, 20 * (200 + 300<<10)},
	} {
		for how, src := range map[string]io.Reader{"whole": bytes.NewReader(c.body), "in bytes": iotest.OneByteReader(bytes.NewReader(c.body))} {
			held := 0
			got, err := io.ReadAll(&zstdFrames{src: bufio.NewReader(src), hold: func(n int) error { held += n; return nil }})
			if err != nil || !bytes.Equal(got, c.body) || held != 2*c.window {
				t.Errorf("%s, %s: %d of %d bytes, held %d: %v", name, how, len(got), len(c.body), held, err)
			}
		}
		got, err := io.ReadAll(w.Body(io.NopCloser(bytes.NewReader(c.body)), "zstd", noBound))
		if err != nil || bytes.Contains(got, []byte(testValue)) || len(bytes.ReplaceAll(got, []byte("mock-API"), []byte(testValue))) != c.length {
			t.Errorf("%s: %d bytes, want %d: %v", name, len(got), c.length, err)
		}
	}
	// The second frame gets nothing where nothing is left.
	full, left := errors.New("full"), codecMemory+2<<10
	got, err := io.ReadAll(w.Body(io.NopCloser(bytes.NewReader(slices.Concat(small, wide))), "zstd", func(n int) error {
		if left -= n; left < 0 {
			return full
		}
		return nil
	}))
	if !errors.Is(err, full) || len(got) > 100 {
		t.Errorf("without memory for the second frame: %d bytes, %v", len(got), err)
	}
}

// TestBombs: what is a thousand times as long as it looks goes through in pieces, in no more memory than was taken for it.
func TestBombs(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	const size, slack = 64 << 20, 4 << 20
	zeros := make([]byte, 1<<20)
	for name, coder := range coders {
		var coded bytes.Buffer
		enc := coder(&coded)
		for range size / len(zeros) {
			if _, err := enc.Write(zeros); err != nil {
				t.Fatal(err)
			}
		}
		if err := enc.Close(); err != nil {
			t.Fatal(err)
		}
		coding, _, _ := strings.Cut(name, ",")
		held, n, most := 0, 0, uint64(0)
		body := w.Body(io.NopCloser(&coded), coding, func(n int) error { held += n; return nil })
		before := inUse()
		for p := make([]byte, 32<<10); ; {
			m, err := body.Read(p)
			if n += m; err == io.EOF {
				break
			} else if err != nil {
				t.Fatal(err)
			}
			if n>>23 != (n-m)>>23 {
				most = max(most, inUse())
			}
		}
		if n != size || most > before+uint64(held)+slack {
			t.Errorf("%s: %d bytes, in use %d and then %d, held %d", name, n, before, most, held)
		}
	}
}

// inUse is how much of the heap is in use, in bytes.
func inUse() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc
}

func TestCoding(t *testing.T) {
	for values, want := range map[string]string{"": "", "identity": "", "gzip": "gzip", "x-gzip": "gzip", " BR ": "br", "identity, zstd": "zstd", "deflate": "deflate",
		"gzip, br": "!", "compress": "!", "gzip,gzip": "!", "aws-chunked": "!", "dcb": "!"} {
		got, err := Coding([]string{values})
		if err != nil {
			got = "!"
		}
		if got != want || err != nil && !errors.Is(err, ErrUnwatchable) {
			t.Errorf("%q: %q, %v", values, got, err)
		}
	}
}

func FuzzBody(f *testing.F) {
	for name, coder := range coders {
		var coded bytes.Buffer
		enc := coder(&coded)
		_, _ = io.WriteString(enc, "some words, "+testValue)
		_ = enc.Close()
		coding, _, _ := strings.Cut(name, ",")
		f.Add(coding, coded.Bytes())
	}
	w := Watched([]Secret{one("API", testValue)})
	f.Fuzz(func(t *testing.T, coding string, data []byte) {
		coding, err := Coding([]string{coding})
		if err != nil {
			return
		}
		got, _ := io.ReadAll(io.LimitReader(w.Body(io.NopCloser(bytes.NewReader(data)), coding, noBound), 1<<20))
		if bytes.Contains(got, []byte(testValue)) {
			t.Errorf("the value is in %q", got)
		}
	})
}

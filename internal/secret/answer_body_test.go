package secret

import (
	"bytes"
	"compress/zlib"
	"errors"
	"io"
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

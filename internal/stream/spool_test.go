package stream

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"pgregory.net/rapid"
)

const window = 1 << 20

func readAll(t testing.TB, s *Spool) (out [3][]byte) {
	t.Helper()
	r, err := s.Attach()
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close(0)
	for {
		m, err := r.Next(nil)
		if err == io.EOF {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out[m[0]] = append(out[m[0]], m[1:]...)
		r.Consumed(len(m) - 1)
	}
}

// TestNewestAreKept: without a reader exactly the newest Held bytes stay, and every other byte is counted.
func TestNewestAreKept(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "out"), window, window)
	defer s.Close()
	var all []byte
	rnd := rand.New(rand.NewPCG(1, 2))
	for len(all) < 20<<20 {
		p := make([]byte, rnd.IntN(100_000))
		for i := range p {
			p[i] = byte(rnd.Uint32())
		}
		all = append(all, p...)
		if err := s.Append(1, p); err != nil {
			t.Fatal(err)
		}
	}
	s.Finish()
	if got, want := s.Lost(), int64(len(all)-Held); got != want {
		t.Errorf("lost %d, want %d", got, want)
	}
	if out := readAll(t, s); !bytes.Equal(out[1], all[len(all)-Held:]) {
		t.Errorf("%d bytes held, or other ones", len(out[1]))
	}
	if out := readAll(t, s); !bytes.Equal(out[1], all[len(all)-Held:]) {
		t.Error("a second replay differs")
	}
	if got, want := s.Lost(), int64(len(all)-Held); got != want {
		t.Errorf("lost %d after reading, want %d", got, want)
	}
}

// TestRelease: behind the end another reader may attach before it is known how much the first has left unread.
func TestRelease(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "out"), window, window)
	defer s.Close()
	attach := func() *Reader {
		t.Helper()
		r, err := s.Attach()
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	read := func(r *Reader) (n int) {
		t.Helper()
		for {
			m, err := r.Next(nil)
			if err == io.EOF {
				return n
			}
			if err != nil {
				t.Fatal(err)
			}
			n += len(m) - 1
			r.Consumed(len(m) - 1)
		}
	}
	const rest = 1000
	if err := s.Append(1, make([]byte, Held)); err != nil {
		t.Fatal(err)
	}
	first := attach()
	stop := make(chan struct{})
	close(stop)
	for n := 0; n < Held; {
		m, err := first.Next(stop)
		if err != nil {
			t.Fatal(err)
		}
		n += len(m) - 1
		first.Consumed(len(m) - 1)
	}
	if first.Release(); !s.Attached() {
		t.Error("released while output may come")
	}
	if err := s.Append(1, make([]byte, rest)); err != nil { // pushes out as much, which was read
		t.Fatal(err)
	}
	s.Finish()
	if n := read(first); n != rest {
		t.Errorf("the first read %d bytes more", n)
	}
	first.Release()
	second := attach()
	if n := read(second); n != Held {
		t.Errorf("the second read %d bytes", n)
	}
	first.Close(Held + 10) // all but 990 of the oldest, 10 of which were dropped since
	second.Close(0)
	first.Close(Held)
	if lost := s.Lost(); lost != 10 {
		t.Errorf("%d bytes are lost, want 10", lost)
	}
}

// TestModel compares with a plain list of bytes: reads + lost = written, whatever the order of appends, reads,
// detaches and restarts.
func TestModel(t *testing.T) {
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		path := filepath.Join(dir, "out")
		_ = os.Remove(path)
		s := New(path, window, window)
		defer func() { s.Close() }()
		var written, seen, received int64
		var unacked int64
		watch := func() { s.OnAck(func(n int) { unacked -= int64(n) }) }
		watch()
		var r *Reader
		var at, before int64 // before is what had been seen when r was attached
		for range rapid.IntRange(1, 60).Draw(t, "steps") {
			switch rapid.IntRange(0, 5).Draw(t, "step") {
			case 0, 1, 2:
				n := rapid.IntRange(1, 3<<19).Draw(t, "bytes")
				n = min(n, int(window-unacked))
				if n <= 0 {
					continue
				}
				p := make([]byte, n)
				for i := range p {
					p[i] = byte((written + int64(i)) * 31)
				}
				unacked += int64(n)
				written += int64(n)
				for len(p) > 0 {
					k := min(len(p), rapid.SampledFrom([]int{1, 7, 4096, 1 << 20}).Draw(t, "piece"))
					if k < 4096 {
						k = min(len(p), k*50)
					}
					if err := s.Append(byte(1+len(p)%2), p[:k]); err != nil {
						t.Fatal(err)
					}
					p = p[k:]
				}
			case 3:
				if r == nil {
					var err error
					if r, err = s.Attach(); err != nil {
						t.Fatal(err)
					}
					at, before = r.got, seen
				}
				stop := make(chan struct{})
				close(stop)
				for range rapid.IntRange(1, 40).Draw(t, "reads") {
					m, err := r.Next(stop)
					if errors.Is(err, ErrClosed) {
						break
					}
					if err != nil {
						t.Fatal(err)
					}
					p := m[1:]
					for i, b := range p {
						if b != byte((at+int64(i))*31) {
							t.Fatalf("byte %d is wrong", at+int64(i))
						}
					}
					received += max(0, at+int64(len(p))-max(at, seen))
					at += int64(len(p))
					r.Consumed(len(p))
					seen = max(seen, at)
				}
			case 4:
				if r != nil {
					unread := rapid.IntRange(0, 300_000).Draw(t, "unread")
					r.Close(int64(unread))
					r = nil
					if sure := max(before, at-int64(unread)); sure < seen {
						received -= seen - sure
						seen = sure
					}
				}
			case 5:
				s.Close()
				var err error
				if s, err = Open(path, window, window); err != nil {
					t.Fatal(err)
				}
				watch()
				r, unacked = nil, 0
			}
			if s.End() != written {
				t.Fatalf("end %d, written %d", s.End(), written)
			}
			if r == nil && unacked != 0 {
				t.Fatalf("%d bytes are not acknowledged though nobody reads", unacked)
			}
		}
		if r != nil {
			r.Close(0)
		}
		lost := s.Lost()
		s.Finish()
		out, err := s.Attach()
		if err != nil {
			t.Fatal(err)
		}
		if fresh := written - max(seen, out.got); received+fresh+lost != written {
			t.Fatalf("written %d, received %d, still to read %d, lost %d", written, received, fresh, lost)
		}
		out.Close(0)
	})
}

// TestReaderHoldsTheProgram: with a reader attached nothing is lost, even when the program changes channel each byte and
// the reader begins only when the program has come to a halt.
func TestReaderHoldsTheProgram(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "out"), window, window)
	defer s.Close()
	free := window // only the program's goroutine, and whoever it waits for, touch it
	s.OnAck(func(n int) { free += n })
	r, err := s.Attach()
	if err != nil {
		t.Fatal(err)
	}
	write := func() {
		for i := 0; free > 0; i++ {
			if err := s.Append(byte(1+i%2), []byte{'x'}); err != nil {
				t.Fatal(err)
			}
			free--
		}
	}
	write()
	if s.End() < 3*window/2 {
		t.Fatalf("the program halted after %d bytes", s.End())
	}
	var got int64
	read := func(until int64) {
		for got < until {
			m, err := r.Next(nil)
			if err != nil {
				t.Fatal(err)
			}
			got += int64(len(m) - 1)
			r.Consumed(len(m) - 1)
		}
	}
	read(s.End() * 3 / 4)
	write()
	read(s.End())
	if s.Lost() != 0 {
		t.Errorf("lost %d of %d", s.Lost(), s.End())
	}
}

func TestOneReader(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "out"), window, window)
	r, err := s.Attach()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := s.Attach(); !errors.Is(err, ErrInUse) {
		t.Fatalf("a second reader: %v", err)
	}
	r.Close(0)
	r2, err := s.Attach()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(nil); !errors.Is(err, ErrClosed) {
		t.Fatalf("the first reader still reads: %v", err)
	}
	done := make(chan error)
	go func() { _, err := r2.Next(nil); done <- err }()
	s.Close()
	if err := <-done; !errors.Is(err, ErrClosed) {
		t.Fatalf("a waiting reader got %v", err)
	}
}

// TestMain is also the program that TestKilled kills.
func TestMain(m *testing.M) {
	path, most := os.Getenv("SPOOL_PATH"), os.Getenv("SPOOL_MOST")
	if path == "" {
		os.Exit(m.Run())
	}
	s, err := Open(path, window, window)
	if err != nil {
		panic(err)
	}
	n, err := strconv.Atoi(most)
	if err != nil {
		panic(err)
	}
	at := s.Resume()
	for {
		p := make([]byte, 1+rand.IntN(n))
		for i := range p {
			p[i] = byteAt(at + int64(i))
		}
		at += int64(len(p))
		if err := s.Append(byte(1+rand.IntN(2)), p); err != nil {
			panic(err)
		}
	}
}

func byteAt(i int64) byte { return byte(i*31 + i>>16) }

// TestKilled: whenever a daemon is killed while it holds output, the next one finds what was held, and goes on.
func TestKilled(t *testing.T) {
	for _, most := range []int{4, 3000, 90_000} { // bytes of one append; with the least the heads fill the ring
		path := filepath.Join(t.TempDir(), "out")
		before := int64(0)
		for round := range 16 {
			cmd := exec.Command(os.Args[0])
			cmd.Env = append(os.Environ(), "SPOOL_PATH="+path, "SPOOL_MOST="+strconv.Itoa(most))
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Duration(30+rand.IntN(60)) * time.Millisecond)
			_ = cmd.Process.Kill()
			_ = cmd.Wait()
			s, err := Open(path, window, window)
			if err != nil {
				t.Fatalf("round %d with %d: %v", round, most, err)
			}
			if s.End() < before {
				t.Fatalf("round %d with %d: the end went back from %d to %d", round, most, before, s.End())
			}
			before = s.End()
			s.ended = true
			r, err := s.Attach()
			if err != nil {
				t.Fatal(err)
			}
			at := r.got
			if s.Lost() != at {
				t.Errorf("round %d with %d: lost %d, held from %d on", round, most, s.Lost(), at)
			}
			for {
				m, err := r.Next(nil)
				if err == io.EOF {
					break
				}
				if err != nil {
					t.Fatalf("round %d with %d: at byte %d of %d: %v", round, most, at, s.End(), err)
				}
				for _, b := range m[1:] {
					if b != byteAt(at) {
						t.Fatalf("round %d with %d: byte %d of %d is wrong", round, most, at, s.End())
					}
					at++
				}
			}
			if at != s.End() {
				t.Errorf("round %d with %d: %d bytes held, the end is %d", round, most, at, s.End())
			}
			_ = s.Close() // without a trace of the reader
		}
	}
}

// TestGap: output that neither the file nor the program's side holds any more is counted, and what follows is held.
func TestGap(t *testing.T) {
	path := filepath.Join(t.TempDir(), "out")
	s := New(path, window, window)
	_ = s.Append(1, []byte("seen"))
	r, _ := s.Attach()
	m, _ := r.Next(nil)
	r.Consumed(len(m) - 1)
	r.Close(0)
	_ = s.Append(1, []byte("not seen"))
	_ = s.Close()
	s, err := Open(path, window, window)
	if err != nil {
		t.Fatal(err)
	}
	s.Skip(1000)
	if got := s.Resume(); got != 1000 {
		t.Errorf("it goes on at %d", got)
	}
	_ = s.Append(2, []byte("after"))
	_ = s.Close()
	if s, err = Open(path, window, window); err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	s.Finish()
	if got := s.Lost(); got != 1000-4 {
		t.Errorf("lost %d, want 996", got)
	}
	if out := readAll(t, s); string(out[2]) != "after" || len(out[1]) != 0 {
		t.Errorf("held: %q", out)
	}
}

// TestFullDisk: output that cannot be written is counted and acknowledged, and ends no reader.
func TestFullDisk(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "gone", "out"), window, window)
	defer s.Close()
	var acked int
	s.OnAck(func(n int) { acked += n })
	if err := s.Append(1, make([]byte, 100_000)); err == nil {
		t.Error("no error")
	}
	if err := s.Append(2, make([]byte, 11)); err != nil {
		t.Errorf("the error came twice: %v", err)
	}
	s.Finish()
	if s.Lost() != 100_011 || acked != 100_011 || s.End() != 100_011 {
		t.Errorf("lost %d, acknowledged %d, end %d", s.Lost(), acked, s.End())
	}
	if out := readAll(t, s); len(out[1])+len(out[2]) != 0 {
		t.Error("output from nowhere")
	}
}

// TestRest: an ended command's output takes no descriptor until somebody reads it, and can be read again.
func TestRest(t *testing.T) {
	s := New(filepath.Join(t.TempDir(), "out"), window, window)
	defer s.Close()
	_ = s.Append(1, []byte("kept"))
	s.Finish()
	for range 2 {
		if s.f != nil {
			t.Error("the file is open")
		}
		if out := readAll(t, s); string(out[1]) != "kept" {
			t.Errorf("held: %q", out[1])
		}
	}
}

func FuzzOpen(f *testing.F) {
	f.Add([]byte(magic), []byte{1, 0, 0, 1, 'x'})
	f.Fuzz(func(t *testing.T, head, ring []byte) {
		path := filepath.Join(t.TempDir(), "out")
		file := make([]byte, headerSize, headerSize+len(ring))
		copy(file, head)
		if err := os.WriteFile(path, append(file, ring...), 0o600); err != nil {
			t.Fatal(err)
		}
		s, err := Open(path, window, window)
		if err != nil {
			return
		}
		defer s.Close()
		s.Finish()
		if r, err := s.Attach(); err == nil {
			for {
				m, err := r.Next(nil)
				if err != nil {
					break
				}
				r.Consumed(len(m) - 1)
			}
		}
		_ = s.Append(1, []byte("more"))
	})
}

func BenchmarkThrough(b *testing.B) {
	s := New(filepath.Join(b.TempDir(), "out"), window, window)
	defer s.Close()
	p := make([]byte, maxFrame)
	r, _ := s.Attach()
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		if err := s.Append(1, p); err != nil {
			b.Fatal(err)
		}
		m, err := r.Next(nil)
		if err != nil {
			b.Fatal(err)
		}
		r.Consumed(len(m) - 1)
	}
}

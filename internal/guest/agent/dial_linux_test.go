package agent_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// netserver builds the server program once; TestMain removes it with the others.
var netserver = sync.OnceValues(func() (string, error) {
	dir, err := programs()
	if err != nil {
		return "", err
	}
	bin := filepath.Join(dir, "netserver")
	build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", bin, "github.com/useshards/shard/test/testdata/netserver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return "", fmt.Errorf("build netserver: %w\n%s", err, out)
	}
	return bin, nil
})

// serve starts the server in the sandbox.
func (b *box) serve(s *guest.Session, args ...string) {
	b.t.Helper()
	bin, err := netserver()
	b.must(err)
	b.copy(bin, "bin/netserver")
	_, k := b.start(s, guest.ExecSpec{Argv: append(guest.Strings{"/bin/netserver", "-up"}, args...)})
	b.await(k, "listening")
}

// pipe is a real connection whose far end is relayed into the sandbox as the engine does.
func (b *box) pipe(s *guest.Session, port int) *net.TCPConn {
	b.t.Helper()
	st, err := s.Dial(b.ctx(), port)
	b.must(err)
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	b.must(err)
	defer l.Close()
	near, err := net.DialTCP("tcp4", nil, l.Addr().(*net.TCPAddr))
	b.must(err)
	far, err := l.AcceptTCP()
	b.must(err)
	var relay sync.WaitGroup
	relay.Go(func() {
		if st.Relay(b.t.Context(), far) != nil {
			_ = far.SetLinger(0)
			_ = far.Close()
		}
	})
	b.t.Cleanup(func() { near.Close(); st.Close(); far.Close(); relay.Wait() })
	_ = near.SetDeadline(time.Now().Add(time.Minute))
	return near
}

// knock dials a port and hangs up.
func (b *box) knock(ctx context.Context, s *guest.Session, port int) error {
	st, err := s.Dial(ctx, port)
	if err != nil {
		return err
	}
	defer st.Close()
	return st.Connected()
}

// ask sends a line on a new connection, ends its half, and reads to the end.
func (b *box) ask(s *guest.Session, port int, line string) (string, error) {
	b.t.Helper()
	c := b.pipe(s, port)
	_, err := io.WriteString(c, line+"\n")
	b.must(err)
	_ = c.CloseWrite() // fails when the server's reset was quicker, of which the read hears
	got, err := io.ReadAll(c)
	return string(got), err
}

func TestDial(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	err := b.knock(b.ctx(), s, 7000) // lo is down or nothing listens
	if err == nil {
		t.Fatal("dialled a port on which nothing listens")
	}
	b.serve(s, "127.0.0.1:7000")

	t.Run("refused", func(t *testing.T) {
		err := b.knock(b.ctx(), s, 7001)
		if shard.CodeOf(err) != guest.CodeConnectionRefused {
			t.Errorf("%v", err)
		}
		for _, port := range []int{0, -1, 65536} {
			if err := b.knock(b.ctx(), s, port); shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Errorf("port %d: %v", port, err)
			}
		}
	})
	t.Run("source", func(t *testing.T) {
		got, err := b.ask(s, 7000, "peer")
		if err != nil || !strings.HasPrefix(got, "127.0.0.1:") {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("echo", func(t *testing.T) {
		c := b.pipe(s, 7000)
		data := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
		go func() {
			_, _ = io.WriteString(c, "echo\n")
			_, _ = c.Write(data)
			_ = c.CloseWrite()
		}()
		got, err := io.ReadAll(c)
		if err != nil || !bytes.Equal(got, data) {
			t.Errorf("%d bytes of %d, %v", len(got), len(data), err)
		}
	})
	t.Run("the client's half ends first", func(t *testing.T) {
		c := b.pipe(s, 7000)
		_, _ = io.WriteString(c, "sink\n"+strings.Repeat("x", 300_000))
		b.must(c.CloseWrite())
		got, err := io.ReadAll(c)
		if err != nil || string(got) != "300000\n" {
			t.Errorf("%q, %v", got, err)
		}
	})
	t.Run("the server's half ends first", func(t *testing.T) {
		c := b.pipe(s, 7000)
		_, _ = io.WriteString(c, "early\n")
		if got, err := io.ReadAll(c); err != nil || len(got) != 0 {
			t.Errorf("%q, %v", got, err)
		}
		_, err := io.WriteString(c, strings.Repeat("y", 200_000))
		b.must(err)
		b.must(c.CloseWrite())
		for ctx := b.ctx(); ; time.Sleep(time.Millisecond) {
			if got, _ := b.ask(s, 7000, "last"); got == "200000\n" {
				return
			} else if ctx.Err() != nil {
				t.Fatalf("the server has read %q", got)
			}
		}
	})
	t.Run("reset by the server", func(t *testing.T) {
		if got, err := b.ask(s, 7000, "reset"); err == nil {
			t.Errorf("a reset looks like an end: %q", got)
		}
	})
	t.Run("slow readers hold up nobody", func(t *testing.T) {
		var slow []*net.TCPConn
		for range 40 {
			c := b.pipe(s, 7000)
			_, _ = io.WriteString(c, "source 100000000\n")
			slow = append(slow, c)
			held := b.pipe(s, 7000) // and a server that reads nothing
			_, _ = io.WriteString(held, "hold\n")
			go func() { _, _ = io.CopyN(held, zeros{}, 100<<20) }()
			slow = append(slow, held)
		}
		if got := b.sh(s, "echo works"); got != "works\n" {
			t.Errorf("%q", got)
		}
		if got, err := b.ask(s, 7000, "source 20000000"); err != nil || len(got) != 20_000_000 {
			t.Errorf("%d bytes, %v", len(got), err)
		}
		// One that was slow goes on as if nothing had been.
		n, err := io.Copy(io.Discard, slow[0])
		if err != nil || n != 100_000_000 {
			t.Errorf("the slow reader got %d bytes, %v", n, err)
		}
		for _, c := range slow {
			_ = c.SetLinger(0)
			_ = c.Close()
		}
	})
	b.settled(s)
	t.Run("the session is lost", func(t *testing.T) {
		c := b.pipe(s, 7000)
		_, _ = io.WriteString(c, "echo\n1")
		_, err := io.ReadFull(c, make([]byte, 1))
		b.must(err)
		s.Close()
		if got, err := io.ReadAll(c); err == nil {
			t.Errorf("a lost session looks like an end: %q", got)
		}
		next := b.connect()
		if got, err := b.ask(next, 7000, "peer"); err != nil || !strings.HasPrefix(got, "127.0.0.1:") {
			t.Errorf("in the next session: %q, %v", got, err)
		}
		b.settled(next)
	})
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// settled waits until the agent has no socket left but its own.
func (b *box) settled(s *guest.Session) {
	b.t.Helper()
	if b.runsc != nil {
		return
	}
	for ctx := b.ctx(); ; time.Sleep(5 * time.Millisecond) {
		entries, err := os.ReadDir("/proc/" + strconv.Itoa(b.pid) + "/fd")
		b.must(err)
		sockets := 0
		for _, e := range entries {
			to, _ := os.Readlink("/proc/" + strconv.Itoa(b.pid) + "/fd/" + e.Name())
			if strings.HasPrefix(to, "socket:") {
				sockets++
			}
		}
		if sockets <= 3 { // the first channel, the listener of attach, and a channel that came by it
			return
		}
		if ctx.Err() != nil {
			b.t.Fatalf("shard-init still holds %d sockets", sockets)
		}
	}
}

// TestDialCancelled: a dial that the server does not take ends with its context.
func TestDialCancelled(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	b.serve(s, "127.0.0.1:7000")
	ctx, cancel := context.WithCancel(b.ctx())
	cancel()
	if err := b.knock(ctx, s, 7000); !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	b.settled(s)
}

// BenchmarkDial moves 256 MiB each way through a connection, and through one without the agent.
func BenchmarkDial(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	x.serve(s, "127.0.0.1:7000")
	const size = 256 << 20
	b.Run("out", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			c := x.pipe(s, 7000)
			fmt.Fprintf(c, "source %d\n", size)
			if n, err := io.CopyBuffer(io.Discard, struct{ io.Reader }{c}, make([]byte, 128<<10)); err != nil || n != size {
				b.Fatal(n, err)
			}
		}
		reportCPU(b, x)
	})
	b.Run("in", func(b *testing.B) {
		b.SetBytes(size)
		for b.Loop() {
			c := x.pipe(s, 7000)
			_, _ = io.WriteString(c, "sink\n")
			buf := make([]byte, 128<<10)
			for range size / len(buf) {
				if _, err := c.Write(buf); err != nil {
					b.Fatal(err)
				}
			}
			x.must(c.CloseWrite())
			if _, err := io.ReadAll(c); err != nil {
				b.Fatal(err)
			}
		}
		reportCPU(b, x)
	})
	b.Run("connect", func(b *testing.B) {
		for b.Loop() {
			x.must(x.knock(x.ctx(), s, 7000))
		}
	})
}

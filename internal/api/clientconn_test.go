package api

import (
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/useshards/shard"
)

// pair is a connected pair of unix sockets, the daemon's end as a clientConn.
func pair(t *testing.T, stall time.Duration) (*clientConn, net.Conn) {
	t.Helper()
	l, err := net.Listen("unix", filepath.Join(t.TempDir(), "s"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	server, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close(); _ = server.Close() })
	return newClientConn(server, stall), client
}

// TestSlowClient: a client that takes little, but takes it, is waited for, however long one message lasts.
func TestSlowClient(t *testing.T) {
	t.Parallel()
	const size = 8 << 20
	c, client := pair(t, 3*time.Second)
	got := make(chan int, 1)
	go func() {
		buf := make([]byte, 64<<10)
		n := 0
		for n < size {
			k, err := client.Read(buf)
			n += k
			if err != nil {
				break
			}
			time.Sleep(40 * time.Millisecond)
		}
		got <- n
	}()
	begin := time.Now()
	n, err := c.Write(make([]byte, size))
	if n != size || err != nil {
		t.Errorf("after %v %d bytes were written: %v", time.Since(begin), n, err)
	}
	if n := <-got; n != size {
		t.Errorf("%d bytes arrived", n)
	}
	if left := c.left(nil); left != 0 {
		t.Errorf("%d bytes are left", left)
	}
}

// TestDeadClient: a client that takes nothing is cut, and what lies in its socket is not counted as read.
func TestDeadClient(t *testing.T) {
	t.Parallel()
	c, _ := pair(t, 200*time.Millisecond)
	n, err := c.Write(make([]byte, 8<<20))
	if !errors.Is(err, os.ErrDeadlineExceeded) || n == 0 || n == 8<<20 {
		t.Errorf("%d bytes, %v", n, err)
	}
	if left := c.left(nil); left < int64(n) {
		t.Errorf("%d bytes are left of %d that were written", left, n)
	}
}

// TestLeavingClient: whoever leaves with an empty socket has read all; whoever leaves something has not.
func TestLeavingClient(t *testing.T) {
	t.Parallel()
	for _, unread := range []int{0, 1, 50_000, 100_000} {
		c, client := pair(t, time.Minute)
		for range 2 {
			if _, err := c.Write(make([]byte, 50_000)); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.ReadFull(client, make([]byte, 100_000-unread)); err != nil {
			t.Fatal(err)
		}
		_ = client.Close()
		_, err := c.Read(make([]byte, 1))
		if err == nil {
			t.Fatal("read from nobody")
		}
		if left := c.left(err); unread == 0 && left != 0 || left < int64(unread) || left > 300_000 {
			t.Errorf("with %d bytes unread %d are left (%v)", unread, left, err)
		}
	}
}

// TestGoneWhileStuck: somebody who goes away while nobody reads is noticed.
func TestGoneWhileStuck(t *testing.T) {
	t.Parallel()
	c, client := pair(t, time.Minute)
	gone := make(chan struct{})
	stop := c.whileThere(func() { close(gone) })
	defer stop()
	select {
	case <-gone:
		t.Fatal("it is there")
	case <-time.After(1500 * time.Millisecond):
	}
	if _, err := client.Write([]byte("unread")); err != nil {
		t.Fatal(err)
	}
	_ = client.Close()
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("nobody noticed")
	}
}

// TestPatience: the body of an upload may be slow and must not be silent; how it ended is said in a way that a client may see.
func TestPatience(t *testing.T) {
	t.Parallel()
	server, client := net.Pipe()
	defer server.Close()
	p := &upload{deadline: server, r: server}
	go func() { _, _ = client.Write([]byte("x")) }()
	_ = p.SetReadDeadline(time.Now().Add(time.Minute))
	if n, err := p.Read(make([]byte, 10)); n != 1 || err != nil {
		t.Errorf("%d bytes, %v", n, err)
	}
	_ = p.SetReadDeadline(time.Now().Add(200 * time.Millisecond))
	if _, err := p.Read(make([]byte, 10)); shard.CodeOf(err) != shard.CodeTimeout {
		t.Errorf("silence: %v", err)
	}
	p.r = io.MultiReader(&net.Buffers{}, brokenReader{})
	if _, err := p.Read(make([]byte, 10)); shard.CodeOf(err) != shard.CodeInvalidRequest {
		t.Errorf("a cut: %v", err)
	}
}

type brokenReader struct{}

func (brokenReader) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

package egress

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/useshards/shard"
)

// fields are n bytes of the shortest fields that a head can have, which take twenty times as much in memory.
func fields(n int) string {
	var b strings.Builder
	for i := int64(100); b.Len() < n; i++ {
		b.WriteString(strconv.FormatInt(i, 36) + ":\r\n")
	}
	return b.String()
}

// TestHeadsAreOfTheShare: what a sandbox, or a host on its behalf, sends and does not end, or ends and lets wait, takes no more
// memory than the sandbox's share, and another sandbox goes on.
func TestHeadsAreOfTheShare(t *testing.T) {
	log.SetOutput(io.Discard) // net/http quotes what hosts send
	defer log.SetOutput(os.Stderr)
	hello := append([]byte{recordHandshake, 3, 1, 0x40, 0}, make([]byte, 16<<10)...)
	const begun = "GET / HTTP/1.1\r\nHost: good.test\r\n"
	short, long := fields(60<<10), strings.Repeat(string(hello), 2)
	hello = bytes.Clone(hello)
	copy(hello[5:], []byte{1, 0, 0xff, 0xf0, 3, 3}) // the head of a message of 64 KiB
	var block strings.Builder
	f := http2.NewFramer(&block, nil)
	_ = f.WriteSettings()
	_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: append([]byte{0, 1, 'x', 0x7f, 0xff, 0x9c, 3}, make([]byte, 16000)...)})
	for range 2 {
		_ = f.WriteContinuation(1, false, make([]byte, 16000))
	}
	for name, c := range map[string]struct {
		port  int
		sends string
		whole bool // it is passed on, and the host does not answer
	}{
		"half a ClientHello":        {port: 443, sends: string(hello) + long},
		"half a head of one field":  {port: 80, sends: begun + "X: " + strings.Repeat("a", 60<<10)},
		"half a head of many":       {port: 80, sends: begun + short},
		"half a head of HTTP/2":     {port: 80, sends: http2.ClientPreface + block.String()},
		"a head of many fields":     {port: 80, sends: begun + short + "\r\n", whole: true},
		"half an answer":            {port: 80, sends: begun + "X-How: half\r\n\r\n", whole: true},
		"an answer of which no end": {port: 80, sends: begun + "X-How: whole\r\n\r\n", whole: true},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			stop := make(chan struct{})
			answer := "HTTP/1.1 200 OK\r\nContent-Length: 1\r\n" + short
			r.host("good.test", public, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
				if how := q.Header.Get("X-How"); how != "" {
					conn, _, err := w.(http.Hijacker).Hijack()
					if err != nil {
						t.Error(err)
						return
					}
					defer conn.Close()
					_, _ = io.WriteString(conn, answer+map[string]string{"whole": "\r\n"}[how])
				} else if q.Header.Get("X-Quick") != "" {
					return
				}
				select {
				case <-stop:
				case <-q.Context().Done():
				}
			}))
			bad, good := r.box(Subject{Policy: policyOf(t, "allow good.test")}), r.box(Subject{Policy: policyOf(t, "allow good.test")})
			const conns = 200
			before := memory()
			var all []net.Conn
			for range conns {
				c := bad.raw(c.port)
				_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
				all = append(all, c)
			}
			for _, one := range all {
				_, _ = io.WriteString(one, c.sends) // it may be closed by now
			}
			full := func() bool {
				for _, d := range r.log(bad.id) {
					if d.Rule == shard.EgressRuleLimit {
						return true
					}
				}
				return false
			}
			for deadline := time.Now().Add(time.Minute); !full(); time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("there was room for all, %d bytes are held", r.proxy.clients[bad.id].held)
				}
			}
			const slack = 48 << 20 // connections, and the rubbish of what was read
			for deadline := time.Now().Add(time.Minute); memory() > before+maxHeld+slack; time.Sleep(10 * time.Millisecond) {
				if time.Now().After(deadline) {
					t.Fatalf("%d MiB in use before, now %d", before>>20, memory()>>20)
				}
			}
			q, _ := http.NewRequest("GET", "http://good.test/", nil)
			q.Header.Set("X-Quick", "1")
			resp, err := good.client(nil, false).Do(q)
			if err != nil || resp.StatusCode != 200 {
				t.Fatalf("another sandbox: %v %v", resp, err)
			}
			resp.Body.Close()
			close(stop)
			for _, one := range all {
				_ = one.Close()
			}
			r.proxy.clients[bad.id].returned(t)
		})
	}
}

// memory is what this process uses, in bytes.
func memory() uint64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.HeapAlloc + m.StackInuse
}

// TestLongHeads are no trouble one at a time, on a connection that is kept.
func TestLongHeads(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		for i := range 30 {
			w.Header().Set(fmt.Sprintf("X-%d", i), strings.Repeat("v", 2000))
		}
		w.WriteHeader(103)
		w.WriteHeader(200)
	}))
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always})
	c := b.raw(80)
	in := bufio.NewReader(c)
	for range 40 {
		_, _ = io.WriteString(c, "GET / HTTP/1.1\r\nHost: good.test\r\nX: "+strings.Repeat("a", 60<<10)+"\r\n\r\n")
		for _, want := range []int{103, 200} {
			if resp, err := http.ReadResponse(in, nil); err != nil || resp.StatusCode != want {
				t.Fatalf("%v %v", resp, err)
			}
		}
	}
	for _, h2 := range []bool{false, true} {
		client := b.client(r.pool, h2)
		for range 40 {
			q, _ := http.NewRequest("GET", "https://good.test/", nil)
			q.Header.Set("X", strings.Repeat("a", 60<<10))
			resp, err := client.Do(q)
			if err != nil || resp.StatusCode != 200 || len(resp.Header) < 30 {
				t.Fatalf("%v %v", resp, err)
			}
			resp.Body.Close()
		}
	}
}

// TestWaitingIsBounded: what connections of one sandbox read while a write of theirs waits is bounded together, and given back when
// the write ends or the connection does.
func TestWaitingIsBounded(t *testing.T) {
	c := &client{}
	var all []*heading
	for room := true; room; {
		h := &heading{http2: true}
		h.write(c, true)
		all, room = append(all, h), h.read(c, freeStuck+100<<10)
	}
	if most := maxStuck/(stuckWeight*100<<10) + 1; len(all) != most {
		t.Errorf("%d connections found room, of %d", len(all)-1, most-1)
	}
	if h := (&heading{http2: true}); !h.read(c, 1<<20) {
		t.Error("a connection whose answers are taken is refused")
	}
	for i, h := range all {
		if i%2 == 0 {
			h.write(c, false)
		} else {
			h.close(c)
		}
	}
	if c.stuck != 0 {
		t.Errorf("%d bytes are held for nothing", c.stuck)
	}
}

// TestQuestionsWhoseAnswersNobodyTakes: pings over HTTP/2 whose answers wait in the proxy are bounded too.
func TestQuestionsWhoseAnswersNobodyTakes(t *testing.T) {
	const most = 600
	r := newRig(t)
	r.host("good.test", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	var pings, head bytes.Buffer
	f := http2.NewFramer(&pings, nil)
	for range 9000 { // net/http itself ends a connection with more than 10,000
		_ = f.WritePing(false, [8]byte{1})
	}
	enc := hpack.NewEncoder(&head)
	for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "good.test"}, {":path", "/"}} {
		_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	client := r.proxy.clients[b.id]
	var all []net.Conn
	for range most {
		c := b.raw(80).(*net.TCPConn)
		_, _ = io.WriteString(c, http2.ClientPreface)
		f := http2.NewFramer(c, c)
		_ = f.WriteSettings()
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true})
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if frame.Header().StreamID == 1 && frame.Header().Flags.Has(http2.FlagDataEndStream) {
				break
			}
		}
		all = append(all, c)
		_ = c.SetReadBuffer(1)
		client.mu.Lock()
		for g := range client.conns {
			_ = g.Conn.(*net.TCPConn).SetWriteBuffer(1) // else the kernel takes a hundred thousand answers
		}
		client.mu.Unlock()
		_ = c.SetWriteDeadline(time.Now().Add(time.Minute))
		_, _ = c.Write(pings.Bytes())
		if slices.ContainsFunc(r.log(b.id), func(d shard.EgressDecision) bool { return d.Rule == shard.EgressRuleLimit }) {
			break
		}
	}
	client.mu.Lock()
	stuck := client.stuck
	client.mu.Unlock()
	for _, c := range all {
		_ = c.Close()
	}
	client.returned(t)
	switch {
	case len(all) < most:
	case stuck > maxStuck:
		t.Errorf("there is room for the answers of all: %d bytes", stuck)
	default: // what the kernel takes of small packets is its own affair, and changes from hour to hour
		t.Skipf("the kernel took most of the answers itself: %d bytes of questions are counted as waiting, and the bound is %d", stuck, maxStuck)
	}
}

// returned waits until nothing is held of a sandbox.
func (c *client) returned(t *testing.T) {
	t.Helper()
	held := func() int { c.mu.Lock(); defer c.mu.Unlock(); return c.held + c.stuck }
	for deadline := time.Now().Add(time.Minute); held() != 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are held for nothing", held())
		}
	}
}

// TestUploadsWhileAWriteWaits: what a body was read into is of the share until no write waits that it may wait behind.
func TestUploadsWhileAWriteWaits(t *testing.T) {
	near, far := net.Pipe()
	defer far.Close()
	c := &client{proxy: &Proxy{maxConns: 1, maxOpen: 1}, hosts: map[*hostConn]struct{}{}}
	conn, err := c.keep(near)
	if err != nil {
		t.Fatal(err)
	}
	h := conn.(*hostConn)
	body := func() *upload { return &upload{ReadCloser: io.NopCloser(strings.NewReader("x")), size: scratch} }
	first, second, after := body(), body(), body()
	for _, u := range []*upload{first, second, after} {
		if !u.begin(h) || !u.begin(h) { // the second time it is sent again
			t.Fatal("there is no room")
		}
	}
	if c.held != 3*scratch {
		t.Errorf("%d bytes are held", c.held)
	}
	if first.Close(); c.held != 2*scratch {
		t.Errorf("no write waits: %d bytes are held", c.held)
	}
	wrote := make(chan error, 1)
	go func() { _, err := h.Write([]byte("x")); wrote <- err }()
	for waits := false; !waits; time.Sleep(time.Millisecond) {
		h.mu.Lock()
		waits = h.writing
		h.mu.Unlock()
	}
	if _, err := io.ReadAll(second); err != nil || second.Close() != nil || c.held != 2*scratch {
		t.Errorf("a write waits: %v, %d bytes are held", err, c.held)
	}
	if _, err := io.ReadFull(far, make([]byte, 1)); err != nil || <-wrote != nil || c.held != scratch {
		t.Errorf("the write has ended: %v, %d bytes are held", err, c.held)
	}
	go func() { _, err := h.Write([]byte("x")); wrote <- err }()
	for waits := false; !waits; time.Sleep(time.Millisecond) {
		h.mu.Lock()
		waits = h.writing
		h.mu.Unlock()
	}
	_ = after.Close()
	if c.end(); <-wrote == nil || c.held != 0 {
		t.Errorf("the sandbox is gone: %d bytes are held", c.held)
	}
	if u := body(); c.hold(maxHeld) && u.begin(h) {
		t.Error("there is room beyond the share")
	}
}

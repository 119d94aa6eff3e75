package gate

import (
	"net"
	"sync"
	"testing"
	"time"
)

// TestIdleConnections: 10,000 connections that say nothing. 4,000 of 125 addresses are held until their time is over, 6,000
// of one address are turned away but for its share, and other clients are served meanwhile.
func TestIdleConnections(t *testing.T) {
	if n := connectionLimit(); n < 6000 {
		t.Skipf("this host lets a process have too few open files for it (%d connections)", n)
	}
	r := newRig(t, Options{}, func(g *Gate) { g.total = 6000 })
	text := r.mint(0)
	var mu sync.Mutex
	var held []net.Conn
	defer func() {
		for _, c := range held {
			_ = c.Close()
		}
	}()
	var wg sync.WaitGroup
	slots := make(chan struct{}, 64)
	dial := func(from net.IP) {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}
			conn, err := d.Dial("tcp", r.addr())
			if err != nil {
				return // turned away
			}
			if from[15] == 1 { // the greedy one: see whether it is kept
				_ = conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
				if _, err := conn.Read(make([]byte, 1)); err == nil || !isTimeout(err) {
					_ = conn.Close()
					return
				}
			}
			mu.Lock()
			defer mu.Unlock()
			held = append(held, conn)
		})
	}
	for i := range 4000 {
		dial(net.IPv4(127, 0, 1, byte(2+i%125)))
	}
	for range 6000 {
		dial(net.IPv4(127, 0, 1, 1))
	}
	wg.Wait()
	for range 3 {
		if got := r.ask("GET", "/v0/version", text); got == nil || got.status != 200 {
			t.Fatalf("another client is not served: %+v", got)
		}
	}
	r.gate.mu.Lock()
	conns, greedy := len(r.gate.conns), r.gate.pending[sourcePrefix("127.0.1.1")]
	r.gate.mu.Unlock()
	if greedy > maxPending || conns > 4000+maxPending+5 {
		t.Errorf("%d connections of the greedy address, %d in all", greedy, conns)
	}
	for deadline := time.Now().Add(wait); ; time.Sleep(20 * time.Millisecond) { // each has headTime
		r.gate.mu.Lock()
		left := len(r.gate.conns)
		r.gate.mu.Unlock()
		if left == 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d idle connections are still held", left)
		}
	}
}

func isTimeout(err error) bool {
	e, ok := err.(net.Error) // straight from the connection
	return ok && e.Timeout()
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/useshards/shard/internal/netns"
)

// TestOnlyTheSandboxIsAnswered at its gateway, which other programs of this host and its neighbours may reach.
func TestOnlyTheSandboxIsAnswered(t *testing.T) {
	e, w := lonely(t, "allow good.test")
	block := byte(1 + (os.Getpid()+7*int(rigs.Add(1)))%250)
	address := func(n byte) netip.Addr { return netip.AddrFrom4([4]byte{127, block, 200, n}) }
	w.addr, w.asking = address(2), make(chan struct{}, maxPerWard)
	ctx, cancel := context.WithCancel(t.Context())
	w.ended = cancel
	if err := e.resolve(ctx, w, Link{w.addr, address(1)}); err != nil {
		t.Fatal(err)
	}
	defer w.end()
	q := new(dns.Msg)
	q.SetQuestion("other.test.", dns.TypeA)
	ask := func(network string, from byte) (*dns.Conn, error) {
		var local net.Addr = &net.UDPAddr{IP: address(from).AsSlice()}
		if network == "tcp" {
			local = &net.TCPAddr{IP: address(from).AsSlice()}
		}
		c, err := (&net.Dialer{LocalAddr: local}).Dial(network, netip.AddrPortFrom(address(1), netns.ResolverPort).String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		_ = c.SetDeadline(time.Now().Add(time.Minute))
		conn := &dns.Conn{Conn: c}
		return conn, conn.WriteMsg(q)
	}
	for _, network := range []string{"udp", "tcp"} {
		stranger, _ := ask(network, 3)
		own, err := ask(network, 2)
		if err != nil {
			t.Fatal(err)
		}
		if m, err := own.ReadMsg(); err != nil || m.Rcode != dns.RcodeNameError {
			t.Errorf("%s: the sandbox is answered %v, %v", network, m, err)
		}
		if network == "udp" { // what came before was seen to; TCP is closed
			_ = stranger.SetDeadline(time.Now().Add(100 * time.Millisecond))
		}
		if m, err := stranger.ReadMsg(); err == nil {
			t.Errorf("%s: another is answered %v", network, m)
		} else if n, ok := errors.AsType[net.Error](err); ok && n.Timeout() && network == "tcp" {
			t.Error("another's connection is kept")
		}
	}
}

// TestHostileNameserver: whatever a nameserver answers, the sandbox gets an answer to its question, soon, with no more addresses
// than there is room for, and none that leads inside.
func TestHostileNameserver(t *testing.T) {
	e, w := lonely(t, "allow dns")
	at := netip.AddrFrom4([4]byte{127, byte(1 + os.Getpid()%250), 201, 1})
	e.cfg.Nameservers = []string{at.String()}
	address := netip.AddrPortFrom(at, 53).String()
	udp, err := net.ListenPacket("udp", address)
	if err != nil {
		t.Fatal(err)
	}
	tcp, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	// Names say what their answer is: by UDP, and by TCP when that is cut off. nil is none.
	answers := map[string]func(m *dns.Msg, byTCP bool) []byte{
		"loop.test.": func(m *dns.Msg, _ bool) []byte {
			p, _ := m.Pack()
			p[7] = 1                                                                           // one record,
			return append(p, 0xc0, byte(len(p)), 0, 1, 0, 1, 0, 0, 0, 9, 0, 4, 203, 0, 113, 9) // whose name is itself
		},
		"junk.test.": func(*dns.Msg, bool) []byte { return []byte("\x00junk") },
		"other.test.": func(m *dns.Msg, _ bool) []byte {
			m.Question[0].Name = "another.test."
			m.Answer = records(t, "other.test. 9 IN A 203.0.113.9")
			p, _ := m.Pack()
			return p
		},
		"aside.test.": func(m *dns.Msg, _ bool) []byte {
			m.Answer = records(t, "another.test. 9 IN A 203.0.113.9")
			p, _ := m.Pack()
			return p
		},
		"many.test.": func(m *dns.Msg, byTCP bool) []byte {
			if m.Truncated = !byTCP; byTCP {
				m.Compress = true
				for i := range 4000 {
					m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: m.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(203, 0, byte(i>>8), byte(i))})
				}
			}
			p, _ := m.Pack()
			return p
		},
		"inside.test.": func(m *dns.Msg, _ bool) []byte {
			m.Answer = records(t, "inside.test. 0 IN CNAME a.test.", "a.test. 0 IN CNAME b.test.", "b.test. 0 IN A 10.0.0.1", "b.test. 0 IN A 127.0.0.1")
			p, _ := m.Pack()
			return p
		},
		"long.test.": func(m *dns.Msg, byTCP bool) []byte {
			if m.Truncated = !byTCP; byTCP {
				name := "long.test."
				for i := range 300 {
					next := fmt.Sprintf("%s%d.test.", strings.Repeat("x", 50), i)
					m.Answer = append(m.Answer, &dns.CNAME{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET}, Target: next})
					name = next
				}
				m.Answer = append(m.Answer, &dns.A{Hdr: dns.RR_Header{Name: name, Rrtype: dns.TypeA, Class: dns.ClassINET}, A: net.IPv4(203, 0, 113, 9)})
			}
			p, _ := m.Pack()
			return p
		},
		"cut.test.": func(m *dns.Msg, _ bool) []byte {
			m.Truncated = true
			p, _ := m.Pack()
			return p
		},
		"silent.test.": func(m *dns.Msg, byTCP bool) []byte {
			if m.Truncated = !byTCP; byTCP {
				return nil
			}
			p, _ := m.Pack()
			return p
		},
	}
	answer := func(packet []byte, byTCP bool) []byte {
		q := new(dns.Msg)
		if q.Unpack(packet) != nil || answers[q.Question[0].Name] == nil {
			return nil
		}
		m := new(dns.Msg)
		m.SetReply(q)
		return answers[q.Question[0].Name](m, byTCP)
	}
	var servers sync.WaitGroup
	servers.Go(func() {
		for buf := make([]byte, 4096); ; {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			if a := answer(buf[:n], false); a != nil {
				_, _ = udp.WriteTo(a, from)
			}
		}
	})
	servers.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			servers.Go(func() {
				defer c.Close()
				conn := &dns.Conn{Conn: c}
				packet, err := conn.ReadMsgHeader(nil)
				if err != nil {
					return
				}
				if a := answer(packet, true); a != nil {
					_, _ = conn.Write(a)
					return
				}
				for range 100 { // a length, and never all of it
					if _, err := c.Write([]byte{9}); err != nil {
						return
					}
					time.Sleep(50 * time.Millisecond)
				}
			})
		}
	})
	t.Cleanup(func() { _ = udp.Close(); _ = tcp.Close(); servers.Wait() })
	for name, want := range map[string]struct {
		rcode, addresses int
	}{
		"loop.test.": {dns.RcodeServerFailure, 0}, "junk.test.": {dns.RcodeServerFailure, 0}, "other.test.": {dns.RcodeServerFailure, 0},
		"aside.test.": {dns.RcodeSuccess, 0}, "many.test.": {dns.RcodeSuccess, maxAnswer}, "inside.test.": {dns.RcodeSuccess, 0},
		"long.test.": {dns.RcodeSuccess, 0}, "cut.test.": {dns.RcodeServerFailure, 0}, "silent.test.": {dns.RcodeServerFailure, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			q := new(dns.Msg)
			q.SetQuestion(name, dns.TypeA)
			packet, err := q.Pack()
			if err != nil {
				t.Fatal(err)
			}
			m := new(dns.Msg)
			if err := m.Unpack(e.handle(t.Context(), w, packet, "tcp")); err != nil {
				t.Fatal(err)
			}
			if got := len(addressesIn(m)); m.Rcode != want.rcode || got != want.addresses || len(m.Answer) > max(want.addresses, maxChain) {
				t.Errorf("%s with %d addresses, %d records", dns.RcodeToString[m.Rcode], got, len(m.Answer))
			}
		})
	}
}

// TestSandboxesTogetherLeaveTurns to one that comes, however many questions of theirs wait.
func TestSandboxesTogetherLeaveTurns(t *testing.T) {
	const all, hogs = 4, 2
	turns := turns{left: all, of: map[*ward]int{}}
	ctx, cancel := context.WithCancel(t.Context())
	var group sync.WaitGroup
	for range hogs {
		w := new(ward)
		for range maxPerWard {
			group.Go(func() {
				if turns.take(ctx, w) == nil {
					<-ctx.Done() // no answer
					turns.give(w)
				}
			})
		}
	}
	used := func() int { turns.mu.Lock(); defer turns.mu.Unlock(); return all - turns.left }
	for deadline := time.Now().Add(time.Minute); used() < all-1; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d turns are used", used())
		}
	}
	comes := new(ward)
	for range 3 {
		if err := turns.take(t.Context(), comes); err != nil || used() != all {
			t.Errorf("%d turns are used: %v", used(), err)
		}
		turns.give(comes)
	}
	cancel()
	group.Wait()
	if used() != 0 || len(turns.of) > 0 {
		t.Errorf("%d turns are kept", used())
	}
}

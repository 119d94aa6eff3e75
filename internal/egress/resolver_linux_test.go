package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
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

package egress

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"
)

// errLocal is the refusal to connect to what is no single other host.
var errLocal = errors.New("the address is this host's own, or not of a single host")

// dialHost connects from this host. The check is made at the socket, so that nothing between a judgement and the connection
// can change where it goes.
func dialHost(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("read the address to connect to: %w", err)
		}
		return reachable(to.Addr())
	}}
	return d.DialContext(ctx, "tcp", addr.String())
}

// headStart is how long the first family of addresses is tried alone, as programs do that know both (RFC 8305).
const headStart = 300 * time.Millisecond

// connect dials the addresses in turn until one answers, and those of the other family beside the first after a while.
func (p *Proxy) connect(ctx context.Context, addrs []netip.Addr, port uint16) (net.Conn, error) {
	others := slices.IndexFunc(addrs, func(a netip.Addr) bool { return a.Is4() != addrs[0].Is4() })
	if others < 0 {
		return p.connectEach(ctx, addrs, port)
	}
	type result struct {
		conn net.Conn
		err  error
	}
	results := make(chan result)
	var group sync.WaitGroup
	defer group.Wait() // not for long: what is still under way is called off
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	dial := func(addrs []netip.Addr) {
		group.Go(func() {
			conn, err := p.connectEach(ctx, addrs, port)
			select {
			case results <- result{conn, err}:
			case <-ctx.Done(): // too late
				if err == nil {
					_ = conn.Close()
				}
			}
		})
	}
	dial(addrs[:others])
	start := time.NewTimer(headStart)
	defer start.Stop()
	var failed error
	for under, begun := 1, false; under > 0; {
		select {
		case <-start.C:
		case r := <-results:
			if under--; r.err == nil {
				return r.conn, nil
			}
			failed = cmp.Or(failed, r.err)
		case <-ctx.Done():
			return nil, cmp.Or(failed, ctx.Err())
		}
		if !begun {
			begun = true
			under++
			dial(addrs[others:])
		}
	}
	return nil, failed
}

// connectEach dials the addresses in turn until one answers.
func (p *Proxy) connectEach(ctx context.Context, addrs []netip.Addr, port uint16) (net.Conn, error) {
	err := errors.New("no address")
	for i, a := range addrs {
		left := dialTime
		if deadline, ok := ctx.Deadline(); ok {
			left = time.Until(deadline)
		}
		one, cancel := context.WithTimeout(ctx, max(left/time.Duration(len(addrs)-i), time.Second))
		var conn net.Conn
		conn, err = p.o.Dial(one, netip.AddrPortFrom(a, port))
		cancel()
		if err == nil {
			tune(conn)
			return conn, nil
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// inOrder puts IPv4 addresses before the others: that is what a sandbox would have used, since its own address of IPv6 is no
// public one (RFC 6724).
func inOrder(addrs []netip.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, a.Unmap())
	}
	slices.SortStableFunc(out, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	return out
}

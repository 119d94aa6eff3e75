package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
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

// connect dials the addresses in turn until one answers.
func (p *Proxy) connect(ctx context.Context, addrs []netip.Addr, port uint16) (net.Conn, error) {
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

// first4 puts IPv4 addresses before the others: that is what a sandbox would have used.
func first4(addrs []netip.Addr) []netip.Addr {
	out := make([]netip.Addr, 0, len(addrs))
	for _, a := range addrs {
		out = append(out, a.Unmap())
	}
	slices.SortStableFunc(out, func(a, b netip.Addr) int { return a.BitLen() - b.BitLen() })
	return out
}

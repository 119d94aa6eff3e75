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

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/policy"
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

// reachable says whether an address may be connected to at all, whatever the rules: errLocal, or another error where this
// host has no way to it.
func reachable(addr netip.Addr) error {
	addr = addr.Unmap()
	if policy.Dropped(addr) || addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
		return errLocal
	}
	// The kernel knows its own addresses and broadcasts best.
	routes, err := netlink.RouteGet(addr.AsSlice())
	if err != nil {
		return fmt.Errorf("find a route: %w", err)
	}
	for _, r := range routes {
		if r.Type != unix.RTN_UNICAST {
			return errLocal
		}
	}
	return nil
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

// tune makes the kernel end a connection whose other side is gone or takes nothing any more.
func tune(conn net.Conn) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return
	}
	// Go's listeners and dialers have keep-alive on: that finds the dead, this the stuck.
	if raw, err := tcp.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(stallTime.Milliseconds()))
		})
	}
}

// originalDestination is where a connection was sent before this host redirected it; zero where it was not redirected.
func originalDestination(conn net.Conn) (dest netip.Addr) {
	tcp, ok := conn.(*net.TCPConn)
	if !ok {
		return dest
	}
	raw, err := tcp.SyscallConn()
	if err != nil {
		return dest
	}
	_ = raw.Control(func(fd uintptr) {
		// The answer is a sockaddr_in, which fits this structure: family and port, then the address.
		m, err := unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST)
		if err == nil {
			dest = netip.AddrFrom4([4]byte(m.Multiaddr[4:8]))
		}
	})
	if dest == addrOf(conn.LocalAddr()) {
		return netip.Addr{} // the kernel follows connections here, and did not change this one
	}
	return dest
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

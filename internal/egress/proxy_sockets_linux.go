package egress

import (
	"fmt"
	"net"
	"net/netip"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// reachable says whether an address may be connected to at all, whatever the rules: errLocal, or another error where this
// host has no way to it.
func reachable(addr netip.Addr) error {
	addr = addr.Unmap()
	if shard.IsUnreachable(addr) || addr.IsMulticast() || addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}) {
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
		if addrOf(conn.LocalAddr()).Is6() {
			// The answer is a sockaddr_in6, which this structure begins with.
			const originalDst6 = 80 // IP6T_SO_ORIGINAL_DST
			if m, err := unix.GetsockoptIPv6MTUInfo(int(fd), unix.IPPROTO_IPV6, originalDst6); err == nil {
				dest = netip.AddrFrom16(m.Addr.Addr)
			}
			return
		}
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

// connections is how many connections all sandboxes may have together: with their other ends, and the pipes through which the
// kernel moves bytes, they take half of the descriptors that this process may have.
func connections() int {
	const each = 6
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return maxConns
	}
	return int(min(limit.Cur, 1<<24) / (2 * each))
}

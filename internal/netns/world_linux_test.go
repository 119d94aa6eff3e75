package netns

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The test's addresses. The host is the process's own namespace, the world is what lies beyond its uplink.
var (
	hostUplink  = "198.18.0.1"
	worldUplink = "198.18.0.2"
	worldPublic = []string{worldUplink, "198.19.0.1", "203.0.113.80"}
	worldHidden = []string{"10.1.2.3", "172.16.5.5", "192.168.7.7", "100.64.1.1", "169.254.169.254"}
	hostOthers  = []string{"192.168.1.1", "10.9.9.9", "203.0.113.5"}

	hostUplink6  = "2001:db8:18::1"
	worldUplink6 = "2001:db8:18::2"
	worldPublic6 = []string{worldUplink6, "2001:db8:19::1", "64:ff9b::203.0.113.80", "2002:cb00:7150::1"}
	// In each form in which an address that nobody reaches can be written.
	worldHidden6 = []string{"fd00:1::1", "fc00::5", "fec0::1", "100::1", "2001::1", "2001:0:cb00:7150::1", "64:ff9b:1::1", "64:ff9b::10.1.2.3",
		"64:ff9b::192.168.7.7", "64:ff9b::127.0.0.1", "64:ff9b::169.254.169.254", "2002:a01:203::1", "2002:c0a8:707::1", "2002:6440:101::1",
		"::ffff:0:10.1.2.3", "::10.1.2.3"}
	hostOthers6 = []string{"fd00:99::1", "2001:db8:5::5"}
)

const port = 7000

// world is everything outside a sandbox: uplink, private and public places, all of which listen.
type world struct {
	t    *testing.T
	path string // its namespace
	seen *seen
}

// seen collects the tokens that arrived, by place.
type seen struct {
	mu     sync.Mutex
	tokens map[string]bool // "place token"
	change chan struct{}
}

func (s *seen) add(place, token string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tokens[place+" "+token] = true
	close(s.change)
	s.change = make(chan struct{})
}

func (s *seen) has(place, token string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.tokens[place+" "+token]
}

// wait fails the test if token does not arrive at place.
func (s *seen) wait(t testing.TB, place, token string) {
	t.Helper()
	deadline := time.After(20 * time.Second)
	for {
		s.mu.Lock()
		change := s.change
		ok := s.tokens[place+" "+token]
		s.mu.Unlock()
		if ok {
			return
		}
		select {
		case <-change:
		case <-deadline:
			t.Fatalf("%s never arrived at %s", token, place)
		}
	}
}

var serial atomic.Int64

func newToken() string { return fmt.Sprintf("canary-%d-", serial.Add(1)) }

var tokenPattern = regexp.MustCompile(`canary-\d+-`)

// within runs f on a thread in the namespace at path ("" is the host); sockets that f makes belong there.
func within(t testing.TB, path string, f func() error) {
	t.Helper()
	if err := tryWithin(path, f); err != nil {
		t.Fatal(err)
	}
}

func tryWithin(path string, f func() error) error {
	if path == "" {
		return f()
	}
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		ns, err := os.Open(path)
		if err == nil {
			err = unix.Setns(int(ns.Fd()), unix.CLONE_NEWNET)
			_ = ns.Close()
		}
		if err == nil {
			err = f()
		}
		done <- err
	}()
	return <-done
}

func newWorld(t *testing.T) *world {
	needRoot(t)
	ns, err := newNamespace()
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, seen: &seen{tokens: map[string]bool{}, change: make(chan struct{})}, path: t.TempDir() + "/world"}
	if err := mountNamespace(ns, w.path); err != nil {
		t.Fatal(err)
	}
	rt, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		t.Fatal(err)
	}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "uplink"
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "uplink", netlink.NsFd(int(ns.file.Fd()))
	if err := rt.LinkAdd(veth); err != nil {
		t.Fatal(err)
	}
	hostLo, err := rt.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := rt.LinkDel(veth)
		for _, a := range slices.Concat(hostOthers, hostOthers6) {
			err = errors.Join(err, rt.AddrDel(hostLo, &netlink.Addr{IPNet: hostNet(a)}))
		}
		ns.close()
		rt.Close()
		if err := errors.Join(err, unmountNamespace(w.path)); err != nil {
			t.Error(err)
		}
	})
	worldLo, err := ns.rt.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	peer, err := ns.rt.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	if uplink, err := rt.LinkByName("uplink"); err != nil {
		t.Fatal(err)
	} else {
		veth.HardwareAddr = uplink.Attrs().HardwareAddr
	}
	errs := []error{
		up(rt, veth, netip.MustParseAddr(hostUplink), netip.MustParsePrefix("198.18.0.0/24")),
		up(ns.rt, peer, netip.MustParseAddr(worldUplink), netip.MustParsePrefix("198.18.0.0/24")),
		ns.rt.LinkSetUp(worldLo),
		rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(worldUplink)}),
		// The world knows the way to the sandboxes, so that only the wall keeps it out.
		ns.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(hostUplink)}),
		join6(rt, veth, hostUplink6, worldUplink6, peer),
		join6(ns.rt, peer, worldUplink6, hostUplink6, veth),
		rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(worldUplink6)}),
		ns.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(hostUplink6)}),
	}
	for _, a := range slices.Concat(worldPublic[1:], worldHidden, worldPublic6[1:], worldHidden6) {
		errs = append(errs, ns.rt.AddrAdd(worldLo, &netlink.Addr{IPNet: hostNet(a), Flags: unix.IFA_F_NODAD}))
	}
	for _, a := range slices.Concat(hostOthers, hostOthers6) {
		errs = append(errs, rt.AddrAdd(hostLo, &netlink.Addr{IPNet: hostNet(a), Flags: unix.IFA_F_NODAD}))
	}
	if err := errors.Join(errs...); err != nil {
		t.Fatal(err)
	}
	for at, addrs := range map[*netlink.Handle][]string{rt: slices.Concat(hostOthers6, []string{hostUplink6}), ns.rt: slices.Concat(worldPublic6, worldHidden6)} {
		for _, a := range addrs { // the kernel sees to it in the background
			eventually(t, "a way to "+a, func() bool {
				routes, err := at.RouteGet(net.ParseIP(a))
				return err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL
			})
		}
	}
	w.listen("host", "")
	w.listen("world", w.path)
	return w
}

func hostNet(a string) *net.IPNet {
	addr := netip.MustParseAddr(a)
	return &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(addr.BitLen(), addr.BitLen())}
}

// join6 gives an end of the uplink its address, and the other end's, so that nobody has to look for it.
func join6(rt *netlink.Handle, link netlink.Link, addr, peer string, other netlink.Link) error {
	return give6(rt, link, netip.MustParseAddr(addr), netip.MustParsePrefix("2001:db8:18::/64"), netip.MustParseAddr(peer), other.Attrs().HardwareAddr)
}

func wide(a string) *net.IPNet { return &net.IPNet{IP: net.ParseIP(a), Mask: net.CIDRMask(64, 128)} }

// at is an address and the test's port, for a dial; over names the network of such an address: tcp4, udp6.
func at(addr string) string { return net.JoinHostPort(addr, fmt.Sprint(port)) }

func over(protocol, addr string) string {
	if strings.Contains(addr, ":") {
		return protocol + "6"
	}
	return protocol + "4"
}

// listen serves TCP and UDP on every address of a namespace: what arrives is noted and sent back.
func (w *world) listen(place, path string) {
	w.t.Helper()
	w.listenOver("4", place, path)
	w.listenOver("6", place, path)
}

func (w *world) listenOver(family, place, path string) {
	w.t.Helper()
	var tcp net.Listener
	var udp net.PacketConn
	within(w.t, path, func() (err error) {
		if tcp, err = net.Listen("tcp"+family, fmt.Sprintf(":%d", port)); err != nil {
			return err
		}
		udp, err = net.ListenPacket("udp"+family, fmt.Sprintf(":%d", port))
		return err
	})
	var group sync.WaitGroup
	var conns sync.Map
	group.Go(func() {
		for {
			c, err := tcp.Accept()
			if err != nil {
				return
			}
			w.seen.add(place, "connection")
			conns.Store(c, nil)
			group.Go(func() {
				defer func() { _ = c.Close() }()
				buf := make([]byte, 256)
				for {
					n, err := c.Read(buf)
					if err != nil {
						return
					}
					w.note(place, buf[:n])
					if _, err := c.Write(buf[:n]); err != nil {
						return
					}
				}
			})
		}
	})
	group.Go(func() {
		buf := make([]byte, 2048)
		for {
			n, from, err := udp.ReadFrom(buf)
			if err != nil {
				return
			}
			w.note(place, buf[:n])
			_, _ = udp.WriteTo(buf[:n], from)
		}
	})
	w.t.Cleanup(func() {
		_ = tcp.Close()
		_ = udp.Close()
		conns.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
		group.Wait()
	})
}

func (w *world) note(place string, data []byte) {
	for _, token := range tokenPattern.FindAll(data, -1) {
		w.seen.add(place, string(token))
	}
}

// capture notes the token of every frame that comes in to a namespace, and ARP answers as "arp ADDRESS".
func (w *world) capture(place, path string) {
	w.t.Helper()
	var fd int
	within(w.t, path, func() (err error) {
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		if err != nil {
			return err
		}
		return unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 50_000})
	})
	stop := make(chan struct{})
	var group sync.WaitGroup
	group.Go(func() {
		buf := make([]byte, 4096)
		for {
			n, from, err := unix.Recvfrom(fd, buf, 0)
			select {
			case <-stop:
				return
			default:
			}
			if err != nil {
				continue
			}
			if ll, ok := from.(*unix.SockaddrLinklayer); ok && ll.Pkttype == unix.PACKET_OUTGOING {
				continue
			}
			w.note(place, buf[:n])
			if n >= 42 && binary.BigEndian.Uint16(buf[12:]) == unix.ETH_P_ARP && binary.BigEndian.Uint16(buf[20:]) == 2 {
				w.seen.add(place, "arp "+net.IP(buf[28:32]).String())
			}
		}
	})
	w.t.Cleanup(func() {
		close(stop)
		group.Wait()
		_ = unix.Close(fd)
	})
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// tcp dials from a namespace and sends a token back and forth; nil when all of it came through.
func tcp(path, addr, token string, patience time.Duration) error {
	return tryWithin(path, func() error {
		c, err := net.DialTimeout(over("tcp", addr), at(addr), patience)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		return exchange(c, token)
	})
}

func exchange(c net.Conn, token string) error {
	if err := c.SetDeadline(time.Now().Add(20 * time.Second)); err != nil {
		return err
	}
	if _, err := io.WriteString(c, token); err != nil {
		return err
	}
	back := make([]byte, len(token))
	if _, err := io.ReadFull(c, back); err != nil {
		return err
	}
	if string(back) != token {
		return fmt.Errorf("sent %q, got back %q", token, back)
	}
	return nil
}

// udp sends a token from a namespace. What the kernel refuses to send at once did not arrive either.
func udp(path, addr, token string) {
	_ = tryWithin(path, func() error {
		d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
			return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_BROADCAST, 1) })
		}}
		c, err := d.DialContext(context.Background(), over("udp", addr), at(addr))
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		_, err = io.WriteString(c, token)
		return err
	})
}

// frame sends a raw Ethernet frame out of eth0 of a namespace.
func frame(t testing.TB, path string, to net.HardwareAddr, kind uint16, payload []byte) {
	t.Helper()
	within(t, path, func() error {
		link, err := net.InterfaceByName(inside)
		if err != nil {
			return err
		}
		fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		if err != nil {
			return err
		}
		defer func() { _ = unix.Close(fd) }()
		data := bytes.Join([][]byte{to, link.HardwareAddr, binary.BigEndian.AppendUint16(nil, kind), payload}, nil)
		return unix.Sendto(fd, data, 0, &unix.SockaddrLinklayer{Ifindex: link.Index, Protocol: htons(kind)})
	})
}

// packet4 is an IPv4 packet of the given protocol; UDP goes to the test's port, ICMP is an echo request.
func packet4(src, dst string, proto byte, token string) []byte {
	var body []byte
	switch proto {
	case unix.IPPROTO_UDP:
		body = binary.BigEndian.AppendUint16(body, 5555)
		body = binary.BigEndian.AppendUint16(body, port)
		body = binary.BigEndian.AppendUint16(body, uint16(8+len(token)))
		body = append(body, 0, 0) // no checksum
		body = append(body, token...)
	case unix.IPPROTO_ICMP:
		body = append([]byte{8, 0, 0, 0, 0, 1, 0, 1}, token...)
		binary.BigEndian.PutUint16(body[2:], checksum(body))
	default:
		body = []byte(token)
	}
	head := []byte{0x45, 0, 0, 0, 0, 1, 0, 0, 64, proto, 0, 0}
	binary.BigEndian.PutUint16(head[2:], uint16(20+len(body)))
	head = append(head, net.ParseIP(src).To4()...)
	head = append(head, net.ParseIP(dst).To4()...)
	binary.BigEndian.PutUint16(head[10:], checksum(head))
	return append(head, body...)
}

// echo6 is an ICMPv6 echo request.
func echo6(src, dst, token string) []byte {
	body := append([]byte{128, 0, 0, 0, 0, 1, 0, 1}, token...)
	p := []byte{0x60, 0, 0, 0, 0, byte(len(body)), unix.IPPROTO_ICMPV6, 64}
	p = append(p, net.ParseIP(src)...)
	p = append(p, net.ParseIP(dst)...)
	pseudo := append(bytes.Clone(p[8:40]), 0, 0, 0, byte(len(body)), 0, 0, 0, unix.IPPROTO_ICMPV6)
	binary.BigEndian.PutUint16(body[2:], checksum(append(pseudo, body...)))
	return append(p, body...)
}

// packet6 is a UDP packet to the test's port over IPv6.
func packet6(src, dst, token string) []byte {
	p := []byte{0x60, 0, 0, 0, 0, byte(8 + len(token)), unix.IPPROTO_UDP, 64}
	p = append(p, net.ParseIP(src)...)
	p = append(p, net.ParseIP(dst)...)
	p = binary.BigEndian.AppendUint16(p, 5555)
	p = binary.BigEndian.AppendUint16(p, port)
	p = binary.BigEndian.AppendUint16(p, uint16(8+len(token)))
	p = append(append(p, 0, 0), token...)
	sum := checksum(append(append(bytes.Clone(p[8:40]), 0, 0, 0, p[5], 0, 0, 0, unix.IPPROTO_UDP), p[40:]...))
	if sum == 0 {
		sum = 0xffff
	}
	binary.BigEndian.PutUint16(p[46:], sum)
	return p
}

func arpRequest(mac net.HardwareAddr, from, who string) []byte {
	p := []byte{0, 1, 8, 0, 6, 4, 0, 1}
	p = append(p, mac...)
	p = append(p, net.ParseIP(from).To4()...)
	p = append(p, make([]byte, 6)...)
	return append(p, net.ParseIP(who).To4()...)
}

func checksum(b []byte) uint16 {
	var sum uint32
	for i := 0; i < len(b); i += 2 {
		sum += uint32(b[i]) << 8
		if i+1 < len(b) {
			sum += uint32(b[i+1])
		}
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return ^uint16(sum)
}

// open begins a Net and takes everything of it away when the test ends.
func open(t *testing.T, cfg Config) *Net {
	t.Helper()
	needRoot(t)
	if cfg.Dir == "" {
		cfg.Dir = t.TempDir()
	}
	n, err := Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := n.Remove(context.Background()); err != nil && !strings.Contains(err.Error(), "are closed") {
			t.Error(err)
		}
	})
	return n
}

func attach(t testing.TB, n *Net, id string) Attachment {
	t.Helper()
	a, err := n.Attach(t.Context(), id)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func macOf(t testing.TB, path, name string) (mac net.HardwareAddr) {
	t.Helper()
	within(t, path, func() error {
		l, err := net.InterfaceByName(name)
		if err == nil {
			mac = l.HardwareAddr
		}
		return err
	})
	return mac
}

// transact changes the table behind its own bookkeeping.
func transact(t *testing.T, n *Net, change func(*nftables.Conn) error) {
	t.Helper()
	n.table.mu.Lock()
	defer n.table.mu.Unlock()
	if err := n.table.locked(change); err != nil {
		t.Fatal(err)
	}
}

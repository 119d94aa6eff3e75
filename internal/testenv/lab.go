package testenv

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/miekg/dns"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// The lab's addresses. 198.18.0.0/15 counts as public for shard, and no real route leads there. Every lab has its own
// namespaces, so all labs use the same ones at the same time.
const (
	LabHostAddr  = "198.18.0.2" // the host's uplink: its public address
	labGateway   = "198.18.0.1" // the world's end of it
	LabRegistry  = "198.18.10.1"
	LabWebAddr   = "198.18.10.2" // HTTP on 80, HTTPS on 443
	LabEchoAddr  = "198.18.10.7" // TCP and UDP echo on port 7
	LabDNSAddr   = "198.18.10.53"
	registryName = "registry.lab.test"
	registryPort = "5000"

	// Over IPv6, 2001:db8::/32 counts as public.
	LabHostAddr6 = "2001:db8:18::2"
	labGateway6  = "2001:db8:18::1"
	LabWebAddr6  = "2001:db8:10::2"
	LabEchoAddr6 = "2001:db8:10::7"
	LabDNSAddr6  = "2001:db8:10::53"
)

// Lab is a make-believe internet. Its world is a network namespace with servers at public and private addresses, its
// host another one in which a daemon under test runs; the host's only way leads to the world, so no packet leaves the
// machine. Both live as long as this process, or what runs in them, whatever way it ends.
//
// DNS servers answer at LabDNSAddr, at the well-known public resolvers, and where this machine's resolv.conf points,
// so that programs in the host resolve the lab's names without a change to any file.
type Lab struct {
	t           testing.TB
	world, host *space
	web         *web

	mu        sync.Mutex
	names     map[string][]netip.Addr // lower case, without the last dot
	records   map[string]func(dns.Question) []dns.RR
	questions []string
	logins    map[string][]string
	owned     map[string]bool // "space address" pairs that the lab gave to a space
}

// space is one of the lab's network namespaces.
type space struct {
	name string
	file *os.File
	rt   *netlink.Handle
}

// NewLab builds a lab that ends with the test. It needs root, and skips the test without.
func NewLab(t testing.TB) *Lab {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can make network namespaces: run as root")
	}
	l := &Lab{t: t, names: map[string][]netip.Addr{}, records: map[string]func(dns.Question) []dns.RR{}, logins: map[string][]string{}, owned: map[string]bool{}}
	l.world, l.host = l.newSpace("world"), l.newSpace("host")
	if err := l.connect(); err != nil {
		t.Fatalf("connect the lab's host with its world: %v", err)
	}
	l.serveDNS()
	l.serveRegistry()
	l.serveWeb()
	l.serveEcho()
	return l
}

// Command is a program that runs in the lab's host, with this machine's files and mounts.
func (l *Lab) Command(name string, args ...string) *exec.Cmd {
	// nsenter becomes the program: same process, same descriptors.
	space := fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), l.host.file.Fd())
	return exec.Command("nsenter", append([]string{space, "--", name}, args...)...)
}

// Registry is the host:port of the OCI registry as programs in the host name it; it speaks plain HTTP.
func (l *Lab) Registry() string { return net.JoinHostPort(registryName, registryPort) }

// Name lets DNS answer the addresses for a name; none takes the name away.
func (l *Lab) Name(name string, addrs ...string) {
	l.t.Helper()
	list := make([]netip.Addr, len(addrs))
	for i, a := range addrs {
		list[i] = netip.MustParseAddr(a)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(list) == 0 {
		delete(l.names, canonical(name))
		return
	}
	l.names[canonical(name)] = list
}

// Records lets DNS answer what answer returns for a name, instead of addresses with a life of 5 seconds: other lives, kinds and
// chains. It is called for every question, also several at once. Heads of records need no class.
func (l *Lab) Records(name string, answer func(q dns.Question) []dns.RR) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.records[canonical(name)] = answer
}

func canonical(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// Questions are the names that DNS was asked for so far, in order, as "A name".
func (l *Lab) Questions() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return slices.Clone(l.questions)
}

// DialFromHost connects from the lab's host to an address or a name of the lab.
func (l *Lab) DialFromHost(ctx context.Context, network, address string) (net.Conn, error) {
	return l.dial(ctx, l.host, network, address)
}

// DialFromWorld connects from the world.
func (l *Lab) DialFromWorld(ctx context.Context, network, address string) (net.Conn, error) {
	return l.dial(ctx, l.world, network, address)
}

func (l *Lab) dial(ctx context.Context, from *space, network, address string) (conn net.Conn, err error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	if _, err := netip.ParseAddr(host); err != nil {
		l.mu.Lock()
		addrs := l.names[canonical(host)]
		l.mu.Unlock()
		if len(addrs) == 0 {
			return nil, fmt.Errorf("the lab knows no name %q", host)
		}
		host = addrs[0].String()
	}
	err = from.within(func() (err error) {
		// One literal address: the dialer opens the socket on this thread.
		conn, err = new(net.Dialer).DialContext(ctx, network, net.JoinHostPort(host, port))
		return err
	})
	return conn, err
}

// ListenHost listens in the lab's host, on one of its addresses or a new one; it ends with the test.
func (l *Lab) ListenHost(network, address string) net.Listener {
	l.t.Helper()
	return l.listen(l.host, network, address)
}

// ListenWorld listens in the world, on one of its addresses or a new one, public or private; it ends with the test.
func (l *Lab) ListenWorld(network, address string) net.Listener {
	l.t.Helper()
	return l.listen(l.world, network, address)
}

func (l *Lab) listen(in *space, network, address string) (listener net.Listener) {
	l.t.Helper()
	l.own(in, address)
	err := in.within(func() (err error) {
		listener, err = new(net.ListenConfig).Listen(l.t.Context(), network, address)
		return err
	})
	if err != nil {
		l.t.Fatalf("listen in the lab's %s: %v", in.name, err)
	}
	l.t.Cleanup(func() { _ = listener.Close() })
	return listener
}

func (l *Lab) listenPacket(in *space, network, address string) (conn net.PacketConn) {
	l.t.Helper()
	l.own(in, address)
	err := in.within(func() (err error) {
		conn, err = new(net.ListenConfig).ListenPacket(l.t.Context(), network, address)
		return err
	})
	if err != nil {
		l.t.Fatalf("listen in the lab's %s: %v", in.name, err)
	}
	l.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// own gives the address of address (host:port) to the space if it has it not yet.
func (l *Lab) own(in *space, address string) {
	l.t.Helper()
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		l.t.Fatal(err)
	}
	addr, err := netip.ParseAddr(host)
	if err != nil || addr.IsUnspecified() || addr.IsLoopback() {
		return
	}
	key := in.name + " " + addr.String()
	l.mu.Lock()
	had := l.owned[key]
	l.owned[key] = true
	l.mu.Unlock()
	if had {
		return
	}
	lo, err := in.rt.LinkByName("lo")
	if err == nil {
		err = in.rt.AddrAdd(lo, labAddr(addr, addr.BitLen()))
	}
	if err == nil && addr.Is6() {
		err = in.routed(addr)
	}
	if err != nil {
		l.t.Fatalf("give %s to the lab's %s: %v", addr, in.name, err)
	}
}

// routed waits until the kernel leads packets to an address of IPv6 that it has just been given, which it sees to in the background.
func (s *space) routed(addr netip.Addr) error {
	for deadline := time.Now().Add(patience); ; time.Sleep(time.Millisecond) {
		routes, err := s.rt.RouteGet(addr.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_LOCAL {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("no way leads to %s: %v, %v", addr, routes, err)
		}
	}
}

// labAddr is an address as an interface gets it: at once, also where others might have it.
func labAddr(a netip.Addr, bits int) *netlink.Addr {
	out := &netlink.Addr{IPNet: &net.IPNet{IP: a.AsSlice(), Mask: net.CIDRMask(bits, a.BitLen())}}
	if a.Is6() {
		out.Flags = unix.IFA_F_NODAD
	}
	return out
}

// connect joins host and world by a veth pair, the host's default route.
func (l *Lab) connect() error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "eth0"
	veth := netlink.NewVeth(attrs)
	veth.PeerName, veth.PeerNamespace = "eth0", netlink.NsFd(int(l.world.file.Fd()))
	// Both ends are born in the lab: this machine's own namespace never sees them.
	if err := l.host.rt.LinkAdd(veth); err != nil {
		return err
	}
	macs := map[*space]net.HardwareAddr{}
	for s, addrs := range map[*space][]netip.Prefix{
		l.host:  {netip.MustParsePrefix(LabHostAddr + "/24"), netip.MustParsePrefix(LabHostAddr6 + "/64")},
		l.world: {netip.MustParsePrefix(labGateway + "/24"), netip.MustParsePrefix(labGateway6 + "/64")},
	} {
		eth, err := s.rt.LinkByName("eth0")
		if err != nil {
			return err
		}
		macs[s] = eth.Attrs().HardwareAddr
		for _, a := range addrs {
			l.owned[s.name+" "+a.Addr().String()] = true
			if err := s.rt.AddrAdd(eth, labAddr(a.Addr(), a.Bits())); err != nil {
				return err
			}
		}
		if err := s.rt.LinkSetUp(eth); err != nil {
			return err
		}
	}
	// The host's end was set up before its peer, or the other way round: until its queue is started in the background
	// it drops all. To ask for its state is to have that done.
	for _, s := range []*space{l.host, l.world} {
		for range 500 {
			eth, err := s.rt.LinkByName("eth0")
			if err != nil {
				return err
			}
			if eth.Attrs().OperState == netlink.OperUp {
				break
			}
			<-time.After(time.Millisecond)
		}
	}
	// The world knows its way back through the host, so that nothing but the product keeps it out of sandboxes.
	return errors.Join(
		l.host.routed(netip.MustParseAddr(LabHostAddr6)), l.world.routed(netip.MustParseAddr(labGateway6)),
		l.host.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(labGateway)}),
		l.world.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(LabHostAddr)}),
		l.neighbour6(l.host, labGateway6, macs[l.world]), l.neighbour6(l.world, LabHostAddr6, macs[l.host]),
		l.host.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(labGateway6)}),
		l.world.rt.RouteAdd(&netlink.Route{Gw: net.ParseIP(LabHostAddr6)}))
}

// neighbour6 says where a neighbour is: to ask, an interface needs an address that is not there at once.
func (l *Lab) neighbour6(in *space, addr string, mac net.HardwareAddr) error {
	eth, err := in.rt.LinkByName("eth0")
	if err != nil {
		return err
	}
	return in.rt.NeighSet(&netlink.Neigh{LinkIndex: eth.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: net.ParseIP(addr), HardwareAddr: mac})
}

// IPv6 takes the host's way out over IPv6, which it has at first, or gives it back.
func (l *Lab) IPv6(there bool) {
	l.t.Helper()
	change := l.host.rt.RouteDel
	if there {
		change = l.host.rt.RouteAdd
	}
	if err := change(&netlink.Route{Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, Gw: net.ParseIP(labGateway6)}); err != nil {
		l.t.Fatalf("the way out of the lab's host over IPv6: %v", err)
	}
}

// newSpace makes a network namespace with lo up.
func (l *Lab) newSpace(name string) *space {
	l.t.Helper()
	s := &space{name: name}
	err := onThread(func() error { return unix.Unshare(unix.CLONE_NEWNET) }, func() (err error) {
		if s.file, err = os.Open("/proc/thread-self/ns/net"); err != nil {
			return err
		}
		s.rt, err = netlink.NewHandle(unix.NETLINK_ROUTE)
		return err
	})
	if err == nil {
		l.t.Cleanup(func() { s.rt.Close(); _ = s.file.Close() })
		var lo netlink.Link
		if lo, err = s.rt.LinkByName("lo"); err == nil {
			err = s.rt.LinkSetUp(lo)
		}
	}
	if err != nil {
		l.t.Fatalf("make the lab's %s: %v", name, err)
	}
	return s
}

// within runs f on a thread in the namespace. Sockets that f opens stay there; f must not hand work to goroutines.
func (s *space) within(f func() error) error {
	return onThread(func() error { return unix.Setns(int(s.file.Fd()), unix.CLONE_NEWNET) }, f)
}

// onThread moves a thread with enter, runs f there and brings it home. A thread that cannot go home is thrown away.
func onThread(enter, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err == nil {
			defer func() { _ = home.Close() }()
			err = enter()
		}
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

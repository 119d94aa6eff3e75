package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// TestPrivateIsOutOfReach6 is case 50 over IPv6: every form of what nobody reaches, the host, and what is public.
func TestPrivateIsOutOfReach6(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "priv6"})
	if !n.IPv6() {
		t.Fatal("the host's way out over IPv6 is not seen")
	}
	a, b := attach(t, n, "able-box"), attach(t, n, "other-box")
	w.capture("a", a.Netns)
	closed := map[string][]string{
		"host":  append([]string{a.Gateway6.String(), b.Gateway6.String(), hostUplink6}, hostOthers6...),
		"world": worldHidden6,
	}
	echo := func(addr, token string) {
		frame(t, a.Netns, macOf(t, "", a.Interface), unix.ETH_P_IPV6, echo6(a.Addr6.String(), addr, token))
	}
	outOfReach(t, w, a.Netns, closed, worldPublic6, echo, func(addr, token string) {
		frame(t, a.Netns, macOf(t, "", a.Interface), unix.ETH_P_IPV6, packet6(a.Addr6.String(), addr, token))
	})
}

// TestSandboxesAreApart6 is case 64 over IPv6, and forged sources; and neither the world nor the host begins a flow to one.
func TestSandboxesAreApart6(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "apart6"})
	a, b := attach(t, n, "able-box"), attach(t, n, "other-box")
	w.listen("b", b.Netns)
	w.capture("b wire", b.Netns)
	w.capture("world wire", w.path)
	src, dst := a.Addr6.String(), b.Addr6.String()
	if err := tcp(b.Netns, dst, newToken(), patient); err != nil {
		t.Fatalf("control: %v", err)
	}
	gateway := macOf(t, "", a.Interface)
	token := newToken() // one for all that must not arrive anywhere
	for _, from := range []string{a.Netns, "", w.path} {
		if err := tcp(from, dst, token, soon); err == nil {
			t.Errorf("TCP from %q came through", from)
		}
		udp(from, dst, token)
	}
	for _, to := range []string{dst, b.Gateway6.String(), "ff02::1", "ff05::1:3", "ff0e::1", "fe80::1", "fe80::2"} {
		udp(a.Netns, to, token)
		for _, mac := range []net.HardwareAddr{gateway, {0x33, 0x33, 0, 0, 0, 1}, {0xff, 0xff, 0xff, 0xff, 0xff, 0xff}} {
			frame(t, a.Netns, mac, unix.ETH_P_IPV6, packet6(src, to, token))
			frame(t, a.Netns, mac, unix.ETH_P_IPV6, echo6(src, to, token))
		}
	}
	// Forged sources: another sandbox, the gateways, this host, the world, link-local, loopback, nobody, mapped.
	for _, forged := range []string{dst, b.Gateway6.String(), a.Gateway6.String(), hostUplink6, worldUplink6, "2001:db8:19::9", "fe80::2", "::1", "::",
		"::ffff:" + a.Addr.String()} {
		for _, to := range []string{dst, worldUplink6, "2001:db8:19::1", hostUplink6} {
			frame(t, a.Netns, gateway, unix.ETH_P_IPV6, packet6(forged, to, token))
			frame(t, a.Netns, gateway, unix.ETH_P_IPV6, echo6(forged, to, token))
		}
	}
	// What comes in from the world with an address of ours.
	control := newToken()
	frame(t, a.Netns, gateway, unix.ETH_P_IPV6, packet6(src, worldUplink6, control))
	w.seen.wait(t, "world", control)
	w.fence()
	fence := newToken()
	if err := tcp(b.Netns, worldUplink6, fence, patient); err != nil {
		t.Fatal(err)
	}
	w.seen.wait(t, "b wire", fence)
	for _, place := range []string{"b", "b wire", "host", "world", "world wire"} {
		if w.seen.has(place, token) {
			t.Errorf("something arrived at %s", place)
		}
	}
}

// TestIPv6AtOnce: a sandbox has its one address from the start, and nothing that others could tell it changes that.
func TestIPv6AtOnce(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "once6"})
	for i := range 6 { // from the pool, and past it
		a := attach(t, n, fmt.Sprintf("box-%d", i))
		within(t, a.Netns, func() error {
			link, err := net.InterfaceByName(inside)
			if err != nil {
				return err
			}
			addrs, err := link.Addrs()
			if err != nil {
				return err
			}
			want := []string{a.Addr.String() + "/30", a.Addr6.String() + "/126"}
			var got []string
			for _, one := range addrs {
				got = append(got, one.String())
			}
			if !slices.Equal(got, want) {
				return fmt.Errorf("eth0 has %v, want %v", got, want)
			}
			return nil
		})
		if err := tcp(a.Netns, worldUplink6, newToken(), patient); err != nil {
			t.Error(err)
		}
		b, _ := n.leases.block, a.Addr6.As16()
		if !n.leases.twin.Contains(a.Addr6) || !n.leases.twin.Contains(a.Gateway6) || n.table.owner(a.Addr6) != a.Addr || !shard.IsUnreachable(a.Addr6) {
			t.Errorf("%s of %s and %s", a.Addr6, n.leases.twin, b)
		}
	}
}

// wayOut takes this host's way out over IPv6, or gives it back.
func wayOut(t *testing.T, there bool) {
	t.Helper()
	change := netlink.RouteDel
	if there {
		change = netlink.RouteAdd
	}
	if err := change(&netlink.Route{Dst: &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}, Gw: net.ParseIP(worldUplink6)}); err != nil {
		t.Fatal(err)
	}
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patient); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s", what, patient)
		}
	}
}

// TestHostWithoutIPv6: where the host has no way out, IPv6 is refused at once and reported, whatever the rules; it works when
// there is one, without a restart, and after an administrator has turned IPv6 off and on. IPv4 sees none of it.
func TestHostWithoutIPv6(t *testing.T) {
	w := newWorld(t)
	wayOut(t, false)
	cfg := Config{Dir: t.TempDir(), Tag: "noway6"}
	n := open(t, cfg)
	if n.IPv6() {
		t.Fatal("there is no way out over IPv6")
	}
	a, free := attach(t, n, "able-box"), attach(t, n, "free-box")
	drops := watchDrops(t, n)
	if err := n.Restrict(t.Context(), Restriction{ID: "able-box", Rules: Rules{Default: "default",
		Rules: []Rule{{Label: "1", Allow: true, TCP: everyPort, UDP: everyPort, Other: true}}}}); err != nil {
		t.Fatal(err)
	}
	public := worldPublic6[1]
	refused := func() {
		t.Helper()
		token := newToken()
		for _, path := range []string{a.Netns, free.Netns} {
			for _, to := range []string{public, worldHidden6[0], hostUplink6, a.Gateway6.String()} {
				for _, protocol := range []string{"tcp6", "udp6"} {
					if got := dials(path, protocol, at(to)); got != "refused" {
						t.Errorf("%s to %s: %s", protocol, to, got)
					}
				}
			}
			for _, at := range []string{"[" + public + "]:53", "[" + public + "]:443"} {
				if got := dials(path, "tcp6", at); got != "refused" {
					t.Errorf("%s: %s", at, got)
				}
			}
			frame(t, path, macOf(t, "", a.Interface), unix.ETH_P_IPV6, packet6(a.Addr6.String(), public, token))
			if got := dials(path, "tcp4", at(worldUplink)); got != "ok" {
				t.Errorf("IPv4: %s", got)
			}
		}
		w.fence()
		if w.seen.has("world", token) || w.seen.has("host", token) {
			t.Error("something arrived")
		}
	}
	open6 := func() {
		t.Helper()
		for _, path := range []string{a.Netns, free.Netns} {
			for _, protocol := range []string{"tcp6", "udp6"} {
				to := public
				if protocol == "udp6" {
					to = worldUplink6 // an answer comes from there
				}
				if got := dials(path, protocol, at(to)); got != "ok" {
					t.Errorf("%s: %s", protocol, got)
				}
			}
		}
	}
	refused()
	drops.wait(t, "a refusal", func(d Drop) bool {
		return d.Label == shard.EgressRuleIPv6 && d.Source == a.Addr && d.Dest == netip.MustParseAddr(public) && d.Port == port
	})

	wayOut(t, true)
	eventually(t, "the way is seen", n.IPv6)
	open6()
	wayOut(t, false)
	eventually(t, "the loss is seen", func() bool { return !n.IPv6() })
	refused()

	// Whoever turns IPv6 off takes the addresses of all interfaces, and does not give them back.
	set := func(iface, value string) {
		t.Helper()
		if err := os.WriteFile("/proc/sys/net/ipv6/conf/"+iface+"/disable_ipv6", []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	set("all", "1")
	set("all", "0")
	uplink, err := netlink.LinkByName("uplink")
	if err != nil {
		t.Fatal(err)
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrReplace(uplink, &netlink.Addr{IPNet: wide(hostUplink6), Flags: unix.IFA_F_NODAD}); err != nil {
		t.Fatal(err)
	}
	if err := netlink.NeighSet(&netlink.Neigh{LinkIndex: uplink.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT,
		IP: net.ParseIP(worldUplink6), HardwareAddr: macOf(t, w.path, "uplink")}); err != nil {
		t.Fatal(err)
	}
	for _, other := range hostOthers6 { // newWorld takes them back
		if err := netlink.AddrReplace(lo, &netlink.Addr{IPNet: hostNet(other), Flags: unix.IFA_F_NODAD}); err != nil {
			t.Fatal(err)
		}
	}
	wayOut(t, true)
	eventually(t, "the way is seen again", n.IPv6)
	open6()

	// The next daemon sees the host as it is then.
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	wayOut(t, false)
	n = open(t, cfg)
	if lost, err := n.Recover(t.Context(), []string{"able-box", "free-box"}); err != nil || lost != nil {
		t.Fatal(lost, err)
	}
	refused()
	wayOut(t, true)
	eventually(t, "the way is seen by the next daemon", n.IPv6)
	if got := dials(free.Netns, "tcp6", at(public)); got != "ok" {
		t.Error(got)
	}
}

// TestForwardingKeepsTheWayOut: a host that passes packets on hears no more of routers, so interfaces that do are told to go on.
func TestForwardingKeepsTheWayOut(t *testing.T) {
	newWorld(t)
	conf := func(iface, key string) string { return "/proc/sys/net/ipv6/conf/" + iface + "/" + key }
	set := func(path, value string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(value), 0); err != nil {
			t.Fatal(err)
		}
	}
	get := func(path string) string { return string(mustRead(t, path)) }
	set(conf("all", "forwarding"), "0")
	set(conf("uplink", "accept_ra"), "1")
	set(conf("lo", "accept_ra"), "0")
	n := open(t, Config{Tag: "fwd6", Pool: -1})
	if !n.IPv6() {
		t.Fatal("no IPv6")
	}
	for path, want := range map[string]string{conf("all", "forwarding"): "1\n", conf("uplink", "accept_ra"): "2\n", conf("lo", "accept_ra"): "0\n"} {
		if got := get(path); got != want {
			t.Errorf("%s is %q, want %q", path, got, want)
		}
	}
	a := attach(t, n, "able-box")
	if got := get(conf(a.Interface, "accept_ra")); got != "0\n" {
		t.Errorf("the host takes advice from the sandbox: %q", got)
	}
}

// TestReportedPackets: what the kernel reports of a packet is read behind whatever a sandbox puts before the ports.
func TestReportedPackets(t *testing.T) {
	plain := packet6("fd00::2", "2001:db8::1", "x")
	extended := func(next byte, extension ...byte) []byte {
		p := slices.Concat(plain[:40], extension, plain[40:])
		p[6] = next
		p[40] = unix.IPPROTO_UDP
		return p
	}
	for what, c := range map[string]struct {
		packet   []byte
		protocol uint8
		port     uint16
	}{
		"plain":           {plain, unix.IPPROTO_UDP, port},
		"hop by hop":      {extended(unix.IPPROTO_HOPOPTS, 0, 0, 1, 4, 0, 0, 0, 0), unix.IPPROTO_UDP, port},
		"options of 16":   {extended(unix.IPPROTO_DSTOPTS, append([]byte{0, 1}, make([]byte, 14)...)...), unix.IPPROTO_UDP, port},
		"first fragment":  {extended(unix.IPPROTO_FRAGMENT, 0, 0, 0, 1, 0, 0, 0, 9), unix.IPPROTO_UDP, port},
		"second fragment": {extended(unix.IPPROTO_FRAGMENT, 0, 0, 0, 16, 0, 0, 0, 9), unix.IPPROTO_UDP, 0},
		"authentication":  {extended(unix.IPPROTO_AH, append([]byte{0, 1}, make([]byte, 10)...)...), unix.IPPROTO_UDP, port},
		"cut":             {extended(unix.IPPROTO_HOPOPTS, 0, 200, 1, 4, 0, 0, 0, 0), unix.IPPROTO_UDP, 0},
		"IPv4":            {packet4("10.0.0.1", "203.0.113.1", unix.IPPROTO_UDP, "x"), unix.IPPROTO_UDP, port},
	} {
		var d Drop
		if !d.parsePacket(c.packet) || d.Protocol != c.protocol || d.Port != c.port {
			t.Errorf("%s: %+v", what, d)
		}
	}
}

func FuzzReportedPacket(f *testing.F) {
	f.Add(packet6("fd00::2", "2001:db8::1", "x"))
	f.Add(packet4("10.0.0.1", "203.0.113.1", unix.IPPROTO_UDP, "x"))
	f.Add(append([]byte{0x60, 0, 0, 0, 0, 8, 0}, make([]byte, 60)...))
	f.Fuzz(func(t *testing.T, p []byte) {
		var d Drop
		if d.parsePacket(p) && !d.Dest.IsValid() {
			t.Fatalf("%x: %+v", p, d)
		}
	})
}

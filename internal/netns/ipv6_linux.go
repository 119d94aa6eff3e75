package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Over IPv6 the ends of a link find each other by fixed entries, so that nothing of neighbour discovery has to pass the
// wall, and a sandbox has no link-local address: its one address is there from the start, and no other.

const conf6 = "/proc/sys/net/ipv6/conf"

// quiet6 are the settings of an interface that has no addresses but those it is given, and takes nobody's advice.
var quiet6 = []struct{ key, value string }{
	{"addr_gen_mode", "1"}, // no link-local address
	{"accept_ra", "0"},
	{"autoconf", "0"},
	{"accept_redirects", "0"},
}

// hasIPv6 says whether this kernel has IPv6 at all.
func hasIPv6() bool {
	_, err := os.Stat(conf6)
	return err == nil
}

// macs are the Ethernet addresses of a slot's link: the host's end and the sandbox's. No other link sees them.
func macs(slot int) (host, guest net.HardwareAddr) {
	base := net.HardwareAddr{0x02, 's', 'h', byte(slot >> 8), byte(slot), 1}
	guest = append(guest, base...)
	guest[5] = 2
	return base, guest
}

// equip6 gives our end of a slot's link what it needs for IPv6. It may be there already.
func (n *Net) equip6(link netlink.Link, slot int) error {
	gateway, addr, subnet := n.leases.link6(slot)
	if !gateway.IsValid() {
		return nil
	}
	name := n.iface(slot)
	for _, s := range append(quiet6[:len(quiet6):len(quiet6)], struct{ key, value string }{"disable_ipv6", "0"}) {
		if err := setConf("ipv6", name, s.key, s.value); err != nil {
			return err
		}
	}
	_, guest := macs(slot)
	return give6(n.rt, link, gateway, subnet, addr, guest)
}

// equipGuest6 gives the sandbox's end its address and its way out.
func (n *Net) equipGuest6(ns *namespace, link netlink.Link, slot int) error {
	gateway, addr, subnet := n.leases.link6(slot)
	if !gateway.IsValid() {
		return nil
	}
	host, _ := macs(slot)
	if err := give6(ns.rt, link, addr, subnet, gateway, host); err != nil {
		return err
	}
	if err := ns.rt.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: gateway.AsSlice()}); err != nil {
		return fmt.Errorf("add the default route of IPv6: %w", err)
	}
	return nil
}

// give6 gives an end of a link its address and the other end's. The link is up.
func give6(rt *netlink.Handle, link netlink.Link, addr netip.Addr, subnet netip.Prefix, peer netip.Addr, mac net.HardwareAddr) error {
	ip := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(subnet.Bits(), 128)}
	// Nobody else can have it, so there is no wait until nobody objects.
	if err := rt.AddrReplace(link, &netlink.Addr{IPNet: ip, Flags: unix.IFA_F_NODAD}); err != nil {
		return fmt.Errorf("give %s its IPv6 address: %w", link.Attrs().Name, err)
	}
	err := rt.NeighSet(&netlink.Neigh{LinkIndex: link.Attrs().Index, Family: unix.AF_INET6, State: netlink.NUD_PERMANENT, IP: peer.AsSlice(), HardwareAddr: mac})
	if err != nil {
		return fmt.Errorf("tell %s its neighbour: %w", link.Attrs().Name, err)
	}
	return nil
}

// IPv6 says whether sandboxes reach the internet over IPv6: whether this host does.
func (n *Net) IPv6() bool { return n.way6.Load() }

// wayOut6 says whether this host has a way to the internet over IPv6, and makes it pass the sandboxes' packets on.
func (n *Net) wayOut6() bool {
	if !n.leases.twin.IsValid() {
		return false
	}
	// Any public address will do: nothing is sent.
	routes, err := n.rt.RouteGet(net.ParseIP("2001:4860:4860::8888"))
	if err != nil || len(routes) != 1 {
		return false
	}
	r := routes[0]
	src, ok := netip.AddrFromSlice(r.Src)
	if r.Type != unix.RTN_UNICAST || !ok || !src.IsGlobalUnicast() {
		return false
	}
	out, err := n.rt.LinkByIndex(r.LinkIndex)
	if err != nil || out.Attrs().Flags&net.FlagLoopback != 0 {
		return false
	}
	if src.IsPrivate() {
		// An address as those of our links, which the kernel takes where there is no better: it must be of the way out.
		addrs, err := dump(func() ([]netlink.Addr, error) { return n.rt.AddrList(out, unix.AF_INET6) })
		own := false
		for _, a := range addrs {
			own = own || a.IP.Equal(r.Src)
		}
		if err != nil || !own {
			return false
		}
	}
	if err := n.forwarding6(); err != nil {
		n.cfg.Log.Error("sandboxes have no IPv6: this host cannot be made to pass it on (sysctl net.ipv6.conf.all.forwarding)", "err", err)
		return false
	}
	return true
}

// forwarding6 makes the host pass IPv6 packets between interfaces. A host that does takes no more advice from routers, on
// which its own way out may hang, unless each interface is told to go on.
func (n *Net) forwarding6() error {
	read := func(iface, key string) string {
		v, _ := os.ReadFile(filepath.Join(conf6, iface, key))
		return strings.TrimSpace(string(v))
	}
	if read("all", "forwarding") != "0" {
		return nil
	}
	ifaces, err := os.ReadDir(conf6)
	if err != nil {
		return err
	}
	for _, i := range ifaces {
		name := i.Name()
		if name == "all" || name == "default" || read(name, "accept_ra") != "1" || read(name, "forwarding") != "0" {
			continue
		}
		if err := setConf("ipv6", name, "accept_ra", "2"); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	if err := setConf("ipv6", "all", "forwarding", "1"); err != nil {
		return err
	}
	n.cfg.Log.Warn("turned on IPv6 forwarding (net.ipv6.conf.all.forwarding): sandboxes need it; interfaces that listen to routers go on doing so (accept_ra=2)")
	return nil
}

// followIPv6 lets the wall follow when this host's way out over IPv6 came or went.
func (n *Net) followIPv6(ctx context.Context) {
	way := n.wayOut6()
	if way == n.way6.Load() || ctx.Err() != nil {
		return
	}
	var err error
	if way { // who turned IPv6 off took the addresses of our links too
		err = n.equipAll6()
	}
	if err = errors.Join(err, n.table.setWay6(way)); err != nil {
		n.cfg.Log.Error("the sandboxes' network cannot follow a change of this host's IPv6", "err", err)
		return // at the next look again
	}
	n.way6.Store(way)
	n.cfg.Log.Info("this host's way out over IPv6 changed", "ipv6", way)
}

// equipAll6 is equip6 for every link there is.
func (n *Net) equipAll6() error {
	links, err := n.links()
	if err != nil {
		return err
	}
	var errs []error
	for name, l := range links {
		var slot int
		if _, err := fmt.Sscanf(strings.TrimPrefix(name, n.prefix), "%04x", &slot); err != nil || slot < 0 || slot >= slotCount {
			continue
		}
		if err := n.equip6(l, slot); err != nil && !errors.Is(err, unix.ENODEV) && !errors.Is(err, os.ErrNotExist) { // it may go meanwhile
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// inside is the name of the sandbox's end of the link.
const inside = "eth0"

// namespace is a network namespace that lives as long as its file is open, it is mounted, or a process is in it.
type namespace struct {
	file *os.File
	// rt speaks rtnetlink inside.
	rt *netlink.Handle
}

func (ns *namespace) close() {
	ns.rt.Close()
	_ = ns.file.Close()
}

// newNamespace makes an empty namespace, whose interfaces have no IPv6 but what they are given.
func newNamespace() (ns *namespace, err error) {
	err = elsewhere(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		ns, err = describeNamespace()
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("make a network namespace: %w", err)
	}
	return ns, nil
}

// elsewhere runs f, which moves its thread to another network namespace. The thread goes home before it serves another
// goroutine; one that cannot is thrown away.
func elsewhere(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		home, err := os.Open("/proc/thread-self/ns/net")
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer func() { _ = home.Close() }()
		err = f()
		if unix.Setns(int(home.Fd()), unix.CLONE_NEWNET) == nil {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// describeNamespace runs on a thread inside.
func describeNamespace() (*namespace, error) {
	for _, s := range quiet6 {
		if err := setConf("ipv6", "default", s.key, s.value); err != nil {
			return nil, err
		}
	}
	file, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, err
	}
	rt, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		_ = file.Close()
		return nil, err
	}
	return &namespace{file: file, rt: rt}, nil
}

// setConf writes an interface setting of the thread's namespace. A kernel without IPv6 has nothing to turn off.
func setConf(family, iface, key, value string) error {
	base := "/proc/sys/net/" + family
	f, err := os.OpenFile(filepath.Join(base, "conf", iface, key), os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) && family == "ipv6" {
		if _, err := os.Stat(base); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	if err != nil {
		return fmt.Errorf("set %s of interface %s: %w", key, iface, err)
	}
	_, err = f.WriteString(value)
	if err := errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("set %s of interface %s: %w", key, iface, err)
	}
	return nil
}

// hostSettings of our end of a link. The guest's end is hostile, so ARP speaks of this link alone, and the host
// neither takes nor gives routing advice. A source that is not of this link is dropped, also where the wall is not.
var hostSettings = []struct{ family, key, value string }{
	{"ipv4", "forwarding", "1"},
	{"ipv4", "rp_filter", "1"},
	{"ipv4", "arp_ignore", "2"},
	{"ipv4", "arp_announce", "2"},
	{"ipv4", "proxy_arp", "0"},
	{"ipv4", "send_redirects", "0"},
	{"ipv4", "accept_redirects", "0"},
	{"ipv4", "route_localnet", "0"},
}

// connect builds the veth pair of a slot between this host and ns, all up. On failure nothing is left of it.
func (n *Net) connect(ns *namespace, slot int) (err error) {
	gateway, addr, subnet := n.leases.link(slot)
	attrs := netlink.NewLinkAttrs()
	attrs.Name, attrs.MTU = n.iface(slot), n.mtu
	// Each end knows the other's, and programs of the host such as udev leave an address alone that was given.
	var guest net.HardwareAddr
	attrs.HardwareAddr, guest = macs(slot)
	veth := netlink.NewVeth(attrs)
	veth.PeerHardwareAddr = guest
	veth.PeerName, veth.PeerNamespace, veth.PeerMTU = inside, netlink.NsFd(int(ns.file.Fd())), uint32(n.mtu)
	err = n.rt.LinkAdd(veth)
	if errors.Is(err, unix.EEXIST) {
		// Left behind by a teardown that failed.
		if err = n.deleteLink(slot); err == nil {
			err = n.rt.LinkAdd(veth)
		}
	}
	if err != nil {
		return fmt.Errorf("make veth pair %s: %w", attrs.Name, err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.deleteLink(slot))
		}
	}()
	if err := n.fault("configure"); err != nil {
		return err
	}
	for _, s := range hostSettings {
		if err := setConf(s.family, attrs.Name, s.key, s.value); err != nil {
			return err
		}
	}
	if err := up(n.rt, veth, gateway, subnet); err != nil {
		return err
	}
	if err := n.equip6(veth, slot); err != nil {
		return err
	}
	lo, err := ns.rt.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("find lo: %w", err)
	}
	if err := ns.rt.LinkSetUp(lo); err != nil {
		return fmt.Errorf("set lo up: %w", err)
	}
	eth, err := ns.rt.LinkByName(inside)
	if err != nil {
		return fmt.Errorf("find %s: %w", inside, err)
	}
	if err := up(ns.rt, eth, addr, subnet); err != nil {
		return err
	}
	if err := ns.rt.RouteAdd(&netlink.Route{LinkIndex: eth.Attrs().Index, Gw: gateway.AsSlice()}); err != nil {
		return fmt.Errorf("add default route: %w", err)
	}
	if err := n.equipGuest6(ns, eth, slot); err != nil {
		return err
	}
	return n.waitForCarrier(veth)
}

// waitForCarrier returns when our end can send. It was set up before its peer, so that the kernel starts its queue in
// the background, and until then drops all, such as the answer to the guest's first ARP request: a second lost.
func (n *Net) waitForCarrier(link netlink.Link) error {
	const tries, pause = 500, time.Millisecond // newer kernels are done at the first look, since asking makes them
	for range tries {
		l, err := n.rt.LinkByIndex(link.Attrs().Index)
		if err != nil {
			return fmt.Errorf("look at %s: %w", link.Attrs().Name, err)
		}
		if l.Attrs().OperState == netlink.OperUp {
			return nil
		}
		<-time.After(pause)
	}
	return fmt.Errorf("%s does not come up", link.Attrs().Name)
}

func up(rt *netlink.Handle, link netlink.Link, addr netip.Addr, subnet netip.Prefix) error {
	ip := &net.IPNet{IP: addr.AsSlice(), Mask: net.CIDRMask(subnet.Bits(), 32)}
	if err := rt.AddrAdd(link, &netlink.Addr{IPNet: ip}); err != nil {
		return fmt.Errorf("give %s its address: %w", link.Attrs().Name, err)
	}
	if err := rt.LinkSetUp(link); err != nil {
		return fmt.Errorf("set %s up: %w", link.Attrs().Name, err)
	}
	return nil
}

// iface is the name of the host's end of a slot's link.
func (n *Net) iface(slot int) string { return fmt.Sprintf("%s%04x", n.prefix, slot) }

// deleteLink removes both ends of a slot's link; one that does not exist is no error.
func (n *Net) deleteLink(slot int) error {
	attrs := netlink.NewLinkAttrs()
	attrs.Name = n.iface(slot)
	link, err := n.rt.LinkByName(attrs.Name)
	if err == nil {
		err = n.rt.LinkDel(link)
	}
	if _, missing := errors.AsType[netlink.LinkNotFoundError](err); missing || errors.Is(err, unix.ENODEV) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("delete %s: %w", attrs.Name, err)
	}
	return nil
}

// links lists the interfaces of ours on this host by name.
func (n *Net) links() (map[string]netlink.Link, error) {
	all, err := dump(n.rt.LinkList)
	if err != nil {
		return nil, fmt.Errorf("list interfaces: %w", err)
	}
	out := map[string]netlink.Link{}
	for _, l := range all {
		if strings.HasPrefix(l.Attrs().Name, n.prefix) {
			out[l.Attrs().Name] = l
		}
	}
	return out, nil
}

// dump repeats a listing that a concurrent change broke: on a busy host a list may be cut at any time.
func dump[T any](list func() ([]T, error)) (out []T, err error) {
	for range 20 {
		if out, err = list(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			return out, err
		}
	}
	return out, err
}

// busy lists the networks this host knows by address or route, but for those of our own links.
func (n *Net) busy() ([]netip.Prefix, error) {
	links, err := n.links()
	if err != nil {
		return nil, err
	}
	own := map[int]bool{}
	for _, l := range links {
		own[l.Attrs().Index] = true
	}
	routes, err := dump(func() ([]netlink.Route, error) {
		return n.rt.RouteListFiltered(unix.AF_INET, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	})
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	addrs, err := dump(func() ([]netlink.Addr, error) { return n.rt.AddrList(nil, unix.AF_INET) })
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	var out []netip.Prefix
	add := func(ip *net.IPNet) {
		if ip == nil {
			return
		}
		a, ok := netip.AddrFromSlice(ip.IP.To4())
		bits, _ := ip.Mask.Size()
		if ok && bits > 0 {
			out = append(out, netip.PrefixFrom(a, bits).Masked())
		}
	}
	for _, r := range routes {
		if !own[r.LinkIndex] {
			add(r.Dst)
		}
	}
	for _, a := range addrs {
		if !own[a.LinkIndex] {
			add(a.IPNet)
			add(a.Peer)
		}
	}
	return out, nil
}

// uplinkMTU is the MTU of the way out, so that sandboxes seldom need path discovery; 1500 when there is none.
func (n *Net) uplinkMTU() int {
	const usual, least = 1500, 1280
	routes, err := dump(func() ([]netlink.Route, error) { return n.rt.RouteList(nil, unix.AF_INET) })
	if err != nil {
		return usual
	}
	for _, r := range routes {
		if r.Dst != nil && r.Dst.IP.IsUnspecified() || r.Dst == nil {
			if l, err := n.rt.LinkByIndex(r.LinkIndex); err == nil {
				return max(least, min(usual, l.Attrs().MTU))
			}
		}
	}
	return usual
}

// mountNamespace gives the namespace a name in the file system, by which it lives on and runtimes enter it.
func mountNamespace(ns *namespace, path string) error {
	f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL|unix.O_NOFOLLOW, 0o400)
	if err != nil {
		return fmt.Errorf("make the mount point of a network namespace: %w", err)
	}
	_ = f.Close()
	if err := unix.Mount(fmt.Sprintf("/proc/self/fd/%d", ns.file.Fd()), path, "", unix.MS_BIND, ""); err != nil {
		return errors.Join(fmt.Errorf("mount a network namespace: %w", err), os.Remove(path))
	}
	return nil
}

// unmountNamespace undoes mountNamespace, in whole or what there is of it.
func unmountNamespace(path string) error {
	err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) {
		err = nil // not mounted
	}
	if e := os.Remove(path); !errors.Is(e, fs.ErrNotExist) {
		err = errors.Join(err, e)
	}
	if err != nil {
		return fmt.Errorf("unmount a network namespace: %w", err)
	}
	return nil
}

// isNamespace says whether a namespace is mounted at path.
func isNamespace(path string) bool {
	var st unix.Statfs_t
	return unix.Statfs(path, &st) == nil && st.Type == unix.NSFS_MAGIC
}

// flows matches the tracked connections of some addresses, for netlink.ConntrackDeleteFilters.
type flows func(netip.Addr) bool

// MatchConntrackFlow says whether one of the flow's addresses is among them.
func (f flows) MatchConntrackFlow(flow *netlink.ConntrackFlow) bool {
	return slices.ContainsFunc([]net.IP{flow.Forward.SrcIP, flow.Forward.DstIP, flow.Reverse.SrcIP, flow.Reverse.DstIP}, func(ip net.IP) bool {
		a, ok := netip.AddrFromSlice(ip)
		return ok && f(a.Unmap())
	})
}

// forget has the kernel forget tracked connections, of both families.
func (n *Net) forget(these flows) error {
	var errs []error
	for _, family := range []netlink.InetFamily{unix.AF_INET, unix.AF_INET6} {
		_, err := n.rt.ConntrackDeleteFilters(netlink.ConntrackTable, family, these)
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

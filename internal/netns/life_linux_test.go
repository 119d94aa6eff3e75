package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// census counts what a Net can leave behind on this host.
type census struct{ links, mounts, tables, elements, claims, files, fds, routes, neighbours int }

func count(t *testing.T, dir string) census {
	t.Helper()
	var c census
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	c.links = len(links)
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_ALL, &netlink.Route{Table: unix.RT_TABLE_UNSPEC}, netlink.RT_FILTER_TABLE)
	if err != nil {
		t.Fatal(err)
	}
	neighbours, err := netlink.NeighList(0, netlink.FAMILY_V6)
	if err != nil {
		t.Fatal(err)
	}
	c.routes, c.neighbours = len(routes), len(neighbours)
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	c.mounts = strings.Count(string(mounts), dir+"/") // others' mounts, copied into this namespace, come and go
	nft := &nftables.Conn{}
	tables, err := nft.ListTables()
	if err != nil {
		t.Fatal(err)
	}
	c.tables = len(tables)
	for _, table := range tables {
		sets, err := nft.GetSets(table)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range sets {
			elements, err := nft.GetSetElements(s)
			if err != nil {
				t.Fatal(err)
			}
			c.elements += len(elements)
		}
	}
	claims, _ := os.ReadDir(claimDir)
	for _, e := range claims {
		owner, _ := os.ReadFile(filepath.Join(claimDir, e.Name()))
		if strings.TrimSpace(string(owner)) == dir {
			c.claims++
		}
	}
	files, _ := os.ReadDir(dir)
	c.files = len(files)
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	c.fds = len(fds)
	return c
}

// settle waits until everything that was handed to the reaper so far is gone.
func settle(t *testing.T, n *Net) {
	t.Helper()
	slot := slotCount - 1 // has no link: the corpse is only a mark in the queue
	select {
	case <-n.reaper.bury(corpse{slot: slot}):
	case <-time.After(time.Minute):
		t.Fatal("teardown does not end")
	}
	// A failed transaction closed the table's socket; it counts as a descriptor.
	transact(t, n, func(*nftables.Conn) error { return nil })
}

// TestNothingLeft: 50 lives, then failures at each step, then Remove; each time the counts are those from before.
func TestNothingLeft(t *testing.T) {
	needRoot(t)
	dir := t.TempDir()
	warm := open(t, Config{Dir: t.TempDir(), Tag: "warm"}) // so that the runtime has its own descriptors
	attach(t, warm, "warm-box")
	if err := warm.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	before := count(t, dir)
	n := open(t, Config{Dir: dir, Tag: "left", Pool: -1})
	attach(t, n, "first-box") // makes the lease file
	if err := n.Release(t.Context(), "first-box"); err != nil {
		t.Fatal(err)
	}
	settle(t, n)
	base := count(t, dir)
	check := func(what string, want census) {
		t.Helper()
		if got := count(t, dir); got != want {
			t.Errorf("%s: %+v, want %+v", what, got, want)
		}
	}

	var group sync.WaitGroup
	for i := range 50 {
		group.Go(func() {
			id := fmt.Sprintf("box-%d", i)
			if _, err := n.Attach(t.Context(), id); err != nil {
				t.Error(err)
			}
			if i%2 == 0 {
				if err := n.Detach(t.Context(), id); err != nil {
					t.Error(err)
				}
			}
			if err := n.Release(t.Context(), id); err != nil {
				t.Error(err)
			}
		})
	}
	group.Wait()
	settle(t, n)
	check("after 50 lives", base)

	held := attach(t, n, "held-box")
	if err := n.Detach(t.Context(), "held-box"); err != nil {
		t.Fatal(err)
	}
	settle(t, n)
	withLease := count(t, dir)
	for _, step := range []string{"namespace", "configure", "mount", "open", "save"} {
		n.failAt = func(s string) error {
			if s == step {
				return errors.New("injected")
			}
			return nil
		}
		for _, id := range []string{"fresh-box", "held-box"} {
			if _, err := n.Attach(t.Context(), id); err == nil && (step != "save" || id == "fresh-box") {
				t.Errorf("%s: attached %s in spite of the failure", step, id)
			}
		}
		n.failAt = nil
		if err := errors.Join(n.Detach(t.Context(), "held-box"), n.save()); err != nil {
			t.Fatal(err)
		}
		settle(t, n)
		check("after a failure at "+step, withLease)
		if again := attach(t, n, "held-box"); again != held {
			t.Errorf("after a failure at %s the lease changed: %v, was %v", step, again, held)
		}
		if err := n.Detach(t.Context(), "held-box"); err != nil {
			t.Fatal(err)
		}
		attach(t, n, "fresh-box")
		n.failAt = func(string) error { return errors.New("injected") }
		if err := n.Release(t.Context(), "fresh-box"); err == nil {
			t.Error("released without a word on disk")
		}
		n.failAt = nil
		attach(t, n, "fresh-box")
		if err := n.Release(t.Context(), "fresh-box"); err != nil {
			t.Fatal(err)
		}
		settle(t, n)
	}
	for _, taken := range n.leases.taken {
		if taken {
			base.claims-- // one is held-box
		}
	}
	if base.claims != 0 {
		t.Errorf("%d slots are taken, want 1", 1-base.claims)
	}
	if err := n.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	check("after Remove", before)
}

// TestRestart: a second daemon on the same root keeps leases, running networks and their open connections, opens the
// way out only for the recovered, and clears away what no lease names.
func TestRestart(t *testing.T) {
	newWorld(t)
	cfg := Config{Dir: t.TempDir(), Tag: "again"}
	n := open(t, cfg)
	run, idle, gone := attach(t, n, "run-box"), attach(t, n, "idle-box"), attach(t, n, "gone-box")
	if err := n.Detach(t.Context(), "idle-box"); err != nil {
		t.Fatal(err)
	}
	var conn net.Conn
	within(t, run.Netns, func() (err error) {
		conn, err = net.DialTimeout("tcp4", fmt.Sprintf("%s:%d", worldUplink, port), patient)
		return err
	})
	defer func() { _ = conn.Close() }()
	talk := func() {
		t.Helper()
		if err := exchange(conn, newToken()); err != nil {
			t.Fatalf("the open connection broke: %v", err)
		}
	}
	talk()
	if _, err := Open(t.Context(), cfg); shard.CodeOf(err) != shard.CodeInUse {
		t.Errorf("a second daemon on a root in use: %v", err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Errorf("Close twice: %v", err)
	}
	if _, err := n.Attach(t.Context(), "late-box"); err == nil {
		t.Error("attached after Close")
	}
	talk()
	// What a crash can leave: a link without a lease, a half-made mount point, a temporary file.
	leftover := &Net{prefix: n.prefix}
	attrs := netlink.NewLinkAttrs()
	attrs.Name = leftover.iface(999)
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: "leftover"}); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"half-box", leaseName + ".new"} {
		if err := os.WriteFile(filepath.Join(cfg.Dir, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}

	n = open(t, cfg)
	talk()
	if _, err := netlink.LinkByName(attrs.Name); err == nil {
		t.Error("a leftover link stayed")
	}
	for _, name := range []string{"half-box", leaseName + ".new"} {
		if _, err := os.Stat(filepath.Join(cfg.Dir, name)); err == nil {
			t.Errorf("a leftover %s stayed", name)
		}
	}
	if err := tcp(run.Netns, worldUplink, newToken(), soon); err == nil {
		t.Error("a new flow began before Recover")
	}
	if lost, err := n.Recover(t.Context(), []string{"run-box", "idle-box", "never-box"}); err != nil || !slices.Equal(lost, []string{"idle-box", "never-box"}) {
		t.Errorf("Recover says that %q lost their network, and %v; want idle-box and never-box", lost, err)
	}
	talk()
	if err := tcp(run.Netns, worldUplink, newToken(), patient); err != nil {
		t.Errorf("after Recover: %v", err)
	}
	if again := attach(t, n, "run-box"); again != run {
		t.Errorf("a running sandbox moved from %v to %v", run, again)
	}
	if again := attach(t, n, "idle-box"); again != idle {
		t.Errorf("a stopped sandbox moved from %v to %v", idle, again)
	}
	err := n.Sweep(t.Context(), func(id string) (bool, bool) { return id != "gone-box", id == "run-box" })
	if err != nil {
		t.Fatal(err)
	}
	talk()
	for path, want := range map[string]bool{run.Netns: true, idle.Netns: false, gone.Netns: false} {
		if isNamespace(path) != want {
			t.Errorf("%s is attached: %v", filepath.Base(path), !want)
		}
	}
	if fresh := attach(t, n, "gone-box"); fresh.Addr == gone.Addr {
		t.Error("an address was leased again at once")
	}
}

// TestNeighbours: two roots in one namespace have other addresses, cannot reach each other, and one going away leaves
// the other alone. Their tags differ in a way that careless prefixes would mix up.
func TestNeighbours(t *testing.T) {
	w := newWorld(t)
	one, two := open(t, Config{Tag: "n"}), open(t, Config{Tag: "n1"})
	a, b := attach(t, one, "same-box"), attach(t, two, "same-box")
	if one.leases.block == two.leases.block {
		t.Fatalf("both have %s", one.leases.block)
	}
	w.listen("b", b.Netns)
	token := newToken()
	if err := tcp(a.Netns, b.Addr.String(), token, soon); err == nil {
		t.Error("a sandbox of one root reached one of the other")
	}
	for _, x := range []Attachment{a, b} {
		if err := tcp(x.Netns, worldUplink, newToken(), patient); err != nil {
			t.Error(err)
		}
	}
	if err := one.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := tcp(b.Netns, worldUplink, newToken(), patient); err != nil {
		t.Errorf("after the other root went: %v", err)
	}
	if w.seen.has("b", token) {
		t.Error("something arrived")
	}
}

// TestReadyAtOnce: the host's end can send when Attach returns, also without a pool, and lo and eth0 are up inside.
func TestReadyAtOnce(t *testing.T) {
	n := open(t, Config{Tag: "ready", Pool: -1})
	for i := range 10 {
		a := attach(t, n, fmt.Sprintf("box-%d", i))
		link, err := netlink.LinkByName(a.Interface)
		if err != nil || link.Attrs().OperState != netlink.OperUp {
			t.Errorf("%s is not up: %v", a.Interface, err)
		}
		within(t, a.Netns, func() error {
			for _, name := range []string{"lo", inside} {
				l, err := net.InterfaceByName(name)
				if err != nil || l.Flags&net.FlagUp == 0 {
					return fmt.Errorf("%s is not up: %w", name, err)
				}
			}
			return nil
		})
	}
}

// TestCrowd attaches 200 sandboxes at once: all have networks, no address comes twice.
func TestCrowd(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "crowd"})
	var mu sync.Mutex
	all := map[string]Attachment{}
	var group sync.WaitGroup
	for i := range 200 {
		group.Go(func() {
			id := fmt.Sprintf("box-%d", i%190) // some ids twice at once
			a, err := n.Attach(context.Background(), id)
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if old, ok := all[id]; ok && old != a {
				t.Errorf("%s has two networks: %v and %v", id, old, a)
			}
			all[id] = a
		})
	}
	group.Wait()
	addrs := map[netip.Addr]bool{}
	for _, a := range all {
		addrs[a.Addr] = true
	}
	if len(all) != 190 || len(addrs) != 190 {
		t.Fatalf("%d networks with %d addresses, want 190", len(all), len(addrs))
	}
	for _, id := range []string{"box-0", "box-95", "box-189"} {
		if err := tcp(all[id].Netns, worldUplink, newToken(), patient); err != nil {
			t.Errorf("%s: %v", id, err)
		}
	}
	on, err := decodeLeases(mustRead(t, filepath.Join(n.cfg.Dir, leaseName)))
	if err != nil || len(on.byID) != 190 {
		t.Errorf("the lease file is behind: %v", err)
	}
}

func mustRead(t *testing.T, path string) []byte {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return data
}

// TestFlowsAreForgotten: the next holder of an address has none of the flows of the last, and the flows of a stopped
// sandbox are forgotten.
func TestFlowsAreForgotten(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "flows", Pool: -1})
	a := attach(t, n, "able-box")
	tracked := func(family netlink.InetFamily) (found int) {
		all, err := netlink.ConntrackTableList(netlink.ConntrackTable, family)
		if err != nil {
			t.Fatal(err)
		}
		mine := flows(func(of netip.Addr) bool { return of == a.Addr || of == a.Addr6 })
		for _, f := range all {
			if mine.MatchConntrackFlow(f) {
				found++
			}
		}
		return found
	}
	families := map[netlink.InetFamily]string{unix.AF_INET: worldUplink, unix.AF_INET6: worldUplink6}
	for family, to := range families {
		if err := tcp(a.Netns, to, newToken(), patient); err != nil {
			t.Fatal(err)
		}
		if tracked(family) == 0 {
			t.Fatalf("control: no flow to %s is tracked", to)
		}
	}
	if err := n.Detach(t.Context(), "able-box"); err != nil {
		t.Fatal(err)
	}
	settle(t, n)
	for family, to := range families {
		if got := tracked(family); got != 0 {
			t.Errorf("%d flows to %s are still tracked", got, to)
		}
	}
}

// TestBlocks: a block keeps clear of routes and addresses of the host, is kept through restarts, is reclaimed when its
// root has vanished, and moves, with its leases, when it was lost.
func TestBlocks(t *testing.T) {
	needRoot(t)
	attrs := netlink.NewLinkAttrs()
	attrs.Name = "vpn"
	vpn := &netlink.Veth{LinkAttrs: attrs, PeerName: "vpn-peer"}
	if err := netlink.LinkAdd(vpn); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(vpn) })
	if err := netlink.LinkSetUp(vpn); err != nil {
		t.Fatal(err)
	}
	route := func(cidr string) {
		t.Helper()
		_, dst, err := net.ParseCIDR(cidr)
		if err != nil {
			t.Fatal(err)
		}
		if err := netlink.RouteAdd(&netlink.Route{LinkIndex: vpn.Index, Dst: dst, Table: 77}); err != nil {
			t.Fatal(err)
		}
	}
	cfg := Config{Dir: t.TempDir(), Tag: "block", Pool: -1}
	n := open(t, cfg)
	first := n.leases.block
	a := attach(t, n, "able-box")
	if err := n.Detach(t.Context(), "able-box"); err != nil {
		t.Fatal(err)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}

	other := Config{Dir: filepath.Join(t.TempDir(), "vanishing"), Tag: "block2", Pool: -1}
	o := open(t, other)
	lost := o.leases.block
	if err := errors.Join(o.table.remove(), o.Close(), os.RemoveAll(other.Dir)); err != nil {
		t.Fatal(err)
	}

	n = open(t, cfg)
	if n.leases.block != first {
		t.Errorf("the block moved from %s to %s without need", first, n.leases.block)
	}
	if _, err := os.Stat(filepath.Join(claimDir, lost.Addr().String())); err == nil {
		t.Error("the claim of a vanished root stayed")
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}

	route("10.0.0.0/8")
	n = open(t, cfg)
	moved := attach(t, n, "able-box")
	if n.leases.block.Overlaps(netip.MustParsePrefix("10.0.0.0/8")) || !n.leases.block.Contains(moved.Addr) || moved.Interface != a.Interface {
		t.Errorf("after a route to 10/8: block %s, %v", n.leases.block, moved)
	}
	if err := n.Close(); err != nil {
		t.Fatal(err)
	}
	if c := count(t, cfg.Dir).claims; c != 1 {
		t.Errorf("%d claims, want 1", c)
	}

	route("100.64.0.0/10")
	route("172.16.0.0/12")
	if _, err := Open(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "no free address block") {
		t.Errorf("with no block free: %v", err)
	}
	if err := netlink.LinkDel(vpn); err != nil {
		t.Fatal(err)
	}
	open(t, cfg)
}

func TestBadConfig(t *testing.T) {
	for _, cfg := range []Config{{Dir: "/x"}, {Dir: "/x", Tag: "Capital"}, {Dir: "/x", Tag: "sevenxx"}, {Dir: "/x", Tag: "a-b"}, {Tag: "a"}} {
		if _, err := Open(t.Context(), cfg); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("%+v: %v", cfg, err)
		}
	}
	n := open(t, Config{Tag: "ids", Pool: -1})
	for _, id := range []string{"", "..", "a/b", leaseName, strings.Repeat("a", 65)} {
		if _, err := n.Attach(t.Context(), id); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("id %q: %v", id, err)
		}
	}
	if err := errors.Join(n.Detach(t.Context(), "unknown"), n.Release(t.Context(), "unknown")); err != nil {
		t.Errorf("unknown id: %v", err)
	}
}

// BenchmarkAttach reports medians of the first attach, the detach, and an attach with an old lease. The pool is given
// the time to fill, as between the creates of a person.
func BenchmarkAttach(b *testing.B) {
	needRoot(b)
	for _, pool := range []int{4, -1} {
		b.Run(fmt.Sprintf("pool=%d", pool), func(b *testing.B) {
			n, err := Open(b.Context(), Config{Dir: b.TempDir(), Tag: "bench", Pool: pool})
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = n.Remove(context.Background()) }()
			var first, detach, again []time.Duration
			timed := func(into *[]time.Duration, f func()) {
				t0 := time.Now()
				f()
				*into = append(*into, time.Since(t0))
			}
			for i := range b.N {
				for pool > 0 && len(n.ready) < pool-1 {
					time.Sleep(5 * time.Millisecond)
				}
				id := fmt.Sprintf("box-%d", i)
				timed(&first, func() { attach(b, n, id) })
				timed(&detach, func() {
					if err := n.Detach(b.Context(), id); err != nil {
						b.Fatal(err)
					}
				})
				<-n.boxes[id].gone
				timed(&again, func() { attach(b, n, id) })
				if err := n.Release(b.Context(), id); err != nil {
					b.Fatal(err)
				}
				<-n.reaper.bury(corpse{slot: slotCount - 1})
			}
			for name, all := range map[string][]time.Duration{"attach": first, "detach": detach, "reattach": again} {
				slices.Sort(all)
				b.ReportMetric(float64(all[len(all)/2].Microseconds()), name+"-µs")
			}
		})
	}
}

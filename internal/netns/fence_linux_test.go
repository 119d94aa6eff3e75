package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// stranger is another program of the host that manages its firewall.
type stranger struct {
	t *testing.T
	c *nftables.Conn
}

// table is what it finds of ours; nil when there is nothing.
func (s stranger) table() *nftables.Table {
	s.t.Helper()
	tables, err := s.c.ListTablesOfFamily(nftables.TableFamilyINet)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, t := range tables {
		if strings.HasPrefix(t.Name, "shard_") && t.Use > 0 {
			return t
		}
	}
	return nil
}

// whole says whether the wall stands.
func (s stranger) whole() bool {
	t := s.table()
	if t == nil {
		return false
	}
	for _, name := range []string{"raw", "from_sandbox", "forward", "out_of", "input", "fence_in", "fence_out", "nat"} {
		rules, err := s.c.GetRules(t, &nftables.Chain{Table: t, Name: name})
		if err != nil || len(rules) == 0 {
			return false
		}
	}
	bound, err := s.c.GetSetElements(&nftables.Set{Table: t, Name: "bound", Concatenation: true, KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)})
	return err == nil && len(bound) > 0
}

// attacks are the ways to take the wall away, in whole and in part.
func (s stranger) attacks() (all []func(t *nftables.Table) error) {
	flush := func(f func(t *nftables.Table)) {
		all = append(all, func(t *nftables.Table) error { f(t); return s.c.Flush() })
	}
	flush(func(*nftables.Table) { s.c.FlushRuleset() })
	flush(s.c.DelTable)
	flush(s.c.FlushTable)
	for _, name := range []string{"raw", "from_sandbox", "forward", "out_of", "into", "fence_in", "fence_out", "nat", "to_service", "no_ipv6"} {
		flush(func(t *nftables.Table) { s.c.FlushChain(&nftables.Chain{Table: t, Name: name}) })
	}
	for _, name := range []string{"bound", "egress", "private", "private6", "policied"} {
		flush(func(t *nftables.Table) { s.c.FlushSet(&nftables.Set{Table: t, Name: name}) })
	}
	// The rules of each restricted sandbox.
	all = append(all, func(t *nftables.Table) error {
		chains, err := s.c.ListChainsOfTableFamily(nftables.TableFamilyINet)
		for _, c := range chains {
			if c.Table.Name == t.Name && strings.HasPrefix(c.Name, "policy_") {
				s.c.FlushChain(c)
			}
		}
		return errors.Join(err, s.c.Flush())
	})
	return all
}

// barrage sends from a namespace, until stop, datagrams and requests for connections to every address, and packets that lie
// about their source; each has the token.
func (w *world) barrage(group *sync.WaitGroup, stop <-chan struct{}, from Attachment, token string, addrs ...string) {
	w.t.Helper()
	var conns []net.Conn
	var raw int
	within(w.t, from.Netns, func() (err error) {
		for _, a := range addrs {
			c, err := net.Dial("udp", net.JoinHostPort(a, fmt.Sprint(port)))
			if err != nil {
				return err
			}
			conns = append(conns, c)
		}
		raw, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, 0)
		return err
	})
	link := macOf(w.t, "", from.Interface)
	var index int
	within(w.t, from.Netns, func() error {
		l, err := net.InterfaceByName(inside)
		if err == nil {
			index = l.Index
		}
		return err
	})
	group.Go(func() {
		defer func() {
			for _, c := range conns {
				_ = c.Close()
			}
			_ = unix.Close(raw)
		}()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(200 * time.Microsecond):
			}
			for _, c := range conns {
				_, _ = c.Write([]byte(token))
			}
			for _, a := range addrs {
				if to := netip.MustParseAddr(a); to.Is4() {
					// The world's own address, another of the host, and one of nobody.
					forged := []string{worldUplink, hostOthers[0], "198.18.0.77", "10.77.1.2"}[i%4]
					frame := append(append(append([]byte{}, link...), 2, 's', 'h', 0, 0, 9), binary.BigEndian.AppendUint16(nil, unix.ETH_P_IP)...)
					frame = append(frame, packet4(forged, a, unix.IPPROTO_UDP, token)...)
					_ = unix.Sendto(raw, frame, 0, &unix.SockaddrLinklayer{Ifindex: index, Protocol: htons(unix.ETH_P_IP)})
				}
			}
			if i%50 == 0 {
				_ = tryWithin(from.Netns, func() error { return beginAt(addrs) })
			}
		}
	})
}

// beginAt begins a connection to each address and does not wait for it.
func beginAt(addrs []string) error {
	for _, a := range addrs {
		d := net.Dialer{Timeout: 5 * time.Millisecond}
		if c, err := d.DialContext(context.Background(), "tcp", net.JoinHostPort(a, fmt.Sprint(port))); err == nil {
			_, _ = c.Write([]byte("canary-0-"))
			_ = c.Close()
		}
	}
	return nil
}

// TestFlush: whatever another program does to the host's firewall, no sandbox sends a packet where it may not, and all is well
// again soon after. Without an owner no connection is made; the host's own addresses are left out, since they are open for a moment.
func TestFlush(t *testing.T) {
	for _, owned := range []bool{true, false} {
		t.Run(fmt.Sprintf("owned=%v", owned), func(t *testing.T) {
			w := newWorld(t)
			n := open(t, Config{Tag: "flush", Pool: -1})
			if !owned {
				n.table.mu.Lock()
				n.table.ownable = false
				err := n.table.put()
				n.table.mu.Unlock()
				if err != nil {
					t.Fatal(err)
				}
			} else if !n.table.owned {
				t.Skip("this kernel has no tables with an owner that last: they came with Linux 6.9")
			}
			free, restricted := attach(t, n, "free-box"), attach(t, n, "able-box")
			allowed := Rules{Default: "default", Rules: []Rule{{Label: "1", Allow: true, Prefix: netip.MustParsePrefix(worldUplink + "/32"), TCP: everyPort, UDP: everyPort, Other: true}}}
			if err := n.Restrict(t.Context(), Restriction{ID: "able-box", Rules: allowed}); err != nil {
				t.Fatal(err)
			}
			for _, addr := range append(worldHidden[:len(worldHidden):len(worldHidden)], "203.0.113.80") {
				control := newToken()
				if err := tcp("", addr, control, patient); err != nil {
					t.Fatalf("control: %s: %v", addr, err)
				}
			}
			forbidden := worldHidden
			if owned {
				forbidden = append(append(forbidden[:len(forbidden):len(forbidden)], hostUplink, free.Gateway.String(), restricted.Gateway.String()), hostOthers...)
			}
			if free.Addr6.IsValid() {
				forbidden = append(forbidden[:len(forbidden):len(forbidden)], worldHidden6...)
			}
			token := newToken()
			stop := make(chan struct{})
			var group sync.WaitGroup
			w.barrage(&group, stop, free, token, append(forbidden[:len(forbidden):len(forbidden)], restricted.Addr.String())...)
			w.barrage(&group, stop, restricted, token, append(forbidden[:len(forbidden):len(forbidden)], "203.0.113.80", free.Addr.String())...)
			w.listen("free", free.Netns)
			w.listen("able", restricted.Netns)

			s := stranger{t, &nftables.Conn{}}
			attacks := s.attacks()
			for i := range 50 {
				if table := s.table(); table != nil {
					err := attacks[i%len(attacks)](table)
					if owned && err == nil && i%len(attacks) != 0 && !errors.Is(err, unix.ENOENT) {
						t.Errorf("attack %d: the table was changed", i)
					}
				}
				eventually(t, "the wall is whole", s.whole)
				if i%3 == 0 { // the fence, while the wall stands
					for _, r := range n.fenceRules() {
						_ = n.rt.RuleDel(r)
					}
				}
				eventually(t, "the fence is whole", func() bool { return fences(t, n) == len(n.fenceRules()) })
			}
			for _, a := range []Attachment{free, restricted} {
				if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
					t.Errorf("what is allowed: %v", err)
				}
			}
			close(stop)
			group.Wait()
			w.fence()
			for _, place := range []string{"world", "host", "free", "able"} {
				// Without an owner, a packet may be between two chains at the very moment when the table goes.
				if owned && w.seen.has(place, token) {
					t.Errorf("something arrived at %s", place)
				}
				if w.seen.has(place, "canary-0-") {
					t.Errorf("a connection was made to %s", place)
				}
			}
		})
	}
}

// fences counts the rules of the host's routing that are about the blocks of n.
func fences(t *testing.T, n *Net) (count int) {
	t.Helper()
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		rules, err := dump(func() ([]netlink.Rule, error) { return netlink.RuleList(family) })
		if err != nil {
			t.Fatal(err)
		}
		for _, r := range rules {
			if r.Src == nil {
				continue
			}
			if a, ok := netip.AddrFromSlice(r.Src.IP); ok && (n.leases.block.Contains(a) || n.leases.twin.Contains(a)) {
				count++
			}
		}
	}
	return count
}

// TestFlushWithoutDaemon: the wall is taken away, in whole and in part, while nobody watches. Nothing leaves that may not until
// the next daemon puts it up.
func TestFlushWithoutDaemon(t *testing.T) {
	w := newWorld(t)
	cfg := Config{Dir: t.TempDir(), Tag: "alone", Pool: -1}
	n := open(t, cfg)
	a := attach(t, n, "able-box")
	hidden, public := worldHidden, worldPublic
	if a.Addr6.IsValid() {
		hidden, public = slices.Concat(worldHidden, worldHidden6), slices.Concat(worldPublic, worldPublic6)
	}
	s := stranger{t, &nftables.Conn{}}
	for i, attack := range s.attacks() {
		if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
			t.Fatal(err)
		}
		if err := n.Close(); err != nil {
			t.Fatal(err)
		}
		if !s.whole() {
			t.Fatal("the wall went with the daemon")
		}
		if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
			t.Fatalf("without a daemon: %v", err)
		}
		if err := attack(s.table()); err != nil && !errors.Is(err, unix.ENOENT) && !errors.Is(err, unix.EBUSY) {
			t.Fatal(err)
		}
		addrs := hidden
		if s.table() == nil {
			addrs = slices.Concat(hidden, public)
		}
		token := newToken()
		stop := make(chan struct{})
		var group sync.WaitGroup
		w.barrage(&group, stop, a, token, addrs...)
		time.Sleep(100 * time.Millisecond)
		close(stop)
		group.Wait()
		w.fence()
		if w.seen.has("world", token) || w.seen.has("world", "canary-0-") {
			t.Fatalf("attack %d: something arrived while there was no wall", i)
		}
		n = open(t, cfg)
		if lost, err := n.Recover(t.Context(), []string{"able-box"}); err != nil || lost != nil {
			t.Fatal(lost, err)
		}
	}
	if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
		t.Errorf("with the next daemon: %v", err)
	}
	if err := n.Remove(t.Context()); err != nil {
		t.Fatal(err)
	}
	if left := fences(t, n); left != 0 || s.table() != nil {
		t.Errorf("left behind: %d routing rules, table %v", left, s.table())
	}
}

package netns

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/useshards/shard"
)

// dials says how a dial from a namespace ends: "ok", "reset" for a refusal at once, "prohibited", or the error.
func dials(path, network, address string) string {
	err := tryWithin(path, func() error {
		c, err := net.DialTimeout(network, address, patient)
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		if strings.HasPrefix(network, "tcp") {
			return exchange(c, newToken())
		}
		_ = c.SetDeadline(time.Now().Add(patient))
		if _, err := c.Write([]byte(newToken())); err != nil {
			return err
		}
		_, err = c.Read(make([]byte, 64))
		return err
	})
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EACCES):
		return "refused"
	}
	return err.Error()
}

// knock dials and hangs up.
func knock(path, address string) error {
	return tryWithin(path, func() error {
		c, err := net.DialTimeout("tcp4", address, soon)
		if err == nil {
			_ = c.Close()
		}
		return err
	})
}

// drops collects what is refused.
type drops struct {
	mu  sync.Mutex
	all []Drop
}

func watchDrops(t *testing.T, n *Net) *drops {
	t.Helper()
	d := &drops{}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		ended <- n.Drops(ctx, func(one Drop) {
			d.mu.Lock()
			defer d.mu.Unlock()
			d.all = append(d.all, one)
		})
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	group := regexp.MustCompile(fmt.Sprintf(`(?m)^ *%d `, n.table.group()))
	eventually(t, "the kernel reports to it", func() bool {
		bound, err := os.ReadFile("/proc/thread-self/net/netfilter/nfnetlink_log")
		if err != nil {
			t.Fatal(err)
		}
		return group.Match(bound)
	})
	return d
}

// wait fails the test if no drop comes for which yes says so.
func (d *drops) wait(t *testing.T, what string, yes func(Drop) bool) {
	t.Helper()
	for deadline := time.Now().Add(patient); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		d.mu.Lock()
		for _, one := range d.all {
			if yes(one) {
				d.mu.Unlock()
				return
			}
		}
		d.mu.Unlock()
	}
	t.Errorf("%s was never reported; what was: %+v", what, d.all)
}

func TestRestrict(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "rules", Pool: -1})
	a, free := attach(t, n, "able-box"), attach(t, n, "free-box")
	seen := watchDrops(t, n)
	time.Sleep(50 * time.Millisecond) // until the reports are asked for
	there := fmt.Sprintf("%s:%d", worldUplink, port)
	other := fmt.Sprintf("203.0.113.80:%d", port)
	expect := func(when, network, address, want string) {
		t.Helper()
		if got := dials(a.Netns, network, address); got != want {
			t.Errorf("%s: %s to %s: %s, want %s", when, network, address, got, want)
		}
	}
	restrict := func(r Rules) {
		t.Helper()
		if err := n.Restrict(t.Context(), Restriction{ID: "able-box", Rules: r}); err != nil {
			t.Fatal(err)
		}
	}
	everything := Rule{TCP: everyPort, UDP: everyPort, Other: true}

	restrict(Rules{Default: "default"})
	expect("no rules", "tcp4", there, "refused")
	expect("no rules", "udp4", there, "refused")
	expect("no rules", "tcp4", fmt.Sprintf("10.1.2.3:%d", port), "refused")
	expect("no rules", "tcp4", fmt.Sprintf("%s:%d", hostUplink, port), "refused")
	expect("no rules", "tcp4", fmt.Sprintf("%s:%d", a.Gateway, ResolverPort), "refused")
	if got := dials(free.Netns, "tcp4", there); got != "ok" {
		t.Errorf("a sandbox without rules: %s", got)
	}
	seen.wait(t, "the default", func(d Drop) bool {
		return d == Drop{Source: a.Addr, Label: "default", Dest: netip.MustParseAddr(worldUplink), Protocol: 6, Port: port}
	})
	seen.wait(t, "a private destination", func(d Drop) bool {
		return d.Label == shard.EgressRulePrivate && d.Dest == netip.MustParseAddr("10.1.2.3")
	})
	seen.wait(t, "the host", func(d Drop) bool { return d.Label == shard.EgressRuleLocal && d.Source == a.Addr })

	restrict(Rules{Default: "default", Rules: []Rule{
		{Label: "1", Prefix: netip.MustParsePrefix("203.0.113.0/24"), TCP: everyPort, UDP: everyPort, Other: true},
		{Label: "2", Allow: true, TCP: []Ports{{1, 2}, {port, port}}},
		{Label: "3", Allow: true, Fed: true, UDP: []Ports{{port - 1, port + 1}}},
	}})
	expect("first match", "tcp4", other, "refused")
	expect("ports", "tcp4", there, "ok")
	expect("not fed", "udp4", there, "refused")
	if err := n.Feed(t.Context(), "able-box", []int{0, 2, 7}, []netip.Addr{netip.MustParseAddr(worldUplink)}, time.Now().Add(time.Hour)); err != nil {
		t.Fatal(err)
	}
	expect("fed", "udp4", there, "ok")

	// What another program flushes comes back with all that was fed.
	c := &nftables.Conn{}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	for deadline := time.Now().Add(patient); !errors.Is(knock(a.Netns, other), syscall.ECONNREFUSED); {
		if time.Now().After(deadline) {
			t.Fatal("the rules do not come back")
		}
	}
	expect("after a flush", "udp4", there, "ok")
	expect("after a flush", "tcp4", there, "ok")

	// All port-53 traffic comes to the resolver's port, wherever it went.
	within(t, "", func() error {
		u, err := net.ListenPacket("udp4", fmt.Sprintf("%s:%d", a.Gateway, ResolverPort))
		if err != nil {
			return err
		}
		t.Cleanup(func() { _ = u.Close() })
		go func() {
			buf := make([]byte, 512)
			for {
				size, from, err := u.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = u.WriteTo(buf[:size], from)
			}
		}()
		return nil
	})
	expect("port 53", "udp4", "8.8.8.8:53", "ok")
	expect("port 53", "udp4", "10.9.8.7:53", "ok")

	// A flood is counted.
	restrict(Rules{Default: "default", Rules: []Rule{{Label: "1", UDP: everyPort}, func() Rule { r := everything; r.Label = "2"; return r }()}})
	for range 100 {
		udp(a.Netns, worldUplink, newToken())
	}
	told := map[Drop]bool{}
	seen.wait(t, "how many others there were", func(d Drop) bool {
		if d.More > 0 {
			told[d] = true
		}
		var sum uint64
		for one := range told {
			sum += one.More
		}
		return sum >= 80 && sum <= 100 // a report may be told later than it is counted
	})

	if err := n.Detach(t.Context(), "able-box"); err != nil {
		t.Fatal(err)
	}
	a = attach(t, n, "able-box")
	expect("attached again", "tcp4", there, "ok")
}

// allows is what rules mean, in plain words.
func (r Rules) allows(addr netip.Addr, protocol string, port uint16, fed map[int]bool) bool {
	for i, rule := range r.Rules {
		ports := rule.UDP
		if protocol == "tcp" {
			ports = rule.TCP
		}
		about := false
		for _, p := range ports {
			about = about || p.From <= port && port <= p.To
		}
		if rule.Fed {
			about = about && fed[i]
		} else if rule.Prefix.IsValid() {
			about = about && rule.Prefix.Contains(addr)
		}
		if about {
			return rule.Allow
		}
	}
	return false
}

// TestRestrictMany: many sandboxes change their rules in one step or not at all, and each goes by its own.
func TestRestrictMany(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "many", Pool: -1})
	there := fmt.Sprintf("%s:%d", worldUplink, port)
	opened := Rules{Default: "default", Rules: []Rule{{Label: "1", Allow: true, TCP: everyPort}}}
	large := opened
	for i := range 255 {
		large.Rules = append(large.Rules, Rule{Label: fmt.Sprint(i + 2), Fed: true, TCP: []Ports{{443, 443}, {8443, 8443}}})
	}
	closed := Rules{Default: "default"}
	const boxes = 6
	at := make([]Attachment, boxes)
	id := func(i int) string { return fmt.Sprintf("many-box-%d", i) }
	for i := range boxes {
		at[i] = attach(t, n, id(i))
	}
	all := func(rules ...Rules) (out []Restriction) {
		for i := range boxes {
			out = append(out, Restriction{ID: id(i), Rules: rules[i%len(rules)]})
		}
		return out
	}
	expect := func(when string, want ...string) {
		t.Helper()
		for i, a := range at {
			if got := dials(a.Netns, "tcp4", there); got != want[i%len(want)] {
				t.Errorf("%s: sandbox %d: %s, want %s", when, i, got, want[i%len(want)])
			}
		}
	}
	if err := n.Restrict(t.Context(), all(large, closed)...); err != nil {
		t.Fatal(err)
	}
	expect("the first rules", "ok", "refused")
	if err := n.Restrict(t.Context(), all(closed, opened)...); err != nil {
		t.Fatal(err)
	}
	expect("the next", "refused", "ok")

	// The kernel refuses a word this long; what was there stays, and so does what a later change finds.
	bad := closed
	bad.Default = strings.Repeat("x", 200)
	some := all(opened)
	some[3].Rules = bad
	if err := n.Restrict(t.Context(), some...); err == nil {
		t.Error("rules that the kernel does not take: no error")
	}
	expect("after a failure", "refused", "ok")
	if err := n.Restrict(t.Context(), append(all(opened), Restriction{ID: "no-box", Rules: opened})...); err == nil {
		t.Error("a sandbox without a network: no error")
	}
	expect("after another", "refused", "ok")

	// Two that take the same ones in other orders end.
	var both sync.WaitGroup
	for turn := range 2 {
		both.Go(func() {
			for range 10 {
				mine := all(opened)
				if turn == 1 {
					slices.Reverse(mine)
				}
				if err := n.Restrict(t.Context(), mine...); err != nil {
					t.Error(err)
				}
			}
		})
	}
	both.Wait()
	expect("in the end", "ok")
}

// TestRulesAsPackets: the kernel lets through exactly what random rules allow.
func TestRulesAsPackets(t *testing.T) {
	newWorld(t)
	n := open(t, Config{Tag: "chance", Pool: -1})
	a := attach(t, n, "able-box")
	const seed = 20261130
	chance := rand.New(rand.NewPCG(seed, 0))
	one := func(of ...string) string { return of[chance.IntN(len(of))] }
	ports := func() []Ports {
		return [][]Ports{nil, everyPort, {{port, port}}, {{1, port - 1}}, {{port + 1, 65535}}, {{22, 22}, {port - 5, port + 5}}, {{0, port}}, {{22, 22}, {port + 1, port + 2}}}[chance.IntN(8)]
	}
	for round := range 25 {
		rules := Rules{Default: "default"}
		fed := map[int]map[netip.Addr]time.Time{}
		for i := range 1 + chance.IntN(8) {
			r := Rule{Label: fmt.Sprint(i), Allow: chance.IntN(2) == 0, TCP: ports(), UDP: ports(), Other: chance.IntN(2) == 0}
			switch chance.IntN(3) {
			case 0:
				r.Fed = true
				fed[i] = map[netip.Addr]time.Time{}
				for _, some := range [][]string{worldPublic, worldPublic6}[:1+chance.IntN(2)] {
					fed[i][netip.MustParseAddr(one(some...))] = time.Now().Add(time.Hour)
				}
			case 1:
				r.Prefix = netip.MustParsePrefix(one("198.18.0.0/15", "198.19.0.1/32", "203.0.113.64/26", "203.0.113.0/26", "0.0.0.0/0", "2001:db8::/32", "128.0.0.0/1",
					"2001:db8:18::/47", "2001:db8:19::1/128", "64:ff9b::/96", "2000::/3", "::/0", "::/1"))
			}
			rules.Rules = append(rules.Rules, r)
		}
		if err := n.Restrict(t.Context(), Restriction{ID: "able-box", Rules: rules, Fed: fed}); err != nil {
			t.Fatal(err)
		}
		for _, to := range slices.Concat(worldPublic, worldPublic6) {
			// TCP alone: the kernel limits ICMP errors, so that a refused datagram may look like a lost one.
			for _, protocol := range []string{"tcp"} {
				in := map[int]bool{}
				addr := netip.MustParseAddr(to)
				for i, addrs := range fed {
					in[i] = addrs[addr] != time.Time{}
				}
				want := "refused"
				if rules.allows(addr, protocol, port, in) {
					want = "ok"
				}
				if got := dials(a.Netns, over(protocol, to), at(to)); got != want {
					t.Errorf("seed %d, round %d: %s to %s: %s, want %s, by\n%+v\nfed %v", seed, round, protocol, to, got, want, rules.Rules, fed)
				}
			}
		}
	}
}

// TestSwitch: while one list of rules takes the place of another, and a whole table that of another, the destinations and ports that
// neither allows stay closed. Sets of ranges once answered "no" at these moments.
func TestSwitch(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "switch", Pool: -1})
	a := attach(t, n, "able-box")
	var closed []Ports // a set: more than single rules are made of
	for p := uint16(port - 20); p <= port; p += 2 {
		closed = append(closed, Ports{p, p})
	}
	everything := Rule{Label: "2", Allow: true, TCP: everyPort, UDP: everyPort, Other: true}
	rules := Rules{Default: "default", Rules: []Rule{{Label: "1", Prefix: netip.MustParsePrefix("203.0.113.80/32"), UDP: closed}, everything}}
	restrict := func() {
		if err := n.Restrict(t.Context(), Restriction{ID: "able-box", Rules: rules}); err != nil {
			t.Fatal(err)
		}
	}
	restrict()
	if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
		t.Fatal(err)
	}
	stop, token := make(chan struct{}), newToken()
	var group sync.WaitGroup
	for _, addr := range []string{"203.0.113.80", worldHidden[0]} {
		var c net.Conn
		within(t, a.Netns, func() (err error) {
			c, err = net.Dial("udp", at(addr))
			return err
		})
		group.Go(func() {
			defer func() { _ = c.Close() }()
			for {
				select {
				case <-stop:
					return
				default:
					_, _ = c.Write([]byte(token))
				}
			}
		})
	}
	for range 100 {
		restrict()
		n.table.mu.Lock()
		err := n.table.put()
		n.table.mu.Unlock()
		if err != nil {
			t.Fatal(err)
		}
	}
	close(stop)
	group.Wait()
	w.fence()
	if w.seen.has("world", token) {
		t.Error("a packet went where no list of rules allows")
	}
}

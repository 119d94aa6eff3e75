package netns

import (
	"fmt"
	"net"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"
)

// soon is how long a dial that must fail is given; whether it arrived is judged at the listener.
const (
	soon    = 150 * time.Millisecond
	patient = 20 * time.Second
)

// fence sends a token by a way that is open, and waits: what was sent to the same listeners before has arrived by then.
func (w *world) fence() {
	w.t.Helper()
	for place, addr := range map[string]string{"host": "127.0.0.1", "world": worldUplink} {
		token := newToken()
		udp("", addr, token)
		w.seen.wait(w.t, place, token)
	}
}

// TestPrivateIsOutOfReach is case 50.
func TestPrivateIsOutOfReach(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "priv"})
	a, b := attach(t, n, "able-box"), attach(t, n, "other-box")
	w.capture("a", a.Netns)

	closed := map[string][]string{
		"host":  append([]string{a.Gateway.String(), b.Gateway.String(), hostUplink}, hostOthers...),
		"world": worldHidden,
	}
	outOfReach(t, w, a.Netns, closed, worldPublic, func(addr, token string) {
		frame(t, a.Netns, macOf(t, "", a.Interface), unix.ETH_P_IP, packet4(a.Addr.String(), addr, unix.IPPROTO_ICMP, token))
	})
}

// outOfReach checks that from the namespace at path nothing of closed, by place, is reached, which is there for this host, by
// TCP, UDP, an echo request, or what more sends; and that all of public is.
func outOfReach(t *testing.T, w *world, path string, closed map[string][]string, public []string, echo func(addr, token string), more ...func(addr, token string)) {
	t.Helper()
	var denied []string // "place token"
	for place, addrs := range closed {
		for _, addr := range addrs {
			control := newToken()
			if err := tcp("", addr, control, patient); err != nil {
				t.Fatalf("control: %s is not there: %v", addr, err)
			}
			w.seen.wait(t, place, control)
			token := newToken()
			if err := tcp(path, addr, token, soon); err == nil {
				t.Errorf("TCP to %s came through", addr)
			}
			udp(path, addr, token)
			for _, send := range append(more, echo) {
				send(addr, token)
			}
			denied = append(denied, place+" "+token, "a "+token)
		}
	}
	for _, addr := range public {
		token := newToken()
		if err := tcp(path, addr, token, patient); err != nil {
			t.Errorf("public %s is out of reach: %v", addr, err)
		}
		token = newToken()
		udp(path, addr, token)
		w.seen.wait(t, "world", token)
		token = newToken()
		echo(addr, token)
		w.seen.wait(t, "a", token) // the answer
	}
	w.fence()
	for _, d := range denied {
		if w.seen.tokens[d] {
			t.Errorf("arrived: %s", d)
		}
	}
}

// TestNoWayIn: neither the world nor this host begins a flow to a sandbox.
func TestNoWayIn(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "in"})
	a := attach(t, n, "able-box")
	w.listen("a", a.Netns)
	w.capture("wire", a.Netns)
	if err := tcp(a.Netns, a.Addr.String(), newToken(), patient); err != nil {
		t.Fatalf("control: %v", err)
	}
	var tokens []string
	for _, from := range []string{"", w.path} {
		token := newToken()
		tokens = append(tokens, token)
		if err := tcp(from, a.Addr.String(), token, soon); err == nil {
			t.Errorf("TCP from %q came in", from)
		}
		udp(from, a.Addr.String(), token)
	}
	// Answers do come in, and with them all that was sent before.
	fence := newToken()
	if err := tcp(a.Netns, worldUplink, fence, patient); err != nil {
		t.Fatal(err)
	}
	w.seen.wait(t, "wire", fence)
	for _, token := range tokens {
		if w.seen.has("a", token) || w.seen.has("wire", token) {
			t.Errorf("%s came in", token)
		}
	}
}

// TestSandboxesAreApart is case 64, and the forged sources of case 50.
func TestSandboxesAreApart(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "apart"})
	a, b := attach(t, n, "able-box"), attach(t, n, "other-box")
	w.listen("b", b.Netns)
	w.capture("b", b.Netns)
	w.capture("a", a.Netns)
	w.capture("world wire", w.path)
	if err := tcp(b.Netns, b.Addr.String(), newToken(), patient); err != nil {
		t.Fatalf("control: %v", err)
	}
	src, dst := a.Addr.String(), b.Addr.String()
	gatewayMAC, bMAC, aMAC := macOf(t, "", a.Interface), macOf(t, b.Netns, inside), macOf(t, a.Netns, inside)
	everyone := net.HardwareAddr{0xff, 0xff, 0xff, 0xff, 0xff, 0xff}
	token := newToken() // one for all that must not arrive anywhere

	if err := tcp(a.Netns, dst, token, soon); err == nil {
		t.Error("TCP came through")
	}
	for _, addr := range []string{dst, "224.0.0.1", "239.1.2.3", "255.255.255.255"} {
		udp(a.Netns, addr, token)
	}
	for _, mac := range []net.HardwareAddr{gatewayMAC, bMAC, everyone} {
		for _, proto := range []byte{unix.IPPROTO_UDP, unix.IPPROTO_ICMP, unix.IPPROTO_SCTP, unix.IPPROTO_GRE} {
			frame(t, a.Netns, mac, unix.ETH_P_IP, packet4(src, dst, proto, token))
		}
		for _, to := range []string{"ff02::1", "fe80::1", "2001:db8::1", "::ffff:" + dst} {
			frame(t, a.Netns, mac, unix.ETH_P_IPV6, packet6("fe80::2", to, token))
		}
		frame(t, a.Netns, mac, 0x88b5, []byte(token)) // an EtherType for experiments
	}
	// Forged sources: another sandbox, another sandbox's gateway, this host, the world, loopback, nobody.
	for _, forged := range []string{dst, b.Gateway.String(), a.Gateway.String(), hostUplink, worldUplink, "198.19.0.9", "127.0.0.1", "0.0.0.0"} {
		for _, to := range []string{dst, worldUplink, "198.19.0.1"} {
			frame(t, a.Netns, gatewayMAC, unix.ETH_P_IP, packet4(forged, to, unix.IPPROTO_UDP, token))
		}
	}
	// ARP: the gateway answers for itself and for nothing else that it knows.
	for _, who := range append([]string{a.Gateway.String(), dst, b.Gateway.String(), hostUplink}, hostOthers...) {
		frame(t, a.Netns, everyone, unix.ETH_P_ARP, arpRequest(aMAC, src, who))
	}

	// The same tools with the true source and a public destination do work.
	control := newToken()
	frame(t, a.Netns, gatewayMAC, unix.ETH_P_IP, packet4(src, worldUplink, unix.IPPROTO_UDP, control))
	w.seen.wait(t, "world", control)
	w.seen.wait(t, "a", "arp "+a.Gateway.String())
	w.fence()
	fence := newToken()
	if err := tcp(b.Netns, worldUplink, fence, patient); err != nil {
		t.Fatal(err)
	}
	w.seen.wait(t, "b", fence)
	for _, place := range []string{"a", "b", "host", "world", "world wire"} {
		if w.seen.has(place, token) {
			t.Errorf("something arrived at %s", place)
		}
	}
	for _, who := range append([]string{dst, b.Gateway.String(), hostUplink}, hostOthers...) {
		if w.seen.has("a", "arp "+who) {
			t.Errorf("the host answered ARP for %s", who)
		}
	}
}

// TestClosedUntilOpened: a finished link that no element names passes nothing, new or established, in or out.
func TestClosedUntilOpened(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "closed", Pool: -1})
	a := attach(t, n, "able-box")
	e := n.entry(n.boxes["able-box"].slot)
	w.listen("a", a.Netns)

	var conn net.Conn
	within(t, a.Netns, func() (err error) {
		conn, err = net.DialTimeout("tcp4", fmt.Sprintf("%s:%d", worldUplink, port), patient)
		return err
	})
	defer func() { _ = conn.Close() }()
	if err := exchange(conn, newToken()); err != nil {
		t.Fatal(err)
	}

	nothing := func(state string, established bool) {
		t.Helper()
		token := newToken()
		for _, try := range []error{tcp(a.Netns, worldUplink, token, soon), tcp("", a.Addr.String(), token, soon), tcp(a.Netns, a.Gateway.String(), token, soon)} {
			if try == nil {
				t.Errorf("%s: TCP came through", state)
			}
		}
		udp(a.Netns, worldUplink, token)
		if !established {
			_, _ = conn.Write([]byte(token))
		}
		w.fence()
		for _, place := range []string{"world", "host", "a"} {
			if w.seen.has(place, token) {
				t.Errorf("%s: something arrived at %s", state, place)
			}
		}
	}
	reopened := func() {
		t.Helper()
		if err := n.table.open(e); err != nil {
			t.Fatal(err)
		}
		if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
			t.Fatalf("after opening: %v", err)
		}
	}
	transact(t, n, func(c *nftables.Conn) error {
		return c.SetDeleteElements(n.table.egress, []nftables.SetElement{{Key: ifname(e.iface)}})
	})
	nothing("bound only", true)
	reopened()
	transact(t, n, func(c *nftables.Conn) error { return c.SetDeleteElements(n.table.bound, e.boundElement()) })
	nothing("egress only", false)
	reopened()
	if err := n.table.shut(e); err != nil {
		t.Fatal(err)
	}
	nothing("shut", false)
	if err := n.table.shut(e); err != nil {
		t.Errorf("shut twice: %v", err)
	}
	reopened()
	if err := n.table.replace(nil); err != nil {
		t.Fatal(err)
	}
	nothing("base table", false)
	reopened()
}

// TestTableComesBack: a program that flushes the host's firewall opens the sandboxes for a moment only, and those that
// were shut stay so.
func TestTableComesBack(t *testing.T) {
	w := newWorld(t)
	n := open(t, Config{Tag: "back", Pool: -1})
	a, shut := attach(t, n, "able-box"), attach(t, n, "shut-box")
	if err := n.table.shut(n.entry(n.boxes["shut-box"].slot)); err != nil {
		t.Fatal(err)
	}
	c := &nftables.Conn{}
	c.FlushRuleset()
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(patient)
	for {
		tables, err := c.ListTables()
		if err != nil {
			t.Fatal(err)
		}
		if len(tables) == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("the table does not come back")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if err := tcp(a.Netns, worldUplink, newToken(), patient); err != nil {
		t.Error(err)
	}
	token := newToken()
	for path, addr := range map[string]string{a.Netns: hostUplink, shut.Netns: worldUplink} {
		if err := tcp(path, addr, token, soon); err == nil {
			t.Errorf("%s was reached", addr)
		}
	}
	w.fence()
	if w.seen.has("host", token) || w.seen.has("world", token) {
		t.Error("something arrived")
	}
}

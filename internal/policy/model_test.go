package policy

import (
	"net/netip"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

// The model says what the documentation says, rule by rule and flow by flow, without any of the package's own types: it
// is slow, and short enough to be believed.

// flow is one kind of traffic; the universe has one of each that rules of the generator can tell apart.
type flow struct {
	protocol string
	port     uint16
}

var universe = func() []flow {
	all := []flow{{"icmp", 0}}
	for _, protocol := range []string{"tcp", "udp"} {
		for _, port := range []uint16{9, 22, 53, 80, 443, 8443} {
			all = append(all, flow{protocol, port})
		}
	}
	return all
}()

var (
	modelNames = []string{"lab.test", "a.lab.test", "b.a.lab.test", "notlab.test", "test", "www.a.com", "www.b.com", "www.com"}
	modelAddrs = []string{"198.51.100.7", "198.51.100.8", "203.0.113.1", "10.0.0.1", "2001:db8::1", "2001:db8:1::1", "2606:4700::1", "fd00::1", "64:ff9b::a00:1"}
	modelDests = []string{"any", "any", "*", "lab.test", "*.lab.test", "suffix:lab.test", "www.*.com", "*.*.com", "www.a.com",
		"198.51.100.7", "198.51.100.0/24", "0.0.0.0/0", "2001:db8::/32", "2001:db8:1::/48", "2001:db8::1", "::/0", "2000::/3", "fd00::/8"}
	modelFlows = []string{"", "", "tcp", "udp", "tcp:22", "tcp:443", "tcp:80,443", "udp:443", "udp:53", "tcp:53", "tcp:1-1024", "udp:20-500"}
)

type modelRule struct{ action, dest, protocol, ports string }

func (r modelRule) text() string {
	text := r.dest
	if r.protocol != "" {
		text += " " + r.protocol
		if r.ports != "" {
			text += ":" + r.ports
		}
	}
	return text
}

func drawRules(t *rapid.T) []modelRule {
	out := make([]modelRule, rapid.IntRange(0, 6).Draw(t, "rules"))
	for i := range out {
		r := modelRule{action: rapid.SampledFrom([]string{Allow, Deny}).Draw(t, "action"), dest: rapid.SampledFrom(modelDests).Draw(t, "dest")}
		if rapid.IntRange(0, 7).Draw(t, "dns") == 0 {
			out[i] = modelRule{action: Allow, dest: "dns"}
			continue
		}
		r.protocol, r.ports, _ = strings.Cut(rapid.SampledFrom(modelFlows).Draw(t, "flows"), ":")
		if r.named() && r.action == Allow && r.protocol == "udp" && r.ports == "" {
			r.ports = "443"
		}
		out[i] = r
	}
	return out
}

func (r modelRule) named() bool {
	_, cidr := r.cidr()
	return !cidr && r.dest != "any" && r.dest != "dns"
}

func (r modelRule) cidr() (netip.Prefix, bool) {
	if a, err := netip.ParseAddr(r.dest); err == nil {
		return netip.PrefixFrom(a, a.BitLen()), true
	}
	p, err := netip.ParsePrefix(r.dest)
	return p, err == nil
}

func (r modelRule) about(f flow) bool {
	if r.dest == "dns" {
		return f.port == 53 && f.protocol != "icmp"
	}
	ports := r.ports
	if ports == "" && r.named() && r.action == Allow {
		ports = "80,443"
		if f.protocol != "tcp" {
			return false
		}
	}
	if r.protocol != "" && r.protocol != f.protocol {
		return false
	}
	if ports == "" {
		return true
	}
	for _, item := range strings.Split(ports, ",") {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		a, _ := strconv.Atoi(from)
		b, _ := strconv.Atoi(to)
		if a <= int(f.port) && int(f.port) <= b {
			return true
		}
	}
	return false
}

func (r modelRule) names(name string) bool {
	if !r.named() {
		return false
	}
	expr, suffix := strings.CutPrefix(r.dest, "suffix:")
	expr = regexp.QuoteMeta(expr)
	if suffix {
		expr = `([^.]+\.)*` + expr
	}
	if rest, ok := strings.CutPrefix(expr, `\*`); ok {
		expr = `([^.]+\.)*[^.]+` + rest
	}
	expr = strings.ReplaceAll(expr, `\*`, `[^.]+`)
	return regexp.MustCompile("^" + expr + "$").MatchString(name)
}

// first is the first rule of those that match, among rules about the flow; -1 for none.
func first(rules []modelRule, f flow, match func(modelRule) bool) int {
	return slices.IndexFunc(rules, func(r modelRule) bool { return r.about(f) && match(r) })
}

// everybody says whether a rule is about every name.
func everybody(r modelRule) bool { return r.dest == "any" || r.dest == "*" }

// model is what the documentation says of a policy as a whole.
func model(rules []modelRule) (implied string, open bool) {
	allowed := func(i int, f flow) bool { // no earlier rule denies the flow to every name
		return rules[i].about(f) && first(rules[:i], f, func(r modelRule) bool { return r.action == Deny && everybody(r) }) < 0
	}
	var named, dnsRule, anyone bool
	for i, r := range rules {
		for _, f := range universe {
			switch {
			case r.dest == "dns":
				dnsRule = dnsRule || first(rules[:i], f, func(r modelRule) bool { return r.action == Deny && everybody(r) }) < 0
			case r.action == Allow && r.named():
				named = named || allowed(i, f)
			case r.action == Allow && r.dest == "any":
				anyone = anyone || allowed(i, f)
			}
		}
	}
	reach := func(protocol string) bool {
		i := first(rules, flow{protocol, 53}, func(r modelRule) bool { return r.dest == "any" })
		return i >= 0 && rules[i].action == Allow
	}
	switch {
	case reach("udp") && reach("tcp"):
	case dnsRule:
		implied = ImpliedDNSRule
	case named:
		implied = ImpliedDNS
	}
	return implied, (implied != "" || reach("udp") || reach("tcp")) && (named || dnsRule || anyone)
}

// listed says whether some flow to the name is allowed, and found whether it may be looked up.
func listed(rules []modelRule, open bool, name string) (found, listed bool) {
	if !open {
		return false, false
	}
	match := func(r modelRule) bool { return r.dest == "any" || r.names(name) }
	for _, f := range universe {
		if i := first(rules, f, match); i >= 0 && rules[i].action == Allow {
			listed = true
		}
	}
	for i, r := range rules {
		if r.dest != "dns" {
			continue
		}
		for _, f := range universe { // it is come to while some flow is undecided
			if first(rules[:i], f, match) < 0 {
				found = true
			}
		}
	}
	return found || listed, listed
}

func TestAgainstTheModel(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rules := drawRules(t)
		var texts []shard.PolicyRule
		for _, r := range rules {
			texts = append(texts, shard.PolicyRule{Action: r.action, Rule: r.text()})
		}
		parsed, err := ParseAll(texts)
		if err != nil {
			t.Fatalf("%v: %v", texts, err)
		}
		c, err := Compile(parsed)
		if err != nil {
			t.Fatal(err)
		}
		implied, open := model(rules)
		front := 0
		if implied != "" {
			front = 2
		}
		if got := c.Rules(); c.DNS() != open || len(got) != len(rules)+front || front > 0 && got[0].Implied != implied {
			t.Fatalf("%v: open %v, %d rules; the model says %v, %q", texts, c.DNS(), len(got), open, implied)
		}

		// Lookups, whose answers open addresses: some names share some.
		opened := map[int][]string{} // step → addresses
		asked := map[string][]string{}
		for _, name := range modelNames {
			a := c.Lookup(name)
			found, isListed := listed(rules, open, name)
			if a.Allow != found || a.Listed != isListed {
				t.Fatalf("%v: lookup of %s: %+v; the model says %v, %v", texts, name, a, found, isListed)
			}
			if a.Allow != (a.Step >= 0 && c.Steps[a.Step].Allow) {
				t.Fatalf("%v: lookup of %s: %+v does not name the rule", texts, name, a)
			}
			if !isListed || !rapid.Bool().Draw(t, "asked") {
				if !isListed && a.Feeds != nil {
					t.Fatalf("%v: %s feeds %v", texts, name, a.Feeds)
				}
				continue
			}
			asked[name] = rapid.SliceOfN(rapid.SampledFrom(modelAddrs), 1, 2).Draw(t, "addresses")
			for _, i := range a.Feeds {
				opened[i] = append(opened[i], asked[name]...)
			}
		}
		inSet := func(step int, addr netip.Addr) bool { return slices.Contains(opened[step], addr.String()) }

		for _, text := range modelAddrs {
			addr := netip.MustParseAddr(text)
			for _, f := range universe {
				v := c.Packet(addr, f.protocol, f.port, inSet)
				toResolver := f.port == 53 && len(rules) > 0
				want, allow := shard.EgressRuleDefault, false
				switch i := first(rules, f, func(r modelRule) bool {
					p, cidr := r.cidr()
					return r.dest == "any" || r.dest == "dns" && f.port == 53 || !toResolver && cidr && p.Contains(addr) ||
						!toResolver && opens(rules, r, f, asked, text)
				}); {
				case toResolver && implied != "":
					want, allow = map[string]string{"udp": "1", "tcp": "2"}[f.protocol], true
				case !toResolver && shard.IsUnreachable(addr):
					want = shard.EgressRulePrivate
				case i >= 0:
					want, allow = strconv.Itoa(i+1+front), rules[i].action == Allow
				}
				if v.Rule != want || v.Allow != allow {
					t.Fatalf("%v: a packet to %s %v: %+v; the model says %s, %v (asked: %v)", texts, addr, f, v, want, allow, asked)
				}
				if f.protocol == "icmp" || f.port == 53 {
					continue
				}
				for _, host := range append(modelNames, "") {
					v := c.Request(host, addr, f.protocol, f.port)
					i := first(rules, f, func(r modelRule) bool {
						p, cidr := r.cidr()
						return r.dest == "any" || cidr && p.Contains(addr) || host != "" && r.names(host)
					})
					want, allow := shard.EgressRuleDefault, false
					if i >= 0 {
						want, allow = strconv.Itoa(i+1+front), rules[i].action == Allow
					}
					if shard.IsUnreachable(addr) && (i < 0 || !rules[i].named()) {
						want, allow = shard.EgressRulePrivate, false
					}
					if v.Rule != want || v.Allow != allow {
						t.Fatalf("%v: a request for %q at %s %v: %+v; the model says %s, %v", texts, host, addr, f, v, want, allow)
					}
				}
			}
		}
	})
}

// opens says whether a rule with names is about an address: a name that it matches was looked up and led there, and the
// rule is the first about some flow to that name.
func opens(rules []modelRule, r modelRule, _ flow, asked map[string][]string, addr string) bool {
	at := slices.Index(rules, r)
	for name, addrs := range asked {
		if !r.names(name) || !slices.Contains(addrs, addr) {
			continue
		}
		for _, f := range universe {
			if first(rules, f, func(r modelRule) bool { return r.dest == "any" || r.names(name) }) == at {
				return true
			}
		}
	}
	return false
}

// TestNothingOpensWhatIsDropped: no rules whatever let a packet to a private destination pass.
func TestNothingOpensWhatIsDropped(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var texts []shard.PolicyRule
		for _, r := range drawRules(t) {
			texts = append(texts, shard.PolicyRule{Action: r.action, Rule: r.text()})
		}
		parsed, err := ParseAll(texts)
		if err != nil {
			t.Fatal(err)
		}
		c, err := Compile(parsed)
		if err != nil {
			t.Fatal(err)
		}
		p := rapid.SampledFrom(shard.Unreachable()).Draw(t, "prefix")
		bytes := p.Addr().AsSlice()
		for i := p.Bits(); i < len(bytes)*8; i++ {
			if rapid.Bool().Draw(t, "bit") {
				bytes[i/8] |= 1 << (7 - i%8)
			}
		}
		addr, _ := netip.AddrFromSlice(bytes)
		f := rapid.SampledFrom(universe).Draw(t, "flow")
		if f.port == 53 {
			return
		}
		if v := c.Packet(addr, f.protocol, f.port, func(int, netip.Addr) bool { return true }); v.Allow {
			t.Fatalf("%v: %s: %+v", texts, addr, v)
		}
	})
}

// TestFlows: the arithmetic of ports against sets of single ports.
func TestFlows(t *testing.T) {
	draw := rapid.Custom(func(t *rapid.T) []PortRange {
		var out []PortRange
		for range rapid.IntRange(0, 5).Draw(t, "n") {
			from := rapid.Uint16Range(0, 20).Draw(t, "from")
			out = append(out, PortRange{from, from + rapid.Uint16Range(0, 5).Draw(t, "more")})
		}
		if rapid.Bool().Draw(t, "end") {
			out = append(out, PortRange{65530, 65535})
		}
		return merge(out)
	})
	rapid.Check(t, func(t *rapid.T) {
		a, b := Flows{TCP: draw.Draw(t, "a")}, Flows{TCP: draw.Draw(t, "b")}
		for _, port := range []uint16{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 15, 20, 25, 26, 65529, 65530, 65535} {
			inA, inB := a.Has("tcp", port), b.Has("tcp", port)
			if a.minus(b).Has("tcp", port) != (inA && !inB) || a.plus(b).Has("tcp", port) != (inA || inB) {
				t.Fatalf("port %d of %v and %v", port, a, b)
			}
		}
		for _, ranges := range [][]PortRange{a.plus(b).TCP, a.minus(b).TCP} {
			for i, r := range ranges {
				if r.From > r.To || i > 0 && ranges[i-1].To >= r.From {
					t.Fatalf("not sorted and apart: %v", ranges)
				}
			}
		}
	})
}

func FuzzParse(f *testing.F) {
	for _, seed := range []string{"a.com tcp:443", "suffix:Bücher.example", "*.*.com udp:1-5,7", "198.51.100.7/24", "::/0", "any", "dns",
		"xn--bcher-kva.example.", "www.*.", "127.1", "any.", "suffix:any", "１２７.0.0.1", "a。b",
		"2001:DB8::7/33 udp:53", "2001:db8::1 tcp:22", "::ffff:198.51.100.7", "::ffff:198.51.100.0/120", "fe80::1%eth0", "[2001:db8::1]", "::/0 tcp", "2001:db8::1:443", "1::/129"} {
		f.Add(seed, true)
		f.Add(seed, false)
	}
	f.Fuzz(func(t *testing.T, text string, allow bool) {
		action := Deny
		if allow {
			action = Allow
		}
		r, err := Parse(action, text)
		if err != nil {
			if shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Fatalf("%q: %v", text, err)
			}
			return
		}
		again, err := Parse(action, Text(r))
		if err != nil || !reflect.DeepEqual(r, again) {
			t.Fatalf("%q is %+v, and read back %+v, %v", text, r, again, err)
		}
		c, err := Compile([]shard.Rule{r})
		if err != nil {
			t.Fatalf("%q: %v", text, err)
		}
		if strings.ContainsFunc(Text(r), func(c rune) bool { return c < ' ' || c > '~' }) {
			t.Fatalf("%q is not plain: %q", text, Text(r))
		}
		c.Lookup("a.com")
		c.Packet(netip.MustParseAddr("198.51.100.7"), "tcp", 443, nil)
	})
}

func FuzzHost(f *testing.F) {
	for _, seed := range []string{"a.com", "BÜCHER.example.", "xn--bcher-kva.example", "127.1", "a。b", "ß.de", "a\u200db.com"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, s string) {
		name, err := Host(s)
		if err != nil {
			return
		}
		if again, err := Host(name); err != nil || again != name {
			t.Fatalf("%q is %q, and that is %q, %v", s, name, again, err)
		}
		if _, err := netip.ParseAddr(name); err == nil {
			t.Fatalf("%q is the address %s", s, name)
		}
	})
}

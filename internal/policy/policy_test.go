package policy

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/useshards/shard"
)

// rules reads a policy written as "allow DEST …; deny DEST …".
func rules(t testing.TB, text string) []shard.Rule {
	t.Helper()
	var list []shard.PolicyRule
	for line := range strings.SplitSeq(text, ";") {
		if action, rule, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			list = append(list, shard.PolicyRule{Action: action, Rule: rule})
		}
	}
	out, err := ParseAll(list)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return out
}

func compile(t testing.TB, text string) *Compiled {
	t.Helper()
	c, err := Compile(rules(t, text))
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	return c
}

func TestParse(t *testing.T) {
	for in, want := range map[string]string{
		"198.51.100.7":                           "cidr 198.51.100.7",
		"198.51.100.7/32":                        "cidr 198.51.100.7",
		"198.51.100.7/24 tcp":                    "cidr 198.51.100.0/24 tcp",
		"0.0.0.0/0 UDP:443":                      "cidr 0.0.0.0/0 udp:443",
		"2001:DB8::1":                            "cidr 2001:db8::1",
		"2001:db8::1/32 tcp:22":                  "cidr 2001:db8::/32 tcp:22",
		"::/0":                                   "cidr ::/0",
		"Example.COM.":                           "domain example.com",
		"example.com tcp":                        "domain example.com tcp",
		"example.com tcp:443,80,443":             "domain example.com tcp:80,443",
		"example.com tcp:8000-8010,8005-8020,22": "domain example.com tcp:22,8000-8020",
		"example.com tcp:80,81,82":               "domain example.com tcp:80-82",
		"example.com tcp:80" + strings.Repeat(",80", MaxPorts-1): "domain example.com tcp:80",
		"example.com udp:443":           "domain example.com udp:443",
		"  example.com\t tcp:1-1024 ":   "domain example.com tcp:1-1024",
		"*.example.com":                 "domain *.example.com",
		"www.*.com":                     "domain www.*.com",
		"*.*.Com.":                      "domain *.*.com",
		"*":                             "domain *",
		"www.*":                         "domain www.*",
		"bücher.example":                "domain xn--bcher-kva.example",
		"BÜCHER.example":                "domain xn--bcher-kva.example",
		"XN--bcher-kva.example":         "domain xn--bcher-kva.example",
		"*.bücher.example":              "domain *.xn--bcher-kva.example",
		"bücher。example":                "domain xn--bcher-kva.example",
		"gİthub.com":                    "domain xn--github-qyd.com", // as everywhere else: no i
		"_dmarc.example.com":            "domain _dmarc.example.com",
		"r3---sn-4g5.example.com":       "domain r3---sn-4g5.example.com",
		"localhost":                     "domain localhost",
		"suffix:Example.com. tcp:443":   "domain-suffix suffix:example.com tcp:443",
		"SUFFIX:bücher.example":         "domain-suffix suffix:xn--bcher-kva.example",
		"suffix:any":                    "domain-suffix suffix:any",
		"any":                           "group any",
		"ANY tcp:25":                    "group any tcp:25",
		"dns":                           "group dns",
		strings.Repeat("a.", 126) + "a": "domain " + strings.Repeat("a.", 126) + "a",
	} {
		r, err := Parse(Allow, in)
		if err != nil {
			t.Errorf("%q: %v", in, err)
			continue
		}
		if got := r.Destination.Kind + " " + Text(r); got != want {
			t.Errorf("%q is %q, want %q", in, got, want)
		}
		if _, err := again(r); err != nil {
			t.Errorf("%q as stored: %v", in, err)
		}
	}
}

func TestParseRefuses(t *testing.T) {
	for in, says := range map[string]string{
		"":                  "empty",
		" \t":               "empty",
		"private":           "private networks",
		"PRIVATE tcp:80":    "private networks",
		"a.com tcp 443":     "too many words",
		"a.com tcp:80, 443": "too many words",
		"a.com icmp":        "not tcp or udp",
		"a.com tcp:":        "not a port",
		"a.com tcp:0":       "not a port",
		"a.com tcp:65536":   "not a port",
		"a.com tcp:+80":     "not a port",
		"a.com tcp:80-":     "not a port",
		"a.com tcp:90-80":   "not a port",
		"a.com tcp:1-2-3":   "not a port",
		"a.com tcp:80,,90":  "not a port",
		"any tcp:1-1025":    "1025 ports",
		"any tcp:80" + strings.Repeat(",80", MaxPorts): "1025 ports",
		"any tcp:1-600,1-600":                          "1200 ports",
		"any\n":                                        "not a host name",
		"\nany":                                        "not a host name",
		"any\ntcp:80":                                  "ports stand after a space",
		"any tcp:80\nany":                              "not a port",
		"any tcp:80\r":                                 "not a port",
		"any\vtcp":                                     "not a host name",
		"any\u00a0tcp:80":                              "ports stand after a space",
		"any tcp\u2028":                                "not tcp or udp",
		"any\u2003":                                    "not a host name",
		"1.2.3.4\x85":                                  "not a host name",
		"1.2.3.0/24\n":                                 "not a prefix",
		"a\u00ad.com":                                  "not a host name",
		"a\u200b.com":                                  "not a host name",
		"a\xff.com":                                    "not a host name",
		"a\ufffd.com":                                  "not a host name",
		"a.com\ufeff":                                  "not a host name",
		"\u202emoc.a":                                  "not a host name",
		"suffix:a\u2066.com":                           "without *",
		"*.a\u200d.com":                                "with *",
		"g\u0130thub.com\n":                            "not a host name",
		"any tcp:1-65535":                              "a rule without ports is about all of them",
		"a.com udp":                                    "which ports",
		"a.com:443":                                    "ports stand after a space",
		"https://a.com/":                               "URL",
		"a.com/x":                                      "not a prefix",
		"1.2.3.4/33":                                   "not a prefix",
		"::ffff:1.2.3.4":                               "in its own form",
		"::ffff:1.2.3.0/120":                           "not a prefix",
		"fe80::1%eth0":                                 "zone",
		"fe80::%eth0/64":                               "not a prefix",
		"1.2.3":                                        "not a host name",
		"127.1":                                        "not a host name",
		"0x7f.1":                                       "not a host name",
		"0x7f":                                         "not a host name",
		"1.2.3.256":                                    "not a host name",
		"１２７.0.0.1":                                    "not a host name",
		"a..com":                                       "not a host name",
		".a.com":                                       "not a host name",
		"a.com..":                                      "not a host name",
		".":                                            "not a host name",
		"-a.com":                                       "not a host name",
		"a-.com":                                       "not a host name",
		"a b":                                          "not tcp or udp",
		"a\x00b":                                       "not a host name",
		"a@b.com":                                      "not a host name",
		"℀.com":                                        "not a host name",
		"xn--a.com":                                    "not a host name",
		"api*.d":                                       "whole part",
		"*api.d":                                       "whole part",
		"**.d":                                         "whole part",
		"a.*.":                                         "", // is a.* with a final dot
		"*..com":                                       "with *",
		"*.1":                                          "with *",
		"suffix:":                                      "without *",
		"suffix:*.d":                                   "without *",
		"suffix:1.2.3.4":                               "without *",
		"suffix:suffix:d":                              "without *",
		"any.":                                         "cannot be the name",
		"dns.":                                         "cannot be the name",
		"dns tcp:53":                                   "no protocol",
		strings.Repeat("a", 64):                        "not a host name",
		strings.Repeat("a.", 127) + "a":                "not a host name",
		"a.com tcp:" + strings.Repeat("1,", 5000) + "1": "longer than",
	} {
		_, err := Parse(Allow, in)
		if says == "" {
			if err != nil {
				t.Errorf("%q: %v", in, err)
			}
			continue
		}
		if shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%q: %v, want %q", in, err, says)
		}
	}
	if _, err := Parse(Deny, "dns"); err == nil {
		t.Error("deny dns is taken")
	}
	for _, action := range []string{"", "ALLOW", "drop"} {
		if _, err := Parse(action, "any"); err == nil {
			t.Errorf("action %q is taken", action)
		}
	}
	if _, err := ParseAll(make([]shard.PolicyRule, MaxRules+1)); err == nil || !strings.Contains(err.Error(), "257 rules") {
		t.Error(err)
	}
	if _, err := ParseAll([]shard.PolicyRule{{Action: "allow", Rule: "any"}, {Action: "deny", Rule: "x y"}}); err == nil || !strings.HasPrefix(err.Error(), "rule 2: ") {
		t.Error(err)
	}
	if _, err := Compile([]shard.Rule{{Action: "allow", Destination: shard.Destination{Kind: "domain", Value: "A.com"}}}); err == nil {
		t.Error("a stored rule that is not canonical is taken")
	}
	if _, err := Compile([]shard.Rule{{Action: "allow", Destination: shard.Destination{Kind: "cidr", Value: "a.com"}}}); err == nil {
		t.Error("a stored rule with another kind is taken")
	}
}

func TestPatterns(t *testing.T) {
	for _, c := range []struct{ rule, yes, no string }{
		{"lab.test", "lab.test LAB.TEST. Lab.Test", "a.lab.test notlab.test lab.test.evil.test test xlab.test lab.tes"},
		{"suffix:lab.test", "lab.test a.lab.test b.a.lab.test A.LAB.TEST.", "notlab.test lab.test.evil.test test ab.test"},
		{"*.lab.test", "a.lab.test b.a.lab.test", "lab.test notlab.test a.lab.test.evil.test"},
		{"www.*.com", "www.a.com WWW.B.COM", "www.com www.a.b.com a.www.b.com www.a.org"},
		{"*.*.com", "a.b.com a.b.c.com", "b.com com"},
		{"*", "a a.b.c", ""},
		{"www.*", "www.a", "www www.a.b"},
		{"bücher.lab.test", "xn--bcher-kva.lab.test BÜCHER.lab.test bücher.lab.test", "bucher.lab.test"},
	} {
		r, err := parse(Allow, c.rule)
		if err != nil {
			t.Fatal(err)
		}
		for list, want := range map[string]bool{c.yes: true, c.no: false} {
			for _, text := range strings.Fields(list) {
				name, err := Host(text)
				if err != nil {
					t.Fatal(err)
				}
				if r.name.matches(name) != want {
					t.Errorf("%s matches %s: want %v", c.rule, text, want)
				}
			}
		}
	}
}

// TestCase056: order, label edges, ports, spellings.
func TestCase056(t *testing.T) {
	allow := compile(t, "allow suffix:lab.test tcp:443; deny any")
	names := map[string]bool{"lab.test": true, "a.lab.test": true, "A.LAB.TEST.": true, "LAB.TEST": true, "notlab.test": false,
		"lab.test.evil.test": false, "bücher.lab.test": true, "xn--bcher-kva.lab.test": true}
	for text, ok := range names {
		name, err := Host(text)
		if err != nil {
			t.Fatal(err)
		}
		if a := allow.Lookup(name); a.Allow != ok || a.Listed != ok {
			t.Errorf("lookup of %s: %+v", text, a)
		}
		for _, port := range []uint16{80, 443, 8443} {
			if v := allow.Request(name, netip.Addr{}, "tcp", port); v.Allow != (ok && port == 443) {
				t.Errorf("%s:%d: %+v", text, port, v)
			}
		}
	}
	before := compile(t, "deny a.lab.test; allow suffix:lab.test tcp:443")
	after := compile(t, "allow suffix:lab.test tcp:443; deny a.lab.test")
	if before.Request("a.lab.test", netip.Addr{}, "tcp", 443).Allow || before.Lookup("a.lab.test").Allow || !before.Request("lab.test", netip.Addr{}, "tcp", 443).Allow {
		t.Error("a deny before the allow")
	}
	if v := after.Request("a.lab.test", netip.Addr{}, "tcp", 443); !v.Allow || v.Rule != "3" {
		t.Errorf("a deny after the allow: %+v", v)
	}
	if v := after.Request("a.lab.test", netip.Addr{}, "tcp", 80); v.Allow || v.Rule != "4" {
		t.Errorf("the rest of it: %+v", v)
	}
}

func TestEffective(t *testing.T) {
	for _, c := range []struct {
		policy  string
		implied string // of the two rules in front
		open    bool
	}{
		{"", "", false},
		{"deny any", "", false},
		{"allow 198.51.100.0/24", "", false},
		{"allow 0.0.0.0/0; allow ::/0", "", false},
		{"allow 198.51.100.0/24; allow dns", "dns-rule", true},
		{"allow a.com", "dns", true},
		{"allow *.a.com; deny any", "dns", true},
		{"allow suffix:a.com udp:443", "dns", true},
		{"allow *", "dns", true},
		{"allow a.com; allow dns", "dns-rule", true},
		{"allow any", "", true},
		{"allow a.com; allow any", "", true},
		{"deny a.com; allow any", "", true},
		{"allow any udp; allow any tcp:53", "", true},
		{"allow any udp", "", true},
		{"allow any tcp:443", "", false},
		{"allow any tcp:443; allow a.com", "dns", true},
		{"deny any udp:53; allow any", "", true},
		{"deny any udp:53; allow any; allow a.com udp:443", "dns", true},
		{"deny any; allow a.com", "", false},
		{"deny any; allow dns", "", false},
		{"deny any tcp; allow a.com", "", false},
		{"deny any tcp; allow a.com udp:443", "dns", true},
		{"deny any tcp:80,443; allow a.com tcp:22,80", "dns", true},
		{"deny *; allow a.com", "", false},
		{"deny *; allow any", "", false},
		{"deny a.com; allow 198.51.100.7", "", false},
	} {
		p := compile(t, c.policy)
		got := p.Rules()
		n := len(rules(t, c.policy))
		implied := ""
		if len(got) == n+2 {
			implied = got[0].Implied
			if got[1].Implied != implied || Text(got[0].Rule) != "dns udp:53" || Text(got[1].Rule) != "dns tcp:53" || got[0].Action != Allow {
				t.Errorf("%s: in front stand %+v", c.policy, got[:2])
			}
		} else if len(got) != n {
			t.Fatalf("%s: %d rules", c.policy, len(got))
		}
		for i, r := range got {
			if r.ID != fmt.Sprint(i+1) {
				t.Errorf("%s: rule %d has the id %s", c.policy, i+1, r.ID)
			}
		}
		if implied != c.implied || p.DNS() != c.open {
			t.Errorf("%s: implied %q, open %v; want %q, %v", c.policy, implied, p.DNS(), c.implied, c.open)
		}
		if written := Written(got); len(written) != n {
			t.Errorf("%s: %d rules are written", c.policy, len(written))
		}
	}
}

func TestLookup(t *testing.T) {
	for _, c := range []struct{ policy, name, rule, feeds string }{
		{"allow a.com", "a.com", "3 listed", "[2]"},
		{"allow a.com", "b.com", "default", "[]"},
		{"allow a.com; deny any", "b.com", "4 denied", "[]"},
		{"allow 198.51.100.0/24; allow a.com", "a.com", "4 listed", "[3]"},
		{"allow 198.51.100.0/24; allow dns", "a.com", "4 unlisted", "[]"},
		{"deny a.com; allow dns", "a.com", "3 denied", "[]"},
		{"allow dns; deny a.com", "a.com", "3 unlisted", "[]"},
		{"allow dns; allow a.com", "a.com", "3 unlisted and listed", "[3]"},
		{"deny a.com; allow any", "a.com", "1 denied", "[]"},
		{"deny a.com; allow any", "b.com", "2 listed", "[]"},
		{"deny a.com tcp:22; allow suffix:com tcp:22,443", "a.com", "4 listed", "[2 3]"},
		{"deny a.com tcp:22; allow suffix:com tcp:22,443", "b.com", "4 listed", "[3]"},
		{"allow any tcp:443; allow a.com tcp:443,8443", "a.com", "3 listed", "[3]"},
		{"allow suffix:com tcp:443; allow a.com tcp:443", "a.com", "3 listed", "[2]"},
		{"allow any tcp:443", "a.com", "default", "[]"},
		{"deny any; allow a.com", "a.com", "1 denied", "[]"},
	} {
		a := compile(t, c.policy).Lookup(c.name)
		got := a.Rule
		switch {
		case a.Allow && a.Listed && strings.Contains(c.rule, "unlisted and"):
			got += " unlisted and listed"
		case a.Allow && a.Listed:
			got += " listed"
		case a.Allow:
			got += " unlisted"
		case a.Step >= 0:
			got += " denied"
		}
		if feeds := fmt.Sprint(a.Feeds); got != c.rule || feeds != c.feeds {
			t.Errorf("%s: lookup of %s: %s %s, want %s %s", c.policy, c.name, got, feeds, c.rule, c.feeds)
		}
	}
}

func TestPacket(t *testing.T) {
	for _, c := range []struct{ policy, packet, want string }{
		{"allow any", "198.51.100.7 tcp:22", "allow 1"},
		{"allow any", "198.51.100.7 icmp", "allow 1"},
		{"allow any", "10.0.0.1 tcp:22", "deny private"},
		{"allow 10.0.0.0/8", "10.0.0.1 tcp:22", "deny private"},
		{"allow 0.0.0.0/0", "2001:db8::1 tcp:22", "deny default"},
		{"allow 2001:db8::/32", "2001:db8::1 tcp:22", "allow 1"},
		{"allow 2001:db8::/32", "2001:db8::1 icmp", "allow 1"},
		{"allow ::/0", "::ffff:10.0.0.1 tcp:22", "deny private"},
		{"allow 198.51.100.7", "::ffff:198.51.100.7 tcp:22", "allow 1"},
		{"allow 198.51.100.7 tcp", "198.51.100.7 icmp", "deny default"},
		{"allow 198.51.100.7 tcp", "198.51.100.7 udp:9", "deny default"},
		{"allow 198.51.100.7 udp:9-11", "198.51.100.7 udp:10", "allow 1"},
		{"deny 198.51.100.7; allow 198.51.100.0/24", "198.51.100.7 tcp:1", "deny 1"},
		{"deny 198.51.100.7; allow 198.51.100.0/24", "198.51.100.8 tcp:1", "allow 2"},
		{"allow a.com", "198.51.100.7 tcp:443", "deny default"},
		// Port 53 is the resolver's, whatever the address.
		{"allow a.com", "198.51.100.7 udp:53", "allow 1"},
		{"allow a.com", "10.0.0.1 tcp:53", "allow 2"},
		{"allow 198.51.100.7", "198.51.100.7 udp:53", "deny default"},
		{"allow any", "198.51.100.7 udp:53", "allow 1"},
		{"deny any", "198.51.100.7 udp:53", "deny 1"},
		{"allow 198.51.100.7", "198.51.100.7 udp:853", "allow 1"},
		{"", "198.51.100.7 tcp:443", "deny default"},
	} {
		addr, port, _ := strings.Cut(c.packet, " ")
		q, err := ParseQuestion(addr, port)
		if err != nil {
			t.Fatal(err)
		}
		v := compile(t, c.policy).Packet(netip.MustParseAddr(addr), q.Protocol, q.Port, nil)
		got := "deny " + v.Rule
		if v.Allow {
			got = "allow " + v.Rule
		}
		if got != c.want {
			t.Errorf("%s: %s: %s, want %s", c.policy, c.packet, got, c.want)
		}
	}
	if v := Unrestricted().Packet(netip.MustParseAddr("198.51.100.7"), "udp", 53, nil); !v.Allow || v.Rule != shard.EgressRuleNone {
		t.Errorf("without a policy: %+v", v)
	}
	if v := Unrestricted().Packet(netip.MustParseAddr("10.0.0.1"), "udp", 53, nil); v.Allow || v.Rule != shard.EgressRulePrivate {
		t.Errorf("without a policy: %+v", v)
	}
	if v := Missing().Packet(netip.MustParseAddr("198.51.100.7"), "tcp", 443, nil); v.Allow || v.Rule != shard.EgressRuleMissing {
		t.Errorf("with a policy that is lost: %+v", v)
	}
	if a := Missing().Lookup("a.com"); a.Allow || a.Listed {
		t.Errorf("with a policy that is lost: %+v", a)
	}
	if a := Unrestricted().Lookup("a.com"); !a.Allow {
		t.Errorf("without a policy: %+v", a)
	}
}

func TestRequest(t *testing.T) {
	for _, c := range []struct{ policy, host, addr, want string }{
		{"allow a.com", "a.com", "", "allow 3"},
		{"allow a.com", "a.com", "10.0.0.1", "allow 3"}, // the proxy looks the name up itself
		{"allow a.com", "b.com", "198.51.100.7", "deny default"},
		{"allow a.com", "", "198.51.100.7", "deny default"},
		{"allow 198.51.100.0/24", "a.com", "198.51.100.7", "allow 1"},
		{"allow 198.51.100.0/24", "a.com", "", "deny default"},
		{"deny a.com; allow any", "a.com", "198.51.100.7", "deny 1"},
		{"deny a.com; allow any", "", "198.51.100.7", "allow 2"},
		{"allow any", "a.com", "10.0.0.1", "deny private"},
		{"allow any", "a.com", "", "allow 1"},
	} {
		var addr netip.Addr
		if c.addr != "" {
			addr = netip.MustParseAddr(c.addr)
		}
		v := compile(t, c.policy).Request(c.host, addr, "tcp", 443)
		got := "deny " + v.Rule
		if v.Allow {
			got = "allow " + v.Rule
		}
		if got != c.want {
			t.Errorf("%s: %q at %s: %s, want %s", c.policy, c.host, c.addr, got, c.want)
		}
	}
}

func TestExplain(t *testing.T) {
	for _, c := range []struct{ policy, dest, port, want string }{
		{"allow suffix:a.com", "www.A.com", "", "www.a.com tcp:443 is allowed: rule 3 (allow suffix:a.com) is the first that matches"},
		{"allow a.com", "b.com", "80", "b.com tcp:80 is denied: no rule of the policy matches; the name cannot be looked up"},
		{"deny any", "b.com", "", "b.com tcp:443 is denied: rule 1 (deny any) is the first that matches; the name cannot be looked up"},
		{"allow a.com", "a.com", "22", "a.com tcp:22 is denied: no rule of the policy matches; the name can be looked up, and a rule with the address it leads to might still decide"},
		{"allow a.com", "198.51.100.7", "", "198.51.100.7 tcp:443 is denied: no rule of the policy matches; rules with names open an address only once one of their names was looked up and led there"},
		{"deny 198.51.100.0/24; allow a.com", "a.com", "", "a.com tcp:443 is allowed: rule 4 (allow a.com) is the first that matches; unless it leads to an address that rule 3 (deny 198.51.100.0/24) is about"},
		{"allow any", "[::1]", "icmp", "::1 icmp is denied: the host drops this destination for every sandbox, and no rule can open it"},
		{"allow a.com", "198.51.100.7", "udp:53", "198.51.100.7 udp:53 is allowed: rule 1 (allow dns udp:53) is the first that matches; all traffic to port 53 goes to the sandbox's resolver"},
		{"allow any", "a.com", "", "a.com tcp:443 is allowed: rule 1 (allow any) is the first that matches; where the name leads to a private address it is dropped all the same"},
	} {
		q, err := ParseQuestion(c.dest, c.port)
		if err != nil {
			t.Fatal(err)
		}
		if got := compile(t, c.policy).Explain(q).Sentence; got != c.want {
			t.Errorf("%s: %s %s:\n got %s\nwant %s", c.policy, c.dest, c.port, got, c.want)
		}
	}
	q := Question{Host: "a.com", Protocol: "tcp", Port: 443}
	if got := Unrestricted().Explain(q).Sentence; got != "a.com tcp:443 is allowed: the sandbox has no policy; where the name leads to a private address it is dropped all the same" {
		t.Error(got)
	}
	for _, bad := range [][2]string{{"", ""}, {"a b", ""}, {"a.com", "x"}, {"a.com", "0"}, {"a.com", "sctp:1"}, {"a.com", "tcp:"}, {"1.2.3.4/8", ""}} {
		if _, err := ParseQuestion(bad[0], bad[1]); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("%q is taken: %v", bad, err)
		}
	}
}

func TestDropped(t *testing.T) {
	for addr, want := range map[string]bool{
		"10.0.0.1": true, "172.16.0.0": true, "172.32.0.0": false, "192.168.1.1": true, "169.254.169.254": true, "127.0.0.1": true,
		"100.64.0.1": true, "100.128.0.0": false, "0.0.0.0": true, "224.0.0.1": true, "255.255.255.255": true, "198.51.100.7": false,
		"::": true, "::1": true, "::10.0.0.1": true, "::198.51.100.7": true, "fe80::1": true, "fc00::1": true, "fdff::1": true, "ff02::1": true,
		"fec0::1": true, "2001:4860::8888": false, "2606:4700::1111": false,
		"::ffff:10.0.0.1": true, "::ffff:198.51.100.7": false, "::ffff:0:10.0.0.1": true, "::ffff:0:198.51.100.7": false,
		"64:ff9b::10.0.0.1": true, "64:ff9b::169.254.169.254": true, "64:ff9b::198.51.100.7": false, "64:ff9b:1::1": true,
		"100::1": true, "2002:a00:1::1": true, "2002:c0a8:101::1": true, "2002:c633:6407::1": false, "2001::1": true, "2001:0:ffff::1": true, "2001:1::1": false,
		"2606:4700::1%eth0": true,
	} {
		if got := shard.IsUnreachable(netip.MustParseAddr(addr)); got != want {
			t.Errorf("%s: %v", addr, got)
		}
	}
	if !shard.IsUnreachable(netip.Addr{}) {
		t.Error("no address")
	}
}

func TestLearn(t *testing.T) {
	packet := func(addr, protocol string, port int) shard.EgressDecision {
		return shard.EgressDecision{Source: shard.EgressHost, Verdict: shard.EgressDeny, Rule: shard.EgressRuleDefault, Address: addr, Protocol: protocol, Port: port}
	}
	old := packet("198.51.100.1", "", 25) // from a log of before protocols were told
	old.Reason = "tcp; no rule of the policy matches"
	lookup := shard.EgressDecision{Source: shard.EgressDNS, Verdict: shard.EgressAllow, Rule: "1", Host: "db.test", Address: "198.51.100.2", Port: 53}
	odd := shard.EgressDecision{Source: shard.EgressDNS, Verdict: shard.EgressDeny, Rule: shard.EgressRuleDefault, Host: "not a name", Port: 53}
	private := packet("10.0.0.1", "tcp", 22)
	private.Rule = shard.EgressRulePrivate
	rules, never := Learn([]shard.EgressDecision{old, odd, lookup, packet("198.51.100.2", "tcp", 5432), packet("198.51.100.2", "icmp", 0),
		packet("198.51.100.3", "udp", 123), packet("198.51.100.3", "tcp", 7), packet("198.51.100.4", "icmp", 0), private})
	var got []string
	for _, r := range rules {
		got = append(got, r.Rule)
	}
	if got, want := strings.Join(got, "; "), "db.test tcp:5432; 198.51.100.3 tcp:7; 198.51.100.3 udp:123; 198.51.100.4"; got != want {
		t.Errorf("%s, want %s", got, want)
	}
	if fmt.Sprint(never) != "[10.0.0.1]" {
		t.Errorf("never: %q", never)
	}
}

// Package policy is the language of egress rules and what it means: it reads rules as people write them, works out what
// the host enforces for them, says which rule decides about a packet, a lookup or a request, and explains that in a
// sentence. It is pure. It must not know how anything is enforced: sockets, nftables, DNS messages, HTTP, files.
//
// # The parts of an enforcement, and what each asks here
//
//	the packet filter   Compiled.Steps, one rule for each, in order; Compiled.Packet says what they must come to
//	the resolver        Compiled.Lookup: whether to answer, and which steps' address sets the answer feeds
//	the proxy           Compiled.Request, for each request on TCP 80 and 443
//	all three           shard.IsUnreachable, before any rule
//
// All port-53 traffic of a sandbox with a policy goes to the resolver, wherever it was sent and even where the policy
// opens no DNS: a lookup that is refused at once is better than one that is dropped and waits. Packet says whether the
// policy opens port 53 of UDP and of TCP.
package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// Bounds of a policy.
const (
	MaxRules = 256
	// MaxPorts is how many ports one rule may name; one that is named twice counts twice.
	MaxPorts = 1024
	// maxText bounds one rule's text, in bytes: 1024 ports with commas and a name of 253 bytes fit.
	maxText = 8 << 10
)

// The kinds of destination.
const (
	KindCIDR   = "cidr"
	KindDomain = "domain"
	KindSuffix = "domain-suffix"
	KindGroup  = "group"
)

// The actions of a rule.
const (
	Allow = "allow"
	Deny  = "deny"
)

const (
	groupAny     = "any"
	groupDNS     = "dns"
	suffixPrefix = "suffix:"
)

// ParseAll reads the rules of a policy, in order.
func ParseAll(texts []shard.PolicyRule) ([]shard.Rule, error) {
	if len(texts) > MaxRules {
		return nil, shard.Invalidf("the policy has %d rules: at most %d are allowed", len(texts), MaxRules)
	}
	rules := make([]shard.Rule, 0, len(texts))
	for i, t := range texts {
		r, err := Parse(t.Action, t.Rule)
		if err != nil {
			return nil, shard.Invalidf("rule %d: %v", i+1, err)
		}
		rules = append(rules, r)
	}
	return rules, nil
}

// Parse reads one rule: `DEST [tcp|udp[:PORTS]]`. What it returns is canonical: names in lower case and ASCII, prefixes
// without host bits, ports sorted. Its errors are public.
func Parse(action, text string) (shard.Rule, error) {
	r, err := parse(action, text)
	if err != nil {
		return shard.Rule{}, err
	}
	return r.Rule, nil
}

// Text writes a rule without its action as people do, such as suffix:example.com tcp:443. Parse reads it back.
func Text(r shard.Rule) string {
	text := r.Destination.Value
	if r.Destination.Kind == KindSuffix {
		text = suffixPrefix + text
	}
	if r.Protocol != "" {
		text += " " + r.Protocol
		if len(r.Ports) > 0 {
			text += ":" + strings.Join(r.Ports, ",")
		}
	}
	return text
}

// rule is a shard.Rule, understood.
type rule struct {
	shard.Rule
	flows  Flows
	prefix netip.Prefix // KindCIDR
	name   pattern      // KindDomain, KindSuffix
}

func parse(action, text string) (*rule, error) {
	if action != Allow && action != Deny {
		return nil, shard.Invalidf("action %s is not allow or deny", shard.Quote(action))
	}
	if len(text) > maxText {
		return nil, shard.Invalidf("the rule is longer than %d bytes", maxText)
	}
	// A blank or a tab parts words. A line end does not: what a log or a review shows as two rules must not be one.
	fields := strings.FieldsFunc(text, func(r rune) bool { return r == ' ' || r == '\t' })
	if len(fields) == 0 {
		return nil, shard.Invalidf("the rule is empty: write DEST [tcp|udp[:PORTS]]")
	}
	if len(fields) > 2 {
		return nil, shard.Invalidf("%s has too many words: write DEST [tcp|udp[:PORTS]], ports with commas and no spaces", shard.Quote(text))
	}
	r := &rule{Rule: shard.Rule{Action: action}}
	if err := r.parseDestination(fields[0]); err != nil {
		return nil, err
	}
	var ports []PortRange
	if len(fields) == 2 {
		protocol, list, given := strings.Cut(strings.ToLower(fields[1]), ":")
		if protocol != "tcp" && protocol != "udp" {
			return nil, shard.Invalidf("protocol %s is not tcp or udp, with ports after a colon", shard.Quote(fields[1]))
		}
		r.Protocol = protocol
		if given {
			var err error
			if ports, err = parsePorts(list); err != nil {
				return nil, err
			}
			for _, p := range ports {
				r.Ports = append(r.Ports, p.String())
			}
		}
	}
	return r, r.setFlows(ports)
}

func (r *rule) parseDestination(dest string) error {
	set := func(kind, value string) { r.Destination = shard.Destination{Kind: kind, Value: value} }
	switch lower := strings.ToLower(dest); {
	case lower == "private":
		return shard.Invalidf("private networks cannot be opened: the host drops them for every sandbox, before any rule")
	case lower == groupDNS && r.Action == Deny:
		return shard.Invalidf("dns cannot be denied: leave it out, and deny names instead")
	case lower == groupAny, lower == groupDNS:
		set(KindGroup, lower)
		return nil
	case strings.HasPrefix(lower, suffixPrefix):
		value, err := Host(dest[len(suffixPrefix):])
		if err != nil {
			return shard.Invalidf("%s: after suffix: stands a host name without *", shard.Quote(dest))
		}
		set(KindSuffix, value)
		r.name = pattern{extra: anyExtra, labels: strings.Split(value, ".")}
		return nil
	case strings.Contains(dest, "://"):
		return shard.Invalidf("%s is a URL: write its host alone", shard.Quote(dest))
	}
	if strings.Contains(dest, "/") {
		p, err := netip.ParsePrefix(dest)
		if err != nil || p.Addr().Is4In6() {
			return shard.Invalidf("%s is not a prefix such as 198.51.100.0/24 or 2001:db8::/32", shard.Quote(dest))
		}
		r.setPrefix(p.Masked())
		return nil
	}
	if a, err := netip.ParseAddr(dest); err == nil {
		if a.Is4In6() || a.Zone() != "" {
			return shard.Invalidf("%s: write an IPv4 address in its own form, and IPv6 without a zone", shard.Quote(dest))
		}
		r.setPrefix(netip.PrefixFrom(a, a.BitLen()))
		return nil
	}
	if strings.Contains(dest, ":") {
		return shard.Invalidf("%s is not an address or a name: ports stand after a space, such as example.com tcp:443", shard.Quote(dest))
	}
	name, err := parsePattern(dest)
	if err != nil {
		return err
	}
	r.name = name
	set(KindDomain, name.String())
	return nil
}

func (r *rule) setPrefix(p netip.Prefix) {
	r.prefix = p
	value := p.String()
	if p.IsSingleIP() {
		value = p.Addr().String()
	}
	r.Destination = shard.Destination{Kind: KindCIDR, Value: value}
}

func (r *rule) named() bool {
	return r.Destination.Kind == KindDomain || r.Destination.Kind == KindSuffix
}

func (r *rule) group(name string) bool {
	return r.Destination.Kind == KindGroup && r.Destination.Value == name
}

// web is what a name without ports opens.
var web = []PortRange{{80, 80}, {443, 443}}

// setFlows works out which traffic the rule is about. Where no ports are given a rule is about all of them, except that
// an allowed name opens the web only: what a name denies it denies whole.
func (r *rule) setFlows(ports []PortRange) error {
	if r.group(groupDNS) {
		if r.Protocol != "" {
			return shard.Invalidf("dns takes no protocol and no ports")
		}
		r.flows = resolverFlows
		return nil
	}
	if r.named() && r.Action == Allow && ports == nil {
		if r.Protocol == "udp" {
			return shard.Invalidf("%s udp: say which ports, such as udp:443", r.Destination.Value)
		}
		r.flows = Flows{TCP: web}
		return nil
	}
	if ports == nil {
		ports = allPorts
	}
	switch r.Protocol {
	case "":
		r.flows = allFlows
	case "tcp":
		r.flows = Flows{TCP: ports}
	default:
		r.flows = Flows{UDP: ports}
	}
	return nil
}

// parsePorts reads a list such as 80,443,8000-8010 and returns it sorted and merged.
func parsePorts(list string) ([]PortRange, error) {
	var out []PortRange
	n := 0
	for item := range strings.SplitSeq(list, ",") {
		from, to, isRange := strings.Cut(item, "-")
		if !isRange {
			to = from
		}
		a, errA := parsePort(from)
		b, errB := parsePort(to)
		if errA != nil || errB != nil || a > b {
			return nil, shard.Invalidf("%s is not a port or a range of ports, from 1 to 65535", shard.Quote(item))
		}
		out = append(out, PortRange{a, b})
		n += int(b) - int(a) + 1
	}
	if n > MaxPorts {
		return nil, shard.Invalidf("the rule names %d ports: at most %d are allowed; a rule without ports is about all of them", n, MaxPorts)
	}
	return merge(out), nil
}

func parsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 {
		return 0, fmt.Errorf("%q is not a port", s)
	}
	return uint16(n), nil
}

// again reads a rule that was stored. Whatever is not canonical was not written by Parse.
func again(r shard.Rule) (*rule, error) {
	got, err := parse(r.Action, Text(r))
	if err != nil {
		return nil, err
	}
	if got.Destination != r.Destination || got.Protocol != r.Protocol || !slices.Equal(got.Ports, r.Ports) {
		return nil, shard.Invalidf("rule %s is not in canonical form", shard.Quote(Text(r)))
	}
	return got, nil
}

package policy

import (
	"cmp"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// Learn returns the rules, as written, of the smallest policy that allows all that a sandbox tried as its decisions tell, and
// what no rule can open. Only exact names and addresses are in it: whether a suffix is meant, a person must say.
func Learn(decisions []shard.EgressDecision) (rules []shard.PolicyRule, never []string) {
	names := map[string]map[string]map[int]bool{} // name → protocol → ports; without any, the web
	addrs := map[string]map[string]map[int]bool{}
	nameOf := map[string]string{} // the name that led to an address last
	dropped := map[string]bool{}
	for _, d := range decisions {
		host, err := Host(d.Host)
		if err != nil {
			host = ""
		}
		addr, err := netip.ParseAddr(d.Address)
		switch {
		case d.Rule == shard.EgressRulePrivate || d.Rule == shard.EgressRuleLocal || d.Rule == shard.EgressRuleIPv6 || err == nil && shard.IsUnreachable(addr):
			dropped[cmp.Or(d.Host, d.Address)] = true
		case d.Source == shard.EgressDNS && host != "":
			if names[host] == nil {
				names[host] = map[string]map[int]bool{}
			}
			if err == nil {
				nameOf[addr.String()] = host
			}
			if d.Verdict == shard.EgressAllow {
				keepPorts(names[host], d.RuleText)
			}
		case d.Source == shard.EgressProxy && host != "":
			if names[host] == nil {
				names[host] = map[string]map[int]bool{}
			}
			add(names[host], "tcp", d.Port)
		case err == nil:
			protocol := d.Protocol
			if d.Source == shard.EgressProxy {
				protocol = "tcp"
			}
			if protocol == "" { // a log of before it was told: no rule is better than one for all ports
				continue
			}
			to := addrs
			key := addr.String()
			if name, ok := nameOf[key]; ok {
				to, key = names, name
			}
			if to[key] == nil {
				to[key] = map[string]map[int]bool{}
			}
			if protocol == "tcp" || protocol == "udp" {
				add(to[key], protocol, d.Port)
			} else if !isName(key) {
				add(to[key], "", 0)
			}
		}
	}
	for _, of := range []map[string]map[string]map[int]bool{names, addrs} {
		for _, dest := range slices.SortedFunc(maps.Keys(of), byDomain) {
			rules = append(rules, rulesFor(dest, of[dest])...)
		}
	}
	return rules, slices.Sorted(maps.Keys(dropped))
}

func isName(s string) bool { _, err := netip.ParseAddr(s); return err != nil }

func add(to map[string]map[int]bool, protocol string, port int) {
	if to[protocol] == nil {
		to[protocol] = map[int]bool{}
	}
	to[protocol][port] = true
}

// keepPorts adds the ports of the rule that let a name be looked up: what was allowed leaves no other trace.
func keepPorts(to map[string]map[int]bool, rule string) {
	action, text, _ := strings.Cut(rule, " ")
	r, err := parse(action, text)
	if err != nil || !r.named() {
		return
	}
	for protocol, ports := range map[string][]PortRange{"tcp": r.flows.TCP, "udp": r.flows.UDP} {
		if slices.Equal(ports, allPorts) {
			continue
		}
		for _, p := range ports {
			for port := int(p.From); port <= int(p.To); port++ {
				add(to, protocol, port)
			}
		}
	}
}

func rulesFor(dest string, flows map[string]map[int]bool) []shard.PolicyRule {
	var out []shard.PolicyRule
	rule := func(text string) { out = append(out, shard.PolicyRule{Action: Allow, Rule: text}) }
	if flows[""] != nil || len(flows) == 0 { // a bare address, or the web
		rule(dest)
		return out
	}
	for _, protocol := range []string{"tcp", "udp"} {
		ports := slices.Sorted(maps.Keys(flows[protocol]))
		if isName(dest) && protocol == "tcp" && slices.Equal(ports, []int{80, 443}) {
			rule(dest)
			continue
		}
		var ranges []PortRange
		for _, p := range ports {
			ranges = append(ranges, PortRange{uint16(p), uint16(p)})
		}
		var list []string
		for _, r := range merge(ranges) {
			list = append(list, r.String())
		}
		if len(list) > 0 {
			rule(dest + " " + protocol + ":" + strings.Join(list, ","))
		}
	}
	return out
}

// byDomain sorts names by their domains, so that those of one stand together, and addresses by number.
func byDomain(a, b string) int {
	x, errX := netip.ParseAddr(a)
	y, errY := netip.ParseAddr(b)
	if errX == nil && errY == nil {
		return x.Compare(y)
	}
	la, lb := strings.Split(a, "."), strings.Split(b, ".")
	slices.Reverse(la)
	slices.Reverse(lb)
	return cmp.Or(slices.Compare(la, lb), cmp.Compare(strconv.Quote(a), strconv.Quote(b)))
}

package policy

import (
	"slices"
	"strconv"
)

// PortRange is the ports From to To, both in it.
type PortRange struct{ From, To uint16 }

func (p PortRange) String() string {
	if p.From == p.To {
		return strconv.Itoa(int(p.From))
	}
	return strconv.Itoa(int(p.From)) + "-" + strconv.Itoa(int(p.To))
}

// Flows is a set of kinds of traffic: ports of TCP and UDP, sorted and apart, and all other protocols at once (ping
// among them).
type Flows struct {
	TCP, UDP []PortRange
	Other    bool
}

var (
	allPorts      = []PortRange{{0, 65535}}
	allFlows      = Flows{TCP: allPorts, UDP: allPorts, Other: true}
	resolverFlows = Flows{TCP: []PortRange{{53, 53}}, UDP: []PortRange{{53, 53}}}
)

// Has says whether traffic of the protocol ("tcp", "udp"; anything else is Other) to the port is in the set.
func (f Flows) Has(protocol string, port uint16) bool {
	ports := f.UDP
	switch protocol {
	case "tcp":
		ports = f.TCP
	case "udp":
	default:
		return f.Other
	}
	return slices.ContainsFunc(ports, func(p PortRange) bool { return p.From <= port && port <= p.To })
}

// All says whether every kind of traffic is in the set: it needs no match on protocol or port.
func (f Flows) All() bool {
	return f.Other && slices.Equal(f.TCP, allPorts) && slices.Equal(f.UDP, allPorts)
}

func (f Flows) empty() bool { return len(f.TCP) == 0 && len(f.UDP) == 0 && !f.Other }

func (f Flows) plus(g Flows) Flows {
	return Flows{TCP: merge(slices.Concat(f.TCP, g.TCP)), UDP: merge(slices.Concat(f.UDP, g.UDP)), Other: f.Other || g.Other}
}

func (f Flows) minus(g Flows) Flows {
	return Flows{TCP: subtract(f.TCP, g.TCP), UDP: subtract(f.UDP, g.UDP), Other: f.Other && !g.Other}
}

// merge sorts ranges and joins those that touch.
func merge(ranges []PortRange) []PortRange {
	slices.SortFunc(ranges, func(a, b PortRange) int { return int(a.From) - int(b.From) })
	var out []PortRange
	for _, r := range ranges {
		if last := len(out) - 1; last >= 0 && int(r.From) <= int(out[last].To)+1 {
			out[last].To = max(out[last].To, r.To)
			continue
		}
		out = append(out, r)
	}
	return out
}

// subtract is what of from is not in take; both sorted and apart.
func subtract(from, take []PortRange) []PortRange {
	var out []PortRange
	for _, r := range from {
		at := int(r.From)
		for len(take) > 0 && int(take[0].To) < at { // and before all that comes in from
			take = take[1:]
		}
		for _, t := range take {
			if t.From > r.To {
				break
			}
			if int(t.From) > at {
				out = append(out, PortRange{uint16(at), t.From - 1})
			}
			at = int(t.To) + 1
		}
		if at <= int(r.To) {
			out = append(out, PortRange{uint16(at), r.To})
		}
	}
	return out
}

package policy

import (
	"net/netip"

	"github.com/useshards/shard"
)

// Verdict is what the policy says about one packet, lookup or request.
type Verdict struct {
	Allow bool
	// Rule is the id of the rule that decides, or one of the Rule constants.
	Rule string
	// Text is that rule with its action; empty where no rule decides.
	Text string
	// Reason says why, where no rule decides.
	Reason string
	// Step is the index of the deciding step; -1 where none decides.
	Step int
}

func (c *Compiled) decided(i int) Verdict {
	s := &c.Steps[i]
	return Verdict{Allow: s.Allow, Rule: s.ID, Text: s.Text, Step: i}
}

func (c *Compiled) undecided() Verdict {
	v := c.fallback
	v.Step = -1
	return v
}

func dropped() Verdict {
	return Verdict{Rule: shard.EgressRulePrivate, Reason: "the host drops this destination for every sandbox, and no rule can open it", Step: -1}
}

// Packet says what becomes of a packet. protocol is tcp, udp or anything else; opened says whether an address is in the
// set of a TargetNames step, nil for none.
func (c *Compiled) Packet(addr netip.Addr, protocol string, port uint16, opened func(step int, addr netip.Addr) bool) Verdict {
	addr = addr.Unmap()
	toResolver := len(c.Steps) > 0 && port == 53 && (protocol == "tcp" || protocol == "udp")
	if !toResolver && shard.IsUnreachable(addr) {
		return dropped()
	}
	for i := range c.Steps {
		s := &c.Steps[i]
		if !s.Flows.Has(protocol, port) {
			continue
		}
		var hit bool
		switch s.Target {
		case TargetAll:
			hit = true
		case TargetResolver:
			hit = toResolver
		case TargetPrefix:
			hit = !toResolver && s.Prefix.Contains(addr)
		case TargetNames:
			hit = !toResolver && opened != nil && opened(i, addr)
		}
		if hit {
			return c.decided(i)
		}
	}
	return c.undecided()
}

// Answer is what the resolver does with a lookup.
type Answer struct {
	Verdict
	// Listed says that a rule allows traffic to the name. Where only `allow dns` lets it be looked up, it is false: the
	// answer opens nothing, and what carries data out (odd record types, long random labels) is to be refused.
	Listed bool
	// Feeds are the indices of the steps whose sets get the addresses of the answer, in order: those with names that
	// decide about some traffic to this name, denying ones too.
	Feeds []int
}

// Lookup says whether a name, as Host returns it, may be looked up: whether a rule allows any traffic to it at all. The
// deciding rule is the first that allows some, else the one that denies the rest.
func (c *Compiled) Lookup(name string) Answer {
	if len(c.Steps) == 0 {
		v := c.undecided()
		return Answer{Verdict: v, Listed: v.Allow}
	}
	a := Answer{Verdict: c.undecided()}
	left := allFlows // what no rule has decided yet
	for i := range c.Steps {
		s := &c.Steps[i]
		switch s.Target {
		case TargetResolver:
			if c.rules[i].Implied == "" && !a.Allow {
				a.Verdict = c.decided(i)
			}
			continue
		case TargetPrefix:
			continue // says nothing about names
		case TargetNames:
			if !s.names.matches(name) {
				continue
			}
		}
		after := left.minus(s.Flows)
		decides := !left.minus(after).empty()
		if !decides {
			continue
		}
		left = after
		if s.Target == TargetNames {
			a.Feeds = append(a.Feeds, i)
		}
		switch {
		case s.Allow && !a.Listed:
			a.Listed = true
			if !a.Allow { // `allow dns` may stand before
				a.Verdict = c.decided(i)
			}
		case !s.Allow && !a.Allow && left.empty():
			a.Verdict = c.decided(i)
		}
		if left.empty() {
			break
		}
	}
	if !c.dns {
		if a.Allow {
			a.Verdict = Verdict{Rule: shard.EgressRuleDefault, Reason: "the policy opens no DNS, so no name can be looked up", Step: -1}
		}
		a.Listed = false
	}
	if !a.Listed {
		a.Feeds = nil
	}
	return a
}

// Request says what becomes of a connection or request whose host name is known: host as Host returns it, or "" for
// none; addr is where it goes, or the zero Addr when that is not known yet. Where a step with names decides, addr is what
// the sandbox claims: whoever connects must look the host up itself and ask again with the address it got, since an
// earlier rule may deny that address, and refuse one that shard.IsUnreachable names. Any other step speaks of addr, and of no other.
func (c *Compiled) Request(host string, addr netip.Addr, protocol string, port uint16) Verdict {
	addr = addr.Unmap()
	v := c.undecided()
	for i := range c.Steps {
		s := &c.Steps[i]
		if !s.Flows.Has(protocol, port) {
			continue
		}
		if s.Target == TargetAll || s.Target == TargetPrefix && addr.IsValid() && s.Prefix.Contains(addr) ||
			s.Target == TargetNames && host != "" && s.names.matches(host) {
			v = c.decided(i)
			break
		}
	}
	byName := v.Step >= 0 && c.Steps[v.Step].Target == TargetNames
	if !byName && addr.IsValid() && shard.IsUnreachable(addr) {
		return dropped()
	}
	return v
}

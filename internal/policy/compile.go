package policy

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"

	"github.com/useshards/shard"
)

// Why a rule that nobody wrote is there (shard.EffectiveRule).
const (
	// ImpliedDNS: rules with names need lookups.
	ImpliedDNS = "dns"
	// ImpliedDNSRule: the policy says `allow dns`.
	ImpliedDNSRule = "dns-rule"
)

// Target says how a step recognises the destinations it is about.
type Target int

const (
	// TargetAll is every address.
	TargetAll Target = iota
	// TargetPrefix is the addresses of Step.Prefix.
	TargetPrefix
	// TargetNames is the addresses that lookups have put into the step's set (Compiled.Lookup), while they live.
	TargetNames
	// TargetResolver is the sandbox's resolver, which all port-53 traffic goes to.
	TargetResolver
)

// Step is one rule as the host enforces it.
type Step struct {
	// ID and Text name the rule in decisions; Text is with the action: "allow suffix:example.com tcp:443".
	ID, Text string
	Allow    bool
	Target   Target
	Prefix   netip.Prefix // TargetPrefix
	Flows    Flows

	names pattern // TargetNames
}

// Compiled is a policy as the host enforces it for a sandbox. It is immutable.
//
// A packet to port 53 of TCP or UDP is one to the resolver: only steps with TargetResolver and TargetAll are about it.
// Every other packet is dropped when shard.IsUnreachable says so; then the first step decides whose Flows has its protocol and port
// and whose Target its address. Where none does, the packet is dropped.
//
// The sets of TargetNames steps are kept by the resolver, per sandbox. An address that an answer put there for a denied
// name closes the denied ports for every name that shares the address.
type Compiled struct {
	Steps []Step
	rules []shard.EffectiveRule
	// dns says whether any lookup can succeed.
	dns bool
	// proxied: web traffic must be judged by its own host name, whatever the rules say.
	proxied bool
	// fallback is what decides where no step does.
	fallback Verdict
}

// Compile works out what the rules of a stored policy mean.
func Compile(rules []shard.Rule) (*Compiled, error) {
	if len(rules) > MaxRules {
		return nil, shard.Invalidf("the policy has %d rules: at most %d are allowed", len(rules), MaxRules)
	}
	parsed := make([]*rule, len(rules))
	for i, r := range rules {
		p, err := again(r)
		if err != nil {
			return nil, fmt.Errorf("rule %d: %w", i+1, err)
		}
		parsed[i] = p
	}
	c := &Compiled{fallback: Verdict{Rule: shard.EgressRuleDefault, Reason: "no rule of the policy matches"}}
	var implied string
	implied, c.dns = lookups(parsed)
	if implied != "" {
		for _, protocol := range []string{"udp", "tcp"} {
			r, err := parse(Allow, groupDNS)
			if err != nil {
				return nil, err
			}
			r.Protocol, r.Ports = protocol, []string{"53"}
			r.flows = Flows{UDP: resolverFlows.UDP}
			if protocol == "tcp" {
				r.flows = Flows{TCP: resolverFlows.TCP}
			}
			c.add(r, implied)
		}
	}
	for _, r := range parsed {
		c.add(r, "")
	}
	return c, nil
}

func (c *Compiled) add(r *rule, implied string) {
	id := strconv.Itoa(len(c.rules) + 1)
	c.rules = append(c.rules, shard.EffectiveRule{ID: id, Implied: implied, Rule: r.Rule})
	s := Step{ID: id, Text: r.Action + " " + Text(r.Rule), Allow: r.Action == Allow, Flows: r.flows, names: r.name, Prefix: r.prefix}
	switch {
	case r.named():
		s.Target = TargetNames
	case r.group(groupDNS):
		s.Target = TargetResolver
	case r.Destination.Kind == KindCIDR:
		s.Target = TargetPrefix
	}
	c.Steps = append(c.Steps, s)
}

// lookups says why the resolver must be opened in front of all rules ("" when it need not be), and whether any lookup can
// succeed: some name can be reached, or `allow dns` be come to, and the resolver too.
func lookups(rules []*rule) (implied string, open bool) {
	var shut Flows // what no name can have any more
	var named, dnsRule, anyone bool
	reach := map[string]bool{} // by protocol: what the first rule about port 53 says
	for _, r := range rules {
		all := r.group(groupAny) || r.named() && r.name.everything()
		if r.group(groupAny) {
			for _, protocol := range []string{"udp", "tcp"} {
				if _, decided := reach[protocol]; !decided && r.flows.Has(protocol, 53) {
					reach[protocol] = r.Action == Allow
				}
			}
		}
		switch usable := !r.flows.minus(shut).empty(); {
		case r.group(groupDNS):
			dnsRule = dnsRule || !shut.All()
		case r.Action == Allow && usable && r.named():
			named = true
		case r.Action == Allow && usable && r.group(groupAny):
			anyone = true
		case r.Action == Deny && all:
			shut = shut.plus(r.flows)
		}
	}
	switch {
	case reach["udp"] && reach["tcp"]:
	case dnsRule:
		implied = ImpliedDNSRule
	case named:
		implied = ImpliedDNS
	}
	return implied, (implied != "" || reach["udp"] || reach["tcp"]) && (named || dnsRule || anyone)
}

// Unrestricted is a sandbox without a policy: everything but what no sandbox reaches.
func Unrestricted() *Compiled {
	return &Compiled{dns: true, fallback: Verdict{Allow: true, Rule: shard.EgressRuleNone, Reason: "the sandbox has no policy"}}
}

// Missing is a sandbox whose policy the store has lost: nothing.
func Missing() *Compiled {
	return &Compiled{fallback: Verdict{Rule: shard.EgressRuleMissing, Reason: "the sandbox's policy is missing from the store, so nothing can be reached"}}
}

// Proxied is c for a sandbox whose web traffic must be seen whatever the rules are, because it has secrets.
func (c *Compiled) Proxied() *Compiled {
	out := *c
	out.proxied = true
	return &out
}

// Open says that there is no policy.
func (c *Compiled) Open() bool { return c.fallback.Allow }

// Rules are the rules as enforced, with ids and with those that nobody wrote.
func (c *Compiled) Rules() []shard.EffectiveRule {
	if c.rules == nil {
		return []shard.EffectiveRule{}
	}
	return slices.Clone(c.rules)
}

// Written are the rules of an inspection without those that nobody wrote.
func Written(rules []shard.EffectiveRule) []shard.Rule {
	var out []shard.Rule
	for _, r := range rules {
		if r.Implied == "" {
			out = append(out, r.Rule)
		}
	}
	return out
}

// DNS says whether any lookup can succeed.
func (c *Compiled) DNS() bool { return c.dns }

// Named says whether the policy has rules with names, for which web traffic must be judged by its own host name.
func (c *Compiled) Named() bool {
	return slices.ContainsFunc(c.Steps, func(s Step) bool { return s.Target == TargetNames })
}

// Web says whether web traffic goes through the proxy.
func (c *Compiled) Web() bool { return c.proxied || c.Named() }

package policy

import (
	"fmt"
	"net/netip"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// Question is what a person asks about a policy: a destination and the traffic to it.
type Question struct {
	// Host is a name, Addr an address: one of them.
	Host string
	Addr netip.Addr
	// Protocol is tcp, udp or icmp; Port is 0 with icmp.
	Protocol string
	Port     uint16
}

// ParseQuestion reads a destination and a port: `N`, `tcp:N`, `udp:N` or `icmp`; "" is tcp:443.
func ParseQuestion(dest, port string) (Question, error) {
	q := Question{Protocol: "tcp", Port: 443}
	bare := strings.TrimSuffix(strings.TrimPrefix(dest, "["), "]")
	if a, err := netip.ParseAddr(bare); err == nil {
		q.Addr = a.Unmap()
	} else if q.Host, err = Host(dest); err != nil {
		return q, shard.Invalidf("%s is not an address or a host name", shard.Quote(dest))
	}
	if port == "" {
		return q, nil
	}
	if strings.EqualFold(port, "icmp") {
		q.Protocol, q.Port = "icmp", 0
		return q, nil
	}
	protocol, number, given := strings.Cut(strings.ToLower(port), ":")
	if !given {
		protocol, number = "tcp", port
	}
	n, err := parsePort(number)
	if err != nil || protocol != "tcp" && protocol != "udp" {
		return q, shard.Invalidf("%s is not a port: write N, tcp:N, udp:N or icmp", shard.Quote(port))
	}
	q.Protocol, q.Port = protocol, n
	return q, nil
}

func (q Question) String() string {
	dest := q.Host
	if dest == "" {
		dest = q.Addr.String()
	}
	if q.Protocol == "icmp" {
		return dest + " icmp"
	}
	return dest + " " + q.Protocol + ":" + strconv.Itoa(int(q.Port))
}

// Explanation answers a Question.
type Explanation struct {
	// Verdict is of the traffic; for a name that cannot be looked up it is the lookup's.
	Verdict
	// Sentence says all of it to a person.
	Sentence string
}

// Explain says which rule decides and why.
func (c *Compiled) Explain(q Question) Explanation {
	if q.Host == "" {
		v := c.Packet(q.Addr, q.Protocol, q.Port, nil)
		return Explanation{v, c.sentence(q, v) + c.hint(q, v)}
	}
	if len(c.Steps) > 0 && q.Port == 53 { // it is the resolver that answers
		v := c.Packet(netip.IPv4Unspecified(), q.Protocol, q.Port, nil)
		return Explanation{v, c.sentence(q, v) + "; all traffic to port 53 goes to the sandbox's resolver"}
	}
	if a := c.Lookup(q.Host); !a.Allow {
		return Explanation{a.Verdict, c.sentence(q, a.Verdict) + "; the name cannot be looked up"}
	}
	v := c.Request(q.Host, netip.Addr{}, q.Protocol, q.Port)
	text := c.sentence(q, v)
	switch {
	case v.Allow && v.Step >= 0 && c.Steps[v.Step].Target == TargetNames:
		for _, s := range c.Steps[:v.Step] {
			if s.Target == TargetPrefix && !s.Allow && s.Flows.Has(q.Protocol, q.Port) {
				text += fmt.Sprintf("; unless it leads to an address that rule %s (%s) is about", s.ID, s.Text)
			}
		}
	case v.Allow && v.Step >= 0 && c.Steps[v.Step].Target == TargetAll, v.Rule == shard.EgressRuleNone:
		text += "; where the name leads to a private address it is dropped all the same"
	case v.Step < 0:
		text += "; the name can be looked up, and a rule with the address it leads to might still decide"
	}
	return Explanation{v, text}
}

func (c *Compiled) sentence(q Question, v Verdict) string {
	word := "denied"
	if v.Allow {
		word = "allowed"
	}
	if v.Text == "" {
		return fmt.Sprintf("%s is %s: %s", q, word, v.Reason)
	}
	return fmt.Sprintf("%s is %s: rule %s (%s) is the first that matches", q, word, v.Rule, v.Text)
}

// hint says what a person who asks about an address may not know.
func (c *Compiled) hint(q Question, v Verdict) string {
	switch {
	case v.Rule == shard.EgressRulePrivate, len(c.Steps) == 0 && !q.Addr.Is6():
		return ""
	case q.Port == 53 && q.Protocol != "icmp":
		return "; all traffic to port 53 goes to the sandbox's resolver"
	case v.Allow && q.Addr.Is6():
		return "; while the host has no IPv6 it is refused all the same"
	case !v.Allow && v.Step < 0 && c.Named():
		return "; rules with names open an address only once one of their names was looked up and led there"
	}
	return ""
}

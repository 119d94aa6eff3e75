package shard

import "time"

// Where an EgressDecision was made.
const (
	EgressProxy = "proxy" // a request or a TLS connection on ports 80 and 443
	EgressDNS   = "dns"   // a lookup
	EgressHost  = "host"  // a packet
)

// What was decided.
const (
	EgressAllow = "allow"
	EgressDeny  = "deny"
)

// Words that stand for the id of a rule where no rule decided.
const (
	EgressRulePrivate     = "private"     // the host drops the destination for every sandbox
	EgressRuleLocal       = "local"       // the destination is this host
	EgressRuleIPv6        = "ipv6"        // the host has no way out over IPv6
	EgressRuleDefault     = "default"     // no rule of the policy matches
	EgressRuleNone        = "none"        // there is no policy
	EgressRuleMissing     = "missing"     // the store lost the policy
	EgressRuleResolve     = "resolve"     // the name could not be looked up
	EgressRuleLimit       = "limit"       // a bound of the resolver, the proxy or the log was reached
	EgressRuleCertificate = "certificate" // the host showed none that this machine trusts
)

// EgressCutHeader counts, in answers of the egress log, the decisions that were left out.
const EgressCutHeader = "Shard-Egress-Cut"

// EgressDecision is one line of a sandbox's egress log: what the host let through or refused, and why. It never holds
// headers, bodies or values.
type EgressDecision struct {
	Time    time.Time `json:"time"`
	Source  string    `json:"source"`
	Verdict string    `json:"verdict"`
	// Rule is the id of the rule that decided, or a word where none did: private, local, ipv6, default, none, missing,
	// resolve, limit, certificate.
	Rule    string `json:"rule"`
	Host    string `json:"host,omitempty"`
	Port    int    `json:"port,omitempty"`
	Address string `json:"address,omitempty"`
	// Protocol is that of a packet: tcp, udp, icmp, icmpv6, or its number. Lookups and requests have none.
	Protocol string `json:"protocol,omitempty"`
	// RuleText is the rule as written, with its action.
	RuleText string `json:"rule_text,omitempty"`
	Reason   string `json:"reason,omitempty"`
}

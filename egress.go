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

// EgressDecision is one line of a sandbox's egress log: what the host let through or refused, and why. It never holds
// headers, bodies or values.
type EgressDecision struct {
	Time    time.Time `json:"time"`
	Source  string    `json:"source"`
	Verdict string    `json:"verdict"`
	// Rule is the id of the rule that decided, or a word where none did: private, default, none, missing, local, ipv6,
	// resolve, limit, certificate.
	Rule    string `json:"rule"`
	Host    string `json:"host,omitempty"`
	Port    int    `json:"port,omitempty"`
	Address string `json:"address,omitempty"`
	// RuleText is the rule as written, with its action.
	RuleText string `json:"rule_text,omitempty"`
	Reason   string `json:"reason,omitempty"`
}

package netns

import (
	"net/netip"
	"time"
)

// ResolverPort is where, on the gateway's address, all that a restricted sandbox sends to port 53 of TCP and UDP arrives,
// wherever it was sent.
const ResolverPort = 30053

// The ports on the gateway's address at which all arrives that a proxied sandbox sends to TCP 80 and 443, wherever it was
// sent: what its rules say about these ports is then the proxy's to see to.
const (
	ProxyPlainPort = 30080
	ProxyTLSPort   = 30443
)

// MaxFed is how many addresses a rule's set holds.
const MaxFed = 4096

// Restriction is what Restrict keeps a sandbox to.
type Restriction struct {
	ID    string // of the sandbox
	Rules Rules
	// Fed is what is in the rules' sets from the beginning, by the rules' indices: each address until the time given.
	Fed map[int]map[netip.Addr]time.Time
}

// Rules are what a restricted sandbox may begin, after what no sandbox may. The first that matches decides; where none
// does, the packet is refused.
type Rules struct {
	Rules []Rule
	// Default names what decides where no rule does, in Drops.
	Default string
	// Proxied leads what is sent to TCP 80 and 443 to the proxy's ports.
	Proxied bool
	// OpenDNS leaves port 53 to the rules, instead of leading it to ResolverPort.
	OpenDNS bool
}

// Rule is one of Rules. The zero Rule matches nothing.
type Rule struct {
	// Label names the rule in Drops; at most 64 bytes.
	Label string
	Allow bool
	// Fed says that the rule is about the addresses which Feed has put into its set, while they live. Otherwise it is about
	// those of Prefix, or about every one if that is zero.
	Fed    bool
	Prefix netip.Prefix
	// TCP and UDP are the ports, sorted and apart, Other every other protocol.
	TCP, UDP []Ports
	Other    bool
}

// Ports is the ports From to To, both in it.
type Ports struct{ From, To uint16 }

// Drop is what a restricted sandbox began and may not.
type Drop struct {
	// Source is the sandbox's IPv4 address, whatever the packet's family.
	Source netip.Addr
	Label  string
	Dest   netip.Addr
	// Protocol is that of IP; Port is 0 where it has none.
	Protocol uint8
	Port     uint16
	// More is how many others of the same sandbox and label were refused unseen in the second before: Drops are limited to
	// 2 a second after a burst of 10. With it only Source and Label are set.
	More uint64
}

// Package netns gives every sandbox its own network namespace: one veth pair routed through this host, one address of IPv4
// and one of IPv6 leased for the sandbox's life, address translation to the outside, and a wall of nftables around it that
// lets nothing private, nothing of this host and no other sandbox be reached. It closes first and opens last: an
// interface of ours that has no set elements is dropped in every direction.
//
// It must not know images, providers, policies or names: who may dial what is decided elsewhere and put into the
// table as elements. It runs no programs; all is netlink.
package netns

import (
	"log/slog"
	"net/netip"
	"regexp"

	"github.com/useshards/shard"
)

// Config says where a Net keeps its things.
type Config struct {
	// Dir is a private directory (made 0700) for the namespaces' bind mounts, one per attached sandbox named by its id,
	// and the file of leases. It names the Net among the daemons of this host.
	Dir string
	// Tag is 1 to 6 of a-z and 0-9, unique on this host: table shard_TAG, interfaces shTAG-HHHH.
	Tag string
	// Pool is how many namespaces to keep ready; 0 means 4, negative none.
	Pool int
	// Log takes what fails in the background; nil discards.
	Log *slog.Logger
}

// Attachment is the network of one attached sandbox.
type Attachment struct {
	// Netns is the path of the network namespace: lo up, eth0 configured.
	Netns string
	// Addr is the sandbox's address, Gateway the host's end of the link; both in one /30.
	Addr, Gateway netip.Addr
	// Addr6 and Gateway6 are those of IPv6, in one /126; zero where this kernel has no IPv6.
	Addr6, Gateway6 netip.Addr
	// Interface is the host's end.
	Interface string
}

var tagPattern = regexp.MustCompile(`^[a-z0-9]{1,6}$`)

func (c *Config) check() error {
	if !tagPattern.MatchString(c.Tag) {
		return shard.Invalidf("network tag %s is not valid: use 1 to 6 of a-z and 0-9", shard.Quote(c.Tag))
	}
	if c.Dir == "" {
		return shard.Invalidf("the network's directory is empty")
	}
	if c.Pool == 0 {
		c.Pool = 4
	}
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

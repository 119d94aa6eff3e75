package netns

import (
	"net/netip"
	"slices"

	"github.com/useshards/shard"
)

// Dropped says whether addr is one that no sandbox ever reaches.
func Dropped(addr netip.Addr) bool { return shard.IsUnreachable(addr) }

// private are the destinations of one family that no rule can open, ascending and apart.
func private(v4 bool) []netip.Prefix {
	return slices.DeleteFunc(shard.Unreachable(), func(p netip.Prefix) bool { return p.Addr().Is4() != v4 })
}

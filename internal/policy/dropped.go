package policy

import (
	"net/netip"

	"github.com/useshards/shard"
)

// DroppedPrefixes are the destinations that no sandbox reaches, whatever its rules, both families.
func DroppedPrefixes() []netip.Prefix { return shard.Unreachable() }

// Dropped says whether addr is one of them.
func Dropped(addr netip.Addr) bool { return shard.IsUnreachable(addr) }

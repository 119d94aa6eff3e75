package netns

import (
	"hash/fnv"
	"net/netip"
)

// ranges is where blocks come from, best first. All of it is always-dropped for sandboxes, so a block is never an
// address that a sandbox may dial.
var ranges = []netip.Prefix{
	netip.MustParsePrefix("10.128.0.0/9"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("172.16.0.0/12"),
}

// private are the destinations that no rule can open. One list, so that what is dropped and what is tested agree.
var private = []netip.Prefix{
	netip.MustParsePrefix("0.0.0.0/8"),
	netip.MustParsePrefix("10.0.0.0/8"),
	netip.MustParsePrefix("100.64.0.0/10"),
	netip.MustParsePrefix("127.0.0.0/8"),
	netip.MustParsePrefix("169.254.0.0/16"),
	netip.MustParsePrefix("172.16.0.0/12"),
	netip.MustParsePrefix("192.168.0.0/16"),
	netip.MustParsePrefix("224.0.0.0/3"), // multicast, reserved and broadcast
}

// pickBlock returns a /16 that overlaps nothing in busy. seed spreads the daemons of one host, so that they seldom
// want the same one; want, if valid and free, is taken first.
func pickBlock(busy []netip.Prefix, seed string, want netip.Prefix) (netip.Prefix, bool) {
	isFree := func(p netip.Prefix) bool {
		for _, b := range busy {
			if b.Overlaps(p) {
				return false
			}
		}
		return true
	}
	if want.IsValid() && isFree(want) {
		return want, true
	}
	h := fnv.New32a()
	_, _ = h.Write([]byte(seed))
	for _, r := range ranges {
		count := 1 << (16 - r.Bits())
		base := r.Addr().As4()
		for i := range count {
			a := base
			a[1] += byte((i + int(h.Sum32()%uint32(count))) % count)
			if p := netip.PrefixFrom(netip.AddrFrom4(a), 16); isFree(p) {
				return p, true
			}
		}
	}
	return netip.Prefix{}, false
}

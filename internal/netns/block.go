package netns

import (
	"crypto/sha256"
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

// twinBlock is the /64 out of which the sandboxes of a /16 block have their IPv6 addresses: a unique local one, so that it is
// always-dropped too. The block, which no other root of this host has, is in it, and so is a hash of the root's directory,
// which makes it unlikely that this host knows the prefix otherwise.
func twinBlock(block netip.Prefix, seed string) netip.Prefix {
	h := sha256.Sum256([]byte(seed))
	a, v4 := [16]byte{0xfd, h[0], h[1], h[2]}, block.Addr().As4()
	a[4], a[5] = v4[0], v4[1]
	return netip.PrefixFrom(netip.AddrFrom16(a), 64)
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

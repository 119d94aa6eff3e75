package shard

import (
	"net/netip"
	"slices"
)

// private4 are the IPv4 destinations that no rule can open: this host, private and shared networks, and what is no single
// host (multicast, reserved, broadcast).
var private4 = prefixes("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12",
	"192.168.0.0/16", "224.0.0.0/3")

// private6 are those of IPv6: unspecified, loopback and the old IPv4-compatible form (::/96), NAT64 with a local prefix,
// discard-only, Teredo, unique local, link-local, the old site-local, multicast.
var private6 = prefixes("::/96", "64:ff9b:1::/48", "100::/64", "2001::/32", "fc00::/7", "fe80::/10", "fec0::/10", "ff00::/8")

// carriers are the forms in which an IPv6 address holds an IPv4 one: what comes before its 32 bits.
var carriers = prefixes("::ffff:0:0/96", "::ffff:0:0:0/96", "64:ff9b::/96", "2002::/16")

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// always is both families, and every private IPv4 network again in every form in which IPv6 can carry it: v4-mapped,
// v4-translated, NAT64 and 6to4. Teredo hides the address under a mask, so it is dropped whole.
var always = func() []netip.Prefix {
	all := slices.Concat(private4, private6)
	for _, c := range carriers {
		for _, p := range private4 {
			a, v4 := c.Addr().As16(), p.Addr().As4()
			copy(a[c.Bits()/8:], v4[:])
			all = append(all, netip.PrefixFrom(netip.AddrFrom16(a), c.Bits()+p.Bits()))
		}
	}
	slices.SortFunc(all, func(a, b netip.Prefix) int { return a.Addr().Compare(b.Addr()) })
	return all
}()

// Unreachable are the destinations that no sandbox reaches, whatever its rules: IPv4 before IPv6, ascending and apart. The
// wall drops them, the resolver leaves them out of answers, and the proxy does not connect to them.
func Unreachable() []netip.Prefix { return slices.Clone(always) }

// IsUnreachable says whether addr is one of them. An address with a zone is: it is of one link only.
func IsUnreachable(addr netip.Addr) bool {
	if !addr.IsValid() || addr.Zone() != "" {
		return true
	}
	addr = addr.Unmap()
	for _, p := range always {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

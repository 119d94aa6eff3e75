package netns

import "net/netip"

// Dropped says whether addr is one that no sandbox ever reaches.
func Dropped(addr netip.Addr) bool {
	for _, p := range private {
		if p.Contains(addr) {
			return true
		}
	}
	return false
}

package netns

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
)

const (
	// slotCount is how many /30 links fit into one /16 block, so how many sandboxes one root can hold.
	slotCount   = 1 << 14
	leaseFormat = 1
)

// leases says who holds which slot of the block. Slots, not addresses, are what is held, so that a root whose block
// was taken while it was away can move to another. Pure; the caller locks.
type leases struct {
	block netip.Prefix
	twin  netip.Prefix // twinBlock of block; zero where there is no IPv6
	// next is where the search for a free slot begins. It only goes round, so a freed slot is the last to be used again.
	next  int
	taken [slotCount]bool
	byID  map[string]int
}

func newLeases(block netip.Prefix) *leases {
	return &leases{block: block, byID: map[string]int{}}
}

// reserve takes a free slot for nobody yet; false when there is none.
func (l *leases) reserve() (int, bool) {
	for i := range slotCount {
		slot := (l.next + i) % slotCount
		if !l.taken[slot] {
			l.taken[slot] = true
			l.next = (slot + 1) % slotCount
			return slot, true
		}
	}
	return 0, false
}

// assign gives a reserved slot to id.
func (l *leases) assign(id string, slot int) { l.byID[id] = slot }

// drop ends the lease of id; the slot stays reserved until free.
func (l *leases) drop(id string) { delete(l.byID, id) }

// free makes a reserved slot available again.
func (l *leases) free(slot int) { l.taken[slot] = false }

// link returns the addresses of a slot: the host's end, the sandbox's, and the /30 they share.
func (l *leases) link(slot int) (gateway, addr netip.Addr, subnet netip.Prefix) {
	base := l.block.Addr().As4()
	n := slot * 4
	base[2], base[3] = byte(n>>8), byte(n)
	first := netip.AddrFrom4(base)
	gateway = first.Next()
	return gateway, gateway.Next(), netip.PrefixFrom(first, 30)
}

// link6 is link with the addresses of IPv6, which share a /126; zero where there is none.
func (l *leases) link6(slot int) (gateway, addr netip.Addr, subnet netip.Prefix) {
	if !l.twin.IsValid() {
		return netip.Addr{}, netip.Addr{}, netip.Prefix{}
	}
	base := l.twin.Addr().As16()
	n := slot * 4
	base[14], base[15] = byte(n>>8), byte(n)
	first := netip.AddrFrom16(base)
	gateway = first.Next()
	return gateway, gateway.Next(), netip.PrefixFrom(first, 126)
}

// leaseFile is what leases look like on disk.
type leaseFile struct {
	Format int            `json:"format"`
	Block  netip.Prefix   `json:"block"`
	Next   int            `json:"next"`
	Slots  map[string]int `json:"slots"`
}

func (l *leases) encode() ([]byte, error) {
	return json.Marshal(leaseFile{Format: leaseFormat, Block: l.block, Next: l.next, Slots: l.byID})
}

func decodeLeases(data []byte) (*leases, error) {
	var f leaseFile
	if err := json.Unmarshal(data, &f); err != nil {
		return nil, fmt.Errorf("decode leases: %w", err)
	}
	switch {
	case f.Format != leaseFormat:
		return nil, fmt.Errorf("leases have format %d, not %d", f.Format, leaseFormat)
	case !f.Block.IsValid() || !f.Block.Addr().Is4() || f.Block.Bits() != 16 || f.Block != f.Block.Masked():
		return nil, errors.New("the leases' block is not an IPv4 /16")
	case f.Next < 0 || f.Next >= slotCount:
		return nil, fmt.Errorf("lease cursor %d is out of range", f.Next)
	}
	l := newLeases(f.Block)
	l.next = f.Next
	for id, slot := range f.Slots {
		if slot < 0 || slot >= slotCount || l.taken[slot] {
			return nil, fmt.Errorf("lease of %q: slot %d is out of range or held twice", id, slot)
		}
		l.taken[slot] = true
		l.byID[id] = slot
	}
	return l, nil
}

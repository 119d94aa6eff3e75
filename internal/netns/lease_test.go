package netns

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"testing"

	"pgregory.net/rapid"
)

// TestLeaseModel compares the allocator with a plain map through random lives.
func TestLeaseModel(t *testing.T) {
	block := netip.MustParsePrefix("10.200.0.0/16")
	rapid.Check(t, func(t *rapid.T) {
		l := newLeases(block)
		held := map[string]int{}  // id → slot
		owner := map[int]string{} // slot → id, and "" for a slot that waits for its teardown
		lastFreed := -1
		serial := 0
		t.Repeat(map[string]func(*rapid.T){
			"lease": func(t *rapid.T) {
				slot, ok := l.reserve()
				if !ok {
					t.Fatal("full with few leases")
				}
				if _, taken := owner[slot]; taken {
					t.Fatalf("slot %d was given twice", slot)
				}
				if slot == lastFreed {
					t.Fatalf("slot %d was used again at once", slot)
				}
				serial++
				id := fmt.Sprintf("id-%d", serial)
				l.assign(id, slot)
				held[id], owner[slot] = slot, id
			},
			"release": func(t *rapid.T) {
				if len(held) == 0 {
					t.Skip("nothing held")
				}
				id := rapid.SampledFrom(sortedKeys(held)).Draw(t, "id")
				l.drop(id)
				owner[held[id]] = ""
				delete(held, id)
			},
			"tear down": func(t *rapid.T) {
				for slot, id := range owner {
					if id == "" {
						l.free(slot)
						delete(owner, slot)
						lastFreed = slot
						return
					}
				}
			},
			"restart": func(t *rapid.T) {
				data, err := l.encode()
				if err != nil {
					t.Fatal(err)
				}
				if l, err = decodeLeases(data); err != nil {
					t.Fatal(err)
				}
				for slot, id := range owner {
					if id == "" {
						delete(owner, slot)
					}
				}
			},
			"": func(t *rapid.T) {
				if len(l.byID) != len(held) {
					t.Fatalf("%d leases, want %d", len(l.byID), len(held))
				}
				for id, slot := range held {
					if l.byID[id] != slot || !l.taken[slot] {
						t.Fatalf("%s lost slot %d", id, slot)
					}
				}
			},
		})
	})
}

func sortedKeys(m map[string]int) []string {
	out := make([]string, 0, len(m))
	for i := range 1 << 20 {
		id := fmt.Sprintf("id-%d", i)
		if _, ok := m[id]; ok {
			out = append(out, id)
		}
		if len(out) == len(m) {
			break
		}
	}
	return out
}

// TestLinkAddresses: no two slots share an address, all lie in the block, both ends in one /30.
func TestLinkAddresses(t *testing.T) {
	l := newLeases(netip.MustParsePrefix("10.200.0.0/16"))
	seen := map[netip.Addr]bool{}
	for slot := range slotCount {
		gateway, addr, subnet := l.link(slot)
		if !l.block.Contains(addr) || !subnet.Contains(gateway) || !subnet.Contains(addr) || subnet.Masked() != subnet {
			t.Fatalf("slot %d: %s, %s in %s", slot, gateway, addr, subnet)
		}
		if seen[gateway] || seen[addr] || gateway == addr {
			t.Fatalf("slot %d: an address comes twice", slot)
		}
		seen[gateway], seen[addr] = true, true
	}
}

// TestLeasesRunOut: every slot can be held, the next cannot, and one freed can be held again.
func TestLeasesRunOut(t *testing.T) {
	l := newLeases(netip.MustParsePrefix("10.200.0.0/16"))
	for i := range slotCount {
		if _, ok := l.reserve(); !ok {
			t.Fatalf("full after %d", i)
		}
	}
	if slot, ok := l.reserve(); ok {
		t.Fatalf("slot %d beyond the last", slot)
	}
	l.free(77)
	if slot, ok := l.reserve(); !ok || slot != 77 {
		t.Fatalf("got %d, %v; want the freed 77", slot, ok)
	}
}

func TestPickBlock(t *testing.T) {
	all := rapid.Custom(func(t *rapid.T) netip.Prefix {
		r := rapid.SampledFrom(ranges).Draw(t, "range")
		a := r.Addr().As4()
		a[1] += byte(rapid.IntRange(0, 1<<(16-r.Bits())-1).Draw(t, "block"))
		a[2] = rapid.Byte().Draw(t, "third")
		return netip.PrefixFrom(netip.AddrFrom4(a), rapid.IntRange(8, 32).Draw(t, "bits")).Masked()
	})
	rapid.Check(t, func(t *rapid.T) {
		busy := rapid.SliceOfN(all, 0, 40).Draw(t, "busy")
		got, ok := pickBlock(busy, rapid.String().Draw(t, "seed"), netip.Prefix{})
		if !ok {
			for _, r := range ranges { // then every block must really be busy
				a := r.Addr().As4()
				for i := range 1 << (16 - r.Bits()) {
					b := a
					b[1] += byte(i)
					free := true
					for _, p := range busy {
						free = free && !p.Overlaps(netip.PrefixFrom(netip.AddrFrom4(b), 16))
					}
					if free {
						t.Fatalf("%v was free", b)
					}
				}
			}
			return
		}
		if got.Bits() != 16 || got != got.Masked() {
			t.Fatalf("%s is no /16", got)
		}
		for _, p := range busy {
			if p.Overlaps(got) {
				t.Fatalf("%s overlaps %s", got, p)
			}
		}
		inRange, dropped := false, false
		for _, r := range ranges {
			inRange = inRange || r.Overlaps(got)
		}
		for _, p := range unreachable(true) {
			dropped = dropped || p.Bits() <= 16 && p.Contains(got.Addr())
		}
		if !inRange || !dropped {
			t.Fatalf("%s is not a private block of ours", got)
		}
	})
}

func FuzzDecodeLeases(f *testing.F) {
	for _, s := range []string{
		`{"format":1,"block":"10.200.0.0/16","next":3,"slots":{"a-b-0001":2}}`, `{"format":1,"block":"10.200.0.0/15"}`,
		`{"format":2}`, `{"format":1,"block":"10.200.0.0/16","slots":{"a":1,"b":1}}`, `{"format":1,"block":"10.200.0.0/16","next":-1}`,
		`{"format":1,"block":"::/16"}`, `{"format":1,"block":"10.200.0.0/16","slots":{"a":16384}}`, ``, `[]`,
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		l, err := decodeLeases(data)
		if err != nil {
			return
		}
		again, err := l.encode()
		if err != nil || !json.Valid(again) {
			t.Fatalf("accepted but not written: %v", err)
		}
		for id, slot := range l.byID {
			if _, addr, _ := l.link(slot); !l.block.Contains(addr) {
				t.Fatalf("%q has %s outside %s", id, addr, l.block)
			}
		}
	})
}

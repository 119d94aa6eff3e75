package netns

import (
	"encoding/binary"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// What the rules of the table are made of: matches of packets, and what becomes of those that match.

// intervals turns prefixes of one family, ascending and apart, into the elements of an interval set.
func intervals(prefixes []netip.Prefix) []nftables.SetElement {
	var out []nftables.SetElement
	var end netip.Addr
	for _, p := range prefixes {
		if p.Addr() == end { // it goes on where the one before ended
			out = out[:len(out)-1]
		} else {
			out = append(out, nftables.SetElement{Key: p.Addr().AsSlice()})
		}
		last := p.Addr().AsSlice()
		for i := p.Bits(); i < len(last)*8; i++ {
			last[i/8] |= 1 << (7 - i%8)
		}
		a, _ := netip.AddrFromSlice(last)
		if end = a.Next(); end.IsValid() { // an interval up to the last address has no end
			out = append(out, nftables.SetElement{Key: end.AsSlice(), IntervalEnd: true})
		}
	}
	return out
}

// ours matches interfaces whose name begins with our prefix, or (yes false) does not.
func (t *table) ours(key expr.MetaKey, yes bool) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op(yes), Register: 1, Data: []byte(t.prefix)}}
}

// family is where a family of addresses has them in a packet's head: where that of the source begins and that of the
// destination, and their length, in bytes.
type family struct {
	number   byte
	from, to uint32
	length   uint32
}

var (
	v4 = family{unix.NFPROTO_IPV4, 12, 16, 4}
	v6 = family{unix.NFPROTO_IPV6, 8, 24, 16}
)

// is matches the packets of the family: before a look at their addresses stands this.
func (f family) is() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{f.number}}}
}

// destination loads it.
func (f family) destination() []expr.Any {
	return append(f.is(), &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: f.to, Len: f.length})
}

// inBlock matches an address at offset of a block whose length is in whole bytes; nothing where there is no block.
func (f family) inBlock(block netip.Prefix, offset uint32) []expr.Any {
	if !block.IsValid() {
		return append(f.is(), &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{f.number}})
	}
	bytes := block.Bits() / 8
	return append(f.is(), &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: uint32(bytes)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: block.Addr().AsSlice()[:bytes]})
}

// isBound matches (interface, address) pairs in the family's set; offset is of the address.
func (t *table) isBound(key expr.MetaKey, f family, offset uint32) []expr.Any {
	set := t.bound
	if f == v6 {
		set = t.bound6
	}
	return append(f.is(), &expr.Meta{Key: key, Register: 1},
		&expr.Payload{DestRegister: 2, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: f.length},
		&expr.Lookup{SourceRegister: 1, SetName: set.Name, SetID: set.ID})
}

// isIn matches packets that came by an interface of a set.
func isIn(set *nftables.Set) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, lookup(set, true)[0]}
}

func lookup(s *nftables.Set, yes bool) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID, Invert: !yes}}
}

func notLoopback() []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: ifname("lo")}}
}

func ctState(bits uint32) []expr.Any {
	return []expr.Any{
		&expr.Ct{Key: expr.CtKeySTATE, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(bits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)},
	}
}

func drop() []expr.Any { return append([]expr.Any{&expr.Counter{}}, verdict(expr.VerdictDrop)...) }

func verdict(kind expr.VerdictKind) []expr.Any { return []expr.Any{&expr.Verdict{Kind: kind}} }

func jump(to *nftables.Chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictJump, Chain: to.Name}}
}

func op(yes bool) expr.CmpOp {
	if yes {
		return expr.CmpOpEq
	}
	return expr.CmpOpNeq
}

func protocol(p byte) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: []byte{p}}}
}

func portOf() expr.Any {
	return &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseTransportHeader, Offset: 2, Len: 2}
}

func portNumber(p uint16) []byte { return binary.BigEndian.AppendUint16(nil, p) }

func goTo(chain *nftables.Chain) []expr.Any {
	return []expr.Any{&expr.Verdict{Kind: expr.VerdictGoto, Chain: chain.Name}}
}

func seldom() []expr.Any {
	return []expr.Any{&expr.Limit{Type: expr.LimitTypePkts, Rate: 2, Unit: expr.LimitTimeSecond, Burst: 10}}
}

// setMark gives a packet one of our marks.
func setMark(value uint32) []expr.Any {
	bits, other := uint32(markBits), binaryutil.NativeEndian
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: other.PutUint32(^bits), Xor: other.PutUint32(value)},
		&expr.Meta{Key: expr.MetaKeyMARK, SourceRegister: true, Register: 1},
	}
}

// marked matches packets that have one of our marks, or (yes false) have not.
func marked(value uint32, yes bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: expr.MetaKeyMARK, Register: 1},
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(markBits), Xor: make([]byte, 4)},
		&expr.Cmp{Op: op(yes), Register: 1, Data: binaryutil.NativeEndian.PutUint32(value)},
	}
}

// unreachable are the destinations of one family that no rule can open, ascending and apart.
func unreachable(v4 bool) []netip.Prefix {
	return slices.DeleteFunc(shard.Unreachable(), func(p netip.Prefix) bool { return p.Addr().Is4() != v4 })
}

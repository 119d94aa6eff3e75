package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// restriction is the rules of one sandbox and what the kernel holds of them: a chain that its verdict in the map egress
// leads to, which leads to one for each part of the traffic, a chain for each way to be refused, and sets of what its rules are fed. Each restriction has names of its
// own, so that the next can be put up before a transaction switches the verdict and takes down the one before.
type restriction struct {
	Rules
	stem string                     // the chain, and what the other names begin with
	fed  []map[netip.Addr]time.Time // by rule: until when, as the kernel knows it too
}

func (r *restriction) set(f family) string {
	if f == v6 {
		return r.stem + "_fed6"
	}
	return r.stem + "_fed"
}
func (r *restriction) isFed() bool {
	return slices.ContainsFunc(r.Rules.Rules, func(it Rule) bool { return it.Fed })
}
func (r *restriction) refusal(i int) string { return fmt.Sprintf("%s_deny%d", r.stem, i) } // len(Rules.Rules): the default
func (r *restriction) refuses(i int) bool   { return i == len(r.Rules.Rules) || !r.Rules.Rules[i].Allow }
func (r *restriction) label(i int) string {
	if i == len(r.Rules.Rules) {
		return r.Default
	}
	return r.Rules.Rules[i].Label
}

// Attachment says how id is attached, if it is.
func (n *Net) Attachment(ctx context.Context, id string) (att Attachment, attached bool, err error) {
	b, giveBack, err := n.take(ctx, id, false)
	if err != nil || b == nil {
		return Attachment{}, false, err
	}
	defer giveBack()
	if !b.attached {
		return Attachment{}, false, nil
	}
	return n.attachment(id, b.slot), true, nil
}

// Restrict keeps attached sandboxes, each of them named once, to rules, in place of what held before, in one transaction:
// where it fails, all of them keep what they had. Flows that are open stay. Where an earlier daemon attached a sandbox it
// still begins nothing before Recover. Detach ends the restriction.
func (n *Net) Restrict(ctx context.Context, all ...Restriction) error {
	// In the order of their ids, so that two who take many do not wait for each other.
	all = slices.SortedFunc(slices.Values(all), func(a, b Restriction) int { return strings.Compare(a.ID, b.ID) })
	entries := make([]entry, len(all))
	for i, r := range all {
		b, giveBack, err := n.take(ctx, r.ID, false)
		if err != nil {
			return err
		}
		defer giveBack()
		if b == nil || !b.attached {
			return shard.Errorf(shard.CodeInternal, "sandbox %s has no network", r.ID)
		}
		entries[i] = n.entry(b.slot)
	}
	return n.table.restrict(entries, all)
}

// Feed puts addresses into the sets of rules of a restricted sandbox, until the time given: never for a shorter time than
// they are in. When it returns, packets to them are judged so. What the sandbox is not restricted to, or is not fed, is
// no error: the rules may have changed.
func (n *Net) Feed(ctx context.Context, id string, rules []int, addrs []netip.Addr, until time.Time) error {
	b, giveBack, err := n.take(ctx, id, false)
	if err != nil || b == nil {
		return err
	}
	slot, attached := b.slot, b.attached
	giveBack()
	if !attached {
		return nil
	}
	return n.table.feed(n.entry(slot), rules, addrs, until)
}

// restrict keeps each of the entries to that of all which is in its place.
func (t *table) restrict(entries []entry, all []Restriction) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	next := make([]*restriction, len(all))
	err := t.locked(func(c *nftables.Conn) (err error) {
		for i, r := range all {
			next[i] = t.newRestriction(entries[i], r)
			err = errors.Join(err, t.describeRestriction(c, next[i]))
		}
		return err
	})
	if err != nil {
		return err
	}
	// In a transaction of its own, for the sake of sets of ports: see put.
	err = t.locked(func(c *nftables.Conn) (err error) {
		for i, e := range entries {
			err = errors.Join(err, t.switchTo(c, e, next[i]))
		}
		return err
	})
	if err != nil {
		return errors.Join(err, t.locked(func(c *nftables.Conn) error {
			for _, r := range next {
				t.forget(c, r)
			}
			return nil
		}))
	}
	for i, e := range entries {
		t.restricted[e.iface] = next[i]
	}
	return nil
}

func (t *table) newRestriction(e entry, of Restriction) *restriction {
	t.serial++
	r := &restriction{Rules: of.Rules, stem: fmt.Sprintf("policy_%s_%d", strings.TrimPrefix(e.iface, t.prefix), t.serial),
		fed: make([]map[netip.Addr]time.Time, len(of.Rules.Rules))}
	for i, addrs := range of.Fed {
		if i < len(r.fed) && r.Rules.Rules[i].Fed {
			r.fed[i] = addrs
		}
	}
	return r
}

// switchTo leads what the entry sends to next, and takes down what it was led to before.
func (t *table) switchTo(c *nftables.Conn, e entry, next *restriction) (err error) {
	before := t.restricted[e.iface]
	if t.held[e] { // opened; the verdict of an element cannot be changed
		err = errors.Join(err, c.SetDeleteElements(t.egress, []nftables.SetElement{{Key: ifname(e.iface)}}),
			c.SetAddElements(t.egress, egressElement(e.iface, next)))
	}
	was, is := t.redirects(before), t.redirects(next)
	for _, set := range is {
		if !slices.Contains(was, set) {
			err = errors.Join(err, c.SetAddElements(set, []nftables.SetElement{{Key: ifname(e.iface)}}))
		}
	}
	for _, set := range was {
		if !slices.Contains(is, set) {
			err = errors.Join(err, c.SetDeleteElements(set, []nftables.SetElement{{Key: ifname(e.iface)}}))
		}
	}
	if before != nil {
		t.forget(c, before)
	}
	return err
}

// unrestrict takes down what is left of the restriction of an entry that has been shut.
func (t *table) unrestrict(e entry) error {
	r := t.restricted[e.iface]
	if r == nil {
		return nil
	}
	delete(t.restricted, e.iface)
	err := t.locked(func(c *nftables.Conn) error {
		t.forget(c, r)
		var err error
		for _, set := range t.redirects(r) {
			err = errors.Join(err, c.SetDeleteElements(set, []nftables.SetElement{{Key: ifname(e.iface)}}))
		}
		return err
	})
	if errors.Is(err, unix.ENOENT) { // the table was put up anew by another: nothing of it is left, or the guard will do
		err = nil
	}
	return err
}

// redirects are the sets of interfaces which a restriction puts its own into.
func (t *table) redirects(r *restriction) (sets []*nftables.Set) {
	if r != nil && !r.OpenDNS {
		sets = append(sets, t.policied)
	}
	if r != nil && r.Proxied {
		sets = append(sets, t.proxied)
	}
	return sets
}

// forget takes a restriction down; no verdict leads to it any more.
func (t *table) forget(c *nftables.Conn, r *restriction) {
	chains := []string{r.stem}
	for _, p := range r.parts() {
		chains = append(chains, r.partChain(p))
	}
	for i := range len(r.Rules.Rules) + 1 {
		if r.refuses(i) {
			chains = append(chains, r.refusal(i))
		}
	}
	for _, name := range chains {
		c.FlushChain(&nftables.Chain{Table: t.nft, Name: name})
	}
	for _, name := range chains {
		c.DelChain(&nftables.Chain{Table: t.nft, Name: name})
	}
	if r.isFed() {
		c.DelSet(t.fedSet(r, v4, 0))
		c.DelSet(t.fedSet(r, v6, 0))
	}
}

func (t *table) feed(e entry, rules []int, addrs []netip.Addr, until time.Time) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	r := t.restricted[e.iface]
	if r == nil {
		return nil
	}
	now := time.Now()
	type news struct {
		rule  int
		addrs []netip.Addr
	}
	var all []news
	for _, i := range rules {
		if i >= len(r.Rules.Rules) || !r.Rules.Rules[i].Fed {
			continue
		}
		if r.fed[i] == nil {
			r.fed[i] = map[netip.Addr]time.Time{}
		}
		in := r.fed[i]
		var fresh []netip.Addr
		for _, a := range addrs {
			if in[a].Before(until) {
				fresh = append(fresh, a)
			}
		}
		if len(in)+len(fresh) > MaxFed {
			for a, end := range in {
				if !end.After(now) {
					delete(in, a)
				}
			}
			if len(in)+len(fresh) > MaxFed {
				return fmt.Errorf("the rule %s of a sandbox has %d addresses already", r.label(i), len(in))
			}
		}
		if len(fresh) > 0 {
			all = append(all, news{i, fresh})
		}
	}
	if len(all) == 0 {
		return nil
	}
	err := t.locked(func(c *nftables.Conn) error {
		for _, f := range all {
			for _, of := range []family{v4, v6} {
				set := t.fedSet(r, of, 0)
				var elements []nftables.SetElement
				for _, a := range f.addrs {
					if a.Is4() == (of == v4) {
						elements = append(elements, nftables.SetElement{Key: fedKey(f.rule, a), Timeout: max(time.Until(until), time.Millisecond)})
					}
				}
				if elements == nil {
					continue
				}
				// An element that is there keeps its time, and one that is not cannot be deleted: so all three.
				if err := errors.Join(c.SetAddElements(set, elements), c.SetDeleteElements(set, elements), c.SetAddElements(set, elements)); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	for _, f := range all {
		for _, a := range f.addrs {
			r.fed[f.rule][a] = until
		}
	}
	return nil
}

// fedSet holds, of each family, what all rules of a restriction were fed, by rule: the kernel looks through all sets of the
// table for each rule that it adds, so they must be few.
func (t *table) fedSet(r *restriction, f family, id uint32) *nftables.Set {
	kind := nftables.TypeIPAddr
	if f == v6 {
		kind = nftables.TypeIP6Addr
	}
	return &nftables.Set{Table: t.nft, ID: id, Name: r.set(f), HasTimeout: true, Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeMark, kind)}
}

func fedKey(rule int, addr netip.Addr) []byte {
	return append(binary.BigEndian.AppendUint32(nil, uint32(rule)), addr.AsSlice()...)
}

// wasFed matches packets of the family to what the rule was fed.
func (f family) wasFed(rule int, set *nftables.Set) []expr.Any {
	const key, behind = 8, 9 // NFT_REG32_00 and the one after
	return []expr.Any{&expr.Immediate{Register: key, Data: binary.BigEndian.AppendUint32(nil, uint32(rule))},
		&expr.Payload{DestRegister: behind, Base: expr.PayloadBaseNetworkHeader, Offset: f.to, Len: f.length},
		&expr.Lookup{SourceRegister: key, SetName: set.Name, SetID: set.ID}}
}

// setNumber is a number by which the batch under way names a new set. The caller holds mu.
func (t *table) setNumber() uint32 {
	t.sets++
	return t.sets
}

// describeRestriction adds the chains and sets of r, which no verdict leads to yet.
func (t *table) describeRestriction(c *nftables.Conn, r *restriction) error {
	var errs []error
	chain := c.AddChain(&nftables.Chain{Table: t.nft, Name: r.stem})
	rule := t.ruler(c)
	refuse := func(i int) []expr.Any {
		deny := c.AddChain(&nftables.Chain{Table: t.nft, Name: r.refusal(i)})
		// The counter is of all, for how many were not seen.
		rule(deny, []expr.Any{&expr.Counter{}})
		rule(deny, seldom(), t.report(r.label(i)))
		t.reject(c, deny)
		return goTo(deny)
	}
	now := time.Now()
	fed := map[family]*nftables.Set{}
	if r.isFed() {
		for _, f := range []family{v4, v6} {
			fed[f] = t.fedSet(r, f, t.setNumber())
			var elements []nftables.SetElement
			for i, addrs := range r.fed {
				for a, end := range addrs {
					if left := end.Sub(now); left > time.Millisecond && a.Is4() == (f == v4) {
						elements = append(elements, nftables.SetElement{Key: fedKey(i, a), Timeout: left})
					}
				}
			}
			errs = append(errs, c.AddSet(fed[f], elements))
		}
	}
	then := make([][]expr.Any, len(r.Rules.Rules)+1)
	for i := range then {
		then[i] = verdict(expr.VerdictAccept)
		if r.refuses(i) {
			then[i] = refuse(i)
		}
	}
	for _, p := range r.parts() {
		own := c.AddChain(&nftables.Chain{Table: t.nft, Name: r.partChain(p)})
		for i := range r.Rules.Rules {
			it := &r.Rules.Rules[i]
			if !it.isAbout(p) {
				continue
			}
			about := p.destination(it.Prefix)
			if it.Fed {
				about = p.wasFed(i, fed[p.family])
			}
			ports, err := t.ports(c, it.ports(p))
			errs = append(errs, err)
			for _, match := range ports {
				rule(own, match, about, then[i])
			}
		}
		rule(own, then[len(r.Rules.Rules)])
		rule(chain, p.is(), goTo(own))
	}
	rule(chain, then[len(r.Rules.Rules)])
	return errors.Join(errs...)
}

// part is the packets of a family and a protocol. Each part has a chain of its own, in which no rule has to look at these
// again: what rules are made of is what they cost, when they are put up and when packets pass.
type part struct {
	family
	protocol byte // 0: those that are neither TCP nor UDP
}

// parts are those that rules are about; the default is for the rest.
func (r *restriction) parts() (some []part) {
	for _, f := range []family{v4, v6} {
		for _, p := range []byte{unix.IPPROTO_TCP, unix.IPPROTO_UDP, 0} {
			if slices.ContainsFunc(r.Rules.Rules, func(it Rule) bool { return it.isAbout(part{f, p}) }) {
				some = append(some, part{f, p})
			}
		}
	}
	return some
}

func (r *restriction) partChain(p part) string {
	return fmt.Sprintf("%s_family%d_protocol%d", r.stem, p.family.number, p.protocol)
}

func (r *Rule) isAbout(p part) bool {
	if !r.Fed && r.Prefix.IsValid() && r.Prefix.Addr().Is4() != (p.family == v4) {
		return false
	}
	return len(r.ports(p)) > 0
}

// ports are the rule's of the part's protocol; every one where it has none.
func (r *Rule) ports(p part) []Ports {
	switch {
	case p.protocol == unix.IPPROTO_TCP:
		return r.TCP
	case p.protocol == unix.IPPROTO_UDP:
		return r.UDP
	case r.Other:
		return everyPort
	}
	return nil
}

// is matches the packets of the part.
func (p part) is() []expr.Any {
	if p.protocol != 0 {
		return append(p.family.is(), protocol(p.protocol)...)
	}
	return append(p.family.is(), &expr.Meta{Key: expr.MetaKeyL4PROTO, Register: 1},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{unix.IPPROTO_TCP}},
		&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: []byte{unix.IPPROTO_UDP}})
}

// destination matches packets of the family to addresses of the prefix; all of them where there is none.
func (p part) destination(prefix netip.Prefix) []expr.Any {
	prefix = prefix.Masked()
	if !prefix.IsValid() || prefix.Bits() == 0 {
		return nil
	}
	addr, bytes := prefix.Addr().AsSlice(), prefix.Bits()/8
	match := []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: p.to, Len: p.length}}
	if prefix.Bits()%8 == 0 {
		match[0] = &expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: p.to, Len: uint32(bytes)}
		return append(match, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: addr[:bytes]})
	}
	mask := make([]byte, p.length)
	for i := range prefix.Bits() {
		mask[i/8] |= 1 << (7 - i%8)
	}
	return append(match,
		&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: p.length, Mask: mask, Xor: make([]byte, p.length)},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: addr})
}

var everyPort = []Ports{{0, 65535}}

// ports is matches of packets, whose protocol has ports, to some: each of a part of them, and all together of the whole.
func (t *table) ports(c *nftables.Conn, some []Ports) (matches [][]expr.Any, err error) {
	// A set costs the kernel more than some rules: it looks through all sets of the table for each.
	const few = 8
	switch {
	case slices.Equal(some, everyPort):
		return [][]expr.Any{nil}, nil
	case len(some) <= few:
		for _, p := range some {
			matches = append(matches, []expr.Any{portOf(),
				&expr.Range{Op: expr.CmpOpEq, Register: 1, FromData: portNumber(p.From), ToData: portNumber(p.To)}})
		}
		return matches, nil
	}
	set := &nftables.Set{Table: t.nft, ID: t.setNumber(), Name: "__set%d", Anonymous: true, Constant: true, Interval: true,
		KeyType: nftables.TypeInetService}
	var elements []nftables.SetElement
	for _, p := range some {
		elements = append(elements, nftables.SetElement{Key: portNumber(p.From)})
		if p.To < 65535 {
			elements = append(elements, nftables.SetElement{Key: portNumber(p.To + 1), IntervalEnd: true})
		}
	}
	return [][]expr.Any{append([]expr.Any{portOf()}, lookup(set, true)...)}, c.AddSet(set, elements)
}

// restrictedChains adds what all restricted sandboxes share: the ways to the resolver and the proxy, and words for what no
// rule opens.
func (t *table) restrictedChains(c *nftables.Conn, outOf, toHost *nftables.Chain, dropped privateSets) error {
	rule := t.ruler(c)
	isRestricted, isProxied := isIn(t.policied), isIn(t.proxied)
	nat := c.AddChain(&nftables.Chain{Table: t.nft, Name: "to_service", Type: nftables.ChainTypeNAT,
		Hooknum: nftables.ChainHookPrerouting, Priority: nftables.ChainPriorityNATDest})
	if !t.way6 { // to this host, whatever it is, where toHost refuses it
		rule(nat, t.ours(expr.MetaKeyIIFNAME, true), v6.is(), []expr.Any{&expr.Redir{}})
	}
	for _, way := range []struct {
		who      []expr.Any
		protocol byte
		from, to uint16
	}{
		{isRestricted, unix.IPPROTO_UDP, 53, ResolverPort},
		{isRestricted, unix.IPPROTO_TCP, 53, ResolverPort},
		{isProxied, unix.IPPROTO_TCP, 80, ProxyPlainPort},
		{isProxied, unix.IPPROTO_TCP, 443, ProxyTLSPort},
	} {
		rule(nat, way.who, protocol(way.protocol), []expr.Any{portOf(), &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: portNumber(way.from)},
			&expr.Immediate{Register: 1, Data: portNumber(way.to)}, &expr.Redir{RegisterProtoMin: 1, Flags: unix.NF_NAT_RANGE_PROTO_SPECIFIED}})
		// Only what was sent to the first port: the service's own is not an address to dial.
		const translated = 1 << 5 // IPS_DST_NAT
		rule(toHost, way.who, []expr.Any{&expr.Ct{Key: expr.CtKeySTATUS, Register: 1},
			&expr.Bitwise{SourceRegister: 1, DestRegister: 1, Len: 4, Mask: binaryutil.NativeEndian.PutUint32(translated), Xor: make([]byte, 4)},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: 1, Data: make([]byte, 4)}},
			protocol(way.protocol), []expr.Any{portOf(), &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: portNumber(way.to)}}, verdict(expr.VerdictAccept))
	}
	for _, label := range []string{shard.EgressRulePrivate, shard.EgressRuleLocal} {
		note, err := t.seen(c, label)
		if err != nil {
			return err
		}
		deny := c.AddChain(&nftables.Chain{Table: t.nft, Name: "deny_" + label})
		rule(deny, note)
		t.reject(c, deny)
		if label == shard.EgressRulePrivate {
			for _, chain := range []*nftables.Chain{outOf, toHost} {
				for _, match := range dropped.match() {
					rule(chain, isRestricted, match, goTo(deny))
				}
			}
		} else {
			rule(toHost, isRestricted, goTo(deny))
		}
	}
	return nil
}

// seen reports packets under a label that no rule has, within a limit for each sandbox.
func (t *table) seen(c *nftables.Conn, label string) ([]expr.Any, error) {
	meter := &nftables.Set{Table: t.nft, ID: t.setNumber(), Name: "seen_" + label, Dynamic: true, HasTimeout: true, Timeout: time.Minute,
		Size: slotCount, KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}
	return append([]expr.Any{&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Dynset{SrcRegKey: 1, SetID: meter.ID, SetName: meter.Name, Operation: unix.NFT_DYNSET_OP_UPDATE, Exprs: seldom()}}, t.report(label)...), c.AddSet(meter, nil)
}

// reject ends chain: whoever waits for an answer learns at once that there will be none.
func (t *table) reject(c *nftables.Conn, chain *nftables.Chain) {
	const adminProhibited = 3 // of the codes for both families
	rule := t.ruler(c)
	rule(chain, protocol(unix.IPPROTO_TCP), []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_TCP_RST}})
	rule(chain, []expr.Any{&expr.Reject{Type: unix.NFT_REJECT_ICMPX_UNREACH, Code: adminProhibited}})
}

// report sends the head of a packet to the group of this root.
func (t *table) report(label string) []expr.Any {
	return []expr.Any{&expr.Log{Key: 1<<unix.NFTA_LOG_GROUP | 1<<unix.NFTA_LOG_PREFIX | 1<<unix.NFTA_LOG_SNAPLEN,
		Group: t.group(), Snaplen: reportedHead, Data: []byte(label)}}
}

// group is the number under which the kernel reports: that of the block, which no other root of this host has.
func (t *table) group() uint16 {
	a := t.block.Addr().As4()
	return binary.BigEndian.Uint16(a[:])
}

func egressElement(iface string, r *restriction) []nftables.SetElement {
	v := &expr.Verdict{Kind: expr.VerdictAccept}
	if r != nil {
		v = &expr.Verdict{Kind: expr.VerdictGoto, Chain: r.stem}
	}
	return []nftables.SetElement{{Key: ifname(iface), VerdictData: v}}
}

package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// table is the wall: one nftables table of family inet per root. It judges only what enters or leaves by an interface
// of ours, or claims an address of our block; all else passes untouched.
//
//	raw      anti-spoof: IPv4 only, and only (interface, source) pairs of the set bound
//	forward  from a sandbox: other sandboxes and private never; what is established goes on; then egress, one verdict
//	         per interface; else drop. To a sandbox: only answers, and only to pairs of bound
//	input    from a sandbox to any address of this host: drop
//	output   from this host to a sandbox: only answers and ICMP errors of its flows
//	nat      masquerade what leaves the block
//
// Attaching a sandbox adds one element to bound and one to egress. A restricted one (policy_linux.go) has a chain of its
// own, and a goto instead of the accept in egress; it is in the set policied too, so that what it sends to port 53 is
// redirected to the resolver, and that it learns what it may not. One that is only behind the proxy is not.
type table struct {
	name, prefix string
	block        netip.Prefix

	nft           *nftables.Table
	bound, egress *nftables.Set
	// The interfaces of restricted sandboxes whose lookups go to the resolver, and of those whose web traffic goes to a proxy.
	policied, proxied *nftables.Set

	// One socket for all transactions: to close one after a deletion waits for an RCU grace period (10 ms). The kernel
	// takes transactions one by one anyway, so the lock is held over each.
	mu   sync.Mutex
	conn *nftables.Conn
	// What it takes to put the table up again.
	held       map[entry]bool          // what bound holds; true: egress too
	restricted map[string]*restriction // by interface
	serial     uint64                  // of restrictions
	sets       uint32                  // setNumber
}

// The numbers by which a batch names its own sets.
const (
	boundID = iota + 1
	egressID
	privateID
	policiedID
	proxiedID
	lastID
)

func newTable(tag, prefix string, block netip.Prefix) *table {
	t := &table{name: "shard_" + tag, prefix: prefix, block: block, held: map[entry]bool{},
		restricted: map[string]*restriction{}, sets: lastID}
	t.nft = &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
	t.bound = &nftables.Set{Table: t.nft, ID: boundID, Name: "bound", Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)}
	t.egress = &nftables.Set{Table: t.nft, ID: egressID, Name: "egress", IsMap: true,
		KeyType: nftables.TypeIFName, DataType: nftables.TypeVerdict, KeyByteOrder: binaryutil.NativeEndian}
	t.policied = &nftables.Set{Table: t.nft, ID: policiedID, Name: "policied", KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}
	t.proxied = &nftables.Set{Table: t.nft, ID: proxiedID, Name: "proxied", KeyType: nftables.TypeIFName, KeyByteOrder: binaryutil.NativeEndian}
	return t
}

// entry is what the table holds of one sandbox.
type entry struct {
	iface string
	addr  netip.Addr
}

func (e entry) boundElement() []nftables.SetElement {
	return []nftables.SetElement{{Key: append(ifname(e.iface), e.addr.AsSlice()...)}}
}

func ifname(s string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, s)
	return b
}

// transact sends what describe adds as one transaction: all of it holds afterwards, or nothing.
func (t *table) transact(describe func(c *nftables.Conn) error) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.locked(describe)
}

// locked is transact for who holds mu.
func (t *table) locked(describe func(c *nftables.Conn) error) (err error) {
	if t.conn == nil {
		// A transaction is one message, which the socket must hold.
		const most = 8 << 20
		t.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
			return errors.Join(c.SetWriteBuffer(most), c.SetReadBuffer(most))
		}))
		if err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
	}
	if err = describe(t.conn); err == nil {
		err = t.conn.Flush()
	}
	if err != nil {
		// Half a description, or answers nobody read, must not reach the next transaction.
		_ = t.conn.CloseLasting()
		t.conn = nil
		return fmt.Errorf("change nftables table %s: %w", t.name, err)
	}
	return nil
}

func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.conn != nil {
		_ = t.conn.CloseLasting()
		t.conn = nil
	}
}

// replace puts up the whole table in one transaction, whatever stood there before. The entries keep the flows they
// have; new ones wait for open.
func (t *table) replace(entries []entry) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	clear(t.held)
	clear(t.restricted)
	for _, e := range entries {
		t.held[e] = false
	}
	return t.locked(t.describe)
}

// restore puts the table up again if it vanished, as it does when an administrator reloads the host's firewall, and
// says whether it had to.
func (t *table) restore() (vanished bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err = t.locked(func(c *nftables.Conn) error {
		tables, err := c.ListTablesOfFamily(t.nft.Family)
		vanished = err == nil && !slices.ContainsFunc(tables, func(other *nftables.Table) bool { return other.Name == t.name })
		return err
	})
	if vanished {
		err = t.locked(t.describe)
	}
	return vanished, err
}

// describe is the whole table with all that is held.
func (t *table) describe(c *nftables.Conn) error {
	c.AddTable(t.nft) // so that the deletion cannot fail
	c.DelTable(t.nft)
	c.AddTable(t.nft)
	dropped := &nftables.Set{Table: t.nft, ID: privateID, Name: "private", Interval: true, KeyType: nftables.TypeIPAddr}
	err := errors.Join(c.AddSet(t.bound, nil), c.AddSet(t.egress, nil), c.AddSet(t.policied, nil), c.AddSet(t.proxied, nil), c.AddSet(dropped, intervals(private)))
	for iface, r := range t.restricted {
		err = errors.Join(err, t.describeRestriction(c, r))
		for _, set := range t.redirects(r) {
			err = errors.Join(err, c.SetAddElements(set, []nftables.SetElement{{Key: ifname(iface)}}))
		}
	}
	err = errors.Join(err, t.chains(c, dropped))
	for e, opened := range t.held {
		err = errors.Join(err, c.SetAddElements(t.bound, e.boundElement()))
		if opened {
			err = errors.Join(err, c.SetAddElements(t.egress, egressElement(e.iface, t.restricted[e.iface])))
		}
	}
	return err
}

func (t *table) chains(c *nftables.Conn, dropped *nftables.Set) error {
	chain := func(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority, kind nftables.ChainType) *nftables.Chain {
		return c.AddChain(&nftables.Chain{Table: t.nft, Name: name, Hooknum: hook, Priority: priority, Type: kind})
	}
	rule := func(chain *nftables.Chain, parts ...[]expr.Any) {
		r := &nftables.Rule{Table: t.nft, Chain: chain}
		for _, p := range parts {
			r.Exprs = append(r.Exprs, p...)
		}
		c.AddRule(r)
	}
	// Chains that are jumped to come first: a rule can only name what exists.
	fromSandbox := chain("from_sandbox", nil, nil, "")
	outOf := chain("out_of", nil, nil, "")
	into := chain("into", nil, nil, "")
	toHost := chain("to_host", nil, nil, "")

	const filter = nftables.ChainTypeFilter
	raw := chain("raw", nftables.ChainHookPrerouting, nftables.ChainPriorityRaw, filter)
	rule(raw, t.ours(expr.MetaKeyIIFNAME, true), jump(fromSandbox))
	// An address of the block comes in from elsewhere only by forgery: answers carry this host's address until later.
	// (This host speaks to its own ends of the links by lo.)
	rule(raw, notLoopback(), ipv4(true), t.inBlock(16), drop())

	rule(fromSandbox, ipv4(false), drop())
	rule(fromSandbox, t.isBound(expr.MetaKeyIIFNAME, 12, false), drop())
	rule(fromSandbox, verdict(expr.VerdictAccept))

	forward := chain("forward", nftables.ChainHookForward, nftables.ChainPriorityFilter, filter)
	rule(forward, t.ours(expr.MetaKeyIIFNAME, true), jump(outOf))
	rule(forward, t.ours(expr.MetaKeyOIFNAME, true), jump(into))

	if err := t.restrictedChains(c, outOf, toHost, dropped); err != nil {
		return err
	}
	rule(outOf, t.ours(expr.MetaKeyOIFNAME, true), drop())
	rule(outOf, address(16), lookup(dropped, true), drop())
	rule(outOf, ctState(expr.CtStateBitINVALID), drop())
	rule(outOf, ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept))
	rule(outOf, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Lookup{SourceRegister: 1, IsDestRegSet: true, SetName: t.egress.Name, SetID: t.egress.ID},
	})
	rule(outOf, drop())

	rule(into, ipv4(false), drop())
	rule(into, t.isBound(expr.MetaKeyOIFNAME, 16, false), drop())
	rule(into, ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept))
	rule(into, drop())

	rule(chain("input", nftables.ChainHookInput, nftables.ChainPriorityFilter, filter), t.ours(expr.MetaKeyIIFNAME, true), jump(toHost))
	rule(toHost, drop())
	rule(chain("output", nftables.ChainHookOutput, nftables.ChainPriorityFilter, filter), t.ours(expr.MetaKeyOIFNAME, true), jump(into))

	nat := chain("nat", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainTypeNAT)
	rule(nat, ipv4(true), t.inBlock(12), t.ours(expr.MetaKeyOIFNAME, false), []expr.Any{&expr.Masq{}})
	return nil
}

// open lets packets of the entries pass as theirs, and lets them begin flows.
func (t *table) open(entries ...entry) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.locked(func(c *nftables.Conn) (err error) {
		for _, e := range entries {
			err = errors.Join(err, c.SetAddElements(t.bound, e.boundElement()), c.SetAddElements(t.egress, egressElement(e.iface, t.restricted[e.iface])))
		}
		return err
	})
	if err == nil {
		for _, e := range entries {
			t.held[e] = true
		}
	}
	return err
}

// shut drops every packet of the entry from now on. Elements that are already gone are no error.
func (t *table) shut(e entry) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	delete(t.held, e)
	unbind := func(c *nftables.Conn) error { return c.SetDeleteElements(t.bound, e.boundElement()) }
	forbid := func(c *nftables.Conn) error {
		return c.SetDeleteElements(t.egress, []nftables.SetElement{{Key: ifname(e.iface)}})
	}
	err := t.locked(func(c *nftables.Conn) error { return errors.Join(unbind(c), forbid(c)) })
	if err == nil {
		return t.unrestrict(e)
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	// One missing element undoes the whole transaction, so each alone.
	err = nil
	for _, part := range []func(*nftables.Conn) error{unbind, forbid} {
		if e := t.locked(part); !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, t.unrestrict(e))
}

// remove takes the table down.
func (t *table) remove() error {
	return t.transact(func(c *nftables.Conn) error {
		c.AddTable(t.nft)
		c.DelTable(t.nft)
		return nil
	})
}

// intervals turns prefixes, ascending and apart, into the elements of an interval set.
func intervals(prefixes []netip.Prefix) []nftables.SetElement {
	var out []nftables.SetElement
	for _, p := range prefixes {
		first := p.Addr().As4()
		out = append(out, nftables.SetElement{Key: first[:]})
		end := binary.BigEndian.Uint32(first[:]) + 1<<(32-p.Bits())
		if end != 0 { // an interval up to the last address has no end
			out = append(out, nftables.SetElement{Key: binary.BigEndian.AppendUint32(nil, end), IntervalEnd: true})
		}
	}
	return out
}

// ours matches interfaces whose name begins with our prefix, or (yes false) does not.
func (t *table) ours(key expr.MetaKey, yes bool) []expr.Any {
	return []expr.Any{&expr.Meta{Key: key, Register: 1}, &expr.Cmp{Op: op(yes), Register: 1, Data: []byte(t.prefix)}}
}

// isBound matches (interface, address) pairs in bound; offset is 12 for the source address, 16 for the destination.
func (t *table) isBound(key expr.MetaKey, offset uint32, yes bool) []expr.Any {
	return []expr.Any{
		&expr.Meta{Key: key, Register: 1},
		&expr.Payload{DestRegister: 2, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4},
		&expr.Lookup{SourceRegister: 1, SetName: t.bound.Name, SetID: t.bound.ID, Invert: !yes},
	}
}

// inBlock matches addresses of our block.
func (t *table) inBlock(offset uint32) []expr.Any {
	first := t.block.Addr().As4()
	return []expr.Any{
		&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 2},
		&expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: first[:2]},
	}
}

func address(offset uint32) []expr.Any {
	return []expr.Any{&expr.Payload{DestRegister: 1, Base: expr.PayloadBaseNetworkHeader, Offset: offset, Len: 4}}
}

func lookup(s *nftables.Set, yes bool) []expr.Any {
	return []expr.Any{&expr.Lookup{SourceRegister: 1, SetName: s.Name, SetID: s.ID, Invert: !yes}}
}

func ipv4(yes bool) []expr.Any {
	return []expr.Any{&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: 1}, &expr.Cmp{Op: op(yes), Register: 1, Data: []byte{unix.NFPROTO_IPV4}}}
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

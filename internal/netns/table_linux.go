package netns

import (
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/binaryutil"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// table is the wall: one nftables table of family inet per root. It judges only what enters or leaves by an interface
// of ours, or claims an address of our blocks; all else passes untouched.
//
//	raw      anti-spoof: only (interface, source) pairs of the sets bound and bound6
//	forward  from a sandbox: other sandboxes and private never; what is established goes on; then egress, one verdict
//	         per interface; else drop. To a sandbox: only answers, and only to pairs of bound and bound6
//	input    from a sandbox to any address of this host: drop
//	output   from this host to a sandbox: only answers and ICMP errors of its flows
//	nat      masquerade what leaves the blocks
//	fence_…  marks on packets without which nothing passes, should others change the table: fence_linux.go
//
// Where this host has no way out over IPv6, all that a sandbox sends by it is refused: led to this host itself, since older
// kernels cannot refuse before the route is known, and refused there.
//
// Attaching a sandbox adds one element to bound, bound6 and egress each. A restricted one (policy_linux.go) has a chain of its
// own, and a goto instead of the accept in egress; it is in the set policied too, so that what it sends to port 53 is
// redirected to the resolver, and that it learns what it may not. One that is only behind the proxy is not.
type table struct {
	// The table has this name or, since a new one is put up before the old one goes, this and a _.
	name, prefix string
	block, twin  netip.Prefix // of IPv4 and IPv6

	nft                   *nftables.Table
	bound, bound6, egress *nftables.Set
	// The interfaces of restricted sandboxes whose lookups go to the resolver, and of those whose web traffic goes to a proxy.
	policied, proxied *nftables.Set

	// One socket for all transactions: to close one after a deletion waits for an RCU grace period (10 ms). The kernel
	// takes transactions one by one anyway, so the lock is held over each.
	mu   sync.Mutex
	conn *nftables.Conn
	sock *netlink.Conn // conn's
	mine sync.Map      // the numbers that our sockets had
	up   bool          // nft names the table that holds
	// owned says that nobody else can change it; ownable, that the kernel has such tables. Tests turn the latter off.
	owned, ownable bool
	way6           bool // this host has a way out over IPv6
	// What it takes to put the table up again.
	held       map[entry]bool          // what bound holds; true: egress too
	restricted map[string]*restriction // by interface
	serial     uint64                  // of restrictions
	sets       uint32                  // setNumber
}

// The numbers by which a batch names its own sets.
const (
	boundID = iota + 1
	bound6ID
	egressID
	privateID
	private6ID
	policiedID
	proxiedID
	lastID
)

func newTable(tag, prefix string, block, twin netip.Prefix) *table {
	t := &table{name: "shard_" + tag, prefix: prefix, block: block, twin: twin, held: map[entry]bool{},
		restricted: map[string]*restriction{}, sets: lastID, ownable: true}
	t.nft = &nftables.Table{Name: t.name, Family: nftables.TableFamilyINet}
	t.bound = &nftables.Set{Table: t.nft, ID: boundID, Name: "bound", Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIPAddr)}
	t.bound6 = &nftables.Set{Table: t.nft, ID: bound6ID, Name: "bound6", Concatenation: true,
		KeyType: nftables.MustConcatSetType(nftables.TypeIFName, nftables.TypeIP6Addr)}
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
	addr6 netip.Addr // zero where there is no IPv6
}

func (e entry) boundElement() []nftables.SetElement {
	return []nftables.SetElement{{Key: append(ifname(e.iface), e.addr.AsSlice()...)}}
}

func (e entry) bound6Element() []nftables.SetElement {
	if !e.addr6.IsValid() {
		return nil
	}
	return []nftables.SetElement{{Key: append(ifname(e.iface), e.addr6.AsSlice()...)}}
}

// bind adds what says which addresses are the entry's.
func (t *table) bind(c *nftables.Conn, e entry) error {
	err := c.SetAddElements(t.bound, e.boundElement())
	if six := e.bound6Element(); six != nil {
		err = errors.Join(err, c.SetAddElements(t.bound6, six))
	}
	return err
}

func ifname(s string) []byte {
	b := make([]byte, unix.IFNAMSIZ)
	copy(b, s)
	return b
}

// locked sends what describe adds as one transaction: all of it holds afterwards, or nothing. The caller holds mu.
func (t *table) locked(describe func(c *nftables.Conn) error) error {
	return t.connected(func(*nftables.Conn) error {
		// The library asks for the kernel's word, and for a copy of each rule: as much work again as the rules. One word about
		// all will do, so it only writes the messages.
		var batch []netlink.Message
		c, err := nftables.New(nftables.WithTestDial(func(all []netlink.Message) ([]netlink.Message, error) {
			batch = append(batch, all...)
			return nil, io.EOF // no answer
		}))
		if err == nil {
			err = describe(c)
		}
		if err == nil {
			err = c.Flush()
		}
		if err != nil || len(batch) == 0 {
			return err
		}
		for i := range batch {
			batch[i].Header.Flags &^= netlink.Acknowledge | netlink.Echo
			batch[i].Header.Sequence, batch[i].Header.PID = 0, 0 // the socket's
		}
		batch[len(batch)-2].Header.Flags |= netlink.Acknowledge // the last of ours; of another, an error alone is told
		if _, err := t.sock.SendMessages(batch); err != nil {
			return err
		}
		_, err = t.sock.Receive()
		return err
	})
}

// connected gives ask the socket for transactions. The caller holds mu.
func (t *table) connected(ask func(c *nftables.Conn) error) error {
	err := t.dial()
	if err == nil {
		err = ask(t.conn)
	}
	if err != nil {
		// Answers nobody read must not reach the next transaction.
		t.hangUp()
		return fmt.Errorf("nftables table %s: %w", t.name, err)
	}
	return nil
}

// dial opens the socket for transactions, and makes the table its own.
func (t *table) dial() (err error) {
	if t.conn != nil {
		return nil
	}
	// A transaction is one message, which the socket must hold: 256 rules of one sandbox are 300 KiB, and the whole table is
	// put up in one. It bounds and takes nothing.
	const most = 256 << 20
	t.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(func(c *netlink.Conn) error {
		t.sock = c
		return errors.Join(c.SetWriteBuffer(most), c.SetReadBuffer(most))
	}))
	if err != nil {
		return fmt.Errorf("open nftables: %w", err)
	}
	port, err := portOfSocket(t.sock)
	t.mine.Store(port, nil)
	if err == nil && t.up && t.owned {
		t.owned, err = own(t.sock, t.nft.Name)
	}
	return err
}

func (t *table) hangUp() {
	if t.conn != nil {
		_ = t.conn.CloseLasting()
		t.conn, t.sock = nil, nil
	}
}

func (t *table) isMine(port uint32) bool { _, ok := t.mine.Load(port); return ok }

func (t *table) isName(name string) bool { return name == t.name || name == t.name+"_" }

func (t *table) close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.hangUp()
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
	return t.put()
}

// put puts up the whole table with all that is held, in place of what stood. It comes under the other name, since an owner is
// given to a table that is new and empty, and in two transactions. The first brings what packets do not meet, the second leads
// them there and takes the old table down: a set of ranges answers "no" from the moment when a transaction holds until it is
// done with all its parts, a millisecond in which nothing would be private.
func (t *table) put() (err error) {
	// A killed daemon owns its table until what it was just starting has let go of the socket.
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		if err = t.tryPut(); !errors.Is(err, unix.EPERM) || time.Now().After(deadline) {
			return err
		}
	}
}

func (t *table) tryPut() error {
	standing, err := t.standing()
	if err != nil {
		return err
	}
	before, next := t.nft.Name, t.name
	if len(standing) > 0 && standing[0] == t.name {
		next = t.name + "_"
	}
	owned := false
	if t.ownable {
		if owned, err = own(t.sock, next); err != nil {
			t.hangUp()
			return fmt.Errorf("make nftables table %s: %w", next, err)
		}
	}
	t.nft.Name = next
	err = t.locked(func(c *nftables.Conn) error {
		if !owned {
			c.AddTable(t.nft)
		}
		return t.furnish(c)
	})
	if err == nil {
		err = t.locked(func(c *nftables.Conn) error {
			err := t.describe(c)
			for _, old := range standing {
				c.DelTable(&nftables.Table{Name: old, Family: t.nft.Family})
			}
			return err
		})
	}
	if err != nil {
		t.nft.Name = before
		return err
	}
	t.up, t.owned = true, owned
	return nil
}

// standing lists the names under which there is a table of ours. What failed half way, which packets do not meet, is taken away.
func (t *table) standing() (names []string, err error) {
	var half []*nftables.Table
	err = t.connected(func(c *nftables.Conn) error {
		tables, err := c.ListTablesOfFamily(t.nft.Family)
		if err != nil {
			return err
		}
		for _, other := range tables {
			if !t.isName(other.Name) {
				continue
			}
			switch err := hasChain(t.sock, other.Name, lastChain); {
			case err == nil:
				names = append(names, other.Name)
			case errors.Is(err, unix.ENOENT):
				half = append(half, other)
			default:
				return err
			}
		}
		return nil
	})
	if err == nil && len(half) > 0 {
		err = t.locked(func(c *nftables.Conn) error {
			for _, other := range half {
				c.DelTable(other)
			}
			return nil
		})
		if errors.Is(err, unix.ENOENT) { // it went by itself
			err = nil
		}
	}
	return names, err
}

// restore puts the table up again if it vanished, as it does when an administrator reloads the host's firewall, or, touched, if
// another program may have changed it. It says whether it had to. A table without an owner may have let the first packet of a
// connection by at the moment when it went: forget is called before the table would take that connection for an old one.
func (t *table) restore(touched bool, forget func() error) (had bool, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	standing, err := t.standing()
	if err != nil {
		return false, err
	}
	if slices.Equal(standing, []string{t.nft.Name}) && (t.owned || !touched) {
		return false, nil
	}
	if !t.owned {
		err = forget()
	}
	return true, errors.Join(err, t.put())
}

// setWay6 says whether this host has a way out over IPv6. Flows that are open over IPv6 end where it has none.
func (t *table) setWay6(way bool) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.way6 = way
	return t.put()
}

// dropped are the destinations that no sandbox reaches. They are constant, so that nobody can empty them.
func (t *table) dropped() privateSets {
	return privateSets{
		&nftables.Set{Table: t.nft, ID: privateID, Name: "private", Interval: true, Constant: true, KeyType: nftables.TypeIPAddr},
		&nftables.Set{Table: t.nft, ID: private6ID, Name: "private6", Interval: true, Constant: true, KeyType: nftables.TypeIP6Addr}}
}

// furnish adds what no packet meets before describe: the sets, and the restrictions that are held.
func (t *table) furnish(c *nftables.Conn) error {
	dropped := t.dropped()
	err := errors.Join(c.AddSet(t.bound, nil), c.AddSet(t.bound6, nil), c.AddSet(t.egress, nil), c.AddSet(t.policied, nil), c.AddSet(t.proxied, nil),
		c.AddSet(dropped.v4, intervals(unreachable(true))), c.AddSet(dropped.v6, intervals(unreachable(false))))
	for iface, r := range t.restricted {
		err = errors.Join(err, t.describeRestriction(c, r))
		for _, set := range t.redirects(r) {
			err = errors.Join(err, c.SetAddElements(set, []nftables.SetElement{{Key: ifname(iface)}}))
		}
	}
	return err
}

// describe is what packets meet in a furnished table, with all that is held.
func (t *table) describe(c *nftables.Conn) error {
	err := t.chains(c, t.dropped())
	for e, opened := range t.held {
		err = errors.Join(err, t.bind(c, e))
		if opened {
			err = errors.Join(err, c.SetAddElements(t.egress, egressElement(e.iface, t.restricted[e.iface])))
		}
	}
	return err
}

// privateSets are the destinations that no sandbox reaches.
type privateSets struct{ v4, v6 *nftables.Set }

// match is of each family a match of packets to them.
func (p privateSets) match() [][]expr.Any {
	return [][]expr.Any{slices.Concat(v4.destination(), lookup(p.v4, true)), slices.Concat(v6.destination(), lookup(p.v6, true))}
}

// ruler gives what adds a rule to the end of a chain of the table.
func (t *table) ruler(c *nftables.Conn) func(chain *nftables.Chain, parts ...[]expr.Any) {
	return func(chain *nftables.Chain, parts ...[]expr.Any) {
		c.AddRule(&nftables.Rule{Table: t.nft, Chain: chain, Exprs: slices.Concat(parts...)})
	}
}

func (t *table) chains(c *nftables.Conn, dropped privateSets) error {
	chain := func(name string, hook *nftables.ChainHook, priority *nftables.ChainPriority, kind nftables.ChainType) *nftables.Chain {
		return c.AddChain(&nftables.Chain{Table: t.nft, Name: name, Hooknum: hook, Priority: priority, Type: kind})
	}
	rule := t.ruler(c)
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
	rule(raw, notLoopback(), v4.inBlock(t.block, v4.to), drop())
	rule(raw, notLoopback(), v6.inBlock(t.twin, v6.to), drop())

	rule(fromSandbox, t.isBound(expr.MetaKeyIIFNAME, v4, v4.from), verdict(expr.VerdictAccept))
	if !t.way6 {
		note, err := t.seen(c, shard.EgressRuleIPv6)
		if err != nil {
			return err
		}
		rule(fromSandbox, t.isBound(expr.MetaKeyIIFNAME, v6, v6.from), isIn(t.policied), note)
	}
	rule(fromSandbox, t.isBound(expr.MetaKeyIIFNAME, v6, v6.from), verdict(expr.VerdictAccept))
	rule(fromSandbox, drop())

	forward := chain("forward", nftables.ChainHookForward, nftables.ChainPriorityFilter, filter)
	rule(forward, t.ours(expr.MetaKeyIIFNAME, true), jump(outOf))
	rule(forward, t.ours(expr.MetaKeyIIFNAME, true), drop()) // should another empty what is jumped to
	rule(forward, t.ours(expr.MetaKeyOIFNAME, true), jump(into))
	rule(forward, t.ours(expr.MetaKeyOIFNAME, true), drop())
	rule(outOf, setMark(markJudged))

	if !t.way6 {
		noWay := chain("no_ipv6", nil, nil, "")
		t.reject(c, noWay)
		for _, from := range []*nftables.Chain{outOf, toHost} {
			rule(from, v6.is(), goTo(noWay))
		}
	}
	if err := t.restrictedChains(c, outOf, toHost, dropped); err != nil {
		return err
	}
	rule(outOf, t.ours(expr.MetaKeyOIFNAME, true), drop())
	for _, match := range dropped.match() {
		rule(outOf, match, drop())
	}
	rule(outOf, ctState(expr.CtStateBitINVALID), drop())
	rule(outOf, ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept))
	rule(outOf, []expr.Any{
		&expr.Meta{Key: expr.MetaKeyIIFNAME, Register: 1},
		&expr.Lookup{SourceRegister: 1, IsDestRegSet: true, SetName: t.egress.Name, SetID: t.egress.ID},
	})
	rule(outOf, drop())

	for _, f := range []family{v4, v6} {
		rule(into, t.isBound(expr.MetaKeyOIFNAME, f, f.to), ctState(expr.CtStateBitESTABLISHED|expr.CtStateBitRELATED), verdict(expr.VerdictAccept))
	}
	rule(into, drop())

	input := chain("input", nftables.ChainHookInput, nftables.ChainPriorityFilter, filter)
	rule(input, t.ours(expr.MetaKeyIIFNAME, true), jump(toHost))
	rule(input, t.ours(expr.MetaKeyIIFNAME, true), drop())
	rule(toHost, drop())
	output := chain("output", nftables.ChainHookOutput, nftables.ChainPriorityFilter, filter)
	rule(output, t.ours(expr.MetaKeyOIFNAME, true), jump(into))
	rule(output, t.ours(expr.MetaKeyOIFNAME, true), drop())

	nat := chain("nat", nftables.ChainHookPostrouting, nftables.ChainPriorityNATSource, nftables.ChainTypeNAT)
	rule(nat, v4.inBlock(t.block, v4.from), t.ours(expr.MetaKeyOIFNAME, false), []expr.Any{&expr.Masq{}})
	rule(nat, v6.inBlock(t.twin, v6.from), t.ours(expr.MetaKeyOIFNAME, false), []expr.Any{&expr.Masq{}})
	t.fenceChains(c)
	return nil
}

// open lets packets of the entries pass as theirs, and lets them begin flows.
func (t *table) open(entries ...entry) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.locked(func(c *nftables.Conn) (err error) {
		for _, e := range entries {
			err = errors.Join(err, t.bind(c, e), c.SetAddElements(t.egress, egressElement(e.iface, t.restricted[e.iface])))
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
	unbind6 := func(c *nftables.Conn) error {
		if six := e.bound6Element(); six != nil {
			return c.SetDeleteElements(t.bound6, six)
		}
		return nil
	}
	forbid := func(c *nftables.Conn) error {
		return c.SetDeleteElements(t.egress, []nftables.SetElement{{Key: ifname(e.iface)}})
	}
	err := t.locked(func(c *nftables.Conn) error { return errors.Join(unbind(c), unbind6(c), forbid(c)) })
	if err == nil {
		return t.unrestrict(e)
	}
	if !errors.Is(err, unix.ENOENT) {
		return err
	}
	// One missing element undoes the whole transaction, so each alone.
	err = nil
	for _, part := range []func(*nftables.Conn) error{unbind, unbind6, forbid} {
		if e := t.locked(part); !errors.Is(e, unix.ENOENT) {
			err = errors.Join(err, e)
		}
	}
	return errors.Join(err, t.unrestrict(e))
}

// remove takes the table down.
func (t *table) remove() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	standing, err := t.standing()
	if err != nil || len(standing) == 0 {
		return err
	}
	t.up = false
	return t.locked(func(c *nftables.Conn) error {
		for _, name := range standing {
			c.DelTable(&nftables.Table{Name: name, Family: t.nft.Family})
		}
		return nil
	})
}

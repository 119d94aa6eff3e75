package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	nl "github.com/mdlayher/netlink"
	"github.com/vishvananda/netlink"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// What other programs of the host do to its firewall must cut sandboxes off, not let them out. Three things see to that:
//
//   - Where the kernel can (6.9), the table has an owner, our socket: nobody else can flush, delete or change it, and it
//     stays when the daemon ends.
//   - A packet of a sandbox carries a mark once the table has seen to where it came from, and another once it was judged. A
//     rule of the host's routing sends what comes from our blocks without the first nowhere, and the table drops, at the last
//     moment, what lacks the second. So a table that is gone, or a chain of it that is empty, lets nothing pass.
//     (The kernel itself sees to it that IPv4 sources are true: rp_filter.)
//   - The kernel tells of every change that was not ours; the table is then put up again.
//
// Before the owner came, and while there is no daemon to own the table, two things are left when it is taken away: the host's
// own addresses are open until it is up again, since their routing comes first, and so is the way of a packet that was
// between two chains at that moment.

// Bits of a packet's mark: of ours alone, and of sandboxes' packets alone.
const (
	markBits   = 0x1040
	markBound  = 0x0040
	markJudged = 0x1040
)

// fenceRules are the rules of the host's routing, in their order.
func (n *Net) fenceRules() (rules []*netlink.Rule) {
	// Before every rule that leads somewhere, but for that of the host's own addresses, which nobody can come before.
	const ownPriority, fencePriority = 1, 2
	bits := uint32(markBits)
	for _, block := range []netip.Prefix{n.leases.block, n.leases.twin} {
		if !block.IsValid() {
			continue
		}
		src := &net.IPNet{IP: block.Addr().AsSlice(), Mask: net.CIDRMask(block.Bits(), block.Addr().BitLen())}
		own, fence := netlink.NewRule(), netlink.NewRule()
		// What this host says to a sandbox from its end of the link; so does the kernel ask where a source is to be found.
		own.Priority, own.Src, own.IifName, own.Table = ownPriority, src, "lo", unix.RT_TABLE_MAIN
		fence.Priority, fence.Src, fence.Mask, fence.Type = fencePriority, src, &bits, unix.RTN_BLACKHOLE
		rules = append(rules, own, fence)
	}
	return rules
}

// raiseFence adds the rules that are missing, and says whether one was.
func (n *Net) raiseFence() (missing bool, err error) {
	for _, r := range n.fenceRules() {
		switch e := n.rt.RuleAdd(r); {
		case e == nil:
			missing = true
		case !errors.Is(e, unix.EEXIST):
			err = errors.Join(err, fmt.Errorf("add a rule to the host's routing: %w", e))
		}
	}
	return missing, err
}

func (n *Net) removeFence() (err error) {
	for _, r := range slices.Backward(n.fenceRules()) {
		if e := n.rt.RuleDel(r); e != nil && !errors.Is(e, unix.ENOENT) && !errors.Is(e, unix.EAFNOSUPPORT) {
			err = errors.Join(err, fmt.Errorf("remove a rule from the host's routing: %w", e))
		}
	}
	return err
}

// lastChain is the one that a table has only if it has all of them.
const lastChain = "fence_out"

// fenceChains adds what gives and looks for the marks; what judges gives markJudged by itself.
func (t *table) fenceChains(c *nftables.Conn) {
	rule := t.ruler(c)
	// Behind whatever else of the host changes marks, such as those that connections keep.
	late := nftables.ChainPriorityRef(1000)
	bound := c.AddChain(&nftables.Chain{Table: t.nft, Name: "fence_in", Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPrerouting, Priority: late})
	left := c.AddChain(&nftables.Chain{Table: t.nft, Name: lastChain, Type: nftables.ChainTypeFilter, Hooknum: nftables.ChainHookPostrouting,
		Priority: nftables.ChainPriorityMangle}) // before addresses are translated
	local := []expr.Any{&expr.Meta{Key: expr.MetaKeyOIFNAME, Register: 1}, &expr.Cmp{Op: expr.CmpOpEq, Register: 1, Data: ifname("lo")}}
	rule(left, local, verdict(expr.VerdictAccept)) // this host to its own end of a link
	for f, block := range map[family]netip.Prefix{v4: t.block, v6: t.twin} {
		rule(bound, t.isBound(expr.MetaKeyIIFNAME, f, f.from), setMark(markBound))
		rule(left, f.inBlock(block, f.from), t.ours(expr.MetaKeyOIFNAME, false), marked(markJudged, false), drop())
	}
}

// own makes the table named name ours and lasting, and makes it where there is none; false where the kernel cannot.
func own(c *nl.Conn, name string) (bool, error) {
	const owner, persist = 1 << 1, 1 << 2 // NFT_TABLE_F_OWNER, NFT_TABLE_F_PERSIST
	table, err := message(unix.NFT_MSG_NEWTABLE, nl.Acknowledge|nl.Create,
		nl.Attribute{Type: unix.NFTA_TABLE_NAME, Data: append([]byte(name), 0)},
		nl.Attribute{Type: unix.NFTA_TABLE_FLAGS, Data: binary.BigEndian.AppendUint32(nil, owner|persist)})
	if err != nil {
		return false, err
	}
	batch := []byte{unix.NFPROTO_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}
	_, err = c.SendMessages([]nl.Message{
		{Header: nl.Header{Type: unix.NFNL_MSG_BATCH_BEGIN, Flags: nl.Request}, Data: batch},
		table,
		{Header: nl.Header{Type: unix.NFNL_MSG_BATCH_END, Flags: nl.Request}, Data: batch},
	})
	if err == nil {
		_, err = c.Receive()
	}
	if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
		return false, nil
	}
	return err == nil, err
}

// hasChain is ENOENT where there is no such table or no such chain of it. (The library's own words for this hide what failed.)
func hasChain(c *nl.Conn, table, chain string) error {
	ask, err := message(unix.NFT_MSG_GETCHAIN, 0,
		nl.Attribute{Type: unix.NFTA_CHAIN_TABLE, Data: append([]byte(table), 0)},
		nl.Attribute{Type: unix.NFTA_CHAIN_NAME, Data: append([]byte(chain), 0)})
	if err == nil {
		_, err = c.Execute(ask)
	}
	return err
}

// message is one to nftables about something of family inet.
func message(kind uint16, flags nl.HeaderFlags, attributes ...nl.Attribute) (nl.Message, error) {
	attrs, err := nl.MarshalAttributes(attributes)
	return nl.Message{
		Header: nl.Header{Type: nl.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: nl.Request | flags},
		Data:   append([]byte{unix.NFPROTO_INET, unix.NFNETLINK_V0, 0, 0}, attrs...),
	}, err
}

// portOfSocket is the number by which the kernel tells whose a change was.
func portOfSocket(c *nl.Conn) (port uint32, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	e := raw.Control(func(fd uintptr) {
		var sa unix.Sockaddr
		if sa, err = unix.Getsockname(int(fd)); err == nil {
			if at, ok := sa.(*unix.SockaddrNetlink); ok {
				port = at.Pid
			}
		}
	})
	return port, errors.Join(err, e)
}

// tableChanges signals touched for every change of our table that was not ours, until ctx ends.
func (t *table) tableChanges(ctx context.Context, touched chan<- struct{}) error {
	const changes = 7 // NFNLGRP_NFTABLES
	return listen(ctx, unix.NETLINK_NETFILTER, []uint32{changes}, touched, func(c *nl.Conn, m nl.Message) bool {
		if t.isMine(m.Header.PID) {
			// There are many of these: the kernel need not tell of more.
			if filter, err := notFrom(m.Header.PID); err == nil {
				_ = c.SetBPF(filter)
			}
			return false
		}
		const head = 4
		if m.Header.Type>>8 != unix.NFNL_SUBSYS_NFTABLES || len(m.Data) < head {
			return false
		}
		attrs, err := nl.UnmarshalAttributes(m.Data[head:])
		return err == nil && slices.ContainsFunc(attrs, func(a nl.Attribute) bool {
			// All kinds of objects name their table so.
			return a.Type == unix.NFTA_TABLE_NAME && t.isName(string(a.Data[:max(len(a.Data)-1, 0)]))
		})
	})
}

// notFrom lets pass what other sockets changed.
func notFrom(port uint32) ([]bpf.RawInstruction, error) {
	const offset = 12 // nlmsg_pid
	return bpf.Assemble([]bpf.Instruction{
		bpf.LoadAbsolute{Off: offset, Size: 4},
		bpf.JumpIf{Cond: bpf.JumpEqual, Val: binary.BigEndian.Uint32(binary.NativeEndian.AppendUint32(nil, port)), SkipTrue: 1},
		bpf.RetConstant{Val: 1 << 20},
		bpf.RetConstant{Val: 0},
	})
}

// ruleChanges signals touched when rules of the host's routing change, until ctx ends.
func ruleChanges(ctx context.Context, touched chan<- struct{}) error {
	const rules4, rules6 = 8, 19 // RTNLGRP_IPV4_RULE, RTNLGRP_IPV6_RULE
	return listen(ctx, unix.NETLINK_ROUTE, []uint32{rules4, rules6}, touched, func(_ *nl.Conn, m nl.Message) bool {
		return m.Header.Type == unix.RTM_DELRULE
	})
}

// listen signals touched for the messages of the groups that matter, and when some were lost.
func listen(ctx context.Context, family int, groups []uint32, touched chan<- struct{}, matters func(*nl.Conn, nl.Message) bool) error {
	conn, err := nl.Dial(family, nil)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetReadBuffer(1 << 20)
	for _, g := range groups {
		if err := conn.JoinGroup(g); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	for {
		messages, err := conn.Receive()
		lost := errors.Is(err, unix.ENOBUFS)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil && !lost && !errors.Is(err, os.ErrDeadlineExceeded):
			return err
		}
		for _, m := range messages {
			lost = matters(conn, m) || lost
		}
		if lost {
			select {
			case touched <- struct{}{}:
			default:
			}
		}
	}
}

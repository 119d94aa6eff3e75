package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"time"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// The kernel's words for a group of reports (linux/netfilter/nfnetlink_log.h).
const (
	ulogPacket, ulogConfig = unix.NFNL_SUBSYS_ULOG<<8 | 0, unix.NFNL_SUBSYS_ULOG<<8 | 1
	cfgCommand, cfgMode    = 1, 2
	cfgThreshold           = 5
	cfgBind, cfgCopyPacket = 1, 2
	ulogPayload            = 9
	ulogPrefix             = 10
)

// reportedHead is how much the kernel reports of a packet, in bytes: an IPv4 head with options and the ports need 64, an IPv6
// head 40, and what may stand between that and the ports is seldom more than another 40.
const reportedHead = 128

// reports opens the socket that the kernel's reports of refused packets come by.
func (t *table) reports() (*netlink.Conn, error) {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, nil)
	if err != nil {
		return nil, fmt.Errorf("open the firewall's reports: %w", err)
	}
	_ = conn.SetReadBuffer(1 << 20)
	mode := binary.BigEndian.AppendUint32(nil, reportedHead)
	for _, a := range []netlink.Attribute{
		{Type: cfgCommand, Data: []byte{cfgBind}},
		{Type: cfgMode, Data: append(mode, cfgCopyPacket, 0)},
		{Type: cfgThreshold, Data: binary.BigEndian.AppendUint32(nil, 1)}, // at once, one by one
	} {
		attrs, err := netlink.MarshalAttributes([]netlink.Attribute{a})
		if err == nil {
			head := []byte{unix.AF_UNSPEC, 0}
			_, err = conn.Execute(netlink.Message{
				Header: netlink.Header{Type: ulogConfig, Flags: netlink.Request | netlink.Acknowledge},
				Data:   append(binary.BigEndian.AppendUint16(head, t.group()), attrs...),
			})
		}
		if err != nil {
			_ = conn.Close()
			return nil, fmt.Errorf("ask for the firewall's reports: %w", err)
		}
	}
	return conn, nil
}

// Drops calls report for what restricted sandboxes were refused, one after the other, until ctx ends. report must not
// wait. There can be one caller at a time.
func (n *Net) Drops(ctx context.Context, report func(Drop)) error {
	conn, err := n.table.reports()
	if err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() {
			<-ctx.Done()
		}
		_ = conn.Close()
	}()
	c := &counts{net: n, seen: map[place]*tally{}}
	next := time.Now().Add(time.Second)
	for ctx.Err() == nil {
		if !time.Now().Before(next) {
			c.report(report)
			next = time.Now().Add(time.Second)
		}
		if err := conn.SetReadDeadline(next); err != nil {
			return fmt.Errorf("wait for the firewall's reports: %w", err)
		}
		if ctx.Err() != nil { // the deadline above may have replaced that of the end
			break
		}
		messages, err := conn.Receive()
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, unix.ENOBUFS): // what did not fit is in the counters
			continue
		case err != nil:
			return fmt.Errorf("read the firewall's reports: %w", err)
		}
		for _, m := range messages {
			if d, ok := parseReport(m); ok {
				d.Source = n.table.owner(d.Source)
				c.saw(d)
				report(d)
			}
		}
	}
	return nil
}

// parseReport reads one message of the kernel. What it holds of the packet was written by the sandbox.
func parseReport(m netlink.Message) (d Drop, ok bool) {
	const header = 4
	if m.Header.Type != ulogPacket || len(m.Data) < header {
		return d, false
	}
	attrs, err := netlink.UnmarshalAttributes(m.Data[header:])
	if err != nil {
		return d, false
	}
	for _, a := range attrs {
		switch a.Type {
		case ulogPrefix:
			d.Label = strings.TrimRight(string(a.Data), "\x00")
		case ulogPayload:
			ok = d.parsePacket(a.Data)
		}
	}
	return d, ok && d.Label != ""
}

func (d *Drop) parsePacket(p []byte) bool {
	if len(p) == 0 {
		return false
	}
	var rest []byte // what comes behind the head, with the ports
	switch p[0] >> 4 {
	case 4:
		if len(p) < 20 {
			return false
		}
		d.Protocol = p[9]
		d.Source, d.Dest = netip.AddrFrom4([4]byte(p[12:16])), netip.AddrFrom4([4]byte(p[16:20]))
		rest = p[min(int(p[0]&15)*4, len(p)):]
	case 6:
		if len(p) < 40 {
			return false
		}
		d.Source, d.Dest = netip.AddrFrom16([16]byte(p[8:24])), netip.AddrFrom16([16]byte(p[24:40]))
		d.Protocol, rest = behindExtensions(p[6], p[40:])
	default:
		return false
	}
	if hasPorts(d.Protocol) && len(rest) >= 4 {
		d.Port = binary.BigEndian.Uint16(rest[2:])
	}
	return true
}

// behindExtensions skips the extension heads of an IPv6 packet. A fragment that is not the first has no ports.
func behindExtensions(next byte, p []byte) (protocol byte, rest []byte) {
	for len(p) >= 8 {
		size := (int(p[1]) + 1) * 8
		switch next {
		case unix.IPPROTO_HOPOPTS, unix.IPPROTO_ROUTING, unix.IPPROTO_DSTOPTS:
		case unix.IPPROTO_AH:
			size = (int(p[1]) + 2) * 4
		case unix.IPPROTO_FRAGMENT:
			if size = 8; binary.BigEndian.Uint16(p[2:])&^7 != 0 {
				return p[0], nil
			}
		default:
			return next, p
		}
		next, p = p[0], p[min(size, len(p)):]
	}
	return next, p
}

func hasPorts(protocol uint8) bool {
	switch protocol {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP, unix.IPPROTO_SCTP, unix.IPPROTO_UDPLITE, unix.IPPROTO_DCCP:
		return true
	}
	return false
}

// owner is the IPv4 address of the sandbox that has addr: it has the same end in both blocks.
func (t *table) owner(addr netip.Addr) netip.Addr {
	if addr.Is4() {
		return addr
	}
	a, six := t.block.Addr().As4(), addr.As16()
	a[2], a[3] = six[14], six[15]
	return netip.AddrFrom4(a)
}

// counts knows how many refusals were not reported. Only sandboxes that were just refused something are looked at.
type counts struct {
	net  *Net
	seen map[place]*tally
}

type place struct {
	source netip.Addr
	label  string
}

type tally struct {
	shown uint64 // reported since the last look
	total uint64 // of the counter at the last look
	chain string
	idle  int // looks without a refusal
}

func (c *counts) saw(d Drop) {
	at := place{d.Source, d.Label}
	k := c.seen[at]
	if k == nil {
		if k = c.net.table.refusalOf(at); k == nil {
			return
		}
		c.seen[at] = k
	}
	k.shown++
}

// report tells of what was refused and not reported since the last look.
func (c *counts) report(report func(Drop)) {
	const quiet, rarely = 3, 60
	for at, k := range c.seen {
		if k.shown == 0 && k.idle >= quiet && k.idle%rarely != 0 { // the next refusal is reported for sure
			k.idle++
			continue
		}
		total, ok := c.net.table.counted(k.chain)
		if !ok { // the rules have changed
			now := c.net.table.refusalOf(at)
			if now == nil {
				delete(c.seen, at)
				continue
			}
			k.chain, k.total = now.chain, 0
			if total, ok = c.net.table.counted(k.chain); !ok {
				continue
			}
		}
		k.total = min(k.total, total) // the counter began anew when the table had to come back
		if total > k.total+k.shown {
			report(Drop{Source: at.source, Label: at.label, More: total - k.total - k.shown})
		}
		k.idle++
		if total > k.total {
			k.idle = 0
		}
		k.total, k.shown = total, 0
	}
}

// refusalOf finds the chain that refuses under a label; nil for the labels that all sandboxes share, which nothing counts
// by sandbox.
func (t *table) refusalOf(at place) *tally {
	t.mu.Lock()
	defer t.mu.Unlock()
	for e := range t.held {
		if e.addr != at.source {
			continue
		}
		r := t.restricted[e.iface]
		if r == nil {
			return nil
		}
		for i := range len(r.Rules.Rules) + 1 {
			if r.refuses(i) && r.label(i) == at.label {
				return &tally{chain: r.refusal(i)}
			}
		}
	}
	return nil
}

// counted reads the counter at the head of a refusing chain.
func (t *table) counted(chain string) (packets uint64, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	err := t.connected(func(c *nftables.Conn) error {
		rules, err := c.GetRules(t.nft, &nftables.Chain{Table: t.nft, Name: chain})
		if errors.Is(err, unix.ENOENT) || err == nil && len(rules) == 0 {
			return nil
		}
		if err == nil && len(rules[0].Exprs) == 1 {
			if counter, is := rules[0].Exprs[0].(*expr.Counter); is {
				packets, ok = counter.Packets, true
			}
		}
		return err
	})
	return packets, ok && err == nil
}

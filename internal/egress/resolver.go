package egress

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"time"

	"github.com/miekg/dns"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/policy"
)

const (
	// lookupTime bounds one question from its arrival to its answer.
	lookupTime = 8 * time.Second
	// tcpIdle bounds the wait for a question on a TCP connection.
	tcpIdle = 10 * time.Second
	// An address is open at least minOpen, whatever the record says, and at most maxOpen; and for slack longer, so that who
	// dials at the end of a record's life still arrives.
	minOpen, maxOpen, slack = time.Second, time.Hour, 2 * time.Second
	// What carries data out in a name: where only `allow dns` lets it be looked up, no name is longer.
	maxPlainName, maxPlainLabel = 128, 48
)

// resolve begins to answer the lookups of w on the gateway's address of a link.
func (e *Enforcer) resolve(ctx context.Context, w *ward, l Link) error {
	at := net.JoinHostPort(l.Gateway.String(), fmt.Sprint(netns.ResolverPort))
	udp, err := new(net.ListenConfig).ListenPacket(ctx, "udp", at)
	if err != nil {
		return notListening("the lookups", err)
	}
	tcp, err := new(net.ListenConfig).Listen(ctx, "tcp", at)
	if err != nil {
		_ = udp.Close()
		return notListening("the lookups", err)
	}
	w.tasks.Go(func() { <-ctx.Done(); _ = udp.Close(); _ = tcp.Close() })
	w.tasks.Go(func() { e.serveUDP(ctx, w, udp.(*net.UDPConn)) })
	w.tasks.Go(func() { e.serveTCP(ctx, w, tcp) })
	return nil
}

// notListening says why a port on a sandbox's gateway could not be had. A program of the host that listens on every address
// of such a port takes it away from us.
func notListening(what string, err error) error {
	if op, ok := errors.AsType[*net.OpError](err); ok && op.Addr != nil && errors.Is(err, syscall.EADDRINUSE) {
		if at, e := netip.ParseAddrPort(op.Addr.String()); e == nil {
			return shard.Errorf(shard.CodeInUse, "port %d (%s) is taken by another program of this host, one that listens on all addresses: "+
				"shard needs it for %s of sandboxes with a policy or a secret", at.Port(), op.Net, what)
		}
	}
	return fmt.Errorf("listen for %s of a sandbox: %w", what, err)
}

// serveUDP answers datagrams, maxPerWard at a time: the others wait in the socket, where they are in nobody else's way.
func (e *Enforcer) serveUDP(ctx context.Context, w *ward, conn *net.UDPConn) {
	buf := make([]byte, dns.MaxMsgSize)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buf)
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			continue // an ICMP error for an earlier answer
		}
		if !w.owns(from.Addr()) {
			continue
		}
		packet := append([]byte(nil), buf[:n]...)
		select {
		case w.asking <- struct{}{}:
		case <-ctx.Done():
			return
		}
		w.tasks.Go(func() {
			defer func() { <-w.asking }()
			if answer := e.handle(ctx, w, packet, "udp"); answer != nil {
				_, _ = conn.WriteToUDPAddrPort(answer, from)
			}
		})
	}
}

// owns says whether an address is the sandbox's. The wall lets no other sandbox come here, but the gateway is an address of this
// host, which its programs reach, and its neighbours if they route there.
func (w *ward) owns(a netip.Addr) bool {
	a = a.Unmap()
	return a == w.addr || a.IsValid() && a == w.addr6
}

// serveTCP answers connections, maxPerWard of them at a time.
func (e *Enforcer) serveTCP(ctx context.Context, w *ward, l net.Listener) {
	open := make(chan struct{}, maxPerWard)
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(100 * time.Millisecond): // no descriptors
			}
			continue
		}
		if !w.owns(addrOf(conn.RemoteAddr())) {
			_ = conn.Close()
			continue
		}
		select {
		case open <- struct{}{}:
		default:
			_ = conn.Close()
			continue
		}
		w.tasks.Go(func() {
			defer func() { _ = conn.Close(); <-open }()
			defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
			e.serveConn(ctx, w, conn)
		})
	}
}

func (e *Enforcer) serveConn(ctx context.Context, w *ward, conn net.Conn) {
	for {
		_ = conn.SetDeadline(time.Now().Add(tcpIdle))
		var size [2]byte
		if _, err := io.ReadFull(conn, size[:]); err != nil {
			return
		}
		packet := make([]byte, binary.BigEndian.Uint16(size[:]))
		if _, err := io.ReadFull(conn, packet); err != nil {
			return
		}
		answer := e.handle(ctx, w, packet, "tcp")
		if answer == nil {
			return
		}
		_ = conn.SetDeadline(time.Now().Add(tcpIdle))
		if _, err := conn.Write(append(binary.BigEndian.AppendUint16(nil, uint16(len(answer))), answer...)); err != nil {
			return
		}
	}
}

// handle answers one message; nil is no answer at all.
func (e *Enforcer) handle(ctx context.Context, w *ward, packet []byte, protocol string) []byte {
	q := new(dns.Msg)
	if err := q.Unpack(packet); err != nil || q.Response {
		if len(packet) < 12 || packet[2]&0x80 != 0 {
			return nil
		}
		m := new(dns.Msg)
		m.Id, m.Response, m.Rcode = binary.BigEndian.Uint16(packet), true, dns.RcodeFormatError
		answer, _ := m.Pack()
		return answer
	}
	ctx, cancel := context.WithTimeout(ctx, lookupTime)
	defer cancel()
	m := e.answer(ctx, w, q, protocol)
	m.Id, m.Response, m.Opcode = q.Id, true, q.Opcode
	m.RecursionDesired, m.RecursionAvailable = q.RecursionDesired, true
	if len(q.Question) == 1 { // thousands of them would make an answer of any length
		m.Question = q.Question
	}
	m.Compress = true
	size := dns.MaxMsgSize - 1
	opt := q.IsEdns0()
	if protocol == "udp" {
		size = dns.MinMsgSize
		if opt != nil {
			size = min(max(int(opt.UDPSize()), dns.MinMsgSize), ednsSize)
		}
	}
	if opt != nil {
		m.SetEdns0(ednsSize, false)
	}
	m.Truncate(size)
	answer, err := m.Pack()
	if err != nil {
		m = &dns.Msg{MsgHdr: dns.MsgHdr{Id: q.Id, Response: true, Rcode: dns.RcodeServerFailure}, Question: m.Question}
		answer, _ = m.Pack()
	}
	return answer
}

func reply(rcode int) *dns.Msg { return &dns.Msg{MsgHdr: dns.MsgHdr{Rcode: rcode}} }

// answer is what w learns: names that no rule lists do not exist, and what an answer leads to is open before it is given.
func (e *Enforcer) answer(ctx context.Context, w *ward, q *dns.Msg, protocol string) *dns.Msg {
	switch {
	case q.Opcode != dns.OpcodeQuery:
		return reply(dns.RcodeNotImplemented)
	case len(q.Question) != 1:
		return reply(dns.RcodeFormatError)
	case q.Question[0].Qclass != dns.ClassINET:
		return reply(dns.RcodeRefused)
	}
	question := q.Question[0]
	w.rules.RLock()
	p := w.policy
	w.rules.RUnlock()
	d := shard.EgressDecision{Source: shard.EgressDNS, Verdict: shard.EgressDeny, Port: 53, Host: shownName(question.Name)}
	say := func(v policy.Verdict, reason string) {
		d.Rule, d.RuleText = v.Rule, v.Text
		if reason == "" {
			reason = v.Reason
		}
		if d.Reason = reason; reason != "" {
			d.Reason = "; " + reason
		}
		d.Reason = typeName(question.Qtype) + d.Reason
		w.journal.note(d)
	}
	limit := policy.Verdict{Rule: shard.EgressRuleLimit}
	if v := p.Packet(netip.IPv4Unspecified(), protocol, 53, nil); !v.Allow {
		say(v, "")
		return reply(dns.RcodeNameError)
	}
	name, err := policy.Host(strings.TrimSuffix(question.Name, "."))
	if err != nil {
		say(policy.Verdict{Rule: shard.EgressRuleDefault}, "this is no host name")
		return reply(dns.RcodeNameError)
	}
	a := p.Lookup(name)
	if !a.Allow {
		say(a.Verdict, "")
		return reply(dns.RcodeNameError)
	}
	if reason := carries(question.Qtype, name, a.Listed); reason != "" {
		say(a.Verdict, reason)
		return reply(dns.RcodeRefused)
	}
	if question.Qtype == dns.TypeAAAA && !e.cfg.Wall.IPv6() { // to say so at once is better than a dial that fails
		d.Verdict = shard.EgressAllow
		say(a.Verdict, "no addresses: "+noIPv6)
		return new(dns.Msg)
	}
	found, err := e.look(ctx, w, question)
	switch {
	case errors.Is(err, errBusy):
		say(limit, "too many lookups are under way")
		return reply(dns.RcodeServerFailure)
	case err != nil:
		say(policy.Verdict{Rule: shard.EgressRuleResolve}, "the nameservers do not answer")
		return reply(dns.RcodeServerFailure)
	}
	m, addrs, private, ttl := tidy(found, question)
	if len(addrs) > 0 {
		d.Address = addrs[0].String()
		if a, err = e.open(ctx, w, name, addrs, ttl); err != nil {
			e.cfg.Log.Error("could not open what a name leads to", "sandbox", w.id, "err", err)
			say(limit, "the addresses could not be opened")
			return reply(dns.RcodeServerFailure)
		}
		if !a.Allow { // the policy changed meanwhile
			say(a.Verdict, "")
			return reply(dns.RcodeNameError)
		}
	} else if private.IsValid() {
		d.Address = private.String()
		say(policy.Verdict{Rule: shard.EgressRulePrivate}, "the name leads to private addresses only, which are left out of answers")
		return m
	}
	d.Verdict = shard.EgressAllow
	reason := ""
	if m.Rcode == dns.RcodeNameError {
		reason = "the name does not exist"
	}
	say(a.Verdict, reason)
	return m
}

// open puts the addresses of a name into the wall, under the rules that hold now.
func (e *Enforcer) open(ctx context.Context, w *ward, name string, addrs []netip.Addr, ttl time.Duration) (policy.Answer, error) {
	until := time.Now().Add(min(max(ttl, minOpen), maxOpen) + slack)
	w.rules.RLock()
	defer w.rules.RUnlock()
	a := w.policy.Lookup(name)
	if len(a.Feeds) == 0 {
		return a, nil
	}
	w.mu.Lock()
	if len(w.known) >= maxKnown {
		for other := range w.known { // any
			delete(w.known, other)
			break
		}
	}
	w.known[knownName{name, addrs[0].Is6()}] = answered{addrs, until}
	w.mu.Unlock()
	return a, e.cfg.Wall.Feed(ctx, w.id, a.Feeds, addrs, until)
}

// carries says why a lookup is refused though its name may be looked up: because of the data that it may carry.
func carries(qtype uint16, name string, listed bool) string {
	switch qtype {
	case dns.TypeANY, dns.TypeAXFR, dns.TypeIXFR, dns.TypeMAILA, dns.TypeMAILB:
		return "this type of question is not answered"
	case dns.TypeA, dns.TypeAAAA, dns.TypeCNAME, dns.TypeHTTPS, dns.TypeSVCB, dns.TypeSRV, dns.TypePTR, dns.TypeMX, dns.TypeNS, dns.TypeSOA:
	default:
		if !listed {
			return "records of this type carry data, and no rule allows the name"
		}
	}
	if listed {
		return ""
	}
	long := len(name) > maxPlainName
	for label := range strings.SplitSeq(name, ".") {
		long = long || len(label) > maxPlainLabel
	}
	if long {
		return "a name as long as this carries data, and no rule allows it"
	}
	return ""
}

// tidy makes the answer of what a nameserver said: the chain of aliases from the name asked for and the records at its end,
// and nothing else. Addresses that no sandbox reaches are left out, since a name must not lead there, and so are hints at
// addresses and keys in service records, which would lead around the resolver. It returns the addresses and for how long
// they are good, and one that was left out.
func tidy(in *dns.Msg, q dns.Question) (m *dns.Msg, addrs []netip.Addr, private netip.Addr, ttl time.Duration) {
	m = reply(in.Rcode)
	if in.Rcode != dns.RcodeSuccess && in.Rcode != dns.RcodeNameError {
		m.Rcode = dns.RcodeServerFailure
		return m, nil, private, 0
	}
	least := uint32(maxOpen / time.Second)
	// One that IPv6 writes as IPv4's is no address to dial over IPv6: a question for the others answers with it.
	address := func(a netip.Addr) (good bool) {
		if a.Is4In6() || shard.IsUnreachable(a) {
			private = a
			return false
		}
		return len(addrs) < maxAnswer
	}
	keep := func(rr dns.RR) {
		h := rr.Header()
		least = min(least, h.Ttl)
		if strings.EqualFold(h.Name, q.Name) {
			h.Name = q.Name // as it was asked, capitals and all
		}
		m.Answer = append(m.Answer, rr)
	}
	at := q.Name
	for range maxChain {
		next := ""
		for _, rr := range in.Answer {
			h := rr.Header()
			if h.Class != dns.ClassINET || !strings.EqualFold(h.Name, at) {
				continue
			}
			switch rr := dns.Copy(rr).(type) {
			case *dns.CNAME:
				if next == "" {
					keep(rr)
					if q.Qtype != dns.TypeCNAME {
						next = rr.Target
					}
				}
			case *dns.A:
				if h.Rrtype != q.Qtype {
					continue
				}
				if a, _ := netip.AddrFromSlice(rr.A.To4()); address(a) {
					addrs = append(addrs, a)
					keep(rr)
				}
			case *dns.AAAA:
				if h.Rrtype != q.Qtype {
					continue
				}
				if a, _ := netip.AddrFromSlice(rr.AAAA.To16()); address(a) {
					addrs = append(addrs, a)
					keep(rr)
				}
			case *dns.HTTPS:
				if h.Rrtype == q.Qtype {
					rr.Value = plain(rr.Value)
					keep(rr)
				}
			case *dns.SVCB:
				if h.Rrtype == q.Qtype {
					rr.Value = plain(rr.Value)
					keep(rr)
				}
			default:
				if h.Rrtype == q.Qtype {
					keep(rr)
				}
			}
		}
		if next == "" {
			break
		}
		at = next
	}
	for _, rr := range in.Ns {
		if soa, ok := rr.(*dns.SOA); ok && len(m.Answer) == 0 {
			m.Ns = append(m.Ns, dns.Copy(soa))
			least = min(least, soa.Hdr.Ttl, soa.Minttl)
		}
	}
	for _, rr := range m.Answer {
		rr.Header().Ttl = min(rr.Header().Ttl, uint32(maxOpen/time.Second))
	}
	return m, addrs, private, time.Duration(least) * time.Second
}

func plain(values []dns.SVCBKeyValue) []dns.SVCBKeyValue {
	var out []dns.SVCBKeyValue
	for _, v := range values {
		switch v.Key() {
		case dns.SVCB_IPV4HINT, dns.SVCB_IPV6HINT, dns.SVCB_ECHCONFIG:
		case dns.SVCB_MANDATORY: // may name what has gone
		default:
			out = append(out, v)
		}
	}
	return out
}

func typeName(t uint16) string {
	if s := dns.TypeToString[t]; s != "" {
		return s
	}
	return fmt.Sprintf("TYPE%d", t)
}

// shownName is a name from a question as the log shows it.
func shownName(name string) string {
	name = strings.ToLower(strings.TrimSuffix(name, "."))
	if name == "" {
		return "."
	}
	return name
}

package egress

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/miekg/dns"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/policy"
)

func rulesOf(t testing.TB, rules ...string) *policy.Compiled {
	t.Helper()
	var list []shard.PolicyRule
	for _, r := range rules {
		action, rule, _ := strings.Cut(r, " ")
		list = append(list, shard.PolicyRule{Action: action, Rule: rule})
	}
	parsed, err := policy.ParseAll(list)
	if err != nil {
		t.Fatal(err)
	}
	c, err := policy.Compile(parsed)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// lonely is a resolver without nameservers.
func lonely(t testing.TB, rules ...string) (*Enforcer, *ward) {
	t.Helper()
	dir := t.TempDir()
	e := &Enforcer{cfg: Config{Wall: &netns.Net{}, Dir: func(string) string { return dir }, Log: slog.New(slog.DiscardHandler)}, turns: turns{left: maxAsking, of: map[*ward]int{}},
		wards: map[string]*ward{}, journals: map[string]*journal{}}
	w := &ward{id: "box", journal: e.journal("box"), policy: rulesOf(t, rules...), known: map[knownName]answered{}}
	return e, w
}

func TestRefusedLookups(t *testing.T) {
	e, w := lonely(t, "allow suffix:good.test", "allow dns")
	closed, shut := lonely(t, "allow 203.0.113.0/24")
	for _, c := range []struct {
		e     *Enforcer
		w     *ward
		name  string
		qtype uint16
		rcode int
	}{
		{e, w, "good.test.", dns.TypeA, dns.RcodeServerFailure}, // there are no nameservers
		{e, w, "good.test.", dns.TypeTXT, dns.RcodeServerFailure},
		{e, w, "good.test.", dns.TypeAAAA, dns.RcodeSuccess},
		{e, w, "good.test.", dns.TypeANY, dns.RcodeRefused},
		{e, w, "other.test.", dns.TypeTXT, dns.RcodeRefused},
		{e, w, "other.test.", dns.TypeNULL, dns.RcodeRefused},
		{e, w, "other.test.", dns.TypeA, dns.RcodeServerFailure},
		{e, w, strings.Repeat("a", 60) + ".other.test.", dns.TypeA, dns.RcodeRefused},
		{closed, shut, "good.test.", dns.TypeA, dns.RcodeNameError},
	} {
		q := new(dns.Msg)
		q.SetQuestion(c.name, c.qtype)
		packet, err := q.Pack()
		if err != nil {
			t.Fatal(err)
		}
		m := new(dns.Msg)
		if err := m.Unpack(c.e.handle(t.Context(), c.w, packet, "udp")); err != nil {
			t.Fatal(err)
		}
		if m.Rcode != c.rcode || m.Id != q.Id || !m.Response {
			t.Errorf("%s %s: %s", c.name, dns.TypeToString[c.qtype], dns.RcodeToString[m.Rcode])
		}
	}
}

func records(t testing.TB, lines ...string) []dns.RR {
	t.Helper()
	var out []dns.RR
	for _, l := range lines {
		rr, err := dns.NewRR(l)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, rr)
	}
	return out
}

// TestTidy: an answer holds the chain from the name that was asked for, and no address that leads inside.
func TestTidy(t *testing.T) {
	in := &dns.Msg{Answer: records(t,
		"cdn.test. 60 IN A 203.0.113.9", // before its alias, as some nameservers do
		"www.test. 5 IN CNAME Cdn.test.",
		"cdn.test. 60 IN A 10.0.0.1",
		"cdn.test. 60 IN A 169.254.169.254",
		"other.test. 60 IN A 203.0.113.66",
		"cdn.test. 60 IN AAAA 2001:db8::1")}
	m, addrs, private, ttl := tidy(in, dns.Question{Name: "WwW.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET})
	if len(addrs) != 1 || addrs[0] != netip.MustParseAddr("203.0.113.9") || !private.IsValid() || ttl.Seconds() != 5 || len(m.Answer) != 2 {
		t.Errorf("%v %v %v\n%v", addrs, private, ttl, m)
	}
	if m.Answer[0].Header().Name != "WwW.test." {
		t.Errorf("the name was asked for as WwW.test., and the answer is about %s", m.Answer[0].Header().Name)
	}
	in = &dns.Msg{Answer: records(t, `svc.test. 60 IN HTTPS 1 . alpn="h3,h2" ipv4hint=10.0.0.1 ipv6hint=2001:db8::1 ech="AAAA"`)}
	m, _, _, _ = tidy(in, dns.Question{Name: "svc.test.", Qtype: dns.TypeHTTPS, Qclass: dns.ClassINET})
	if got := m.String(); len(m.Answer) != 1 || strings.Contains(got, "hint") || strings.Contains(got, "ech") || !strings.Contains(got, "alpn") {
		t.Errorf("%s", got)
	}
	in = &dns.Msg{Answer: records(t, "a.test. 1 IN CNAME b.test.", "b.test. 1 IN CNAME a.test.")}
	if m, addrs, _, _ := tidy(in, dns.Question{Name: "a.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET}); len(addrs) != 0 || len(m.Answer) > maxChain {
		t.Errorf("in circles: %v", m)
	}
}

// TestTidy6: the same over IPv6, in every form in which an address that leads inside, or of IPv4, can be written.
func TestTidy6(t *testing.T) {
	in := &dns.Msg{Answer: records(t,
		"www.test. 5 IN CNAME cdn.test.",
		"cdn.test. 60 IN A 203.0.113.9",
		"cdn.test. 60 IN AAAA 2001:db8::1",
		"cdn.test. 60 IN AAAA 64:ff9b::203.0.113.9",
		"cdn.test. 60 IN AAAA fd00::1",
		"cdn.test. 60 IN AAAA fe80::1",
		"cdn.test. 60 IN AAAA ::1",
		"cdn.test. 60 IN AAAA ::10.0.0.1",
		"cdn.test. 60 IN AAAA ::ffff:10.0.0.1",
		"cdn.test. 60 IN AAAA ::ffff:203.0.113.9",
		"cdn.test. 60 IN AAAA 64:ff9b::10.0.0.1",
		"cdn.test. 60 IN AAAA 2002:a00:1::1",
		"cdn.test. 60 IN AAAA 2001:0:1::1",
		"cdn.test. 60 IN AAAA ff02::1")}
	m, addrs, private, ttl := tidy(in, dns.Question{Name: "www.test.", Qtype: dns.TypeAAAA, Qclass: dns.ClassINET})
	want := []netip.Addr{netip.MustParseAddr("2001:db8::1"), netip.MustParseAddr("64:ff9b::203.0.113.9")}
	if !slices.Equal(addrs, want) || !private.IsValid() || ttl.Seconds() != 5 || len(m.Answer) != 3 {
		t.Errorf("%v %v %v\n%v", addrs, private, ttl, m)
	}
}

// TestLongAnswersAreNotKept, since a sandbox may choose how long and how many they are.
func TestLongAnswersAreNotKept(t *testing.T) {
	var c cache
	for n, kept := range map[int]bool{60: true, 2000: false} {
		k := cacheKey{fmt.Sprintf("n%d.test.", n), dns.TypeA}
		c.put(k, &dns.Msg{Answer: records(t, slices.Repeat([]string{"n.test. 60 IN A 198.51.100.1"}, n)...)})
		if (c.get(k) != nil) != kept {
			t.Errorf("an answer of %d records: kept is %v", n, !kept)
		}
	}
}

// TestManyQuestions in one message are not told back.
func TestManyQuestions(t *testing.T) {
	e, w := lonely(t, "allow good.test")
	q := new(dns.Msg)
	for range 2000 {
		q.Question = append(q.Question, dns.Question{Name: "good.test.", Qtype: dns.TypeA, Qclass: dns.ClassINET})
	}
	q.Compress = true
	packet, err := q.Pack()
	if err != nil {
		t.Fatal(err)
	}
	answer, m := e.handle(t.Context(), w, packet, "udp"), new(dns.Msg)
	if err := m.Unpack(answer); err != nil || m.Rcode != dns.RcodeFormatError || len(answer) > dns.MinMsgSize {
		t.Errorf("%d bytes: %v", len(answer), err)
	}
}

// FuzzQuestion: whatever a sandbox sends is answered by something that can be read, or not at all.
func FuzzQuestion(f *testing.F) {
	for _, qtype := range []uint16{dns.TypeA, dns.TypeTXT, dns.TypeANY} {
		q := new(dns.Msg)
		q.SetQuestion("www.good.test.", qtype).SetEdns0(4096, true)
		packet, _ := q.Pack()
		f.Add(packet)
		f.Add(packet[:len(packet)-5])
	}
	e, w := lonely(f, "allow suffix:good.test", "allow dns")
	f.Fuzz(func(t *testing.T, packet []byte) {
		for _, protocol := range []string{"udp", "tcp"} {
			answer := e.handle(context.Background(), w, packet, protocol)
			if answer == nil {
				continue
			}
			m := new(dns.Msg)
			if err := m.Unpack(answer); err != nil || !m.Response || len(packet) >= 2 && (answer[0] != packet[0] || answer[1] != packet[1]) {
				t.Fatalf("%x is answered by %x: %v", packet, answer, err)
			}
			if protocol == "udp" && len(answer) > ednsSize {
				t.Fatalf("a datagram of %d bytes", len(answer))
			}
		}
	})
}

// FuzzAnswer: whatever a nameserver sends, no address gets through that no sandbox reaches.
func FuzzAnswer(f *testing.F) {
	m := &dns.Msg{Answer: records(f, "www.test. 5 IN CNAME cdn.test.", "cdn.test. 60 IN A 10.0.0.1", "cdn.test. 60 IN A 203.0.113.9"), Compress: true}
	m.SetQuestion("www.test.", dns.TypeA)
	packet, _ := m.Pack()
	f.Add(packet)
	m = &dns.Msg{Answer: records(f, "www.test. 5 IN CNAME cdn.test.", "cdn.test. 60 IN AAAA ::ffff:10.0.0.1", "cdn.test. 60 IN AAAA 2001:db8::1"), Compress: true}
	m.SetQuestion("www.test.", dns.TypeAAAA)
	packet, _ = m.Pack()
	f.Add(packet)
	f.Fuzz(func(t *testing.T, packet []byte) {
		in := new(dns.Msg)
		if in.Unpack(packet) != nil || len(in.Question) == 0 {
			return
		}
		q := in.Question[0]
		lastAlias(in, q)
		m, addrs, _, ttl := tidy(in, q)
		if ttl < 0 || ttl > maxOpen {
			t.Fatalf("open for %s", ttl)
		}
		open := map[string]bool{}
		for _, a := range addrs {
			open[a.String()] = true
			if shard.IsUnreachable(a) {
				t.Fatalf("%s is open", a)
			}
		}
		for _, rr := range m.Answer {
			if a, ok := rr.(*dns.A); ok && q.Qtype == dns.TypeA && !open[a.A.String()] {
				t.Fatalf("%s is answered and not open", a.A)
			}
			if a, ok := rr.(*dns.AAAA); ok && q.Qtype == dns.TypeAAAA && !open[a.AAAA.String()] {
				t.Fatalf("%s is answered and not open", a.AAAA)
			}
		}
	})
}

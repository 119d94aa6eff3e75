package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/miekg/dns"
)

const (
	// ednsSize is the largest datagram either way, in bytes: what passes everywhere in one piece.
	ednsSize = 1232
	// tryTime bounds one question to one nameserver.
	tryTime = 1500 * time.Millisecond
	rounds  = 2
	// maxChain bounds the aliases between a name and its records.
	maxChain = 16
	// maxAnswer bounds the addresses of one answer.
	maxAnswer = 512
	// maxCache bounds the answers kept for one sandbox, maxCached the length of each, in bytes, maxKept how long.
	maxCache  = 1024
	maxCached = 4 << 10
	maxKept   = 5 * time.Minute
)

var errBusy = errors.New("too many questions are under way")

// cache holds answers for one sandbox. What another has asked for must not show in how fast an answer comes.
type cache struct {
	mu  sync.Mutex
	all map[cacheKey]cached
}

type cacheKey struct {
	name  string // lower case
	qtype uint16
}

type cached struct {
	m         *dns.Msg // never changed
	from, end time.Time
}

// get returns an answer as it is now.
func (c *cache) get(k cacheKey) *dns.Msg {
	c.mu.Lock()
	hit, ok := c.all[k]
	c.mu.Unlock()
	now := time.Now()
	if !ok || !now.Before(hit.end) {
		return nil
	}
	m := hit.m.Copy()
	age := uint32(now.Sub(hit.from) / time.Second)
	for _, list := range [][]dns.RR{m.Answer, m.Ns} {
		for _, rr := range list {
			rr.Header().Ttl -= min(age, rr.Header().Ttl)
		}
	}
	return m
}

func (c *cache) put(k cacheKey, m *dns.Msg) {
	life := uint32(maxKept / time.Second)
	for _, rr := range m.Answer {
		life = min(life, rr.Header().Ttl)
	}
	if len(m.Answer) == 0 {
		found := false
		for _, rr := range m.Ns {
			if soa, ok := rr.(*dns.SOA); ok {
				life, found = min(life, soa.Hdr.Ttl, soa.Minttl), true
			}
		}
		if !found {
			return
		}
	}
	if life == 0 || m.Len() > maxCached {
		return
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now()
	if c.all == nil {
		c.all = map[cacheKey]cached{}
	}
	if len(c.all) >= maxCache {
		for other, hit := range c.all {
			if !now.Before(hit.end) {
				delete(c.all, other)
			}
		}
		for other := range c.all { // any
			if len(c.all) < maxCache {
				break
			}
			delete(c.all, other)
		}
	}
	c.all[k] = cached{m: m, from: now, end: now.Add(time.Duration(life) * time.Second)}
}

// turns are those of questions to nameservers, of all sandboxes. None takes one more than are left for all others, so that some
// whose questions are never answered do not hold up one that comes: the next turn that is free is for who has none.
type turns struct {
	mu   sync.Mutex
	left int
	of   map[*ward]int
}

// take waits for a turn.
func (t *turns) take(ctx context.Context, w *ward) error {
	const look = 10 * time.Millisecond
	for {
		t.mu.Lock()
		ok := t.left > 0 && t.of[w] < max(t.left, 1)
		if ok {
			t.left--
			t.of[w]++
		}
		t.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-time.After(look):
		case <-ctx.Done():
			return errBusy
		}
	}
}

func (t *turns) give(w *ward) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.left++
	if t.of[w]--; t.of[w] == 0 {
		delete(t.of, w)
	}
}

// look finds out about a name, following aliases that a nameserver leaves unresolved.
func (e *Enforcer) look(ctx context.Context, w *ward, q dns.Question) (*dns.Msg, error) {
	k := cacheKey{strings.ToLower(q.Name), q.Qtype}
	if m := w.cache.get(k); m != nil {
		return m, nil
	}
	if err := e.turns.take(ctx, w); err != nil {
		return nil, err
	}
	defer e.turns.give(w)
	m, err := e.ask(ctx, q)
	if err != nil {
		return nil, err
	}
	for range maxChain {
		end, open := lastAlias(m, q)
		if !open {
			break
		}
		more, err := e.ask(ctx, dns.Question{Name: end, Qtype: q.Qtype, Qclass: q.Qclass})
		if err != nil || len(more.Answer) == 0 {
			break
		}
		m.Answer = append(m.Answer, more.Answer...)
	}
	w.cache.put(k, m.Copy())
	return m, nil
}

// lastAlias follows the aliases of an answer; open says that there is nothing at their end.
func lastAlias(m *dns.Msg, q dns.Question) (end string, open bool) {
	if q.Qtype == dns.TypeCNAME || m.Rcode != dns.RcodeSuccess {
		return "", false
	}
	end = q.Name
	for range maxChain {
		next := ""
		for _, rr := range m.Answer {
			if !strings.EqualFold(rr.Header().Name, end) {
				continue
			}
			if c, ok := rr.(*dns.CNAME); ok {
				next = c.Target
			} else if rr.Header().Rrtype == q.Qtype {
				return "", false
			}
		}
		if next == "" {
			return end, end != q.Name
		}
		end = next
	}
	return "", false // in circles
}

// ask asks the nameservers one after the other, twice.
func (e *Enforcer) ask(ctx context.Context, q dns.Question) (*dns.Msg, error) {
	err := errors.New("there are no nameservers")
	for range rounds {
		for _, server := range e.cfg.Nameservers {
			var m *dns.Msg
			if m, err = askOne(ctx, net.JoinHostPort(server, "53"), q); err == nil {
				return m, nil
			}
			if ctx.Err() != nil {
				return nil, ctx.Err()
			}
		}
	}
	return nil, err
}

// askOne asks by UDP, from a port of its own, and by TCP if the answer does not fit.
func askOne(ctx context.Context, server string, q dns.Question) (*dns.Msg, error) {
	m := new(dns.Msg)
	m.Id, m.RecursionDesired = dns.Id(), true
	m.Question = []dns.Question{q}
	m.SetEdns0(ednsSize, false)
	for _, network := range []string{"udp", "tcp"} {
		c := &dns.Client{Net: network, Timeout: tryTime, UDPSize: ednsSize}
		try, cancel := context.WithTimeout(ctx, tryTime)
		in, _, err := c.ExchangeContext(try, m, server)
		cancel()
		switch {
		case err != nil:
			return nil, fmt.Errorf("ask a nameserver: %w", err)
		case !in.Response || len(in.Question) != 1 || !strings.EqualFold(in.Question[0].Name, q.Name) || in.Question[0].Qtype != q.Qtype:
			return nil, errors.New("a nameserver answered another question")
		case in.Truncated:
			continue
		case in.Rcode != dns.RcodeSuccess && in.Rcode != dns.RcodeNameError:
			return nil, fmt.Errorf("a nameserver answered %s", dns.RcodeToString[in.Rcode])
		}
		return in, nil
	}
	return nil, errors.New("a nameserver's answer is cut off")
}

package egress

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"

	"github.com/miekg/dns"
)

// subject is what the proxy judges a sandbox by.
func (e *Enforcer) subject(id string) (Subject, bool) {
	e.mu.Lock()
	w := e.wards[id]
	e.mu.Unlock()
	if w == nil {
		return Subject{}, false
	}
	w.rules.RLock()
	defer w.rules.RUnlock()
	s := Subject{Policy: w.policy}
	if e.cfg.Secrets != nil {
		s.Secrets = e.cfg.Secrets(id)
	}
	return s, true
}

// addresses looks a host up as the sandbox's resolver does, out of the same answers and within the same bounds: those of IPv4
// first, and where this host has IPv6 those of IPv6.
func (e *Enforcer) addresses(ctx context.Context, id, host string) ([]netip.Addr, error) {
	e.mu.Lock()
	w := e.wards[id]
	e.mu.Unlock()
	if w == nil {
		return nil, fmt.Errorf("sandbox %s has no policy in force", id)
	}
	select {
	case w.asking <- struct{}{}:
	case <-ctx.Done():
		return nil, errBusy
	}
	defer func() { <-w.asking }()
	kinds := []uint16{dns.TypeA, dns.TypeAAAA}
	if !w.addr6.IsValid() || !e.cfg.Wall.IPv6() {
		kinds = kinds[:1]
	}
	found := make([][]netip.Addr, len(kinds))
	failed := make([]error, len(kinds))
	var group sync.WaitGroup
	for i, kind := range kinds {
		group.Go(func() {
			q := dns.Question{Name: dns.Fqdn(host), Qtype: kind, Qclass: dns.ClassINET}
			var m *dns.Msg
			if m, failed[i] = e.look(ctx, w, q); failed[i] == nil {
				found[i] = addressesIn(m)
			}
		})
	}
	group.Wait()
	all := slices.Concat(found...)
	if len(all) > 0 {
		return all, nil
	}
	return nil, errors.Join(failed...)
}

// addressesIn are the addresses of an answer, also those that no sandbox reaches.
func addressesIn(m *dns.Msg) (out []netip.Addr) {
	for _, rr := range m.Answer {
		var ip net.IP
		switch rr := rr.(type) {
		case *dns.A:
			ip = rr.A.To4()
		case *dns.AAAA:
			ip = rr.AAAA.To16()
		}
		if a, ok := netip.AddrFromSlice(ip); ok && len(out) < maxAnswer {
			out = append(out, a)
		}
	}
	return out
}

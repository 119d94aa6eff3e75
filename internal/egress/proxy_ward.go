package egress

import (
	"context"
	"fmt"
	"net/netip"

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

// addresses looks a host up as the sandbox's resolver does, out of the same answers and within the same bounds.
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
	m, err := e.look(ctx, w, dns.Question{Name: dns.Fqdn(host), Qtype: dns.TypeA, Qclass: dns.ClassINET})
	if err != nil {
		return nil, err
	}
	var out []netip.Addr
	for _, rr := range m.Answer {
		if a, ok := rr.(*dns.A); ok && len(out) < maxAnswer {
			if addr, ok := netip.AddrFromSlice(a.A.To4()); ok {
				out = append(out, addr)
			}
		}
	}
	return out, nil
}

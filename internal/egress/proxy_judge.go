package egress

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

// route is where a request may go, and by which verdict.
type route struct {
	verdict policy.Verdict
	addrs   []netip.Addr
	// claimed says that the sandbox chose the address, which a rule about addresses allows: it holds for this request only.
	claimed bool
}

// refusal is why a request goes nowhere.
type refusal struct {
	status             int
	rule, text, reason string
	addr               netip.Addr
	// about is what else there is to say of the request; for the log.
	about string
	// silent is a failure and no decision: it is answered and not recorded.
	silent bool
	// bare is answered without words: there is no share for them to wait in, and a head does not wait.
	bare bool
}

func refuse(v policy.Verdict, addr netip.Addr) *refusal {
	r := &refusal{status: 403, rule: v.Rule, text: v.Text, reason: v.Reason, addr: addr}
	if r.reason == "" {
		r.reason = "rule " + v.Rule + " (" + v.Text + ") is the first that matches"
	}
	return r
}

// judge says where a request to a host may go. host is as policy.Host returns it, or "" where the sandbox names the address
// dest; else dest is where it sent the connection, which is believed only where a rule allows that very address.
func (p *Proxy) judge(ctx context.Context, sandbox string, c *policy.Compiled, host string, dest netip.Addr, port uint16) (route, *refusal) {
	var look policy.Answer
	if host != "" {
		look = c.Lookup(host)
	}
	if !look.Listed {
		// No rule names the host, so it is not looked up either: a lookup carries the name out.
		v := c.Request(host, dest, "tcp", port)
		if v.Allow && v.Step >= 0 && c.Steps[v.Step].Target == policy.TargetNames {
			v = look.Verdict // the rule names it, and the policy opens no lookups
			v.Allow = false
		}
		if !v.Allow {
			return route{}, refuse(v, dest)
		}
		if r := p.unreachable(dest); r != nil {
			return route{}, r
		}
		return route{verdict: v, addrs: []netip.Addr{dest}, claimed: host != ""}, nil
	}
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	var out route
	addrs, err := p.o.Resolve(ctx, sandbox, host)
	if (err != nil || len(addrs) == 0) && c.Open() && dest.IsValid() {
		// Where nothing is forbidden the sandbox may know an address of its own, as it would without the proxy.
		addrs, err = []netip.Addr{dest}, nil
		out.claimed = true
	}
	if err != nil || len(addrs) == 0 {
		return route{}, &refusal{status: 502, rule: shard.EgressRuleResolve, reason: "the name could not be looked up", addr: netip.Addr{}}
	}
	var first *refusal
	for _, a := range inOrder(addrs) {
		r := p.unreachable(a)
		v := c.Request(host, a, "tcp", port)
		if r == nil && !v.Allow {
			r = refuse(v, a)
		}
		switch {
		case r == nil && len(out.addrs) == 0:
			out.verdict, out.addrs = v, []netip.Addr{a}
		case r == nil:
			out.addrs = append(out.addrs, a)
		case first == nil:
			first = r
		}
	}
	if len(out.addrs) == 0 {
		return route{}, first
	}
	return out, nil
}

// unreachable refuses addresses that no rule can open.
func (p *Proxy) unreachable(addr netip.Addr) *refusal {
	if shard.IsUnreachable(addr) {
		return &refusal{status: 403, rule: shard.EgressRulePrivate, addr: addr,
			reason: "the host drops this destination for every sandbox, and no rule can open it"}
	}
	if p.reachable(addr) == errLocal {
		return &refusal{status: 403, rule: shard.EgressRuleLocal, addr: addr, reason: "the address is the host's own, or not of a single host"}
	}
	return nil // one without a way to it fails when it is dialled
}

// maxRoutes bounds how many routes are remembered of one sandbox, routeLife for how long: what the resolver says is
// cheap to ask again, but not for every request.
const (
	maxRoutes = 256
	routeLife = 5 * time.Second
)

type remembered struct {
	route
	until time.Time
}

// way is judge with a memory.
func (p *Proxy) way(ctx context.Context, g *guestConn, t *trunk, host string, dest netip.Addr) (route, *refusal) {
	key := routeKey{host, dest, g.port}
	if host != "" {
		key.dest = netip.Addr{} // routes by name alone; a claimed one is not remembered
	}
	now := time.Now()
	t.mu.Lock()
	known, ok := t.routes[key]
	t.mu.Unlock()
	if ok && now.Before(known.until) {
		return known.route, nil
	}
	r, refused := p.judge(ctx, g.client.sandbox, t.policy, host, dest, g.port)
	if refused != nil || r.claimed {
		return r, refused
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.routes) >= maxRoutes {
		clear(t.routes)
	}
	t.routes[key] = remembered{r, now.Add(routeLife)}
	return r, nil
}

type routeKey struct {
	host string
	dest netip.Addr
	port uint16
}

// record writes down that a request goes to the first address of a route, and what else there is to say about it. It must not
// go when that fails.
func (p *Proxy) record(g *guestConn, host string, r route, about string) error {
	if g.client.gone() {
		return errors.New("the sandbox is no longer served")
	}
	return p.o.Recorder.Record(g.client.sandbox, shard.EgressDecision{Time: time.Now().UTC(), Source: shard.EgressProxy,
		Verdict: shard.EgressAllow, Host: host, Port: int(g.port), Address: r.addrs[0].String(),
		Rule: r.verdict.Rule, RuleText: r.verdict.Text, Reason: join(r.verdict.Reason, about)})
}

func join(reasons ...string) string {
	return strings.Join(slices.DeleteFunc(reasons, func(s string) bool { return s == "" }), "; ")
}

// note writes down a refusal. Where that fails it stays a refusal.
func (p *Proxy) note(g *guestConn, host string, r refusal) {
	if r.silent || g.client.gone() { // a sandbox that is removed has no log
		return
	}
	d := shard.EgressDecision{Time: time.Now().UTC(), Source: shard.EgressProxy, Verdict: shard.EgressDeny, Host: host,
		Port: int(g.port), Rule: r.rule, RuleText: r.text}
	if r.text == "" { // the rule says it otherwise
		d.Reason = r.reason
	}
	d.Reason = join(d.Reason, r.about)
	if r.addr.IsValid() {
		d.Address = r.addr.String()
	}
	if err := p.o.Recorder.Record(g.client.sandbox, d); err != nil {
		p.o.Log.Error("a refusal of the proxy could not be recorded", "sandbox", g.client.sandbox, "err", err)
	}
}

// target reads a Host header or :authority: a name, or an address and no name.
func target(authority string, port uint16) (host string, addr netip.Addr, ok bool) {
	name := authority
	if i := strings.LastIndexByte(authority, ':'); i >= 0 && !strings.HasSuffix(authority, "]") {
		suffix := authority[i+1:]
		if suffix != "" && suffix != map[uint16]string{80: "80", 443: "443"}[port] {
			return "", addr, false
		}
		name = authority[:i]
	}
	if a, err := netip.ParseAddr(strings.TrimSuffix(strings.TrimPrefix(name, "["), "]")); err == nil {
		return "", a.Unmap(), true
	}
	host, err := policy.Host(name)
	return host, addr, err == nil
}

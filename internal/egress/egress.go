// Package egress keeps sandboxes to their policies. It turns a compiled policy into rules of the wall (internal/netns),
// answers the sandboxes' lookups and puts the addresses of the answers into the wall, judges web traffic by its host name,
// and writes down what was decided. It must not know the store of policies, the life of sandboxes or the API.
package egress

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

// Config is what an Enforcer works with.
type Config struct {
	Wall *netns.Net
	// Nameservers are addresses of recursive resolvers, best first.
	Nameservers []string
	// Dir is the directory of a sandbox's record, in which its decisions are written down.
	Dir func(id string) string
	// CA is what the proxy shows where it takes TLS apart.
	CA *CA
	// Secrets are those that a sandbox has now, with the values of now. It is asked for each request and never waits. nil:
	// there are none.
	Secrets func(sandbox string) []secret.Secret
	// Misused hears that a sandbox sent the placeholder of a secret where its value must not go. It returns at once. nil:
	// nobody does.
	Misused func(sandbox, name, host, reason string)
	Log     *slog.Logger
}

// Enforcer keeps sandboxes to policies. Its methods may be called at the same time, those about one sandbox not.
type Enforcer struct {
	cfg    Config
	ctx    context.Context
	cancel context.CancelFunc
	tasks  sync.WaitGroup
	turns  turns
	proxy  *Proxy
	tally  tally

	mu       sync.Mutex // guards the maps; nothing is called while it is held
	wards    map[string]*ward
	byAddr   map[netip.Addr]*ward
	journals map[string]*journal
}

// ward is a sandbox that has a policy in force.
type ward struct {
	id      string
	addr    netip.Addr
	addr6   netip.Addr // zero where there is no IPv6
	journal *journal
	ended   context.CancelFunc
	tasks   sync.WaitGroup
	asking  chan struct{} // bounds its questions
	cache   cache

	// rules is held for reading over every feed, so that no address gets into a set of rules that have been replaced;
	// and for writing while they are.
	rules  sync.RWMutex
	policy *policy.Compiled

	mu    sync.Mutex // after rules
	known map[knownName]answered
}

// knownName is a name and the family of addresses that were asked for.
type knownName struct {
	name string
	six  bool
}

// answered is what the resolver told a sandbox about a name.
type answered struct {
	addrs []netip.Addr
	until time.Time
}

// maxAsking is how many questions to nameservers may be under way in all, maxPerWard how many questions, and how many TCP
// connections, of one sandbox.
const (
	maxAsking  = 256
	maxPerWard = 16
	// maxKnown bounds the names whose addresses survive a change of policy.
	maxKnown = 4096
)

// Open begins an Enforcer that has nothing in force.
func Open(cfg Config) *Enforcer {
	e := &Enforcer{cfg: cfg, turns: turns{left: maxAsking, of: map[*ward]int{}},
		wards: map[string]*ward{}, byAddr: map[netip.Addr]*ward{}, journals: map[string]*journal{}}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	e.proxy = NewProxy(ProxyOptions{Subject: e.subject, Resolve: e.addresses, Recorder: e, Misused: cfg.Misused, CA: cfg.CA, Log: cfg.Log})
	e.tasks.Go(e.watchDrops)
	e.tasks.Go(e.tick)
	return e
}

// Close ends the resolver and the logs. What is in force in the wall stays in force: names are no longer answered.
func (e *Enforcer) Close() {
	e.cancel()
	e.mu.Lock()
	wards := maps.Clone(e.wards)
	e.mu.Unlock()
	if err := e.proxy.Close(); err != nil {
		e.cfg.Log.Warn("the proxy did not end well", "err", err)
	}
	for _, w := range wards {
		w.end()
	}
	e.tasks.Wait()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, j := range e.journals {
		j.close()
	}
}

// Apply puts p in force for an attached sandbox in place of what was in force, in one step. When it fails, what was in force
// stays. What the sandbox looked up before stays open as far as p says so. Of a sandbox that has secrets p is Proxied: of the
// policy, or of policy.Unrestricted when it has none.
func (e *Enforcer) Apply(ctx context.Context, id string, addr netip.Addr, p *policy.Compiled) error {
	e.mu.Lock()
	w := e.wards[id]
	e.mu.Unlock()
	if w != nil && w.addr != addr {
		if err := e.Remove(ctx, id); err != nil {
			return err
		}
		w = nil
	}
	if w != nil {
		return e.restrict(ctx, order{w, p})
	}
	att, attached, err := e.cfg.Wall.Attachment(ctx, id)
	if err != nil {
		return err
	}
	if !attached || att.Addr != addr {
		return fmt.Errorf("sandbox %s is not attached at %s", id, addr)
	}
	life, end := context.WithCancel(e.ctx)
	w = &ward{id: id, addr: addr, addr6: att.Addr6, journal: e.journal(id), ended: end, asking: make(chan struct{}, maxPerWard), known: map[knownName]answered{}}
	if err := e.restrict(ctx, order{w, p}); err != nil {
		end()
		return err
	}
	links := []Link{{addr, att.Gateway}}
	if att.Addr6.IsValid() {
		links = append(links, Link{att.Addr6, att.Gateway6})
	}
	for _, l := range links {
		if err := e.resolve(life, w, l); err != nil {
			w.end()
			return err // the sandbox is restricted and cannot look names up: closed, not open
		}
	}
	if err := e.proxy.Add(id, links...); err != nil {
		w.end()
		return err
	}
	e.mu.Lock()
	e.wards[id], e.byAddr[addr] = w, w
	e.mu.Unlock()
	return nil
}

// Replace is Apply for sandboxes, by id, that have something in force; the others are left out. Those that it fails for
// keep what was in force, and are in what it returns.
func (e *Enforcer) Replace(ctx context.Context, policies map[string]*policy.Compiled) (failed map[string]error) {
	var orders []order
	e.mu.Lock()
	for id, p := range policies {
		if w := e.wards[id]; w != nil {
			orders = append(orders, order{w, p})
		}
	}
	e.mu.Unlock()
	// The kernel goes through the whole table for each transaction; while one lasts, answers to its sandboxes' lookups wait.
	const atOnce = 10
	failed = map[string]error{}
	for some := range slices.Chunk(orders, atOnce) {
		if e.restrict(ctx, some...) == nil {
			continue
		}
		for _, o := range some { // one must not keep the others from their rules
			err := e.restrict(ctx, o)
			if err == nil {
				continue
			}
			// One that has been stopped meanwhile gets its rules when it starts.
			if _, attached, unknown := e.cfg.Wall.Attachment(ctx, o.ward.id); attached || unknown != nil {
				failed[o.ward.id] = err
			}
		}
	}
	return failed
}

// order is to keep a ward to a policy.
type order struct {
	ward   *ward
	policy *policy.Compiled
}

// restrict makes the policies the rules in the wall, all of them or none. No ward is in two orders.
func (e *Enforcer) restrict(ctx context.Context, orders ...order) error {
	all := make([]netns.Restriction, len(orders))
	for i, o := range orders {
		o.ward.rules.Lock()
		defer o.ward.rules.Unlock()
		all[i] = netns.Restriction{ID: o.ward.id, Rules: wallRules(o.policy), Fed: o.ward.remembered(o.policy)}
	}
	if err := e.cfg.Wall.Restrict(ctx, all...); err != nil {
		return err
	}
	for _, o := range orders {
		o.ward.policy = o.policy
	}
	return nil
}

// remembered are the addresses that p opens or closes by what was looked up before, by step.
func (w *ward) remembered(p *policy.Compiled) map[int]map[netip.Addr]time.Time {
	w.mu.Lock()
	defer w.mu.Unlock()
	fed := map[int]map[netip.Addr]time.Time{}
	now := time.Now()
	for key, known := range w.known {
		if !known.until.After(now) {
			delete(w.known, key)
			continue
		}
		for _, step := range p.Lookup(key.name).Feeds {
			if fed[step] == nil {
				fed[step] = map[netip.Addr]time.Time{}
			}
			for _, a := range known.addrs {
				if known.until.After(fed[step][a]) && len(fed[step]) < netns.MaxFed {
					fed[step][a] = known.until
				}
			}
		}
	}
	return fed
}

// Remove ends what Apply began for a sandbox; the rules in the wall end with its network. Idempotent.
func (e *Enforcer) Remove(_ context.Context, id string) error {
	e.mu.Lock()
	w := e.wards[id]
	delete(e.wards, id)
	if w != nil {
		delete(e.byAddr, w.addr)
	}
	e.mu.Unlock()
	e.proxy.Forget(id)
	if w != nil {
		w.end()
		w.journal.rest()
	}
	return nil
}

// end stops the resolver of w and waits for it.
func (w *ward) end() {
	w.ended()
	w.tasks.Wait()
}

// wallRules says a policy in the words of the wall. A rule about the resolver is not the wall's: no packet to port 53 gets
// that far. Its place is kept, so that indices are the same.
func wallRules(p *policy.Compiled) netns.Rules {
	if p.Open() { // but for being proxied, as if it were not restricted: what no sandbox reaches is refused before
		every := []netns.Ports{{From: 0, To: 65535}}
		return netns.Rules{Proxied: p.Web(), OpenDNS: true, Default: shard.EgressRuleNone,
			Rules: []netns.Rule{{Label: shard.EgressRuleNone, Allow: true, TCP: every, UDP: every, Other: true}}}
	}
	out := netns.Rules{Proxied: p.Web(), Rules: make([]netns.Rule, len(p.Steps)), Default: p.Request("", netip.Addr{}, "none", 0).Rule}
	if len(p.Steps) > 0 {
		out.Default = shard.EgressRuleDefault
	}
	for i, s := range p.Steps {
		r := netns.Rule{Label: s.ID, Allow: s.Allow}
		if s.Target != policy.TargetResolver {
			r.TCP, r.UDP, r.Other = wallPorts(s.Flows.TCP), wallPorts(s.Flows.UDP), s.Flows.Other
		}
		switch s.Target {
		case policy.TargetPrefix:
			r.Prefix = s.Prefix
		case policy.TargetNames:
			r.Fed = true
		}
		out.Rules[i] = r
	}
	return out
}

func wallPorts(ranges []policy.PortRange) []netns.Ports {
	out := make([]netns.Ports, len(ranges))
	for i, r := range ranges {
		out[i] = netns.Ports{From: r.From, To: r.To}
	}
	return out
}

// watchDrops writes down what the wall refuses.
func (e *Enforcer) watchDrops() {
	const pause = 5 * time.Second
	for e.ctx.Err() == nil {
		err := e.cfg.Wall.Drops(e.ctx, e.dropped)
		if err == nil {
			return
		}
		e.cfg.Log.Error("refused packets are missing from the egress logs", "err", err)
		select {
		case <-e.ctx.Done():
		case <-time.After(pause):
		}
	}
}

func (e *Enforcer) dropped(d netns.Drop) {
	e.mu.Lock()
	w := e.byAddr[d.Source]
	e.mu.Unlock()
	if w == nil {
		return
	}
	decision := shard.EgressDecision{Source: shard.EgressHost, Verdict: shard.EgressDeny, Rule: d.Label}
	w.rules.RLock()
	for _, s := range w.policy.Steps {
		if s.ID == d.Label {
			decision.RuleText = s.Text
		}
	}
	w.rules.RUnlock()
	if d.More > 0 {
		decision.Reason = fmt.Sprintf("%d more in the last second", d.More)
	} else {
		decision.Address, decision.Port = d.Dest.String(), int(d.Port)
		decision.Protocol = protocolName(d.Protocol)
		switch d.Label {
		case shard.EgressRulePrivate:
			decision.Reason = "no rule can open this destination"
		case shard.EgressRuleLocal:
			decision.Reason = "the destination is the host itself"
		case shard.EgressRuleIPv6:
			decision.Reason = noIPv6
		case shard.EgressRuleDefault:
			decision.Reason = "no rule of the policy matches"
		case shard.EgressRuleMissing:
			decision.Reason = "the sandbox's policy is missing from the store"
		}
	}
	w.journal.note(decision)
}

// noIPv6 is why nothing goes over IPv6.
const noIPv6 = "the host has no IPv6"

func protocolName(p uint8) string {
	switch p {
	case 1:
		return "icmp"
	case 6:
		return "tcp"
	case 17:
		return "udp"
	case 58:
		return "icmpv6"
	}
	return strconv.Itoa(int(p))
}

// tick tells the logs to count what they left out.
func (e *Enforcer) tick() {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-e.ctx.Done():
			return
		case <-tick.C:
		}
		e.mu.Lock()
		all := make([]*journal, 0, len(e.wards))
		for _, w := range e.wards {
			all = append(all, w.journal)
		}
		e.mu.Unlock()
		for _, j := range all {
			j.count()
		}
	}
}

package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/store"
)

// Enforcer makes the host keep a sandbox to a policy. Without one no sandbox with a policy starts. Its methods must not
// call the engine: some are called with policies.change held.
type Enforcer interface {
	// Apply puts p in force for a sandbox in place of what was in force, at once and with nothing open in between. When
	// it returns nil, p is in force; when it fails, what was in force stays. It is idempotent: the engine also calls it
	// for what an earlier daemon applied. Of a sandbox that has secrets p is Proxied.
	Apply(ctx context.Context, sandboxID string, addr netip.Addr, p *policy.Compiled) error
	// Replace is Apply for sandboxes, by id, that have something in force; it leaves out those that have not, which are being
	// stopped. It returns those that it failed for.
	Replace(ctx context.Context, policies map[string]*policy.Compiled) (failed map[string]error)
	// Remove takes away what Apply made for a sandbox, which has no machine any more. Idempotent.
	Remove(ctx context.Context, sandboxID string) error
	// Decisions returns the newest decisions about a sandbox as JSON, oldest first, how many older ones were left out, and a
	// reader of those to come, which the caller closes.
	Decisions(sandboxID string) (newest []json.RawMessage, cut int, live LiveDecisions, err error)
	// Forget ends all readers of a sandbox that is being removed. Idempotent.
	Forget(sandboxID string)
	// Trust works out how a sandbox comes to trust what the enforcer shows it in the place of hosts that get secrets: which of
	// its files of certificates, read by read, needs what at its end. An image without one is refused as an invalid request.
	Trust(read func(path string) ([]byte, error)) (path string, add []byte, err error)
	// Anchors are directories, of which a sandbox may have some, and a file that belongs there so that it is still trusted when
	// a tool of the image makes the file of Trust anew.
	Anchors() (dirs []string, name string, content []byte)
	// Verdicts counts all decisions since the daemon began, by source and verdict.
	Verdicts() map[[2]string]int64
}

// LiveDecisions reads decisions as they are made. Next waits; io.EOF is the end of the log.
type LiveDecisions interface {
	Next(ctx context.Context) ([]json.RawMessage, error)
	Close()
}

const policyFormat = 1

// policies is the store of egress policies and what of it is in force.
type policies struct {
	records *store.Records[shard.Policy]
	// change is held for writing while a policy changes, for reading while a sandbox gets one or has it applied: so that
	// no sandbox keeps old rules, and none gets a policy that is being removed. It is held over I/O, and comes after a
	// sandbox's verb lock and before Engine.mu.
	change sync.RWMutex
	// byName is replaced, never changed.
	byName atomic.Pointer[map[string]*storedPolicy]
}

// storedPolicy is a policy with its meaning. One that cannot be read has only a reason: it keeps its name.
type storedPolicy struct {
	shard.Policy
	compiled   *policy.Compiled
	unreadable string
}

func (e *Engine) openPolicies() (*policies, error) {
	records, err := store.Open[shard.Policy](filepath.Join(e.Root, "policies"), "policy.json", policyFormat)
	if err != nil {
		return nil, err
	}
	all, unreadable, hollow, err := records.All()
	if err != nil {
		return nil, err
	}
	byName := make(map[string]*storedPolicy)
	for name, rec := range all {
		p := &storedPolicy{Policy: *rec}
		if p.compiled, err = policy.Compile(rec.Rules); err == nil && rec.Name != name {
			err = fmt.Errorf("it is of policy %q", rec.Name)
		}
		if err != nil {
			p = &storedPolicy{unreadable: err.Error()}
		}
		byName[name] = p
	}
	for _, u := range unreadable {
		byName[u.Key] = &storedPolicy{unreadable: u.Reason}
	}
	for name, p := range byName {
		if p.unreadable != "" {
			e.Log.Error("unreadable policy", "policy", name, "reason", p.unreadable)
		}
	}
	for _, name := range hollow { // a put or a remove that the host's end cut short
		if err := records.Delete(name); err != nil {
			e.Log.Warn("remove what is left of a policy", "policy", name, "err", err)
		}
	}
	ps := &policies{records: records}
	ps.byName.Store(&byName)
	return ps, nil
}

// get returns a policy that is there and can be read.
func (ps *policies) get(name string) (*storedPolicy, error) {
	if err := shard.CheckPolicyName(name); err != nil {
		return nil, err
	}
	p := (*ps.byName.Load())[name]
	switch {
	case p == nil:
		return nil, notFound("policy", name)
	case p.unreadable != "":
		return nil, shard.Wrap(shard.CodeInternal, errors.New(p.unreadable), "policy %q cannot be read: store it again", name)
	}
	return p, nil
}

// compiled is what the policy of that name means; everything closed when the store has lost it.
func (ps *policies) compiled(name string) (c *policy.Compiled, missing bool) {
	if p := (*ps.byName.Load())[name]; p != nil && p.unreadable == "" {
		return p.compiled, false
	}
	return policy.Missing(), true
}

// set replaces one policy in memory; nil removes it. The caller holds change.
func (ps *policies) set(name string, p *storedPolicy) {
	next := maps.Clone(*ps.byName.Load())
	if p == nil {
		delete(next, name)
	} else {
		next[name] = p
	}
	ps.byName.Store(&next)
}

// policyHolders are the sandboxes that have the policy.
func (e *Engine) policyHolders(name string) []shard.Sandbox {
	all, _ := e.List(true)
	return slices.DeleteFunc(all, func(s shard.Sandbox) bool { return s.Policy != name })
}

func (e *Engine) policyView(p *storedPolicy) *shard.PolicyView {
	v := &shard.PolicyView{Policy: p.Policy, DNS: shard.DNSClosed}
	if p.compiled.DNS() {
		v.DNS = shard.DNSOpen
	}
	for _, s := range e.policyHolders(p.Name) {
		v.Holders = append(v.Holders, s.Ref())
	}
	return v
}

// ListPolicies returns the policies in the order of their names, and a warning for each that cannot be read.
func (e *Engine) ListPolicies() ([]shard.Policy, []string) {
	byName := *e.policies.byName.Load()
	out := make([]shard.Policy, 0, len(byName))
	var warnings []string
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		if p := byName[name]; p.unreadable == "" {
			out = append(out, p.Policy)
		} else {
			warnings = append(warnings, fmt.Sprintf("policy %q cannot be read: store it again", name))
		}
	}
	return out, warnings
}

// GetPolicy returns one policy with its holders.
func (e *Engine) GetPolicy(name string) (*shard.PolicyView, error) {
	p, err := e.policies.get(name)
	if err != nil {
		return nil, err
	}
	return e.policyView(p), nil
}

// PutPolicy makes a policy or replaces all rules of one, and puts them in force for the sandboxes that have it. It may
// fail after the rules are stored: the error then says so, and the sandbox keeps what was in force until its next start.
func (e *Engine) PutPolicy(ctx context.Context, name string, rules []shard.PolicyRule) (*shard.PolicyView, error) {
	if err := shard.CheckPolicyName(name); err != nil {
		return nil, err
	}
	parsed, err := policy.ParseAll(rules)
	if err != nil {
		return nil, err
	}
	compiled, err := policy.Compile(parsed)
	if err != nil {
		return nil, err
	}
	p := &storedPolicy{Policy: shard.Policy{Name: name, Rules: parsed}, compiled: compiled}
	ctx = context.WithoutCancel(ctx)
	e.policies.change.Lock()
	defer e.policies.change.Unlock()
	if err := e.policies.records.Put(name, &p.Policy); err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "could not store policy %q: is the host's disk full?", name)
	}
	e.policies.set(name, p)
	holders := e.policyHolders(name)
	next, proxied := make(map[string]*policy.Compiled, len(holders)), compiled.Proxied()
	for _, s := range holders {
		if next[s.ID] = compiled; len(s.Secrets) > 0 {
			next[s.ID] = proxied
		}
	}
	var failed []string
	var errs []error
	notApplied := e.Enforcer.Replace(ctx, next)
	for _, s := range holders {
		if err := notApplied[s.ID]; err != nil {
			failed, errs = append(failed, s.Ref()), append(errs, err)
		}
	}
	if len(failed) > 0 {
		return nil, shard.Wrap(shard.CodeInternal, errors.Join(errs...),
			"policy %q is stored, but could not be put in force for %q: store it again, or stop and start the sandbox", name, failed)
	}
	return e.policyView(p), nil
}

// RemovePolicy removes a policy that no sandbox has.
func (e *Engine) RemovePolicy(name string) error {
	if err := shard.CheckPolicyName(name); err != nil {
		return err
	}
	e.policies.change.Lock()
	defer e.policies.change.Unlock()
	if (*e.policies.byName.Load())[name] == nil {
		return notFound("policy", name)
	}
	if holders := e.policyHolders(name); len(holders) > 0 {
		err := shard.Errorf(shard.CodeInUse, "policy %q is in use: detach it from the sandboxes that have it, or remove them", name)
		for _, s := range holders {
			err.Holders = append(err.Holders, s.Ref())
		}
		return err
	}
	if err := e.policies.records.Delete(name); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not remove policy %q", name)
	}
	e.policies.set(name, nil)
	return nil
}

// AttachPolicy gives a stopped sandbox a policy, in place of the one it had.
func (e *Engine) AttachPolicy(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	return e.changePolicy(ctx, ref, name)
}

// DetachPolicy takes a stopped sandbox's policy away.
func (e *Engine) DetachPolicy(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return e.changePolicy(ctx, ref, "")
}

func (e *Engine) changePolicy(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	unlock, err := sb.lock(ctx, shard.VerbGrant)
	if err != nil {
		if shard.CodeOf(err) == shard.CodeSandboxLive {
			err = shard.Errorf(shard.CodeSandboxLive, "the policy of sandbox %q cannot change while it is %s: stop it first%s",
				sb.ref(), sb.record().Sandbox.State, sb.priceOfStop())
		}
		return nil, err
	}
	defer unlock()
	release, err := e.holdPolicy(name)
	if err != nil {
		return nil, err
	}
	defer release()
	if sb.record().Sandbox.Policy != name {
		if err := sb.update(func(r *record) { r.Sandbox.Policy = name }); err != nil {
			return nil, err
		}
	}
	s := sb.record().Sandbox
	return &s, nil
}

// holdPolicy checks that a policy can be given to a sandbox and keeps it from being removed until release; "" is none.
func (e *Engine) holdPolicy(name string) (release func(), err error) {
	if name == "" {
		return func() {}, nil
	}
	e.policies.change.RLock()
	if _, err := e.policies.get(name); err != nil {
		e.policies.change.RUnlock()
		if shard.CodeOf(err) == shard.CodeNotFound { // it is the request that names what is not there
			err = shard.Invalidf("there is no policy %s: shard policy list shows those that there are", shard.Quote(name))
		}
		return nil, err
	}
	return e.policies.change.RUnlock, nil
}

// enforce puts the sandbox's policy in force, if it has one, before anything runs in it.
func (e *Engine) enforce(ctx context.Context, s *shard.Sandbox, addr netip.Addr) error {
	if s.Policy == "" && len(s.Secrets) == 0 {
		return nil
	}
	e.Secrets.Lend(s.ID, s.Secrets)
	e.policies.change.RLock()
	defer e.policies.change.RUnlock()
	compiled, missing := policy.Unrestricted(), false
	if s.Policy != "" {
		compiled, missing = e.policies.compiled(s.Policy)
	}
	if len(s.Secrets) > 0 {
		compiled = compiled.Proxied()
	}
	if missing {
		e.Log.Warn("the policy of a sandbox is missing: nothing can be reached", "sandbox", s.ID, "policy", s.Policy)
	}
	if err := e.Enforcer.Apply(ctx, s.ID, addr, compiled); err != nil {
		code, why := shard.CodeInternal, ""
		if e, ok := errors.AsType[*shard.Error](err); ok {
			code, why = e.Code, ": "+e.Message
		}
		if s.Policy == "" {
			return shard.Wrap(code, err, "sandbox %q, which has secrets, could not be put behind the proxy%s", s.Ref(), why)
		}
		return shard.Wrap(code, err, "policy %q could not be put in force for sandbox %q%s", s.Policy, s.Ref(), why)
	}
	return nil
}

// enforceAgain puts the policy of a sandbox that an earlier daemon started in force, with what it says now, before its
// network is opened. Where it says no, the network must stay closed.
func (e *Engine) enforceAgain(ctx context.Context, sb *sandbox) bool {
	s := sb.record().Sandbox
	if s.Policy == "" && len(s.Secrets) == 0 {
		return true
	}
	att, attached, err := e.Net.Attachment(ctx, s.ID)
	if err == nil && !attached {
		return true // Recover says so
	}
	if err == nil {
		err = e.enforce(ctx, &s, att.Addr)
	}
	if err != nil {
		e.Log.Error("put a policy in force again: the sandbox can begin nothing on the network", "sandbox", s.ID, "policy", s.Policy, "err", err)
	}
	return err == nil
}

// unenforce takes away what enforce made. Idempotent.
func (e *Engine) unenforce(ctx context.Context, id string) error {
	if err := e.Enforcer.Remove(ctx, id); err != nil {
		return fmt.Errorf("take away the enforcement of %s: %w", id, err)
	}
	e.Secrets.Lend(id, nil)
	return nil
}

// egress is what the host enforces for a sandbox; nil without a policy.
func (e *Engine) egress(s *shard.Sandbox) *shard.Egress {
	if s.Policy == "" {
		return nil
	}
	compiled, missing := e.policies.compiled(s.Policy)
	return &shard.Egress{Rules: compiled.Rules(), Missing: missing}
}

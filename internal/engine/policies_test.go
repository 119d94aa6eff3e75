package engine

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"path/filepath"
	"sync"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
	"github.com/useshards/shard/internal/store"
)

// ledger is an Enforcer that remembers what it was told.
type ledger struct {
	mu      sync.Mutex
	inForce map[string]*policy.Compiled
	fail    map[string]bool
}

func (l *ledger) Apply(_ context.Context, id string, _ netip.Addr, p *policy.Compiled) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.fail[id] {
		return errors.New("no")
	}
	l.inForce[id] = p
	return nil
}

func (l *ledger) Replace(ctx context.Context, policies map[string]*policy.Compiled) map[string]error {
	failed := make(map[string]error)
	for id, p := range policies {
		l.mu.Lock()
		in := l.inForce[id] != nil
		l.mu.Unlock()
		if !in {
			continue
		}
		if err := l.Apply(ctx, id, netip.Addr{}, p); err != nil {
			failed[id] = err
		}
	}
	return failed
}

func (l *ledger) Remove(_ context.Context, id string) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.inForce, id)
	return nil
}

func (l *ledger) Decisions(string) ([]json.RawMessage, int, LiveDecisions, error) {
	return nil, 0, nil, errors.New("there is no log")
}

func (l *ledger) Forget(string) {}

func (l *ledger) Trust(func(string) ([]byte, error)) (string, []byte, error) {
	return "", nil, errors.New("there is no proxy")
}

func (l *ledger) Anchors() ([]string, string, []byte) { return nil, "", nil }

func (l *ledger) Verdicts() map[[2]string]int64 { return nil }

// policyEngine is an engine that can do everything about policies and nothing else.
func policyEngine(t *testing.T, boxes int) (*Engine, *ledger) {
	t.Helper()
	l := &ledger{inForce: make(map[string]*policy.Compiled), fail: make(map[string]bool)}
	root := t.TempDir()
	records, err := store.Open[record](filepath.Join(root, "sandboxes"), "sandbox.json", recordFormat)
	if err != nil {
		t.Fatal(err)
	}
	secrets, err := secret.Open(filepath.Join(root, "secrets"), nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	e := &Engine{Config: Config{Root: root, Enforcer: l, Secrets: secrets, Log: slog.New(slog.DiscardHandler)}, records: records,
		sandboxes: make(map[string]*sandbox), names: make(map[string]string)}
	if e.policies, err = e.openPolicies(); err != nil {
		t.Fatal(err)
	}
	for i := range boxes {
		id := boxID(i)
		e.add(e.newSandbox(id, &record{Sandbox: shard.Sandbox{ID: id, State: shard.StateStopped}}))
	}
	return e, l
}

func boxID(i int) string { return fmt.Sprintf("bold-fern-%04x", i) }

var someAddr = netip.MustParseAddr("10.128.0.2")

func putPolicy(t *testing.T, e *Engine, name string, port int) error {
	t.Helper()
	_, err := e.PutPolicy(t.Context(), name, []shard.PolicyRule{{Action: "allow", Rule: fmt.Sprintf("any tcp:%d", port)}})
	return err
}

// TestPolicyInForce: whatever starts, stops, attaches and changes at the same time, in the end every sandbox that runs is
// kept to what its policy says, and a policy that a sandbox has is there.
func TestPolicyInForce(t *testing.T) {
	const boxes, rounds = 4, 25
	e, l := policyEngine(t, boxes)
	ctx := t.Context()
	if err := putPolicy(t, e, "p", 1); err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	for i := range boxes {
		wg.Go(func() { // a box that is attached, started and stopped again and again, and runs in the end
			for n := range rounds {
				if _, err := e.AttachPolicy(ctx, boxID(i), "p"); err != nil && shard.CodeOf(err) != shard.CodeInvalidRequest {
					t.Errorf("attach: %v", err)
				}
				sb, _ := e.find(boxID(i))
				s := sb.record().Sandbox
				if err := e.enforce(ctx, &s, someAddr); err != nil {
					t.Errorf("enforce: %v", err)
				}
				if n == rounds-1 {
					return
				}
				if err := e.unenforce(ctx, s.ID); err != nil {
					t.Errorf("unenforce: %v", err)
				}
				if _, err := e.DetachPolicy(ctx, boxID(i)); err != nil {
					t.Errorf("detach: %v", err)
				}
			}
		})
	}
	wg.Go(func() {
		for n := range rounds {
			if err := putPolicy(t, e, "p", n+2); err != nil {
				t.Errorf("put: %v", err)
			}
		}
	})
	wg.Go(func() {
		for range rounds {
			switch err := e.RemovePolicy("p"); shard.CodeOf(err) {
			case "", shard.CodeInUse, shard.CodeNotFound:
			default:
				t.Errorf("remove: %v", err)
			}
		}
	})
	wg.Wait()
	if err := putPolicy(t, e, "p", 9999); err != nil {
		t.Fatal(err)
	}
	now, missing := e.policies.compiled("p")
	if missing {
		t.Fatal("the policy is not there")
	}
	for i := range boxes {
		sb, _ := e.find(boxID(i))
		if has := sb.record().Sandbox.Policy == "p"; has != (l.inForce[boxID(i)] == now) {
			t.Errorf("%s: has it: %v; in force: %v", boxID(i), has, l.inForce[boxID(i)])
		}
	}
}

// TestPolicyNotApplied: rules that are stored and cannot be put in force are an error that names the sandbox, and the next
// put mends it. A policy that is gone closes everything.
func TestPolicyNotApplied(t *testing.T) {
	e, l := policyEngine(t, 2)
	ctx := t.Context()
	if err := putPolicy(t, e, "p", 1); err != nil {
		t.Fatal(err)
	}
	for i := range 2 {
		if _, err := e.AttachPolicy(ctx, boxID(i), "p"); err != nil {
			t.Fatal(err)
		}
		sb, _ := e.find(boxID(i))
		s := sb.record().Sandbox
		if err := e.enforce(ctx, &s, someAddr); err != nil {
			t.Fatal(err)
		}
	}
	l.fail[boxID(0)] = true
	err := putPolicy(t, e, "p", 2)
	if public, ok := errors.AsType[*shard.Error](err); !ok || public.Code != shard.CodeInternal || public.Message !=
		`policy "p" is stored, but could not be put in force for ["bold-fern-0000"]: store it again, or stop and start the sandbox` {
		t.Errorf("got %v", err)
	}
	now, _ := e.policies.compiled("p")
	if l.inForce[boxID(0)] == now || l.inForce[boxID(1)] != now {
		t.Error("the other sandbox must have the new rules, this one the old")
	}
	l.fail[boxID(0)] = false
	if err := putPolicy(t, e, "p", 2); err != nil {
		t.Error(err)
	}
	if now, _ := e.policies.compiled("p"); l.inForce[boxID(0)] != now {
		t.Error("stored again, and not in force")
	}
	e.policies.set("p", nil) // the store lost it
	sb, _ := e.find(boxID(0))
	s := sb.record().Sandbox
	if err := e.enforce(ctx, &s, someAddr); err != nil {
		t.Fatal(err)
	}
	if v := l.inForce[boxID(0)].Packet(netip.MustParseAddr("198.51.100.7"), "tcp", 2, nil); v.Allow || v.Rule != shard.EgressRuleMissing {
		t.Errorf("with a lost policy: %+v", v)
	}
}

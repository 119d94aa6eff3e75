package test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// put stores a policy whose rules are written "allow DEST …".
func put(t *testing.T, d *testenv.Daemon, name string, rules ...string) answer {
	t.Helper()
	list := []shard.PolicyRule{}
	for _, r := range rules {
		action, rule, _ := strings.Cut(r, " ")
		list = append(list, shard.PolicyRule{Action: action, Rule: rule})
	}
	return call(t, d, "PUT", "/v0/policies/"+name, map[string]any{"rules": list})
}

// TestPolicies: what is stored is what was said, in one spelling, in order, and it is there after a crash.
func TestPolicies(t *testing.T) {
	t.Parallel()
	d := start(t)
	a := put(t, d, "api-only", "allow suffix:Example.COM. tcp:443,80,81", "deny bücher.example", "allow 198.51.100.9/24", "allow 2001:DB8::/32 udp:53",
		"allow *.a.b", "deny any")
	want := `{"name":"api-only","rules":[` +
		`{"action":"allow","destination":{"kind":"domain-suffix","value":"example.com"},"protocol":"tcp","ports":["80-81","443"]},` +
		`{"action":"deny","destination":{"kind":"domain","value":"xn--bcher-kva.example"}},` +
		`{"action":"allow","destination":{"kind":"cidr","value":"198.51.100.0/24"}},` +
		`{"action":"allow","destination":{"kind":"cidr","value":"2001:db8::/32"},"protocol":"udp","ports":["53"]},` +
		`{"action":"allow","destination":{"kind":"domain","value":"*.a.b"}},` +
		`{"action":"deny","destination":{"kind":"group","value":"any"}}],"dns":"open"}` + "\n"
	if diff := cmp.Diff(want, string(a.Body)); a.Status != 200 || diff != "" {
		t.Errorf("put: status %d: %s", a.Status, diff)
	}
	if v := decode[shard.PolicyView](t, put(t, d, "offline", "deny any"), 200); v.DNS != shard.DNSClosed {
		t.Errorf("offline: %+v", v)
	}
	if v := decode[shard.PolicyView](t, put(t, d, "empty"), 200); v.DNS != shard.DNSClosed || v.Rules == nil {
		t.Errorf("empty: %+v", v)
	}
	d.Kill9()
	d.Restart()
	if a := call(t, d, "GET", "/v0/policies/api-only", nil); a.Status != 200 || string(a.Body) != want {
		t.Errorf("after a crash: %d %s", a.Status, a.Body)
	}
	type page struct {
		Policies []shard.Policy `json:"policies"`
		Next     *string        `json:"next"`
	}
	names := func(p page) (out []string) {
		for _, x := range p.Policies {
			out = append(out, x.Name)
		}
		return out
	}
	if p := decode[page](t, call(t, d, "GET", "/v0/policies", nil), 200); !slices.Equal(names(p), []string{"api-only", "empty", "offline"}) || p.Next != nil {
		t.Errorf("list: %+v", p)
	}
	first := decode[page](t, call(t, d, "GET", "/v0/policies?limit=2", nil), 200)
	if len(first.Policies) != 2 || first.Next == nil {
		t.Fatalf("the first page: %+v", first)
	}
	if p := decode[page](t, call(t, d, "GET", "/v0/policies?cursor="+*first.Next, nil), 200); !slices.Equal(names(p), []string{"offline"}) {
		t.Errorf("the second page: %+v", p)
	}
	// The same name replaces all rules.
	if v := decode[shard.PolicyView](t, put(t, d, "api-only", "allow a.b"), 200); len(v.Rules) != 1 {
		t.Errorf("replaced: %+v", v)
	}
	if a := call(t, d, "DELETE", "/v0/policies/api-only", nil); a.Status != 204 {
		t.Errorf("remove: %d %s", a.Status, a.Body)
	}
	for _, method := range []string{"GET", "DELETE"} {
		if a := call(t, d, method, "/v0/policies/api-only", nil); a.code(t) != shard.CodeNotFound {
			t.Errorf("%s of one that is gone: %s", method, a.Body)
		}
	}
	if entries, err := os.ReadDir(filepath.Join(d.Root, "policies")); err != nil || len(entries) != 2 {
		t.Errorf("left in the store: %v, %v", entries, err)
	}
}

func TestPolicyRefusals(t *testing.T) {
	t.Parallel()
	d := start(t)
	many := `{"rules":[` + strings.Repeat(`{"action":"allow","rule":"any"},`, 256) + `{"action":"allow","rule":"any"}]}`
	for _, c := range []struct{ method, path, body, says string }{
		{"PUT", "/v0/policies/Bad", `{"rules":[]}`, "Bad"},
		{"PUT", "/v0/policies/-bad", `{"rules":[]}`, "-bad"},
		{"PUT", "/v0/policies/..", `{"rules":[]}`, ".."},
		{"PUT", "/v0/policies/a%2Fb", `{"rules":[]}`, "a/b"},
		{"GET", "/v0/policies/a_b", "", "a_b"},
		{"PUT", "/v0/policies/" + strings.Repeat("a", 65), `{"rules":[]}`, "64"},
		{"PUT", "/v0/policies/p", `{}`, "rules"},
		{"PUT", "/v0/policies/p", `{"rules":null}`, "rules"},
		{"PUT", "/v0/policies/p", `{"rules":{}}`, "rules"},
		{"PUT", "/v0/policies/p", `{"rules":[],"dns":"open"}`, "dns"},
		{"PUT", "/v0/policies/p", `{"rules":[{"action":"allow","rule":"any","ports":[]}]}`, "ports"},
		{"PUT", "/v0/policies/p", `{"rules":[{"action":"allow","rule":"any"},{"action":"drop","rule":"any"}]}`, "rule 2: "},
		{"PUT", "/v0/policies/p", `{"rules":[{"action":"allow","rule":"private"}]}`, "private"},
		{"PUT", "/v0/policies/p", `{"rules":[{"action":"deny","rule":"dns"}]}`, "dns"},
		{"PUT", "/v0/policies/p", `{"rules":[{"action":"allow"}]}`, "empty"},
		{"PUT", "/v0/policies/p", many, "257"},
		{"PUT", "/v0/sandboxes/x/policy", `{}`, "policy"},
		{"PUT", "/v0/sandboxes/x/policy", `{"policy":"p","x":1}`, "x"},
	} {
		a := call(t, d, c.method, c.path, []byte(c.body))
		if code := a.code(t); code != shard.CodeInvalidRequest || !strings.Contains(string(a.Body), c.says) {
			t.Errorf("%s %s %.60s: %d %s", c.method, c.path, c.body, a.Status, a.Body)
		}
	}
	if got := d.Must("policy", "list", "--format", "json"); got != "[]" {
		t.Errorf("something was stored: %s", got)
	}
	if a := call(t, d, "PUT", "/v0/policies/p", []byte(strings.TrimSuffix(many, `,{"action":"allow","rule":"any"}]}`)+"]}")); a.Status != 200 {
		t.Errorf("256 rules: %d %s", a.Status, a.Body)
	}
	if a := call(t, d, "PUT", "/v0/sandboxes/none/policy", map[string]string{"policy": "p"}); a.code(t) != shard.CodeNotFound {
		t.Errorf("attach to none: %s", a.Body)
	}
}

// TestPolicyHolders: a policy belongs to a sandbox that is down, is held by it, and no sandbox runs without the rules it
// should have.
func TestPolicyHolders(t *testing.T) {
	t.Parallel()
	d := start(t)
	c := connect(t, d)
	ctx := t.Context()
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		policy, name := "p-"+provider, "box-"+provider
		decode[shard.PolicyView](t, put(t, d, policy, "allow a.b", "deny any"), 200)

		req := shard.CreateRequest{Image: image, Provider: provider, Policy: "no-such"}
		if a := call(t, d, "POST", "/v0/sandboxes?wait=true", req); a.code(t) != shard.CodeInvalidRequest || !strings.Contains(string(a.Body), "no-such") {
			t.Errorf("create with a policy that is not there: %s", a.Body)
		}
		if list := d.Must("list", "--all", "-q"); list != "" {
			t.Errorf("a refused create left %s", list)
		}

		id := box(t, d, provider, "--name", name)
		if in := inspect(t, d, id); in.Egress != nil || in.Policy != "" {
			t.Errorf("without a policy: %+v", in.Egress)
		}
		if a := call(t, d, "PUT", "/v0/sandboxes/"+name+"/policy", map[string]string{"policy": policy}); a.code(t) != shard.CodeSandboxLive {
			t.Errorf("attach while it runs: %s", a.Body)
		}
		if a := call(t, d, "DELETE", "/v0/sandboxes/"+name+"/policy", nil); a.code(t) != shard.CodeSandboxLive {
			t.Errorf("detach while it runs: %s", a.Body)
		}
		d.Must("stop", name)
		_, err := c.AttachPolicy(ctx, name, "no-such")
		wantCode(t, err, shard.CodeInvalidRequest)
		for range 2 { // a repeat changes nothing
			if s := decode[shard.Sandbox](t, call(t, d, "PUT", "/v0/sandboxes/"+name+"/policy", map[string]string{"policy": policy}), 200); s.Policy != policy {
				t.Errorf("attached: %+v", s)
			}
		}
		in := inspect(t, d, name)
		raw, _ := json.Marshal(in.Egress)
		want := `{"rules":[{"id":"1","implied":"dns","action":"allow","destination":{"kind":"group","value":"dns"},"protocol":"udp","ports":["53"]},` +
			`{"id":"2","implied":"dns","action":"allow","destination":{"kind":"group","value":"dns"},"protocol":"tcp","ports":["53"]},` +
			`{"id":"3","action":"allow","destination":{"kind":"domain","value":"a.b"}},{"id":"4","action":"deny","destination":{"kind":"group","value":"any"}}]}`
		if diff := cmp.Diff(want, string(raw)); diff != "" || in.Policy != policy {
			t.Errorf("egress: %s", diff)
		}
		if v := decode[shard.PolicyView](t, call(t, d, "GET", "/v0/policies/"+policy, nil), 200); !slices.Equal(v.Holders, []string{name}) {
			t.Errorf("holders: %q", v.Holders)
		}
		refusal := call(t, d, "DELETE", "/v0/policies/"+policy, nil)
		var body shard.ErrorBody
		if err := json.Unmarshal(refusal.Body, &body); err != nil || refusal.code(t) != shard.CodeInUse || !slices.Equal(body.Error.Holders, []string{name}) {
			t.Errorf("remove while it is held: %s", refusal.Body)
		}
		refused(t, d.Shard("policy", "remove", policy), policy, "in use", name)
		// A change shows at once, and survives a crash with its holder.
		decode[shard.PolicyView](t, put(t, d, policy, "deny any"), 200)
		d.Kill9()
		d.Restart()
		if in := inspect(t, d, name); in.Policy != policy || len(in.Egress.Rules) != 1 || in.Egress.Missing {
			t.Errorf("after a change and a crash: %+v %+v", in.Policy, in.Egress)
		}
		if got := d.Must("policy", "check", name, "a.b"); !strings.Contains(got, "rule 1 (deny any)") {
			t.Errorf("check: %s", got)
		}
		d.Must("policy", "detach", name)
		d.Must("start", name)
		if got := sh(t, d, name, "echo up"); got != "up" {
			t.Errorf("after the detach: %q", got)
		}
		d.Must("policy", "remove", policy)
		d.Must("remove", "--force", name)
	})
}

// TestPolicyLost: where the store has lost a policy, or cannot read it, its holder says that nothing can be reached, and
// storing it again mends it.
func TestPolicyLost(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		name := "box-" + provider
		box(t, d, provider, "--name", name)
		d.Must("stop", name)
		d.Must("policy", "create", "--allow", "any", "p")
		d.Must("policy", "attach", name, "p")
		dir := filepath.Join(d.Root, "policies", "p")
		for _, how := range []func() error{
			func() error { return os.RemoveAll(dir) },
			func() error { return os.WriteFile(filepath.Join(dir, "policy.json"), []byte("{"), 0o600) },
			func() error {
				return os.WriteFile(filepath.Join(dir, "policy.json"), []byte(`{"format":1,"record":{"name":"p","rules":[{"action":"allow","destination":{"kind":"domain","value":"A"}}]}}`), 0o600)
			},
		} {
			d.Kill9()
			if err := how(); err != nil {
				t.Fatal(err)
			}
			d.Restart()
			if in := inspect(t, d, name); in.Egress == nil || !in.Egress.Missing || len(in.Egress.Rules) != 0 {
				t.Errorf("egress: %+v", in.Egress)
			}
			if got := d.Must("policy", "check", name, "198.51.100.7"); !strings.Contains(got, "denied") || !strings.Contains(got, "missing") {
				t.Errorf("check: %s", got)
			}
			d.Must("policy", "create", "--allow", "any", "p")
			if in := inspect(t, d, name); in.Egress.Missing || len(in.Egress.Rules) != 1 {
				t.Errorf("stored again: %+v", in.Egress)
			}
		}
		// One that cannot be read is named in the list.
		d.Kill9()
		if err := os.WriteFile(filepath.Join(dir, "policy.json"), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Restart()
		if r := d.Shard("policy", "list"); r.Code != 1 || r.Stdout != "NAME   RULES\n" || !strings.Contains(r.Stderr, `policy "p" cannot be read`) {
			t.Errorf("list: %+v", r)
		}
		d.Must("policy", "create", "--allow", "any", "p")
		d.Must("remove", name)
		d.Must("policy", "remove", "p")
	})
}

// TestPolicyCommands: what the guide shows, and case 56 as a person would check it.
func TestPolicyCommands(t *testing.T) {
	t.Parallel()
	d := start(t)
	r := d.Shard("policy", "create", "--deny", "any", "offline")
	if r.Code != 0 || r.Stdout != "offline\n" || !strings.HasPrefix(r.Stderr, "note: ") {
		t.Errorf("create: %+v", r)
	}
	d.Must("policy", "create", "--allow", "suffix:lab.test tcp:443", "--deny", "any", "lab")
	for _, c := range []struct {
		dest string
		ok   bool
	}{{"lab.test", true}, {"a.lab.test", true}, {"notlab.test", false}, {"lab.test.evil.test", false}, {"A.LAB.TEST.", true},
		{"bücher.lab.test", true}, {"xn--bcher-kva.lab.test", true}} {
		for _, port := range []string{"80", "443", "8443"} {
			got := d.Must("policy", "check", "lab", c.dest, port)
			if want := c.ok && port == "443"; strings.Contains(got, " is allowed: rule 3 ") != want {
				t.Errorf("%s %s: %s", c.dest, port, got)
			}
		}
	}
	var rows []struct {
		Name  string `json:"name"`
		Count int    `json:"rule_count"`
	}
	if err := json.Unmarshal([]byte(d.Must("policy", "list", "--format", "json")), &rows); err != nil || fmt.Sprint(rows) != "[{lab 2} {offline 1}]" {
		t.Errorf("list: %v, %v", rows, err)
	}
}

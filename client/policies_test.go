package client_test

import (
	"encoding/json"
	"io"
	"net/http"
	"slices"
	"testing"

	"github.com/useshards/shard"
)

func TestPolicies(t *testing.T) {
	var method, target, body string
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		raw, _ := io.ReadAll(r.Body)
		method, target, body = r.Method, r.URL.RequestURI(), string(raw)
		switch {
		case r.Method == http.MethodDelete && r.URL.Path == "/v0/policies/p":
			w.WriteHeader(http.StatusNoContent)
		case r.URL.RequestURI() == "/v0/policies":
			_, _ = io.WriteString(w, `{"policies":[{"name":"a","rules":[]}],"next":"x","warnings":["w"]}`)
		case r.URL.Path == "/v0/policies":
			_, _ = io.WriteString(w, `{"policies":[{"name":"b","rules":[]}],"next":null}`)
		case r.URL.Path == "/v0/sandboxes/box/policy":
			_ = json.NewEncoder(w).Encode(shard.Sandbox{ID: "box", Policy: "p"})
		default:
			_ = json.NewEncoder(w).Encode(shard.PolicyView{Policy: shard.Policy{Name: "p"}, DNS: shard.DNSOpen, Holders: []string{"box"}})
		}
	}))
	check := func(err error, want ...string) {
		t.Helper()
		if got := []string{method, target, body}; err != nil || !slices.Equal(got, want) {
			t.Errorf("sent %q, want %q; %v", got, want, err)
		}
	}
	ctx := t.Context()
	p, err := c.PutPolicy(ctx, "p", []shard.PolicyRule{{Action: "allow", Rule: "a.b tcp:443"}})
	check(err, "PUT", "/v0/policies/p", `{"rules":[{"action":"allow","rule":"a.b tcp:443"}]}`)
	if p.Name != "p" || p.DNS != shard.DNSOpen || len(p.Holders) != 1 {
		t.Errorf("got %+v", p)
	}
	_, err = c.PutPolicy(ctx, "a/b", nil)
	check(err, "PUT", "/v0/policies/a%2Fb", `{"rules":[]}`)
	_, err = c.Policy(ctx, "p")
	check(err, "GET", "/v0/policies/p", "")
	check(c.RemovePolicy(ctx, "p"), "DELETE", "/v0/policies/p", "")
	sb, err := c.AttachPolicy(ctx, "box", "p")
	check(err, "PUT", "/v0/sandboxes/box/policy", `{"policy":"p"}`)
	if sb.Policy != "p" {
		t.Errorf("got %+v", sb)
	}
	_, err = c.DetachPolicy(ctx, "box")
	check(err, "DELETE", "/v0/sandboxes/box/policy", "")
	list, warnings, err := c.Policies(ctx)
	check(err, "GET", "/v0/policies?cursor=x", "")
	if len(list) != 2 || list[1].Name != "b" || !slices.Equal(warnings, []string{"w"}) {
		t.Errorf("got %+v, %q", list, warnings)
	}
}

package cli_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/useshards/shard"
)

func TestPolicy(t *testing.T) {
	d := start(t)
	var body string
	view := `{"name":"api","rules":[{"action":"allow","destination":{"kind":"domain-suffix","value":"a.com"},"protocol":"tcp","ports":["443"]},
		{"action":"deny","destination":{"kind":"group","value":"any"}}],"dns":"open","holders":["web","db"]}`
	d.mux.HandleFunc("PUT /v0/policies/{name}", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		body = string(b)
		if r.PathValue("name") == "offline" {
			_, _ = io.WriteString(w, `{"name":"offline","rules":[],"dns":"closed"}`)
			return
		}
		_, _ = io.WriteString(w, view)
	})
	d.answer("GET /v0/policies/api", 200, view)
	d.answer("GET /v0/policies", 200, `{"policies":[`+view+`],"next":null}`)
	d.answer("DELETE /v0/policies/api", 409, `{"error":{"code":"in_use","message":"policy \"api\" is in use","holders":["web"]}}`)
	d.answer("DELETE /v0/policies/old", 204, "")
	d.refuse("GET /v0/policies/{name}", 404, shard.CodeNotFound, "there is no policy")
	d.answer("PUT /v0/sandboxes/web/policy", 200, `{"id":"bold-fern-0001"}`)
	d.answer("DELETE /v0/sandboxes/web/policy", 200, `{"id":"bold-fern-0001"}`)
	d.answer("GET /v0/sandboxes/web", 200, `{"id":"bold-fern-0001","name":"web","policy":"api","egress":{"rules":[
		{"id":"1","implied":"dns","action":"allow","destination":{"kind":"group","value":"dns"},"protocol":"udp","ports":["53"]},
		{"id":"2","implied":"dns","action":"allow","destination":{"kind":"group","value":"dns"},"protocol":"tcp","ports":["53"]},
		{"id":"3","action":"allow","destination":{"kind":"domain","value":"a.com"}}]}}`)
	d.answer("GET /v0/sandboxes/free", 200, `{"id":"bold-fern-0002","name":"free"}`)
	d.answer("GET /v0/sandboxes/lost", 200, `{"id":"bold-fern-0003","policy":"gone","egress":{"rules":[],"missing":true}}`)
	d.refuse("GET /v0/sandboxes/{id}", 404, shard.CodeNotFound, "there is no sandbox")

	if got := run(t, d, "policy", "create", "--deny", "b.a.com", "--allow", "suffix:a.com tcp:443", "--deny", "any", "api"); got != (result{out: "api\n"}) {
		t.Errorf("got %+v", got)
	}
	if want := `{"rules":[{"action":"deny","rule":"b.a.com"},{"action":"allow","rule":"suffix:a.com tcp:443"},{"action":"deny","rule":"any"}]}`; body != want {
		t.Errorf("sent %s", body)
	}
	if got := run(t, d, "policy", "create", "offline"); got.code != 0 || got.out != "offline\n" || !strings.HasPrefix(got.errs, "note: ") || body != `{"rules":[]}` {
		t.Errorf("got %+v, sent %s", got, body)
	}
	if got := run(t, d, "policy", "create", "--allow", "api*.a.com", "x"); got.code != 1 || !strings.Contains(got.errs, `option --allow: "api*.a.com" is not valid`) {
		t.Errorf("got %+v", got)
	}
	for _, tc := range []struct {
		args string
		want result
	}{
		{"policy list", result{out: "NAME   RULES\napi    2\n"}},
		{"policy ls --format json", result{out: "[\n  {\n    \"name\": \"api\",\n    \"rule_count\": 2\n  }\n]\n"}},
		{"policy show --format table api", result{out: "name      api\ndns       open\nholders   web, db\n\nRULE\nallow suffix:a.com tcp:443\ndeny any\n"}},
		{"policy rm api old", result{"old\n", "shard: policy \"api\" is in use (in use by web)\n", 1}},
		{"policy attach web api", result{out: "bold-fern-0001\n"}},
		{"policy detach web", result{out: "bold-fern-0001\n"}},
		{"policy check api www.a.com", result{out: "policy api: www.a.com tcp:443 is allowed: rule 3 (allow suffix:a.com tcp:443) is the first that matches\n"}},
		{"policy check api b.com 80", result{out: "policy api: b.com tcp:80 is denied: rule 4 (deny any) is the first that matches; the name cannot be looked up\n"}},
		{"policy check web a.com", result{out: "sandbox web with policy api: a.com tcp:443 is allowed: rule 3 (allow a.com) is the first that matches\n"}},
		{"policy check free 10.0.0.1 icmp", result{out: "sandbox free: 10.0.0.1 icmp is denied: the host drops this destination for every sandbox, and no rule can open it\n"}},
		{"policy check lost a.com", result{out: "sandbox bold-fern-0003 with policy gone: a.com tcp:443 is denied: the sandbox's policy is missing from the store, so nothing can be reached; the name cannot be looked up\n"}},
		{"policy check none a.com", result{"", "shard: there is no policy and no sandbox \"none\"\n", 1}},
		{"policy check api a_b..c", result{"", "shard: \"a_b..c\" is not an address or a host name\n", 1}},
	} {
		if diff := cmp.Diff(tc.want, run(t, d, strings.Fields(tc.args)...), cmp.AllowUnexported(result{})); diff != "" {
			t.Errorf("%s: %s", tc.args, diff)
		}
	}
	var p shard.PolicyView
	if got := run(t, d, "policy", "show", "api"); got.code != 0 || json.Unmarshal([]byte(got.out), &p) != nil || p.DNS != "open" || len(p.Rules) != 2 || len(p.Holders) != 2 {
		t.Errorf("got %+v", got)
	}
	var x map[string]string
	if got := run(t, d, "policy", "check", "--format", "json", "web", "a.com", "udp:443"); got.code != 0 || json.Unmarshal([]byte(got.out), &x) != nil ||
		x["sandbox"] != "web" || x["policy"] != "api" || x["verdict"] != "deny" || x["rule"] != "default" || x["destination"] != "a.com udp:443" {
		t.Errorf("got %+v", got)
	}
	for _, c := range strings.Fields("policy policy/create policy/show policy/list policy/remove policy/attach policy/detach policy/check") {
		got := run(t, d, append(strings.Split(c, "/"), "--help")...)
		if got.code != 0 || got.errs != "" || !strings.Contains(got.out, "Example:\n  ") {
			t.Errorf("%s: %+v", c, got)
		}
	}
}

package api

import (
	"encoding/json"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/useshards/shard"
)

// TestScopeHeader: what a request needs beyond its route's scope, and what becomes of a header that is not ours.
func TestScopeHeader(t *testing.T) {
	a := New(Config{Log: slog.New(slog.DiscardHandler)})
	for _, c := range []struct {
		scopes               []string
		method, target, body string
		status               int
		says                 string
	}{
		{[]string{"sandbox:write"}, "POST", "/v0/sandboxes", `{"image":"a","secrets":["A"]}`, 403, "secret:*"},
		{[]string{"sandbox:write,secret:*"}, "POST", "/v0/sandboxes", `{"image":"a","secrets":["A"],"policy":"p"}`, 403, "policy:*"},
		{[]string{"sandbox:write,secret:*,policy:*"}, "POST", "/v0/sandboxes", `{"image":"a","policy":"p","ports":[{}]}`, 403, "port:write"},
		{[]string{"sandbox:write,port:read"}, "POST", "/v0/sandboxes", `{"image":"a","ports":[{}]}`, 403, "port:write"},
		{[]string{"exec"}, "POST", "/v0/sandboxes", `{}`, 403, "sandbox:write"},
		{[]string{""}, "GET", "/v0/sandboxes", ``, 403, "sandbox:read"},
		{[]string{"colour"}, "GET", "/v0/sandboxes", ``, 403, "sandbox:read"},
		{[]string{"*", "*"}, "GET", "/v0/sandboxes", ``, 403, "sandbox:read"},
		{[]string{"*"}, "GET", "/v0/images", ``, 403, "host"},
		{[]string{""}, "GET", "/v0/scopes", ``, 200, ""},
	} {
		r := httptest.NewRequest(c.method, c.target, strings.NewReader(c.body))
		r.Header[shard.ScopesHeader] = c.scopes
		w := httptest.NewRecorder()
		a.ServeHTTP(w, r)
		var e shard.ErrorBody
		_ = json.Unmarshal(w.Body.Bytes(), &e)
		if w.Code != c.status || c.status == http.StatusForbidden && e.Error.Code != shard.CodeForbidden || !strings.Contains(e.Error.Message, c.says) {
			t.Errorf("%q %s %s %s: %d %+v", c.scopes, c.method, c.target, c.body, w.Code, e.Error)
		}
	}
}

func TestScopesRoute(t *testing.T) {
	w := httptest.NewRecorder()
	New(Config{Log: slog.New(slog.DiscardHandler)}).ServeHTTP(w, httptest.NewRequest("GET", "/v0/scopes", nil))
	var out struct{ Scopes []shard.Scope }
	if err := json.Unmarshal(w.Body.Bytes(), &out); err != nil || len(out.Scopes) != len(shard.Scopes) || out.Scopes[0].Description == "" {
		t.Error(w.Code, w.Body)
	}
}

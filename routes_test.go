package shard

import (
	"strings"
	"testing"
)

func TestEveryRouteMatchesItself(t *testing.T) {
	seen := map[string]bool{}
	for i := range Routes {
		r := &Routes[i]
		if seen[r.Name()] {
			t.Errorf("%s is there twice", r.Name())
		}
		seen[r.Name()] = true
		path := strings.NewReplacer("{id}", "web", "{exec}", "abc", "{name}", "web", "{ref...}", "index.docker.io/library/alpine:3").Replace(r.Path)
		got, params := MatchRoute(r.Method, path)
		if got != r {
			t.Errorf("%s matches %v", r.Name(), got)
		}
		if strings.Contains(r.Path, "{id}") && params["id"] != "web" {
			t.Errorf("%s: id is %q", r.Name(), params["id"])
		}
		if !r.Local && r.Scope == "" && !strings.Contains(" version capabilities providers scopes ", r.Path[4:]+" ") {
			t.Errorf("%s asks for no scope", r.Name())
		}
	}
}

// TestOddPaths: what a parameter holds never changes which route is meant (case 138).
func TestOddPaths(t *testing.T) {
	for path, id := range map[string]string{
		"/v0/sandboxes/..":         "..",
		"/v0/sandboxes/%2e%2e":     "..",
		"/v0/sandboxes/a%2Fb":      "a/b",
		"/v0/sandboxes/a%00":       "a\x00",
		"/v0/sandboxes/%2e%2e%2fx": "../x",
	} {
		r, params := MatchRoute("GET", path)
		if r == nil || r.Path != "/v0/sandboxes/{id}" || params["id"] != id {
			t.Errorf("%s: %v %q", path, r, params)
		}
	}
	for _, path := range []string{"", "/", "/v0", "/v0/", "v0/version", "/v0/sandboxes/", "//v0/version", "/v0/version/", "/V0/version",
		"/v0/sandboxes/a/b", "/v0/sandboxes/%zz", "/v0/../v0/version", "/v0/sandboxes//exec"} {
		if r, _ := MatchRoute("GET", path); r != nil {
			t.Errorf("%q matches %s", path, r.Name())
		}
	}
	if r, _ := MatchRoute("PATCH", "/v0/version"); r != nil {
		t.Error("another method matches")
	}
	if r, params := MatchRoute("DELETE", "/v0/images/a/b%2Fc:1@sha256:x"); r == nil || params["ref"] != "a/b/c:1@sha256:x" {
		t.Error(params)
	}
}

package shard

import (
	"slices"
	"testing"
)

// TestScopes: a route asks for a scope that exists, and no name that does not exist gives a right.
func TestScopes(t *testing.T) {
	for i := range Routes {
		if r := &Routes[i]; r.Scope != "" && !IsScope(r.Scope) || r.Local && r.Scope != "" {
			t.Errorf("%s asks for the scope %q", r.Name(), r.Scope)
		}
	}
	for _, c := range []struct {
		granted []string
		want    string
		ok      bool
	}{
		{nil, "", true}, {nil, "exec", false}, {[]string{"exec"}, "exec", true}, {[]string{"exec"}, "sandbox:read", false},
		{[]string{"*"}, "exec", true}, {[]string{"*"}, "colour", true}, {[]string{"colour"}, "colour", false},
		{[]string{"secret:*"}, "secret:*", true}, {[]string{"sandbox:*"}, "sandbox:read", false}, {[]string{""}, "exec", false},
	} {
		if ScopesAllow(c.granted, c.want) != c.ok {
			t.Errorf("%q allow %q: want %v", c.granted, c.want, c.ok)
		}
	}
	for _, bad := range []string{"", "colour", "exec,", "exec,Exec", "sandbox:*", "exec sandbox:read", "admin"} {
		if got, err := ParseScopes(bad); CodeOf(err) != CodeInvalidRequest {
			t.Errorf("ParseScopes(%q) = %q, %v", bad, got, err)
		}
	}
	if got, err := ParseScopes("exec, *,exec"); err != nil || !slices.Equal(got, []string{"*"}) {
		t.Error(got, err)
	}
	if got, err := ParseScopes("exec, port:read,exec"); err != nil || !slices.Equal(got, []string{"exec", "port:read"}) {
		t.Error(got, err)
	}
}

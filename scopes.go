package shard

import (
	"slices"
	"strings"
)

// Scope is one right that a token can carry.
type Scope struct {
	Name        string `json:"name"`
	Description string `json:"description"`
}

// ScopeAll is the scope that covers every other.
const ScopeAll = "*"

// ScopesHeader carries what the caller of a request may do, as shard serve knows it from the caller's token: scopes with
// commas between them. A request without it comes from the socket itself and may do everything.
const ScopesHeader = "X-Shard-Scopes"

// Scopes is every valid scope.
var Scopes = []Scope{
	{"sandbox:read", "list and inspect sandboxes and snapshots, read the logs of processes, the egress log and the metrics"},
	{"sandbox:write", "create, start, stop, pause, resume and fork sandboxes, make snapshots"},
	{"sandbox:delete", "remove sandboxes and snapshots"},
	{"exec", "run commands and processes in sandboxes, read and write their files"},
	{"secret:*", "set, list, remove and grant secrets"},
	{"policy:*", "set, list, remove and attach egress policies"},
	{"port:read", "list forwarded ports"},
	{"port:write", "forward ports"},
	{ScopeAll, "everything that the API has"},
}

// IsScope says whether a scope of this name exists. One that does not exist gives no right, wherever it was written.
func IsScope(name string) bool {
	return slices.ContainsFunc(Scopes, func(s Scope) bool { return s.Name == name })
}

// ScopesAllow says whether the granted scopes cover the wanted one; every set of scopes covers "".
func ScopesAllow(granted []string, want string) bool {
	return want == "" || slices.Contains(granted, ScopeAll) || IsScope(want) && slices.Contains(granted, want)
}

// ParseScopes reads a list of scopes with commas between them, such as a person writes: each is valid and there once,
// and one that covers every other stands alone.
func ParseScopes(list string) ([]string, error) {
	var out []string
	for name := range strings.SplitSeq(list, ",") {
		name = strings.TrimSpace(name)
		if !IsScope(name) {
			var known []string
			for _, s := range Scopes {
				known = append(known, s.Name)
			}
			return nil, Invalidf("there is no scope %s: choose from %s", Quote(name), strings.Join(known, ", "))
		}
		if !slices.Contains(out, name) {
			out = append(out, name)
		}
	}
	if slices.Contains(out, ScopeAll) {
		return []string{ScopeAll}, nil
	}
	return out, nil
}

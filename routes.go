package shard

import (
	"net/url"
	"strings"
)

// Route is one operation of the API. The daemon serves exactly these; `shard serve` asks for Scope before it passes a
// request on, and refuses those that are Local.
type Route struct {
	Method string
	// Path has parameters in braces; {ref...} takes the rest of the path, slashes included.
	Path string
	// Scope is what a token needs; "" means that any token will do.
	Scope string
	// Local routes exist on the daemon's socket only.
	Local bool
	// Query names the parameters that the route takes.
	Query []string
	// Stream says that the route can also be upgraded to a WebSocket.
	Stream bool
	// Door routes are answered by shard serve itself, which has the key to sign with; the daemon refuses them.
	Door bool
}

// Routes is every route of the API.
var Routes = []Route{
	{Method: "GET", Path: "/v0/version"},
	{Method: "GET", Path: "/v0/capabilities", Query: []string{"provider"}},
	{Method: "GET", Path: "/v0/providers"},
	{Method: "GET", Path: "/v0/scopes"},
	{Method: "GET", Path: "/metrics", Scope: "sandbox:read"},

	{Method: "GET", Path: "/v0/sandboxes", Scope: "sandbox:read", Query: []string{"all", "limit", "cursor"}},
	{Method: "POST", Path: "/v0/sandboxes", Scope: "sandbox:write", Query: []string{"wait"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}", Scope: "sandbox:read", Query: []string{"wait"}},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}", Scope: "sandbox:delete", Query: []string{"force"}},
	{Method: "POST", Path: "/v0/sandboxes/{id}/start", Scope: "sandbox:write"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/stop", Scope: "sandbox:write"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/pause", Scope: "sandbox:write"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/resume", Scope: "sandbox:write"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/fork", Scope: "sandbox:write"},

	{Method: "POST", Path: "/v0/sandboxes/{id}/exec", Scope: "exec"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/exec", Scope: "exec", Query: []string{"limit", "cursor"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}/exec/{exec}", Scope: "exec", Query: []string{"wait"}, Stream: true},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}/exec/{exec}", Scope: "exec"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/exec/{exec}/kill", Scope: "exec"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/exec/{exec}/resize", Scope: "exec"},

	{Method: "POST", Path: "/v0/sandboxes/{id}/processes", Scope: "exec"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/processes", Scope: "sandbox:read"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/processes/{name}", Scope: "sandbox:read"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/processes/{name}/attach", Scope: "sandbox:read", Stream: true},
	{Method: "POST", Path: "/v0/sandboxes/{id}/processes/{name}/kill", Scope: "exec"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/processes/{name}/logs", Scope: "sandbox:read", Query: []string{"follow"}, Stream: true},

	{Method: "GET", Path: "/v0/ports", Scope: "port:read", Query: []string{"limit", "cursor"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}/ports", Scope: "port:read", Query: []string{"limit", "cursor"}},
	{Method: "PUT", Path: "/v0/sandboxes/{id}/ports/{host_port}", Scope: "port:write"},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}/ports/{host_port}", Scope: "port:write"},
	{Method: "POST", Path: "/v0/sandboxes/{id}/links/{guest_port}", Scope: "port:write", Query: []string{"expires"}, Door: true},
	{Method: "GET", Path: "/v0/sandboxes/{id}/dial/{guest_port}", Local: true},

	{Method: "PUT", Path: "/v0/sandboxes/{id}/files", Scope: "exec", Query: []string{"path", "mode", "user", "parents"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}/files", Scope: "exec", Query: []string{"path"}},
	{Method: "HEAD", Path: "/v0/sandboxes/{id}/files", Scope: "exec", Query: []string{"path"}},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}/files", Scope: "exec", Query: []string{"path", "recursive"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}/ls", Scope: "exec", Query: []string{"path"}},
	{Method: "POST", Path: "/v0/sandboxes/{id}/mkdir", Scope: "exec"},
	{Method: "GET", Path: "/v0/sandboxes/{id}/watch", Scope: "exec", Query: []string{"path", "recursive"}, Stream: true},
	{Method: "GET", Path: "/v0/sandboxes/{id}/egress-log", Scope: "sandbox:read", Query: []string{"follow"}, Stream: true},
	{Method: "PUT", Path: "/v0/sandboxes/{id}/archive", Scope: "exec", Query: []string{"path", "user"}},
	{Method: "GET", Path: "/v0/sandboxes/{id}/archive", Scope: "exec", Query: []string{"path"}},

	{Method: "PUT", Path: "/v0/sandboxes/{id}/policy", Scope: "policy:*"},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}/policy", Scope: "policy:*"},

	{Method: "GET", Path: "/v0/policies", Scope: "policy:*", Query: []string{"limit", "cursor"}},
	{Method: "GET", Path: "/v0/policies/{name}", Scope: "policy:*"},
	{Method: "PUT", Path: "/v0/policies/{name}", Scope: "policy:*"},
	{Method: "DELETE", Path: "/v0/policies/{name}", Scope: "policy:*"},

	{Method: "POST", Path: "/v0/sandboxes/{id}/secrets/{name}", Scope: "secret:*"},
	{Method: "DELETE", Path: "/v0/sandboxes/{id}/secrets/{name}", Scope: "secret:*"},

	{Method: "GET", Path: "/v0/secrets", Scope: "secret:*", Query: []string{"limit", "cursor"}},
	{Method: "PUT", Path: "/v0/secrets/{name}", Scope: "secret:*"},
	{Method: "DELETE", Path: "/v0/secrets/{name}", Scope: "secret:*", Query: []string{"force"}},

	{Method: "GET", Path: "/v0/daemon", Local: true},
	{Method: "PUT", Path: "/v0/daemon/preview", Local: true},
	{Method: "GET", Path: "/v0/images", Local: true, Query: []string{"limit", "cursor"}},
	{Method: "POST", Path: "/v0/images/pull", Local: true},
	{Method: "POST", Path: "/v0/images/import", Local: true, Query: []string{"ref", "env", "workdir", "user"}},
	{Method: "POST", Path: "/v0/images/prune", Local: true},
	{Method: "DELETE", Path: "/v0/images/{ref...}", Local: true, Query: []string{"force"}},
}

// Name is how logs and tables call the route.
func (r *Route) Name() string { return r.Method + " " + r.Path }

// MatchRoute finds the route of a request and the values of its parameters. escapedPath is the path as it was sent: no
// part of it is cleaned or joined, so what a parameter holds never changes which route is meant.
func MatchRoute(method, escapedPath string) (*Route, map[string]string) {
	parts := strings.Split(escapedPath, "/")
	for i := range Routes {
		r := &Routes[i]
		if r.Method != method {
			continue
		}
		if params, ok := r.match(parts); ok {
			return r, params
		}
	}
	return nil, nil
}

func (r *Route) match(parts []string) (map[string]string, bool) {
	pattern := strings.Split(r.Path, "/")
	var params map[string]string
	for i, want := range pattern {
		if i >= len(parts) {
			return nil, false
		}
		name, isParam := strings.CutPrefix(want, "{")
		if !isParam {
			if parts[i] != want {
				return nil, false
			}
			continue
		}
		name = strings.TrimSuffix(name, "}")
		raw := parts[i]
		name, rest := strings.CutSuffix(name, "...")
		if rest {
			raw = strings.Join(parts[i:], "/")
		}
		value, err := url.PathUnescape(raw)
		if err != nil || value == "" {
			return nil, false
		}
		if params == nil {
			params = make(map[string]string)
		}
		params[name] = value
		if rest {
			return params, true
		}
	}
	return params, len(parts) == len(pattern)
}

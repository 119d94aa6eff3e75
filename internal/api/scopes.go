package api

import (
	"strings"

	"github.com/useshards/shard"
)

// allows refuses what the caller's scopes do not cover. shard serve has asked for the route's own scope already; handlers
// ask here for what a request needs beyond it, such as secret:* for a create with secrets. A caller on the socket, whose
// request has no such header, may do everything.
func (c *call) allows(scope string) error {
	headers, remote := c.r.Header[shard.ScopesHeader]
	if !remote {
		return nil
	}
	if len(headers) == 1 && shard.ScopesAllow(strings.Split(headers[0], ","), scope) {
		return nil
	}
	return shard.Errorf(shard.CodeForbidden, "the API key lacks the scope %s, which this request needs", scope)
}

// admits is the second look at what shard serve has judged: should the two ever disagree, the caller gets less.
func (c *call) admits(route *shard.Route) error {
	if _, remote := c.r.Header[shard.ScopesHeader]; remote && route.Local {
		return shard.Errorf(shard.CodeForbidden, "%s is there on the daemon's host only", route.Name())
	}
	return c.allows(route.Scope)
}

// scopesOfCreate refuses a create that uses what its caller has no right to.
func (c *call) scopesOfCreate(req *shard.CreateRequest) error {
	for _, part := range []struct {
		used  bool
		scope string
	}{{len(req.Secrets) > 0, "secret:*"}, {req.Policy != "", "policy:*"}, {len(req.Ports) > 0, "port:write"}} {
		if part.used {
			if err := c.allows(part.scope); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *API) scopes(c *call) error {
	return c.json(200, shard.ScopeList{Scopes: shard.Scopes})
}

package api

import (
	"github.com/useshards/shard"
)

func (a *API) listPolicies(c *call) error {
	policies, warnings := a.Engine.ListPolicies()
	items, next, err := page(c, policies, func(p shard.Policy) string { return p.Name })
	if err != nil {
		return err
	}
	return c.json(200, shard.PolicyList{Policies: items, Next: next, Warnings: warnings})
}

func (a *API) getPolicy(c *call) error {
	p, err := a.Engine.GetPolicy(c.param("name"))
	if err != nil {
		return err
	}
	return c.json(200, p)
}

func (a *API) putPolicy(c *call) error {
	var req shard.PutPolicyRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	if req.Rules == nil {
		return shard.Invalidf("rules is missing: send a list, empty for a policy that denies everything")
	}
	p, err := a.Engine.PutPolicy(c.r.Context(), c.param("name"), req.Rules)
	if err != nil {
		return err
	}
	return c.json(200, p)
}

func (a *API) removePolicy(c *call) error {
	if err := a.Engine.RemovePolicy(c.param("name")); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) attachPolicy(c *call) error {
	var req shard.AttachPolicyRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	if req.Policy == "" {
		return shard.Invalidf("policy is missing: name the policy to attach")
	}
	sb, err := a.Engine.AttachPolicy(c.r.Context(), c.param("id"), req.Policy)
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

func (a *API) detachPolicy(c *call) error {
	if err := c.empty(); err != nil {
		return err
	}
	sb, err := a.Engine.DetachPolicy(c.r.Context(), c.param("id"))
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

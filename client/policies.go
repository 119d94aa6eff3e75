package client

import (
	"context"
	"net/http"

	"github.com/useshards/shard"
)

// Policies lists every policy. The warnings name policies that the daemon could not read.
func (c *Client) Policies(ctx context.Context) (policies []shard.Policy, warnings []string, err error) {
	err = walk(func(p Page) (*string, error) {
		var page shard.PolicyList
		if err := c.do(ctx, call{method: http.MethodGet, path: "/v0/policies", query: p.query()}, &page); err != nil {
			return nil, err
		}
		policies = append(policies, page.Policies...)
		warnings = append(warnings, page.Warnings...)
		return page.Next, nil
	})
	return policies, warnings, err
}

// Policy reads one policy with its holders.
func (c *Client) Policy(ctx context.Context, name string) (*shard.PolicyView, error) {
	var out shard.PolicyView
	err := c.do(ctx, call{method: http.MethodGet, path: policyPath(name)}, &out)
	return &out, err
}

// PutPolicy makes a policy, or replaces all rules of one; the sandboxes that have it are kept to the new rules at once.
func (c *Client) PutPolicy(ctx context.Context, name string, rules []shard.PolicyRule) (*shard.PolicyView, error) {
	if rules == nil {
		rules = []shard.PolicyRule{} // null is no list
	}
	var out shard.PolicyView
	err := c.do(ctx, call{method: http.MethodPut, path: policyPath(name), body: shard.PutPolicyRequest{Rules: rules}}, &out)
	return &out, err
}

// RemovePolicy removes a policy that no sandbox has.
func (c *Client) RemovePolicy(ctx context.Context, name string) error {
	return c.do(ctx, call{method: http.MethodDelete, path: policyPath(name)}, nil)
}

// AttachPolicy gives a stopped sandbox a policy, in place of the one it had.
func (c *Client) AttachPolicy(ctx context.Context, ref, policy string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodPut, path: sandboxPath(ref, "policy"), body: shard.AttachPolicyRequest{Policy: policy}}, &out)
	return &out, err
}

// DetachPolicy takes a stopped sandbox's policy away.
func (c *Client) DetachPolicy(ctx context.Context, ref string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref, "policy")}, &out)
	return &out, err
}

func policyPath(name string) string { return "/v0/policies/" + segment(name) }

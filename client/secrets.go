package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

// Secrets lists every secret, without the values. The warnings name secrets that the daemon could not read.
func (c *Client) Secrets(ctx context.Context) (secrets []shard.Secret, warnings []string, err error) {
	err = walk(func(p Page) (*string, error) {
		var page shard.SecretList
		if err := c.do(ctx, call{method: http.MethodGet, path: "/v0/secrets", query: p.query()}, &page); err != nil {
			return nil, err
		}
		secrets = append(secrets, page.Secrets...)
		warnings = append(warnings, page.Warnings...)
		return page.Next, nil
	})
	return secrets, warnings, err
}

// PutSecret makes a secret or replaces its value; what the request leaves out stays as it is.
func (c *Client) PutSecret(ctx context.Context, name string, req shard.PutSecretRequest) (*shard.Secret, error) {
	var out shard.Secret
	err := c.do(ctx, call{method: http.MethodPut, path: secretPath(name), body: req}, &out)
	return &out, err
}

// RemoveSecret removes a secret. With force also one that sandboxes have: its placeholder then stands for nothing.
func (c *Client) RemoveSecret(ctx context.Context, name string, force bool) error {
	q := url.Values{}
	setTrue(q, "force", force)
	return c.do(ctx, call{method: http.MethodDelete, path: secretPath(name), query: q}, nil)
}

// GrantSecret gives a stopped sandbox a secret.
func (c *Client) GrantSecret(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "secrets", name)}, &out)
	return &out, err
}

// UngrantSecret takes a secret from a stopped sandbox.
func (c *Client) UngrantSecret(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref, "secrets", name)}, &out)
	return &out, err
}

func secretPath(name string) string { return "/v0/secrets/" + segment(name) }

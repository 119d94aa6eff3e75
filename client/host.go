package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

// Version asks the daemon for its version.
func (c *Client) Version(ctx context.Context) (*shard.VersionInfo, error) {
	var out shard.VersionInfo
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/version"}, &out)
	return &out, err
}

// Capabilities asks what a provider can do; "" is the default one.
func (c *Client) Capabilities(ctx context.Context, provider string) (*shard.Capabilities, error) {
	q := url.Values{}
	if provider != "" {
		q.Set("provider", provider)
	}
	var out shard.Capabilities
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/capabilities", query: q}, &out)
	return &out, err
}

// Providers lists every isolation provider the daemon knows, usable or not.
func (c *Client) Providers(ctx context.Context) ([]shard.ProviderInfo, error) {
	var out shard.ProviderList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/providers"}, &out)
	return out.Providers, err
}

// Scopes lists every scope that a token can carry.
func (c *Client) Scopes(ctx context.Context) ([]shard.Scope, error) {
	var out shard.ScopeList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/scopes"}, &out)
	return out.Scopes, err
}

// Daemon reads the daemon's own state (local socket only).
func (c *Client) Daemon(ctx context.Context) (*shard.DaemonStatus, error) {
	var out shard.DaemonStatus
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/daemon"}, &out)
	return &out, err
}

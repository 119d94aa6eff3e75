package client

import (
	"context"
	"net/http"
	"net/url"
	"time"

	"github.com/useshards/shard"
)

// Version is what the daemon says of itself.
type Version struct {
	Version    string `json:"version"`
	APIVersion string `json:"api_version"`
}

// DaemonStatus is the daemon's own state.
type DaemonStatus struct {
	Version      string             `json:"version"`
	PID          int                `json:"pid"`
	StartedAt    time.Time          `json:"started_at"`
	Socket       string             `json:"socket"`
	Provider     string             `json:"provider"`
	Capabilities DaemonCapabilities `json:"capabilities"`
	Proxy        ProxyPorts         `json:"proxy"`
	Tasks        []DaemonTask       `json:"tasks"`
}

// DaemonCapabilities are the capabilities of the default provider that not every provider has.
type DaemonCapabilities struct {
	Pause  bool `json:"pause"`
	Resume bool `json:"resume"`
	Fork   bool `json:"fork"`
	Port   bool `json:"port"`
	Swap   bool `json:"swap"`
}

// ProxyPorts are the gateway ports of the egress proxy; 0 is none.
type ProxyPorts struct {
	PlainPort int `json:"plain_port"`
	TLSPort   int `json:"tls_port"`
}

// TaskBackoff is the state of a task that failed and waits to be tried again.
const TaskBackoff = "backoff"

// DaemonTask is one long-running part of the daemon.
type DaemonTask struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Restarts  int    `json:"restarts"`
	LastError string `json:"last_error,omitempty"`
}

// Version asks the daemon for its version.
func (c *Client) Version(ctx context.Context) (*Version, error) {
	var out Version
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
	var out struct {
		Providers []shard.ProviderInfo `json:"providers"`
	}
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/providers"}, &out)
	return out.Providers, err
}

// Scopes lists every scope that a token can carry.
func (c *Client) Scopes(ctx context.Context) ([]shard.Scope, error) {
	var out struct {
		Scopes []shard.Scope `json:"scopes"`
	}
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/scopes"}, &out)
	return out.Scopes, err
}

// Daemon reads the daemon's own state (local socket only).
func (c *Client) Daemon(ctx context.Context) (*DaemonStatus, error) {
	var out DaemonStatus
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/daemon"}, &out)
	return &out, err
}

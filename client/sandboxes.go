package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

// Sandboxes lists one page of sandboxes; stopped ones only with all. With any warning the list is not complete.
func (c *Client) Sandboxes(ctx context.Context, all bool, p Page) (*shard.SandboxList, error) {
	q := p.query()
	setTrue(q, "all", all)
	var out shard.SandboxList
	err := c.do(ctx, call{method: http.MethodGet, path: "/v0/sandboxes", query: q}, &out)
	return &out, err
}

// AllSandboxes lists every page.
func (c *Client) AllSandboxes(ctx context.Context, all bool) (*shard.SandboxList, error) {
	var list shard.SandboxList
	err := walk(func(p Page) (*string, error) {
		page, err := c.Sandboxes(ctx, all, p)
		if err != nil {
			return nil, err
		}
		list.Sandboxes = append(list.Sandboxes, page.Sandboxes...)
		list.Warnings = append(list.Warnings, page.Warnings...)
		return page.Next, nil
	})
	return &list, err
}

// Create makes a sandbox and waits until it is running or has failed: look at State. progress, if not nil, is called
// with each step of the pull, in order, on the calling goroutine. Cancelling ctx ends only the wait: the daemon goes on.
func (c *Client) Create(ctx context.Context, req shard.CreateRequest, progress func(shard.Progress)) (*shard.Sandbox, error) {
	last, err := c.progress(ctx, call{method: http.MethodPost, path: "/v0/sandboxes", query: url.Values{"wait": {"true"}}, body: req}, progress)
	if err != nil {
		return nil, err
	}
	return last.Sandbox, nil
}

// Inspect reads one sandbox with its effective egress rules.
func (c *Client) Inspect(ctx context.Context, ref string) (*shard.Inspection, error) {
	var out shard.Inspection
	err := c.do(ctx, call{method: http.MethodGet, path: sandboxPath(ref)}, &out)
	return &out, err
}

// Start boots a stopped sandbox with the files it kept.
func (c *Client) Start(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return c.verb(ctx, ref, "start")
}

// Stop ends a sandbox and keeps its files. It waits until it is gone: up to 35 s.
func (c *Client) Stop(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return c.verb(ctx, ref, "stop")
}

// Pause saves memory and files of a running sandbox to the disk of its host and ends its machine: up to 10 minutes for a large
// memory. Cancelling ctx ends only the wait. Commands that run in it end; named processes go on when it is resumed.
func (c *Client) Pause(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return c.verb(ctx, ref, "pause")
}

// Resume lets a paused sandbox go on where it stood. Cancelling ctx ends only the wait.
func (c *Client) Resume(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return c.verb(ctx, ref, "resume")
}

func (c *Client) verb(ctx context.Context, ref, verb string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, verb)}, &out)
	return &out, err
}

// Remove deletes a sandbox and its files; force stops it first.
func (c *Client) Remove(ctx context.Context, ref string, force bool) error {
	q := url.Values{}
	setTrue(q, "force", force)
	return c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref), query: q}, nil)
}

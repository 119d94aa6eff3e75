package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

const ndjson = "application/x-ndjson"

// maxLine bounds one line of a progress stream, in bytes.
const maxLine = 4 << 20

// Sandboxes lists one page of sandboxes; stopped ones only with all. With any warning the list is not complete.
func (c *Client) Sandboxes(ctx context.Context, all bool, p Page) (*shard.SandboxList, error) {
	q := p.query()
	if all {
		q.Set("all", "true")
	}
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
	resp, err := c.send(ctx, call{method: http.MethodPost, path: "/v0/sandboxes", query: url.Values{"wait": {"true"}},
		accept: ndjson, body: req})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	var sb *shard.Sandbox
	err = c.readProgress(ctx, resp.Body, progress, func(l line) bool { sb = l.Sandbox; return sb != nil })
	return sb, err
}

// line is one line of a progress stream: exactly one of the fields.
type line struct {
	Event   *shard.Progress    `json:"event"`
	Sandbox *shard.Sandbox     `json:"sandbox"`
	Image   *shard.Image       `json:"image"`
	Error   *shard.ErrorDetail `json:"error"`
}

// readProgress reads lines until last takes one or the stream says how it failed. Lines it does not know are skipped.
func (c *Client) readProgress(ctx context.Context, r io.Reader, progress func(shard.Progress), last func(line) bool) error {
	lines := bufio.NewScanner(r)
	lines.Buffer(make([]byte, 0, 4<<10), maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var l line
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return fmt.Errorf("read the daemon's progress: %w", err)
		}
		switch {
		case l.Error != nil:
			return detailError(*l.Error)
		case last(l):
			_, _ = io.Copy(io.Discard, io.LimitReader(r, maxLine)) // to the end, so that the connection can be used again
			return nil
		case l.Event != nil && progress != nil:
			progress(*l.Event)
		}
	}
	if errors.Is(lines.Err(), bufio.ErrTooLong) {
		return fmt.Errorf("read the daemon's progress: %w", lines.Err())
	}
	if lines.Err() == nil {
		return transportError(ctx, io.ErrUnexpectedEOF)
	}
	return transportError(ctx, lines.Err())
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

func (c *Client) verb(ctx context.Context, ref, verb string) (*shard.Sandbox, error) {
	var out shard.Sandbox
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, verb)}, &out)
	return &out, err
}

// Remove deletes a sandbox and its files; force stops it first.
func (c *Client) Remove(ctx context.Context, ref string, force bool) error {
	q := url.Values{}
	if force {
		q.Set("force", "true")
	}
	return c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref), query: q}, nil)
}

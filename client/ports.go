package client

import (
	"context"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/useshards/shard"
)

// Ports lists one page of the forwards of a sandbox, or of all sandboxes when ref is empty.
func (c *Client) Ports(ctx context.Context, ref string, p Page) (*shard.PortList, error) {
	path := "/v0/ports"
	if ref != "" {
		path = sandboxPath(ref, "ports")
	}
	var out shard.PortList
	err := c.do(ctx, call{method: http.MethodGet, path: path, query: p.query()}, &out)
	return &out, err
}

// AllPorts lists every page.
func (c *Client) AllPorts(ctx context.Context, ref string) ([]shard.Port, error) {
	ports := []shard.Port{}
	err := walk(func(p Page) (*string, error) {
		page, err := c.Ports(ctx, ref, p)
		if err != nil {
			return nil, err
		}
		ports = append(ports, page.Ports...)
		return page.Next, nil
	})
	return ports, err
}

// PutPort forwards a host port to a port of the sandbox's 127.0.0.1, or changes the forward that the host port has.
func (c *Client) PutPort(ctx context.Context, ref string, f shard.PortForward) (*shard.Port, error) {
	var out shard.Port
	body := shard.PortRequest{GuestPort: f.GuestPort, Public: f.Public}
	err := c.do(ctx, call{method: http.MethodPut, path: sandboxPath(ref, "ports", strconv.Itoa(f.HostPort)), body: body}, &out)
	return &out, err
}

// RemovePort ends a forward and the connections it carries.
func (c *Client) RemovePort(ctx context.Context, ref string, hostPort int) error {
	return c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref, "ports", strconv.Itoa(hostPort))}, nil)
}

// LinkPort has shard serve sign a link to a port of a sandbox, good for so long (whole seconds).
func (c *Client) LinkPort(ctx context.Context, ref string, guestPort int, d time.Duration) (*shard.PortLink, error) {
	var out shard.PortLink
	query := url.Values{"expires": {strconv.FormatInt(int64((d+time.Second-1)/time.Second), 10)}}
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "links", strconv.Itoa(guestPort)), query: query}, &out)
	return &out, err
}

package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"github.com/useshards/shard"
)

// EgressLog returns the newest decisions about what a sandbox began on the network, oldest first, and how many older ones
// were left out.
func (c *Client) EgressLog(ctx context.Context, ref string) (decisions []shard.EgressDecision, cut int, err error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "egress-log")})
	if err != nil {
		return nil, 0, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(io.LimitReader(&body{ctx, resp.Body}, maxAnswer)).Decode(&decisions); err != nil {
		return nil, 0, fmt.Errorf("read the daemon's egress log: %w", err)
	}
	cut, _ = strconv.Atoi(resp.Header.Get(shard.EgressCutHeader))
	return decisions, cut, nil
}

// EgressFollow reads the decisions about a sandbox, those that are kept first.
type EgressFollow struct{ lines[shard.EgressDecision] }

// FollowEgressLog reads a sandbox's decisions until it stops or is removed. ctx bounds the whole of it; the caller closes it.
func (c *Client) FollowEgressLog(ctx context.Context, ref string) (*EgressFollow, error) {
	l, err := follow[shard.EgressDecision](ctx, c,
		call{method: http.MethodGet, path: sandboxPath(ref, "egress-log"), query: url.Values{"follow": {"true"}}}, "egress log")
	if err != nil {
		return nil, err
	}
	return &EgressFollow{l}, nil
}

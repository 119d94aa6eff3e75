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
	"strconv"

	"github.com/useshards/shard"
)

// maxDecision bounds one line of a followed egress log, in bytes.
const maxDecision = 64 << 10

// EgressLog returns the newest decisions about what a sandbox began on the network, oldest first, and how many older ones
// were left out.
func (c *Client) EgressLog(ctx context.Context, ref string) (decisions []shard.EgressDecision, cut int, err error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "egress-log")})
	if err != nil {
		return nil, 0, err
	}
	defer func() { _ = resp.Body.Close() }()
	if err := json.NewDecoder(&body{ctx, resp.Body}).Decode(&decisions); err != nil {
		return nil, 0, fmt.Errorf("read the daemon's egress log: %w", err)
	}
	cut, _ = strconv.Atoi(resp.Header.Get("Shard-Egress-Cut"))
	return decisions, cut, nil
}

// EgressFollow reads the decisions about a sandbox, those that are kept first.
type EgressFollow struct {
	ctx   context.Context
	body  io.ReadCloser
	lines *bufio.Scanner
}

// FollowEgressLog reads a sandbox's decisions until it stops or is removed. ctx bounds the whole of it; the caller closes it.
func (c *Client) FollowEgressLog(ctx context.Context, ref string) (*EgressFollow, error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "egress-log"), query: url.Values{"follow": {"true"}}, accept: ndjson})
	if err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 4<<10), maxDecision)
	return &EgressFollow{ctx, resp.Body, lines}, nil
}

// Next waits for the next decision. io.EOF is the end: the sandbox has stopped or is no longer there. A *shard.Error says why
// the log cannot be read on.
func (f *EgressFollow) Next() (*shard.EgressDecision, error) {
	if !f.lines.Scan() {
		switch err := f.lines.Err(); {
		case err == nil:
			return nil, io.EOF
		case errors.Is(err, bufio.ErrTooLong):
			return nil, fmt.Errorf("read the daemon's egress log: %w", err)
		default:
			return nil, transportError(f.ctx, err)
		}
	}
	var line struct {
		shard.EgressDecision
		Error *shard.ErrorDetail `json:"error"`
	}
	if err := json.Unmarshal(f.lines.Bytes(), &line); err != nil {
		return nil, fmt.Errorf("read the daemon's egress log: %w", err)
	}
	if line.Error != nil {
		return nil, detailError(*line.Error)
	}
	return &line.EgressDecision, nil
}

// Close ends the reading.
func (f *EgressFollow) Close() error { return f.body.Close() }

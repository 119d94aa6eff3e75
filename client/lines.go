package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/useshards/shard"
)

// maxEvent bounds one line of an answer that goes on, in bytes: two paths of 4096, escaped, are the longest.
const maxEvent = 128 << 10

// lines reads an answer of JSON lines that goes on until what it tells of ends.
type lines[T any] struct {
	ctx  context.Context
	body io.ReadCloser
	scan *bufio.Scanner
	what string // for errors
}

// follow asks for lines. ctx bounds the whole of the reading, and the answer must be closed.
func follow[T any](ctx context.Context, c *Client, k call, what string) (lines[T], error) {
	k.accept = ndjson
	resp, err := c.send(ctx, k)
	if err != nil {
		return lines[T]{}, err
	}
	scan := bufio.NewScanner(resp.Body)
	scan.Buffer(make([]byte, 0, 4<<10), maxEvent)
	return lines[T]{ctx, resp.Body, scan, what}, nil
}

// Next waits for the next one. io.EOF is the end: the sandbox has stopped, or what was followed is no longer there. A
// *shard.Error says why it cannot go on.
func (l *lines[T]) Next() (*T, error) {
	if !l.scan.Scan() {
		switch err := l.scan.Err(); {
		case err == nil:
			return nil, io.EOF
		case errors.Is(err, bufio.ErrTooLong):
			return nil, fmt.Errorf("read the daemon's %s: %w", l.what, err)
		default:
			return nil, transportError(l.ctx, err)
		}
	}
	var failed struct {
		Error *shard.ErrorDetail `json:"error"`
	}
	var next T
	if err := errors.Join(json.Unmarshal(l.scan.Bytes(), &failed), json.Unmarshal(l.scan.Bytes(), &next)); err != nil {
		return nil, fmt.Errorf("read the daemon's %s: %w", l.what, err)
	}
	if failed.Error != nil {
		return nil, detailError(*failed.Error)
	}
	return &next, nil
}

// Close ends the reading.
func (l *lines[T]) Close() error { return l.body.Close() }

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

const ndjson = "application/x-ndjson"

// maxLine bounds one line, in bytes: a sandbox's record is the longest.
const maxLine = 4 << 20

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
	scan.Buffer(make([]byte, 0, 4<<10), maxLine)
	return lines[T]{ctx, resp.Body, scan, what}, nil
}

// Next waits for the next one; an empty line is none. io.EOF is the end: the sandbox has stopped, or what was followed is no longer there. A
// *shard.Error says why it cannot go on.
func (l *lines[T]) Next() (*T, error) {
	more := l.scan.Scan()
	for more && len(l.scan.Bytes()) == 0 {
		more = l.scan.Scan()
	}
	if !more {
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

// step is one line of an answer that reports progress: an event, or what came of it.
type step struct {
	Event   *shard.Progress `json:"event"`
	Sandbox *shard.Sandbox  `json:"sandbox"`
	Image   *shard.Image    `json:"image"`
}

// progress reports events until it comes to the sandbox or the image. Lines that hold neither are skipped.
func (c *Client) progress(ctx context.Context, k call, report func(shard.Progress)) (*step, error) {
	steps, err := follow[step](ctx, c, k, "progress")
	if err != nil {
		return nil, err
	}
	defer steps.Close()
	for {
		s, err := steps.Next()
		switch {
		case errors.Is(err, io.EOF):
			return nil, transportError(ctx, io.ErrUnexpectedEOF)
		case err != nil:
			return nil, err
		case s.Sandbox != nil || s.Image != nil:
			_, _ = io.Copy(io.Discard, io.LimitReader(steps.body, maxLine)) // to the end, so that the connection can be used again
			return s, nil
		case s.Event != nil && report != nil:
			report(*s.Event)
		}
	}
}

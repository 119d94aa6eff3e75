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

// maxEvent bounds one line of a watch, in bytes: two paths of 4096, escaped.
const maxEvent = 128 << 10

// FileWatch reads the changes below a directory of a sandbox.
type FileWatch struct {
	ctx   context.Context
	body  io.ReadCloser
	lines *bufio.Scanner
}

// Watch begins to watch the directory path, with recursive all below it too. When it returns, nothing is missed any
// more. ctx bounds the whole watch, which must be closed.
func (c *Client) Watch(ctx context.Context, ref, path string, recursive bool) (*FileWatch, error) {
	q := url.Values{"path": {path}}
	if recursive {
		q.Set("recursive", "true")
	}
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "watch"), query: q, accept: ndjson})
	if err != nil {
		return nil, err
	}
	lines := bufio.NewScanner(resp.Body)
	lines.Buffer(make([]byte, 0, 4<<10), maxEvent)
	return &FileWatch{ctx, resp.Body, lines}, nil
}

// Next waits for the next event. io.EOF is the end: the directory, which the last event has told, or the sandbox is no
// longer there. A *shard.Error says why the watch cannot go on.
func (w *FileWatch) Next() (*shard.FileEvent, error) {
	if !w.lines.Scan() {
		switch err := w.lines.Err(); {
		case err == nil:
			return nil, io.EOF
		case errors.Is(err, bufio.ErrTooLong):
			return nil, fmt.Errorf("read the daemon's file events: %w", err)
		default:
			return nil, transportError(w.ctx, err)
		}
	}
	var line struct {
		shard.FileEvent
		Error *shard.ErrorDetail `json:"error"`
	}
	if err := json.Unmarshal(w.lines.Bytes(), &line); err != nil {
		return nil, fmt.Errorf("read the daemon's file events: %w", err)
	}
	if line.Error != nil {
		return nil, detailError(*line.Error)
	}
	return &line.FileEvent, nil
}

// Close ends the watch.
func (w *FileWatch) Close() error { return w.body.Close() }

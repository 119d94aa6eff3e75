package client

import (
	"context"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

// FileWatch reads the changes below a directory of a sandbox. The last event tells the end of the directory, if that was
// what ended it.
type FileWatch struct{ lines[shard.FileEvent] }

// Watch begins to watch the directory path, with recursive all below it too. When it returns, nothing is missed any
// more. ctx bounds the whole watch, which must be closed.
func (c *Client) Watch(ctx context.Context, ref, path string, recursive bool) (*FileWatch, error) {
	q := url.Values{"path": {path}}
	setTrue(q, "recursive", recursive)
	l, err := follow[shard.FileEvent](ctx, c, call{method: http.MethodGet, path: sandboxPath(ref, "watch"), query: q}, "file events")
	if err != nil {
		return nil, err
	}
	return &FileWatch{l}, nil
}

package api

import (
	"context"

	"github.com/useshards/shard"
)

// watch reports what changes below a directory, as JSON lines or WebSocket text messages. The answer begins when nothing
// is missed any more. It ends with the directory or the sandbox: a WebSocket then says why in its close.
func (a *API) watch(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	recursive, err := c.flag("recursive")
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(c.r.Context())
	defer cancel()
	w, err := a.Engine.Watch(ctx, c.param("id"), path, recursive)
	if err != nil {
		return err
	}
	defer w.Close()
	next := func(context.Context) ([]shard.FileEvent, error) { return w.Next() } // which ends with ctx
	return serveFeed(ctx, cancel, a, c, feed[shard.FileEvent]{next, w.Reason, "a watch of files"})
}

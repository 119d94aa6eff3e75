package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strconv"

	"github.com/useshards/shard"
)

// egressLog answers what was decided about a sandbox's traffic: as a list, or followed, as JSON lines or WebSocket text
// messages. A WebSocket's close says why the end came.
func (a *API) egressLog(c *call) error {
	follow, err := c.follows()
	if err != nil {
		return err
	}
	if !follow {
		decisions, cut, err := a.Engine.EgressLog(c.param("id"))
		if err != nil {
			return err
		}
		if cut > 0 {
			c.w.Header().Set(shard.EgressCutHeader, strconv.Itoa(cut))
		}
		return c.json(http.StatusOK, decisions)
	}
	f, cut, err := a.Engine.FollowEgressLog(c.param("id"))
	if err != nil {
		return err
	}
	defer f.Close()
	if cut > 0 {
		c.w.Header().Set(shard.EgressCutHeader, strconv.Itoa(cut))
	}
	ctx, cancel := context.WithCancel(c.r.Context())
	defer cancel()
	return serveFeed(ctx, cancel, a, c, feed[json.RawMessage]{f.Next, f.Reason, "the following of an egress log"})
}

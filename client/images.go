package client

import (
	"context"
	"io"
	"net/http"
	"net/url"
	"strings"

	"github.com/useshards/shard"
)

// Images lists the images on the host, every page (local socket only, like all image routes).
func (c *Client) Images(ctx context.Context) ([]shard.Image, error) {
	var list []shard.Image
	err := walk(func(p Page) (*string, error) {
		var page shard.ImageList
		if err := c.do(ctx, call{method: http.MethodGet, path: "/v0/images", query: p.query()}, &page); err != nil {
			return nil, err
		}
		list = append(list, page.Images...)
		return page.Next, nil
	})
	return list, err
}

// Pull brings an image to the host; progress as with Create.
func (c *Client) Pull(ctx context.Context, ref string, progress func(shard.Progress)) (*shard.Image, error) {
	return c.imageStream(ctx, call{method: http.MethodPost, path: "/v0/images/pull",
		body: shard.PullRequest{Ref: ref}}, progress)
}

// ImageImport describes an image that is made from a tar: the reference it gets, and settings that override its own.
type ImageImport struct {
	Ref     string
	Env     []string
	Workdir string
	User    string
}

// Import makes an image from a tar: an OCI layout, a docker save, or a plain root file system.
func (c *Client) Import(ctx context.Context, spec ImageImport, tar io.Reader, progress func(shard.Progress)) (*shard.Image, error) {
	q := url.Values{"ref": {spec.Ref}}
	if len(spec.Env) > 0 {
		q["env"] = spec.Env
	}
	if spec.Workdir != "" {
		q.Set("workdir", spec.Workdir)
	}
	if spec.User != "" {
		q.Set("user", spec.User)
	}
	return c.imageStream(ctx, call{method: http.MethodPost, path: "/v0/images/import", query: q,
		body: tar, contentType: "application/x-tar", size: -1}, progress)
}

func (c *Client) imageStream(ctx context.Context, k call, progress func(shard.Progress)) (*shard.Image, error) {
	last, err := c.progress(ctx, k, progress)
	if err != nil {
		return nil, err
	}
	return last.Image, nil
}

// RemoveImage deletes an image; force also when sandboxes were made from it. The warnings say what could not be freed.
func (c *Client) RemoveImage(ctx context.Context, ref string, force bool) (warnings []string, err error) {
	// The route takes the reference with its slashes, so each part is escaped on its own.
	parts := strings.Split(ref, "/")
	for i, p := range parts {
		parts[i] = segment(p)
	}
	q := url.Values{}
	setTrue(q, "force", force)
	var out shard.RemovedImage
	err = c.do(ctx, call{method: http.MethodDelete, path: "/v0/images/" + strings.Join(parts, "/"), query: q}, &out)
	return out.Warnings, err
}

// PruneImages deletes every image that nothing uses.
func (c *Client) PruneImages(ctx context.Context) (*shard.PrunedImages, error) {
	var out shard.PrunedImages
	err := c.do(ctx, call{method: http.MethodPost, path: "/v0/images/prune"}, &out)
	return &out, err
}

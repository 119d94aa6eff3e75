package api

import (
	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/image"
)

func (a *API) listImages(c *call) error {
	images, warnings, err := a.Images.List()
	if err != nil {
		return err
	}
	items, next, err := page(c, images, func(i shard.Image) string { return i.Reference })
	if err != nil {
		return err
	}
	return c.json(200, shard.ImageList{Images: items, Next: next, Warnings: warnings})
}

// public is an image as the API shows it.
func public(img *image.Image) shard.Image {
	return shard.Image{Reference: img.Reference, Digest: img.Digest, Size: img.Size, Created: img.Created}
}

func (a *API) pullImage(c *call) error {
	var req shard.PullRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	if req.Ref == "" {
		return shard.Invalidf("ref is missing: name the image to pull")
	}
	lines := c.lines(200)
	img, err := a.Images.Pull(c.r.Context(), req.Ref, func(p shard.Progress) { lines.write(map[string]any{"event": p}) })
	if err != nil {
		return lines.end("image", nil, err)
	}
	return lines.end("image", public(img), nil)
}

func (a *API) importImage(c *call) error {
	if err := shard.CheckEnv(c.query["env"]); err != nil {
		return err
	}
	lines := c.lines(200)
	img, err := a.Images.Import(c.r.Context(), c.reader(), c.text("ref"), image.ImportOptions{Env: c.query["env"],
		Workdir: c.text("workdir"), User: c.text("user")}, func(p shard.Progress) { lines.write(map[string]any{"event": p}) })
	if err != nil {
		return lines.end("image", nil, err)
	}
	return lines.end("image", public(img), nil)
}

func (a *API) removeImage(c *call) error {
	force, err := c.flag("force")
	if err != nil {
		return err
	}
	warnings, err := a.Images.Remove(c.param("ref"), force, a.Engine.ImageHolders)
	if err != nil {
		return err
	}
	if warnings == nil {
		warnings = []string{}
	}
	return c.json(200, shard.RemovedImage{Warnings: warnings})
}

func (a *API) pruneImages(c *call) error {
	if err := c.empty(); err != nil {
		return err
	}
	removed, err := a.Images.Prune(func(digest string) bool { return len(a.Engine.ImageHolders(digest)) > 0 })
	if err != nil {
		return err
	}
	if removed == nil {
		removed = []string{}
	}
	return c.json(200, shard.PrunedImages{Removed: removed, Warnings: []string{}})
}

package api

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"

	"github.com/useshards/shard"
)

func (a *API) version(c *call) error {
	return c.json(200, shard.VersionInfo{Version: a.Version, APIVersion: "v0"})
}

func (a *API) capabilities(c *call) error {
	caps, err := a.Engine.Capabilities(c.text("provider"))
	if err != nil {
		return err
	}
	return c.json(200, caps)
}

func (a *API) providers(c *call) error {
	return c.json(200, shard.ProviderList{Providers: a.Engine.ListProviders(c.r.Context())})
}

func (a *API) daemon(c *call) error {
	status := a.Status()
	status.Preview = a.previews.get()
	return c.json(200, status)
}

func (a *API) list(c *call) error {
	all, err := c.flag("all")
	if err != nil {
		return err
	}
	sandboxes, warnings := a.Engine.List(all)
	items, next, err := page(c, sandboxes, func(s shard.Sandbox) string { return s.ID })
	if err != nil {
		return err
	}
	return c.json(200, shard.SandboxList{Sandboxes: items, Next: next, Warnings: warnings})
}

func (a *API) create(c *call) error {
	wait, err := c.flag("wait")
	if err != nil {
		return err
	}
	var req shard.CreateRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	if err := c.scopesOfCreate(&req); err != nil {
		return err
	}
	if !wait || !accepts(c.r, "application/x-ndjson") {
		sb, err := a.Engine.Create(c.r.Context(), req, wait, nil)
		if err != nil {
			return err
		}
		return c.json(201, sb)
	}
	lines := c.lines(201)
	sb, err := a.Engine.Create(c.r.Context(), req, true, func(p shard.Progress) { lines.write(map[string]any{"event": p}) })
	return lines.end("sandbox", sb, err)
}

// accepts says whether the request asks for the media type.
func accepts(r *http.Request, media string) bool {
	for _, part := range strings.Split(r.Header.Get("Accept"), ",") {
		if name, _, _ := strings.Cut(part, ";"); strings.EqualFold(strings.TrimSpace(name), media) {
			return true
		}
	}
	return false
}

// lines is an answer of JSON lines. The status goes out with the first line.
type lines struct {
	c      *call
	status int
}

func (c *call) lines(status int) *lines { return &lines{c: c, status: status} }

func (l *lines) write(v any) {
	data, err := json.Marshal(v)
	if err != nil {
		return // our own types always encode
	}
	if !l.c.sent {
		l.c.w.Header().Set("Content-Type", "application/x-ndjson")
		l.c.sent = true
		l.c.w.WriteHeader(l.status)
	}
	rc := http.NewResponseController(l.c.w)
	_, _ = l.c.w.Write(append(data, '\n'))
	_ = rc.Flush()
}

// end writes the closing line. An error before the first line is left to the ordinary error answer.
func (l *lines) end(key string, v any, err error) error {
	if err == nil {
		l.write(map[string]any{key: v})
		return nil
	}
	if !l.c.sent {
		return err
	}
	l.write(shard.ErrorBody{Error: publicError(err)})
	return nil
}

func (a *API) inspect(c *call) error {
	wait, err := c.flag("wait")
	if err != nil {
		return err
	}
	sb, err := a.Engine.Inspect(c.r.Context(), c.param("id"), wait)
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

func (a *API) remove(c *call) error {
	force, err := c.flag("force")
	if err != nil {
		return err
	}
	if err := a.Engine.Remove(c.r.Context(), c.param("id"), force); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) start(c *call) error  { return c.verb(a.Engine.Start) }
func (a *API) stop(c *call) error   { return c.verb(a.Engine.Stop) }
func (a *API) pause(c *call) error  { return c.verb(a.Engine.Pause) }
func (a *API) resume(c *call) error { return c.verb(a.Engine.Resume) }

// verb does one thing to the sandbox, without more to say about it.
func (c *call) verb(do func(context.Context, string) (*shard.Sandbox, error)) error {
	if err := c.empty(); err != nil {
		return err
	}
	sb, err := do(c.r.Context(), c.param("id"))
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

// fork is what no provider of this version can.
func (a *API) fork(c *call) error {
	sb, err := a.Engine.Inspect(c.r.Context(), c.param("id"), false)
	if err != nil {
		return err
	}
	return shard.Errorf(shard.CodeUnsupported, "provider %s cannot fork a sandbox", sb.Provider)
}

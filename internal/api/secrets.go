package api

import "github.com/useshards/shard"

func (a *API) listSecrets(c *call) error {
	secrets, warnings := a.Engine.ListSecrets()
	items, next, err := page(c, secrets, func(s shard.Secret) string { return s.Name })
	if err != nil {
		return err
	}
	return c.json(200, shard.SecretList{Secrets: items, Next: next, Warnings: warnings})
}

func (a *API) putSecret(c *call) error {
	var req shard.PutSecretRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	s, err := a.Engine.PutSecret(c.param("name"), req)
	if err != nil {
		return err
	}
	return c.json(200, s)
}

func (a *API) removeSecret(c *call) error {
	force, err := c.flag("force")
	if err != nil {
		return err
	}
	if err := a.Engine.RemoveSecret(c.param("name"), force); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) grantSecret(c *call) error {
	if err := c.empty(); err != nil {
		return err
	}
	sb, err := a.Engine.GrantSecret(c.r.Context(), c.param("id"), c.param("name"))
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

func (a *API) ungrantSecret(c *call) error {
	if err := c.empty(); err != nil {
		return err
	}
	sb, err := a.Engine.UngrantSecret(c.r.Context(), c.param("id"), c.param("name"))
	if err != nil {
		return err
	}
	return c.json(200, sb)
}

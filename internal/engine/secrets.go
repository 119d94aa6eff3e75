package engine

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/provider"
	"github.com/useshards/shard/internal/rootfs"
	"github.com/useshards/shard/internal/secret"
)

// maxTrustFile bounds the trust file of a sandbox, in bytes: those of distributions have 0.2 MiB.
const maxTrustFile = 8 << 20

// maxSecrets bounds the secrets of one sandbox: the proxy looks for each of their placeholders in each header.
const maxSecrets = 64

// ListSecrets returns the secrets in the order of their names, and a warning for each that cannot be read.
func (e *Engine) ListSecrets() ([]shard.Secret, []string) { return e.Secrets.List() }

// PutSecret makes a secret or replaces its value. Requests of the sandboxes that have it get the new value from now on.
func (e *Engine) PutSecret(name string, req shard.PutSecretRequest) (*shard.Secret, error) {
	e.granting.Lock()
	defer e.granting.Unlock()
	for _, s := range e.secretHolders(name) {
		if err := e.canPunish(&s, name, req.OnMisuse); err != nil {
			return nil, err
		}
	}
	return e.Secrets.Set(name, req, e.holdersOf(name))
}

// RemoveSecret removes a secret that no sandbox has, or with force any: its placeholder then stands for nothing.
func (e *Engine) RemoveSecret(name string, force bool) error {
	e.granting.Lock()
	defer e.granting.Unlock()
	return e.Secrets.Remove(name, force, e.holdersOf(name))
}

func (e *Engine) secretHolders(name string) []shard.Sandbox {
	all, _ := e.List(true)
	return slices.DeleteFunc(all, func(s shard.Sandbox) bool { return !slices.Contains(s.Secrets, name) })
}

func (e *Engine) holdersOf(name string) secret.Holders {
	var h secret.Holders
	for _, s := range e.secretHolders(name) {
		h.Names = append(h.Names, s.Ref())
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if len(e.damaged) > 0 {
		h.Uncertain = "the records of some sandboxes cannot be read, and they may have it: mend them, or remove these sandboxes with force"
	}
	return h
}

// canPunish refuses a secret whose misuse must do to a sandbox what its provider cannot.
func (e *Engine) canPunish(s *shard.Sandbox, name, onMisuse string) error {
	if onMisuse != secret.OnMisusePause {
		return nil
	}
	p, err := e.providerNamed(s.Provider)
	if err != nil {
		return err
	}
	if _, can := p.(provider.Pauser); !can {
		which := "the sandbox"
		if s.ID != "" {
			which = fmt.Sprintf("sandbox %q", s.Ref())
		}
		return shard.Errorf(shard.CodeUnsupported, "a misuse of secret %s is to pause %s, which provider %s cannot: "+
			"set --on-misuse stop, or none", name, which, p.Name())
	}
	return nil
}

// grantable checks that a sandbox with this environment can have a secret, and returns its placeholder. given are the
// variables that somebody set, to which what the image sets is added in all.
func (e *Engine) grantable(s *shard.Sandbox, name string, given, all []string) (placeholder string, err error) {
	sec, err := e.Secrets.Get(name)
	if err != nil {
		return "", err
	}
	if slices.Contains(secret.TrustVariables, name) {
		return "", shard.Invalidf("secret %s has the name of a variable by which programs find the certificates that they trust: a sandbox cannot have it", name)
	}
	if hasVariable(all, name) {
		return "", shard.Invalidf("the environment of the sandbox has %s already: a secret of that name would replace it", name)
	}
	for _, v := range secret.TrustVariables {
		if hasVariable(given, v) {
			return "", shard.Invalidf("env sets %s, which a sandbox with a secret needs for the proxy's certificate: leave it out", v)
		}
	}
	return sec.Placeholder, e.canPunish(s, name, sec.OnMisuse)
}

func hasVariable(env []string, name string) bool {
	return slices.ContainsFunc(env, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// planSecrets works out the grants of a create, as far as that needs no image. The caller holds granting.
func (e *Engine) planSecrets(rec *record, names []string) error {
	rec.Sandbox.Secrets, rec.Placeholders = nil, nil
	for _, name := range names {
		if rec.Placeholders[name] != "" {
			continue
		}
		if len(rec.Sandbox.Secrets) == maxSecrets {
			return shard.Invalidf("a sandbox can have at most %d secrets", maxSecrets)
		}
		placeholder, err := e.grantable(&rec.Sandbox, name, rec.Env, rec.Env)
		if shard.CodeOf(err) == shard.CodeNotFound { // it is the request that names what is not there
			err = shard.Invalidf("there is no secret %s: shard secret list shows those that there are", shard.Quote(name))
		}
		if err != nil {
			return err
		}
		rec.grant(name, placeholder)
	}
	return nil
}

// grant adds a secret to a record that is not stored yet.
func (r *record) grant(name, placeholder string) {
	r.Sandbox.Secrets = append(slices.Clone(r.Sandbox.Secrets), name)
	r.Placeholders = maps.Clone(r.Placeholders)
	if r.Placeholders == nil {
		r.Placeholders = make(map[string]string)
	}
	r.Placeholders[name] = placeholder
}

// environment is what every command starts with: the settings, the placeholders, and where the trusted certificates are.
func (r *record) environment() []string {
	if len(r.Sandbox.Secrets) == 0 && r.TrustFile == "" {
		return r.Env
	}
	var more []string
	for _, name := range r.Sandbox.Secrets {
		more = append(more, name+"="+r.Placeholders[name])
	}
	if r.TrustFile != "" {
		for _, name := range secret.TrustVariables {
			more = append(more, name+"="+r.TrustFile)
		}
	}
	return shard.MergeEnv(r.Env, more...)
}

// GrantSecret gives a stopped sandbox a secret.
func (e *Engine) GrantSecret(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	sb, unlock, err := e.lockGrants(ctx, ref, name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	rec := sb.record()
	if slices.Contains(rec.Sandbox.Secrets, name) {
		s := rec.Sandbox
		return &s, nil
	}
	if len(rec.Sandbox.Secrets) >= maxSecrets {
		return nil, shard.Invalidf("sandbox %q has %d secrets, which is the most", sb.ref(), maxSecrets)
	}
	img, release, err := e.Images.Acquire(rec.Sandbox.Digest)
	if err != nil {
		return nil, shard.Wrap(shard.CodeNotFound, err, "the image of sandbox %q is no longer on this host: pull %s", sb.ref(), rec.Sandbox.Image)
	}
	defer release()
	given := slices.DeleteFunc(slices.Clone(rec.Env), func(kv string) bool { return slices.Contains(img.Config.Env, kv) })
	placeholder, err := e.grantable(&rec.Sandbox, name, given, rec.Env)
	if err != nil {
		return nil, err
	}
	next := *rec
	next.grant(name, placeholder)
	if err := e.plantStopped(context.WithoutCancel(ctx), sb, &next, img); err != nil {
		return nil, err
	}
	if err := sb.update(func(r *record) {
		r.Sandbox.Secrets, r.Placeholders, r.TrustFile = next.Sandbox.Secrets, next.Placeholders, next.TrustFile
	}); err != nil {
		return nil, err
	}
	s := sb.record().Sandbox
	return &s, nil
}

// UngrantSecret takes a secret from a stopped sandbox. The proxy's certificate stays in it.
func (e *Engine) UngrantSecret(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
	sb, unlock, err := e.lockGrants(ctx, ref, name)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if slices.Contains(sb.record().Sandbox.Secrets, name) {
		if err := sb.update(func(r *record) {
			r.Sandbox.Secrets = slices.DeleteFunc(slices.Clone(r.Sandbox.Secrets), func(n string) bool { return n == name })
			r.Placeholders = maps.Clone(r.Placeholders)
			delete(r.Placeholders, name)
		}); err != nil {
			return nil, err
		}
	}
	s := sb.record().Sandbox
	return &s, nil
}

// lockGrants takes what a change of a sandbox's secrets needs: the sandbox, and that no secret changes meanwhile.
func (e *Engine) lockGrants(ctx context.Context, ref, name string) (*sandbox, func(), error) {
	if err := shard.CheckSecretName(name); err != nil {
		return nil, nil, err
	}
	sb, err := e.find(ref)
	if err != nil {
		return nil, nil, err
	}
	unlock, err := sb.lock(ctx, shard.VerbGrant)
	if err != nil {
		if shard.CodeOf(err) == shard.CodeSandboxLive {
			err = shard.Errorf(shard.CodeSandboxLive, "the secrets of sandbox %q cannot change while it is %s: stop it first%s",
				sb.ref(), sb.record().Sandbox.State, sb.priceOfStop())
		}
		return nil, nil, err
	}
	e.granting.RLock()
	return sb, func() { e.granting.RUnlock(); unlock() }, nil
}

// plantStopped makes a sandbox that has no machine trust the proxy.
func (e *Engine) plantStopped(ctx context.Context, sb *sandbox, rec *record, img *image.Image) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	defer func() {
		if e := e.Roots.Unmount(context.WithoutCancel(ctx), sb.dir); e != nil {
			err = errors.Join(err, e)
		}
	}()
	root, err := e.Roots.Mount(ctx, sb.dir, e.Images.LayersDir(), layerNames(img))
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "the files of sandbox %q could not be reached", sb.ref())
	}
	return e.plant(rec, root)
}

func layerNames(img *image.Image) []string {
	layers := make([]string, len(img.Layers))
	for i, dir := range img.Layers {
		layers[i] = filepath.Base(dir)
	}
	return layers
}

// plant adds the proxy's certificate to the files of a sandbox that has secrets, before anything runs in it. They may be of
// the guest's making.
func (e *Engine) plant(rec *record, root string) error {
	if len(rec.Sandbox.Secrets) == 0 {
		return nil
	}
	var content []byte
	path, add, err := e.Enforcer.Trust(func(path string) ([]byte, error) {
		data, err := rootfs.ReadFile(root, path, maxTrustFile)
		if err == nil {
			content = data
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			err = shard.Wrap(shard.CodeInvalidRequest, err, "%s in the sandbox, to which the proxy's certificate must be added, is no file of at most %d MiB", path, maxTrustFile>>20)
		}
		return data, err
	})
	if err != nil {
		return err
	}
	if len(add) > 0 {
		if err := rootfs.ReplaceFile(root, path, append(content, add...)); err != nil {
			return notPlanted(err, path)
		}
	}
	dirs, name, anchor := e.Enforcer.Anchors()
	for _, dir := range dirs {
		if old, err := rootfs.ReadFile(root, filepath.Join(dir, name), int64(len(anchor))); err == nil && bytes.Equal(old, anchor) {
			continue
		}
		// What the guest made of the directory is its own loss.
		err := rootfs.AddFile(root, dir, name, anchor)
		if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, rootfs.ErrNotPlain) {
			return notPlanted(err, dir)
		}
	}
	rec.TrustFile = path
	return nil
}

func notPlanted(err error, where string) error {
	switch {
	case errors.Is(err, unix.ENOSPC):
		return shard.Wrap(shard.CodeInvalidRequest, err, "the proxy's certificate could not be added to %s in the sandbox: its disk is full", where)
	case errors.Is(err, rootfs.ErrNotPlain):
		return shard.Wrap(shard.CodeInvalidRequest, err, "the proxy's certificate could not be added to %s in the sandbox: remove .shard-new beside it", where)
	}
	return shard.Wrap(shard.CodeInternal, err, "the proxy's certificate could not be added to %s in the sandbox", where)
}

// misuseRest is the least time between two looks at what sandboxes tried: what they make us write is bounded.
const misuseRest = time.Second

// watchMisuses writes down what sandboxes tried with placeholders, and does to them what the secrets say.
func (e *Engine) watchMisuses() {
	for {
		all, err := e.Secrets.Misuses(e.ctx)
		if err != nil {
			return
		}
		for _, m := range all {
			e.mu.Lock()
			sb := e.sandboxes[m.Sandbox]
			e.mu.Unlock()
			if sb != nil {
				e.wg.Go(func() { e.misused(sb, m) })
			}
		}
		select {
		case <-e.ctx.Done():
		case <-time.After(misuseRest):
		}
	}
}

func (e *Engine) misused(sb *sandbox, m secret.Misuse) {
	e.Log.Warn("a sandbox sent a placeholder where its value must not go", "sandbox", sb.id, "secret", m.Secret, "host", m.Host,
		"reason", m.Reason, "times", m.Count)
	unlock, err := sb.lock(e.ctx, shard.VerbGet) // so that no removed record comes back
	if err != nil {
		return
	}
	err = sb.update(func(r *record) {
		list := slices.Clone(r.Sandbox.Misuses)
		i := slices.IndexFunc(list, func(old shard.SecretMisuse) bool { return old.Secret == m.Secret })
		if i < 0 {
			i, list = len(list), append(list, shard.SecretMisuse{Secret: m.Secret})
		}
		list[i].Count += m.Count
		list[i].LastAt, list[i].Host, list[i].Reason = m.At, m.Host, m.Reason
		r.Sandbox.Misuses = list
	})
	unlock()
	if err != nil {
		e.Log.Error("store a misuse of a secret", "sandbox", sb.id, "err", err)
	}
	sec, err := e.Secrets.Get(m.Secret)
	if err != nil || sec.OnMisuse == secret.OnMisuseNone {
		return
	}
	if err := e.punish(sb, m, sec.OnMisuse); err != nil {
		e.Log.Error("halt a sandbox that misused a secret", "sandbox", sb.id, "err", err)
	}
}

// punish does to a sandbox what a misuse of the secret is to do. One that cannot be paused is stopped.
func (e *Engine) punish(sb *sandbox, m secret.Misuse, how string) error {
	verb := shard.VerbStop
	if how == secret.OnMisusePause {
		verb = shard.VerbPause
	}
	unlock, err := sb.lock(e.ctx, verb)
	if err != nil {
		return nil // it ended meanwhile, or the daemon does
	}
	defer unlock()
	rec := sb.record()
	for _, since := range []*time.Time{rec.Sandbox.StartedAt, rec.ResumedAt} {
		if since != nil && since.After(m.At) {
			return nil // that was before somebody let it run again
		}
	}
	ctx := context.WithoutCancel(e.ctx)
	why := fmt.Sprintf("the placeholder of secret %s was sent to %s: %s", m.Secret, m.Host, m.Reason)
	if verb == shard.VerbPause {
		p, err := e.pauser(sb)
		if err == nil {
			err = e.pause(ctx, sb, p, why)
		}
		if err == nil || sb.allows(shard.VerbStop) != nil {
			return err
		}
		e.Log.Warn("a sandbox that misused a secret cannot be paused and is stopped", "sandbox", sb.id, "err", err)
		why += "; it could not be paused: " + reason(err)
	}
	if err := e.stop(ctx, sb); err != nil {
		return err
	}
	e.Log.Info("a sandbox was stopped for a misuse", "sandbox", sb.id, "secret", m.Secret)
	return sb.update(func(r *record) { r.Sandbox.StoppedReason = why })
}

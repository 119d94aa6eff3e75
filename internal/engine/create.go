package engine

import (
	"context"
	"crypto/rand"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/provider"
	"github.com/useshards/shard/internal/rootfs"
)

const (
	defaultPath = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// job is a create under way. Its goroutine belongs to the engine, not to the request: a client that hangs up does not
// end it, a stop or a remove does.
type job struct {
	cancel context.CancelFunc
	done   chan struct{}
	err    error // valid after done
	// reason, when set before cancel, says who cancelled.
	mu     sync.Mutex
	reason string
	feed   feed
}

func (j *job) stop(reason string) {
	j.mu.Lock()
	if j.reason == "" {
		j.reason = reason
	}
	j.mu.Unlock()
	j.cancel()
	<-j.done
}

func (sb *sandbox) pending() *job {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.job
}

// feed carries progress from a job to the request that follows it. The job never waits for the request: of the layer
// events that pile up only the newest of each layer is kept.
type feed struct {
	mu      sync.Mutex
	events  []shard.Progress
	changed chan struct{}
}

func (f *feed) put(p shard.Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if p.Status == "layer" {
		for i, old := range slices.Backward(f.events) {
			if old.Status == "layer" && old.Digest == p.Digest {
				f.events[i] = p
				return
			}
		}
	}
	f.events = append(f.events, p)
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

func (f *feed) take() ([]shard.Progress, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	events := f.events
	f.events = nil
	if f.changed == nil {
		f.changed = make(chan struct{})
	}
	return events, f.changed
}

// Create makes a sandbox. Where the image is on the host the answer comes when it runs, and a failure leaves nothing
// behind. Where it must be pulled, the answer is the pending record at once, or with wait the running or failed one;
// progress, when not nil, is told each step while the caller waits.
func (e *Engine) Create(ctx context.Context, req shard.CreateRequest, wait bool, progress func(shard.Progress)) (*shard.Sandbox, error) {
	rec, p, err := e.plan(ctx, req)
	if err != nil {
		return nil, err
	}
	img, err := e.Images.Get(rec.Sandbox.Image)
	if err != nil && shard.CodeOf(err) != shard.CodeNotFound {
		return nil, err
	}
	cached := err == nil
	if err := e.forgetFailed(ctx, rec.Sandbox.Name); err != nil {
		return nil, err
	}
	sb, err := e.claim(rec)
	if err != nil {
		return nil, err
	}
	j := sb.job
	if cached {
		j.feed.put(shard.Progress{Status: "cached", Reference: img.Reference, Digest: img.Digest})
	}
	jobCtx, cancel := context.WithCancel(e.ctx)
	j.cancel = cancel
	e.wg.Go(func() {
		defer cancel()
		err := e.runJob(jobCtx, sb, p, img, req)
		e.endJob(sb, j, err, cached)
	})
	if !cached && !wait {
		return &rec.Sandbox, nil
	}
	for {
		events, changed := j.feed.take()
		for _, event := range events {
			if progress != nil {
				progress(event)
			}
		}
		select {
		case <-changed:
			continue
		case <-j.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
		if events, _ := j.feed.take(); progress != nil {
			for _, event := range events {
				progress(event)
			}
		}
		if j.err != nil && cached {
			return nil, j.err
		}
		s := sb.record().Sandbox
		return &s, nil
	}
}

// plan checks a request and works out the record that it asks for, as far as that needs no image.
func (e *Engine) plan(ctx context.Context, req shard.CreateRequest) (*record, provider.Provider, error) {
	switch {
	case req.Snapshot != "" && req.Image != "":
		return nil, nil, shard.Invalidf("image and snapshot are both given: a sandbox is made from one of them")
	case req.Snapshot != "":
		return nil, nil, shard.Errorf(shard.CodeUnsupported, "this version cannot make a sandbox from a snapshot: give an image")
	case req.Image == "":
		return nil, nil, shard.Invalidf("image is missing: name the image to make the sandbox from")
	}
	if req.Name != "" {
		if err := shard.CheckName("sandbox", req.Name); err != nil {
			return nil, nil, err
		}
	}
	if err := shard.CheckEnv(req.Env); err != nil {
		return nil, nil, err
	}
	release, err := e.holdPolicy(req.Policy)
	if err != nil {
		return nil, nil, err
	}
	release() // claim looks again
	if err := checkWorkdir(req.Workdir); err != nil {
		return nil, nil, err
	}
	ref, err := image.ParseReference(req.Image)
	if err != nil {
		return nil, nil, err
	}
	p, err := e.provider(ctx, req.Provider)
	if err != nil {
		return nil, nil, err
	}
	resources, err := checkResources(p, req.Resources)
	if err != nil {
		return nil, nil, err
	}
	ports, err := e.ports.checkForwards(req.Ports)
	if err != nil {
		return nil, nil, err
	}
	token := make([]byte, 32)
	_, _ = rand.Read(token)
	rec := &record{
		Sandbox: shard.Sandbox{Name: req.Name, Image: ref, Provider: p.Name(), State: shard.StatePending,
			Policy: req.Policy, Resources: resources, Ports: ports, CreatedAt: time.Now().UTC().Truncate(time.Microsecond)},
		Env: req.Env, Workdir: req.Workdir, User: req.User, Token: token,
	}
	e.granting.RLock()
	defer e.granting.RUnlock()
	if err := e.planSecrets(rec, req.Secrets); err != nil { // claim looks again
		return nil, nil, err
	}
	return rec, p, nil
}

func checkWorkdir(dir string) error {
	switch {
	case dir == "":
		return nil
	case !path.IsAbs(dir) || len(dir) > 4095 || strings.ContainsRune(dir, 0):
		return shard.Invalidf("workdir %s is not an absolute path of at most 4095 bytes", shard.Quote(dir))
	}
	return nil
}

// checkResources fills in the defaults and refuses bounds that the provider or the host cannot honour.
func checkResources(p provider.Provider, req *shard.ResourcesRequest) (shard.Resources, error) {
	r := shard.Resources{DiskMiB: rootfs.DefaultDiskMiB}
	if req == nil {
		return r, nil
	}
	for _, f := range []struct {
		name string
		from *int64
		to   *int64
		most int64
	}{
		{"memory in MiB", req.MemoryMiB, &r.MemoryMiB, shard.MaxMemoryMiB},
		{"vcpus", req.VCPUs, &r.VCPUs, 1 << 20},
		{"disk in MiB", req.DiskMiB, &r.DiskMiB, shard.MaxDiskMiB},
		{"swap in MiB", req.SwapMiB, &r.SwapMiB, shard.MaxDiskMiB},
	} {
		if f.from == nil {
			continue
		}
		if *f.from < 0 || *f.from > f.most {
			return r, shard.Invalidf("%s must be 0 to %d", f.name, f.most)
		}
		*f.to = *f.from
	}
	if r.DiskMiB == 0 {
		r.DiskMiB = rootfs.DefaultDiskMiB
	}
	memory, err := hostMemoryMiB()
	if err != nil {
		return r, err
	}
	_, swaps := p.(provider.Swapper)
	var least int64
	if bounded, ok := p.(provider.Bounded); ok {
		least = bounded.MinMemoryMiB()
	}
	switch {
	case r.MemoryMiB > memory:
		return r, shard.Invalidf("memory of %d MiB is more than this host has (%d MiB): ask for less", r.MemoryMiB, memory)
	case r.MemoryMiB > 0 && r.MemoryMiB < least:
		return r, shard.Invalidf("memory of %d MiB is too little for %s: give at least %d MiB, or 0 for no bound", r.MemoryMiB, p.Name(), least)
	case r.VCPUs > int64(runtime.NumCPU()):
		return r, shard.Invalidf("%d vcpus are more than this host has (%d): ask for fewer", r.VCPUs, runtime.NumCPU())
	case r.SwapMiB > 0 && !swaps:
		return r, shard.Invalidf("provider %s has no swap: leave swap out, or 0", p.Name())
	}
	return r, nil
}

// forgetFailed removes the record of a create that failed and has the name. It was kept so that its reason can be read, and must not
// stand in the way of another try. What has run once keeps its name.
func (e *Engine) forgetFailed(ctx context.Context, name string) error {
	e.mu.Lock()
	sb := e.sandboxes[e.names[name]]
	e.mu.Unlock()
	if sb == nil {
		return nil
	}
	if s := &sb.record().Sandbox; s.State != shard.StateFailed || s.StartedAt != nil {
		return nil
	}
	if err := e.Remove(ctx, sb.id, false); err != nil && shard.CodeOf(err) != shard.CodeNotFound { // not found: another create was faster
		return err
	}
	return nil
}

// claim takes an id and the name, stores the pending record and makes it visible, with a job on it.
func (e *Engine) claim(rec *record) (*sandbox, error) {
	release, err := e.holdPolicy(rec.Sandbox.Policy)
	if err != nil {
		return nil, err
	}
	defer release()
	e.granting.RLock()
	defer e.granting.RUnlock()
	if err := e.planSecrets(rec, rec.Sandbox.Secrets); err != nil {
		return nil, err
	}
	e.mu.Lock()
	if name := rec.Sandbox.Name; name != "" {
		if _, taken := e.names[name]; taken {
			e.mu.Unlock()
			return nil, shard.Errorf(shard.CodeNameTaken, "a sandbox named %q exists: remove it, or choose another name", name)
		}
	}
	id := shard.NewID()
	for e.sandboxes[id] != nil || e.names["\x00"+id] != "" {
		id = shard.NewID()
	}
	// Reserve both until the record is durable: the id under a key that no name can be.
	e.names["\x00"+id] = id
	if rec.Sandbox.Name != "" {
		e.names[rec.Sandbox.Name] = id
	}
	e.mu.Unlock()

	rec.Sandbox.ID = id
	sb := e.newSandbox(id, rec)
	sb.job = &job{done: make(chan struct{})}
	sb.verb <- struct{}{} // the job's
	if err = e.ports.claim(&rec.Sandbox, rec.Sandbox.Ports...); err == nil {
		if err = e.records.Put(id, rec); err != nil {
			e.ports.free(id)
			err = shard.Wrap(shard.CodeInternal, err, "could not store the sandbox's record")
		}
	}
	if err == nil {
		e.add(sb)
	}
	e.mu.Lock()
	delete(e.names, "\x00"+id)
	if err != nil && rec.Sandbox.Name != "" {
		delete(e.names, rec.Sandbox.Name)
	}
	e.mu.Unlock()
	if err != nil {
		e.deleteHollow(id)
		return nil, err
	}
	return sb, nil
}

// runJob pulls the image if it must, and starts the sandbox.
func (e *Engine) runJob(ctx context.Context, sb *sandbox, p provider.Provider, img *image.Image, req shard.CreateRequest) error {
	if img == nil {
		pulled, err := e.Images.Pull(ctx, sb.record().Sandbox.Image, sb.job.feed.put)
		if err != nil {
			return err
		}
		img = pulled
	}
	img, release, err := e.Images.Acquire(img.Digest)
	if err != nil {
		return err
	}
	defer release()
	sb.job.feed.put(shard.Progress{Status: "building"})
	rec := *sb.record()
	rec.Sandbox.Digest = img.Digest
	base := img.Config.Env
	if !slices.ContainsFunc(base, func(kv string) bool { return strings.HasPrefix(kv, "PATH=") }) {
		base = append([]string{defaultPath}, base...)
	}
	for _, name := range rec.Sandbox.Secrets {
		if hasVariable(base, name) {
			return shard.Invalidf("the environment of the image has %s already: a secret of that name would replace it", name)
		}
	}
	rec.Env = shard.MergeEnv(base, req.Env...)
	if rec.Workdir == "" {
		rec.Workdir = img.Config.Workdir
	}
	if !path.IsAbs(rec.Workdir) { // images may say "app"
		rec.Workdir = path.Join("/", rec.Workdir)
	}
	if rec.User == "" {
		rec.User = img.Config.User
	}
	return e.boot(ctx, sb, p, &rec, img)
}

// endJob writes how a create ended. It holds the verb lock, which claim took.
func (e *Engine) endJob(sb *sandbox, j *job, err error, cached bool) {
	j.mu.Lock()
	cancelled := j.reason
	j.mu.Unlock()
	switch {
	case err == nil:
	case e.ctx.Err() != nil:
		// The daemon goes: the record stays pending, and the next daemon says what became of it.
	case cached && cancelled == "":
		sb.closePorts() // a change of them that is under way ends first
		if left := e.remove(context.WithoutCancel(e.ctx), sb); left != nil {
			e.Log.Error("remove what a failed create left: it is tried again", "sandbox", sb.id, "err", left)
			sb.learn(func(r *record) {
				r.Sandbox.State, r.Sandbox.FailedReason, r.Intent = shard.StateFailed, reason(err), "remove"
			})
		}
	default:
		text := reason(err)
		if cancelled != "" {
			text = cancelled
		}
		e.Log.Warn("create failed", "sandbox", sb.id, "err", err)
		e.ports.free(sb.id)
		sb.learn(func(r *record) { r.Sandbox.State, r.Sandbox.FailedReason = shard.StateFailed, text })
	}
	sb.mu.Lock()
	sb.job = nil
	sb.mu.Unlock()
	if err != nil && cancelled != "" {
		err = shard.Errorf(shard.CodeSandboxFailed, "the create of sandbox %q was %s", sb.ref(), cancelled)
	}
	j.err = err
	<-sb.verb
	close(j.done)
}

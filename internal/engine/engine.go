// Package engine is the only owner of sandbox life. It keeps the records, serialises the verbs of each sandbox, and
// drives the workshops (image, rootfs, netns) and the providers; every failure undoes what was done before it, and a
// daemon that was killed at any moment finds its way back from the records. It knows no route, no command line and no
// concrete provider.
//
// # Locks, in the order in which they may be taken
//
//	sandbox.verb   one verb at a time per sandbox; held over slow work; waits end with the caller's context
//	policies.change
//	               a policy changes, or a sandbox gets one; held over the write of a record and over its enforcement
//	Engine.granting
//	               the same for secrets
//	Engine.mu      the maps of sandboxes and names
//	sandbox.mu     what runs in one sandbox: the live machine, its commands
//
// forwards.mu stands beside the first: it is held over one change of a sandbox's ports.
//
// The first three are held over I/O, and sandbox.put, which stands for itself, over the write of one record; no other lock
// is. Records are read without any: they are replaced, never changed.
package engine

import (
	"context"
	"crypto/sha256"
	"encoding/base32"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/provider"
	"github.com/useshards/shard/internal/rootfs"
	"github.com/useshards/shard/internal/secret"
	"github.com/useshards/shard/internal/store"
)

// Config is what an Engine works with. The engine owns none of it: the caller closes what it opened, after Close.
type Config struct {
	// Root is the data directory.
	Root string
	// Default names the provider of a create that names none.
	Default   string
	Providers []provider.Provider
	Images    *image.Store
	Roots     *rootfs.Manager
	Net       *netns.Net
	Cgroups   *cgroup.Manager
	// Nameservers are the addresses that a sandbox without a policy asks.
	Nameservers []string
	// Enforcer keeps sandboxes to their policies.
	Enforcer Enforcer
	Secrets  *secret.Store
	Log      *slog.Logger
}

// Engine runs the sandboxes under one root.
type Engine struct {
	Config
	records  *store.Records[record]
	policies *policies
	// granting is held for writing while a secret changes, for reading while a sandbox gets or loses one.
	granting sync.RWMutex

	ctx    context.Context // ends background work
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu        sync.Mutex
	sandboxes map[string]*sandbox
	names     map[string]string // name → id
	ids       []string          // sorted
	warnings  []string          // records that cannot be read, and other damage
	damaged   map[string]string // id → why its record cannot be read
	hollow    []string          // ids of creates that were refused, whose directories are still to be deleted
	ports     portTable

	execs    atomic.Int64 // commands that run, in all sandboxes
	probesMu sync.Mutex
	probes   map[string]provider.Report
}

// Tag is a short name of a root, for things on the host that several daemons share: cgroups, interfaces, tables.
func Tag(root string) string {
	sum := sha256.Sum256([]byte(root))
	return strings.ToLower(base32.StdEncoding.EncodeToString(sum[:])[:6])
}

// Open reads the records, finds out what became of every sandbox, and finishes or undoes what an earlier daemon left
// half done. When it returns, every record is true.
func Open(ctx context.Context, cfg Config) (*Engine, error) {
	records, err := store.Open[record](filepath.Join(cfg.Root, "sandboxes"), "sandbox.json", recordFormat)
	if err != nil {
		return nil, err
	}
	e := &Engine{Config: cfg, records: records, sandboxes: make(map[string]*sandbox), names: make(map[string]string), damaged: make(map[string]string),
		probes: make(map[string]provider.Report)}
	e.ctx, e.cancel = context.WithCancel(context.Background())
	if e.policies, err = e.openPolicies(); err != nil {
		e.Close()
		return nil, err
	}
	if err := e.keepReserve(); err != nil {
		e.Log.Warn("hold some of the disk in reserve", "err", err)
	}
	if err := e.reconcile(ctx); err != nil {
		e.Close()
		return nil, err
	}
	e.wg.Go(func() { e.ListProviders(e.ctx) }) // the first create need not wait for the probes
	e.wg.Go(e.restartLoop)
	e.wg.Go(e.watchMisuses)
	e.wg.Go(e.revive)
	return e, nil
}

// Close lets go of every sandbox: they run on, and the next engine finds them. It waits for its goroutines.
func (e *Engine) Close() {
	e.cancel()
	all := e.all()
	for _, sb := range all {
		sb.letGo()
	}
	e.wg.Wait()
	for _, sb := range all {
		sb.catchUp()
	}
}

// all is every sandbox, in no order.
func (e *Engine) all() []*sandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Collect(maps.Values(e.sandboxes))
}

// PowerDown ends what runs because the host goes down: processes have the grace of a stop, and files come to rest. No record
// says that a stop was asked for, so the daemon of the next boot brings back what shall come back. Close follows.
func (e *Engine) PowerDown(ctx context.Context) {
	var wg sync.WaitGroup
	for _, sb := range e.all() {
		wg.Go(func() { e.quiet(ctx, sb) })
	}
	wg.Wait()
}

// Empty says that there is no sandbox, readable or not.
func (e *Engine) Empty() bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.sandboxes) == 0 && len(e.warnings) == 0
}

// record is a sandbox on disk: what clients see and what only the host knows.
type record struct {
	Sandbox shard.Sandbox `json:"sandbox"`
	// Env, Workdir and User are what every command starts with: the image's settings and the create's over them.
	Env     []string `json:"env"`
	Workdir string   `json:"workdir"`
	User    string   `json:"user"`
	// Placeholders are what stands for the values of Sandbox.Secrets, by name.
	Placeholders map[string]string `json:"placeholders,omitempty"`
	// TrustFile is the file in the sandbox to which the proxy's certificate was added.
	TrustFile string `json:"trust_file,omitempty"`
	// Token is the agent's, from which it knows the host: 32 bytes.
	Token []byte `json:"token"`
	// Handle is the provider's, while a machine runs.
	Handle []byte `json:"handle,omitempty"`
	// Intent is what is under way, so that the next daemon finishes or undoes it: start, stop, remove, pause, resume, or the
	// cleanup after a machine that is gone.
	Intent string `json:"intent,omitempty"`
	// Prepared says that the files have been started once.
	Prepared bool `json:"prepared,omitempty"`
	// OOMInARow counts the kills for want of memory without steady running in between.
	OOMInARow int `json:"oom_in_a_row,omitempty"`
	// Runs is what the host knows of each named process beside its public record, by name.
	Runs map[string]processRun `json:"runs,omitempty"`
	// Launches are the processes that the agent is asked to start, by name. Nobody sees them.
	Launches map[string]launch `json:"launches,omitempty"`
	// ResumedAt is when its last resume began: what it did before then was before the pause.
	ResumedAt *time.Time `json:"resumed_at,omitempty"`
	// StoppedByUser says that a stop, not a death, ended it.
	StoppedByUser bool `json:"stopped_by_user,omitempty"`
}

const recordFormat = 1

// up says whether a machine runs, for all that is known.
func (r *record) up() bool {
	return r.Sandbox.State == shard.StateRunning || r.Sandbox.State == shard.StateUnresponsive
}

// sandbox is one sandbox in memory.
type sandbox struct {
	e    *Engine
	id   string
	dir  string
	verb chan struct{} // holds one token
	rec  atomic.Pointer[record]
	put  sync.Mutex // serialises changes of the record; held over its write
	// behind says that the record on disk lacks what happened; deleted, that it must not be written any more. Guarded by put.
	behind, deleted bool
	// early are the states of processes whose run is under way, by the agent's id: nil until the agent has told one.
	// Guarded by put.
	early map[string]*guest.ProcessState

	mu       sync.Mutex
	live     *live  // the running machine
	job      *job   // the create under way
	giveUp   func() // ends the pause or resume under way; nil while there is none
	commands []*Command

	processes map[string]*process
	attended  *guest.Session // the session whose stream of process states is read
	changed   chan struct{}  // closed and replaced when the record has changed, or is gone

	forwards forwards // has its own locks
}

func (e *Engine) newSandbox(id string, rec *record) *sandbox {
	sb := &sandbox{e: e, id: id, dir: e.records.Dir(id), verb: make(chan struct{}, 1),
		early: make(map[string]*guest.ProcessState), processes: make(map[string]*process), changed: make(chan struct{})}
	sb.rec.Store(rec)
	return sb
}

func (sb *sandbox) record() *record { return sb.rec.Load() }

func (sb *sandbox) ref() string { return sb.record().Sandbox.Ref() }

// update changes the record: durably first, visibly then.
func (sb *sandbox) update(change func(*record)) error {
	return sb.change(func(r *record) bool { change(r); return true })
}

// change is update for a change that may turn out to be none: then it returns false.
func (sb *sandbox) change(change func(*record) bool) error {
	sb.put.Lock()
	defer sb.put.Unlock()
	next := *sb.record()
	if !change(&next) {
		return nil
	}
	if err := sb.write(&next); err != nil {
		return err
	}
	sb.rec.Store(&next)
	sb.wake()
	return nil
}

// learn changes the record to what has happened, or is sure to: no failure can undo that. What cannot be stored, since the
// host's disk is full, is seen all the same, and stored when it can be.
func (sb *sandbox) learn(change func(*record)) {
	sb.learnIf(func(r *record) bool { change(r); return true })
}

// learnIf is learn for what may turn out to be no news: then change returns false.
func (sb *sandbox) learnIf(change func(*record) bool) {
	sb.put.Lock()
	defer sb.put.Unlock()
	next := *sb.record()
	if !change(&next) {
		return
	}
	if err := sb.write(&next); err != nil && !sb.deleted {
		if !sb.behind {
			sb.e.Log.Error("a sandbox's record on disk is behind until it can be written", "sandbox", sb.id, "err", err)
		}
		sb.behind = true
	}
	sb.rec.Store(&next)
	sb.wake()
}

// catchUp stores what could not be stored before.
func (sb *sandbox) catchUp() {
	sb.put.Lock()
	defer sb.put.Unlock()
	if sb.behind && sb.write(sb.record()) == nil {
		sb.e.Log.Info("a sandbox's record on disk is up to date again", "sandbox", sb.id)
	}
}

// write stores a record. The caller holds put.
func (sb *sandbox) write(rec *record) error {
	if sb.deleted {
		return notFound("sandbox", rec.Sandbox.Ref())
	}
	if err := sb.e.records.Put(sb.id, rec); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not store the record of sandbox %q", rec.Sandbox.Ref())
	}
	sb.behind = false
	return nil
}

// allows says whether the sandbox's state allows the verb; of a failed one also why it failed.
func (sb *sandbox) allows(verb shard.Verb) error {
	s := &sb.record().Sandbox
	err := shard.CheckVerb(s.Ref(), s.State, verb)
	if err != nil && s.State == shard.StateFailed && s.FailedReason != "" {
		return shard.Errorf(shard.CodeOf(err), "%s (it failed: %s)", err, s.FailedReason)
	}
	if err != nil && s.State == shard.StatePaused && s.StoppedReason != "" && shard.CodeOf(err) == shard.CodeSandboxNotRunning {
		return shard.Errorf(shard.CodeOf(err), "sandbox %q was paused: %s: look at it (inspect) before you resume it", s.Ref(), s.StoppedReason)
	}
	return err
}

// lock takes the sandbox's verb lock and checks that the verb is allowed, before waiting and again after it.
func (sb *sandbox) lock(ctx context.Context, verb shard.Verb) (unlock func(), err error) {
	if err := sb.allows(verb); err != nil {
		return nil, err
	}
	select {
	case sb.verb <- struct{}{}:
	case <-ctx.Done():
		return nil, shard.Wrap(shard.CodeTimeout, ctx.Err(), "another request on sandbox %q did not end in time", sb.ref())
	}
	unlock = func() { <-sb.verb }
	if !sb.e.holds(sb) {
		unlock()
		return nil, notFound("sandbox", sb.ref())
	}
	if err := sb.allows(verb); err != nil {
		unlock()
		return nil, err
	}
	return unlock, nil
}

func (e *Engine) holds(sb *sandbox) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.sandboxes[sb.id] == sb
}

func notFound(what, ref string) error {
	return shard.Errorf(shard.CodeNotFound, "there is no %s %s", what, shard.Quote(ref))
}

// find resolves a reference: an exact id, else an exact name, else an id prefix that fits exactly one.
func (e *Engine) find(ref string) (*sandbox, error) {
	if err := shard.CheckRef("sandbox", ref); err != nil {
		return nil, err
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if sb, ok := e.sandboxes[ref]; ok {
		return sb, nil
	}
	if why, ok := e.damaged[ref]; ok {
		return nil, shard.Errorf(shard.CodeSandboxFailed, "the record of sandbox %q cannot be read: %s: mend it and restart the daemon, "+
			"or remove the sandbox with force", ref, why)
	}
	if id, ok := e.names[ref]; ok {
		if sb, ok := e.sandboxes[id]; ok {
			return sb, nil
		}
	}
	if len(ref) >= shard.MinPrefix {
		at, _ := slices.BinarySearch(e.ids, ref)
		var found []string
		for _, id := range e.ids[at:] {
			if !strings.HasPrefix(id, ref) {
				break
			}
			found = append(found, id)
		}
		switch {
		case len(found) == 1:
			return e.sandboxes[found[0]], nil
		case len(found) > 1:
			return nil, shard.Invalidf("%q is the beginning of %d sandbox ids: write more of the one that is meant", ref, len(found))
		}
	}
	return nil, notFound("sandbox", ref)
}

// add makes a sandbox visible. The name was reserved before.
func (e *Engine) add(sb *sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.sandboxes[sb.id] = sb
	e.ports.keep(&sb.record().Sandbox)
	if name := sb.record().Sandbox.Name; name != "" {
		if other, taken := e.names[name]; taken && other != sb.id { // only after damage to a record
			e.warnings = append(e.warnings, fmt.Sprintf("sandboxes %q and %q have the same name %q: the second is reached by its id only",
				other, sb.id, name))
		} else {
			e.names[name] = sb.id
		}
	}
	if at, found := slices.BinarySearch(e.ids, sb.id); !found {
		e.ids = slices.Insert(e.ids, at, sb.id)
	}
}

// drop makes a sandbox invisible and frees its name.
func (e *Engine) drop(sb *sandbox) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.sandboxes, sb.id)
	e.ports.free(sb.id)
	if name := sb.record().Sandbox.Name; e.names[name] == sb.id {
		delete(e.names, name)
	}
	if at, found := slices.BinarySearch(e.ids, sb.id); found {
		e.ids = slices.Delete(e.ids, at, at+1)
	}
}

// List returns the records in the order of their ids, stopped ones only when all is set or a start of them is due, and a warning for each record
// that cannot be read.
func (e *Engine) List(all bool) ([]shard.Sandbox, []string) {
	e.mu.Lock()
	sandboxes := make([]*sandbox, len(e.ids))
	for i, id := range e.ids {
		sandboxes[i] = e.sandboxes[id]
	}
	warnings := slices.Clone(e.warnings)
	e.mu.Unlock()
	out := make([]shard.Sandbox, 0, len(sandboxes))
	for _, sb := range sandboxes {
		if s := sb.record().Sandbox; all || s.State != shard.StateStopped || restartDue(&s) {
			out = append(out, s)
		}
	}
	return out, warnings
}

// Inspect returns one record. With wait it holds while the sandbox is pending.
func (e *Engine) Inspect(ctx context.Context, ref string, wait bool) (*shard.Inspection, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	if j := sb.pending(); wait && j != nil {
		select {
		case <-j.done:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
	s := sb.record().Sandbox
	return &shard.Inspection{Sandbox: s, Egress: e.egress(&s)}, nil
}

// ImageHolders names the sandboxes that were made from the image of this digest.
func (e *Engine) ImageHolders(digest string) []string {
	all, _ := e.List(true)
	var holders []string
	for _, s := range all {
		if s.Digest == digest {
			holders = append(holders, s.Ref())
		}
	}
	return holders
}

// provider finds a provider by name, or the default one, and checks that it works on this host.
func (e *Engine) provider(ctx context.Context, name string) (provider.Provider, error) {
	if name == "" {
		name = e.Default
	}
	p, err := e.providerNamed(name)
	if err != nil {
		return nil, err
	}
	if report := e.probe(ctx, p); !report.Available {
		return nil, shard.Errorf(shard.CodeUnsupported, "provider %s does not work on this host: %s", name, report.Reason)
	}
	return p, nil
}

func (e *Engine) providerNamed(name string) (provider.Provider, error) {
	var names []string
	for _, p := range e.Providers {
		if p.Name() == name {
			return p, nil
		}
		names = append(names, p.Name())
	}
	return nil, shard.Invalidf("there is no provider %s here: this daemon has %s", shard.Quote(name), strings.Join(names, ", "))
}

// probe asks a provider once whether it works. A refusal is asked again: the host may have been mended.
func (e *Engine) probe(ctx context.Context, p provider.Provider) provider.Report {
	e.probesMu.Lock()
	defer e.probesMu.Unlock()
	report, ok := e.probes[p.Name()]
	if !ok || !report.Available {
		report = p.Probe(ctx)
		e.probes[p.Name()] = report
	}
	return report
}

// ListProviders says what each provider is worth on this host.
func (e *Engine) ListProviders(ctx context.Context) []shard.ProviderInfo {
	out := make([]shard.ProviderInfo, 0, len(e.Providers))
	for _, p := range e.Providers {
		out = append(out, e.probe(ctx, p).Info(p, p.Name() == e.Default))
	}
	return out
}

// Capabilities are those of the named provider, or of the default one.
func (e *Engine) Capabilities(name string) (shard.Capabilities, error) {
	if name == "" {
		name = e.Default
	}
	p, err := e.providerNamed(name)
	if err != nil {
		return shard.Capabilities{}, err
	}
	return provider.CapabilitiesOf(p), nil
}

// reason is the text of err that may be shown to any client.
func reason(err error) string {
	if e, ok := errors.AsType[*shard.Error](err); ok {
		return e.Message
	}
	return "internal error: the daemon's log says more"
}

// undo is a stack of what must be taken back when an operation fails. Its steps ignore the operation's cancellation.
type undo []func(context.Context) error

func (u *undo) push(step func(context.Context) error) { *u = append(*u, step) }

// run takes everything back, newest first, and goes on after failures.
func (u *undo) run(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), teardownTime)
	defer cancel()
	var errs []error
	for _, step := range slices.Backward(*u) {
		errs = append(errs, step(ctx))
	}
	return errors.Join(errs...)
}

// Bounds of the server's own work.
const (
	startTime    = 60 * time.Second
	execTime     = 20 * time.Second
	stopGrace    = 30 * time.Second
	stopMargin   = 5 * time.Second
	teardownTime = 60 * time.Second
)

// hostMemoryMiB is the memory of this host.
func hostMemoryMiB() (int64, error) {
	var info unix.Sysinfo_t
	if err := unix.Sysinfo(&info); err != nil {
		return 0, fmt.Errorf("read the host's memory: %w", err)
	}
	return int64(info.Totalram) * int64(info.Unit) >> 20, nil
}

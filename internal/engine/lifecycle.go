package engine

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/provider"
)

// live is one running machine and the session with its agent.
type live struct {
	inst     provider.Instance
	expected atomic.Bool   // a verb is ending the machine: its death is no news
	stop     chan struct{} // closed when the watch must end
	stopped  chan struct{} // closed when it has

	// guarded by sandbox.mu
	session *guest.Session // nil while there is none
	ready   chan struct{}  // closed when session is set
}

// newLive is a machine that has no session yet.
func newLive(inst provider.Instance) *live {
	return &live{inst: inst, ready: make(chan struct{}), stop: make(chan struct{}), stopped: make(chan struct{})}
}

// spec is what the provider must know.
func (sb *sandbox) spec(rec *record) provider.Spec {
	hostname := rec.Sandbox.Name
	if hostname == "" {
		hostname = sb.id
	}
	return provider.Spec{ID: sb.id, Hostname: hostname, Root: filepath.Join(sb.dir, "rootfs"), Dir: sb.dir,
		Resources: rec.Sandbox.Resources}
}

// boot prepares root and network, starts the machine, greets the agent, and stores rec as running. The caller holds the
// verb lock; rec is the record to be, not yet stored. On failure everything is undone.
func (e *Engine) boot(ctx context.Context, sb *sandbox, p provider.Provider, rec *record, img *image.Image) (err error) {
	ctx, cancel := context.WithTimeout(ctx, startTime)
	defer cancel()
	var undo undo
	defer func() {
		if err == nil {
			return
		}
		if errors.Is(ctx.Err(), context.DeadlineExceeded) {
			err = shard.Wrap(shard.CodeTimeout, err, "sandbox %q did not start within %d s", rec.Sandbox.Ref(), startTime/time.Second)
		}
		if undoErr := undo.run(ctx); undoErr != nil {
			e.Log.Error("undo of a failed start: it is tried again", "sandbox", sb.id, "err", undoErr)
			sb.learn(func(r *record) { r.Intent = "cleanup" })
		}
	}()
	spec, att, err := e.prepare(ctx, sb, rec, img, &undo)
	if err != nil {
		return err
	}
	undo.push(func(ctx context.Context) error { return p.Destroy(ctx, spec) })
	inst, err := p.Start(ctx, spec)
	if err != nil {
		if m := rec.Sandbox.Resources.MemoryMiB; m > 0 && m < fewMiB {
			return shard.Wrap(shard.CodeInvalidRequest, err, "provider %s could not start the sandbox in %d MiB of memory: give it more", p.Name(), m)
		}
		return shard.Wrap(shard.CodeInternal, err, "provider %s could not start the sandbox: the daemon's log says why", p.Name())
	}
	undo.push(func(context.Context) error { return inst.Close() })
	session, err := connect(ctx, inst, rec)
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "the agent of the sandbox did not answer")
	}
	undo.push(func(context.Context) error { session.Close(); return nil })
	err = session.Call(ctx, guest.OpBoot, guest.BootArgs{Hostname: spec.Hostname, First: !rec.Prepared, User: rec.User,
		Workdir: guest.Path(rec.Workdir), Files: map[string]string{
			"/etc/hostname":    spec.Hostname + "\n",
			"/etc/hosts":       hosts(spec.Hostname, att),
			"/etc/resolv.conf": "nameserver " + strings.Join(e.Nameservers, "\nnameserver ") + "\n",
		}}, nil)
	if err != nil {
		return err
	}
	l := newLive(inst)
	l.session = session
	close(l.ready)
	if err := sb.update(func(r *record) {
		now := time.Now().UTC().Truncate(time.Microsecond)
		rec.Sandbox.Ports = r.Sandbox.Ports // they may have changed meanwhile
		*r = *rec
		callOff(r)
		r.processesDue()
		r.Handle, r.Intent, r.Prepared, r.StoppedByUser = inst.Handle(), "", true, false
		r.Sandbox.State, r.Sandbox.StoppedReason, r.Sandbox.StartedAt = shard.StateRunning, "", &now
	}); err != nil {
		return err
	}
	e.enliven(sb, l)
	e.startProcesses(sb, session)
	return nil
}

// prepare makes what a machine of the sandbox needs on the host: its root, its network, the enforcement of its policy. What it
// makes goes onto undo.
func (e *Engine) prepare(ctx context.Context, sb *sandbox, rec *record, img *image.Image, undo *undo) (spec provider.Spec, att netns.Attachment, err error) {
	e.wg.Go(e.Cgroups.Warm)
	spec = sb.spec(rec)
	undo.push(func(ctx context.Context) error { return e.Roots.Unmount(ctx, sb.dir) })
	undo.push(func(ctx context.Context) error { return e.Net.Detach(ctx, sb.id) })
	g, prepare := errgroup.WithContext(ctx)
	g.Go(func() error {
		if !rec.Prepared {
			if err := e.Roots.Create(prepare, sb.dir, rec.Sandbox.Resources.DiskMiB); err != nil {
				return err
			}
		}
		root, err := e.Roots.Mount(prepare, sb.dir, e.Images.LayersDir(), layerNames(img))
		spec.Root = root
		if err != nil || rec.Sandbox.State == shard.StatePaused { // then what runs has its files, and the certificate among them
			return err
		}
		return e.plant(rec, root)
	})
	g.Go(func() error {
		var err error
		att, err = e.Net.Attach(prepare, sb.id)
		spec.Netns = att.Netns
		return err
	})
	if err := g.Wait(); err != nil {
		return spec, att, err
	}
	undo.push(func(ctx context.Context) error { return e.unenforce(ctx, sb.id) })
	return spec, att, e.enforce(ctx, &rec.Sandbox, att.Addr)
}

// hosts is the guest's /etc/hosts. localhost is 127.0.0.1 alone, where port forwards arrive: a server that is told to listen on
// localhost must not choose another.
func hosts(name string, att netns.Attachment) string {
	text := fmt.Sprintf("127.0.0.1\tlocalhost\n%s\t%s\n", att.Addr, name)
	if att.Addr6.IsValid() {
		text += fmt.Sprintf("::1\tip6-localhost ip6-loopback\n%s\t%s\n", att.Addr6, name)
	}
	return text
}

// connect opens the agent's channel and greets it.
func connect(ctx context.Context, inst provider.Instance, rec *record) (*guest.Session, error) {
	var conn net.Conn
	conn, err := inst.Dial(ctx)
	if err != nil {
		return nil, err
	}
	return guest.Connect(ctx, conn, [guest.TokenSize]byte(rec.Token))
}

// enliven makes l the sandbox's machine and watches it.
func (e *Engine) enliven(sb *sandbox, l *live) {
	sb.mu.Lock()
	sb.live = l
	sb.mu.Unlock()
	e.attend(sb, l)
}

// attend watches a machine that is the sandbox's already, and opens its ports.
func (e *Engine) attend(sb *sandbox, l *live) {
	sb.openPorts()
	e.wg.Go(func() { e.watch(sb, l) })
}

// watch follows one machine: it greets the agent again when the session breaks, and stores the end when the machine dies
// by itself.
func (e *Engine) watch(sb *sandbox, l *live) {
	defer close(l.stopped)
	wait := 20 * time.Millisecond
	for {
		sb.mu.Lock()
		session := l.session
		sb.mu.Unlock()
		if session == nil {
			ctx, cancel := context.WithTimeout(e.ctx, 10*time.Second)
			fresh, err := connect(ctx, l.inst, sb.record())
			cancel()
			if err == nil {
				e.resumeProcesses(sb, fresh)
				sb.mu.Lock()
				l.session = fresh
				close(l.ready)
				sb.mu.Unlock()
				e.resumeCommands(sb, fresh)
				wait = 20 * time.Millisecond
				continue
			}
			select {
			case <-l.inst.Done():
			case <-l.stop:
				return
			case <-time.After(wait):
				if wait >= time.Second { // before that it is most likely a machine that is ending
					e.Log.Warn("the agent does not answer", "sandbox", sb.id, "err", err)
				}
				wait = min(2*wait, 5*time.Second)
				continue
			}
		} else {
			select {
			case <-l.inst.Done():
			case <-l.stop:
				return
			case <-session.Done():
				if l.expected.Load() { // the machine is on its way out
					select {
					case <-l.inst.Done():
					case <-l.stop:
					}
					return
				}
				sb.mu.Lock()
				l.session, l.ready = nil, make(chan struct{})
				sb.mu.Unlock()
				_ = session.Close() // so that nothing of it comes behind what the next one brings
				select {
				case <-l.inst.Done(): // a dying machine's channel goes a little before it
				case <-l.stop:
					return
				case <-time.After(dying):
					e.Log.Warn("the session with the agent broke", "sandbox", sb.id, "err", session.Err())
					continue
				}
			}
		}
		if !l.expected.Load() {
			e.wg.Go(func() { e.died(sb, l) })
		}
		return
	}
}

// letGo ends the watch of a sandbox whose machine runs on.
func (sb *sandbox) letGo() {
	for _, c := range sb.unwatch() {
		c.letGo()
	}
	sb.closeProcesses()
}

// unwatch forgets the machine and its session, and returns the commands it forgets with them.
func (sb *sandbox) unwatch() []*Command {
	sb.closePorts()
	sb.mu.Lock()
	commands := sb.commands
	sb.commands = nil
	sb.mu.Unlock()
	l := sb.halt()
	if l == nil {
		return commands
	}
	if l.session != nil {
		l.session.Close()
	}
	_ = l.inst.Close()
	return commands
}

// halt takes the machine from its watch: from then on nobody else uses it, or its session. nil when there is none.
func (sb *sandbox) halt() *live {
	sb.mu.Lock()
	l := sb.live
	sb.live = nil
	sb.mu.Unlock()
	if l == nil {
		return nil
	}
	l.expected.Store(true)
	close(l.stop)
	<-l.stopped
	return l
}

// ending says whether the machine is gone or on its way out.
func (sb *sandbox) ending() bool {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.live == nil || sb.live.expected.Load()
}

// session returns the session with the agent of a running sandbox; while there is none it waits for the watch to make one.
func (sb *sandbox) session(ctx context.Context) (*guest.Session, error) {
	ctx, cancel := context.WithTimeout(ctx, execTime)
	defer cancel()
	for {
		sb.mu.Lock()
		l := sb.live
		var session *guest.Session
		var ready chan struct{}
		if l != nil {
			session, ready = l.session, l.ready
		}
		sb.mu.Unlock()
		switch {
		case l == nil:
			if err := sb.allows(shard.VerbExec); err != nil {
				return nil, err
			}
			what := "ending"
			if sb.record().Intent == "pause" {
				what = "being paused"
			}
			return nil, shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just %s", sb.ref(), what)
		case session != nil:
			return session, nil
		}
		select {
		case <-ready:
		case <-l.inst.Done():
			return nil, shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q has just ended", sb.ref())
		case <-ctx.Done():
			return nil, shard.Wrap(shard.CodeTimeout, ctx.Err(), "the agent of sandbox %q does not answer: stop the sandbox, or remove it with force", sb.ref())
		}
	}
}

// died stores the end of a machine that nobody asked to end.
func (e *Engine) died(sb *sandbox, l *live) {
	select {
	case sb.verb <- struct{}{}:
	case <-e.ctx.Done():
		return // the next daemon finds out
	}
	defer func() { <-sb.verb }()
	sb.mu.Lock()
	current := sb.live == l
	sb.mu.Unlock()
	if !current {
		return // a verb was quicker
	}
	sb.lastWords(l)
	e.bury(context.WithoutCancel(e.ctx), sb, l)
}

// bury stores the end of a machine that ended by itself, and removes what it left. The caller holds the verb lock.
func (e *Engine) bury(ctx context.Context, sb *sandbox, l *live) {
	exit := l.inst.Exit()
	e.Log.Info("sandbox ended by itself", "sandbox", sb.id, "oom", exit.OOM, "detail", exit.Detail)
	ctx, cancel := context.WithTimeout(ctx, teardownTime)
	defer cancel()
	// The record first: who was told of the end must not read that it runs. The next verb waits for the rest.
	sb.learn(ended(exit))
	why := "the sandbox ended"
	if exit.OOM {
		why = "the sandbox " + reasonOOM
	}
	e.endLive(sb, why)
	if err := e.finish(ctx, sb); err != nil {
		e.Log.Error("clean up after a sandbox that ended: it is tried again", "sandbox", sb.id, "err", err)
	}
}

// fewMiB: a start that fails with less memory than this most likely fails for want of it.
const fewMiB = 32

// dying is how long a machine may take to end after its channel has.
const dying = 300 * time.Millisecond

const (
	reasonOOM  = "ran out of memory and the host ended it"
	reasonDied = "its processes died"
	reasonGone = "the daemon restarted and found no process"
)

// ended changes a record to that of a sandbox that ended by itself.
func ended(exit provider.Exit) func(*record) {
	return func(r *record) {
		r.Sandbox.State, r.Sandbox.StoppedReason, r.Handle, r.Intent = shard.StateStopped, reasonDied, nil, "cleanup"
		r.processesDown()
		if exit.OOM {
			oomKilled(r, time.Now().UTC().Truncate(time.Microsecond))
		}
	}
}

// endLive forgets the machine, its session and its commands. why is what attached clients are told.
func (e *Engine) endLive(sb *sandbox, why string) {
	for _, c := range sb.unwatch() {
		c.discard(shard.Errorf(shard.CodeSandboxNotRunning, "%s while the command ran", why))
		<-c.launched // a start under way has failed with the session, and makes no file any more
	}
	sb.restProcesses()
}

// Start starts a stopped sandbox with the files it kept.
func (e *Engine) Start(ctx context.Context, ref string) (*shard.Sandbox, error) {
	return e.start(ctx, ref, nil)
}

// start is Start, if the sandbox still fits when its turn has come; nil fits any.
func (e *Engine) start(ctx context.Context, ref string, fits func(*shard.Sandbox) bool) (*shard.Sandbox, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	unlock, err := sb.lock(ctx, shard.VerbStart)
	if err != nil {
		return nil, err
	}
	defer unlock()
	ctx = context.WithoutCancel(ctx)
	if err := e.finish(ctx, sb); err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "what sandbox %q left when it ended could not be cleaned up: try again", sb.ref())
	}
	if !e.holds(sb) { // that was the rest of a removal
		return nil, notFound("sandbox", sb.ref())
	}
	rec := *sb.record()
	if fits != nil && !fits(&rec.Sandbox) {
		return &rec.Sandbox, nil
	}
	p, err := e.provider(ctx, rec.Sandbox.Provider)
	if err != nil {
		return nil, err
	}
	img, release, err := e.Images.Acquire(rec.Sandbox.Digest)
	if err != nil {
		return nil, shard.Wrap(shard.CodeNotFound, err, "the image of sandbox %q is no longer on this host: pull %s", sb.ref(), rec.Sandbox.Image)
	}
	defer release()
	err = e.bootAgain(ctx, sb, p, &rec, img)
	if errors.Is(err, syscall.ENOSPC) && e.spendReserve() {
		e.Log.Warn("the host's disk is full: what was kept in reserve is used for a start", "sandbox", sb.id)
		err = e.bootAgain(ctx, sb, p, &rec, img)
	}
	if err != nil {
		return nil, err
	}
	s := sb.record().Sandbox
	return &s, nil
}

// bootAgain starts the machine of a stopped sandbox. The caller holds the verb lock.
func (e *Engine) bootAgain(ctx context.Context, sb *sandbox, p provider.Provider, rec *record, img *image.Image) error {
	err := sb.update(func(r *record) { r.Intent = "start" })
	if err != nil {
		return err
	}
	if err = e.boot(ctx, sb, p, rec, img); err != nil {
		sb.learnIf(func(r *record) bool {
			undone := r.Intent == "start"
			if undone {
				r.Intent = ""
			}
			return undone
		})
	}
	return err
}

// Stop ends every process of a sandbox and keeps its files. A pending sandbox's create is cancelled.
func (e *Engine) Stop(ctx context.Context, ref string) (*shard.Sandbox, error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	if j := sb.pending(); j != nil {
		j.stop("cancelled by stop")
		if s := sb.record().Sandbox; s.State == shard.StateFailed {
			return &s, nil
		}
		// It had just come up: then this is a stop like any other.
	}
	if restartDue(&sb.record().Sandbox) {
		return e.stopDue(ctx, sb)
	}
	sb.interrupt()
	unlock, err := sb.lock(ctx, shard.VerbStop)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := e.stop(context.WithoutCancel(ctx), sb); err != nil {
		return nil, err
	}
	s := sb.record().Sandbox
	return &s, nil
}

// stop ends the machine of a sandbox and stores it as stopped. The caller holds the verb lock.
func (e *Engine) stop(ctx context.Context, sb *sandbox) error {
	sb.learn(func(r *record) { r.Intent = "stop" }) // a full disk must not keep anybody from a stop or a remove
	e.quiet(ctx, sb)
	e.endLive(sb, "the sandbox was stopped")
	ctx, cancel := context.WithTimeout(ctx, teardownTime)
	defer cancel()
	if err := e.finish(ctx, sb); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q did not stop", sb.ref())
	}
	return nil
}

// stopped changes a record to that of a sandbox that a client stopped.
func stopped(r *record) {
	r.Sandbox.State, r.Sandbox.StoppedReason, r.Handle, r.Intent, r.StoppedByUser = shard.StateStopped, "", nil, "", true
	r.processesDown()
}

// quiet asks the agent to end every process, and then ends the machine, with or without the agent's answer.
func (e *Engine) quiet(ctx context.Context, sb *sandbox) {
	sb.mu.Lock()
	l := sb.live
	var session *guest.Session
	if l != nil {
		l.expected.Store(true)
		session = l.session
	}
	sb.mu.Unlock()
	if l == nil {
		return
	}
	if session != nil {
		ctx, cancel := context.WithTimeout(ctx, stopGrace+stopMargin)
		err := session.Call(ctx, guest.OpStop, guest.StopArgs{GraceMillis: stopGrace.Milliseconds()}, nil)
		cancel()
		if err != nil {
			e.Log.Warn("the agent did not stop the sandbox's processes", "sandbox", sb.id, "err", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, stopMargin)
	defer cancel()
	if err := l.inst.Kill(ctx); err != nil {
		e.Log.Warn("end the machine", "sandbox", sb.id, "err", err)
	}
}

// Remove deletes a sandbox and its files. With force a live one is ended first, without the grace of a stop.
func (e *Engine) Remove(ctx context.Context, ref string, force bool) error {
	if force {
		if damaged, err := e.eraseDamaged(ctx, ref); damaged {
			return err
		}
	}
	sb, err := e.find(ref)
	if err != nil {
		return err
	}
	if j := sb.pending(); j != nil {
		j.stop("cancelled by its removal")
	}
	verb := shard.VerbRemove
	if force {
		verb = shard.VerbForce
		sb.interrupt()
	}
	unlock, err := sb.lock(ctx, verb)
	if err != nil {
		return err
	}
	defer unlock()
	ctx = context.WithoutCancel(ctx)
	sb.learn(func(r *record) { r.Intent = "remove" })
	return e.remove(ctx, sb)
}

// remove does the work of Remove. The caller holds the verb lock and has stored the intent.
func (e *Engine) remove(ctx context.Context, sb *sandbox) error {
	ctx, cancel := context.WithTimeout(ctx, teardownTime)
	defer cancel()
	sb.mu.Lock()
	l := sb.live
	sb.mu.Unlock()
	if l != nil {
		l.expected.Store(true)
		if err := l.inst.Kill(ctx); err != nil {
			e.Log.Warn("end the machine", "sandbox", sb.id, "err", err)
		}
	}
	e.endLive(sb, "the sandbox was removed")
	if err := e.teardown(ctx, sb); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "sandbox %q could not be removed whole: try again", sb.ref())
	}
	if err := e.deleteFiles(sb); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "the files of sandbox %q could not be removed: try again", sb.ref())
	}
	e.drop(sb)
	sb.closeProcesses()
	e.Enforcer.Forget(sb.id)
	return nil
}

package engine

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// process is what the daemon holds of one named process beside its record.
type process struct {
	log     *stream.Log
	claimed bool // a run of the name is under way; guarded by sandbox.mu
	leaving bool // the name is forgotten, its log being removed; guarded by sandbox.mu
}

// Run starts a named process in a running sandbox, in the place of one of its name that has ended.
func (e *Engine) Run(ctx context.Context, ref string, req shard.RunRequest) (*shard.Process, error) {
	p, err := planProcess(req)
	if err != nil {
		return nil, err
	}
	sb, err := e.find(ref)
	if err != nil {
		return nil, err
	}
	session, err := sb.session(ctx)
	if err != nil {
		return nil, err
	}
	release, err := sb.claimProcess(p.Name)
	if err != nil {
		return nil, err
	}
	defer release()
	if err := sb.followStates(session); err != nil {
		return nil, sb.explain(err)
	}
	launch, cancel := context.WithTimeout(ctx, execTime)
	defer cancel()
	r, err := sb.launch(launch, session, p, false)
	if err != nil {
		if launch.Err() != nil && ctx.Err() == nil {
			err = shard.Wrap(shard.CodeTimeout, err, "the process did not start within %d s", execTime/time.Second)
		}
		return nil, err
	}
	if err := sb.enterProcess(p.Name, r, session); err != nil {
		return nil, err
	}
	return sb.getProcess(p.Name)
}

// planProcess checks a request and fills in its defaults.
func planProcess(req shard.RunRequest) (*shard.Process, error) {
	if err := shard.CheckCommand(req.Command); err != nil {
		return nil, err
	}
	p := &shard.Process{Name: path.Base(req.Command[0]), Command: req.Command, Env: req.Env, Workdir: req.Workdir, User: req.User,
		Restart: shard.RestartSpec{Policy: shard.RestartUnlessStopped}}
	if req.Name != nil {
		p.Name = *req.Name
	}
	if err := shard.CheckProcessName(p.Name); err != nil {
		if req.Name == nil {
			return nil, shard.Invalidf("the program's name %s cannot be a process name: give one", shard.Quote(p.Name))
		}
		return nil, err
	}
	if req.Restart != nil {
		p.Restart = *req.Restart
	}
	if err := shard.CheckRestart(p.Restart); err != nil {
		return nil, err
	}
	if err := shard.CheckEnv(req.Env); err != nil {
		return nil, err
	}
	return p, checkWorkdir(req.Workdir)
}

// claimProcess reserves a name for a run that is about to be.
func (sb *sandbox) claimProcess(name string) (release func(), err error) {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	live := 0
	names := make(map[string]bool)
	for _, p := range sb.record().Sandbox.Processes {
		if names[p.Name] = p.Status.Live(); names[p.Name] {
			live++
		}
	}
	for other, p := range sb.processes {
		if p.claimed && !names[other] {
			names[other] = true
			live++
		}
	}
	p := sb.processes[name]
	switch {
	case names[name] || p != nil && p.leaving:
		return nil, shard.Errorf(shard.CodeNameTaken, "a process named %q runs in sandbox %q: kill it first, or choose another name", name, sb.ref())
	case live >= shard.MaxProcesses:
		return nil, shard.Errorf(shard.CodeProcessLimit, "%d processes run in sandbox %q, which is the most: kill one first", live, sb.ref())
	}
	p = sb.process(name)
	p.claimed = true
	return func() {
		sb.mu.Lock()
		p.claimed = false
		sb.mu.Unlock()
		if find(sb.record(), name) == nil { // it came to nothing
			sb.forget(name)
		}
	}, nil
}

// process is what is held of a name. The caller holds mu.
func (sb *sandbox) process(name string) *process {
	p := sb.processes[name]
	if p == nil {
		p = &process{log: stream.NewLog(sb.logDir(name), sb.record().Runs[name].Base)}
		sb.processes[name] = p
	}
	return p
}

func (sb *sandbox) logDir(name string) string { return filepath.Join(sb.dir, "logs", name) }

// forget lets go of a name that is no more, and removes its log.
func (sb *sandbox) forget(name string) {
	sb.mu.Lock()
	p := sb.processes[name]
	if p == nil || p.claimed || p.leaving {
		sb.mu.Unlock()
		return
	}
	p.leaving = true
	sb.mu.Unlock()
	p.log.Close()
	_ = os.RemoveAll(sb.logDir(name))
	sb.mu.Lock()
	if sb.processes[name] == p {
		delete(sb.processes, name)
	}
	sb.mu.Unlock()
}

// launch asks the agent for a process, and stores that meanwhile. With keep a program that cannot be started is tried again as
// the policy says. The run that it returns must be entered.
func (sb *sandbox) launch(ctx context.Context, session *guest.Session, p *shard.Process, keep bool) (processRun, error) {
	rec := sb.record()
	id := make([]byte, 8)
	_, _ = rand.Read(id)
	r := processRun{ID: hex.EncodeToString(id)}
	sb.put.Lock()
	sb.early[r.ID] = nil
	sb.put.Unlock()
	sb.mu.Lock()
	log := sb.process(p.Name).log
	sb.mu.Unlock()
	heard(log, rec.Runs[p.Name].End)
	w, base, err := log.Begin()
	if err == nil {
		r.Base = base
		stored := make(chan error, 1)
		go func() { stored <- sb.storeLaunch(p, r) }()
		var cmd *guest.Command
		cmd, err = session.Run(ctx, guest.ProcessSpec{ID: r.ID, Name: p.Name, Argv: p.Command, Env: shard.MergeEnv(rec.environment(), p.Env...),
			Workdir: guest.Path(cmp.Or(p.Workdir, rec.Workdir)), User: cmp.Or(p.User, rec.User), Restart: p.Restart, Keep: keep}, &logSink{sb: sb, w: w})
		failed := <-stored
		switch {
		case err != nil:
			err = sb.explain(err)
		case failed != nil:
			err = failed
		default:
			w.OnAck(cmd.Ack)
			return r, nil
		}
		w.Cancel()
	}
	sb.cancelLaunch(p.Name, r.ID)
	switch shard.CodeOf(err) {
	case shard.CodeCommandNotStarted, shard.CodeInvalidRequest, shard.CodeNameTaken, shard.CodeSandboxNotRunning, shard.CodeExecLimit:
	default:
		sb.dropRun(r.ID) // it may be running
	}
	return r, err
}

// storeLaunch stores that the agent is asked for a process.
func (sb *sandbox) storeLaunch(p *shard.Process, r processRun) error {
	now := time.Now().UTC().Truncate(time.Microsecond)
	l := launch{Process: *p, Run: r}
	l.Process.Killed, l.Process.Status = false, shard.ProcessStatus{State: shard.ProcessRunning, StartedAt: &now}
	return sb.update(func(rec *record) {
		rec.own()
		if rec.Launches == nil {
			rec.Launches = make(map[string]launch)
		}
		rec.Launches[p.Name] = l
	})
}

// cancelLaunch stores that a launch came to nothing, before anybody is told.
func (sb *sandbox) cancelLaunch(name, id string) {
	sb.learnIf(func(rec *record) bool {
		delete(sb.early, id)
		if rec.Launches[name].Run.ID != id {
			return false
		}
		rec.own()
		delete(rec.Launches, name)
		return true
	})
}

// dropRun makes the agent end and forget a run that no record names. It does not wait.
func (sb *sandbox) dropRun(id string) {
	sb.e.wg.Go(func() {
		ctx, cancel := context.WithTimeout(sb.e.ctx, execTime)
		defer cancel()
		session, err := sb.session(ctx)
		if err == nil {
			err = session.Call(ctx, guest.OpDrop, guest.ForgetArgs{ID: id}, nil)
		}
		if err != nil && shard.CodeOf(err) != shard.CodeSandboxNotRunning && ctx.Err() == nil {
			sb.e.Log.Warn("drop a process", "sandbox", sb.id, "err", err) // the next session does it
		}
	})
}

// enterProcess shows a process that was launched in session, as it stands by now. Its launch is on disk, which says as much to
// the next daemon, so nobody waits until the record is, too. When it fails, the run is dropped.
func (sb *sandbox) enterProcess(name string, r processRun, session *guest.Session) error {
	evicted, evictedID, told, entered := sb.showProcess(name, r)
	if !entered {
		sb.cancelLaunch(name, r.ID)
		sb.dropRun(r.ID)
		return shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just ending", sb.ref())
	}
	store := func() { sb.learn(func(*record) {}) }
	if evicted == "" && told {
		sb.e.wg.Go(store) // else with what the agent is about to tell
	}
	if evicted != "" {
		store() // before its log goes
		if evictedID != "" {
			sb.dropRun(evictedID)
		}
		sb.forget(evicted)
	}
	sb.mu.Lock()
	now := sb.attended
	sb.mu.Unlock()
	if now != nil && now != session { // a new session came between, and may not have known of this run
		if err := sb.resumeLog(now, name, r); err != nil {
			sb.e.Log.Warn("take up the output of a process", "sandbox", sb.id, "process", name, "err", err)
		}
	}
	return nil
}

// showProcess makes a launch a process. It says which one gave way where there were as many as there may be, whether the agent
// has told how it stands, and false when the sandbox is ending.
func (sb *sandbox) showProcess(name string, r processRun) (evicted, evictedID string, told, entered bool) {
	sb.put.Lock()
	defer sb.put.Unlock()
	rec := *sb.record()
	if rec.Sandbox.State != shard.StateRunning || rec.Intent != "" || rec.Launches[name].Run.ID != r.ID {
		return "", "", false, false
	}
	rec.own()
	if list := rec.Sandbox.Processes; len(list) >= shard.MaxProcesses && find(&rec, name) == nil {
		if i := slices.IndexFunc(list, func(p shard.Process) bool { return !p.Status.Live() }); i >= 0 {
			evicted, evictedID = list[i].Name, rec.Runs[list[i].Name].ID
			delete(rec.Runs, evicted)
			rec.Sandbox.Processes = slices.Delete(list, i, i+1)
		}
	}
	rec.launched(name)
	if state := sb.early[r.ID]; state != nil {
		told = rec.take(name, *state)
	}
	delete(sb.early, r.ID)
	sb.rec.Store(&rec)
	sb.wake()
	return evicted, evictedID, told, true
}

// startProcesses starts what is to run again in a sandbox that has come up.
func (e *Engine) startProcesses(sb *sandbox, session *guest.Session) {
	ctx, cancel := context.WithTimeout(e.ctx, startTime)
	defer cancel()
	for _, p := range sb.record().Sandbox.Processes {
		if p.Status.State != shard.ProcessStopped || !returns(&p) {
			continue
		}
		release, err := sb.claimProcess(p.Name)
		if err != nil {
			continue // a client was quicker
		}
		err = sb.followStates(session)
		var r processRun
		if err == nil {
			r, err = sb.launch(ctx, session, &p, true)
		}
		if err == nil {
			err = sb.enterProcess(p.Name, r, session)
		}
		release()
		if err != nil {
			e.Log.Warn("start a process with its sandbox", "sandbox", sb.id, "process", p.Name, "err", err)
		}
	}
}

// restProcesses lets go of the logs of a sandbox that is down, until somebody reads them.
func (sb *sandbox) restProcesses() {
	sb.mu.Lock()
	all := slices.Collect(maps.Values(sb.processes))
	sb.attended = nil
	sb.mu.Unlock()
	for _, p := range all {
		p.log.Rest()
	}
}

// closeProcesses ends who reads a log of a sandbox that is gone, or that the daemon lets go of.
func (sb *sandbox) closeProcesses() {
	sb.mu.Lock()
	all := slices.Collect(maps.Values(sb.processes))
	sb.mu.Unlock()
	for _, p := range all {
		p.log.Close()
	}
	sb.wake()
}

// wake wakes who waits for a change of the record.
func (sb *sandbox) wake() {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	close(sb.changed)
	sb.changed = make(chan struct{})
}

// changes is closed when the record has changed, or is gone.
func (sb *sandbox) changes() <-chan struct{} {
	sb.mu.Lock()
	defer sb.mu.Unlock()
	return sb.changed
}

// revive starts, when a daemon has come up, every sandbox that is down and holds a process which is to run all the same:
// an always one, or an unless-stopped one that nobody killed in a sandbox that nobody stopped.
func (e *Engine) revive() {
	wanted := func(sb *sandbox) bool {
		rec := sb.record()
		if rec.Sandbox.State != shard.StateStopped || restartDue(&rec.Sandbox) {
			return false
		}
		return slices.ContainsFunc(rec.Sandbox.Processes, func(p shard.Process) bool {
			return returns(&p) && (p.Restart.Policy == shard.RestartAlways || !rec.StoppedByUser)
		})
	}
	slots := make(chan struct{}, 2)
	for _, sb := range e.all() {
		if !wanted(sb) {
			continue
		}
		slots <- struct{}{}
		e.wg.Go(func() {
			defer func() { <-slots }()
			if e.ctx.Err() != nil {
				return
			}
			if _, err := e.start(e.ctx, sb.id, func(*shard.Sandbox) bool { return wanted(sb) }); err != nil {
				e.Log.Warn("start a sandbox for its processes", "sandbox", sb.id, "err", err)
			}
		})
	}
}

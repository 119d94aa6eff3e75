package engine

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"sync"
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

// processRun is what the host knows of a process beside its public record. The agent knows the process by ID, a new one
// for each run of the name and each start of the sandbox. Base is where its output begins in the log; Start and End are
// those of the agent's state Seq, counted from there.
type processRun struct {
	ID    string `json:"id"`
	Seq   uint64 `json:"seq"`
	Base  int64  `json:"base"`
	Start int64  `json:"start"`
	End   int64  `json:"end"`
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
		return nil, err
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
	if err := sb.enterProcess(p, r, session); err != nil {
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

// find is a process's public record; nil when there is none.
func find(r *record, name string) *shard.Process {
	for i := range r.Sandbox.Processes {
		if r.Sandbox.Processes[i].Name == name {
			return &r.Sandbox.Processes[i]
		}
	}
	return nil
}

// own makes what a record says of processes r's own, so that it can be changed.
func (r *record) own() {
	r.Sandbox.Processes, r.Runs = slices.Clone(r.Sandbox.Processes), maps.Clone(r.Runs)
	if r.Runs == nil {
		r.Runs = make(map[string]processRun)
	}
}

// launch asks the agent for a process. With keep a program that cannot be started is tried again as the policy says. The
// run that it returns must be entered, or dropped.
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
		var cmd *guest.Command
		cmd, err = session.Run(ctx, guest.ProcessSpec{ID: r.ID, Name: p.Name, Argv: p.Command, Env: shard.MergeEnv(rec.Env, p.Env...),
			Workdir: guest.Path(or(p.Workdir, rec.Workdir)), User: or(p.User, rec.User), Restart: p.Restart, Keep: keep}, &logSink{sb: sb, w: w})
		if err == nil {
			w.OnAck(cmd.Ack)
			return r, nil
		}
		w.Cancel()
	}
	switch shard.CodeOf(err) {
	case shard.CodeCommandNotStarted, shard.CodeInvalidRequest, shard.CodeNameTaken, shard.CodeSandboxNotRunning, shard.CodeExecLimit:
		sb.expectNot(r.ID)
	default:
		sb.dropRun(r.ID) // it may be running
	}
	return r, err
}

// heard waits until the log has all that an ended process wrote. That is nearly always so.
func heard(log *stream.Log, end int64) {
	for deadline := time.Now().Add(lastOutput); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if got, _ := log.Got(); got >= end {
			return
		}
	}
}

// lastOutput is how long an end waits for the output before it. Only a client that is attached and slow makes it long.
const lastOutput = 2 * time.Second

// hear waits for the last output of the processes that are over, so that whoever learns of an end finds the log whole.
func (sb *sandbox) hear(states []guest.ProcessState) {
	for _, s := range states {
		name := sb.record().runName(s.ID)
		if s.State == shard.ProcessRunning || s.State == shard.ProcessRestarting || name == "" {
			continue
		}
		sb.mu.Lock()
		log := sb.process(name).log
		sb.mu.Unlock()
		heard(log, s.End)
	}
}

// lastWords waits until what a machine that died has sent was taken.
func (sb *sandbox) lastWords(l *live) {
	sb.mu.Lock()
	session := l.session
	sb.mu.Unlock()
	if session == nil {
		return
	}
	select {
	case <-session.Done():
	case <-time.After(dying):
	}
}

// expectNot says that a run came to nothing.
func (sb *sandbox) expectNot(id string) {
	sb.put.Lock()
	defer sb.put.Unlock()
	delete(sb.early, id)
}

// dropRun makes the agent end and forget a run that no record names. It does not wait.
func (sb *sandbox) dropRun(id string) {
	sb.expectNot(id)
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

// enterProcess stores a process that was launched in session, as it stands by now. When it fails, the run is dropped.
func (sb *sandbox) enterProcess(p *shard.Process, r processRun, session *guest.Session) error {
	var evicted, evictedID string
	entered := false
	err := sb.change(func(rec *record) bool {
		state := sb.early[r.ID]
		delete(sb.early, r.ID)
		if entered = rec.Sandbox.State == shard.StateRunning && rec.Intent == ""; !entered {
			return false
		}
		rec.own()
		now := time.Now().UTC().Truncate(time.Microsecond)
		next := *p
		next.Killed, next.Status = false, shard.ProcessStatus{State: shard.ProcessRunning, StartedAt: &now}
		list := rec.Sandbox.Processes
		if old := find(rec, p.Name); old != nil {
			*old = next
		} else {
			if len(list) >= shard.MaxProcesses {
				if i := slices.IndexFunc(list, func(p shard.Process) bool { return !p.Status.Live() }); i >= 0 {
					evicted, evictedID = list[i].Name, rec.Runs[list[i].Name].ID
					delete(rec.Runs, evicted)
					list = slices.Delete(list, i, i+1)
				}
			}
			rec.Sandbox.Processes = append(list, next)
		}
		rec.Runs[p.Name] = r
		if state != nil {
			rec.take(p.Name, *state)
		}
		return true
	})
	if err == nil && !entered {
		err = shard.Errorf(shard.CodeSandboxNotRunning, "sandbox %q is just ending", sb.ref())
	}
	if err != nil {
		sb.dropRun(r.ID)
		return err
	}
	if evicted != "" {
		if evictedID != "" {
			sb.dropRun(evictedID)
		}
		sb.forget(evicted)
	}
	sb.mu.Lock()
	now := sb.attended
	sb.mu.Unlock()
	if now != nil && now != session { // a new session came between, and may not have known of this run
		if err := sb.resumeLog(now, p.Name, r); err != nil {
			sb.e.Log.Warn("take up the output of a process", "sandbox", sb.id, "process", p.Name, "err", err)
		}
	}
	return nil
}

// take changes a record to what the agent says of a process; false when that is old news. The record owns its processes.
func (r *record) take(name string, s guest.ProcessState) bool {
	run, p := r.Runs[name], find(r, name)
	if s.Seq <= run.Seq || p == nil {
		return false
	}
	run.Seq, run.Start, run.End = s.Seq, s.Start, s.End
	r.Runs[name] = run
	p.Killed, p.Status = s.Killed, shard.ProcessStatus{State: s.State, Restarts: s.Restarts, StartedAt: &s.StartedAt}
	if s.Exit != nil {
		p.Status.Exit = &shard.ExitStatus{Code: s.Exit.Code, Signal: s.Exit.Signal}
	}
	return true
}

// tell stores what the agent says of processes. What ends while the sandbox goes down is not told: it is stopped.
func (sb *sandbox) tell(states []guest.ProcessState) error {
	return sb.change(func(rec *record) bool {
		changed := false
		for _, s := range states {
			name := rec.runName(s.ID)
			switch _, expected := sb.early[s.ID]; {
			case expected:
				sb.early[s.ID] = &s
			case name != "" && rec.Sandbox.State == shard.StateRunning && rec.Intent == "":
				if !changed {
					rec.own()
				}
				changed = rec.take(name, s) || changed
			}
		}
		return changed
	})
}

// runName is the name of the process that the agent knows by id, "" when there is none.
func (r *record) runName(id string) string {
	for name, run := range r.Runs {
		if run.ID == id {
			return name
		}
	}
	return ""
}

// processesDown changes a record to that of a sandbox that went down.
func (r *record) processesDown() {
	r.own()
	for name, run := range r.Runs {
		r.Runs[name] = processRun{Base: run.Base, Start: run.Start}
	}
	for i := range r.Sandbox.Processes {
		if s := &r.Sandbox.Processes[i].Status; s.Live() {
			s.State = shard.ProcessStopped
		}
	}
}

// processesDue changes a record to that of a sandbox that comes up: what runs again with it is stopped until it does, so
// that a daemon that dies in between finds it.
func (r *record) processesDue() {
	r.processesDown()
	for i := range r.Sandbox.Processes {
		if p := &r.Sandbox.Processes[i]; returns(p) {
			p.Killed, p.Status = false, shard.ProcessStatus{State: shard.ProcessStopped}
		}
	}
}

// returns says whether a process runs again when its sandbox starts.
func returns(p *shard.Process) bool {
	return p.Restart.Policy == shard.RestartAlways || p.Restart.Policy == shard.RestartUnlessStopped && !p.Killed
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
			err = sb.enterProcess(&p, r, session)
		}
		release()
		if err != nil {
			e.Log.Warn("start a process with its sandbox", "sandbox", sb.id, "process", p.Name, "err", err)
		}
	}
}

// followStates reads what the agent says of processes, for as long as the session lasts, unless it is read already.
func (sb *sandbox) followStates(session *guest.Session) error {
	sb.mu.Lock()
	attended := sb.attended == session
	sb.mu.Unlock()
	if attended {
		return nil
	}
	_, err := sb.openStates(session)
	return err
}

// openStates is followStates, and returns the ids of the processes that the agent held when it began.
func (sb *sandbox) openStates(session *guest.Session) (held []string, err error) {
	sb.mu.Lock()
	sb.attended = session
	sb.mu.Unlock()
	ctx, cancel := context.WithCancel(sb.e.ctx)
	late := time.AfterFunc(execTime, cancel)
	states, err := guest.WatchStates(ctx, session)
	late.Stop()
	if err != nil {
		cancel()
		sb.mu.Lock()
		if sb.attended == session {
			sb.attended = nil
		}
		sb.mu.Unlock()
		return nil, err
	}
	sb.e.wg.Go(func() {
		defer cancel()
		defer states.Close()
		for {
			news, err := states.Next()
			if err == nil {
				sb.hear(news)
				if err = sb.tell(news); err != nil {
					sb.e.Log.Error("store how processes stand", "sandbox", sb.id, "err", err)
				}
				continue
			}
			if session.Err() == nil && ctx.Err() == nil {
				sb.e.Log.Warn("the agent no longer says how processes stand", "sandbox", sb.id, "err", err)
			}
			return
		}
	})
	return states.Held, nil
}

// resumeProcesses takes up the processes of a sandbox in a new session, before anybody else can use that: their output goes
// on behind what the log has, what changed is heard, and what no record names is ended.
func (e *Engine) resumeProcesses(sb *sandbox, session *guest.Session) {
	held, err := sb.openStates(session)
	if err != nil {
		e.Log.Warn("take up the processes of a sandbox", "sandbox", sb.id, "err", err)
		return
	}
	rec := sb.record()
	for name, run := range rec.Runs {
		switch {
		case run.ID == "":
		case slices.Contains(held, run.ID):
			if err := sb.resumeLog(session, name, run); err != nil {
				e.Log.Warn("take up the output of a process", "sandbox", sb.id, "process", name, "err", err)
			}
		default:
			if err := sb.lost(name, run.ID); err != nil {
				e.Log.Error("store that a process was lost", "sandbox", sb.id, "process", name, "err", err)
			}
		}
	}
	sb.put.Lock()
	rec = sb.record()
	var strange []string
	for _, id := range held {
		if _, expected := sb.early[id]; !expected && rec.runName(id) == "" {
			strange = append(strange, id)
		}
	}
	sb.put.Unlock()
	for _, id := range strange {
		sb.dropRun(id)
	}
	e.startProcesses(sb, session)
}

// resumeLog goes on with a process's output.
func (sb *sandbox) resumeLog(session *guest.Session, name string, run processRun) error {
	sb.mu.Lock()
	log := sb.process(name).log
	sb.mu.Unlock()
	w, got, err := log.Resume()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(sb.e.ctx, execTime)
	defer cancel()
	cmd, err := session.Follow(ctx, run.ID, got, &logSink{sb: sb, w: w})
	if err != nil {
		return err
	}
	w.Skip(cmd.Head.Offset - got)
	w.OnAck(cmd.Ack)
	return nil
}

// lost stores that the agent does not hold a process that it should.
func (sb *sandbox) lost(name, id string) error {
	return sb.change(func(r *record) bool {
		p := find(r, name)
		if p == nil || r.Runs[name].ID != id {
			return false
		}
		r.own()
		run := r.Runs[name]
		r.Runs[name] = processRun{Base: run.Base, Start: run.Start}
		if p = find(r, name); p.Status.Live() {
			p.Status.State = shard.ProcessStopped
		}
		return true
	})
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

// logSink takes a process's output from the session. Its methods do not wait.
type logSink struct {
	sb   *sandbox
	w    *stream.LogWriter
	once sync.Once
}

// Output adds to the log. What cannot be written is lost, and the program goes on.
func (s *logSink) Output(_ byte, p []byte) {
	if err := s.w.Append(p); err != nil {
		s.once.Do(func() { s.sb.e.Log.Error("a log of a process is not complete", "sandbox", s.sb.id, "err", err) })
	}
}

// Exited and Broken say nothing that the stream of states does not.
func (s *logSink) Exited(guest.Exit) {}

func (s *logSink) Broken(error) {}

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
	e.mu.Lock()
	all := slices.Collect(maps.Values(e.sandboxes))
	e.mu.Unlock()
	slots := make(chan struct{}, 2)
	for _, sb := range all {
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

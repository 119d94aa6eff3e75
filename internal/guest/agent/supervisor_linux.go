package agent

import (
	"encoding/json"
	"errors"
	"slices"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// maxProcesses are held at once, ended ones included. The host keeps to fewer.
const maxProcesses = 4 * shard.MaxProcesses

// supervisor holds the named processes. Each has a goroutine for its life; none needs the host.
type supervisor struct {
	mu      sync.Mutex // comes behind a process's begins and agent.mu, never held over I/O
	all     []*process // in the order of their runs
	seq     uint64
	changed chan struct{} // closed and replaced when a state changes
}

// process is a named program over all its runs.
type process struct {
	a    *agent
	spec guest.ProcessSpec
	out  *output
	ends chan struct{} // closed when no other run may begin

	begins sync.Mutex // held while a run is started, so that what ends the process finds it

	// guarded by supervisor.mu
	state guest.ProcessState
	run   *command    // nil between runs
	kill  *time.Timer // sends KILL when TERM did not do
	seen  bool        // it began: the host may know of it
}

// run starts a process and sends its output.
func (a *agent) run(r *request) (guest.Done, error) {
	p := &process{a: a, out: newOutput(), ends: make(chan struct{})}
	p.out.lasting = true
	if err := r.Args(&p.spec); err != nil {
		return guest.Done{}, err
	}
	if s := &p.spec; s.ID == "" || len(s.ID) > 128 || s.Name == "" || len(s.Argv) == 0 || s.Argv[0] == "" {
		return guest.Done{}, shard.Invalidf("a process needs an id of at most 128 bytes, a name and a program")
	}
	if err := shard.CheckRestart(p.spec.Restart); err != nil {
		return guest.Done{}, err
	}
	p.state = guest.ProcessState{ID: p.spec.ID, State: shard.ProcessRunning, StartedAt: now()}
	old, err := a.sup.enter(p)
	if err != nil {
		return guest.Done{}, err
	}
	ended, err := p.begin(r)
	if code := shard.CodeOf(err); p.spec.Keep && (code == shard.CodeCommandNotStarted || code == shard.CodeInvalidRequest) {
		ended, err = endedWith(err), nil
	}
	if err != nil {
		a.sup.leave(p, old)
		return guest.Done{}, err
	}
	if old != nil {
		old.out.close()
	}
	go p.supervise(ended, func() (<-chan guest.Exit, error) { return p.begin(nil) })
	return p.serve(r, 0)
}

// follow attaches the stream to a process that an earlier session ran.
func (a *agent) follow(r *request) (guest.Done, error) {
	var args guest.ResumeArgs
	if err := r.Args(&args); err != nil {
		return guest.Done{}, err
	}
	a.settle()
	p, err := a.sup.find(args.ID)
	if err != nil {
		return guest.Done{}, err
	}
	return p.serve(r, args.Offset)
}

// settle waits for everything that is being started.
func (a *agent) settle() {
	a.starting.Lock()
	a.starting.Unlock() // to have held it is the purpose
}

// serve sends the output behind offset, or what is held when that is less.
func (p *process) serve(r *request, offset int64) (guest.Done, error) {
	p.out.mu.Lock()
	offset = min(max(offset, p.out.base), p.out.end)
	p.out.mu.Unlock()
	if !p.out.attach(r, offset, 0) {
		return guest.Done{}, errGone // another stream of this process was quicker
	}
	if err := r.Head(guest.ExecHead{Offset: offset}); err != nil {
		return guest.Done{}, err
	}
	return p.out.send(r)
}

// states sends how every process stands, and then what changes.
func (a *agent) states(r *request) error {
	a.settle()
	if err := r.Head(guest.StatesHead{Held: a.sup.held()}); err != nil {
		return err
	}
	last := uint64(0)
	for {
		lines, seq, changed := a.sup.since(last)
		if len(lines) > 0 {
			if _, err := r.Write(lines); err != nil {
				return err
			}
		}
		last = seq
		select {
		case <-changed:
		case <-r.Gone():
			return errGone
		}
	}
}

// kill ends a process for good. One that has ended stays as it is.
func (a *agent) kill(r *request) error {
	var args guest.KillArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	p, err := a.sup.find(args.ID)
	if err != nil {
		return err
	}
	grace := min(max(time.Duration(args.GraceMillis)*time.Millisecond, 0), time.Hour)
	p.begins.Lock()
	defer p.begins.Unlock()
	a.sup.mu.Lock()
	live := p.state.State == shard.ProcessRunning || p.state.State == shard.ProcessRestarting
	if live && !p.state.Killed {
		p.state.Killed = true
		close(p.ends)
		a.sup.touch(p)
	}
	run := p.run
	if live && run != nil && grace > 0 && p.kill == nil {
		p.kill = time.AfterFunc(grace, func() { a.reaper.signal(run, unix.SIGKILL) })
	}
	a.sup.mu.Unlock()
	if live && run != nil {
		sig := unix.SIGTERM
		if grace == 0 {
			sig = unix.SIGKILL
		}
		a.reaper.signal(run, sig)
	}
	return nil
}

// drop forgets a process. It is idempotent, as forget is.
func (a *agent) drop(r *request) error {
	var args guest.ForgetArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	a.settle()
	p, err := a.sup.find(args.ID)
	if err != nil {
		return nil
	}
	p.begins.Lock()
	defer p.begins.Unlock()
	a.sup.mu.Lock()
	if !p.state.Killed {
		p.state.Killed = true
		close(p.ends)
	}
	run := p.run
	a.sup.mu.Unlock()
	if run != nil {
		a.reaper.signal(run, unix.SIGKILL)
	}
	a.sup.leave(p, nil)
	p.out.close()
	return nil
}

// begin starts a run. r, when not nil, is the request that asks for it: without its session nothing starts.
func (p *process) begin(r *request) (<-chan guest.Exit, error) {
	a := p.a
	a.starting.RLock()
	defer a.starting.RUnlock()
	if r != nil {
		select {
		case <-r.gone:
			return nil, errGone
		default:
		}
	}
	p.begins.Lock()
	defer p.begins.Unlock()
	a.mu.Lock()
	stopping := a.stopping
	a.mu.Unlock()
	if stopping {
		return nil, shard.Errorf(shard.CodeSandboxNotRunning, "the sandbox is stopping")
	}
	select {
	case <-p.ends:
		return nil, errGone
	default:
	}
	start := p.out.drain() // nothing is left to drain: only the offset is wanted
	user, err := lookupUser(p.spec.User)
	c := &command{id: p.spec.ID, out: p.out, over: make(chan guest.Exit, 1)}
	if err == nil {
		err = a.start(c, nil, &guest.ExecSpec{ID: p.spec.ID, Argv: p.spec.Argv, Env: slices.Clip(p.spec.Env), Workdir: p.spec.Workdir}, user)
	}
	a.sup.mu.Lock()
	defer a.sup.mu.Unlock()
	if r == nil { // a restart, whether or not the program could be started
		p.state.Restarts++
	}
	p.state.State, p.state.StartedAt, p.state.Start, p.state.End = shard.ProcessRunning, now(), start, 0
	if err == nil {
		p.run = c
	}
	p.seen = true
	a.sup.touch(p)
	return c.over, err
}

func now() time.Time { return time.Now().UTC().Truncate(time.Microsecond) }

// endedWith is the end of a run that could not begin.
func endedWith(err error) <-chan guest.Exit {
	exit := guest.Exit{Code: 126}
	if e, ok := errors.AsType[*shard.Error](err); ok && e.ExitCode > 0 {
		exit.Code = e.ExitCode
	}
	ended := make(chan guest.Exit, 1)
	ended <- exit
	return ended
}

// supervise is the life of a process from its first run on: ended tells the end of that, begin starts another.
func (p *process) supervise(ended <-chan guest.Exit, begin func() (<-chan guest.Exit, error)) {
	policy := restarts{spec: p.spec.Restart}
	for {
		began := time.Now()
		exit := <-ended
		at := time.Now()
		state, wait := policy.after(exit, at.Sub(began))
		end := p.out.drain()
		if !p.ended(exit, end, state) {
			return
		}
		timer := time.NewTimer(time.Until(at.Add(wait)))
		select {
		case <-timer.C:
		case <-p.ends:
			timer.Stop()
			p.over(shard.ProcessKilled)
			return
		}
		next, err := begin()
		switch {
		case err == errGone: // killed meanwhile
			p.over(shard.ProcessKilled)
			return
		case shard.CodeOf(err) == shard.CodeSandboxNotRunning:
			return
		case err != nil:
			next = endedWith(err)
		}
		ended = next
	}
}

// ended notes the end of a run, and says whether another follows. When the sandbox stops nothing is noted: that it went
// down is for the host to say.
func (p *process) ended(exit guest.Exit, end int64, state string) bool {
	a := p.a
	a.mu.Lock()
	stopping := a.stopping
	a.mu.Unlock()
	a.sup.mu.Lock()
	defer a.sup.mu.Unlock()
	if p.kill != nil {
		p.kill.Stop()
	}
	p.run = nil
	if stopping {
		return false
	}
	if p.state.Killed {
		state = shard.ProcessKilled
	}
	p.state.State, p.state.Exit, p.state.End = state, &exit, end
	a.sup.touch(p)
	return state == shard.ProcessRestarting
}

func (p *process) over(state string) {
	p.a.sup.mu.Lock()
	defer p.a.sup.mu.Unlock()
	p.state.State = state
	p.a.sup.touch(p)
}

// enter takes a process in, in the place of one of its name that has ended, which is returned.
func (s *supervisor) enter(p *process) (old *process, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, o := range s.all {
		switch {
		case o.spec.ID == p.spec.ID:
			return nil, shard.Invalidf("the process id %s is taken", shard.Quote(p.spec.ID))
		case o.spec.Name != p.spec.Name:
			continue
		case o.state.State == shard.ProcessRunning, o.state.State == shard.ProcessRestarting:
			return nil, shard.Errorf(shard.CodeNameTaken, "a process named %s runs", p.spec.Name)
		}
		s.all[i] = p
		return o, nil
	}
	if len(s.all) >= maxProcesses {
		return nil, shard.Errorf(shard.CodeExecLimit, "shard-init holds %d processes", maxProcesses)
	}
	s.all = append(s.all, p)
	return nil, nil
}

// leave forgets p, and puts old, when not nil, back in its place.
func (s *supervisor) leave(p, old *process) {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.all, p)
	switch {
	case i < 0:
	case old != nil:
		s.all[i] = old
	default:
		s.all = slices.Delete(s.all, i, i+1)
	}
}

func (s *supervisor) find(id string) (*process, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.all {
		if p.spec.ID == id && p.seen {
			return p, nil
		}
	}
	return nil, shard.Errorf(shard.CodeNotFound, "shard-init holds no process %s", shard.Quote(id))
}

func (s *supervisor) held() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make([]string, 0, len(s.all))
	for _, p := range s.all {
		if p.seen {
			ids = append(ids, p.spec.ID)
		}
	}
	return ids
}

// touch numbers a change of p and wakes who waits for one. The caller holds mu.
func (s *supervisor) touch(p *process) {
	s.seq++
	p.state.Seq = s.seq
	if s.changed != nil {
		close(s.changed)
		s.changed = nil
	}
}

// since gives the states that changed after seq as lines, the number of the newest change, and what is closed at the next.
func (s *supervisor) since(seq uint64) (lines []byte, newest uint64, changed <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, p := range s.all {
		if p.seen && p.state.Seq > seq {
			line, err := json.Marshal(&p.state)
			if err != nil {
				continue // a clock that shows no year of four digits
			}
			lines = append(append(lines, line...), '\n')
		}
	}
	if s.changed == nil {
		s.changed = make(chan struct{})
	}
	return lines, s.seq, s.changed
}

// tell waits until the host has heard all that the processes wrote, for at most d.
func (s *supervisor) tell(d time.Duration) {
	for end := time.Now().Add(d); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		s.mu.Lock()
		left := slices.ContainsFunc(s.all, func(p *process) bool { return !p.out.told() })
		s.mu.Unlock()
		if !left {
			return
		}
	}
}

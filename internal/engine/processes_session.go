package engine

import (
	"context"
	"slices"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/stream"
)

// heard waits until the log has all that an ended process wrote. That is nearly always so.
func heard(log *stream.Log, end int64) {
	for deadline := time.Now().Add(lastOutput); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if got, _ := log.Got(); got >= end {
			return
		}
	}
}

// mostNews is how many times a second a sandbox may have states of its processes stored.
const mostNews = 100

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

// tell stores what the agent says of processes. What ends while the sandbox goes down is not told: it is stopped.
func (sb *sandbox) tell(states []guest.ProcessState) {
	sb.learnIf(func(rec *record) bool {
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
		began := time.Now()
		for n := 1; ; n++ {
			if n%mostNews == 0 { // no agent that means well is so fast: it must not keep the host's disk busy
				select {
				case <-time.After(time.Until(began.Add(time.Second))):
				case <-ctx.Done():
				}
				began = time.Now()
			}
			news, err := states.Next()
			if err == nil {
				sb.hear(news)
				sb.tell(news)
				continue
			}
			if session.Err() == nil && ctx.Err() == nil && !sb.ending() {
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
			sb.lost(name, run.ID)
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
func (sb *sandbox) lost(name, id string) {
	sb.learnIf(func(r *record) bool {
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

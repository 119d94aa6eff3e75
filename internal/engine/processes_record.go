package engine

import (
	"maps"
	"slices"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

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

// launch is a process that the agent is asked to start. It is stored while the agent does so: once both is done, it is a process
// in this daemon's memory, and in the next daemon's too, whether or not the record was written again.
type launch struct {
	Process shard.Process `json:"process"`
	Run     processRun    `json:"run"`
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
	r.Sandbox.Processes, r.Runs, r.Launches = slices.Clone(r.Sandbox.Processes), maps.Clone(r.Runs), maps.Clone(r.Launches)
	if r.Runs == nil {
		r.Runs = make(map[string]processRun)
	}
}

// launched makes a launch a process, in the place of the one of its name. The record owns its processes.
func (r *record) launched(name string) {
	l := r.Launches[name]
	delete(r.Launches, name)
	if old := find(r, name); old != nil {
		*old = l.Process
	} else {
		r.Sandbox.Processes = append(r.Sandbox.Processes, l.Process)
	}
	r.Runs[name] = l.Run
}

// recovered makes what an earlier daemon was starting processes: their clients may have been told that they run. One that the
// agent does not hold is then stopped, and started as its policy says.
func (r *record) recovered() {
	r.own()
	for _, name := range slices.Sorted(maps.Keys(r.Launches)) {
		r.launched(name)
	}
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
	r.Launches = nil // who waits for one hears that it came to nothing
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

package engine

import (
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

func recordOf(processes ...shard.Process) *record {
	r := &record{Sandbox: shard.Sandbox{State: shard.StateRunning, Processes: processes}, Runs: map[string]processRun{}}
	for _, p := range processes {
		r.Runs[p.Name] = processRun{ID: "id-" + p.Name, Seq: 3, Base: 100, Start: 10, End: 20}
	}
	return r
}

func in(name, policy, state string, killed bool) shard.Process {
	return shard.Process{Name: name, Restart: shard.RestartSpec{Policy: policy}, Killed: killed,
		Status: shard.ProcessStatus{State: state, Restarts: 2, Exit: &shard.ExitStatus{Code: 1}}}
}

// TestProcessesOverAStop: what a stop makes of each process, and what the next start does.
func TestProcessesOverAStop(t *testing.T) {
	for _, c := range []struct {
		policy, state string
		killed        bool
		down          string
		runs          bool
	}{
		{shard.RestartNo, shard.ProcessRunning, false, shard.ProcessStopped, false},
		{shard.RestartNo, shard.ProcessExited, false, shard.ProcessExited, false},
		{shard.RestartOnFailure, shard.ProcessRestarting, false, shard.ProcessStopped, false},
		{shard.RestartOnFailure, shard.ProcessGaveUp, false, shard.ProcessGaveUp, false},
		{shard.RestartAlways, shard.ProcessRunning, false, shard.ProcessStopped, true},
		{shard.RestartAlways, shard.ProcessKilled, true, shard.ProcessKilled, true},
		{shard.RestartUnlessStopped, shard.ProcessRestarting, false, shard.ProcessStopped, true},
		{shard.RestartUnlessStopped, shard.ProcessRunning, true, shard.ProcessStopped, false}, // the kill was under way
		{shard.RestartUnlessStopped, shard.ProcessKilled, true, shard.ProcessKilled, false},
	} {
		before := recordOf(in("p", c.policy, c.state, c.killed))
		r := *before
		r.processesDown()
		if p := find(&r, "p"); p.Status.State != c.down || p.Status.Restarts != 2 || p.Killed != c.killed {
			t.Errorf("%+v: down as %+v", c, p)
		}
		if run := r.Runs["p"]; run != (processRun{Base: 100, Start: 10}) {
			t.Errorf("%+v: the run is %+v", c, run)
		}
		r.processesDue()
		p := find(&r, "p")
		if due := p.Status.State == shard.ProcessStopped && returns(p); due != c.runs {
			t.Errorf("%+v: runs at the next start: %v", c, due)
		}
		if c.runs && (p.Killed || p.Status.Restarts != 0 || p.Status.Exit != nil) {
			t.Errorf("%+v: begins as %+v", c, p)
		}
		if old := before.Sandbox.Processes[0]; old.Status.State != c.state || before.Runs["p"].ID == "" {
			t.Errorf("%+v: the record before was changed: %+v", c, old)
		}
	}
}

func TestOldNewsIsIgnored(t *testing.T) {
	r := recordOf(in("p", shard.RestartAlways, shard.ProcessRunning, false))
	r.own()
	state := guest.ProcessState{Seq: 3, ID: "id-p", State: shard.ProcessRestarting, StartedAt: time.Now()}
	if r.take("p", state) || r.Sandbox.Processes[0].Status.State != shard.ProcessRunning {
		t.Error("a state that is known already was taken")
	}
	state.Seq = 4
	if !r.take("p", state) || r.Sandbox.Processes[0].Status.State != shard.ProcessRestarting || r.Runs["p"].Seq != 4 {
		t.Errorf("%+v", r.Sandbox.Processes[0])
	}
}

func TestRunDefaults(t *testing.T) {
	p, err := planProcess(shard.RunRequest{Command: []string{"/usr/bin/python3.12", "-m", "x"}})
	if err != nil || p.Name != "python3.12" || p.Restart != (shard.RestartSpec{Policy: shard.RestartUnlessStopped}) {
		t.Errorf("%+v, %v", p, err)
	}
	for _, program := range []string{"/bin/[", "Xvfb", "/", "."} {
		if _, err := planProcess(shard.RunRequest{Command: []string{program}}); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("%s: %v", program, err)
		}
	}
}

package agent_test

import (
	"context"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// runProcess starts a process whose output goes to the sink that is returned.
func (b *box) runProcess(s *guest.Session, name, policy, script string) (id string, k *sink) {
	b.t.Helper()
	id, k = nextID(), newSink()
	cmd, err := s.Run(b.ctx(), guest.ProcessSpec{ID: id, Name: name, Argv: guest.Strings{"sh", "-c", script}, Env: guest.Strings{"PATH=/bin"},
		Restart: shard.RestartSpec{Policy: policy, Backoff: 0.02}}, k)
	b.must(err)
	k.started(cmd)
	return id, k
}

// told waits until the agent says that a process is in a state.
func (b *box) told(s *guest.Session, id, state string) guest.ProcessState {
	b.t.Helper()
	ctx, cancel := context.WithCancel(b.ctx())
	defer cancel()
	w, err := guest.WatchStates(ctx, s)
	b.must(err)
	defer w.Close()
	last := uint64(0)
	for {
		states, err := w.Next()
		b.must(err)
		for _, p := range states {
			if p.Seq <= last {
				b.t.Errorf("state %d after %d", p.Seq, last)
			}
			if p.ID == id && p.State == state {
				return p
			}
		}
	}
}

// TestSupervisorWithoutHost: what happens while no session is there is known in the next, and no byte is missing.
func TestSupervisorWithoutHost(t *testing.T) {
	b := newBox(t, true)
	s := b.connect()
	id, k := b.runProcess(s, "crash", shard.RestartAlways, "echo run; echo >>/tmp/runs; test $(wc -l </tmp/runs) -lt 5 || exec sleep 600; exit 1")
	big, kb := b.runProcess(s, "big", shard.RestartNo, "sleep 0.2; seq 300000; exit 7") // more than the window
	b.await(k, "run")
	s.Close()
	<-k.done
	had := k.len()
	for ctx := b.ctx(); ; time.Sleep(2 * time.Millisecond) {
		if runs, _ := os.ReadFile(filepath.Join(b.root, "tmp/runs")); len(runs) == 5 {
			break
		}
		if ctx.Err() != nil {
			t.Fatal("nothing is restarted while no host is there")
		}
	}
	s = b.connect()
	p := b.told(s, id, shard.ProcessRunning)
	for p.Restarts < 4 { // the file may be quicker than the count
		p = b.told(s, id, shard.ProcessRunning)
	}
	if p.Restarts != 4 || p.Exit == nil || p.Exit.Code != 1 {
		t.Errorf("after a time alone: %+v, %+v", p, p.Exit)
	}
	k2 := newSink()
	cmd, err := s.Follow(b.ctx(), id, int64(had), k2)
	b.must(err)
	k2.started(cmd)
	b.await(k2, "run\n")
	want := strings.Repeat("run\n", 5)
	for ctx := b.ctx(); k.text()+k2.text() != want; time.Sleep(2 * time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("output %q and %q", k.text(), k2.text())
		}
	}
	if p.Start != int64(len(want)-4) {
		t.Errorf("the last run began at byte %d of %d", p.Start, len(want))
	}
	kb2 := newSink()
	cmd, err = s.Follow(b.ctx(), big, int64(kb.len()), kb2)
	b.must(err)
	kb2.started(cmd)
	end := b.told(s, big, shard.ProcessExited)
	b.await(kb2, "300000\n")
	if n := int64(kb.len() + kb2.len()); end.Exit.Code != 7 || end.End != n || strings.Count(kb.text()+kb2.text(), "\n") != 300000 {
		t.Errorf("%+v, and %d bytes", end, n)
	}
	// A host that claims too little is told where the output goes on.
	k3 := newSink()
	cmd, err = s.Follow(b.ctx(), big, 0, k3)
	b.must(err)
	if cmd.Head.Offset != end.End {
		t.Errorf("a follow from 0 goes on at %d", cmd.Head.Offset)
	}
}

func TestSupervisorNames(t *testing.T) {
	b := newBox(t, true)
	s := b.connect()
	first, k := b.runProcess(s, "web", shard.RestartNo, "echo one")
	b.told(s, first, shard.ProcessExited)
	b.await(k, "one")
	if _, err := s.Run(b.ctx(), guest.ProcessSpec{ID: nextID(), Name: "web", Argv: guest.Strings{"nosuch"},
		Restart: shard.RestartSpec{Policy: "no"}}, newSink()); shard.CodeOf(err) != shard.CodeCommandNotStarted {
		t.Errorf("a program that is not there: %v", err)
	}
	if p := b.told(s, first, shard.ProcessExited); p.Exit == nil {
		t.Errorf("after a run that failed the one before is %+v", p)
	}
	second, _ := b.runProcess(s, "web", shard.RestartNo, "sleep 600")
	<-k.done // the first is forgotten, and its stream has ended
	_, err := s.Run(b.ctx(), guest.ProcessSpec{ID: nextID(), Name: "web", Argv: guest.Strings{"true"}, Restart: shard.RestartSpec{Policy: "no"}}, newSink())
	if shard.CodeOf(err) != shard.CodeNameTaken {
		t.Errorf("a second process of the name: %v", err)
	}
	b.must(s.Call(b.ctx(), guest.OpDrop, guest.ForgetArgs{ID: second}, nil))
	b.must(s.Call(b.ctx(), guest.OpDrop, guest.ForgetArgs{ID: second}, nil))
	if err := s.Call(b.ctx(), guest.OpKill, guest.KillArgs{ID: second}, nil); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("kill of what was dropped: %v", err)
	}
	third, k3 := b.runProcess(s, "web", shard.RestartAlways, "trap '' TERM; echo up; while :; do sleep 1; done")
	b.await(k3, "up")
	b.must(s.Call(b.ctx(), guest.OpKill, guest.KillArgs{ID: third, GraceMillis: 100}, nil))
	if p := b.told(s, third, shard.ProcessKilled); !p.Killed || p.Exit.Signal != 9 || p.Restarts != 0 {
		t.Errorf("killed after its grace: %+v, %+v", p, p.Exit)
	}
	// A program that cannot be started is a run that failed, where that was asked for.
	id := nextID()
	_, err = s.Run(b.ctx(), guest.ProcessSpec{ID: id, Name: "keep", Argv: guest.Strings{"nosuch"}, Keep: true,
		Restart: shard.RestartSpec{Policy: shard.RestartOnFailure, Retries: 2, Backoff: 0.01}}, newSink())
	b.must(err)
	if p := b.told(s, id, shard.ProcessGaveUp); p.Exit.Code != 127 || p.Restarts != 2 {
		t.Errorf("%+v, %+v", p, p.Exit)
	}
}

// TestSupervisorStop: when the sandbox stops, nothing starts again, nothing is said to have ended, and the last words are
// heard.
func TestSupervisorStop(t *testing.T) {
	b := newBox(t, true)
	s := b.connect()
	id, k := b.runProcess(s, "polite", shard.RestartAlways, "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.02; done")
	b.await(k, "up")
	b.runProcess(s, "crash", shard.RestartAlways, "exit 1")
	b.must(s.Call(b.ctx(), guest.OpStop, guest.StopArgs{GraceMillis: 5000}, nil))
	if text := k.text(); !strings.HasSuffix(text, "bye\n") {
		t.Errorf("at the answer to stop the output is %q", text)
	}
	if p := b.told(s, id, shard.ProcessRunning); p.Restarts != 0 {
		t.Errorf("%+v", p)
	}
	_, err := s.Run(b.ctx(), guest.ProcessSpec{ID: nextID(), Name: "x", Argv: guest.Strings{"true"}, Restart: shard.RestartSpec{Policy: "no"}}, newSink())
	if shard.CodeOf(err) != shard.CodeSandboxNotRunning {
		t.Errorf("a run while the sandbox stops: %v", err)
	}
}

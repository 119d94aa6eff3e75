package engine

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/useshards/shard"
)

// EgressLog returns the newest decisions about what a sandbox began on the network, each as JSON, oldest first, and how many
// older ones were left out.
func (e *Engine) EgressLog(ref string) (newest []json.RawMessage, cut int, err error) {
	f, cut, err := e.FollowEgressLog(ref)
	if err != nil {
		return nil, 0, err
	}
	defer f.Close()
	return f.next, cut, nil
}

// EgressFollow reads the decisions about one sandbox, those that are kept first, for as long as it runs.
type EgressFollow struct {
	sb     *sandbox
	live   *live // the machine that is followed; nil while the sandbox is being created
	log    LiveDecisions
	next   []json.RawMessage
	reason string
}

// FollowEgressLog reads a sandbox's decisions, old and new. cut is how many of the old ones were left out. The caller closes
// it.
func (e *Engine) FollowEgressLog(ref string) (f *EgressFollow, cut int, err error) {
	sb, err := e.find(ref)
	if err != nil {
		return nil, 0, err
	}
	s := sb.record().Sandbox
	if s.State == shard.StateFailed {
		return nil, 0, shard.Errorf(shard.CodeSandboxFailed, "sandbox %q has failed: %s", s.Ref(), s.FailedReason)
	}
	f = &EgressFollow{sb: sb}
	sb.mu.Lock()
	f.live = sb.live
	sb.mu.Unlock()
	if f.next, cut, f.log, err = e.Enforcer.Decisions(sb.id); err != nil {
		return nil, 0, shard.Wrap(shard.CodeInternal, err, "the egress log of sandbox %q cannot be read", s.Ref())
	}
	if f.next == nil {
		f.next = []json.RawMessage{}
	}
	return f, cut, nil
}

// Next waits for decisions; the first are those that were kept, perhaps none. io.EOF is the end, and Reason says why.
func (f *EgressFollow) Next(ctx context.Context) ([]json.RawMessage, error) {
	const look = 200 * time.Millisecond
	if out := f.next; out != nil {
		f.next = nil
		return out, nil
	}
	for {
		reason := f.ended()
		wait := look
		if reason != "" {
			wait = 0 // what is there is read all the same
		}
		some, cancel := context.WithTimeout(ctx, wait)
		out, err := f.log.Next(some)
		cancel()
		switch {
		case err == nil:
			return out, nil
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case f.sb.e.ctx.Err() != nil:
			return nil, shard.Errorf(shard.CodeInternal, "the daemon is stopping")
		case errors.Is(err, io.EOF):
			f.reason = "removed"
			return nil, io.EOF
		case !errors.Is(err, context.DeadlineExceeded):
			return nil, shard.Wrap(shard.CodeInternal, err, "the egress log cannot be read")
		case reason != "":
			f.reason = reason
			return nil, io.EOF
		}
	}
}

// ended says what became of the machine: "" while it runs or is on its way.
func (f *EgressFollow) ended() string {
	if f.live == nil {
		f.sb.mu.Lock()
		f.live = f.sb.live
		f.sb.mu.Unlock()
	}
	switch what := f.sb.became(f.live); shard.State(what) {
	case shard.StatePending, shard.StateCreated:
		return ""
	default:
		return what
	}
}

// Reason says why it ended: stopped, removed or failed.
func (f *EgressFollow) Reason() string { return f.reason }

// Close ends the reader.
func (f *EgressFollow) Close() { f.log.Close() }

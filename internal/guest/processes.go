package guest

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/useshards/shard"
)

const (
	maxState = 4 << 10 // bytes of one line of the stream of states
	maxHeld  = 1 << 10 // processes that an agent may say it holds
)

// States reads how the processes of the guest stand. It is for one goroutine.
type States struct {
	// Held are the ids of the processes that the agent held when the stream began.
	Held []string

	st    *Stream
	lines *bufio.Reader
}

// WatchStates opens the stream of states. It ends with the session, with ctx, or by Close.
func WatchStates(ctx context.Context, s *Session) (*States, error) {
	var head StatesHead
	st, err := s.Open(ctx, OpStates, nil, &head)
	if err != nil {
		return nil, err
	}
	if len(head.Held) > maxHeld {
		_ = st.Close()
		return nil, violation("%d processes at once", len(head.Held))
	}
	return &States{Held: head.Held, st: st, lines: bufio.NewReaderSize(st, maxState)}, nil
}

// Next waits for states and returns those that have come, at most one batch that fits memory easily.
func (w *States) Next() ([]ProcessState, error) {
	var out []ProcessState
	for {
		line, err := w.lines.ReadSlice('\n')
		switch {
		case errors.Is(err, bufio.ErrBufferFull), err == io.EOF && len(line) > 0:
			return nil, violation("a process state that is none")
		case err != nil:
			return nil, err
		}
		var s ProcessState
		if json.Unmarshal(line, &s) != nil || !s.valid() {
			return nil, violation("a process state that is none")
		}
		out = append(out, s)
		// A line that is not complete yet would make us wait with those that are.
		if rest, _ := w.lines.Peek(w.lines.Buffered()); bytes.IndexByte(rest, '\n') < 0 {
			return out, nil
		}
	}
}

// Close ends the stream.
func (w *States) Close() { _ = w.st.Close() }

func (s *ProcessState) valid() bool {
	switch s.State {
	case shard.ProcessRunning, shard.ProcessRestarting, shard.ProcessExited, shard.ProcessKilled, shard.ProcessGaveUp:
	default:
		return false
	}
	s.StartedAt = s.StartedAt.UTC()
	year := s.StartedAt.Year()
	return year >= 1 && year <= 9999 && s.Restarts >= 0 && s.Start >= 0 && s.End >= 0 &&
		(s.Exit == nil || s.Exit.Code >= 0 && s.Exit.Code <= 255 && s.Exit.Signal >= 0 && s.Exit.Signal <= 127)
}

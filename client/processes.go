package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
)

// RunProcess starts a named process under the sandbox's supervisor. When it returns, the program runs.
func (c *Client) RunProcess(ctx context.Context, ref string, req shard.RunRequest) (*shard.Process, error) {
	var out shard.Process
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "processes"), body: req}, &out)
	return &out, err
}

// Processes lists the named processes of a sandbox in the order of their first runs.
func (c *Client) Processes(ctx context.Context, ref string) ([]shard.Process, error) {
	var out shard.ProcessList
	err := c.do(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "processes")}, &out)
	return out.Processes, err
}

// Process reads the record of one.
func (c *Client) Process(ctx context.Context, ref, name string) (*shard.Process, error) {
	return c.process(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "processes", name)})
}

// WaitProcess waits until a process has ended and will not be started again.
func (c *Client) WaitProcess(ctx context.Context, ref, name string) (*shard.Process, error) {
	return c.process(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "processes", name, "attach")})
}

// KillProcess ends a process for good and waits for its end: TERM and 30 s later KILL, or KILL at once with force.
func (c *Client) KillProcess(ctx context.Context, ref, name string, force bool) (*shard.Process, error) {
	return c.process(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "processes", name, "kill"), body: shard.KillProcessRequest{Force: force}})
}

func (c *Client) process(ctx context.Context, k call) (*shard.Process, error) {
	var out shard.Process
	err := c.do(ctx, k, &out)
	return &out, err
}

// ProcessLog reads what a process has written over all its runs, as far as it is kept; with follow also what it writes
// from now on, until it or its sandbox ends. The caller closes it.
func (c *Client) ProcessLog(ctx context.Context, ref, name string, follow bool) (io.ReadCloser, error) {
	q := url.Values{}
	setTrue(q, "follow", follow)
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "processes", name, "logs"), query: q})
	if err != nil {
		return nil, err
	}
	return &body{ctx, resp.Body}, nil
}

// AttachProcess connects to a process: its output from the start of the current run, then what it writes. Cancelling ctx,
// or Close, ends the connection and leaves the process running.
func (c *Client) AttachProcess(ctx context.Context, ref, name string) (*ProcessStream, error) {
	s, err := c.stream(ctx, sandboxPath(ref, "processes", name, "attach"))
	if err != nil {
		return nil, err
	}
	return &ProcessStream{s}, nil
}

// ProcessStream is the live connection to a process.
type ProcessStream struct{ s *Stream }

// Copy passes output on until the process has ended for good, and returns its record. Errors are those of Stream.Copy.
func (p *ProcessStream) Copy(w io.Writer) (*shard.Process, error) {
	for {
		kind, message, err := p.s.conn.Read(p.s.ctx)
		switch {
		case err != nil:
			return nil, p.s.broken(err)
		case kind != websocket.MessageBinary || len(message) == 0:
			return nil, errors.New("the daemon sent what is no message of a process's stream")
		}
		switch message[0] {
		case shard.FrameStdout:
			if _, err := w.Write(message[1:]); err != nil {
				return nil, &WriteError{Err: err}
			}
		case shard.FrameExit, shard.FrameError:
			return last[shard.Process](p.s, message[0], message[1:])
		default:
			return nil, fmt.Errorf("the daemon sent a message of unknown kind %#x on a process's stream", message[0])
		}
	}
}

// Close lets go of the process, which runs on.
func (p *ProcessStream) Close() error { return p.s.Close() }

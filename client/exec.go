package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
)

const (
	// maxMessage is the longest message that is accepted, in bytes; the daemon sends at most 1 MiB and one byte.
	maxMessage = 4 << 20
	// StdinPiece is the payload of one message of input, in bytes.
	StdinPiece = 64 << 10
	// closeWait bounds the wait for the daemon's close after the last message.
	closeWait = time.Second
)

// Exec starts a command. When it returns, the command runs (execve succeeded); a command that could not be started is
// a *shard.Error with command_not_started and an exit code.
func (c *Client) Exec(ctx context.Context, ref string, req shard.ExecRequest) (*shard.Exec, error) {
	var out shard.Exec
	err := c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "exec"), body: req}, &out)
	return &out, err
}

// Run is Exec and Attach over one connection, the quickest way to a command's output. When only the attach failed, the
// record comes with the error: the command runs.
func (c *Client) Run(ctx context.Context, ref string, req shard.ExecRequest) (*shard.Exec, *Stream, error) {
	one := &oneConn{dial: c.dial}
	pinned := &Client{http: &http.Client{Transport: one}, dial: c.dial, base: c.base, header: c.header}
	req.Attach = true
	exec, err := pinned.Exec(ctx, ref, req)
	if err != nil {
		one.close()
		return nil, nil, err
	}
	stream, err := pinned.Attach(ctx, ref, exec.ID)
	if err != nil {
		one.close()
		return exec, nil, err
	}
	return exec, stream, nil
}

// GetExec reads the record of a command.
func (c *Client) GetExec(ctx context.Context, ref, id string) (*shard.Exec, error) {
	var out shard.Exec
	err := c.do(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "exec", id)}, &out)
	return &out, err
}

// KillExec sends TERM or KILL to a command.
func (c *Client) KillExec(ctx context.Context, ref, id, signal string) error {
	return c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "exec", id, "kill"),
		body: shard.KillRequest{Signal: signal}}, nil)
}

// Resize tells a command's terminal its size.
func (c *Client) Resize(ctx context.Context, ref, id string, size shard.Size) error {
	return c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "exec", id, "resize"), body: size}, nil)
}

// Stream is the live connection to a command. One goroutine may read (Copy) while another writes.
type Stream struct {
	conn *websocket.Conn
	ctx  context.Context // of the whole connection, as Attach says

	// mu orders writers; buf is the message under construction: its first byte is the frame's kind.
	mu  sync.Mutex
	buf []byte
}

// Attach connects to a command: what the daemon holds of its output, then what it writes. Cancelling ctx, at any time,
// or Close, ends the connection and leaves the command running.
func (c *Client) Attach(ctx context.Context, ref, id string) (*Stream, error) {
	return c.stream(ctx, sandboxPath(ref, "exec", id))
}

func (c *Client) stream(ctx context.Context, path string) (*Stream, error) {
	conn, _, err := websocket.Dial(ctx, c.base+path, &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: upgrader{c.http.Transport}},
		HTTPHeader: c.header.Clone(),
	})
	if err != nil {
		return nil, transportError(ctx, err)
	}
	conn.SetReadLimit(maxMessage)
	return &Stream{conn: conn, ctx: ctx}, nil
}

// upgrader turns a refused handshake into the error it carries, which the WebSocket library would cut and hide.
type upgrader struct{ http.RoundTripper }

func (u upgrader) RoundTrip(req *http.Request) (*http.Response, error) {
	resp, err := u.RoundTripper.RoundTrip(req)
	if err != nil || resp.StatusCode == http.StatusSwitchingProtocols {
		return resp, err
	}
	defer resp.Body.Close()
	if resp.StatusCode < 300 {
		return nil, fmt.Errorf("the daemon answered %s to a request for a stream", resp.Status)
	}
	return nil, refusal(resp)
}

// WriteError is a failure to pass output on: the stream itself was fine.
type WriteError struct{ Err error }

func (e *WriteError) Error() string { return "pass output on: " + e.Err.Error() }

func (e *WriteError) Unwrap() error { return e.Err }

// Copy passes output to stdout and stderr until the command has ended, and says how. A stream that ends without a last
// message is ErrBroken: the command's record explains it. A writer that fails ends the copy with a *WriteError.
func (s *Stream) Copy(stdout, stderr io.Writer) (*shard.ExitMessage, error) {
	buf := make([]byte, 128<<10)
	for {
		kind, r, err := s.conn.Reader(s.ctx)
		if err != nil {
			return nil, s.broken(err)
		}
		if kind != websocket.MessageBinary {
			return nil, fmt.Errorf("the daemon sent a text message on a command's stream")
		}
		// The first read may bring payload along with the kind.
		n, err := r.Read(buf)
		for n == 0 && err == nil {
			n, err = r.Read(buf)
		}
		if n == 0 {
			if errors.Is(err, io.EOF) {
				return nil, errors.New("the daemon sent an empty message on a command's stream")
			}
			return nil, s.broken(err)
		}
		switch frame := buf[0]; frame {
		case shard.FrameStdout, shard.FrameStderr:
			w := stdout
			if frame == shard.FrameStderr {
				w = stderr
			}
			if err := s.pass(w, r, buf, n, err); err != nil {
				return nil, err
			}
		case shard.FrameExit, shard.FrameError:
			raw := append([]byte(nil), buf[1:n]...)
			rest, err := io.ReadAll(r)
			if err != nil {
				return nil, s.broken(err)
			}
			return last[shard.ExitMessage](s, frame, append(raw, rest...))
		default:
			return nil, fmt.Errorf("the daemon sent a message of unknown kind %#x on a command's stream", frame)
		}
	}
}

// pass writes one message's payload: buf[1:n] is there already, err is how its first read ended.
func (s *Stream) pass(w io.Writer, r io.Reader, buf []byte, n int, err error) error {
	for payload := buf[1:n]; ; payload = buf[:n] {
		if len(payload) > 0 {
			if _, werr := w.Write(payload); werr != nil {
				return &WriteError{Err: werr}
			}
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return s.broken(err)
		}
		n, err = r.Read(buf)
	}
}

// last decodes the closing message and waits for the daemon's close, so that neither side sees a cut connection.
func last[T any](s *Stream, frame byte, raw []byte) (*T, error) {
	ctx, cancel := context.WithTimeout(s.ctx, closeWait)
	_, _, _ = s.conn.Read(ctx) // answers the close frame
	cancel()
	if frame == shard.FrameError {
		var body shard.ErrorBody
		if err := json.Unmarshal(raw, &body); err != nil {
			return nil, fmt.Errorf("read the stream's error message: %w", err)
		}
		return nil, detailError(body.Error)
	}
	var out T
	if err := json.Unmarshal(raw, &out); err != nil {
		return nil, fmt.Errorf("read the stream's last message: %w", err)
	}
	return &out, nil
}

func (s *Stream) broken(err error) error {
	if cause := context.Cause(s.ctx); cause != nil {
		return cause
	}
	if errors.Is(err, websocket.ErrMessageTooBig) {
		return fmt.Errorf("the daemon sent a message of more than %d bytes on a command's stream", maxMessage)
	}
	if c, ok := errors.AsType[websocket.CloseError](err); ok {
		if reason := strings.TrimSpace(c.Reason); reason != "" {
			return fmt.Errorf("%w: %s", ErrBroken, reason)
		}
	}
	return ErrBroken
}

// Write sends input, in pieces of StdinPiece.
func (s *Stream) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.buf == nil {
		s.buf = make([]byte, 1+StdinPiece)
	}
	sent := 0
	for sent < len(p) {
		s.buf[0] = shard.FrameStdin
		n := copy(s.buf[1:], p[sent:])
		if err := s.conn.Write(s.ctx, websocket.MessageBinary, s.buf[:1+n]); err != nil {
			return sent, s.broken(err)
		}
		sent += n
	}
	return sent, nil
}

// CloseStdin says that there is no more input.
func (s *Stream) CloseStdin() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.conn.Write(s.ctx, websocket.MessageBinary, []byte{shard.FrameStdinClosed}); err != nil {
		return s.broken(err)
	}
	return nil
}

// Close lets go of the command, which runs on if it has not ended.
func (s *Stream) Close() error { return s.conn.CloseNow() }

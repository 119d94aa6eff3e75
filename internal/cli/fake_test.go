package cli_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/creack/pty"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cli"
)

// asCLI in the environment makes the test binary the command line, so that tests can give it pipes, terminals and
// signals.
const asCLI = "SHARD_TEST_AS_CLI"

func TestMain(m *testing.M) {
	if os.Getenv(asCLI) != "" {
		app := newApp(os.Stdin, os.Stdout, os.Stderr)
		os.Exit(app.Main(context.Background(), os.Args[1:]))
	}
	os.Exit(m.Run())
}

func newApp(in io.Reader, out, errs io.Writer) *cli.App {
	return &cli.App{Version: "test", In: in, Out: out, Err: errs, Getenv: func(k string) string {
		if k == "SHARD_REMOTE" || strings.HasPrefix(k, "SUDO_") {
			return os.Getenv(k)
		}
		return ""
	}}
}

// command is the command line as a process.
func command(t *testing.T, d *daemon, args ...string) *exec.Cmd {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), self, append([]string{"--root", d.root}, args...)...)
	cmd.Env = append(os.Environ(), asCLI+"=1")
	return cmd
}

type result struct {
	out, errs string
	code      int
}

// run is the command line in this process.
func run(t *testing.T, d *daemon, args ...string) result {
	t.Helper()
	return runApp(t, newApp(strings.NewReader(""), nil, nil), append([]string{"--root", d.root}, args...)...)
}

func runApp(t *testing.T, app *cli.App, args ...string) result {
	t.Helper()
	var out, errs bytes.Buffer
	app.Out, app.Err = &out, &errs
	code := app.Main(t.Context(), args)
	return result{out.String(), errs.String(), code}
}

// daemon speaks the API over a real socket. Its sandbox "box" is this host: commands are real processes, files
// are under box.
type daemon struct {
	t    *testing.T
	root string
	box  string
	mux  *http.ServeMux
	srv  *http.Server

	mu    sync.Mutex
	execs map[string]*running
	sizes chan shard.Size
	// cut ends the stream of a command without a last message once it has ended.
	cut bool
	// lost is what the last message says was lost.
	lost int64
	// sockets are the upgraded connections, which the server has let go of.
	sockets []*websocket.Conn
}

// die ends the daemon as kill -9 does: every connection is cut, commands run on.
func (d *daemon) die() {
	_ = d.srv.Close()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, ws := range d.sockets {
		_ = ws.CloseNow()
	}
}

type running struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	pty    *os.File
	out    [2]io.Reader
	record shard.Exec
	ended  chan struct{}
}

func start(t *testing.T) *daemon {
	t.Helper()
	d := &daemon{t: t, root: t.TempDir(), box: t.TempDir(), mux: http.NewServeMux(), execs: map[string]*running{}, sizes: make(chan shard.Size, 16)}
	l, err := net.Listen("unix", filepath.Join(d.root, "shard.sock"))
	if err != nil {
		t.Fatal(err)
	}
	d.mux.HandleFunc("POST /v0/sandboxes/box/exec", d.startExec)
	d.mux.HandleFunc("GET /v0/sandboxes/box/exec/{exec}", d.getExec)
	d.mux.HandleFunc("POST /v0/sandboxes/box/exec/{exec}/resize", d.resize)
	d.srv = &http.Server{ReadHeaderTimeout: time.Minute, Handler: d.mux}
	go func() { _ = d.srv.Serve(l) }()
	t.Cleanup(func() {
		_ = d.srv.Close()
		d.mu.Lock()
		defer d.mu.Unlock()
		for _, r := range d.execs {
			_ = syscall.Kill(-r.cmd.Process.Pid, syscall.SIGKILL)
		}
	})
	return d
}

// answer makes a route answer one thing.
func (d *daemon) answer(pattern string, status int, body string) {
	d.mux.HandleFunc(pattern, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	})
}

func (d *daemon) refuse(pattern string, status int, code shard.Code, message string) {
	b, _ := json.Marshal(shard.ErrorBody{Error: shard.ErrorDetail{Code: code, Message: message}})
	d.answer(pattern, status, string(b))
}

func fail(w http.ResponseWriter, e *shard.Error) {
	w.WriteHeader(e.Code.Status())
	_ = json.NewEncoder(w).Encode(shard.ErrorBody{Error: shard.ErrorDetail{Code: e.Code, Message: e.Message, ExitCode: e.ExitCode}})
}

func (d *daemon) startExec(w http.ResponseWriter, r *http.Request) {
	var req shard.ExecRequest
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || !req.Attach {
		fail(w, shard.Invalidf("bad exec request: %v", err))
		return
	}
	run := &running{ended: make(chan struct{}), cmd: exec.CommandContext(context.Background(), req.Command[0], req.Command[1:]...)}
	run.cmd.Env = append(os.Environ(), req.Env...)
	if run.cmd.Dir = req.Workdir; run.cmd.Dir != "" {
		if _, err := os.Stat(run.cmd.Dir); err != nil {
			fail(w, &shard.Error{Code: shard.CodeCommandNotStarted, Message: "no such working directory", ExitCode: 126})
			return
		}
	}
	var err error
	if req.TTY {
		size := &pty.Winsize{Rows: 24, Cols: 80}
		if req.Size != nil {
			size = &pty.Winsize{Rows: req.Size.Rows, Cols: req.Size.Cols}
		}
		run.pty, err = pty.StartWithSize(run.cmd, size)
		run.stdin, run.out[0] = run.pty, run.pty
	} else {
		run.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		if req.Stdin {
			run.stdin, _ = run.cmd.StdinPipe()
		}
		run.out[0], _ = run.cmd.StdoutPipe()
		run.out[1], _ = run.cmd.StderrPipe()
		err = run.cmd.Start()
	}
	if err != nil {
		e := &shard.Error{Code: shard.CodeCommandNotStarted, Message: "cannot run " + shard.Quote(req.Command[0]), ExitCode: 126}
		if errors.Is(err, exec.ErrNotFound) || errors.Is(err, os.ErrNotExist) {
			e.ExitCode = 127
		}
		fail(w, e)
		return
	}
	d.mu.Lock()
	id := fmt.Sprintf("x%d", len(d.execs)+1)
	run.record = shard.Exec{ID: id, Sandbox: "box", Command: req.Command, State: shard.ExecRunning, StartedAt: time.Now()}
	d.execs[id] = run
	d.mu.Unlock()
	w.WriteHeader(http.StatusCreated)
	_ = json.NewEncoder(w).Encode(run.record)
}

func (d *daemon) find(r *http.Request) *running {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.execs[r.PathValue("exec")]
}

func (d *daemon) resize(w http.ResponseWriter, r *http.Request) {
	var size shard.Size
	_ = json.NewDecoder(r.Body).Decode(&size)
	_ = pty.Setsize(d.find(r).pty, &pty.Winsize{Rows: size.Rows, Cols: size.Cols})
	d.sizes <- size
	w.WriteHeader(http.StatusNoContent)
}

func (d *daemon) getExec(w http.ResponseWriter, r *http.Request) {
	run := d.find(r)
	if run == nil {
		fail(w, shard.Errorf(shard.CodeNotFound, "no such exec"))
		return
	}
	if r.Header.Get("Upgrade") == "" {
		d.mu.Lock()
		defer d.mu.Unlock()
		_ = json.NewEncoder(w).Encode(run.record)
		return
	}
	ws, err := websocket.Accept(w, r, nil)
	if err != nil {
		return
	}
	ws.SetReadLimit(1<<20 + 1)
	d.mu.Lock()
	d.sockets = append(d.sockets, ws)
	d.mu.Unlock()
	ctx := context.Background()
	go func() { // input, until the connection ends
		for {
			_, msg, err := ws.Read(ctx)
			switch {
			case err != nil:
				return
			case run.stdin == nil:
			case msg[0] == 4 && run.pty == nil:
				_ = run.stdin.Close()
			case msg[0] == 0:
				_, _ = run.stdin.Write(msg[1:])
			}
		}
	}()
	var wg sync.WaitGroup
	for i, out := range run.out {
		if out == nil {
			continue
		}
		wg.Go(func() {
			buf := make([]byte, 1+100_000)
			for {
				n, err := out.Read(buf[1:])
				if n > 0 {
					buf[0] = byte(1 + i)
					_ = ws.Write(ctx, websocket.MessageBinary, buf[:1+n])
				}
				if err != nil {
					return
				}
			}
		})
	}
	wg.Wait()
	code := 0
	if err := run.cmd.Wait(); err != nil {
		status := run.cmd.ProcessState.Sys().(syscall.WaitStatus)
		if code = status.ExitStatus(); status.Signaled() {
			code = 128 + int(status.Signal())
		}
	}
	d.mu.Lock()
	run.record.State, run.record.ExitStatus = shard.ExecExited, &shard.ExitStatus{Code: code}
	d.mu.Unlock()
	close(run.ended)
	if d.cut {
		_ = ws.CloseNow()
		return
	}
	_ = ws.Write(ctx, websocket.MessageBinary, fmt.Appendf(nil, "\x03"+`{"code":%d,"signal":0,"lost_bytes":%d}`, code, d.lost))
	_ = ws.Close(websocket.StatusNormalClosure, "")
}

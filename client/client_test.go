package client_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// serve runs h behind a unix socket and returns a client of it.
func serve(t *testing.T, h http.Handler) *client.Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "shard.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	c := client.New(client.Options{Dial: client.Unix(socket), UserAgent: "shard-cli/test"})
	t.Cleanup(c.Close)
	return c
}

func handle(pattern string, f http.HandlerFunc) *http.ServeMux {
	mux := http.NewServeMux()
	mux.HandleFunc(pattern, f)
	return mux
}

func TestRefusalsAreTyped(t *testing.T) {
	long := strings.Repeat("x", 2000)
	for _, tc := range []struct {
		name   string
		status int
		body   string
		want   shard.Error
	}{
		{"full", 422, `{"error":{"code":"command_not_started","message":"no such program","exit_code":127,"new":1}}`,
			shard.Error{Code: shard.CodeCommandNotStarted, Message: "no such program", ExitCode: 127}},
		{"holders", 409, `{"error":{"code":"in_use","message":"held","holders":["a","b"]}}`,
			shard.Error{Code: shard.CodeInUse, Message: "held", Holders: []string{"a", "b"}}},
		{"unknown code is kept", 418, `{"error":{"code":"teapot","message":"short and stout"}}`,
			shard.Error{Code: "teapot", Message: "short and stout"}},
		{"not JSON", 502, `<html>` + long,
			shard.Error{Code: shard.CodeInternal, Message: fmt.Sprintf("the daemon answered 502 Bad Gateway: %q", ("<html>" + long)[:512])}},
		{"empty", 404, ``, shard.Error{Code: shard.CodeNotFound, Message: "the daemon answered 404 Not Found"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := serve(t, handle("/", func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(tc.status)
				_, _ = io.WriteString(w, tc.body)
			}))
			_, err := c.Inspect(t.Context(), "box")
			got, ok := errors.AsType[*shard.Error](err)
			if !ok {
				t.Fatalf("got %v, want a *shard.Error", err)
			}
			if diff := cmp.Diff(tc.want, *got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestTextOnly: what JSON cannot carry is not sent as something else.
func TestTextOnly(t *testing.T) {
	asked := false
	c := serve(t, handle("/", func(w http.ResponseWriter, _ *http.Request) {
		asked = true
		_, _ = io.WriteString(w, "{}")
	}))
	_, value := c.PutSecret(t.Context(), "A", shard.PutSecretRequest{Value: "caf\xe9"})
	_, argument := c.Exec(t.Context(), "box", shard.ExecRequest{Command: []string{"echo", "caf\xe9"}})
	for what, err := range map[string]error{"a value": value, "an argument": argument} {
		if shard.CodeOf(err) != shard.CodeInvalidRequest || asked || strings.Contains(err.Error(), "caf") {
			t.Errorf("%s: %v", what, err)
		}
	}
	if _, err := c.PutSecret(t.Context(), "A", shard.PutSecretRequest{Value: "caf\u00e9 \ufffd"}); err != nil || !asked {
		t.Errorf("text: %v", err)
	}
}

func TestHeadIsClassedByStatus(t *testing.T) {
	for status, code := range map[int]shard.Code{400: shard.CodeInvalidRequest, 404: shard.CodeNotFound, 409: shard.CodeSandboxNotRunning, 500: shard.CodeInternal} {
		c := serve(t, handle("HEAD /", func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(status) }))
		if _, err := c.Stat(t.Context(), "box", "/x"); shard.CodeOf(err) != code {
			t.Errorf("%d: got %v, want %s", status, err, code)
		}
	}
}

func TestNobodyThere(t *testing.T) {
	dir := t.TempDir()
	dial := func(socket string) error {
		c := client.New(client.Options{Dial: client.Unix(socket)})
		_, err := c.Version(t.Context())
		return err
	}
	dead := filepath.Join(dir, "dead.sock")
	l, err := net.Listen("unix", dead)
	if err != nil {
		t.Fatal(err)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	l.Close()
	for socket, want := range map[string]error{filepath.Join(dir, "none.sock"): fs.ErrNotExist, dead: syscall.ECONNREFUSED} {
		err := dial(socket)
		if e, ok := errors.AsType[*client.DialError](err); !ok || e.Address != socket || !errors.Is(err, want) {
			t.Errorf("%s: got %v, want a DialError with %v", socket, err, want)
		}
	}
}

func TestLongSocketPath(t *testing.T) {
	dir := filepath.Join(t.TempDir(), strings.Repeat("d", 120))
	if err := os.Mkdir(dir, 0o700); err != nil {
		t.Fatal(err)
	}
	// The listener too must go through a short name of the directory.
	d, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	l, err := net.Listen("unix", fmt.Sprintf("/proc/self/fd/%d/shard.sock", d.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{ReadHeaderTimeout: time.Minute, Handler: handle("GET /v0/version", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"version":"1","api_version":"v0"}`)
	})}
	go func() { _ = srv.Serve(l) }()
	defer srv.Close()
	c := client.New(client.Options{Dial: client.Unix(filepath.Join(dir, "shard.sock"))})
	defer c.Close()
	v, err := c.Version(t.Context())
	if err != nil || v.APIVersion != "v0" {
		t.Fatalf("got %v, %v", v, err)
	}
	if _, err := client.Unix(filepath.Join(dir, "none", "shard.sock"))(t.Context()); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing directory: got %v", err)
	}
}

func TestListsWalkAllPages(t *testing.T) {
	var cursors []string
	c := serve(t, handle("GET /v0/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		cursors = append(cursors, r.FormValue("cursor")+"/"+r.FormValue("all"))
		switch r.FormValue("cursor") {
		case "":
			_, _ = io.WriteString(w, `{"sandboxes":[{"id":"a-a-0000","later":true}],"next":"a-a-0000"}`)
		default:
			_, _ = io.WriteString(w, `{"sandboxes":[{"id":"b-b-0000"}],"next":null,"warnings":["c is unreadable"]}`)
		}
	}))
	list, err := c.AllSandboxes(t.Context(), true)
	if err != nil {
		t.Fatal(err)
	}
	if len(list.Sandboxes) != 2 || list.Sandboxes[1].ID != "b-b-0000" || len(list.Warnings) != 1 {
		t.Errorf("got %+v", list)
	}
	if diff := cmp.Diff([]string{"/true", "a-a-0000/true"}, cursors); diff != "" {
		t.Error(diff)
	}
	stuck := serve(t, handle("GET /v0/images", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = io.WriteString(w, `{"images":[],"next":"same"}`)
	}))
	if _, err := stuck.Images(t.Context()); err == nil {
		t.Error("a list that does not advance went on")
	}
}

func TestCreateReadsProgress(t *testing.T) {
	for _, tc := range []struct {
		name, body, want string
		steps            []string
	}{
		{"events then sandbox", `{"event":{"status":"pulling","layers":2}}` + "\n\n" + `{"later":{}}` + "\n" + `{"event":{"status":"new"}}` + "\n" + `{"sandbox":{"id":"a-a-0000","state":"running"}}` + "\n",
			"a-a-0000 running", []string{"pulling", "new"}},
		{"no final newline", `{"sandbox":{"id":"a-a-0000","state":"failed","failed_reason":"no"}}`, "a-a-0000 failed", nil},
		{"error at the end", `{"event":{"status":"pulling"}}` + "\n" + `{"error":{"code":"internal","message":"it broke"}}` + "\n", "it broke", []string{"pulling"}},
		{"cut", `{"event":{"status":"pulling"}}` + "\n", client.ErrBroken.Error(), []string{"pulling"}},
		{"not JSON", "hello\n", "read the daemon's progress", nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c := serve(t, handle("POST /v0/sandboxes", func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Accept") != "application/x-ndjson" || r.FormValue("wait") != "true" {
					t.Errorf("request: %v %v", r.URL, r.Header)
				}
				w.Header().Set("Content-Type", "application/x-ndjson")
				w.WriteHeader(http.StatusCreated)
				_, _ = io.WriteString(w, tc.body)
			}))
			var steps []string
			sb, err := c.Create(t.Context(), shard.CreateRequest{Image: "x"}, func(p shard.Progress) { steps = append(steps, p.Status) })
			got := ""
			if err != nil {
				got = err.Error()
			} else {
				got = sb.ID + " " + string(sb.State)
			}
			if !strings.HasPrefix(got, tc.want) {
				t.Errorf("got %q, want %q", got, tc.want)
			}
			if diff := cmp.Diff(tc.steps, steps); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestCancelledCreateSaysWhy(t *testing.T) {
	began := make(chan struct{})
	c := serve(t, handle("POST /v0/sandboxes", func(_ http.ResponseWriter, r *http.Request) {
		close(began)
		<-r.Context().Done()
	}))
	cause := errors.New("ctrl-c")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() { <-began; cancel(cause) }()
	if _, err := c.Create(ctx, shard.CreateRequest{}, nil); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
}

func TestFilesOnTheWire(t *testing.T) {
	mode := fs.FileMode(0o640)
	stat := `{"type":"file","size":3,"mode":420,"uid":0,"gid":0,"mtime":"2026-01-02T03:04:05Z","later":1}`
	type seen struct{ Method, Path, Query, Body, Length string }
	var got seen
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = seen{r.Method, r.URL.EscapedPath(), r.URL.Query().Encode(), string(b), fmt.Sprint(r.ContentLength, r.TransferEncoding)}
		switch {
		case r.Method == http.MethodGet && strings.HasSuffix(r.URL.Path, "/ls"):
			_, _ = io.WriteString(w, `{"entries":[{"name":"a"}]}`)
		case r.Method == http.MethodGet || r.Method == http.MethodHead:
			w.Header().Set("X-Shard-Stat", stat)
			_, _ = io.WriteString(w, "abc")
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	}))
	ctx := t.Context()
	check := func(err error, want seen) {
		t.Helper()
		if err != nil {
			t.Error(err)
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	}
	err := c.PutFile(ctx, "box", "/a b", strings.NewReader("xyz"), 3, client.WriteOptions{Mode: &mode, User: "u:g", Parents: true})
	check(err, seen{"PUT", "/v0/sandboxes/box/files", "mode=0640&parents=true&path=%2Fa+b&user=u%3Ag", "xyz", "3 []"})
	err = c.PutFile(ctx, "box", "/e", strings.NewReader(""), 0, client.WriteOptions{})
	check(err, seen{"PUT", "/v0/sandboxes/box/files", "path=%2Fe", "", "0 []"})
	err = c.PutArchive(ctx, "box", "/d", "", strings.NewReader("tar"))
	check(err, seen{"PUT", "/v0/sandboxes/box/archive", "path=%2Fd", "tar", "-1 [chunked]"})
	err = c.Mkdir(ctx, "box", "/m", client.WriteOptions{Mode: &mode, Parents: true})
	check(err, seen{"POST", "/v0/sandboxes/box/mkdir", "", `{"path":"/m","mode":"0640","parents":true}`, "42 []"})
	err = c.RemoveFile(ctx, "box", "/r", true)
	check(err, seen{"DELETE", "/v0/sandboxes/box/files", "path=%2Fr&recursive=true", "", "0 []"})
	_, err = c.ListDir(ctx, "box", "/l")
	check(err, seen{"GET", "/v0/sandboxes/box/ls", "path=%2Fl", "", "0 []"})

	body, entry, err := c.GetFile(ctx, "box", "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); err != nil || string(b) != "abc" || entry.Size != 3 || entry.Mode != 0o644 {
		t.Errorf("got %q, %+v, %v", b, entry, err)
	}
	if entry, err := c.Stat(ctx, "box", "/f"); err != nil || entry.Type != "file" {
		t.Errorf("got %+v, %v", entry, err)
	}
	if _, err := c.RemoveImage(ctx, "docker.io/a b/c@sha256:1", true); err == nil {
		t.Error("an empty answer to a removal was taken for JSON")
	}
	if got.Path != "/v0/images/docker.io/a%20b/c@sha256:1" || got.Query != "force=true" {
		t.Errorf("got %+v", got)
	}
}

func TestCutDownloadIsNoEnd(t *testing.T) {
	c := serve(t, handle("GET /", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("X-Shard-Stat", `{"type":"file"}`)
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	}))
	body, _, err := c.GetFile(t.Context(), "box", "/f")
	if err != nil {
		t.Fatal(err)
	}
	defer body.Close()
	if b, err := io.ReadAll(body); string(b) != "half" || !errors.Is(err, client.ErrBroken) {
		t.Errorf("got %q, %v", b, err)
	}
}

// stream serves one exec whose attach runs f, counting the connections that were made.
func stream(t *testing.T, f func(ctx context.Context, ws *websocket.Conn)) (*client.Client, *atomic.Int32) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v0/sandboxes/{id}/exec", func(w http.ResponseWriter, r *http.Request) {
		var req shard.ExecRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil || !req.Attach {
			t.Errorf("request %+v, %v", req, err)
		}
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(shard.Exec{ID: "e1", State: shard.ExecRunning})
	})
	mux.HandleFunc("GET /v0/sandboxes/{id}/exec/{exec}", func(w http.ResponseWriter, r *http.Request) {
		if ext := r.Header.Get("Sec-WebSocket-Extensions"); ext != "" {
			t.Errorf("asked for the extensions %q", ext)
		}
		ws, err := websocket.Accept(w, r, nil)
		if err != nil {
			t.Error(err)
			return
		}
		ws.SetReadLimit(1 << 20)
		f(context.Background(), ws)
	})
	var conns atomic.Int32
	socket := filepath.Join(t.TempDir(), "shard.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute, ConnState: func(_ net.Conn, s http.ConnState) {
		if s == http.StateNew {
			conns.Add(1)
		}
	}}
	go func() { _ = srv.Serve(l) }()
	t.Cleanup(func() { _ = srv.Close() })
	c := client.New(client.Options{Dial: client.Unix(socket)})
	t.Cleanup(c.Close)
	return c, &conns
}

func send(t *testing.T, ws *websocket.Conn, kind byte, payload string) {
	t.Helper()
	if err := ws.Write(context.Background(), websocket.MessageBinary, append([]byte{kind}, payload...)); err != nil {
		t.Error(err)
	}
}

func TestStreamPassesBothWays(t *testing.T) {
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB, the longest payload
	c, conns := stream(t, func(ctx context.Context, ws *websocket.Conn) {
		var in strings.Builder
		for {
			_, msg, err := ws.Read(ctx)
			if err != nil {
				t.Error(err)
				return
			}
			if len(msg)-1 > client.StdinPiece {
				t.Errorf("a piece of %d bytes", len(msg)-1)
			}
			if msg[0] == 4 {
				break
			}
			in.Write(msg[1:])
		}
		send(t, ws, 1, in.String()[:10])
		send(t, ws, 2, "err\x00\xff")
		send(t, ws, 1, "")
		send(t, ws, 1, big)
		send(t, ws, 3, `{"code":3,"signal":0,"lost_bytes":7,"later":true}`)
		if err := ws.Close(websocket.StatusNormalClosure, ""); err != nil {
			t.Errorf("the client did not answer the close: %v", err)
		}
	})
	ctx := t.Context()
	_, s, err := c.Run(ctx, "box", shard.ExecRequest{Command: []string{"x"}, Stdin: true})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	go func() {
		if n, err := io.WriteString(s, strings.Repeat("i", 200_000)); n != 200_000 || err != nil {
			t.Errorf("wrote %d, %v", n, err)
		}
		if err := s.CloseStdin(); err != nil {
			t.Error(err)
		}
	}()
	var out, errs strings.Builder
	exit, err := s.Copy(&out, &errs)
	if err != nil {
		t.Fatal(err)
	}
	if out.String() != strings.Repeat("i", 10)+big || errs.String() != "err\x00\xff" {
		t.Errorf("output differs: %d bytes, %q", out.Len(), errs.String())
	}
	if exit.Code != 3 || exit.LostBytes != 7 {
		t.Errorf("got %+v", exit)
	}
	if n := conns.Load(); n != 1 {
		t.Errorf("%d connections for one exec, want one", n)
	}
}

func TestStreamEnds(t *testing.T) {
	for _, tc := range []struct {
		name string
		f    func(ctx context.Context, ws *websocket.Conn)
		want string
	}{
		{"error message", func(_ context.Context, ws *websocket.Conn) {
			send(t, ws, 5, `{"error":{"code":"sandbox_not_running","message":"box stopped"}}`)
			_ = ws.Close(1000, "")
		}, "box stopped"},
		{"close without a last message", func(_ context.Context, ws *websocket.Conn) { _ = ws.Close(1000, "") }, client.ErrBroken.Error()},
		{"cut", func(_ context.Context, ws *websocket.Conn) { _ = ws.CloseNow() }, client.ErrBroken.Error()},
		{"empty message", func(ctx context.Context, ws *websocket.Conn) { _ = ws.Write(ctx, websocket.MessageBinary, nil) }, "the daemon sent an empty message"},
		{"unknown kind", func(_ context.Context, ws *websocket.Conn) { send(t, ws, 9, "x") }, "the daemon sent a message of unknown kind 0x9"},
		{"text", func(ctx context.Context, ws *websocket.Conn) {
			_ = ws.Write(ctx, websocket.MessageText, []byte("\x01x"))
		}, "the daemon sent a text message"},
		{"too long", func(ctx context.Context, ws *websocket.Conn) {
			_ = ws.Write(ctx, websocket.MessageBinary, append([]byte{1}, make([]byte, 5<<20)...))
		}, "the daemon sent a message of more than"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, _ := stream(t, tc.f)
			s, err := c.Attach(t.Context(), "box", "e1")
			if err != nil {
				t.Fatal(err)
			}
			defer s.Close()
			if _, err := s.Copy(io.Discard, io.Discard); err == nil || !strings.HasPrefix(err.Error(), tc.want) {
				t.Errorf("got %v, want %s", err, tc.want)
			}
		})
	}
}

func TestStreamWriterThatFails(t *testing.T) {
	c, _ := stream(t, func(_ context.Context, ws *websocket.Conn) {
		send(t, ws, 1, "x")
		_, _, _ = ws.Read(context.Background())
	})
	s, err := c.Attach(t.Context(), "box", "e1")
	if err != nil {
		t.Fatal(err)
	}
	defer s.Close()
	pr, pw := io.Pipe()
	pr.CloseWithError(syscall.EPIPE)
	_, err = s.Copy(pw, io.Discard)
	if e, ok := errors.AsType[*client.WriteError](err); !ok || !errors.Is(e, syscall.EPIPE) {
		t.Errorf("got %v", err)
	}
}

func TestRunThatIsRefused(t *testing.T) {
	c := serve(t, handle("/", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusUnprocessableEntity)
		_, _ = io.WriteString(w, `{"error":{"code":"command_not_started","message":"no","exit_code":127}}`)
	}))
	if _, _, err := c.Run(t.Context(), "box", shard.ExecRequest{}); shard.CodeOf(err) != shard.CodeCommandNotStarted {
		t.Errorf("got %v", err)
	}
	hang := make(chan struct{})
	c = serve(t, handle("/", func(_ http.ResponseWriter, r *http.Request) { close(hang); <-r.Context().Done() }))
	cause := errors.New("ctrl-c")
	ctx, cancel := context.WithCancelCause(t.Context())
	go func() { <-hang; cancel(cause) }()
	if _, _, err := c.Run(ctx, "box", shard.ExecRequest{}); !errors.Is(err, cause) {
		t.Errorf("got %v, want the cause", err)
	}
	// A server that closes after each answer costs a second connection, no more.
	n := 0
	mux := handle("POST /", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Connection", "close")
		_, _ = io.WriteString(w, `{"exec":"e1"}`)
	})
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) { n++; w.WriteHeader(http.StatusConflict) })
	exec, _, err := serve(t, mux).Run(t.Context(), "box", shard.ExecRequest{})
	if err == nil || exec == nil || exec.ID != "e1" || n != 1 {
		t.Errorf("got %v, %v, %d attaches", exec, err, n)
	}
}

func TestRefusedAttachKeepsItsError(t *testing.T) {
	long := strings.Repeat("m", 4000) // longer than what the WebSocket library keeps of a refusal
	c := serve(t, handle("/", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusConflict)
		_ = json.NewEncoder(w).Encode(shard.ErrorBody{Error: shard.ErrorDetail{Code: shard.CodeInUse, Message: long}})
	}))
	_, err := c.Attach(t.Context(), "box", "e1")
	if e, ok := errors.AsType[*shard.Error](err); !ok || e.Code != shard.CodeInUse || e.Message != long {
		t.Errorf("got %v", err)
	}
}

// Package test runs the real programs against each other: the daemon, the CLI and the Go client, on every provider
// that works on this host. Tests that stand for a known fault of the field carry its number (TestCase…).
package test

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// image is the reference under which the busybox image is on every test daemon.
const image = "test/busybox:latest"

// start starts a daemon that has the busybox image.
func start(t *testing.T, o ...testenv.Options) *testenv.Daemon {
	t.Helper()
	var options testenv.Options
	if len(o) > 0 {
		options = o[0]
	}
	d := testenv.Start(t, options)
	d.Import(image, testenv.Busybox(t))
	return d
}

// connect gives a Go client of the daemon.
func connect(t *testing.T, d *testenv.Daemon) *client.Client {
	t.Helper()
	c := d.Client()
	t.Cleanup(c.Close)
	return c
}

// box creates a running sandbox and returns its id. It is removed when the (sub)test ends.
func box(t *testing.T, d *testenv.Daemon, provider string, options ...string) string {
	t.Helper()
	args := append([]string{"create", "--provider", provider}, options...)
	if !endsWithImage(options) {
		args = append(args, image)
	}
	r := d.Shard(args...)
	if r.Code != 0 {
		t.Fatalf("shard %s: exit code %d: %s", strings.Join(args, " "), r.Code, r.Stderr)
	}
	id := strings.TrimSpace(r.Stdout)
	if !shard.IsID(id) {
		t.Fatalf("create printed %q, which is not an id", r.Stdout)
	}
	t.Cleanup(func() { d.Shard("remove", "--force", id) })
	return id
}

// endsWithImage says whether the last option is the image: options come in pairs or as --flag=value.
func endsWithImage(options []string) bool {
	n := len(options)
	if n == 0 || strings.HasPrefix(options[n-1], "-") {
		return false
	}
	return n == 1 || !strings.HasPrefix(options[n-2], "--") || strings.Contains(options[n-2], "=")
}

// sh runs a shell script in a sandbox, which must exit 0, and returns its output without the last newline.
func sh(t *testing.T, d *testenv.Daemon, box, script string) string {
	t.Helper()
	r := d.Shard("exec", box, "sh", "-c", script)
	if r.Code != 0 {
		t.Fatalf("in %s: %s: exit code %d\n%s%s", box, script, r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// state is that of a sandbox's record.
func state(t *testing.T, d *testenv.Daemon, ref string) shard.State {
	t.Helper()
	return inspect(t, d, ref).State
}

func inspect(t *testing.T, d *testenv.Daemon, ref string) *shard.Inspection {
	t.Helper()
	got, err := connect(t, d).Inspect(t.Context(), ref)
	if err != nil {
		t.Fatalf("inspect %s: %v", ref, err)
	}
	return got
}

// refused checks that a CLI run failed as a refusal should: exit code 1, nothing on stdout, one line "shard: …" at the
// end of stderr (create tells its progress before) that holds each of the words.
func refused(t *testing.T, r testenv.Result, words ...string) {
	t.Helper()
	failed(t, r, 1, words...)
}

func failed(t *testing.T, r testenv.Result, code int, words ...string) {
	t.Helper()
	if r.Code != code {
		t.Errorf("exit code %d, want %d\nstdout: %s\nstderr: %s", r.Code, code, r.Stdout, r.Stderr)
	}
	if r.Stdout != "" {
		t.Errorf("a refusal printed to stdout: %q", r.Stdout)
	}
	lines := strings.Split(strings.TrimSuffix(r.Stderr, "\n"), "\n")
	last := lines[len(lines)-1]
	if !strings.HasPrefix(last, "shard: ") || strings.Count(r.Stderr, "shard: ") != 1 {
		t.Errorf("stderr does not end with one line of the form \"shard: …\": %q", r.Stderr)
	}
	for _, w := range words {
		if !strings.Contains(last, w) {
			t.Errorf("the message does not say %q: %q", w, r.Stderr)
		}
	}
	for _, private := range []string{"/tmp/sh", "goroutine ", ".go:"} {
		// Whoever has no daemon, or two, is told where.
		if strings.Contains(r.Stderr, private) && !strings.Contains(last, "--root") {
			t.Errorf("the message shows what is private (%s): %q", private, r.Stderr)
		}
	}
}

// exitCode waits for the end of a command that the test has started; one that does not end is killed.
func exitCode(t *testing.T, what string, cmd *exec.Cmd) int {
	t.Helper()
	late := time.AfterFunc(time.Minute, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	if !late.Stop() {
		t.Errorf("%s does not end", what)
	}
	return cmd.ProcessState.ExitCode()
}

// wantCode checks the code of an error of the API.
func wantCode(t *testing.T, err error, code shard.Code) {
	t.Helper()
	if got := shard.CodeOf(err); got != code {
		t.Errorf("code %q, want %q (%v)", got, code, err)
	}
}

// answer is what the daemon said to a plain request.
type answer struct {
	Status int
	Header http.Header
	Body   []byte
}

// code is that of the error in the body; anything but exactly the documented form is an error of the test.
func (a answer) code(t *testing.T) shard.Code {
	t.Helper()
	var body map[string]json.RawMessage
	if err := json.Unmarshal(a.Body, &body); err != nil || len(body) != 1 || body["error"] == nil {
		t.Errorf("status %d: the body is not {\"error\":{…}}: %q", a.Status, a.Body)
		return ""
	}
	var e shard.ErrorDetail
	if err := json.Unmarshal(body["error"], &e); err != nil || e.Message == "" || strings.Contains(e.Message, "\n") {
		t.Errorf("status %d: the error has no one-line message: %q", a.Status, a.Body)
	}
	if e.Code.Status() != a.Status {
		t.Errorf("status %d does not belong to code %s", a.Status, e.Code)
	}
	return e.Code
}

// call sends one request as any HTTP client would. A body that is not a string or []byte is sent as JSON.
func call(t *testing.T, d *testenv.Daemon, method, path string, body any, header ...string) answer {
	t.Helper()
	var r io.Reader
	switch b := body.(type) {
	case nil:
	case string:
		r = strings.NewReader(b)
	case []byte:
		r = bytes.NewReader(b)
	default:
		raw, err := json.Marshal(b)
		if err != nil {
			t.Fatal(err)
		}
		r = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(t.Context(), method, "http://shard"+path, r)
	if err != nil {
		t.Fatal(err)
	}
	if r != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i+1 < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
	}
	resp, err := rawHTTP(d).Do(req)
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s %s: read the answer: %v", method, path, err)
	}
	return answer{Status: resp.StatusCode, Header: resp.Header, Body: raw}
}

func rawHTTP(d *testenv.Daemon) *http.Client {
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			var dialer net.Dialer
			return dialer.DialContext(ctx, "unix", filepath.Join(d.Root, "shard.sock"))
		},
	}, Timeout: 5 * time.Minute}
}

// decode reads an answer that must have the status.
func decode[T any](t *testing.T, a answer, status int) T {
	t.Helper()
	var v T
	if a.Status != status {
		t.Fatalf("status %d, want %d: %s", a.Status, status, a.Body)
	}
	if err := json.Unmarshal(a.Body, &v); err != nil {
		t.Fatalf("the answer is not JSON: %v: %s", err, a.Body)
	}
	return v
}

func sum(b []byte) string {
	h := sha256.Sum256(b)
	return hex.EncodeToString(h[:])
}

// noise is n random bytes.
func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.Read(b)
	return b
}

func p[T any](v T) *T { return &v }

// diskUse is how much the files of a tree take, in bytes.
func diskUse(root string) (n int64) {
	_ = filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		var st unix.Stat_t
		if err == nil && e.Type().IsRegular() && unix.Lstat(path, &st) == nil {
			n += st.Blocks * 512
		}
		return nil
	})
	return n
}

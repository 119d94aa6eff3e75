package gate_test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
	"github.com/useshards/shard/test/script"
)

const wait = 60 * time.Second

// nobody is who runs serve: a user with no rights but those of its group.
const nobody = 65534

const image = "test/busybox:latest"

// server is a real shard serve, run by nobody, before a real daemon.
type server struct {
	t    *testing.T
	d    *testenv.Daemon
	cmd  *exec.Cmd
	done chan struct{}
	url  string

	mu  sync.Mutex
	log bytes.Buffer
}

// openToGroup gives nobody's group what the group shard has where it exists.
func openToGroup(t *testing.T, d *testenv.Daemon) {
	t.Helper()
	d.Must("tokens", "mint", "--name", "first")
	for path, mode := range map[string]os.FileMode{"": 0o710, "shard.sock": 0o660, "auth": 0o750, "auth/signing-key": 0o640, "auth/serve.tokens": 0o640} {
		if err := os.Chown(filepath.Join(d.Root, path), 0, nobody); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(filepath.Join(d.Root, path), mode); err != nil {
			t.Fatal(err)
		}
	}
	// setgid: what is made in it belongs to the group too.
	if err := os.Chmod(filepath.Join(d.Root, "auth"), 0o750|os.ModeSetgid); err != nil {
		t.Fatal(err)
	}
}

// serve starts shard serve as nobody, by way of a shell command that may set limits first.
func serve(t *testing.T, d *testenv.Daemon, before string, args ...string) *server {
	t.Helper()
	s := &server{t: t, d: d, done: make(chan struct{})}
	program := []string{filepath.Join(testenv.Bin(t), "shard"), "--root", d.Root, "serve", "--listen", "127.0.0.1:0"}
	s.cmd = exec.Command("sh", append([]string{"-c", before + ` exec "$@"`, "sh"}, append(program, args...)...)...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	s.cmd.Dir = "/"
	s.cmd.Env = []string{"PATH=" + os.Getenv("PATH")}
	pipe, err := s.cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	url := make(chan string, 1)
	go func() {
		defer close(s.done)
		for lines := bufio.NewScanner(pipe); lines.Scan(); {
			s.mu.Lock()
			s.log.WriteString(lines.Text() + "\n")
			s.mu.Unlock()
			var line struct{ URL string }
			if json.Unmarshal(lines.Bytes(), &line) == nil && line.URL != "" {
				url <- line.URL
			}
		}
		_ = s.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-s.done
		if t.Failed() {
			t.Logf("the log of serve:\n%s", s.text())
		}
	})
	select {
	case s.url = <-url:
	case <-s.done:
		t.Fatalf("serve ended: %s", s.text())
	case <-time.After(wait):
		t.Fatalf("serve does not listen: %s", s.text())
	}
	return s
}

func (s *server) text() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.log.String()
}

func (s *server) addr() string { _, addr, _ := strings.Cut(s.url, "://"); return addr }

// rss is the memory of a process, in bytes.
func rss(t *testing.T, pid int) int64 {
	t.Helper()
	raw, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) == 3 && f[0] == "VmRSS:" {
			kib, _ := strconv.ParseInt(f[1], 10, 64)
			return kib << 10
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// mint makes a key on the daemon's host.
func mint(t *testing.T, d *testenv.Daemon, args ...string) string {
	t.Helper()
	var out struct{ Token string }
	if err := json.Unmarshal([]byte(d.Must(append([]string{"tokens", "mint"}, args...)...)), &out); err != nil {
		t.Fatal(err)
	}
	return out.Token
}

// cli is the command line on another machine: it has an address and a key, and nothing of the daemon's.
func (s *server) cli(key string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(testenv.Bin(s.t), "shard"), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "SHARD_REMOTE=" + s.url, "SHARD_API_KEY=" + key}
	if strings.HasPrefix(s.url, "https:") {
		cmd.Env = append(cmd.Env, "SHARD_CA_FILE="+filepath.Join(s.d.Root, "auth/tls/ca.crt"))
	}
	return cmd
}

func (s *server) must(key string, args ...string) string {
	s.t.Helper()
	r := testenv.Run(s.t, s.cli(key, args...))
	if r.Code != 0 {
		s.t.Fatalf("shard %q: exit code %d\n%s%s", args, r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// ask sends one raw request and reads the answer's status, 0 when there is none, and its body.
func (s *server) ask(raw io.Reader) (int, string) {
	conn, err := net.DialTimeout("tcp", s.addr(), wait)
	if err != nil {
		return 0, err.Error()
	}
	if strings.HasPrefix(s.url, "https:") {
		conn = tls.Client(conn, &tls.Config{InsecureSkipVerify: true}) // the answer is what is looked at
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(wait))
	go func() { _, _ = io.Copy(conn, raw) }()
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		return 0, err.Error()
	}
	defer resp.Body.Close()
	body, _ := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body)
}

func head(method, path, key string, headers ...string) string {
	return method + " " + path + " HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + key + "\r\n" + strings.Join(append(headers, "\r\n"), "\r\n")
}

func TestServe(t *testing.T) {
	d := testenv.Start(t, testenv.Options{})
	d.Import(image, testenv.Busybox(t))
	case141(t, d)
	// The authority is made by root, once: nobody may read it, and not write beside it.
	openToGroup(t, d)
	if err := os.MkdirAll(filepath.Join(d.Root, "auth/tls"), 0o770); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(filepath.Join(d.Root, "auth/tls"), 0o770); err != nil {
		t.Fatal(err)
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) { story(t, d, provider, "--tls-self-signed") })
	t.Run("plain", func(t *testing.T) {
		d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
			story(t, d, provider)
			fewDescriptors(t, d, provider)
		}, "runc")
	})
	t.Run("stories", func(t *testing.T) { stories(t, d) })
	t.Run("names", func(t *testing.T) { case138(t, d) })
	t.Run("rough clients", func(t *testing.T) { case140(t, d) })
}

// story is a day of a remote command line.
func story(t *testing.T, d *testenv.Daemon, provider string, args ...string) {
	s := serve(t, d, "", args...)
	key := mint(t, d, "--name", "story")
	secure := len(args) > 0
	r := testenv.Run(t, s.cli(key, "version"))
	if r.Code != 0 || strings.Contains(r.Stderr, "not encrypted") == secure {
		t.Fatalf("%+v", r)
	}
	box := s.must(key, "create", "--name", "far", "--provider", provider, image)
	if out := s.must(key, "exec", "far", "echo", "hi"); out != "hi" {
		t.Errorf("exec: %q", out)
	}
	if r := testenv.Run(t, s.cli(key, "exec", "far", "sh", "-c", "echo out; echo err >&2; exit 7")); r.Code != 7 || r.Stdout != "out\n" || !strings.HasSuffix(r.Stderr, "err\n") {
		t.Errorf("%+v", r)
	}
	if r := testenv.Run(t, s.cli(key, "exec", "far", "nonexistent")); r.Code != 127 {
		t.Errorf("%+v", r)
	}
	// Many bytes in and out at the same time, by a stream and by a file.
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<20)
	cat := s.cli(key, "exec", "-i", "far", "cat")
	sum := sha256.New()
	cat.Stdin, cat.Stdout = bytes.NewReader(big), sum
	if r := testenv.Run(t, cat); r.Code != 0 {
		t.Errorf("%+v", r)
	}
	if want := sha256.Sum256(big); !bytes.Equal(sum.Sum(nil), want[:]) {
		t.Error("16 MiB through a stream came back differently")
	}
	file := filepath.Join(t.TempDir(), "big")
	if err := os.WriteFile(file, big, 0o600); err != nil {
		t.Fatal(err)
	}
	s.must(key, "cp", file, "far:/tmp/big")
	s.must(key, "cp", "far:/tmp/big", file+".back")
	if back, err := os.ReadFile(file + ".back"); err != nil || !bytes.Equal(back, big) {
		t.Errorf("16 MiB by cp came back differently: %v", err)
	}
	if out := s.must(key, "list", "--quiet"); out != box {
		t.Errorf("list: %q", out)
	}
	for _, c := range [][]string{{"inspect", "far"}, {"capabilities"}, {"providers"}, {"tokens", "scopes"}} {
		if out := s.must(key, c...); out == "" || strings.Contains(out, d.Root) {
			t.Errorf("%q: %q", c, out)
		}
	}
	// The daemon's socket is no place that a sandbox knows.
	if out := s.must(key, "exec", "far", "sh", "-c", "ls -d "+d.Root+" "+d.Root+"/shard.sock 2>/dev/null | wc -l"); out != "0" {
		t.Errorf("a sandbox sees the daemon's root: %s", out)
	}
	// What only the daemon's host may.
	if r := testenv.Run(t, s.cli(key, "image", "list")); r.Code != 1 || r.Stdout != "" {
		t.Errorf("%+v", r)
	}
	// A key of few rights.
	reader := mint(t, d, "--name", "reader", "--scopes", "sandbox:read,sandbox:write")
	s.must(reader, "inspect", "far")
	for _, c := range [][]string{{"exec", "far", "true"}, {"remove", "--force", "far"}, {"cp", "far:/etc/passwd", t.TempDir()}, {"create", "--secret", "A", image}, {"create", "--policy", "p", image}} {
		if r := testenv.Run(t, s.cli(reader, c...)); r.Code != 1 || !strings.Contains(r.Stderr, "lacks the scope") {
			t.Errorf("%q: %+v", c, r)
		}
	}
	// The key is taken back while a command runs: the stream ends, the command does not.
	passing := mint(t, d, "--name", "passing")
	sleeper := s.cli(passing, "exec", "far", "sh", "-c", "echo up; touch /tmp/up; sleep 1000")
	out, err := sleeper.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	sleeper.Stderr = &stderr
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	late := time.AfterFunc(wait, func() { _ = sleeper.Process.Kill() })
	defer late.Stop()
	if _, err := io.ReadFull(out, make([]byte, 3)); err != nil {
		t.Fatal(err)
	}
	d.Must("tokens", "revoke", "--name", "passing")
	_, _ = io.Copy(io.Discard, out)
	_ = sleeper.Wait()
	if !late.Stop() {
		t.Error("the stream of a revoked key goes on")
	}
	if code := sleeper.ProcessState.ExitCode(); code == 0 {
		t.Errorf("exit code %d: %s", code, stderr.String())
	}
	if out := s.must(key, "exec", "far", "sh", "-c", "ps | grep -c '[s]leep 1000'"); out == "0" {
		t.Error("the command ended with its client")
	}
	if r := testenv.Run(t, s.cli(passing, "list")); r.Code != 1 || !strings.Contains(r.Stderr, "API key") {
		t.Errorf("%+v", r)
	}
	s.must(key, "remove", "--force", "far")

	_ = s.cmd.Process.Signal(syscall.SIGHUP)
	s.must(key, "version")
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-s.done:
	case <-time.After(wait):
		t.Fatal("it does not end at SIGTERM")
	}
	if code := s.cmd.ProcessState.ExitCode(); code != 0 {
		t.Errorf("SIGTERM: exit code %d", code)
	}
	log := s.text()
	for _, secret := range []string{key, reader, passing} {
		if _, _, found := strings.Cut(log, secret[strings.LastIndexByte(secret, '.'):]); found {
			t.Error("a key is in the log")
		}
	}
	if !strings.Contains(log, `"subject":"reader"`) || !strings.Contains(log, `"status":403`) {
		t.Error("the log names neither subject nor status")
	}
}

// stories are those that the command line goes through on the socket, word for word over TLS.
func stories(t *testing.T, d *testenv.Daemon) {
	s := serve(t, d, "", "--tls-self-signed")
	cmd := s.cli(mint(t, d, "--name", "stories"))
	shard := []string{"env"}
	for _, kv := range cmd.Env {
		if strings.HasPrefix(kv, "SHARD_") {
			shard = append(shard, kv)
		}
	}
	script.Run(t, d, append(shard, cmd.Path), "runc")
}

// case138: names are never paths.
func case138(t *testing.T, d *testenv.Daemon) {
	s := serve(t, d, "")
	key := mint(t, d, "--name", "names")
	canary := filepath.Join(filepath.Dir(d.Root), filepath.Base(d.Root)+"-canary")
	if err := os.WriteFile(canary, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	defer os.Remove(canary)
	before := tree(t, d.Root)
	for _, name := range []string{".", "..", "a/b", "%2e%2e", "..%2f", "..%2f..%2f" + filepath.Base(canary), "%00", "a%00b", strings.Repeat("a", 300), "-", "a%20b", "UPPER", "%d0%b0", "%ef%bc%8e%ef%bc%8e"} {
		for _, route := range []string{"GET /v0/sandboxes/N", "DELETE /v0/sandboxes/N", "DELETE /v0/sandboxes/N?force=true", "POST /v0/sandboxes/N/stop", "GET /v0/sandboxes/N/exec/N",
			"DELETE /v0/sandboxes/N/exec/N", "GET /v0/sandboxes/N/ls?path=/"} {
			method, path, _ := strings.Cut(route, " ")
			status, body := s.ask(strings.NewReader(head(method, strings.ReplaceAll(path, "N", name), key, "Content-Length: 0")))
			if status != 400 && status != 404 && status != 403 || strings.Contains(body, d.Root) {
				t.Errorf("%s with %q: %d %s", route, name, status, body)
			}
			if status == 403 && !strings.Contains(name, "/") {
				t.Errorf("%s with %q changes the route: %s", route, name, body)
			}
		}
		plain, _ := json.Marshal(map[string]string{"image": image, "name": strings.NewReplacer("%2e", ".", "%2f", "/", "%00", "\x00", "%20", " ").Replace(name)})
		if name == "-" {
			continue // which is allowed
		}
		status, body := s.ask(strings.NewReader(head("POST", "/v0/sandboxes", key, "Content-Length: "+strconv.Itoa(len(plain))) + string(plain)))
		if status != 400 {
			t.Errorf("create %q: %d %s", name, status, body)
		}
	}
	if after := tree(t, d.Root); after != before {
		t.Errorf("the root changed:\n%s\nto\n%s", before, after)
	}
	if raw, err := os.ReadFile(canary); err != nil || string(raw) != "x" {
		t.Errorf("the canary: %q %v", raw, err)
	}
}

// tree lists the records of a root.
func tree(t *testing.T, root string) string {
	t.Helper()
	var out strings.Builder
	for _, dir := range []string{"", "sandboxes", "auth", "images"} {
		entries, err := os.ReadDir(filepath.Join(root, dir))
		if err != nil && !os.IsNotExist(err) {
			t.Fatal(err)
		}
		for _, e := range entries {
			fmt.Fprintln(&out, filepath.Join(dir, e.Name()))
		}
	}
	return out.String()
}

// endless is a body of so many bytes that nobody wants.
type endless struct{ left int64 }

func (e *endless) Read(p []byte) (int, error) {
	if e.left <= 0 {
		return 0, io.EOF
	}
	n := int(min(int64(len(p)), e.left))
	for i := range p[:n] {
		p[i] = '['
	}
	e.left -= int64(n)
	return n, nil
}

// case140: rough clients cost neither the daemon nor serve its memory, and others are served meanwhile.
func case140(t *testing.T, d *testenv.Daemon) {
	s := serve(t, d, "")
	key := mint(t, d, "--name", "rough")
	mine := s.cmd.Process.Pid
	daemonBefore, before := rss(t, d.PID()), rss(t, mine)
	const huge = 500 << 20
	for name, raw := range map[string]io.Reader{
		"500 MiB of JSON":  io.MultiReader(strings.NewReader(head("POST", "/v0/sandboxes", key, fmt.Sprintf("Content-Length: %d", huge))), &endless{huge}),
		"deep JSON":        strings.NewReader(head("POST", "/v0/sandboxes", key, "Content-Length: 600000") + strings.Repeat(`{"a":`, 100_000) + strings.Repeat("}", 100_000)),
		"a head of 1 MiB":  strings.NewReader("GET /v0/version HTTP/1.1\r\nX-A: " + strings.Repeat("a", 1<<20)),
		"a chunk of a TiB": strings.NewReader(head("POST", "/v0/sandboxes", key, "Transfer-Encoding: chunked") + "10000000000\r\n" + strings.Repeat("[", 2<<20)),
		"a chunk of junk":  strings.NewReader(head("POST", "/v0/sandboxes", key, "Transfer-Encoding: chunked") + "zz\r\n[]\r\n0\r\n\r\n"),
		"HTTP/2":           strings.NewReader("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + strings.Repeat("\x00\x00\x04\x03\x00\x00\x00\x00\x01\x00\x00\x00\x08", 1000)),
	} {
		if status, body := s.ask(raw); status != 0 && status != 400 && status != 413 {
			t.Errorf("%s: %d %s", name, status, body)
		}
		if status, body := s.ask(strings.NewReader(head("GET", "/v0/version", key))); status != 200 {
			t.Errorf("after %s: %d %s", name, status, body)
		}
	}
	const slack = 64 << 20
	testenv.Eventually(t, "memory returns", func() (bool, string) {
		daemonNow, now := rss(t, d.PID()), rss(t, mine)
		return daemonNow < daemonBefore+slack && now < before+slack, fmt.Sprintf("the daemon has %d of %d, serve %d of %d bytes", daemonNow, daemonBefore, now, before)
	})
}

// fewDescriptors: the bound of all keeps descriptors for those who are in.
func fewDescriptors(t *testing.T, d *testenv.Daemon, provider string) {
	s := serve(t, d, "ulimit -n 128;")
	if !strings.Contains(s.text(), `"connections":32`) {
		t.Errorf("another bound: %s", s.text())
	}
	key := mint(t, d, "--name", "few")
	boxes := []string{"few-a", "few-b", "few-c"} // each can be watched 16 times
	for _, name := range boxes {
		d.Must("create", "--name", name, "--provider", provider, image)
	}
	defer d.Must(append([]string{"remove", "--force"}, boxes...)...)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var conns []net.Conn
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	served, closed := 0, 0
	for i := range 40 {
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", s.addr())
		if err != nil {
			closed++
			continue
		}
		conns = append(conns, conn)
		_ = conn.SetDeadline(time.Now().Add(wait))
		_, _ = io.WriteString(conn, head("GET", "/v0/sandboxes/"+boxes[i%3]+"/watch?path=/tmp", key))
		if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
			closed++
		} else if served++; resp.StatusCode != 200 {
			t.Errorf("status %d", resp.StatusCode)
		}
	}
	if served != 32 || closed != 8 {
		t.Errorf("%d streams and %d closed", served, closed)
	}
	for _, c := range conns {
		c.Close()
	}
	conns = nil
	testenv.Eventually(t, "served again", func() (bool, string) {
		status, body := s.ask(strings.NewReader(head("GET", "/v0/version", key)))
		return status == 200, fmt.Sprint(status, body)
	})
	if strings.Contains(s.text(), "too many open files") {
		t.Error("it ran out of descriptors")
	}
}

// case141: who may not talk to the daemon itself, before and after a restart.
func case141(t *testing.T, d *testenv.Daemon) {
	for range 2 {
		socket, err := os.Stat(filepath.Join(d.Root, "shard.sock"))
		if err != nil {
			t.Fatal(err)
		}
		root, err := os.Stat(d.Root)
		if err != nil {
			t.Fatal(err)
		}
		if s, r := socket.Mode().Perm(), root.Mode().Perm(); (s != 0o600 || r != 0o700) && (s != 0o660 || r != 0o710) {
			t.Errorf("the socket has mode %o, the root %o", s, r)
		}
		stranger := exec.Command(filepath.Join(testenv.Bin(t), "shard"), "--root", d.Root, "--remote", "", "version", "--format", "json")
		stranger.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		stranger.Dir = "/"
		if r := testenv.Run(t, stranger); r.Code != 1 || !strings.Contains(r.Stderr, "no permission") {
			t.Errorf("a stranger: %+v", r)
		}
		for _, file := range []string{"auth/signing-key", "auth/serve.tokens", "daemon.pid", "sandboxes"} {
			read := exec.Command("cat", filepath.Join(d.Root, file))
			read.SysProcAttr = stranger.SysProcAttr
			if r := testenv.Run(t, read); r.Code == 0 {
				t.Errorf("a stranger reads %s", file)
			}
		}
		d.Stop()
		d.Restart()
	}
}

package test

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard/internal/testenv"
)

// webserver is the server program of the tests of previews, built once.
var webserver = sync.OnceValues(func() ([]byte, error) {
	bin := filepath.Join(testenv.Module(), "build", "test-bin", "webserver")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "./test/testdata/webserver")
	cmd.Dir = testenv.Module()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(bin)
})

func webserverEntry(t *testing.T) testenv.Entry {
	t.Helper()
	body, err := webserver()
	if err != nil {
		t.Fatal(err)
	}
	return testenv.Entry{Name: "bin/webserver", Body: string(body), Mode: 0o755}
}

// gate is a running shard serve with previews.
type gate struct {
	t *testing.T
	d *testenv.Daemon
	// url is the API's, port that of all addresses.
	url, port string
	roots     *x509.CertPool
}

// serveGate starts shard serve on this machine's loopback: the daemon's socket is a file, wherever its network is.
func serveGate(t *testing.T, d *testenv.Daemon, args ...string) *gate {
	t.Helper()
	cmd := exec.Command(filepath.Join(testenv.Bin(t), "shard"), append([]string{"--root", d.Root, "serve", "--listen", "127.0.0.1:0"}, args...)...)
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	urls, ended := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			log.Write(append(lines.Bytes(), '\n'))
			var line struct{ Msg, URL string }
			if json.Unmarshal(lines.Bytes(), &line) == nil && line.Msg == "shard serve listens" {
				urls <- line.URL
			}
		}
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Signal(os.Interrupt)
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Error("shard serve does not end")
			_ = cmd.Process.Kill()
			<-ended
		}
		if t.Failed() {
			t.Logf("the log of shard serve:\n%s", &log)
		}
	})
	g := &gate{t: t, d: d}
	select {
	case g.url = <-urls:
	case <-ended:
		t.Fatalf("shard serve ended: %s", &log)
	case <-time.After(time.Minute):
		t.Fatal("shard serve does not listen")
	}
	u, _ := url.Parse(g.url)
	g.port = u.Port()
	if u.Scheme == "https" {
		pem, err := os.ReadFile(filepath.Join(d.Root, "auth/tls/ca.crt"))
		g.roots = x509.NewCertPool()
		if err != nil || !g.roots.AppendCertsFromPEM(pem) {
			t.Fatal(err)
		}
	}
	testenv.Eventually(t, "the daemon hears of the previews", func() (bool, string) {
		r := d.Shard("daemon", "status", "--format", "json")
		return strings.Contains(r.Stdout, ":"+g.port+`"`), r.Stdout + r.Stderr
	})
	return g
}

// with is the same gate for a subtest.
func (g *gate) with(t *testing.T, d *testenv.Daemon) *gate {
	sub := *g
	sub.t, sub.d = t, d
	return &sub
}

// browser is an HTTP client that finds every name at the gate and keeps cookies as browsers do.
func (g *gate) browser() *http.Client {
	t := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: g.roots}, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", "127.0.0.1:"+g.port)
	}}
	g.t.Cleanup(t.CloseIdleConnections)
	return &http.Client{Transport: t, Jar: newJar()}
}

// jar keeps each host's cookies apart: all that is asked of it here.
type jar struct {
	mu    sync.Mutex
	hosts map[string]map[string]*http.Cookie
}

func newJar() *jar { return &jar{hosts: make(map[string]map[string]*http.Cookie)} }

// SetCookies implements http.CookieJar.
func (j *jar) SetCookies(u *url.URL, cookies []*http.Cookie) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, c := range cookies {
		if j.hosts[u.Host] == nil {
			j.hosts[u.Host] = make(map[string]*http.Cookie)
		}
		j.hosts[u.Host][c.Name] = c
	}
}

// Cookies implements http.CookieJar.
func (j *jar) Cookies(u *url.URL) (out []*http.Cookie) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, c := range j.hosts[u.Host] {
		out = append(out, c)
	}
	return out
}

// send makes a request and reads the answer, which must come whole.
func (g *gate) send(b *http.Client, method, at string, body io.Reader, headers ...string) (int, string) {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 2*time.Minute)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, method, at, body)
	if err != nil {
		g.t.Fatal(err)
	}
	for _, h := range headers {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := b.Do(req)
	if err != nil {
		g.t.Fatalf("%s %s: %v", method, at, err)
	}
	defer resp.Body.Close()
	got, err := io.ReadAll(resp.Body)
	if err != nil {
		g.t.Errorf("%s %s: the answer is cut: %v", method, at, err)
	}
	return resp.StatusCode, string(got)
}

// want checks an answer's status, and that it holds a text.
func (g *gate) want(b *http.Client, at string, status int, text string, headers ...string) {
	g.t.Helper()
	if got, body := g.send(b, "GET", at, nil, headers...); got != status || !strings.Contains(body, text) {
		g.t.Errorf("%s: %d %.500s, want %d and %q", at, got, body, status, text)
	}
}

// events opens an endless answer; ended says that it was cut.
func (g *gate) events(b *http.Client, at string) (ended func()) {
	g.t.Helper()
	req, _ := http.NewRequestWithContext(g.t.Context(), "GET", at+"/events", nil)
	resp, err := b.Do(req)
	if err != nil {
		g.t.Fatal(err)
	}
	r := bufio.NewReader(resp.Body)
	if line, err := r.ReadString('\n'); err != nil || line != "data: first\n" {
		g.t.Fatalf("the first event: %q %v", line, err)
	}
	return func() {
		g.t.Helper()
		defer resp.Body.Close()
		late := time.AfterFunc(time.Minute, func() { _ = resp.Body.Close(); g.t.Error("the events go on") })
		defer late.Stop()
		if _, err := io.Copy(io.Discard, r); err == nil {
			g.t.Error("the events end as if they were whole")
		}
	}
}

// socket opens the echo of the sandbox's server and uses it.
func (g *gate) socket(b *http.Client, at string) *websocket.Conn {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), time.Minute)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, at+"/echo", &websocket.DialOptions{HTTPClient: b, HTTPHeader: http.Header{"Origin": {at}}})
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = ws.CloseNow() })
	ws.SetReadLimit(1 << 20)
	for _, text := range []string{"hello", strings.Repeat("long ", 100_000)} {
		if err := ws.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			g.t.Fatal(err)
		}
		if _, got, err := ws.Read(ctx); err != nil || string(got) != text {
			g.t.Fatalf("the echo: %d bytes for %d, %v", len(got), len(text), err)
		}
	}
	return ws
}

func closes(t *testing.T, ws *websocket.Conn) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	if _, _, err := ws.Read(ctx); err == nil || ctx.Err() != nil {
		t.Errorf("the WebSocket is still there: %v", err)
	}
}

// TestPreview: from the command line to the program in the sandbox and back, over TLS.
func TestPreview(t *testing.T) {
	t.Parallel()
	d := testenv.Start(t, testenv.Options{})
	d.Import(image, testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(testenv.BusyboxEntries(t), webserverEntry(t))...)))
	refused(t, d.Shard("port", "url", "nosuch", "80"), "--preview-domain")
	key := decodeKey(t, d.Must("tokens", "mint", "--name", "tester", "--scopes", "port:write"))
	g := serveGate(t, d, "--tls-self-signed", "--preview-domain", "preview.test")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		g.with(t, d).story(provider, key)
	})
}

func decodeKey(t *testing.T, line string) string {
	t.Helper()
	var out struct{ Token string }
	if err := json.Unmarshal([]byte(line), &out); err != nil {
		t.Fatal(err)
	}
	return out.Token
}

func (g *gate) story(provider, key string) {
	t, d := g.t, g.d
	id, neighbour := box(t, d, provider, "--name", "site-"+provider), box(t, d, provider)
	at := func(port int, ref string) string {
		return fmt.Sprintf("https://%d-%s.preview.test:%s", port, ref, g.port)
	}
	start := func(ref string) { d.Must("run", ref, "--name", "web", "webserver", "127.0.0.1:8000") }
	link := d.Must("port", "url", "site-"+provider, "8000")
	if !strings.HasPrefix(link, at(8000, id)+"/?shard-link=") {
		t.Fatalf("the link is %s", link)
	}
	b := g.browser()
	g.want(b, link, 502, "Nothing listens on port 8000")
	start(id)
	start(neighbour)
	testenv.Eventually(t, "the server answers", func() (bool, string) {
		status, body := g.send(b, "GET", at(8000, id)+"/saw?q=1", nil)
		return status == 200 && strings.Contains(body, `"host":"localhost:8000"`) && strings.Contains(body, `"uri":"/saw?q=1"`) &&
			strings.Contains(body, `"remote":"127.0.0.1:`) && !strings.Contains(body, "shard"), body
	})
	g.want(b, at(8000, "site-"+provider)+"/saw", 401, "shard port url") // a host of its own, which no cookie is for
	g.want(g.browser(), at(8000, id)+"/saw", 401, "shard port url")
	g.want(b, at(8001, id)+"/saw", 401, "")
	g.want(b, at(8000, neighbour)+"/saw", 401, "")
	g.want(b, strings.Replace(link, id, neighbour, 1), 403, "")
	g.want(b, strings.ReplaceAll(link, id, neighbour), 401, "")
	g.want(b, strings.Replace(link, "://8000", "://8001", 1), 403, "")

	// Bytes, both ways, whole.
	const size = 24 << 20
	sum := sha256.New()
	if _, err := io.CopyN(sum, rand.NewChaCha8([32]byte{1}), size); err != nil {
		t.Fatal(err)
	}
	want := hex.EncodeToString(sum.Sum(nil))
	_, body := g.send(b, "GET", fmt.Sprintf("%s/download?n=%d", at(8000, id), size), nil)
	if got := sha256.Sum256([]byte(body)); hex.EncodeToString(got[:]) != want {
		t.Errorf("a download of %d bytes differs, it has %d", size, len(body))
	}
	for _, upload := range []io.Reader{strings.NewReader(body), io.MultiReader(strings.NewReader(body))} { // with a length, and chunked
		if _, got := g.send(b, "POST", at(8000, id)+"/upload", upload); got != fmt.Sprint(size, " ", want, " <nil>") {
			t.Errorf("an upload arrives as %s", got)
		}
	}
	g.socket(b, at(8000, id))
	var wg sync.WaitGroup
	for i := range 12 { // of one address, 32 may be unknown at once
		wg.Go(func() { g.want(b, fmt.Sprintf("%s/saw?n=%d", at(8000, id), i), 200, fmt.Sprintf("/saw?n=%d", i)) })
	}
	wg.Wait()

	// An API key reaches what is forwarded, and only while it is.
	bearer := "Authorization: Bearer " + key
	g.want(g.browser(), at(8000, id)+"/saw", 403, "port add", bearer)
	host := map[string]string{"gvisor": "9300", "runc": "9301"}[provider]
	d.Must("port", "add", id, host+":8000")
	if status, body := g.send(g.browser(), "GET", at(8000, "site-"+provider)+"/saw", nil, bearer); status != 200 || strings.Contains(body, "Bearer") {
		t.Errorf("with an API key: %d %s", status, body)
	}
	d.Must("port", "remove", id, host)
	g.want(g.browser(), at(8000, id)+"/saw", 403, "port add", bearer)

	// A link made from afar, and one that expires.
	far := g.cli(key, "port", "url", id, "8000")
	g.want(g.browser(), far, 404, "") // the server has no page at /
	short := d.Must("port", "url", "--expires", "2s", id, "8000")
	testenv.Eventually(t, "the link expires", func() (bool, string) {
		status, body := g.send(g.browser(), "GET", short, nil)
		return status == 401, body
	})

	// What is open ends with the link's token, and with the sandbox.
	farBrowser := g.browser()
	g.want(farBrowser, far, 404, "")
	ended, ws := g.events(b, at(8000, id)), g.socket(b, at(8000, id))
	other := g.events(farBrowser, at(8000, id))
	d.Must("tokens", "revoke", "--name", "preview."+id+".8000")
	ended()
	closes(t, ws)
	g.want(b, at(8000, id)+"/saw", 401, "")
	g.want(farBrowser, at(8000, id)+"/saw", 200, "")
	ws = g.socket(farBrowser, at(8000, id))
	d.Must("stop", id)
	other()
	closes(t, ws)
	g.want(farBrowser, at(8000, id)+"/saw", 503, "not running")
	d.Must("start", id)
	testenv.Eventually(t, "the server answers again", func() (bool, string) {
		status, body := g.send(farBrowser, "GET", at(8000, id)+"/saw", nil)
		return status == 200, body
	})
	d.Must("remove", "--force", id)
	g.want(farBrowser, at(8000, id)+"/saw", 404, "no such sandbox")
	refused(t, d.Shard("port", "url", id, "8000"), id)

	// Who had a link to a sandbox has none to the next of its name.
	next := box(t, d, provider, "--name", "site-"+provider)
	start(next)
	g.want(farBrowser, at(8000, "site-"+provider)+"/saw", 401, "shard port url")
	g.want(farBrowser, strings.Replace(far, "-"+id+".", "-site-"+provider+".", 1), 403, "another address")
	g.want(farBrowser, strings.Replace(far, "-"+id+".", "-"+next+".", 1), 403, "another address")
	g.want(farBrowser, far, 404, "no such sandbox")
}

// cli is the command line on another machine.
func (g *gate) cli(key string, args ...string) string {
	g.t.Helper()
	cmd := exec.Command(filepath.Join(testenv.Bin(g.t), "shard"), args...)
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "SHARD_REMOTE=" + g.url, "SHARD_API_KEY=" + key, "SHARD_CA_FILE=" + filepath.Join(g.d.Root, "auth/tls/ca.crt")}
	r := testenv.Run(g.t, cmd)
	if r.Code != 0 {
		g.t.Fatalf("shard %q: %s", args, r.Stderr)
	}
	return strings.TrimSpace(r.Stdout)
}

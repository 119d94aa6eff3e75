package gate

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
	"github.com/golang-jwt/jwt/v5"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

var parameter = regexp.MustCompile(`\{\w+(\.\.\.)?\}`)

// pathOf is a path of the route, whatever its parameters are.
func pathOf(r *shard.Route) string { return parameter.ReplaceAllString(r.Path, "abc") }

// TestCase133ScopeTable: every route with a token of every scope, one of all, and one whose scopes do not exist.
func TestCase133ScopeTable(t *testing.T) {
	r := newRig(t, Options{})
	tokens := map[string]string{"colour": r.forge(jwt.SigningMethodHS256, r.key(), claims("colour", "sandbox:*", "EXEC")), "": r.forge(jwt.SigningMethodHS256, r.key(), claims())}
	for _, s := range shard.Scopes {
		tokens[s.Name] = r.mint(0, s.Name)
	}
	for i := range shard.Routes {
		route := &shard.Routes[i]
		for scope, text := range tokens {
			before := len(r.requests())
			got := r.ask(route.Method, pathOf(route), text, "X-Shard-Scopes: *", "Connection: keep-alive, X-Shard-Scopes")
			want := !route.Local && (route.Scope == "" || scope == route.Scope || scope == shard.ScopeAll)
			reached := r.requests()[before:]
			switch {
			case got == nil:
				t.Errorf("%s with %q: no answer", route.Name(), scope)
			case !want:
				if got.status != 403 || got.code != shard.CodeForbidden && route.Method != "HEAD" || len(reached) != 0 {
					t.Errorf("%s with %q: %d %s, %d reached the daemon", route.Name(), scope, got.status, got.body, len(reached))
				}
			case route.Door:
				if got.code != shard.CodeUnsupported || len(reached) != 0 {
					t.Errorf("%s with %q, without previews: %d %s, %d reached the daemon", route.Name(), scope, got.status, got.body, len(reached))
				}
			case got.status != 200 || len(reached) != 1 || !got.close:
				t.Errorf("%s with %q: %+v, %d reached the daemon", route.Name(), scope, got, len(reached))
			default:
				said := scope
				if !shard.IsScope(scope) {
					said = ""
				}
				if h := reached[0].Header; !slices.Equal(h[shard.ScopesHeader], []string{said}) || h["Authorization"] != nil || !reached[0].Close {
					t.Errorf("%s with %q reached the daemon as %v", route.Name(), scope, h)
				}
			}
		}
	}
	for _, other := range []string{"PATCH /v0/sandboxes", "OPTIONS /v0/sandboxes", "TRACE /v0/version", "GET /", "GET /metrics/", "GET /v0", "POST /v0/version",
		"GET /v0/sandboxes/", "GET /v0/sandboxes/web/exec/", "GET /v0/../v0/version", "DELETE /v0/images/a", "GET /v0/daemon"} {
		method, path, _ := strings.Cut(other, " ")
		before := len(r.requests())
		if got := r.ask(method, path, tokens["*"]); got == nil || got.status != 403 || len(r.requests()) != before {
			t.Errorf("%s: %+v", other, got)
		}
		if got := r.ask(method, path, ""); got == nil || got.status != 401 {
			t.Errorf("%s without a token tells of routes: %+v", other, got)
		}
	}
}

// key is the signing key.
func (r *rig) key() []byte {
	raw, err := os.ReadFile(token.DefaultKeyFile(r.root))
	if err != nil {
		r.t.Fatal(err)
	}
	return []byte(strings.TrimSpace(string(raw)))
}

func claims(scopes ...string) jwt.MapClaims {
	id := make([]byte, 16)
	_, _ = rand.Read(id)
	if scopes == nil {
		scopes = []string{}
	}
	return jwt.MapClaims{"sub": "forger", "jti": hex.EncodeToString(id), "iat": time.Now().Unix(), "scopes": scopes}
}

// forge signs a token and writes a record for it that agrees, as somebody could who has the key and the ledger.
func (r *rig) forge(method jwt.SigningMethod, key any, c jwt.MapClaims) string {
	r.t.Helper()
	text, err := jwt.NewWithClaims(method, c).SignedString(key)
	if err != nil {
		r.t.Fatal(err)
	}
	sum := sha256.Sum256([]byte(text))
	record := map[string]any{"id": c["jti"], "name": c["sub"], "hash": hex.EncodeToString(sum[:]), "issued_at": time.Now(), "expires_at": nil, "scopes": c["scopes"]}
	if exp, ok := c["exp"].(int64); ok {
		record["expires_at"] = time.Unix(exp, 0).UTC()
	}
	line, _ := json.Marshal(record)
	f, err := os.OpenFile(filepath.Join(r.root, "auth", "serve.tokens"), os.O_APPEND|os.O_WRONLY|os.O_CREATE, 0o640)
	if err != nil {
		r.t.Fatal(err)
	}
	defer f.Close()
	if _, err := f.Write(append(line, '\n')); err != nil {
		r.t.Fatal(err)
	}
	return text
}

// TestCase137BadCredentials: a key that is wrong in any way is 401 without detail, and is shown nowhere.
func TestCase137BadCredentials(t *testing.T) {
	r := newRig(t, Options{})
	good := r.mint(0)
	expiring := claims("*")
	expiring["exp"] = time.Now().Add(-time.Second).Unix()
	without := func(claim string) string {
		c := claims("*")
		delete(c, claim)
		c2 := claims("*")
		text := r.forge(jwt.SigningMethodHS256, r.key(), c2)
		_ = text
		signed, _ := jwt.NewWithClaims(jwt.SigningMethodHS256, c).SignedString(r.key())
		return signed
	}
	head, rest, _ := strings.Cut(good, ".")
	payload, signature, _ := strings.Cut(rest, ".")
	none := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"none","typ":"JWT"}`))
	upper := base64.RawURLEncoding.EncodeToString([]byte(`{"alg":"hs256","typ":"JWT"}`))
	revoked := r.mint(0)
	if _, _, err := r.book.Revoke(func(rec *token.Record) bool { return rec.Hash == hashOf(revoked) }); err != nil {
		t.Fatal(err)
	}
	unlisted, _ := jwt.NewWithClaims(jwt.SigningMethodHS256, claims("*")).SignedString(r.key())
	bearer := func(s string) []string { return []string{"Authorization: Bearer " + s} }
	for name, headers := range map[string][]string{
		"none":               nil,
		"empty":              {"Authorization:"},
		"empty bearer":       bearer(""),
		"wrong scheme":       {"Authorization: Basic " + good},
		"no scheme":          {"Authorization: " + good},
		"another header":     {"X-Api-Key: " + good},
		"cookie":             {"Cookie: token=" + good},
		"cut":                bearer(good[:len(good)-1]),
		"cut in front":       bearer(good[1:]),
		"longer":             bearer(good + "A"),
		"twice":              {"Authorization: Bearer " + good, "Authorization: Bearer " + good},
		"two in one":         bearer(good + ", Bearer " + good),
		"padded":             bearer(good + "="),
		"folded":             bearer(good[:20] + " " + good[20:]),
		"unsigned":           bearer(none + "." + payload + "."),
		"none, signed":       bearer(none + "." + payload + "." + signature),
		"algorithm in small": bearer(upper + "." + payload + "." + signature),
		"no signature":       bearer(head + "." + payload + "."),
		"another payload":    bearer(head + "." + payload[:10] + "A" + payload[11:] + "." + signature),
		"HS384":              bearer(r.forge(jwt.SigningMethodHS384, r.key(), claims("*"))),
		"HS512":              bearer(r.forge(jwt.SigningMethodHS512, r.key(), claims("*"))),
		"another key":        bearer(r.forge(jwt.SigningMethodHS256, []byte(strings.Repeat("k", 32)), claims("*"))),
		"alg none by key":    bearer(r.forge(jwt.SigningMethodNone, jwt.UnsafeAllowNoneSignatureType, claims("*"))),
		"expired":            bearer(r.forge(jwt.SigningMethodHS256, r.key(), expiring)),
		"no id":              bearer(without("jti")),
		"no subject":         bearer(without("sub")),
		"no time":            bearer(without("iat")),
		"unlisted":           bearer(unlisted),
		"revoked":            bearer(revoked),
		"huge":               bearer(strings.Repeat("a", 60_000)),
	} {
		got := r.ask("GET", "/v0/sandboxes", "", headers...)
		if got == nil || got.status != 401 || got.code != shard.CodeUnauthorized || got.header.Get("Www-Authenticate") != "Bearer" {
			t.Errorf("%s: %+v", name, got)
			continue
		}
		if got.body != `{"error":{"code":"unauthorized","message":"the API key is missing or not valid here"}}`+"\n" {
			t.Errorf("%s: the answer has details: %s", name, got.body)
		}
	}
	if got := r.ask("GET", "/v0/sandboxes?access_token="+good+"&token="+good, ""); got.status != 401 {
		t.Errorf("in the query: %+v", got)
	}
	if got := r.ask("GET", "/v0/sandboxes", "", "Authorization: Bearer "+good[:20]+"\r\n"+good[20:]); got.status != 400 {
		t.Errorf("with a line break: %+v", got)
	}
	if got := r.ask("HEAD", "/v0/sandboxes/a/files", ""); got.status != 401 || got.body != "" {
		t.Errorf("HEAD: %+v", got)
	}
	if len(r.requests()) != 0 {
		t.Error("a request without a good key reached the daemon")
	}
	if got := r.ask("GET", "/v0/sandboxes", "", "authorization: bearer "+good); got.status != 200 {
		t.Errorf("the good one, control: %+v", got)
	}
	r.stop()
	if log := r.log.String(); strings.Contains(log, good) || strings.Contains(log, signature) || strings.Contains(log, revoked) {
		t.Error("a key is in the log")
	} else if !strings.Contains(log, `"subject":"tester"`) || !strings.Contains(log, `"route":"GET /v0/sandboxes"`) {
		t.Errorf("the log names neither subject nor route: %s", log)
	}
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

// TestSmuggling: nothing of a request that could be read in two ways reaches the daemon.
func TestSmuggling(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	for name, raw := range smuggles {
		// With a good token in it, as far as there is a place for one.
		raw = strings.Replace(raw, "Host: x\r\n", "Host: localhost\r\nAuthorization: Bearer "+text+"\r\n", 1)
		conn := r.dial("127.0.0.1")
		got := r.raw(conn, raw)
		if got == nil || got.status != 400 || got.code != shard.CodeInvalidRequest || !got.close {
			t.Errorf("%s: %+v", name, got)
		}
		if n, err := io.Copy(io.Discard, conn); n != 0 || err != nil && !strings.Contains(err.Error(), "reset") {
			t.Errorf("%s: the connection goes on after the refusal: %d bytes, %v", name, n, err)
		}
		conn.Close()
	}
	if seen := r.requests(); len(seen) != 0 {
		t.Errorf("reached the daemon: %s %s", seen[0].Method, seen[0].URL)
	}
}

// TestOneRequestPerConnection: whatever a client sends behind its request is no second one, least of all when a
// handshake was refused: the daemon would keep that connection, and take the scopes of its next request for ours.
func TestOneRequestPerConnection(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0, "exec")
	const second = "GET /v0/daemon HTTP/1.1\r\nHost: localhost\r\nX-Shard-Scopes: *\r\n\r\n"
	hand := []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="}
	for name, first := range map[string]string{
		"refused handshake": request("GET", "/v0/sandboxes/missing/exec/1", text, hand...),
		"plain":             request("GET", "/v0/sandboxes/missing/exec/1", text, "Connection: keep-alive"),
		"with a body":       request("POST", "/v0/sandboxes/web/exec", text, "Content-Length: 2") + "{}",
		"chunked":           request("POST", "/v0/sandboxes/web/exec", text, "Transfer-Encoding: chunked") + "2\r\n{}\r\n0\r\n\r\n",
	} {
		before := len(r.requests())
		conn := r.dial("127.0.0.1")
		if _, err := io.WriteString(conn, first); err != nil {
			t.Fatal(err)
		}
		// Once the request is with the daemon the second one is sent, before, while and after the answer comes.
		for deadline := time.Now().Add(wait); len(r.requests()) == before; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%s: the request does not reach the daemon", name)
			}
		}
		_, _ = io.WriteString(conn, second)
		answers, _ := io.ReadAll(conn)
		_, _ = io.WriteString(conn, second)
		if n := strings.Count(string(answers), "HTTP/1.1 "); n != 1 || !strings.Contains(string(answers), "Connection: close\r\n") {
			t.Errorf("%s: %d answers: %s", name, n, answers)
		}
		conn.Close()
		if seen := r.requests()[before:]; len(seen) != 1 {
			t.Errorf("%s: %d requests reached the daemon", name, len(seen))
		}
	}
}

// TestBadGateway: a daemon that is not there, or dies before it answers.
func TestBadGateway(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	hand := []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Version: 13", "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="}
	check := func(what string, got *answer) {
		t.Helper()
		if got == nil || got.status != 502 || got.code != shard.CodeInternal || strings.Contains(got.body, r.root) {
			t.Errorf("%s: %+v", what, got)
		}
	}
	check("dies", r.ask("GET", "/v0/sandboxes/dead", text))
	check("dies in a handshake", r.ask("GET", "/v0/sandboxes/dead/exec/1", text, hand...))
	if err := os.Remove(filepath.Join(r.root, "shard.sock")); err != nil {
		t.Fatal(err)
	}
	check("not there", r.ask("GET", "/v0/version", text))
}

// TestHalfClosed: a client that has said all it has to say still gets its answer, and one that breaks off is noticed.
func TestHalfClosed(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	conn := r.dial("127.0.0.1")
	big := strings.Repeat("x", 3<<20)
	_, _ = io.WriteString(conn, request("PUT", "/v0/sandboxes/web/files?path=/a", text, fmt.Sprintf("Content-Length: %d", len(big)))+big)
	_ = conn.CloseWrite()
	if got := r.raw(conn, ""); got == nil || got.status != 200 || got.body != fmt.Sprint(len(big)) {
		t.Errorf("after the whole body: %+v", got)
	}
	conn = r.dial("127.0.0.1")
	_, _ = io.WriteString(conn, request("PUT", "/v0/sandboxes/web/files?path=/a", text, "Content-Length: 100")+"half")
	_ = conn.CloseWrite()
	if got := r.raw(conn, ""); got != nil && got.status == 200 {
		t.Errorf("after half of the body: %+v", got)
	}
	// The daemon answers before it has read the body: the client gets that answer, whatever it still has to send.
	early := r.dial("127.0.0.1")
	go func() {
		_, _ = io.WriteString(early, request("PUT", "/v0/sandboxes/early/files?path=/a", text, fmt.Sprintf("Content-Length: %d", 8*len(big))))
		for range 8 {
			if _, err := io.WriteString(early, big); err != nil {
				return
			}
		}
	}()
	if got := r.raw(early, ""); got == nil || got.status != 413 || got.body != "too much" {
		t.Errorf("answered early: %+v", got)
	}
	// A client that goes away ends the request at the daemon.
	conn = r.dial("127.0.0.1")
	_, _ = io.WriteString(conn, request("GET", "/v0/sandboxes/slow", text))
	buf := make([]byte, 1)
	if _, err := io.ReadFull(conn, buf); err != nil {
		t.Fatal(err)
	}
	seen := r.requests()
	conn.Close()
	select {
	case <-seen[len(seen)-1].Context().Done():
	case <-time.After(wait):
		t.Error("the daemon does not learn that the client has gone")
	}
}

// TestStreams: bytes both ways, and no end but the daemon's, the client's or the token's.
func TestStreams(t *testing.T) {
	r := newRig(t, Options{})
	revoked, expiring, kept := r.mint(0), r.mint(2*time.Second), r.mint(0, "exec")
	end := time.Now().Add(2 * time.Second)
	streams := map[string]*websocket.Conn{"revoked": r.stream(revoked), "expiring": r.stream(expiring), "kept": r.stream(kept)}
	for name, ws := range streams {
		for _, size := range []int{1, 100, 70_000, 5 << 20} {
			if err := r.echo(ws, strings.Repeat("y", size)); err != nil {
				t.Errorf("%s: %d bytes: %v", name, size, err)
			}
		}
	}
	slow := r.dial("127.0.0.1")
	_, _ = io.WriteString(slow, request("GET", "/v0/sandboxes/slow", revoked))
	if _, err := io.ReadFull(slow, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	if ids, _, err := r.book.Revoke(func(rec *token.Record) bool { return rec.Hash == hashOf(revoked) }); err != nil || len(ids) != 1 {
		t.Fatal(ids, err)
	}
	r.ends(streams["revoked"])
	if rest, _ := io.ReadAll(slow); strings.Contains(string(rest), "last") {
		t.Error("a chunked answer goes on after its token was revoked")
	}
	r.ends(streams["expiring"])
	if time.Now().Before(end.Truncate(time.Second)) {
		t.Error("a token ended before its time")
	}
	if err := r.echo(streams["kept"], "still there"); err != nil {
		t.Errorf("another token's stream: %v", err)
	}
	if err := os.Remove(filepath.Join(r.root, "auth", "serve.tokens")); err != nil {
		t.Fatal(err)
	}
	r.ends(streams["kept"])
	if got := r.ask("GET", "/v0/version", kept); got == nil || got.status != 401 {
		t.Errorf("without a ledger: %+v", got)
	}
}

// TestDrain: at the end plain requests finish, streams and unknown clients do not hold it up, and nobody new comes in.
func TestDrain(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	ws := r.stream(text)
	unknown := r.dial("127.0.0.1")
	_, _ = io.WriteString(unknown, "GET /v0/ver")
	slow := r.dial("127.0.0.1")
	_, _ = io.WriteString(slow, request("GET", "/v0/sandboxes/slow", text))
	if _, err := io.ReadFull(slow, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	stopped := make(chan struct{})
	go func() { defer close(stopped); r.stop() }()
	r.ends(ws)
	if _, err := io.ReadAll(unknown); err != nil && !strings.Contains(err.Error(), "reset") {
		t.Error(err)
	}
	select {
	case <-stopped:
		t.Error("it did not wait for the request under way")
	default:
	}
	close(r.release)
	if rest, err := io.ReadAll(slow); err != nil || !strings.Contains(string(rest), "last") {
		t.Errorf("the request under way was cut: %q %v", rest, err)
	}
	<-stopped
	if conn, err := net.Dial("tcp", r.addr()); err == nil {
		conn.Close()
		t.Error("it still listens")
	}
}

// TestCase140RoughClients: clients that are slow, many or endless cost others nothing, and leave nothing behind.
func TestCase140RoughClients(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	before := runtime.NumGoroutine()
	// 2,000 connections of one address, most of which are turned away at once.
	var wg sync.WaitGroup
	slots := make(chan struct{}, 64)
	var mu sync.Mutex
	var open []net.Conn
	for i := range 2000 {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			d := net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 7)}}
			conn, err := d.Dial("tcp", r.addr())
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, "GET /v0/version HTTP/1.1\r\nX-"+fmt.Sprint(i)+": ")
			if i%20 != 0 { // keep a hundred
				_ = conn.SetReadDeadline(time.Now().Add(50 * time.Millisecond))
				_, _ = conn.Read(make([]byte, 1))
				conn.Close()
				return
			}
			mu.Lock()
			open = append(open, conn)
			mu.Unlock()
		})
	}
	wg.Wait()
	for range 3 {
		if got := r.ask("GET", "/v0/version", text); got == nil || got.status != 200 {
			t.Errorf("another address is not served: %+v", got)
		}
	}
	r.gate.mu.Lock()
	pending, conns := r.gate.pending[sourcePrefix("127.0.0.7")], len(r.gate.conns)
	r.gate.mu.Unlock()
	if pending > maxPending || conns > maxPending+5 {
		t.Errorf("%d connections of one unknown address, %d in all", pending, conns)
	}
	for _, conn := range open {
		conn.Close()
	}
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		if runtime.NumGoroutine() <= before+2 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d goroutines are left of %d", runtime.NumGoroutine(), before)
		}
	}
	r.gate.mu.Lock()
	if len(r.gate.conns) != 0 || len(r.gate.pending) != 0 {
		t.Errorf("still counted: %d connections, %v", len(r.gate.conns), r.gate.pending)
	}
	r.gate.mu.Unlock()
	r.stop()
	if !strings.Contains(r.log.String(), "too many") {
		t.Error("the log does not say that connections were turned away")
	}
}

// TestSlowHead: a head that takes too long ends the connection, however steadily its bytes come.
func TestSlowHead(t *testing.T) {
	r := newRig(t, Options{}, func(g *Gate) { g.patience = 300 * time.Millisecond })
	conn := r.dial("127.0.0.1")
	closed := make(chan struct{})
	go func() { defer close(closed); _, _ = io.Copy(io.Discard, conn) }()
	_, _ = io.WriteString(conn, plain)
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		_, _ = io.WriteString(conn, "X: y\r\n")
		select {
		case <-closed:
			return
		default:
		}
		if time.Now().After(deadline) {
			t.Fatal("it waits for ever")
		}
	}
}

// TestTotalLimit: known clients count against the bound of all.
func TestTotalLimit(t *testing.T) {
	r := newRig(t, Options{}, func(g *Gate) { g.total = 3 })
	text := r.mint(0)
	var streams []*websocket.Conn
	for range 3 {
		streams = append(streams, r.stream(text))
	}
	if conn, err := net.Dial("tcp", r.addr()); err == nil { // the reset can come before
		if got := r.raw(conn, request("GET", "/v0/version", text)); got != nil {
			t.Errorf("over the bound: %+v", got)
		}
		conn.Close()
	}
	_ = streams[0].CloseNow()
	for deadline := time.Now().Add(wait); ; time.Sleep(10 * time.Millisecond) {
		if conn, err := net.Dial("tcp", r.addr()); err == nil {
			got := r.raw(conn, request("GET", "/v0/version", text))
			conn.Close()
			if got != nil && got.status == 200 {
				break
			}
		}
		if time.Now().After(deadline) {
			t.Fatal("under the bound again, and still not served")
		}
	}
	if n := connectionLimit(); n < minTotal {
		t.Errorf("the bound is %d", n)
	}
}

func TestClientGoesBeforeStream(t *testing.T) {
	r := newRig(t, Options{})
	text := r.mint(0)
	ctx, cancel := context.WithCancel(t.Context())
	req, _ := http.NewRequestWithContext(ctx, "GET", "http://"+r.addr()+"/v0/sandboxes/slow/exec/1", nil)
	for _, h := range []string{"Connection: Upgrade", "Upgrade: websocket", "Sec-Websocket-Version: 13", "Sec-Websocket-Key: dGhlIHNhbXBsZSBub25jZQ==", "Authorization: Bearer " + text} {
		name, value, _ := strings.Cut(h, ": ")
		req.Header.Set(name, value)
	}
	resp, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	seen := r.requests()
	cancel()
	select {
	case <-seen[0].Context().Done():
	case <-time.After(wait):
		t.Error("the daemon does not learn that the client has gone")
	}
}

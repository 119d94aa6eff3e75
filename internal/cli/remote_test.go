package cli_test

import (
	"encoding/json"
	"encoding/pem"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard/internal/cli"
)

// place is a user's environment: variables and a home of their own.
type place struct {
	t    *testing.T
	vars map[string]string
}

func newPlace(t *testing.T) *place {
	return &place{t, map[string]string{"HOME": t.TempDir()}}
}

func (p *place) run(args ...string) result {
	p.t.Helper()
	app := newApp(strings.NewReader(""), nil, nil)
	app.Getenv = func(k string) string { return p.vars[k] }
	return runApp(p.t, app, args...)
}

// save writes the saved connection.
func (p *place) save(text string) {
	p.t.Helper()
	dir := filepath.Join(p.vars["HOME"], ".config", "shard")
	if x := p.vars["XDG_CONFIG_HOME"]; filepath.IsAbs(x) {
		dir = filepath.Join(x, "shard")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(text), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// server is a shard serve of sorts: it tells which key it was shown.
type server struct {
	*httptest.Server
	mu   sync.Mutex
	keys []string
}

func newServer(t *testing.T, secure bool) *server {
	s := &server{}
	h := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.mu.Lock()
		s.keys = append(s.keys, r.Header.Get("Authorization"))
		s.mu.Unlock()
		w.Header().Set("Connection", "close")
		switch r.URL.Path {
		case "/v0/version":
			_, _ = w.Write([]byte(`{"version":"9.9","api_version":"v0"}`))
		case "/v0/scopes":
			_, _ = w.Write([]byte(`{"scopes":[{"name":"exec","description":"run things"}]}`))
		case "/v0/sandboxes":
			http.Redirect(w, r, "http://127.0.0.1:1/elsewhere", http.StatusTemporaryRedirect)
		default:
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(`{"error":{"code":"forbidden","message":"the API key lacks the scope x"}}`))
		}
	})
	s.Server = httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	if secure {
		s.StartTLS()
	} else {
		s.Start()
	}
	t.Cleanup(s.Close)
	return s
}

// took is the keys that the server was shown since it was last asked.
func (s *server) took() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	keys := strings.Join(s.keys, " ")
	s.keys = nil
	return keys
}

func (s *server) caFile(t *testing.T) string {
	file := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

var version = []string{"version", "--format", "json"}

// TestRemotePrecedence: --remote, then SHARD_REMOTE, then the saved connection, then the socket; and which key goes where.
func TestRemotePrecedence(t *testing.T) {
	one, two, three := newServer(t, false), newServer(t, false), newServer(t, false)
	local := start(t)
	local.answer("GET /v0/version", 200, `{"version":"local","api_version":"v0"}`)
	p := newPlace(t)
	asked := func(server *server, key string, got result) {
		t.Helper()
		if got.code != 0 || server.took() != key || one.took()+two.took()+three.took() != "" {
			t.Errorf("%+v: the wrong server was asked, or with the wrong key", got)
		}
		if n := strings.Count(got.errs, "\n"); n != 1 || !strings.Contains(got.errs, "not encrypted") {
			t.Errorf("warned %d times: %s", n, got.errs)
		}
	}
	isLocal := func(got result) {
		t.Helper()
		if got.code != 0 || got.errs != "" || !strings.Contains(got.out, "local") || one.took()+two.took()+three.took() != "" {
			t.Errorf("%+v", got)
		}
	}
	with := func(global ...string) []string {
		return append(append([]string{"--root", local.root}, global...), version...)
	}

	isLocal(p.run(with()...))
	p.save(`{"remote":"` + three.URL + `","api_key":"saved"}`)
	asked(three, "Bearer saved", p.run(with()...))
	isLocal(p.run(with("--remote", "")...))
	p.vars["SHARD_API_KEY"] = " \tgiven\n"
	asked(three, "Bearer given", p.run(with()...))
	p.vars["SHARD_REMOTE"] = two.URL
	asked(two, "Bearer given", p.run(with()...))
	asked(one, "Bearer given", p.run(with("--remote", one.URL)...))
	isLocal(p.run(with("--remote", "")...))
	// The saved key is for the server it was saved with, however its address is written, and for no other.
	p.vars["SHARD_API_KEY"] = " \n"
	p.vars["SHARD_REMOTE"] = strings.Replace(three.URL, "http", "HTTP", 1) + "/"
	asked(three, "Bearer saved", p.run(with()...))
	p.vars["SHARD_REMOTE"] = two.URL
	if got := p.run(with()...); got.code != 1 || !strings.Contains(got.errs, "no API key") || !strings.Contains(got.errs, "SHARD_API_KEY") || two.took() != "" {
		t.Errorf("another server: %+v", got)
	}
	p.vars["SHARD_REMOTE"] = strings.Replace(three.URL, "127.0.0.1", "localhost", 1)
	if got := p.run(with()...); got.code != 1 || three.took() != "" {
		t.Errorf("another name: %+v", got)
	}
	p.vars["SHARD_REMOTE"] = strings.Replace(three.URL, "http:", "https:", 1)
	if got := p.run(with()...); got.code != 1 || !strings.Contains(got.errs, "no API key") {
		t.Errorf("another scheme: %+v", got)
	}
	// XDG_CONFIG_HOME counts when it is absolute.
	delete(p.vars, "SHARD_REMOTE")
	p.vars["XDG_CONFIG_HOME"] = "relative"
	asked(three, "Bearer saved", p.run(with()...))
	p.vars["XDG_CONFIG_HOME"] = t.TempDir()
	isLocal(p.run(with()...))
	p.save(`{"remote":"` + one.URL + `","api_key":"other"}`)
	asked(one, "Bearer other", p.run(with()...))
	// A redirect is not followed: the key stays here.
	if got := p.run("list"); got.code != 1 || one.took() != "Bearer other" {
		t.Errorf("a redirect: %+v", got)
	}
	if got := p.run("tokens", "scopes"); got.code != 0 || !strings.Contains(got.out, "run things") || one.took() != "Bearer other" {
		t.Errorf("tokens scopes: %+v", got)
	}
}

// TestRemoteTLS: whom the certificate is checked by, and what is said when it fails.
func TestRemoteTLS(t *testing.T) {
	s := newServer(t, true)
	p := newPlace(t)
	p.vars["SHARD_REMOTE"], p.vars["SHARD_API_KEY"] = s.URL, "key"
	if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "SHARD_CA_FILE") || s.took() != "" {
		t.Errorf("an authority nobody knows: %+v", got)
	}
	p.vars["SHARD_CA_FILE"] = s.caFile(t)
	if got := p.run(version...); got.code != 0 || got.errs != "" || s.took() != "Bearer key" {
		t.Errorf("%+v", got)
	}
	// Its certificate is for 127.0.0.1 and example.com.
	p.vars["SHARD_REMOTE"] = strings.Replace(s.URL, "127.0.0.1", "localhost", 1)
	if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "localhost") || s.took() != "" {
		t.Errorf("another name: %+v", got)
	}
	for file, says := range map[string]string{"/nonexistent": "SHARD_CA_FILE", "/etc/passwd": "holds no certificate"} {
		p.vars["SHARD_REMOTE"], p.vars["SHARD_CA_FILE"] = s.URL, file
		if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, says) {
			t.Errorf("%s: %+v", file, got)
		}
	}
	plain := newServer(t, false)
	p.vars["SHARD_REMOTE"], p.vars["SHARD_CA_FILE"] = plain.URL, s.caFile(t)
	if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "SHARD_CA_FILE is set") || plain.took() != "" {
		t.Errorf("an authority for http: %+v", got)
	}
}

// TestRemoteIsWrong: what is refused before anything is dialled, and that no key is ever shown.
func TestRemoteIsWrong(t *testing.T) {
	p := newPlace(t)
	p.vars["SHARD_API_KEY"] = "SECRET"
	for _, bad := range []string{"x", "example.com", "example.com:7850", "ftp://example.com", "unix:///x", "https://", "https://:7850", "https:example.com",
		"https://u:SECRET@example.com", "https://example.com/path", "https://example.com?q", "https://example.com?", "https://example.com#f", "https://example.com:0",
		"https://example.com:99999", "https://example.com:", "https://exa mple.com", "//example.com", "https://example.com\n", "https://[::1"} {
		for _, how := range []string{"--remote", "SHARD_REMOTE"} {
			p.vars["SHARD_REMOTE"] = ""
			args := append([]string{"--remote", bad}, version...)
			if how == "SHARD_REMOTE" {
				p.vars["SHARD_REMOTE"], args = bad, version
			}
			if got := p.run(args...); got.code != 1 || got.out != "" || !strings.HasPrefix(got.errs, "shard: "+how+" must be the URL of shard serve") || strings.Contains(got.errs, "SECRET") {
				t.Errorf("%s %q: %+v", how, bad, got)
			}
		}
	}
	p.vars["SHARD_REMOTE"] = "http://127.0.0.1:1"
	if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "nobody listens at http://127.0.0.1:1") || strings.Contains(got.errs, "SECRET") {
		t.Errorf("nobody there: %+v", got)
	}
	for _, key := range []string{"SEC\nRET", "SEC\rRET", "SEC\x00RET", "SEC\x7fRET"} {
		p.vars["SHARD_API_KEY"] = key
		if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "SHARD_API_KEY has a control character") || strings.Contains(got.errs, "RET") {
			t.Errorf("key %q: %+v", key, got)
		}
	}
	delete(p.vars, "SHARD_REMOTE")
	delete(p.vars, "SHARD_API_KEY")
	for _, bad := range []string{"", "x", "[]", `{"remote":"https://e.com","api_key":"SECRET","user":"x"}`, `{"remote":7}`, `{}{}`, `{"remote":"ftp://e.com","api_key":"SECRET"}`,
		`{"remote":"https://e.com","api_key":"SEC\nRET"}`} {
		p.save(bad)
		if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "the saved connection") || strings.Contains(got.errs, "SECRET") || strings.Contains(got.errs, "RET") {
			t.Errorf("saved %q: %+v", bad, got)
		}
		// It does not stand in the way of who does not use it.
		p.vars["SHARD_API_KEY"] = "key"
		if got := p.run(append([]string{"--remote", "http://127.0.0.1:1"}, version...)...); !strings.Contains(got.errs, "nobody listens") {
			t.Errorf("saved %q, not used: %+v", bad, got)
		}
		delete(p.vars, "SHARD_API_KEY")
	}
	p.save(`{"remote":"https://example.com","api_key":"SECRET"}`)
	if err := os.Chmod(filepath.Join(p.vars["HOME"], ".config/shard/config.json"), 0o666); err != nil {
		t.Fatal(err)
	}
	if got := p.run(version...); got.code != 1 || !strings.Contains(got.errs, "can be changed by others") {
		t.Errorf("a file that others can change: %+v", got)
	}
}

// TestLocalCommands: what speaks of the daemon's host goes to no other, whatever the way in which one was named.
func TestLocalCommands(t *testing.T) {
	s := newServer(t, false)
	commands := [][]string{{"pull", "x"}, {"image", "list"}, {"image", "ls"}, {"image", "remove", "x"}, {"image", "rm", "x"}, {"image", "prune"}, {"image", "import", "x", "y"},
		{"daemon", "status"}, {"info"}, {"tokens", "mint", "--name", "x"}, {"tokens", "list"}, {"tokens", "ls"}, {"tokens", "revoke", "x"}}
	for from, set := range map[string]func(*place) []string{
		"--remote":         func(*place) []string { return []string{"--remote", s.URL} },
		"SHARD_REMOTE":     func(p *place) []string { p.vars["SHARD_REMOTE"] = s.URL; return nil },
		"connection saved": func(p *place) []string { p.save(`{"remote":"` + s.URL + `","api_key":"k"}`); return nil },
	} {
		p := newPlace(t)
		p.vars["SHARD_API_KEY"] = "key"
		global := append([]string{"--root", t.TempDir()}, set(p)...)
		for _, c := range commands {
			if got := p.run(append(global, c...)...); got.code != 1 || got.out != "" || !strings.Contains(got.errs, from) || !strings.Contains(got.errs, "daemon's own host") {
				t.Errorf("%s, %q: %+v", from, c, got)
			}
		}
		for _, c := range []string{"daemon", "serve"} {
			got := p.run(append(global, c)...)
			if refused := strings.Contains(got.errs, "does not go with it"); got.code != 1 || refused != (from != "connection saved") {
				t.Errorf("%s, %s: %+v", from, c, got)
			}
		}
	}
	if s.took() != "" {
		t.Error("one of them went there")
	}
}

// TestTokensCommands: formats, refusals, and what is left to see of a key afterwards.
func TestTokensCommands(t *testing.T) {
	p := newPlace(t)
	root := t.TempDir()
	run := func(args ...string) result {
		t.Helper()
		return p.run(append([]string{"--root", root, "tokens"}, args...)...)
	}
	if got := run("list"); got.code != 0 || got.out != "ID   NAME   ISSUED   EXPIRES   SCOPES   STATUS\n" {
		t.Errorf("before the first: %+v", got)
	}
	if got := run("list", "--format", "json"); got.code != 0 || got.out != "[]\n" {
		t.Errorf("before the first: %+v", got)
	}
	minted := run("mint", "--name", "build-agent", "--duration", "90d", "--scopes", "exec, sandbox:read")
	if !regexp.MustCompile(`^\{"token":"[\w-]+\.[\w-]+\.[\w-]+","expires_at":"[\d-]+T[\d:]+Z","scopes":\["exec","sandbox:read"\]\}\n$`).MatchString(minted.out) || minted.code != 0 || minted.errs != "" {
		t.Errorf("%+v", minted)
	}
	var key struct{ Token string }
	if err := json.Unmarshal([]byte(minted.out), &key); err != nil {
		t.Fatal(err)
	}
	if got := run("mint", "--name", "ever"); !strings.HasSuffix(got.out, `","expires_at":null,"scopes":["*"]}`+"\n") {
		t.Errorf("%+v", got)
	}
	if got := run("mint", "--name", "ever", "--format", "table"); !regexp.MustCompile(`^TOKEN +EXPIRES +SCOPES\n\S+ +never +\*\n$`).MatchString(got.out) {
		t.Errorf("%+v", got)
	}
	list := run("list", "--format", "json")
	var rows []map[string]any
	if err := json.Unmarshal([]byte(list.out), &rows); err != nil || len(rows) != 3 || len(rows[0]) != 6 || rows[0]["status"] != "active" || rows[1]["expires_at"] != nil {
		t.Fatalf("%v %+v", err, list)
	}
	if strings.Contains(list.out, key.Token) || strings.Contains(list.out, "hash") {
		t.Error("the list shows more than it should")
	}
	if at, err := time.Parse(time.RFC3339, rows[0]["expires_at"].(string)); err != nil || time.Until(at) < 89*24*time.Hour {
		t.Errorf("90d is until %v, %v", at, err)
	}
	id := rows[0]["id"].(string)
	if got := run("revoke", id); got.code != 0 || got.out != id+"\n" {
		t.Errorf("%+v", got)
	}
	if got := run("revoke", "--name", "ever"); got.code != 0 || strings.Count(got.out, "\n") != 2 {
		t.Errorf("%+v", got)
	}
	if got := run("ls"); strings.Count(got.out, "revoked") != 3 {
		t.Errorf("%+v", got)
	}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"mint"}, "--name is missing"}, {[]string{"mint", "--name", ""}, "--name is missing"}, {[]string{"mint", "--name", "../x"}, "not valid"},
		{[]string{"mint", "--name", "x", "--scopes", "colour"}, `no scope "colour"`}, {[]string{"mint", "--name", "x", "--scopes", ""}, "no scope"},
		{[]string{"mint", "--name", "x", "--duration", "-1s"}, "negative"}, {[]string{"mint", "--name", "x", "--signing-key-file", "/nonexistent"}, "signing key file"},
		{[]string{"mint", "--name", "x", "extra"}, "unexpected"}, {[]string{"mint", "--name", "x", "--format", "yaml"}, "json or table"},
		{[]string{"revoke"}, "give a token's id"}, {[]string{"revoke", "nobody"}, "no API key"}, {[]string{"revoke", "--name", "nobody"}, "no API key"},
		{[]string{"revoke", "--name", "ever", id}, "not both"}, {[]string{"list", "--signing-key-file", "/nonexistent"}, "signing key file"},
	} {
		if got := run(c.args...); got.code != 1 || got.out != "" || !strings.Contains(got.errs, c.says) {
			t.Errorf("%q: %+v", c.args, got)
		}
	}
	ledger := filepath.Join(root, "auth", "serve.tokens")
	raw, _ := os.ReadFile(ledger)
	if err := os.WriteFile(ledger, append(raw, "nonsense\n"...), 0o640); err != nil {
		t.Fatal(err)
	}
	if got := run("list"); got.code != 1 || strings.Count(got.out, "revoked") != 3 || !strings.Contains(got.errs, "line 4") {
		t.Errorf("with a broken line: %+v", got)
	}
}

func TestServeNeedsABuild(t *testing.T) {
	app := cli.App{Version: "x"}
	app.Getenv = func(string) string { return "" }
	if got := runApp(t, &app, "serve"); got.code != 1 || !strings.Contains(got.errs, "no shard serve") {
		t.Errorf("%+v", got)
	}
}

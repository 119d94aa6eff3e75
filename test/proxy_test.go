package test

import (
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
)

// browse is a program in the sandbox that asks one URL after the other, each "URL[|HOST]" with a Host header of its own, and
// says what came of it in a line. It trusts the authority of the lab alone.
const browse = `
import http.client, socket, ssl, sys, urllib.parse
trust = ssl.create_default_context(cadata=sys.argv[1])
for what in sys.argv[2:]:
    url, _, host = what.partition("|")
    u = urllib.parse.urlsplit(url)
    try:
        if u.scheme == "nosni":
            blind = ssl.create_default_context(cadata=sys.argv[1])
            blind.check_hostname = False
            with socket.create_connection((u.hostname, 443), timeout=20) as s:
                blind.wrap_socket(s).close()
            print("200")
            continue
        if u.scheme == "https":
            c = http.client.HTTPSConnection(u.hostname, timeout=20, context=trust)
        else:
            c = http.client.HTTPConnection(u.hostname, timeout=20)
        c.request("GET", u.path or "/", headers={"Host": host} if host else {})
        r = c.getresponse()
        print(r.status, r.read().decode().strip(), flush=True)
    except Exception as e:
        print("failed", type(e).__name__, str(e).replace("\n", " "), flush=True)
`

// asked runs browse and compares: pairs of what to ask and how the line about it begins or what it has in it.
func asked(t *testing.T, d *testenv.Daemon, box, when string, pairs ...string) {
	t.Helper()
	args := []string{"exec", box, "python3", "-c", browse, string(d.Lab().CA())}
	for i := 0; i < len(pairs); i += 2 {
		args = append(args, pairs[i])
	}
	r := d.Shard(args...)
	got := strings.Split(strings.TrimSuffix(r.Stdout, "\n"), "\n")
	if r.Code != 0 || len(got) != len(pairs)/2 {
		t.Fatalf("%s: browse: exit code %d\n%s%s", when, r.Code, r.Stdout, r.Stderr)
	}
	for i, line := range got {
		for _, word := range strings.Split(pairs[2*i+1], "…") {
			if !strings.Contains(line, word) {
				t.Errorf("%s: %s: %q, want %q in it", when, pairs[2*i], line, word)
			}
		}
	}
}

// TestProxy: on ports 80 and 443 each request is judged by its own host, whatever address it was sent to.
func TestProxy(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	lab.Name("shared.lab.test", testenv.LabWebAddr) // another name at the same address
	lab.Name("inside.lab.test", "10.1.2.3")
	lab.Name("host.lab.test", testenv.LabHostAddr)
	go func() {
		_ = http.Serve(lab.ListenWorld("tcp", "203.0.113.60:80"), http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			_, _ = w.Write([]byte("by address, " + r.Host))
		}))
	}()
	lab.Web().HandleFunc("/slow", func(w http.ResponseWriter, r *http.Request) {
		_, _ = w.Write([]byte("first "))
		_ = http.NewResponseController(w).Flush()
		time.Sleep(300 * time.Millisecond)
		_, _ = w.Write([]byte("last"))
	})
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, name := policied(t, d, provider, "allow web.lab.test", "allow inside.lab.test", "allow host.lab.test", "allow 203.0.113.0/24 tcp:80")
		asked(t, d, id, "at first",
			"http://web.lab.test/a", "200 GET http web.lab.test /a from "+testenv.LabHostAddr,
			"https://web.lab.test/b", "200 GET https web.lab.test /b from "+testenv.LabHostAddr, // the host's own certificate
			"http://web.lab.test/slow", "200 first last",
			"http://web.lab.test/|shared.lab.test", `403 …"host":"shared.lab.test"…"rule":"default"`,
			"http://shared.lab.test/", "failed gaierror",
			"http://"+testenv.LabWebAddr+"/|web.lab.test", "200 GET http web.lab.test",
			"http://"+testenv.LabWebAddr+"/", "403", // an address that no rule names
			"https://"+testenv.LabWebAddr+"/", "failed", // TLS that names no host
			"nosni://web.lab.test/", "failed",
			"http://203.0.113.60/", "200 by address, 203.0.113.60",
			"http://203.0.113.60/|any.name.test", "200 by address, any.name.test", // allowed by where it goes, and not looked up
			"http://203.0.113.60/|any.name.test", "200 by address, any.name.test",
			"http://203.0.113.60/|web.lab.test", "200 GET http web.lab.test", // its name decides where it goes
			"http://web.lab.test/|inside.lab.test", `403 …"rule":"private"`,
			"http://web.lab.test/|host.lab.test", `403 …"rule":"local"`,
			"http://web.lab.test/|10.1.2.3", `403 …"rule":"private"`,
		)
		decisions(t, d, id, "proxy allow rule=3 host=web.lab.test to="+testenv.LabWebAddr+":80", "proxy allow rule=3 host=web.lab.test to="+testenv.LabWebAddr+":443",
			"proxy deny rule=default host=shared.lab.test", "proxy deny rule=private host=inside.lab.test", "proxy deny rule=local host=host.lab.test",
			"proxy deny rule=default host= to="+testenv.LabWebAddr+":443")
		put(t, d, name, "allow shared.lab.test")
		asked(t, d, id, "under other rules",
			"http://shared.lab.test/", "200 GET http shared.lab.test",
			"https://shared.lab.test/", "200 GET https shared.lab.test",
			"http://shared.lab.test/|web.lab.test", `403 …"host":"web.lab.test"`,
		)
		d.Kill9()
		d.Restart()
		asked(t, d, id, "after the daemon died",
			"http://shared.lab.test/", "200 GET http shared.lab.test",
			"https://shared.lab.test/", "200 GET https shared.lab.test",
			"http://shared.lab.test/|web.lab.test", "403")
		put(t, d, name, "allow 203.0.113.0/24", "deny any")
		asked(t, d, id, "rules without names need no proxy",
			"http://203.0.113.60/|web.lab.test", "200 by address, web.lab.test", "http://"+testenv.LabWebAddr+"/", "failed Connection")
	})
}

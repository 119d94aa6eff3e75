package test

import (
	"encoding/json"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// probe is a program in the sandbox that tries one thing after the other and says in a word how each ended: ok, refused, or
// the name of the error; and how many seconds it took if that was long.
const probe = `
import errno, socket, sys, time
def attempt(what):
    kind, host, port = what.split("/")
    port = int(port)
    if kind == "name":
        return ",".join(sorted({a[4][0] for a in socket.getaddrinfo(host, port, socket.AF_INET, socket.SOCK_STREAM)}))
    if kind == "tcp":
        c = socket.create_connection((host, port), timeout=10)
        c.close()
        return "ok"
    c = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    c.settimeout(1)
    c.connect((host, port))
    c.send(b"hello")
    c.recv(100)
    return "ok"
for what in sys.argv[1:]:
    began = time.monotonic()
    try:
        how = attempt(what)
    except socket.gaierror as e:
        how = "no-name" if e.errno == socket.EAI_NONAME else "gaierror %d" % e.errno
    except TimeoutError:
        how = "timeout"
    except OSError as e:
        how = "refused" if e.errno in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.EACCES) else errno.errorcode.get(e.errno, str(e))
    if time.monotonic() - began > 3:
        how += " slow"
    print(how, flush=True)
`

// try runs probe and compares: pairs of what to try and how it must end.
func try(t *testing.T, d *testenv.Daemon, box, when string, pairs ...string) {
	t.Helper()
	var what []string
	for pair := range slices.Chunk(pairs, 2) {
		what = append(what, pair[0])
	}
	r := d.Shard(append([]string{"exec", box, "python3", "-c", probe}, what...)...)
	got := strings.Split(strings.TrimSuffix(r.Stdout, "\n"), "\n")
	if r.Code != 0 || len(got) != len(what) {
		t.Fatalf("%s: probe: exit code %d\n%s%s", when, r.Code, r.Stdout, r.Stderr)
	}
	for i, pair := range slices.Collect(slices.Chunk(pairs, 2)) {
		if got[i] == "timeout" && pair[1] == "refused" && strings.HasPrefix(pair[0], "udp/") && strings.Contains(t.Name(), "gvisor") {
			continue // gVisor tells programs of no ICMP error for UDP
		}
		if got[i] != pair[1] {
			t.Errorf("%s: %s: %s, want %s", when, pair[0], got[i], pair[1])
		}
	}
}

// decisions are what the sandbox's egress log says, once each of the words stands in one of its lines.
func decisions(t *testing.T, d *testenv.Daemon, box string, words ...string) []shard.EgressDecision {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		a := call(t, d, "GET", "/v0/sandboxes/"+box+"/egress-log", nil)
		var all []shard.EgressDecision
		if a.Status != 200 {
			t.Fatalf("egress log: %d %s", a.Status, a.Body)
		}
		if err := json.Unmarshal([]byte(a.Body), &all); err != nil {
			t.Fatal(err)
		}
		var lines []string
		for _, one := range all {
			lines = append(lines, fmt.Sprintf("%s %s rule=%s host=%s to=%s:%d %s (%s) %s", one.Source, one.Verdict, one.Rule, one.Host, one.Address, one.Port, one.RuleText, one.Reason, one.Protocol))
		}
		missing := slices.DeleteFunc(slices.Clone(words), func(w string) bool {
			return slices.ContainsFunc(lines, func(line string) bool { return strings.Contains(line, w) })
		})
		if len(missing) == 0 {
			return all
		}
		if time.Now().After(deadline) {
			t.Fatalf("the egress log has no line with %q:\n%s", missing, strings.Join(lines, "\n"))
		}
	}
}

// policied makes a policy and a sandbox that has it.
func policied(t *testing.T, d *testenv.Daemon, provider string, rules ...string) (id, policy string) {
	t.Helper()
	policy = strings.ToLower(strings.Map(func(r rune) rune {
		if r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' {
			return r
		}
		return '-'
	}, t.Name()))
	put(t, d, policy, rules...)
	return box(t, d, provider, "--policy", policy, testenv.PythonRef), policy
}

func egressDaemon(t *testing.T) *testenv.Daemon {
	t.Helper()
	lab := testenv.NewLab(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--dns", testenv.LabDNSAddr}})
	d.Must("image", "import", testenv.PythonArchive(t), testenv.PythonRef)
	return d
}

// TestCase052: `--deny any` is complete and quick, and all of it is in the log.
func TestCase052(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	inWorld, private := d.Lab().CanaryInWorld("203.0.113.9:7000"), d.Lab().CanaryInWorld("10.1.2.3:7000")
	host := d.Lab().CanaryOnHost("203.0.113.5:7000")
	for _, c := range []*testenv.Canary{inWorld, private, host} {
		c.Control()
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, _ := policied(t, d, provider, "deny any")
		asked := len(d.Lab().Questions())
		try(t, d, id, "deny any",
			"name/web.lab.test/80", "no-name", "name/secret-data.evil.test/80", "no-name",
			"tcp/203.0.113.9/7000", "refused", "udp/203.0.113.9/7000", "refused", "tcp/10.1.2.3/7000", "refused",
			"tcp/203.0.113.5/7000", "refused", "udp/10.1.2.3/53", "timeout", "tcp/"+testenv.LabDNSAddr+"/853", "refused")
		for _, c := range []*testenv.Canary{inWorld, private, host} {
			if hits := c.Hits(); len(hits) > 0 {
				t.Errorf("%s was reached: %v", c.Addr, hits)
			}
		}
		if got := d.Lab().Questions()[asked:]; len(got) > 0 {
			t.Errorf("nameservers were asked: %v", got)
		}
		decisions(t, d, id, "dns deny rule=1 host=web.lab.test", "dns deny rule=1 host=secret-data.evil.test",
			"host deny rule=1 host= to=203.0.113.9:7000 deny any () tcp", "to=203.0.113.9:7000 deny any () udp",
			"host deny rule=private host= to=10.1.2.3:7000", "host deny rule=local host= to=203.0.113.5:7000")
	})
}

// TestCase056 is the network's part: rule order, edges of suffixes, ports.
func TestCase056(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	for i, name := range []string{"edge.test", "a.edge.test", "notedge.test", "edge.test.evil.test", "xn--bcher-kva.edge.test"} {
		addr := fmt.Sprintf("203.0.113.%d", 20+i)
		lab.Name(name, addr)
		for _, port := range []string{"443", "8080", "8443"} {
			lab.CanaryInWorld(net.JoinHostPort(addr, port))
		}
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, name := policied(t, d, provider, "allow suffix:edge.test tcp:443,8443", "deny any")
		try(t, d, id, "allow",
			"tcp/203.0.113.20/8443", "refused", // not looked up yet
			"name/edge.test/1", "203.0.113.20", "tcp/203.0.113.20/8443", "ok", "tcp/203.0.113.20/8080", "refused",
			"udp/203.0.113.20/443", "refused",
			"tcp/A.EDGE.TEST./8443", "ok", "tcp/xn--bcher-kva.edge.test/8443", "ok", "tcp/bücher.edge.test/8443", "ok",
			"name/notedge.test/1", "no-name", "tcp/203.0.113.22/8443", "refused", "name/edge.test.evil.test/1", "no-name",
			"tcp/203.0.113.23/8443", "refused")
		try(t, d, id, "again", "name/edge.test/1", "203.0.113.20")
		put(t, d, name, "deny a.edge.test", "allow suffix:edge.test tcp:443,8443")
		try(t, d, id, "deny first, at once, and what was looked up before stays open",
			"tcp/203.0.113.21/8443", "refused", "name/a.edge.test/1", "no-name", "tcp/203.0.113.20/8443", "ok")
		put(t, d, name, "allow 203.0.113.21 tcp:8443", "deny any")
		try(t, d, id, "by address", "tcp/203.0.113.21/8443", "ok", "tcp/203.0.113.20/8443", "refused", "name/edge.test/1", "no-name")
	})
}

// TestCase062: UDP goes no way that TCP does not.
func TestCase062(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	lab.Name("quic.test", "203.0.113.40")
	for _, at := range []string{"203.0.113.40:443", "203.0.113.41:443", "203.0.113.41:123", "203.0.113.41:53"} {
		lab.CanaryInWorld(at)
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, name := policied(t, d, provider, "allow quic.test")
		try(t, d, id, "a name opens the web over TCP",
			"name/quic.test/1", "203.0.113.40", "udp/203.0.113.40/443", "refused", "udp/203.0.113.41/443", "refused", "udp/203.0.113.41/123", "refused",
			"udp/203.0.113.41/53", "timeout", // the resolver took it, and it is no question
			"tcp/quic.test/443", "ok")
		put(t, d, name, "allow quic.test", "allow quic.test udp:443")
		try(t, d, id, "and UDP where the rule says so", "name/quic.test/1", "203.0.113.40", "udp/203.0.113.40/443", "ok", "udp/203.0.113.41/443", "refused")
	})
}

package test

import (
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// probe6 is probe over IPv6: name (its addresses), tcp, udp (to an echo), web (a URL by name or address), dns (a question for a
// name to the port 53 of an address).
const probe6 = `
import errno, socket, ssl, struct, sys, time, urllib.request
trust = ssl.create_default_context(cadata=sys.argv[1])
def attempt(kind, host, port):
    if kind == "name":
        return ",".join(sorted({a[4][0] for a in socket.getaddrinfo(host, 1, socket.AF_INET6, socket.SOCK_STREAM)}))
    if kind == "tcp":
        socket.create_connection((host, int(port)), timeout=10).close()
        return "ok"
    if kind == "udp":
        c = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        c.settimeout(2)
        c.connect((host, int(port)))
        c.send(b"hello")
        c.recv(100)
        return "ok"
    if kind == "dns":
        c = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
        c.settimeout(10)
        c.connect((host, 53))
        name = b"".join(bytes([len(l)]) + l.encode() for l in port.split(".")) + b"\0"
        c.send(struct.pack(">6H", 7, 256, 1, 0, 0, 0) + name + struct.pack(">2H", 28, 1))
        a = c.recv(600)
        return "code %d, %d answers" % (a[3] & 15, a[7])
    with urllib.request.urlopen(kind + "://" + host + port, timeout=20, context=trust if kind == "https" else None) as r:
        return "%d %s" % (r.status, r.read().decode().strip())
for what in sys.argv[2:]:
    began = time.monotonic()
    try:
        how = attempt(*what.split(" "))
    except urllib.error.HTTPError as e:
        how = "%d %s" % (e.code, e.read().decode().strip())
    except TimeoutError:
        how = "timeout"
    except OSError as e:
        e = getattr(e, "reason", e) # urllib wraps
        n = getattr(e, "errno", None)
        if isinstance(e, socket.gaierror):
            how = {socket.EAI_NONAME: "no-name", socket.EAI_NODATA: "no-address", socket.EAI_ADDRFAMILY: "no-address"}.get(n, str(n))
        else:
            how = "refused" if n in (errno.ECONNREFUSED, errno.EHOSTUNREACH, errno.ENETUNREACH, errno.EACCES) else errno.errorcode.get(n, str(e))
    print(how, flush=True)
`

// reached6 knocks at port 7000 of addresses and says which answered.
const reached6 = `
import concurrent.futures, socket, sys
def dial(a):
    u = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
    try: u.sendto(b"x", (a, 7000))
    except OSError: pass
    try: socket.create_connection((a, 7000), timeout=3).close(); return [a]
    except OSError: return []
with concurrent.futures.ThreadPoolExecutor(32) as pool:
    print(*sum(pool.map(dial, sys.argv[1:]), []))
`

// try6 runs probe6 and compares: pairs of what to try and how it must end, or begin where the word ends in *.
func try6(t *testing.T, d *testenv.Daemon, box, when string, pairs ...string) {
	t.Helper()
	args := []string{"exec", box, "python3", "-c", probe6, string(d.Lab().CA())}
	for pair := range slices.Chunk(pairs, 2) {
		args = append(args, pair[0])
	}
	r := d.Shard(args...)
	got := strings.Split(strings.TrimSuffix(r.Stdout, "\n"), "\n")
	if r.Code != 0 || len(got) != len(pairs)/2 {
		t.Fatalf("%s: probe: exit code %d\n%s%s", when, r.Code, r.Stdout, r.Stderr)
	}
	for i, pair := range slices.Collect(slices.Chunk(pairs, 2)) {
		if got[i] == "timeout" && pair[1] == "refused" && strings.HasPrefix(pair[0], "udp ") && strings.Contains(t.Name(), "gvisor") {
			continue // gVisor tells programs of no ICMP error for UDP
		}
		start, begins := strings.CutSuffix(pair[1], "*")
		if got[i] != pair[1] && !(begins && strings.HasPrefix(got[i], start)) {
			t.Errorf("%s: %s: %q, want %q", when, pair[0], got[i], pair[1])
		}
	}
}

// hostIPv6 takes the host's way out over IPv6 or gives it back, and waits until the daemon has seen it.
func hostIPv6(t *testing.T, d *testenv.Daemon, there bool) {
	t.Helper()
	const seen = "this host's way out over IPv6 changed"
	before := strings.Count(d.Log(), seen)
	d.Lab().IPv6(there)
	testenv.Eventually(t, seen, func() (bool, string) { return strings.Count(d.Log(), seen) > before, "" })
}

// TestIPv6: without a policy a sandbox reaches the IPv6 internet where its host does, and nothing private in any form; where
// the host has none, or loses it, also while the daemon is dead, programs are told at once.
func TestIPv6(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	d.Import(image, testenv.Busybox(t))
	lab := d.Lab()
	private := []string{"fd00:7::1", "fc00::7", "fec0::7", "2001::7", "64:ff9b:1::7", "64:ff9b::10.1.2.3", "64:ff9b::192.168.7.7", "64:ff9b::169.254.169.254",
		"2002:a01:203::7", "2002:c0a8:707::7", "100::7"}
	host := []string{testenv.LabHostAddr6, "2001:db8:5::5", "fd00:99::1"}
	var canaries []*testenv.Canary
	for _, a := range private {
		canaries = append(canaries, lab.CanaryInWorld(net.JoinHostPort(a, "7000")))
	}
	for _, a := range host {
		canaries = append(canaries, lab.CanaryOnHost(net.JoinHostPort(a, "7000")))
	}
	for _, c := range canaries {
		c.Control()
	}
	closed := append(private, host...)
	echo := testenv.LabEchoAddr6
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, other := box(t, d, provider, testenv.PythonRef), box(t, d, provider, testenv.PythonRef)
		works := func(when string) {
			t.Helper()
			try6(t, d, id, when, "name echo6.lab.test 1", echo, "tcp "+echo+" 7", "ok", "udp "+echo+" 7", "ok", "tcp echo6.lab.test 7", "ok",
				"http web6.lab.test /a", "200 GET http web6.lab.test /a from "+testenv.LabHostAddr6,
				"https web6.lab.test /b", "200 GET https web6.lab.test /b from "+testenv.LabHostAddr6,
				"http ["+testenv.LabWebAddr6+"] /c", "200 GET http *", "http dual.lab.test /d", "200 *", "http web.lab.test /e", "200 *")
		}
		works("at first")
		if got := sh(t, d, box(t, d, provider), "ping -6 -c 1 -W 20 "+echo+" >/dev/null && echo pong"); got != "pong" {
			t.Errorf("ping: %q", got)
		}
		hosts := sh(t, d, id, "cat /etc/hosts")
		var addr string
		for line := range strings.Lines(sh(t, d, other, "cat /etc/hosts")) {
			if f := strings.Fields(line); f[1] == other { // the last is that of IPv6
				addr = f[0]
			}
		}
		if !strings.Contains(hosts, "::1\tip6-localhost") || strings.Contains(hosts, "::1\tlocalhost") || net.ParseIP(addr).To4() != nil || net.ParseIP(addr) == nil {
			t.Errorf("hosts: %q; the other's address is %q", hosts, addr)
		}
		serve6 := d.Command("exec", other, "python3", "-c", "import socket\ns = socket.create_server(('::', 7000), family=socket.AF_INET6)\nwhile True: s.accept()[0].sendall(b'reached')")
		if err := serve6.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = serve6.Process.Kill(); _ = serve6.Wait() }()
		testenv.Eventually(t, "it reaches itself", func() (bool, string) {
			r := d.Shard("exec", other, "python3", "-c", reached6, addr)
			return strings.TrimSpace(r.Stdout) == addr, r.Stdout + r.Stderr
		})
		// All at once, since what is dropped in silence takes its time.
		if got := d.Must(append([]string{"exec", id, "python3", "-c", reached6, addr, "::ffff:10.1.2.3", "::10.1.2.3", "ff02::1", "fe80::1"}, closed...)...); got != "" {
			t.Errorf("reached: %s", got)
		}
		for _, c := range canaries {
			if hits := c.Hits(); len(hits) > 0 {
				t.Errorf("%s was reached: %v", c.Addr, hits)
			}
		}
		d.Must("stop", id)
		d.Must("start", id)
		works("after stop and start")

		hostIPv6(t, d, false)
		try6(t, d, id, "the host has lost it", "tcp "+echo+" 7", "refused", "udp "+echo+" 7", "refused", "http dual.lab.test /", "200 *", "http web.lab.test /", "200 *")
		d.Kill9()
		lab.IPv6(true)
		d.Restart()
		works("gained while the daemon was dead")
		d.Kill9()
		lab.IPv6(false)
		d.Restart()
		try6(t, d, id, "lost while the daemon was dead", "tcp "+echo+" 7", "refused", "http dual.lab.test /", "200 *")
		hostIPv6(t, d, true)
		try6(t, d, id, "gained again", "tcp "+echo+" 7", "ok", "udp "+echo+" 7", "ok")
	})
}

// TestIPv6Policy: rules, lookups, feeds, the proxy and the log over IPv6.
func TestIPv6Policy(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	open, shut := "2001:db8:60::1", "2001:db8:61::1"
	for _, a := range []string{open, shut, "2001:db8:62::1"} {
		for _, port := range []string{"443", "7000", "7001"} {
			lab.CanaryInWorld(net.JoinHostPort(a, port))
		}
	}
	lab.Name("named6.test", "2001:db8:62::1")
	lab.Name("inside6.test", "fd00:7::1", "::ffff:203.0.113.9", "64:ff9b::a01:203", "2002:a01:203::1")
	lab.Name("mixed6.test", "fd00:7::1", "2001:db8:62::1")
	lab.Name("other6.test", testenv.LabWebAddr6) // shares its address with web6
	lab.Name("host6.test", testenv.LabHostAddr6)
	echo := testenv.LabEchoAddr6
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, name := policied(t, d, provider, "deny 2001:db8:60::1 tcp:7001", "allow 2001:db8:60::/64", "allow web6.lab.test", "allow dual.lab.test",
			"allow echo6.lab.test tcp:7", "allow echo6.lab.test udp:7", "allow suffix:test tcp:7000,80")
		try6(t, d, id, "rules",
			"tcp "+open+" 7000", "ok", "tcp "+open+" 7001", "refused", "udp "+open+" 7000", "ok", "tcp "+shut+" 7000", "refused", "udp "+shut+" 7000", "refused",
			"tcp "+echo+" 7", "refused", "udp "+echo+" 7", "refused", // not looked up yet
			"name echo6.lab.test 1", echo, "tcp "+echo+" 7", "ok", "udp "+echo+" 7", "ok", "tcp "+echo+" 8080", "refused",
			"name named6.test 1", "2001:db8:62::1", "tcp 2001:db8:62::1 7000", "ok", "tcp 2001:db8:62::1 7001", "refused", "udp 2001:db8:62::1 443", "refused",
			"name inside6.test 1", "no-address", "name mixed6.test 1", "2001:db8:62::1", "name denied.example 1", "no-name",
			"name dual.lab.test 1", testenv.LabWebAddr6, "tcp fd00:7::1 7000", "refused", "tcp "+testenv.LabHostAddr6+" 7000", "refused",
			"dns "+shut+" echo6.lab.test", "code 0, 1 answers", "dns fd00:7::1 denied.example", "code 3, 0 answers",
		)
		try6(t, d, id, "the web",
			"http web6.lab.test /a", "200 GET http web6.lab.test /a from "+testenv.LabHostAddr6,
			"https web6.lab.test /b", "200 GET https web6.lab.test /b from "+testenv.LabHostAddr6, // the host's own certificate
			"http dual.lab.test /c", "200 *", "https dual.lab.test /d", "200 *",
			"http ["+testenv.LabWebAddr6+"] /e", `403 {"host":"`+testenv.LabWebAddr6+`","port":80,"rule":"default"*`,
			"https other6.test /", "*", // refused by an alert
			"http host6.test /", `403 {"host":"host6.test","port":80,"rule":"local"*`,
			"http inside6.test /", "no-address",
		)
		decisions(t, d, id, "dns allow rule=7 host=echo6.lab.test to="+echo+":53", "dns deny rule=private host=inside6.test", "dns deny rule=default host=denied.example",
			"host deny rule=3 host= to="+open+":7001 deny 2001:db8:60::1 tcp:7001 () tcp", "host deny rule=default host= to="+shut+":7000", "host deny rule=private host= to=fd00:7::1:7000",
			"host deny rule=local host= to="+testenv.LabHostAddr6+":7000", "proxy allow rule=5 host=web6.lab.test to="+testenv.LabWebAddr6+":80",
			"proxy allow rule=5 host=web6.lab.test to="+testenv.LabWebAddr6+":443", "proxy deny rule=local host=host6.test to="+testenv.LabHostAddr6+":80")
		if got := d.Must("policy", "check", id, open, "7001"); !strings.Contains(got, "is denied: rule 3 (deny 2001:db8:60::1 tcp:7001)") {
			t.Errorf("check: %s", got)
		}
		if got := d.Must("policy", "learn", id); !strings.Contains(got, fmt.Sprintf("'%s tcp:7000'", shut)) || !strings.Contains(got, fmt.Sprintf("'%s udp:7000'", shut)) {
			t.Errorf("learn:\n%s", got)
		}
		// What was looked up stays open as far as the new rules say so, and does not where the daemon died.
		put(t, d, name, "allow echo6.lab.test tcp:7", "allow dual.lab.test", "deny any")
		try6(t, d, id, "other rules", "tcp "+echo+" 7", "ok", "udp "+echo+" 7", "refused", "tcp "+open+" 7000", "refused")

		hostIPv6(t, d, false)
		try6(t, d, id, "the host has lost it", "name echo6.lab.test 1", "no-address", "tcp "+echo+" 7", "refused", "tcp "+shut+" 443", "refused",
			"http dual.lab.test /", "200 *", "https dual.lab.test /", "200 *")
		decisions(t, d, id, "host deny rule=ipv6 host= to="+echo+":7  (the host has no IPv6) tcp", "dns allow rule=3 host=echo6.lab.test")
		d.Kill9()
		lab.IPv6(true)
		d.Restart()
		try6(t, d, id, "gained while the daemon was dead", "tcp "+echo+" 7", "refused", "name echo6.lab.test 1", echo, "tcp "+echo+" 7", "ok", "http dual.lab.test /", "200 *")
	})
}

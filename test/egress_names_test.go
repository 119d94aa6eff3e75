package test

import (
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/miekg/dns"

	"github.com/useshards/shard/internal/testenv"
)

// changing is a program that keeps a connection to a name, and meanwhile makes another each tenth of a second, each after a
// lookup; it says how many failed.
const changing = `
import socket, sys, time
def dial():
    c = socket.create_connection(("cdn.test", 7000), timeout=20)
    echo(c)
    return c
def echo(c):
    c.sendall(b"?")
    if c.recv(1) != b"?":
        raise OSError("no answer")
kept, failed, seen = dial(), [], set()
end = time.monotonic() + 12
while time.monotonic() < end:
    try:
        with dial() as c:
            seen.add(c.getpeername()[0])
        echo(kept)
    except OSError as e:
        failed.append(str(e))
    time.sleep(0.1)
print(len(failed), failed[:3], len(seen) > 2)
`

// TestCase059: answers that change all the time, behind a chain of names: what was just looked up can be reached, a connection
// outlives its address, and the chain's other names open nothing.
func TestCase059(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	const many, each, life = 60, 8, 2
	for i := range many {
		listener := lab.ListenWorld("tcp", fmt.Sprintf("203.0.113.%d:7000", 100+i))
		go func() {
			for {
				c, err := listener.Accept()
				if err != nil {
					return
				}
				go func() { _, _ = io.Copy(c, c); _ = c.Close() }()
			}
		}()
	}
	var turn atomic.Int64
	chain := []string{"cdn.test.", "a.edge.example.", "b.edge.example.", "c.edge.example."}
	addresses := func(q dns.Question) (out []dns.RR) {
		if q.Qtype != dns.TypeA {
			return nil
		}
		first := int(turn.Add(1)) * each
		for i := range each {
			out = append(out, &dns.A{Hdr: dns.RR_Header{Name: chain[3], Rrtype: dns.TypeA, Ttl: life}, A: net.IPv4(203, 0, 113, byte(100+(first+i)%many))})
		}
		return out
	}
	for i, name := range chain {
		lab.Records(name, func(q dns.Question) (out []dns.RR) {
			for j := i; j < len(chain)-1; j++ {
				out = append(out, &dns.CNAME{Hdr: dns.RR_Header{Name: chain[j], Rrtype: dns.TypeCNAME, Ttl: life}, Target: chain[j+1]})
			}
			return append(out, addresses(q)...)
		})
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, _ := policied(t, d, provider, "allow cdn.test tcp:80,7000")
		r := d.Shard("exec", id, "python3", "-c", changing)
		if r.Code != 0 || r.Stdout != "0 [] True\n" {
			t.Errorf("exit code %d: %s%s", r.Code, r.Stdout, r.Stderr)
		}
		try(t, d, id, "the chain's other names", "name/c.edge.example/1", "no-name", "name/a.edge.example/1", "no-name")
		asked(t, d, id, "the chain's other names", "http://cdn.test/|c.edge.example", "403")
	})
}

// TestCase063: lookups by the resolvers of glibc, musl and Go.
func TestCase063(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	archive := testenv.ClientsArchive(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--dns", testenv.LabDNSAddr}})
	d.Must("image", "import", archive, testenv.ClientsRef)
	var many []string
	for i := range 60 {
		many = append(many, fmt.Sprintf("203.0.113.%d", 100+i))
	}
	lab.Name("many.test", many...)
	lab.Name("one.test", "203.0.113.99")
	lab.Name("found.sub.test", "203.0.113.97")
	lab.Name("inside.test", "10.1.2.3", "203.0.113.98")
	lab.Name("private.test", "10.1.2.3")
	const size = 4096
	lab.Records("long.test", func(q dns.Question) []dns.RR {
		if q.Qtype != dns.TypeTXT {
			return nil
		}
		return []dns.RR{&dns.TXT{Hdr: dns.RR_Header{Name: q.Name, Rrtype: dns.TypeTXT, Ttl: 5}, Txt: slices.Repeat([]string{strings.Repeat("x", 128)}, size/128)}}
	})
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		put(t, d, "libc-"+provider, "allow suffix:test tcp:7000")
		id := box(t, d, provider, "--policy", "libc-"+provider, testenv.ClientsRef)
		sh(t, d, id, `printf 'search sub.test\noptions ndots:2\n' >> /etc/resolv.conf`)
		for _, libc := range testenv.LookupNames {
			for _, c := range []struct{ what, name, want string }{
				{"host", "one.test", "203.0.113.99"},
				{"host", "many.test", strings.Join(many, "\n")},
				{"host", "found", "203.0.113.97"},
				{"host", "inside.test", "203.0.113.98"},
				{"host", "private.test", "no-name"},
				{"host", "none.test", "no-name"},
				{"host", "denied.example", "no-name"},
				{"host", "one.test", "203.0.113.99"},
				{"txt", "long.test", fmt.Sprint(size)},
				{"txt", "none.test", "no-name"},
			} {
				r := d.Shard("exec", id, "lookup-"+libc, c.what, c.name)
				lines := strings.Fields(r.Stdout)
				slices.Sort(lines)
				got := strings.Join(lines, "\n")
				switch {
				case libc == "musl" && c.name == "long.test":
					continue // this musl (before 1.2.4) asks by UDP alone
				case libc == "musl" && c.name == "many.test" && len(lines) >= 20 && !slices.ContainsFunc(lines, func(a string) bool { return !slices.Contains(many, a) }):
					continue // and takes the addresses that fit
				case c.name == "private.test" && strings.Contains(r.Stdout, "No address"):
					continue // glibc tells a name without addresses from no name
				}
				if got != c.want || r.Code != 0 {
					t.Errorf("%s: %s of %s: exit code %d, %q%s, want %q", libc, c.what, c.name, r.Code, got, r.Stderr, c.want)
				}
			}
		}
		decisions(t, d, id, "dns deny rule=private host=private.test to=10.1.2.3:53", "dns allow rule=3 host=none.test")
	})
}

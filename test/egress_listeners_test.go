package test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/miekg/dns"

	"github.com/useshards/shard/internal/testenv"
)

// TestServicesAreApart: the resolver and the proxy that serve a sandbox serve nobody else: no other sandbox, no program of the
// host, no machine beside the host; and it reaches them by the way of its traffic alone.
func TestServicesAreApart(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		gateway := func(box string) string {
			t.Helper()
			out := sh(t, d, box, `python3 -c '
import socket, struct
for line in open("/proc/net/route"):
    f = line.split()
    if f[1] == "00000000":
        print(socket.inet_ntoa(struct.pack("<L", int(f[2], 16))))
'`)
			if net.ParseIP(out) == nil {
				t.Fatalf("the gateway is %q", out)
			}
			return out
		}
		a, _ := policied(t, d, provider, "allow web.lab.test")
		b, _ := policied(t, d, provider, "allow web.lab.test")
		own, other := gateway(a), gateway(b)
		for _, at := range []string{own, other} {
			for _, port := range []string{"30053", "30080", "30443"} {
				try(t, d, a, "a service by its own port", "tcp/"+at+"/"+port, "refused", "udp/"+at+"/"+port, "refused")
			}
		}
		// What is sent to the ports of the other's services arrives at the sandbox's own.
		asked(t, d, a, "the other's gateway", "http://"+other+"/|web.lab.test", "200 GET http web.lab.test", "http://"+other+"/", `403 …"rule":"private"`)
		decisions(t, d, a, "proxy allow rule=3 host=web.lab.test")
		if got := decisions(t, d, b); len(got) > 0 {
			t.Errorf("the other sandbox's log: %+v", got)
		}
		question := new(dns.Msg)
		question.SetQuestion("web.lab.test.", dns.TypeA)
		packet, err := question.Pack()
		if err != nil {
			t.Fatal(err)
		}
		for who, dial := range map[string]func(context.Context, string, string) (net.Conn, error){"the host": lab.DialFromHost, "a neighbour": lab.DialFromWorld} {
			for port, says := range map[string]string{"30053": string([]byte{0, byte(len(packet))}) + string(packet), "30080": "GET / HTTP/1.1\r\nHost: web.lab.test\r\n\r\n", "30443": "\x16\x03\x01\x00\x05hello"} {
				ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
				c, err := dial(ctx, "tcp", net.JoinHostPort(other, port))
				cancel()
				if err != nil {
					continue // better still: what it sends is dropped
				}
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				_, _ = io.WriteString(c, says)
				got, err := io.ReadAll(c)
				if n, ok := errors.AsType[net.Error](err); len(got) > 0 || ok && n.Timeout() {
					t.Errorf("%s, port %s: %q, %v", who, port, got, err)
				}
				_ = c.Close()
			}
		}
		if got := decisions(t, d, b); len(got) > 0 {
			t.Errorf("the other sandbox's log: %s", strings.ReplaceAll(fmt.Sprint(got), "} {", "}\n{"))
		}
	})
}

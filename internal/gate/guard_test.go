package gate

import (
	"net"
	"strings"
	"testing"
)

// TestGuards: a page in a browser cannot call, neither by its origin nor by a name that leads to us.
func TestGuards(t *testing.T) {
	r := newRig(t, Options{AllowHosts: []string{"shard.example.com"}, AllowOrigins: []string{"https://console.example.com"}})
	text := r.mint(0)
	for _, c := range []struct {
		host, origin string
		status       int
	}{
		{"127.0.0.1:7850", "", 200}, {"localhost", "", 200}, {"LOCALHOST:1", "", 200}, {"[::1]:80", "", 200}, {"127.1.2.3", "", 200},
		{"shard.example.com", "", 200}, {"Shard.Example.com:443", "", 200},
		{"evil.example.com", "", 403}, {"evil.example.com:7850", "", 403}, {"localhost.evil.example.com", "", 403}, {"", "", 403},
		{"10.0.0.1", "", 403}, {"0.0.0.0", "", 403}, {"127.0.0.1.evil.example.com", "", 403}, {"[::2]", "", 403},
		{"localhost", "https://console.example.com", 200}, {"localhost", "https://evil.example.com", 403}, {"localhost", "null", 403},
		{"localhost", "http://localhost:7850", 403}, {"localhost", "http://console.example.com", 403}, {"localhost", "https://console.example.com.evil", 403},
	} {
		raw := "GET /v0/version HTTP/1.1\r\nHost: " + c.host + "\r\nAuthorization: Bearer " + text + "\r\n"
		if c.origin != "" {
			raw += "Origin: " + c.origin + "\r\n"
		}
		conn := r.dial("127.0.0.1")
		if got := r.raw(conn, raw+"\r\n"); got == nil || got.status != c.status {
			t.Errorf("host %q, origin %q: %+v", c.host, c.origin, got)
		}
		conn.Close()
	}
}

// TestListen: what is not started.
func TestListen(t *testing.T) {
	for _, o := range []Options{
		{Listen: "0.0.0.0:0"}, {Listen: ":0"}, {Listen: "[::]:0"}, {Listen: "nonsense"}, {Listen: "127.0.0.1"},
		{Listen: "127.0.0.1:0", CertFile: "/x"}, {Listen: "127.0.0.1:0", KeyFile: "/x"}, {Listen: "127.0.0.1:0", CertFile: "/x", KeyFile: "/x"},
		{Listen: "127.0.0.1:0", CertFile: "/x", KeyFile: "/x", SelfSigned: true}, {Listen: "127.0.0.1:0", SigningKey: "/nonexistent/key"},
	} {
		o.Root, o.Log = t.TempDir(), newRig(t, Options{}).gate.o.Log
		if g, err := Listen(o); err == nil {
			g.listener.Close()
			t.Errorf("%+v listens", o)
		}
	}
	r := newRig(t, Options{Listen: "0.0.0.0:0", Insecure: true})
	if !strings.Contains(r.log.String(), "without TLS") {
		t.Error("no warning")
	}
}

// TestEveryAddress: a gate on all addresses goes by the one that was called, not by the name for all.
func TestEveryAddress(t *testing.T) {
	r := newRig(t, Options{Listen: "0.0.0.0:0", Insecure: true})
	text := r.mint(0)
	_, port, _ := net.SplitHostPort(r.addr())
	for host, status := range map[string]int{"0.0.0.0": 403, "127.0.0.9": 200, "192.0.2.1": 403} {
		conn, err := net.Dial("tcp", net.JoinHostPort("127.0.0.9", port))
		if err != nil {
			t.Fatal(err)
		}
		if got := r.raw(conn, "GET /v0/version HTTP/1.1\r\nHost: "+host+"\r\nAuthorization: Bearer "+text+"\r\n\r\n"); got == nil || got.status != status {
			t.Errorf("host %s: %+v", host, got)
		}
		conn.Close()
	}
}

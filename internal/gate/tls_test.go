package gate

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// certificate writes a certificate of a new authority for a name, and its key.
func certificate(t *testing.T, dir, name string) (cert, key string, roots *x509.CertPool) {
	t.Helper()
	c := &ownCA{dir: t.TempDir(), names: []string{name}, addr: &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)}}
	if err := c.open(); err != nil {
		t.Fatal(err)
	}
	if err := c.reload(); err != nil {
		t.Fatal(err)
	}
	leaf := c.loaded.Load()
	raw, err := x509.MarshalPKCS8PrivateKey(leaf.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	if err := writePEM(key, 0o600, "PRIVATE KEY", raw); err != nil {
		t.Fatal(err)
	}
	if err := writePEM(cert, 0o644, "CERTIFICATE", leaf.Certificate[0]); err != nil {
		t.Fatal(err)
	}
	return cert, key, rootsOf(t, filepath.Join(c.dir, "ca.crt"))
}

func rootsOf(t *testing.T, file string) *x509.CertPool {
	t.Helper()
	raw, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(raw) {
		t.Fatal("no certificate in " + file)
	}
	return roots
}

// serves says whether the server has a certificate for the name now.
func (r *rig) serves(name string, roots *x509.CertPool) error {
	d := tls.Dialer{Config: &tls.Config{ServerName: name, RootCAs: roots}}
	conn, err := d.DialContext(r.t.Context(), "tcp", r.addr())
	if err == nil {
		conn.Close()
	}
	return err
}

// TestTLSReload: a renewed certificate is taken without a restart, half of one is not, and open streams stay.
func TestTLSReload(t *testing.T) {
	dir := t.TempDir()
	cert, key, first := certificate(t, dir, "one.example.com")
	r := newRig(t, Options{CertFile: cert, KeyFile: key})
	if err := r.serves("one.example.com", first); err != nil {
		t.Fatal(err)
	}
	open, err := tls.Dial("tcp", r.addr(), &tls.Config{ServerName: "one.example.com", RootCAs: first})
	if err != nil {
		t.Fatal(err)
	}
	defer open.Close()
	if err := os.WriteFile(key, []byte("half of a key"), 0o600); err != nil {
		t.Fatal(err)
	}
	r.gate.Reload()
	if err := r.serves("one.example.com", first); err != nil {
		t.Errorf("a broken key ended the old certificate: %v", err)
	}
	_, _, second := certificate(t, dir, "two.example.com")
	for deadline := time.Now().Add(wait); r.serves("two.example.com", second) != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the new certificate is not served: %v", r.serves("two.example.com", second))
		}
	}
	if r.serves("one.example.com", first) == nil {
		t.Error("the old certificate is still served")
	}
	_, _ = io.WriteString(open, "GET /v0/version HTTP/1.1\r\nHost: two.example.com\r\nAuthorization: Bearer "+r.mint(0)+"\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(open), nil)
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("a connection from before the change: %v %v", resp, err)
	} else {
		resp.Body.Close()
	}
}

// TestTLSForms: what is not spoken, and what is said to those who speak it.
func TestTLSForms(t *testing.T) {
	cert, key, roots := certificate(t, t.TempDir(), "one.example.com")
	r := newRig(t, Options{CertFile: cert, KeyFile: key})
	for name, config := range map[string]*tls.Config{
		"TLS 1.1": {MaxVersion: tls.VersionTLS11, MinVersion: tls.VersionTLS10}, // to see it refused
		"HTTP/2":  {NextProtos: []string{"h2"}},
	} {
		config.RootCAs, config.ServerName = roots, "one.example.com"
		if conn, err := tls.Dial("tcp", r.addr(), config); err == nil {
			conn.Close()
			t.Errorf("%s is spoken", name)
		}
	}
	conn, err := tls.Dial("tcp", r.addr(), &tls.Config{RootCAs: roots, ServerName: "one.example.com", NextProtos: []string{"h2", "http/1.1"}})
	if err != nil {
		t.Fatal(err)
	}
	if p := conn.ConnectionState().NegotiatedProtocol; p != "http/1.1" {
		t.Errorf("the protocol is %q", p)
	}
	conn.Close()
	if got := r.raw(r.dial("127.0.0.1"), plain+"\r\n"); got == nil || got.status != 400 || got.code != shard.CodeInvalidRequest || !strings.Contains(got.body, "https://") {
		t.Errorf("plain HTTP: %+v", got)
	}
}

// TestSelfSigned: a client with the authority's certificate is served, over restarts, and one without is not.
func TestSelfSigned(t *testing.T) {
	r := newRig(t, Options{SelfSigned: true, AllowHosts: []string{"shard.test:7850"}})
	crt, key := filepath.Join(r.root, "auth", "tls", "ca.crt"), filepath.Join(r.root, "auth", "tls", "ca.key")
	if !strings.Contains(r.log.String(), crt) {
		t.Error("the log does not say where the authority's certificate is")
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the authority's key: %v %v", info.Mode(), err)
	}
	roots := rootsOf(t, crt)
	base := &url.URL{Scheme: "https", Host: r.addr()}
	c := client.New(client.Options{Dial: client.Remote(base, roots), Base: base, Token: r.mint(0)})
	defer c.Close()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	if err := c.Remove(ctx, "web", false); err != nil { // any answer below 300 will do
		t.Error(err)
	}
	for _, name := range []string{"localhost", "shard.test", "127.0.0.1"} {
		if err := r.serves(name, roots); err != nil {
			t.Error(err)
		}
	}
	if r.serves("evil.example.com", roots) == nil || r.serves("localhost", x509.NewCertPool()) == nil {
		t.Error("it is trusted by who should not")
	}
	again := &ownCA{dir: filepath.Dir(crt), addr: &net.TCPAddr{}}
	if err := again.open(); err != nil || !again.ca.Leaf.Equal(mustParse(t, crt)) {
		t.Errorf("another start makes another authority: %v", err)
	}
}

func mustParse(t *testing.T, crt string) *x509.Certificate {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(crt, filepath.Join(filepath.Dir(crt), "ca.key"))
	if err != nil {
		t.Fatal(err)
	}
	return pair.Leaf
}

// TestTLSStream: a stream under TLS carries much both ways, and ends with its token.
func TestTLSStream(t *testing.T) {
	r := newRig(t, Options{SelfSigned: true})
	base := &url.URL{Scheme: "https", Host: r.addr()}
	dial := client.Remote(base, rootsOf(t, filepath.Join(r.root, "auth", "tls", "ca.crt")))
	transport := &http.Transport{DialTLSContext: func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) }}
	defer transport.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	ws, _, err := websocket.Dial(ctx, base.String()+"/v0/sandboxes/echo/exec/1", &websocket.DialOptions{
		HTTPClient: &http.Client{Transport: transport}, HTTPHeader: http.Header{"Authorization": {"Bearer " + r.mint(2*time.Second)}}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	ws.SetReadLimit(32 << 20)
	for _, size := range []int{1, 70_000, 5 << 20} {
		if err := r.echo(ws, strings.Repeat("z", size)); err != nil {
			t.Errorf("%d bytes: %v", size, err)
		}
	}
	r.ends(ws)
}

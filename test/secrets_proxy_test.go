package test

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/hex"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"math/big"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
)

// arrival is a request as the lab got it; arrivals answers each with the value of its header Key, as an echoing host does.
type arrival struct {
	Host, URI, Body string
	Header, Trailer http.Header
}

type arrivals struct {
	mu  sync.Mutex
	all []arrival
}

func (a *arrivals) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	a.mu.Lock()
	a.all = append(a.all, arrival{r.Host, r.RequestURI, string(body), r.Header.Clone(), r.Trailer.Clone()})
	a.mu.Unlock()
	w.Header().Set("X-Echo", r.Header.Get("Key"))
	_, _ = fmt.Fprintf(w, "echo %s %s\n", r.Header.Get("Key"), base64.StdEncoding.EncodeToString([]byte("u:"+r.Header.Get("Key"))))
}

// take returns what arrived since the last call.
func (a *arrivals) take() []arrival {
	a.mu.Lock()
	defer a.mu.Unlock()
	all := a.all
	a.all = nil
	return all
}

// listen serves what arrives at an address of the world, by TLS with cert where there is one.
func (a *arrivals) listen(t *testing.T, lab *testenv.Lab, address string, config *tls.Config) {
	t.Helper()
	l := lab.ListenWorld("tcp", address)
	if config != nil {
		l = tls.NewListener(l, config)
	}
	s := &http.Server{Handler: a, ReadHeaderTimeout: time.Minute, ErrorLog: log.New(io.Discard, "", 0)}
	var group sync.WaitGroup
	group.Go(func() { _ = s.Serve(l) })
	t.Cleanup(func() { _ = s.Close(); group.Wait() })
}

// signer is an authority of a test.
type signer struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
}

func newSigner(t *testing.T, name string) *signer {
	t.Helper()
	s := &signer{cert: &x509.Certificate{Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}}
	c := s.issue(t, s.cert)
	s.cert, s.key = c.Leaf, c.PrivateKey.(*ecdsa.PrivateKey)
	return s
}

// issue signs a certificate, or has it sign itself where the signer has no key yet.
func (s *signer) issue(t *testing.T, template *x509.Certificate) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(time.Now().UnixNano())
	template.NotBefore = time.Now().Add(-48 * time.Hour)
	if template.NotAfter.IsZero() {
		template.NotAfter = time.Now().Add(48 * time.Hour)
	}
	signer := s.key
	if signer == nil {
		signer = key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, s.cert, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf}
}

func (s *signer) pem() string {
	return string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.cert.Raw}))
}

// TestSecretProxy is cases 71, 75 and 78.
func TestSecretProxy(t *testing.T) {
	t.Parallel()
	trusted, dir := newSigner(t, "trusted"), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "trusted.pem"), []byte(trusted.pem()), 0o600); err != nil {
		t.Fatal(err)
	}
	d := secretDaemon(t, testenv.Options{Env: []string{"SSL_CERT_DIR=" + dir}})
	t.Run("Case071", func(t *testing.T) { onlyHeaders(t, d) })
	t.Run("Case075", func(t *testing.T) { onlyValidHosts(t, d, trusted) })
	t.Run("Case078", func(t *testing.T) { untouchedHosts(t, d) })
}

// onlyHeaders: the value is put into headers inside TLS on port 443 to a destination, and nowhere else; what an echoing
// host answers holds the placeholder; a placeholder that strays is in the log.
func onlyHeaders(t *testing.T, d *testenv.Daemon) {
	lab := d.Lab()
	got := &arrivals{}
	lab.Web().Handle("dest.lab.test/", got)
	lab.Web().Handle("other.lab.test/", got)
	got.listen(t, lab, testenv.LabWebAddr+":8080", nil)
	alone := &signer{cert: &x509.Certificate{Subject: pkix.Name{CommonName: "alone"}}}
	cert := alone.issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "dest.lab.test"}, DNSNames: []string{"dest.lab.test"}})
	got.listen(t, lab, testenv.LabWebAddr+":8443", &tls.Config{Certificates: []tls.Certificate{cert}})
	const value = "sk-071/the+value=of-it"
	setSecret(t, d, value, "--dest", "dest.lab.test", "API_TOKEN")
	const script = `
import http.client, os, ssl, sys, base64
p = os.environ["API_TOKEN"]
def ask(kind, port, host, method, path, body=None, headers={}, **o):
    c = kind(host, port, timeout=30, **o)
    c.request(method, path, body, headers)
    r = c.getresponse()
    print(r.status, r.headers["X-Echo"], r.read().decode().strip(), flush=True)
plain, tls = http.client.HTTPConnection, http.client.HTTPSConnection
ask(tls, 443, "dest.lab.test", "POST", "/" + p + "?q=" + p, "k=" + p, {"Key": p, "Cookie": "a=" + p, "User-Agent": "ua/" + p, "Proxy-Authorization": p, "Content-Type": "application/x-www-form-urlencoded"})
ask(tls, 443, "dest.lab.test", "POST", "/json", '{"k": "%s"}' % p, {"Content-Type": "application/json"})
c = tls("dest.lab.test", 443, timeout=30)
c.connect()
c.sock.sendall(("POST /trailer HTTP/1.1\r\nHost: dest.lab.test\r\nTransfer-Encoding: chunked\r\nTrailer: Key\r\nConnection: close\r\n\r\n2\r\nhi\r\n0\r\nKey: %s\r\n\r\n" % p).encode())
print(c.sock.makefile("rb").readline().split()[1].decode(), flush=True)
ask(plain, 80, "dest.lab.test", "GET", "/", None, {"Key": p})
ask(plain, 8080, "dest.lab.test", "GET", "/", None, {"Key": p})
ask(tls, 8443, "dest.lab.test", "GET", "/", None, {"Key": p}, context=ssl._create_unverified_context())
ask(tls, 443, "other.lab.test", "GET", "/", None, {"Key": p})
`
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--secret", "API_TOKEN", trustingPython)
		got.take()
		const mock = "mock-API_TOKEN"
		echo := func(s string) string {
			return "200 " + s + " echo " + s + " " + base64.StdEncoding.EncodeToString([]byte("u:"+s))
		}
		out := d.Must("exec", id, "python3", "-c", script)
		lines := strings.Split(out, "\n")
		if len(lines) != 7 || !strings.HasPrefix(lines[0], "200 "+mock+" echo "+mock+" ") || lines[2] != "200" || lines[3] != echo(mock) || lines[6] != echo(mock) {
			t.Errorf("answers: %q", lines)
		}
		if strings.Contains(out, value) || strings.Contains(out, base64.StdEncoding.EncodeToString([]byte("u:" + value))[4:]) {
			t.Errorf("the value came back: %s", out)
		}
		all := got.take()
		if len(all) != 7 {
			t.Fatalf("%d requests arrived: %+v", len(all), all)
		}
		head := func(i int, name string) string { return all[i].Header.Get(name) }
		for what, pair := range map[string][2]string{
			"a header": {head(0, "Key"), value}, "a cookie": {head(0, "Cookie"), "a=" + value}, "the user agent": {head(0, "User-Agent"), "ua/" + value},
			"a header of the connection": {head(0, "Proxy-Authorization"), ""}, "path and query": {all[0].URI, "/" + mock + "?q=" + mock}, "a form": {all[0].Body, "k=" + mock},
			"JSON": {all[1].Body, `{"k": "` + mock + `"}`}, "a trailer": {all[2].Trailer.Get("Key"), mock}, "HTTP": {head(3, "Key"), mock},
			"HTTP on 8080": {head(4, "Key"), mock}, "HTTPS on 8443": {head(5, "Key"), mock}, "another host": {head(6, "Key"), mock},
		} {
			if pair[0] != pair[1] {
				t.Errorf("%s: %q, want %q", what, pair[0], pair[1])
			}
		}
		decisions(t, d, id, "allow rule=none host=dest.lab.test", "(the sandbox has no policy; the request carries the value of API_TOKEN)",
			"the placeholder of API_TOKEN goes without its value: the request is plain HTTP")
		if log := d.Must("policy", "logs", id); strings.Contains(log, value) || strings.Contains(log, mock) {
			t.Errorf("the log holds what it must not: %s", log)
		}
	})
}

// onlyValidHosts: a value goes to nobody whose certificate is not valid for the destination.
func onlyValidHosts(t *testing.T, d *testenv.Daemon, trusted *signer) {
	lab, revoked := d.Lab(), newSigner(t, "revoked")
	got := &arrivals{}
	alone := &signer{cert: &x509.Certificate{Subject: pkix.Name{CommonName: "alone"}}}
	urls := []string{}
	for i, c := range []struct {
		name string
		by   *signer
		in   x509.Certificate
	}{
		{"good", trusted, x509.Certificate{}},
		{"expired", trusted, x509.Certificate{NotAfter: time.Now().Add(-24 * time.Hour)}},
		{"self", alone, x509.Certificate{}},
		{"wrong", trusted, x509.Certificate{DNSNames: []string{"good.tls.lab.test"}}},
		{"revoked", revoked, x509.Certificate{}},
		{"sha1", trusted, x509.Certificate{SignatureAlgorithm: x509.ECDSAWithSHA1}},
	} {
		host := c.name + ".tls.lab.test"
		if c.in.DNSNames == nil {
			c.in.DNSNames = []string{host}
		}
		c.in.Subject = pkix.Name{CommonName: host}
		addr := fmt.Sprintf("203.0.113.%d", 70+i)
		lab.Name(host, addr)
		got.listen(t, lab, addr+":443", &tls.Config{Certificates: []tls.Certificate{c.by.issue(t, &c.in)}})
		urls = append(urls, "https://"+host+"/")
	}
	setSecret(t, d, "sk-075-0123456789", "--dest", "*.tls.lab.test", "TLS_TOKEN")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--secret", "TLS_TOKEN", trustingPython)
		got.take()
		lines := send(t, d, id, "TLS_TOKEN", urls...)
		if all := got.take(); len(all) != 1 || all[0].Header.Get("Authorization") != "Bearer sk-075-0123456789" {
			t.Errorf("the control: %+v", all)
		}
		for i, line := range lines {
			if i == 0 != strings.HasPrefix(line, "200 ") || i > 0 && !(strings.HasPrefix(line, "502 ") && strings.Contains(line, `"rule":"certificate"`)) {
				t.Errorf("%s: %s", urls[i], line)
			}
		}
		const noName = `
import socket, ssl
c = ssl._create_unverified_context()
try:
    s = c.wrap_socket(socket.create_connection(("good.tls.lab.test", 443), timeout=30))
    s.sendall(b"GET / HTTP/1.1\r\nHost: good.tls.lab.test\r\nKey: mock-TLS_TOKEN\r\n\r\n")
    print(s.recv(100))
except OSError as e:
    print("refused")
`
		if out := d.Must("exec", id, "python3", "-c", noName); out != "refused" || len(got.take()) != 0 {
			t.Errorf("without a name in TLS: %s", out)
		}
	})
}

// untouchedHosts: TLS to a host that is no destination is not touched: its own chain is seen, mutual TLS and pinning work.
func untouchedHosts(t *testing.T, d *testenv.Daemon) {
	lab := d.Lab()
	people := newSigner(t, "people")
	client := people.issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "somebody"}, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	server := people.issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "mutual"}, DNSNames: []string{"mutual.lab.test"}})
	lab.Name("mutual.lab.test", "203.0.113.80")
	got := &arrivals{}
	pool := x509.NewCertPool()
	pool.AddCert(people.cert)
	got.listen(t, lab, "203.0.113.80:443", &tls.Config{Certificates: []tls.Certificate{server}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool})
	key, err := x509.MarshalPKCS8PrivateKey(client.PrivateKey)
	if err != nil {
		t.Fatal(err)
	}
	pair := string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: client.Certificate[0]})) + string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: key}))
	setSecret(t, d, "sk-078-0123456789", "--dest", "dest.lab.test", "PIN_TOKEN")
	const script = `
import hashlib, http.client, socket, ssl, sys
def issuer(host):
    s = ssl.create_default_context().wrap_socket(socket.create_connection((host, 443), timeout=30), server_hostname=host)
    print(dict(x[0] for x in s.getpeercert()["issuer"])["commonName"])
issuer("other.lab.test")
issuer("dest.lab.test")
open("/tmp/pair.pem", "w").write(sys.argv[1])
c = ssl.create_default_context(cadata=sys.argv[2])
c.load_cert_chain("/tmp/pair.pem")
m = http.client.HTTPSConnection("mutual.lab.test", timeout=30, context=c)
m.request("GET", "/", headers={"Key": "k"})
print(hashlib.sha256(m.sock.getpeercert(True)).hexdigest())
print(m.getresponse().status)
`
	pin := sha256.Sum256(server.Certificate[0])
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--secret", "PIN_TOKEN", trustingPython)
		lines := strings.Split(d.Must("exec", id, "python3", "-c", script, pair, people.pem()), "\n")
		if len(lines) != 4 || lines[0] != "shard lab CA" || !strings.HasPrefix(lines[1], "shard proxy ") || lines[2] != hex.EncodeToString(pin[:]) || lines[3] != "200" {
			t.Errorf("%q", lines)
		}
	})
}

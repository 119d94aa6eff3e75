package egress

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

// rig is a proxy between sandboxes, which are addresses of the loopback network, and hosts, which are real servers that are
// reached under public addresses.
type rig struct {
	t     testing.TB
	proxy *Proxy
	ca    *CA
	block byte // of this rig: gateway 127.block.n.1, sandbox 127.block.n.2
	pool  *x509.CertPool
	world *authority

	mu        sync.Mutex
	subjects  map[string]Subject
	names     map[string][]netip.Addr
	servers   map[netip.AddrPort]string
	dialled   []netip.AddrPort
	lookups   []string
	decisions map[string][]shard.EgressDecision // the newest thousand or so
	full      bool                              // the log takes nothing
	sandboxes int
}

var rigs atomic.Int32

func newRig(t testing.TB) *rig {
	t.Helper()
	ca, err := OpenCA(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, ca: ca, world: newAuthority(t), pool: x509.NewCertPool(), block: byte(1 + (os.Getpid()+int(rigs.Add(1))*7)%250),
		subjects: map[string]Subject{}, names: map[string][]netip.Addr{}, servers: map[netip.AddrPort]string{}, decisions: map[string][]shard.EgressDecision{}}
	r.pool.AppendCertsFromPEM(ca.PEM())
	r.proxy = NewProxy(ProxyOptions{
		Subject: func(id string) (Subject, bool) {
			r.mu.Lock()
			defer r.mu.Unlock()
			s, ok := r.subjects[id]
			return s, ok
		},
		Resolve: func(_ context.Context, _, host string) ([]netip.Addr, error) {
			r.mu.Lock()
			defer r.mu.Unlock()
			r.lookups = append(r.lookups, host)
			if a := r.names[host]; len(a) > 0 {
				return a, nil
			}
			return nil, errors.New("no such name")
		},
		Recorder: r, CA: ca, Roots: r.world.pool,
		Dial: func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
			r.mu.Lock()
			r.dialled = append(r.dialled, addr)
			to := r.servers[addr]
			r.mu.Unlock()
			if to == "" {
				to = "127.0.0.1:1" // refused
			}
			return new(net.Dialer).DialContext(ctx, "tcp", to)
		},
	})
	t.Cleanup(func() {
		if err := r.proxy.Close(); err != nil {
			t.Errorf("close the proxy: %v", err)
		}
	})
	return r
}

func (r *rig) Record(sandbox string, d shard.EgressDecision) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.full {
		return errors.New("no space left")
	}
	if len(r.decisions[sandbox]) > 1000 {
		r.decisions[sandbox] = nil
	}
	r.decisions[sandbox] = append(r.decisions[sandbox], d)
	return nil
}

func (r *rig) log(sandbox string) []shard.EgressDecision {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.decisions[sandbox])
}

func (r *rig) last(sandbox string) shard.EgressDecision {
	all := r.log(sandbox)
	if len(all) == 0 {
		r.t.Fatal("nothing was recorded")
	}
	return all[len(all)-1]
}

// policyOf makes a policy of rules such as "allow example.test".
func policyOf(t testing.TB, rules ...string) *policy.Compiled {
	t.Helper()
	var list []shard.PolicyRule
	for _, text := range rules {
		action, rule, _ := cut(text)
		list = append(list, shard.PolicyRule{Action: action, Rule: rule})
	}
	parsed, err := policy.ParseAll(list)
	if err != nil {
		t.Fatal(err)
	}
	c, err := policy.Compile(parsed)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func cut(s string) (before, after string, found bool) {
	for i := range len(s) {
		if s[i] == ' ' {
			return s[:i], s[i+1:], true
		}
	}
	return s, "", false
}

// always is of a secret for which all TLS must be taken apart.
var always = []secret.Secret{{Name: "ALWAYS", Placeholder: "mock-ALWAYS", Destinations: []string{"*.test"}, Value: secret.NewValue("never-sent-by-these-tests")}}

// box is a sandbox of the rig.
type box struct {
	*rig
	id            string
	addr, gateway netip.Addr
}

func (r *rig) box(s Subject) *box {
	r.t.Helper()
	r.mu.Lock()
	r.sandboxes++
	n := byte(r.sandboxes)
	b := &box{rig: r, id: fmt.Sprintf("box%d", n), addr: netip.AddrFrom4([4]byte{127, r.block, n, 2}), gateway: netip.AddrFrom4([4]byte{127, r.block, n, 1})}
	r.subjects[b.id] = s
	r.mu.Unlock()
	if err := r.proxy.Add(b.id, Link{b.addr, b.gateway}); err != nil {
		r.t.Fatal(err)
	}
	return b
}

func (b *box) set(s Subject) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.subjects[b.id] = s
}

// dial is what arrives at the proxy when the sandbox connects to port 80 or 443 of anything.
func (b *box) dial(ctx context.Context, port int) (net.Conn, error) {
	d := net.Dialer{LocalAddr: net.TCPAddrFromAddrPort(netip.AddrPortFrom(b.addr, 0))}
	return d.DialContext(ctx, "tcp", netip.AddrPortFrom(b.gateway, map[int]uint16{80: PlainPort, 443: TLSPort}[port]).String())
}

func (b *box) raw(port int) net.Conn {
	b.t.Helper()
	c, err := b.dial(b.t.Context(), port)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	return c
}

// client is a program in the sandbox that trusts roots.
func (b *box) client(roots *x509.CertPool, http2 bool) *http.Client {
	tr := &http.Transport{
		DialContext: func(ctx context.Context, _, address string) (net.Conn, error) {
			port := 80
			if _, p, _ := net.SplitHostPort(address); p == "443" {
				port = 443
			}
			return b.dial(ctx, port)
		},
		TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: http2, DisableCompression: true, MaxIdleConnsPerHost: 64,
		ExpectContinueTimeout: 30 * time.Second,
	}
	b.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: time.Minute, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// dialServer connects to a host as if there were no proxy.
func (r *rig) dialServer(ctx context.Context, _, address string) (net.Conn, error) {
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, err
	}
	r.mu.Lock()
	to := r.servers[netip.AddrPortFrom(r.names[host][0], map[string]uint16{"80": 80, "443": 443}[port])]
	r.mu.Unlock()
	return new(net.Dialer).DialContext(ctx, "tcp", to)
}

// get returns status and body.
func get(t testing.TB, c *http.Client, url string) (int, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// host serves name at addr on 80 and 443.
func (r *rig) host(name, addr string, h http.Handler) {
	r.t.Helper()
	r.serve(name, addr, h, r.world.issue(r.t, leafOptions{name: name}), true)
}

func (r *rig) serve(name, addr string, h http.Handler, cert tls.Certificate, http2 bool) {
	r.t.Helper()
	a := netip.MustParseAddr(addr)
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(http2)
	protocols.SetUnencryptedHTTP2(http2)
	s := &http.Server{Handler: h, Protocols: &protocols, ErrorLog: log.New(io.Discard, "", 0), TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}}}
	plain, secure := listenLocal(r.t), listenLocal(r.t)
	var group sync.WaitGroup
	group.Go(func() { _ = s.Serve(plain) })
	group.Go(func() { _ = s.ServeTLS(secure, "", "") })
	r.t.Cleanup(func() { _ = s.Close(); group.Wait() })
	r.mu.Lock()
	defer r.mu.Unlock()
	if name != "" {
		r.names[name] = append(r.names[name], a)
	}
	r.servers[netip.AddrPortFrom(a, 80)] = plain.Addr().String()
	r.servers[netip.AddrPortFrom(a, 443)] = secure.Addr().String()
}

func listenLocal(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// authority vouches for hosts.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pool *x509.CertPool
	next atomic.Int64
}

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{pool: x509.NewCertPool()}
	var err error
	if a.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "the world"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, a.key.Public(), a.key)
	if err != nil {
		t.Fatal(err)
	}
	if a.cert, err = x509.ParseCertificate(der); err != nil {
		t.Fatal(err)
	}
	a.pool.AddCert(a.cert)
	return a
}

type leafOptions struct {
	name            string
	also            []string // names that it is for too
	expired, selfly bool
}

func (a *authority) issue(t testing.TB, o leafOptions) tls.Certificate {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1 + a.next.Add(1)), Subject: pkix.Name{CommonName: o.name}, DNSNames: append([]string{o.name}, o.also...),
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: time.Now().Add(-2 * time.Hour), NotAfter: time.Now().Add(time.Hour)}
	if o.expired {
		template.NotAfter = time.Now().Add(-time.Hour)
	}
	parent, signer := a.cert, a.key
	if o.selfly {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		t.Fatal(err)
	}
	return tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key}
}

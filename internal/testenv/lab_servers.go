package testenv

import (
	"bufio"
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/miekg/dns"
)

// publicResolvers are where programs that ignore the machine's configuration look names up.
var publicResolvers = []string{"1.1.1.1", "1.0.0.1", "8.8.8.8", "8.8.4.4", "9.9.9.9"}

// serve runs an HTTP server on a listener until the test ends.
func (l *Lab) serve(listener net.Listener, s *http.Server) {
	s.ReadHeaderTimeout = time.Minute
	s.ErrorLog = log.New(io.Discard, "", 0) // probes that hang up are what tests are made of
	var group sync.WaitGroup
	group.Go(func() { _ = s.Serve(listener) })
	l.t.Cleanup(func() { _ = s.Close(); group.Wait() })
}

func (l *Lab) serveRegistry() {
	l.Name(registryName, LabRegistry)
	handler := registry.New(registry.Logger(log.New(io.Discard, "", 0)))
	l.serve(l.ListenWorld("tcp", net.JoinHostPort(LabRegistry, registryPort)), &http.Server{Handler: handler})
}

// Push puts an image (v1.Image) or an index of images (v1.ImageIndex) into the registry as repository:tag and returns
// the reference by which programs in the host pull it.
func (l *Lab) Push(repositoryTag string, what remote.Taggable) string {
	l.t.Helper()
	ref := l.Registry() + "/" + repositoryTag
	tag, err := name.ParseReference(ref, name.Insecure)
	if err != nil {
		l.t.Fatal(err)
	}
	transport := &http.Transport{DialContext: l.DialFromHost}
	defer transport.CloseIdleConnections()
	options := []remote.Option{remote.WithTransport(transport), remote.WithContext(l.t.Context())}
	switch it := what.(type) {
	case v1.ImageIndex:
		err = remote.WriteIndex(tag, it, options...)
	case v1.Image:
		err = remote.Write(tag, it, options...)
	default:
		err = fmt.Errorf("%T is neither an image nor an index", what)
	}
	if err != nil {
		l.t.Fatalf("push %s: %v", ref, err)
	}
	return ref
}

// web is the HTTP and HTTPS server and the authority that vouches for it.
type web struct {
	mux     *http.ServeMux
	ca      *x509.Certificate
	key     *ecdsa.PrivateKey
	pem     []byte
	mu      sync.Mutex
	byName  map[string]*tls.Certificate
	clients *x509.CertPool
}

// Web takes handlers for the HTTP and HTTPS server of web.lab.test and every name that points at LabWebAddr or LabWebAddr6.
// What no handler takes is answered with a line "METHOD SCHEME HOST PATH from ADDRESS".
func (l *Lab) Web() *http.ServeMux { return l.web.mux }

// CA is the certificate, in PEM, of the authority behind every HTTPS server of the lab.
func (l *Lab) CA() []byte { return bytes.Clone(l.web.pem) }

// Client is an HTTP client in the lab's host that trusts the lab's authority.
func (l *Lab) Client() *http.Client {
	transport := &http.Transport{DialContext: l.DialFromHost, TLSClientConfig: &tls.Config{RootCAs: l.web.clients}}
	l.t.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Timeout: time.Minute}
}

func (l *Lab) serveWeb() {
	l.t.Helper()
	w := &web{mux: http.NewServeMux(), byName: map[string]*tls.Certificate{}, clients: x509.NewCertPool()}
	l.web = w
	if err := w.makeCA(); err != nil {
		l.t.Fatalf("make the lab's certificate authority: %v", err)
	}
	w.mux.HandleFunc("/", func(rw http.ResponseWriter, r *http.Request) {
		scheme := "http"
		if r.TLS != nil {
			scheme = "https"
		}
		from, _, _ := net.SplitHostPort(r.RemoteAddr)
		_, _ = fmt.Fprintf(rw, "%s %s %s %s from %s\n", r.Method, scheme, r.Host, r.URL.Path, from)
	})
	l.Name("web.lab.test", LabWebAddr)
	l.Name("web6.lab.test", LabWebAddr6)
	l.Name("dual.lab.test", LabWebAddr, LabWebAddr6)
	for _, addr := range []string{LabWebAddr, LabWebAddr6} {
		l.serve(l.ListenWorld("tcp", net.JoinHostPort(addr, "80")), &http.Server{Handler: w.mux})
		secure := tls.NewListener(l.ListenWorld("tcp", net.JoinHostPort(addr, "443")),
			&tls.Config{GetCertificate: w.certificate, NextProtos: []string{"h2", "http/1.1"}})
		l.serve(secure, &http.Server{Handler: w.mux})
	}
}

func (w *web) makeCA() (err error) {
	if w.key, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader); err != nil {
		return err
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "shard lab CA"}, IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign, NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(48 * time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, w.key.Public(), w.key)
	if err != nil {
		return err
	}
	if w.ca, err = x509.ParseCertificate(der); err != nil {
		return err
	}
	w.pem = pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	w.clients.AddCert(w.ca)
	return nil
}

// certificate makes a certificate for whatever name a client asks for.
func (w *web) certificate(hello *tls.ClientHelloInfo) (*tls.Certificate, error) {
	host := hello.ServerName
	if host == "" {
		host = LabWebAddr
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if c := w.byName[host]; c != nil {
		return c, nil
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(int64(len(w.byName) + 2)), Subject: pkix.Name{CommonName: "lab"},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}, NotBefore: w.ca.NotBefore, NotAfter: w.ca.NotAfter}
	if ip := net.ParseIP(host); ip != nil {
		template.IPAddresses = []net.IP{ip}
	} else {
		template.DNSNames = []string{host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, w.ca, w.key.Public(), w.key)
	if err != nil {
		return nil, err
	}
	w.byName[host] = &tls.Certificate{Certificate: [][]byte{der, w.ca.Raw}, PrivateKey: w.key}
	return w.byName[host], nil
}

// serveEcho sends back what comes, on TCP and UDP port 7.
func (l *Lab) serveEcho() {
	l.t.Helper()
	l.Name("echo.lab.test", LabEchoAddr)
	l.Name("echo6.lab.test", LabEchoAddr6)
	for _, addr := range []string{LabEchoAddr, LabEchoAddr6} {
		address := net.JoinHostPort(addr, "7")
		l.accept(l.ListenWorld("tcp", address), func(c net.Conn) { _, _ = io.Copy(c, c) })
		l.receive(l.listenPacket(l.world, "udp", address), func(c net.PacketConn, data []byte, from net.Addr) { _, _ = c.WriteTo(data, from) })
	}
}

// accept handles each connection in a goroutine of its own until the test ends.
func (l *Lab) accept(listener net.Listener, handle func(net.Conn)) {
	var group sync.WaitGroup
	var open sync.Map
	group.Go(func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			open.Store(c, nil)
			group.Go(func() {
				handle(c)
				_ = c.Close()
				open.Delete(c)
			})
		}
	})
	l.t.Cleanup(func() {
		_ = listener.Close()
		// A connection accepted while the listener closed may be stored late, so look until all have ended.
		ended := make(chan struct{})
		go func() { group.Wait(); close(ended) }()
		for {
			open.Range(func(c, _ any) bool { _ = c.(net.Conn).Close(); return true })
			select {
			case <-ended:
				return
			case <-time.After(5 * time.Millisecond):
			}
		}
	})
}

// receive handles each datagram until the test ends.
func (l *Lab) receive(conn net.PacketConn, handle func(net.PacketConn, []byte, net.Addr)) {
	var group sync.WaitGroup
	group.Go(func() {
		buf := make([]byte, 65536)
		for {
			n, from, err := conn.ReadFrom(buf)
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err == nil {
				handle(conn, buf[:n], from)
			}
		}
	})
	l.t.Cleanup(func() { _ = conn.Close(); group.Wait() })
}

// Canary is a listener on TCP and UDP that nobody in a sandbox may reach.
type Canary struct {
	// Addr is its host:port.
	Addr string

	l    *Lab
	mu   sync.Mutex
	hits []string
}

// CanaryInWorld plants a canary in the world, CanaryOnHost one on the lab's host; the address may be new there.
func (l *Lab) CanaryInWorld(address string) *Canary { l.t.Helper(); return l.canary(l.world, address) }

// CanaryOnHost plants a canary on the lab's host.
func (l *Lab) CanaryOnHost(address string) *Canary { l.t.Helper(); return l.canary(l.host, address) }

func (l *Lab) canary(in *space, address string) *Canary {
	l.t.Helper()
	listener := l.listen(in, "tcp", address)
	c := &Canary{Addr: listener.Addr().String(), l: l}
	l.accept(listener, func(conn net.Conn) {
		c.hit("tcp " + conn.RemoteAddr().String())
		_, _ = io.WriteString(conn, "canary\n")
	})
	l.receive(l.listenPacket(in, "udp", c.Addr), func(conn net.PacketConn, data []byte, from net.Addr) {
		c.hit("udp " + from.String())
		_, _ = conn.WriteTo([]byte("canary\n"), from)
	})
	return c
}

func (c *Canary) hit(who string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hits = append(c.hits, who)
}

// Hits are the connections and datagrams that arrived since the last control, as "tcp ADDRESS" or "udp ADDRESS".
func (c *Canary) Hits() []string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return append([]string(nil), c.hits...)
}

// Control proves from the lab's host that the canary can be reached by TCP and UDP, and forgets all hits.
func (c *Canary) Control() {
	c.l.t.Helper()
	for _, network := range []string{"tcp", "udp"} {
		if err := c.l.ask(network, c.Addr); err != nil {
			c.l.t.Fatalf("control: canary %s is not there: %v", c.Addr, err)
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.hits = nil
}

// ask expects the answer of a canary.
func (l *Lab) ask(network, address string) error {
	ctx, cancel := context.WithTimeout(l.t.Context(), 30*time.Second)
	defer cancel()
	conn, err := l.DialFromHost(ctx, network, address)
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if err := conn.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	if network == "udp" {
		if _, err := io.WriteString(conn, "?"); err != nil {
			return err
		}
	}
	line, err := bufio.NewReader(conn).ReadString('\n')
	if err == nil && line != "canary\n" {
		err = fmt.Errorf("answered %q", line)
	}
	return err
}

// serveDNS answers the lab's names wherever a program may ask.
func (l *Lab) serveDNS() {
	l.t.Helper()
	type place struct {
		in   *space
		addr string
	}
	places := []place{{l.world, LabDNSAddr}, {l.world, LabDNSAddr6}}
	for _, a := range publicResolvers {
		places = append(places, place{l.world, a})
	}
	conf, _ := os.ReadFile("/etc/resolv.conf")
	for line := range strings.Lines(string(conf)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		switch {
		case err != nil || !addr.Is4():
		case addr.IsLoopback():
			places = append(places, place{l.host, addr.String()})
		default:
			places = append(places, place{l.world, addr.String()})
		}
	}
	seen := map[place]bool{}
	for _, p := range places {
		if seen[p] {
			continue
		}
		seen[p] = true
		address := net.JoinHostPort(p.addr, "53")
		for _, s := range []*dns.Server{
			{Listener: l.listen(p.in, "tcp", address)}, {PacketConn: l.listenPacket(p.in, "udp", address)},
		} {
			s.Handler = dns.HandlerFunc(l.answer)
			started := make(chan struct{})
			s.NotifyStartedFunc = func() { close(started) }
			var group sync.WaitGroup
			group.Go(func() { _ = s.ActivateAndServe() })
			l.t.Cleanup(func() { _ = s.Shutdown(); group.Wait() })
			<-started
		}
	}
}

func (l *Lab) answer(w dns.ResponseWriter, r *dns.Msg) {
	m := new(dns.Msg)
	m.SetReply(r)
	m.RecursionAvailable = true
	if len(r.Question) == 1 {
		q := r.Question[0]
		l.mu.Lock()
		l.questions = append(l.questions, dns.TypeToString[q.Qtype]+" "+canonical(q.Name))
		addrs, known := l.names[canonical(q.Name)]
		records := l.records[canonical(q.Name)]
		l.mu.Unlock()
		if records != nil {
			m.Answer = records(q)
			for _, rr := range m.Answer {
				rr.Header().Class = dns.ClassINET
			}
		} else if !known {
			m.Rcode = dns.RcodeNameError
		}
		head := dns.RR_Header{Name: q.Name, Class: dns.ClassINET, Ttl: 5}
		for _, a := range addrs {
			switch {
			case q.Qtype == dns.TypeA && a.Is4():
				head.Rrtype = dns.TypeA
				m.Answer = append(m.Answer, &dns.A{Hdr: head, A: a.AsSlice()})
			case q.Qtype == dns.TypeAAAA && a.Is6():
				head.Rrtype = dns.TypeAAAA
				m.Answer = append(m.Answer, &dns.AAAA{Hdr: head, AAAA: a.AsSlice()})
			}
		}
	}
	if _, ok := w.LocalAddr().(*net.UDPAddr); ok {
		size := dns.MinMsgSize
		if opt := r.IsEdns0(); opt != nil {
			size = int(opt.UDPSize())
		}
		m.Truncate(size)
	}
	_ = w.WriteMsg(m)
}

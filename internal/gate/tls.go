package gate

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"math/big"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/durable"
)

// certificates is where the server's certificate comes from.
type certificates interface {
	// current is the certificate for a handshake.
	current() (*tls.Certificate, error)
	// reload reads or makes it anew; on failure the old one stays.
	reload() error
	// covers says whether the certificate is good for a host.
	covers(host string) bool
}

// loadCertificates is what the options ask for, nil for no TLS.
func loadCertificates(o Options, addr *net.TCPAddr) (certificates, error) {
	files := o.CertFile != "" || o.KeyFile != ""
	switch {
	case files && o.SelfSigned:
		return nil, shard.Invalidf("--tls-self-signed makes a certificate of its own: leave --tls-cert and --tls-key away")
	case o.SelfSigned:
		c := &ownCA{dir: filepath.Join(o.Root, "auth", "tls"), names: append([]string{"localhost"}, o.AllowHosts...), addr: addr}
		if host, _, err := net.SplitHostPort(o.Listen); err == nil && host != "" {
			c.names = append(c.names, host)
		}
		if domain := previewDomain(o.Preview); domain != "" {
			c.names = append(c.names, "*."+domain)
		}
		if err := c.open(); err != nil {
			return nil, err
		}
		o.Log.Info("TLS under a certificate authority of our own", "SHARD_CA_FILE", filepath.Join(c.dir, "ca.crt"))
		return c, c.reload()
	case files:
		if o.CertFile == "" || o.KeyFile == "" {
			return nil, shard.Invalidf("--tls-cert and --tls-key go together")
		}
		c := &fileCertificate{cert: o.CertFile, key: o.KeyFile, log: o.Log}
		return c, c.reload()
	}
	return nil, nil
}

// fileCertificate is a certificate in files that somebody else renews.
type fileCertificate struct {
	cert, key string
	log       *slog.Logger
	loaded    atomic.Pointer[tls.Certificate]

	mu      sync.Mutex // held while the files are looked at
	checked time.Time
	seen    [2]fileStamp
}

type fileStamp struct {
	mtime time.Time
	size  int64
}

// checkEvery is how often a handshake looks whether the files changed.
const checkEvery = time.Second

func (c *fileCertificate) current() (*tls.Certificate, error) {
	if c.mu.TryLock() { // another handshake is at it already
		defer c.mu.Unlock()
		if time.Since(c.checked) >= checkEvery {
			c.checked = time.Now()
			if c.stamps() != c.seen {
				if err := c.load(); err != nil {
					c.log.Error("the certificate changed and could not be read; the old one stays", "err", err)
				}
			}
		}
	}
	return c.loaded.Load(), nil
}

func (c *fileCertificate) stamps() (s [2]fileStamp) {
	for i, path := range []string{c.cert, c.key} {
		if info, err := os.Stat(path); err == nil {
			s[i] = fileStamp{info.ModTime(), info.Size()}
		}
	}
	return s
}

func (c *fileCertificate) reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.load()
}

// load reads both files. Between the writes of a renewal they do not fit each other: the next change is tried again.
func (c *fileCertificate) load() error {
	c.seen = c.stamps()
	pair, err := tls.LoadX509KeyPair(c.cert, c.key)
	if err != nil {
		return fmt.Errorf("read the certificate %s and its key: %w", c.cert, err)
	}
	c.loaded.Store(&pair)
	return nil
}

func (c *fileCertificate) covers(host string) bool {
	return c.loaded.Load().Leaf.VerifyHostname(host) == nil
}

const (
	caLife   = 10 * 365 * 24 * time.Hour
	leafLife = 30 * 24 * time.Hour
)

// ownCA is a certificate authority of our own, for hosts that have no other. Its certificate and key are files; the
// server's certificate is made at start, and again before it ends, and is never written down.
type ownCA struct {
	dir   string
	names []string
	addr  *net.TCPAddr
	ca    tls.Certificate

	loaded atomic.Pointer[tls.Certificate]
	mu     sync.Mutex // held while a new one is made
}

// open reads the authority, making one when there is none.
func (c *ownCA) open() error {
	crt, key := filepath.Join(c.dir, "ca.crt"), filepath.Join(c.dir, "ca.key")
	if _, err := os.Stat(crt); errors.Is(err, fs.ErrNotExist) {
		if err := makeCA(crt, key); err != nil {
			return fmt.Errorf("make a certificate authority: %w", err)
		}
	}
	var err error
	if c.ca, err = tls.LoadX509KeyPair(crt, key); err != nil {
		return fmt.Errorf("read the certificate authority in %s: %w", c.dir, err)
	}
	if time.Now().Add(leafLife).After(c.ca.Leaf.NotAfter) {
		return fmt.Errorf("the certificate authority in %s ends on %s: remove it, start again, and give the new ca.crt to the clients",
			c.dir, c.ca.Leaf.NotAfter.Format(time.DateOnly))
	}
	return nil
}

func makeCA(crt, keyFile string) error {
	if err := os.MkdirAll(filepath.Dir(crt), 0o700); err != nil {
		return err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	host, _ := os.Hostname()
	template := newTemplate("shard on "+host, caLife)
	template.IsCA, template.BasicConstraintsValid, template.MaxPathLenZero = true, true, true
	template.KeyUsage = x509.KeyUsageCertSign
	der, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	if err != nil {
		return err
	}
	raw, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return err
	}
	// The certificate last: where it is, its key is.
	if err := writePEM(keyFile, 0o600, "PRIVATE KEY", raw); err != nil {
		return err
	}
	return writePEM(crt, 0o644, "CERTIFICATE", der)
}

func writePEM(path string, mode os.FileMode, kind string, der []byte) error {
	return durable.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), mode)
}

func newTemplate(name string, life time.Duration) *x509.Certificate {
	serial, _ := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 127)) // never fails
	now := time.Now()
	return &x509.Certificate{SerialNumber: serial, Subject: pkix.Name{CommonName: name},
		NotBefore: now.Add(-time.Hour), NotAfter: now.Add(life)} // clocks of clients are a little behind
}

func (c *ownCA) current() (*tls.Certificate, error) {
	cert := c.loaded.Load()
	if time.Until(cert.Leaf.NotAfter) < leafLife/2 {
		if err := c.reload(); err != nil {
			return nil, err
		}
		cert = c.loaded.Load()
	}
	return cert, nil
}

func (c *ownCA) reload() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	template := newTemplate("shard serve", leafLife)
	template.KeyUsage = x509.KeyUsageDigitalSignature
	template.ExtKeyUsage = []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}
	template.IPAddresses = append(c.addresses(), net.IPv4(127, 0, 0, 1), net.IPv6loopback)
	names := c.names
	if host, err := os.Hostname(); err == nil {
		names = append(names[:len(names):len(names)], host)
	}
	for _, name := range names {
		if ip, err := netip.ParseAddr(hostname(name)); err == nil {
			template.IPAddresses = append(template.IPAddresses, ip.AsSlice())
		} else {
			template.DNSNames = append(template.DNSNames, hostname(name))
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.ca.Leaf, &key.PublicKey, c.ca.PrivateKey)
	if err != nil {
		return fmt.Errorf("make a certificate: %w", err)
	}
	leaf, err := x509.ParseCertificate(der)
	if err != nil {
		return fmt.Errorf("make a certificate: %w", err)
	}
	c.loaded.Store(&tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: leaf})
	return nil
}

// addresses are those that clients may call.
func (c *ownCA) addresses() []net.IP {
	if len(c.addr.IP) > 0 && !c.addr.IP.IsUnspecified() {
		return []net.IP{c.addr.IP}
	}
	var out []net.IP
	all, _ := net.InterfaceAddrs()
	for _, a := range all {
		if n, ok := a.(*net.IPNet); ok && !n.IP.IsLinkLocalUnicast() {
			out = append(out, n.IP)
		}
	}
	return out
}

func (c *ownCA) covers(host string) bool { return c.loaded.Load().Leaf.VerifyHostname(host) == nil }

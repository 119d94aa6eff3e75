package egress

import (
	"bytes"
	"container/list"
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
	"math/big"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/useshards/shard/internal/durable"
)

const (
	caLife = 10 * 365 * 24 * time.Hour
	// leafLife is short: a leaf lives in this process only, and some clients refuse long ones.
	leafLife = 7 * 24 * time.Hour
	// clockSlack is how far a sandbox's clock may be behind ours.
	clockSlack = 24 * time.Hour
	maxLeaves  = 1024
)

// CA is the certificate authority of one root, by which the proxy speaks for other hosts to the sandboxes that trust it.
type CA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
	// leafKey is the key of all leaves: to sign is cheap, and whoever can read one of them in this process can read all.
	leafKey *ecdsa.PrivateKey

	mu     sync.Mutex
	leaves map[string]*list.Element // of *leaf
	recent *list.List               // the newest used first
}

type leaf struct {
	host string
	cert *tls.Certificate
}

// OpenCA reads the authority in a private directory (made 0700): ca.crt, and ca.key which is 0600. Where there is none it
// makes one. It never replaces one: sandboxes trust the certificate that was planted in them.
func OpenCA(dir string) (*CA, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of the proxy's authority: %w", err)
	}
	durable.Sweep(dir)
	certFile, keyFile := filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key")
	keyPEM, err := os.ReadFile(keyFile)
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(certFile); err == nil {
			return nil, fmt.Errorf("the proxy's authority has a certificate and no key: restore ca.key, or remove ca.crt to have a new one made")
		}
		if keyPEM, err = makeKey(); err == nil {
			// The key first: a key without a certificate is taken up below, after a crash between the two.
			err = durable.WriteFile(keyFile, keyPEM, 0o600)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("the key of the proxy's authority: %w", err)
	}
	key, err := parseKey(keyPEM)
	if err != nil {
		return nil, fmt.Errorf("read the key of the proxy's authority: %w", err)
	}
	certPEM, err := os.ReadFile(certFile)
	if errors.Is(err, fs.ErrNotExist) {
		if certPEM, err = makeAuthority(key); err == nil {
			err = durable.WriteFile(certFile, certPEM, 0o644)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("the certificate of the proxy's authority: %w", err)
	}
	cert, err := parseCertificate(certPEM)
	if err != nil {
		return nil, fmt.Errorf("read the certificate of the proxy's authority: %w", err)
	}
	if public, ok := cert.PublicKey.(*ecdsa.PublicKey); !ok || !public.Equal(key.Public()) {
		return nil, errors.New("the certificate of the proxy's authority does not belong to its key")
	}
	if time.Now().After(cert.NotAfter) {
		return nil, fmt.Errorf("the proxy's authority expired on %s: remove its directory to have a new one made", cert.NotAfter.Format(time.DateOnly))
	}
	c := &CA{cert: cert, key: key, pem: certPEM, leaves: map[string]*list.Element{}, recent: list.New()}
	c.leafKey, err = ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	return c, err
}

// PEM is the certificate, as ca.crt holds it.
func (c *CA) PEM() []byte { return bytes.Clone(c.pem) }

// Leaf is a certificate for a host name, as policy.Host returns it.
func (c *CA) Leaf(host string) (*tls.Certificate, error) {
	c.mu.Lock()
	if e := c.leaves[host]; e != nil {
		if l := e.Value.(*leaf); time.Until(l.cert.Leaf.NotAfter) > leafLife/2 {
			c.recent.MoveToFront(e)
			c.mu.Unlock()
			return l.cert, nil
		}
	}
	c.mu.Unlock()
	cert, err := c.sign(host) // outside the lock: two at once for one host do no harm
	if err != nil {
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.leaves[host]; e != nil {
		c.recent.Remove(e)
	}
	c.leaves[host] = c.recent.PushFront(&leaf{host, cert})
	if c.recent.Len() > maxLeaves {
		delete(c.leaves, c.recent.Remove(c.recent.Back()).(*leaf).host)
	}
	return cert, nil
}

func (c *CA) sign(host string) (*tls.Certificate, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		NotBefore:    now.Add(-clockSlack),
		NotAfter:     now.Add(leafLife),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		DNSNames:     []string{host},
	}
	if len(host) <= 64 { // the bound of a common name; without a subject the alternative name must be critical, and Go sees to that
		template.Subject = pkix.Name{CommonName: host}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, c.cert, c.leafKey.Public(), c.key)
	if err != nil {
		return nil, fmt.Errorf("sign a certificate: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("read a signed certificate: %w", err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: c.leafKey, Leaf: parsed}, nil
}

func makeKey() ([]byte, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	der, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), nil
}

func makeAuthority(key *ecdsa.PrivateKey) ([]byte, error) {
	serial, err := newSerial()
	if err != nil {
		return nil, err
	}
	now := time.Now()
	template := &x509.Certificate{
		SerialNumber: serial,
		// The serial tells the authorities of several roots apart in a trust store.
		Subject:               pkix.Name{CommonName: fmt.Sprintf("shard proxy %x", serial.Bytes()[:4]), Organization: []string{"shard"}},
		NotBefore:             now.Add(-clockSlack),
		NotAfter:              now.Add(caLife),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	if err != nil {
		return nil, err
	}
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}), nil
}

// newSerial is 127 random bits, of which the first is set.
func newSerial() (*big.Int, error) {
	b := make([]byte, 16)
	if _, err := rand.Read(b); err != nil {
		return nil, err
	}
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b), nil
}

func parseKey(data []byte) (*ecdsa.PrivateKey, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "PRIVATE KEY" {
		return nil, errors.New("the file holds no private key")
	}
	key, err := x509.ParsePKCS8PrivateKey(block.Bytes)
	if err != nil {
		return nil, err
	}
	if k, ok := key.(*ecdsa.PrivateKey); ok {
		return k, nil
	}
	return nil, errors.New("the file holds a key of another kind")
}

func parseCertificate(data []byte) (*x509.Certificate, error) {
	block, _ := pem.Decode(data)
	if block == nil || block.Type != "CERTIFICATE" {
		return nil, errors.New("the file holds no certificate")
	}
	return x509.ParseCertificate(block.Bytes)
}

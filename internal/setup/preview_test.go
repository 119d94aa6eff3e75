package setup

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"math/big"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"
)

// certificate puts one for names into files of the host.
func (h *host) certificate(cert, key string, names ...string) {
	h.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		h.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), DNSNames: names, NotBefore: time.Now(), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		h.t.Fatal(err)
	}
	raw, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		h.t.Fatal(err)
	}
	h.write(cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})))
	h.write(key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})))
}

// TestPreviews: a server can serve previews from its setup on, and setup says what of names and certificates is left to do.
func TestPreviews(t *testing.T) {
	h := newHost(t, true)
	h.certificate("etc/tls/good.pem", "etc/tls/good.key", "api.test", "*.preview.test")
	h.certificate("etc/tls/bad.pem", "etc/tls/bad.key", "api.test")
	for _, c := range []struct {
		listen, domain, cert string
		// serve is the end of the command line, said are parts of what setup says.
		serve string
		said  []string
	}{
		{"127.0.0.1:7850", "localhost", "", " --preview-domain localhost", []string{"http://<port>-<sandbox>.localhost:7850/", "DNS: none needed"}},
		{"127.0.0.1:7850", "preview.test", "", " --preview-domain preview.test", []string{"http://<port>-<sandbox>.preview.test:7850/", "for this machine alone"}},
		{"127.0.0.1:7850", "https://preview.test", "", " --preview-domain https://preview.test", []string{"https://<port>-<sandbox>.preview.test/", "*.preview.test must lead to the proxy", "Host on to 127.0.0.1:7850", "the proxy's"}},
		{"0.0.0.0:443", "preview.test", "", " --tls-self-signed --preview-domain preview.test", []string{"https://<port>-<sandbox>.preview.test/", "must lead to this server", "/var/lib/shard/auth/tls/ca.crt"}},
		{"0.0.0.0:443", "preview.test", "/etc/tls/good", " --tls-cert /etc/tls/good.pem --tls-key /etc/tls/good.key --preview-domain preview.test", []string{"certificate: /etc/tls/good.pem, until"}},
		{"0.0.0.0:443", "preview.test", "/etc/tls/bad", " --tls-cert /etc/tls/bad.pem --tls-key /etc/tls/bad.key --preview-domain preview.test", []string{"/etc/tls/bad.pem is not good for *.preview.test"}},
	} {
		p := plan
		p.Listen, p.Preview, p.TLS = c.listen, c.domain, c.listen != "127.0.0.1:7850"
		if c.cert != "" {
			p.CertFile, p.KeyFile = c.cert+".pem", c.cert+".key"
		}
		h.install(p)
		if unit := h.read("etc/systemd/system/shard-serve.service"); !strings.Contains(unit, "serve --listen "+c.listen+c.serve+"\n") {
			t.Errorf("%+v: the unit:\n%s", c, unit)
		}
		said := strings.Join(h.said, "\n")
		for _, want := range c.said {
			if !strings.Contains(said, want) {
				t.Errorf("%+v: it did not say %q:\n%s", c, want, said)
			}
		}
		if readable := slices.Contains(h.ran, "runuser -u shard -- test -r "+p.KeyFile); readable != (c.cert != "") {
			t.Errorf("%+v: %q", c, h.ran)
		}
		h.install(p)
		if slices.ContainsFunc(h.ran, func(s string) bool { return strings.Contains(s, "restart") }) || said == "" {
			t.Errorf("%+v: the second run did %q", c, h.ran)
		}
		if again, err := h.installer().Installed(); err != nil || !reflect.DeepEqual(*again, p) {
			t.Errorf("%+v is remembered as %+v, %v", p, again, err)
		}
	}
	// What cannot be served changes nothing.
	before := h.read("etc/systemd/system/shard-serve.service")
	for file, want := range map[string]string{"/root/x": "where shard serve sees nothing", "/etc/tls/none": "no such file"} {
		p := plan
		p.CertFile, p.KeyFile = file+".pem", file+".key"
		if err := h.installer().Install(t.Context(), &p); err == nil || !strings.Contains(err.Error(), want) || len(h.ran)+len(h.said) > 0 {
			t.Errorf("%s: %v %q %q", file, err, h.ran, h.said)
		}
	}
	if h.read("etc/systemd/system/shard-serve.service") != before {
		t.Error("the unit changed")
	}
	h.install(plan)
	if strings.Contains(h.read("etc/systemd/system/shard-serve.service"), "--preview-domain") {
		t.Error("previews are still served")
	}
}

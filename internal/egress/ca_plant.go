package egress

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"

	"github.com/useshards/shard"
)

// TrustVariables are the environment variables by which programs are told where the trusted authorities are.
var TrustVariables = []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE"}

// trustFiles are where images keep the authorities that they trust, all in one file. In most images several are links to
// one, so the first that exists is the one.
var trustFiles = []string{
	"/etc/ssl/certs/ca-certificates.crt",                // Debian, Ubuntu, Alpine, Arch, Gentoo, Nix, distroless
	"/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", // Fedora, RHEL, Rocky, Amazon Linux
	"/etc/pki/tls/certs/ca-bundle.crt",                  // older ones of these
	"/etc/ssl/ca-bundle.pem",                            // SUSE
	"/var/lib/ca-certificates/ca-bundle.pem",            // SUSE without links
	"/etc/ssl/cert.pem",                                 // older Alpine, Wolfi
}

// Planting is what a sandbox needs to trust the proxy.
type Planting struct {
	// Path is the trust file of the image; Append is to be added at its end, and empty where it has been.
	Path   string
	Append []byte
	// Env names the trust file in all of TrustVariables.
	Env map[string]string
}

// PlantCA works out how to make a sandbox trust the authority whose certificate is given in PEM. read reads a file of the
// sandbox, following links within it; where there is none it returns an error that is fs.ErrNotExist. An image without a
// trust file is refused as an invalid request.
func PlantCA(cert []byte, read func(path string) ([]byte, error)) (*Planting, error) {
	for _, path := range trustFiles {
		data, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("read the image's trust file: %w", err)
		}
		p := &Planting{Path: path, Env: map[string]string{}}
		for _, name := range TrustVariables {
			p.Env[name] = path
		}
		if cert = bytes.TrimSpace(cert); !bytes.Contains(data, cert) {
			if len(data) > 0 && data[len(data)-1] != '\n' {
				p.Append = []byte("\n")
			}
			p.Append = append(append(p.Append, cert...), '\n')
		}
		return p, nil
	}
	return nil, shard.Invalidf("the image has no file of trusted certificates, which the proxy's must be added to: use an image with the package ca-certificates")
}

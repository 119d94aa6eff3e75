package egress

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"

	"github.com/useshards/shard"
)

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

// anchors are where images keep the authorities out of which their tools make that file anew: without the proxy's there, the next
// package that has it made takes the proxy out of it.
var anchors = []string{
	"/usr/local/share/ca-certificates",          // Debian, Ubuntu, Alpine, Wolfi
	"/etc/pki/ca-trust/source/anchors",          // Fedora, RHEL, Rocky, Amazon Linux
	"/etc/pki/trust/anchors",                    // SUSE
	"/etc/ca-certificates/trust-source/anchors", // Arch
}

// Anchors are directories, of which an image may have some, and a file that belongs there so that the proxy stays trusted.
func (e *Enforcer) Anchors() (dirs []string, name string, content []byte) {
	return anchors, "shard-proxy.crt", e.cfg.CA.PEM()
}

// Trust works out how to make a sandbox trust the proxy: add is to be put at the end of the file at path, which
// secret.TrustVariables must name, and is empty where it was. read reads a file of the sandbox, following links within it;
// where there is none it returns an error that is fs.ErrNotExist. An image without a trust file is refused as an invalid request.
func (e *Enforcer) Trust(read func(path string) ([]byte, error)) (path string, add []byte, err error) {
	return e.cfg.CA.plant(read)
}

func (c *CA) plant(read func(path string) ([]byte, error)) (path string, add []byte, err error) {
	for _, path := range trustFiles {
		data, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return "", nil, fmt.Errorf("read the image's trust file: %w", err)
		}
		if cert := bytes.TrimSpace(c.pem); !bytes.Contains(data, cert) {
			if len(data) > 0 && data[len(data)-1] != '\n' {
				add = []byte("\n")
			}
			add = append(append(add, cert...), '\n')
		}
		return path, add, nil
	}
	return "", nil, shard.Invalidf("the image has no file of trusted certificates, which the proxy's must be added to: use an image with the package ca-certificates")
}

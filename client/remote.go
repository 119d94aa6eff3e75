package client

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"net"
	"net/url"
	"time"
)

// connectTime bounds a connect to shard serve, TLS handshake included.
const connectTime = 30 * time.Second

// Remote returns a Dial for shard serve at base, an http or https URL with a host. roots are who may have signed its
// certificate; nil is whom this system trusts.
func Remote(base *url.URL, roots *x509.CertPool) func(context.Context) (net.Conn, error) {
	port, secure := base.Port(), base.Scheme == "https"
	switch {
	case port != "":
	case secure:
		port = "443"
	default:
		port = "80"
	}
	config := &tls.Config{ServerName: base.Hostname(), RootCAs: roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}
	return func(ctx context.Context) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(ctx, connectTime)
		defer cancel()
		conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(base.Hostname(), port))
		if err == nil && secure {
			t := tls.Client(conn, config)
			if err = t.HandshakeContext(ctx); err != nil {
				conn.Close()
			}
			conn = t
		}
		if err != nil {
			return nil, &DialError{Address: base.Redacted(), Err: err}
		}
		return conn, nil
	}
}

package setup

import (
	"context"
	"crypto/tls"
	"fmt"
	"net"
	"strings"

	"github.com/useshards/shard"
)

// previewOrigin is what browsers see of the plan's preview addresses, and their domain.
func (p *Plan) previewOrigin() (origin, domain string, err error) {
	_, port, err := net.SplitHostPort(p.Listen)
	if err != nil {
		return "", "", err
	}
	u, err := shard.PreviewOrigin(p.Preview, p.TLS, port)
	if err != nil {
		return "", "", err
	}
	return u.Scheme + "://<port>-<sandbox>." + u.Host, u.Hostname(), nil
}

// hidden are directories of which the unit of shard serve sees nothing (ProtectHome, PrivateTmp).
var hidden = []string{"/home/", "/root/", "/run/user/", "/tmp/", "/var/tmp/"}

// readCertificate finds out whether the plan's certificate can be served, before anything is changed.
func (in *Installer) readCertificate(p *Plan) (*tls.Certificate, error) {
	if p.CertFile == "" {
		return nil, nil
	}
	for _, file := range []string{p.CertFile, p.KeyFile} {
		for _, dir := range hidden {
			if strings.HasPrefix(file, dir) {
				return nil, fmt.Errorf("%s is below %s, where shard serve sees nothing: copy it elsewhere, such as /etc/shard", file, dir)
			}
		}
	}
	pair, err := tls.LoadX509KeyPair(in.path(p.CertFile), in.path(p.KeyFile))
	if err != nil {
		return nil, fmt.Errorf("the certificate %s and its key: %w", p.CertFile, err)
	}
	return &pair, nil
}

// shareCertificate finds out whether shard serve will be able to read its certificate, which is not ours to give away.
func (in *Installer) shareCertificate(ctx context.Context, p *Plan) error {
	if p.CertFile == "" {
		return nil
	}
	for _, file := range []string{p.CertFile, p.KeyFile} {
		if err := in.Run(ctx, "runuser", "-u", account, "--", "test", "-r", file); err != nil {
			return fmt.Errorf("user %s, as whom shard serve runs, cannot read %s: chgrp %s %[2]s; chmod 640 %[2]s; its directories must let that user pass too", account, file, account)
		}
	}
	return nil
}

// sayPreviews says what of previews is outside of this host: names, and what browsers trust.
func (in *Installer) sayPreviews(p *Plan, pair *tls.Certificate) error {
	if p.Preview == "" {
		return nil
	}
	origin, domain, err := p.previewOrigin()
	if err != nil {
		return err
	}
	in.Say("previews: %s/, to who has a link (shard port url SANDBOX PORT)", origin)
	proxied := strings.Contains(p.Preview, "://")
	switch host, _, _ := net.SplitHostPort(p.Listen); {
	case domain == "localhost" || strings.HasSuffix(domain, ".localhost"):
		in.Say("  DNS: none needed; browsers look for names below localhost on the machine they run on, so on this one")
	case proxied:
		in.Say("  DNS: *.%s must lead to the proxy, which passes all requests with their Host on to %s", domain, p.Listen)
		in.Say("  certificate: the proxy's must be good for *.%s", domain)
		return nil
	case isLoopback(host):
		in.Say("  DNS: *.%s must lead here, but shard serve listens on %s, for this machine alone: --listen 0.0.0.0:7850 is for others, --preview-domain https://%[1]s for a proxy", domain, p.Listen)
	default:
		in.Say("  DNS: *.%s must lead to this server: an A (AAAA) record with its address", domain)
	}
	switch {
	case pair != nil && pair.Leaf.VerifyHostname("x."+domain) != nil:
		in.Say("  certificate: %s is not good for *.%s: browsers will refuse it", p.CertFile, domain)
	case pair != nil:
		in.Say("  certificate: %s, until %s; a renewed one is read by itself", p.CertFile, pair.Leaf.NotAfter.Format("2006-01-02"))
	case p.TLS:
		in.Say("  certificate: one for *.%s under an authority of this server's own, %s/auth/tls/ca.crt: have browsers trust it, or give another with --tls-cert and --tls-key", domain, p.Root)
	}
	return nil
}

// isLoopback says whether only this machine reaches what listens on the host.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

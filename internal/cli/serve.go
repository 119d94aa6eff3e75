package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"syscall"

	"github.com/spf13/cobra"
	"golang.org/x/net/publicsuffix"

	"github.com/useshards/shard"
)

// ServeOptions are the options of the serve command.
type ServeOptions struct {
	Root string
	// Listen is HOST:PORT.
	Listen string
	// SigningKey is the file of the key of tokens; "" is the root's.
	SigningKey string
	// CertFile and KeyFile are PEM files; SelfSigned makes a certificate instead.
	CertFile, KeyFile string
	SelfSigned        bool
	// Insecure allows an address that others can reach without TLS.
	Insecure bool
	// AllowHosts and AllowOrigins loosen the guard against web pages.
	AllowHosts, AllowOrigins []string
	// Preview is the domain of preview addresses, or the origin of them that browsers see.
	Preview string
}

func (a *App) serveCommand() *cobra.Command {
	var o ServeOptions
	cmd := &cobra.Command{
		Use:   "serve [options]",
		Short: "Serve the API to a network, for holders of a token",
		Long: `Serve the daemon's API on a network address, to clients that send a token (shard tokens mint). A separate program beside
the daemon, which needs no root: it must be able to read the signing key and the ledger of tokens, and to connect to
the daemon's socket. For a user of the group shard:

  sudo shard tokens mint --name first >/dev/null
  sudo chgrp -R shard /var/lib/shard/auth
  sudo chmod 2750 /var/lib/shard/auth
  sudo chmod 0640 /var/lib/shard/auth/signing-key

--tls-self-signed makes its authority in auth/tls below the root at the first start: let root make that one, or the user
write there. Ends at SIGINT or SIGTERM, after requests under way; SIGHUP reads the certificate again.

A request from a web page (with an Origin header), or for a host name that is neither the address listened on, nor this
machine's loopback, nor in the certificate, is refused: otherwise a page in a browser near this server could call it.
Behind a proxy that passes the client's Host on, name that host with --allow-host.

With --preview-domain D, https://<port>-<sandbox>.D leads browsers to that port of that sandbox, if they have a link (shard
port url) or an API key with port:write. *.D must resolve to this server, and its certificate be good for *.D. On one's
own machine --preview-domain localhost needs neither.`,
		Example: `  shard serve
  shard serve --listen 0.0.0.0:7850 --tls-cert /etc/shard/cert.pem --tls-key /etc/shard/key.pem
  shard serve --preview-domain localhost`,
		Args: arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Root = a.root
			return a.serve(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Listen, "listen", "127.0.0.1:7850", "`HOST:PORT` to listen on")
	f.StringVar(&o.CertFile, "tls-cert", "", "PEM `FILE` of the server's certificate and those that lead to its authority; read again when it changes")
	f.StringVar(&o.KeyFile, "tls-key", "", "PEM `FILE` of the certificate's key")
	f.BoolVar(&o.SelfSigned, "tls-self-signed", false, "TLS under an authority of this server's own; clients set SHARD_CA_FILE to a copy of its ca.crt")
	f.BoolVar(&o.Insecure, "insecure", false, "serve without TLS on an address that others can reach")
	f.StringArrayVar(&o.AllowHosts, "allow-host", nil, "`HOST` name that this server goes by; may be repeated")
	f.StringArrayVar(&o.AllowOrigins, "allow-origin", nil, "`ORIGIN` (https://host) of web pages that may call; may be repeated")
	f.StringVar(&o.Preview, "preview-domain", "", "serve ports of sandboxes below `DOMAIN`; behind a proxy, the origin that browsers see (https://DOMAIN[:PORT])")
	signingKeyFlag(cmd, &o.SigningKey)
	return cmd
}

func (a *App) serve(ctx context.Context, o ServeOptions) error {
	if o.Preview != "" {
		if err := checkPreviewDomain(o.Preview); err != nil {
			return err
		}
	}
	if a.Serve == nil {
		return errors.New("this build has no shard serve")
	}
	if os.Geteuid() == 0 {
		fmt.Fprintln(a.Err, "note: shard serve needs no root, and whoever takes it over should not have it: shard setup --http-api true runs it as a user of its own")
	}
	err := a.Serve(ctx, o)
	if errors.Is(err, context.Canceled) || errors.Is(err, errInterrupted) {
		return nil // asked to end, and did
	}
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("another program listens on %s already, maybe another shard serve: end that one, or choose another address with --listen", o.Listen)
	}
	if errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("%w: shard serve --help says what its user needs", err)
	}
	return err
}

// checkPreviewDomain refuses what is no domain or origin of preview addresses, and a domain that names are registered in, such as
// com: a slip, since no server has all names below it. A domain that its owner has put on the public suffix list is a good one.
func checkPreviewDomain(where string) error {
	u, err := shard.PreviewOrigin(where, false, "80")
	if err != nil {
		return usagef("--preview-domain: %v", err)
	}
	host := u.Hostname()
	if suffix, registry := publicsuffix.PublicSuffix(host); suffix == host && registry {
		return usagef("--preview-domain: %s is a domain that others register names in: give one of your own, such as preview.example.com", shard.Quote(host))
	}
	return nil
}

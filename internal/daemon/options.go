package daemon

import (
	"log/slog"
	"net/netip"
	"path/filepath"
	"time"

	"github.com/useshards/shard"
)

// Options say what kind of daemon to run.
type Options struct {
	// Root is the data directory, an absolute path.
	Root string
	// Provider is the default of new sandboxes; "" is gvisor.
	Provider string
	// PullTimeout bounds one image pull; 0 is 30 minutes.
	PullTimeout time.Duration
	// Insecure are the registries that may be spoken to without verified TLS.
	Insecure []string
	// DNS are the addresses that sandboxes ask for names; none means the host's public ones, else well-known ones.
	DNS []string
	// SecretKeyFile holds the key with which secrets are encrypted at rest; "" is the credential that systemd gives, if any.
	SecretKeyFile string
	Version       string
	Log           *slog.Logger
}

func (o *Options) check() error {
	if !filepath.IsAbs(o.Root) || filepath.Clean(o.Root) == "/" {
		return shard.Invalidf("root %s is not an absolute path of a directory", shard.Quote(o.Root))
	}
	o.Root = filepath.Clean(o.Root)
	if len(o.Root) > MaxRoot {
		return shard.Invalidf("root %s is longer than %d bytes: choose a shorter path", o.Root, MaxRoot)
	}
	if o.Provider == "" {
		o.Provider = shard.ProviderGVisor
	}
	if err := shard.CheckProvider(o.Provider); err != nil {
		return err
	}
	for _, a := range o.DNS {
		if addr, err := netip.ParseAddr(a); err != nil || addr.Is4In6() || addr.Zone() != "" {
			return shard.Invalidf("dns server %s is not an address of IPv4 or IPv6", shard.Quote(a))
		}
	}
	if len(o.DNS) == 0 {
		o.DNS = nameservers()
	}
	if o.PullTimeout == 0 {
		o.PullTimeout = 30 * time.Minute
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

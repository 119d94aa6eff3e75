// Package secret keeps values that sandboxes may use and never see: their store on disk, the hosts that each may be sent to,
// which sandbox may use which, and what was tried against that. It must not know sandboxes beyond their ids, proxies or HTTP.
package secret

import (
	"slices"
	"strings"
	"time"

	"github.com/useshards/shard"
)

// What happens to a sandbox that sends a placeholder where its value must not go.
const (
	OnMisuseNone  = "" // it is counted
	OnMisusePause = "pause"
	OnMisuseStop  = "stop"
)

// TrustVariables are the environment variables by which programs are told where the trusted certificates are. A sandbox with
// secrets has them, so no secret can have their names.
var TrustVariables = []string{"SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "CURL_CA_BUNDLE"}

// Secret is a named value, the hosts that may have it, and the placeholder that a sandbox holds in its stead. It is never
// changed: a new value makes a new Secret.
type Secret struct {
	Name        string
	Placeholder string
	// Destinations are host names in their one form (policy.Host), or *. and one.
	Destinations []string
	OnMisuse     string
	UpdatedAt    time.Time
	Value        Value
}

// For says whether the value may be sent to a host, which is as policy.Host returns it. The * of a destination stands for
// one label.
func (s *Secret) For(host string) bool {
	_, parent, below := strings.Cut(host, ".")
	return slices.ContainsFunc(s.Destinations, func(d string) bool {
		domain, wild := strings.CutPrefix(d, "*.")
		return wild && below && parent == domain || !wild && d == host
	})
}

// Record is what clients see of the secret: all but the value.
func (s *Secret) Record() shard.Secret {
	r := shard.Secret{Name: s.Name, Destinations: slices.Clone(s.Destinations), Placeholder: s.Placeholder, UpdatedAt: s.UpdatedAt}
	if s.OnMisuse != OnMisuseNone {
		r.OnMisuse = s.OnMisuse
	}
	return r
}

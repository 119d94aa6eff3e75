package secret

import (
	"slices"
	"strings"

	"golang.org/x/net/publicsuffix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

// maxDestinations bounds the destinations of one secret.
const maxDestinations = 64

// parseDestinations brings destinations to their one form, sorted as they were given and each once.
func parseDestinations(given []string) ([]string, error) {
	if len(given) == 0 {
		return nil, shard.Invalidf("there are no destinations: name the hosts that the value may be sent to (--dest on the command line)")
	}
	if len(given) > maxDestinations {
		return nil, shard.Invalidf("%d destinations are more than the %d that a secret can have", len(given), maxDestinations)
	}
	var out []string
	for _, text := range given {
		d, err := parseDestination(text)
		if err != nil {
			return nil, err
		}
		if !slices.Contains(out, d) {
			out = append(out, d)
		}
	}
	return out, nil
}

func parseDestination(text string) (string, error) {
	domain, wild := strings.CutPrefix(text, "*.")
	host, err := policy.Host(domain)
	switch {
	case err != nil:
		return "", shard.Invalidf("%s is not a destination: write a host name, without scheme, port or path, or *. and a domain", shard.Quote(text))
	case !strings.Contains(host, "."):
		return "", shard.Invalidf("destination %s is one word, a name of this host's own network or a whole domain: no public certificate names it, and no sandbox reaches it", shard.Quote(text))
	}
	if !wild {
		// A registry's own domain is a slip of who means what is below it. What companies have registered as domains in which
		// anybody can have a name are hosts of theirs too (s3.amazonaws.com).
		if suffix, registry := publicsuffix.PublicSuffix(host); suffix == host && registry {
			return "", shard.Invalidf("destination %s is a domain that names are registered in, and no host: name the host that is meant", shard.Quote(text))
		}
		return host, nil
	}
	// Where anybody can have a name below the domain, the value would go to anybody.
	if _, err := publicsuffix.EffectiveTLDPlusOne(host); err != nil {
		return "", shard.Invalidf("destination %s is too wide: anybody can have a name below %s: name the domain that is meant", shard.Quote(text), host)
	}
	return "*." + host, nil
}

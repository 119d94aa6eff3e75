package image

import (
	"encoding/hex"
	"net/url"
	"regexp"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"

	"github.com/useshards/shard"
)

// repositoryPattern is the path of a repository as the distribution specification has it; the library is laxer.
var repositoryPattern = regexp.MustCompile(`^[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*(/[a-z0-9]+((\.|_|__|-+)[a-z0-9]+)*)*$`)

// hostPattern is the registry of a reference: a name, an IPv4 or a bracketed IPv6 address, and maybe a port.
var hostPattern = regexp.MustCompile(`^([A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?$`)

var digestPattern = regexp.MustCompile(`^sha256:[0-9a-f]{64}$`)

// ParseReference gives the full form of a reference as people write it: alpine becomes
// index.docker.io/library/alpine:latest, name:tag@digest becomes name@digest. It refuses with invalid_request.
func ParseReference(ref string) (string, error) {
	r, err := parse(ref)
	if err != nil {
		return "", err
	}
	return r.Name(), nil
}

func parse(ref string, o ...name.Option) (name.Reference, error) {
	if strings.Contains(ref, "://") {
		return nil, shard.Invalidf("image reference %s holds a URL scheme: leave it out, as in registry.example.com/app:1.0", shard.Quote(ref))
	}
	if ref != strings.TrimSpace(ref) || ref == "" || len(ref) > 512 {
		return nil, shard.Invalidf("image reference %s is not valid: write it as name, name:tag or name@sha256:…, such as python:3.12-slim",
			shard.Quote(ref))
	}
	if base, digest, ok := strings.Cut(ref, "@"); ok && !digestPattern.MatchString(digest) {
		return nil, shard.Invalidf("image reference %s has a digest that is not sha256: and 64 hex digits, such as %s@sha256:9f86d081…",
			shard.Quote(ref), strings.TrimSuffix(base, ":"))
	}
	r, err := name.ParseReference(ref, o...)
	if err == nil && (!repositoryPattern.MatchString(r.Context().RepositoryStr()) || !hostPattern.MatchString(r.Context().RegistryStr())) {
		err = &name.ErrBadName{}
	}
	if err != nil {
		hint := "names are lower case letters, digits and . _ - between slashes"
		if strings.ToLower(ref) != ref {
			hint = "names are lower case"
		}
		return nil, shard.Invalidf("image reference %s is not valid (%s): write it as name, name:tag or name@sha256:…, such as python:3.12-slim",
			shard.Quote(ref), hint)
	}
	return r, nil
}

// fileName is the name of a reference's record. It can be read back by a person even when the record cannot.
func fileName(ref string) string {
	if esc := url.PathEscape(ref); len(esc) <= 200 {
		return esc + recordExt
	}
	return "sha256-" + hex.EncodeToString(sum([]byte(ref))) + recordExt
}

// refOfFile reads a reference back from the name of its record, where that is possible.
func refOfFile(file string) (string, bool) {
	esc, ok := strings.CutSuffix(file, recordExt)
	ref, err := url.PathUnescape(esc)
	if !ok || err != nil || fileName(ref) != file {
		return "", false
	}
	_, err = ParseReference(ref)
	return ref, err == nil
}

// insecure says whether the operator allowed plain HTTP and unverified certificates for host, which may have a port.
func (o Options) insecure(host string) bool {
	bare := host
	if i := strings.LastIndexByte(host, ':'); i >= 0 && !strings.HasSuffix(host, "]") {
		bare = host[:i]
	}
	for _, allowed := range o.Insecure {
		if strings.EqualFold(allowed, host) || strings.EqualFold(allowed, bare) {
			return true
		}
	}
	return false
}

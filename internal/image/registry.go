package image

import (
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"os/user"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote/transport"
	"github.com/google/go-containerregistry/pkg/v1/types"

	"github.com/useshards/shard"
)

const (
	headerTimeout = 30 * time.Second
	// maxManifest bounds a manifest and a configuration, in bytes; registries themselves refuse more than 4 MiB.
	maxManifest = 4 << 20
	maxConfig   = 8 << 20
	maxLayers   = 127
	maxImage    = 64 << 30
)

var manifestTypes = []types.MediaType{types.OCIImageIndex, types.DockerManifestList, types.OCIManifestSchema1,
	types.DockerManifestSchema2, types.DockerManifestSchema1Signed, types.DockerManifestSchema1}

// errPlainHTTP stops a request that would leave in plain HTTP for a host that the operator did not name.
var errPlainHTTP = errors.New("plain HTTP is not allowed")

// guard is the transport under everything that talks to registries, token servers and the stores they redirect to.
type guard struct {
	o                Options
	secure, insecure http.RoundTripper
}

func newGuard(o Options) *guard {
	base := &http.Transport{
		Proxy:                  http.ProxyFromEnvironment,
		DialContext:            (&net.Dialer{Timeout: 15 * time.Second, KeepAlive: 30 * time.Second, Control: noLinkLocal}).DialContext,
		TLSHandshakeTimeout:    15 * time.Second,
		ResponseHeaderTimeout:  headerTimeout,
		MaxResponseHeaderBytes: 1 << 20,
		IdleConnTimeout:        30 * time.Second,
		MaxIdleConnsPerHost:    4,
		ForceAttemptHTTP2:      true,
		DisableCompression:     true, // a length and a digest are about the bytes that were sent
	}
	lax := base.Clone()
	lax.TLSClientConfig = &tls.Config{InsecureSkipVerify: true} // only for the hosts of --insecure-registry
	return &guard{o: o, secure: base, insecure: lax}
}

// noLinkLocal keeps a registry's redirects away from the metadata services of clouds.
func noLinkLocal(_, address string, _ syscall.RawConn) error {
	if a, err := netip.ParseAddrPort(address); err == nil && a.Addr().Unmap().IsLinkLocalUnicast() {
		return fmt.Errorf("%s is a link-local address: %w", a.Addr(), syscall.EACCES)
	}
	return nil
}

func (g *guard) RoundTrip(r *http.Request) (*http.Response, error) {
	if g.o.insecure(r.URL.Host) {
		return g.insecure.RoundTrip(r)
	}
	if r.URL.Scheme != "https" {
		return nil, errPlainHTTP
	}
	return g.secure.RoundTrip(r)
}

// remote is one repository of a registry, with the credentials for it.
type remote struct {
	repo   name.Repository
	client *http.Client
	scheme string
}

// connect finds the credentials and does the registry's handshake.
func (s *Store) connect(ctx context.Context, ref string) (*remote, name.Reference, error) {
	r, err := parse(ref)
	if err != nil {
		return nil, nil, err
	}
	if s.o.insecure(r.Context().RegistryStr()) {
		if r, err = parse(ref, name.Insecure); err != nil {
			return nil, nil, err
		}
	}
	repo := r.Context()
	auth, err := s.credentials(ctx, repo)
	if err != nil {
		return nil, nil, shard.Wrap(shard.CodeInternal, err,
			"the credentials for registry %s cannot be read: check the daemon's Docker configuration and its credential helper", repo.RegistryStr())
	}
	rt, err := transport.NewWithContext(ctx, repo.Registry, auth, s.guard, []string{repo.Scope(transport.PullScope)})
	if err != nil {
		return nil, nil, registryError(ctx, r, err)
	}
	// The transport puts in the scheme that answered its ping.
	return &remote{repo: repo, client: &http.Client{Transport: rt}, scheme: repo.Scheme()}, r, nil
}

// credentials asks the keychain, which may start a credential helper that takes its time or hangs: the caller is not
// held by it. The goroutine ends with the helper.
func (s *Store) credentials(ctx context.Context, repo name.Repository) (authn.Authenticator, error) {
	type answer struct {
		auth authn.Authenticator
		err  error
	}
	ch := make(chan answer, 1)
	go func() {
		auth, err := authn.Resolve(ctx, s.o.Keychain, repo)
		ch <- answer{auth, err}
	}()
	select {
	case a := <-ch:
		return a.auth, a.err
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// setHome gives the process a HOME when it has none, as under systemd: credential files and helpers are found by it.
func setHome() {
	if os.Getenv("HOME") != "" {
		return
	}
	if u, err := user.Current(); err == nil && u.HomeDir != "" {
		_ = os.Setenv("HOME", u.HomeDir)
	}
}

func (r *remote) get(ctx context.Context, kind, id string, header http.Header) (*http.Response, error) {
	u := url.URL{Scheme: r.scheme, Host: r.repo.RegistryStr(), Path: "/v2/" + r.repo.RepositoryStr() + "/" + kind + "/" + id}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, u.String(), nil)
	if err != nil {
		return nil, err
	}
	req.Header = header
	req.Header.Set("Accept-Encoding", "identity")
	return r.client.Do(req)
}

// small fetches a manifest or a configuration whole, within a minute.
func (r *remote) small(ctx context.Context, kind, id string, most int64, header http.Header) (data []byte, contentType string, err error) {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	resp, err := r.get(ctx, kind, id, header)
	if err != nil {
		return nil, "", err
	}
	defer resp.Body.Close()
	if err := transport.CheckError(resp, http.StatusOK); err != nil {
		return nil, "", err
	}
	data, err = io.ReadAll(io.LimitReader(resp.Body, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("it is larger than %d bytes: %w", most, errLies)
	}
	return data, resp.Header.Get("Content-Type"), err
}

// resolved is what a reference means on this platform.
type resolved struct {
	// asked is the digest of what the reference names, digest that of the platform's manifest.
	asked, digest string
	manifest      *v1.Manifest
}

// resolve follows ref through at most two indexes to the manifest for this platform.
func (s *Store) resolve(ctx context.Context, r *remote, ref name.Reference) (*resolved, error) {
	out := &resolved{}
	id := ref.Identifier()
	for range 3 {
		accept := make([]string, len(manifestTypes))
		for i, t := range manifestTypes {
			accept[i] = string(t)
		}
		data, contentType, err := r.small(ctx, "manifests", id, maxManifest, http.Header{"Accept": {strings.Join(accept, ", ")}})
		if err != nil {
			return nil, registryError(ctx, ref, err)
		}
		digest := fmt.Sprintf("sha256:%x", sha256.Sum256(data))
		if digestPattern.MatchString(id) && digest != id {
			return nil, lie(ref, "the manifest it sent is not the one that %s names", id)
		}
		if out.asked == "" {
			out.asked = digest
		}
		next, m, err := s.readManifest(ref.Name(), data, contentType)
		if err != nil {
			return nil, err
		}
		if m != nil {
			out.digest, out.manifest = digest, m
			return out, nil
		}
		id = next
	}
	return nil, shard.Invalidf("image %s is an index of indexes of indexes: that is more than is followed", ref.Name())
}

// readManifest gives the manifest in data or, when data is an index, the digest of what it has for this platform.
func (s *Store) readManifest(ref string, data []byte, contentType string) (next string, m *v1.Manifest, err error) {
	var head struct {
		SchemaVersion int             `json:"schemaVersion"`
		MediaType     types.MediaType `json:"mediaType"`
		ArtifactType  string          `json:"artifactType"`
		Manifests     json.RawMessage `json:"manifests"`
		Config        struct {
			MediaType types.MediaType `json:"mediaType"`
		} `json:"config"`
	}
	if err := json.Unmarshal(data, &head); err != nil {
		return "", nil, shard.Wrap(shard.CodeInternal, err, "the manifest of %s is not JSON", ref)
	}
	mt := head.MediaType
	if mt == "" {
		mt = types.MediaType(strings.TrimSpace(strings.Split(contentType, ";")[0]))
	}
	switch {
	case head.SchemaVersion == 1 || mt == types.DockerManifestSchema1 || mt == types.DockerManifestSchema1Signed:
		return "", nil, shard.Invalidf("image %s is in the old schema 1 format, which is not supported: push it again with a current tool", ref)
	case mt.IsIndex() || (!mt.IsImage() && head.Manifests != nil):
		index, err := v1.ParseIndexManifest(bytes.NewReader(data))
		if err != nil {
			return "", nil, shard.Wrap(shard.CodeInternal, err, "the index of %s cannot be read", ref)
		}
		d, err := s.choose(ref, index)
		return d, nil, err
	case head.Config.MediaType != "" && !head.Config.MediaType.IsConfig():
		return "", nil, shard.Invalidf("%s is not a container image but %s", ref, shard.Quote(string(head.Config.MediaType)))
	}
	m, err = v1.ParseManifest(bytes.NewReader(data))
	if err != nil {
		return "", nil, shard.Wrap(shard.CodeInternal, err, "the manifest of %s cannot be read", ref)
	}
	return "", m, checkManifest(ref, m)
}

// checkManifest refuses what no honest manifest holds, before anything is allocated for it.
func checkManifest(ref string, m *v1.Manifest) error {
	if len(m.Layers) > maxLayers {
		return shard.Invalidf("image %s has %d layers: at most %d can be mounted", ref, len(m.Layers), maxLayers)
	}
	var total int64
	for _, d := range append([]v1.Descriptor{m.Config}, m.Layers...) {
		if !digestPattern.MatchString(d.Digest.String()) || d.Size < 0 || d.Size > maxImage {
			return shard.Invalidf("the manifest of %s names a part of it with a bad digest or size", ref)
		}
		if total += d.Size; total > maxImage {
			return shard.Invalidf("image %s is larger than %s compressed, the most that is pulled", ref, size(maxImage))
		}
	}
	if m.Config.Size > maxConfig {
		return shard.Invalidf("the configuration of %s is larger than %s", ref, size(maxConfig))
	}
	return nil
}

// choose picks the entry of an index for linux on this architecture: the plain variant first, since every CPU has it.
func (s *Store) choose(ref string, index *v1.IndexManifest) (string, error) {
	plain := map[string][]string{"arm64": {"", "v8"}, "arm": {"v7", "", "v6"}}[s.o.Arch]
	if plain == nil {
		plain = []string{"", "v1"}
	}
	best, bestRank := "", 1<<30
	var there []string
	for _, d := range index.Manifests {
		p := d.Platform
		if !d.MediaType.IsImage() && !d.MediaType.IsIndex() && d.MediaType != "" {
			continue
		}
		rank := 1 << 20 // an entry that does not say: its configuration will
		if p != nil {
			if p.OS != "unknown" && platformPattern.MatchString(p.String()) { // attestations, and what no client should be shown
				there = append(there, p.String())
			}
			if p.OS != "linux" || p.Architecture != s.o.Arch {
				continue
			}
			if rank = slices.Index(plain, p.Variant); rank < 0 {
				rank = len(plain)
			}
		}
		if digestPattern.MatchString(d.Digest.String()) && rank < bestRank {
			best, bestRank = d.Digest.String(), rank
		}
	}
	if best == "" {
		return "", wrongPlatform(ref, s.o.Arch, there)
	}
	return best, nil
}

// platformPattern is what a platform looks like that is told to clients.
var platformPattern = regexp.MustCompile(`^[a-z0-9]+/[a-z0-9./:_-]{1,40}$`)

func wrongPlatform(ref, arch string, there []string) error {
	slices.Sort(there)
	there = slices.Compact(there)
	if len(there) > 20 {
		there = append(there[:20], "…")
	}
	list := "none"
	if len(there) > 0 {
		list = strings.Join(there, ", ")
	}
	return shard.Invalidf("image %s has nothing for linux/%s, the platform of this host; it is there for: %s", ref, arch, list)
}

// config fetches and checks the image's configuration.
func (s *Store) config(ctx context.Context, r *remote, ref name.Reference, m *v1.Manifest) (*v1.ConfigFile, error) {
	data := m.Config.Data // some registries put it in
	if int64(len(data)) != m.Config.Size || fmt.Sprintf("sha256:%x", sum(data)) != m.Config.Digest.String() {
		var err error
		if data, _, err = r.small(ctx, "blobs", m.Config.Digest.String(), m.Config.Size, http.Header{}); err != nil {
			return nil, registryError(ctx, ref, err)
		}
	}
	if int64(len(data)) != m.Config.Size || fmt.Sprintf("sha256:%x", sum(data)) != m.Config.Digest.String() {
		return nil, lie(ref, "the configuration it sent does not have the digest that the manifest names")
	}
	return s.readConfig(ref.Name(), data, len(m.Layers))
}

// readConfig reads a configuration for an image of this many layers and checks the platform.
func (s *Store) readConfig(ref string, data []byte, layers int) (*v1.ConfigFile, error) {
	cfg, err := v1.ParseConfigFile(bytes.NewReader(data))
	if err != nil {
		return nil, shard.Wrap(shard.CodeInvalidRequest, err, "the configuration of %s cannot be read", ref)
	}
	if (cfg.OS != "" && cfg.OS != "linux") || (cfg.Architecture != "" && cfg.Architecture != s.o.Arch) {
		return nil, wrongPlatform(ref, s.o.Arch, []string{cfg.Platform().String()})
	}
	if len(cfg.RootFS.DiffIDs) != layers {
		return nil, shard.Invalidf("image %s is not consistent: its manifest has %d layers, its configuration %d", ref, layers, len(cfg.RootFS.DiffIDs))
	}
	for _, d := range cfg.RootFS.DiffIDs {
		if !digestPattern.MatchString(d.String()) {
			return nil, shard.Invalidf("the configuration of %s has a bad layer digest", ref)
		}
	}
	return cfg, nil
}

func hostArch(arch string) string {
	if arch == "" {
		return runtime.GOARCH
	}
	return arch
}

// errLies marks an answer that contradicts what the registry promised: asking again would not help.
var errLies = errors.New("the registry contradicts itself")

func lie(ref name.Reference, format string, args ...any) error {
	return shard.Wrap(shard.CodeInternal, errLies, "registry %s is not to be trusted with %s: %s", ref.Context().RegistryStr(), ref.Name(),
		fmt.Sprintf(format, args...))
}

// registryError puts a failure to talk to a registry into words for clients. URLs and bodies stay out of them: they
// hold signatures and whatever the other side cares to say.
func registryError(ctx context.Context, ref name.Reference, err error) error {
	if _, ok := errors.AsType[*shard.Error](err); ok {
		return err
	}
	reg := ref.Context().RegistryStr()
	if ctx.Err() != nil {
		return fmt.Errorf("pull %s: %w", ref.Name(), context.Cause(ctx))
	}
	if errors.Is(err, errPlainHTTP) {
		return shard.Wrap(shard.CodeInternal, scrub(err), "registry %s cannot be reached over HTTPS (%s): if that is how it is meant to be, start the daemon with --insecure-registry %s",
			reg, reason(err), reg)
	}
	if errors.Is(err, errLies) {
		return lie(ref, "what it sent does not have the size that it promised")
	}
	if te, ok := errors.AsType[*transport.Error](err); ok {
		switch {
		case te.StatusCode == http.StatusNotFound:
			return shard.Wrap(shard.CodeNotFound, scrub(err), "registry %s has no image %s", reg, ref.Name())
		case te.StatusCode == http.StatusUnauthorized || te.StatusCode == http.StatusForbidden:
			return shard.Wrap(shard.CodeNotFound, scrub(err), "registry %s refused access to %s: it does not exist there, or needs a login (on the host, as the daemon's user: docker login %s)",
				reg, ref.Context().RepositoryStr(), reg)
		case te.StatusCode == http.StatusTooManyRequests:
			return shard.Wrap(shard.CodeInternal, scrub(err), "registry %s allows no more pulls for now: try again later, or log in (docker login %s)", reg, reg)
		}
		return shard.Wrap(shard.CodeInternal, scrub(err), "registry %s answered %d %s for %s", reg, te.StatusCode, http.StatusText(te.StatusCode), ref.Name())
	}
	return shard.Wrap(shard.CodeInternal, scrub(err), "could not reach registry %s: %s", reg, reason(err))
}

// reason names the cause of a failed exchange in words of ours.
func reason(err error) string {
	if ce, ok := errors.AsType[*tls.CertificateVerificationError](err); ok {
		return "its certificate cannot be trusted: " + ce.Err.Error()
	}
	if ue, ok := errors.AsType[x509.UnknownAuthorityError](err); ok {
		return "its certificate cannot be trusted: " + ue.Error()
	}
	if _, ok := errors.AsType[tls.RecordHeaderError](err); ok {
		return "it does not speak TLS"
	}
	if de, ok := errors.AsType[*net.DNSError](err); ok {
		if de.IsNotFound {
			return "no such host name: see that it is spelled right, and that this host finds names (shard doctor)"
		}
		return "its host name could not be looked up"
	}
	if no, ok := errors.AsType[syscall.Errno](err); ok {
		return no.Error()
	}
	if ne, ok := errors.AsType[net.Error](err); ok && ne.Timeout() {
		return "no answer in time"
	}
	switch {
	case errors.Is(err, errPlainHTTP):
		return "it wants plain HTTP"
	case errors.Is(err, errStalled):
		return "no data for " + stallTimeout.String()
	case errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, io.EOF):
		return "the connection was cut"
	}
	return "the exchange failed; the daemon's log says more"
}

// RegistryError is what a registry, or the way to it, did: no fault of this host's daemon. Pull has logged it.
type RegistryError struct{ err error }

func (e *RegistryError) Error() string { return e.err.Error() }

func (e *RegistryError) Unwrap() error { return e.err }

// scrub takes the URL out of a registry's error, since the query of a redirect can be a credential.
func scrub(err error) error {
	if ue, ok := errors.AsType[*url.Error](err); ok {
		err = fmt.Errorf("%s: %w", ue.Op, ue.Err)
	}
	return &RegistryError{err}
}

func size(n int64) string {
	if n >= 10<<30 {
		return fmt.Sprintf("%d GiB", n>>30)
	}
	return fmt.Sprintf("%d MiB", n>>20)
}

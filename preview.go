package shard

import (
	"net/url"
	"strconv"
	"strings"
	"time"
)

const (
	// LinkParameter is the query parameter of a preview address that carries a signed link.
	LinkParameter = "shard-link"
	// DefaultLinkLife and MaxLinkLife are how long a link is good for unless told, and at most.
	DefaultLinkLife = time.Hour
	MaxLinkLife     = 30 * 24 * time.Hour
)

// PortLink is a signed address at which a browser reaches one port of one sandbox.
type PortLink struct {
	URL       string    `json:"url"`
	Sandbox   string    `json:"sandbox"`
	GuestPort int       `json:"guest_port"`
	ExpiresAt time.Time `json:"expires_at"`
}

// PreviewRequest tells the daemon under which origin a shard serve has its preview addresses.
type PreviewRequest struct {
	// Origin is scheme, domain and port, such as https://preview.example.com:7850; empty when there are none any more.
	Origin string `json:"origin"`
}

// ParsePreviewOrigin reads scheme, domain and port of preview addresses, in the form that browsers write them: lower case,
// ASCII, no port that the scheme implies.
func ParsePreviewOrigin(origin string) (*url.URL, error) {
	u, err := url.Parse(origin)
	if err != nil || u.Scheme != "http" && u.Scheme != "https" || u.User != nil || u.Path != "" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "" {
		return nil, Invalidf("%s is not the origin of preview addresses: write http:// or https://, a domain, and a port if it is not the usual one", Quote(origin))
	}
	host := strings.ToLower(u.Hostname())
	labels := strings.Split(host, ".")
	for _, label := range labels {
		if !isLabel(label) {
			return nil, Invalidf("%s is not a domain of preview addresses: write it in ASCII, such as preview.example.com", Quote(host))
		}
	}
	if last := labels[len(labels)-1]; last[0] >= '0' && last[0] <= '9' {
		return nil, Invalidf("%s is an address, below which there are no names: give a domain, such as localhost", Quote(host))
	}
	port := u.Port()
	if n, err := strconv.ParseUint(port, 10, 16); port != "" && (err != nil || n == 0) {
		return nil, Invalidf("%s has a port that is none", Quote(origin))
	}
	if port == "" || u.Scheme == "http" && port == "80" || u.Scheme == "https" && port == "443" {
		return &url.URL{Scheme: u.Scheme, Host: host}, nil
	}
	return &url.URL{Scheme: u.Scheme, Host: host + ":" + port}, nil
}

// PreviewOrigin is the origin under which browsers see previews where somebody said just a domain of shard serve's, which listens
// on a port; an origin, of a proxy, stays what it is.
func PreviewOrigin(where string, tls bool, port string) (*url.URL, error) {
	if !strings.Contains(where, "://") {
		if !strings.Contains(where, ":") {
			where += ":" + port
		}
		scheme := "http"
		if tls {
			scheme = "https"
		}
		where = scheme + "://" + where
	}
	return ParsePreviewOrigin(where)
}

// isLabel says whether s can stand between the dots of a host name.
func isLabel(s string) bool {
	return s != "" && len(s) <= 63 && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == "" && s[0] != '-' && s[len(s)-1] != '-'
}

// PreviewLabel is the first label of the preview address of a port: <port>-<sandbox>.
func PreviewLabel(sandbox string, guestPort int) string {
	return strconv.Itoa(guestPort) + "-" + sandbox
}

// ParsePreviewLabel takes a PreviewLabel apart. ref is an id or a name, of which it must be the exact one.
func ParsePreviewLabel(label string) (ref string, guestPort int, ok bool) {
	digits, ref, _ := strings.Cut(label, "-")
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 || digits[0] == '0' || ref == "" || !isLabel(label) {
		return "", 0, false
	}
	return ref, int(port), true
}

// NewPortLink is the link with its signed text in the address below an origin.
func NewPortLink(origin *url.URL, sandbox string, guestPort int, signed string, expires time.Time) *PortLink {
	at := url.URL{Scheme: origin.Scheme, Host: PreviewLabel(sandbox, guestPort) + "." + origin.Host, Path: "/",
		RawQuery: LinkParameter + "=" + url.QueryEscape(signed)}
	return &PortLink{URL: at.String(), Sandbox: sandbox, GuestPort: guestPort, ExpiresAt: expires}
}

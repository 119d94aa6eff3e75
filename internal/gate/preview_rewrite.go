package gate

import (
	"net"
	"net/http"
	"net/http/httputil"
	"net/textproto"
	"net/url"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// A program in a sandbox sees what it would see on its author's own machine: a browser at http://localhost:PORT. Development
// servers allow that host and that origin without being told (Vite, Next.js, Jupyter, Streamlit, Django), compare the two
// with each other, and refuse what they do not know. So Host, Origin and Referer are translated on the way in, and the
// same addresses back on the way out; of where the browser really is nothing is said, since a server that believes
// X-Forwarded-* would compare that with Origin.

// local is the origin of a port as the sandbox sees it.
func local(port int) string { return "http://" + localHost(port) }

func localHost(port int) string {
	if port == 80 {
		return "localhost"
	}
	return "localhost:" + strconv.Itoa(port)
}

func portText(port int) string { return strconv.Itoa(port) }

// localOrigin translates a URL of a preview of the same sandbox; ok is false for all others.
func (p *preview) localOrigin(text string, v *visit) (out string, ok bool) {
	u, err := url.Parse(text)
	if err != nil || u.Scheme != p.origin.Scheme || u.Opaque != "" {
		return "", false
	}
	ref, port, ok := p.target(u.Host)
	if !ok || ref != v.ref || !strings.EqualFold(u.Host, shard.PreviewLabel(ref, port)+"."+p.origin.Host) {
		return "", false
	}
	return local(port) + strings.TrimPrefix(text[len(u.Scheme)+3:], u.Host), true
}

// previewOrigin translates a URL on the sandbox's own localhost to where the browser finds that.
func (p *preview) previewOrigin(text string, v *visit) (out string, ok bool) {
	scheme, rest, found := strings.Cut(text, "//")
	if scheme = strings.ToLower(scheme); !found || scheme != "" && scheme != "http:" && scheme != "https:" {
		return "", false
	}
	end := strings.IndexAny(rest, "/?#")
	if end < 0 {
		end = len(rest)
	}
	host, digits := rest[:end], "80" // as the program sees its own address, in plain HTTP
	if scheme == "https:" {
		digits = "443"
	}
	if h, d, err := net.SplitHostPort(host); err == nil {
		host, digits = h, d
	}
	switch strings.ToLower(host) {
	case "localhost", "127.0.0.1", "0.0.0.0", "::1", "[::1]":
	default:
		return "", false
	}
	port, err := strconv.ParseUint(digits, 10, 16)
	if err != nil || port == 0 {
		return "", false
	}
	return p.address(v.ref, int(port)) + rest[end:], true
}

// rewriteRequest makes the request that the sandbox gets.
func (p *preview) rewriteRequest(r *httputil.ProxyRequest) {
	v := r.In.Context().Value(visitKey{}).(*visit)
	out := r.Out
	// The host of the URL is where connections are kept for the next request, and dialSandbox takes it apart.
	out.URL.Scheme, out.URL.Host = "http", net.JoinHostPort(v.sandbox, portText(v.port))
	out.URL.RawQuery = r.In.URL.RawQuery // as it was sent
	out.Host = localHost(v.port)
	h := out.Header
	for name := range h {
		lower := strings.ToLower(name)
		if strings.HasPrefix(lower, "x-shard-") || strings.HasPrefix(lower, "x-forwarded-") || lower == "forwarded" || lower == "x-real-ip" || lower == "expect" {
			delete(h, name)
		}
	}
	if v.keyed {
		h.Del("Authorization")
	}
	for _, name := range []string{"Origin", "Referer"} {
		for i, value := range h[name] {
			if to, ok := p.localOrigin(value, v); ok {
				h[name][i] = to
			}
		}
	}
	var cookies []string
	for _, line := range h["Cookie"] {
		var kept []string
		for part := range strings.SplitSeq(line, ";") {
			part = strings.TrimSpace(part)
			name, _, _ := strings.Cut(part, "=")
			if part != "" && !isOurCookie(name) {
				kept = append(kept, part)
			}
		}
		if len(kept) > 0 {
			cookies = append(cookies, strings.Join(kept, "; "))
		}
	}
	delete(h, "Cookie")
	if len(cookies) > 0 {
		h["Cookie"] = cookies
	}
}

// isOurCookie goes by both names that it can have, whichever is in use.
func isOurCookie(name string) bool {
	name = strings.TrimSpace(name)
	return strings.EqualFold(name, "__Host-shard-preview") || strings.EqualFold(name, "shard-preview")
}

// rewriteAnswer makes the answer that the browser gets.
func (p *preview) rewriteAnswer(resp *http.Response) error {
	v := resp.Request.Context().Value(visitKey{}).(*visit)
	v.status = resp.StatusCode
	if resp.StatusCode == http.StatusSwitchingProtocols {
		v.conn.stream.Store(true)
		if !p.gate.streaming() {
			return shard.Errorf(shard.CodeSandboxNotRunning, "the server is stopping")
		}
	}
	h := resp.Header
	for _, name := range []string{"Location", "Access-Control-Allow-Origin"} {
		for i, value := range h[name] {
			if to, ok := p.previewOrigin(value, v); ok {
				h[name][i] = to
			}
		}
	}
	// These two speak for more than this host: the browser would clear the cookies of every preview, or look elsewhere for this one.
	h.Del("Clear-Site-Data")
	h.Del("Alt-Svc")
	var kept []string
	for _, line := range h["Set-Cookie"] {
		if name, _, _ := strings.Cut(line, "="); !isOurCookie(name) {
			kept = append(kept, withoutDomain(line))
		}
	}
	delete(h, "Set-Cookie")
	if len(kept) > 0 {
		h["Set-Cookie"] = kept
	}
	return nil
}

// withoutDomain keeps a cookie to the host that sets it: other sandboxes have names below the same domain.
func withoutDomain(line string) string {
	parts := strings.Split(line, ";")
	kept := parts[:1]
	for _, attribute := range parts[1:] {
		name, _, _ := strings.Cut(attribute, "=")
		if !strings.EqualFold(textproto.TrimString(name), "domain") {
			kept = append(kept, attribute)
		}
	}
	return strings.Join(kept, ";")
}

// cutLink takes the link out of a query.
func cutLink(query string) (signed, rest string, found bool) {
	if !strings.Contains(query, shard.LinkParameter) {
		return "", query, false
	}
	var kept []string
	for part := range strings.SplitSeq(query, "&") {
		if value, ok := strings.CutPrefix(part, shard.LinkParameter+"="); ok {
			signed, found = value, true
			continue
		}
		kept = append(kept, part)
	}
	return signed, strings.Join(kept, "&"), found
}

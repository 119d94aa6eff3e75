package secret

import (
	"encoding/base64"
	"errors"
	"fmt"
	"iter"
	"math"
	"net/netip"
	"net/url"
	"slices"
	"strings"

	"github.com/useshards/shard/internal/policy"
)

var (
	// ErrRoom is that the headers of a request have no room for the values in them.
	ErrRoom = errors.New("with the values of its secrets the headers of the request are too long")
	// ErrUnfit is that a header cannot carry a value. The store takes none such.
	ErrUnfit = errors.New("the value of a secret cannot stand in a header")
)

// hopByHop are the headers about a connection, not about a request: they go no further than to the proxy.
var hopByHop = []string{"Connection", "Proxy-Connection", "Keep-Alive", "Proxy-Authenticate", "Proxy-Authorization", "Te", "Trailer",
	"Transfer-Encoding", "Upgrade"}

// Request is what the proxy knows of a request when values are put into it.
type Request struct {
	// Header is as net/http reads it; Insert changes it in place. Trailers are not in it.
	Header map[string][]string
	// Target is path and query.
	Target string
	// Host is the one name that the TLS connection and the request agree on, as policy.Host returns it; "" where the request
	// goes without TLS, to another port than 443, or to an address.
	Host string
}

// Insert puts the values of those secrets that may go to the request's host in the place of their placeholders: in the values
// of headers, as they stand, and in the credentials of `Authorization: Basic`. Where two placeholders begin at one place it is
// the longer. carried are the secrets whose value the request has now. strayed are the names of those whose placeholder
// goes, as it is, to where its value must not. After an error the request must not be sent; room bounds the headers, in bytes.
func Insert(r Request, held []Secret, room int) (carried []Secret, strayed []string, err error) {
	if len(held) == 0 {
		return nil, nil, nil
	}
	in := &inserter{held: held, host: r.Host, room: room, found: make([]bool, len(held))}
	var named []string // by Connection
	for _, v := range r.Header["Connection"] {
		for name := range strings.SplitSeq(v, ",") {
			named = append(named, strings.TrimSpace(name))
		}
	}
	total, grown := 0, false
	for name, values := range r.Header {
		same := func(other string) bool { return strings.EqualFold(name, other) }
		hop := slices.ContainsFunc(hopByHop, same) || slices.ContainsFunc(named, same)
		for i, v := range values {
			if !hop {
				v = in.header(v, same("Authorization"))
				if in.err != nil {
					return nil, nil, in.err
				}
				grown = grown || len(v) > len(values[i])
				values[i] = v
			}
			if total += len(name) + len(v) + len(": \r\n"); grown && total > room { // before more is made of it
				return nil, nil, ErrRoom
			}
		}
	}
	for i := range held {
		if in.found[i] && in.goes(i) {
			carried = append(carried, held[i])
		}
	}
	if total > room && carried != nil {
		return nil, nil, ErrRoom
	}
	in.look(r.Target)
	for i := range held {
		if in.found[i] && !in.goes(i) {
			strayed = append(strayed, held[i].Name)
		}
	}
	return carried, strayed, nil
}

type inserter struct {
	held  []Secret
	host  string
	room  int
	found []bool // by index of held: its placeholder
	err   error
}

func (in *inserter) goes(i int) bool { return in.host != "" && in.held[i].For(in.host) }

// placeholders are those in text, first to last and apart: of which secret, and where. Each secret is looked for once in all of
// the text, however many placeholders of others it has.
func (in *inserter) placeholders(text string) iter.Seq2[int, int] {
	return func(yield func(i, at int) bool) {
		const none = math.MaxInt
		next := make([]int, len(in.held)) // where each is, from here on
		for from := 0; ; {
			first := -1
			for j := range in.held {
				p := in.held[j].Placeholder
				if next[j] < from || from == 0 {
					if next[j] = none; from < len(text) {
						if k := strings.Index(text[from:], p); k >= 0 {
							next[j] = from + k
						}
					}
				}
				if next[j] != none && (first < 0 || next[j] < next[first] || next[j] == next[first] && len(p) > len(in.held[first].Placeholder)) {
					first = j
				}
			}
			if first < 0 || !yield(first, next[first]) {
				return
			}
			from = next[first] + len(in.held[first].Placeholder)
		}
	}
}

// look finds placeholders where they stay what they are.
func (in *inserter) look(text string) {
	for i := range in.placeholders(text) {
		in.found[i] = true
	}
}

// put returns text with values. A value is never looked into.
func (in *inserter) put(text string) string {
	var out strings.Builder
	from := 0
	for i, at := range in.placeholders(text) {
		in.found[i] = true
		s := &in.held[i]
		put := s.Placeholder
		out.WriteString(text[from:at])
		if in.goes(i) {
			put = s.Value.Reveal()
			switch {
			case !fits(put):
				in.err = ErrUnfit
			case out.Len()+len(put) > in.room:
				in.err = ErrRoom
			}
			if in.err != nil {
				return ""
			}
		}
		out.WriteString(put)
		from = at + len(s.Placeholder)
	}
	if from == 0 {
		return text
	}
	out.WriteString(text[from:])
	return out.String()
}

func (in *inserter) header(v string, authorization bool) string {
	out := in.put(v)
	if out != v || !authorization {
		return out
	}
	plain, ok := basic(v)
	if !ok {
		return v
	}
	if with := in.put(plain); with != plain {
		return "Basic " + base64.StdEncoding.EncodeToString([]byte(with))
	}
	return v
}

// basic is what `Basic` credentials say.
func basic(v string) (string, bool) {
	scheme, coded, found := strings.Cut(v, " ")
	if !found || !strings.EqualFold(scheme, "Basic") {
		return "", false
	}
	coded = strings.TrimRight(strings.Trim(coded, " \t"), "=")
	plain, err := base64.RawStdEncoding.DecodeString(coded)
	if err != nil {
		plain, err = base64.RawURLEncoding.DecodeString(coded)
	}
	return string(plain), err == nil
}

// fits says whether a header can carry a value.
func fits(v string) bool {
	for i := range len(v) {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return false
		}
	}
	return v != ""
}

// Explain says whether a request of a sandbox that has the secret would carry its value to rawURL, and why. Whether the
// sandbox's policy lets the request go is another question.
func (s *Secret) Explain(rawURL string) (carried bool, why string) {
	u, err := url.Parse(rawURL)
	if err != nil || u.Host == "" {
		return false, "this is not a URL with a host: write https://HOST/PATH"
	}
	host := u.Hostname()
	_, isAddr := netip.ParseAddr(host)
	name, err := policy.Host(host)
	switch port := u.Port(); {
	case u.Scheme != "https" && u.Scheme != "wss":
		return false, fmt.Sprintf("the request goes by %s: a value is only put into requests inside TLS (https)", u.Scheme)
	case port != "" && port != "443":
		return false, fmt.Sprintf("the request goes to port %s: a value is only put into requests to port 443", port)
	case isAddr == nil:
		return false, "the request names an address: a value only goes to a host that its certificate names"
	case err != nil:
		return false, "this is not a host name"
	case !s.For(name):
		return false, fmt.Sprintf("%s is not a destination of %s, which are %s", name, s.Name, strings.Join(s.Destinations, ", "))
	}
	why = fmt.Sprintf("%s is a destination of %s: %s in the value of a header, or in the credentials of Authorization: Basic, is replaced", name, s.Name, s.Placeholder)
	if strings.Contains(u.RequestURI(), s.Placeholder) {
		why += "; in the path or query, as here, it is not"
	}
	return true, why
}

package gate

import (
	"bytes"
	"encoding/base64"
	"io"
	"net/http"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// maxHead bounds the request line and the headers together, in bytes.
const maxHead = 64 << 10

// head is a request line with its headers, of the only form that passes: one that every HTTP parser reads alike.
type head struct {
	method, target string
	fields         []field
	// length is the body's in bytes, 0 without one, chunked when its end is in the body.
	length int64
	// upgrade is a full WebSocket handshake.
	upgrade bool
	// host is the value of Host.
	host string
	// raw is all that was read: the head, and what came with it.
	raw []byte
}

type field struct{ name, value string }

const chunked = -1

// path is the target as sent, without the query.
func (h *head) path() string {
	path, _, _ := strings.Cut(h.target, "?")
	return path
}

// get is every value of a header.
func (h *head) get(name string) []string {
	var values []string
	for _, f := range h.fields {
		if strings.EqualFold(f.name, name) {
			values = append(values, f.value)
		}
	}
	return values
}

func bad(format string, args ...any) *shard.Error { return shard.Invalidf(format, args...) }

// readHead reads a head and what came with it of the body. A line that is wrong ends it at once, so that nobody waits
// for the rest of a request that will be refused. loose also lets the bytes in a target pass that browsers do not escape
// although RFC 3986 wants it. An error that is no *shard.Error is the connection's.
func readHead(r io.Reader, loose bool) (h *head, rest []byte, err error) {
	buf := make([]byte, 0, 2<<10)
	line, seen := 0, 0 // where the line under way begins, and what was looked at
	for {
		if len(buf) == cap(buf) {
			buf = append(make([]byte, 0, min(2*cap(buf), maxHead)), buf...)
		}
		n, err := r.Read(buf[len(buf):cap(buf)])
		buf = buf[:len(buf)+n]
		for ; seen < len(buf); seen++ {
			if seen > line && buf[seen-1] == '\r' && buf[seen] != '\n' {
				return h, nil, bad("a line of the request has a bare CR")
			}
			if buf[seen] != '\n' {
				continue
			}
			if seen == line || buf[seen-1] != '\r' {
				return h, nil, bad("a line of the request ends without CR LF")
			}
			text := buf[line : seen-1]
			line = seen + 1
			switch {
			case h == nil:
				if h, err = requestLine(text, loose); err != nil {
					return h, nil, err
				}
			case len(text) == 0:
				if err := h.check(); err != nil {
					return h, nil, err
				}
				rest := buf[line:]
				if h.length >= 0 && int64(len(rest)) > h.length {
					return h, nil, bad("more than one request was sent at once: wait for each answer")
				}
				h.raw = buf
				return h, rest, nil
			default:
				if err := h.add(text); err != nil {
					return h, nil, err
				}
			}
		}
		if err != nil {
			return h, nil, err
		}
		if len(buf) == maxHead {
			return h, nil, bad("the request line and the headers have more than %d bytes", maxHead)
		}
	}
}

// requestLine reads METHOD SP TARGET SP HTTP/1.1. Only the origin form of a target passes.
func requestLine(text []byte, loose bool) (*head, error) {
	parts := strings.Split(string(text), " ")
	if len(parts) != 3 || parts[2] != "HTTP/1.1" {
		return nil, bad("the request line is not METHOD PATH HTTP/1.1")
	}
	method, target := parts[0], parts[1]
	if method == "" || len(method) > 16 || strings.Trim(method, "ABCDEFGHIJKLMNOPQRSTUVWXYZ") != "" {
		return nil, bad("the request's method is not valid")
	}
	h := &head{method: method, target: target}
	if refusal := h.checkTarget(loose); refusal != nil {
		return nil, refusal
	}
	return h, nil
}

func (h *head) checkTarget(loose bool) error {
	more := ""
	if loose {
		more = browserBytes
	}
	path, query, _ := strings.Cut(h.target, "?")
	if !strings.HasPrefix(path, "/") || !wellFormed(path, pathBytes+more) || !wellFormed(query, queryBytes+more) {
		return bad("the request's target is not a path with an optional query, properly escaped")
	}
	return nil
}

const (
	// pathBytes are RFC 3986's besides letters and digits. net/url keeps a path of these as it was sent, so that the
	// daemon finds the route that we found.
	pathBytes  = "-._~!$&'()*+,;=:@/"
	queryBytes = pathBytes + "?"
	// browserBytes are what browsers leave as it is (WHATWG URL).
	browserBytes = "[]{}|^`\\\""
	tokenBytes   = "!#$%&'*+-.^_`|~"
)

func alphanumeric(c byte) bool {
	return 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
}

// wellFormed says whether s is made of letters, digits, the others, and escapes.
func wellFormed(s, others string) bool {
	for i := 0; i < len(s); i++ {
		switch c := s[i]; {
		case alphanumeric(c) || strings.IndexByte(others, c) >= 0:
		case c == '%' && i+2 < len(s) && hexDigit(s[i+1]) && hexDigit(s[i+2]):
			i += 2
		default:
			return false
		}
	}
	return true
}

func hexDigit(c byte) bool {
	return '0' <= c && c <= '9' || 'a' <= c && c <= 'f' || 'A' <= c && c <= 'F'
}

// add reads one header line. Folded lines and blanks before the colon are where parsers differ, so they are refused.
func (h *head) add(text []byte) error {
	name, value, ok := bytes.Cut(text, []byte(":"))
	if !ok || len(name) == 0 {
		return bad("a header line has no name")
	}
	for _, c := range name {
		if !alphanumeric(c) && strings.IndexByte(tokenBytes, c) < 0 {
			return bad("a header's name is not valid")
		}
	}
	value = bytes.Trim(value, " \t")
	for _, c := range value {
		if c < ' ' && c != '\t' || c == 0x7f {
			return bad("the header %s has a control character", shard.Quote(string(name)))
		}
	}
	h.fields = append(h.fields, field{string(name), string(value)})
	return nil
}

// check reads what the headers say of the request: its host, where its body ends, and whether it is a handshake.
func (h *head) check() error {
	hosts := h.get("Host")
	if len(hosts) != 1 || strings.ContainsAny(hosts[0], " \t,/@\\\"") {
		return bad("the request must have one Host header, with one host")
	}
	h.host = hosts[0]
	lengths, encodings := h.get("Content-Length"), h.get("Transfer-Encoding")
	switch {
	case len(lengths) > 0 && len(encodings) > 0:
		return bad("the request has both Content-Length and Transfer-Encoding")
	case len(lengths) > 1 || len(encodings) > 1:
		return bad("the request says twice where its body ends")
	case len(encodings) == 1:
		if !strings.EqualFold(encodings[0], "chunked") {
			return bad("the request's Transfer-Encoding is not chunked")
		}
		h.length = chunked
	case len(lengths) == 1:
		// ParseUint takes no sign, and with base 10 no underscore.
		n, err := strconv.ParseUint(lengths[0], 10, 62)
		if err != nil {
			return bad("the request's Content-Length is not a number")
		}
		h.length = int64(n)
	}
	h.upgrade = h.length == 0 && h.method == http.MethodGet && h.handshake()
	return nil
}

// handshake says whether all four headers of a WebSocket handshake are there, as RFC 6455 wants them.
func (h *head) handshake() bool {
	one := func(name string) string {
		if v := h.get(name); len(v) == 1 {
			return v[0]
		}
		return ""
	}
	key, err := base64.StdEncoding.DecodeString(one("Sec-WebSocket-Key"))
	return err == nil && len(key) == 16 && one("Sec-WebSocket-Version") == "13" &&
		strings.EqualFold(one("Upgrade"), "websocket") && hasToken(h.get("Connection"), "upgrade")
}

func hasToken(values []string, want string) bool {
	for _, v := range values {
		for part := range strings.SplitSeq(v, ",") {
			if strings.EqualFold(strings.Trim(part, " \t"), want) {
				return true
			}
		}
	}
	return false
}

// dropped are the headers that end here: what is between the client and us, and what only we may say.
var dropped = map[string]bool{"authorization": true, "proxy-authorization": true, "connection": true, "proxy-connection": true,
	"keep-alive": true, "upgrade": true}

// bytes is the head as the daemon gets it. Every connection carries one request, so that nothing a client sends can be
// taken for a second one that did not pass the checks; only a stream stays open.
func (h *head) bytes(scopes []string) []byte {
	var b bytes.Buffer
	b.WriteString(h.method + " " + h.target + " HTTP/1.1\r\n")
	for _, f := range h.fields {
		if name := strings.ToLower(f.name); !dropped[name] && !strings.HasPrefix(name, "x-shard-") {
			b.WriteString(f.name + ": " + f.value + "\r\n")
		}
	}
	if h.upgrade {
		b.WriteString("Connection: Upgrade\r\nUpgrade: websocket\r\n")
	} else {
		b.WriteString("Connection: close\r\n")
	}
	b.WriteString(shard.ScopesHeader + ": " + strings.Join(scopes, ",") + "\r\n\r\n")
	return b.Bytes()
}

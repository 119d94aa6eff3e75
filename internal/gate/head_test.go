package gate

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

	"github.com/useshards/shard"
)

const plain = "GET /v0/version HTTP/1.1\r\nHost: x\r\n"

// smuggles are requests that two parsers could read differently, or that a browser, a proxy or an old client would not
// send to us. Each one is refused before its head ends.
var smuggles = map[string]string{
	"both lengths":            "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
	"two lengths":             "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n",
	"the same length twice":   "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\ncontent-length: 5\r\n\r\n",
	"a list of lengths":       "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 5, 5\r\n\r\n",
	"a signed length":         "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: +5\r\n\r\n",
	"a negative length":       "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
	"a hex length":            "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 0x5\r\n\r\n",
	"an underscored length":   "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 1_0\r\n\r\n",
	"an empty length":         "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: \r\n\r\n",
	"a huge length":           "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999\r\n\r\n",
	"another encoding":        "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n",
	"a hidden encoding":       "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: xchunked\r\n\r\n",
	"two encodings":           "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n\r\n",
	"encoding with a tab":     "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: \vchunked\r\n\r\n",
	"a blank before a colon":  plain + "Content-Length : 5\r\n\r\n",
	"a tab before a colon":    plain + "Transfer-Encoding\t: chunked\r\n\r\n",
	"a folded header":         plain + "X-A: b\r\n c\r\n\r\n",
	"a header folded by tab":  plain + "X-A: b\r\n\tContent-Length: 5\r\n\r\n",
	"first header folded":     "GET /v0/version HTTP/1.1\r\n Host: x\r\n\r\n",
	"bare LF":                 "GET /v0/version HTTP/1.1\nHost: x\n\n",
	"bare LF in headers":      plain + "X-A: b\nX-Shard-Scopes: *\r\n\r\n",
	"bare CR in a header":     plain + "X-A: b\rX-Shard-Scopes: *\r\n\r\n",
	"bare CR in the line":     "GET /v0/version\r HTTP/1.1\r\nHost: x\r\n\r\n",
	"CR CR LF":                plain + "X-A: b\r\r\n\r\n",
	"NUL in a header":         plain + "X-A: b\x00c\r\n\r\n",
	"NUL in a name":           plain + "X\x00A: b\r\n\r\n",
	"no name":                 plain + ": b\r\n\r\n",
	"no colon":                plain + "X-A\r\n\r\n",
	"a second request":        plain + "\r\nGET /v0/daemon HTTP/1.1\r\nHost: x\r\n\r\n",
	"one behind a body":       "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n{}GET /v0/daemon HTTP/1.1\r\nHost: x\r\n\r\n",
	"an empty line first":     "\r\n" + plain + "\r\n",
	"HTTP/1.0":                "GET /v0/version HTTP/1.0\r\nHost: x\r\n\r\n",
	"HTTP/0.9":                "GET /v0/version\r\n",
	"HTTP/2":                  "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
	"HTTP/1.1 in small":       "GET /v0/version http/1.1\r\nHost: x\r\n\r\n",
	"HTTP/1.10":               "GET /v0/version HTTP/1.10\r\nHost: x\r\n\r\n",
	"an absolute target":      "GET http://x/v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"a target of a host":      "CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
	"a target of all":         "OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
	"no target":               "GET  HTTP/1.1\r\nHost: x\r\n\r\n",
	"two blanks":              "GET  /v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"a blank at the end":      "GET /v0/version HTTP/1.1 \r\nHost: x\r\n\r\n",
	"a tab between":           "GET\t/v0/version\tHTTP/1.1\r\nHost: x\r\n\r\n",
	"a fragment":              "GET /v0/version#x HTTP/1.1\r\nHost: x\r\n\r\n",
	"a broken escape":         "GET /v0/%zz HTTP/1.1\r\nHost: x\r\n\r\n",
	"a cut escape":            "GET /v0/%2 HTTP/1.1\r\nHost: x\r\n\r\n",
	"a quote in the path":     "GET /v0/sandboxes/x%2fexec\" HTTP/1.1\r\nHost: x\r\n\r\n",
	"bytes over 127":          "GET /v0/sandboxes/\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n",
	"a backslash":             "GET /v0\\version HTTP/1.1\r\nHost: x\r\n\r\n",
	"a method in small":       "get /v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"a method with a sign":    "GET: /v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"no method":               " /v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"a long method":           "GETGETGETGETGETGET /v0/version HTTP/1.1\r\nHost: x\r\n\r\n",
	"no host":                 "GET /v0/version HTTP/1.1\r\n\r\n",
	"two hosts":               plain + "Host: y\r\n\r\n",
	"a host with a user":      "GET /v0/version HTTP/1.1\r\nHost: a@b\r\n\r\n",
	"TLS":                     "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\n",
	"a head that has no end":  plain + "X-A: " + strings.Repeat("a", maxHead),
	"headers that have none":  plain + strings.Repeat("X-A: a\r\n", maxHead/8),
	"a line that has no end":  "GET /" + strings.Repeat("a", maxHead),
	"a body where none is":    "DELETE /v0/sandboxes/x HTTP/1.1\r\nHost: x\r\n\r\n{}",
	"an early stream message": handshakeHead + "\r\n\x81\x80",
}

const handshakeHead = "GET /v0/sandboxes/a/exec/b HTTP/1.1\r\nHost: x\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"

func TestHeadRefusals(t *testing.T) {
	for name, raw := range smuggles {
		for _, slow := range []bool{false, true} {
			var r io.Reader = strings.NewReader(raw)
			if slow {
				if name == "a second request" || strings.Contains(name, "bod") || strings.HasPrefix(name, "an early") {
					continue // what comes later is not looked at, and never reaches the daemon
				}
				r = iotest.OneByteReader(r)
			}
			_, _, err := readHead(r, false)
			if shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Errorf("%s (byte by byte: %v): %v", name, slow, err)
			}
		}
	}
	for _, cut := range []string{"", "GET", plain, plain + "X-A: b\r"} {
		if _, _, err := readHead(strings.NewReader(cut), false); !errors.Is(err, io.EOF) {
			t.Errorf("%q: %v", cut, err)
		}
	}
}

func TestHeadPasses(t *testing.T) {
	for _, c := range []struct {
		raw, rest string
		length    int64
		upgrade   bool
	}{
		{plain + "\r\n", "", 0, false},
		{plain + "X-A:\r\nX-B:b \t\r\n\r\n", "", 0, false},
		{"POST /v0/sandboxes?wait=true&x=%2F HTTP/1.1\r\nHost: x:1\r\nContent-Length: 10\r\n\r\n{}", "{}", 10, false},
		{"PUT /v0/sandboxes/a/files?path=/a HTTP/1.1\r\nHost: [::1]:1\r\ntransfer-encoding: Chunked\r\n\r\n5\r\nhello", "5\r\nhello", chunked, false},
		{handshakeHead + "\r\n", "", 0, true},
		{strings.Replace(handshakeHead, "13", "12", 1) + "\r\n", "", 0, false},
		{strings.Replace(handshakeHead, "Upgrade\r", "x\r", 1) + "\r\n", "", 0, false},
		{strings.Replace(handshakeHead, "websocket", "h2c", 1) + "\r\n", "", 0, false},
		{strings.Replace(handshakeHead, "dGhl", "", 1) + "\r\n", "", 0, false},
		{strings.Replace(handshakeHead, "GET", "POST", 1) + "\r\n", "", 0, false},
		{handshakeHead + "Content-Length: 3\r\n\r\nabc", "abc", 3, false},
		{handshakeHead + "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", "", 0, false},
	} {
		for _, r := range []io.Reader{strings.NewReader(c.raw), iotest.HalfReader(strings.NewReader(c.raw))} {
			h, rest, err := readHead(r, false)
			if err != nil || h.length != c.length || h.upgrade != c.upgrade || !strings.HasPrefix(c.rest, string(rest)) {
				t.Errorf("%q: %+v, %q, %v", c.raw, h, rest, err)
			}
		}
	}
	full := plain + "X-A: " + strings.Repeat("a", maxHead-len(plain)-len("X-A: ")-4) + "\r\n\r\n"
	if _, _, err := readHead(strings.NewReader(full), false); err != nil || len(full) != maxHead {
		t.Errorf("a head of exactly the bound: %d %v", len(full), err)
	}
}

// agree checks that the daemon's own parser takes the head that we send on for the request that we judged.
func agree(t *testing.T, raw string, scopes []string) {
	t.Helper()
	h, rest, err := readHead(strings.NewReader(raw), false)
	if err != nil {
		return
	}
	sent := h.bytes(scopes)
	r, err := http.ReadRequest(bufio.NewReader(io.MultiReader(bytes.NewReader(sent), bytes.NewReader(rest))))
	if err != nil {
		return // the daemon refuses it: nothing can come of it
	}
	ours, _ := shard.MatchRoute(h.method, h.path())
	theirs, _ := shard.MatchRoute(r.Method, r.URL.EscapedPath())
	if ours != theirs {
		t.Fatalf("%q: we judge %v, the daemon serves %v", raw, ours, theirs)
	}
	if got := r.Header[shard.ScopesHeader]; len(got) != 1 || got[0] != strings.Join(scopes, ",") {
		t.Fatalf("%q: scopes reach the daemon as %q", raw, got)
	}
	if r.Header["Authorization"] != nil || r.Close == h.upgrade {
		t.Fatalf("%q: passed on as %q", raw, sent)
	}
	if length := r.ContentLength; length != h.length || (length == chunked) != slices.Equal(r.TransferEncoding, []string{"chunked"}) {
		t.Fatalf("%q: the body's length is %d to us, %d to the daemon", raw, h.length, length)
	}
	if r.Host != h.host {
		t.Fatalf("%q: the host is %q to us, %q to the daemon", raw, h.host, r.Host)
	}
}

func TestHeadAgreesWithDaemon(t *testing.T) {
	for _, raw := range []string{
		plain + "\r\n", handshakeHead + "\r\n",
		plain + "Authorization: Bearer x\r\nX-SHARD-scopes: *\r\nx-shard-anything: *\r\nConnection: X-Shard-Scopes\r\n\r\n",
		"POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n",
		"PUT /v0/sandboxes/a%2Fb/files?path=/a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nTrailer: X-Shard-Scopes\r\n\r\n",
		"GET //v0/version HTTP/1.1\r\nHost: x\r\n\r\n", "GET /v0/sandboxes/%2e%2e%2fx!$&'()*+,;=:@ HTTP/1.1\r\nHost: x\r\n\r\n",
	} {
		if _, _, err := readHead(strings.NewReader(raw), false); err != nil {
			t.Errorf("%q: %v", raw, err)
		}
		agree(t, raw, []string{"exec", "sandbox:read"})
		agree(t, raw, nil)
	}
}

func FuzzHead(f *testing.F) {
	for _, raw := range smuggles {
		if len(raw) < 1000 {
			f.Add(raw)
		}
	}
	f.Add(plain + "\r\n")
	f.Add(handshakeHead + "\r\n")
	f.Fuzz(func(t *testing.T, raw string) {
		whole, _, err := readHead(strings.NewReader(raw), false)
		if err != nil && shard.CodeOf(err) != shard.CodeInvalidRequest && !errors.Is(err, io.EOF) {
			t.Fatalf("%q: %v", raw, err)
		}
		if err == nil {
			// What is read does not hang on how it arrives, except that a second request may be seen or not.
			h, _, err := readHead(iotest.OneByteReader(strings.NewReader(raw)), false)
			if err != nil || h.target != whole.target || !slices.Equal(h.fields, whole.fields) {
				t.Fatalf("%q: byte by byte %+v, %v", raw, h, err)
			}
		}
		agree(t, raw, []string{"exec"})
	})
}

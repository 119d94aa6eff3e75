package egress

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

// what says of a request what a host saw of it.
var what = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	w.Header().Set("Content-Type", "text/plain")
	fmt.Fprintf(w, "%s %s %s %s %q xff=%q conn=%q body=%q trailer=%q", r.Proto, r.Method, r.Host, r.RequestURI, r.UserAgent(),
		r.Header.Get("X-Forwarded-For"), r.Header.Get("X-Hop"), body, r.Trailer.Get("X-End"))
})

const public = "198.51.100.7"

func TestRequestsAreJudgedByTheirHost(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	r.host("evil.test", public, what) // the same address: the later server answers for both
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always})
	for _, scheme := range []string{"http", "https"} {
		for _, h2 := range []bool{false, true} {
			c := b.client(r.pool, h2)
			if scheme == "https" {
				r.host("good.test", "198.51.100.8", what)
				r.mu.Lock()
				r.names["good.test"] = []netip.Addr{netip.MustParseAddr("198.51.100.8")}
				r.mu.Unlock()
				b.set(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always}) // forgets the old address
			}
			status, body := get(t, c, scheme+"://good.test/a%2fb?x=1;y=%zz")
			proto := "HTTP/1.1"
			if scheme == "https" {
				proto = "HTTP/2.0"
			}
			if status != 200 || !strings.HasPrefix(body, proto+" GET good.test /a%2fb?x=1;y=%zz ") {
				t.Errorf("%s: %d %s", scheme, status, body)
			}
			if d := r.last(b.id); d.Verdict != shard.EgressAllow || d.Rule != "3" || d.Host != "good.test" || d.Source != shard.EgressProxy || d.Address == "" {
				t.Errorf("recorded %+v", d)
			}
			status, body = get(t, c, scheme+"://evil.test/")
			var refused struct{ Host, Rule, Reason string }
			if err := json.Unmarshal([]byte(body), &refused); err != nil {
				t.Fatalf("%v: %s", err, body)
			}
			if status != 403 || refused.Host != "evil.test" || refused.Rule != shard.EgressRuleDefault || refused.Reason == "" {
				t.Errorf("%s: %d %s", scheme, status, body)
			}
			if d := r.last(b.id); d.Verdict != shard.EgressDeny || d.Rule != shard.EgressRuleDefault || d.Host != "evil.test" {
				t.Errorf("recorded %+v", d)
			}
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, name := range r.lookups {
		if name != "good.test" {
			t.Errorf("%s was looked up: a name that no rule allows carries data out", name)
		}
	}
}

func TestEveryRequestOfAConnectionIsJudged(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	c := b.raw(80)
	in := bufio.NewReader(c)
	ask := func(request string) *http.Response {
		t.Helper()
		if _, err := io.WriteString(c, request); err != nil {
			t.Fatal(err)
		}
		resp, err := http.ReadResponse(in, nil)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body = io.NopCloser(bytes.NewReader(body))
		return resp
	}
	for _, try := range []struct {
		request string
		status  int
	}{
		{"GET / HTTP/1.1\r\nHost: good.test\r\n\r\n", 200},
		{"GET / HTTP/1.1\r\nHost: evil.test\r\n\r\n", 403},
		{"GET / HTTP/1.1\r\nHost: GOOD.test.\r\n\r\n", 200},
		{"GET / HTTP/1.1\r\nHost: good.test:80\r\n\r\n", 200},
		{"GET / HTTP/1.1\r\nHost: good.test:8080\r\n\r\n", 400},
		{"GET http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n", 403}, // the line wins over the header
		{"GET http://good.test/ HTTP/1.1\r\nHost: evil.test\r\n\r\n", 200},
		{"GET / HTTP/1.1\r\nHost: 10.0.0.1\r\n\r\n", 403},
		{"GET / HTTP/1.1\r\nHost: 127.1\r\n\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: \r\n\r\n", 400},
		{"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n5\r\nhello\r\n0\r\n\r\n", 200},
	} {
		if resp := ask(try.request); resp.StatusCode != try.status {
			body, _ := io.ReadAll(resp.Body)
			t.Errorf("%q: %d %s, want %d", try.request, resp.StatusCode, body, try.status)
		}
	}
	// A policy that changes counts from the next request on.
	b.set(Subject{Policy: policyOf(t, "allow other.test")})
	if resp := ask("GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"); resp.StatusCode != 403 {
		t.Errorf("after the change: %d", resp.StatusCode)
	}
}

func TestWhatCannotBeReadInOneWayIsRefused(t *testing.T) {
	r := newRig(t)
	var mu sync.Mutex
	var seen []string
	r.host("good.test", public, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		body, _ := io.ReadAll(q.Body)
		mu.Lock()
		seen = append(seen, q.Method+" "+q.Host+q.RequestURI+" "+string(body))
		mu.Unlock()
	}))
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	for _, request := range []string{
		"GET / HTTP/1.1\r\nHost: good.test\r\nHost: evil.test\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\nabcd",
		"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: good.test\r\nX: a\x00b\r\n\r\n",
		"GET /\x01 HTTP/1.1\r\nHost: good.test\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: good.test evil\r\n\r\n",
		"CONNECT evil.test:443 HTTP/1.1\r\nHost: evil.test:443\r\n\r\n",
		"GET / HTTP/3.0\r\nHost: good.test\r\n\r\n",
		"this is no request at all\r\n\r\n",
		"GET http:http://evil.test/ HTTP/1.1\r\nHost: good.test\r\n\r\n",
		"GET http:evil.test:80 HTTP/1.1\r\nHost: good.test\r\n\r\n",
		"GET mailto:evil.test HTTP/1.1\r\nHost: good.test\r\n\r\n",
		"OPTIONS * HTTP/1.1\r\nHost: evil.test\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: good.test\r\nContent-Length: +5\r\n\r\nhello",
		"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: \x0bchunked\r\nContent-Length: 5\r\n\r\nhello",
		"POST / HTTP/1.1\r\nHost: good.test\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: good.test\r\nX: a\rHost: evil.test\r\n\r\n",
		"GET / HTTP/1.1\r\n Host: good.test\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: \x1b[31mgood.test\r\n\r\n",
		"GET / HTTP/1.1\r\nHost: [fe80::1%25lo]\r\n\r\n",
	} {
		c := b.raw(80)
		_, _ = io.WriteString(c, request)
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil && (resp.StatusCode < 400 || resp.StatusCode > 505) {
			t.Errorf("%q: %d", request, resp.StatusCode)
		}
		_ = c.Close()
	}
	for _, path := range []string{"http:http://evil.test/", "http:evil.test", "//evil.test", "http://evil.test/"} {
		if status := asked2(t, b.raw(80), [2]string{":method", "GET"}, [2]string{":scheme", "http"}, [2]string{":authority", "good.test"}, [2]string{":path", path}); status == "200" {
			mu.Lock()
			last := seen[len(seen)-1]
			seen = seen[:len(seen)-1]
			mu.Unlock()
			if !strings.HasPrefix(last, "GET good.test/") {
				t.Errorf("%s over HTTP/2: the host saw %q", path, last)
			}
		}
	}
	// An upgrade to HTTP/2 would carry requests past the judge: it is not passed on.
	c := b.raw(80)
	_, _ = io.WriteString(c, "GET /up HTTP/1.1\r\nHost: good.test\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil || resp.StatusCode != 200 {
		t.Errorf("upgrade: %v %v", resp, err)
	}
	c = b.raw(80)
	_, _ = io.WriteString(c, "OPTIONS * HTTP/1.1\r\nHost: good.test\r\n\r\n")
	if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 200 {
		t.Errorf("options: %v %v", resp, err)
	}
	mu.Lock()
	defer mu.Unlock()
	if !slices.Equal(seen, []string{"GET good.test/up "}) {
		t.Errorf("the host saw %q", seen)
	}
}

// asked2 is the status of a request over HTTP/2 with these fields and no others, or how it ended otherwise.
func asked2(t testing.TB, c net.Conn, fields ...[2]string) string {
	t.Helper()
	defer c.Close()
	_, _ = io.WriteString(c, http2.ClientPreface)
	f := http2.NewFramer(c, c)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var head bytes.Buffer
	enc := hpack.NewEncoder(&head)
	for _, h := range fields {
		_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]})
	}
	_ = f.WriteSettings()
	_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: head.Bytes(), EndStream: true, EndHeaders: true})
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return err.Error()
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			return frame.PseudoValue("status")
		case *http2.RSTStreamFrame:
			return frame.ErrCode.String()
		case *http2.GoAwayFrame:
			return frame.ErrCode.String()
		}
	}
}

func TestHeadersOfTheConnectionStayOnIt(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always})
	for _, scheme := range []string{"http", "https"} {
		q, err := http.NewRequest("POST", scheme+"://good.test/", struct{ io.Reader }{strings.NewReader("hello")})
		if err != nil {
			t.Fatal(err)
		}
		if scheme == "http" { // HTTP/2 has no such headers
			q.Header.Set("Connection", "X-Hop")
			q.Header.Set("X-Hop", "secret")
		}
		q.Header.Set("X-Forwarded-For", "as sent")
		q.Header.Set("User-Agent", "")
		q.Trailer = http.Header{"X-End": {"the end"}}
		resp, err := b.client(r.pool, scheme == "https").Do(q)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		resp.Body.Close()
		want := `"" xff="as sent" conn="" body="hello" trailer="the end"`
		if !strings.Contains(string(body), want) {
			t.Errorf("%s: %s", scheme, body)
		}
	}
}

func TestWhereTheNameAloneDecidesNothingIsTakenApart(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	c := b.client(r.world.pool, true) // pins: it trusts the host's authority and not the proxy's
	if status, body := get(t, c, "https://good.test/"); status != 200 {
		t.Errorf("%d %s", status, body)
	}
	if d := r.last(b.id); d.Verdict != shard.EgressAllow || d.Host != "good.test" || d.Port != 443 || d.Address != public {
		t.Errorf("recorded %+v", d)
	}
	_, err := c.Get("https://evil.test/")
	if err == nil || !strings.Contains(err.Error(), "access denied") {
		t.Errorf("refusal: %v", err)
	}
	if d := r.last(b.id); d.Verdict != shard.EgressDeny || d.Host != "evil.test" {
		t.Errorf("recorded %+v", d)
	}
	conn := tls.Client(b.raw(443), &tls.Config{InsecureSkipVerify: true}) // no name
	if err := conn.Handshake(); err == nil {
		t.Error("a connection that names no host got through")
	}
	plain := b.raw(443)
	_, _ = io.WriteString(plain, "GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
	if data, _ := io.ReadAll(plain); len(data) != 7 {
		t.Errorf("plain HTTP to port 443: %q", data)
	}
}

func TestInsideAndOutsideMustAgree(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	r.host("other.test", "198.51.100.8", what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test", "allow other.test"), Secrets: always})
	c := b.client(r.pool, true)
	q, _ := http.NewRequest("GET", "https://good.test/", nil)
	q.Host = "other.test"
	resp, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != 400 {
		t.Errorf("%d", resp.StatusCode)
	}
}

func TestCertificatesOfHostsAreVerified(t *testing.T) {
	r := newRig(t)
	reached := make(chan string, 9)
	h := http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached <- "a request" })
	r.serve("expired.test", "198.51.100.1", h, r.world.issue(t, leafOptions{name: "expired.test", expired: true}), true)
	r.serve("self.test", "198.51.100.2", h, r.world.issue(t, leafOptions{name: "self.test", selfly: true}), true)
	r.serve("wrong.test", "198.51.100.3", h, r.world.issue(t, leafOptions{name: "right.test"}), true)
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: always})
	for _, h2 := range []bool{false, true} {
		c := b.client(r.pool, h2)
		for host, why := range map[string]string{"expired.test": "expired", "self.test": "authority", "wrong.test": "other names"} {
			status, body := get(t, c, "https://"+host+"/")
			if status != 502 || !strings.Contains(body, host) || !strings.Contains(body, "certificate") || !strings.Contains(body, why) {
				t.Errorf("%s: %d %s", host, status, body)
			}
			d := r.last(b.id)
			if strings.Contains(body+d.Reason, "right.test") {
				t.Errorf("%s: the host's own words are passed on: %s, %+v", host, body, d)
			}
			if d.Rule != "certificate" || d.Verdict != shard.EgressDeny {
				t.Errorf("recorded %+v", d)
			}
		}
	}
	if len(reached) > 0 {
		t.Error("a host that could not prove its name got a request")
	}
}

func TestNamesCannotLeadInside(t *testing.T) {
	r := newRig(t)
	for name, addrs := range map[string][]string{"in.test": {"10.0.0.1"}, "loop.test": {"127.0.0.1"}, "zero.test": {"0.0.0.0"}, "meta.test": {"169.254.169.254"},
		"many.test": {"224.0.0.1"}, "all.test": {"255.255.255.255"}, "six.test": {"::1", "::ffff:10.0.0.1", "fe80::1"}, "rule.test": {"203.0.113.5"}} {
		for _, a := range addrs {
			r.names[name] = append(r.names[name], netip.MustParseAddr(a))
		}
	}
	b := r.box(Subject{Policy: policyOf(t, "deny 203.0.113.0/24", "allow *"), Secrets: always})
	c, secure := b.client(nil, false), b.client(r.pool, true)
	for name := range r.names {
		want := shard.EgressRulePrivate
		if name == "rule.test" {
			want = "3"
		}
		for _, status := range []func() (int, string){
			func() (int, string) { return get(t, c, "http://"+name+"/") },
			func() (int, string) { return get(t, secure, "https://"+name+"/") },
		} {
			if s, body := status(); s != 403 || r.last(b.id).Rule != want {
				t.Errorf("%s: %d %s, recorded %+v", name, s, body, r.last(b.id))
			}
		}
	}
	if s, body := get(t, c, "http://nowhere.test/"); s != 502 || r.last(b.id).Rule != "resolve" {
		t.Errorf("%d %s", s, body)
	}
	if len(r.dialled) > 0 {
		t.Errorf("dialled %v", r.dialled)
	}
	// The same at the socket, where a name that changes its mind would end up.
	for _, a := range []string{"127.0.0.1", "10.0.0.1", "0.0.0.0", "224.0.0.1", "255.255.255.255", "169.254.169.254"} {
		if conn, err := dialHost(t.Context(), netip.AddrPortFrom(netip.MustParseAddr(a), 80)); err == nil {
			conn.Close()
			t.Errorf("%s was dialled", a)
		}
	}
}

func TestAnAddressThatARuleAllowsIsBelieved(t *testing.T) {
	r := newRig(t)
	r.host("", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow "+public+" tcp:80", "allow good.test")})
	if s, body := get(t, b.client(nil, false), "http://"+public+"/"); s != 200 {
		t.Errorf("%d %s", s, body)
	}
	if s, body := get(t, b.client(nil, false), "http://198.51.100.9/"); s != 403 {
		t.Errorf("%d %s", s, body)
	}
}

func TestWhatCannotBeRecordedIsNotSent(t *testing.T) {
	r := newRig(t)
	reached := make(chan string, 9)
	r.host("good.test", public, http.HandlerFunc(func(http.ResponseWriter, *http.Request) { reached <- "a request" }))
	inside, through := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: always}), r.box(Subject{Policy: policyOf(t, "allow *")})
	r.mu.Lock()
	r.full = true
	r.mu.Unlock()
	if s, _ := get(t, inside.client(nil, false), "http://good.test/"); s != 503 {
		t.Errorf("http: %d", s)
	}
	if s, _ := get(t, inside.client(r.pool, true), "https://good.test/"); s != 503 {
		t.Errorf("https: %d", s)
	}
	if _, err := through.client(r.world.pool, true).Get("https://good.test/"); err == nil {
		t.Error("through: it was sent")
	}
	if len(reached) > 0 {
		t.Error("a request was sent that nobody wrote down")
	}
}

func TestASandboxCannotBlockAnother(t *testing.T) {
	t.Parallel() // it waits for deadlines
	r := newRig(t)
	r.host("good.test", public, what)
	r.proxy.maxConns = 200
	bad, good := r.box(Subject{Policy: policyOf(t, "allow good.test")}), r.box(Subject{Policy: policyOf(t, "allow good.test")})
	// Slow heads, half a ClientHello, nothing at all: they hold their connections and no more.
	for i := range 220 {
		port := 80 + i%2*363
		c, err := bad.dial(t.Context(), port)
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		_, _ = io.WriteString(c, []string{"GET / HTTP/1.1\r\nHost: go", "\x16\x03\x01\x02\x00\x01"}[i%2])
	}
	deadline := time.Now().Add(20 * time.Second)
	for len(r.log(bad.id)) == 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	if d := r.last(bad.id); d.Rule != "limit" {
		t.Errorf("recorded %+v", d)
	}
	if s, body := get(t, good.client(nil, false), "http://good.test/"); s != 200 {
		t.Errorf("%d %s", s, body)
	}
	if s, body := get(t, good.client(r.world.pool, true), "https://good.test/"); s != 200 {
		t.Errorf("%d %s", s, body)
	}
	// Slow heads are not waited for without end.
	slow := good.raw(80)
	_, _ = io.WriteString(slow, "GET / HTTP/1.1\r\n")
	if _, err := io.ReadAll(slow); err != nil {
		t.Errorf("a slow head was not ended: %v", err)
	}
	// What is under way of one sandbox is bounded, and not that of another.
	client := r.proxy.clients[good.id]
	for !client.hold(maxHeld - copyBuffer + 1) { // the requests before are not quite over
		time.Sleep(time.Millisecond)
	}
	if s, _ := get(t, good.client(nil, false), "http://good.test/"); s != 503 || r.last(good.id).Rule != "limit" {
		t.Errorf("%d, recorded %+v", s, r.last(good.id))
	}
}

// TestSandboxesTogetherLeaveRoom: where descriptors are few, sandboxes that take all they can leave some to one that comes.
func TestSandboxesTogetherLeaveRoom(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	r.proxy.maxOpen = 100
	var hogs []*box
	for range 4 {
		b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
		hogs = append(hogs, b)
		for range r.proxy.maxOpen {
			b.raw(80 + len(hogs)%2*363) // it may be closed at once
		}
	}
	for _, b := range hogs {
		for deadline := time.Now().Add(time.Minute); len(r.log(b.id)) == 0 && time.Now().Before(deadline); {
			time.Sleep(10 * time.Millisecond)
		}
		if d := r.last(b.id); d.Rule != shard.EgressRuleLimit {
			t.Errorf("recorded %+v", d)
		}
	}
	if n := r.proxy.open.Load(); n < 80 || n > 98 {
		t.Errorf("%d connections are open, of %d", n, r.proxy.maxOpen)
	}
	if s, body := get(t, r.box(Subject{Policy: policyOf(t, "allow good.test")}).client(nil, false), "http://good.test/"); s != 200 {
		t.Errorf("%d %s", s, body)
	}
	for _, b := range hogs {
		r.proxy.Forget(b.id)
	}
	for deadline := time.Now().Add(time.Minute); r.proxy.open.Load() > 2; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections are counted that are gone", r.proxy.open.Load())
		}
	}
}

func TestForgetEndsConnections(t *testing.T) {
	r := newRig(t)
	r.host("good.test", public, what)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	c := b.raw(80)
	through := tls.Client(b.raw(443), &tls.Config{ServerName: "good.test", RootCAs: r.world.pool})
	if err := through.Handshake(); err != nil {
		t.Fatal(err)
	}
	r.proxy.Forget(b.id)
	for _, conn := range []net.Conn{c, through} {
		if _, err := conn.Read(make([]byte, 1)); err == nil {
			t.Error("a connection goes on")
		}
	}
	if conn, err := b.dial(t.Context(), 80); err == nil {
		conn.Close()
		t.Error("the proxy still listens")
	}
	r.proxy.Forget(b.id)
	if err := r.proxy.Add(b.id, Link{b.addr, b.gateway}); err != nil {
		t.Error(err)
	}
	stranger, err := net.Dial("tcp", netip.AddrPortFrom(b.gateway, PlainPort).String())
	if err != nil {
		t.Fatal(err)
	}
	defer stranger.Close()
	_, _ = io.WriteString(stranger, "GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
	if data, _ := io.ReadAll(stranger); len(data) > 0 {
		t.Errorf("a program that is not the sandbox was answered: %q", data)
	}
}

// FuzzTarget: a host that is taken from a request is in the one form in which policies are judged, and is no address.
func FuzzTarget(f *testing.F) {
	for _, s := range []string{"good.test", "GOOD.test.:80", "[::1]:443", "127.1", "10.0.0.1:80", "a:b:c", "user@good.test", "good.test:080", "bücher.test", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, authority string) {
		host, addr, ok := target(authority, 80)
		if !ok {
			return
		}
		if again, err := policy.Host(host); host != "" && (err != nil || again != host) || (host == "") != addr.IsValid() {
			t.Fatalf("%q is read as %q, %v", authority, host, addr)
		}
	})
}

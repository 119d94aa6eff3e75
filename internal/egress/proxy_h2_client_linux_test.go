package egress

import (
	"bufio"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
)

// frames is a program in the sandbox that speaks HTTP/2 as it likes, on a connection to name.
func (b *box) frames(name string, settings ...http2.Setting) *frames {
	b.t.Helper()
	raw := b.raw(443)
	_ = raw.SetDeadline(time.Now().Add(2 * time.Minute))
	conn := tls.Client(raw, &tls.Config{RootCAs: b.pool, ServerName: name, NextProtos: []string{"h2"}})
	if err := conn.Handshake(); err != nil {
		b.t.Fatal(err)
	}
	if got := conn.ConnectionState().NegotiatedProtocol; got != "h2" {
		b.t.Fatalf("the proxy speaks %q", got)
	}
	_, _ = io.WriteString(conn, http2.ClientPreface)
	f := newFrames(conn)
	_ = f.WriteSettings(settings...)
	return f
}

// ask sends a request with these fields and no others, and returns the status of its answer, or how it ended otherwise.
func (f *frames) ask(stream uint32, fields ...string) string {
	f.head(stream, true, wholeFrame, f.coded(fields...))
	return f.answer(stream)
}

// answer waits for the end of the answer to a request, or of the connection.
func (f *frames) answer(stream uint32) (status string) {
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return "the connection ended"
		}
		if away, ok := frame.(*http2.GoAwayFrame); ok {
			return away.ErrCode.String()
		}
		if frame.Header().StreamID != stream {
			continue
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			if status = frame.PseudoValue("status"); frame.StreamEnded() {
				return status
			}
		case *http2.DataFrame:
			_ = f.WriteWindowUpdate(0, max(1, uint32(len(frame.Data()))))
			if frame.StreamEnded() {
				return status
			}
		case *http2.RSTStreamFrame:
			return frame.ErrCode.String()
		}
	}
}

// TestOddRequests: each request over HTTP/2 is judged by itself, names its host in one way, and carries a value only where all agree
// and the placeholder stands in one header's value.
func TestOddRequests(t *testing.T) {
	r, misuses := secretive(t)
	h := r.serveAll("good.test", "other.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	get := func(more ...string) []string {
		return append([]string{":method", "GET", ":scheme", "https", ":authority", "good.test", ":path", "/"}, more...)
	}
	to := func(authority string, more ...string) []string {
		return append([]string{":method", "GET", ":scheme", "https", ":authority", authority, ":path", "/"}, more...)
	}
	const passes, malformed = "200", "PROTOCOL_ERROR"
	for _, c := range []struct {
		name, want string
		fields     []string
		header     http.Header // what of the header the host sees, where it sees the request
	}{
		{"as it should be", passes, get("x-key", thePlace), http.Header{"X-Key": {theValue}}},
		{"with its port", passes, to("good.test:443", "x-key", thePlace), http.Header{"X-Key": {theValue}}},
		{"in capitals", passes, to("GOOD.test.", "x-key", thePlace), http.Header{"X-Key": {theValue}}},
		{"at another port", "400", to("good.test:8443", "x-key", thePlace), nil},
		{"with a user", malformed, to("u@good.test", "x-key", thePlace), nil},
		{"of an address", "400", to("198.51.100.40", "x-key", thePlace), nil},
		{"of another destination", "400", to("other.test", "x-key", thePlace, "x-other", otherPlace), nil},
		{"of no host", "400", []string{":method", "GET", ":scheme", "https", ":path", "/", "x-key", thePlace}, nil},
		{"two authorities", malformed, get(":authority", "other.test"), nil},
		{"Host alone", passes, []string{":method", "GET", ":scheme", "https", ":path", "/", "host", "good.test", "x-key", thePlace}, http.Header{"X-Key": {theValue}, "Host": nil}},
		{"another Host alone", "400", []string{":method", "GET", ":scheme", "https", ":path", "/", "host", "other.test", "x-key", thePlace}, nil},
		{"the same Host", passes, get("host", "Good.test", "x-key", thePlace), http.Header{"X-Key": {theValue}, "Host": nil}},
		{"another Host", "400", get("host", "other.test", "x-key", thePlace), nil},
		{"two Hosts", "400", get("host", "good.test", "host", "other.test", "x-key", thePlace), nil},
		{"a Host twice", "400", get("host", "good.test", "host", "good.test", "x-key", thePlace), nil},
		{"a placeholder as Host", "400", get("host", thePlace), nil},
		{"plain HTTP, as it says inside TLS", passes, []string{":method", "GET", ":scheme", "http", ":authority", "good.test", ":path", "/", "x-key", thePlace}, http.Header{"X-Key": {theValue}}},
		{"plain HTTP of another host", "400", []string{":method", "GET", ":scheme", "http", ":authority", "other.test", ":path", "/", "x-key", thePlace}, nil},
		{"no scheme", malformed, []string{":method", "GET", ":authority", "good.test", ":path", "/", "x-key", thePlace}, nil},
		{"CONNECT", "400", []string{":method", "CONNECT", ":authority", "good.test:443", "x-key", thePlace}, nil},
		{"CONNECT to WebSockets", malformed, []string{":method", "CONNECT", ":protocol", "websocket", ":scheme", "https", ":authority", "good.test", ":path", "/", "x-key", thePlace}, nil},
		{"an upgrade", "400", get("connection", "upgrade", "upgrade", "h2c", "x-key", thePlace), nil},
		{"a header of the connection", "400", get("connection", "x-key", "x-key", thePlace), nil},
		{"TE", "400", get("te", thePlace), nil},
		{"Transfer-Encoding", "400", get("transfer-encoding", thePlace), nil},
		{"credentials of the proxy", passes, get("proxy-authorization", thePlace), http.Header{"Proxy-Authorization": nil}},
		{"a placeholder over two headers", passes, get("x-key", thePlace[:5], "x-key", thePlace[5:]), http.Header{"X-Key": {thePlace[:5], thePlace[5:]}}},
		{"a header twice", passes, get("x-key", thePlace, "x-key", "a "+thePlace), http.Header{"X-Key": {theValue, "a " + theValue}}},
		{"crumbs of a cookie", passes, get("cookie", "a="+thePlace, "cookie", "b="+thePlace), http.Header{"Cookie": {"a=" + theValue + "; b=" + theValue}}},
		{"a placeholder over crumbs", passes, get("cookie", thePlace[:5], "cookie", thePlace[5:]), http.Header{"Cookie": {thePlace[:5] + "; " + thePlace[5:]}}},
		{"a header's name", passes, get(strings.ToLower(thePlace), thePlace), http.Header{"Mock-Api": {theValue}}},
		{"bytes beyond ASCII", passes, get("x-key", "\xff"+thePlace+"\x80"), http.Header{"X-Key": {"\xff" + theValue + "\x80"}}},
		{"a zero", malformed, get("x-key", thePlace+"\x00"), nil},
		{"a line end", malformed, get("x-key", thePlace+"\r\nx-other: a"), nil},
		{"a name in capitals", malformed, get("X-Key", thePlace), nil},
		{"a name with a blank", malformed, get("x key", thePlace), nil},
		{"a name with a line end", malformed, get("x\r\nhost: other.test\r\nx", thePlace), nil},
		{"no name", malformed, get("", thePlace), nil},
		{"a field that is none", malformed, get(":key", thePlace), nil},
		{"pseudo fields behind others", malformed, []string{":method", "GET", ":scheme", "https", "x-key", thePlace, ":authority", "good.test", ":path", "/"}, nil},
		{"a method", passes, []string{":method", thePlace, ":scheme", "https", ":authority", "good.test", ":path", "/"}, http.Header{}},
		{"a path", passes, []string{":method", "GET", ":scheme", "https", ":authority", "good.test", ":path", "/" + thePlace + "?" + thePlace}, http.Header{}},
		{"a URL as path", passes, []string{":method", "GET", ":scheme", "https", ":authority", "good.test", ":path", "https://other.test/", "x-key", thePlace}, http.Header{"X-Key": {theValue}}},
		{"a URL without end as path", passes, []string{":method", "GET", ":scheme", "https", ":authority", "good.test", ":path", "//other.test/", "x-key", thePlace}, http.Header{"X-Key": {theValue}}},
		{"a body that is none", passes, get("content-length", "5", "x-key", thePlace), http.Header{"X-Key": {theValue}, "Content-Length": nil}},
	} {
		before, told := h.count(), len(misuses())
		f := b.frames("good.test")
		if got := f.ask(1, c.fields...); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
		_ = f.conn.Close()
		if (h.count() > before) != (c.header != nil) {
			t.Errorf("%s: it reached the host: %v", c.name, h.count() > before)
		} else if c.header != nil {
			got := h.last(t)
			if got.host != "good.test" || strings.Contains(got.uri, theValue) {
				t.Errorf("%s: the host got %+v", c.name, got)
			}
			for name, want := range c.header {
				if fmt.Sprintf("%q", got.header[name]) != fmt.Sprintf("%q", []string(want)) {
					t.Errorf("%s: the host got %s %q, want %q", c.name, name, got.header[name], want)
				}
			}
		}
		if c.header == nil && len(misuses()) > told {
			t.Errorf("%s: %v", c.name, misuses()[told:])
		}
	}
	// On one connection each is judged for itself, and what is wrong with one is not the others' affair.
	f := b.frames("good.test")
	before := h.count()
	for i, fields := range [][]string{get("x-key", thePlace), to("other.test", "x-other", otherPlace), get("x-key", "none"), get("host", "other.test", "x-key", thePlace), get("x-key", thePlace)} {
		f.head(uint32(2*i+1), true, wholeFrame, f.coded(fields...))
	}
	got := map[string]int{}
	for range 5 {
		for {
			frame, err := f.ReadFrame()
			if err != nil {
				t.Fatal(err)
			}
			if head, ok := frame.(*http2.MetaHeadersFrame); ok {
				got[head.PseudoValue("status")]++
				break
			}
		}
	}
	if got["200"] != 3 || got["400"] != 2 || h.count() != before+3 {
		t.Errorf("on one connection: %v, %d arrived", got, h.count()-before)
	}
	// Trailers go as they are.
	f = b.frames("good.test")
	f.head(1, false, wholeFrame, f.coded(":method", "POST", ":scheme", "https", ":authority", "good.test", ":path", "/", "trailer", "x-key"))
	_ = f.WriteData(1, false, []byte(thePlace))
	f.head(1, true, 1, f.coded("x-key", thePlace))
	if got := f.answer(1); got != passes || h.last(t).body != thePlace || h.last(t).trailer.Get("X-Key") != thePlace {
		t.Errorf("a trailer: %s, %+v", got, h.last(t))
	}
}

// TestOneConnectionOneHost: a connection is for the host that its handshake names, also where the host's certificate is for another
// destination too, which lies at the same address: no request goes on a connection that was made for another, on either side.
func TestOneConnectionOneHost(t *testing.T) {
	r, misuses := secretive(t)
	var mu sync.Mutex
	var seen []string
	both := http.HandlerFunc(func(_ http.ResponseWriter, q *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		seen = append(seen, fmt.Sprintf("%s in %s: %s%s", q.Host, q.TLS.ServerName, q.Header.Get("X-Key"), q.Header.Get("X-Other")))
	})
	cert := r.world.issue(t, leafOptions{name: "good.test", also: []string{"other.test"}})
	r.serve("good.test", "198.51.100.40", both, cert, true)
	r.serve("other.test", "198.51.100.40", both, cert, true)
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	take := func() string {
		mu.Lock()
		defer mu.Unlock()
		all := seen
		seen = nil
		return strings.Join(all, "; ")
	}
	key := map[string][]string{"good.test": {"x-key", thePlace}, "other.test": {"x-other", otherPlace}}
	want := map[string]string{"good.test": "good.test in good.test: " + theValue, "other.test": "other.test in other.test: ok-other-5555555555"}
	for sni, other := range map[string]string{"good.test": "other.test", "other.test": "good.test"} {
		f := b.frames(sni)
		if leaf := f.conn.(*tls.Conn).ConnectionState().PeerCertificates[0]; len(leaf.DNSNames) != 1 || leaf.DNSNames[0] != sni {
			t.Errorf("the proxy shows a certificate for %q", leaf.DNSNames)
		}
		for i, host := range []string{sni, other, sni} {
			fields := append([]string{":method", "GET", ":scheme", "https", ":authority", host, ":path", "/"}, key[host]...)
			status := f.ask(uint32(2*i+1), fields...)
			if got := take(); host == sni && (status != "200" || got != want[host]) || host != sni && (status != "400" || got != "") {
				t.Errorf("HTTP/2, %s in %s: %s, the host saw %q", host, sni, status, got)
			}
		}
		conn := tls.Client(b.raw(443), &tls.Config{RootCAs: r.pool, ServerName: sni})
		in := bufio.NewReader(conn)
		for _, host := range []string{sni, other, sni} {
			fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\n%s: %s\r\n\r\n", host, key[host][0], key[host][1])
			resp, err := http.ReadResponse(in, nil)
			if err != nil {
				t.Fatal(err)
			}
			_, _ = io.Copy(io.Discard, resp.Body)
			if got := take(); host == sni && (resp.StatusCode != 200 || got != want[host]) || host != sni && (resp.StatusCode != 400 || got != "") {
				t.Errorf("HTTP/1.1, %s in %s: %d, the host saw %q", host, sni, resp.StatusCode, got)
			}
		}
	}
	if all := misuses(); len(all) > 0 {
		t.Errorf("what was refused counts as misuse: %v", all)
	}
}

// TestHTTP2IsOfTheShare: what a program and a host make the proxy keep together, of each the most and many at once, is bounded,
// ends with the sandbox at the latest, and another sandbox goes on.
func TestHTTP2IsOfTheShare(t *testing.T) {
	log.SetOutput(io.Discard) // net/http says there what hosts do
	defer log.SetOutput(os.Stderr)
	var lots []string // about as many fields as a head may have
	for i := range 1700 {
		lots = append(lots, fmt.Sprintf("x-%x", i), "")
	}
	bomb := compressed(t, "zstd", theValue)
	silent := func(*frames, asked) {}
	ask := func(f *frames, stream uint32, end bool, more ...string) {
		f.head(stream, end, wholeFrame, f.coded(append([]string{":method", "POST", ":scheme", "https", ":authority", "good.test", ":path", "/", "x-key", thePlace}, more...)...))
	}
	for _, c := range []struct {
		name           string
		conns, streams int
		ask            func(f *frames, stream uint32)
		answer         func(f *frames, q asked)
	}{
		{"heads of many fields", 4, 120, func(f *frames, stream uint32) { ask(f, stream, true, lots...) }, silent},
		{"trailers of many fields", 4, 120, func(f *frames, stream uint32) {
			ask(f, stream, false, "trailer", "x-1")
			f.head(stream, true, wholeFrame, f.coded(lots...))
		}, silent},
		{"halves of heads beside a request", 150, 1, func(f *frames, stream uint32) {
			ask(f, stream, true)
			block := f.coded(append([]string{":method", "GET"}, lots...)...)
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream + 2, BlockFragment: block[:min(len(block), wholeFrame)]})
		}, silent},
		{"bodies that nobody reads", 8, 120, func(f *frames, stream uint32) {
			ask(f, stream, false)
			f.data(stream, false, make([]byte, 48<<10))
		}, func(f *frames, q asked) { f.head(q.stream, false, wholeFrame, f.coded(":status", "103")) }},
		{"resets", 4, 1500, func(f *frames, stream uint32) {
			ask(f, stream, true, lots[:200]...)
			_ = f.WriteRSTStream(stream, http2.ErrCodeCancel)
		}, silent},
		{"heads that do not end", 20, 1, func(f *frames, stream uint32) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: f.coded(":method", "GET")})
			for range 10000 {
				if f.WriteContinuation(stream, false, f.coded("x", "y")) != nil {
					return
				}
			}
		}, silent},
		{"settings and windows", 20, 1, func(f *frames, stream uint32) {
			ask(f, stream, true)
			for i := range uint32(5000) {
				_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: i}, http2.Setting{ID: http2.SettingHeaderTableSize, Val: i * 1000})
				_ = f.WriteWindowUpdate(stream, 1)
				_ = f.WritePriority(stream, http2.PriorityParam{StreamDep: i + 100, Weight: byte(i)})
			}
		}, silent},
		{"a window beyond all", 20, 1, func(f *frames, stream uint32) {
			ask(f, stream, true)
			for range 3 {
				_ = f.WriteWindowUpdate(0, 1<<31-1)
			}
		}, silent},
		{"bodies to a host of large frames", 4, 120, func(f *frames, stream uint32) { ask(f, stream, false) }, silent},
		{"answers of many fields", 4, 120, func(f *frames, stream uint32) { ask(f, stream, true) },
			func(f *frames, q asked) { f.ok(q.stream, lots...); f.whole(q.stream, "") }},
		{"trailers behind answers", 4, 120, func(f *frames, stream uint32) { ask(f, stream, true) }, func(f *frames, q asked) {
			f.ok(q.stream)
			f.data(q.stream, false, make([]byte, 100<<10))
			f.head(q.stream, true, wholeFrame, f.coded(lots...))
		}},
		{"bombs", 4, 120, func(f *frames, stream uint32) { ask(f, stream, true) }, func(f *frames, q asked) {
			f.ok(q.stream, "content-encoding", "zstd")
			f.data(q.stream, true, bomb)
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			r, _ := secretive(t)
			r.wildHost("good.test", public, func(f *frames, q asked) bool {
				if q.get("x-quick") != "" {
					_ = f.WriteSettings(http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1<<24 - 1}, http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1 << 20},
						http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1})
					f.ok(q.stream)
					f.whole(q.stream, "quick")
				} else {
					c.answer(f, q)
				}
				return true
			})
			s := Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)}
			bad, good := r.box(s), r.box(s)
			quick := func(b *box) {
				t.Helper()
				if resp, text := request(t, b.client(r.pool, true), "GET", "https://good.test/", map[string]string{"X-Quick": "1"}, nil); resp.StatusCode != 200 || text != "<quick>" {
					t.Errorf("%s: %d %q", b.id, resp.StatusCode, text)
				}
			}
			quick(bad) // what the host says of frames and streams is known from here on
			before, most := memory(), uint64(0)
			var all []*frames
			var group sync.WaitGroup
			for range c.conns {
				f := bad.frames("good.test", http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}) // it takes no bodies
				all = append(all, f)
				group.Go(func() {
					for i := range uint32(c.streams) {
						c.ask(f, 2*i+1)
					}
				})
				group.Go(func() {
					for {
						if _, err := f.ReadFrame(); err != nil {
							return
						}
					}
				})
			}
			client := r.proxy.clients[bad.id]
			for range 6 { // while it goes on, and when it has come to rest
				time.Sleep(100 * time.Millisecond)
				most = max(most, memory())
			}
			client.mu.Lock()
			t.Logf("%d MiB more, %d of the share, %d connections to the host", (int64(most)-int64(before))>>20, client.held>>20, client.upstream)
			client.mu.Unlock()
			const slack = 48 << 20
			if most > before+maxHeld+slack {
				t.Errorf("%d MiB in use before, then %d", before>>20, most>>20)
			}
			quick(good)
			r.proxy.Forget(bad.id)
			client.returned(t)
			for _, f := range all {
				_ = f.conn.Close()
			}
			group.Wait()
			client.mu.Lock()
			defer client.mu.Unlock()
			if client.upstream != 0 {
				t.Errorf("%d connections to hosts are left", client.upstream)
			}
		})
	}
}

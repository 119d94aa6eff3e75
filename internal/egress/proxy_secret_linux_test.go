package egress

import (
	"bufio"
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/andybalholm/brotli"
	"github.com/coder/websocket"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"

	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

const (
	theValue   = "sk-live-0123456789+/abc"
	nextValue  = "sk-next-9876543210"
	thePlace   = "mock-API"
	otherPlace = "mock-OTHER"
)

// held is what a sandbox of these tests has: one secret for good.test and what lies below, one for other.test.
func held(value string) []secret.Secret {
	return []secret.Secret{
		{Name: "API", Placeholder: thePlace, Destinations: []string{"good.test", "*.good.test"}, Value: secret.NewValue(value)},
		{Name: "OTHER", Placeholder: otherPlace, Destinations: []string{"other.test"}, Value: secret.NewValue("ok-other-5555555555")},
	}
}

// seenRequest is a request as a host got it.
type seenRequest struct {
	host, uri, body string
	header, trailer http.Header
}

// farHosts serves names with one handler that keeps what it got and answers by what the path says.
type farHosts struct {
	mu   sync.Mutex
	seen []seenRequest
}

func (h *farHosts) last(t testing.TB) seenRequest {
	t.Helper()
	h.mu.Lock()
	defer h.mu.Unlock()
	if len(h.seen) == 0 {
		t.Fatal("no host got a request")
	}
	return h.seen[len(h.seen)-1]
}

func (h *farHosts) count() int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return len(h.seen)
}

func (h *farHosts) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	h.mu.Lock()
	h.seen = append(h.seen, seenRequest{r.Host, r.RequestURI, string(body), r.Header.Clone(), r.Trailer.Clone()})
	h.mu.Unlock()
	key := r.Header.Get("X-Key")
	echo := "<" + key + "> {\"auth\":\"" + r.Header.Get("Authorization") + "\"}"
	switch strings.Trim(r.URL.Path, "/") {
	case "echo":
		w.Header().Set("X-Echo", key)
		w.Header().Set("Etag", `"v1"`)
		w.Header().Set("Content-Md5", "xxxx")
		w.Header().Set("Content-Digest", "sha-256=:xxxx:")
		w.Header().Set("Trailer", "Grpc-Message")
		w.Header().Add("Link", "</early>; k="+key)
		w.WriteHeader(http.StatusEarlyHints)
		_, _ = io.WriteString(w, echo)
		w.Header().Set("Grpc-Message", "no such key: "+key)
		w.Header().Set(http.TrailerPrefix+"X-Late", key)
	case "length":
		w.Header().Set("Content-Length", fmt.Sprint(len(echo)))
		_, _ = io.WriteString(w, echo)
	case "204":
		w.Header().Set("X-Echo", key)
		w.WriteHeader(http.StatusNoContent)
	case "304":
		w.Header().Set("Etag", `"v1"`)
		w.WriteHeader(http.StatusNotModified)
	case "206":
		w.WriteHeader(http.StatusPartialContent)
		_, _ = io.WriteString(w, echo[:4])
	case "coded":
		coding := r.URL.Query().Get("c")
		w.Header().Set("Content-Encoding", coding)
		var b bytes.Buffer
		var enc io.WriteCloser = nopCloser{&b}
		switch coding {
		case "gzip":
			enc = gzip.NewWriter(&b)
		case "br":
			enc = brotli.NewWriter(&b)
		case "zstd":
			enc, _ = zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1))
		}
		_, _ = io.WriteString(enc, strings.Repeat(echo, 1000))
		_ = enc.Close()
		w.Header().Set("Content-Length", fmt.Sprint(b.Len()))
		_, _ = w.Write(b.Bytes())
	case "late": // over HTTP/2 trailers may come behind a body that is none
		w.Header().Set("Content-Length", "0")
		w.Header().Set("Trailer", "X-Late")
		w.WriteHeader(http.StatusOK)
		w.(http.Flusher).Flush()
		w.Header().Set("X-Late", key)
	case "announced":
		w.Header().Set("Trailer", "X-"+key)
		w.Header().Set("Alt-Svc", `h3=":443"`)
		_, _ = io.WriteString(w, "trailers follow")
	case "messages":
		w.Header().Set("Grpc-Encoding", "gzip")
		_, _ = io.WriteString(w, "accepted: "+r.Header.Get("Grpc-Accept-Encoding"))
	case "redirect":
		http.Redirect(w, r, "https://evil.test/caught?k="+key, http.StatusFound)
	}
}

type nopCloser struct{ io.Writer }

func (nopCloser) Close() error { return nil }

func (r *rig) serveAll(names ...string) *farHosts {
	r.t.Helper()
	h := &farHosts{}
	for i, name := range names {
		r.host(name, fmt.Sprintf("198.51.100.%d", 40+i), h)
	}
	return h
}

func request(t testing.TB, c *http.Client, method, url string, header map[string]string, body io.Reader) (*http.Response, string) {
	t.Helper()
	q, err := http.NewRequestWithContext(t.Context(), method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		q.Header.Set(k, v)
	}
	resp, err := c.Do(q)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("%s: %v", url, err)
	}
	return resp, string(text)
}

// misuse is what a Proxy told of.
type misuse struct{ sandbox, name, host, reason string }

// secretive makes a rig whose proxy tells of misuses.
func secretive(t testing.TB) (*rig, func() []misuse) {
	r := newRig(t)
	var mu sync.Mutex
	var all []misuse
	r.proxy.o.Misused = func(sandbox, name, host, reason string) {
		mu.Lock()
		defer mu.Unlock()
		all = append(all, misuse{sandbox, name, host, reason})
	}
	return r, func() []misuse {
		mu.Lock()
		defer mu.Unlock()
		return slices.Clone(all)
	}
}

func TestValuesGoIntoHeadersOnly(t *testing.T) {
	r, misuses := secretive(t)
	h := r.serveAll("good.test", "api.good.test", "plain.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	basic := func(s string) string { return "Basic " + base64.StdEncoding.EncodeToString([]byte(s)) }
	for _, http2 := range []bool{false, true} {
		c := b.client(r.pool, http2)
		for _, host := range []string{"good.test", "api.good.test"} {
			pr, pw := io.Pipe()
			go func() { _, _ = io.WriteString(pw, "form="+thePlace); _ = pw.Close() }()
			q, err := http.NewRequestWithContext(t.Context(), "POST", "https://"+host+"/p/"+thePlace+"?q="+thePlace, pr)
			if err != nil {
				t.Fatal(err)
			}
			q.Trailer = http.Header{"X-Trail": nil}
			for k, v := range map[string]string{"X-Key": thePlace, "Authorization": basic("user:" + thePlace), "Cookie": "a=1; k=" + thePlace, "User-Agent": "agent " + thePlace + "/1",
				"Content-Type": "application/x-www-form-urlencoded", "X-Other": otherPlace} {
				q.Header.Set(k, v)
			}
			q.Body = &trailing{ReadCloser: pr, q: q}
			resp, err := c.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			resp.Body.Close()
			got := h.last(t)
			if got.host != host || got.uri != "/p/"+thePlace+"?q="+thePlace || got.body != "form="+thePlace || got.trailer.Get("X-Trail") != thePlace {
				t.Errorf("a value is where none belongs: %+v", got)
			}
			for k, want := range map[string]string{"X-Key": theValue, "Authorization": basic("user:" + theValue), "Cookie": "a=1; k=" + theValue, "User-Agent": "agent " + theValue + "/1", "X-Other": otherPlace} {
				if v := got.header.Get(k); v != want {
					t.Errorf("http2 %v: %s is %q, want %q", http2, k, v, want)
				}
			}
		}
	}
	last := r.last(b.id)
	if want := "the request carries the value of API; the placeholder of OTHER goes without its value: the host is not one of its destinations"; last.Reason != want {
		t.Errorf("the log says %+v", last)
	}
	if all := misuses(); len(all) != 4 || all[0] != (misuse{b.id, "OTHER", "good.test", "the host is not one of its destinations"}) {
		t.Errorf("misuses %v", all)
	}
	// What goes without TLS goes as it is, and is told.
	for path, want := range map[string]string{"/": thePlace, "/" + thePlace: "", "/?x=" + thePlace: ""} {
		before := len(misuses())
		request(t, b.client(nil, false), "GET", "http://good.test"+path, map[string]string{"X-Key": want, "Authorization": basic("u:" + want)}, nil)
		if got := h.last(t); got.header.Get("X-Key") != want || got.header.Get("Authorization") != basic("u:"+want) || got.uri != path {
			t.Errorf("plain HTTP: %+v", got)
		}
		if all := misuses(); len(all) != before+1 || all[before] != (misuse{b.id, "API", "good.test", "the request is plain HTTP"}) {
			t.Errorf("%s: misuses %v", path, all)
		}
	}
	if d := r.last(b.id); !strings.Contains(d.Reason, "plain HTTP") {
		t.Errorf("the log says %+v", d)
	}
	// Headers of the connection go nowhere, and hold no value either.
	conn := b.raw(80)
	fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: good.test\r\nConnection: x-mine\r\nX-Mine: %[1]s\r\nProxy-Authorization: %[1]s\r\n\r\n", thePlace)
	if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || resp.StatusCode != 200 {
		t.Fatal(err)
	}
	if got := h.last(t); got.header.Get("X-Mine") != "" || got.header.Get("Proxy-Authorization") != "" {
		t.Errorf("headers of the connection went on: %v", got.header)
	}
	text, err := json.Marshal(r.log(b.id))
	if err != nil || bytes.Contains(text, []byte(theValue)) || bytes.Contains(text, []byte(thePlace)) {
		t.Errorf("the log holds what it must not: %s %v", text, err)
	}
}

// trailing sets a trailer when the body has ended.
type trailing struct {
	io.ReadCloser
	q *http.Request
}

func (b *trailing) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err == io.EOF {
		b.q.Trailer.Set("X-Trail", thePlace)
	}
	return n, err
}

// A connection is kept over requests; the value is that of each, from the first after it has changed.
func TestValuesAreReadForEachRequest(t *testing.T) {
	r, _ := secretive(t)
	h := r.serveAll("good.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	for _, http2 := range []bool{false, true} {
		c := b.client(r.pool, http2)
		b.set(Subject{Policy: b.subjectNow().Policy, Secrets: held(theValue)})
		for i, want := range []string{theValue, theValue, nextValue, nextValue, thePlace} {
			switch i {
			case 2:
				b.set(Subject{Policy: b.subjectNow().Policy, Secrets: held(nextValue)})
			case 4: // removed by force: the connection is kept, and nothing is put in any more
				b.set(Subject{Policy: b.subjectNow().Policy})
			}
			if request(t, c, "GET", "https://good.test/", map[string]string{"X-Key": thePlace}, nil); h.last(t).header.Get("X-Key") != want {
				t.Errorf("http2 %v, request %d: %q, want %q", http2, i, h.last(t).header.Get("X-Key"), want)
			}
		}
	}
	// At once, over one connection.
	b.set(Subject{Policy: b.subjectNow().Policy, Secrets: held(theValue)})
	c := b.client(r.pool, true)
	var group sync.WaitGroup
	for range 50 {
		group.Go(func() {
			if _, text := request(t, c, "GET", "https://good.test/echo", map[string]string{"X-Key": thePlace}, nil); !strings.Contains(text, "<"+thePlace+">") {
				t.Errorf("echoed %q", text)
			}
		})
	}
	group.Wait()
}

func (b *box) subjectNow() Subject {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.subjects[b.id]
}

func TestAnEchoHoldsNoValue(t *testing.T) {
	r, _ := secretive(t)
	h := r.serveAll("good.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	clean := func(t testing.TB, where string, texts ...string) {
		t.Helper()
		for _, text := range texts {
			for _, form := range []string{theValue, "sk-live-0123456789", base64.StdEncoding.EncodeToString([]byte("u:" + theValue))[4:20]} {
				if strings.Contains(text, form) {
					t.Errorf("%s holds the value: %.200q", where, text)
				}
			}
		}
	}
	for _, http2 := range []bool{false, true} {
		c := b.client(r.pool, http2)
		t.Run(fmt.Sprintf("http2 %v", http2), func(t *testing.T) {
			var early []string
			ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(_ int, hd textproto.MIMEHeader) error {
				early = append(early, fmt.Sprint(hd))
				return nil
			}})
			q, _ := http.NewRequestWithContext(ctx, "GET", "https://good.test/echo", nil)
			q.Header.Set("X-Key", thePlace)
			q.Header.Set("Authorization", "Basic "+base64.StdEncoding.EncodeToString([]byte("u:"+thePlace)))
			q.Header.Set("Range", "bytes=0-3")
			q.Header.Set("Accept-Encoding", "br, gzip")
			resp, err := c.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			body, err := io.ReadAll(resp.Body)
			if err != nil {
				t.Fatal(err)
			}
			clean(t, "the body", string(body))
			clean(t, "a header", fmt.Sprint(resp.Header))
			clean(t, "a trailer", fmt.Sprint(resp.Trailer))
			clean(t, "an early hint", early...)
			if !strings.HasPrefix(string(body), "<"+thePlace+"> ") || resp.Header.Get("X-Echo") != thePlace || resp.Header.Get("Etag") != `"v1"` ||
				resp.Trailer.Get("Grpc-Message") != "no such key: "+thePlace || resp.Trailer.Get("X-Late") != thePlace || len(early) != 1 || !strings.Contains(early[0], thePlace) {
				t.Errorf("%q\n%v\n%v\n%v", body, resp.Header, resp.Trailer, early)
			}
			if resp.Header.Get("Content-Md5") != "" || resp.Header.Get("Content-Digest") != "" {
				t.Errorf("a digest of a body that may have changed: %v", resp.Header)
			}
			if got := h.last(t).header; got.Get("Range") != "" || got.Get("Accept-Encoding") != "gzip" || got.Get("X-Key") != theValue {
				t.Errorf("asked for %v", got)
			}
			resp2, text := request(t, c, "GET", "https://good.test/length", map[string]string{"X-Key": thePlace}, nil)
			if clean(t, "the body", text); !strings.HasPrefix(text, "<"+thePlace+"> ") || resp2.Header.Get("Content-Length") != "" || h.last(t).header.Get("Accept-Encoding") != "identity" {
				t.Errorf("%q %v", text, resp2.Header)
			}
			for _, coding := range []string{"gzip", "br", "zstd", "identity"} {
				resp, text := request(t, c, "GET", "https://good.test/coded?c="+coding, map[string]string{"X-Key": thePlace, "Accept-Encoding": "gzip"}, nil)
				clean(t, coding, text)
				if n := strings.Count(text, "<"+thePlace+">"); n != 1000 || coding != "identity" && resp.Header.Get("Content-Encoding") != "" {
					t.Errorf("%s: %d echoes, %v", coding, n, resp.Header)
				}
			}
			for path, want := range map[string]int{"coded?c=compress": 502, "coded?c=gzip,gzip": 502, "206": 502, "204": 204, "304": 304,
				"late": 200, "announced": 200, "messages": 502} {
				resp, text := request(t, c, "GET", "https://good.test/"+path, map[string]string{"X-Key": thePlace, "Grpc-Accept-Encoding": "gzip"}, nil)
				if clean(t, path, text, fmt.Sprint(resp.Header), fmt.Sprint(resp.Trailer)); resp.StatusCode != want {
					t.Errorf("%s: %d %s", path, resp.StatusCode, text)
				}
				if got := h.last(t).header.Get("Grpc-Accept-Encoding"); got != "" || resp.Header.Get("Alt-Svc") != "" {
					t.Errorf("%s: messages may be in %q, other ways are %q", path, got, resp.Header.Get("Alt-Svc"))
				}
			}
			resp3, _ := request(t, c, "HEAD", "https://good.test/length", map[string]string{"X-Key": thePlace}, nil)
			if resp3.StatusCode != 200 || resp3.Header.Get("Content-Length") == "" {
				t.Errorf("HEAD: %d %v", resp3.StatusCode, resp3.Header)
			}
			resp3, _ = request(t, c, "HEAD", "https://good.test/coded?c=gzip", map[string]string{"X-Key": thePlace}, nil)
			if resp3.StatusCode != 200 || resp3.Header.Get("Content-Length") != "" || resp3.Header.Get("Content-Encoding") != "" {
				t.Errorf("HEAD of what is encoded: %d %v", resp3.StatusCode, resp3.Header)
			}
			// Without a value nothing is touched.
			resp4, text := request(t, c, "GET", "https://good.test/coded?c=compress", map[string]string{"X-Key": "none", "Range": "bytes=0-3"}, nil)
			if resp4.StatusCode != 200 || resp4.Header.Get("Content-Length") == "" || h.last(t).header.Get("Range") == "" || !strings.Contains(text, "<none>") {
				t.Errorf("without a value: %d %v", resp4.StatusCode, resp4.Header)
			}
			// A redirect is answered; the request after it is the client's own.
			resp5, _ := request(t, c, "GET", "https://good.test/redirect", map[string]string{"X-Key": thePlace}, nil)
			if to := resp5.Header.Get("Location"); to != "https://evil.test/caught?k="+thePlace {
				t.Errorf("redirected to %q", to)
			}
		})
	}
}

func TestStreamsOfRequestsWithValues(t *testing.T) {
	r, _ := secretive(t)
	step := make(chan string)
	mux := http.NewServeMux()
	mux.HandleFunc("/events", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		for s := range step {
			fmt.Fprintf(w, "data: %s %s\n\n", s, q.Header.Get("X-Key"))
			w.(http.Flusher).Flush()
		}
	})
	mux.HandleFunc("/turns", func(w http.ResponseWriter, q *http.Request) { // as gRPC
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Trailer", "Grpc-Status")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		lines := bufio.NewScanner(q.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "%s %s\n", lines.Text(), q.Header.Get("X-Key"))
			w.(http.Flusher).Flush()
		}
		w.Header().Set("Grpc-Status", "0")
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, q *http.Request) {
		c, err := websocket.Accept(w, q, &websocket.AcceptOptions{CompressionMode: websocket.CompressionContextTakeover, Subprotocols: []string{q.Header.Get("X-Key")}})
		if err != nil {
			return
		}
		defer c.CloseNow()
		c.SetReadLimit(1 << 20)
		for {
			kind, data, err := c.Read(q.Context())
			if err != nil {
				return
			}
			_ = c.Write(q.Context(), kind, []byte(q.Header.Get("X-Key")+" "+string(data)))
		}
	})
	r.host("good.test", public, mux)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)})
	for _, http2 := range []bool{false, true} {
		c := b.client(r.pool, http2)
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		q, _ := http.NewRequestWithContext(ctx, "GET", "https://good.test/events", nil)
		q.Header.Set("X-Key", thePlace)
		resp, err := c.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		lines := bufio.NewScanner(resp.Body)
		for _, s := range []string{"one", "two", "three"} {
			step <- s
			if !lines.Scan() || lines.Text() != "data: "+s+" "+thePlace {
				t.Fatalf("got %q %v", lines.Text(), lines.Err())
			}
			lines.Scan()
		}
		resp.Body.Close()
		close(step)
		step = make(chan string)

		pr, pw := io.Pipe()
		q, _ = http.NewRequestWithContext(ctx, "POST", "https://good.test/turns", pr)
		q.Header.Set("X-Key", thePlace)
		if resp, err = c.Do(q); err != nil {
			t.Fatal(err)
		}
		lines = bufio.NewScanner(resp.Body)
		for _, s := range []string{"a", thePlace} { // a body is not changed on its way out
			fmt.Fprintln(pw, s)
			if !lines.Scan() || lines.Text() != s+" "+thePlace {
				t.Fatalf("got %q %v", lines.Text(), lines.Err())
			}
		}
		pw.Close()
		for lines.Scan() {
		}
		if resp.Body.Close(); resp.Trailer.Get("Grpc-Status") != "0" {
			t.Errorf("trailers %v", resp.Trailer)
		}
		cancel()
	}
	client := *b.client(r.pool, false)
	client.Timeout = 0
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ws, resp, err := websocket.Dial(ctx, "wss://good.test/ws", &websocket.DialOptions{HTTPClient: &client, HTTPHeader: http.Header{"X-Key": {thePlace}},
		CompressionMode: websocket.CompressionContextTakeover, Subprotocols: []string{thePlace}})
	if err != nil {
		t.Fatal(err)
	}
	defer ws.CloseNow()
	if resp.Header.Get("Sec-Websocket-Protocol") != thePlace || resp.Header.Get("Sec-Websocket-Extensions") != "" {
		t.Errorf("the handshake's answer: %v", resp.Header)
	}
	ws.SetReadLimit(1 << 20)
	for _, text := range []string{"hello", thePlace, strings.Repeat("long ", 30000)} {
		if err := ws.Write(ctx, websocket.MessageText, []byte(text)); err != nil {
			t.Fatal(err)
		}
		if _, data, err := ws.Read(ctx); err != nil || string(data) != thePlace+" "+text {
			t.Fatalf("%.100s %v", data, err)
		}
	}
}

// Where no value may go nothing is taken apart: the host's own certificate is seen.
func TestOnlyDestinationsAreTakenApart(t *testing.T) {
	r, _ := secretive(t)
	h := r.serveAll("good.test", "elsewhere.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	if _, err := b.client(r.world.pool, true).Get("https://good.test/"); err == nil {
		t.Error("a destination showed its own certificate")
	}
	request(t, b.client(r.world.pool, true), "GET", "https://elsewhere.test/", map[string]string{"X-Key": thePlace}, nil)
	if got := h.last(t); got.host != "elsewhere.test" || got.header.Get("X-Key") != thePlace {
		t.Errorf("%+v", got)
	}
	// A host in which the certificate does not agree gets nothing.
	r.serve("api.good.test", "198.51.100.60", h, r.world.issue(t, leafOptions{name: "good.test"}), true)
	r.serve("old.good.test", "198.51.100.61", h, r.world.issue(t, leafOptions{name: "old.good.test", expired: true}), true)
	r.serve("self.good.test", "198.51.100.62", h, r.world.issue(t, leafOptions{name: "self.good.test", selfly: true}), true)
	for _, host := range []string{"api.good.test", "old.good.test", "self.good.test"} {
		before := h.count()
		resp, text := request(t, b.client(r.pool, true), "GET", "https://"+host+"/", map[string]string{"X-Key": thePlace}, nil)
		if resp.StatusCode != 502 || !strings.Contains(text, `"rule":"certificate"`) || !strings.Contains(text, host) || h.count() != before {
			t.Errorf("%s: %d %s", host, resp.StatusCode, text)
		}
	}
	// Nor does one that only the request names.
	c := b.client(r.pool, false)
	q, _ := http.NewRequestWithContext(t.Context(), "GET", "https://good.test/", nil)
	q.Host = "elsewhere.test"
	q.Header.Set("X-Key", thePlace)
	before := h.count()
	if resp, err := c.Do(q); err != nil || resp.StatusCode != 400 || h.count() != before {
		t.Errorf("another Host: %v %v", resp, err)
	}
}

// A refusal says of the placeholder too.
func TestMisuseOnTheWayToWhatIsRefused(t *testing.T) {
	r, misuses := secretive(t)
	r.serveAll("good.test")
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)})
	resp, _ := request(t, b.client(r.pool, false), "GET", "https://evil.test/"+thePlace, nil, nil)
	if d := r.last(b.id); resp.StatusCode != 403 || d.Verdict != "deny" || !strings.Contains(d.Reason, "the placeholder of API goes without its value") {
		t.Errorf("%d %+v", resp.StatusCode, d)
	}
	if all := misuses(); len(all) != 1 || all[0].host != "evil.test" {
		t.Errorf("misuses %v", all)
	}
}

// Without a policy everything stays open, and a name that only the sandbox knows leads where the sandbox says.
func TestSecretsWithoutAPolicy(t *testing.T) {
	r, _ := secretive(t)
	h := r.serveAll("good.test", "elsewhere.test")
	b := r.box(Subject{Policy: policy.Unrestricted().Proxied(), Secrets: held(theValue)})
	request(t, b.client(r.pool, true), "GET", "https://good.test/", map[string]string{"X-Key": thePlace}, nil)
	if got := h.last(t); got.header.Get("X-Key") != theValue {
		t.Errorf("%+v", got)
	}
	if d := r.last(b.id); d.Rule != "none" || d.Verdict != "allow" || d.Reason != "the sandbox has no policy; the request carries the value of API" {
		t.Errorf("%+v", d)
	}
	request(t, b.client(r.world.pool, true), "GET", "https://elsewhere.test/", nil, nil)
	request(t, b.client(nil, false), "GET", "http://elsewhere.test/", nil, nil)
	r.mu.Lock()
	r.names["inside.test"] = []netip.Addr{netip.MustParseAddr("10.0.0.1")}
	r.mu.Unlock()
	if resp, text := request(t, b.client(nil, false), "GET", "http://inside.test/", nil, nil); resp.StatusCode != 403 || !strings.Contains(text, `"rule":"private"`) {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
	way, refused := r.proxy.judge(t.Context(), b.id, policy.Unrestricted().Proxied(), "unknown.test", netip.MustParseAddr("198.51.100.40"), 443)
	if refused != nil || !way.claimed || way.verdict.Rule != "none" || len(way.addrs) != 1 {
		t.Errorf("%+v %+v", way, refused)
	}
	if _, refused = r.proxy.judge(t.Context(), b.id, policy.Unrestricted().Proxied(), "unknown.test", netip.MustParseAddr("192.168.1.1"), 443); refused == nil || refused.rule != "private" {
		t.Errorf("%+v", refused)
	}
}

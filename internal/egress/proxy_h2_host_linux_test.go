package egress

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/netip"
	"net/textproto"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// frames is one end of a connection of HTTP/2 that says whatever it likes. Errors of writing are not looked at: the other side may
// have had enough.
type frames struct {
	*http2.Framer
	conn  net.Conn
	table *hpack.Encoder
	block bytes.Buffer
}

func newFrames(conn net.Conn) *frames {
	f := &frames{Framer: http2.NewFramer(conn, conn), conn: conn}
	f.AllowIllegalWrites = true
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	f.table = hpack.NewEncoder(&f.block)
	return f
}

// coded are fields as HPACK writes them, which Huffman codes what becomes shorter by it.
func (f *frames) coded(fields ...string) []byte {
	f.block.Reset()
	for i := 0; i+1 < len(fields); i += 2 {
		_ = f.table.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1]})
	}
	return bytes.Clone(f.block.Bytes())
}

// head sends a block of fields, in pieces of up to n bytes, the first of which is a frame of headers.
func (f *frames) head(stream uint32, end bool, n int, block []byte) {
	for first := true; ; first = false {
		part := block[:min(n, len(block))]
		block = block[len(part):]
		var err error
		if first {
			err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: part, EndStream: end, EndHeaders: len(block) == 0})
		} else {
			err = f.WriteContinuation(stream, len(block) == 0, part)
		}
		if err != nil || len(block) == 0 {
			return
		}
	}
}

const wholeFrame = 16 << 10

// ok begins an answer.
func (f *frames) ok(stream uint32, fields ...string) {
	f.head(stream, false, wholeFrame, f.coded(append([]string{":status", "200"}, fields...)...))
}

// asked is a request as a wildHost gets it.
type asked struct {
	*http2.MetaHeadersFrame
	stream uint32
}

func (a asked) get(name string) string {
	for _, field := range a.Fields {
		if field.Name == name {
			return field.Value
		}
	}
	return ""
}

// wildHost serves name at addr, by TLS and HTTP/2 alone: answer does with each request what it likes, one after the other, and the
// connection ends where it says so. What the proxy sends beside requests goes unread where deaf.
func (r *rig) wildHost(name, addr string, answer func(f *frames, q asked) (more bool)) {
	r.t.Helper()
	config := &tls.Config{Certificates: []tls.Certificate{r.world.issue(r.t, leafOptions{name: name})}, NextProtos: []string{"h2"}}
	l := listenLocal(r.t)
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				defer context.AfterFunc(ctx, func() { _ = raw.Close() })()
				defer raw.Close()
				conn := tls.Server(raw, config)
				preface := make([]byte, len(http2.ClientPreface))
				if _, err := io.ReadFull(conn, preface); err != nil {
					return
				}
				f := newFrames(conn)
				_ = f.WriteSettings()
				for {
					frame, err := f.ReadFrame()
					if err != nil {
						return
					}
					if q, ok := frame.(*http2.MetaHeadersFrame); ok && !answer(f, asked{q, q.StreamID}) {
						return
					}
				}
			})
		}
	})
	r.t.Cleanup(func() { cancel(); _ = l.Close(); group.Wait() })
	a := netip.MustParseAddr(addr)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.names[name] = []netip.Addr{a}
	r.servers[netip.AddrPortFrom(a, 443)] = l.Addr().String()
}

// heard is all that a program hears of the answer to one request.
type heard struct {
	status int
	body   string // the last of it
	length int
	rest   string // headers, trailers, early answers
	early  int
	err    error
}

// hear asks for a URL with the placeholder, and takes up to most bytes of the answer.
func hear(ctx context.Context, c *http.Client, url string, most int) (h heard) {
	var rest strings.Builder
	ctx, cancel := context.WithCancel(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{Got1xxResponse: func(code int, header textproto.MIMEHeader) error {
		h.early++
		if h.early < 10 {
			fmt.Fprintln(&rest, code, header)
		}
		return nil
	}}))
	defer cancel()
	defer func() { h.rest = rest.String() }()
	q, err := http.NewRequestWithContext(ctx, "GET", url, nil)
	if err != nil {
		return heard{err: err}
	}
	q.Header.Set("X-Key", thePlace)
	resp, err := c.Do(q)
	if err != nil {
		h.err = err
		return h
	}
	defer resp.Body.Close()
	h.status = resp.StatusCode
	fmt.Fprintln(&rest, resp.Header)
	buf := make([]byte, 64<<10)
	for h.length < most {
		n, err := resp.Body.Read(buf)
		h.length += n
		h.body = h.body[min(len(h.body), max(0, len(h.body)+n-4096)):] + string(buf[max(0, n-4096):n])
		if err != nil {
			if err != io.EOF {
				h.err = err
			}
			break
		}
	}
	fmt.Fprintln(&rest, resp.Trailer)
	return h
}

// compressed is text between two walls of zeros, of which little is left, in each coding.
func compressed(t testing.TB, coding, text string) []byte {
	t.Helper()
	var b bytes.Buffer
	var enc io.WriteCloser
	switch coding {
	case "gzip":
		enc = gzip.NewWriter(&b)
	case "br":
		enc = brotli.NewWriterLevel(&b, 1)
	case "zstd":
		var err error
		if enc, err = zstd.NewWriter(&b, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(zstd.SpeedFastest)); err != nil {
			t.Fatal(err)
		}
	}
	zeros := make([]byte, 1<<20)
	for i := range 2 * bombSize >> 20 {
		if i == bombSize>>20 {
			_, _ = io.WriteString(enc, text)
		}
		_, _ = enc.Write(zeros)
	}
	_, _ = io.WriteString(enc, text)
	if err := enc.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

const bombSize = 16 << 20

// data sends a body within the windows of one that reads.
func (f *frames) data(stream uint32, end bool, body []byte) {
	for len(body) > 0 {
		n := min(len(body), wholeFrame)
		if f.WriteData(stream, end && n == len(body), body[:n]) != nil {
			return
		}
		body = body[n:]
	}
}

// many are more fields than a head may have.
func many() (fields []string) {
	for i := range 3000 {
		fields = append(fields, fmt.Sprintf("x-%x", i), "v")
	}
	return fields
}

// TestHostileHosts: whatever a host of HTTP/2 does with a request that carries a value, the value does not come back, and the request
// ends: with an answer that holds the placeholder, or with a failure that the program can tell from one.
func TestHostileHosts(t *testing.T) {
	log.SetOutput(io.Discard) // net/http says there what hosts do
	t.Cleanup(func() { log.SetOutput(os.Stderr) })
	const flood = 10000
	status := func(code string) func(*frames, asked, string) {
		return func(f *frames, q asked, key string) {
			f.head(q.stream, false, wholeFrame, f.coded(":status", code, "upgrade", "websocket", "connection", "upgrade", "x", key))
			f.whole(q.stream, key)
		}
	}
	coded := func(coding string) func(*frames, asked, string) {
		return func(f *frames, q asked, key string) {
			f.ok(q.stream, "content-encoding", coding)
			f.data(q.stream, true, compressed(t, coding, "<"+key+">"))
		}
	}
	const answered, fails = "<" + thePlace + ">", "" // what the body of an answer ends in
	for _, wild := range []struct {
		name   string
		ends   string
		answer func(f *frames, q asked, key string)
	}{
		{"the value in pieces", answered, func(f *frames, q asked, key string) {
			f.head(q.stream, false, 1, f.coded(":status", "200", "x-echo", key, "x-"+strings.Map(inName, strings.ToLower(key)), key))
			for _, c := range []byte("<" + key + ">") {
				_ = f.WriteDataPadded(q.stream, false, []byte{c}, make([]byte, 3))
				_ = f.WriteData(q.stream, false, nil)
			}
			f.head(q.stream, true, 1, f.coded("x-late", key, "grpc-message", url.QueryEscape(key)))
		}},
		{"headers in the table", answered, func(f *frames, q asked, key string) { // by a number from the second on
			for range 40 {
				f.head(q.stream, false, wholeFrame, f.coded(":status", "103", "link", key))
			}
			f.ok(q.stream, "link", key)
			f.whole(q.stream, key)
		}},
		{"early answers without number", answered, func(f *frames, q asked, key string) {
			for range flood {
				f.head(q.stream, false, wholeFrame, f.coded(":status", "103", "link", key))
			}
			f.ok(q.stream)
			f.whole(q.stream, key)
		}},
		{"resets without number", answered, func(f *frames, q asked, key string) {
			for i := range uint32(flood) {
				_ = f.WriteRSTStream(2*i+1001, http2.ErrCodeCancel)
			}
			f.ok(q.stream)
			f.whole(q.stream, key)
		}},
		{"pings and frames of no kind", answered, func(f *frames, q asked, key string) {
			for range flood / 10 {
				_ = f.WritePing(false, [8]byte{1})
				_ = f.WriteRawFrame(0xee, 0, q.stream, []byte(key))
				_ = f.WriteWindowUpdate(q.stream, 1)
			}
			f.ok(q.stream)
			f.whole(q.stream, key)
		}},
		{"a bomb of gzip", answered, coded("gzip")},
		{"a bomb of brotli", answered, coded("br")},
		{"a bomb of zstd", answered, coded("zstd")},
		{"settings without number", fails, func(f *frames, q asked, key string) { // more than before an answer may come
			for i := range uint32(5 * flood) {
				if f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: i}, http2.Setting{ID: http2.SettingHeaderTableSize, Val: i}) != nil {
					return
				}
			}
		}},
		{"it sends each request away", fails, func(f *frames, q asked, key string) { _ = f.WriteGoAway(0, http2.ErrCodeNo, []byte(key)) }},
		{"it refuses each request", fails, func(f *frames, q asked, key string) { _ = f.WriteRSTStream(q.stream, http2.ErrCodeRefusedStream) }},
		{"it resets the request", fails, func(f *frames, q asked, key string) { _ = f.WriteRSTStream(q.stream, http2.ErrCodeInternal) }},
		{"it resets the answer", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream, "x", key)
			_ = f.WriteData(q.stream, false, []byte("<"+key+"> "+key))
			_ = f.WriteRSTStream(q.stream, http2.ErrCodeInternal)
		}},
		{"it goes amid the answer", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream)
			_ = f.WriteData(q.stream, false, []byte("<"+key[:len(key)-1]))
			_ = f.WriteGoAway(q.stream, http2.ErrCodeEnhanceYourCalm, []byte(key))
			_ = f.conn.Close()
		}},
		{"status 101", fails, status("101")},
		{"status 1000", fails, status("1000")},
		{"status -1", fails, status("-1")},
		{"status 99", fails, status("99")},
		{"no status", fails, func(f *frames, q asked, key string) { f.head(q.stream, true, wholeFrame, f.coded("x", key)) }},
		{"two", fails, func(f *frames, q asked, key string) {
			f.head(q.stream, true, wholeFrame, f.coded(":status", "200", ":status", "500", "x", key))
		}},
		{"too many headers", fails, func(f *frames, q asked, key string) { f.ok(q.stream, many()...); f.whole(q.stream, key) }},
		{"too many trailers", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream)
			_ = f.WriteData(q.stream, false, []byte("<"+key+">"))
			f.head(q.stream, true, wholeFrame, f.coded(append(many(), "x-late", key)...))
		}},
		{"a head without end", fails, func(f *frames, q asked, key string) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: q.stream, BlockFragment: f.coded(":status", "200")})
			for range flood {
				if f.WriteContinuation(q.stream, false, f.coded("x", key)) != nil {
					return
				}
			}
		}},
		{"nothing without end, as a head", fails, func(f *frames, q asked, key string) {
			_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: q.stream, BlockFragment: f.coded(":status", "200")})
			for f.WriteContinuation(q.stream, false, nil) == nil {
			}
		}},
		{"a bomb of HPACK", fails, func(f *frames, q asked, key string) {
			block := f.coded(":status", "200", "x", strings.Repeat(key, 150))
			for range flood {
				block = append(block, 0x80|62) // the last that went into the table
			}
			f.head(q.stream, true, wholeFrame, block)
		}},
		{"what is in no table", fails, func(f *frames, q asked, key string) {
			f.head(q.stream, true, wholeFrame, append(f.coded(":status", "200"), 0xff, 0xff, 0xff, 0xff, 0x0f))
		}},
		{"a push", fails, func(f *frames, q asked, key string) {
			_ = f.WritePushPromise(http2.PushPromiseParam{StreamID: q.stream, PromiseID: 2, EndHeaders: true,
				BlockFragment: f.coded(":method", "GET", ":scheme", "https", ":path", "/"+key, ":authority", "good.test")})
		}},
		{"a line end in a header", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream, "x", "a\r\nset-cookie: "+key)
			f.whole(q.stream, key)
		}},
		{"a header with a colon", fails, func(f *frames, q asked, key string) { f.ok(q.stream, "x: "+key, "y"); f.whole(q.stream, key) }},
		{"more than its length", fails, func(f *frames, q asked, key string) { f.ok(q.stream, "content-length", "5"); f.whole(q.stream, key) }},
		{"less than its length", fails, func(f *frames, q asked, key string) { f.ok(q.stream, "content-length", "500"); f.whole(q.stream, key) }},
		{"two heads", fails, func(f *frames, q asked, key string) { f.ok(q.stream); f.ok(q.stream, "x", key); f.whole(q.stream, key) }},
		{"data before a head", fails, func(f *frames, q asked, key string) { f.whole(q.stream, key) }},
		{"data for nobody", fails, func(f *frames, q asked, key string) { f.whole(q.stream+100, key) }},
		{"more than the window", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream)
			f.data(q.stream, true, make([]byte, 16<<20))
		}},
		{"a frame that is too long", fails, func(f *frames, q asked, key string) {
			f.ok(q.stream)
			_ = f.WriteData(q.stream, true, make([]byte, 1<<20))
		}},
		{"a window that is none", fails, func(f *frames, q asked, key string) {
			_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 31})
		}},
		{"a window beyond all", fails, func(f *frames, q asked, key string) {
			for range 3 {
				_ = f.WriteWindowUpdate(0, 1<<31-1)
			}
		}},
	} {
		t.Run(wild.name, func(t *testing.T) {
			t.Parallel()
			r, _ := secretive(t)
			var times atomic.Int32
			r.wildHost("good.test", public, func(f *frames, q asked) bool {
				if times.Add(1); q.get("x-key") != theValue {
					t.Errorf("asked with %q", q.get("x-key"))
				}
				wild.answer(f, q, theValue)
				return true
			})
			b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)})
			var group sync.WaitGroup
			for _, http2 := range []bool{false, true} {
				group.Go(func() {
					h := hear(t.Context(), b.client(r.pool, http2), "https://good.test/", 1<<30)
					if all := h.rest + h.body + fmt.Sprint(h.err); strings.Contains(all, theValue) || strings.Contains(all, strings.Map(inName, theValue)) {
						t.Errorf("http2 %v: the value came back: %.2000s", http2, all)
					}
					ok := h.status == 200 && h.err == nil
					switch wild.ends {
					case answered:
						ok = ok && strings.HasSuffix(h.body, answered)
					case fails:
						ok = !ok && (h.err != nil || h.status >= 500 && h.status < 600)
					}
					if errors.Is(h.err, context.DeadlineExceeded) || !ok {
						t.Errorf("http2 %v: status %d, error %v, %d bytes that end in %.200q, %.500s", http2, h.status, h.err, h.length, h.body, h.rest)
					}
				})
			}
			group.Wait()
			if n := times.Load(); n > 2*(maxTries+1) {
				t.Errorf("the host was asked %d times", n)
			}
			c := r.proxy.clients[b.id]
			r.proxy.Forget(b.id)
			c.returned(t)
		})
	}
}

// inName is a byte of a value as it may stand in the name of a header.
func inName(c rune) rune {
	if c == '/' || c == '+' {
		return '-'
	}
	return c
}

// whole ends an answer with a body.
func (f *frames) whole(stream uint32, key string) { _ = f.WriteData(stream, true, []byte("<"+key+">")) }

// TestOneConnectionManyRequests: of the requests on one connection those that carry a value are watched, however their answers are
// mixed, and the others are left as they are.
func TestOneConnectionManyRequests(t *testing.T) {
	const each = 20
	r, _ := secretive(t)
	var mu sync.Mutex
	conns := map[net.Conn]bool{}
	var waiting []asked
	r.wildHost("good.test", public, func(f *frames, q asked) bool {
		mu.Lock()
		defer mu.Unlock()
		conns[f.conn] = true
		if q.get("x-key") == "" { // so that there is a connection
			f.whole(q.stream, "")
			return true
		}
		if waiting = append(waiting, q); len(waiting) < 2*each {
			return true
		}
		for _, q := range waiting {
			f.ok(q.stream, "x-echo", q.get("x-key"))
		}
		for i := range 1 + len(theValue) { // a byte of each in turn
			for _, q := range waiting {
				if key := q.get("x-key"); i < len(key) {
					_ = f.WriteData(q.stream, false, []byte{key[i]})
				} else if i == len(key) {
					f.head(q.stream, true, wholeFrame, f.coded("x-late", key))
				}
			}
		}
		return true
	})
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)})
	for _, http2 := range []bool{false, true} {
		c := b.client(r.pool, http2)
		mu.Lock()
		waiting = nil
		mu.Unlock()
		if _, err := c.Get("https://good.test/"); http2 && err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		for range each {
			for _, key := range []string{thePlace, "none of ours"} {
				group.Go(func() {
					resp, text := request(t, c, "GET", "https://good.test/", map[string]string{"X-Key": key}, nil)
					if text != key || resp.Header.Get("X-Echo") != key || resp.Trailer.Get("X-Late") != key {
						t.Errorf("http2 %v: sent %q, got %q, %v, %v", http2, key, text, resp.Header, resp.Trailer)
					}
				})
			}
		}
		group.Wait()
	}
	mu.Lock()
	defer mu.Unlock()
	if len(conns) != 1 {
		t.Errorf("%d connections", len(conns))
	}
}

// TestHostsThatTakeNothing: a host that floods and reads nothing holds up what it was sent, and nothing of another sandbox; when the
// sandbox goes, so does all that waits.
func TestHostsThatTakeNothing(t *testing.T) {
	log.SetOutput(io.Discard)
	defer log.SetOutput(os.Stderr)
	r, _ := secretive(t)
	stalled, gone := make(chan struct{}), make(chan struct{})
	var once, end sync.Once
	r.wildHost("good.test", public, func(f *frames, q asked) bool {
		if q.get("x-quick") != "" {
			f.ok(q.stream)
			f.whole(q.stream, "quick")
			return true
		}
		_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1<<31 - 1}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1<<24 - 1})
		_ = f.WriteWindowUpdate(0, 1<<30)
		f.ok(q.stream)
		for i := 0; f.WritePing(false, [8]byte{1}) == nil; i++ {
			if i > 1000 {
				once.Do(func() { close(stalled) })
			}
		}
		end.Do(func() { close(gone) })
		return false
	})
	s := Subject{Policy: policyOf(t, "allow good.test"), Secrets: held(theValue)}
	bad, good := r.box(s), r.box(s)
	c := bad.client(r.pool, true)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var group sync.WaitGroup
	for range 40 {
		group.Go(func() {
			q, _ := http.NewRequestWithContext(ctx, "POST", "https://good.test/", endless{})
			q.Header.Set("X-Key", thePlace)
			if resp, err := c.Do(q); err == nil {
				_, _ = io.Copy(io.Discard, resp.Body)
				resp.Body.Close()
			}
		})
	}
	<-stalled
	if resp, text := request(t, good.client(r.pool, true), "GET", "https://good.test/", map[string]string{"X-Key": thePlace, "X-Quick": "1"}, nil); resp.StatusCode != 200 || text != "<quick>" {
		t.Errorf("another sandbox: %d %q", resp.StatusCode, text)
	}
	cancel()
	group.Wait()
	client := r.proxy.clients[bad.id]
	r.proxy.Forget(bad.id)
	client.returned(t)
	select {
	case <-gone:
	case <-time.After(time.Minute):
		t.Error("a connection to a host outlives the sandbox")
	}
	client.mu.Lock()
	defer client.mu.Unlock()
	if client.upstream != 0 || len(client.hosts) != 0 {
		t.Errorf("%d connections to hosts are left, and %d are counted", len(client.hosts), client.upstream)
	}
}

type endless struct{}

func (endless) Read(b []byte) (int, error) { clear(b); return len(b), nil }

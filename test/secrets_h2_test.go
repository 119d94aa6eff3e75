package test

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/useshards/shard/internal/testenv"
)

// TestSecretHTTP2: a sandbox and a destination of its secret that both do their worst over HTTP/2 cost the daemon no more than their
// share, another sandbox goes on, the value does not come back, and when the sandbox goes nothing of it is left.
func TestSecretHTTP2(t *testing.T) {
	t.Parallel()
	trusted, dir := newSigner(t, "trusted"), t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "trusted.pem"), []byte(trusted.pem()), 0o600); err != nil {
		t.Fatal(err)
	}
	d := secretDaemon(t, testenv.Options{Env: []string{"SSL_CERT_DIR=" + dir}})
	lab, got := d.Lab(), &seen{}
	lab.Web().Handle("/seen", got)
	cert := trusted.issue(t, &x509.Certificate{Subject: pkix.Name{CommonName: "wild"}, DNSNames: []string{"*.wild.lab.test"}})
	scripts := wildClients()
	for _, s := range scripts {
		lab.Name(s.Host, "203.0.113.90")
	}
	wild := &wildHost{t: t, open: map[net.Conn]bool{}}
	wild.listen(lab.ListenWorld("tcp", "203.0.113.90:443"), cert)
	const value = "sk-h2/0123456789+abc"
	setSecret(t, d, value, "--dest", "*.wild.lab.test", "--dest", "dest.lab.test", "KEY")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		bad, good := box(t, d, provider, "--secret", "KEY", trustingPython), box(t, d, provider, "--secret", "KEY", trustingPython)
		run := func(scripts map[string]wildClient) testenv.Result {
			data, err := json.Marshal(scripts)
			if err != nil {
				t.Error(err)
			}
			return d.Feed(bytes.NewReader(data), "exec", "-i", bad, "python3", "-c", sendAll)
		}
		// came is what came back on a connection of each, which never holds the value.
		came := func(r testenv.Result) map[string]string {
			t.Helper()
			var coded map[string][]byte
			if err := json.Unmarshal([]byte(r.Stdout), &coded); err != nil || r.Code != 0 {
				t.Fatalf("%v, exit code %d: %.500s %s", err, r.Code, r.Stdout, r.Stderr)
			}
			answers := map[string]string{}
			for name, raw := range coded {
				if answers[name] = said(raw); strings.Contains(answers[name], value) || strings.Contains(answers[name], "sk-h2") {
					t.Errorf("%s: the value came back: %.1000q", name, answers[name])
				}
			}
			return answers
		}
		testenv.Eventually(t, "an echo holds the placeholder", func() (bool, string) {
			text := came(run(map[string]wildClient{"/echo": scripts["/echo"]}))["/echo"]
			return strings.HasPrefix(text, "x-echo: mock-KEY\n<mock-KEY>x-late: mock-KEY\n"), text
		})
		before, most := testenv.UsageOf(d.PID()), int64(0)
		done := make(chan testenv.Result, 1)
		go func() { done <- run(scripts) }()
		var r testenv.Result
		for ended := false; !ended; {
			if lines := send(t, d, good, "KEY", "https://dest.lab.test/seen"); !strings.HasPrefix(lines[0], "200 ") {
				t.Errorf("another sandbox: %q", lines)
			}
			most = max(most, testenv.UsageOf(d.PID()).MemoryKiB)
			select {
			case r = <-done:
				ended = true
			case <-time.After(500 * time.Millisecond):
			}
		}
		came(r)
		t.Logf("the daemon: %d MiB at the start, %d MiB at most", before.MemoryKiB>>10, most>>10)
		if grown := most - before.MemoryKiB; grown > 160<<10 {
			t.Errorf("the daemon grew by %d MiB", grown>>10)
		}
		if wild.asked("/echo", value) == 0 || wild.asked("/goaway", value) == 0 {
			t.Error("the host never got the value")
		}
		if n := wild.asked("/goaway", value); n > 8*5 { // connections, and times that the proxy tries
			t.Errorf("what the host sent away came again %d times", n)
		}
		wild.forget()
		d.Must("remove", "--force", bad)
		testenv.Eventually(t, "no connection to the host is left", func() (bool, string) {
			n := wild.connections()
			return n == 0, fmt.Sprint(n, " connections")
		})
		if lines := send(t, d, good, "KEY", "https://dest.lab.test/seen"); !strings.HasPrefix(lines[0], "200 ") {
			t.Errorf("another sandbox, afterwards: %q", lines)
		}
	})
	if !strings.Contains(strings.Join(got.all(), "\n"), "dest.lab.test Bearer "+value) {
		t.Error("the other host never got the value")
	}
}

// h2Fields are fields as HPACK writes them, none of which goes into a table.
func h2Fields(fields ...string) []byte {
	var b bytes.Buffer
	enc := hpack.NewEncoder(&b)
	for i := 0; i+1 < len(fields); i += 2 {
		_ = enc.WriteField(hpack.HeaderField{Name: fields[i], Value: fields[i+1], Sensitive: true})
	}
	return b.Bytes()
}

func h2Head(f *http2.Framer, stream uint32, end bool, fields ...string) error {
	return f.WriteHeaders(http2.HeadersFrameParam{StreamID: stream, BlockFragment: h2Fields(fields...), EndStream: end, EndHeaders: true})
}

// wildClient is a host, and all that a connection to it sends.
type wildClient struct {
	Host string
	Data []byte
}

// wildClients are connections of the sandbox by the path that they ask for, or what else they do. Each has a host for itself, since the
// proxy would make requests to one share its connection.
func wildClients() map[string]wildClient {
	all := map[string]wildClient{}
	script := func(name string, write func(f *http2.Framer, ask func(stream uint32, path string, more ...string))) {
		var b bytes.Buffer
		host := fmt.Sprintf("h%d.wild.lab.test", len(all))
		b.WriteString(http2.ClientPreface)
		f := http2.NewFramer(&b, nil)
		f.AllowIllegalWrites = true
		_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 20})
		write(f, func(stream uint32, path string, more ...string) {
			_ = h2Head(f, stream, true, append([]string{":method", "GET", ":scheme", "https", ":authority", host, ":path", path, "key", "mock-KEY"}, more...)...)
		})
		all[name] = wildClient{host, b.Bytes()}
	}
	for _, path := range []string{"/echo", "/early", "/goaway", "/settings", "/pings", "/body", "/headers"} {
		script(path, func(_ *http2.Framer, ask func(uint32, string, ...string)) { ask(1, path) })
	}
	script("many of each", func(_ *http2.Framer, ask func(uint32, string, ...string)) {
		for i := range uint32(100) {
			ask(2*i+1, []string{"/body", "/silent", "/pings", "/echo"}[i%4])
		}
	})
	script("resets", func(f *http2.Framer, ask func(uint32, string, ...string)) {
		for i := range uint32(2000) {
			ask(2*i+1, "/silent")
			_ = f.WriteRSTStream(2*i+1, http2.ErrCodeCancel)
		}
	})
	script("a head without end", func(f *http2.Framer, _ func(uint32, string, ...string)) {
		_ = f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: h2Fields(":method", "GET")})
		for range 5000 {
			_ = f.WriteContinuation(1, false, h2Fields("x", "y"))
		}
	})
	script("settings", func(f *http2.Framer, ask func(uint32, string, ...string)) {
		ask(1, "/silent")
		for i := range uint32(5000) {
			_ = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: i})
		}
	})
	script("large heads", func(_ *http2.Framer, ask func(uint32, string, ...string)) {
		for i := range uint32(100) {
			ask(2*i+1, "/silent", "x", strings.Repeat("x", 12<<10))
		}
	})
	return all
}

// sendAll sends what it is given, eight times each at once, and prints what came back to one of the eight.
const sendAll = `
import base64, json, socket, ssl, sys, threading
scripts, out = json.load(sys.stdin), {}
def one(name, host, data, keep):
    got = b""
    try:
        c = ssl.create_default_context()
        c.set_alpn_protocols(["h2"])
        s = c.wrap_socket(socket.create_connection((host, 443), timeout=30), server_hostname=host)
        s.settimeout(3)
        for i in range(0, len(data), 16384):
            s.sendall(data[i:i+16384])
        while len(got) < 1 << 18:
            more = s.recv(65536)
            if not more:
                break
            got += more
    except OSError:
        pass
    if keep:
        out[name] = base64.b64encode(got[:1 << 17]).decode()
threads = [threading.Thread(target=one, args=(n, s["Host"], base64.b64decode(s["Data"]), i == 0)) for n, s in scripts.items() for i in range(8)]
for t in threads: t.start()
for t in threads: t.join()
json.dump(out, sys.stdout)
`

// said is what the frames of an answer say: headers, a line each, and bodies.
func said(raw []byte) string {
	var out strings.Builder
	f := http2.NewFramer(io.Discard, bytes.NewReader(raw))
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return out.String()
		}
		switch frame := frame.(type) {
		case *http2.MetaHeadersFrame:
			for _, field := range frame.RegularFields() {
				if field.Name != "date" && field.Name != "content-type" {
					fmt.Fprintf(&out, "%s: %s\n", field.Name, field.Value)
				}
			}
		case *http2.DataFrame:
			out.Write(frame.Data())
		case *http2.GoAwayFrame:
			out.Write(frame.DebugData())
		}
	}
}

// wildHost does with a request what its path says.
type wildHost struct {
	t    *testing.T
	mu   sync.Mutex
	open map[net.Conn]bool
	got  []string // path and key of each request
}

func (h *wildHost) asked(path, key string) (n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, one := range h.got {
		if one == path+" "+key {
			n++
		}
	}
	return n
}

func (h *wildHost) forget() { h.mu.Lock(); defer h.mu.Unlock(); h.got = nil }

func (h *wildHost) connections() int { h.mu.Lock(); defer h.mu.Unlock(); return len(h.open) }

func (h *wildHost) listen(l net.Listener, cert tls.Certificate) {
	config := &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"h2"}}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			raw, err := l.Accept()
			if err != nil {
				return
			}
			h.mu.Lock()
			h.open[raw] = true
			h.mu.Unlock()
			group.Go(func() {
				h.serve(tls.Server(raw, config))
				_ = raw.Close()
				h.mu.Lock()
				defer h.mu.Unlock()
				delete(h.open, raw)
			})
		}
	})
	h.t.Cleanup(func() {
		_ = l.Close()
		h.mu.Lock()
		for conn := range h.open {
			_ = conn.Close()
		}
		h.mu.Unlock()
		group.Wait()
	})
}

func (h *wildHost) serve(conn net.Conn) {
	preface := make([]byte, len(http2.ClientPreface))
	if _, err := io.ReadFull(conn, preface); err != nil {
		return
	}
	f := http2.NewFramer(conn, conn)
	f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	_ = f.WriteSettings(http2.Setting{ID: http2.SettingMaxConcurrentStreams, Val: 1000}, http2.Setting{ID: http2.SettingMaxFrameSize, Val: 1<<24 - 1})
	for {
		frame, err := f.ReadFrame()
		if err != nil {
			return
		}
		if head, ok := frame.(*http2.MetaHeadersFrame); ok && !h.answer(f, head) {
			return
		}
	}
}

func (h *wildHost) answer(f *http2.Framer, head *http2.MetaHeadersFrame) bool {
	id, path, key := head.StreamID, head.PseudoValue("path"), ""
	for _, field := range head.RegularFields() {
		if field.Name == "key" {
			key = field.Value
		}
	}
	h.mu.Lock()
	h.got = append(h.got, path+" "+key)
	h.mu.Unlock()
	var err error
	switch path {
	case "/echo":
		_ = h2Head(f, id, false, ":status", "200", "x-echo", key)
		for _, c := range []byte("<" + key + ">") {
			_ = f.WriteData(id, false, []byte{c})
		}
		err = h2Head(f, id, true, "x-late", key)
	case "/early":
		for range 2000 {
			_ = h2Head(f, id, false, ":status", "103", "link", key)
		}
		err = h2Head(f, id, true, ":status", "200")
	case "/goaway":
		err = f.WriteGoAway(0, http2.ErrCodeNo, []byte(key))
	case "/settings":
		for i := uint32(0); err == nil; i++ {
			err = f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: i % 1000})
		}
	case "/pings": // and nothing is read any more
		for err == nil {
			err = f.WritePing(false, [8]byte{1})
		}
	case "/body":
		_ = h2Head(f, id, false, ":status", "200", "x-echo", key)
		for range 15 { // within the window
			err = f.WriteData(id, false, bytes.Repeat([]byte(key), 800))
		}
	case "/headers":
		var many []string
		for i := range 3000 {
			many = append(many, fmt.Sprintf("x-%x", i), key)
		}
		block := h2Fields(append([]string{":status", "200"}, many...)...)
		err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: block[:16<<10]})
		for rest := block[16<<10:]; err == nil && len(rest) > 0; {
			n := min(len(rest), 16<<10)
			err = f.WriteContinuation(id, n == len(rest), rest[:n])
			rest = rest[n:]
		}
	}
	return err == nil
}

package egress

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"
)

func TestStreamsArePassedOnAtOnce(t *testing.T) {
	r := newRig(t)
	step := make(chan string)
	mux := http.NewServeMux()
	mux.HandleFunc("/events", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		w.(http.Flusher).Flush()
		for s := range step {
			fmt.Fprintf(w, "data: %s\n\n", s)
			w.(http.Flusher).Flush()
		}
	})
	// As gRPC: both sides speak in turn, and the outcome comes in trailers, announced and not.
	mux.HandleFunc("/turns", func(w http.ResponseWriter, q *http.Request) {
		_ = http.NewResponseController(w).EnableFullDuplex()
		w.Header().Set("Trailer", "Grpc-Status")
		w.WriteHeader(200)
		w.(http.Flusher).Flush()
		lines := bufio.NewScanner(q.Body)
		for lines.Scan() {
			fmt.Fprintf(w, "got %s\n", lines.Text())
			w.(http.Flusher).Flush()
		}
		w.Header().Set("Grpc-Status", "0")
		w.Header().Set(http.TrailerPrefix+"Grpc-Message", "fine")
	})
	mux.HandleFunc("/ws", func(w http.ResponseWriter, q *http.Request) {
		c, err := websocket.Accept(w, q, nil)
		if err != nil {
			return
		}
		defer c.CloseNow()
		for {
			kind, data, err := c.Read(q.Context())
			if err != nil {
				return
			}
			_ = c.Write(q.Context(), kind, append([]byte("echo "), data...))
		}
	})
	r.host("good.test", public, mux)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always})
	c2 := b.box(Subject{Policy: policyOf(t, "allow good.test")}) // through, untouched
	h2c := b.client(nil, false)
	tr := h2c.Transport.(*http.Transport)
	tr.Protocols = new(http.Protocols)
	tr.Protocols.SetUnencryptedHTTP2(true)
	for _, kind := range []struct {
		name, scheme string
		client       *http.Client
	}{
		{"http", "http", b.client(nil, false)},
		{"h2c", "http", h2c},
		{"https", "https", b.client(r.pool, false)},
		{"h2", "https", b.client(r.pool, true)},
		{"through", "https", c2.client(r.world.pool, true)},
	} {
		t.Run(kind.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			q, _ := http.NewRequestWithContext(ctx, "GET", kind.scheme+"://good.test/events", nil)
			resp, err := kind.client.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			lines := bufio.NewScanner(resp.Body)
			for _, s := range []string{"one", "two", "three"} {
				step <- s // the next is sent only when this one has come
				if !lines.Scan() || lines.Text() != "data: "+s {
					t.Fatalf("got %q %v", lines.Text(), lines.Err())
				}
				lines.Scan()
			}
			resp.Body.Close()
			// The host hears of it: its next event fails or is taken, and it needs no more of ours.
			cancel()
			step <- "last"

			ctx, cancel = context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			pr, pw := io.Pipe()
			q, _ = http.NewRequestWithContext(ctx, "POST", kind.scheme+"://good.test/turns", pr)
			q.Header.Set("Te", "trailers")
			resp, err = kind.client.Do(q)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			lines = bufio.NewScanner(resp.Body)
			for _, s := range []string{"a", "b"} {
				fmt.Fprintln(pw, s)
				if !lines.Scan() || lines.Text() != "got "+s {
					t.Fatalf("got %q %v", lines.Text(), lines.Err())
				}
			}
			pw.Close()
			for lines.Scan() {
			}
			if resp.Trailer.Get("Grpc-Status") != "0" || resp.Trailer.Get("Grpc-Message") != "fine" {
				t.Errorf("trailers %v", resp.Trailer)
			}
			if strings.HasPrefix(kind.name, "h2") {
				return // no WebSockets over HTTP/2
			}
			client := *kind.client
			client.Timeout = 0
			if kind.name == "through" {
				client.Transport = c2.client(r.world.pool, false).Transport
			}
			ws, _, err := websocket.Dial(ctx, strings.Replace(kind.scheme, "http", "ws", 1)+"://good.test/ws", &websocket.DialOptions{HTTPClient: &client})
			if err != nil {
				t.Fatal(err)
			}
			defer ws.CloseNow()
			for range 3 {
				if err := ws.Write(ctx, websocket.MessageText, []byte("hello")); err != nil {
					t.Fatal(err)
				}
				if _, data, err := ws.Read(ctx); err != nil || string(data) != "echo hello" {
					t.Fatalf("%s %v", data, err)
				}
			}
		})
		close(step) // ends what still waits for an event
		step = make(chan string)
	}
}

func TestBodiesAndAnswersKeepTheirForm(t *testing.T) {
	r := newRig(t)
	mux := http.NewServeMux()
	mux.HandleFunc("/big", func(w http.ResponseWriter, q *http.Request) {
		n, err := io.Copy(io.Discard, q.Body)
		fmt.Fprint(w, n, err, q.ContentLength)
	})
	mux.HandleFunc("/refuses", func(w http.ResponseWriter, q *http.Request) { w.WriteHeader(http.StatusExpectationFailed) })
	mux.HandleFunc("/packed", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Encoding", "gzip")
		_, _ = io.WriteString(w, "not really "+q.Header.Get("Accept-Encoding"))
	})
	mux.HandleFunc("/cut", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Content-Length", "100")
		_, _ = io.WriteString(w, "half")
		_ = http.NewResponseController(w).Flush()
		panic(http.ErrAbortHandler)
	})
	mux.HandleFunc("/early", func(w http.ResponseWriter, q *http.Request) {
		w.Header().Set("Link", "</style>; rel=preload")
		w.WriteHeader(http.StatusEarlyHints)
		w.WriteHeader(http.StatusNotModified)
	})
	r.host("good.test", public, mux)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test"), Secrets: always})
	for _, way := range []struct {
		scheme string
		h2     bool
	}{{"http", false}, {"https", false}, {"https", true}} {
		c := b.client(r.pool, way.h2)
		do := func(method, path string, body io.Reader, header ...string) (int, string, error) {
			q, err := http.NewRequest(method, way.scheme+"://good.test"+path, body)
			if err != nil {
				t.Fatal(err)
			}
			for i := 0; i+1 < len(header); i += 2 {
				q.Header.Set(header[i], header[i+1])
			}
			resp, err := c.Do(q)
			if err != nil {
				return 0, "", err
			}
			defer resp.Body.Close()
			data, err := io.ReadAll(resp.Body)
			return resp.StatusCode, string(data), err
		}
		const size = 40 << 20 // more than may be held
		if s, got, err := do("POST", "/big", io.LimitReader(neverending{}, size)); s != 200 || got != fmt.Sprint(size, error(nil), -1) {
			t.Errorf("%v: %d %s %v", way, s, got, err)
		}
		if s, got, err := do("POST", "/big", bytes.NewReader(make([]byte, 1<<20)), "Expect", "100-continue"); s != 200 || got != fmt.Sprint(1<<20, error(nil), 1<<20) {
			t.Errorf("%v: %d %s %v", way, s, got, err)
		}
		if s, _, err := do("POST", "/refuses", bytes.NewReader(make([]byte, 1<<20)), "Expect", "100-continue"); s != 417 {
			t.Errorf("%v: %d %v", way, s, err)
		}
		if _, got, err := do("GET", "/packed", nil, "Accept-Encoding", "br"); got != "not really br" {
			t.Errorf("%v: %q %v", way, got, err)
		}
		if s, got, err := do("HEAD", "/packed", nil); s != 200 || got != "" {
			t.Errorf("%v: %d %q %v", way, s, got, err)
		}
		if s, _, err := do("GET", "/early", nil); s != 304 {
			t.Errorf("%v: %d %v", way, s, err)
		}
		if _, got, err := do("GET", "/cut", nil); err == nil {
			t.Errorf("%v: an answer that broke off looks whole: %q", way, got)
		}
	}
	client := r.proxy.clients[b.id]
	deadline := time.Now().Add(20 * time.Second)
	for held := -1; held != 0; {
		client.mu.Lock()
		held = client.held
		client.mu.Unlock()
		if time.Now().After(deadline) {
			t.Fatalf("%d bytes are still counted", held)
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// TestManyConnections: as many as are allowed, all in use at once.
func TestManyConnections(t *testing.T) {
	r := newRig(t)
	if r.proxy.maxOpen < maxConns {
		t.Skipf("this process may have too few descriptors: %d connections", r.proxy.maxOpen)
	}
	r.proxy.maxOpen = 4 * maxConns // so that it is the sandbox's bound that is reached
	var waiting sync.WaitGroup
	release := make(chan struct{})
	waiting.Add(maxConns)
	r.host("good.test", public, http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		waiting.Done()
		<-release
	}))
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	var all []net.Conn
	for range maxConns {
		c := b.raw(80)
		if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: good.test\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		all = append(all, c)
	}
	waiting.Wait()
	extra := b.raw(80)
	_, _ = io.WriteString(extra, "GET / HTTP/1.1\r\nHost: good.test\r\n\r\n")
	if data, _ := io.ReadAll(extra); len(data) > 0 {
		t.Errorf("one too many was answered: %q", data)
	}
	if d := r.last(b.id); d.Rule != "limit" {
		t.Errorf("recorded %+v", d)
	}
	close(release)
	for _, c := range all {
		if resp, err := http.ReadResponse(bufio.NewReader(c), nil); err != nil || resp.StatusCode != 200 {
			t.Fatalf("%v %v", resp, err)
		}
	}
}

// TestOddAnswers: what a host sends that other parsers read in another way, or that is no answer, reaches the sandbox as an answer
// all the same.
func TestOddAnswers(t *testing.T) {
	log.SetOutput(io.Discard) // net/http quotes what hosts send
	defer log.SetOutput(os.Stderr)
	r := newRig(t)
	cert := r.world.issue(t, leafOptions{name: "good.test"})
	r.serve("good.test", public, what, cert, false)
	host := listenLocal(t)
	answers := make(chan string, 1)
	go func() {
		for {
			c, err := host.Accept()
			if err != nil {
				return
			}
			go func() {
				conn := tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}})
				defer conn.Close()
				if _, err := http.ReadRequest(bufio.NewReader(conn)); err == nil {
					_, _ = io.WriteString(conn, <-answers)
				}
			}()
		}
	}()
	r.mu.Lock()
	r.servers[netip.AddrPortFrom(netip.MustParseAddr(public), 443)] = host.Addr().String()
	r.mu.Unlock()
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: always})
	for _, h2 := range []bool{false, true} {
		c := b.client(r.pool, h2)
		for _, try := range []struct {
			sent   string
			status int
			body   string
		}{
			{"000 None\r\nContent-Length: 0\r\n\r\n", 502, ""},
			{"099 None\r\nContent-Length: 0\r\n\r\n", 502, ""},
			{"999 Much\r\nContent-Length: 2\r\n\r\nok", 999, "ok"},
			{"101 Switching\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\nok", 502, ""},
			{"204 None\r\nContent-Length: 2\r\n\r\nno", 204, ""},
			{"304 Same\r\nContent-Length: 2\r\n\r\nno", 304, ""},
			{"200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nok!", 502, ""},
			{"200 OK\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n2;x=\"\r\nok\r\n0\r\n\r\n", 200, "ok"},
			{"200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", 502, ""},
			{"200 OK\r\nX: a\r\n b\r\nContent-Length: 2\r\n\r\nok", 200, "ok"},
			{"200 OK\r\nX: a\x00b\r\nContent-Length: 2\r\n\r\nok", 502, ""},
			{"200 OK\r\nContent-Length: -2\r\n\r\nok", 502, ""},
			{"200 OK\r\nConnection: close\r\n\r\nok", 200, "ok"},
			{"no answer\r\n\r\n", 502, ""},
		} {
			answers <- "HTTP/1.1 " + try.sent
			status, body := get(t, c, "https://good.test/")
			if status != try.status || status != 502 && body != try.body {
				t.Errorf("%q: %d %q", try.sent, status, body)
			}
		}
	}
}

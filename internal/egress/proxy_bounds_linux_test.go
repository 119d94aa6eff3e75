package egress

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

func TestHeadersStayBoundedWithValues(t *testing.T) {
	r, _ := secretive(t)
	h := r.serveAll("good.test")
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(strings.Repeat("v", 16<<10))})
	request(t, b.client(r.pool, true), "GET", "https://good.test/", map[string]string{"X-Key": thePlace}, nil)
	before := h.count()
	resp, text := request(t, b.client(r.pool, true), "GET", "https://good.test/", map[string]string{"X-Key": strings.Repeat(thePlace+" ", 5)}, nil)
	if resp.StatusCode != http.StatusRequestHeaderFieldsTooLarge || !strings.Contains(text, `"rule":"limit"`) || h.count() != before {
		t.Errorf("%d %s", resp.StatusCode, text)
	}
}

// TestRefusalsThatNobodyTakes: a client of HTTP/2 that takes no bytes of its answers keeps no more requests in memory than its
// share holds, and those not for long.
func TestRefusalsThatNobodyTakes(t *testing.T) {
	r := newRig(t)
	b := r.box(Subject{Policy: policyOf(t, "allow good.test")})
	const conns, streams = 3, 120
	large := strings.Repeat("x", 50<<10)
	statuses := make(chan string, conns*streams)
	ended := make(chan error, conns*streams)
	for range conns {
		c := b.raw(80)
		_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
		if _, err := io.WriteString(c, http2.ClientPreface); err != nil {
			t.Fatal(err)
		}
		f := http2.NewFramer(c, c)
		f.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
		if err := f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 0}); err != nil {
			t.Fatal(err)
		}
		begun := make(chan struct{}, streams)
		go func() {
			defer close(begun)
			for left := streams; left > 0; {
				frame, err := f.ReadFrame()
				if err != nil {
					ended <- err
					return
				}
				switch frame := frame.(type) {
				case *http2.MetaHeadersFrame:
					begun <- struct{}{}
					statuses <- frame.PseudoValue("status")
					if frame.StreamEnded() {
						left--
						ended <- nil
					}
				case *http2.RSTStreamFrame:
					left--
					ended <- nil
				case *http2.GoAwayFrame:
					ended <- errors.New(frame.String())
					return
				}
			}
		}()
		for i := range streams {
			var head bytes.Buffer
			enc := hpack.NewEncoder(&head)
			x := large
			switch i { // before its first request a connection without room is closed
			case 0:
				x = ""
			case 1:
				<-begun
			}
			for _, h := range [][2]string{{":method", "GET"}, {":scheme", "http"}, {":authority", "evil.test"}, {":path", "/"}, {"x", x}} {
				_ = enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1], Sensitive: true})
			}
			id, first := uint32(2*i+1), true
			for head.Len() > 0 {
				part := head.Next(16 << 10)
				var err error
				if first {
					err = f.WriteHeaders(http2.HeadersFrameParam{StreamID: id, BlockFragment: part, EndStream: true, EndHeaders: head.Len() == 0})
				} else {
					err = f.WriteContinuation(id, head.Len() == 0, part)
				}
				if first = false; err != nil {
					t.Fatal(err)
				}
			}
		}
	}
	count := map[string]int{}
	for range conns * streams {
		select {
		case err := <-ended:
			if err != nil {
				t.Fatal(err)
			}
		case <-time.After(time.Minute):
			t.Fatal("requests are kept though nobody takes their answers")
		}
		count[<-statuses]++
	}
	if count["403"] == 0 || count["503"] == 0 || count["403"]+count["503"] != conns*streams {
		t.Errorf("answers: %v", count)
	}
}

// TestFailuresQuoteNothing: what a host sends that is no HTTP is in no log, since it may hold the value.
func TestFailuresQuoteNothing(t *testing.T) {
	r := newRig(t)
	var log bytes.Buffer
	r.proxy.o.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	r.host("good.test", "198.51.100.40", http.HandlerFunc(func(w http.ResponseWriter, q *http.Request) {
		conn, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		_, _ = fmt.Fprintf(conn, q.URL.Query().Get("answer")+"\r\n\r\n", q.Header.Get("X-Key"))
		_ = conn.Close()
	}))
	b := r.box(Subject{Policy: policyOf(t, "allow *"), Secrets: held(theValue)})
	c := b.client(r.pool, false)
	for _, answer := range []string{"%s", "HTTP/1.1 %s", "HTTP/1.1 200 OK\r\n%s", "HTTP/1.1 200 OK\r\nContent-Length: %s"} {
		q, err := http.NewRequestWithContext(t.Context(), "GET", "https://good.test/", nil)
		if err != nil {
			t.Fatal(err)
		}
		q.URL.RawQuery = url.Values{"answer": {answer}}.Encode()
		// What begins with a handshake of WebSocket goes over HTTP/1.1.
		q.Header = http.Header{"X-Key": {thePlace}, "Connection": {"Upgrade"}, "Upgrade": {"websocket"}}
		resp, err := c.Do(q)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != 502 || strings.Contains(string(body), theValue) {
			t.Errorf("%q: %d %s", answer, resp.StatusCode, body)
		}
	}
	r.proxy.Forget(b.id)
	if !strings.Contains(log.String(), "a request of the proxy failed") || strings.Contains(log.String(), theValue) {
		t.Errorf("the log: %s", log.String())
	}
}

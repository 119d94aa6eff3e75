package egress

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"testing"
	"testing/iotest"
)

// hello is the first that a client sends.
func hello(t testing.TB, cfg *tls.Config) []byte {
	t.Helper()
	var sent bytes.Buffer
	_ = tls.Client(&recorded{w: &sent}, cfg).Handshake()
	return sent.Bytes()
}

type recorded struct {
	net.Conn
	w io.Writer
}

func (r *recorded) Write(p []byte) (int, error) { return r.w.Write(p) }
func (r *recorded) Read([]byte) (int, error)    { return 0, io.EOF }
func (r *recorded) Close() error                { return nil }

// split puts the handshake message of one record into records of n bytes.
func split(record []byte, n int) []byte {
	var out []byte
	for body := record[5:]; len(body) > 0; {
		part := body[:min(n, len(body))]
		out = append(append(out, record[0], record[1], record[2], byte(len(part)>>8), byte(len(part))), part...)
		body = body[len(part):]
	}
	return out
}

func TestSniff(t *testing.T) {
	whole := hello(t, &tls.Config{ServerName: "good.test", NextProtos: []string{"h2"}})
	for name, data := range map[string][]byte{"whole": whole, "in records of 7 bytes": split(whole, 7), "with more behind": append(bytes.Clone(whole), "more"...)} {
		for _, r := range []io.Reader{bytes.NewReader(data), iotest.OneByteReader(bytes.NewReader(data))} {
			host, seen, err := sniff(r)
			rest, _ := io.ReadAll(r)
			if err != nil || host != "good.test" || !bytes.Equal(append(seen, rest...), data) {
				t.Errorf("%s: %q %v", name, host, err)
			}
		}
	}
	if host, _, err := sniff(bytes.NewReader(hello(t, &tls.Config{InsecureSkipVerify: true}))); err != nil || host != "" {
		t.Errorf("no name: %q %v", host, err)
	}
	if _, seen, err := sniff(bytes.NewReader([]byte("GET / HTTP/1.1\r\n\r\n"))); err == nil || len(seen) == 0 {
		t.Errorf("plain HTTP: %v", err)
	}
	// What never ends is not kept.
	endless := io.MultiReader(bytes.NewReader(split(whole, 1)[:600]), neverending{})
	if _, seen, err := sniff(endless); err == nil || len(seen) > maxHello {
		t.Errorf("endless: %d bytes, %v", len(seen), err)
	}
}

// neverending is empty records of a handshake.
type neverending struct{}

func (neverending) Read(p []byte) (int, error) {
	n := copy(p, bytes.Repeat([]byte{22, 3, 1, 0, 1, 0}, len(p)/6+1))
	return n, nil
}

// FuzzSniff: whatever comes, nothing is lost, nothing is read without end, and a name that is found is the one that a server
// of crypto/tls would find.
func FuzzSniff(f *testing.F) {
	whole := hello(f, &tls.Config{ServerName: "good.test", NextProtos: []string{"h2"}})
	f.Add(whole)
	f.Add(split(whole, 100))
	f.Add(whole[:50])
	f.Add([]byte("GET / HTTP/1.1\r\n\r\n"))
	f.Add([]byte{22, 3, 1, 0, 0})
	f.Fuzz(func(t *testing.T, data []byte) {
		r := bytes.NewReader(data)
		host, seen, err := sniff(r)
		rest, _ := io.ReadAll(r)
		if len(seen) > maxHello || !bytes.Equal(append(bytes.Clone(seen), rest...), data) {
			t.Fatal("bytes were lost or made up")
		}
		if err != nil {
			return
		}
		var again string
		_ = tls.Server(&onlyReads{r: bytes.NewReader(seen)}, &tls.Config{GetCertificate: func(h *tls.ClientHelloInfo) (*tls.Certificate, error) {
			again = h.ServerName
			return nil, errNoHello
		}}).Handshake()
		if again != "" && again != host {
			t.Fatalf("%q here, %q there", host, again)
		}
	})
}

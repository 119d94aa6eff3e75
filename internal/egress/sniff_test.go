package egress

import (
	"bytes"
	"crypto/ecdh"
	"crypto/rand"
	"crypto/tls"
	"encoding/binary"
	"io"
	"net"
	"slices"
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

// encryptedTo is what a host says, by DNS, for ClientHellos to be encrypted to it (an ECHConfigList).
func encryptedTo(t testing.TB, publicName string) []byte {
	t.Helper()
	key, err := ecdh.X25519().GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	config := append([]byte{1, 0, 0x20, 0, 32}, key.PublicKey().Bytes()...)
	config = append(config, 0, 4, 0, 1, 0, 1, 0, byte(len(publicName)))
	config = append(append(config, publicName...), 0, 0)
	config = append([]byte{0xfe, 0x0d, 0, byte(len(config))}, config...)
	return append([]byte{0, byte(len(config))}, config...)
}

// named is a record with a ClientHello for good.test that names another, without a look at what a name may be.
func named(record []byte, name string) []byte {
	at := bytes.Index(record, []byte("\x00\x00\x09good.test"))
	out := slices.Concat(record[:at+1], []byte{byte(len(name) >> 8), byte(len(name))}, []byte(name), record[at+12:])
	for _, back := range []int{3, 5} { // the list, the extension
		binary.BigEndian.PutUint16(out[at+1-back:], binary.BigEndian.Uint16(out[at+1-back:])+uint16(len(name)-9))
	}
	return resized(out)
}

// lengthened is a record with a ClientHello that is made n bytes long, by padding (RFC 7685); the record itself may be too long.
func lengthened(record []byte, n int) []byte {
	more := n - (len(record) - 5)
	padding := binary.BigEndian.AppendUint16([]byte{0, 21}, uint16(more-4))
	return resized(slices.Concat(record, padding, make([]byte, more-4)))
}

// resized puts right the lengths of a record, its ClientHello and the extensions in it.
func resized(record []byte) []byte {
	binary.BigEndian.PutUint16(record[3:], uint16(len(record)-5))
	size := len(record) - 9
	record[6], record[7], record[8] = byte(size>>16), byte(size>>8), byte(size)
	at := 9 + 2 + 32
	at += 1 + int(record[at])
	at += 2 + int(binary.BigEndian.Uint16(record[at:]))
	at += 1 + int(record[at])
	binary.BigEndian.PutUint16(record[at:], uint16(len(record)-at-2))
	return record
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
	for name, want := range map[string]string{"GOOD.Test": "GOOD.Test", "192.0.2.1": "192.0.2.1", "good.test.": "!", "": "!", "a.test\x00b": "a.test\x00b"} {
		host, _, err := sniff(bytes.NewReader(named(whole, name))) // as no honest client writes it
		if err != nil {
			host = "!"
		}
		if host != want {
			t.Errorf("a name of %q: %q %v", name, host, err)
		}
	}
	// Of an encrypted one it is the name on the outside, which the connection is judged by.
	if host, seen, err := sniff(bytes.NewReader(hello(t, &tls.Config{ServerName: "hidden.test", MinVersion: tls.VersionTLS13,
		EncryptedClientHelloConfigList: encryptedTo(t, "good.test")}))); err != nil || host != "good.test" || bytes.Contains(seen, []byte("hidden")) {
		t.Errorf("encrypted: %q %v", host, err)
	}
	// As long as TLS lets one be, and in records that make it longer.
	long := lengthened(whole, 64<<10)
	for name, data := range map[string][]byte{"of 64 KiB": split(long, 16<<10), "of 64 KiB, in pieces": split(long, 100)} {
		if host, seen, err := sniff(iotest.HalfReader(bytes.NewReader(data))); err != nil || host != "good.test" || len(seen) != len(data) {
			t.Errorf("%s: %q, %d of %d bytes, %v", name, host, len(seen), len(data), err)
		}
	}
	if _, _, err := sniff(bytes.NewReader(split(lengthened(whole, 64<<10+8), 16<<10))); err == nil {
		t.Error("longer than TLS lets one be: it is read")
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

package client

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
)

// The vectors of conformance/, which the SDKs run too, as far as this client has what they are about: see the README there.

func vectors(t *testing.T, name string, out any) {
	t.Helper()
	raw, err := os.ReadFile("../conformance/" + name)
	if err == nil {
		err = json.Unmarshal(raw, out)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// rawServer gives each connection to f, and makes a client of it.
func rawServer(t *testing.T, f func(net.Conn, *bufio.Reader)) *Client {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				_ = conn.SetDeadline(time.Now().Add(time.Minute))
				f(conn, bufio.NewReader(conn))
			}()
		}
	}()
	c := New(Options{Dial: Unix(socket)})
	t.Cleanup(c.Close)
	return c
}

type errorVector struct {
	Status   int
	Body     json.RawMessage
	Text     *string
	Code     *shard.Code
	Holders  []string
	ExitCode int `json:"exit_code"`
	Reason   string
	Says     string
}

func (v *errorVector) check(t *testing.T, err error) {
	t.Helper()
	e, ok := errors.AsType[*shard.Error](err)
	if !ok {
		t.Fatalf("got %v, want a refusal", err)
	}
	if v.Code != nil && *v.Code != "" && e.Code != *v.Code {
		t.Errorf("code %q, want %q", e.Code, *v.Code)
	}
	if v.Code != nil && *v.Code == "" && e.Code != codeOfStatus(v.Status) {
		t.Errorf("code %q for an answer that has none", e.Code)
	}
	if len(e.Holders)+len(v.Holders) > 0 && !reflect.DeepEqual(e.Holders, v.Holders) {
		t.Errorf("holders %q, want %q", e.Holders, v.Holders)
	}
	if e.ExitCode != v.ExitCode {
		t.Errorf("exit code %d, want %d", e.ExitCode, v.ExitCode)
	}
	if text := strings.ReplaceAll(e.Message, `\"`, `"`); !strings.Contains(text, v.Says) || !strings.Contains(text, v.Reason) {
		t.Errorf("%q does not say %q %q", e.Message, v.Says, v.Reason)
	}
}

func TestConformanceErrors(t *testing.T) {
	var all struct {
		Answers, Heads, Streams []errorVector
		Quoted                  struct {
			Status, Count, Quotes int
			Unit                  string
		}
	}
	vectors(t, "errors.json", &all)
	ask := func(t *testing.T, status int, body string, ask func(c *Client) error) error {
		c := rawServer(t, func(conn net.Conn, r *bufio.Reader) {
			if _, err := http.ReadRequest(r); err == nil {
				fmt.Fprintf(conn, "HTTP/1.1 %d X\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s", status, len(body), body)
			}
		})
		return ask(c)
	}
	inspect := func(c *Client) error {
		_, err := c.Inspect(context.Background(), "box")
		return err
	}
	for i, v := range all.Answers {
		t.Run(fmt.Sprintf("answer %d: %d", i, v.Status), func(t *testing.T) {
			body := string(v.Body)
			if v.Body == nil {
				body = *v.Text
			}
			v.check(t, ask(t, v.Status, body, inspect))
		})
	}
	for _, v := range all.Heads {
		t.Run(fmt.Sprintf("head: %d", v.Status), func(t *testing.T) {
			err := ask(t, v.Status, "", func(c *Client) error {
				_, err := c.Stat(context.Background(), "box", "/x")
				return err
			})
			v.check(t, err)
			if got := shard.CodeOf(err).Status(); got != v.Status {
				t.Errorf("the code means %d, the answer was %d", got, v.Status)
			}
		})
	}
	q := all.Quoted
	err := ask(t, q.Status, strings.Repeat(q.Unit, q.Count), inspect)
	if n := strings.Count(err.Error(), q.Unit); n != q.Quotes {
		t.Errorf("%d bytes of a body that is not ours are quoted, want %d", n, q.Quotes)
	}
	for i, v := range all.Streams {
		t.Run(fmt.Sprintf("stream %d: %d", i, v.Status), func(t *testing.T) {
			_, err := copyRaw(t, serverFrame(append([]byte{shard.FrameError}, v.Body...)))
			v.check(t, err)
			if got := shard.CodeOf(err).Status(); v.Status != 0 && got != v.Status {
				t.Errorf("the code means %d, want %d", got, v.Status)
			}
		})
	}
}

// A piece is hex, or hex and how often it is repeated.
type pieces []byte

func (p *pieces) UnmarshalJSON(raw []byte) error {
	var list []json.RawMessage
	if err := json.Unmarshal(raw, &list); err != nil {
		return err
	}
	for _, raw := range list {
		var text string
		times := 1
		if json.Unmarshal(raw, &text) != nil {
			if err := json.Unmarshal(raw, &[]any{&text, &times}); err != nil {
				return err
			}
		}
		data, err := hex.DecodeString(text)
		if err != nil {
			return err
		}
		*p = append(*p, bytes.Repeat(data, times)...)
	}
	return nil
}

// accept is how a server answers the key of a handshake.
func accept(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}

// attachRaw attaches to a command of a server that completes the handshake and then does f.
func attachRaw(t *testing.T, answer func(key string) string, f func(net.Conn, *bufio.Reader)) (*Stream, error) {
	c := rawServer(t, func(conn net.Conn, r *bufio.Reader) {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: %s\r\n\r\n",
			answer(req.Header.Get("Sec-WebSocket-Key")))
		f(conn, r)
	})
	s, err := c.Attach(t.Context(), "box", "e1")
	if err == nil {
		t.Cleanup(func() { s.Close() })
	}
	return s, err
}

// serverFrame is a whole binary message of a server, shorter than 64 KiB.
func serverFrame(payload []byte) []byte {
	return append(binary.BigEndian.AppendUint16([]byte{0x82, 126}, uint16(len(payload))), payload...)
}

// copyRaw reads a command's stream of exactly these bytes.
func copyRaw(t *testing.T, sent []byte) (*shard.ExitMessage, error) {
	t.Helper()
	s, err := attachRaw(t, accept, func(conn net.Conn, _ *bufio.Reader) { _, _ = conn.Write(sent) })
	if err != nil {
		t.Fatal(err)
	}
	return s.Copy(io.Discard, io.Discard)
}

func TestConformanceFrames(t *testing.T) {
	type message struct {
		Opcode  byte
		Payload pieces
	}
	var all struct {
		Received []struct {
			About    string
			Bytes    pieces
			Messages []message
		}
		Refused []struct {
			About string
			Bytes pieces
		}
		Sent []struct {
			About string
			message
			Mask  string
			Bytes pieces
		}
		Handshakes []struct{ Key, Accept string }
	}
	vectors(t, "frames.json", &all)
	const opText, opBinary, opClose = 1, 2, 8
	for _, v := range all.Received {
		for _, step := range []int{1 << 20, 7} {
			t.Run(fmt.Sprintf("received by %d: %s", step, v.About), func(t *testing.T) {
				if step < 100 && len(v.Bytes) > 1<<17 {
					step = 997
				}
				s, err := attachRaw(t, accept, func(conn net.Conn, r *bufio.Reader) {
					for rest := []byte(v.Bytes); len(rest) > 0; {
						n := min(step, len(rest))
						if _, err := conn.Write(rest[:n]); err != nil {
							return
						}
						rest = rest[n:]
					}
					_, _ = io.Copy(io.Discard, r)
				})
				if err != nil {
					t.Fatal(err)
				}
				for _, want := range v.Messages { // pings and pongs are the library's own
					switch want.Opcode {
					case opText, opBinary:
						kind, got, err := s.conn.Read(t.Context())
						if err != nil || !bytes.Equal(got, want.Payload) || (kind == websocket.MessageBinary) != (want.Opcode == opBinary) {
							t.Fatalf("got a %v of %d bytes, %v; want %d bytes", kind, len(got), err, len(want.Payload))
						}
					case opClose:
						_, _, err := s.conn.Read(t.Context())
						status := websocket.StatusNoStatusRcvd
						if len(want.Payload) > 1 {
							status = websocket.StatusCode(binary.BigEndian.Uint16(want.Payload))
						}
						if got := websocket.CloseStatus(err); got != status {
							t.Errorf("got %v, want a close with %d", err, status)
						}
					}
				}
			})
		}
	}
	for _, v := range all.Refused {
		t.Run("refused: "+v.About, func(t *testing.T) {
			// Whoever took the bytes would find that the command has ended.
			if exit, err := copyRaw(t, append(v.Bytes, serverFrame([]byte("\x03{\"code\":0,\"signal\":0}"))...)); err == nil {
				t.Errorf("got %+v", exit)
			}
		})
	}
	for _, v := range all.Sent {
		if v.Opcode != opBinary {
			continue // the library chooses its own pongs and closes
		}
		t.Run("sent: "+v.About, func(t *testing.T) {
			got := make(chan []byte, 1)
			s, err := attachRaw(t, accept, func(_ net.Conn, r *bufio.Reader) {
				sent := make([]byte, len(v.Bytes))
				_, _ = io.ReadFull(r, sent)
				got <- sent
			})
			if err != nil {
				t.Fatal(err)
			}
			if err := s.conn.Write(t.Context(), websocket.MessageBinary, v.Payload); err != nil {
				t.Fatal(err)
			}
			mask, err := hex.DecodeString(v.Mask)
			if err != nil {
				t.Fatal(err)
			}
			sent, head := <-got, len(v.Bytes)-len(v.Payload)
			own := bytes.Clone(sent[head-4 : head])
			copy(sent[head-4:], mask)
			for i := range sent[head:] {
				sent[head+i] ^= own[i%4] ^ mask[i%4]
			}
			if !bytes.Equal(sent, v.Bytes) {
				t.Errorf("sent %x…, want %x…", sent[:min(len(sent), 20)], v.Bytes[:min(len(v.Bytes), 20)])
			}
		})
	}
	for _, v := range all.Handshakes {
		if got := accept(v.Key); got != v.Accept {
			t.Fatalf("the test's own server answers %q to %q, want %q", got, v.Key, v.Accept)
		}
		if _, err := attachRaw(t, func(string) string { return v.Accept }, func(net.Conn, *bufio.Reader) {}); err == nil {
			t.Error("the answer to another key was taken")
		}
	}
}

func TestConformanceInputs(t *testing.T) {
	var all struct {
		Names    map[string]struct{ Accepted, Refused []string }
		Segments []struct{ Value, Path string }
		Commands []struct{ Value, Argv any }
		Env      []struct {
			Value   map[string]string
			Entries []string
			Refused string
		}
		Modes []struct {
			Value int
			Octal string
		}
		Ports []struct {
			Value    int
			Accepted bool
		}
		Sizes []struct {
			Value string
			MiB   *int64
		}
	}
	vectors(t, "inputs.json", &all)
	for kind, check := range map[string]func(string) error{
		"sandbox": func(s string) error { return shard.CheckName("sandbox", s) },
		"process": shard.CheckProcessName,
		"policy":  shard.CheckPolicyName,
		"secret":  shard.CheckSecretName,
	} {
		for _, name := range all.Names[kind].Accepted {
			if err := check(name); err != nil {
				t.Errorf("%s name %q: %v", kind, name, err)
			}
		}
		for _, name := range all.Names[kind].Refused {
			if check(name) == nil {
				t.Errorf("%s name %q is accepted", kind, name)
			}
		}
	}
	for _, v := range all.Segments {
		if v.Path == "" {
			continue // commands refuse an empty name
		}
		if got := segment(v.Value); got != v.Path {
			t.Errorf("%q in a path is %q, want %q", v.Value, got, v.Path)
		}
	}
	for _, v := range all.Env {
		for _, entry := range v.Entries {
			if err := shard.CheckEnv([]string{entry}); err != nil {
				t.Errorf("%q: %v", entry, err)
			}
		}
		for name, value := range v.Value {
			// Here variables are entries already: that a name has a "=" cannot be told.
			if v.Refused != "" && !strings.Contains(name, "=") && shard.CheckEnv([]string{name + "=" + value}) == nil {
				t.Errorf("the variable %q is accepted", name)
			}
		}
	}
	for _, v := range all.Modes {
		if v.Octal != "" && octal(fs.FileMode(v.Value)) != v.Octal {
			t.Errorf("mode %d is %s, want %s", v.Value, octal(fs.FileMode(v.Value)), v.Octal)
		}
	}
	for _, v := range all.Ports {
		err := shard.CheckForwards([]shard.PortForward{{HostPort: v.Value, GuestPort: 1}})
		if (err == nil) != v.Accepted {
			t.Errorf("port %d: %v", v.Value, err)
		}
	}
	for _, v := range all.Sizes {
		mib, err := shard.ParseSize(v.Value)
		if (err == nil) != (v.MiB != nil) || v.MiB != nil && mib != *v.MiB {
			t.Errorf("size %q is %d MiB, %v", v.Value, mib, err)
		}
	}
	if shard.CheckCommand(nil) == nil {
		t.Error("an empty command is accepted")
	}
}

func TestConformanceRecords(t *testing.T) {
	var all struct {
		Accepted, Refused []struct {
			About, Kind string
			Wire        json.RawMessage
			Fields      map[string]any
		}
	}
	vectors(t, "records.json", &all)
	kinds := map[string]func() any{
		"sandbox":         func() any { return new(shard.Inspection) },
		"command":         func() any { return new(shard.Exec) },
		"process":         func() any { return new(shard.Process) },
		"port":            func() any { return new(shard.Port) },
		"file_entry":      func() any { return new(shard.FileEntry) },
		"egress_decision": func() any { return new(shard.EgressDecision) },
		"version":         func() any { return new(shard.VersionInfo) },
		"file_event":      func() any { return new(shard.FileEvent) },
		"provider":        func() any { return new(shard.ProviderInfo) },
		"capabilities":    func() any { return new(shard.Capabilities) },
		"policy":          func() any { return new(shard.PolicyView) },
	}
	for _, v := range all.Accepted {
		make := kinds[v.Kind]
		if make == nil {
			continue // snapshots and secrets are not known here yet
		}
		t.Run(v.About, func(t *testing.T) {
			record := make()
			if err := json.Unmarshal(v.Wire, record); err != nil {
				t.Fatal(err)
			}
			again, err := json.Marshal(record)
			if err != nil {
				t.Fatal(err)
			}
			var got map[string]any
			if err := json.Unmarshal(again, &got); err != nil {
				t.Fatal(err)
			}
			if v.Kind == "command" { // fields are named as people know them, not as the wire has them
				got["id"] = got["exec"]
				if exit, ok := got["exit_status"].(map[string]any); ok {
					got["exit_code"], got["signal"] = exit["code"], exit["signal"]
				}
			}
			if from, ok := got["from"]; ok {
				got["moved_from"] = from
			}
			delete(v.Fields, "rules") // as above
			if egress, ok := v.Fields["egress"].(map[string]any); ok {
				delete(egress, "rules")
			}
			if problem := differ(v.Fields, got); problem != "" {
				t.Error(problem)
			}
		})
	}
	for _, v := range all.Refused {
		make := kinds[v.Kind]
		if make == nil || v.About == "no id" || v.About == "no status" || v.About == "an event without a path" {
			continue // what is absent is zero here
		}
		t.Run("refused: "+v.About, func(t *testing.T) {
			if record := make(); json.Unmarshal(v.Wire, record) == nil {
				t.Errorf("read as %+v", record)
			}
		})
	}
}

// differ says where got lacks what is wanted. null, "", 0 and empty lists are all absent; times compare as instants.
func differ(want, got any) string {
	switch w := want.(type) {
	case map[string]any:
		g, ok := got.(map[string]any)
		if !ok {
			return fmt.Sprintf("%v, want an object", got)
		}
		for key, value := range w {
			if problem := differ(value, g[key]); problem != "" {
				return key + ": " + problem
			}
		}
		return ""
	case []any:
		g, _ := got.([]any)
		if len(g) != len(w) {
			return fmt.Sprintf("%v, want %v", got, want)
		}
		for i := range w {
			if problem := differ(w[i], g[i]); problem != "" {
				return fmt.Sprintf("[%d]%s", i, problem)
			}
		}
		return ""
	case string:
		if g, ok := got.(string); ok {
			a, errA := time.Parse(time.RFC3339, w)
			b, errB := time.Parse(time.RFC3339, g)
			if errA == nil && errB == nil && a.Equal(b) {
				return ""
			}
		}
	}
	absent := func(v any) bool { return v == nil || reflect.ValueOf(v).IsZero() }
	if want == got || absent(want) && absent(got) {
		return ""
	}
	return fmt.Sprintf("%v, want %v", got, want)
}

package test

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// rawSocket is a WebSocket client that can also do what it must not.
type rawSocket struct {
	t    testing.TB
	conn net.Conn
	r    *bufio.Reader
}

const (
	opText   = 1
	opBinary = 2
	opClose  = 8
	opPing   = 9
	opPong   = 10
)

// upgrade sends a handshake and returns the answer; the socket only after a 101.
func upgrade(t testing.TB, d *testenv.Daemon, path string, header ...string) (*rawSocket, *http.Response) {
	t.Helper()
	conn, err := net.Dial("unix", filepath.Join(d.Root, "shard.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(3 * time.Minute))
	key := make([]byte, 16)
	_, _ = rand.Read(key)
	req, _ := http.NewRequest(http.MethodGet, "http://shard"+path, nil)
	req.Header = http.Header{"Connection": {"keep-alive, Upgrade"}, "Upgrade": {"websocket"}, "Sec-Websocket-Version": {"13"},
		"Sec-Websocket-Key": {base64.StdEncoding.EncodeToString(key)}}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i+1] == "" {
			req.Header.Del(header[i])
		} else {
			req.Header.Set(header[i], header[i+1])
		}
	}
	if err := req.Write(conn); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReaderSize(conn, 16)
	resp, err := http.ReadResponse(r, req)
	if err != nil {
		t.Fatal(err)
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return nil, resp
	}
	return &rawSocket{t, conn, r}, resp
}

// open is an upgrade that must succeed. An attachment that has just ended may still hold the command for a moment.
func open(t testing.TB, d *testenv.Daemon, box, exec string) (s *rawSocket) {
	t.Helper()
	testenv.Eventually(t, "attach", func() (bool, string) {
		var resp *http.Response
		s, resp = upgrade(t, d, "/v0/sandboxes/"+box+"/exec/"+exec)
		return s != nil, resp.Status
	})
	return s
}

func (s *rawSocket) send(first byte, mask bool, payload []byte) {
	s.t.Helper()
	head := []byte{first}
	bit := byte(0)
	if mask {
		bit = 0x80
	}
	switch n := len(payload); {
	case n < 126:
		head = append(head, bit|byte(n))
	case n < 1<<16:
		head = binary.BigEndian.AppendUint16(append(head, bit|126), uint16(n))
	default:
		head = binary.BigEndian.AppendUint64(append(head, bit|127), uint64(n))
	}
	if mask {
		key := []byte{1, 2, 3, 4}
		head = append(head, key...)
		payload = bytes.Clone(payload)
		for i := range payload {
			payload[i] ^= key[i%4]
		}
	}
	_, _ = s.conn.Write(append(head, payload...)) // a socket that is closed meanwhile shows when it is read
}

func (s *rawSocket) message(payload string) { s.send(0x80|opBinary, true, []byte(payload)) }

// frame reads one frame; the daemon must not mask, compress or fragment.
func (s *rawSocket) frame() (op byte, payload []byte, err error) {
	var head [2]byte
	if _, err := io.ReadFull(s.r, head[:]); err != nil {
		return 0, nil, err
	}
	if head[0]&0xf0 != 0x80 || head[1]&0x80 != 0 {
		s.t.Errorf("a frame begins with %#x %#x", head[0], head[1])
	}
	n := uint64(head[1] & 0x7f)
	switch n {
	case 126:
		var b [2]byte
		_, err = io.ReadFull(s.r, b[:])
		n = uint64(binary.BigEndian.Uint16(b[:]))
	case 127:
		var b [8]byte
		_, err = io.ReadFull(s.r, b[:])
		n = binary.BigEndian.Uint64(b[:])
	}
	if err != nil {
		return 0, nil, err
	}
	if n > 1<<20+1 {
		return 0, nil, fmt.Errorf("a frame of %d bytes", n)
	}
	payload = make([]byte, n)
	_, err = io.ReadFull(s.r, payload)
	return head[0] & 0xf, payload, err
}

// all reads to the end: output by stream, the closing message if there is one, the close code (0 when the connection was
// just cut).
func (s *rawSocket) all() (out [3]string, last string, code int) {
	s.t.Helper()
	var buf [3]bytes.Buffer
	defer func() {
		for i := range out {
			out[i] = buf[i].String()
		}
	}()
	for {
		op, p, err := s.frame()
		switch {
		case err != nil:
			var late net.Error
			if errors.As(err, &late) && late.Timeout() {
				s.t.Errorf("the stream does not end: %v", err)
			}
			return out, last, 0
		case op == opClose:
			s.send(0x80|opClose, true, p)
			if len(p) < 2 {
				return out, last, 1005
			}
			return out, last, int(binary.BigEndian.Uint16(p))
		case op == opPing || op == opPong:
		case op != opBinary || len(p) == 0:
			s.t.Errorf("a frame with opcode %d and %d bytes", op, len(p))
		case last != "":
			s.t.Errorf("a message behind the last one: %q", p)
		case p[0] == 1 || p[0] == 2:
			buf[p[0]].Write(p[1:])
		case p[0] == 3 || p[0] == 5:
			last = string(p)
		default:
			s.t.Errorf("a message of stream %d", p[0])
		}
	}
}

// until reads output until it holds what is awaited.
func (s *rawSocket) until(want string) {
	s.t.Helper()
	for got := ""; !strings.Contains(got, want); {
		op, p, err := s.frame()
		if err != nil {
			s.t.Fatalf("before %q: %v; %q", want, err, got)
		}
		if op == opBinary && len(p) > 0 && p[0] == 1 {
			got += string(p[1:])
		}
	}
}

// run starts a command by the API.
func run(t testing.TB, d *testenv.Daemon, box string, req shard.ExecRequest) string {
	t.Helper()
	c := d.Client()
	defer c.Close()
	e, err := c.Exec(t.Context(), box, req)
	if err != nil {
		t.Fatal(err)
	}
	return e.ID
}

// finished waits for the end of a command.
func finished(t *testing.T, d *testenv.Daemon, box, id string) shard.Exec {
	t.Helper()
	return decode[shard.Exec](t, call(t, d, "GET", "/v0/sandboxes/"+box+"/exec/"+id+"?wait=true", nil), 200)
}

func script(s string) []string { return []string{"sh", "-c", s} }

// TestStreamHandshake: every refusal comes before the 101, as a status and the documented body; nothing is negotiated.
func TestStreamHandshake(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}})
		path := "/v0/sandboxes/" + id + "/exec/"
		first, resp := upgrade(t, d, path+exec, "Sec-WebSocket-Extensions", "permessage-deflate", "Sec-WebSocket-Protocol", "chat", "Origin", "http://elsewhere.example")
		if first == nil {
			t.Fatal(resp.Status)
		}
		for _, h := range []string{"Sec-WebSocket-Extensions", "Sec-WebSocket-Protocol"} {
			if v := resp.Header.Get(h); v != "" {
				t.Errorf("%s: %s was negotiated", h, v)
			}
		}
		for what, c := range map[string]struct {
			path   string
			header []string
			want   shard.Code
		}{
			"a second client":    {path + exec, nil, shard.CodeInUse},
			"an unknown command": {path + "0123456789abcdef", nil, shard.CodeNotFound},
			"an unknown sandbox": {"/v0/sandboxes/nosuch/exec/" + exec, nil, shard.CodeNotFound},
			"no key":             {path + exec, []string{"Sec-WebSocket-Key", ""}, shard.CodeInvalidRequest},
			"a short key":        {path + exec, []string{"Sec-WebSocket-Key", "c2hvcnQ="}, shard.CodeInvalidRequest},
			"another version":    {path + exec, []string{"Sec-WebSocket-Version", "8"}, shard.CodeInvalidRequest},
		} {
			s, resp := upgrade(t, d, c.path, c.header...)
			if s != nil {
				t.Errorf("%s: attached", what)
				continue
			}
			raw, _ := io.ReadAll(resp.Body)
			if got := (answer{Status: resp.StatusCode, Body: raw}).code(t); got != c.want {
				t.Errorf("%s: %s, want %s", what, got, c.want)
			}
			if strings.Contains(string(raw), "holders") {
				t.Errorf("%s: %s", what, raw)
			}
		}
		// Without the upgrade it is the record.
		if a := call(t, d, "GET", path+exec, nil); a.Status != 200 {
			t.Errorf("the record: %d", a.Status)
		}
	}, "runc")
}

// TestStreamFrames: the frames of both directions, to the byte.
func TestStreamFrames(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"cat"}, Stdin: true})
		s := open(t, d, id, exec)
		// One message in three fragments, with a ping between them; the first fragment has only the stream's byte.
		s.send(opBinary, true, []byte{0})
		s.send(0x80|opPing, true, []byte("are you there"))
		s.send(0, true, []byte("ab"))
		s.send(0x80, true, []byte("cd\n"))
		s.message("\x00") // no input is no end
		s.send(0x80|opPong, true, nil)
		var pong, out string
		for out != "abcd\n" || pong == "" {
			op, p, err := s.frame()
			switch {
			case err != nil:
				t.Fatalf("%v; output %q, pong %q", err, out, pong)
			case op == opPong:
				pong = string(p)
			case op == opBinary && p[0] == 1:
				out += string(p[1:])
			default:
				t.Fatalf("opcode %d, %q", op, p)
			}
		}
		if pong != "are you there" {
			t.Errorf("the pong says %q", pong)
		}
		// The largest message that there may be, there and back.
		big := noise(1 << 20)
		go s.send(0x80|opBinary, true, append([]byte{0}, big...))
		var back []byte
		for len(back) < len(big) {
			op, p, err := s.frame()
			if err != nil || op != opBinary || p[0] != 1 {
				t.Fatalf("after %d bytes: opcode %d, %v", len(back), op, err)
			}
			back = append(back, p[1:]...)
		}
		if !bytes.Equal(back, big) {
			t.Error("1 MiB came back changed")
		}
		s.message("\x04")
		if out, last, code := s.all(); out[1] != "" || out[2] != "" || last != "\x03"+`{"code":0,"signal":0}` || code != 1000 {
			t.Errorf("at the end: %q %q, close %d", out, last, code)
		}
		if _, err := s.r.ReadByte(); err != io.EOF {
			t.Errorf("after the close: %v", err)
		}
		// The whole once more, and once more.
		for range 2 {
			s := open(t, d, id, exec)
			if out, last, code := s.all(); out[1] != "abcd\n"+string(big) || last != "\x03"+`{"code":0,"signal":0}` || code != 1000 {
				t.Errorf("the replay: %d bytes, %q, close %d", len(out[1]), last, code)
			}
		}
		// Input for a command that takes none does not disturb it.
		exec = run(t, d, id, shard.ExecRequest{Command: script("sleep 1; echo fine >&2; exit 7")})
		s = open(t, d, id, exec)
		for range 4 {
			s.send(0x80|opBinary, true, make([]byte, 1<<20))
		}
		s.message("\x04")
		if out, last, code := s.all(); out[2] != "fine\n" || last != "\x03"+`{"code":7,"signal":0}` || code != 1000 {
			t.Errorf("with input for nobody: %q %q, close %d", out, last, code)
		}
		// Stopping the sandbox is an error, not an exit.
		exec = run(t, d, id, shard.ExecRequest{Command: script("trap '' TERM; echo begun; sleep 600 & wait; sleep 600")})
		s = open(t, d, id, exec)
		if _, p, err := s.frame(); err != nil || string(p) != "\x01begun\n" {
			t.Fatalf("%q, %v", p, err)
		}
		d.Must("remove", "--force", id)
		_, last, code := s.all()
		var body shard.ErrorBody
		if err := json.Unmarshal([]byte(strings.TrimPrefix(last, "\x05")), &body); err != nil || last[0] != 5 || body.Error.Code != shard.CodeSandboxNotRunning || code != 1000 {
			t.Errorf("when the sandbox ends: %q, close %d", last, code)
		}
	})
}

// TestStreamBadMessages: what is no message ends the connection with the right code, and never the command.
func TestStreamBadMessages(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: script("read x; echo got $x"), Stdin: true})
		for what, c := range map[string]struct {
			send func(*rawSocket)
			code int
		}{
			"text":                      {func(s *rawSocket) { s.send(0x80|opText, true, []byte("\x00x\n")) }, 1002},
			"an empty message":          {func(s *rawSocket) { s.send(0x80|opBinary, true, nil) }, 1002},
			"an unknown stream":         {func(s *rawSocket) { s.message("\x07x\n") }, 1002},
			"output from the client":    {func(s *rawSocket) { s.message("\x01x\n") }, 1002},
			"an end with a payload":     {func(s *rawSocket) { s.message("\x04x\n") }, 1002},
			"more than 1 MiB":           {func(s *rawSocket) { s.send(0x80|opBinary, true, make([]byte, 1<<20+2)) }, 1009},
			"no mask":                   {func(s *rawSocket) { s.send(0x80|opBinary, false, []byte("\x00x\n")) }, 0},
			"a reserved bit":            {func(s *rawSocket) { s.send(0xc0|opBinary, true, []byte("\x00x\n")) }, 1002},
			"an unknown opcode":         {func(s *rawSocket) { s.send(0x80|3, true, []byte("\x00x\n")) }, 1002},
			"a continuation of nothing": {func(s *rawSocket) { s.send(0x80, true, []byte("\x00x\n")) }, 1002},
			"a fragmented ping":         {func(s *rawSocket) { s.send(opPing, true, []byte("x")) }, 1002},
			"a close":                   {func(s *rawSocket) { s.send(0x80|opClose, true, []byte{0x03, 0xe8}) }, 1000},
			"a cut":                     {func(s *rawSocket) { _ = s.conn.Close() }, 0},
			"half a frame":              {func(s *rawSocket) { _, _ = s.conn.Write([]byte{0x82, 0xff, 0}); _ = s.conn.Close() }, 0},
		} {
			s := open(t, d, id, exec)
			c.send(s)
			out, last, code := s.all()
			if code != c.code || last != "" || out != [3]string{} {
				t.Errorf("%s: close %d, want %d (%q %q)", what, code, c.code, out, last)
			}
			_ = s.conn.Close()
			if rec := decode[shard.Exec](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec, nil), 200); rec.State != shard.ExecRunning {
				t.Fatalf("%s: the command ended: %+v", what, rec)
			}
		}
		s := open(t, d, id, exec)
		s.message("\x00fine\n")
		if out, last, code := s.all(); out[1] != "got fine\n" || code != 1000 {
			t.Errorf("after all that: %q %q, close %d", out, last, code)
		}
	}, "runc")
}

// TestStreamReleased: with the closing message the streams are free, whether the client answers the close or not.
func TestStreamReleased(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"echo", "once"}})
		first := open(t, d, id, exec)
		for {
			_, p, err := first.frame()
			if err != nil {
				t.Fatal(err)
			}
			if len(p) > 0 && p[0] == 3 {
				break
			}
		}
		second, resp := upgrade(t, d, "/v0/sandboxes/"+id+"/exec/"+exec)
		if second == nil {
			t.Fatalf("attach behind the closing message of another client: %s", resp.Status)
		}
		if out, last, code := second.all(); out[1] != "once\n" || !strings.Contains(last, `"code":0`) || code != 1000 {
			t.Errorf("%q, %s, %d", out, last, code)
		}
	})
}

// TestStreamStuckInput: a client that goes away while the program does not read its input lets go of the command.
func TestStreamStuckInput(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}, Stdin: true})
		s := open(t, d, id, exec)
		_ = s.conn.SetWriteDeadline(time.Now().Add(3 * time.Second))
		for range 64 { // until nothing is taken any more
			s.send(0x80|opBinary, true, make([]byte, 1<<20))
		}
		if _, resp := upgrade(t, d, "/v0/sandboxes/"+id+"/exec/"+exec); resp.StatusCode != 409 {
			t.Fatalf("a second client: %s", resp.Status)
		}
		_ = s.conn.Close()
		_ = open(t, d, id, exec).conn.Close()
	})
}

// TestStreamStalled: a client that takes nothing for 30 s is cut without a closing message, and the command goes on; what
// it wrote and nobody read is counted. The hold of `attach` ends likewise.
func TestStreamStalled(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		const size = 40 << 20
		program := script(fmt.Sprintf("head -c %d /dev/zero; exit 4", size))
		held := run(t, d, id, shard.ExecRequest{Command: program, Attach: true})
		stalled := run(t, d, id, shard.ExecRequest{Command: program, Attach: true})
		s := open(t, d, id, stalled) // and reads nothing
		for _, exec := range []string{held, stalled} {
			rec := finished(t, d, id, exec)
			if rec.ExitStatus.Code != 4 || !rec.Truncated || rec.LostBytes == 0 {
				t.Errorf("the record: %+v", rec)
			}
			out, last, _ := open(t, d, id, exec).all()
			if want := fmt.Sprintf("\x03"+`{"code":4,"signal":0,"lost_bytes":%d}`, size-len(out[1])); last != want {
				t.Errorf("%d bytes, then %q, want %q", len(out[1]), last, want)
			}
			if len(out[1]) != 8<<20 {
				t.Errorf("%d bytes were held", len(out[1]))
			}
		}
		out, last, code := s.all()
		if last != "" || code != 0 || len(out[1]) > 1<<20 {
			t.Errorf("the stalled client got %d bytes, %q and close %d", len(out[1]), last, code)
		}
	})
}

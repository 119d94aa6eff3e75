package guest

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

// played is the guest's end of a session, played by a test frame by frame.
type played struct {
	t    testing.TB
	conn net.Conn
	s    *Session
}

func newPlayed(t testing.TB) *played {
	t.Helper()
	host, agent := net.Pipe()
	g := &played{t: t, conn: agent}
	greeted := make(chan struct{})
	go func() {
		defer close(greeted)
		hello := make([]byte, len(HostMagic)+TokenSize+EpochSize)
		if _, err := io.ReadFull(agent, hello); err != nil {
			return
		}
		agent.Write(append([]byte("stale bytes \x00\x01 shardG1\n of an earlier session"+GuestMagic), hello[len(HostMagic)+TokenSize:]...))
	}()
	s, err := Connect(testContext(t), host, [TokenSize]byte{1})
	if err != nil {
		t.Fatal(err)
	}
	<-greeted
	g.s = s
	t.Cleanup(func() { agent.Close(); s.Close() })
	return g
}

func testContext(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	t.Cleanup(cancel)
	return ctx
}

func pack(t Type, stream uint32, payload any) []byte {
	raw, ok := payload.([]byte)
	if !ok && payload != nil {
		raw, _ = json.Marshal(payload)
	}
	out := make([]byte, HeaderSize)
	Header{len(raw), t, stream}.Put(out)
	return append(out, raw...)
}

// say sends frames; the session may end before it has read them.
func (g *played) say(frames ...[]byte) {
	go g.conn.Write(bytes.Join(frames, nil))
}

// hear reads one frame of the host.
func (g *played) hear() (Header, []byte) {
	g.t.Helper()
	head := make([]byte, HeaderSize)
	if _, err := io.ReadFull(g.conn, head); err != nil {
		g.t.Fatal(err)
	}
	h := ParseHeader(head)
	payload := make([]byte, h.Size)
	if _, err := io.ReadFull(g.conn, payload); err != nil {
		g.t.Fatal(err)
	}
	return h, payload
}

// swallow reads and drops what the host says from now on.
func (g *played) swallow() { go io.Copy(io.Discard, g.conn) }

type recorder struct {
	mu     sync.Mutex
	output int
	calls  []string
}

func (r *recorder) note(s string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.calls = append(r.calls, s)
}
func (r *recorder) Output(_ byte, p []byte) { r.mu.Lock(); r.output += len(p); r.mu.Unlock() }
func (r *recorder) Exited(Exit)             { r.note("exited") }
func (r *recorder) Broken(error)            { r.note("broken") }

// TestHostileGuest: whatever the protocol forbids ends the session with ErrProtocol, and every stream with it.
func TestHostileGuest(t *testing.T) {
	head := pack(TypeHead, 1, Head{Body: json.RawMessage(`{"pid":1}`)})
	data := func(n int) []byte { return pack(TypeData, 1, append([]byte{ChannelStdout}, make([]byte, n)...)) }
	oversize := func(t Type, n int) []byte { return pack(t, 1, make([]byte, n)) }
	for what, frames := range map[string][][]byte{
		"an unknown type":          {pack(77, 1, nil)},
		"a frame of the host's":    {pack(TypeOpen, 1, Open{})},
		"a huge frame":             {[]byte("\xff\xff\xff\xff\x03\x00\x00\x00\x01")},
		"a large head":             {oversize(TypeHead, MaxPayload+1)},
		"large data":               {head, oversize(TypeData, MaxData+2)},
		"a short credit":           {head, oversize(TypeCredit, 3)},
		"an unknown stream":        {pack(TypeData, 9, []byte("\x01x"))},
		"stream 0":                 {pack(TypeHead, 0, Head{})},
		"a head that is no JSON":   {pack(TypeHead, 1, []byte("{{"))},
		"two heads":                {head, head},
		"a head of another type":   {pack(TypeHead, 1, Head{Body: json.RawMessage(`[1]`)})},
		"data before the head":     {data(1)},
		"data without a channel":   {head, pack(TypeData, 1, []byte{})},
		"data of no known channel": {head, pack(TypeData, 1, []byte{3, 1})},
		"data past the window":     append([][]byte{head}, bytesOf(data(MaxData), (Window+Tail)/MaxData+1)...),
		"credit past the window":   {head, pack(TypeCredit, 1, []byte{0, 0, 0, 1})},
		"done before the head":     {pack(TypeDone, 1, Done{Exit: &Exit{}})},
		"done without an exit":     {head, pack(TypeDone, 1, Done{})},
		"an exit out of range":     {head, pack(TypeDone, 1, Done{Exit: &Exit{Code: 256}})},
		"done twice":               {head, pack(TypeDone, 1, Done{Exit: &Exit{}}), pack(TypeDone, 1, Done{Exit: &Exit{}})},
		"data after done":          {head, pack(TypeDone, 1, Done{Exit: &Exit{}}), data(1)},
	} {
		t.Run(what, func(t *testing.T) {
			g := newPlayed(t)
			go func() {
				g.hear() // Open
				g.swallow()
				g.say(frames...)
			}()
			k := &recorder{}
			_, err := g.s.Exec(testContext(t), ExecSpec{ID: "x", Argv: Strings{"true"}}, k)
			select {
			case <-g.s.Done():
			case <-testContext(t).Done():
				t.Fatal("the session goes on")
			}
			if !errors.Is(g.s.Err(), ErrProtocol) {
				t.Errorf("ended with %v (Exec: %v)", g.s.Err(), err)
			}
			g.s.Close()
			if k.output > Window+Tail {
				t.Errorf("the sink got %d bytes", k.output)
			}
			if len(k.calls) > 1 || err == nil && len(k.calls) == 0 {
				t.Errorf("ends told to the sink: %q", k.calls)
			}
			if err := g.s.Call(testContext(t), OpPing, nil, nil); !errors.Is(err, ErrProtocol) {
				t.Errorf("a call after the end: %v", err)
			}
		})
	}
}

func bytesOf(b []byte, n int) [][]byte {
	out := make([][]byte, n)
	for i := range out {
		out[i] = b
	}
	return out
}

// What a guest says of itself is bounded and plain.
func TestFailureIsPublic(t *testing.T) {
	for _, c := range []struct {
		f    Failure
		code shard.Code
		exit int
	}{
		{Failure{Code: "not_found", Message: "no such file"}, shard.CodeNotFound, 0},
		{Failure{Code: "command_not_started", Message: "x", ExitCode: 127}, shard.CodeCommandNotStarted, 127},
		{Failure{Code: "command_not_started", Message: "x", ExitCode: 0}, shard.CodeCommandNotStarted, 126},
		{Failure{Code: "not_found", Message: "x", ExitCode: 127}, shard.CodeNotFound, 0},
		{Failure{Code: "unauthorized", Message: "log in again"}, shard.CodeInternal, 0},
		{Failure{Code: strings.Repeat("x", 1000), Message: "\x1b[31m\xff\xfe\nred\u202e" + strings.Repeat("é", 1000)}, shard.CodeInternal, 0},
		{Failure{}, shard.CodeInternal, 0},
	} {
		e := c.f.public()
		if e.Code != c.code || e.ExitCode != c.exit || len(e.Message) > 512 || e.Message == "" || strings.ContainsAny(e.Message, "\x1b\n\u202e") ||
			!strings.Contains(e.Message, c.f.Message[:min(len(c.f.Message), 1)]) && c.f.Message[0] != 0x1b {
			t.Errorf("%+v became %+v", c.f, e)
		}
	}
	g := newPlayed(t)
	go func() {
		g.hear()
		g.say(pack(TypeHead, 1, Head{Err: &Failure{Code: "not_found", Message: "gone"}}), pack(TypeDone, 1, Done{}))
	}()
	if err := g.s.Call(testContext(t), OpStat, PathArgs{Path: "/x"}, nil); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("a refusal: %v", err)
	}
	if g.s.Err() != nil {
		t.Error("a refusal ends the session")
	}
}

// A stream that nobody reads holds up no other, and one that is given up is reset.
func TestStreamsAreApart(t *testing.T) {
	g := newPlayed(t)
	go func() {
		g.hear()
		g.say(append([][]byte{pack(TypeHead, 1, Head{})}, bytesOf(pack(TypeData, 1, make([]byte, MaxData)), Window/MaxData)...)...)
	}()
	st, err := g.s.Open(testContext(t), OpGet, PathArgs{Path: "/big"}, nil)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		g.hear()
		g.say(pack(TypeHead, 2, Head{}), pack(TypeDone, 2, Done{}))
	}()
	if err := g.s.Call(testContext(t), OpPing, nil, nil); err != nil {
		t.Fatal(err)
	}
	got := make(chan int64)
	go func() {
		n, _ := io.CopyN(io.Discard, readerOnly{st}, Window/2)
		got <- n
	}()
	credited := 0
	for credited < Window/2 {
		h, p := g.hear()
		if h.Type != TypeCredit || h.Stream != 1 {
			t.Fatalf("the host said %+v", h)
		}
		credited += int(p[0])<<24 | int(p[1])<<16 | int(p[2])<<8 | int(p[3])
	}
	if n := <-got; n != Window/2 || credited != Window/2 {
		t.Errorf("read %d, credited %d", n, credited)
	}
	st.Close()
	if h, _ := g.hear(); h.Type != TypeReset || h.Stream != 1 {
		t.Errorf("after Close the host said %+v", h)
	}
	if _, err := st.Read(make([]byte, 1)); err == nil || err == io.EOF {
		t.Errorf("a closed stream reads %v", err)
	}
	g.say(pack(TypeData, 1, make([]byte, 10)), pack(TypeDone, 1, Done{})) // what was on its way is dropped
	go func() {
		g.hear()
		g.say(pack(TypeHead, 3, Head{}), pack(TypeDone, 3, Done{}))
	}()
	if err := g.s.Call(testContext(t), OpPing, nil, nil); err != nil {
		t.Error(err)
	}
}

// The context ends what waits for a guest that does not answer, at every step.
func TestSilentGuest(t *testing.T) {
	g := newPlayed(t)
	g.swallow()
	short := func() context.Context {
		ctx, cancel := context.WithTimeout(context.Background(), 20*time.Millisecond)
		t.Cleanup(cancel)
		return ctx
	}
	if err := g.s.Call(short(), OpPing, nil, nil); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a call: %v", err)
	}
	k := &recorder{}
	if _, err := g.s.Exec(short(), ExecSpec{ID: "x", Argv: Strings{"true"}}, k); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("an exec: %v", err)
	}
	if g.s.Close(); len(k.calls) != 0 {
		t.Errorf("the sink of a failed exec got %q", k.calls)
	}
	host, agent := net.Pipe()
	go io.Copy(io.Discard, agent)
	if _, err := Connect(short(), host, [TokenSize]byte{}); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("a hello: %v", err)
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte("\x00\x00\x00\x02\x02\x00\x00\x00\x01{}"))
	f.Add(pack(TypeData, 1, []byte("\x01hello")))
	f.Add(pack(TypeDone, 1, Done{Exit: &Exit{Code: 3}}))
	f.Add([]byte("\xff\xff\xff\xff\x03\x00\x00\x00\x01"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r := newFrameReader(bytes.NewReader(in))
		read := 0
		for {
			fr, err := r.next()
			if err != nil {
				break
			}
			if len(fr.payload) != fr.Size || fr.Size > MaxPayload {
				t.Fatalf("a frame of %d bytes with %d", fr.Size, len(fr.payload))
			}
			if !bytes.Equal(fr.payload, in[read+HeaderSize:read+HeaderSize+fr.Size]) {
				t.Fatal("the payload is not what was sent")
			}
			read += HeaderSize + fr.Size
		}
	})
}

// FuzzSession: no bytes of a guest make the host's side panic, hang, or give a sink more than the window.
func FuzzSession(f *testing.F) {
	head := pack(TypeHead, 1, Head{Body: json.RawMessage(`{"pid":1}`)})
	f.Add(bytes.Join([][]byte{head, pack(TypeData, 1, []byte("\x01hello")), pack(TypeDone, 1, Done{Exit: &Exit{Code: 3}})}, nil))
	f.Add(bytes.Join([][]byte{head, pack(TypeCredit, 1, []byte{0, 0, 0, 1})}, nil))
	f.Add(append(head, bytes.Repeat(pack(TypeData, 1, make([]byte, MaxData)), 20)...))
	f.Add([]byte(GuestMagic))
	f.Fuzz(func(t *testing.T, in []byte) {
		g := newPlayed(t)
		go func() {
			g.hear()
			g.swallow()
			g.conn.Write(in)
			g.conn.Close()
		}()
		k := &recorder{}
		_, err := g.s.Exec(testContext(t), ExecSpec{ID: "x", Argv: Strings{"true"}}, k)
		<-g.s.Done()
		g.s.Close()
		if k.output > Window || len(k.calls) > 1 || err == nil && len(k.calls) != 1 {
			t.Fatalf("output %d, ends %q, exec %v", k.output, k.calls, err)
		}
	})
}

// TestText: paths and arguments keep every byte on their way.
func TestText(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		path := Path(rapid.SliceOf(rapid.Byte()).Draw(t, "path"))
		var list Strings
		for _, b := range rapid.SliceOf(rapid.SliceOf(rapid.ByteRange(1, 255))).Draw(t, "list") {
			list = append(list, string(b))
		}
		raw, err := json.Marshal(ExecSpec{Workdir: path, Argv: list})
		if err != nil {
			t.Fatal(err)
		}
		var got ExecSpec
		if err := json.Unmarshal(raw, &got); err != nil {
			t.Fatal(err)
		}
		if got.Workdir != path || strings.Join(got.Argv, "\x00") != strings.Join(list, "\x00") || len(got.Argv) != len(list) {
			t.Fatalf("%q became %q", list, got.Argv)
		}
	})
	for _, bad := range []string{`"%"`, `"%4"`, `"%zz"`, `"%+1"`} {
		var p Path
		if json.Unmarshal([]byte(bad), &p) == nil {
			t.Errorf("%s is a path: %q", bad, p)
		}
	}
	var s Strings
	if json.Unmarshal([]byte(`"eA=="`), &s) == nil {
		t.Errorf("a cut list passes: %q", s)
	}
	if _, err := json.Marshal(Strings{"a\x00b"}); err == nil {
		t.Error("a NUL passes")
	}
}

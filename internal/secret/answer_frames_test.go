package secret

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"

	"pgregory.net/rapid"
)

type duplex struct {
	io.Reader
	io.Writer
}

func (duplex) Close() error { return nil }

// message is a WebSocket frame as a host sends it.
func message(head byte, payload string) string {
	out := []byte{head}
	switch n := len(payload); {
	case n < 126:
		out = append(out, byte(n))
	case n < 1<<16:
		out = binary.BigEndian.AppendUint16(append(out, 126), uint16(n))
	default:
		out = binary.BigEndian.AppendUint64(append(out, 127), uint64(n))
	}
	return string(out) + payload
}

// messages reads frames as a client does: each message with its opcode, control frames marked by !.
func messages(t interface{ Fatalf(string, ...any) }, stream []byte) (all []string) {
	var under strings.Builder
	for len(stream) > 0 {
		head, n, skip := stream[0], uint64(stream[1]), 2
		switch n {
		case 126:
			n, skip = uint64(binary.BigEndian.Uint16(stream[2:])), 4
		case 127:
			n, skip = binary.BigEndian.Uint64(stream[2:]), 10
		}
		payload := string(stream[skip : skip+int(n)])
		stream = stream[skip+int(n):]
		op := head & 15
		if op >= opControl {
			all = append(all, "!"+payload)
			continue
		}
		if (op == opContinuation) != (under.Len() > 0) {
			t.Fatalf("a frame with opcode %d where %q is under way", op, under.String())
		}
		if op != opContinuation {
			under.WriteByte('0' + op)
		}
		under.WriteString(payload)
		if head&0x80 != 0 {
			all = append(all, under.String())
			under.Reset()
		}
	}
	return all
}

// However messages are cut into frames, each arrives with placeholders for values, and control frames where they were.
func TestFrames(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.OneOf(rapid.Just(testValue), rapid.Just("sk-0123"), rapid.Just("456789"), rapid.StringN(0, 4, -1), rapid.Just(strings.Repeat("long ", 20000)))
		var stream strings.Builder
		var want []string
		for range rapid.IntRange(1, 4).Draw(t, "messages") {
			op := rapid.SampledFrom([]byte{1, 2}).Draw(t, "opcode")
			text := strings.Join(rapid.SliceOfN(part, 0, 4).Draw(t, "text"), "")
			want = append(want, string('0'+op)+strings.ReplaceAll(text, testValue, "mock-API"))
			for rest := text; ; op = opContinuation {
				n := rapid.IntRange(0, len(rest)).Draw(t, "frame")
				if rapid.Bool().Draw(t, "last") {
					stream.WriteString(message(0x80|op, rest))
					break
				}
				stream.WriteString(message(op, rest[:n]))
				rest = rest[n:]
				if rapid.Bool().Draw(t, "ping") {
					stream.WriteString(message(0x89, testValue))
					want = append(want[:len(want)-1], "!mock-API", want[len(want)-1])
				}
			}
		}
		got, err := io.ReadAll(w.Frames(duplex{Reader: iotest.HalfReader(strings.NewReader(stream.String()))}))
		if err != nil {
			t.Fatalf("%v", err)
		}
		if all := messages(t, got); strings.Join(all, "\n") != strings.Join(want, "\n") {
			t.Fatalf("%.300q, want %.300q", all, want)
		}
	})
}

func TestSmallFramesStayWhole(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	in := message(0x81, "a "+testValue) + message(0x82, strings.Repeat("x", piece)) + message(0x88, "\x03\xe8"+strings.Repeat(testValue, 9)) + message(0x81, "sk-01")
	got, err := io.ReadAll(w.Frames(duplex{Reader: strings.NewReader(in)}))
	if err != nil {
		t.Fatal(err)
	}
	want := message(0x81, "a mock-API") + message(0x82, strings.Repeat("x", piece)) + message(0x88, "\x03\xe8"+strings.Repeat("mock-API", 9)) + message(0x81, "sk-01")
	if string(got) != want {
		t.Errorf("%.80q", got)
	}
}

func TestFramesThatAreNone(t *testing.T) {
	w := Watched([]Secret{one("API", testValue)})
	for name, in := range map[string]string{
		"compressed": message(0xc1, "x"), "masked": "\x81\x81abcdx", "continued without a beginning": message(0x80, "x"), "begun twice": message(1, "x") + message(1, "x"),
		"a long ping": message(0x89, strings.Repeat("x", 126)), "a ping in pieces": message(9, "x"), "too long": "\x81\x7f\xff\xff\xff\xff\xff\xff\xff\xff",
	} {
		if _, err := io.ReadAll(w.Frames(duplex{Reader: strings.NewReader(in)})); !errors.Is(err, ErrUnwatchable) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, in := range []string{"\x81", "\x81\x05ab", "\x81\x7e\x00"} {
		if _, err := io.ReadAll(w.Frames(duplex{Reader: strings.NewReader(in)})); !errors.Is(err, io.ErrUnexpectedEOF) {
			t.Errorf("%q: %v", in, err)
		}
	}
	var out bytes.Buffer
	f := w.Frames(duplex{Reader: strings.NewReader(""), Writer: &out})
	if _, err := f.Write([]byte("as it is")); err != nil || out.String() != "as it is" {
		t.Error("what a client writes changes")
	}
}

func FuzzFrames(f *testing.F) {
	f.Add([]byte(message(1, "sk-0123") + message(0x89, testValue) + message(0x80, "456789")))
	f.Add([]byte(message(0x82, testValue)))
	w := Watched([]Secret{one("API", testValue)})
	f.Fuzz(func(t *testing.T, in []byte) {
		got, err := io.ReadAll(w.Frames(duplex{Reader: bytes.NewReader(in)}))
		if err == nil {
			for _, m := range messages(t, got) {
				if strings.Contains(m, testValue) {
					t.Errorf("the value is in %q", m)
				}
			}
		}
	})
}

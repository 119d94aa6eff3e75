package guest

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
)

// scripted is a guest that answers the first operation with head and data, and with done unless it is to hang.
func scripted(t *testing.T, head any, data []byte, hang bool) *Session {
	t.Helper()
	host, far := net.Pipe()
	t.Cleanup(func() { host.Close(); far.Close() })
	go func() {
		hello := make([]byte, len(HostMagic)+TokenSize+EpochSize)
		if _, err := io.ReadFull(far, hello); err != nil {
			return
		}
		_, _ = far.Write(append([]byte(GuestMagic), hello[len(HostMagic)+TokenSize:]...))
		for answered := false; ; {
			var h [9]byte
			if _, err := io.ReadFull(far, h[:]); err != nil {
				return
			}
			if _, err := io.CopyN(io.Discard, far, int64(binary.BigEndian.Uint32(h[:]))); err != nil {
				return
			}
			if Type(h[4]) != TypeOpen || answered {
				continue
			}
			answered = true
			send := func(kind Type, payload []byte) {
				frame := binary.BigEndian.AppendUint32(nil, uint32(len(payload)))
				frame = append(append(append(frame, byte(kind)), h[5:]...), payload...)
				_, _ = far.Write(frame)
			}
			body, _ := json.Marshal(head)
			body, _ = json.Marshal(Head{Body: body})
			send(TypeHead, body)
			for len(data) > 0 {
				n := min(len(data), MaxData)
				send(TypeData, data[:n])
				data = data[n:]
			}
			if !hang {
				send(TypeDone, []byte("{}"))
			}
		}
	}()
	s, err := Connect(t.Context(), host, [TokenSize]byte{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { s.Close() })
	return s
}

func TestNothingMoves(t *testing.T) {
	idle, work := idleLimit, workLimit
	idleLimit, workLimit = 50*time.Millisecond, 50*time.Millisecond
	t.Cleanup(func() { idleLimit, workLimit = idle, work })
	timeout := func(what string, err error) {
		t.Helper()
		if shard.CodeOf(err) != shard.CodeTimeout {
			t.Errorf("%s: %v", what, err)
		}
	}
	_, r, err := Get(t.Context(), scripted(t, shard.FileEntry{Type: "file"}, []byte("some"), true), "/f")
	if err != nil {
		t.Fatal(err)
	}
	body, err := io.ReadAll(r)
	timeout("a guest that stops sending", err)
	if string(body) != "some" {
		t.Errorf("%q", body)
	}
	r.Close()

	args := PutArgs{Path: "/f", Size: 2 * Window}
	timeout("a guest that stops taking", Put(t.Context(), scripted(t, nil, nil, true), args, bytes.NewReader(make([]byte, args.Size))))
	args.Size = 1
	timeout("a guest that does not finish", Put(t.Context(), scripted(t, nil, nil, true), args, strings.NewReader("x")))
	client, far := net.Pipe()
	defer far.Close()
	if err := Put(t.Context(), scripted(t, nil, nil, true), args, client); err == nil {
		t.Error("a client that sends nothing is waited for")
	}
	timeout("a guest that does not remove", Remove(t.Context(), scripted(t, nil, nil, true), RemoveArgs{Path: "/f"}))
	timeout("a guest that lists nothing", List(t.Context(), scripted(t, nil, nil, true), "/", func(shard.FileEntry) error { return nil }))
	err = Put(t.Context(), scripted(t, nil, nil, false), PutArgs{Path: "/f", Size: 8 * Window}, bytes.NewReader(make([]byte, 8*Window)))
	if err == nil {
		t.Error("a guest that says well before it has the file is believed")
	}
}

func TestHostileEntries(t *testing.T) {
	list := func(lines string) (entries []shard.FileEntry, err error) {
		err = List(t.Context(), scripted(t, nil, []byte(lines), false), "/", func(e shard.FileEntry) error {
			entries = append(entries, e)
			return nil
		})
		return entries, err
	}
	for what, lines := range map[string]string{
		"no JSON":        "x\n",
		"cut":            `{"name":"a","type":"file"}`,
		"no name":        `{"type":"file"}` + "\n",
		"a path":         `{"name":"../a"}` + "\n",
		"parent":         `{"name":".."}` + "\n",
		"long":           `{"name":"` + strings.Repeat("a", 256) + `"}` + "\n",
		"endless":        strings.Repeat("a", 1<<20),
		"bytes a path":   `{"name":"\ufffd/","name_bytes":"/y8="}` + "\n",
		"bytes for show": `{"name":"a","name_bytes":"/w=="}` + "\n",
		"time":           `{"name":"a","mtime":"99999-01-01T00:00:00Z"}` + "\n",
	} {
		if entries, err := list(lines); !errors.Is(err, ErrProtocol) || len(entries) > 0 {
			t.Errorf("%s: %v, %v", what, entries, err)
		}
	}
	entries, err := list(`{"name":"a","type":"door","mode":4294967295,"size":-1}` + "\n" + `{"name":"\ufffd","name_bytes":"/w==","type":"dir"}` + "\n")
	if err != nil || len(entries) != 2 || entries[0].Type != "other" || entries[0].Mode != 0o7777 || entries[0].Size != 0 || string(entries[1].NameBytes) != "\xff" {
		t.Errorf("%+v, %v", entries, err)
	}
	e, err := Stat(t.Context(), scripted(t, shard.FileEntry{Type: "file", Size: -5, Mode: 1 << 20}, nil, false), "/f")
	if err != nil || e.Size != 0 || e.Mode != 0 {
		t.Errorf("%+v, %v", e, err)
	}
}

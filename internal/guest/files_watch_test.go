package guest

import (
	"bufio"
	"errors"
	"io"
	"strings"
	"testing"
)

func watcherOf(root, lines string) *Watcher {
	return &Watcher{root: strings.TrimRight(root, "/"), lines: bufio.NewReaderSize(strings.NewReader(lines), maxEvent)}
}

// TestHostileFileEvents: only what can be an event of the watch passes.
func TestHostileFileEvents(t *testing.T) {
	const at = `,"time":"2026-01-02T03:04:05Z"}` + "\n"
	for _, good := range []string{
		`{"type":"created","path":"/w/a"`, `{"type":"modified","path":"/w/a/b c"`, `{"type":"deleted","path":"/w","is_dir":true`,
		`{"type":"moved","path":"/w/a","from":"/w/b/c"`, `{"type":"overflow","path":"/w"`, `{"type":"created","path":"/w/\ufffd","path_bytes":"L3cv/w=="`,
		`{"type":"created","path":"/w/..."`,
	} {
		if events, err := watcherOf("/w/", good+at).Next(); err != nil || len(events) != 1 {
			t.Errorf("%s: %v, %v", good, events, err)
		}
	}
	for _, bad := range []string{
		`{"type":"created"`, `{"type":"created","path":"/w"`, `{"type":"created","path":"/www/a"`, `{"type":"created","path":"/etc/passwd"`,
		`{"type":"created","path":"/w/../etc"`, `{"type":"created","path":"/w/./a"`, `{"type":"created","path":"/w//a"`, `{"type":"created","path":"/w/a/"`,
		`{"type":"created","path":"/w/a\u0000b"`, `{"type":"shouted","path":"/w/a"`, `{"type":"","path":"/w/a"`, `{"type":"moved","path":"/w/a"`,
		`{"type":"moved","path":"/w/a","from":"/x"`, `{"type":"created","path":"/w/a","from":"/w/b"`, `{"type":"overflow","path":"/w/a"`,
		`{"type":"created","path":"/w/a","path_bytes":"L3cvYQ=="`, `{"type":"created","path":"/w/b","path_bytes":"L3cv/w=="`,
		`{"type":"created","path":"/w/` + strings.Repeat("a", 4096) + `"`, `[`, `{"type":"created","path":1`,
		`{"type":"created","path":"/w/` + strings.Repeat("a", maxEvent) + `"`,
	} {
		if events, err := watcherOf("/w", bad+at).Next(); !errors.Is(err, ErrProtocol) {
			t.Errorf("%.100s: %v, %v", bad, events, err)
		}
	}
	for _, cut := range []string{`{"type":"created","path":"/w/a"`, "{}"} {
		if _, err := watcherOf("/w", cut).Next(); !errors.Is(err, ErrProtocol) {
			t.Errorf("%s without an end: %v", cut, err)
		}
	}
	if _, err := watcherOf("/w", "").Next(); err != io.EOF {
		t.Errorf("the end: %v", err)
	}
	if events, err := watcherOf("/", `{"type":"created","path":"/a"`+at+`{"type":"overflow","path":"/"`+at).Next(); err != nil || len(events) != 2 {
		t.Errorf("of the root: %v, %v", events, err)
	}
}

func FuzzFileEvents(f *testing.F) {
	f.Add("/w", `{"type":"moved","path":"/w/a","from":"/w/b","time":"2026-01-02T03:04:05Z"}`+"\n")
	f.Add("/", "{\"type\":\"overflow\",\"path\":\"/\",\"time\":\"9999-12-31T23:59:59-01:00\"}\n{}\n")
	f.Fuzz(func(t *testing.T, root, lines string) {
		if CheckPath(root) != nil {
			return
		}
		w := watcherOf(root, lines)
		for {
			events, err := w.Next()
			if err != nil {
				return
			}
			for _, e := range events {
				path, ok := spoken(e.Path, e.PathBytes)
				if !ok || !strings.HasPrefix(path, w.root) || strings.IndexByte(path[len(w.root):], 0) >= 0 {
					t.Errorf("%+v below %q", e, root)
				}
				if _, err := e.Time.MarshalJSON(); err != nil {
					t.Errorf("a time that cannot be told: %v", e.Time)
				}
			}
		}
	})
}

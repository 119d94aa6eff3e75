package egress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
)

func journals(t *testing.T) (*Enforcer, string) {
	t.Helper()
	dir := t.TempDir()
	return &Enforcer{cfg: Config{Dir: func(string) string { return dir }, Log: slog.New(slog.DiscardHandler)},
		wards: map[string]*ward{}, journals: map[string]*journal{}}, dir
}

func hosts(lines []json.RawMessage) string {
	var out []string
	for _, l := range lines {
		var d shard.EgressDecision
		_ = json.Unmarshal(l, &d)
		out = append(out, d.Host)
	}
	return strings.Join(out, " ")
}

func TestJournal(t *testing.T) {
	e, dir := journals(t)
	// A host that ended in the middle of a line.
	if err := os.WriteFile(filepath.Join(dir, journalFile), []byte(`{"host":"old"}`+"\n"+`{"host":"ha`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := e.Record("box", shard.EgressDecision{Host: "a"}); err != nil {
		t.Fatal(err)
	}
	newest, cut, live, err := e.Decisions("box")
	if err != nil || cut != 0 || hosts(newest) != "old a" {
		t.Fatalf("%s, %d, %v", hosts(newest), cut, err)
	}
	defer live.Close()
	if err := e.Record("box", shard.EgressDecision{Host: "b"}); err != nil {
		t.Fatal(err)
	}
	if got, err := live.Next(t.Context()); err != nil || hosts(got) != "b" {
		t.Fatalf("%s, %v", hosts(got), err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	if _, err := live.Next(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Fatal(err)
	}
	e.Forget("box")
	if _, err := live.Next(t.Context()); !errors.Is(err, io.EOF) {
		t.Fatal(err)
	}
}

// TestJournalIsBounded: two files of maxJournal, and a reader who keeps up sees every line across the change of files.
func TestJournalIsBounded(t *testing.T) {
	e, dir := journals(t)
	_, _, live, err := e.Decisions("box")
	if err != nil {
		t.Fatal(err)
	}
	defer live.Close()
	const lines = 2500
	long := strings.Repeat("x", 8<<10)
	seen := 0
	for n := range lines {
		if err := e.Record("box", shard.EgressDecision{Host: fmt.Sprint(n), Reason: long}); err != nil {
			t.Fatal(err)
		}
		if n%7 != 0 && n != lines-1 {
			continue
		}
		for seen <= n {
			got, err := live.Next(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			for _, l := range got {
				if hosts([]json.RawMessage{l}) != fmt.Sprint(seen) {
					t.Fatalf("line %d is %s", seen, hosts([]json.RawMessage{l}))
				}
				seen++
			}
		}
	}
	for _, name := range []string{journalFile, oldJournal} {
		if st, err := os.Stat(filepath.Join(dir, name)); err != nil || st.Size() > maxJournal {
			t.Errorf("%s: %v, %v", name, st, err)
		}
	}
	// A burst is counted, not written.
	j := e.journal("box")
	for range noteBurst + 500 {
		j.note(shard.EgressDecision{Source: "dns", Host: "burst"})
	}
	j.count()
	newest, _, again, err := e.Decisions("box")
	if err != nil {
		t.Fatal(err)
	}
	again.Close()
	if last := string(newest[len(newest)-1]); !strings.Contains(last, "more decisions") || !strings.Contains(last, `"rule":"limit"`) {
		t.Errorf("the last line is %s", last)
	}
}

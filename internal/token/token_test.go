package token

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/useshards/shard"
)

func open(t *testing.T) (*Book, string) {
	t.Helper()
	file := DefaultKeyFile(t.TempDir())
	b, err := Open(file, true)
	if err != nil {
		t.Fatal(err)
	}
	return b, file
}

func mint(t *testing.T, b *Book, name string) (string, *Record) {
	t.Helper()
	text, r, err := b.Mint(name, 0, []string{"exec"})
	if err != nil {
		t.Fatal(err)
	}
	return text, r
}

// TestCase144TokensAtRest: the ledger has no token in it, and nobody gains anything by editing it.
func TestCase144TokensAtRest(t *testing.T) {
	b, file := open(t)
	text, r := mint(t, b, "one")
	other, _ := mint(t, b, "two")
	ledger := filepath.Join(filepath.Dir(file), "serve.tokens")
	raw, err := os.ReadFile(ledger)
	if err != nil {
		t.Fatal(err)
	}
	for _, part := range strings.Split(text, ".") {
		if strings.Contains(string(raw), part) {
			t.Error("the ledger holds a part of a token")
		}
	}
	for path, want := range map[string]os.FileMode{filepath.Dir(file): 0o700, file: 0o600, ledger: 0o640, ledger + ".lock": 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v %v, want %v", path, info.Mode(), err, want)
		}
	}
	if key, _ := os.ReadFile(file); len(strings.TrimSpace(string(key))) != 64 {
		t.Errorf("the key has %d characters", len(key))
	}
	edit := func(old, changed string) {
		t.Helper()
		if !strings.Contains(string(raw), old) {
			t.Fatalf("%q is not in the ledger", old)
		}
		if err := os.WriteFile(ledger, []byte(strings.Replace(string(raw), old, changed, 1)), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	for what, change := range map[string][2]string{
		"more scopes":     {`"scopes":["exec"]`, `"scopes":["*"]`},
		"unknown scopes":  {`"scopes":["exec"]`, `"scopes":["colour"]`},
		"no scopes":       {`"scopes":["exec"]`, `"scopes":null`},
		"another name":    {`"name":"one"`, `"name":"two"`},
		"another hash":    {`"hash":"` + r.Hash[:4], `"hash":"0000`},
		"an end":          {`"expires_at":null`, `"expires_at":"2100-01-01T00:00:00Z"`},
		"another field":   {`"name":"one"`, `"name":"one","admin":true`},
		"half a record":   {`"name":"one"`, `"name":"on`},
		"another id":      {`"id":"` + r.ID[:4], `"id":"0000`},
		"no record":       {`"id"`, `"other"`},
		"a revocation":    {`"scopes":["exec"]`, `"scopes":["exec"],"revoked_at":"2020-01-01T00:00:00Z"`},
		"a list":          {`{"id"`, `[{"id"`},
		"two on one line": {"}\n", "}"},
	} {
		edit(change[0], change[1])
		if g, err := b.Check(text); err == nil {
			t.Errorf("%s: %+v", what, g)
		}
		if _, err := b.Check(other); (err != nil) != (what == "two on one line") {
			t.Errorf("%s: another token: %v", what, err)
		}
	}
	// The line of a revoked token, once more without the revocation.
	if err := os.WriteFile(ledger, raw, 0o640); err != nil {
		t.Fatal(err)
	}
	if ids, found, err := b.Revoke(func(rec *Record) bool { return rec.ID == r.ID }); err != nil || !found || !slices.Equal(ids, []string{r.ID}) {
		t.Fatal(ids, found, err)
	}
	revoked, _ := os.ReadFile(ledger)
	first, _, _ := strings.Cut(string(raw), "\n")
	if err := os.WriteFile(ledger, append(revoked, first+"\n"...), 0o640); err != nil {
		t.Fatal(err)
	}
	if g, err := b.Check(text); err == nil {
		t.Errorf("a second record revives it: %+v", g)
	}
	records, warnings, err := b.List()
	if err != nil || len(records) != 1 || len(warnings) != 2 {
		t.Errorf("%+v %q %v", records, warnings, err)
	}
	// Broken lines are kept for whoever looks into it.
	mint(t, b, "three")
	if now, _ := os.ReadFile(ledger); !strings.Contains(string(now), first) {
		t.Error("a broken line was thrown away")
	}
}

// TestReuse: a new token of an old name does not revive the old one, and names say nothing about each other's tokens.
func TestReuse(t *testing.T) {
	b, _ := open(t)
	old, r := mint(t, b, "agent")
	if ids, _, err := b.Revoke(func(rec *Record) bool { return rec.Name == "agent" }); err != nil || !slices.Equal(ids, []string{r.ID}) {
		t.Fatal(ids, err)
	}
	fresh, _ := mint(t, b, "agent")
	if _, err := b.Check(old); err == nil {
		t.Error("the old token lives again")
	}
	if g, err := b.Check(fresh); err != nil || g.Name != "agent" || !slices.Equal(g.Scopes, []string{"exec"}) {
		t.Error(g, err)
	}
	if ids, found, err := b.Revoke(func(rec *Record) bool { return rec.ID == r.ID }); err != nil || !found || len(ids) != 0 {
		t.Error("revoked twice:", ids, found, err)
	}
	if _, found, err := b.Revoke(func(rec *Record) bool { return rec.Name == "nobody" }); err != nil || found {
		t.Error(found, err)
	}
	for _, bad := range []string{"", ".", "..", "a/b", "%2e%2e", "-a", "A", "a b", "é", "\u0430", "a\x00", strings.Repeat("a", 65), strings.Repeat("a", 300)} {
		if _, _, err := b.Mint(bad, 0, []string{"*"}); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("Mint(%q): %v", bad, err)
		}
	}
	if _, _, err := b.Mint("a", 0, nil); err == nil {
		t.Error("a token of no scopes")
	}
}

func TestExpiry(t *testing.T) {
	b, _ := open(t)
	begin := time.Now()
	text, r, err := b.Mint("short", time.Second, []string{"*"})
	if err != nil || r.ExpiresAt == nil || r.ExpiresAt.Before(begin.Add(time.Second).Truncate(time.Second)) {
		t.Fatal(r, err)
	}
	g, err := b.Check(text)
	if err != nil {
		t.Fatal(err)
	}
	if v := b.View(); !v.Standing(g, r.ExpiresAt.Add(-1)) || v.Standing(g, *r.ExpiresAt) {
		t.Error("it does not end when it says")
	}
	if r.Status(r.ExpiresAt.Add(-1)) != Active || r.Status(*r.ExpiresAt) != Expired {
		t.Error("its status is not what it does")
	}
}

// TestKeyFile: what is no signing key.
func TestKeyFile(t *testing.T) {
	dir := t.TempDir()
	file := filepath.Join(dir, "key")
	for what, make := range map[string]func() error{
		"empty":          func() error { return os.WriteFile(file, nil, 0o600) },
		"blank":          func() error { return os.WriteFile(file, []byte(strings.Repeat("\n", 64)), 0o600) },
		"short":          func() error { return os.WriteFile(file, []byte(strings.Repeat("k", 31)), 0o600) },
		"long":           func() error { return os.WriteFile(file, []byte(strings.Repeat("k", maxKeyFile+1)), 0o600) },
		"a directory":    func() error { return os.Mkdir(file, 0o700) },
		"a pipe":         func() error { return syscall.Mkfifo(file, 0o600) },
		"world-readable": func() error { return writeMode(file, 0o604) },
		"world-writable": func() error { return writeMode(file, 0o602) },
		"missing":        func() error { return nil },
	} {
		if err := make(); err != nil {
			t.Fatal(err)
		}
		if _, err := Open(file, false); err == nil {
			t.Errorf("%s: it is taken", what)
		}
		if err := os.RemoveAll(file); err != nil {
			t.Fatal(err)
		}
	}
	if err := writeMode(file, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := Open(file, false); err != nil {
		t.Error(err)
	}
}

func writeMode(file string, mode os.FileMode) error {
	if err := os.WriteFile(file, []byte(strings.Repeat("k", 64)), 0o600); err != nil {
		return err
	}
	return os.Chmod(file, mode)
}

// TestTogether: programs that make the key and write the ledger at the same time lose nothing.
func TestTogether(t *testing.T) {
	file := DefaultKeyFile(t.TempDir())
	var wg sync.WaitGroup
	tokens := make([]string, 24)
	for i := range tokens {
		wg.Go(func() {
			b, err := Open(file, true)
			if err == nil {
				tokens[i], _, err = b.Mint(fmt.Sprintf("n%d", i), 0, []string{"*"})
			}
			if err == nil && i%3 == 0 {
				_, _, err = b.Revoke(func(r *Record) bool { return r.Name == fmt.Sprintf("n%d", i) })
			}
			if err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	b, err := Open(file, false)
	if err != nil {
		t.Fatal(err)
	}
	for i, text := range tokens {
		if _, err := b.Check(text); (err != nil) != (i%3 == 0) {
			t.Errorf("token %d: %v", i, err)
		}
	}
	entries, _ := os.ReadDir(filepath.Dir(file))
	if len(entries) != 3 {
		t.Errorf("left behind: %v", entries)
	}
}

// TestLedgerKeepsReaders: who could read the ledger can read it after the next change.
func TestLedgerKeepsReaders(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root can give a file to a group: run as root")
	}
	b, file := open(t)
	mint(t, b, "one")
	ledger := filepath.Join(filepath.Dir(file), "serve.tokens")
	if err := os.Chown(ledger, 0, 12345); err != nil {
		t.Fatal(err)
	}
	mint(t, b, "two")
	info, err := os.Stat(ledger)
	if err != nil || info.Sys().(*syscall.Stat_t).Gid != 12345 || info.Mode().Perm() != 0o640 {
		t.Error(info.Mode(), err)
	}
}

// FuzzLedger: no bytes in the ledger make a token good that was not minted with this key, or make us fall over.
func FuzzLedger(f *testing.F) {
	record, _ := json.Marshal(Record{ID: strings.Repeat("a", 32), Name: "n", Scopes: []string{"*"}})
	f.Add(string(record) + "\n" + string(record))
	f.Add("{}\n\n[]\nnull\n")
	f.Fuzz(func(t *testing.T, raw string) {
		ids := map[string]int{}
		for _, e := range parse([]byte(raw)) {
			if (e.record == nil) == (e.err == nil) {
				t.Fatalf("%q is a record and none", e.line)
			}
			if e.record != nil {
				if ids[e.record.ID]++; ids[e.record.ID] > 1 || !idPattern.MatchString(e.record.ID) {
					t.Fatalf("id %q", e.record.ID)
				}
			}
		}
	})
}

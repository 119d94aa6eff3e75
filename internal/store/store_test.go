package store

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

type thing struct {
	Name string `json:"name"`
}

func open(t *testing.T) (*Records[thing], string) {
	t.Helper()
	dir := t.TempDir()
	r, err := Open[thing](filepath.Join(dir, "things"), "thing.json", 1)
	if err != nil {
		t.Fatal(err)
	}
	return r, dir
}

func TestRoundTrip(t *testing.T) {
	r, _ := open(t)
	for _, name := range []string{"first", "second"} {
		if err := r.Put("a", &thing{Name: name}); err != nil {
			t.Fatal(err)
		}
		if v, err := r.Get("a"); err != nil || v.Name != name {
			t.Fatalf("%+v, %v", v, err)
		}
	}
	if err := os.WriteFile(filepath.Join(r.Dir("a"), "other"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for range 2 { // removing twice is not an error
		if err := r.Delete("a"); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := os.Stat(r.Dir("a")); !os.IsNotExist(err) {
		t.Fatalf("the directory is still there: %v", err)
	}
}

// TestOtherVersions is case 130: records of another version are read safely or refused by name, never rewritten.
func TestOtherVersions(t *testing.T) {
	r, _ := open(t)
	files := map[string]string{
		"good":    `{"format":1,"record":{"name":"x"}}`,
		"missing": `{"format":1,"record":{}}`,
		"higher":  `{"format":2,"record":{"name":"x"}}`,
		"unknown": `{"format":1,"record":{"name":"x","colour":"red"}}`,
		"damaged": `{"format":1,"rec`,
		"empty":   ``,
		"null":    `{"format":1,"record":null}`,
	}
	for key, text := range files {
		if err := os.MkdirAll(r.Dir(key), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(r.Dir(key), "thing.json"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(r.Dir("hollow"), 0o700); err != nil {
		t.Fatal(err)
	}
	good, bad, hollow, err := r.All()
	if err != nil || len(good) != 2 || good["good"].Name != "x" || good["missing"] == nil || len(bad) != 5 ||
		len(hollow) != 1 || hollow[0] != "hollow" {
		t.Fatalf("good %v, bad %v, hollow %v, %v", good, bad, hollow, err)
	}
	for _, u := range bad {
		if strings.Contains(u.Reason, "/") {
			t.Errorf("%s: a path in %q", u.Key, u.Reason)
		}
		if data, _ := os.ReadFile(filepath.Join(r.Dir(u.Key), "thing.json")); string(data) != files[u.Key] {
			t.Errorf("%s was rewritten", u.Key)
		}
	}
}

func TestLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "lock")
	f, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Lock(path); err != ErrHeld {
		t.Fatalf("a second lock: %v", err)
	}
	f.Close()
	g, err := Lock(path)
	if err != nil {
		t.Fatal(err)
	}
	g.Close()
}

func BenchmarkPut(b *testing.B) {
	r, err := Open[thing](filepath.Join(b.TempDir(), "things"), "thing.json", 1)
	if err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		if err := r.Put("a", &thing{Name: "x"}); err != nil {
			b.Fatal(err)
		}
	}
}

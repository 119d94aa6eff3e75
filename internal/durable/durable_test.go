package durable

import (
	"os"
	"path/filepath"
	"testing"
)

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "file")
	for _, mode := range []os.FileMode{0o600, 0o644} { // a new one, and the same name again
		if err := WriteFile(path, []byte(mode.String()), mode); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		info, _ := os.Stat(path)
		if err != nil || string(data) != mode.String() || info.Mode() != mode {
			t.Errorf("%q, %v, %v", data, info.Mode(), err)
		}
	}
	if err := os.MkdirAll(filepath.Join(dir, "taken", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := WriteFile(filepath.Join(dir, "taken"), nil, 0o600); err == nil {
		t.Error("a directory was replaced")
	}
	if err := os.WriteFile(filepath.Join(dir, temporary+"1"), nil, 0o600); err != nil { // a crash in a write
		t.Fatal(err)
	}
	Sweep(dir)
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 2 {
		t.Errorf("left are %v, %v", entries, err)
	}
}

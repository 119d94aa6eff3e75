package hostfs

import (
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/useshards/shard"
)

// TestConformance unpacks the archives of conformance/tar, which the SDKs unpack too: see the README there.
func TestConformance(t *testing.T) {
	const vectors = "../../conformance/tar"
	raw, err := os.ReadFile(vectors + "/index.json")
	must(t, err)
	type landed struct {
		Data *string
		Link *string
		Dir  bool
		Mode string
	}
	var index map[string]struct {
		Refused bool
		Holds   map[string]landed
	}
	must(t, json.Unmarshal(raw, &index))
	if len(index) < 40 {
		t.Fatalf("only %d archives", len(index))
	}
	for name, want := range index {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			target := dir + "/target"
			write(t, dir+"/canary", "untouched")
			must(t, os.Mkdir(target, 0o755))
			archive, err := os.Open(vectors + "/" + name + ".tar")
			must(t, err)
			defer archive.Close()

			err = Unpack(t.Context(), archive, target, UnpackOptions{Name: "."})
			switch {
			case want.Refused && shard.CodeOf(err) != shard.CodeInvalidRequest:
				t.Errorf("got %v, want a refusal", err)
			case !want.Refused:
				must(t, err)
			}
			for name, w := range want.Holds {
				path := target + "/" + name
				if w.Data != nil {
					wantFile(t, path, *w.Data)
				}
				if w.Link != nil {
					if got, err := os.Readlink(path); err != nil || got != *w.Link {
						t.Errorf("%s: a link to %q, %v; want %q", name, got, err, *w.Link)
					}
				}
				info, err := os.Lstat(path)
				must(t, err)
				if w.Dir && !info.IsDir() {
					t.Errorf("%s is no directory", name)
				}
				if got := unixMode(info.Mode()); w.Mode != "" && got != w.Mode {
					t.Errorf("%s has mode %s, want %s", name, got, w.Mode)
				}
			}
			wantFile(t, dir+"/canary", "untouched")
			wantNames(t, dir, "canary", "target")
			wantInside(t, target)
		})
	}
}

func unixMode(m fs.FileMode) string {
	bits := uint32(m.Perm())
	for bit, flag := range map[uint32]fs.FileMode{0o4000: fs.ModeSetuid, 0o2000: fs.ModeSetgid, 0o1000: fs.ModeSticky} {
		if m&flag != 0 {
			bits |= bit
		}
	}
	return fmt.Sprintf("%04o", bits)
}

// wantInside checks that no link below dir leads out of it, and that nothing temporary was left.
func wantInside(t *testing.T, dir string) {
	t.Helper()
	must(t, filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if strings.HasPrefix(d.Name(), ".shard-") {
			t.Errorf("%s was left", path)
		}
		if d.Type() != fs.ModeSymlink {
			return nil
		}
		if to, err := os.Readlink(path); err != nil || filepath.IsAbs(to) {
			t.Errorf("%s is a link to %q, %v", path, to, err)
		}
		if real, err := filepath.EvalSymlinks(path); err == nil && real != dir && !strings.HasPrefix(real, dir+"/") {
			t.Errorf("%s leads out, to %s", path, real)
		}
		return nil
	}))
}

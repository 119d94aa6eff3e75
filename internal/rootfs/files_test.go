//go:build linux

package rootfs

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFilesInHostileRoot: whatever links, pipes and sizes a guest left, reading and replacing a file stays inside its root
// and ends.
func TestFilesInHostileRoot(t *testing.T) {
	base := t.TempDir()
	root := filepath.Join(base, "root")
	outside := filepath.Join(base, "outside")
	for _, dir := range []string{"etc/ssl", "etc/loop", "srv"} {
		if err := os.MkdirAll(filepath.Join(root, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write := func(path, text string) {
		if err := os.WriteFile(path, []byte(text), 0o640); err != nil {
			t.Fatal(err)
		}
	}
	write(outside, "the host's")
	write(filepath.Join(root, "srv/plain"), "guest")
	write(filepath.Join(root, "srv/long"), "")
	err := errors.Join(
		os.Truncate(filepath.Join(root, "srv/long"), 1<<40),
		os.Symlink("/srv/plain", filepath.Join(root, "etc/ssl/absolute")),
		os.Symlink("../../srv/plain", filepath.Join(root, "etc/ssl/relative")),
		os.Symlink("../../../outside", filepath.Join(root, "etc/ssl/out")),
		os.Symlink(outside, filepath.Join(root, "etc/ssl/outright")),
		os.Symlink("/etc/loop/b", filepath.Join(root, "etc/loop/a")),
		os.Symlink("/etc/loop/a", filepath.Join(root, "etc/loop/b")),
		os.Symlink("/proc/self/root"+outside, filepath.Join(root, "etc/ssl/magic")),
		os.Symlink("/srv", filepath.Join(root, "etc/dir")),
		unix.Mkfifo(filepath.Join(root, "srv/pipe"), 0o600),
		os.Chown(filepath.Join(root, "srv/plain"), 1234, 4321),
	)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]any{
		"/srv/plain": "guest", "/etc/ssl/absolute": "guest", "/etc/ssl/relative": "guest", "/etc/dir/plain": "guest",
		"/etc/ssl/out": fs.ErrNotExist, "/etc/ssl/outright": fs.ErrNotExist, "/etc/ssl/magic": fs.ErrNotExist, "/nothing": fs.ErrNotExist, "/srv/plain/below": fs.ErrNotExist,
		"/etc/loop/a": ErrNotPlain, "/srv/pipe": ErrNotPlain, "/srv": ErrNotPlain, "/srv/long": ErrNotPlain,
	} {
		data, err := ReadFile(root, path, 1<<20)
		switch want := want.(type) {
		case string:
			if err != nil || string(data) != want {
				t.Errorf("read %s: %q, %v", path, data, err)
			}
		case error:
			if !errors.Is(err, want) {
				t.Errorf("read %s: %v, want %v", path, err, want)
			}
			if path != "/srv/long" {
				if err := ReplaceFile(root, path, []byte("new")); !errors.Is(err, want) {
					t.Errorf("replace %s: %v, want %v", path, err, want)
				}
			}
		}
	}
	write(filepath.Join(root, "srv/.shard-new"), "left by a crash")
	for path, text := range map[string]string{"/etc/ssl/absolute": "first", "/srv/plain": "second", "/etc/dir/plain": strings.Repeat("third", 1000)} {
		if err := ReplaceFile(root, path, []byte(text)); err != nil {
			t.Errorf("replace %s: %v", path, err)
		}
		var st unix.Stat_t
		data, err := os.ReadFile(filepath.Join(root, "srv/plain"))
		if err := errors.Join(err, unix.Stat(filepath.Join(root, "srv/plain"), &st)); err != nil || string(data) != text || st.Uid != 1234 || st.Gid != 4321 || st.Mode&0o7777 != 0o640 {
			t.Errorf("%s: %q, %+v, %v", path, data, st, err)
		}
	}
	for dir, want := range map[string]error{"/srv": nil, "/etc/dir": nil, "/etc/ssl/out": fs.ErrNotExist, "/srv/plain": fs.ErrNotExist, "/etc/ssl/magic": fs.ErrNotExist, "/etc/loop/a": ErrNotPlain} {
		if err := AddFile(root, dir, "added", []byte(dir)); !errors.Is(err, want) {
			t.Errorf("add to %s: %v, want %v", dir, err, want)
		} else if data, err := ReadFile(root, "/srv/added", 100); want == nil && (err != nil || string(data) != dir) {
			t.Errorf("added to %s: %q, %v", dir, data, err)
		}
	}
	for name, want := range map[string]error{"added": nil, "dir": ErrNotPlain} { // a link goes, and is not followed
		_ = os.Remove(filepath.Join(root, "srv", name))
		err := os.Symlink(outside, filepath.Join(root, "srv", name))
		if want != nil {
			err = errors.Join(os.Remove(filepath.Join(root, "srv", name)), os.Mkdir(filepath.Join(root, "srv", name), 0o755))
		}
		if err != nil {
			t.Fatal(err)
		}
		if err := AddFile(root, "/srv", name, []byte("new")); !errors.Is(err, want) {
			t.Errorf("add %s: %v, want %v", name, err, want)
		}
		if err := os.Remove(filepath.Join(root, "srv", name)); err != nil {
			t.Error(err)
		}
	}
	if err := os.MkdirAll(filepath.Join(root, "srv/.shard-new/kept"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(ReplaceFile(root, "/srv/plain", nil), AddFile(root, "/srv", "added", nil)); !errors.Is(err, ErrNotPlain) {
		t.Errorf("with a directory in the way: %v", err)
	}
	if err := os.RemoveAll(filepath.Join(root, "srv/.shard-new")); err != nil {
		t.Fatal(err)
	}
	entries, err := os.ReadDir(filepath.Join(root, "srv"))
	if err != nil || len(entries) != 3 {
		t.Errorf("left over: %v %v", entries, err)
	}
	if data, _ := os.ReadFile(outside); string(data) != "the host's" {
		t.Errorf("the host's file: %q", data)
	}
}

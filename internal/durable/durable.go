// Package durable writes files that are wholly the old or wholly the new ones after a crash of the program or the host.
package durable

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

const temporary = ".tmp-"

// WriteFile replaces path by data: temporary file, fsync, rename, fsync of the directory. When it fails before the rename the
// old file stands and nothing else is left.
func WriteFile(path string, data []byte, mode fs.FileMode) error {
	dir := filepath.Dir(path)
	f, err := os.CreateTemp(dir, temporary)
	if err == nil {
		_, err = f.Write(data)
		if err == nil {
			err = errors.Join(f.Chmod(mode), f.Sync())
		}
		if err = errors.Join(err, f.Close()); err == nil {
			err = os.Rename(f.Name(), path)
		}
		if err != nil {
			_ = os.Remove(f.Name())
		}
	}
	if err != nil {
		return fmt.Errorf("write %s: %w", filepath.Base(path), err)
	}
	return SyncDir(dir)
}

// SyncDir makes the names in dir durable.
func SyncDir(dir string) error {
	f, err := os.Open(dir)
	if err != nil {
		return err
	}
	if err := errors.Join(f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("sync directory: %w", err)
	}
	return nil
}

// Sweep removes what interrupted writes left in dir. Nobody may write there meanwhile.
func Sweep(dir string) {
	entries, _ := os.ReadDir(dir)
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), temporary) {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
}

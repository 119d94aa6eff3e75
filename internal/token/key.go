// Package token makes, lists, revokes and checks the tokens of shard serve: JWTs signed with a key that lies in a file, and a
// ledger beside it in which every token that may be used has a record. A token needs both: a right signature and a record
// that agrees with it. The ledger holds hashes, never tokens. The package knows files and claims; it must not know
// HTTP, routes or the daemon.
package token

import (
	"bytes"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/durable"
)

const (
	// keyBytes is the least length of a signing key, in bytes; one that is made has that many random ones.
	keyBytes = 32
	// maxKeyFile bounds a signing key file, in bytes.
	maxKeyFile = 64 << 10
)

// DefaultKeyFile is where the signing key of a root lies.
func DefaultKeyFile(root string) string { return filepath.Join(root, "auth", "signing-key") }

// readKey reads a signing key. A file that everybody may read or write is no secret, and is refused.
func readKey(path string) ([]byte, error) {
	// Without O_NONBLOCK a pipe by that name would hang us.
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	switch {
	case !info.Mode().IsRegular():
		return nil, fmt.Errorf("the signing key %s is not a file", path)
	case info.Mode().Perm()&0o007 != 0:
		return nil, fmt.Errorf("the signing key %s is open to every user of this host: run chmod o= on it, and mint new tokens if somebody may have read it", path)
	}
	key, err := io.ReadAll(io.LimitReader(f, maxKeyFile+1))
	if err != nil {
		return nil, err
	}
	key = bytes.TrimSpace(key)
	switch {
	case len(key) == 0:
		return nil, fmt.Errorf("the signing key %s is empty", path)
	case len(key) < keyBytes:
		return nil, fmt.Errorf("the signing key %s is shorter than %d bytes", path, keyBytes)
	case len(key) > maxKeyFile:
		return nil, fmt.Errorf("the signing key %s is longer than %d bytes", path, maxKeyFile)
	}
	return key, nil
}

// makeKey puts a new random key at path unless one is there. It appears whole or not at all, whoever else is at it.
func makeKey(path string) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	raw := make([]byte, keyBytes)
	_, _ = rand.Read(raw) // never fails
	f, err := os.CreateTemp(dir, ".signing-key-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name())
	_, err = f.WriteString(hex.EncodeToString(raw) + "\n")
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Link(f.Name(), path); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return durable.SyncDir(dir)
}

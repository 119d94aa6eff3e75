// Package store keeps records on disk: one JSON file each, written so that after a crash of the daemon or the host a
// record is wholly the old or wholly the new one. It knows nothing of what the records mean.
package store

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/durable"
)

// Records is a directory of records of one type: <dir>/<key>/<file>. The caller checks keys: they become path elements.
// One process writes; methods of different keys may run at the same time.
type Records[T any] struct {
	dir, file string
	format    int
}

// Unreadable names a record that could not be read, and why.
type Unreadable struct {
	Key    string
	Reason string
}

// envelope is the form on disk. A record of a higher format, or with fields this build does not know, is refused rather
// than read in part: it would lose them when it is next written.
type envelope[T any] struct {
	Format int `json:"format"`
	Record *T  `json:"record"`
}

// Open uses dir, making it when it is missing, for records of the given format version.
func Open[T any](dir, file string, format int) (*Records[T], error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of records: %w", err)
	}
	return &Records[T]{dir: dir, file: file, format: format}, nil
}

// Dir is the directory of one key. Whoever owns the record may keep other files in it.
func (r *Records[T]) Dir(key string) string { return filepath.Join(r.dir, key) }

// Put writes a record durably: when it returns nil, the record survives a crash of the host.
func (r *Records[T]) Put(key string, v *T) error {
	data, err := json.MarshalIndent(envelope[T]{Format: r.format, Record: v}, "", "  ")
	if err != nil {
		return fmt.Errorf("encode record %s: %w", key, err)
	}
	dir := r.Dir(key)
	switch err := os.Mkdir(dir, 0o700); {
	case err == nil:
		if err := durable.SyncDir(r.dir); err != nil {
			return err
		}
	case !errors.Is(err, fs.ErrExist):
		return fmt.Errorf("make the directory of record %s: %w", key, err)
	}
	return durable.WriteFile(filepath.Join(dir, r.file), append(data, '\n'), 0o600)
}

// Get reads a record; fs.ErrNotExist when there is none.
func (r *Records[T]) Get(key string) (*T, error) {
	data, err := os.ReadFile(filepath.Join(r.dir, key, r.file))
	if err != nil {
		return nil, err
	}
	var version struct {
		Format int `json:"format"`
	}
	if err := json.Unmarshal(data, &version); err != nil {
		return nil, errors.New("it is not valid JSON")
	}
	if version.Format != r.format {
		return nil, fmt.Errorf("it has format %d, and this version of shard reads format %d", version.Format, r.format)
	}
	var e envelope[T]
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil {
		return nil, fmt.Errorf("it does not have the fields this version of shard knows: %w", err)
	}
	if e.Record == nil {
		return nil, errors.New("it is empty")
	}
	return e.Record, nil
}

// All reads every record. One that cannot be read harms no other: it is named in the second result. A directory without
// a record file is what a create or a remove left when the host crashed; it is returned in the third. It also removes what
// interrupted writes left: nobody may write yet.
func (r *Records[T]) All() (map[string]*T, []Unreadable, []string, error) {
	entries, err := os.ReadDir(r.dir)
	if err != nil {
		return nil, nil, nil, fmt.Errorf("read the directory of records: %w", err)
	}
	records := make(map[string]*T)
	var bad []Unreadable
	var empty []string
	for _, e := range entries {
		if !e.IsDir() {
			continue
		}
		durable.Sweep(r.Dir(e.Name()))
		v, err := r.Get(e.Name())
		switch {
		case err == nil:
			records[e.Name()] = v
		case errors.Is(err, fs.ErrNotExist):
			empty = append(empty, e.Name())
		default:
			bad = append(bad, Unreadable{Key: e.Name(), Reason: err.Error()})
		}
	}
	return records, bad, empty, nil
}

// Delete removes a record and everything in its directory. The record itself goes first, so that a crash in between
// leaves an empty directory, never a record without its files.
func (r *Records[T]) Delete(key string) error {
	dir := r.Dir(key)
	if err := os.Remove(filepath.Join(dir, r.file)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove record %s: %w", key, err)
	}
	if err := durable.SyncDir(dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the directory of record %s: %w", key, err)
	}
	return nil
}

// ErrHeld says that another process holds the lock.
var ErrHeld = errors.New("another process holds the lock")

// Lock takes an advisory lock on path, making the file when it is missing, and holds it until the file is closed or the
// process ends. ErrHeld: another process has it, and keeps it for longer than a program that a killed owner was just
// starting would (until it executes).
func Lock(path string) (*os.File, error) {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_CLOEXEC, 0o600)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(time.Second); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		switch {
		case err == nil:
			return f, nil
		case !errors.Is(err, unix.EWOULDBLOCK):
			f.Close()
			return nil, err
		case time.Now().After(deadline):
			f.Close()
			return nil, ErrHeld
		}
	}
}

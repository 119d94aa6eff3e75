package token

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/durable"
)

const (
	// maxLedger bounds a ledger, in bytes: about 100,000 tokens.
	maxLedger = 64 << 20
	// lockWait bounds the wait for another program that writes the ledger.
	lockWait = 10 * time.Second
	// ledgerMode lets the group read: shard serve needs no more.
	ledgerMode = 0o640
)

// Record is what the ledger knows of one token.
type Record struct {
	// ID is the token's jti, 32 hex digits.
	ID   string `json:"id"`
	Name string `json:"name"`
	// Hash is the SHA-256 of the token, in hex: it recognises the token and cannot be turned back into it.
	Hash      string     `json:"hash"`
	IssuedAt  time.Time  `json:"issued_at"`
	ExpiresAt *time.Time `json:"expires_at"`
	Scopes    []string   `json:"scopes"`
	RevokedAt *time.Time `json:"revoked_at,omitempty"`
}

// The states of a token.
const (
	Active  = "active"
	Revoked = "revoked"
	Expired = "expired"
)

// Status is the state of the token at a moment.
func (r *Record) Status(now time.Time) string {
	switch {
	case r.RevokedAt != nil:
		return Revoked
	case r.ExpiresAt != nil && !now.Before(*r.ExpiresAt):
		return Expired
	}
	return Active
}

// Ledger is the file of records, one JSON object to a line, and its lock beside it. Lines that cannot be read are kept
// as they are and give nobody access.
type Ledger struct{ path string }

// LedgerOf is the ledger beside a signing key.
func LedgerOf(keyFile string) *Ledger {
	return &Ledger{filepath.Join(filepath.Dir(keyFile), "serve.tokens")}
}

// List is every readable record, oldest first, and a warning for each line that is none. A ledger that is not there is
// empty.
func (l *Ledger) List() ([]Record, []string, error) {
	data, _, err := l.read()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil, nil
	}
	if err != nil {
		return nil, nil, fmt.Errorf("read the ledger of tokens: %w", err)
	}
	var records []Record
	var warnings []string
	for i, e := range parse(data) {
		switch {
		case e.err != nil:
			warnings = append(warnings, fmt.Sprintf("line %d of %s gives no access: %v", i+1, l.path, e.err))
		default:
			records = append(records, *e.record)
		}
	}
	return records, warnings, nil
}

// Revoke marks the active tokens that match, and returns their ids. found says whether any token matched, active or not.
func (l *Ledger) Revoke(match func(*Record) bool) (ids []string, found bool, err error) {
	err = l.update(func(data []byte) ([]byte, error) {
		now := time.Now().UTC().Truncate(time.Second)
		var out bytes.Buffer
		for _, e := range parse(data) {
			line := e.line
			if e.record != nil && match(e.record) {
				found = true
				if e.record.RevokedAt == nil {
					ids = append(ids, e.record.ID)
					e.record.RevokedAt = &now
					var err error
					if line, err = json.Marshal(e.record); err != nil {
						return nil, err
					}
				}
			}
			out.Write(line)
			out.WriteByte('\n')
		}
		return out.Bytes(), nil
	})
	return ids, found, err
}

// add appends a record.
func (l *Ledger) add(r *Record) error {
	return l.update(func(data []byte) ([]byte, error) {
		line, err := json.Marshal(r)
		if err != nil {
			return nil, err
		}
		if len(data) > 0 && data[len(data)-1] != '\n' {
			data = append(data, '\n')
		}
		return append(append(data, line...), '\n'), nil
	})
}

// update rewrites the ledger under its lock.
func (l *Ledger) update(change func([]byte) ([]byte, error)) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	data, old, err := l.read()
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("read the ledger of tokens: %w", err)
	}
	if data, err = change(data); err != nil {
		return err
	}
	if err := l.write(data, old); err != nil {
		return fmt.Errorf("write the ledger of tokens: %w", err)
	}
	return nil
}

func (l *Ledger) lock() (unlock func(), err error) {
	f, err := os.OpenFile(l.path+".lock", os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock the ledger of tokens: %w", err)
	}
	for deadline := time.Now().Add(lockWait); ; time.Sleep(10 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { f.Close() }, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) || time.Now().After(deadline) {
			f.Close()
			return nil, fmt.Errorf("lock the ledger of tokens %s: %w", l.path, err)
		}
	}
}

// write replaces the ledger. Who could read the old one can read the new one.
func (l *Ledger) write(data []byte, old os.FileInfo) (err error) {
	// The lock is held, so the name is ours; what is there by it was left by a crash.
	temp := l.path + ".new"
	if err := os.Remove(temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	f, err := os.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = os.Remove(temp)
		}
	}()
	if old != nil {
		if st, ok := old.Sys().(*syscall.Stat_t); ok {
			err = f.Chown(int(st.Uid), int(st.Gid))
		}
	}
	if err == nil {
		err = f.Chmod(ledgerMode)
	}
	if err == nil {
		_, err = f.Write(data)
	}
	if err = errors.Join(err, f.Sync(), f.Close()); err != nil {
		return err
	}
	if err := os.Rename(temp, l.path); err != nil {
		return err
	}
	return durable.SyncDir(filepath.Dir(l.path))
}

func (l *Ledger) read() ([]byte, os.FileInfo, error) {
	f, err := os.OpenFile(l.path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxLedger {
		return nil, nil, fmt.Errorf("%s is not a file of at most %d bytes", l.path, maxLedger)
	}
	data, err := io.ReadAll(io.LimitReader(f, maxLedger))
	return data, info, err
}

// entry is one line of the ledger: a record, or why it is none.
type entry struct {
	line   []byte
	record *Record
	err    error
}

func parse(data []byte) []entry {
	var out []entry
	first := make(map[string]int)
	for line := range bytes.Lines(data) {
		e := entry{line: bytes.TrimSuffix(line, []byte("\n"))}
		var r Record
		dec := json.NewDecoder(bytes.NewReader(e.line))
		dec.DisallowUnknownFields()
		if err := dec.Decode(&r); err != nil {
			e.err = errors.New("it is not a record of a token")
		} else if _, err := dec.Token(); err != io.EOF || !idPattern.MatchString(r.ID) {
			e.err = errors.New("it is not a record of a token")
		} else if i, twice := first[r.ID]; twice {
			// Which of the two is right is anybody's guess, so neither is.
			e.err = fmt.Errorf("token %s has two records", r.ID)
			out[i].record, out[i].err = nil, e.err
		} else {
			first[r.ID] = len(out)
			e.record = &r
		}
		out = append(out, e)
	}
	return out
}

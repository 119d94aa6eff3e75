package secret

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/durable"
)

const format = 1

// maxValue bounds a value, in bytes: it must fit the head of a request beside other headers.
const maxValue = 16 << 10

// Store is the secrets of one root: a file each, of mode 0600 in a directory of 0700, encrypted where the host has a key.
// Reads are from memory and never wait.
type Store struct {
	dir string
	key *Key // nil: files are plain
	log *slog.Logger

	change sync.Mutex // over a change, its I/O included
	// byName is replaced, never changed.
	byName atomic.Pointer[map[string]*entry]

	lent    sync.Map // sandbox id → []string, the names of the secrets that it has
	misuses misuses
}

// entry is a secret, or why it cannot be read: it keeps its name.
type entry struct {
	Secret
	unreadable string
}

// envelope is the form on disk: Record, or Sealed by the key whose id is Key.
type envelope struct {
	Format int     `json:"format"`
	Record *stored `json:"record,omitempty"`
	Key    string  `json:"key,omitempty"`
	Sealed []byte  `json:"sealed,omitempty"`
}

type stored struct {
	Name         string    `json:"name"`
	Destinations []string  `json:"destinations"`
	Placeholder  string    `json:"placeholder"`
	OnMisuse     string    `json:"on_misuse,omitempty"`
	UpdatedAt    time.Time `json:"updated_at"`
	Value        string    `json:"value"`
}

// Open reads the secrets in dir, making it when it is missing. With a key, those that are plain are encrypted. One that
// cannot be read harms no other.
func Open(dir string, key *Key, log *slog.Logger) (*Store, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory of secrets: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil {
		return nil, fmt.Errorf("close the directory of secrets to others: %w", err)
	}
	durable.Sweep(dir)
	files, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("read the directory of secrets: %w", err)
	}
	s := &Store{dir: dir, key: key, log: log, misuses: misuses{changed: make(chan struct{}, 1)}}
	byName := make(map[string]*entry)
	for _, f := range files {
		name := f.Name()
		if shard.CheckSecretName(name) != nil {
			log.Warn("what is no secret lies among the secrets", "name", name)
			continue
		}
		sec, plain, err := s.read(name)
		if err == nil && plain && key != nil {
			if err = s.write(sec); err == nil {
				log.Info("secret encrypted at rest", "secret", name)
			}
		}
		if err != nil {
			log.Error("unreadable secret", "secret", name, "reason", err)
			byName[name] = &entry{unreadable: err.Error()}
			continue
		}
		byName[name] = &entry{Secret: *sec}
	}
	s.byName.Store(&byName)
	return s, nil
}

// read reads one file. Its errors are public: they hold neither paths nor content.
func (s *Store) read(name string) (_ *Secret, plain bool, err error) {
	path := filepath.Join(s.dir, name)
	info, err := os.Lstat(path)
	if err != nil || !info.Mode().IsRegular() {
		return nil, false, errors.New("it is not a file")
	}
	if info.Mode().Perm() != 0o600 {
		if err := os.Chmod(path, 0o600); err != nil {
			return nil, false, errors.New("it could not be closed to others")
		}
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, false, errors.New("the file cannot be read")
	}
	var env envelope
	if err := decode(data, &env); err != nil {
		return nil, false, err
	}
	switch {
	case env.Format != format:
		return nil, false, fmt.Errorf("it has format %d, and this version of shard reads format %d", env.Format, format)
	case env.Key == "":
		plain = true
	case s.key == nil:
		return nil, false, fmt.Errorf("it is encrypted with the host key %s, and the daemon was given none", env.Key)
	case env.Key != s.key.id:
		return nil, false, fmt.Errorf("it is encrypted with the host key %s, and the daemon was given %s", env.Key, s.key.id)
	default:
		text, err := s.key.open(name, env.Sealed)
		if err != nil {
			return nil, false, err
		}
		env.Record = new(stored)
		if err := decode(text, env.Record); err != nil {
			return nil, false, err
		}
	}
	r := env.Record
	if r == nil || r.Name != name || r.Value == "" || r.Placeholder == "" || len(r.Destinations) == 0 {
		return nil, false, errors.New("it is damaged: something is missing, or it is of another name")
	}
	return &Secret{Name: name, Placeholder: r.Placeholder, Destinations: r.Destinations, OnMisuse: r.OnMisuse, UpdatedAt: r.UpdatedAt,
		Value: NewValue(r.Value)}, plain, nil
}

// decode reads one JSON object with known fields. What is wrong is not quoted: it may be a value.
func decode(data []byte, v any) error {
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if dec.Decode(v) != nil || dec.More() {
		return errors.New("it is damaged, or was written by another version of shard")
	}
	return nil
}

// write stores a secret durably.
func (s *Store) write(sec *Secret) error {
	r := &stored{Name: sec.Name, Destinations: sec.Destinations, Placeholder: sec.Placeholder, OnMisuse: sec.OnMisuse, UpdatedAt: sec.UpdatedAt,
		Value: sec.Value.Reveal()}
	env := envelope{Format: format, Record: r}
	if s.key != nil {
		text, err := json.Marshal(r)
		if err != nil {
			return err
		}
		env = envelope{Format: format, Key: s.key.id, Sealed: s.key.seal(sec.Name, text)}
	}
	data, err := json.Marshal(env)
	if err != nil {
		return err
	}
	return durable.WriteFile(filepath.Join(s.dir, sec.Name), append(data, '\n'), 0o600)
}

// replace changes one entry in memory; nil removes it. The caller holds change.
func (s *Store) replace(name string, e *entry) {
	next := maps.Clone(*s.byName.Load())
	if e == nil {
		delete(next, name)
	} else {
		next[name] = e
	}
	s.byName.Store(&next)
}

// List returns the secrets in the order of their names, and a warning for each that cannot be read.
func (s *Store) List() ([]shard.Secret, []string) {
	byName := *s.byName.Load()
	out := make([]shard.Secret, 0, len(byName))
	var warnings []string
	for _, name := range slices.Sorted(maps.Keys(byName)) {
		if e := byName[name]; e.unreadable == "" {
			out = append(out, e.Record())
		} else {
			warnings = append(warnings, unreadable(name, e.unreadable))
		}
	}
	return out, warnings
}

func unreadable(name, reason string) string {
	return fmt.Sprintf("secret %s cannot be read: %s", name, reason)
}

// Get returns a secret that is there and can be read.
func (s *Store) Get(name string) (*Secret, error) {
	if err := shard.CheckSecretName(name); err != nil {
		return nil, err
	}
	e := (*s.byName.Load())[name]
	switch {
	case e == nil:
		return nil, shard.Errorf(shard.CodeNotFound, "there is no secret %s", name)
	case e.unreadable != "":
		return nil, shard.Errorf(shard.CodeInternal, "%s", unreadable(name, e.unreadable))
	}
	return &e.Secret, nil
}

// Holders are the sandboxes that have a secret. Uncertain says why they may not be all; "" when they are.
type Holders struct {
	Names     []string
	Uncertain string
}

// Set makes a secret or replaces its value, and what else the request names. holders are those of this name, and must not
// change meanwhile. From its return on, Held gives out the new value, and never the old one.
func (s *Store) Set(name string, req shard.PutSecretRequest, holders Holders) (*shard.Secret, error) {
	if err := shard.CheckSecretName(name); err != nil {
		return nil, err
	}
	if err := checkValue(req.Value); err != nil {
		return nil, err
	}
	s.change.Lock()
	defer s.change.Unlock()
	byName := *s.byName.Load()
	for _, other := range slices.Sorted(maps.Keys(byName)) {
		if e := byName[other]; e.unreadable != "" { // whose placeholder it may be is not known
			return nil, shard.Errorf(shard.CodeInternal, "no secret can be set while one cannot be read; %s: mend that, or remove secret %s",
				unreadable(other, e.unreadable), other)
		}
	}
	next := Secret{Name: name, Placeholder: DefaultPlaceholder(name), Value: NewValue(req.Value), UpdatedAt: time.Now().UTC().Truncate(time.Microsecond)}
	old := byName[name]
	if old != nil {
		next.Placeholder, next.Destinations, next.OnMisuse = old.Placeholder, old.Destinations, old.OnMisuse
	} else if len(holders.Names) > 0 {
		err := shard.Errorf(shard.CodeInUse, "secret %s was removed, and sandboxes still have it: take it from them first (shard secret ungrant)", name)
		err.Holders = holders.Names
		return nil, err
	}
	if req.Destinations != nil || old == nil {
		var err error
		if next.Destinations, err = parseDestinations(req.Destinations); err != nil {
			return nil, err
		}
	}
	switch req.OnMisuse {
	case "":
	case "none":
		next.OnMisuse = OnMisuseNone
	case OnMisusePause, OnMisuseStop:
		next.OnMisuse = req.OnMisuse
	default:
		return nil, shard.Invalidf("%s is not what can be done on misuse: write none, pause or stop", shard.Quote(req.OnMisuse))
	}
	if req.Placeholder != "" && req.Placeholder != next.Placeholder {
		next.Placeholder = req.Placeholder
		if err := checkCustom(next.Placeholder, name); err != nil {
			return nil, err
		}
		if old != nil && (len(holders.Names) > 0 || holders.Uncertain != "") {
			err := shard.Errorf(shard.CodeInUse, "the placeholder of secret %s cannot change while sandboxes have it: take it from them first (shard secret ungrant)", name)
			if err.Holders = holders.Names; len(holders.Names) == 0 {
				err.Message = fmt.Sprintf("the placeholder of secret %s cannot change: %s", name, holders.Uncertain)
			}
			return nil, err
		}
	}
	if strings.Contains(next.Placeholder, req.Value) || strings.Contains(req.Value, next.Placeholder) {
		return nil, shard.Invalidf("the value of secret %s and its placeholder contain one another: use another placeholder or value", name)
	}
	for other, e := range byName {
		if other != name && (next.Placeholder == e.Placeholder || next.Placeholder == DefaultPlaceholder(other)) {
			return nil, shard.Invalidf("placeholder %s is that of secret %s: use another", next.Placeholder, other)
		}
	}
	if err := s.write(&next); err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "could not store secret %s: is the host's disk full?", name)
	}
	s.replace(name, &entry{Secret: next})
	rec := next.Record()
	return &rec, nil
}

// Remove removes a secret, readable or not. Sandboxes that have it keep the grant, which gives nothing any more; without
// force it is refused while there are some.
func (s *Store) Remove(name string, force bool, holders Holders) error {
	if err := shard.CheckSecretName(name); err != nil {
		return err
	}
	s.change.Lock()
	defer s.change.Unlock()
	if (*s.byName.Load())[name] == nil {
		return shard.Errorf(shard.CodeNotFound, "there is no secret %s", name)
	}
	if len(holders.Names) > 0 && !force {
		err := shard.Errorf(shard.CodeInUse, "secret %s is in use: take it from the sandboxes that have it (shard stop, then shard secret ungrant), or remove it with force", name)
		err.Holders = holders.Names
		return err
	}
	err := os.Remove(filepath.Join(s.dir, name))
	if errors.Is(err, fs.ErrNotExist) {
		err = nil
	}
	if err == nil {
		s.replace(name, nil) // gone from the disk: no request may still use it, whatever comes now
		err = durable.SyncDir(s.dir)
	}
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not remove secret %s", name)
	}
	return nil
}

// DefaultPlaceholder is the placeholder of a secret that was given none.
func DefaultPlaceholder(name string) string { return "mock-" + name }

// checkValue refuses what no header can carry.
func checkValue(v string) error {
	switch {
	case v == "":
		return shard.Invalidf("value is empty")
	case len(v) > maxValue:
		return shard.Invalidf("value has more than %d bytes, and would not fit the headers of a request", maxValue)
	case !utf8.ValidString(v):
		return shard.Invalidf("value is not UTF-8")
	}
	for i := range len(v) {
		if c := v[i]; c < ' ' && c != '\t' || c == 0x7f {
			return shard.Invalidf("value holds a line end or another control character (at byte %d), which a header cannot carry", i)
		}
	}
	return nil
}

// checkCustom refuses what cannot be the placeholder of a secret of that name.
func checkCustom(p, name string) error {
	const least, most = 8, 256
	if p == DefaultPlaceholder(name) {
		return nil
	}
	if len(p) < least || len(p) > most || strings.Trim(p, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-.") != "" {
		return shard.Invalidf("placeholder %s is not valid: use %d to %d letters, digits, _, - and .", shard.Quote(p), least, most)
	}
	return nil
}

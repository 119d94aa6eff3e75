package token

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/golang-jwt/jwt/v5"

	"github.com/useshards/shard"
)

var (
	idPattern   = regexp.MustCompile(`^[0-9a-f]{32}$`)
	namePattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_.@-]{0,63}$`)
)

// maxToken bounds a token, in bytes; ours have about 300.
const maxToken = 8 << 10

// claims are what a token says. No scopes mean all.
type claims struct {
	jwt.RegisteredClaims
	Scopes *[]string `json:"scopes,omitempty"`
}

// Book is a signing key and its ledger. It is safe for concurrent use.
type Book struct {
	*Ledger
	key    []byte
	parser *jwt.Parser

	mu   sync.Mutex // held over reading the ledger, so that a change is read once
	view *View
	seen stamp
}

// stamp tells one state of the ledger's file from another.
type stamp struct {
	inode      uint64
	size       int64
	mtime      time.Time
	unreadable string
}

// Open reads the signing key, first making one when create is set and none is there.
func Open(keyFile string, create bool) (*Book, error) {
	key, err := readKey(keyFile)
	if errors.Is(err, fs.ErrNotExist) && create {
		if err := makeKey(keyFile); err != nil {
			return nil, fmt.Errorf("make a signing key: %w", err)
		}
		key, err = readKey(keyFile)
	}
	if err != nil {
		return nil, err
	}
	return &Book{Ledger: LedgerOf(keyFile), key: key,
		// HS256 and nothing else: the header of a token must not choose how it is checked.
		parser: jwt.NewParser(jwt.WithValidMethods([]string{jwt.SigningMethodHS256.Alg()}), jwt.WithStrictDecoding())}, nil
}

// Mint makes a token and its record. d is how long it is good for, 0 for ever; scopes are valid ones (shard.ParseScopes).
func (b *Book) Mint(name string, d time.Duration, scopes []string) (string, *Record, error) {
	if !namePattern.MatchString(name) {
		return "", nil, shard.Invalidf("token name %s is not valid: up to 64 of a-z, 0-9, . _ @ and -, beginning with a letter or digit", shard.Quote(name))
	}
	if len(scopes) == 0 || !slices.ContainsFunc(scopes, shard.IsScope) {
		return "", nil, shard.Invalidf("a token needs at least one scope")
	}
	raw := make([]byte, 16)
	_, _ = rand.Read(raw) // never fails
	r := &Record{ID: hex.EncodeToString(raw), Name: name, IssuedAt: time.Now().UTC().Truncate(time.Second), Scopes: scopes}
	c := claims{RegisteredClaims: jwt.RegisteredClaims{Subject: name, ID: r.ID, IssuedAt: jwt.NewNumericDate(r.IssuedAt)}, Scopes: &scopes}
	if d > 0 {
		// Up to the whole second that it must last.
		end := time.Now().UTC().Add(d + time.Second - time.Nanosecond).Truncate(time.Second)
		r.ExpiresAt = &end
		c.ExpiresAt = jwt.NewNumericDate(end)
	}
	signed, err := jwt.NewWithClaims(jwt.SigningMethodHS256, c).SignedString(b.key)
	if err != nil {
		return "", nil, fmt.Errorf("sign the token: %w", err)
	}
	r.Hash = hash(signed)
	if err := b.add(r); err != nil {
		return "", nil, err
	}
	return signed, r, nil
}

func hash(token string) string {
	sum := sha256.Sum256([]byte(token))
	return hex.EncodeToString(sum[:])
}

// Grant is what a checked token gives its bearer.
type Grant struct {
	// ID and Name are the token's.
	ID, Name string
	// Scopes are those of the token that exist.
	Scopes []string
	hash   string
	expiry time.Time
	// until is when a link ends, which its token outlives.
	until time.Time
}

// ErrRefused says that a token gives nothing. Why is nobody's business who does not have the ledger.
var ErrRefused = errors.New("the token is not valid here")

// Check verifies a token against the key and the ledger as it is now.
func (b *Book) Check(token string) (*Grant, error) {
	if len(token) > maxToken {
		return nil, ErrRefused
	}
	var c claims
	_, err := b.parser.ParseWithClaims(token, &c, func(*jwt.Token) (any, error) { return b.key, nil })
	if err != nil || c.Subject == "" || c.IssuedAt == nil || !idPattern.MatchString(c.ID) {
		return nil, ErrRefused
	}
	said := []string{shard.ScopeAll}
	if c.Scopes != nil {
		said = *c.Scopes
	}
	g := &Grant{ID: c.ID, Name: c.Subject, hash: hash(token)}
	for _, s := range said {
		if shard.IsScope(s) {
			g.Scopes = append(g.Scopes, s)
		}
	}
	if c.ExpiresAt != nil {
		g.expiry = c.ExpiresAt.Time
	}
	v := b.View()
	// A record that says something else than the token was written by hand: neither is to be trusted.
	if r := v.records[g.ID]; r == nil || r.Name != g.Name || !slices.Equal(r.Scopes, said) {
		return nil, ErrRefused
	}
	if !v.Standing(g, time.Now()) {
		return nil, ErrRefused
	}
	return g, nil
}

// View is the ledger at one moment.
type View struct {
	records map[string]*Record
	// Problem says why the ledger could not be read; then it gives nobody access.
	Problem error
	// Broken is how many of its lines are no records.
	Broken int
}

// View reads the ledger again if its file has changed.
func (b *Book) View() *View {
	b.mu.Lock()
	defer b.mu.Unlock()
	if now := stampOf(os.Stat(b.path)); b.view == nil || now != b.seen {
		v := &View{records: make(map[string]*Record)}
		data, info, err := b.read()
		b.seen = stampOf(info, err)
		if v.Problem = err; err != nil {
			data = nil // a part of a ledger is none
		}
		for _, e := range parse(data) {
			if e.err != nil {
				v.Broken++
				continue
			}
			v.records[e.record.ID] = e.record
		}
		b.view = v
	}
	return b.view
}

func stampOf(info os.FileInfo, err error) stamp {
	if err != nil {
		return stamp{unreadable: err.Error()}
	}
	s := stamp{size: info.Size(), mtime: info.ModTime()}
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		s.inode = st.Ino
	}
	return s
}

// Standing says whether a grant is still good: its token is in the ledger as it was made, not revoked and not expired.
func (v *View) Standing(g *Grant, now time.Time) bool {
	r := v.records[g.ID]
	if !g.until.IsZero() && !now.Before(g.until) {
		return false
	}
	if r == nil || r.RevokedAt != nil || subtle.ConstantTimeCompare([]byte(r.Hash), []byte(g.hash)) != 1 {
		return false
	}
	// The record's end and the token's are the same second, unless somebody moved the record's.
	switch {
	case g.expiry.IsZero():
		return r.ExpiresAt == nil
	case r.ExpiresAt == nil || !r.ExpiresAt.Equal(g.expiry):
		return false
	}
	return now.Before(g.expiry)
}

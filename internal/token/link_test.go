package token

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
)

// TestLinks: a link says what was signed, ends with its time or its token, and is no token; and no edit of the ledger, nor of
// the link, makes another.
func TestLinks(t *testing.T) {
	b, file := open(t)
	text, r, err := b.Mint("linker", time.Hour, []string{LinkScope})
	if err != nil {
		t.Fatal(err)
	}
	grant, err := b.Check(text)
	if err != nil {
		t.Fatal(err)
	}
	signed, end, err := b.SignLink(grant, "amber-otter-0001", 3000, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	l, err := b.CheckLink(signed)
	if err != nil || l.Sandbox != "amber-otter-0001" || l.Port != 3000 || !l.Expires.Equal(end) || l.Grant.Name != "linker" || len(l.Grant.Scopes) != 0 {
		t.Fatalf("%+v %v", l, err)
	}
	if !b.View().Standing(l.Grant, end.Add(-time.Second)) || b.View().Standing(l.Grant, end) {
		t.Error("it does not stand until its end")
	}
	if _, long, err := b.SignLink(grant, "amber-otter-0001", 3000, 24*time.Hour); err != nil || !long.Equal(*r.ExpiresAt) {
		t.Errorf("a link that outlives its token: %v %v", long, err)
	}
	if _, err := b.Check(signed); err == nil {
		t.Error("a link is a token")
	}
	if _, err := b.CheckLink(text); err == nil {
		t.Error("a token is a link")
	}
	for i := range signed {
		for _, c := range []string{"", "0", ".", "A"} {
			if changed := signed[:i] + c + signed[i+1:]; changed != signed {
				if _, err := b.CheckLink(changed); err == nil {
					t.Fatalf("%s is taken for %s", changed, signed)
				}
			}
		}
	}
	for _, bad := range []string{"", "....", strings.Repeat("a", 1000), signed + ".", "." + signed, signed + "=", signed + signed} {
		if _, err := b.CheckLink(bad); err == nil {
			t.Errorf("%q is a link", bad)
		}
	}
	for what, sign := range map[string]func() (string, time.Time, error){
		"no time": func() (string, time.Time, error) { return b.SignLink(grant, "amber-otter-0001", 3000, 0) },
		"too long": func() (string, time.Time, error) {
			return b.SignLink(grant, "amber-otter-0001", 3000, shard.MaxLinkLife+1)
		},
		"a name":  func() (string, time.Time, error) { return b.SignLink(grant, "web", 3000, time.Minute) },
		"no port": func() (string, time.Time, error) { return b.SignLink(grant, "amber-otter-0001", 0, time.Minute) },
		"no right": func() (string, time.Time, error) {
			text, _ := mint(t, b, "narrow")
			narrow, _ := b.Check(text)
			return b.SignLink(narrow, "amber-otter-0001", 3000, time.Minute)
		},
	} {
		if _, _, err := sign(); err == nil {
			t.Errorf("signed with %s", what)
		}
	}

	ledger := filepath.Join(filepath.Dir(file), "serve.tokens")
	raw, err := os.ReadFile(ledger)
	if err != nil {
		t.Fatal(err)
	}
	// Somebody makes records for the same id.
	for what, change := range map[string]func(*Record){"another hash": func(r *Record) { r.Hash = strings.Repeat("0", 64) }, "no right": func(r *Record) { r.Scopes = []string{"exec"} },
		"an end": func(r *Record) { now := time.Now(); r.RevokedAt = &now }, "an end in the past": func(r *Record) { past := time.Now().Add(-time.Second); r.ExpiresAt = &past }} {
		changed := *r
		change(&changed)
		line, _ := json.Marshal(changed)
		if err := os.WriteFile(ledger, append(line, '\n'), 0o640); err != nil {
			t.Fatal(err)
		}
		if _, err := b.CheckLink(signed); err == nil {
			t.Errorf("with %s in the ledger it is still a link", what)
		}
	}
	if err := os.WriteFile(ledger, raw, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := b.CheckLink(signed); err != nil {
		t.Error(err)
	}
	fresh, _ := open(t)
	if _, err := fresh.CheckLink(signed); err == nil {
		t.Error("another key takes it")
	}
}

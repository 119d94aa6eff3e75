package token

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard"
)

// LinkScope is what a token must be allowed for links to be signed with it.
const LinkScope = "port:write"

// Link is a checked link: a right to one port of one sandbox. It hangs on the token with which it was signed, and falls with
// it; so the ledger, which only its owner can write, takes links back too.
type Link struct {
	// Sandbox is an id: a name may be another sandbox's tomorrow.
	Sandbox string
	Port    int
	Expires time.Time
	// Grant is the token's, without its scopes: a link opens no route.
	Grant *Grant
}

// SignLink signs a link that is good for d, and not longer than the grant's token.
func (b *Book) SignLink(g *Grant, sandbox string, port int, d time.Duration) (string, time.Time, error) {
	switch {
	case !shard.ScopesAllow(g.Scopes, LinkScope):
		return "", time.Time{}, shard.Errorf(shard.CodeForbidden, "the API key lacks the scope %s, which links need", LinkScope)
	case d <= 0 || d > shard.MaxLinkLife:
		return "", time.Time{}, shard.Invalidf("a link is good for more than nothing and at most %s", shard.MaxLinkLife)
	case !shard.IsID(sandbox) || port < 1 || port > shard.MaxPort:
		return "", time.Time{}, fmt.Errorf("a link to port %d of %q", port, sandbox)
	}
	end := time.Now().UTC().Add(d + time.Second - time.Nanosecond).Truncate(time.Second)
	if !g.expiry.IsZero() && g.expiry.Before(end) {
		end = g.expiry.UTC()
	}
	text := linkText(g.ID, sandbox, port, end.Unix())
	return text + "." + base64.RawURLEncoding.EncodeToString(b.linkMAC(text, g.hash)), end, nil
}

func linkText(id, sandbox string, port int, end int64) string {
	return id + "." + sandbox + "." + strconv.Itoa(port) + "." + strconv.FormatInt(end, 10)
}

// linkMAC signs with a key that is derived from the signing key, so that no link is ever a token or the other way round. The
// token's hash goes in: a record that somebody wrote by hand carries no links.
func (b *Book) linkMAC(text, hash string) []byte {
	key := hmac.New(sha256.New, b.key)
	key.Write([]byte("shard preview link 1"))
	mac := hmac.New(sha256.New, key.Sum(nil))
	mac.Write([]byte(text + " " + hash))
	return mac.Sum(nil)
}

// CheckLink verifies a link against the key and the ledger as it is now.
func (b *Book) CheckLink(signed string) (*Link, error) {
	parts := strings.Split(signed, ".")
	if len(signed) > 256 || len(parts) != 5 {
		return nil, ErrRefused
	}
	port, perr := strconv.Atoi(parts[2])
	end, eerr := strconv.ParseInt(parts[3], 10, 64)
	mac, merr := base64.RawURLEncoding.Strict().DecodeString(parts[4])
	v := b.View()
	r := v.records[parts[0]]
	if perr != nil || eerr != nil || merr != nil || r == nil || !hmac.Equal(mac, b.linkMAC(linkText(parts[0], parts[1], port, end), r.Hash)) {
		return nil, ErrRefused
	}
	l := &Link{Sandbox: parts[1], Port: port, Expires: time.Unix(end, 0), Grant: &Grant{ID: r.ID, Name: r.Name, hash: r.Hash}}
	if r.ExpiresAt != nil {
		l.Grant.expiry = *r.ExpiresAt
	}
	l.Grant.until = l.Expires
	if !shard.ScopesAllow(r.Scopes, LinkScope) || !v.Standing(l.Grant, time.Now()) {
		return nil, ErrRefused
	}
	return l, nil
}

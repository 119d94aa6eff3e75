package policy

import (
	"strings"
	"unicode"
	"unicode/utf8"

	"golang.org/x/net/idna"

	"github.com/useshards/shard"
)

// international turns names in any script into the form that DNS carries. Hyphens and underscores are left to checkLabel:
// names such as r3---sn-x.example.com and _dmarc.example.com are in use.
var international = idna.New(idna.MapForLookup(), idna.BidiRule(), idna.StrictDomainName(false), idna.CheckHyphens(false))

// maxName is the length of a name in DNS, in bytes.
const maxName = 253

// Host brings a host name to its one form: lower case, ASCII, no final dot. Both spellings of an international name come
// to the same. What looks like an address, however odd (127.1, 0x7f.1), is no name: programs would dial it as one.
func Host(s string) (string, error) {
	name, err := ascii(strings.TrimSuffix(s, "."))
	if err == nil {
		err = checkName(strings.Split(name, "."))
	}
	if err != nil {
		return "", shard.Invalidf("%s is not a host name", shard.Quote(s))
	}
	return name, nil
}

// ascii is the form in DNS of a name or a part of one.
func ascii(s string) (string, error) {
	if len(s) > 4*maxName {
		return "", shard.Invalidf("the name is too long")
	}
	plain := true
	for _, r := range s {
		if r >= 0x80 {
			plain = false
		}
		// International names may hold what nobody sees, and leave it out: a name is what it looks like.
		if !unicode.IsPrint(r) || r == utf8.RuneError {
			return "", shard.Invalidf("the name holds what is no character, or one that cannot be seen")
		}
	}
	if plain {
		if s = strings.ToLower(s); !strings.Contains(s, "xn--") {
			return s, nil
		}
	}
	return international.ToASCII(s)
}

func checkName(labels []string) error {
	length := len(labels) - 1
	for _, l := range labels {
		length += len(l)
		if !isLabel(l) {
			return shard.Invalidf("%s is not a part of a host name", shard.Quote(l))
		}
	}
	if length > maxName {
		return shard.Invalidf("the name is longer than %d bytes", maxName)
	}
	if last := labels[len(labels)-1]; isNumber(last) {
		return shard.Invalidf("a host name does not end in a number")
	}
	return nil
}

func isLabel(l string) bool {
	if l == "" || len(l) > 63 || l[0] == '-' || l[len(l)-1] == '-' {
		return false
	}
	for i := range len(l) {
		if c := l[i]; (c < 'a' || c > 'z') && (c < '0' || c > '9') && c != '-' && c != '_' {
			return false
		}
	}
	return true
}

// isNumber says whether a last label makes programs take the whole for an address (WHATWG URL, "ends in a number").
func isNumber(l string) bool {
	if rest, hex := strings.CutPrefix(l, "0x"); hex {
		return strings.Trim(rest, "0123456789abcdef") == ""
	}
	return strings.Trim(l, "0123456789") == ""
}

// The numbers of labels that may stand before those of a pattern.
const (
	noExtra   = iota // the name itself
	someExtra        // *.d
	anyExtra         // suffix:d
)

// pattern is a set of names: the last labels, of which "*" is any one, and what may stand before them.
type pattern struct {
	extra  int
	labels []string
}

// parsePattern reads a name in which * stands for whole labels: the first for one or more, the others for one each.
func parsePattern(s string) (pattern, error) {
	if !strings.Contains(s, "*") {
		name, err := Host(s)
		if err != nil {
			return pattern{}, err
		}
		if name == groupAny || name == groupDNS || name == "private" {
			return pattern{}, shard.Invalidf("%s cannot be the name of a host in a rule", shard.Quote(s))
		}
		return pattern{labels: strings.Split(name, ".")}, nil
	}
	var p pattern
	var plain []string // the labels with a stand-in for *
	for i, l := range strings.Split(strings.TrimSuffix(s, "."), ".") {
		switch {
		case l == "*" && i == 0:
			p.extra = someExtra
			continue
		case l == "*":
			p.labels, plain = append(p.labels, l), append(plain, "x")
			continue
		case strings.Contains(l, "*"):
			return pattern{}, shard.Invalidf("%s: * stands for a whole part of a name, between dots", shard.Quote(s))
		}
		label, err := ascii(l)
		if err != nil {
			return pattern{}, shard.Invalidf("%s is not a host name with *", shard.Quote(s))
		}
		p.labels, plain = append(p.labels, label), append(plain, label)
	}
	if len(plain) > 0 && checkName(plain) != nil {
		return pattern{}, shard.Invalidf("%s is not a host name with *", shard.Quote(s))
	}
	return p, nil
}

func (p pattern) String() string {
	text := strings.Join(p.labels, ".")
	switch {
	case p.extra != someExtra:
		return text
	case text == "":
		return "*"
	}
	return "*." + text
}

// everything says whether every name is in the pattern.
func (p pattern) everything() bool { return p.extra != noExtra && len(p.labels) == 0 }

// matches says whether a name, as Host returns it, is in the pattern.
func (p pattern) matches(name string) bool {
	i := len(p.labels)
	rest := name
	for i > 0 {
		if rest == "" {
			return false
		}
		i--
		label := rest
		if dot := strings.LastIndexByte(rest, '.'); dot >= 0 {
			rest, label = rest[:dot], rest[dot+1:]
		} else {
			rest = ""
		}
		if p.labels[i] != "*" && p.labels[i] != label {
			return false
		}
	}
	switch p.extra {
	case noExtra:
		return rest == ""
	case someExtra:
		return rest != ""
	}
	return true
}

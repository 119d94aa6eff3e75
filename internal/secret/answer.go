package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"html"
	"net/url"
	"slices"
	"strings"
	"sync"
	"unicode/utf16"
)

// leastWatched is how long a value must be, in bytes, to be looked for in answers. A shorter one would be found by chance in
// what has nothing to do with it.
const leastWatched = 8

// Watch recognises the values of some secrets in a stream of bytes, as they are and as common encoders write them, and knows
// the placeholder to write instead. It is immutable.
//
// It is an automaton of Aho and Corasick: a node for each beginning of a pattern. Nearly all bytes of nearly all streams keep
// it among the first nodes, which have a table of what comes next; the others are followed by links, so that long values
// cost memory in proportion to their length.
type Watch struct {
	secrets []Secret
	nodes   []node
	rows    [][256]uint16 // of the first nodes, none of which ends a pattern
	put     []string      // by pattern
	lower   []string      // all patterns, for where the case of letters is lost
	deepest int32
}

type node struct {
	fail, child, sibling int32 // 0 is the root, and no child
	depth                int32
	hit                  int32 // 1 + the longest pattern that ends here, and its length; 0 for none
	hitLen               int32
	b                    byte
}

// maxRows bounds the tables to what a core's nearest cache holds.
const maxRows = 64

// Watched makes a Watch; nil where no value is long enough for one.
func Watched(secrets []Secret) *Watch {
	w := &Watch{secrets: secrets, nodes: make([]node, 1)}
	seen := map[string]bool{}
	for i := range secrets {
		v := watchable(secrets[i])
		if v == "" {
			continue
		}
		for _, f := range forms(v, secrets[i].Placeholder) {
			if !seen[f.find] {
				seen[f.find] = true
				w.add(f)
				w.lower = append(w.lower, strings.ToLower(f.find))
			}
		}
	}
	if len(w.put) == 0 {
		return nil
	}
	w.link()
	return w
}

// watchable is what is looked for of a secret's value, "" for nothing: HTTP takes blanks off the ends of a header.
func watchable(s Secret) string {
	v := strings.Trim(s.Value.Reveal(), " \t")
	if len(v) < leastWatched {
		return ""
	}
	return v
}

// form is one way in which a value is written, and how its placeholder is.
type form struct{ find, put string }

// forms are the ways in which encoders write a value: as it is, escaped for URLs, JSON and HTML, and inside base64.
func forms(value, placeholder string) []form {
	texts := []string{value, url.QueryEscape(value), url.PathEscape(value), html.EscapeString(value)}
	for _, apostrophe := range []string{"&#39;", "&#x27;", "&#039;"} { // Go, Python, PHP
		texts = append(texts, strings.NewReplacer("&#34;", "&quot;", "&#39;", apostrophe).Replace(html.EscapeString(value)))
	}
	texts = append(texts, escapeJSON(value, "", "0123456789abcdef"), escapeJSON(value, "\"&'+<>`", hexDigits)) // Python, .NET
	for _, kept := range []string{"-_.~", "-_.!~*'()", "-_.!~*'();,/?:@&=+$#"} {                               // RFC 3986, encodeURIComponent, encodeURI
		texts = append(texts, escape(value, kept))
	}
	for _, t := range slices.Clone(texts) {
		texts = append(texts, lowerEscapes(t))
	}
	for _, forHTML := range []bool{true, false} {
		var b bytes.Buffer
		enc := json.NewEncoder(&b)
		enc.SetEscapeHTML(forHTML)
		if enc.Encode(value) == nil {
			quoted := strings.TrimSpace(b.String())
			quoted = quoted[1 : len(quoted)-1]
			texts = append(texts, quoted, strings.ReplaceAll(quoted, "/", `\/`))
		}
	}
	var out []form
	for _, t := range texts {
		out = append(out, form{t, placeholder})
	}
	// In base64 the first and the last character of a value depend on what stands beside it, unless it is aligned. Between
	// them lies what depends on the value alone. A placeholder of the same length but for whole groups keeps what follows
	// readable.
	fitted := placeholder
	for (len(fitted)-len(value))%3 != 0 {
		fitted += "_"
	}
	for _, enc := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for before := range 3 {
			out = append(out, form{core(enc, before, value), core(enc, before, fitted)})
		}
	}
	return out
}

// core is what base64 writes of s alone when before bytes, modulo 3, stand in front of it.
func core(enc *base64.Encoding, before int, s string) string {
	coded := enc.EncodeToString(append(make([]byte, before), s...))
	return coded[(before*8+5)/6 : (before+len(s))*8/6]
}

const hexDigits = "0123456789ABCDEF"

// escape writes all but letters, digits and what is kept as %XX.
func escape(s, kept string) string {
	var b strings.Builder
	for i := range len(s) {
		c := s[i]
		if c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || strings.IndexByte(kept, c) >= 0 {
			b.WriteByte(c)
		} else {
			b.WriteString("%" + string(hexDigits[c>>4]) + string(hexDigits[c&15]))
		}
	}
	return b.String()
}

// escapeJSON writes what is special or not ASCII as \uXXXX, as JSON may.
func escapeJSON(s, special, digits string) string {
	var b strings.Builder
	for _, u := range utf16.Encode([]rune(s)) {
		switch {
		case u >= 0x80 || strings.IndexByte(special, byte(u)) >= 0:
			b.Write([]byte{'\\', 'u', digits[u>>12], digits[u>>8&15], digits[u>>4&15], digits[u&15]})
		case u == '"' || u == '\\':
			b.Write([]byte{'\\', byte(u)})
		default:
			b.WriteByte(byte(u))
		}
	}
	return b.String()
}

// lowerEscapes writes the digits of escapes in lower case.
func lowerEscapes(s string) string {
	b := []byte(s)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' && strings.IndexByte(hexDigits, b[i+1]) >= 0 && strings.IndexByte(hexDigits, b[i+2]) >= 0 {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// add puts a pattern into the tree.
func (w *Watch) add(f form) {
	at := int32(0)
	for i := range len(f.find) {
		next := w.childOf(at, f.find[i])
		if next == 0 {
			next = int32(len(w.nodes))
			w.nodes = append(w.nodes, node{b: f.find[i], depth: int32(i + 1), sibling: w.nodes[at].child})
			w.nodes[at].child = next
		}
		at = next
	}
	w.put = append(w.put, f.put)
	w.nodes[at].hit, w.nodes[at].hitLen = int32(len(w.put)), int32(len(f.find))
	w.deepest = max(w.deepest, int32(len(f.find)))
}

func (w *Watch) childOf(at int32, b byte) int32 {
	c := w.nodes[at].child
	for c != 0 && w.nodes[c].b != b {
		c = w.nodes[c].sibling
	}
	return c
}

// link numbers the nodes by depth, and says for each where to go on when what comes is not among its children: the longest
// other beginning that the same bytes end in.
func (w *Watch) link() {
	order := make([]int32, 1, len(w.nodes))
	for i := 0; i < len(order); i++ {
		for c := w.nodes[order[i]].child; c != 0; c = w.nodes[c].sibling {
			order = append(order, c)
		}
	}
	number := make([]int32, len(order))
	for i, old := range order {
		number[old] = int32(i)
	}
	nodes := make([]node, len(order))
	for i, old := range order {
		n := w.nodes[old]
		n.child, n.sibling = number[n.child], number[n.sibling]
		nodes[i] = n
	}
	w.nodes = nodes
	for i := range w.nodes {
		for c := w.nodes[i].child; c != 0; c = w.nodes[c].sibling {
			if i > 0 {
				w.nodes[c].fail = w.next(w.nodes[i].fail, w.nodes[c].b)
			}
			if fail := &w.nodes[w.nodes[c].fail]; w.nodes[c].hit == 0 {
				w.nodes[c].hit, w.nodes[c].hitLen = fail.hit, fail.hitLen
			}
		}
	}
	dense := 0
	for dense < len(w.nodes) && dense < maxRows && w.nodes[dense].depth < leastWatched-1 {
		dense++
	}
	rows := make([][256]uint16, dense)
	for i := range rows {
		for b := range 256 {
			rows[i][b] = uint16(w.next(int32(i), byte(b))) // no child of so few nodes has a greater number
		}
	}
	w.rows = rows
}

// next is where byte b leads from a node.
func (w *Watch) next(at int32, b byte) int32 {
	for {
		if int(at) < len(w.rows) {
			return int32(w.rows[at][b])
		}
		if c := w.childOf(at, b); c != 0 || at == 0 {
			return c
		}
		at = w.nodes[at].fail
	}
}

// Longest is how many bytes can be held back of a stream, at most.
func (w *Watch) Longest() int { return int(w.deepest) }

// String returns s with placeholders for values.
func (w *Watch) String(s string) string {
	if len(s) < leastWatched {
		return s
	}
	r := Rewriter{w: w}
	out := r.Flush(r.Append(make([]byte, 0, len(s)), []byte(s)))
	if r.Found == 0 {
		return s
	}
	return string(out)
}

// Rewriter puts placeholders for values into a stream. Of values that overlap it is the one that begins first, of those that
// begin at one place the longest.
type Rewriter struct {
	// Found is how many values there were.
	Found int

	w    *Watch
	at   int32
	held []byte // the end of the stream so far: what may be the beginning of a value
	// pending is a value in held, to be replaced once it is clear that no longer one begins where it does or before.
	pending    int32 // 1 + its pattern; 0 for none
	start, end int
}

// Rewriter begins a stream.
func (w *Watch) Rewriter() Rewriter { return Rewriter{w: w} }

// Append takes the next bytes of the stream and appends to dst all that is certain of what it becomes.
func (r *Rewriter) Append(dst, p []byte) []byte {
	data, i := p, 0
	if len(r.held) > 0 {
		i = len(r.held)
		r.held = append(r.held, p...)
		data = r.held
	}
	from := 0 // of data, what has not gone out
	rows, at := r.w.rows, r.at
	for i < len(data) {
		if r.pending == 0 && int(at) < len(rows) {
			for i < len(data) && int(at) < len(rows) {
				at = int32(rows[at][data[i]])
				i++
			}
			if int(at) < len(rows) {
				break
			}
		} else {
			at = r.w.next(at, data[i])
			i++
		}
		n := &r.w.nodes[at]
		if start := i - int(n.hitLen); n.hit != 0 && (r.pending == 0 || start <= r.start) {
			r.pending, r.start, r.end = n.hit, start, i
		}
		// Nothing that is still open began where the pending one did, or before, or it cannot become longer.
		if r.pending != 0 && (i-int(n.depth) > r.start || n.child == 0 && n.hitLen == n.depth) {
			dst = append(append(dst, data[from:r.start]...), r.w.put[r.pending-1]...)
			r.Found++
			from, i = r.end, r.end
			r.pending, at = 0, 0
		}
	}
	keep := len(data) - int(r.w.nodes[at].depth)
	if r.pending != 0 {
		keep = min(keep, r.start)
	}
	dst = append(dst, data[from:keep]...)
	r.held = append(r.held[:0], data[keep:]...)
	r.at, r.start, r.end = at, r.start-keep, r.end-keep
	return dst
}

// Flush ends the stream and appends what was held of it. The Rewriter can begin another.
func (r *Rewriter) Flush(dst []byte) []byte {
	for r.pending != 0 {
		rest := slices.Clone(r.held[r.end:])
		dst = append(append(dst, r.held[:r.start]...), r.w.put[r.pending-1]...)
		r.Found++
		r.held, r.pending, r.at = r.held[:0], 0, 0
		dst = r.Append(dst, rest)
	}
	dst = append(dst, r.held...)
	r.held, r.at = r.held[:0], 0
	return dst
}

// Watches keeps what was made for the sets of secrets in use, since making one takes longer than a request should.
type Watches struct {
	mu    sync.Mutex
	all   []*Watch // the newest used last
	nodes int
}

// Bounds of Watches.
const (
	maxWatches      = 64
	maxWatchedNodes = 1 << 20 // 28 MB
)

// Of is Watched with a memory.
func (ws *Watches) Of(secrets []Secret) *Watch {
	same := func(w *Watch) bool {
		return slices.EqualFunc(w.secrets, secrets, func(a, b Secret) bool {
			return a.Placeholder == b.Placeholder && a.Value.Reveal() == b.Value.Reveal()
		})
	}
	ws.mu.Lock()
	defer ws.mu.Unlock()
	if i := slices.IndexFunc(ws.all, same); i >= 0 {
		w := ws.all[i]
		ws.all = append(slices.Delete(ws.all, i, i+1), w)
		return w
	}
	w := Watched(secrets)
	if w == nil {
		return nil
	}
	ws.all = append(ws.all, w)
	ws.nodes += len(w.nodes)
	for len(ws.all) > 1 && (len(ws.all) > maxWatches || ws.nodes > maxWatchedNodes) {
		ws.nodes -= len(ws.all[0].nodes)
		ws.all = slices.Delete(ws.all, 0, 1)
	}
	return w
}

package secret

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"html"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"pgregory.net/rapid"
)

// reference is what a Rewriter does, without its automaton: of the patterns that begin first the longest.
func reference(all []form, s string) string {
	var out strings.Builder
	for i := 0; i < len(s); {
		best := form{}
		for _, f := range all {
			if strings.HasPrefix(s[i:], f.find) && len(f.find) > len(best.find) {
				best = f
			}
		}
		if best.find == "" {
			out.WriteByte(s[i])
			i++
			continue
		}
		out.WriteString(best.put)
		i += len(best.find)
	}
	return out.String()
}

// cut gives s to a Rewriter in pieces that end at the given places, modulo what is left.
func cut(w *Watch, s string, at []int) string {
	r := w.Rewriter()
	var out []byte
	for _, n := range at {
		n %= len(s) + 1
		out = r.Append(out, []byte(s[:n]))
		s = s[n:]
	}
	return string(r.Flush(r.Append(out, []byte(s))))
}

// However a stream is cut, it becomes what the whole does, which is what the reference says: no value is in it any more, and
// nothing else has changed.
func TestAnswersInPieces(t *testing.T) {
	letters := rapid.StringOfN(rapid.SampledFrom([]rune("ab+/% \"=")), leastWatched, 14, -1).
		Filter(func(s string) bool { return watchable(one("A", s)) != "" })
	rapid.Check(t, func(t *rapid.T) {
		values := rapid.SliceOfN(letters, 1, 3).Draw(t, "values")
		var secrets []Secret
		var all []form
		for i, v := range values {
			s := one(string(rune('A'+i)), v)
			secrets = append(secrets, s)
			all = append(all, forms(watchable(s), s.Placeholder)...)
		}
		w := Watched(secrets)
		var parts []*rapid.Generator[string]
		for _, f := range all {
			parts = append(parts, rapid.Just(f.find), rapid.Map(rapid.IntRange(0, len(f.find)), func(n int) string { return f.find[:n] }),
				rapid.Map(rapid.IntRange(0, len(f.find)), func(n int) string { return f.find[n:] }))
		}
		parts = append(parts, rapid.StringN(0, 5, -1), rapid.StringOf(rapid.SampledFrom([]rune("ab+/"))))
		text := strings.Join(rapid.SliceOfN(rapid.OneOf(parts...), 0, 8).Draw(t, "text"), "")
		at := rapid.SliceOfN(rapid.IntRange(0, 40), 0, 12).Draw(t, "cuts")

		got, want := cut(w, text, at), reference(all, text)
		if got != want {
			t.Fatalf("%q became %q, want %q", text, got, want)
		}
		if whole := w.String(text); whole != want {
			t.Fatalf("%q became %q whole, want %q", text, whole, want)
		}
	})
}

func TestForms(t *testing.T) {
	const value = `k+/=%"<é> ~'sk-42`
	s := one("API", value)
	w := Watched([]Secret{s})
	quoted, err := json.Marshal(value)
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"as it is": value, "query": url.QueryEscape(value), "path": url.PathEscape(value), "HTML": html.EscapeString(value),
		"query, in lower case": strings.ToLower(url.QueryEscape(value)), "encodeURIComponent": "k%2B%2F%3D%25%22%3C%C3%A9%3E%20~'sk-42",
		"JSON": string(quoted[1 : len(quoted)-1]), "JSON, with solidus": `k+\/=%\"<é> ~'sk-42`,
		"JSON, as Python": `k+/=%\"<\u00e9> ~'sk-42`, "JSON, as .NET": `k\u002B/=%\u0022\u003C\u00E9\u003E ~\u0027sk-42`,
		"HTML, as Python": "k+/=%&quot;&lt;é&gt; ~&#x27;sk-42", "HTML, as PHP": "k+/=%&quot;&lt;é&gt; ~&#039;sk-42",
	} {
		if got := w.String("<" + text + ">"); got != "<mock-API>" {
			t.Errorf("%s: %q became %q", name, text, got)
		}
	}
	for _, enc := range []*base64.Encoding{base64.StdEncoding, base64.RawStdEncoding, base64.URLEncoding, base64.RawURLEncoding} {
		for _, before := range []string{"", "u", "u:", "us:", "user:"} {
			for _, after := range []string{"", ":", "::", ":::"} {
				text := enc.EncodeToString([]byte(before + value + after))
				got := w.String("Basic " + text)
				plain, err := enc.DecodeString(strings.TrimPrefix(got, "Basic "))
				if err != nil {
					t.Errorf("%q between %q and %q became %q: %v", value, before, after, got, err)
					continue
				}
				// But for the two letters at its edges the placeholder can be read, and what is beside it is whole.
				p := string(plain)
				if strings.Contains(p, value[1:len(value)-1]) || !strings.Contains(p, "ock-AP") || !strings.HasPrefix(p, before) || !strings.HasSuffix(p, after) {
					t.Errorf("%q between %q and %q became %q", value, before, after, p)
				}
			}
		}
	}
}

func TestBlanksAtTheEnds(t *testing.T) {
	w := Watched([]Secret{one("API", " sk-live-12345\t")})
	for text, want := range map[string]string{"<sk-live-12345>": "<mock-API>", "< sk-live-12345\t>": "< mock-API\t>"} {
		if got := w.String(text); got != want {
			t.Errorf("%q became %q", text, got)
		}
	}
}

func TestWhatIsNotWatched(t *testing.T) {
	if Watched([]Secret{one("SHORT", "1234567")}) != nil {
		t.Error("a value of seven bytes is watched")
	}
	w := Watched([]Secret{one("SHORT", "1234567"), one("LONG", "12345678")})
	if got := w.String("1234567 12345678"); got != "1234567 mock-LONG" {
		t.Error(got)
	}
	if got := w.String("1234567812345"); got != "mock-LONG12345" {
		t.Error(got)
	}
}

// Only what may be the beginning of a value is held back.
func TestNothingElseIsHeldBack(t *testing.T) {
	w := Watched([]Secret{one("API", "sk-0123456789"), one("MORE", "sk-0123456789abc")})
	r := w.Rewriter()
	for _, c := range []struct{ in, out string }{
		{"data: 1\n\n", "data: 1\n\n"}, {"a sk-0", "a "}, {"12", ""}, {"x", "sk-012x"}, {"sk-0123456789", ""}, {"a", ""}, {"bc", "mock-MORE"},
		{"sk-0123456789ab-", "mock-APIab-"},
	} {
		if got := string(r.Append(nil, []byte(c.in))); got != c.out {
			t.Errorf("%q: %q, want %q", c.in, got, c.out)
		}
	}
	if got := string(r.Flush(nil)); got != "" || r.Found != 2 {
		t.Errorf("at the end: %q, found %d", got, r.Found)
	}
	r.Append(nil, []byte("sk-01"))
	if got := string(r.Flush(nil)); got != "sk-01" {
		t.Errorf("at the end: %q", got)
	}
}

func TestWatches(t *testing.T) {
	var ws Watches
	a, b := []Secret{one("A", "sk-aaaaaaaa")}, []Secret{one("A", "sk-bbbbbbbb")}
	first := ws.Of(a)
	if ws.Of(a) != first || ws.Of(b) == first || ws.Of(a) != first {
		t.Error("not kept by value")
	}
	for i := range 2 * maxWatches {
		ws.Of([]Secret{one("B", strings.Repeat(string(rune(256+i)), 8))})
	}
	if len(ws.all) != maxWatches || ws.Of(a) == first {
		t.Errorf("%d kept", len(ws.all))
	}
	long := []Secret{one("L", strings.Repeat("abcdefgh", maxValue/8))}
	if w := ws.Of(long); w.Longest() < maxValue || w.String("-"+long[0].Value.Reveal()+"-") != "-mock-L-" {
		t.Error("a long value is not found")
	}
}

func TestHeaderOfAnswers(t *testing.T) {
	w := Watched([]Secret{one("API", "sk-0123456789")})
	h := map[string][]string{"X-Echo": {"a", "Bearer sk-0123456789"}, "X-Sk-0123456789": {"1"}, "Set-Cookie": {"k=" + encoded("u:sk-0123456789")}}
	w.Header(h)
	if len(h) != 2 || h["X-Echo"][1] != "Bearer mock-API" || h["X-Echo"][0] != "a" || strings.Contains(h["Set-Cookie"][0], encoded("u:sk-012")) {
		t.Errorf("%q", h)
	}
	w = Watched([]Secret{one("API", "a/b+c'0123456")})
	h = map[string][]string{"X-A%2fb%2bc%270123456": {"1"}, "X-A%2Fb%2Bc'0123456": {"1"}, http.CanonicalHeaderKey("X-" + encoded("a/b+c'0123456")): {"1"}, "X-A": {"1"}}
	if w.Header(h); len(h) != 1 {
		t.Errorf("the value in a name: %q", h)
	}
}

func FuzzRewriter(f *testing.F) {
	f.Add("sk-0123456789", []byte("x sk-0123456789 sk-012"), uint8(3))
	f.Add("aaaaaaaa", []byte("aaaaaaaaaaaaaaaaaaa"), uint8(1))
	f.Add("a+/b+/c+/", []byte("a%2B/b"+encoded("::a+/b+/c+/")), uint8(7))
	f.Fuzz(func(t *testing.T, value string, text []byte, size uint8) {
		if len(value) < leastWatched || len(value) > 64 || strings.Contains(value, "mock-A") || strings.Contains("mock-A", value) {
			return
		}
		s := []Secret{one("A", value)}
		w, r := Watched(s), Rewriter{}
		r = w.Rewriter()
		var out []byte
		for p := text; len(p) > 0; {
			n := min(int(size)%64+1, len(p))
			out = r.Append(out, p[:n])
			p = p[n:]
		}
		out = r.Flush(out)
		if want := reference(forms(value, "mock-A"), string(text)); string(out) != want {
			t.Errorf("%q became %q, want %q", text, out, want)
		}
		if bytes.Equal(out, text) != (r.Found == 0) && value != "mock-A" {
			t.Errorf("%d found in %q", r.Found, text)
		}
	})
}

func BenchmarkRewriter(b *testing.B) {
	w := Watched([]Secret{one("API", "sk-proj-aZ09bY18cX27dW36eV45fU54gT63hS72iR81jQ90")})
	var text strings.Builder
	for i := 0; text.Len() < 1<<20; i++ {
		text.WriteString(`{"id":"chatcmpl-` + base64.RawURLEncoding.EncodeToString([]byte{byte(i), byte(i >> 8), 7, 9, 200}) + `","choices":[{"delta":{"content":"sk is a word as any"}}]}` + "\n")
	}
	data := []byte(text.String())
	var out []byte
	before := processorTime(b)
	for b.Loop() {
		r := w.Rewriter()
		out = out[:0]
		for i := 0; i < len(data); i += piece {
			out = r.Append(out[:0], data[i:min(i+piece, len(data))])
		}
	}
	b.ReportMetric(float64(len(data)*b.N)/1e6/(processorTime(b)-before).Seconds(), "MB/s/core")
}

// processorTime is what this process has used: on a busy host the clock says little.
func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

func BenchmarkWatched(b *testing.B) {
	s := []Secret{one("API", "sk-proj-aZ09bY18cX27dW36eV45fU54gT63hS72iR81jQ90")}
	for b.Loop() {
		Watched(s)
	}
}

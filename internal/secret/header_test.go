package secret

import (
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// one makes a secret for tests.
func one(name, value string, destinations ...string) Secret {
	return Secret{Name: name, Placeholder: DefaultPlaceholder(name), Destinations: destinations, Value: NewValue(value)}
}

func encoded(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }

func TestInsert(t *testing.T) {
	key, other := one("API", "sk-0123456789", "api.test", "*.api.test"), one("API_TOKEN", "tk-abcdefghij", "token.test")
	held := []Secret{key, other}
	for _, c := range []struct {
		name, header, value, want string
		host                      string
		carried, strayed          string
	}{
		{"whole", "X-Key", "mock-API", "sk-0123456789", "api.test", "API", ""},
		{"bearer", "Authorization", "Bearer mock-API", "Bearer sk-0123456789", "api.test", "API", ""},
		{"within, twice", "Cookie", "a=mock-API; b=mock-API.", "a=sk-0123456789; b=sk-0123456789.", "api.test", "API", ""},
		{"below a wildcard", "X-Key", "mock-API", "sk-0123456789", "eu.api.test", "API", ""},
		{"the longer of two", "X-Key", "mock-API_TOKEN", "tk-abcdefghij", "token.test", "API_TOKEN", ""},
		{"the longer is not for the host", "X-Key", "mock-API_TOKEN", "mock-API_TOKEN", "api.test", "", "API_TOKEN"},
		{"both, one may go", "X-Key", "mock-API mock-API_TOKEN", "sk-0123456789 mock-API_TOKEN", "api.test", "API", "API_TOKEN"},
		{"another case", "X-Key", "MOCK-API mock-api", "MOCK-API mock-api", "api.test", "", ""},
		{"another host", "X-Key", "mock-API", "mock-API", "evil.test", "", "API"},
		{"no TLS, or no name", "X-Key", "mock-API", "mock-API", "", "", "API"},
		{"basic, as the password", "Authorization", "Basic " + encoded("u:mock-API"), "Basic " + encoded("u:sk-0123456789"), "api.test", "API", ""},
		{"basic, as the user, in lower case", "Authorization", "basic " + encoded("mock-API:"), "Basic " + encoded("sk-0123456789:"), "api.test", "API", ""},
		{"basic without padding", "Authorization", "Basic " + strings.TrimRight(encoded("us:mock-API"), "="), "Basic " + encoded("us:sk-0123456789"), "api.test", "API", ""},
		{"basic to another host", "Authorization", "Basic " + encoded("u:mock-API"), "Basic " + encoded("u:mock-API"), "evil.test", "", "API"},
		{"basic without one", "Authorization", "basic  eDp5 ", "basic  eDp5 ", "api.test", "", ""},
		{"basic that is none", "Authorization", "Basic !!", "Basic !!", "api.test", "", ""},
		{"base64 elsewhere", "X-Key", encoded("u:mock-API"), encoded("u:mock-API"), "api.test", "", ""},
		{"of the connection", "Proxy-Authorization", "mock-API", "mock-API", "api.test", "", ""},
		{"of the connection, encoded", "Proxy-Authorization", "Basic " + encoded("u:mock-API"), "Basic " + encoded("u:mock-API"), "api.test", "", ""},
		{"named by Connection", "X-Mine", "mock-API", "mock-API", "api.test", "", ""},
		{"an upgrade", "Upgrade", "mock-API", "mock-API", "api.test", "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			h := map[string][]string{c.header: {"first", c.value}, "Connection": {"close, x-mine , mock-API"}}
			carried, strayed, err := Insert(Request{Header: h, Target: "/", Host: c.host}, held, 4096)
			if err != nil {
				t.Fatal(err)
			}
			var names []string
			for _, s := range carried {
				names = append(names, s.Name)
			}
			if got := h[c.header]; got[0] != "first" || got[1] != c.want || strings.Join(names, ",") != c.carried || strings.Join(strayed, ",") != c.strayed {
				t.Errorf("%q, carried %v, strayed %v", got, names, strayed)
			}
			if h["Connection"][0] != "close, x-mine , mock-API" {
				t.Errorf("Connection became %q", h["Connection"])
			}
		})
	}
}

func TestInsertLooksIntoTheTarget(t *testing.T) {
	held := []Secret{one("API", "sk-0123456789", "api.test")}
	for host, want := range map[string]int{"api.test": 0, "evil.test": 1, "": 1} {
		_, strayed, err := Insert(Request{Target: "/v1/mock-API?q=mock-API", Host: host}, held, 4096)
		if err != nil || len(strayed) != want {
			t.Errorf("to %q: %v, %v", host, strayed, err)
		}
	}
}

func TestInsertIsBounded(t *testing.T) {
	held := []Secret{one("API", strings.Repeat("v", 1000), "api.test")}
	for _, c := range []struct {
		value string
		want  error
	}{{strings.Repeat("mock-API ", 3), nil}, {strings.Repeat("mock-API ", 1000), ErrRoom}, {"Basic " + encoded(strings.Repeat("mock-API ", 1000)), ErrRoom}} {
		_, _, err := Insert(Request{Header: map[string][]string{"Authorization": {c.value}}, Host: "api.test"}, held, 4096)
		if !errors.Is(err, c.want) {
			t.Errorf("%.20s...: %v", c.value, err)
		}
	}
	held[0].Value = NewValue("two\r\nX-Lines: 1")
	if _, _, err := Insert(Request{Header: map[string][]string{"X": {"mock-API"}}, Host: "api.test"}, held, 4096); !errors.Is(err, ErrUnfit) {
		t.Errorf("a value with a line end: %v", err)
	}
}

// TestInsertLooksOnce through a header for each secret: looking again behind each placeholder would take minutes.
func TestInsertLooksOnce(t *testing.T) {
	var held []Secret
	for i := range 300 {
		held = append(held, one(fmt.Sprintf("S%d", i), "sk-0123456789", "other.test"))
	}
	text := strings.Repeat("mock-S200 ", 20_000)
	h := map[string][]string{"X": {text}}
	_, strayed, err := Insert(Request{Header: h, Host: "api.test", Target: text}, held, 1<<20)
	if err != nil || h["X"][0] != text || !slices.Equal(strayed, []string{"S200"}) {
		t.Errorf("%v, %v", strayed, err)
	}
}

// Values appear where placeholders were, and nothing else changes.
func TestInsertChangesNothingElse(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		part := rapid.SampledFrom([]string{"mock-API", "mock-API_TOKEN", "mock-", "API", "_TOKEN", "x", " ", "Basic ", "mock-OTHER", "\xff"})
		parts := rapid.SliceOfN(part, 0, 8).Draw(t, "parts")
		text := strings.Join(parts, "")
		name := rapid.SampledFrom([]string{"X-Key", "Authorization", "Te", "Connection", "Keep-Alive"}).Draw(t, "name")
		host := rapid.SampledFrom([]string{"api.test", "evil.test", ""}).Draw(t, "host")
		held := []Secret{one("API", "sk-0123456789", "api.test"), one("API_TOKEN", "tk-abcdefghij", "token.test")}
		h := map[string][]string{name: {text}}
		carried, strayed, err := Insert(Request{Header: h, Host: host}, held, 1<<16)
		if err != nil {
			t.Fatal(err)
		}
		want := text
		if host == "api.test" && name != "Te" && name != "Connection" && name != "Keep-Alive" {
			want = strings.NewReplacer("mock-API_TOKEN", "mock-API_TOKEN", "mock-API", "sk-0123456789").Replace(text)
		}
		if h[name][0] != want {
			t.Fatalf("%q to %q became %q, want %q", text, host, h[name][0], want)
		}
		if (want != text) != (len(carried) > 0) || len(carried) > 0 && host == "" {
			t.Fatalf("%q to %q: carried %v, strayed %v", text, host, carried, strayed)
		}
	})
}

func TestExplain(t *testing.T) {
	s := one("API", "sk-0123456789", "api.test", "*.api.test")
	for url, want := range map[string]string{
		"https://api.test/v1":              "+api.test is a destination",
		"https://API.test.:443/v1":         "+api.test is a destination",
		"wss://eu.api.test":                "+eu.api.test is a destination",
		"https://api.test/v1?k=mock-API":   "+in the path or query, as here, it is not",
		"http://api.test":                  "-goes by http",
		"https://api.test:8443":            "-port 8443",
		"https://192.0.2.1":                "-names an address",
		"https://[2001:db8::1]/":           "-names an address",
		"https://evil.test":                "-evil.test is not a destination of API, which are api.test, *.api.test",
		"https://api.test.evil.test":       "-not a destination",
		"https://api.test@evil.test":       "-evil.test is not",
		"https://a.b.api.test/":            "-not a destination",
		"api.test":                         "-not a URL",
		"https://":                         "-not a URL",
		"https://ex ample":                 "-not a URL",
		"https://bad_host-.test/\x00value": "-not a URL",
	} {
		carried, why := s.Explain(url)
		if carried != (want[0] == '+') || !strings.Contains(why, want[1:]) || strings.Contains(why, "sk-") {
			t.Errorf("%s: %v, %s", url, carried, why)
		}
	}
}

func FuzzInsert(f *testing.F) {
	f.Add("Authorization", "Basic "+encoded("u:mock-API"), "api.test")
	f.Add("Connection", "mock-API", "api.test")
	f.Add("Authorization", "Bearer mock-APImock-API", "evil.test")
	f.Fuzz(func(t *testing.T, name, value, host string) {
		held := []Secret{one("API", "sk-0123456789", "api.test")}
		h := map[string][]string{name: {value}}
		before := maps.Clone(h)
		before[name] = slices.Clone(h[name])
		carried, _, err := Insert(Request{Header: h, Target: value, Host: host}, held, 1<<20)
		if err == nil && len(carried) == 0 && h[name][0] != before[name][0] {
			t.Errorf("%q became %q and nothing was carried", before[name][0], h[name][0])
		}
		if host != "api.test" && strings.Contains(h[name][0], "sk-0123456789") && !strings.Contains(value, "sk-0123456789") {
			t.Errorf("the value went to %q", host)
		}
	})
}

// TestRoomIsTakenAtOnce: a request of many headers with placeholders is refused before all of it has grown.
func TestRoomIsTakenAtOnce(t *testing.T) {
	const room = 64 << 10
	header := map[string][]string{}
	for range 5000 {
		header["X-Key"] = append(header["X-Key"], "mock-KEY")
	}
	held := []Secret{one("KEY", strings.Repeat("v", maxValue), "dest.test")}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	_, _, err := Insert(Request{Header: header, Host: "dest.test"}, held, room)
	runtime.ReadMemStats(&after)
	if taken := after.TotalAlloc - before.TotalAlloc; !errors.Is(err, ErrRoom) || taken > 4*room {
		t.Errorf("%v after %d bytes", err, taken)
	}
}

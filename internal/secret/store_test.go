package secret

import (
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

const value = "s3cr3t-value-of-a-test"

func open(t *testing.T, dir string, key *Key) *Store {
	t.Helper()
	s, err := Open(dir, key, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func set(t *testing.T, s *Store, name string, req shard.PutSecretRequest) *shard.Secret {
	t.Helper()
	rec, err := s.Set(name, req, Holders{})
	if err != nil {
		t.Fatal(err)
	}
	return rec
}

func to(hosts ...string) shard.PutSecretRequest {
	return shard.PutSecretRequest{Value: value, Destinations: hosts}
}

func key(t *testing.T, fill byte) *Key {
	t.Helper()
	path := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(path, []byte(strings.Repeat(hex.EncodeToString([]byte{fill}), keySize)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	k, err := ReadKey(path)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestDestinations is the part of case 84 about odd destinations: each is matched as documented, or refused.
func TestDestinations(t *testing.T) {
	for _, tc := range []struct{ given, is string }{
		{"api.example.com", "api.example.com"}, {"API.Example.COM.", "api.example.com"}, {"bücher.example", "xn--bcher-kva.example"},
		{"*.example.com", "*.example.com"}, {"*.EXAMPLE.co.uk.", "*.example.co.uk"}, {"*.me.github.io", "*.me.github.io"},
		{"s3.amazonaws.com", "s3.amazonaws.com"}, {"github.io", "github.io"}, {"a.localhost", "a.localhost"}, {"dest.lab", "dest.lab"}, // hosts, whoever has names below them
		{"localhost", ""}, {"com", ""}, {"COM.", ""}, {"intranet", ""}, {"co.uk", ""}, {"Co.Uk.", ""}, {"gov.br", ""}, {"x.ck", ""}, {"xn--p1ai", ""}, {"*.localhost", ""},
		{"*.s3.amazonaws.com", ""}, {"exam\u00adple.com", ""}, {"example.com\u200b", ""}, {"\u202eexample.com", ""}, {"example.com\u00a0", ""}, {"example.com\x00", ""},
		{"*", ""}, {"*.com", ""}, {"*.co.uk", ""}, {"*.github.io", ""}, {"a.*", ""}, {"*.*.example.com", ""}, {"a*.example.com", ""}, {"www.*.com", ""},
		{"*.", ""}, {"", ""}, {".", ""}, {"example.com:443", ""}, {"https://example.com", ""}, {"example.com/path", ""}, {"user@example.com", ""},
		{"suffix:example.com", ""}, {"192.0.2.1", ""}, {"127.1", ""}, {"0x7f.1", ""}, {"[2001:db8::1]", ""}, {"2001:db8::1", ""}, {"*.192.0.2.1", ""},
		{"a b.example.com", ""}, {"example.com\n", ""}, {strings.Repeat("a.", 127) + "toolong", ""},
	} {
		got, err := parseDestinations([]string{tc.given})
		if tc.is == "" {
			if shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Errorf("%q: %v, %v", tc.given, got, err)
			}
			continue
		}
		if err != nil || len(got) != 1 || got[0] != tc.is {
			t.Errorf("%q: %v, %v, want %s", tc.given, got, err, tc.is)
		}
	}
	if got, err := parseDestinations([]string{"a.example", "A.example.", "b.example"}); err != nil || len(got) != 2 {
		t.Errorf("the same host twice: %v %v", got, err)
	}
	if _, err := parseDestinations(slices.Repeat([]string{"a.example"}, maxDestinations+1)); err == nil {
		t.Error("too many were accepted")
	}
}

// TestFor: a plain destination is one host, *.d is every host with exactly one label before d, and nothing else is.
func TestFor(t *testing.T) {
	label := rapid.SampledFrom([]string{"a", "b", "api", "www", "example", "com", "evil"})
	host := rapid.Custom(func(t *rapid.T) []string { return rapid.SliceOfN(label, 1, 5).Draw(t, "labels") })
	rapid.Check(t, func(t *rapid.T) {
		domain, asked := host.Draw(t, "domain"), host.Draw(t, "asked")
		wild := rapid.Bool().Draw(t, "wild")
		s := Secret{Destinations: []string{"other.test", strings.Join(domain, ".")}}
		want := slices.Equal(domain, asked)
		if wild {
			s.Destinations[1] = "*." + s.Destinations[1]
			want = len(asked) == len(domain)+1 && slices.Equal(domain, asked[1:])
		}
		if got := s.For(strings.Join(asked, ".")); got != want {
			t.Fatalf("%v for %v: %v", s.Destinations, asked, got)
		}
	})
}

// TestValuePrintsRedacted: nothing that prints, logs or encodes shows a value, wherever it stands.
func TestValuePrintsRedacted(t *testing.T) {
	v := NewValue(value)
	s := Secret{Name: "A", Value: v}
	type holder struct {
		inside Secret
		list   []Secret
		byName map[string]*Secret
	}
	h := holder{s, []Secret{s}, map[string]*Secret{"A": &s}}
	var log bytes.Buffer
	for _, handler := range []slog.Handler{slog.NewJSONHandler(&log, nil), slog.NewTextHandler(&log, nil)} {
		l := slog.New(handler)
		l.Info("x", "value", v, "secret", s, "pointer", &s, "holder", h, "err", fmt.Errorf("bad %v", v))
	}
	text := log.String()
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d", "%T"} {
		text += fmt.Sprintf(verb+verb+verb+verb, v, s, &s, h)
	}
	data, err := json.Marshal(map[string]any{"value": v, "secret": s})
	if err != nil {
		t.Fatal(err)
	}
	text += string(data)
	for _, form := range []string{value, hex.EncodeToString([]byte(value)), strings.ToUpper(hex.EncodeToString([]byte(value)))} {
		if strings.Contains(text, form) {
			t.Errorf("the value shows:\n%s", text)
		}
	}
	if !strings.Contains(text, Redacted) || v.Reveal() != value || (Value{}).Reveal() != "" {
		t.Errorf("%q %q", text, v.Reveal())
	}
}

func TestSetAndHeld(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "secrets")
	s := open(t, dir, nil)
	rec := set(t, s, "API_TOKEN", to("API.example.com."))
	if rec.Placeholder != "mock-API_TOKEN" || !slices.Equal(rec.Destinations, []string{"api.example.com"}) || time.Since(rec.UpdatedAt) > time.Hour {
		t.Errorf("%+v", rec)
	}
	for _, p := range []string{dir, filepath.Join(dir, "API_TOKEN")} {
		info, err := os.Stat(p)
		if err != nil || info.Mode().Perm()&0o077 != 0 {
			t.Errorf("%s: %v %v", p, info.Mode(), err)
		}
	}
	s.Lend("box", []string{"API_TOKEN", "GONE"})
	held := func(s *Store) string {
		var out []string
		for _, h := range s.Held("box") {
			out = append(out, h.Name+"="+h.Value.Reveal()+"@"+h.Placeholder)
		}
		return strings.Join(out, " ")
	}
	if got := held(s); got != "API_TOKEN="+value+"@mock-API_TOKEN" {
		t.Errorf("held: %s", got)
	}
	// The value is replaced, all else stays; a custom placeholder and what a misuse does likewise.
	rec = set(t, s, "API_TOKEN", shard.PutSecretRequest{Value: "another-value", Placeholder: "sk-test-0000", OnMisuse: "stop"})
	rec = set(t, s, "API_TOKEN", shard.PutSecretRequest{Value: "a-third-value"})
	if rec.Placeholder != "sk-test-0000" || rec.OnMisuse != "stop" || len(rec.Destinations) != 1 || held(s) != "API_TOKEN=a-third-value@sk-test-0000" {
		t.Errorf("%+v, held %s", rec, held(s))
	}
	again := open(t, dir, nil)
	again.Lend("box", []string{"API_TOKEN"})
	if held(again) != held(s) {
		t.Errorf("after a restart: %s", held(again))
	}
	// While somebody has it, its placeholder and its name stay.
	holders := Holders{Names: []string{"web"}}
	_, err := s.Set("API_TOKEN", shard.PutSecretRequest{Value: value, Placeholder: "sk-test-0001"}, holders)
	if e, ok := errors.AsType[*shard.Error](err); !ok || e.Code != shard.CodeInUse || !slices.Equal(e.Holders, holders.Names) {
		t.Errorf("placeholder of a held secret: %v", err)
	}
	if _, err := s.Set("API_TOKEN", shard.PutSecretRequest{Value: value, Placeholder: "sk-test-0001"}, Holders{Uncertain: "records are unreadable"}); shard.CodeOf(err) != shard.CodeInUse {
		t.Errorf("placeholder while records cannot be read: %v", err)
	}
	if _, err := s.Set("API_TOKEN", shard.PutSecretRequest{Value: "fourth-value", Placeholder: "sk-test-0000"}, holders); err != nil {
		t.Errorf("the placeholder that it has: %v", err)
	}
	err = s.Remove("API_TOKEN", false, holders)
	if e, ok := errors.AsType[*shard.Error](err); !ok || e.Code != shard.CodeInUse || !slices.Equal(e.Holders, holders.Names) {
		t.Errorf("remove a held secret: %v", err)
	}
	if err := s.Remove("API_TOKEN", true, holders); err != nil || held(s) != "" {
		t.Errorf("force: %v, held %s", err, held(s))
	}
	if _, err := os.Stat(filepath.Join(dir, "API_TOKEN")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file is still there: %v", err)
	}
	if _, err := s.Set("API_TOKEN", to("api.example.com"), holders); shard.CodeOf(err) != shard.CodeInUse {
		t.Errorf("set again while granted: %v", err)
	}
	if err := s.Remove("API_TOKEN", true, Holders{}); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("remove twice: %v", err)
	}
	s.Lend("box", nil)
	if s.Held("box") != nil {
		t.Error("a sandbox that has nothing holds something")
	}
}

func TestRefusals(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	set(t, s, "TAKEN", shard.PutSecretRequest{Value: value, Destinations: []string{"a.example"}, Placeholder: "custom-placeholder"})
	dest := []string{"b.example"}
	for what, tc := range map[string]struct {
		name string
		req  shard.PutSecretRequest
	}{
		"a name in lower case":           {"token", to("b.example")},
		"a name that begins with 1":      {"1TOKEN", to("b.example")},
		"a name that is a path":          {"../TOKEN", to("b.example")},
		"a long name":                    {strings.Repeat("A", 129), to("b.example")},
		"no value":                       {"TOKEN", shard.PutSecretRequest{Destinations: dest}},
		"no destinations":                {"TOKEN", shard.PutSecretRequest{Value: value}},
		"an empty list":                  {"TAKEN", shard.PutSecretRequest{Value: value, Destinations: []string{}}},
		"a line end":                     {"TOKEN", shard.PutSecretRequest{Value: value + "\n", Destinations: dest}},
		"a NUL":                          {"TOKEN", shard.PutSecretRequest{Value: "\x00" + value, Destinations: dest}},
		"bytes that are no text":         {"TOKEN", shard.PutSecretRequest{Value: value + "\xff", Destinations: dest}},
		"a huge value":                   {"TOKEN", shard.PutSecretRequest{Value: strings.Repeat(value, 1000), Destinations: dest}},
		"a short placeholder":            {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "short"}},
		"a placeholder with a space":     {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "place holder"}},
		"the value within":               {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "x" + value}},
		"within the value":               {"TOKEN", shard.PutSecretRequest{Value: "pre-placeholder-post", Destinations: dest, Placeholder: "placeholder"}},
		"another's placeholder":          {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "custom-placeholder"}},
		"another's default placeholder":  {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "mock-TAKEN"}},
		"a misuse that does who knows":   {"TOKEN", shard.PutSecretRequest{Value: value, Destinations: dest, OnMisuse: "explode"}},
		"a destination that is too wide": {"TOKEN", to("*.com")},
	} {
		_, err := s.Set(tc.name, tc.req, Holders{})
		if shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("%s: %v", what, err)
		} else if len(tc.req.Value) > 8 && strings.Contains(err.Error(), tc.req.Value) && tc.req.Placeholder == "" {
			t.Errorf("%s: the value is in the refusal: %v", what, err)
		}
	}
	// A default placeholder that somebody took before.
	set(t, s, "SQUATTER", shard.PutSecretRequest{Value: value, Destinations: dest, Placeholder: "mock-LATER_ONE"})
	if _, err := s.Set("LATER_ONE", to("b.example"), Holders{}); shard.CodeOf(err) != shard.CodeInvalidRequest {
		t.Errorf("two secrets have one placeholder: %v", err)
	}
	if files, _ := os.ReadDir(s.dir); len(files) != 2 {
		t.Errorf("refusals left something: %v", files)
	}
}

// TestUnreadable: a damaged secret harms no other, is told by name, keeps anything from being set, and can be removed.
func TestUnreadable(t *testing.T) {
	dir := t.TempDir()
	s := open(t, dir, nil)
	set(t, s, "GOOD", to("a.example"))
	for name, text := range map[string]string{"EMPTY": "", "CUT": `{"format":1,"rec`, "OTHER": `{"format":2,"record":{"name":"OTHER"}}`, "NAMELESS": `{"format":1,"record":{"name":"GOOD"}}`,
		"FIELD": `{"format":1,"record":{"name":"FIELD","value":"` + value + `","new":1}}`} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(dir, "A_DIRECTORY"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/etc/shadow", filepath.Join(dir, "LINK")); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, ".tmp-123"), nil, 0o600); err != nil { // a crash in a write
		t.Fatal(err)
	}
	s = open(t, dir, nil)
	list, warnings := s.List()
	if len(list) != 1 || list[0].Name != "GOOD" || len(warnings) != 7 || strings.Contains(strings.Join(warnings, ""), value) || strings.Contains(strings.Join(warnings, ""), "/") {
		t.Errorf("%v %q", list, warnings)
	}
	s.Lend("box", []string{"GOOD", "CUT"})
	if held := s.Held("box"); len(held) != 1 || held[0].Name != "GOOD" {
		t.Errorf("held: %v", held)
	}
	if _, err := s.Set("GOOD", shard.PutSecretRequest{Value: "new"}, Holders{}); err == nil || !strings.Contains(err.Error(), "A_DIRECTORY") {
		t.Errorf("a set beside unreadable ones: %v", err)
	}
	for _, name := range []string{"EMPTY", "CUT", "OTHER", "NAMELESS", "FIELD", "A_DIRECTORY", "LINK"} {
		if err := s.Remove(name, false, Holders{}); err != nil {
			t.Errorf("remove %s: %v", name, err)
		}
	}
	if _, err := os.Stat("/etc/shadow"); err != nil {
		t.Fatal("a link was followed")
	}
	set(t, s, "GOOD", shard.PutSecretRequest{Value: "new"})
}

// TestEncryption: with a key nothing readable is on disk; without it, or with another, or moved to another name, a secret is
// unreadable and says why.
func TestEncryption(t *testing.T) {
	dir := t.TempDir()
	set(t, open(t, dir, nil), "PLAIN", to("a.example"))
	if data, _ := os.ReadFile(filepath.Join(dir, "PLAIN")); !bytes.Contains(data, []byte(value)) {
		t.Fatalf("%s", data)
	}
	right, wrong := key(t, 1), key(t, 2)
	s := open(t, dir, right) // the plain one is encrypted
	set(t, s, "SEALED", to("secret-host.example"))
	for _, name := range []string{"PLAIN", "SEALED"} {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil || bytes.Contains(data, []byte(value)) || bytes.Contains(data, []byte("example")) {
			t.Errorf("%s: %v %s", name, err, data)
		}
	}
	if list, warnings := open(t, dir, right).List(); len(list) != 2 || len(warnings) != 0 {
		t.Errorf("%v %q", list, warnings)
	}
	for why, k := range map[string]*Key{"given none": nil, "given " + wrong.id: wrong} {
		list, warnings := open(t, dir, k).List()
		if len(list) != 0 || len(warnings) != 2 || !strings.Contains(warnings[0], why) || !strings.Contains(warnings[0], right.id) {
			t.Errorf("%s: %v %q", why, list, warnings)
		}
	}
	data, _ := os.ReadFile(filepath.Join(dir, "SEALED"))
	if err := os.WriteFile(filepath.Join(dir, "PLAIN"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	var env envelope
	if err := json.Unmarshal(data, &env); err != nil {
		t.Fatal(err)
	}
	env.Sealed[len(env.Sealed)-1] ^= 1
	data, _ = json.Marshal(env)
	if err := os.WriteFile(filepath.Join(dir, "SEALED"), data, 0o600); err != nil {
		t.Fatal(err)
	}
	if list, warnings := open(t, dir, right).List(); len(list) != 0 || len(warnings) != 2 || !strings.Contains(warnings[0], "another name") || !strings.Contains(warnings[1], "damaged") {
		t.Errorf("%v %q", list, warnings)
	}
}

func TestReadKey(t *testing.T) {
	dir := t.TempDir()
	good := strings.Repeat("0f", keySize)
	for what, tc := range map[string]struct {
		text string
		mode os.FileMode
		word string
	}{
		"too short": {good[2:], 0o600, "64 hexadecimal"}, "too long": {good + "00", 0o600, "64 hexadecimal"}, "no hex": {strings.Repeat("zz", keySize), 0o600, "64 hexadecimal"},
		"empty": {"", 0o600, "64 hexadecimal"}, "open to the group": {good, 0o640, "0640"}, "open to all": {good, 0o604, "0604"},
	} {
		path := filepath.Join(dir, strings.ReplaceAll(what, " ", "-"))
		if err := os.WriteFile(path, []byte(tc.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, tc.mode); err != nil {
			t.Fatal(err)
		}
		if _, err := ReadKey(path); err == nil || !strings.Contains(err.Error(), tc.word) || strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, path := range []string{dir, filepath.Join(dir, "nothing")} {
		if _, err := ReadKey(path); err == nil || strings.Contains(err.Error(), dir) {
			t.Errorf("%s: %v", path, err)
		}
	}
}

// TestKilledBetweenSteps: whenever the daemon dies while a value is replaced, the next one finds the old or the new value.
func TestKilledBetweenSteps(t *testing.T) {
	if dir := os.Getenv("SHARD_SECRET_TEST"); dir != "" {
		s := open(t, dir, nil)
		fmt.Println("ready")
		for i := 0; ; i++ {
			set(t, s, "TOKEN", shard.PutSecretRequest{Value: fmt.Sprintf("value-%d", i), Destinations: []string{"a.example"}})
		}
	}
	dir := t.TempDir()
	set(t, open(t, dir, nil), "TOKEN", shard.PutSecretRequest{Value: "value-0", Destinations: []string{"a.example"}})
	for i := range 20 {
		cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run", "^TestKilledBetweenSteps$")
		cmd.Env = append(os.Environ(), "SHARD_SECRET_TEST="+dir)
		out, err := cmd.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		if _, err := out.Read(make([]byte, 5)); err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Duration(i) * 500 * time.Microsecond) // anywhere in the loop
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		s := open(t, dir, nil)
		sec, err := s.Get("TOKEN")
		if err != nil || !strings.HasPrefix(sec.Value.Reveal(), "value-") {
			t.Fatal(err)
		}
		if files, _ := os.ReadDir(dir); len(files) != 1 {
			t.Errorf("left over: %v", files)
		}
	}
}

func TestMisuses(t *testing.T) {
	s := open(t, t.TempDir(), nil)
	for range 1000 {
		s.Misused("one", "A", "evil.example", "not granted")
		s.Misused("two", "A", "evil.example", "not granted")
	}
	s.Misused("one", "A", "last.example", "plain HTTP")
	got, err := s.Misuses(t.Context())
	slices.SortFunc(got, func(a, b Misuse) int { return strings.Compare(a.Sandbox, b.Sandbox) })
	if err != nil || len(got) != 2 || got[0].Count != 1001 || got[0].Host != "last.example" || got[0].Reason != "plain HTTP" || got[1].Count != 1000 || s.MisuseCount() != 2001 {
		t.Errorf("%+v %v", got, err)
	}
}

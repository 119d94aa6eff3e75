package shard

import (
	"strings"
	"testing"
	"unicode/utf8"
)

func TestWordLists(t *testing.T) {
	for _, list := range [][]string{adjectives, nouns} {
		seen := map[string]bool{}
		for _, w := range list {
			seen[w] = true
		}
		if len(list) != 64 || len(seen) != 64 {
			t.Errorf("a word list has %d words, %d of them different: want 64", len(list), len(seen))
		}
	}
	for range 100 {
		if id := NewID(); !IsID(id) || CheckName("sandbox", id) == nil || CheckRef("sandbox", id) != nil {
			t.Fatalf("id %q: not an id, or taken as a name", id)
		}
	}
}

func TestNames(t *testing.T) {
	for _, bad := range []string{"", ".", "..", "a/b", "A", "a b", "é", "a\x00", strings.Repeat("a", 65), "brave-otter-12ab", "%2e%2e"} {
		if err := CheckName("sandbox", bad); CodeOf(err) != CodeInvalidRequest {
			t.Errorf("CheckName(%q) = %v", bad, err)
		}
	}
	for _, good := range []string{"a", "-", "web_1", strings.Repeat("a", 64), "brave-otter-12abc", "list", "brave"} {
		if err := CheckName("sandbox", good); err != nil {
			t.Errorf("CheckName(%q) = %v", good, err)
		}
	}
	for _, bad := range []string{"..", "a/b", "", "A", strings.Repeat("a", 33), "%2e%2e"} {
		if CheckProcessName(bad) == nil {
			t.Errorf("process name %q is taken", bad)
		}
	}
}

func TestEnvAndCommand(t *testing.T) {
	for _, bad := range [][]string{{"=x"}, {"x"}, {"A\x00=1"}, {"A=1\x00"}, {""}} {
		if CheckEnv(bad) == nil {
			t.Errorf("CheckEnv(%q) passes", bad)
		}
	}
	if err := CheckEnv([]string{"A=", "B=a=b\nc", "1=x"}); err != nil {
		t.Error(err)
	}
	if err := CheckEnv([]string{"KEY\x00=SECRET"}); strings.Contains(err.Error(), "SECRET") {
		t.Error("a value is in the message")
	}
	got := strings.Join(MergeEnv([]string{"A=1", "B=2"}, "C=3", "A=4", "C=5"), " ")
	if got != "A=4 B=2 C=5" {
		t.Error(got)
	}
	for _, bad := range [][]string{nil, {""}, {"a", "\x00"}} {
		if CheckCommand(bad) == nil {
			t.Errorf("CheckCommand(%q) passes", bad)
		}
	}
}

func TestSizes(t *testing.T) {
	for in, want := range map[string]int64{"0": 0, "512MiB": 512, "2GiB": 2048, "1KiB": 1, "1MB": 1, "2GB": 1908, "1048577KiB": 1025} {
		if got, err := ParseSize(in); err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", in, got, err, want)
		}
	}
	for _, bad := range []string{"", "512", "-1MiB", "1.5GiB", "1 GiB", "1TiB", "1mib", "999999999999999GiB"} {
		if _, err := ParseSize(bad); CodeOf(err) != CodeInvalidRequest {
			t.Errorf("ParseSize(%q) = %v", bad, err)
		}
	}
}

// TestStateTable states the table of verbs and states a second time, in another order of columns.
func TestStateTable(t *testing.T) {
	columns := []State{StatePending, StateRunning, StatePaused, StateUnresponsive, StateStopped, StateFailed, StateCreated}
	short := map[string]Code{"ok": "", "nr": CodeSandboxNotRunning, "ns": CodeSandboxNotStopped, "np": CodeSandboxNotPaused,
		"lv": CodeSandboxLive, "fl": CodeSandboxFailed}
	table := map[Verb]string{
		VerbGet:      "ok ok ok ok ok ok ok",
		VerbStart:    "ns ns ns ns ok fl ns",
		VerbStop:     "ok ok ok ok nr fl nr",
		VerbPause:    "nr ok nr nr nr fl nr",
		VerbResume:   "np np ok np np fl np",
		VerbFork:     "nr ok nr nr nr fl nr",
		VerbExec:     "nr ok nr nr nr fl nr",
		VerbKill:     "nr ok nr nr nr fl nr",
		VerbSnapshot: "ns ns ns ns ok fl ns",
		VerbGrant:    "lv lv lv lv ok fl ok",
		VerbPort:     "ok ok ok ok ok fl ok",
		VerbRemove:   "ok ns ns ns ok ok ok",
		VerbForce:    "ok ok ok ok ok ok ok",
	}
	for _, verb := range Verbs {
		for i, want := range strings.Fields(table[verb]) {
			if got := CodeOf(CheckVerb("web", columns[i], verb)); got != short[want] {
				t.Errorf("%s of a %s sandbox: %q, want %q", verb, columns[i], got, short[want])
			}
		}
	}
	// A refusal says how the sandbox is and what to do, whatever was asked of it: cp and watch are no "exec".
	for _, c := range []struct {
		state State
		verb  Verb
		says  string
	}{
		{StateStopped, VerbExec, `sandbox "web" is stopped: start it first`},
		{StatePaused, VerbKill, `sandbox "web" is paused: resume it first`},
		{StatePending, VerbExec, `sandbox "web" is pending: wait until it runs (inspect shows when)`},
		{StateUnresponsive, VerbExec, `sandbox "web" does not respond: wait until it does, or stop it`},
		{StateFailed, VerbStart, `sandbox "web" is failed: it can only be inspected and removed`},
		{StateRunning, VerbResume, `sandbox "web" is running: only a paused one can be resumed`},
	} {
		if err := CheckVerb("web", c.state, c.verb); err == nil || err.Error() != c.says {
			t.Errorf("%s of a %s sandbox: %v, want %s", c.verb, c.state, err, c.says)
		}
	}
}

func FuzzParseSize(f *testing.F) {
	f.Add("512MiB")
	f.Fuzz(func(t *testing.T, s string) {
		if mib, err := ParseSize(s); err == nil && (mib < 0 || (mib == 0 && strings.Trim(s, "0KMGiB") != "")) {
			t.Fatalf("ParseSize(%q) = %d", s, mib)
		}
	})
}

// A message is one line that can be shown, whatever somebody else put into it.
func TestMessagesAreOneLine(t *testing.T) {
	hostile := "a\x1b[2Jb\nc\xffd\u202e" + strings.Repeat("é", 5000)
	for _, err := range []*Error{Errorf(CodeInternal, "x %s", hostile), Wrap(CodeInternal, nil, "x %s", hostile), Invalidf("x %s", hostile)} {
		if m := err.Message; !strings.HasPrefix(m, "x a?[2Jb?c?d?éé") || len(m) > 4096 || !utf8.ValidString(m) || !strings.HasSuffix(m, "é…") {
			t.Errorf("%d bytes: %.40q", len(m), m)
		}
	}
	if m := Errorf(CodeInternal, "said: %q …", "ok").Message; m != `said: "ok" …` {
		t.Errorf("%q", m)
	}
}

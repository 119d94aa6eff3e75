package test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestBadInput: what a person can get wrong is answered with one plain line, the documented code, and no trace.
func TestBadInput(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--name", "taken")
		dir := t.TempDir()
		file := filepath.Join(dir, "file")
		if err := os.WriteFile(file, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
		create := func(options ...string) []string {
			return append(append([]string{"create", "--provider", provider}, options...), image)
		}
		for name, c := range map[string]struct {
			args  []string
			code  int
			words []string
		}{
			"name taken":           {create("--name", "taken"), 1, []string{"taken"}},
			"name upper case":      {create("--name", "Bad"), 1, []string{"Bad", "name"}},
			"name with slash":      {create("--name", "../x"), 1, []string{"name"}},
			"name too long":        {create("--name", strings.Repeat("a", 65)), 1, []string{"name"}},
			"name like an id":      {create("--name", "calm-otter-0123"), 1, []string{"calm-otter-0123"}},
			"memory without unit":  {create("--memory", "512"), 1, []string{"512"}},
			"memory nonsense":      {create("--memory", "lots"), 1, []string{"lots"}},
			"memory negative":      {create("--memory=-5MiB"), 1, []string{"-5MiB"}},
			"memory above host":    {create("--memory", "1000000GiB"), 1, nil},
			"disk nonsense":        {create("--disk", "1.5GiB"), 1, []string{"1.5GiB"}},
			"vcpus fraction":       {create("--vcpus", "1.5"), 1, []string{"1.5"}},
			"vcpus negative":       {create("--vcpus=-1"), 1, []string{"-1"}},
			"vcpus above host":     {create("--vcpus", "100000"), 1, nil},
			"env without =":        {create("--env", "NOVALUE"), 1, []string{"env"}},
			"env without key":      {create("--env", "=x"), 1, []string{"env"}},
			"user unknown":         {create("--user", "nosuchuser"), 1, []string{"nosuchuser"}},
			"provider unknown":     {[]string{"create", "--provider", "nosuch", image}, 1, []string{"nosuch"}},
			"image unparsable":     {[]string{"create", "--provider", provider, "UPPER CASE"}, 1, []string{"UPPER CASE"}},
			"image missing":        {[]string{"create"}, 1, nil},
			"flag unknown":         {[]string{"create", "--nosuch", image}, 1, []string{"nosuch"}},
			"command unknown":      {[]string{"nosuch"}, 1, []string{"nosuch"}},
			"sandbox unknown":      {[]string{"exec", "nosuch", "true"}, 1, []string{"nosuch"}},
			"sandbox bad form":     {[]string{"inspect", "../../etc"}, 1, nil},
			"inspect unknown":      {[]string{"inspect", "nosuch"}, 1, []string{"nosuch"}},
			"stop unknown":         {[]string{"stop", "nosuch"}, 1, []string{"nosuch"}},
			"start unknown":        {[]string{"start", "nosuch"}, 1, []string{"nosuch"}},
			"remove unknown":       {[]string{"remove", "nosuch"}, 1, []string{"nosuch"}},
			"cp local missing":     {[]string{"cp", filepath.Join(dir, "missing"), "taken:/tmp/x"}, 1, []string{"missing"}},
			"cp no sandbox side":   {[]string{"cp", file, filepath.Join(dir, "other")}, 1, nil},
			"cp both sandbox":      {[]string{"cp", "taken:/a", "taken:/b"}, 1, nil},
			"cp sandbox unknown":   {[]string{"cp", file, "nosuch:/tmp/x"}, 1, []string{"nosuch"}},
			"cp out missing":       {[]string{"cp", "taken:/nosuch", dir}, 1, []string{"/nosuch"}},
			"cp parent missing":    {[]string{"cp", file, "taken:/no/such/dir/x"}, 1, []string{"/no/such"}},
			"exec without command": {[]string{"exec", "taken"}, 1, nil},
			"exec missing":         {[]string{"exec", "taken", "nosuchcommand"}, 127, []string{"nosuchcommand"}},
			"exec missing path":    {[]string{"exec", "taken", "/no/such/command"}, 127, []string{"/no/such/command"}},
			"exec not executable":  {[]string{"exec", "taken", "/etc/passwd"}, 126, []string{"/etc/passwd"}},
			"exec a directory":     {[]string{"exec", "taken", "/etc"}, 126, []string{"/etc"}},
			"exec bad workdir":     {[]string{"exec", "--workdir", "/nosuchdir", "taken", "true"}, 126, []string{"/nosuchdir"}},
			"exec unknown user":    {[]string{"exec", "--user", "nosuchuser", "taken", "true"}, 1, []string{"nosuchuser"}},
			"exec env without =":   {[]string{"exec", "--env", "NOVALUE", "taken", "true"}, 1, []string{"env"}},
			"image remove unknown": {[]string{"image", "remove", "no/such:image"}, 1, []string{"no/such"}},
			"import missing file":  {[]string{"image", "import", filepath.Join(dir, "missing.tar"), "a/b:c"}, 1, []string{"missing.tar"}},
			"import no archive":    {[]string{"image", "import", file, "a/b:c"}, 1, nil},
		} {
			t.Run(name, func(t *testing.T) {
				failed(t, d.Shard(c.args...), c.code, c.words...)
			})
		}
		if out := d.Must("list", "--all", "-q"); out != id {
			t.Errorf("after all that the list is %q, want %q", out, id)
		}
		d.Must("remove", "--force", id)
		testenv.Eventually(t, "nothing is left on the host", func() (bool, string) {
			left := d.Leftovers(false)
			return left.Empty(), left.String()
		})
	})
}

// TestBadInputAPI: the codes behind those lines, and what only an HTTP client can get wrong.
func TestBadInputAPI(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--name", "taken")
		type req = map[string]any
		for name, c := range map[string]struct {
			method, path string
			body         any
			want         shard.Code
		}{
			"name taken":                 {"POST", "/v0/sandboxes", req{"image": image, "provider": provider, "name": "taken"}, shard.CodeNameTaken},
			"name bad":                   {"POST", "/v0/sandboxes", req{"image": image, "name": ".."}, shard.CodeInvalidRequest},
			"name like an id":            {"POST", "/v0/sandboxes", req{"image": image, "name": "calm-otter-0123"}, shard.CodeInvalidRequest},
			"neither image nor snapshot": {"POST", "/v0/sandboxes", req{}, shard.CodeInvalidRequest},
			"both":                       {"POST", "/v0/sandboxes", req{"image": image, "snapshot": "x"}, shard.CodeInvalidRequest},
			"field unknown":              {"POST", "/v0/sandboxes", req{"image": image, "imagee": "x"}, shard.CodeInvalidRequest},
			"type wrong":                 {"POST", "/v0/sandboxes", req{"image": 7}, shard.CodeInvalidRequest},
			"resource wrong":             {"POST", "/v0/sandboxes", req{"image": image, "resources": req{"memory_mib": -1}}, shard.CodeInvalidRequest},
			"resource fraction":          {"POST", "/v0/sandboxes", req{"image": image, "resources": req{"vcpus": 1.5}}, shard.CodeInvalidRequest},
			"user unknown":               {"POST", "/v0/sandboxes", req{"image": image, "provider": provider, "user": "nosuch"}, shard.CodeInvalidRequest},
			"body is an array":           {"POST", "/v0/sandboxes", "[]", shard.CodeInvalidRequest},
			"body is not JSON":           {"POST", "/v0/sandboxes", "{", shard.CodeInvalidRequest},
			"body twice":                 {"POST", "/v0/sandboxes", `{"image":"x"}{"image":"x"}`, shard.CodeInvalidRequest},
			"body empty":                 {"POST", "/v0/sandboxes", "", shard.CodeInvalidRequest},
			"body deep":                  {"POST", "/v0/sandboxes", strings.Repeat(`{"a":`, 100000), shard.CodeInvalidRequest},
			"body too large":             {"POST", "/v0/sandboxes", `{"image":"` + strings.Repeat("x", 1<<20) + `"}`, shard.CodeBodyTooLarge},
			"sandbox unknown":            {"GET", "/v0/sandboxes/nosuch", nil, shard.CodeNotFound},
			"sandbox ..":                 {"GET", "/v0/sandboxes/%2e%2e", nil, shard.CodeInvalidRequest},
			"sandbox a/b":                {"GET", "/v0/sandboxes/a%2fb", nil, shard.CodeInvalidRequest},
			"sandbox NUL":                {"GET", "/v0/sandboxes/a%00b", nil, shard.CodeInvalidRequest},
			"route unknown":              {"GET", "/v0/nosuch", nil, shard.CodeNotFound},
			"root":                       {"GET", "/", nil, shard.CodeNotFound},
			"limit zero":                 {"GET", "/v0/sandboxes?limit=0", nil, shard.CodeInvalidRequest},
			"limit word":                 {"GET", "/v0/sandboxes?limit=x", nil, shard.CodeInvalidRequest},
			"all word":                   {"GET", "/v0/sandboxes?all=maybe", nil, shard.CodeInvalidRequest},
			"stop with a field":          {"POST", "/v0/sandboxes/taken/stop", `{"force":true}`, shard.CodeInvalidRequest},
			"exec no command":            {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{}}, shard.CodeInvalidRequest},
			"exec empty program":         {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{""}}, shard.CodeInvalidRequest},
			"exec NUL":                   {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{"a\x00b"}}, shard.CodeInvalidRequest},
			"exec env key empty":         {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{"true"}, "env": []string{"=x"}}, shard.CodeInvalidRequest},
			"exec env NUL":               {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{"true"}, "env": []string{"A=\x00"}}, shard.CodeInvalidRequest},
			"exec user unknown":          {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{"true"}, "user": "nosuch"}, shard.CodeInvalidRequest},
			"exec missing":               {"POST", "/v0/sandboxes/taken/exec", req{"command": []string{"nosuch"}}, shard.CodeCommandNotStarted},
			"exec id unknown":            {"GET", "/v0/sandboxes/taken/exec/nosuch", nil, shard.CodeNotFound},
			"file missing":               {"GET", "/v0/sandboxes/taken/files?path=/nosuch", nil, shard.CodeNotFound},
			"file relative":              {"GET", "/v0/sandboxes/taken/files?path=etc", nil, shard.CodeInvalidRequest},
			"file no path":               {"GET", "/v0/sandboxes/taken/files", nil, shard.CodeInvalidRequest},
			"file a directory":           {"GET", "/v0/sandboxes/taken/files?path=/etc", nil, shard.CodeInvalidRequest},
			"put mode bad":               {"PUT", "/v0/sandboxes/taken/files?path=/tmp/x&mode=99", "x", shard.CodeInvalidRequest},
			"put parent missing":         {"PUT", "/v0/sandboxes/taken/files?path=/no/such/x", "x", shard.CodeNotFound},
			"remove /":                   {"DELETE", "/v0/sandboxes/taken/files?path=/&recursive=true", nil, shard.CodeInvalidRequest},
			"remove not empty":           {"DELETE", "/v0/sandboxes/taken/files?path=/etc", nil, shard.CodeInvalidRequest},
			"archive of /":               {"GET", "/v0/sandboxes/taken/archive?path=/", nil, shard.CodeInvalidRequest},
			"mkdir exists":               {"POST", "/v0/sandboxes/taken/mkdir", req{"path": "/etc"}, shard.CodeInvalidRequest},
			"image unknown":              {"DELETE", "/v0/images/no/such:image", nil, shard.CodeNotFound},
			"pull unparsable":            {"POST", "/v0/images/pull", req{"ref": "UPPER CASE"}, shard.CodeInvalidRequest},
		} {
			t.Run(name, func(t *testing.T) {
				a := call(t, d, c.method, c.path, c.body)
				if got := a.code(t); got != c.want {
					t.Errorf("code %s (status %d), want %s: %s", got, a.Status, c.want, a.Body)
				}
			})
		}
		if out := d.Must("list", "--all", "-q"); out != id {
			t.Errorf("after all that the list is %q, want %q", out, id)
		}
		if a := call(t, d, "POST", "/v0/sandboxes/taken/exec", req{"command": []string{"/etc/passwd"}}); !strings.Contains(string(a.Body), `"exit_code":126`) {
			t.Errorf("what cannot be run has no exit code 126: %s", a.Body)
		}
	}, "runc")
}

// TestDaemonDown: without a daemon every command says so and what to do.
func TestDaemonDown(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.Stop()
	for _, args := range [][]string{{"list"}, {"create", image}, {"exec", "x", "true"}, {"inspect", "x"}, {"daemon", "status"}, {"image", "list"}} {
		refused(t, d.Shard(args...), "daemon")
	}
	if r := d.Shard("version"); r.Code != 0 && r.Stdout == "" {
		t.Errorf("version without a daemon: exit code %d, %q %q", r.Code, r.Stdout, r.Stderr)
	}
	if r := d.Shard("--version"); r.Code != 0 {
		t.Errorf("--version without a daemon: exit code %d: %s", r.Code, r.Stderr)
	}
}

// TestCase138: names never become paths.
func TestCase138(t *testing.T) {
	t.Parallel()
	d := start(t)
	canary := filepath.Join(d.Root, "canary")
	if err := os.WriteFile(canary, []byte("here"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, ref := range []string{".", "..", "%2e", "%2e%2e", "..%2fcanary", "a%2fb", "%00", "-x", "%20", strings.Repeat("a", 300), "UPPER", "caf%C3%A9"} {
		for _, method := range []string{"GET", "DELETE"} {
			a := call(t, d, method, "/v0/sandboxes/"+ref, nil)
			if a.Status != 400 && a.Status != 404 && a.Status != 301 && a.Status != 307 && a.Status != 405 {
				t.Errorf("%s %s: status %d", method, ref, a.Status)
			}
		}
	}
	if got, err := os.ReadFile(canary); err != nil || string(got) != "here" {
		t.Errorf("the canary: %q, %v", got, err)
	}
	d.Must("list")
}

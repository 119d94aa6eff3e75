package cli_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cli"
)

var update = flag.Bool("update", false, "write the golden files anew")

// TestHelpOf: help is of the command that is named, on whichever side of --help, and of none that there is not.
func TestHelpOf(t *testing.T) {
	for _, args := range []string{"image list --help", "image --help list", "--help image ls", "help image list", "help image ls"} {
		got := runApp(t, newApp(strings.NewReader(""), nil, nil), strings.Fields(args)...)
		if got.code != 0 || got.errs != "" || !strings.HasPrefix(got.out, "List the images on this host.") {
			t.Errorf("%s: %+v", args, got)
		}
	}
	// Every command that is not hidden is in a group of the list, or nobody would find it.
	got := runApp(t, newApp(strings.NewReader(""), nil, nil), "--help")
	for _, c := range []string{"create", "exec", "port", "image", "setup", "completion"} {
		if !strings.Contains(got.out, "\n  "+c+" ") {
			t.Errorf("the list of commands lacks %s: %s", c, got.out)
		}
	}
}

// TestBashCompletion: a press of the tab key works in a bash that has nothing besides our script, at words with = and : too.
func TestBashCompletion(t *testing.T) {
	if _, err := exec.LookPath("bash"); err != nil {
		t.Skip("there is no bash here")
	}
	d := start(t)
	d.answer("GET /v0/sandboxes", 200, `{"sandboxes":[{"id":"bold-fern-0001","name":"web","state":"running","image":"x"}],"next":null}`)
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(self, filepath.Join(d.root, "shard")); err != nil {
		t.Fatal(err)
	}
	for line, want := range map[string]string{
		"shard lis":                          "list",
		"shard list --format=":               "json table",
		"shard --root " + d.root + " exec w": "web",
		"shard --root " + d.root + " cp we":  "web:",
		"shard tokens mint --scopes exec,po": "exec,policy:* exec,port:read exec,port:write",
		"shard create --restart":             "",
		"shard run web --re":                 "--restart --restart-retries --restart-backoff",
		"shard run web --restart o":          "on-failure",
		"shard run web --attach --nam":       "--name",
		"shard image --n":                    "",
	} {
		cmd := exec.CommandContext(t.Context(), "bash", "--norc", "-c", `compopt() { :; }; source <(shard completion bash); COMP_LINE=$1 COMP_POINT=${#1} COMP_TYPE=9; __start_shard; echo "${COMPREPLY[*]}"`, "bash", line)
		cmd.Env = append(os.Environ(), asCLI+"=1", "PATH="+d.root+":"+os.Getenv("PATH"))
		out, err := cmd.CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != want {
			t.Errorf("%s: %q, want %q (%v)", line, got, want, err)
		}
	}
	if got := run(t, d, cobra.ShellCompRequestCmd, "create", "--poli"); !strings.Contains(got.out, "--policy\tNAME of the network policy\n") {
		t.Errorf("an option is told as %+v", got)
	}
}

// golden compares text with testdata/NAME.
func golden(t *testing.T, name, text string) {
	t.Helper()
	file := filepath.Join("testdata", name)
	if *update {
		if err := os.MkdirAll("testdata", 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), text); diff != "" {
		t.Errorf("%s: %s", name, diff)
	}
}

// TestUsage: what makes no sense is refused in one line that names it and points at the help, with exit code 1, before
// anybody is asked.
func TestUsage(t *testing.T) {
	for _, tc := range []struct{ args, says string }{
		{"nothing", `there is no command "nothing"`},
		{"lst", "did you mean list"},
		{"image nothing", `there is no command "image nothing" (see shard image --help)`},
		{"daemon nothing", `there is no command "daemon nothing"`},
		{"list --root /x", "--root is a global option and stands before the command: shard --root … list"},
		{"image list --remote x", "--remote is a global option"},
		{"--root x list", `--root "x" is not an absolute path`},
		{"--root", "option --root needs a value"},
		{"--nothing list", "unknown option --nothing (see shard --help)"},
		{"list --nothing", "unknown option --nothing (see shard list --help)"},
		{"list -x", "unknown option -x (see"},
		{"remove -f box", "unknown option -f: did you mean --force? (see"},
		{"create --mem 1GiB a", "unknown option --mem: did you mean --memory? (see"},
		{"create -p 80 a", "unknown option -p: did you mean --provider or --policy or --port? (see"},
		{"list --format yaml", `option --format: "yaml" is not valid: write json or table`},
		{"list box", `unexpected argument "box"`},
		{"list -q --format json", "exclude each other"},
		{"create", "IMAGE is missing"},
		{"create a b", `unexpected argument "b"`},
		{"create --snapshot s a", "not both"},
		{"create --memory 512 a", "option --memory"},
		{"create --memory -1MiB a", "option --memory"},
		{"create --vcpus -1 a", "option --vcpus"},
		{"port url --expires 3w a 1", `option --expires: "3w" is not valid: write a number and a unit, such as 30m, 24h or 90d`},
		{"port url --expires 31d a 1", "--expires must be 1s to 30d"},
		{"serve --preview-domain co.uk", `"co.uk" is a domain that others register names in`},
		{"create --vcpus 1.5 a", "option --vcpus"},
		{"create --env A a", "--env A has no value: write --env A=VALUE"},
		{"create --env =x a", "--env: entry 1 is not KEY=VALUE"},
		{"help images", `there is no command "images": did you mean image?`},
		{"help image nothing", `there is no command "image nothing" (see shard image --help)`},
		{"--root x list", "(see shard --help)"},
		{"cp - box:/x", "- is not a stream here"},
		{"tokens mint --name x --duration 3", `option --duration: "3" is not valid: write a number and a unit, such as 30m, 24h or 90d`},
		{"policy create --allow api*.d.com x", `option --allow: "api*.d.com" is not valid: * stands for a whole part`},
		{"create --port x a", "--port"},
		{"create --port 0:1 a", "--port"},
		{"create --port 1:65536 a", "--port"},
		{"create alpine --name x", `option "--name" stands after an argument: options come first (see shard create --help)`},
		{"exec", "SANDBOX and COMMAND are missing"},
		{"exec box", "COMMAND is missing"},
		{"exec box --", "COMMAND is missing"},
		{"exec box -it sh", `option "-it" stands after the sandbox`},
		{"exec -t box sh", "--tty needs --interactive"},
		{"exec --env A box sh", "--env"},
		{"shell", "SANDBOX is missing"},
		{"remove", "SANDBOX… is missing"},
		{"remove box --force", `option "--force" stands after an argument`},
		{"start a b", `unexpected argument "b"`},
		{"prune", "give --force"},
		{"daemon --timeout x", "option --timeout"},
		{"daemon --timeout 0", "--timeout must be longer than 0"},
		{"daemon --storage-size 1", "option --storage-size"},
		{"help nothing", `there is no command "nothing"`},
	} {
		t.Run(tc.args, func(t *testing.T) {
			got := runApp(t, newApp(strings.NewReader(""), nil, nil), strings.Fields(tc.args)...)
			if got.code != 1 || got.out != "" || !strings.Contains(got.errs, tc.says) || !strings.Contains(got.errs, "--help)\n") ||
				!strings.HasPrefix(got.errs, "shard: ") || strings.Count(got.errs, "\n") != 1 {
				t.Errorf("got %+v, want %q", got, tc.says)
			}
		})
	}
}

func TestRemoteIsRefused(t *testing.T) {
	d := start(t)
	d.answer("GET /v0/images", 200, `{"images":[],"next":null}`)
	list := []string{"--root", d.root, "image", "list"}
	t.Setenv("SHARD_REMOTE", "https://example.com")
	app := func() *cli.App { return newApp(strings.NewReader(""), nil, nil) }
	if got := runApp(t, app(), list...); got.code != 1 || !strings.Contains(got.errs, "SHARD_REMOTE leads to another") {
		t.Errorf("got %+v", got)
	}
	if got := runApp(t, app(), append([]string{"--remote", ""}, list...)...); got.code != 0 {
		t.Errorf("an empty --remote forces the local socket: %+v", got)
	}
	if got := runApp(t, app(), append([]string{"--remote", "x"}, list...)...); got.code != 1 || !strings.Contains(got.errs, "--remote leads to another") {
		t.Errorf("got %+v", got)
	}
	if got := runApp(t, app(), "daemon"); got.code != 1 || !strings.Contains(got.errs, "SHARD_REMOTE does not go with it") {
		t.Errorf("got %+v", got)
	}
	for _, args := range [][]string{{"--version"}, {"--help"}, {"list", "--help"}, {"help", "exec"}, {"completion", "bash"}, {"completion", "--help"}} {
		if got := runApp(t, app(), args...); got.code != 0 || got.errs != "" {
			t.Errorf("%q must work whatever the globals say: %+v", args, got)
		}
	}
}

func TestDaemonNotThere(t *testing.T) {
	root := t.TempDir()
	app := func() *cli.App { return newApp(strings.NewReader(""), nil, nil) }
	got := runApp(t, app(), "--root", root, "list")
	if got.code != 1 || got.out != "" || !strings.Contains(got.errs, "the daemon is not running") ||
		!strings.Contains(got.errs, "sudo shard --root "+root+" daemon") || strings.Contains(got.errs, "systemctl") {
		t.Errorf("got %+v", got)
	}
	if got := runApp(t, app(), "--root", root, "version", "--format", "json"); got.code != 1 || got.out != "" {
		t.Errorf("version as JSON: %+v", got)
	}
	if got := runApp(t, app(), "--root", root, "version"); got.code != 0 || got.out != "PROGRAM   VERSION\nclient    test\ndaemon    -\n" {
		t.Errorf("version: %+v", got)
	}
	if got := runApp(t, app(), "--version"); got != (result{out: "shard test\n"}) {
		t.Errorf("got %+v", got)
	}
	if os.Geteuid() == 0 {
		return // root is always let in
	}
	l, err := net.Listen("unix", root+"/shard.sock")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := os.Chmod(root+"/shard.sock", 0); err != nil {
		t.Fatal(err)
	}
	if got := runApp(t, app(), "--root", root, "list"); !strings.Contains(got.errs, "group shard") {
		t.Errorf("got %+v", got)
	}
}

func TestEveryCommandHasHelp(t *testing.T) {
	var all strings.Builder
	for _, c := range strings.Fields(`.help create exec shell cp list inspect start stop pause resume remove prune pull image image/list image/remove
		image/prune image/import info version capabilities providers daemon daemon/status completion`) {
		args := append(strings.Split(c, "/"), "--help")
		if c == ".help" {
			args = args[1:]
		}
		got := runApp(t, newApp(strings.NewReader(""), nil, nil), args...)
		if got.code != 0 || got.errs != "" || !strings.Contains(got.out, "Example:\n  ") || !strings.Contains(got.out, "Usage:\n  shard") {
			t.Errorf("%s: %+v", c, got)
		}
		if c != ".help" && c != "image" { // those grow with every new command
			fmt.Fprintf(&all, "=== %s\n%s\n", c, got.out)
		}
		if strings.Contains(got.out, "\n  ls ") || strings.Contains(got.out, "Aliases") {
			t.Errorf("the help of %s shows an alias", c)
		}
	}
	golden(t, "help.golden", all.String())
}

func TestCreate(t *testing.T) {
	d := start(t)
	var body string
	answer := `{"event":{"status":"pulling","reference":"index.docker.io/library/alpine:3.20","layers":2,"bytes":3500000}}
{"event":{"status":"layer","digest":"sha256:0123456789abcdef0123","bytes":1000}}
{"event":{"status":"layer","digest":"sha256:0123456789abcdef0123","bytes":2000}}
{"event":{"status":"layer","digest":"sha256:ffff456789abcdef0123","bytes":2000,"present":true}}
{"event":{"status":"unpacking","layers":2}}
{"event":{"status":"unpacked","layer":2,"layers":2}}
{"event":{"status":"building"}}
{"event":{"status":"pulled","reference":"index.docker.io/library/alpine:3.20\u001b[2J"}}
{"sandbox":{"id":"bold-fern-0001","name":"web","state":"running"}}
`
	d.mux.HandleFunc("POST /v0/sandboxes", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		body = string(b)
		w.WriteHeader(http.StatusCreated)
		_, _ = io.WriteString(w, answer)
	})
	got := run(t, d, "create", "--name", "web", "--provider", "runc", "--env", "A=1", "--env", "B=2", "--secret", "S", "--policy", "p",
		"--workdir", "/w", "--user", "1:2", "--memory", "1GiB", "--vcpus", "2", "--disk", "4GB", "--swap", "0", "--port", "8080:80", "--port", "9", "alpine:3.20")
	want := result{out: "bold-fern-0001\n", errs: `pulling alpine:3.20: 2 layers, 3.5 MB
layer sha256:0123456789ab
layer sha256:ffff456789ab is on the host
unpacking 2 layers
unpacked layer 2 of 2
starting the sandbox
pulled alpine:3.20\x1b[2J
created web (bold-fern-0001)
`}
	if diff := cmp.Diff(fmt.Sprintf("%+v", want), fmt.Sprintf("%+v", got)); diff != "" {
		t.Error(diff)
	}
	if want := `{"image":"alpine:3.20","name":"web","provider":"runc","env":["A=1","B=2"],"workdir":"/w","user":"1:2","secrets":["S"],"policy":"p",` +
		`"ports":[{"host_port":8080,"guest_port":80},{"host_port":9,"guest_port":9}],"resources":{"memory_mib":1024,"vcpus":2,"disk_mib":3815,"swap_mib":0}}`; body != want {
		t.Errorf("sent %s", body)
	}
	if run(t, d, "create", "--snapshot", "snap"); body != `{"snapshot":"snap"}` {
		t.Errorf("sent %s", body)
	}
	answer = `{"sandbox":{"id":"bold-fern-0001","state":"failed","failed_reason":"no such image"}}`
	if got := run(t, d, "create", "x"); got != (result{errs: "shard: sandbox bold-fern-0001 could not be created: no such image; shard remove bold-fern-0001 takes the record of it away\n", code: 1}) {
		t.Errorf("got %+v", got)
	}
	answer = `{"event":{"status":"pulling","layers":1}}` + "\n"
	if got := run(t, d, "create", "x"); got.code != 1 || got.out != "" || !strings.Contains(got.errs, "before its answer was complete") {
		t.Errorf("a cut stream: %+v", got)
	}
}

func TestInterruptedCreate(t *testing.T) {
	d := start(t)
	began := make(chan struct{})
	d.mux.HandleFunc("POST /v0/sandboxes", func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		close(began)
		<-r.Context().Done()
	})
	cmd := command(t, d, "create", "x")
	var errs strings.Builder
	cmd.Stderr = &errs
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	<-began
	_ = cmd.Process.Signal(os.Interrupt)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || !strings.Contains(errs.String(), "the daemon goes on with the create") {
		t.Errorf("code %d, %q", code, errs.String())
	}
}

// sandboxes is a list with one of everything; times are relative to now, so that UPTIME stands still.
func sandboxes(t *testing.T) string {
	t.Helper()
	started := time.Now().Add(-26*time.Hour - 10*time.Minute)
	restart := time.Now().Add(10*time.Second + 500*time.Millisecond)
	killed := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	ended := shard.ProcessStatus{State: "exited"}
	list := []shard.Sandbox{
		{ID: "bold-fern-0001", Name: "web", Image: "index.docker.io/library/alpine:3.20", Provider: "gvisor", State: shard.StateRunning, StartedAt: &started,
			Policy: "offline", Processes: []shard.Process{{Status: shard.ProcessStatus{State: "running"}}, {Status: ended}, {Status: shard.ProcessStatus{State: "restarting"}}}},
		{ID: "bold-fern-0002", Image: "x:1", Provider: "runc", State: shard.StateStopped},
		{ID: "bold-fern-0003", Image: "x:1", Provider: "runc", State: shard.StateStopped, StoppedReason: "ran out of memory and the host ended it",
			OOM: &shard.OOM{Kills: 2, KilledAt: killed, RestartAt: &restart}},
		{ID: "bold-fern-0004", Image: "x:1\x1b[31m", Provider: "runc", State: shard.StateFailed, FailedReason: "the pull failed"},
		{ID: "bold-fern-0005", Image: "x:1", Provider: "runc", State: shard.StatePaused, StartedAt: &started, Processes: []shard.Process{{Status: ended}}},
	}
	b, err := json.Marshal(map[string]any{"sandboxes": list, "next": nil})
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

func TestList(t *testing.T) {
	d := start(t)
	body := sandboxes(t)
	d.mux.HandleFunc("GET /v0/sandboxes", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, body) })
	got := run(t, d, "list")
	golden(t, "list.golden", got.out)
	if got.errs != "1 stopped not shown (--all shows them)\n" || got.code != 0 {
		t.Errorf("got %+v", got)
	}
	got = run(t, d, "ls", "--all")
	golden(t, "list-all.golden", got.out)
	if got.errs != "" {
		t.Errorf("got %+v", got)
	}
	if got := run(t, d, "list", "-q"); got != (result{out: "bold-fern-0001\nbold-fern-0003\nbold-fern-0004\nbold-fern-0005\n"}) {
		t.Errorf("got %+v", got)
	}
	var list []shard.Sandbox
	if got := run(t, d, "list", "--all", "--format", "json"); got.code != 0 || json.Unmarshal([]byte(got.out), &list) != nil || len(list) != 5 || !strings.HasPrefix(got.out, "[\n  {\n    \"id\"") {
		t.Errorf("got %+v", got)
	}
	body = `{"sandboxes":[],"next":null,"warnings":["sandbox x is unreadable"]}`
	if got := run(t, d, "list", "--format", "json"); got != (result{"[]\n", "shard: sandbox x is unreadable\n", 1}) {
		t.Errorf("got %+v", got)
	}
}

func TestInspect(t *testing.T) {
	d := start(t)
	d.answer("GET /v0/sandboxes/web", 200, `{"id":"bold-fern-0001","name":"web","image":"x:1","provider":"gvisor","state":"running","later":1,
		"resources":{"memory_mib":1536,"vcpus":2,"disk_mib":10240,"swap_mib":0},"ports":[{"host_port":1,"guest_port":2,"public":true}],
		"processes":[{"name":"p","command":["a","b"],"restart":{"policy":"no"},"status":{"state":"running","restarts":0}}],
		"egress":{"rules":[{"id":"1","implied":"dns","action":"allow","destination":{"kind":"group","value":"dns"}},
		{"id":"2","action":"deny","destination":{"kind":"domain-suffix","value":"a.b"},"protocol":"tcp","ports":["80","443"]}]}}`)
	golden(t, "inspect-table.golden", run(t, d, "inspect", "--format", "table", "web").out)
	golden(t, "inspect-json.golden", run(t, d, "inspect", "web").out)
}

func TestLifecycle(t *testing.T) {
	d := start(t)
	d.answer("POST /v0/sandboxes/web/start", 200, `{"id":"bold-fern-0001","state":"running"}`)
	d.answer("POST /v0/sandboxes/web/stop", 200, `{"id":"bold-fern-0001","state":"stopped"}`)
	d.refuse("POST /v0/sandboxes/old/stop", 409, shard.CodeSandboxNotRunning, "old is stopped")
	d.answer("POST /v0/sandboxes/web/pause", 200, `{"id":"bold-fern-0001","state":"paused"}`)
	d.refuse("POST /v0/sandboxes/plain/pause", 409, shard.CodeUnsupported, "provider runc cannot pause")
	d.answer("POST /v0/sandboxes/web/resume", 200, `{"id":"bold-fern-0001","state":"running"}`)
	d.refuse("POST /v0/sandboxes/old/resume", 409, shard.CodeSandboxNotPaused, "old is stopped")
	d.answer("GET /v0/sandboxes/web", 200, `{"id":"bold-fern-0001"}`)
	d.refuse("GET /v0/sandboxes/none", 404, shard.CodeNotFound, "there is no sandbox none")
	d.answer("DELETE /v0/sandboxes/bold-fern-0001", 204, "")
	d.refuse("DELETE /v0/sandboxes/bold-fern-0009", 404, shard.CodeNotFound, "there is no sandbox bold-fern-0009")
	for _, tc := range []struct {
		args string
		want result
	}{
		{"start web", result{out: "bold-fern-0001\n"}},
		{"stop old web", result{"bold-fern-0001\n", "shard: old is stopped\n", 1}},
		{"pause plain web", result{"bold-fern-0001\n", "shard: provider runc cannot pause\n", 1}},
		{"resume web old web", result{"bold-fern-0001\nbold-fern-0001\n", "shard: old is stopped\n", 1}},
		{"remove none web", result{"bold-fern-0001\n", "shard: there is no sandbox none\n", 1}},
		{"rm --force none web bold-fern-0009", result{out: "bold-fern-0001\n"}},
		{"remove bold-fern-0009", result{"", "shard: there is no sandbox bold-fern-0009\n", 1}},
	} {
		if got := run(t, d, strings.Fields(tc.args)...); got != tc.want {
			t.Errorf("%s: got %+v", tc.args, got)
		}
	}
}

func TestPrune(t *testing.T) {
	d := start(t)
	d.answer("GET /v0/sandboxes", 200, sandboxes(t))
	d.answer("DELETE /v0/sandboxes/bold-fern-0002", 204, "")
	if got := run(t, d, "prune", "--force"); got != (result{out: "bold-fern-0002\n"}) {
		t.Errorf("got %+v", got)
	}
	for answer, removed := range map[string]bool{"y\n": true, "\n": false, "no\n": false} {
		cmd, tty := onTerminal(t, d, 24, 200, "prune")
		expect(t, tty, "Remove this sandbox and its files? [y/N] ")
		if _, err := io.WriteString(tty, answer); err != nil {
			t.Fatal(err)
		}
		rest := drain(tty)
		if err := cmd.Wait(); err != nil || strings.Contains(rest, "bold-fern-0002") != removed {
			t.Errorf("%q: %q, %v", answer, rest, err)
		}
	}
}

func TestImages(t *testing.T) {
	d := start(t)
	image := `{"reference":"index.docker.io/library/a:1","digest":"sha256:0123456789abcdef","size":7654321,"created":"0001-01-01T00:00:00Z"}`
	d.answer("GET /v0/images", 200, `{"images":[`+image+`,{"reference":"b:2","digest":"sha256:1","size":12,"created":"0001-01-01T00:00:00Z","broken":"layer 1 is missing"}],"next":null}`)
	golden(t, "images.golden", run(t, d, "image", "list").out)
	d.answer("POST /v0/images/pull", 200, `{"event":{"status":"cached","reference":"a:1"}}`+"\n"+`{"image":`+image+`}`)
	if got := run(t, d, "pull", "a:1"); got != (result{"index.docker.io/library/a:1\nsha256:0123456789abcdef\n", "image a:1 is on the host\n", 0}) {
		t.Errorf("got %+v", got)
	}
	d.answer("DELETE /v0/images/reg.io/x/a:1", 200, `{"warnings":["kept a layer"]}`)
	d.answer("DELETE /v0/images/b", 409, `{"error":{"code":"in_use","message":"image b is in use","holders":["web","db"]}}`)
	if got := run(t, d, "image", "rm", "b", "reg.io/x/a:1"); got != (result{"reg.io/x/a:1\n", "shard: kept a layer\nshard: image b is in use (in use by web, db)\n", 1}) {
		t.Errorf("got %+v", got)
	}
	d.answer("POST /v0/images/prune", 200, `{"removed":["a","b"],"warnings":[]}`)
	if got := run(t, d, "image", "prune"); got != (result{out: "a\nb\n"}) {
		t.Errorf("got %+v", got)
	}
	// On a terminal it asks first.
	for answer, removed := range map[string]bool{"y\n": true, "\n": false} {
		cmd, tty := onTerminal(t, d, 24, 200, "image", "prune")
		expect(t, tty, "was made from? [y/N] ")
		if _, err := io.WriteString(tty, answer); err != nil {
			t.Fatal(err)
		}
		rest := drain(tty)
		if err := cmd.Wait(); err != nil || strings.Contains(rest, "a\r\nb") != removed {
			t.Errorf("%q: %q, %v", answer, rest, err)
		}
	}
	cmd, tty := onTerminal(t, d, 24, 200, "image", "prune", "--force")
	if out := drain(tty); cmd.Wait() != nil || strings.TrimSpace(out) != "a\r\nb" {
		t.Errorf("with --force: %q", out)
	}
}

func TestHost(t *testing.T) {
	d := start(t)
	d.answer("GET /v0/version", 200, `{"version":"9.9","api_version":"v0"}`)
	d.answer("GET /v0/capabilities", 200, `{"create":true,"swap":false}`)
	d.answer("GET /v0/providers", 200, `{"providers":[{"name":"gvisor","available":true,"default":true,"version":"2026"},{"name":"runc","available":false,"reason":"no runc: install it"}]}`)
	status := `{"version":"9.9","pid":7,"started_at":"2026-01-02T03:04:05Z","socket":"/s","provider":"gvisor","capabilities":{"pause":true,"fork":true},"proxy":{"plain_port":30080,"tls_port":30443},"tasks":[{"name":"oom","state":"%s","restarts":2,"last_error":"boom"}]}`
	state := "running"
	d.mux.HandleFunc("GET /v0/daemon", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintf(w, status, state) })
	var all strings.Builder
	for _, args := range []string{"version", "version --format json", "capabilities", "capabilities --format json", "providers", "daemon status --format json"} {
		got := run(t, d, strings.Fields(args)...)
		fmt.Fprintf(&all, "=== %s\n%s%s%d\n", args, got.out, got.errs, got.code)
	}
	golden(t, "host.golden", all.String())
	if got := run(t, d, "daemon", "status"); got.code != 0 || !strings.Contains(got.out, "oom    running   2          boom\n") {
		t.Errorf("got %+v", got)
	}
	state = "backoff"
	if got := run(t, d, "daemon", "status"); got.code != 1 || got.errs != "shard: task oom failed and waits to be tried again: boom\n" {
		t.Errorf("got %+v", got)
	}
}

func TestCreateOnATerminal(t *testing.T) {
	d := start(t)
	d.answer("POST /v0/sandboxes", 201, `{"event":{"status":"pulling","reference":"r:1","layers":2,"bytes":3000}}
{"event":{"status":"layer","digest":"sha256:a","bytes":1000}}
{"event":{"status":"layer","digest":"sha256:b","bytes":2000}}
{"event":{"status":"unpacking","layers":2}}
{"event":{"status":"unpacked","layer":1,"layers":2}}
{"event":{"status":"unpacked","layer":2,"layers":2}}
{"event":{"status":"building"}}
{"event":{"status":"pulled","reference":"r:1"}}
{"sandbox":{"id":"bold-fern-0001","state":"running"}}
`)
	cmd, tty := onTerminal(t, d, 24, 100, "create", "r:1")
	expect(t, tty, "created bold-fern-0001\r\nbold-fern-0001\r\n")
	if err := cmd.Wait(); err != nil {
		t.Error(err)
	}
	// A pull that fails in the middle of a bar leaves a clean line for the reason.
	d = start(t)
	d.answer("POST /v0/images/pull", 200, `{"event":{"status":"pulling","reference":"r:1","layers":2,"bytes":3000}}
{"event":{"status":"layer","digest":"sha256:a","bytes":1000}}
{"error":{"code":"internal","message":"the registry went away"}}
`)
	cmd, tty = onTerminal(t, d, 24, 100, "pull", "r:1")
	expect(t, tty, "shard: the registry went away\r\n")
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 {
		t.Errorf("exit code %d", code)
	}
}

package test

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestSecretDocs runs the samples of docs/secrets.md as they are written there, but for where the host key lies.
func TestSecretDocs(t *testing.T) {
	t.Parallel()
	archive, dir := testenv.PythonArchive(t), t.TempDir()
	recipe := strings.ReplaceAll(sample(t, "secrets.md", "--secret-key-file"), "/etc/shard", dir+"/etc/shard")
	makeKey, daemon, _ := strings.Cut(recipe, "\nshard daemon ")
	if r := testenv.Run(t, shell(makeKey)); r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	d := testenv.Start(t, testenv.Options{Args: strings.Fields(daemon)})
	d.Must("image", "import", archive, "python:3.12-slim")

	// `shard` as somebody has it who has this one daemon alone.
	command := d.Command()
	program := "#!/bin/sh\nexec '" + strings.Join(command.Args, "' '") + "' \"$@\"\n"
	for name, text := range map[string]string{"shard": program, "token.txt": "sk-of-the-docs\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	run := func(script string) testenv.Result {
		t.Helper()
		cmd := shell(script)
		cmd.Dir = dir
		cmd.Env = append(command.Env, "PATH="+dir+":"+os.Getenv("PATH"))
		r := testenv.Run(t, cmd)
		if r.Code != 0 {
			t.Errorf("%s: %+v", script, r)
		}
		return r
	}
	if r := run(sample(t, "secrets.md", "--dest api.example.com API_TOKEN")); !strings.HasPrefix(r.Stdout, "API_TOKEN\n") || !strings.HasSuffix(r.Stdout, "\nmock-API_TOKEN\n") {
		t.Errorf("the first sample: %+v", r)
	}
	if r := run(sample(t, "secrets.md", "secret check")); !strings.Contains(r.Stdout, "the value is put in") {
		t.Errorf("check: %+v", r)
	}
	if file, err := os.ReadFile(filepath.Join(d.Root, "secrets", "API_TOKEN")); err != nil || strings.Contains(string(file), "sk-of-the-docs") || strings.Contains(string(file), "example") {
		t.Errorf("at rest: %v %s", err, file)
	}

	d.Must("run", "agent", "--name", "holder", "--", "python3", "-c", "kept = 'in ' + 'memory'; import time; time.sleep(9999)")
	if r := d.Shard("pause", "agent"); strings.Contains(r.Stderr, "cannot save memory") {
		t.Logf("not tried: %s", r.Stderr)
		return
	} else if r.Code != 0 {
		t.Fatalf("%+v", r)
	}
	run(sample(t, "secrets.md", "--on-misuse none"))
	const look = `pid=$(for p in /proc/[0-9]*; do tr '\0' ' ' <$p/cmdline | grep -q '^python3 -c kept' && echo ${p#/proc/}; done | head -n 1)
python3 -c '
import sys
for line in open(sys.argv[1] + "/maps"):
    span, mode = line.split()[:2]
    if "w" not in mode: continue
    a, b = (int(x, 16) for x in span.split("-"))
    with open(sys.argv[1] + "/mem", "rb", 0) as mem:
        try: mem.seek(a); data = mem.read(b - a)
        except (OSError, OverflowError): continue
    if b"in" + b" memory" in data: print("found"); break
' /proc/$pid`
	if r := d.Shard("exec", "agent", "sh", "-c", look); strings.TrimSpace(r.Stdout) != "found" {
		t.Errorf("a look into memory: %+v", r)
	}
	d.Must("kill", "agent", "holder")
}

func shell(script string) *exec.Cmd { return exec.Command("sh", "-ec", script) }

// TestSecretSystemd: the sample of docs/secrets.md for systemd's credentials, on a machine that systemd runs.
func TestSecretSystemd(t *testing.T) {
	t.Parallel()
	if _, err := exec.LookPath("systemd-creds"); err != nil {
		t.Skipf("this systemd has no encrypted credentials: %v", err)
	}
	built := testenv.Bin(t) + "/shard"
	m := testenv.Boot(t, testenv.NewLab(t))
	m.Must(built + " setup --local --yes --provider runc --start-at-boot true --http-api false")
	set := func(name string) {
		m.Must("echo value-of-" + name + " | shard secret set --dest api.example.com " + name)
	}
	set("BEFORE")
	m.Must(sample(t, "secrets.md", "systemd-creds"))
	set("AFTER")
	if r := m.Sh("grep -c value-of /var/lib/shard/secrets/*; shard secret list"); r.Stdout[:strings.Index(r.Stdout, "NAME")] != "/var/lib/shard/secrets/AFTER:0\n/var/lib/shard/secrets/BEFORE:0\n" || r.Stderr != "" {
		t.Errorf("under the key: %+v", r)
	}
	m.Must("systemctl restart shard; shard secret list")
	m.Must("rm /etc/systemd/system/shard.service.d/secret-key.conf; systemctl daemon-reload; systemctl restart shard")
	if r := m.Sh("shard secret list"); r.Code != 1 || strings.Count(r.Stderr, "the daemon was given none") != 2 {
		t.Errorf("without the key: %+v", r)
	}
}

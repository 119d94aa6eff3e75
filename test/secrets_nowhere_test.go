package test

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestSecretIsNowhere is cases 67 and 82: after much use, the value is in the store, which its owner alone can read, and
// neither in the data directory, the logs, answers, process lists and the sandbox's files, nor in the memory of what runs there.
func TestSecretIsNowhere(t *testing.T) {
	t.Parallel()
	d := secretDaemon(t, testenv.Options{Env: []string{"SHARD_LOG_LEVEL=debug"}})
	got := &seen{}
	d.Lab().Web().Handle("/seen", got)
	d.Lab().Web().HandleFunc("/wordy", wordy)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		value := "v4lue" + sum(noise(16))[:32]
		name := "KEY_" + strings.ToUpper(provider)
		setSecret(t, d, value, "--dest", "dest.lab.test", name)
		id := box(t, d, provider, "--secret", name, "--disk", "512MiB", trustingPython)
		var answers strings.Builder
		note := func(a answer) { answers.Write(a.Body) }
		for _, line := range send(t, d, id, name, "https://dest.lab.test/seen", "https://dest.lab.test/seen", "https://evil.lab.test/seen", "http://dest.lab.test/seen",
			"https://nowhere.lab.test/", "https://dest.lab.test:8443/") {
			answers.WriteString(line)
		}
		if all := got.all(); !slices.Contains(all, "dest.lab.test Bearer "+value) {
			t.Fatalf("the host never got the value: %q", all)
		}
		for range 3 { // what is said unasked is found when the next request comes, or before
			answers.WriteString(d.Must("exec", id, "python3", "-c", upgrading, name, "https://dest.lab.test/wordy"))
		}
		// A program that keeps what it was answered, in memory and in a file.
		d.Must("run", id, "--name", "keeper", "--", "python3", "-c", bearer+"\nopen('/root/kept','w').write(repr(r.getheaders())+repr(c))\nimport time\ntime.sleep(600)", name, "https://dest.lab.test/seen")
		testenv.Eventually(t, "the program keeps its answer", func() (bool, string) {
			return d.Shard("exec", id, "test", "-s", "/root/kept").Code == 0, d.Shard("logs", id, "keeper").Stdout
		})
		for _, path := range []string{"/v0/secrets", "/v0/sandboxes/" + id, "/v0/sandboxes/" + id + "/egress-log", "/v0/sandboxes/" + id + "/exec", "/metrics", "/v0/daemon"} {
			note(call(t, d, "GET", path, nil))
		}
		put := func(name string, r shard.PutSecretRequest) {
			note(call(t, d, "PUT", "/v0/secrets/"+name, r))
		}
		put("bad name", shard.PutSecretRequest{Value: value, Destinations: []string{"a.example"}})
		put(name, shard.PutSecretRequest{Value: value, Destinations: []string{"*.com"}})
		put(name, shard.PutSecretRequest{Value: value + "\n"})
		put("OTHER", shard.PutSecretRequest{Value: value, Destinations: []string{"a.example"}, OnMisuse: "what"})
		note(call(t, d, "PUT", "/v0/secrets/"+name, map[string]any{"value": []string{value}}))
		note(call(t, d, "PUT", "/v0/secrets/"+name, `{"value":"`+value))
		note(call(t, d, "POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: image, Provider: provider, Secrets: []string{name}}))

		// All forms in which it went over the wire.
		needles := []string{value, base64.StdEncoding.EncodeToString([]byte(value))[:40]}
		for _, n := range needles {
			if before, _, found := strings.Cut(answers.String(), n); found {
				t.Errorf("an answer holds the value, behind …%s", before[max(0, len(before)-200):])
			}
			if strings.Contains(d.Log(), n) {
				t.Errorf("the daemon's log holds the value")
			}
			inProcesses(t, n)
		}
		d.Must("exec", id, "sync")
		if files := search(t, d.Root, needles...); !slices.Equal(files, []string{filepath.Join("secrets", name)}) {
			t.Errorf("the value is in %q, want the store alone", files)
		}
		// As root in the sandbox. What is looked for is sent backwards, so that looking does not find itself.
		backwards := func(s string) string {
			b := []byte(s)
			slices.Reverse(b)
			return string(b)
		}
		script := "printf '%s\n' " + backwards(value) + " " + backwards("mock-"+name) + " | python3 -c '" + memory + "'"
		if provider == "gvisor" { // there no process can read another's memory: it is a file of the host's
			inGVisor(t, id, value, "mock-"+name)
		} else if out := sh(t, d, id, script); out != "the placeholder is in memory" {
			t.Errorf("in the sandbox's memory: %s", out)
		}
		err := filepath.WalkDir(filepath.Join(d.Root, "secrets"), func(path string, e fs.DirEntry, err error) error {
			if info, err := e.Info(); err != nil || info.Mode().Perm()&0o077 != 0 {
				t.Errorf("%s: %v %v", path, info, err)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
	})
}

// wordy is a host that says more than its answer: the key that it got.
func wordy(w http.ResponseWriter, r *http.Request) {
	conn, _, err := http.NewResponseController(w).Hijack()
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	_, _ = fmt.Fprintf(conn, "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok, your key is %s", r.Header.Get("Authorization"))
	_ = conn.Close()
}

// upgrading is bearer with the headers by which a request goes over HTTP/1.1 all the way.
var upgrading = strings.ReplaceAll(bearer, `headers={`, `headers={"Connection": "Upgrade", "Upgrade": "websocket", `)

// search names the files below root that hold one of the needles. What mounts show is in the files below them too.
func search(t *testing.T, root string, needles ...string) (found []string) {
	t.Helper()
	err := filepath.WalkDir(root, func(path string, e fs.DirEntry, err error) error {
		switch {
		case errors.Is(err, fs.ErrNotExist):
			return nil // gone meanwhile
		case err != nil:
			return err
		case e.IsDir() && (e.Name() == "rootfs" || e.Name() == "disk"):
			return fs.SkipDir
		case !e.Type().IsRegular():
			return nil
		}
		holds, err := fileHolds(path, needles)
		if holds {
			rel, _ := filepath.Rel(root, path)
			found = append(found, rel)
		}
		if errors.Is(err, fs.ErrNotExist) {
			err = nil
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// fileHolds looks through a file's data; disks are holes for the most part.
func fileHolds(path string, needles []string) (bool, error) {
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	const overlap = 256
	buf := make([]byte, 1<<20+overlap)
	for at := int64(0); ; {
		if at, err = f.Seek(at, unix.SEEK_DATA); errors.Is(err, unix.ENXIO) || errors.Is(err, unix.ESPIPE) {
			return false, nil // nothing but a hole is left, or it is a namespace
		} else if err != nil {
			return false, err
		}
		n, err := f.ReadAt(buf, at)
		for _, needle := range needles {
			if bytes.Contains(buf[:n], []byte(needle)) {
				return true, nil
			}
		}
		if err == io.EOF {
			return false, nil
		}
		if err != nil {
			return false, err
		}
		at += int64(n) - overlap
	}
}

// inProcesses looks through the arguments and environments of every process of this host.
func inProcesses(t *testing.T, needle string) {
	t.Helper()
	for _, pattern := range []string{"/proc/[0-9]*/cmdline", "/proc/[0-9]*/environ"} {
		files, err := filepath.Glob(pattern)
		if err != nil || len(files) == 0 {
			t.Fatal(pattern, err)
		}
		for _, file := range files {
			if data, err := os.ReadFile(file); err == nil && strings.Contains(string(data), needle) {
				t.Errorf("the value is in %s", file)
			}
		}
	}
}

// inGVisor looks through all memory of a gVisor sandbox for the value, and for the placeholder to show that it would find it.
func inGVisor(t *testing.T, id, value, placeholder string) {
	t.Helper()
	fds, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	seen := false
	for _, fd := range fds {
		if to, err := os.Readlink(fd); err != nil || !strings.Contains(to, "runsc-memory") {
			continue
		}
		cmdline, err := os.ReadFile(filepath.Join(filepath.Dir(filepath.Dir(fd)), "cmdline"))
		if err != nil || !strings.Contains(string(cmdline), id) {
			continue
		}
		if holds, err := fileHolds(fd, []string{value}); err != nil || holds {
			t.Errorf("the value is in the sandbox's memory: %v, %v", holds, err)
		}
		if holds, _ := fileHolds(fd, []string{placeholder}); holds {
			seen = true
		}
	}
	if !seen {
		t.Error("the search of the sandbox's memory does not even find the placeholder")
	}
}

// memory looks through the memory and the environments of all processes but itself for the value, and for the placeholder to
// show that it would find it.
const memory = `
import os, sys
needle, control = (line.strip()[::-1].encode() for line in sys.stdin)
seen = False
for pid in [p for p in os.listdir("/proc") if p.isdigit() and int(p) != os.getpid()]:
    try:
        if needle in open("/proc/%s/environ" % pid, "rb").read():
            print("the value is in the environment of", pid)
        with open("/proc/%s/maps" % pid) as maps, open("/proc/%s/mem" % pid, "rb", 0) as mem:
            for line in maps:
                part = line.split()
                begin, end = (int(x, 16) for x in part[0].split("-"))
                if "r" not in part[1] or end - begin > 1 << 28:
                    continue
                try:
                    mem.seek(begin)
                    data = mem.read(end - begin)
                except (OSError, ValueError, OverflowError):
                    continue
                if needle in data:
                    print("the value is in the memory of", pid)
                seen = seen or control in data
    except OSError:
        pass
print("the placeholder is in memory" if seen else "nothing could be read")
`

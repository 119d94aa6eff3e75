package test

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPolicyOutlivesDaemon: what is refused is refused while the daemon is dead and while the next one comes up.
func TestPolicyOutlivesDaemon(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	lab := d.Lab()
	lab.Name("open.test", "203.0.113.60")
	lab.CanaryInWorld("203.0.113.60:7000")
	forbidden := lab.CanaryInWorld("203.0.113.61:7000")
	forbidden.Control()
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, _ := policied(t, d, provider, "allow open.test tcp:7000")
		try(t, d, id, "before", "name/open.test/1", "203.0.113.60", "tcp/203.0.113.60/7000", "ok", "tcp/203.0.113.61/7000", "refused")
		sh(t, d, id, `nohup python3 -c '
import socket, time
for n in range(600):
    try:
        socket.create_connection(("203.0.113.61", 7000), timeout=0.2).close()
        open("/tmp/reached", "w").close()
    except OSError:
        pass
    open("/tmp/tries", "w").write(str(n))
    time.sleep(0.01)
' >/dev/null 2>&1 & echo started`)
		d.Kill9()
		time.Sleep(300 * time.Millisecond) // a while without a daemon
		d.Restart()
		if got := sh(t, d, id, "sleep 0.3; cat /tmp/tries; ls /tmp/reached 2>/dev/null || true"); got == "0" || strings.Contains(got, "reached") {
			t.Errorf("the program that tried all the time: %q", got)
		}
		try(t, d, id, "after", "tcp/203.0.113.61/7000", "refused", "name/open.test/1", "203.0.113.60", "tcp/203.0.113.60/7000", "ok", "name/other.test/1", "no-name")
		if hits := forbidden.Hits(); len(hits) > 0 {
			t.Errorf("it was reached: %v", hits)
		}
	})
}

// TestCase066: the log holds what was decided, whatever a sandbox does to it.
func TestCase066(t *testing.T) {
	t.Parallel()
	d := egressDaemon(t)
	c := connect(t, d)
	d.Lab().Name("api.test", "203.0.113.70")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, _ := policied(t, d, provider, "allow api.test tcp:22", "deny any")
		f, err := c.FollowEgressLog(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		try(t, d, id, "some", "name/api.test/1", "203.0.113.70", "name/evil.test/1", "no-name", "tcp/203.0.113.70/2222", "refused")
		other, _ := policied(t, d, provider, "allow api.test tcp:22", "deny any")
		try(t, d, other, "another", "tcp/203.0.113.72/9", "refused")
		for _, want := range []string{"api.test", "evil.test"} {
			if got, err := f.Next(); err != nil || got.Host != want || got.Source != shard.EgressDNS {
				t.Fatalf("followed: %+v, %v; want %s", got, err, want)
			}
		}
		// Many thousands of refusals, and names made to break a line or a terminal.
		sh(t, d, id, `python3 -c '
import socket, struct
for n in range(6000):
    try:
        socket.create_connection(("203.0.113.71", 9), timeout=5)
    except OSError:
        pass
u = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
u.settimeout(5)
for label in [b"a\nb", b"\x1b[31mred", b"\xff\x00\"", b"x" * 63]:
    name = b"".join(bytes([len(l)]) + l for l in [label, b"evil", b"test"]) + b"\0"
    u.sendto(struct.pack(">6H", 7, 256, 1, 0, 0, 0) + name + struct.pack(">2H", 1, 1), ("8.8.8.8", 53))
    u.recv(600)
'`)
		all := decisions(t, d, id, "more in the last second", "rule=4", "to=203.0.113.71:9", "host="+strings.Repeat("x", 63)+".evil.test")
		lines := 0
		for _, one := range all {
			if one.Address == "203.0.113.71" {
				lines++
			}
			if strings.ContainsAny(one.Host, "\n\x1b\x00") {
				t.Errorf("a name breaks the line: %q", one.Host)
			}
		}
		if lines < 5 || lines > 400 {
			t.Errorf("%d lines for 6000 refusals", lines)
		}
		if bystander := decisions(t, d, other, "rule=4 host= to=203.0.113.72:9"); len(bystander) != 1 {
			t.Errorf("another sandbox's log has %d entries", len(bystander))
		}
		for _, name := range []string{"egress.jsonl", "egress.jsonl.1"} {
			if st, err := os.Stat(filepath.Join(d.Root, "sandboxes", id, name)); err == nil && st.Size() > 8<<20 {
				t.Errorf("%s has %d bytes", name, st.Size())
			}
		}
		if got := d.Must("policy", "logs", id); !strings.Contains(got, "evil.test") || strings.ContainsAny(got, "\x1b\x00") {
			t.Errorf("policy logs: %.2000q", got)
		}
		want := fmt.Sprintf("--allow '%s'", "203.0.113.71 tcp:9")
		if got := d.Must("policy", "learn", id); !strings.Contains(got, want) || !strings.Contains(got, "--allow 'api.test tcp:22,2222'") || !strings.Contains(got, "--allow 'evil.test'") {
			t.Errorf("policy learn:\n%s", got)
		}
		d.Must("stop", id)
		for {
			_, err := f.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		if got := d.Must("policy", "logs", id); !strings.Contains(got, "evil.test") {
			t.Error("the log is gone with the machine")
		}
	})
}

package test

import (
	"context"
	"fmt"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
)

// fetch asks a URL from inside a sandbox and returns what came, or why nothing did.
func fetch(t *testing.T, d *testenv.Daemon, box, url string) string {
	t.Helper()
	r := d.Shard("exec", box, "python3", "-c", "import sys, urllib.request\nsys.stdout.write(urllib.request.urlopen(sys.argv[1], timeout=20).read().decode())", url)
	if r.Code != 0 {
		return fmt.Sprintf("exit code %d: %s", r.Code, r.Stderr)
	}
	return r.Stdout
}

// TestInternet: a sandbox without a policy reaches what is public, by name and by address, and nothing reaches it.
func TestInternet(t *testing.T) {
	t.Parallel()
	d := testenv.Start(t, testenv.Options{})
	d.Must("image", "import", testenv.PythonArchive(t), testenv.PythonRef)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, testenv.PythonRef)
		if got := fetch(t, d, id, "http://web.lab.test/hello"); !strings.Contains(got, "GET http web.lab.test /hello") || !strings.Contains(got, "from "+testenv.LabHostAddr) {
			t.Errorf("by name: %q", got)
		}
		if got := fetch(t, d, id, "http://"+testenv.LabWebAddr+"/"); !strings.Contains(got, "GET http") {
			t.Errorf("by address: %q", got)
		}
		d.Must("stop", id)
		d.Must("start", id)
		if got := fetch(t, d, id, "http://web.lab.test/again"); !strings.Contains(got, "/again") {
			t.Errorf("after stop and start: %q", got)
		}
		d.Kill9()
		d.Restart()
		if got := fetch(t, d, id, "http://web.lab.test/restarted"); !strings.Contains(got, "/restarted") {
			t.Errorf("after a restart of the daemon: %q", got)
		}
		if got := sh(t, d, id, "grep -c localhost /etc/hosts; cat /etc/hostname"); !strings.HasSuffix(got, id) || strings.HasPrefix(got, "0") {
			t.Errorf("hosts and hostname: %q", got)
		}
	})
}

// TestCase050: the default keeps private networks and this host out, on TCP and UDP; each place is shown to listen.
func TestCase050(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	d := start(t, testenv.Options{Lab: lab})
	greet := func(l net.Listener) {
		go func() {
			for {
				conn, err := l.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(conn, "reached\n")
				_ = conn.Close()
			}
		}()
	}
	private := []string{"10.1.2.3", "172.16.5.5", "172.31.255.1", "192.168.7.7", "100.64.1.1", "169.254.169.254"}
	for _, addr := range private {
		greet(lab.ListenWorld("tcp", addr+":7000"))
	}
	// The host itself: its public address, one of its other addresses, and everything on it.
	host := []string{testenv.LabHostAddr, "192.168.1.1", "203.0.113.5"}
	for _, addr := range host {
		greet(lab.ListenHost("tcp", addr+":7000"))
	}
	greet(lab.ListenHost("tcp", "0.0.0.0:7001"))
	greet(lab.ListenWorld("tcp", "198.18.30.1:7000"))
	control := func(addr string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		conn, err := lab.DialFromHost(ctx, "tcp", addr)
		if err != nil {
			t.Fatalf("%s cannot be reached from the host either: %v", addr, err)
		}
		got, _ := io.ReadAll(conn)
		_ = conn.Close()
		if string(got) != "reached\n" {
			t.Fatalf("%s says %q to the host", addr, got)
		}
	}
	for _, addr := range append(append([]string{"198.18.30.1"}, private...), host...) {
		control(addr + ":7000")
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		gateway := sh(t, d, id, "ip route | awk '/default/ {print $3}'")
		targets := []string{gateway + " 7001", "127.0.0.1 7001"}
		for _, addr := range append(private, host...) {
			targets = append(targets, addr+" 7000")
		}
		script := `dial() { timeout 4 nc -w 3 $1 $2 </dev/null 2>/dev/null; }; dial 198.18.30.1 7000; `
		for _, target := range targets {
			script += fmt.Sprintf("(dial %s | sed 's/^/%s /') & ", target, strings.ReplaceAll(target, " ", ":"))
		}
		if got := sh(t, d, id, script+"wait"); got != "reached" {
			t.Errorf("the sandbox reached more than the public address, or not even that: %q", got)
		}
	})
}

// TestCase064: sandboxes cannot reach each other.
func TestCase064(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		a, b := box(t, d, provider), box(t, d, provider)
		address := sh(t, d, b, "ip -4 -o addr show eth0 | awk '{print $4}' | cut -d/ -f1")
		if net.ParseIP(address) == nil {
			t.Fatalf("the other sandbox's address is %q", address)
		}
		listen := d.Command("exec", b, "sh", "-c", "while :; do echo reached | nc -l -p 7000; done")
		if err := listen.Start(); err != nil {
			t.Fatal(err)
		}
		defer func() { _ = listen.Process.Kill(); _ = listen.Wait() }()
		testenv.Eventually(t, "it reaches itself", func() (bool, string) {
			r := d.Shard("exec", b, "sh", "-c", "timeout 4 nc -w 3 "+address+" 7000 </dev/null")
			return r.Stdout == "reached\n", r.Stdout + r.Stderr
		})
		if r := d.Shard("exec", a, "sh", "-c", "timeout 4 nc -w 3 "+address+" 7000 </dev/null"); strings.Contains(r.Stdout, "reached") {
			t.Error("one sandbox reached another")
		}
		if r := d.Shard("exec", a, "ping", "-c", "1", "-W", "2", address); r.Code == 0 {
			t.Error("one sandbox can ping another")
		}
	})
}

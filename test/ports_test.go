package test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// netserver is the server program of the tests of ports, built once.
var netserver = sync.OnceValues(func() ([]byte, error) {
	bin := filepath.Join(testenv.Module(), "build", "test-bin", "netserver")
	cmd := exec.Command("go", "build", "-trimpath", "-o", bin, "./test/testdata/netserver")
	cmd.Dir = testenv.Module()
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(bin)
})

// ports starts a daemon whose busybox image also has netserver.
func ports(t *testing.T) *testenv.Daemon {
	t.Helper()
	body, err := netserver()
	if err != nil {
		t.Fatal(err)
	}
	d := testenv.Start(t, testenv.Options{})
	d.Import(image, testenv.Image(t, testenv.BusyboxConfig(),
		testenv.Layer(t, append(testenv.BusyboxEntries(t), testenv.Entry{Name: "bin/netserver", Body: string(body), Mode: 0o755})...)))
	return d
}

// serve runs netserver in a sandbox until the test ends, and returns once it listens.
func serve(t *testing.T, d *testenv.Daemon, box string, args ...string) (stop func()) {
	t.Helper()
	e := decode[shard.Exec](t, call(t, d, "POST", "/v0/sandboxes/"+box+"/exec", shard.ExecRequest{Command: append([]string{"netserver"}, args...)}), 201)
	port := args[len(args)-1][strings.LastIndexByte(args[len(args)-1], ':')+1:]
	testenv.Eventually(t, "the server listens", func() (bool, string) {
		n, err := strconv.Atoi(port)
		if err != nil {
			t.Fatal(err)
		}
		r := d.Shard("exec", box, "sh", "-c", fmt.Sprintf("cat /proc/net/tcp /proc/net/tcp6 2>/dev/null | grep ':%04X [0-9A-F:]* 0A'", n))
		return r.Code == 0, r.Stdout + r.Stderr
	})
	return func() {
		call(t, d, "POST", "/v0/sandboxes/"+box+"/exec/"+e.ID+"/kill", map[string]string{"signal": "KILL"})
	}
}

// dialHost connects to a port of the daemon's host, from it.
func dialHost(t *testing.T, d *testenv.Daemon, addr string) (*net.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	c, err := d.Lab().DialFromHost(ctx, "tcp4", addr)
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(2 * time.Minute))
	return c.(*net.TCPConn), nil
}

func local(port int) string { return fmt.Sprintf("127.0.0.1:%d", port) }

// ask sends one line to a host port, ends its half, and reads to the end.
func ask(t *testing.T, d *testenv.Daemon, addr, line string) (string, error) {
	t.Helper()
	c, err := dialHost(t, d, addr)
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return "", err
	}
	if err := c.CloseWrite(); err != nil {
		return "", err
	}
	got, err := io.ReadAll(c)
	return string(got), err
}

// answers checks that a forward works: the server answers, and sees 127.0.0.1.
func answers(t *testing.T, d *testenv.Daemon, addr string) {
	t.Helper()
	if got, err := ask(t, d, addr, "peer"); err != nil || !strings.HasPrefix(got, "127.0.0.1:") {
		t.Errorf("%s answers %q, %v", addr, got, err)
	}
}

func unreachable(t *testing.T, d *testenv.Daemon, addr string) {
	t.Helper()
	if got, err := ask(t, d, addr, "peer"); err == nil {
		t.Errorf("%s answers %q", addr, got)
	}
}

func putPort(t *testing.T, d *testenv.Daemon, box string, host, guest int, public bool) shard.Port {
	t.Helper()
	return decode[shard.Port](t, call(t, d, "PUT", fmt.Sprintf("/v0/sandboxes/%s/ports/%d", box, host), map[string]any{"guest_port": guest, "public": public}), 200)
}

func listPorts(t *testing.T, d *testenv.Daemon, box string) []shard.Port {
	t.Helper()
	path := "/v0/ports"
	if box != "" {
		path = "/v0/sandboxes/" + box + "/ports"
	}
	return decode[struct{ Ports []shard.Port }](t, call(t, d, "GET", path, nil), 200).Ports
}

// again starts the daemon again, and waits until it has asked its providers, so that it can be killed again.
func again(d *testenv.Daemon) {
	d.Restart()
	d.Shard("providers")
}

// sockets counts the daemon's sockets.
func sockets(d *testenv.Daemon) int {
	n := 0
	entries, _ := os.ReadDir(fmt.Sprintf("/proc/%d/fd", d.PID()))
	for _, e := range entries {
		if to, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", d.PID(), e.Name())); strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// TestCase085: no connection, however bad, ends the forward or leaves a descriptor behind.
func TestCase085(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		serve(t, d, id, "127.0.0.1:8000")
		serve(t, d, id, "--greet", "close", "127.0.0.1:8001")
		serve(t, d, id, "--greet", "reset", "127.0.0.1:8002")
		for i := range 3 {
			putPort(t, d, id, 9000+i, 8000+i, false)
		}
		answers(t, d, local(9000))
		before := sockets(d)
		var wg sync.WaitGroup
		slots := make(chan struct{}, 32)
		for i := range 2000 {
			slots <- struct{}{}
			wg.Go(func() {
				defer func() { <-slots }()
				ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
				defer cancel()
				conn, err := d.Lab().DialFromHost(ctx, "tcp4", local(9000+max(0, i%8-5)))
				if err != nil {
					if i%8 < 6 || !errors.Is(err, syscall.ECONNRESET) { // a server that is quick with its reset is first
						t.Errorf("connection %d: %v", i, err)
					}
					return
				}
				c := conn.(*net.TCPConn)
				defer func() { _ = c.Close() }()
				_ = c.SetDeadline(time.Now().Add(time.Minute))
				switch i % 8 {
				case 0: // reset at once
					_ = c.SetLinger(0)
				case 1: // reset in the middle of a download
					_, _ = io.WriteString(c, "source 10000000\n")
					_, _ = io.CopyN(io.Discard, c, 1000)
					_ = c.SetLinger(0)
				case 2: // close in the middle of one
					_, _ = io.WriteString(c, "source 10000000\n")
					_, _ = io.CopyN(io.Discard, c, 1000)
				case 3: // reset while the server reads nothing
					_, _ = io.WriteString(c, "hold\n")
					_, _ = c.Write(make([]byte, 10000))
					_ = c.SetLinger(0)
				case 4: // say nothing, and close
				case 5: // reset by the server in the middle
					_, _ = io.WriteString(c, "reset\n")
					_, _ = io.ReadAll(c)
				case 6, 7: // closed and reset by the server before anything
					_, _ = io.ReadAll(c)
				}
			})
		}
		wg.Wait()
		answers(t, d, local(9000))
		for _, p := range listPorts(t, d, id) {
			if !p.Listening || p.Error != "" {
				t.Errorf("%+v", p)
			}
		}
		testenv.Eventually(t, "no descriptor is left", func() (bool, string) {
			now := sockets(d)
			return now <= before, fmt.Sprintf("%d sockets, %d before", now, before)
		})
	})
}

// TestCase087: a connection is reset at once while nothing listens, and works as soon as something does, wherever on IPv4
// it listens.
func TestCase087(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--port", "9000:8000")
		if _, err := ask(t, d, local(9000), "peer"); !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
			t.Errorf("while nothing listens: %v, want a reset", err)
		}
		for _, listen := range []string{"127.0.0.1:8000", "0.0.0.0:8000", "[::]:8000"} {
			stop := serve(t, d, id, listen)
			answers(t, d, local(9000))
			stop()
			testenv.Eventually(t, "the server is gone", func() (bool, string) {
				got, err := ask(t, d, local(9000), "peer")
				return err != nil, got
			})
		}
		// As docs/ports.md says: what listens on ::1 alone is not reached.
		if r := d.Shard("exec", id, "test", "-e", "/proc/sys/net/ipv6/conf/lo"); r.Code == 0 && sh(t, d, id, "cat /proc/sys/net/ipv6/conf/lo/disable_ipv6") == "0" {
			serve(t, d, id, "[::1]:8000")
			unreachable(t, d, local(9000))
		}
	})
}

// TestCase088: a host port is one forward's only, and what cannot be is refused whole or heals.
func TestCase088(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		a, b := box(t, d, provider), box(t, d, provider)
		putPort(t, d, a, 9100, 8000, false)
		put := func(id string, host, guest any) answer {
			return call(t, d, "PUT", fmt.Sprintf("/v0/sandboxes/%s/ports/%v", id, host), map[string]any{"guest_port": guest})
		}
		other := d.Lab().ListenHost("tcp4", "127.0.0.1:9101")
		for _, c := range []struct {
			host, guest any
			code        shard.Code
		}{
			{9100, 8000, shard.CodeInUse}, {9101, 8000, shard.CodeInUse},
			{0, 8000, shard.CodeInvalidRequest}, {65536, 8000, shard.CodeInvalidRequest}, {"x", 8000, shard.CodeInvalidRequest}, {-1, 8000, shard.CodeInvalidRequest},
			{9102, 0, shard.CodeInvalidRequest}, {9102, 65536, shard.CodeInvalidRequest}, {9102, "80", shard.CodeInvalidRequest}, {9102, nil, shard.CodeInvalidRequest},
		} {
			if got := put(b, c.host, c.guest).code(t); got != c.code {
				t.Errorf("%v to %v: code %q, want %q", c.host, c.guest, got, c.code)
			}
		}
		if got := call(t, d, "PUT", "/v0/sandboxes/"+b+"/ports/9102", `{"guest_port":80,"address":"10.0.0.1"}`).code(t); got != shard.CodeInvalidRequest {
			t.Errorf("a bind address: %q", got)
		}
		if got := listPorts(t, d, b); len(got) != 0 {
			t.Errorf("refused forwards were kept: %+v", got)
		}
		// A create with a bad port makes nothing; the good one is free.
		count := func() int {
			list, err := connect(t, d).AllSandboxes(t.Context(), true)
			if err != nil {
				t.Fatal(err)
			}
			return len(list.Sandboxes)
		}
		before := count()
		for bad, code := range map[string]shard.Code{`{"host_port":9101,"guest_port":1}`: shard.CodeInUse, `{"host_port":9100,"guest_port":1}`: shard.CodeInUse,
			`{"host_port":9103,"guest_port":2}`: shard.CodeInvalidRequest, `{"host_port":70000,"guest_port":2}`: shard.CodeInvalidRequest} {
			body := fmt.Sprintf(`{"image":%q,"provider":%q,"ports":[{"host_port":9103,"guest_port":1},%s]}`, image, provider, bad)
			if got := call(t, d, "POST", "/v0/sandboxes?wait=true", body).code(t); got != code {
				t.Errorf("create with %s: code %q, want %q", bad, got, code)
			}
		}
		if now := count(); now != before {
			t.Errorf("refused creates left %d sandboxes", now-before)
		}
		putPort(t, d, b, 9103, 8000, false)

		// Taken while the sandbox was down: the record says so, and it heals.
		serve(t, d, b, "127.0.0.1:8000")
		d.Must("stop", b)
		thief := d.Lab().ListenHost("tcp4", "127.0.0.1:9103")
		d.Must("start", b)
		p := listPorts(t, d, b)[0]
		if p.Listening || !strings.Contains(p.Error, "9103") {
			t.Errorf("a taken port: %+v", p)
		}
		if got := putPort(t, d, b, 9103, 8000, false); got.Listening || got.Error == "" {
			t.Errorf("the same again: %+v", got)
		}
		_ = thief.Close()
		testenv.Eventually(t, "the forward heals", func() (bool, string) {
			p := listPorts(t, d, b)[0]
			return p.Listening && p.Error == "", fmt.Sprintf("%+v", p)
		})
		serve(t, d, b, "127.0.0.1:8000")
		answers(t, d, local(9103))

		// What is removed is free at once.
		d.Must("port", "remove", a, "9100")
		refused(t, d.Shard("port", "remove", a, "9100"), "9100")
		putPort(t, d, b, 9100, 8000, false)
		answers(t, d, local(9100))
		d.Must("remove", "--force", b)
		putPort(t, d, a, 9100, 8000, false)
		putPort(t, d, a, 9103, 8000, false)
		_ = other.Close()
	})
}

// TestCase090: a forward is the host's own business unless it is public, and again when it is public no longer.
func TestCase090(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, other := box(t, d, provider), box(t, d, provider)
		serve(t, d, id, "127.0.0.1:8000")
		lan := testenv.LabHostAddr + ":9200"
		fromWorld := func() (net.Conn, error) {
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			return d.Lab().DialFromWorld(ctx, "tcp4", lan)
		}
		private := func(p shard.Port) {
			t.Helper()
			if p.Public || p.Address != "127.0.0.1" || !p.Listening || len(p.ReachableOn) != 1 || p.ReachableOn[0] != (shard.HostAddress{Interface: "lo", Address: "127.0.0.1"}) {
				t.Errorf("%+v", p)
			}
			answers(t, d, local(9200))
			unreachable(t, d, lan)
			if c, err := fromWorld(); err == nil {
				_ = c.Close()
				t.Error("another machine reaches a private forward")
			}
		}
		private(putPort(t, d, id, 9200, 8000, false))

		inside, err := dialHost(t, d, local(9200))
		if err != nil {
			t.Fatal(err)
		}
		echo := func(c net.Conn) error {
			_ = c.SetDeadline(time.Now().Add(30 * time.Second))
			if _, err := io.WriteString(c, "x"); err != nil {
				return err
			}
			_, err := io.ReadFull(c, make([]byte, 1))
			return err
		}
		_, _ = io.WriteString(inside, "echo\n")
		if err := echo(inside); err != nil {
			t.Fatal(err)
		}
		p := putPort(t, d, id, 9200, 8000, true)
		if !p.Public || p.Address != "0.0.0.0" || !p.Listening || len(p.ReachableOn) != 2 ||
			!slices.Contains(p.ReachableOn, shard.HostAddress{Interface: "eth0", Address: testenv.LabHostAddr}) {
			t.Errorf("%+v", p)
		}
		answers(t, d, local(9200))
		answers(t, d, lan)
		outside, err := fromWorld()
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = outside.Close() }()
		_, _ = io.WriteString(outside, "echo\n")
		if err := errors.Join(echo(outside), echo(inside)); err != nil {
			t.Error(err)
		}
		// Not even a public one can be reached from a sandbox.
		gateway := sh(t, d, other, "ip route | awk '/default/ {print $3}'")
		for _, addr := range []string{testenv.LabHostAddr, gateway} {
			if r := d.Shard("exec", other, "sh", "-c", "echo peer | timeout 4 nc -w 3 "+addr+" 9200"); r.Stdout != "" {
				t.Errorf("another sandbox reaches %s: %q", addr, r.Stdout)
			}
		}
		private(putPort(t, d, id, 9200, 8000, false))
		if err := echo(outside); err == nil {
			t.Error("a connection from outside outlives the end of the public forward")
		}
		if err := echo(inside); err != nil {
			t.Errorf("a connection from inside was cut: %v", err)
		}
		// Another guest port cuts what leads to the old one.
		putPort(t, d, id, 9200, 8001, false)
		if err := echo(inside); err == nil {
			t.Error("a connection to the old port of the sandbox outlives the change")
		}
	})
}

// TestPortsLife: forwards listen only while the sandbox runs, and are kept whatever happens to it or to the daemon.
func TestPortsLife(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--port", "9300:8000", "--port", "9301")
		want := []shard.PortForward{{HostPort: 9300, GuestPort: 8000}, {HostPort: 9301, GuestPort: 9301}}
		if got := inspect(t, d, id).Ports; !slices.Equal(got, want) {
			t.Errorf("ports of the record: %+v", got)
		}
		serve(t, d, id, "127.0.0.1:8000")
		answers(t, d, local(9300))

		t.Run("bytes", func(t *testing.T) {
			c, err := dialHost(t, d, local(9300))
			if err != nil {
				t.Fatal(err)
			}
			data := noise(20 << 20)
			go func() {
				_, _ = io.WriteString(c, "echo\n")
				_, _ = c.Write(data)
				_ = c.CloseWrite()
			}()
			got, err := io.ReadAll(c)
			if err != nil || !bytes.Equal(got, data) {
				t.Errorf("20 MiB there and back: %d bytes, %v", len(got), err)
			}
			if got, err := ask(t, d, local(9300), "sink\n"+strings.Repeat("x", 3_000_000)); err != nil || got != "3000001\n" {
				t.Errorf("half-close: %q, %v", got, err)
			}
		})

		open, err := dialHost(t, d, local(9300))
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(open, "echo\n1")
		if _, err := io.ReadFull(open, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		d.Kill9()
		again(d)
		if n, _ := io.Copy(io.Discard, open); n != 0 {
			t.Errorf("%d bytes come from a daemon that was killed", n)
		}
		answers(t, d, local(9300))
		d.Stop()
		again(d)
		answers(t, d, local(9300))

		if open, err = dialHost(t, d, local(9300)); err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(open, "hold\n")
		d.Must("stop", id)
		if n, err := io.Copy(io.Discard, open); n != 0 {
			t.Errorf("after stop: %d bytes, %v", n, err)
		}
		unreachable(t, d, local(9300))
		for _, p := range listPorts(t, d, id) {
			if p.Listening || p.Error != "" {
				t.Errorf("while stopped: %+v", p)
			}
		}
		// Kept for the start: one more, one changed, one removed.
		if p := putPort(t, d, id, 9302, 8000, false); p.Listening {
			t.Errorf("%+v", p)
		}
		putPort(t, d, id, 9301, 8000, true)
		d.Must("port", "remove", id, "9300")
		d.Kill9()
		again(d)
		unreachable(t, d, local(9302))
		d.Must("start", id)
		serve(t, d, id, "127.0.0.1:8000")
		answers(t, d, local(9302))
		answers(t, d, testenv.LabHostAddr+":9301")
		unreachable(t, d, local(9300))
		d.Must("remove", "--force", id)
		unreachable(t, d, local(9302))
		if got := listPorts(t, d, ""); len(got) != 0 {
			t.Errorf("after remove: %+v", got)
		}
	})
}

// TestPortsList: the list is that of all sandboxes in the order of the host ports, in pages, and the command line shows it.
func TestPortsList(t *testing.T) {
	t.Parallel()
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		a, b := box(t, d, provider, "--name", "a-"+provider), box(t, d, provider)
		r := d.Shard("port", "add", a, "--public", "10000:80")
		if r.Code != 0 || r.Stdout != "lo 127.0.0.1:10000\neth0 "+testenv.LabHostAddr+":10000\n" || r.Stderr != "" {
			t.Errorf("port add: %+v", r)
		}
		if r := d.Shard("port", "add", b, "9400"); r.Stdout != "lo 127.0.0.1:9400\n" {
			t.Errorf("port add: %+v", r)
		}
		d.Must("port", "add", a, "9401:80")
		var hosts []int
		c := connect(t, d)
		list, err := c.AllPorts(t.Context(), "")
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range list {
			hosts = append(hosts, p.HostPort)
		}
		if !slices.Equal(hosts, []int{9400, 9401, 10000}) {
			t.Errorf("%v", hosts)
		}
		type page struct {
			Ports []shard.Port
			Next  *string
		}
		first := decode[page](t, call(t, d, "GET", "/v0/ports?limit=1", nil), 200)
		second := decode[page](t, call(t, d, "GET", "/v0/ports?limit=2&cursor="+*first.Next, nil), 200)
		if first.Ports[0].HostPort != 9400 || len(second.Ports) != 2 || second.Ports[1].HostPort != 10000 || second.Next != nil {
			t.Errorf("pages: %+v, %+v", first, second)
		}
		text := d.Must("port", "list", a)
		for _, want := range []string{"SANDBOX", "VISIBILITY", "REACHABLE-ON", "a-" + provider, "public", "private", testenv.LabHostAddr + ":10000"} {
			if !strings.Contains(text, want) {
				t.Errorf("port list does not say %q:\n%s", want, text)
			}
		}
		if text := d.Must("port", "list", "--format", "json", b); !strings.Contains(text, `"host_port": 9400`) {
			t.Errorf("port list as JSON: %s", text)
		}
		if caps := d.Must("capabilities", "--format", "json"); !strings.Contains(caps, `"port": true`) {
			t.Errorf("capabilities: %s", caps)
		}
		refused(t, d.Shard("port", "list", "no-such-box"), "no-such-box")
	})
}

package test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestCreateModes: the three ways in which a create answers, for an image that is on the host.
func TestCreateModes(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		req := shard.CreateRequest{Image: image, Provider: provider}
		for _, path := range []string{"/v0/sandboxes", "/v0/sandboxes?wait=true", "/v0/sandboxes?wait=false"} {
			s := decode[shard.Sandbox](t, call(t, d, "POST", path, req), 201)
			if s.State != shard.StateRunning || s.StartedAt == nil || !shard.IsID(s.ID) {
				t.Errorf("%s: %+v", path, s)
			}
			d.Must("remove", "--force", s.ID)
		}
		a := call(t, d, "POST", "/v0/sandboxes?wait=true", req, "Accept", "application/x-ndjson")
		events, last := lines(t, a)
		if len(events) == 0 || events[0].Status != "cached" || !strings.HasSuffix(events[0].Reference, image) || events[0].Digest == "" {
			t.Errorf("the events are %+v", events)
		}
		var s shard.Sandbox
		if err := json.Unmarshal(last["sandbox"], &s); err != nil || s.State != shard.StateRunning {
			t.Fatalf("the last line is %s", last)
		}
		d.Must("remove", "--force", s.ID)

		// A refusal before the first line keeps its status and body.
		a = call(t, d, "POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: image, Provider: provider, Name: "BAD"}, "Accept", "application/x-ndjson")
		if got := a.code(t); got != shard.CodeInvalidRequest {
			t.Errorf("a refused create: %s", got)
		}
		// An image that cannot be had: pending at first, failed in the end, with a reason; gone after remove.
		s = decode[shard.Sandbox](t, call(t, d, "POST", "/v0/sandboxes", shard.CreateRequest{Image: "127.0.0.1:1/no/such:image", Provider: provider, Name: "late"}), 201)
		if s.State != shard.StatePending && s.State != shard.StateFailed {
			t.Errorf("a create of an image that is not here answers %+v", s)
		}
		in := decode[shard.Inspection](t, call(t, d, "GET", "/v0/sandboxes/"+s.ID+"?wait=true", nil), 200)
		if in.State != shard.StateFailed || in.FailedReason == "" || strings.Contains(in.FailedReason, d.Root) {
			t.Errorf("it ended as %+v", in)
		}
		if a := call(t, d, "DELETE", "/v0/sandboxes/late", nil); a.Status != 204 {
			t.Errorf("remove: %d %s", a.Status, a.Body)
		}
		s = decode[shard.Sandbox](t, call(t, d, "POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: "127.0.0.1:1/no/such:image", Provider: provider}), 201)
		if s.State != shard.StateFailed || s.FailedReason == "" {
			t.Errorf("wait=true of an image that cannot be had: %+v", s)
		}
		d.Must("remove", s.ID)
		refused(t, d.Shard("create", "--provider", provider, "127.0.0.1:1/no/such:image"))
	})
}

// lines splits an NDJSON answer into its events and its last line, and checks its form.
func lines(t *testing.T, a answer) (events []shard.Progress, last map[string]json.RawMessage) {
	t.Helper()
	if a.Status != 201 && a.Status != 200 || !strings.HasPrefix(a.Header.Get("Content-Type"), "application/x-ndjson") {
		t.Fatalf("status %d, type %q: %s", a.Status, a.Header.Get("Content-Type"), a.Body)
	}
	if !bytes.HasSuffix(a.Body, []byte("\n")) {
		t.Errorf("the last line does not end: %q", a.Body)
	}
	scan := bufio.NewScanner(bytes.NewReader(a.Body))
	for scan.Scan() {
		if last["event"] == nil && last != nil {
			t.Errorf("a line follows the last one: %s", scan.Text())
		}
		last = nil
		if err := json.Unmarshal(scan.Bytes(), &last); err != nil || len(last) != 1 {
			t.Fatalf("a line is not one object with one key: %q", scan.Text())
		}
		if raw := last["event"]; raw != nil {
			var e shard.Progress
			if err := json.Unmarshal(raw, &e); err != nil {
				t.Fatal(err)
			}
			events = append(events, e)
		}
	}
	if last["event"] != nil || last == nil {
		t.Errorf("the stream ends with an event: %s", a.Body)
	}
	return events, last
}

// TestCursors: lists can be walked in pages, also when what the cursor names is removed meanwhile.
func TestCursors(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		var ids []string
		for range 5 {
			ids = append(ids, box(t, d, provider))
		}
		d.Must("stop", ids[0])
		slices.Sort(ids)
		type page struct {
			Sandboxes []shard.Sandbox `json:"sandboxes"`
			Next      *string         `json:"next"`
		}
		whole := decode[page](t, call(t, d, "GET", "/v0/sandboxes?all=true", nil), 200)
		if len(whole.Sandboxes) != 5 || whole.Next != nil {
			t.Errorf("without a limit: %d, next %v", len(whole.Sandboxes), whole.Next)
		}
		var got []string
		query := "/v0/sandboxes?all=true&limit=2"
		for path, i := query, 0; i < 10; i++ {
			p := decode[page](t, call(t, d, "GET", path, nil), 200)
			if len(p.Sandboxes) > 2 {
				t.Errorf("a page of %d", len(p.Sandboxes))
			}
			for _, s := range p.Sandboxes {
				got = append(got, s.ID)
			}
			if i == 0 { // what the cursor names goes away
				d.Must("remove", "--force", p.Sandboxes[1].ID)
			}
			if p.Next == nil {
				break
			}
			path = query + "&cursor=" + *p.Next
		}
		if !slices.Equal(got, ids) {
			t.Errorf("walked %v, want %v in order", got, ids)
		}
		if a := call(t, d, "GET", "/v0/sandboxes", nil); !bytes.Contains(a.Body, []byte(`"next":null`)) {
			t.Errorf("next is not null: %.200s", a.Body)
		}
	}, "runc")
}

// TestCase140: rough clients get their refusal and nobody else notices.
func TestCase140(t *testing.T) {
	t.Parallel()
	d := start(t)
	c := connect(t, d)
	before := testenv.UsageOf(d.PID())
	dial := func() net.Conn {
		conn, err := net.Dial("unix", filepath.Join(d.Root, "shard.sock"))
		if err != nil {
			t.Fatal(err)
		}
		return conn
	}
	var conns []net.Conn
	for range 300 {
		conn := dial()
		_, _ = io.WriteString(conn, "GET /v0/version HTTP/1.1\r\nHost: x\r\nX-Slow: ")
		conns = append(conns, conn)
	}
	begin := time.Now()
	if _, err := c.Version(t.Context()); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(begin); took > 10*time.Second {
		t.Errorf("with 300 slow clients an answer took %s", took)
	}
	for _, conn := range conns {
		_ = conn.Close()
	}
	// A body without end.
	conn := dial()
	_, _ = io.WriteString(conn, "POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 524288000\r\n\r\n")
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	go func() {
		piece := bytes.Repeat([]byte("x"), 1<<20)
		for range 500 {
			if _, err := conn.Write(piece); err != nil {
				return
			}
		}
	}()
	answer, _ := bufio.NewReader(conn).ReadString('\n')
	if !strings.Contains(answer, "413") && !strings.Contains(answer, "400") {
		t.Errorf("500 MiB of JSON: %q", answer)
	}
	_ = conn.Close()
	conn = dial()
	_ = conn.SetDeadline(time.Now().Add(time.Minute))
	_, _ = io.WriteString(conn, "GET /v0/version HTTP/1.1\r\nHost: x\r\nX-Big: "+strings.Repeat("x", 2<<20)+"\r\n\r\n")
	if answer, _ = bufio.NewReader(conn).ReadString('\n'); answer != "" && !strings.Contains(answer, " 4") {
		t.Errorf("2 MiB of headers: %q", answer)
	}
	_ = conn.Close()
	testenv.Eventually(t, "the daemon is back to its base", func() (bool, string) {
		after := testenv.UsageOf(d.PID())
		return after.Files <= before.Files+4 && after.MemoryKiB < before.MemoryKiB+64<<10, fmt.Sprintf("%+v, was %+v", after, before)
	})
}

// TestCase141: the socket and the root are for the daemon's user alone.
func TestCase141(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for range 2 {
			info, err := os.Stat(filepath.Join(d.Root, "shard.sock"))
			if err != nil {
				t.Fatal(err)
			}
			want := os.FileMode(0o600)
			if exec.Command("getent", "group", "shard").Run() == nil {
				want = 0o660
			}
			if info.Mode().Perm() != want {
				t.Errorf("the socket's mode is %s", info.Mode())
			}
			for _, dir := range []string{"sandboxes", "images", filepath.Join("sandboxes", id)} {
				info, err := os.Stat(filepath.Join(d.Root, dir))
				if err != nil || info.Mode().Perm()&0o077 != 0 {
					t.Errorf("%s: %v, %v", dir, info.Mode(), err)
				}
			}
			// As somebody else.
			cmd := exec.Command(filepath.Join(testenv.Bin(t), "shard"), "--root", d.Root, "list")
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
			cmd.Dir = "/"
			if out, err := cmd.CombinedOutput(); err == nil {
				t.Errorf("user 65534 can use the daemon: %s", out)
			}
			d.Kill9()
			d.Restart()
		}
	}, "runc")
}

// TestProviders: the list of providers, the capabilities and the version agree with each other.
func TestProviders(t *testing.T) {
	t.Parallel()
	d := start(t)
	list := decode[struct {
		Providers []shard.ProviderInfo `json:"providers"`
	}](t, call(t, d, "GET", "/v0/providers", nil), 200).Providers
	defaults := 0
	for _, p := range list {
		if p.Default {
			defaults++
		}
		if !p.Available && p.Reason == "" {
			t.Errorf("provider %s is not available and does not say why", p.Name)
		}
		caps := decode[shard.Capabilities](t, call(t, d, "GET", "/v0/capabilities?provider="+p.Name, nil), 200)
		if caps != p.Capabilities {
			t.Errorf("provider %s: %+v in the list, %+v by itself", p.Name, p.Capabilities, caps)
		}
	}
	if defaults != 1 {
		t.Errorf("%d providers are the default, want 1: %+v", defaults, list)
	}
	if a := call(t, d, "GET", "/v0/capabilities?provider=nosuch", nil); a.Status != 400 && a.Status != 404 {
		t.Errorf("capabilities of an unknown provider: %d %s", a.Status, a.Body)
	}
	v := decode[map[string]string](t, call(t, d, "GET", "/v0/version", nil), 200)
	if v["api_version"] != "v0" || v["version"] == "" {
		t.Errorf("version: %v", v)
	}
}

// TestRefusedUpload: a client that sends all of a body, slowly, before it looks at the answer, gets the answer.
func TestRefusedUpload(t *testing.T) {
	t.Parallel()
	d := start(t)
	for name, c := range map[string]struct {
		head   string
		status string
	}{
		"a sandbox that is not there": {"PUT /v0/sandboxes/nosuch/files?path=/x HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n", "404"},
		"a query that is wrong":       {"PUT /v0/sandboxes/nosuch/archive?path=relative HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n", "4"},
		"JSON of 8 MiB":               {"POST /v0/sandboxes HTTP/1.1\r\nHost: x\r\nContent-Length: 8388608\r\n\r\n", "4"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			conn, err := net.Dial("unix", filepath.Join(d.Root, "shard.sock"))
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			_ = conn.SetDeadline(time.Now().Add(time.Minute))
			if _, err := io.WriteString(conn, c.head); err != nil {
				t.Fatal(err)
			}
			piece := bytes.Repeat([]byte("x"), 1<<20)
			for i := range 8 {
				if _, err := conn.Write(piece); err != nil {
					t.Fatalf("after %d MiB: %v", i, err)
				}
				time.Sleep(150 * time.Millisecond)
			}
			line, err := bufio.NewReader(conn).ReadString('\n')
			if err != nil || !strings.HasPrefix(line, "HTTP/1.1 "+c.status) {
				t.Errorf("%q, %v", line, err)
			}
		})
	}
}

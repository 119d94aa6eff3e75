package test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/testenv"
)

// TestWatch: what changes below a directory is told in order, on every provider, until the directory or the sandbox ends.
func TestWatch(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		sh(t, d, id, "mkdir -p /w/src/lib && echo 1 > /w/src/lib/a && mkdir /elsewhere && ln -s /elsewhere /w/link")

		t.Run("events", func(t *testing.T) {
			w := watching(t, c, id, "/w", true)
			for _, step := range []struct {
				script string
				want   []string
			}{
				{"echo 2 >> /w/src/lib/a", []string{"modified /w/src/lib/a"}},
				{"chmod 600 /w/src/lib/a", []string{"modified /w/src/lib/a"}},
				{"mv /w/src/lib/a /w/b", []string{"moved /w/b from /w/src/lib/a"}},
				{"mv /w/src /w/dst", []string{"moved /w/dst from /w/src dir"}},
				{"touch /w/dst/lib/c", []string{"created /w/dst/lib/c"}},
				{"mv /w/dst /elsewhere/dst; touch /elsewhere/dst/lib/unseen", []string{"deleted /w/dst dir"}},
				{"mv /elsewhere/dst/lib /w/lib", []string{"created /w/lib dir", "created /w/lib/c", "created /w/lib/unseen"}},
				{"rm /w/b; touch /w/link/unseen", []string{"deleted /w/b"}},
				{"ln /w/lib/c /w/hard; ln -s c /w/lib/soft; mkfifo /w/fifo", []string{"created /w/hard", "created /w/lib/soft", "created /w/fifo"}},
				{"rm -r /w/lib", []string{"deleted /w/lib/c", "deleted /w/lib/soft", "deleted /w/lib/unseen", "deleted /w/lib dir"}},
				{"mkdir -p /w/1/2/3 && echo x > /w/1/2/3/f", []string{"created /w/1 dir", "created /w/1/2 dir", "created /w/1/2/3 dir", "created /w/1/2/3/f"}},
			} {
				got := tell(w.around(t, d, id, step.script))
				if len(step.want) == 1 {
					got = slices.Compact(got) // a change may be told twice
				} else { // what a scan finds comes in the directory's order, and contents may follow
					got = slices.DeleteFunc(got, func(s string) bool { return strings.HasPrefix(s, "modified ") })
					slices.Sort(got)
					slices.Sort(step.want)
				}
				if !slices.Equal(got, step.want) {
					t.Errorf("%s: told\n  %s\nwant\n  %s", step.script, strings.Join(got, "\n  "), strings.Join(step.want, "\n  "))
				}
			}
		})

		t.Run("names", func(t *testing.T) {
			sh(t, d, id, "mkdir /odd")
			w := watching(t, c, id, "/odd", false)
			sh(t, d, id, `touch "$(printf '/odd/a\377%%\nb')"`)
			e := w.next(t)
			if e.Path != "/odd/a\uFFFD%\nb" || string(e.PathBytes) != "/odd/a\xff%\nb" {
				t.Errorf("%q %q", e.Path, e.PathBytes)
			}
		})

		t.Run("deep race", func(t *testing.T) {
			sh(t, d, id, "mkdir /race")
			w := watching(t, c, id, "/race", true)
			sh(t, d, id, "for i in 0 1 2 3 4 5 6 7 8 9; do for j in 0 1 2 3 4; do mkdir -p /race/$i/$j/x/y; : > /race/$i/$j/x/y/f; done; done; touch /race/end")
			seen := map[string]int{}
			for e := w.next(t); e.Path != "/race/end"; e = w.next(t) {
				if e.Type == shard.FileCreated {
					seen[e.Path]++
				}
			}
			for i := range 10 {
				for j := range 5 {
					path := fmt.Sprintf("/race/%d/%d/x/y/f", i, j)
					for path != "/race" {
						if n := seen[path]; n == 0 && strings.HasSuffix(path, "f") || n > 1 && strings.HasSuffix(path, "f") {
							t.Errorf("%s was told %d times", path, n)
						}
						path = path[:strings.LastIndexByte(path, '/')]
					}
				}
			}
			for path, n := range seen {
				if n != 1 {
					t.Errorf("%s was told %d times", path, n)
				}
			}
		})

		t.Run("directory ends", func(t *testing.T) {
			sh(t, d, id, "mkdir -p /short/sub")
			w := watching(t, c, id, "/short", true)
			sh(t, d, id, "rm -r /short")
			all, err := w.rest()
			if last := all[len(all)-1]; !errors.Is(err, io.EOF) || last.Type != shard.FileDeleted || last.Path != "/short" || !last.IsDir {
				t.Errorf("%v, %v", tell(all), err)
			}
		})

		t.Run("refusals", func(t *testing.T) {
			for path, code := range map[string]shard.Code{"/none": shard.CodeNotFound, "relative": shard.CodeInvalidRequest, "": shard.CodeInvalidRequest,
				"/w/fifo": shard.CodeInvalidRequest} {
				_, err := c.Watch(t.Context(), id, path, true)
				wantCode(t, err, code)
				if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/watch?path="+url.QueryEscape(path), nil, "Connection", "Upgrade", "Upgrade", "websocket",
					"Sec-WebSocket-Version", "13", "Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="); a.code(t) != code {
					t.Errorf("a WebSocket for %q: %d %s", path, a.Status, a.Body)
				}
			}
			if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/watch?path=/&recursive=maybe", nil); a.Status != 400 {
				t.Errorf("recursive=maybe: %d", a.Status)
			}
		})

		t.Run("many watches", func(t *testing.T) {
			sh(t, d, id, "mkdir /many")
			var open []*client.FileWatch
			for {
				w, err := c.Watch(t.Context(), id, "/many", true)
				if err != nil {
					wantCode(t, err, shard.CodeExecLimit)
					break
				}
				if open = append(open, w); len(open) > 64 {
					t.Fatal("65 watches at once were not refused")
				}
			}
			for _, w := range open {
				_ = w.Close()
			}
			// The ends take a moment to arrive; files work all the while.
			for deadline := time.Now().Add(time.Minute); ; {
				if _, err := c.ListDir(t.Context(), id, "/many"); err != nil {
					t.Fatal(err)
				}
				w, err := c.Watch(t.Context(), id, "/many", true)
				if err == nil {
					_ = w.Close()
					break
				}
				if time.Now().After(deadline) {
					t.Fatalf("after %d watches were closed: %v", len(open), err)
				}
			}
		})

		t.Run("a client that takes nothing", func(t *testing.T) {
			deep := "/slow/" + strings.Repeat("d", 200) + "/" + strings.Repeat("e", 200)
			sh(t, d, id, "mkdir -p "+deep)
			w := watching(t, c, id, "/slow", true)
			// Some 4 MB of events: more than sockets, the window and the agent hold together.
			sh(t, d, id, "cd "+deep+"; i=0; while [ $i -lt 6000 ]; do : > "+strings.Repeat("f", 200)+"$i; i=$((i+1)); done")
			sh(t, d, id, "touch /slow/end")
			told := 0
			for e := w.next(t); e.Type != shard.FileOverflow; e = w.next(t) {
				if told++; e.Path == "/slow/end" {
					t.Fatalf("%d events and no overflow", told)
				}
			}
			t.Logf("overflow after %d events", told)
			w.around(t, d, id, "true") // goes on
		})

		t.Run("session lost", func(t *testing.T) {
			sockets, _ := filepath.Glob(filepath.Join(d.Root, "sandboxes", id, "agent.sock"))
			if len(sockets) != 1 {
				t.Skipf("the agent of provider %s has no socket to take the daemon's place at", provider)
			}
			sh(t, d, id, "mkdir /lost")
			w := watching(t, c, id, "/lost", true)
			var file struct {
				Record struct {
					Token []byte `json:"token"`
				} `json:"record"`
			}
			raw, err := os.ReadFile(recordFile(d, id))
			if err != nil || json.Unmarshal(raw, &file) != nil || len(file.Record.Token) != guest.TokenSize {
				t.Fatalf("the record's token: %v", err)
			}
			conn, err := net.Dial("unix", sockets[0])
			if err != nil {
				t.Fatal(err)
			}
			session, err := guest.Connect(t.Context(), conn, [guest.TokenSize]byte(file.Record.Token))
			if err != nil {
				t.Fatal(err)
			}
			defer session.Close()
			if e := w.next(t); e.Type != shard.FileOverflow || e.Path != "/lost" {
				t.Errorf("after the session was lost: %+v", e)
			}
			sh(t, d, id, "touch /lost/f")
			if e := w.next(t); e.Path != "/lost/f" || e.Type != shard.FileCreated {
				t.Errorf("in the next session: %+v", e)
			}
		})

		t.Run("stop and remove", func(t *testing.T) {
			for _, end := range []string{"stop", "remove"} {
				ref := box(t, d, provider)
				lines := watching(t, c, ref, "/", true)
				conn := socket(t, d, ref, "/tmp")
				sh(t, d, ref, "touch /tmp/f")
				kind, data, err := conn.Read(t.Context())
				var e shard.FileEvent
				if err != nil || kind != websocket.MessageText || json.Unmarshal(data, &e) != nil || e.Path != "/tmp/f" || e.Type != shard.FileCreated {
					t.Errorf("the first message: %v %s %v", kind, data, err)
				}
				if end == "stop" {
					d.Must("stop", ref)
				} else {
					d.Must("remove", "--force", ref)
				}
				for err == nil {
					_, _, err = conn.Read(t.Context())
				}
				want := map[string]string{"stop": "stopped", "remove": "removed"}[end]
				if closed, ok := errors.AsType[websocket.CloseError](err); !ok || closed.Code != websocket.StatusNormalClosure || closed.Reason != want {
					t.Errorf("%s: the WebSocket ended with %v, want 1000 %s", end, err, want)
				}
				if _, err := lines.rest(); !errors.Is(err, io.EOF) {
					t.Errorf("%s: the lines ended with %v", end, err)
				}
			}
		})

		t.Run("cli", func(t *testing.T) {
			sh(t, d, id, "mkdir -p /cli/sub")
			cmd := d.Command("watch", id, "/cli")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { _ = cmd.Process.Kill() }()
			lines := bufio.NewScanner(out)
			// When it watches cannot be seen from outside: write until it tells.
			told := make(chan bool)
			go func() { told <- lines.Scan() }()
			for i := 0; ; i++ {
				sh(t, d, id, fmt.Sprintf("touch /cli/sub/f%d", i))
				select {
				case ok := <-told:
					var e shard.FileEvent
					if !ok || json.Unmarshal(lines.Bytes(), &e) != nil || !strings.HasPrefix(e.Path, "/cli/sub/f") || e.Type != shard.FileCreated {
						t.Fatalf("the first line: %q", lines.Text())
					}
				case <-time.After(50 * time.Millisecond):
					continue
				}
				break
			}
			if err := cmd.Process.Signal(os.Interrupt); err != nil {
				t.Fatal(err)
			}
			for lines.Scan() {
			}
			if code := exitCode(t, "watch after Ctrl+C", cmd); code != 130 {
				t.Errorf("exit code %d after Ctrl+C, want 130", code)
			}
			refused(t, d.Shard("watch", id, "/none"), "/none")
		})
	})
}

// watched is a watch whose reads are bounded.
type watched struct {
	*client.FileWatch
	events chan shard.FileEvent
	err    error // set before events is closed
}

func watching(t *testing.T, c *client.Client, id, path string, recursive bool) *watched {
	t.Helper()
	w, err := c.Watch(t.Context(), id, path, recursive)
	if err != nil {
		t.Fatalf("watch %s: %v", path, err)
	}
	t.Cleanup(func() { _ = w.Close() })
	out := &watched{FileWatch: w, events: make(chan shard.FileEvent)}
	go func() {
		defer close(out.events)
		for {
			e, err := w.Next()
			if err != nil {
				out.err = err
				return
			}
			select {
			case out.events <- *e:
			case <-t.Context().Done():
				return
			}
		}
	}()
	return out
}

func (w *watched) next(t *testing.T) shard.FileEvent {
	t.Helper()
	select {
	case e, ok := <-w.events:
		if !ok {
			t.Fatalf("the watch ended: %v", w.err)
		}
		return e
	case <-time.After(2 * time.Minute):
		t.Fatal("no event in two minutes")
	}
	panic("unreachable")
}

// rest reads to the end.
func (w *watched) rest() ([]shard.FileEvent, error) {
	var all []shard.FileEvent
	for e := range w.events {
		all = append(all, e)
	}
	return all, w.err
}

// around runs a script between two marks in the directory, and returns the events between them.
func (w *watched) around(t *testing.T, d *testenv.Daemon, id, script string) []shard.FileEvent {
	t.Helper()
	sh(t, d, id, "dir=$(ls -d /slow /w 2>/dev/null | head -n 1); mkdir $dir/mark; "+script+"; rmdir $dir/mark")
	var events []shard.FileEvent
	inside := false
	for {
		e := w.next(t)
		switch {
		case !strings.HasSuffix(e.Path, "/mark"):
			if inside {
				events = append(events, e)
			}
		case e.Type == shard.FileDeleted:
			return events
		default:
			inside = true
		}
	}
}

func tell(events []shard.FileEvent) []string {
	var out []string
	for _, e := range events {
		line := e.Type + " " + e.Path
		if e.From != "" {
			line += " from " + e.From
		}
		if e.IsDir {
			line += " dir"
		}
		out = append(out, line)
	}
	return out
}

// socket opens a watch as a WebSocket.
func socket(t *testing.T, d *testenv.Daemon, id, path string) *websocket.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	conn, _, err := websocket.Dial(ctx, "http://shard/v0/sandboxes/"+id+"/watch?recursive=true&path="+url.QueryEscape(path),
		&websocket.DialOptions{HTTPClient: &http.Client{Transport: rawHTTP(d).Transport},
			HTTPHeader: http.Header{"Origin": {"https://page.example"}}}) // shard serve has allowed it, or not: not the daemon's to judge
	if err != nil {
		t.Fatalf("open a WebSocket: %v", err)
	}
	t.Cleanup(func() { _ = conn.CloseNow() })
	return conn
}

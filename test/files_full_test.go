package test

import (
	"archive/tar"
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// dialDaemon is a bare connection to the daemon's socket.
func dialDaemon(t *testing.T, d *testenv.Daemon) net.Conn {
	t.Helper()
	conn, err := net.Dial("unix", filepath.Join(d.Root, "shard.sock"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	_ = conn.SetDeadline(time.Now().Add(3 * time.Minute))
	return conn
}

// exchange sends a request as it is written and reads the answer.
func exchange(t *testing.T, conn net.Conn, request string) answer {
	t.Helper()
	if _, err := io.WriteString(conn, request); err != nil {
		t.Fatal(err)
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil {
		t.Fatalf("%.60q: %v", request, err)
	}
	body, _ := io.ReadAll(resp.Body)
	return answer{resp.StatusCode, resp.Header, body}
}

// TestFilesUpload: a file is there whole or not at all.
func TestFilesUpload(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		put := func(path, rest string) string {
			return "PUT /v0/sandboxes/" + id + "/files?path=" + path + " HTTP/1.1\r\nHost: shard\r\n" + rest
		}
		sh(t, d, id, "mkdir /up && echo old >/up/old")
		for what, request := range map[string]string{
			"chunked":                  put("/up/new", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
			"chunked, over another":    put("/up/old", "Transfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"),
			"no length":                put("/up/new", "Connection: close\r\n\r\n"),
			"a mode beyond permission": put("/up/new&mode=4755", "Content-Length: 1\r\n\r\nx"),
			"a mode that is none":      put("/up/new&mode=rw", "Content-Length: 1\r\n\r\nx"),
			"a user that is none":      put("/up/new&user=nosuch", "Content-Length: 1\r\n\r\nx"),
			"a flag that is none":      put("/up/new&parents=1", "Content-Length: 1\r\n\r\nx"),
			"a directory":              put("/up", "Content-Length: 1\r\n\r\nx"),
		} {
			if got := exchange(t, dialDaemon(t, d), request).code(t); got != shard.CodeInvalidRequest {
				t.Errorf("%s: %s", what, got)
			}
		}
		// Cut in the middle: at once, after some, one byte before the end.
		for _, sent := range []int{0, 1, 100_000, 5<<20 - 1} {
			for _, name := range []string{"new", "old"} {
				conn := dialDaemon(t, d)
				_, _ = io.WriteString(conn, put("/up/"+name, fmt.Sprintf("Content-Length: %d\r\n\r\n", 5<<20)))
				_, _ = conn.Write(make([]byte, sent))
				_ = conn.Close()
			}
		}
		// The same when the sandbox itself still waits for more: nothing is visible meanwhile.
		conn := dialDaemon(t, d)
		_, _ = io.WriteString(conn, put("/up/slow", "Content-Length: 4\r\n\r\nab"))
		testenv.Eventually(t, "only what was there is there", func() (bool, string) {
			got := sh(t, d, id, "ls /up; cat /up/old")
			return got == "old\nold", got
		})
		_, _ = io.WriteString(conn, "cd")
		if resp, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil || resp.StatusCode != 204 {
			t.Errorf("the slow one: %v %v", resp, err)
		}
		testenv.Eventually(t, "no temporary file is left", func() (bool, string) {
			got := sh(t, d, id, "ls -A /up; cat /up/slow")
			return got == "old\nslow\nabcd", got
		})
		// The sandbox ends under an upload.
		conn = dialDaemon(t, d)
		_, _ = io.WriteString(conn, put("/up/never", "Content-Length: 4\r\n\r\nab"))
		time.Sleep(300 * time.Millisecond)
		go d.Must("stop", id)
		resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatal(err)
		}
		raw, _ := io.ReadAll(resp.Body)
		if got := (answer{Status: resp.StatusCode, Body: raw}).code(t); got != shard.CodeSandboxNotRunning {
			t.Errorf("when the sandbox ends: %s", raw)
		}
		testenv.Eventually(t, "it has stopped", func() (bool, string) { s := state(t, d, id); return s == shard.StateStopped, string(s) })
		d.Must("start", id)
		if got := sh(t, d, id, "ls -A /up"); got != "old\nslow" {
			t.Errorf("afterwards: %q", got)
		}
	})
}

// TestFilesDownload: what is cut never looks whole; lengths that the guest tells are not trusted.
func TestFilesDownload(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, "mkdir /big /many; dd if=/dev/zero of=/big/file bs=1M count=200 2>/dev/null; cd /many; seq -w 30000 | xargs touch")
		conns := map[string]net.Conn{}
		readers := map[string]*bufio.Reader{}
		for _, route := range []string{"files?path=/big/file", "archive?path=/big", "ls?path=/many"} {
			conn := dialDaemon(t, d)
			_, _ = io.WriteString(conn, "GET /v0/sandboxes/"+id+"/"+route+" HTTP/1.1\r\nHost: shard\r\n\r\n")
			conns[route], readers[route] = conn, bufio.NewReaderSize(conn, 16)
			if line, err := readers[route].ReadString('\n'); err != nil || line != "HTTP/1.1 200 OK\r\n" {
				t.Fatalf("%s: %q, %v", route, line, err)
			}
		}
		d.Must("remove", "--force", id)
		for route, r := range readers {
			resp, err := http.ReadResponse(bufio.NewReader(io.MultiReader(strings.NewReader("HTTP/1.1 200 OK\r\n"), r)), nil)
			if err != nil {
				t.Fatal(err)
			}
			if resp.ContentLength >= 0 {
				t.Errorf("%s: the length %d was told before", route, resp.ContentLength)
			}
			body, err := io.ReadAll(resp.Body)
			if err == nil {
				t.Errorf("%s: the cut answer looks whole, with %d bytes", route, len(body))
			}
			if strings.HasPrefix(route, "ls") && json.Valid(body) {
				t.Errorf("the cut list is valid JSON of %d bytes", len(body))
			}
		}
		id = box(t, d, provider)
		// A file that shrinks and one that grows while they are read.
		sh(t, d, id, "dd if=/dev/zero of=/shrinks bs=1M count=64 2>/dev/null; cp /shrinks /grows")
		for name, script := range map[string]string{"shrinks": ": >/shrinks", "grows": "cat /etc/passwd >>/grows"} {
			body, entry, err := connect(t, d).GetFile(t.Context(), id, "/"+name)
			if err != nil {
				t.Fatal(err)
			}
			n, _ := io.CopyN(io.Discard, body, 1000)
			sh(t, d, id, script)
			rest, err := io.Copy(io.Discard, body)
			_ = body.Close()
			if entry.Size != 64<<20 || err == nil && name == "grows" && n+rest < 64<<20 {
				t.Errorf("%s: entry %+v, %d bytes, %v", name, entry, n+rest, err)
			}
			t.Logf("a file that %s: %d bytes, %v", name, n+rest, err)
		}
	})
}

// TestFilesSilence: a client that sends or takes nothing for a minute is cut, and leaves nothing.
func TestFilesSilence(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, "mkdir /up; dd if=/dev/zero of=/big bs=1M count=64 2>/dev/null")
		var wg sync.WaitGroup
		for _, request := range []string{
			"PUT /v0/sandboxes/" + id + "/files?path=/up/file HTTP/1.1\r\nHost: shard\r\nContent-Length: 10\r\n\r\nabc",
			"PUT /v0/sandboxes/" + id + "/archive?path=/up HTTP/1.1\r\nHost: shard\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n",
		} {
			wg.Go(func() {
				a := exchange(t, dialDaemon(t, d), request)
				if got := a.code(t); got != shard.CodeTimeout {
					t.Errorf("%.40q: %s", request, a.Body)
				}
			})
		}
		wg.Go(func() {
			conn := dialDaemon(t, d)
			_, _ = io.WriteString(conn, "GET /v0/sandboxes/"+id+"/files?path=/big HTTP/1.1\r\nHost: shard\r\n\r\n")
			time.Sleep(70 * time.Second)
			resp, err := http.ReadResponse(bufio.NewReader(conn), nil)
			if err != nil {
				t.Errorf("the silent reader: %v", err)
				return
			}
			if n, err := io.Copy(io.Discard, resp.Body); err == nil {
				t.Errorf("the silent reader got all %d bytes", n)
			}
		})
		wg.Wait()
		if got := sh(t, d, id, "ls -A /up"); got != "" {
			t.Errorf("left: %q", got)
		}
	}, "runc")
}

// TestFilesKinds: the routes on everything that is not a plain file, by name of what it is.
func TestFilesKinds(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, `mkdir -p /k/dir/sub; mkfifo /k/fifo; echo x >/k/file; chmod 640 /k/file; ln -s file /k/link; ln -s dir /k/dirlink; ln -s nowhere /k/dangling; cd /k/dir; touch b B a .h 10 9`)
		at := func(method, route, query string) answer {
			return call(t, d, method, "/v0/sandboxes/"+id+"/"+route+"?"+query, nil)
		}
		for path, words := range map[string][]string{"/k/dir": {"directory"}, "/k/dirlink": {"directory"}, "/k/fifo": {"fifo", "pipe"}, "/dev/null": {"device"}} {
			a := at("GET", "files", "path="+path)
			if got := a.code(t); got != shard.CodeInvalidRequest {
				t.Errorf("read %s: %s", path, got)
			}
			named := false
			for _, w := range words {
				named = named || strings.Contains(strings.ToLower(string(a.Body)), w)
			}
			if !named {
				t.Errorf("read %s: the message does not say what it is: %s", path, a.Body)
			}
		}
		for path, want := range map[string]string{"/k/file": `"type":"file","size":2,"mode":416,"uid":0,"gid":0`, "/k/link": `"type":"symlink"`, "/k/dir": `"type":"dir"`, "/k/fifo": `"type":"other"`} {
			a := at("HEAD", "files", "path="+path)
			var stat map[string]any
			if err := json.Unmarshal([]byte(a.Header.Get("X-Shard-Stat")), &stat); err != nil || len(stat) != 6 || a.Status != 200 || len(a.Body) != 0 || !strings.Contains(a.Header.Get("X-Shard-Stat"), want) {
				t.Errorf("HEAD %s: %d %q %v", path, a.Status, a.Header.Get("X-Shard-Stat"), err)
			}
		}
		if a := at("HEAD", "files", "path=/k/none"); a.Status != 404 || len(a.Body) != 0 {
			t.Errorf("HEAD of nothing: %d", a.Status)
		}
		if a := at("GET", "files", "path=/k/link"); a.Status != 200 || string(a.Body) != "x\n" || !strings.Contains(a.Header.Get("X-Shard-Stat"), `"type":"file"`) {
			t.Errorf("read through a link: %d %q %s", a.Status, a.Body, a.Header.Get("X-Shard-Stat"))
		}
		list := decode[struct {
			Entries []shard.FileEntry `json:"entries"`
		}](t, at("GET", "ls", "path=/k/dirlink"), 200)
		var names []string
		for _, e := range list.Entries {
			names = append(names, e.Name)
		}
		if got := strings.Join(names, " "); got != ".h 10 9 B a b sub" {
			t.Errorf("the list through a link: %q", got)
		}
		for path, want := range map[string]shard.Code{"/k/none": shard.CodeNotFound, "/k/file": shard.CodeInvalidRequest, "/k/dangling": shard.CodeNotFound} {
			if got := at("GET", "ls", "path="+path).code(t); got != want {
				t.Errorf("list %s: %s, want %s", path, got, want)
			}
		}
		if a := at("GET", "ls", "path=/k/dir/sub"); string(a.Body) != `{"entries":[]}`+"\n" {
			t.Errorf("an empty list: %q", a.Body)
		}
		type req map[string]any
		for what, c := range map[string]struct {
			body req
			want int
		}{
			"new":                      {req{"path": "/k/m", "mode": "777"}, 204},
			"exists":                   {req{"path": "/k/m"}, 400},
			"exists, with parents":     {req{"path": "/k/dir", "parents": true}, 204},
			"a file, with parents":     {req{"path": "/k/file", "parents": true}, 400},
			"below a file":             {req{"path": "/k/file/x", "parents": true}, 400},
			"no parent":                {req{"path": "/k/no/no"}, 404},
			"a mode beyond permission": {req{"path": "/k/x", "mode": "1777"}, 400},
			"a mode that is a number":  {req{"path": "/k/x", "mode": 493}, 400},
			"no path":                  {req{}, 400},
			"an unknown field":         {req{"path": "/k/x", "recursive": true}, 400},
		} {
			if what == "exists" {
				continue // behind "new", whatever the order
			}
			if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/mkdir", c.body); a.Status != c.want {
				t.Errorf("mkdir, %s: %d %s", what, a.Status, a.Body)
			}
		}
		if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/mkdir", req{"path": "/k/m"}); a.Status != 400 || sh(t, d, id, "stat -c %a /k/m") != "777" {
			t.Errorf("mkdir of what exists: %d %s", a.Status, a.Body)
		}
		for query, want := range map[string]int{"path=/k/dir": 400, "path=/k/none": 404, "path=/&recursive=true": 400, "path=/k/file/x": 404} {
			if a := at("DELETE", "files", query); a.Status != want && !(query == "path=/k/file/x" && a.Status == 400) {
				t.Errorf("DELETE %s: %d %s, want %d", query, a.Status, a.Body, want)
			}
		}
		for _, query := range []string{"path=/k/dirlink", "path=/k/dangling", "path=/k/fifo", "path=/k/dir&recursive=true"} {
			if a := at("DELETE", "files", query); a.Status != 204 || len(a.Body) != 0 {
				t.Errorf("DELETE %s: %d %s", query, a.Status, a.Body)
			}
			if query == "path=/k/dirlink" {
				sh(t, d, id, "test -d /k/dir/sub && ! test -L /k/dirlink")
			}
		}
		if got := sh(t, d, id, "ls /k"); got != "file\nlink\nm" {
			t.Errorf("in the end: %q", got)
		}
	})
}

// TestFilesArchive: what an upload and a download keep, and in which order.
func TestFilesArchive(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--user", "dev")
		sh(t, d, id, "mkdir -p /tmp/t/kept; chmod 700 /tmp/t/kept; touch /tmp/t/kept/before")
		var buf bytes.Buffer
		w := tar.NewWriter(&buf)
		for _, h := range []tar.Header{
			{Name: "kept/", Typeflag: tar.TypeDir, Mode: 0o755},
			{Name: "locked/", Typeflag: tar.TypeDir, Mode: 0o555, Uid: 7},
			{Name: "locked/file", Typeflag: tar.TypeReg, Mode: 0o644, Uid: 7, Gid: 7, Size: 3},
			{Name: "deep/er/file", Typeflag: tar.TypeReg, Mode: 0o600, Size: 3},
			{Name: "link", Typeflag: tar.TypeSymlink, Linkname: "/etc/passwd", Mode: 0o777},
			{Name: "hard", Typeflag: tar.TypeLink, Linkname: "deep/er/file", Mode: 0o600},
		} {
			if err := w.WriteHeader(&h); err != nil {
				t.Fatal(err)
			}
			if h.Size > 0 {
				_, _ = w.Write([]byte("abc"))
			}
		}
		_ = w.Close()
		if a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/tmp/t", buf.Bytes(), "Content-Type", "application/x-tar"); a.Status != 204 {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		if got := sh(t, d, id, "cd /tmp/t; stat -c '%n %a %U' kept kept/before locked locked/file deep/er/file; readlink link; stat -c %h hard"); got !=
			"kept 700 dev\nkept/before 644 dev\nlocked 555 dev\nlocked/file 644 dev\ndeep/er/file 600 dev\n/etc/passwd\n2" {
			t.Errorf("in the sandbox: %q", got)
		}
		a := call(t, d, "GET", "/v0/sandboxes/"+id+"/archive?path=/tmp/t", nil)
		if a.Status != 200 || a.Header.Get("Content-Type") != "application/x-tar" || !strings.Contains(a.Header.Get("X-Shard-Stat"), `"type":"dir"`) {
			t.Errorf("%d %v", a.Status, a.Header)
		}
		var names []string
		r := tar.NewReader(bytes.NewReader(a.Body))
		for {
			h, err := r.Next()
			if err == io.EOF {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			names = append(names, h.Name)
		}
		if got := strings.Join(names, " "); got != "t/ t/deep/ t/deep/er/ t/deep/er/file t/hard t/kept/ t/kept/before t/link t/locked/ t/locked/file" {
			t.Errorf("the archive holds %q", got)
		}
		for query, want := range map[string]shard.Code{"path=/": shard.CodeInvalidRequest, "path=/tmp/none": shard.CodeNotFound} {
			if got := call(t, d, "GET", "/v0/sandboxes/"+id+"/archive?"+query, nil).code(t); got != want {
				t.Errorf("%s: %s, want %s", query, got, want)
			}
		}
		if a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/tmp/new", buf.Bytes()); a.Status != 204 || sh(t, d, id, "cat /tmp/new/locked/file") != "abc" {
			t.Errorf("into a directory that is to be made: %d %s", a.Status, a.Body)
		}
	})
}

// TestFilesSwap: a guest that swaps links under every route. What the host has at the same paths is not touched and not
// read.
func TestFilesSwap(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		canary := t.TempDir()
		if err := os.WriteFile(filepath.Join(canary, "x"), []byte("CANARY of the host"), 0o600); err != nil {
			t.Fatal(err)
		}
		// Links to the canary's path, absolute and by way of any number of "..", take turns with a real directory.
		sh(t, d, id, fmt.Sprintf(`mkdir -p /s/real /s/other; echo inside >/s/real/x; echo inside >/s/other/x; cd /s
(while [ ! -e /stop ]; do ln -sfn %[1]s d; ln -sfn ../../../../../../../../..%[1]s d; ln -sfn /proc/1/root%[1]s d; ln -sfn /proc/self/cwd d; rm d; mv real d; mv d real; ln -sfn other d; done) >/dev/null 2>&1 &`, canary))
		var wg sync.WaitGroup
		ends := time.Now().Add(8 * time.Second)
		q := url.QueryEscape("/s/d/x")
		archive := func() []byte {
			var buf bytes.Buffer
			w := tar.NewWriter(&buf)
			_ = w.WriteHeader(&tar.Header{Name: "x", Typeflag: tar.TypeReg, Mode: 0o644, Size: 3})
			_, _ = w.Write([]byte("tar"))
			_ = w.Close()
			return buf.Bytes()
		}()
		for name, op := range map[string]func() []byte{
			"put": func() []byte {
				_ = c.PutFile(t.Context(), id, "/s/d/x", strings.NewReader("put"), 3, client.WriteOptions{Parents: true})
				return nil
			},
			"get":    func() []byte { return call(t, d, "GET", "/v0/sandboxes/"+id+"/files?path="+q, nil).Body },
			"stat":   func() []byte { return call(t, d, "HEAD", "/v0/sandboxes/"+id+"/files?path="+q, nil).Body },
			"ls":     func() []byte { return call(t, d, "GET", "/v0/sandboxes/"+id+"/ls?path=/s/d", nil).Body },
			"remove": func() []byte { return call(t, d, "DELETE", "/v0/sandboxes/"+id+"/files?path="+q, nil).Body },
			"remove all": func() []byte {
				return call(t, d, "DELETE", "/v0/sandboxes/"+id+"/files?recursive=true&path=/s/d/sub", nil).Body
			},
			"mkdir": func() []byte {
				return call(t, d, "POST", "/v0/sandboxes/"+id+"/mkdir", map[string]any{"path": "/s/d/sub/a", "parents": true}).Body
			},
			"put archive": func() []byte { return call(t, d, "PUT", "/v0/sandboxes/"+id+"/archive?path=/s/d", archive).Body },
			"cp out": func() []byte {
				req, _ := http.NewRequestWithContext(t.Context(), "GET", "http://shard/v0/sandboxes/"+id+"/archive?path=/s/d", nil)
				resp, err := rawHTTP(d).Do(req)
				if err != nil {
					return nil
				}
				defer func() { _ = resp.Body.Close() }()
				body, _ := io.ReadAll(io.LimitReader(resp.Body, 4<<20)) // it may be all of /
				return body
			},
		} {
			wg.Go(func() {
				for n := 0; time.Now().Before(ends); n++ {
					if body := op(); bytes.Contains(body, []byte("CANARY")) {
						t.Errorf("%s: the host's file came out: %.80q", name, body)
						return
					}
				}
			})
		}
		wg.Wait()
		sh(t, d, id, "touch /stop")
		entries, err := os.ReadDir(canary)
		if err != nil || len(entries) != 1 {
			t.Errorf("the host's directory: %v, %v", entries, err)
		}
		if got, err := os.ReadFile(filepath.Join(canary, "x")); err != nil || string(got) != "CANARY of the host" {
			t.Errorf("the host's file: %q, %v", got, err)
		}
		if got := call(t, d, "GET", "/v0/sandboxes/"+id+"/files?path=/etc/hostname", nil).Status; got != 200 {
			t.Errorf("afterwards: %d", got)
		}
	})
}

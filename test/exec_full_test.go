package test

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"hash"
	"io"
	"math/rand/v2"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

type execList struct {
	Execs []shard.Exec `json:"execs"`
	Next  *string      `json:"next"`
}

func execs(t *testing.T, d *testenv.Daemon, box, query string) execList {
	t.Helper()
	return decode[execList](t, call(t, d, "GET", "/v0/sandboxes/"+box+"/exec"+query, nil), 200)
}

// TestExecCodes: every refusal of the routes of commands, and what they answer when they do not refuse.
func TestExecCodes(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		base := "/v0/sandboxes/" + id + "/exec"
		running := run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}})
		tty := run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}, TTY: true})
		ended := run(t, d, id, shard.ExecRequest{Command: script("exit 9"), TTY: true})
		if rec := finished(t, d, id, ended); rec.State != shard.ExecExited || *rec.ExitStatus != (shard.ExitStatus{Code: 9}) || rec.ExitedAt == nil || rec.Truncated || rec.LostBytes != 0 {
			t.Errorf("the record of an ended command: %+v", rec)
		}
		raw := call(t, d, "GET", base+"/"+running, nil).Body
		for _, field := range []string{`"exec":`, `"sandbox":"` + id + `"`, `"command":["sleep","600"]`, `"state":"running"`, `"exit_status":null`, `"started_at":`, `"exited_at":null`, `"truncated":false`, `"lost_bytes":0`} {
			if !bytes.Contains(raw, []byte(field)) {
				t.Errorf("the record lacks %s: %s", field, raw)
			}
		}
		none := "/0123456789abcdef"
		for what, c := range map[string]struct {
			method, path string
			body         any
			want         shard.Code
		}{
			"read an unknown one":       {"GET", none, nil, shard.CodeNotFound},
			"delete an unknown one":     {"DELETE", none, nil, shard.CodeNotFound},
			"kill an unknown one":       {"POST", none + "/kill", nil, shard.CodeNotFound},
			"resize an unknown one":     {"POST", none + "/resize", nil, shard.CodeNotFound},
			"delete a running one":      {"DELETE", "/" + running, nil, shard.CodeExecRunning},
			"kill an ended one":         {"POST", "/" + ended + "/kill", nil, shard.CodeExecExited},
			"kill with another signal":  {"POST", "/" + running + "/kill", map[string]any{"signal": "HUP"}, shard.CodeInvalidRequest},
			"kill with a number":        {"POST", "/" + running + "/kill", map[string]any{"signal": 9}, shard.CodeInvalidRequest},
			"kill with a field":         {"POST", "/" + running + "/kill", map[string]any{"force": true}, shard.CodeInvalidRequest},
			"resize without a terminal": {"POST", "/" + running + "/resize", shard.Size{Rows: 1, Cols: 1}, shard.CodeNotFound},
			"resize an ended one":       {"POST", "/" + ended + "/resize", shard.Size{Rows: 1, Cols: 1}, shard.CodeNotFound},
			"resize beyond":             {"POST", "/" + tty + "/resize", map[string]any{"rows": 65536, "cols": 1}, shard.CodeInvalidRequest},
			"wait with a word":          {"GET", "/" + running + "?wait=yes", nil, shard.CodeInvalidRequest},
			"an unknown parameter":      {"GET", "/" + running + "?follow=true", nil, shard.CodeInvalidRequest},
			"a bad limit":               {"GET", "?limit=0", nil, shard.CodeInvalidRequest},
			"a bad cursor":              {"GET", "?cursor=%25", nil, shard.CodeInvalidRequest},
			"a program that is missing": {"POST", "", map[string]any{"command": []string{"nosuch"}}, shard.CodeCommandNotStarted},
			"a workdir that is missing": {"POST", "", map[string]any{"command": []string{"true"}, "workdir": "/nosuch"}, shard.CodeCommandNotStarted},
			"an unknown user":           {"POST", "", map[string]any{"command": []string{"true"}, "user": "nosuch"}, shard.CodeInvalidRequest},
			"an unknown field":          {"POST", "", map[string]any{"command": []string{"true"}, "timeout": 5}, shard.CodeInvalidRequest},
			"a size beyond":             {"POST", "", map[string]any{"command": []string{"true"}, "tty": true, "size": map[string]any{"rows": -1, "cols": 1}}, shard.CodeInvalidRequest},
			"too large a body":          {"POST", "", map[string]any{"command": []string{"true", strings.Repeat("x", 1<<20)}}, shard.CodeBodyTooLarge},
		} {
			if got := call(t, d, c.method, base+c.path, c.body).code(t); got != c.want {
				t.Errorf("%s: %s, want %s", what, got, c.want)
			}
		}
		for command, code := range map[string]string{"nosuch": "127", "/etc/passwd": "126", "/etc": "126"} {
			if a := call(t, d, "POST", base, map[string]any{"command": []string{command}}); !strings.Contains(string(a.Body), `"exit_code":`+code) {
				t.Errorf("%s: %s, want exit code %s", command, a.Body, code)
			}
		}
		if n := len(execs(t, d, id, "").Execs); n != 3 {
			t.Errorf("%d commands are listed, want 3: what never started has no record", n)
		}
		for _, c := range [][2]string{{"POST", "/" + tty + "/resize"}, {"POST", "/" + running + "/kill"}, {"DELETE", "/" + ended}} {
			if a := call(t, d, c[0], base+c[1], nil); a.Status != 204 || len(a.Body) != 0 {
				t.Errorf("%s %s: %d %s", c[0], c[1], a.Status, a.Body)
			}
		}
		if got := call(t, d, "GET", base+"/"+ended, nil).code(t); got != shard.CodeNotFound {
			t.Errorf("a deleted one: %s", got)
		}
		if rec := finished(t, d, id, running); *rec.ExitStatus != (shard.ExitStatus{Code: 143}) {
			t.Errorf("after TERM: %+v", rec.ExitStatus)
		}
		// Pages: every command once, in the order of the ids, whatever is deleted between two.
		for range 6 {
			finished(t, d, id, run(t, d, id, shard.ExecRequest{Command: []string{"true"}}))
		}
		want := execs(t, d, id, "").Execs
		var got []string
		for query := "?limit=3"; ; {
			page := execs(t, d, id, query)
			for _, e := range page.Execs {
				got = append(got, e.ID)
			}
			if page.Next == nil {
				break
			}
			if len(page.Execs) != 3 {
				t.Errorf("a page of %d", len(page.Execs))
			}
			if last := got[len(got)-1]; last != tty {
				call(t, d, "DELETE", base+"/"+last, nil)
			}
			query = "?limit=3&cursor=" + *page.Next
		}
		var ids []string
		for _, e := range want {
			ids = append(ids, e.ID)
		}
		if !slices.Equal(got, ids) || !slices.IsSorted(got) {
			t.Errorf("the pages give %v, want %v", got, ids)
		}
		// Nothing of it works in a sandbox that does not run.
		d.Must("stop", id)
		for _, method := range []string{"GET", "POST"} {
			if got := call(t, d, method, base, map[string]any{"command": []string{"true"}}).code(t); got != shard.CodeSandboxNotRunning {
				t.Errorf("%s in a stopped sandbox: %s", method, got)
			}
		}
		if left, _ := filepath.Glob(filepath.Join(d.Root, "sandboxes", id, "execs", "*")); len(left) != 0 {
			t.Errorf("after the stop there are %v", left)
		}
	})
}

// TestExecWait: `wait` holds until the end, and ends with an error when the sandbox does.
func TestExecWait(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		exec := run(t, d, id, shard.ExecRequest{Command: script("read x; exit 3"), Stdin: true})
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if rec := finished(t, d, id, exec); rec.ExitStatus == nil || rec.ExitStatus.Code != 3 {
					t.Errorf("%+v", rec)
				}
			})
		}
		s := open(t, d, id, exec)
		s.message("\x00\n")
		wg.Wait()
		exec = run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}})
		answers := make(chan answer, 1)
		go func() { answers <- call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec+"?wait=true", nil) }()
		time.Sleep(300 * time.Millisecond)
		d.Must("remove", "--force", id)
		if got := (<-answers).code(t); got != shard.CodeSandboxNotRunning && got != shard.CodeNotFound {
			t.Errorf("when the sandbox ends: %s", got)
		}
	}, "runc")
}

// TestExecKept: of ended commands the 32 that ended last are kept, but not at the cost of one that a client is to read.
func TestExecKept(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		early := run(t, d, id, shard.ExecRequest{Command: script("read x; exit 1"), Stdin: true}) // begins first, ends last
		wanted := run(t, d, id, shard.ExecRequest{Command: script("echo wanted"), Attach: true})
		var ids []string
		for range 40 {
			exec := run(t, d, id, shard.ExecRequest{Command: []string{"true"}})
			finished(t, d, id, exec)
			ids = append(ids, exec)
		}
		s := open(t, d, id, early)
		s.message("\x00\n")
		s.all()
		testenv.Eventually(t, "the oldest are gone", func() (bool, string) {
			list := execs(t, d, id, "").Execs
			return len(list) == 33, fmt.Sprint(len(list))
		})
		for i, exec := range append(ids, early) {
			a := call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec, nil)
			if want := i >= len(ids)-31; (a.Status == 200) != want {
				t.Errorf("command %d: %d, kept should be %t", i, a.Status, want)
			}
		}
		if out, last, _ := open(t, d, id, wanted).all(); out[1] != "wanted\n" || !strings.HasPrefix(last, "\x03") {
			t.Errorf("the command that waits for its client: %q %q", out, last)
		}
		testenv.Eventually(t, "then it goes too", func() (bool, string) {
			left, _ := filepath.Glob(filepath.Join(d.Root, "sandboxes", id, "execs", "*"))
			return len(left) == 32, fmt.Sprint(len(left))
		})
	}, "runc")
}

// TestExecHangup: a client that hangs up while a command starts leaves a command that is listed, or none.
func TestExecHangup(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for i := range 24 {
			conn, err := net.Dial("unix", filepath.Join(d.Root, "shard.sock"))
			if err != nil {
				t.Fatal(err)
			}
			body := `{"command":["sleep","600"]}`
			_, _ = fmt.Fprintf(conn, "POST /v0/sandboxes/%s/exec HTTP/1.1\r\nHost: shard\r\nContent-Length: %d\r\n\r\n%s", id, len(body), body)
			time.Sleep(time.Duration(i%8) * 500 * time.Microsecond)
			_ = conn.Close()
		}
		testenv.Eventually(t, "every command that runs is listed", func() (bool, string) {
			listed := 0
			for _, e := range execs(t, d, id, "").Execs { // those that looked before have ended
				if e.State == shard.ExecRunning {
					listed++
				}
			}
			runs := sh(t, d, id, "ps | grep -c '[s]leep 600' || true")
			return runs == strconv.Itoa(listed), fmt.Sprintf("%s run, %d are listed", runs, listed)
		})
	})
}

// numbers is what a program wrote of lines of 8 bytes that count up from 1000000: each byte's place is known.
const numbersFrom = 1_000_000

// place is where in that output a piece begins that holds a whole line.
func place(piece string) (int, bool) {
	at := strings.IndexByte(piece, '\n') + 1
	if at == 0 || len(piece) < at+8 {
		return 0, false
	}
	n, err := strconv.Atoi(piece[at : at+7])
	return (n-numbersFrom)*8 - at, err == nil && piece[at+7] == '\n'
}

// TestExecLost: what clients received and what is counted as lost is all that was written, when clients come, read what
// there is, and vanish.
func TestExecLost(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		rnd := rand.New(rand.NewPCG(3, 9))
		var program strings.Builder
		total, phases := 0, 7
		for i := range phases {
			lines := []int{200_000, 60_000, 1_300_000, 1_900_000}[rnd.IntN(4)]
			fmt.Fprintf(&program, "seq %d %d; touch /wrote%d; while [ ! -e /go%d ]; do sleep 0.1; done\n", numbersFrom+total, numbersFrom+total+lines-1, i, i)
			total += lines
		}
		written := total * 8
		exec := run(t, d, id, shard.ExecRequest{Command: script(program.String())})
		seen := make([]bool, total) // lines
		note := func(piece string) {
			at, ok := place(piece)
			if !ok {
				t.Fatalf("%d bytes that are not of the output: %.40q", len(piece), piece)
			}
			for i, b := range []byte(piece) {
				if (at+i)%8 == 7 { // a line is seen with its end
					if b != '\n' {
						t.Fatalf("byte %d is %q", at+i, b)
					}
					seen[(at+i)/8] = true
				}
			}
		}
		for i := range phases {
			attached := i%2 == 1
			wrote := func() {
				testenv.Eventually(t, "the program comes to a halt", func() (bool, string) {
					r := d.Shard("exec", id, "test", "-e", fmt.Sprintf("/wrote%d", i))
					return r.Code == 0, r.Stderr
				})
			}
			if !attached {
				wrote()
				if i == 0 { // a client that comes late, and reads all that there is
					s := open(t, d, id, exec)
					for got := 0; got < min(total*8, 200_000*8) && got < 1<<20; {
						_, p, err := s.frame()
						if err != nil {
							t.Fatal(err)
						}
						note(string(p[1:]))
						got += len(p) - 1
					}
					// It read a part, and leaves: exact only when nothing is under way, so it takes the rest too.
					_ = s.conn.SetReadDeadline(time.Now().Add(2 * time.Second))
					for {
						_, p, err := s.frame()
						if err != nil {
							break
						}
						note(string(p[1:]))
					}
					_ = s.conn.Close()
				}
			} else {
				s := open(t, d, id, exec)
				ended := make(chan struct{})
				go func() { // it reads while the program writes
					defer close(ended)
					for {
						_, p, err := s.frame()
						if err != nil {
							return
						}
						note(string(p[1:]))
					}
				}()
				wrote()
				_ = s.conn.SetReadDeadline(time.Now().Add(2 * time.Second)) // by then it has read all
				<-ended
				_ = s.conn.Close()
			}
			sh(t, d, id, fmt.Sprintf("touch /go%d", i))
		}
		rec := finished(t, d, id, exec)
		out, last, _ := open(t, d, id, exec).all()
		note(out[1])
		received := 0
		for _, s := range seen {
			if s {
				received += 8
			}
		}
		// A replay may begin inside a line.
		if got := int64(received) + rec.LostBytes; got < int64(written-8) || got > int64(written) {
			t.Errorf("received %d + lost %d = %d, written %d", received, rec.LostBytes, got, written)
		}
		if rec.Truncated != (rec.LostBytes > 0) || !strings.Contains(last, fmt.Sprintf(`"lost_bytes":%d`, rec.LostBytes)) && rec.LostBytes > 0 {
			t.Errorf("%q, %+v", last, rec)
		}
		t.Logf("written %d, received %d, lost %d", written, received, rec.LostBytes)
	})
}

// TestExecVanish: clients that go away in the middle of a flood. What they may not have read counts as lost, so that
// nothing is missing uncounted; and a client that reads slowly gets every byte.
func TestExecVanish(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		const lines = 6_000_000
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"seq", strconv.Itoa(numbersFrom), strconv.Itoa(numbersFrom + lines - 1)}, Attach: true})
		seen := make([]bool, lines)
		rnd := rand.New(rand.NewPCG(5, 5))
		vanished := 0
		for ; ; vanished++ {
			s := open(t, d, id, exec)
			over := false
			for left := rnd.IntN(12 << 20); left > 0 && !over; {
				_, p, err := s.frame()
				if err != nil {
					t.Fatal(err)
				}
				if p[0] == 3 {
					over = true
					break
				}
				if at, ok := place(string(p[1:])); ok {
					for i := range p[1:] {
						if (at+i)%8 == 7 {
							seen[(at+i)/8] = true
						}
					}
				}
				left -= len(p) - 1
			}
			_ = s.conn.Close()
			if over {
				break
			}
			time.Sleep(time.Duration(rnd.IntN(60)) * time.Millisecond)
		}
		rec := finished(t, d, id, exec)
		received := 0
		for _, s := range seen {
			if s {
				received += 8
			}
		}
		const inTheSocket = 1 << 20 // that the kernel may hold for one client, with room
		sum, written := int64(received)+rec.LostBytes, int64(lines*8)
		if sum < written-16*int64(vanished+1) || sum > written+int64(vanished)*inTheSocket {
			t.Errorf("received %d + lost %d = %d, written %d, %d clients vanished", received, rec.LostBytes, sum, written, vanished)
		}
		t.Logf("received %d + lost %d = written %d%+d; %d clients vanished", received, rec.LostBytes, written, sum-written, vanished)
	})
}

// TestExecThousand: a thousand short commands, eight at a time: every byte of both streams and every exit code.
func TestExecThousand(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		var next atomic.Int64
		var wg sync.WaitGroup
		for range 8 {
			wg.Go(func() {
				for i := int(next.Add(1)); i <= 1000 && !t.Failed(); i = int(next.Add(1)) {
					n := i * 37 % 3000
					out, err := digest(n, "o"), digest(n/2, "e")
					req := shard.ExecRequest{Command: script(fmt.Sprintf("seq %d | sed s/^/o/; seq %d | sed s/^/e/ >&2; exit %d", n, n/2, i%256))}
					_, s, e := c.Run(t.Context(), id, req)
					if e != nil {
						t.Errorf("command %d: %v", i, e)
						return
					}
					gotOut, gotErr := sha256.New(), sha256.New()
					exit, e := s.Copy(gotOut, gotErr)
					_ = s.Close()
					switch {
					case e != nil:
						t.Errorf("command %d: %v", i, e)
					case exit.Code != i%256 || exit.LostBytes != 0:
						t.Errorf("command %d: %+v", i, exit)
					case !same(gotOut, out) || !same(gotErr, err):
						t.Errorf("command %d: other bytes", i)
					}
				}
			})
		}
		wg.Wait()
		if r := d.Shard("exec", id, "ps"); strings.Count(r.Stdout, "seq") != 0 {
			t.Errorf("left behind: %s", r.Stdout)
		}
	})
}

func digest(n int, prefix string) hash.Hash {
	h := sha256.New()
	for i := 1; i <= n; i++ {
		_, _ = fmt.Fprintf(h, "%s%d\n", prefix, i)
	}
	return h
}

func same(a, b hash.Hash) bool { return bytes.Equal(a.Sum(nil), b.Sum(nil)) }

// TestExecHundred: a hundred commands at once in one sandbox: those beyond the limit are told so, come again, and none
// is lost.
func TestExecHundred(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		var refusals atomic.Int64
		var wg sync.WaitGroup
		for i := range 100 {
			wg.Go(func() {
				for {
					e, err := c.Exec(t.Context(), id, shard.ExecRequest{Attach: true, Command: script(fmt.Sprintf("seq %d; sleep 0.2; exit %d", 20_000+i, i))})
					if shard.CodeOf(err) == shard.CodeExecLimit {
						refusals.Add(1)
						time.Sleep(50 * time.Millisecond)
						continue
					}
					if err != nil {
						t.Errorf("command %d: %v", i, err)
						return
					}
					s, err := c.Attach(t.Context(), id, e.ID)
					if err != nil {
						t.Errorf("command %d: attach: %v", i, err)
						return
					}
					got := sha256.New()
					exit, err := s.Copy(got, io.Discard)
					_ = s.Close()
					if err != nil || exit.Code != i || exit.LostBytes != 0 || !same(got, digest(20_000+i, "")) {
						t.Errorf("command %d: %+v, %v", i, exit, err)
					}
					return
				}
			})
		}
		wg.Wait()
		t.Logf("%d were told to come again", refusals.Load())
	})
}

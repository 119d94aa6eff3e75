package test

import (
	"fmt"
	"io"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// terminal is a person at a terminal in which a command line runs.
type terminal struct {
	t   *testing.T
	cmd *exec.Cmd
	io.ReadWriteCloser
	mu   sync.Mutex
	seen strings.Builder
	from int // what was expected so far ends here
}

func newTerminal(t *testing.T, cmd *exec.Cmd) *terminal {
	t.Helper()
	f, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 31, Cols: 99})
	if err != nil {
		t.Fatal(err)
	}
	p := &terminal{t: t, cmd: cmd, ReadWriteCloser: f}
	t.Cleanup(func() { _ = f.Close(); _ = cmd.Process.Kill() })
	go func() {
		buf := make([]byte, 4096)
		for {
			n, err := f.Read(buf)
			p.mu.Lock()
			p.seen.Write(buf[:n])
			p.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	return p
}

func (p *terminal) say(s string) { _, _ = io.WriteString(p, s) }

// expect waits for a text behind the last expected one.
func (p *terminal) expect(what string) {
	p.t.Helper()
	testenv.Eventually(p.t, "the terminal shows "+what, func() (bool, string) {
		p.mu.Lock()
		defer p.mu.Unlock()
		rest := p.seen.String()[p.from:]
		at := strings.Index(rest, what)
		if at < 0 {
			return false, fmt.Sprintf("%q", rest)
		}
		p.from += at + len(what)
		return true, ""
	})
}

// ends waits for the end of the command line.
func (p *terminal) ends() int {
	p.t.Helper()
	ended := make(chan struct{})
	go func() { _ = p.cmd.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(time.Minute):
		p.mu.Lock()
		defer p.mu.Unlock()
		p.t.Fatalf("the command line does not end: %q", p.seen.String()[p.from:])
	}
	return p.cmd.ProcessState.ExitCode()
}

// TestTerminalSize: the size is right from the first read, however often one tries, and a change arrives once.
func TestTerminalSize(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for i := range 50 {
			exec := run(t, d, id, shard.ExecRequest{Command: []string{"stty", "size"}, TTY: true, Attach: true, Size: &shard.Size{Rows: 40, Cols: 120}})
			if out, last, _ := open(t, d, id, exec).all(); out[1] != "40 120\r\n" || out[2] != "" || last != "\x03"+`{"code":0,"signal":0}` {
				t.Fatalf("run %d: %q %q", i, out, last)
			}
		}
		exec := run(t, d, id, shard.ExecRequest{Command: script(`trap 'echo "winch $(stty size)"' WINCH; stty size; while [ ! -e /stop ]; do sleep 0.1; done`), TTY: true,
			Size: &shard.Size{Rows: 40, Cols: 120}})
		s := open(t, d, id, exec)
		if _, p, err := s.frame(); err != nil || string(p) != "\x0140 120\r\n" {
			t.Fatalf("%q, %v", p, err)
		}
		if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/exec/"+exec+"/resize", shard.Size{Rows: 50, Cols: 200}); a.Status != 204 {
			t.Fatalf("%d %s", a.Status, a.Body)
		}
		if _, p, err := s.frame(); err != nil || string(p) != "\x01winch 50 200\r\n" {
			t.Errorf("%q, %v", p, err)
		}
		time.Sleep(time.Second)
		sh(t, d, id, "touch /stop")
		if out, last, _ := s.all(); out[1] != "" || last != "\x03"+`{"code":0,"signal":0}` {
			t.Errorf("behind the one change: %q %q", out, last)
		}
	})
}

// TestTerminalJobs: a shell in a terminal has job control, and Ctrl+C, Ctrl+Z and Ctrl+D do what they do.
func TestTerminalJobs(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		if provider == "runc" { // its terminals are the host's, of which there are some thousands
			sh(t, d, id, "grep ' /dev/pts devpts .*max=256' /proc/mounts")
		}
		for _, args := range [][]string{{"exec", "-i", "-t", id, "sh"}, {"shell", id}} {
			p := newTerminal(t, d.Command(args...))
			p.say("echo ready$((1+1)); stty size; tty\n")
			p.expect("ready2")
			p.expect("31 99")
			p.expect("/dev/pts/")
			p.say("sleep 321\n")
			testenv.Eventually(t, "the program runs", func() (bool, string) {
				r := d.Shard("exec", id, "ps")
				return strings.Contains(r.Stdout, "sleep 321"), r.Stdout
			})
			p.say("\x1a") // Ctrl+Z
			p.expect("Stopped")
			p.say("jobs | wc -l | sed s/^/jobs/; fg\n")
			p.expect("jobs1")
			p.expect("sleep 321")
			time.Sleep(300 * time.Millisecond)
			p.say("\x03") // Ctrl+C
			p.say("echo after$? survived$((2+2))\n")
			p.expect("after130 survived4")
			if r := d.Shard("exec", id, "ps"); strings.Contains(r.Stdout, "sleep 321") {
				t.Errorf("%s: the interrupted program runs on: %s", args[0], r.Stdout)
			}
			p.say("cat | tr a-z A-Z\n")
			time.Sleep(300 * time.Millisecond)
			p.say("upper\n\x04") // Ctrl+D
			p.expect("UPPER")
			p.say("sleep 322 & echo background$((3+3))\n")
			p.expect("background6")
			p.say("kill %1; exit 11\n")
			if code := p.ends(); code != 11 {
				t.Errorf("%s: exit code %d", args[0], code)
			}
		}
		// A terminal that goes away detaches; the shell runs on and can be had again.
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"sh"}, TTY: true, Stdin: true})
		s := open(t, d, id, exec)
		s.message("\x00echo ready$((4+4))\n")
		s.until("ready8")
		s.message("\x00echo much; echo more; X=kept\n") // what has arrived counts, though nobody reads the answer
		_ = s.conn.Close()
		s = open(t, d, id, exec)
		s.message("\x00echo it is $X; exit 2\n")
		if out, last, _ := s.all(); !strings.Contains(out[1], "it is kept") || last != "\x03"+`{"code":2,"signal":0}` {
			t.Errorf("%q %q", out, last)
		}
	})
}

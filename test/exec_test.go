package test

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestCase001: every byte written before the exit arrives, on both streams.
func TestCase001(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		const out, err = 5_000_003, 1_000_001
		// Odd sizes: 4099-byte writes of a known pattern, then the exit at once.
		sh(t, d, id, fmt.Sprintf(`yes 0123456789abcdefghijklmnopqrstuvwxyz | tr -d '\n' | head -c %d >/out; head -c %d /out >/err`, out, err))
		wantOut, wantErr := sh(t, d, id, "sha256sum </out | cut -c1-64"), sh(t, d, id, "sha256sum </err | cut -c1-64")
		script := "cat /err >&2; dd bs=4099 if=/out 2>/dev/null; exit 3"
		one := func() error {
			r := d.Shard("exec", id, "sh", "-c", script)
			switch {
			case r.Code != 3:
				return fmt.Errorf("exit code %d: %.200s", r.Code, r.Stderr)
			case len(r.Stdout) != out || sum([]byte(r.Stdout)) != wantOut:
				return fmt.Errorf("stdout has %d bytes, want %d", len(r.Stdout), out)
			case len(r.Stderr) != err || sum([]byte(r.Stderr)) != wantErr:
				return fmt.Errorf("stderr has %d bytes, want %d", len(r.Stderr), err)
			}
			return nil
		}
		for i := range 12 {
			if err := one(); err != nil {
				t.Fatalf("run %d: %v", i, err)
			}
		}
		var wg sync.WaitGroup
		for i := range 8 {
			wg.Go(func() {
				for range 2 {
					if err := one(); err != nil {
						t.Errorf("parallel run %d: %v", i, err)
						return
					}
				}
			})
		}
		wg.Wait()
	})
}

// TestCase003: the end of input is passed on, and an input that never ends does not hold a finished command.
func TestCase003(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for i := range 30 {
			if r := d.Feed(strings.NewReader("hi"), "exec", "-i", id, "cat"); r.Stdout != "hi" || r.Code != 0 {
				t.Fatalf("run %d: %+v", i, r)
			}
		}
		if r := d.Feed(strings.NewReader(""), "exec", "-i", id, "cat"); r.Stdout != "" || r.Code != 0 {
			t.Errorf("empty input: %+v", r)
		}
		if r := d.Shard("exec", id, "cat"); r.Stdout != "" || r.Code != 0 {
			t.Errorf("without -i: %+v", r)
		}
		big := noise(20 << 20)
		if r := d.Feed(bytes.NewReader(big), "exec", "-i", id, "sha256sum"); !strings.HasPrefix(r.Stdout, sum(big)) {
			t.Errorf("20 MiB of input: %+v", r)
		}
		if r := d.Feed(bytes.NewReader(big), "exec", "-i", id, "cat"); r.Stdout != string(big) {
			t.Errorf("20 MiB there and back: %d bytes, exit code %d", len(r.Stdout), r.Code)
		}
		// A pipe that stays open.
		read, write := io.Pipe()
		defer func() { _ = write.Close() }()
		cmd := d.Command("exec", "-i", id, "true")
		stdin, err := cmd.StdinPipe()
		if err != nil {
			t.Fatal(err)
		}
		go func() { _, _ = io.Copy(stdin, read) }()
		ended := make(chan error, 1)
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		go func() { _, err := cmd.Process.Wait(); ended <- err }()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			t.Error("`exec -i true` waits for an input that stays open")
		}
	})
}

// TestCase006: Ctrl+C, or the death of the CLI, only detaches; the command runs on and its output is kept.
func TestCase006(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		for _, signal := range []syscall.Signal{syscall.SIGINT, syscall.SIGKILL} {
			sh(t, d, id, "rm -f /tmp/done")
			cmd := d.Command("exec", id, "sh", "-c", "echo early; sleep 4; echo late; touch /tmp/done")
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			_, _ = out.Read(make([]byte, 16))
			execs := decode[struct {
				Execs []shard.Exec `json:"execs"`
			}](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/exec", nil), 200).Execs
			_ = cmd.Process.Signal(signal)
			_ = cmd.Wait()
			if signal == syscall.SIGINT && cmd.ProcessState.ExitCode() <= 0 {
				t.Errorf("after Ctrl+C the CLI ended as %v, want an exit code that is not 0", cmd.ProcessState)
			}
			var running *shard.Exec
			for i := range execs {
				if execs[i].State == shard.ExecRunning {
					running = &execs[i]
				}
			}
			if running == nil {
				t.Fatalf("%s: the command is not listed as running: %+v", signal, execs)
			}
			var replay bytes.Buffer
			testenv.Eventually(t, "attach again", func() (bool, string) {
				s, err := c.Attach(t.Context(), id, running.ID)
				if err != nil {
					return false, err.Error()
				}
				defer func() { _ = s.Close() }()
				replay.Reset()
				exit, err := s.Copy(&replay, io.Discard)
				return err == nil && exit.Code == 0, fmt.Sprint(exit, err)
			})
			if !strings.HasSuffix(replay.String(), "late\n") {
				t.Errorf("%s: the replay is %q", signal, replay.String())
			}
			sh(t, d, id, "test -e /tmp/done")
		}
	})
}

// TestCase007: the terminal has its size from the first read, and a change of size arrives.
func TestCase007(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		for i := range 20 {
			e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"stty", "size"}, TTY: true, Attach: true, Stdin: true, Size: &shard.Size{Rows: 40, Cols: 120}})
			if err != nil {
				t.Fatal(err)
			}
			out, exit := attach(t, d, id, e.ID)
			if strings.TrimSpace(out) != "40 120" || exit.Code != 0 {
				t.Fatalf("run %d: stty says %q, exit %+v", i, out, exit)
			}
		}
		// By the CLI, on a terminal of our own; Ctrl+C reaches the program, and the shell survives it.
		cmd := d.Command("exec", "-i", "-t", id, "sh")
		term, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: 33, Cols: 101})
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = term.Close() }()
		var mu sync.Mutex
		var seen strings.Builder
		go func() {
			buf := make([]byte, 4096)
			for {
				n, err := term.Read(buf)
				mu.Lock()
				seen.Write(buf[:n])
				mu.Unlock()
				if err != nil {
					return
				}
			}
		}()
		expect := func(what string) {
			t.Helper()
			testenv.Eventually(t, "the terminal shows "+what, func() (bool, string) {
				mu.Lock()
				defer mu.Unlock()
				return strings.Contains(seen.String(), what), fmt.Sprintf("%q", seen.String())
			})
		}
		say := func(s string) { _, _ = io.WriteString(term, s) }
		say("stty size; echo size$((1+1))\n")
		expect("33 101")
		expect("size2")
		if err := pty.Setsize(term, &pty.Winsize{Rows: 50, Cols: 200}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, "the new size arrives", func() (bool, string) {
			say("stty size\n")
			time.Sleep(100 * time.Millisecond)
			mu.Lock()
			defer mu.Unlock()
			return strings.Contains(seen.String(), "50 200"), fmt.Sprintf("%q", seen.String())
		})
		say("sleep 100\n")
		time.Sleep(500 * time.Millisecond)
		say("\x03")
		say("echo survived$((2+2))\n")
		expect("survived4")
		say("exit 9\n")
		ended := make(chan struct{})
		go func() { _ = cmd.Wait(); close(ended) }()
		select {
		case <-ended:
			if code := cmd.ProcessState.ExitCode(); code != 9 {
				t.Errorf("exit code %d, want 9", code)
			}
		case <-time.After(30 * time.Second):
			_ = cmd.Process.Kill()
			t.Errorf("the CLI does not end with the shell: %q", seen.String())
		}
	})
}

// attach reads a command's stream to its end.
func attach(t *testing.T, d *testenv.Daemon, box, id string) (string, shard.ExitStatus) {
	t.Helper()
	c := connect(t, d)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	s, err := c.Attach(ctx, box, id)
	if err != nil {
		t.Fatalf("attach: %v", err)
	}
	defer func() { _ = s.Close() }()
	var out bytes.Buffer
	exit, err := s.Copy(&out, &out)
	if err != nil {
		t.Fatalf("the stream: %v (so far %q)", err, out.String())
	}
	if exit.LostBytes != 0 {
		t.Errorf("%d bytes were lost", exit.LostBytes)
	}
	return out.String(), exit.ExitStatus
}

// TestCase010: "never started" and "ended with an error" are different things.
func TestCase010(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, `printf '#!/no/such/interpreter\n' >/script; chmod 755 /script; echo x >/plain`)
		for what, c := range map[string]struct {
			options, command []string
			code             int
		}{
			"a missing binary":                   {nil, []string{"nosuch"}, 127},
			"a file without the x bit":           {nil, []string{"/plain"}, 126},
			"a directory":                        {nil, []string{"/etc"}, 126},
			"a script with a lost interpreter":   {nil, []string{"/script"}, 126},
			"a workdir that does not exist":      {[]string{"--workdir", "/nosuch"}, []string{"true"}, 126},
			"a workdir that is a file":           {[]string{"--workdir", "/plain"}, []string{"true"}, 126},
			"a user that does not exist":         {[]string{"--user", "nosuch"}, []string{"true"}, 1},
			"a user who may not run the program": {[]string{"--user", "nobody"}, []string{"/root/x"}, 126},
		} {
			if what == "a user who may not run the program" {
				sh(t, d, id, "cp /bin/busybox /root/x")
			}
			r := d.Shard(append(append(append([]string{"exec"}, c.options...), id), c.command...)...)
			if r.Code != c.code || r.Stdout != "" || !strings.HasPrefix(r.Stderr, "shard:") || strings.Count(r.Stderr, "\n") != 1 {
				t.Errorf("%s: %+v, want exit code %d and one line", what, r, c.code)
			}
		}
		list := decode[struct {
			Execs []shard.Exec `json:"execs"`
		}](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/exec", nil), 200)
		for _, e := range list.Execs {
			if e.Command[0] != "sh" {
				t.Errorf("a command that never started is listed: %+v", e)
			}
		}
		for script, want := range map[string]int{"nosuch": 127, "exit 125": 125, "exit 126": 126} {
			r := d.Shard("exec", id, "sh", "-c", script)
			if r.Code != want || strings.Contains(r.Stderr, "shard:") {
				t.Errorf("sh -c %q: %+v, want exit code %d and no line of ours", script, r, want)
			}
		}
	})
}

// TestCase014: the two streams stay apart, byte for byte; a terminal has one.
func TestCase014(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		script := `printf 'o\000\377\r\n'; printf 'e\000\377\r\n' >&2`
		r := d.Shard("exec", id, "sh", "-c", script)
		if r.Stdout != "o\x00\xff\r\n" || r.Stderr != "e\x00\xff\r\n" {
			t.Errorf("stdout %q, stderr %q", r.Stdout, r.Stderr)
		}
		e, err := connect(t, d).Exec(t.Context(), id, shard.ExecRequest{Command: []string{"sh", "-c", "stty raw; " + script}, TTY: true, Attach: true})
		if err != nil {
			t.Fatal(err)
		}
		if out, _ := attach(t, d, id, e.ID); out != "o\x00\xff\r\ne\x00\xff\r\n" {
			t.Errorf("a terminal shows %q", out)
		}
	})
}

// TestCase015: arguments and variables arrive as they were given.
func TestCase015(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		args := []string{"", "a\nb", `"'` + "`", "$HOME", "; rm -rf /", "--", "-x", "*", "naïve", strings.Repeat("x", 120<<10)}
		r := d.Shard(append([]string{"exec", id, "sh", "-c", `shift; for a; do printf '%s\0' "$a"; done`, "sh", "skipped"}, args...)...)
		if want := strings.Join(args, "\x00") + "\x00"; r.Stdout != want {
			t.Errorf("the arguments arrived as %.300q, want %.300q (%s)", r.Stdout, want, r.Stderr)
		}
		// JSON cannot carry them; to change them silently would be worse than to say so.
		refused(t, d.Shard("exec", id, "echo", "\xff"), "UTF-8")
		value := "line one\nline two = three\t\"quoted\" $x"
		r = d.Shard("exec", "--env", "VALUE="+value, "--env", "EMPTY=", "--env", "with space=1", id, "cat", "/proc/self/environ")
		env := strings.Split(r.Stdout, "\x00")
		for _, want := range []string{"VALUE=" + value, "EMPTY=", "with space=1"} {
			found := false
			for _, kv := range env {
				found = found || kv == want
			}
			if !found {
				t.Errorf("%q is not in the environment %q", want, env)
			}
		}
		// A list is never given to a shell.
		if r := d.Shard("exec", id, "echo", "$HOME", ";", "ls"); r.Stdout != "$HOME ; ls\n" {
			t.Errorf("echo printed %q", r.Stdout)
		}
		here := "cat <<'END'\nfirst $x\nsecond\nEND\n"
		if got := sh(t, d, id, here); got != "first $x\nsecond" {
			t.Errorf("a here document gave %q", got)
		}
	})
}

// TestCase119: output that nobody reads is bounded on the host, and the daemon goes on answering.
func TestCase119(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		var ids []string
		for range 4 {
			ids = append(ids, box(t, d, provider))
		}
		before := testenv.UsageOf(d.PID())
		var execs []string
		for _, id := range ids {
			e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"yes"}})
			if err != nil {
				t.Fatal(err)
			}
			execs = append(execs, e.ID)
		}
		// One attached client that stops reading.
		s, err := c.Attach(t.Context(), ids[0], execs[0])
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = s.Close() }()
		for range 10 {
			time.Sleep(time.Second)
			if _, err := c.Inspect(t.Context(), ids[1]); err != nil {
				t.Fatal(err)
			}
		}
		after := testenv.UsageOf(d.PID())
		if grown := after.MemoryKiB - before.MemoryKiB; grown > 96<<10 {
			t.Errorf("the daemon grew by %d MiB", grown>>10)
		}
		// The client stays: the end does not wait for it.
		for i, id := range ids {
			if err := c.KillExec(t.Context(), id, execs[i], "KILL"); err != nil {
				t.Errorf("kill: %v", err)
			}
			testenv.Eventually(t, "the record tells the end and the loss", func() (bool, string) {
				e, err := c.GetExec(t.Context(), id, execs[i])
				if err != nil {
					return false, err.Error()
				}
				return e.State == shard.ExecExited && e.ExitStatus != nil && e.ExitStatus.Code == 137, fmt.Sprintf("%+v", e)
			})
		}
		if e, err := c.GetExec(t.Context(), ids[1], execs[1]); err != nil || !e.Truncated || e.LostBytes == 0 {
			t.Errorf("a command that lost output: %+v, %v", e, err)
		}
	})
}

// TestExecLimits: 33 running commands in one sandbox are one too many; ended ones are kept up to 32.
func TestExecLimits(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		var execs []string
		for range 32 {
			e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"sleep", "600"}})
			if err != nil {
				t.Fatal(err)
			}
			execs = append(execs, e.ID)
		}
		_, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: []string{"true"}})
		wantCode(t, err, shard.CodeExecLimit)
		if got := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/exec/"+execs[0], nil).code(t); got != shard.CodeExecRunning {
			t.Errorf("delete of a running command: %s", got)
		}
		for _, e := range execs {
			if err := c.KillExec(t.Context(), id, e, "TERM"); err != nil {
				t.Fatal(err)
			}
		}
		var last *shard.Exec
		testenv.Eventually(t, "all have ended", func() (bool, string) {
			for _, id2 := range execs {
				if last, err = c.GetExec(t.Context(), id, id2); err != nil || last.State != shard.ExecExited {
					return false, fmt.Sprint(last, err)
				}
			}
			return true, ""
		})
		if last.ExitStatus.Code != 143 || last.ExitStatus.Signal != 0 {
			t.Errorf("a command ended by TERM has %+v, want code 143, signal 0", last.ExitStatus)
		}
		wantCode(t, c.KillExec(t.Context(), id, execs[0], "TERM"), shard.CodeExecExited)
		if a := call(t, d, "DELETE", "/v0/sandboxes/"+id+"/exec/"+execs[0], nil); a.Status != 204 {
			t.Errorf("delete of an ended command: %d %s", a.Status, a.Body)
		}
		if got := call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+execs[0], nil).code(t); got != shard.CodeNotFound {
			t.Errorf("a deleted command: %s", got)
		}
		for range 33 {
			d.Must("exec", id, "true")
		}
		// One that a client reads is kept beyond that until the client has left.
		testenv.Eventually(t, "32 ended commands are kept", func() (bool, string) {
			list := decode[struct {
				Execs []shard.Exec `json:"execs"`
				Next  *string      `json:"next"`
			}](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/exec", nil), 200)
			return len(list.Execs) == 32 && list.Next == nil, fmt.Sprint(len(list.Execs))
		})
	}, "runc")
}

// TestPipes: pipelines inside end (part of case 165).
func TestPipes(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		for script, want := range map[string]string{
			"yes | head -1":                               "y",
			"seq 100000 | grep -c 9":                      "40951",
			"cat /dev/zero | head -c 1000 | wc -c":        "1000",
			"(sleep 0.1; echo a) | (read x; echo got $x)": "got a",
		} {
			if got := sh(t, d, id, script); got != want {
				t.Errorf("%s gave %q, want %q", script, got, want)
			}
		}
		// A background child that keeps the pipe does not keep the exit from being reported when it has closed it.
		begin := time.Now()
		sh(t, d, id, "sleep 600 >/dev/null 2>&1 </dev/null & echo started")
		if took := time.Since(begin); took > 30*time.Second {
			t.Errorf("a command with a quiet child took %s", took)
		}
	})
}

// TestCLIPipe: the CLI behaves in a shell's pipeline: a reader that goes away ends it, and bytes arrive through a file.
func TestCLIPipe(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := d.Command("exec", id, "seq", "300000")
		file, err := os.OpenFile(t.TempDir()+"/out", os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = file.Close() }()
		c.Stdout = file
		if err := c.Run(); err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(file.Name())
		if err != nil {
			t.Fatal(err)
		}
		want, err := exec.Command("seq", "300000").Output()
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, want) {
			t.Errorf("%d bytes, want %d", len(got), len(want))
		}
		c = d.Command("exec", id, "yes")
		out, err := c.StdoutPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		_, _ = io.ReadFull(out, make([]byte, 100))
		_ = out.Close()
		ended := make(chan struct{})
		go func() { _ = c.Wait(); close(ended) }()
		select {
		case <-ended:
		case <-time.After(30 * time.Second):
			_ = c.Process.Kill()
			t.Error("the CLI goes on although nobody reads its output")
		}
	}, "runc")
}

package cli_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"os"
	"os/exec"
	"reflect"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/term"

	"github.com/useshards/shard"
)

func TestExecExitCodes(t *testing.T) {
	d := start(t)
	for _, tc := range []struct {
		name string
		args []string
		want result
	}{
		{"success", []string{"exec", "box", "sh", "-c", "echo out; echo err >&2"}, result{"out\n", "err\n", 0}},
		{"own code, and no line of ours", []string{"exec", "box", "sh", "-c", "exit 7"}, result{"", "", 7}},
		{"125 is the command's", []string{"exec", "box", "sh", "-c", "exit 125"}, result{"", "", 125}},
		{"signal", []string{"exec", "box", "sh", "-c", "kill -9 $$"}, result{"", "", 137}},
		{"options of the command", []string{"exec", "box", "sh", "-c", `echo "$@"`, "sh", "--env", "-i", "--"}, result{"--env -i --\n", "", 0}},
		{"two dashes", []string{"exec", "box", "--", "echo", "--"}, result{"--\n", "", 0}},
		{"env", []string{"exec", "--env", "A=1 2", "--env", "B==", "box", "sh", "-c", `echo "$A$B"`}, result{"1 2=\n", "", 0}},
		{"workdir", []string{"exec", "--workdir", "/usr", "box", "pwd"}, result{"/usr\n", "", 0}},
		{"arguments unchanged", []string{"exec", "box", "printf", "%s|", "", "a\nb", `"'$;`}, result{"|a\nb|\"'$;|", "", 0}},
		{"no such program", []string{"exec", "box", "/none"}, result{"", "shard: cannot run \"/none\"\n", 127}},
		{"not a program", []string{"exec", "box", "/etc"}, result{"", "shard: cannot run \"/etc\"\n", 126}},
		{"no such workdir", []string{"exec", "--workdir", "/none", "box", "true"}, result{"", "shard: no such working directory\n", 126}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if got := run(t, d, tc.args...); got != tc.want {
				t.Errorf("got %+v, want %+v", got, tc.want)
			}
		})
	}
}

func TestExecIsBinaryClean(t *testing.T) {
	d := start(t)
	got := run(t, d, "exec", "box", "sh", "-c", `head -c 5000003 /dev/zero | tr '\0' '\377'; head -c 1000001 /dev/zero >&2; exit 3`)
	if got.code != 3 || got.out != strings.Repeat("\xff", 5000003) || got.errs != strings.Repeat("\x00", 1000001) {
		t.Errorf("code %d, %d and %d bytes", got.code, len(got.out), len(got.errs))
	}
}

func TestExecStdin(t *testing.T) {
	d := start(t)
	big := bytes.Repeat([]byte("0123456789\n"), 1<<18)
	for name, in := range map[string][]byte{"empty": nil, "short": []byte("hi"), "big": big} {
		cmd := command(t, d, "exec", "-i", "box", "cat")
		cmd.Stdin = bytes.NewReader(in)
		out, err := cmd.Output()
		if err != nil || sha256.Sum256(out) != sha256.Sum256(in) {
			t.Errorf("%s: %d bytes back of %d, %v", name, len(out), len(in), err)
		}
	}
	// Without -i the command has no input, whatever stdin holds.
	cmd := command(t, d, "exec", "box", "cat")
	cmd.Stdin = strings.NewReader("not for you")
	if out, err := cmd.Output(); err != nil || len(out) > 0 {
		t.Errorf("without -i: %q, %v", out, err)
	}
	// A big input for a command that reads none must not hold it.
	cmd = command(t, d, "exec", "-i", "box", "true")
	cmd.Stdin = bytes.NewReader(big)
	if err := cmd.Run(); err != nil {
		t.Errorf("a command that does not read: %v", err)
	}
}

func TestExecDoesNotWaitForStdin(t *testing.T) {
	d := start(t)
	r, w, err := os.Pipe() // stays open
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	defer w.Close()
	cmd := command(t, d, "exec", "-i", "box", "true")
	cmd.Stdin = r
	if err := cmd.Run(); err != nil {
		t.Error(err)
	}
}

// interrupt starts a command that says hello, waits for that, and sends signals.
func interrupted(t *testing.T, d *daemon, signals ...os.Signal) (errs string, code int) {
	t.Helper()
	cmd := command(t, d, "exec", "box", "sh", "-c", "echo hello; exec sleep 100")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 6)); err != nil {
		t.Fatal(err)
	}
	for _, s := range signals {
		_ = cmd.Process.Signal(s)
	}
	_ = cmd.Wait()
	return stderr.String(), cmd.ProcessState.ExitCode()
}

func TestExecCtrlCDetaches(t *testing.T) {
	d := start(t)
	errs, code := interrupted(t, d, os.Interrupt)
	if code != 130 || errs != "shard: detached: the command runs on in box as x1\n" {
		t.Errorf("code %d, %q", code, errs)
	}
	if err := d.execs["x1"].cmd.Process.Signal(syscall.Signal(0)); err != nil {
		t.Errorf("the command does not run on: %v", err)
	}
	if _, code := interrupted(t, d, os.Interrupt, os.Interrupt); code != 130 {
		t.Errorf("second interrupt: code %d", code)
	}
}

func TestExecLostOutput(t *testing.T) {
	d := start(t)
	d.lost = 9
	got := run(t, d, "exec", "box", "true")
	if want := (result{"", "shard: 9 bytes of the command's output were lost; it ended with exit code 0\n", 1}); got != want {
		t.Errorf("got %+v", got)
	}
	if got := run(t, d, "exec", "box", "sh", "-c", "exit 5"); got.code != 5 {
		t.Errorf("got %+v", got)
	}
}

func TestExecBrokenStreamIsExplained(t *testing.T) {
	d := start(t)
	d.cut = true
	got := run(t, d, "exec", "box", "sh", "-c", "echo x; exit 4")
	if want := (result{"x\n", "shard: the connection broke and output may be missing; the command ended with exit code 4\n", 4}); got != want {
		t.Errorf("got %+v", got)
	}
	if got := run(t, d, "exec", "box", "true"); got.code != 1 {
		t.Errorf("a broken stream of a command that succeeded: %+v", got)
	}
}

// speaking is a command line whose command has written n bytes.
func speaking(t *testing.T, d *daemon, n int, args ...string) (cmd *exec.Cmd, out io.Closer, stderr *bytes.Buffer) {
	t.Helper()
	cmd, stderr = command(t, d, args...), new(bytes.Buffer)
	cmd.Stderr = stderr
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(pipe, make([]byte, n)); err != nil {
		t.Fatal(err)
	}
	return cmd, pipe, stderr
}

func TestExecOutlivesTheDaemon(t *testing.T) {
	d := start(t)
	cmd, _, stderr := speaking(t, d, 6, "exec", "box", "sh", "-c", "echo hello; exec sleep 100")
	d.die()
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || stderr.String() != "shard: the daemon went away; the command may run on in box as x1: look when the daemon is back\n" {
		t.Errorf("code %d, %q", code, stderr.String())
	}
}

func TestExecReaderGoesAway(t *testing.T) {
	d := start(t)
	cmd, out, stderr := speaking(t, d, 2, "exec", "box", "sh", "-c", "yes")
	out.Close()
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 1 || stderr.String() != "shard: nobody reads the output any more; the command runs on in box as x1\n" {
		t.Errorf("code %d, %q", code, stderr.String())
	}
}

// onTerminal starts the command line on a new terminal of the given size, and returns the terminal's other end.
func onTerminal(t *testing.T, d *daemon, rows, cols uint16, args ...string) (*exec.Cmd, *os.File) {
	t.Helper()
	cmd := command(t, d, args...)
	tty, err := pty.StartWithSize(cmd, &pty.Winsize{Rows: rows, Cols: cols})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { tty.Close() })
	return cmd, tty
}

// freshTerminal is the state of a terminal that nobody has touched.
func freshTerminal(t *testing.T) *term.State {
	t.Helper()
	ctrl, tty, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer ctrl.Close()
	defer tty.Close()
	state, err := term.GetState(int(ctrl.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	return state
}

func checkSane(t *testing.T, tty *os.File) {
	t.Helper()
	after, err := term.GetState(int(tty.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if before := freshTerminal(t); !reflect.DeepEqual(before, after) {
		t.Errorf("the terminal was left as %+v, it was %+v", after, before)
	}
}

// expect reads until the text has come.
func expect(t *testing.T, r io.Reader, text string) string {
	t.Helper()
	var seen bytes.Buffer
	buf := make([]byte, 1024)
	for !strings.Contains(seen.String(), text) {
		n, err := r.Read(buf)
		seen.Write(buf[:n])
		if err != nil {
			t.Fatalf("wanted %q, got %q, %v", text, seen.String(), err)
		}
	}
	return seen.String()
}

// drain reads a terminal to its end. When the other end is closed while the kernel looks for input, the first read that fails
// does so before the last bytes; the next one has them.
func drain(tty io.Reader) string {
	first, _ := io.ReadAll(tty)
	last, _ := io.ReadAll(tty)
	return string(first) + string(last)
}

func TestExecTerminal(t *testing.T) {
	d := start(t)
	cmd, tty := onTerminal(t, d, 40, 120, "exec", "-it", "box", "sh")
	write := func(s string) {
		t.Helper()
		if _, err := io.WriteString(tty, s); err != nil {
			t.Fatal(err)
		}
	}
	write("stty size; echo size-$((1+1))\n")
	if got := expect(t, tty, "size-2"); !strings.Contains(got, "40 120") {
		t.Errorf("the size from the first read: %q", got)
	}
	// Ctrl+C is the command's: the sleep ends, the shell survives.
	write("sh -c 'echo begun-$((1+1)); exec sleep 100'\n")
	expect(t, tty, "begun-2")
	write("\x03")
	write("echo alive-$((2+2))\n")
	expect(t, tty, "alive-4")
	if err := pty.Setsize(tty, &pty.Winsize{Rows: 50, Cols: 200}); err != nil {
		t.Fatal(err)
	}
	select {
	case got := <-d.sizes:
		if want := (shard.Size{Rows: 50, Cols: 200}); got != want {
			t.Errorf("resized to %+v", got)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the terminal's new size never arrived")
	}
	write("stty size; echo size-$((3+3))\n")
	if got := expect(t, tty, "size-6"); !strings.Contains(got, "50 200") {
		t.Errorf("after the resize: %q", got)
	}
	write("exit 9\n")
	go io.Copy(io.Discard, tty) // ends with the terminal
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 9 {
		t.Errorf("exit code %d", code)
	}
	checkSane(t, tty)
}

func TestTerminalIsRestoredAfterASignal(t *testing.T) {
	d := start(t)
	cmd, tty := onTerminal(t, d, 24, 80, "exec", "-it", "box", "sh", "-c", "echo ready; exec sleep 100")
	expect(t, tty, "ready")
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	expect(t, tty, "detached: the command runs on in box as x1")
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 130 {
		t.Errorf("exit code %d", code)
	}
	checkSane(t, tty)
}

func TestShell(t *testing.T) {
	d := start(t)
	if got := run(t, d, "shell", "box"); got.code != 1 || !strings.Contains(got.errs, "stdin is not a terminal") {
		t.Errorf("without a terminal: %+v", got)
	}
	cmd, tty := onTerminal(t, d, 24, 80, "shell", "--workdir", "/usr", "box")
	if _, err := io.WriteString(tty, "pwd; echo $0-$((1+1)); exit 3\n"); err != nil {
		t.Fatal(err)
	}
	if got := expect(t, tty, "bash-2"); !strings.Contains(got, "/usr") {
		t.Errorf("got %q", got)
	}
	go io.Copy(io.Discard, tty) // ends with the terminal
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 3 {
		t.Errorf("exit code %d", code)
	}
	cmd, tty = onTerminal(t, d, 24, 80, "shell", "--workdir", "/none", "box")
	expect(t, tty, "no such working directory")
	err := cmd.Wait()
	if e, ok := errors.AsType[*exec.ExitError](err); !ok || e.ExitCode() != 127 {
		t.Errorf("no workdir: %v", err)
	}
}

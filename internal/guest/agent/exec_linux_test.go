package agent_test

import (
	"bytes"
	"crypto/sha256"
	"strconv"
	"strings"
	"sync"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// burst is what the helper writes to one stream.
func burst(n int, seed byte) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(i*31>>3) ^ seed
	}
	return out
}

func TestPing(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	b.must(s.Call(b.ctx(), guest.OpPing, nil, nil))
	if err := s.Call(b.ctx(), "nosuch", nil, nil); shard.CodeOf(err) != shard.CodeUnsupported {
		t.Errorf("an unknown operation: %v", err)
	}
}

// Case 1: every byte before the exit, on both streams, alone and with others.
func TestEveryByteBeforeExit(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	want := [3]([32]byte){1: sha256.Sum256(burst(5_000_003, 0)), 2: sha256.Sum256(burst(1_000_001, 1))}
	once := func() {
		k, exit := b.run(s, "helper", "burst", "5000003", "1000001", "3")
		if exit != (guest.Exit{Code: 3}) {
			t.Errorf("exit %+v", exit)
		}
		for ch := 1; ch <= 2; ch++ {
			if sha256.Sum256(k.out[ch].Bytes()) != want[ch] {
				t.Errorf("channel %d: %d bytes are not those that were written", ch, k.out[ch].Len())
			}
		}
	}
	for range 4 {
		once()
	}
	var all sync.WaitGroup
	for range 8 {
		all.Go(once)
	}
	all.Wait()
}

// Case 3: the end of input is passed on, and input that stays open holds nothing.
func TestInput(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	for _, text := range []string{"hi", "", strings.Repeat("0123456789abcdef", 200_000)} {
		c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"cat"}, Stdin: true})
		n, err := c.Write(b.ctx(), []byte(text))
		b.must(err)
		b.must(c.CloseStdin())
		if exit := b.end(k); exit.Code != 0 || k.text() != text || n != len(text) {
			t.Errorf("cat of %d bytes: %+v, %d bytes", len(text), exit, k.len())
		}
	}

	c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"true"}, Stdin: true})
	b.end(k)
	if _, err := c.Write(b.ctx(), []byte("late")); err == nil {
		t.Error("an ended command takes input")
	}

	// A program that closes its input but runs on takes any amount, and one that never reads holds up nobody else.
	c, k = b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "exec 0<&-; echo closed; sleep 0.3"}, Stdin: true})
	for range 64 {
		if _, err := c.Write(b.ctx(), make([]byte, 100_000)); err != nil {
			break // it has ended
		}
	}
	b.end(k)
	lazy, lk := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sleep", "1000"}, Stdin: true})
	stuck := make(chan error)
	go func() {
		_, err := lazy.Write(b.ctx(), make([]byte, 4<<20))
		stuck <- err
	}()
	b.sh(s, "echo others go on")
	b.must(lazy.Signal(b.ctx(), "KILL"))
	if exit := b.end(lk); exit.Signal != 9 {
		t.Errorf("a killed command: %+v", exit)
	}
	if err := <-stuck; err == nil {
		t.Error("input for a program that never read it was all taken")
	}
	if k, _ := b.run(s, "cat"); k.len() != 0 {
		t.Error("input without stdin")
	}
}

// A process left behind that holds the pipes does not hold the end of the command.
func TestLeftBehind(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	for script, want := range map[string]string{
		"sleep 1000 & echo hi":                                       "hi\n",
		"yes >/dev/null & echo hi; exit 0":                           "hi\n",
		"trap '' HUP; sleep 1000 & head -c 300000 /dev/zero; exit 0": strings.Repeat("\x00", 300000),
	} {
		if got := b.sh(s, script); got != want {
			t.Errorf("%s: %.100q", script, got)
		}
	}
	k, _ := b.run(s, "sh", "-c", "yes & exit 4") // speaks for ever: it is heard for a while
	if k.exit.Code != 4 {
		t.Errorf("exit %+v", k.exit)
	}
}

// Case 7: the size of a terminal is right from the first read, and a resize is seen once.
func TestTerminal(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	tty := guest.ExecSpec{TTY: true, Stdin: true, Rows: 40, Cols: 120}
	with := func(argv ...string) guest.ExecSpec {
		spec := tty
		spec.Argv = argv
		return spec
	}
	for range 20 {
		_, k := b.start(s, with("stty", "size"))
		if b.end(k); k.text() != "40 120\r\n" {
			t.Fatalf("size %q", k.text())
		}
	}

	c, k := b.start(s, with("sh", "-c", `trap 'stty size; exit 7' WINCH; echo ready $TERM; while :; do sleep 0.05; done`))
	b.await(k, "ready xterm")
	b.must(c.Resize(b.ctx(), 50, 200))
	if exit := b.end(k); exit.Code != 7 || strings.Count(k.text(), "50 200") != 1 {
		t.Errorf("after a resize: %+v %q", exit, k.text())
	}

	// Ctrl+C ends the foreground job and not the shell; the end of input ends the shell.
	c, k = b.start(s, with("sh"))
	_, err := c.Write(b.ctx(), []byte("echo before-$((1+1)); sleep 1000\n"))
	b.must(err)
	b.await(k, "before-2")
	_, err = c.Write(b.ctx(), []byte{3})
	b.must(err)
	_, err = c.Write(b.ctx(), []byte("echo after-$((1+2))\n"))
	b.must(err)
	b.await(k, "after-3")
	b.must(c.CloseStdin())
	if exit := b.end(k); exit.Code != 0 {
		t.Errorf("the shell's end: %+v %q", exit, k.text())
	}
	ended := c
	if k.out[guest.ChannelStderr].Len() != 0 {
		t.Error("a terminal has one stream")
	}
	if err := ended.Resize(b.ctx(), 1, 1); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("resize of an ended command: %v", err)
	}
	for _, text := range []string{"a line\n", "an unfinished line", ""} {
		c, k := b.start(s, with("cat"))
		_, err := c.Write(b.ctx(), []byte(text))
		b.must(err)
		b.must(c.CloseStdin())
		if exit := b.end(k); exit.Code != 0 || strings.Count(k.text(), strings.TrimSpace(text)) < 1 {
			t.Errorf("cat of %q: %+v %q", text, exit, k.text())
		}
	}
	_, k = b.start(s, with("sh", "-c", "head -c 500000 /dev/zero; exit 5"))
	if exit := b.end(k); exit.Code != 5 || k.len() != 500000 {
		t.Errorf("the last output of a terminal: %d bytes, %+v", k.len(), exit)
	}
}

// Case 10: what never started is told apart from what failed, and is not held.
func TestNeverStarted(t *testing.T) {
	b := newBox(t, false)
	b.write("noexec", "x")
	b.must(b.mkdir("scripts", 0o755))
	b.write("scripts/interp", "#!/nosuch/interpreter\n")
	b.write("scripts/plain", "echo no interpreter line\n")
	for _, name := range []string{"scripts/interp", "scripts/plain"} {
		b.chmod(name, 0o755)
	}
	b.must(b.mkdir("secret", 0o700))
	s := b.connect()
	for _, c := range []struct {
		what string
		spec guest.ExecSpec
		code shard.Code
		exit int
	}{
		{"missing", guest.ExecSpec{Argv: guest.Strings{"nosuch"}}, shard.CodeCommandNotStarted, 127},
		{"missing path", guest.ExecSpec{Argv: guest.Strings{"/bin/nosuch"}}, shard.CodeCommandNotStarted, 127},
		{"path through a file", guest.ExecSpec{Argv: guest.Strings{"/noexec/x"}}, shard.CodeCommandNotStarted, 127},
		{"no x bit", guest.ExecSpec{Argv: guest.Strings{"/noexec"}}, shard.CodeCommandNotStarted, 126},
		{"directory", guest.ExecSpec{Argv: guest.Strings{"/tmp"}}, shard.CodeCommandNotStarted, 126},
		{"interpreter", guest.ExecSpec{Argv: guest.Strings{"/scripts/interp"}}, shard.CodeCommandNotStarted, 126},
		{"format", guest.ExecSpec{Argv: guest.Strings{"/scripts/plain"}}, shard.CodeCommandNotStarted, 126},
		{"too large", guest.ExecSpec{Argv: guest.Strings{"true", strings.Repeat("x", 200<<10)}}, shard.CodeCommandNotStarted, 126},
		{"workdir missing", guest.ExecSpec{Argv: guest.Strings{"true"}, Workdir: "/nosuch"}, shard.CodeCommandNotStarted, 126},
		{"workdir a file", guest.ExecSpec{Argv: guest.Strings{"true"}, Workdir: "/noexec"}, shard.CodeCommandNotStarted, 126},
		{"workdir closed", guest.ExecSpec{Argv: guest.Strings{"true"}, Workdir: "/secret", User: "user"}, shard.CodeCommandNotStarted, 126},
		{"workdir relative", guest.ExecSpec{Argv: guest.Strings{"true"}, Workdir: "tmp"}, shard.CodeInvalidRequest, 0},
		{"no such user", guest.ExecSpec{Argv: guest.Strings{"true"}, User: "nosuch"}, shard.CodeInvalidRequest, 0},
		{"empty", guest.ExecSpec{}, shard.CodeInvalidRequest, 0},
	} {
		k := newSink()
		_, err := s.Exec(b.ctx(), b.spec(c.spec), k)
		var exit int
		if e, ok := err.(*shard.Error); ok {
			exit = e.ExitCode
		}
		if shard.CodeOf(err) != c.code || exit != c.exit {
			t.Errorf("%s: %v (%s, %d), want %s, %d", c.what, err, shard.CodeOf(err), exit, c.code, c.exit)
		}
		if k.len() != 0 || k.exit != nil || k.broken != nil {
			t.Errorf("%s: the sink was called", c.what)
		}
	}
	var held guest.ExecsHead
	b.must(s.Call(b.ctx(), guest.OpExecs, nil, &held))
	if len(held.Execs) != 0 {
		t.Errorf("held: %+v", held)
	}
	for script, code := range map[string]int{"nosuch": 127, "exit 125": 125, "exit 126": 126, "exit 0": 0} {
		if _, exit := b.run(s, "sh", "-c", script); exit != (guest.Exit{Code: code}) {
			t.Errorf("sh -c %q: %+v", script, exit)
		}
	}
	if _, exit := b.run(s, "sh", "-c", "kill -SEGV $$"); exit != (guest.Exit{Signal: 11}) {
		t.Errorf("death by signal: %+v", exit)
	}
}

// PATH is the command's own, entries that cannot be used are passed over, and relative ones are below the workdir.
func TestPath(t *testing.T) {
	b := newBox(t, false)
	b.must(b.mkdir("a", 0o755))
	b.must(b.mkdir("a/prog", 0o755))
	b.must(b.mkdir("hidden", 0o700))
	b.must(b.mkdir("good", 0o755))
	b.write("good/prog", "#!/bin/sh\necho good $0\n")
	b.write("hidden/prog", "#!/bin/sh\necho hidden\n")
	b.chmod("good/prog", 0o755)
	b.chmod("hidden/prog", 0o755)
	s := b.connect()
	for _, c := range []struct{ path, dir, want string }{
		{"/nosuch:/a:/hidden:/good", "/", "good /good/prog"},
		{":/nosuch", "/good", "good ./prog"},
		{"good", "/", "good good/prog"},
	} {
		_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"prog"}, Env: guest.Strings{"PATH=" + c.path}, Workdir: guest.Path(c.dir), User: "user"})
		if b.end(k); strings.TrimSpace(k.text()) != c.want {
			t.Errorf("PATH=%s: %q", c.path, k.text())
		}
	}
	_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "echo $HOME"}, Env: guest.Strings{"X=1"}, User: "user"})
	if b.end(k); k.text() != "/home/user\n" {
		t.Errorf("without PATH: %q", k.text())
	}
}

// Case 14: the streams stay apart and keep every byte.
func TestBinaryStreams(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", `printf '\000\377\r\n1'; printf '\000\376\r\n2' >&2`}})
	b.end(k)
	if got := k.out[1].String(); got != "\x00\xff\r\n1" {
		t.Errorf("stdout %q", got)
	}
	if got := k.out[2].String(); got != "\x00\xfe\r\n2" {
		t.Errorf("stderr %q", got)
	}
}

// Case 15: arguments and environment arrive byte for byte.
func TestArguments(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	argv := guest.Strings{"helper", "dump", "", "a\nb", `"'$;`, "-x", strings.Repeat("é", 60<<10), "\xff\xfe\x80", "cat <<E\nx\nE\n"}
	env := guest.Strings{"PATH=/bin", "A=", "B=x=y\nz", "RAW=\xff\xfe", "HOME=/elsewhere"}
	_, k := b.start(s, guest.ExecSpec{Argv: argv, Env: env})
	if exit := b.end(k); exit.Code != 0 {
		t.Fatalf("%+v %.200q", exit, k.text())
	}
	var want bytes.Buffer
	for _, list := range [][]string{argv, env} {
		for _, e := range list {
			want.WriteString(e + "\x00")
		}
		want.WriteByte('\n')
	}
	if k.text() != want.String() {
		t.Errorf("got %.300q", k.text())
	}
	if _, err := s.Exec(b.ctx(), b.spec(guest.ExecSpec{Argv: guest.Strings{"a\x00b"}}), newSink()); err == nil {
		t.Error("a NUL in an argument passes")
	}
}

// Case 21: orphans are reaped.
func TestOrphans(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	if k, exit := b.run(s, "helper", "orphans", "3000"); exit.Code != 0 {
		t.Fatalf("%+v %s", exit, k.text())
	}
	for left := -1; left != 0; {
		if b.ctx().Err() != nil {
			t.Fatalf("%d zombies are left", left)
		}
		left = strings.Count(b.sh(s, `cat /proc/[0-9]*/stat 2>/dev/null || :`), ") Z ")
	}
	b.sh(s, "true")
}

// Case 157: a command has three descriptors, and none of the agent's can be its working directory.
func TestDescriptors(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	k, _ := b.run(s, "helper", "fds")
	lines := strings.Split(strings.TrimSpace(k.text()), "\n")
	for _, line := range lines {
		n, target, _ := strings.Cut(line, " ")
		if fd, _ := strconv.Atoi(n); fd > 2 && !strings.HasPrefix(target, "anon_inode:") && !strings.HasPrefix(target, "/proc/") {
			t.Errorf("descriptor %s is %s", n, target)
		}
	}
	if len(lines) < 3 {
		t.Errorf("descriptors: %q", lines)
	}
	if got := b.sh(s, "cat /proc/self/environ"); strings.Contains(got, "HOST_SECRET") {
		t.Error("the runtime's environment reaches a command")
	}
	for fd := 3; fd <= 60; fd++ {
		_, err := s.Exec(b.ctx(), b.spec(guest.ExecSpec{Argv: guest.Strings{"true"}, Workdir: guest.Path("/proc/self/fd/" + strconv.Itoa(fd))}), newSink())
		if shard.CodeOf(err) != shard.CodeCommandNotStarted {
			t.Errorf("workdir /proc/self/fd/%d: %v", fd, err)
		}
	}
}

// Case 160: users and groups.
func TestUsers(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	for _, bad := range []string{"2147483648", "4294967295", "4294967296", "5000000000", "-1", "0x1", " 1000", "1000 ", "1000:99999999999",
		"1000:", ":", ":0", "+1", "1000:-1", "1000:nosuch", "nosuch", "user:0x0", "root:x:0", "\xff\x00"} {
		if err := s.Call(b.ctx(), guest.OpUser, guest.UserArgs{User: bad}, nil); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("user %q: %v", bad, err)
		}
	}
	for user, want := range map[string]string{
		"": "uid=0(root) gid=0(root) groups=10(wheel)", "root": "uid=0(root) gid=0(root) groups=10(wheel)",
		"user": "uid=1000(user) gid=1001(users) groups=10(wheel)", "1000": "uid=1000(user) gid=1001(users) groups=10(wheel)",
		"user:root": "uid=1000(user) gid=0(root)", "4242": "uid=4242 gid=0(root)", "user:77": "uid=1000(user) gid=77",
		"2147483647:2147483647": "uid=2147483647 gid=2147483647",
	} {
		_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"id"}, User: user})
		b.end(k)
		got := strings.TrimSpace(k.text())
		if !strings.HasPrefix(got, want) {
			t.Errorf("user %q: %s, want %s", user, got, want)
		}
	}
}

// Many at once.
func TestParallel(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	want := sha256.Sum256(burst(300_001, 0))
	var all sync.WaitGroup
	for range 32 {
		all.Go(func() {
			for range 5 {
				_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"helper", "burst", "300001", "7", "0"}, Stdin: true})
				b.end(k)
				if sha256.Sum256(k.out[1].Bytes()) != want || k.out[2].Len() != 7 {
					t.Errorf("%d and %d bytes", k.out[1].Len(), k.out[2].Len())
				}
				b.must(k.cmd.Forget(b.ctx()))
			}
		})
	}
	all.Wait()
	var held guest.ExecsHead
	b.must(s.Call(b.ctx(), guest.OpExecs, nil, &held))
	if len(held.Execs) != 0 {
		t.Errorf("%d commands are held", len(held.Execs))
	}
}

package agent_test

import (
	"bytes"
	"crypto/sha256"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// both runs a test with either kind of channel.
func both(t *testing.T, f func(t *testing.T, b *box)) {
	t.Run("listening", func(t *testing.T) { f(t, newBox(t, true)) })
	t.Run("connected", func(t *testing.T) { f(t, newBox(t, false)) })
}

// A daemon that dies and comes back loses no byte and no exit.
func TestReconnect(t *testing.T) {
	both(t, func(t *testing.T, b *box) {
		const total = 9_000_001
		s := b.connect()
		var held bytes.Buffer // what the host has durably
		c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"helper", "burst", strconv.Itoa(total), "0", "5"}})
		id := c.ID
		for round := range 4 {
			for ctx := b.ctx(); k.len() < guest.Window/2 && ctx.Err() == nil; {
				time.Sleep(time.Millisecond)
			}
			b.must(s.Close())
			<-k.done
			if k.broken == nil {
				t.Fatal("the command ended before the cut")
			}
			// Of the output that came, some is not durable when the daemon dies, though never what it acknowledged.
			keep := max(k.len()-1000*round, k.acked)
			held.WriteString(k.text()[:keep])

			s = b.connect()
			var execs guest.ExecsHead
			b.must(s.Call(b.ctx(), guest.OpExecs, nil, &execs))
			if len(execs.Execs) != 1 || execs.Execs[0].ID != id || execs.Execs[0].Exit != nil {
				t.Fatalf("held after a cut: %+v", execs)
			}
			next := newSink()
			next.hold = round == 2 // and sometimes nothing is acknowledged at all
			var err error
			c, err = s.Resume(b.ctx(), id, int64(held.Len()), next)
			b.must(err)
			next.started(c)
			k = next
		}
		exit := b.end(k)
		held.WriteString(k.text())
		if exit != (guest.Exit{Code: 5}) || held.Len() != total || sha256.Sum256(held.Bytes()) != sha256.Sum256(burst(total, 0)) {
			t.Errorf("after four cuts: %+v, %d bytes", exit, held.Len())
		}

		b.must(s.Close())
		s = b.connect()
		again := newSink()
		c, err := s.Resume(b.ctx(), id, total, again)
		b.must(err)
		if exit := b.end(again); exit.Code != 5 || again.len() != 0 {
			t.Errorf("the exit a second time: %+v", exit)
		}
		if _, err := s.Resume(b.ctx(), id, 0, newSink()); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("output that the host has acknowledged: %v", err)
		}
		b.must(c.Forget(b.ctx()))
		b.must(c.Forget(b.ctx()))
		if _, err := s.Resume(b.ctx(), id, total, newSink()); shard.CodeOf(err) != shard.CodeNotFound {
			t.Errorf("a forgotten command: %v", err)
		}
	})
}

// Input goes on where the agent has it.
func TestReconnectInput(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	text := burst(6_000_000, 7)
	c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"helper", "copy"}, Stdin: true})
	id, got := c.ID, []byte(nil)
	for at := int64(0); ; {
		type sent struct {
			n   int
			err error
		}
		result := make(chan sent)
		go func() {
			n, err := c.Write(b.ctx(), text[at:min(at+2_500_000, int64(len(text)))])
			result <- sent{n, err}
		}()
		time.Sleep(2 * time.Millisecond)
		b.must(s.Close())
		<-result
		<-k.done
		got = append(got, k.text()...)
		s = b.connect()
		k = newSink()
		var err error
		c, err = s.Resume(b.ctx(), id, int64(len(got)), k)
		b.must(err)
		k.started(c)
		if at = c.Head.StdinBytes; at > int64(len(text))/2 {
			_, err := c.Write(b.ctx(), text[at:])
			b.must(err)
			b.must(c.CloseStdin())
			break
		}
	}
	b.end(k)
	if got = append(got, k.text()...); !bytes.Equal(got, text) {
		t.Errorf("%d bytes came back of %d", len(got), len(text))
	}
}

// Only the token opens the channel; a bad hello closes the new channel alone, and a good one replaces the session.
func TestToken(t *testing.T) {
	both(t, func(t *testing.T, b *box) {
		s := b.connect()
		_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "echo on; exec sleep 1000"}})
		b.await(k, "on")
		wrong := b.token
		wrong[31] ^= 1
		if _, err := guest.Connect(b.ctx(), b.dial(), wrong); err == nil {
			t.Fatal("a wrong token opens a session")
		}
		b.must(s.Call(b.ctx(), guest.OpPing, nil, nil))

		if b.addr == "" {
			b.must(s.Close()) // the channel that PID 1 was born with is never closed from within
		}
		second := b.connect()
		<-s.Done()
		if err := s.Call(b.ctx(), guest.OpPing, nil, nil); err == nil {
			t.Error("the replaced session answers")
		}
		b.must(second.Call(b.ctx(), guest.OpPing, nil, nil))
	})
}

// staying is a channel that outlives its sessions, as the one of a restored sandbox.
type staying struct{ net.Conn }

func (c staying) Close() error { return c.SetDeadline(time.Unix(1, 0)) }

// A session that follows another on the same channel is not disturbed by what that one left.
func TestSameChannel(t *testing.T) {
	b := newBox(t, false)
	conn := staying{b.dial()}
	var token [guest.TokenSize]byte
	for round := range 20 {
		b.must(conn.SetDeadline(time.Time{}))
		s, err := guest.Connect(b.ctx(), conn, token)
		b.must(err)
		k := newSink()
		_, err = s.Exec(b.ctx(), b.spec(guest.ExecSpec{Argv: guest.Strings{"yes"}}), k)
		b.must(err)
		b.await(k, "y")
		if round%2 == 0 {
			b.must(s.Close())
			b.must(conn.SetDeadline(time.Time{}))
			_, err = conn.Write(bytes.Repeat([]byte("\xffshard"), 1000)) // a frame that was cut
			b.must(err)
			continue
		}
		b.must(s.Call(b.ctx(), guest.OpPing, nil, nil))
		b.must(s.Close())
	}
}

// After Quiesce PID 1 holds no channel but its first, and a command goes on when the first is used again.
func TestQuiesce(t *testing.T) {
	b := newBox(t, false)
	first := staying{b.dial()}
	s, err := guest.Connect(b.ctx(), first, b.token)
	b.must(err)
	c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"helper", "burst", "5000000", "0", "0"}})
	for ctx := b.ctx(); k.len() == 0 && ctx.Err() == nil; {
		time.Sleep(time.Millisecond)
	}
	before := b.descriptors()
	got := ""
	for _, attached := range []bool{false, true, false} {
		if attached {
			b.must(s.Close())
			<-k.done
			got += k.text()
			s = b.connect()
			k = newSink()
			c, err = s.Resume(b.ctx(), c.ID, int64(len(got)), k)
			b.must(err)
			k.started(c)
		}
		b.must(s.Quiesce(b.ctx()))
		if n := b.descriptors(); n > before {
			t.Errorf("attached %v: %d descriptors, %d before", attached, n, before)
		}
		b.must(s.Close())
		<-k.done
		got += k.text()
		b.must(first.SetDeadline(time.Time{}))
		s, err = guest.Connect(b.ctx(), first, b.token)
		b.must(err)
		k = newSink()
		c, err = s.Resume(b.ctx(), c.ID, int64(len(got)), k)
		b.must(err)
		k.started(c)
	}
	if b.end(k); got+k.text() != string(burst(5000000, 0)) {
		t.Error("the output is not what was written")
	}
}

// What anyone in the sandbox can do to the attach socket ends nothing.
func TestHostileAttach(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	before := b.descriptors()
	null, err := os.Open("/dev/null")
	b.must(err)
	if out, err := b.enter(null, "/shard-init", "attach").CombinedOutput(); err == nil {
		t.Errorf("a file is taken as a channel: %s", out)
	}
	null.Close()
	if out, err := b.enter(nil, "/shard-init", "attach").CombinedOutput(); err == nil {
		t.Errorf("attach without a channel: %s", out)
	}
	for range 10 { // channels that say nothing, or nonsense, and go
		host, file := socketpair(t)
		b.attach(file)
		host.Write([]byte("shardA1\nshort"))
		host.Close()
	}
	b.must(s.Call(b.ctx(), guest.OpPing, nil, nil))
	for ctx := b.ctx(); b.descriptors() > before; time.Sleep(10 * time.Millisecond) {
		if ctx.Err() != nil {
			t.Fatalf("PID 1 has %d descriptors, before %d", b.descriptors(), before)
		}
	}
}

func (b *box) descriptors() int {
	b.t.Helper()
	if b.runsc != nil {
		return 0 // they are the sentry's
	}
	entries, err := os.ReadDir("/proc/" + strconv.Itoa(b.pid) + "/fd")
	b.must(err)
	return len(entries)
}

// A host that breaks the protocol loses its session and nothing else.
func TestHostileHost(t *testing.T) {
	b := newBox(t, true)
	s := b.connect()
	_, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "echo on; exec sleep 1000"}})
	b.await(k, "on")
	frame := func(size int, kind guest.Type, stream uint32, payload string) string {
		head := make([]byte, guest.HeaderSize)
		guest.Header{Size: size, Type: kind, Stream: stream}.Put(head)
		return string(head) + payload
	}
	whole := func(kind guest.Type, stream uint32, payload string) string {
		return frame(len(payload), kind, stream, payload)
	}
	open := whole(guest.TypeOpen, 1, `{"op":"exec","args":{"id":"h","argv":"Y2F0AA==","stdin":true}}`)
	window := whole(guest.TypeData, 1, strings.Repeat("x", guest.MaxData))
	for what, bytes := range map[string]string{
		"a huge frame":        frame(1<<31, guest.TypeData, 1, ""),
		"a large open":        frame(guest.MaxOpen+1, guest.TypeOpen, 1, ""),
		"an unknown type":     whole(99, 1, ""),
		"a frame of ours":     whole(guest.TypeHead, 1, "{}"),
		"an unknown stream":   whole(guest.TypeData, 7, "x"),
		"an open of nonsense": whole(guest.TypeOpen, 1, "{{{"),
		"an id used twice":    whole(guest.TypeOpen, 5, `{"op":"ping"}`) + whole(guest.TypeOpen, 5, `{"op":"ping"}`),
		"an id that shrinks":  whole(guest.TypeOpen, 5, `{"op":"ping"}`) + whole(guest.TypeOpen, 4, `{"op":"ping"}`),
		"too much credit":     whole(guest.TypeOpen, 1, `{"op":"exec","args":{"id":"c","argv":"Y2F0AA==","stdin":true}}`) + whole(guest.TypeCredit, 1, "\x00\x00\x10\x00"),
		"a short credit":      whole(guest.TypeOpen, 1, `{"op":"ping"}`) + frame(2, guest.TypeCredit, 1, "xx"),
		"data past EOF":       open + whole(guest.TypeEOF, 1, "") + whole(guest.TypeData, 1, "x"),
		"data past the window": whole(guest.TypeOpen, 1, `{"op":"exec","args":{"id":"w","argv":"c2xlZXAAMTAwMAA=","stdin":true,"env":"UEFUSD0vYmluAA=="}}`) +
			strings.Repeat(window, guest.Window/guest.MaxData) + whole(guest.TypeData, 1, "x"),
	} {
		conn := b.dial()
		_, err := conn.Write(append(append([]byte(guest.HostMagic), b.token[:]...), make([]byte, guest.EpochSize)...))
		b.must(err)
		go conn.Write([]byte(bytes))
		conn.SetReadDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.Copy(io.Discard, conn); os.IsTimeout(err) {
			t.Errorf("%s: the session goes on", what)
		}
		conn.Close()
	}
	s = b.connect()
	b.must(s.Call(b.ctx(), guest.OpSignal, guest.SignalArgs{ID: k.cmd.ID, Signal: "TERM"}, nil))
	b.sh(s, "true")
}

// PID 1 ignores what anyone in the sandbox can send it, and its commands do not inherit that.
func TestSignals(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	skip := "0"
	if os.Getenv("SHARD_TEST_RUNSC") != "" {
		skip = "9|19|32|33|34" // KILL and STOP reach it there, when the sandbox's root sends them
	}
	b.sh(s, "for n in $(seq 1 64); do case $n in "+skip+") ;; *) kill -$n 1 2>/dev/null || : ;; esac; done")
	b.must(s.Call(b.ctx(), guest.OpPing, nil, nil))
	for sig, n := range map[string]int{"TERM": 15, "KILL": 9} {
		c, k := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "sleep 1000 & echo on; wait"}})
		b.await(k, "on")
		b.must(c.Signal(b.ctx(), sig))
		if exit := b.end(k); exit != (guest.Exit{Signal: n}) {
			t.Errorf("%s: %+v", sig, exit)
		}
		if err := c.Signal(b.ctx(), sig); shard.CodeOf(err) != shard.CodeExecExited {
			t.Errorf("a signal after the end: %v", err)
		}
	}
	if left := b.sh(s, "ps | grep -c '[s]leep 1000' || :"); strings.TrimSpace(left) != "0" {
		t.Errorf("the group outlives a signal: %s", left)
	}
	if err := s.Call(b.ctx(), guest.OpSignal, guest.SignalArgs{ID: "nosuch", Signal: "KILL"}, nil); shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("an unknown command: %v", err)
	}
}

func TestBoot(t *testing.T) {
	b := newBox(t, false)
	canary := filepath.Join(b.root, "tmp/canary")
	b.write("tmp/canary", "untouched")
	b.must(os.Symlink("/nosuch/dangling", filepath.Join(b.root, "etc/resolv.conf")))
	b.must(os.Symlink("../tmp/canary", filepath.Join(b.root, "etc/hosts")))
	b.must(unix.Mkfifo(filepath.Join(b.root, "etc/hostname"), 0o600))
	s := b.connect()
	args := guest.BootArgs{Hostname: "web", First: true, User: "user", Workdir: "/srv/app/deep", Files: map[string]string{
		"/etc/hostname": "web\n", "/etc/hosts": "127.0.0.1 localhost\n", "/etc/resolv.conf": "nameserver 192.0.2.1\n"}}
	b.must(s.Call(b.ctx(), guest.OpBoot, args, nil))
	check := func(want map[string]string) {
		t.Helper()
		for name, text := range want {
			info, err := os.Lstat(filepath.Join(b.root, name))
			b.must(err)
			got, err := os.ReadFile(filepath.Join(b.root, name))
			b.must(err)
			if !info.Mode().IsRegular() || info.Mode().Perm() != 0o644 || string(got) != text {
				t.Errorf("%s: %v %q", name, info.Mode(), got)
			}
		}
	}
	check(args.Files)
	if got, err := os.ReadFile(canary); err != nil || string(got) != "untouched" {
		t.Error("boot wrote through a link")
	}
	if got := b.sh(s, "cd /srv/app/deep && pwd && cat /proc/sys/kernel/hostname"); got != "/srv/app/deep\nweb\n" {
		t.Errorf("workdir and hostname: %q", got)
	}
	args.First, args.Files = false, map[string]string{"/etc/hostname": "other\n", "/etc/resolv.conf": "nameserver 192.0.2.2\n"}
	b.must(s.Call(b.ctx(), guest.OpBoot, args, nil))
	check(map[string]string{"/etc/hostname": "web\n", "/etc/resolv.conf": "nameserver 192.0.2.2\n"})
	// A guest that has lost its user, its workdir and /etc starts all the same.
	b.must(os.Rename(filepath.Join(b.root, "etc"), filepath.Join(b.root, "old")))
	b.must(os.Symlink("/proc", filepath.Join(b.root, "etc")))
	lost := args
	lost.User, lost.Workdir = "nosuch", "/tmp/canary/x"
	b.must(s.Call(b.ctx(), guest.OpBoot, lost, nil))
	b.must(os.Remove(filepath.Join(b.root, "etc")))
	b.must(os.Rename(filepath.Join(b.root, "old"), filepath.Join(b.root, "etc")))
	args.User, args.First = "nosuch", true
	if err := s.Call(b.ctx(), guest.OpBoot, args, nil); shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), "nosuch") {
		t.Errorf("an unknown user: %v", err)
	}
	b.must(os.RemoveAll(filepath.Join(b.root, "etc")))
	args.User, args.First = "", true
	b.must(s.Call(b.ctx(), guest.OpBoot, args, nil))
	check(args.Files)
}

// Stop ends every process, whoever started it, and nothing starts any more.
func TestStop(t *testing.T) {
	b := newBox(t, false)
	s := b.connect()
	_, polite := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "trap 'echo bye; exit 3' TERM; echo on; while :; do sleep 0.02; done"}})
	_, stubborn := b.start(s, guest.ExecSpec{Argv: guest.Strings{"helper", "stubborn"}})
	_, orphan := b.start(s, guest.ExecSpec{Argv: guest.Strings{"sh", "-c", "(trap '' TERM HUP; sleep 1000 >/dev/null 2>&1 </dev/null) & echo on"}})
	b.await(polite, "on")
	b.await(stubborn, "ready")
	b.end(orphan)
	foreign := b.enter(nil, "/bin/sleep", "1000")
	b.must(foreign.Start())
	waited := make(chan error, 1)
	go func() { waited <- foreign.Wait() }()

	b.must(s.Call(b.ctx(), guest.OpStop, guest.StopArgs{GraceMillis: 300}, nil))
	if exit := b.end(polite); exit.Code != 3 || !strings.Contains(polite.text(), "bye") {
		t.Errorf("a command that handles TERM: %+v %q", exit, polite.text())
	}
	if exit := b.end(stubborn); exit.Signal != 9 {
		t.Errorf("a command that ignores TERM: %+v", exit)
	}
	<-waited
	if _, err := s.Exec(b.ctx(), b.spec(guest.ExecSpec{Argv: guest.Strings{"true"}}), newSink()); shard.CodeOf(err) != shard.CodeSandboxNotRunning {
		t.Errorf("a command after stop: %v", err)
	}
	if b.runsc != nil {
		return
	}
	out, err := exec.Command("ps", "--ppid", strconv.Itoa(b.pid), "-o", "args=").Output()
	if len(bytes.TrimSpace(out)) != 0 {
		t.Errorf("left after stop: %s (%v)", out, err)
	}
}

// An idle agent is small.
func TestResident(t *testing.T) {
	b := newBox(t, true)
	s := b.connect()
	b.run(s, "true")
	status, err := os.ReadFile("/proc/" + strconv.Itoa(b.pid) + "/status")
	b.must(err)
	for line := range strings.Lines(string(status)) {
		if strings.HasPrefix(line, "VmRSS") || strings.HasPrefix(line, "Threads") || strings.HasPrefix(line, "RssAnon") {
			t.Log(strings.TrimSpace(line))
		}
	}
}

// shard-init stays small: no network stack is linked in.
func TestSmallBinary(t *testing.T) {
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(filepath.Join(bin, "shard-init"))
	if err != nil {
		t.Fatal(err)
	}
	if info.Size() >= 4<<20 {
		t.Errorf("shard-init has %d bytes, at most 4 MiB", info.Size())
	}
	list := exec.Command("go", "list", "-deps", "github.com/useshards/shard/cmd/shard-init")
	list.Env = append(os.Environ(), "CGO_ENABLED=0")
	out, err := list.Output()
	if err != nil {
		t.Fatal(err)
	}
	for _, dep := range strings.Fields(string(out)) {
		switch dep {
		case "net", "net/http", "crypto/tls", "os/exec":
			t.Errorf("shard-init links %s", dep)
		}
	}
}

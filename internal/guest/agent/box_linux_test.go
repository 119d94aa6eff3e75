package agent_test

import (
	"bytes"
	"context"
	"crypto/rand"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/guest"
)

// programs builds shard-init and the helper once.
var programs = sync.OnceValues(func() (string, error) {
	dir, err := os.MkdirTemp("", "shard-init-test-")
	if err != nil {
		return "", err
	}
	for name, pkg := range map[string]string{"shard-init": "github.com/useshards/shard/cmd/shard-init", "helper": "./testdata/helper"} {
		build := exec.Command("go", "build", "-ldflags", "-s -w", "-o", filepath.Join(dir, name), pkg)
		build.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := build.CombinedOutput(); err != nil {
			return dir, fmt.Errorf("build %s: %w\n%s", name, err, out)
		}
	}
	return dir, nil
})

func TestMain(m *testing.M) {
	code := m.Run()
	if dir, _ := programs(); dir != "" {
		os.RemoveAll(dir)
	}
	os.Exit(code)
}

// setup mounts what a runtime gives a sandbox, in a mount namespace of its own, and becomes PID 1 there.
const setup = `set -e
mount --make-rprivate /
mount -t proc proc "$1/proc"
mount -t tmpfs dev "$1/dev"
mknod -m 666 "$1/dev/null" c 1 3
mknod -m 666 "$1/dev/zero" c 1 5
mknod -m 666 "$1/dev/tty" c 5 0
mkdir "$1/dev/pts"
mount -t devpts -o newinstance,ptmxmode=0666,mode=0620 devpts "$1/dev/pts"
ln -s pts/ptmx "$1/dev/ptmx"
exec 7</etc
exec chroot "$1" /shard-init
`

// box is a sandbox without a runtime: shard-init as PID 1 of fresh namespaces over a small root.
type box struct {
	t     testing.TB
	root  string
	pid   int
	token [guest.TokenSize]byte
	conn  net.Conn // the first channel; nil once taken
	addr  string   // of the listener that is PID 1's stdin, if it has one
	runsc []string // the command line up to the verb, under gVisor
	id    string   // under gVisor
}

// newBox starts a sandbox. listening chooses what PID 1 has as stdin: a listening socket or a connected one.
func newBox(t testing.TB, listening bool) *box {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("namespaces and mounts need root")
	}
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		t.Skip("busybox (package busybox-static) is not installed")
	}
	bin, err := programs()
	if err != nil {
		t.Fatal(err)
	}
	b := &box{t: t, root: t.TempDir()}
	_, _ = rand.Read(b.token[:])
	for _, dir := range []string{"bin", "proc", "dev", "etc", "tmp", "home/user"} {
		b.must(os.MkdirAll(filepath.Join(b.root, dir), 0o755))
	}
	b.must(os.Chmod(filepath.Join(b.root, "tmp"), 0o1777))
	b.must(os.Chmod(b.root, 0o755))
	for from, to := range map[string]string{busybox: "bin/busybox", bin + "/helper": "bin/helper", bin + "/shard-init": "shard-init"} {
		b.copy(from, to)
	}
	for _, name := range strings.Fields("sh cat echo true false sleep stty ps id pwd wc head ls kill printf env yes seq touch nproc dd") {
		b.must(os.Symlink("busybox", filepath.Join(b.root, "bin", name)))
	}
	b.write("etc/passwd", "root:x:0:0::/root:/bin/sh\nuser:x:1000:1001::/home/user:/bin/sh\n5000000000:x:0:0::/root:/bin/sh\n"+
		"0x1:x:0:0::/root:/bin/sh\n-1:x:0:0::/root:/bin/sh\n")
	b.write("etc/group", "root:x:0:\nusers:x:1001:\nwheel:x:10:root,user\n")

	var stdin *os.File
	if listening {
		b.addr = filepath.Join(t.TempDir(), "init.sock")
		l, err := net.ListenUnix("unix", &net.UnixAddr{Name: b.addr, Net: "unix"})
		b.must(err)
		l.SetUnlinkOnClose(false)
		stdin, err = l.File()
		b.must(err)
		b.must(l.Close())
	} else {
		b.conn, stdin = socketpair(t)
	}
	if runsc := os.Getenv("SHARD_TEST_RUNSC"); runsc != "" {
		b.startRunsc(runsc, stdin)
		return b
	}
	cmd := exec.Command("/bin/sh", "-c", setup, "sh", b.root)
	cmd.Stdin = stdin
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	cmd.Env = []string{"PATH=" + os.Getenv("PATH"), "HOST_SECRET=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWUTS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC,
		Pdeathsig:  unix.SIGKILL,
	}
	if err := cmd.Start(); err != nil {
		t.Skipf("this machine gives no namespaces: %v", err)
	}
	stdin.Close()
	b.pid = cmd.Process.Pid
	t.Cleanup(func() {
		cmd.Process.Kill()
		cmd.Wait()
		if stderr.Len() > 0 {
			t.Logf("shard-init said: %s", stderr.String())
		}
	})
	return b
}

// startRunsc starts the sandbox with gVisor instead, for a run of these tests by hand: SHARD_TEST_RUNSC names the
// program. Tests that look at PID 1 from the host do not hold there.
func (b *box) startRunsc(runsc string, stdin *os.File) {
	b.t.Helper()
	if b.addr != "" {
		b.t.Skip("gVisor's PID 1 cannot accept from a socket of the host")
	}
	dir := b.t.TempDir()
	caps := `["CAP_CHOWN","CAP_DAC_OVERRIDE","CAP_FOWNER","CAP_KILL","CAP_SETGID","CAP_SETUID","CAP_SYS_CHROOT"]`
	b.must(os.WriteFile(filepath.Join(dir, "config.json"), fmt.Appendf(nil, `{"ociVersion":"1.0.0","hostname":"box","root":{"path":%q},
		"process":{"args":["/shard-init"],"cwd":"/","user":{"uid":0,"gid":0},"env":["HOST_SECRET=1"],
			"capabilities":{"bounding":%[2]s,"effective":%[2]s,"permitted":%[2]s}},
		"mounts":[{"destination":"/proc","type":"proc","source":"proc"},{"destination":"/dev","type":"tmpfs","source":"tmpfs"}],
		"linux":{"namespaces":[{"type":"pid"},{"type":"mount"},{"type":"ipc"},{"type":"uts"},{"type":"network"}]}}`, b.root, caps), 0o600))
	flags := []string{"--root", dir + "/state", "--network=none", "--ignore-cgroups", "--overlay2=none", "--file-access=shared"}
	b.runsc, b.id = append([]string{runsc}, flags...), "box"+strconv.Itoa(os.Getpid())+"-"+filepath.Base(filepath.Dir(b.root))
	log, err := os.Create(dir + "/log")
	b.must(err)
	defer log.Close()
	cmd := exec.Command(runsc, append(flags, "run", "--detach", "--bundle", dir, b.id)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, log, log
	err = cmd.Run()
	stdin.Close()
	b.t.Cleanup(func() {
		exec.Command(runsc, append(flags, "delete", "--force", b.id)...).Run()
		unix.Unmount(dir+"/state/null-netns", unix.MNT_DETACH)
	})
	if err != nil {
		said, _ := os.ReadFile(dir + "/log")
		b.t.Fatalf("runsc: %v: %s", err, said)
	}
}

func socketpair(t testing.TB) (net.Conn, *os.File) {
	t.Helper()
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fds[0]), "host end")
	defer f.Close()
	conn, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn, os.NewFile(uintptr(fds[1]), "guest end")
}

func (b *box) must(err error) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
}

func (b *box) copy(from, to string) {
	b.t.Helper()
	content, err := os.ReadFile(from)
	b.must(err)
	b.must(os.WriteFile(filepath.Join(b.root, to), content, 0o755))
}

func (b *box) write(name, content string) {
	b.t.Helper()
	b.must(os.WriteFile(filepath.Join(b.root, name), []byte(content), 0o644))
}

// ctx bounds one step of a test: it only ever ends a test that hangs.
func (b *box) ctx() context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	b.t.Cleanup(cancel)
	return ctx
}

// dial gives a channel: the first one, or a new one by the listener or by attach.
func (b *box) dial() net.Conn {
	b.t.Helper()
	if conn := b.conn; conn != nil {
		b.conn = nil
		return conn
	}
	if b.addr != "" {
		conn, err := net.Dial("unix", b.addr)
		b.must(err)
		return conn
	}
	conn, file := socketpair(b.t)
	b.attach(file)
	return conn
}

// attach runs the helper in the sandbox, with file as the channel.
func (b *box) attach(file *os.File) {
	b.t.Helper()
	defer file.Close()
	if out, err := b.enter(file, "/shard-init", "attach").CombinedOutput(); err != nil {
		b.t.Fatalf("attach: %v: %s", err, out)
	}
}

// enter is a command beside PID 1, as a runtime's exec makes one.
func (b *box) enter(file *os.File, argv ...string) *exec.Cmd {
	if b.runsc != nil {
		args := append(b.runsc[1:len(b.runsc):len(b.runsc)], "exec")
		if file != nil {
			args = append(args, "--pass-fd", "3:3")
		}
		cmd := exec.Command(b.runsc[0], append(append(args, b.id), argv...)...)
		if file != nil {
			cmd.ExtraFiles = []*os.File{file}
		}
		return cmd
	}
	cmd := exec.Command("nsenter", append([]string{"-t", fmt.Sprint(b.pid), "-p", "-n", "-u", "-i", "-m", "chroot", b.root}, argv...)...)
	if file != nil {
		cmd.ExtraFiles = []*os.File{file}
	}
	return cmd
}

func (b *box) connect() *guest.Session {
	b.t.Helper()
	s, err := guest.Connect(b.ctx(), b.dial(), b.token)
	b.must(err)
	b.t.Cleanup(func() { s.Close() })
	return s
}

// sink collects a command's output and acknowledges it, unless held.
type sink struct {
	mu     sync.Mutex
	out    [3]bytes.Buffer // by channel
	all    bytes.Buffer
	acked  int
	cmd    *guest.Command
	hold   bool
	broken error
	exit   *guest.Exit
	done   chan struct{}
}

func newSink() *sink { return &sink{done: make(chan struct{})} }

func (k *sink) Output(channel byte, p []byte) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.out[channel].Write(p)
	k.all.Write(p)
	k.ack()
}

func (k *sink) ack() {
	if n := k.all.Len() - k.acked; k.cmd != nil && !k.hold && n > 0 {
		k.acked += n
		k.cmd.Ack(n)
	}
}

func (k *sink) Exited(e guest.Exit) { k.exit = &e; close(k.done) }
func (k *sink) Broken(err error)    { k.broken = err; close(k.done) }

// started gives the sink its command, which may have spoken already.
func (k *sink) started(c *guest.Command) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.cmd = c
	k.ack()
}

func (k *sink) len() int {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.all.Len()
}

func (k *sink) text() string {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.all.String()
}

var ids struct {
	sync.Mutex
	n int
}

func nextID() string {
	ids.Lock()
	defer ids.Unlock()
	ids.n++
	return fmt.Sprintf("exec-%d", ids.n)
}

// start starts a command. Its environment is a PATH.
func (b *box) start(s *guest.Session, spec guest.ExecSpec) (*guest.Command, *sink) {
	b.t.Helper()
	k := newSink()
	c, err := s.Exec(b.ctx(), b.spec(spec), k)
	b.must(err)
	k.started(c)
	return c, k
}

func (b *box) spec(spec guest.ExecSpec) guest.ExecSpec {
	if spec.ID == "" {
		spec.ID = nextID()
	}
	if spec.Env == nil {
		spec.Env = guest.Strings{"PATH=/bin"}
	}
	return spec
}

// end waits for the command's end.
func (b *box) end(k *sink) guest.Exit {
	b.t.Helper()
	select {
	case <-k.done:
	case <-b.ctx().Done():
		b.t.Fatalf("the command does not end; output so far: %.200q", k.text())
	}
	if k.exit == nil {
		b.t.Fatalf("the command broke: %v", k.broken)
	}
	return *k.exit
}

// run runs a command to its end and returns its output and exit.
func (b *box) run(s *guest.Session, argv ...string) (*sink, guest.Exit) {
	b.t.Helper()
	_, k := b.start(s, guest.ExecSpec{Argv: argv})
	return k, b.end(k)
}

// sh runs a shell command that is to succeed, and returns its stdout.
func (b *box) sh(s *guest.Session, script string) string {
	b.t.Helper()
	k, exit := b.run(s, "sh", "-c", script)
	if exit != (guest.Exit{}) {
		b.t.Fatalf("%s: %+v, %q", script, exit, k.text())
	}
	return k.out[guest.ChannelStdout].String()
}

// await waits until the output holds text.
func (b *box) await(k *sink, text string) {
	b.t.Helper()
	for ctx := b.ctx(); !strings.Contains(k.text(), text); time.Sleep(2 * time.Millisecond) {
		if ctx.Err() != nil {
			b.t.Fatalf("no %q in %q", text, k.text())
		}
	}
}

func (b *box) chmod(name string, mode os.FileMode) {
	b.must(os.Chmod(filepath.Join(b.root, name), mode))
}

func (b *box) mkdir(name string, mode os.FileMode) error {
	return os.Mkdir(filepath.Join(b.root, name), mode)
}

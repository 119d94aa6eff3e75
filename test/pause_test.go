package test

import (
	"encoding/json"
	"fmt"
	"io"

	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// eachPausing runs a test for each provider that says it can pause. What the others say is TestPauseUnsupported's.
func eachPausing(t *testing.T, d *testenv.Daemon, run func(t *testing.T, d *testenv.Daemon, provider string)) {
	t.Helper()
	infos, err := connect(t, d).Providers(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var can []string
	for _, info := range infos {
		if info.Capabilities.Pause {
			can = append(can, info.Name)
		}
	}
	if len(can) == 0 {
		t.Skip("no provider of this version can pause")
	}
	d.EachProvider(t, run, can...)
}

// pause pauses a sandbox, which must then be paused; resume lets it go on.
func pause(t *testing.T, c *client.Client, id string) *shard.Sandbox {
	t.Helper()
	s, err := c.Pause(t.Context(), id)
	if err != nil || s.State != shard.StatePaused {
		t.Fatalf("pause: %+v, %v", s, err)
	}
	return s
}

func resume(t *testing.T, c *client.Client, id string) *shard.Sandbox {
	t.Helper()
	s, err := c.Resume(t.Context(), id)
	if err != nil || s.State != shard.StateRunning {
		t.Fatalf("resume: %+v, %v", s, err)
	}
	return s
}

// TestPauseUnsupported: a provider that cannot pause says so by name, whatever the state is, and nothing changes.
func TestPauseUnsupported(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		caps := decode[shard.Capabilities](t, call(t, d, "GET", "/v0/capabilities?provider="+provider, nil), 200)
		if caps.Pause {
			t.Skipf("provider %s can pause", provider)
		}
		id := box(t, d, provider, "--port", "18100:80")
		exec := run(t, d, id, shard.ExecRequest{Command: []string{"sleep", "600"}})
		for _, s := range []shard.State{shard.StateRunning, shard.StateStopped} {
			before := inspect(t, d, id)
			for _, verb := range []string{"pause", "resume"} {
				refused(t, d.Shard(verb, id), "provider "+provider, "cannot")
				if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/"+verb, nil); a.code(t) != shard.CodeUnsupported {
					t.Errorf("%s: %d %s", verb, a.Status, a.Body)
				}
				if a := call(t, d, "POST", "/v0/sandboxes/nobody/"+verb, nil); a.code(t) != shard.CodeNotFound {
					t.Errorf("%s of nobody: %d %s", verb, a.Status, a.Body)
				}
			}
			if now := inspect(t, d, id); fmt.Sprintf("%+v", now) != fmt.Sprintf("%+v", before) && !equalJSON(now, before) || now.State != s {
				t.Errorf("refused verbs made of %+v: %+v", before, now)
			}
			if s == shard.StateRunning {
				if e := decode[shard.Exec](t, call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec, nil), 200); e.State != shard.ExecRunning {
					t.Errorf("a refused pause ended a command: %+v", e)
				}
				d.Must("stop", id)
			}
		}
	})
}

func equalJSON(a, b any) bool {
	x, _ := json.Marshal(a)
	y, _ := json.Marshal(b)
	return string(x) == string(y)
}

// keeper is a program that has all kinds of state that lie in memory only, its own or the kernel's. At each line of its input it
// says in a line of JSON what of it is there, and works; the first line is to come before any pause.
const keeper = `
import fcntl, json, mmap, os, pty, select, signal, socket, subprocess, sys, threading, time

count = 0
def counts():
    global count
    while True:
        count += 1
        time.sleep(0.01)
threading.Thread(target=counts, daemon=True).start()

ticks = 0
def tick(*_):
    global ticks
    ticks += 1
signal.signal(signal.SIGALRM, tick)
signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)

blob = os.urandom(8 << 20)
total = hash(blob)
open_file = open("open", "w+b")
open_file.write(b"open"); open_file.flush()
deleted = open("deleted", "w+b")
deleted.write(blob[:1 << 20]); deleted.flush()
os.unlink("deleted")
renamed = open("before", "w+b")
os.rename("before", "after")
shared = open("mapped", "w+b")
shared.truncate(1 << 20)
mapped = mmap.mmap(shared.fileno(), 1 << 20)
mapped[:6] = b"before"
lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
r, w = os.pipe()
os.write(w, b"in the pipe")
memfd = os.memfd_create("m")
os.write(memfd, b"in memory")

# A child at the other ends of a unix socket and a pipe, which waits for a lock as well.
ours, theirs = socket.socketpair()
listener = socket.socket(socket.AF_UNIX)
listener.bind("socket"); listener.listen()
child = os.fork()
if child == 0:
    signal.setitimer(signal.ITIMER_REAL, 0)
    while True:
        what = theirs.recv(100)
        if not what:
            os._exit(0)
        theirs.send(what.upper())

# A program at a terminal: what was typed before comes back as well as what is typed behind it.
master, slave = pty.openpty()
at_terminal = subprocess.Popen(["sh", "-c", "stty size; while read x; do echo got $x; done"], stdin=slave, stdout=slave, stderr=slave, start_new_session=True)
os.close(slave)
fcntl.ioctl(master, 0x5414, (33).to_bytes(2, "little") + (77).to_bytes(2, "little") + bytes(4))
terminal = b""
def hear(want):
    global terminal
    end = time.monotonic() + 50
    while want not in terminal and time.monotonic() < end:
        if select.select([master], [], [], 1)[0]:
            terminal += os.read(master, 1000)
    return want in terminal

mono, born = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME)
step, sleeper = 0, None
print("ready", flush=True)
for line in sys.stdin:
    step += 1
    seen, heard, at = count, ticks, time.monotonic()
    while (count <= seen or ticks <= heard) and time.monotonic() < at + 50:
        time.sleep(0.01)
    word = ("word%d" % step).encode()
    ours.send(word)
    os.write(master, word + b"\n")
    os.write(w, word)
    open_file.write(word); open_file.flush()
    renamed.write(word); renamed.flush()
    mapped[100 * step:100 * step + 5] = word
    mapped.flush()
    dialled = socket.socket(socket.AF_UNIX)
    dialled.connect("socket")
    listener.accept()[0].close()
    dialled.close()
    other = subprocess.run(["python3", "-c", "import fcntl; fcntl.flock(open('lock', 'w'), fcntl.LOCK_EX | fcntl.LOCK_NB)"], stderr=subprocess.PIPE)
    now_mono = time.monotonic()
    piped = os.read(r, 1000)
    print(json.dumps({
        "counts": count > seen, "count": count, "ticks": ticks > heard,
        "blob": hash(blob) == total, "child": ours.recv(100) == word.upper(), "terminal": hear(b"got " + word + b"\r\n"),
        "pipe": piped == (b"in the pipe" + word if step == 1 else word), "memfd": os.pread(memfd, 100, 0) == b"in memory",
        "open": os.pread(open_file.fileno(), 4, 0) == b"open" and open("open", "rb").read().endswith(word),
        "renamed": open("after", "rb").read().endswith(word),
        "deleted": os.pread(deleted.fileno(), 1 << 20, 0) == blob[:1 << 20],
        "mapped": mapped[:6] == b"before" and open("mapped", "rb").read()[100 * step:100 * step + 5] == word,
        "locked": b"BlockingIOError" in other.stderr,
        "monotonic": now_mono >= mono, "boottime": time.clock_gettime(time.CLOCK_BOOTTIME) >= born,
        "slept": sleeper is None or sleeper.wait() == 0,
        "wall": time.time(), "hostname": socket.gethostname(), "env": os.environ["KEPT"], "cwd": os.getcwd(), "ids": [os.getuid(), os.getgid()],
        "pid": os.getpid(), "threads": threading.active_count(),
    }), flush=True)
    mono, born, sleeper = now_mono, time.clock_gettime(time.CLOCK_BOOTTIME), subprocess.Popen(["sleep", "1"])
`

// TestPause: what a sandbox is and has goes on over a pause, and what was changed meanwhile holds.
func TestPause(t *testing.T) {
	t.Parallel()
	d := secretDaemon(t, testenv.Options{})
	got := &seen{}
	d.Lab().Web().Handle("/seen", got)
	one, two := d.Lab().CanaryInWorld("203.0.113.9:7000"), d.Lab().CanaryInWorld("203.0.113.10:7000")
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		one.Control()
		two.Control()
		pauseMemory(t, d, provider)
		pauseBounds(t, d, provider)
		pausePolicy(t, d, provider, one, two)
		pauseSecret(t, d, provider, got)
	})
}

// pauseMemory: a program and all that the kernel holds for it go on where they stood, over several pauses and a restart of the
// daemon in between; with the wall clock of the host, and as the sandbox that it was.
func pauseMemory(t *testing.T, d *testenv.Daemon, provider string) {
	c := connect(t, d)
	id := box(t, d, provider, "--name", "keeper-"+provider, "--vcpus", "1", trustingPython)
	sh(t, d, id, "mkdir -m 777 /job; mkfifo -m 666 /job/ask")
	addresses := func() string {
		return sh(t, d, id, "cat /proc/net/fib_trie /proc/net/if_inet6 2>/dev/null; cat /etc/hosts /etc/resolv.conf; nproc")
	}
	mustRun(t, c, id, shard.RunRequest{Name: p("keeper"), Command: []string{"sh", "-c", `exec python3 -c "$0" <>/job/ask`, keeper},
		Env: []string{"KEPT=yes"}, Workdir: "/job", User: "1234:4321", Restart: &shard.RestartSpec{Policy: shard.RestartNo}})
	address, before := addresses(), inspect(t, d, id)
	var last struct{ Count, PID, Threads float64 }
	tell := func(step int) {
		t.Helper()
		asked := time.Now()
		sh(t, d, id, "echo go >/job/ask")
		var line string
		testenv.Eventually(t, "the program tells", func() (bool, string) {
			log := logOf(t, c, id, "keeper")
			lines := strings.Split(log, "\n")
			if len(lines) < step+2 {
				return false, log
			}
			line = lines[step]
			return true, ""
		})
		var told map[string]any
		if err := json.Unmarshal([]byte(line), &told); err != nil {
			t.Fatalf("step %d: %v: %s", step, err, logOf(t, c, id, "keeper"))
		}
		for what, is := range told {
			if is == false {
				t.Errorf("step %d: of the program is lost: %s", step, what)
			}
		}
		const off = 2 * time.Second // its clock runs by itself, and is set right again and again
		wall := time.UnixMicro(int64(told["wall"].(float64) * 1e6))
		if wall.Before(asked.Add(-off)) || wall.After(time.Now().Add(off)) {
			t.Errorf("step %d: the program reads %s on the clock, between %s and %s", step, wall, asked, time.Now())
		}
		now := fmt.Sprint(told["hostname"], told["env"], told["cwd"], told["ids"])
		if want := "keeper-" + provider + "yes/job[1234 4321]"; now != want {
			t.Errorf("step %d: the program is %s, want %s", step, now, want)
		}
		if count := told["count"].(float64); count < last.Count || step > 1 && (told["pid"] != last.PID || told["threads"] != last.Threads) {
			t.Errorf("step %d: %v, before %+v", step, told, last)
		}
		last.Count, last.PID, last.Threads = told["count"].(float64), told["pid"].(float64), told["threads"].(float64)
		if got := addresses(); got != address {
			t.Errorf("step %d: the network is %s\nand was %s", step, got, address)
		}
		if now := inspect(t, d, id); !equalJSON(now, before) {
			t.Errorf("step %d: the record is %+v, and was %+v", step, now, before)
		}
	}
	tell(1)
	for step := 2; step <= 4; step++ {
		pause(t, c, id)
		switch step {
		case 2:
			time.Sleep(3 * time.Second) // a clock that stood still meanwhile shows
		case 3:
			d.Stop()
			d.Restart()
		}
		resume(t, c, id)
		tell(step)
	}
}

// hog holds random bytes, of which it says the sum at each line of its input.
const hog = `
import hashlib, os, sys
blob = [os.urandom(1 << 20) for _ in range(190)]
for line in sys.stdin:
    h = hashlib.sha256()
    for b in blob:
        h.update(b)
    print(h.hexdigest(), os.cpu_count(), flush=True)
`

// pauseBounds: a pause and a resume keep the bounds, and memory close to its bound comes back whole.
func pauseBounds(t *testing.T, d *testenv.Daemon, provider string) {
	c := connect(t, d)
	id := box(t, d, provider, "--memory", "256MiB", "--vcpus", "1", "--disk", "64MiB", trustingPython)
	sh(t, d, id, "mkfifo /ask")
	mustRun(t, c, id, shard.RunRequest{Name: p("hog"), Command: []string{"sh", "-c", `exec python3 -c "$0" <>/ask`, hog}, Restart: &shard.RestartSpec{Policy: shard.RestartNo}})
	for round := range 3 {
		sh(t, d, id, "echo >/ask")
		testenv.Eventually(t, "the sum of what it holds", func() (bool, string) {
			log := logOf(t, c, id, "hog")
			lines := strings.Split(log, "\n")
			for _, line := range lines[:len(lines)-1] {
				if line != lines[0] || !strings.HasSuffix(line, " 1") {
					t.Fatalf("the memory or the number of processors changed over a pause: %q", log)
				}
			}
			return len(lines) == round+2, log
		})
		if round < 2 {
			pause(t, c, id)
			resume(t, c, id)
		}
	}
	if got := inspect(t, d, id); got.OOM != nil || got.State != shard.StateRunning || got.Resources != (shard.Resources{MemoryMiB: 256, VCPUs: 1, DiskMiB: 64}) {
		t.Errorf("after it all: %+v", got)
	}
	if r := d.Shard("exec", id, "sh", "-c", "head -c 104857600 /dev/zero >/big"); r.Code == 0 {
		t.Error("a disk of 64 MiB took 100")
	}
	_ = d.Shard("exec", id, "python3", "-c", "x = [bytes(1 << 20) + b'x' for _ in range(300)]")
	testenv.Eventually(t, "too much memory ends the sandbox, as before", func() (bool, string) {
		got := inspect(t, d, id)
		return got.OOM != nil && got.OOM.Kills > 0, fmt.Sprintf("%+v", got)
	})
}

// endless is input without an end.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// TestPauseCommands: a pause ends commands, with a clear error, and nothing of them happens any more when the sandbox goes on; what
// ended commands left behind goes on.
func TestPauseCommands(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := box(t, d, provider)
		sh(t, d, id, "(while :; do echo x >>/left; sleep 0.02; done) </dev/null >/dev/null 2>&1 &")
		for round := range 2 {
			// Each writes as quickly as it can, so that the file's time is that of the last moment in which it ran.
			write := func(name string) []string {
				return script("while :; do echo x; done >>/" + name)
			}
			cli := d.Command("exec", "-i", id, "sh", "-c", "while :; do echo x; done >>/cli")
			in, err := cli.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = in.Close() }()
			stderr := new(strings.Builder)
			cli.Stderr = stderr
			if err := cli.Start(); err != nil {
				t.Fatal(err)
			}
			fed := d.Command("exec", "-i", id, "sh", "-c", "cat >/dev/null")
			complaint := new(strings.Builder)
			fed.Stdin, fed.Stderr = endless{}, complaint
			if err := fed.Start(); err != nil {
				t.Fatal(err)
			}
			watch := socket(t, d, id, "/root")
			attached := run(t, d, id, shard.ExecRequest{Command: write("attached"), Stdin: true})
			stream := open(t, d, id, attached)
			all := []string{attached,
				run(t, d, id, shard.ExecRequest{Command: write("alone")}),
				run(t, d, id, shard.ExecRequest{Command: write("tty"), TTY: true}),
				run(t, d, id, shard.ExecRequest{Command: script("while :; do sh -c 'echo x >>/forks'; done"), Attach: true}),
				// A shell at a terminal puts what it runs into a process group of its own.
				run(t, d, id, shard.ExecRequest{Command: script("set -m; sh -c 'while :; do echo x; done >>/job'; true"), TTY: true, Stdin: true}),
				run(t, d, id, shard.ExecRequest{Command: script("trap '' HUP TERM; set -m; sh -c 'while :; do echo x; done >>/deaf'; true"), TTY: true, Stdin: true}),
				run(t, d, id, shard.ExecRequest{Command: script("yes")}), // output that nobody reads
				run(t, d, id, shard.ExecRequest{Command: script("exit 3")})}
			waiting := make(chan string, 1)
			go func() {
				resp, err := rawHTTP(d).Get("http://shard/v0/sandboxes/" + id + "/exec/" + all[1] + "?wait=true")
				if err != nil {
					waiting <- err.Error()
					return
				}
				defer func() { _ = resp.Body.Close() }()
				body, _ := io.ReadAll(resp.Body)
				waiting <- resp.Status + string(body)
			}()
			files := []string{"/cli", "/attached", "/alone", "/tty", "/forks", "/job", "/deaf"}
			sh(t, d, id, "for f in "+strings.Join(files, " ")+"; do while [ ! -s $f ]; do sleep 0.05; done; done")

			pause(t, c, id)
			paused := time.Now()
			if code := exitCode(t, "the command line of a command", cli); code != 1 || !strings.HasPrefix(stderr.String(), "shard: ") || !strings.Contains(stderr.String(), "was paused") {
				t.Errorf("exec over a pause: exit code %d, %q", code, stderr)
			}
			if code := exitCode(t, "the command line of a command with input", fed); code != 1 || !strings.Contains(complaint.String(), "was paused") {
				t.Errorf("exec with input over a pause: exit code %d, %q", code, complaint)
			}
			if _, _, err := watch.Read(t.Context()); !strings.Contains(fmt.Sprint(err), "paused") {
				t.Errorf("a watch over a pause: %v", err)
			}
			if _, last, code := stream.all(); code != 1000 || !strings.HasPrefix(last, "\x05") || !strings.Contains(last, string(shard.CodeSandboxNotRunning)) || !strings.Contains(last, "was paused") {
				t.Errorf("the socket of a command over a pause: %q, %d", last, code)
			}
			if got := <-waiting; !strings.HasPrefix(got, "409 ") || !strings.Contains(got, "was paused") {
				t.Errorf("who waited for a command was told %q", got)
			}
			for _, exec := range all {
				if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec, nil); a.Status != 404 || a.code(t) != shard.CodeNotFound {
					t.Errorf("a command in a paused sandbox: %d %s", a.Status, a.Body)
				}
			}
			if a := call(t, d, "POST", "/v0/sandboxes/"+id+"/exec", shard.ExecRequest{Command: []string{"true"}}); a.code(t) != shard.CodeSandboxNotRunning {
				t.Errorf("exec in a paused sandbox: %d %s", a.Status, a.Body)
			}
			refused(t, d.Shard("exec", id, "true"), "paused", "resume")
			time.Sleep(time.Until(paused.Truncate(time.Second).Add(time.Second + 50*time.Millisecond)))

			resume(t, c, id)
			for _, exec := range all {
				if a := call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+exec, nil); a.Status != 404 {
					t.Errorf("a command after the resume: %d %s", a.Status, a.Body)
				}
			}
			if list := execs(t, d, id, ""); len(list.Execs) != 0 {
				t.Errorf("the commands after a resume: %+v", list)
			}
			left := sh(t, d, id, "wc -l </left")
			testenv.Eventually(t, "what an ended command left goes on", func() (bool, string) {
				now := sh(t, d, id, "wc -l </left")
				return now != left, now
			})
			testenv.Eventually(t, "the commands have ended in the sandbox", func() (bool, string) {
				ps := sh(t, d, id, "ps -o args | grep -v left")
				return !strings.Contains(ps, "echo x") && !strings.Contains(ps, "yes"), ps
			})
			for _, f := range files {
				if last := sh(t, d, id, "stat -c %Y "+f+"; rm "+f); last > fmt.Sprint(paused.Unix()) {
					t.Errorf("round %d: %s was written to after the resume: at %s, and the pause was over at %d", round, f, last, paused.Unix())
				}
			}
		}
	})
}

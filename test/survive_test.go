package test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// ideal is what a stream of numbered lines holds, as far as any test comes.
var ideal = sync.OnceValue(func() []byte {
	var b bytes.Buffer
	for n := numbersFrom; b.Len() < 8<<20; n++ {
		b.WriteString(strconv.Itoa(n))
		b.WriteByte('\n')
	}
	return b.Bytes()
})

// follower reads one command over many connections. Each gets a replay, so each must hold the streams from their first
// byte on, without a gap and without a byte twice.
type follower struct {
	t     *testing.T
	exec  string
	done  chan struct{} // of the connection
	most  [3]int        // bytes of each stream, at the best
	last  string
	conns int
}

func (f *follower) follow(d *testenv.Daemon, box string) {
	f.done = make(chan struct{})
	f.conns++
	s := open(f.t, d, box, f.exec)
	go func() {
		defer close(f.done)
		defer func() { _ = s.conn.Close() }()
		var got [3]int
		for {
			op, p, err := s.frame()
			if err != nil || op != opBinary {
				return
			}
			switch p[0] {
			case 1, 2:
				n := got[p[0]]
				if rest := p[1:]; !bytes.Equal(rest, ideal()[n:n+len(rest)]) {
					f.t.Errorf("connection %d, stream %d: behind byte %d comes %.60q, want %.60q", f.conns, p[0], n, rest, ideal()[n:n+len(rest)])
					return
				}
				got[p[0]] += len(p) - 1
				f.most[p[0]] = max(f.most[p[0]], got[p[0]])
			default:
				f.last = string(p)
			}
		}
	}()
}

// TestKill9Random: the daemon is killed at random moments, twice in a row at times and while it boots, with commands that
// print on both streams, commands that are just being started, and commands that end while there is no daemon. Nothing
// of it is lost, nothing comes twice, and nothing stays behind.
func TestKill9Random(t *testing.T) {
	t.Parallel()
	const rounds = 12
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		c := connect(t, d)
		rnd := rand.New(rand.NewPCG(20, 26))
		program := fmt.Sprintf(`n=%d; while [ ! -e /stop ]; do seq $n $((n+299)); seq $n $((n+299)) >&2; n=$((n+300)); sleep 0.1; done; exit 5`, numbersFrom)
		var followers []*follower
		for range 3 {
			f := &follower{t: t, exec: run(t, d, id, shard.ExecRequest{Command: script(program)})}
			f.follow(d, id)
			followers = append(followers, f)
		}
		silent := run(t, d, id, shard.ExecRequest{Command: script("read x; exit 6"), Stdin: true})
		for round := range rounds {
			// Commands that begin around the kill, and end before, in and after it.
			var started sync.Map // id → exit code
			var wg sync.WaitGroup
			for i := range 4 {
				pause := time.Duration(rnd.IntN(250)) * time.Millisecond
				lasts := rnd.IntN(6)
				wg.Go(func() {
					time.Sleep(pause)
					code := 10 + i
					e, err := c.Exec(t.Context(), id, shard.ExecRequest{Command: script(fmt.Sprintf("sleep 0.%d; echo out%d; exit %d", lasts, code, code))})
					if err == nil {
						started.Store(e.ID, code)
					}
				})
			}
			time.Sleep(time.Duration(rnd.IntN(300)) * time.Millisecond)
			d.Kill9()
			wg.Wait()
			if rnd.IntN(3) == 0 { // the next one is killed while it boots
				again := d.Command("daemon")
				if err := again.Start(); err != nil {
					t.Fatal(err)
				}
				time.Sleep(time.Duration(rnd.IntN(120)) * time.Millisecond)
				_ = again.Process.Kill()
				_ = again.Wait()
			}
			if rnd.IntN(2) == 0 {
				time.Sleep(600 * time.Millisecond) // all short ones end meanwhile
			}
			d.Restart()
			for _, f := range followers {
				<-f.done
				f.follow(d, id)
			}
			started.Range(func(exec, code any) bool {
				rec := finished(t, d, id, exec.(string))
				if rec.ExitStatus == nil || rec.ExitStatus.Code != code || rec.LostBytes != 0 {
					t.Errorf("round %d: a command that should exit with %d: %+v", round, code, rec)
				}
				if out, _, _ := open(t, d, id, exec.(string)).all(); out[1] != fmt.Sprintf("out%d\n", code) {
					t.Errorf("round %d: it wrote %q", round, out[1])
				}
				return true
			})
			if t.Failed() {
				t.FailNow()
			}
		}
		s := open(t, d, id, silent)
		s.message("\x00\n")
		if _, last, _ := s.all(); last != "\x03"+`{"code":6,"signal":0}` {
			t.Errorf("the silent command: %q", last)
		}
		sh(t, d, id, "touch /stop")
		for _, f := range followers {
			rec := finished(t, d, id, f.exec)
			<-f.done
			if rec.ExitStatus.Code != 5 || rec.LostBytes != 0 || f.last != "\x03"+`{"code":5,"signal":0}` {
				t.Errorf("at the end: %+v, %q", rec, f.last)
			}
			if f.most[1] != f.most[2] || f.most[1]%2400 != 0 {
				t.Errorf("at the end the streams have %d and %d bytes", f.most[1], f.most[2])
			}
			t.Logf("%d connections, %d bytes on each stream", f.conns, f.most[1])
		}
		testenv.Eventually(t, "nothing runs that is not listed, and nothing is listed as running that does not", func() (bool, string) {
			r := d.Shard("exec", id, "ps")
			var running []string
			list := execs(t, d, id, "").Execs
			for _, e := range list {
				if e.State == shard.ExecRunning {
					running = append(running, strings.Join(e.Command, " "))
				}
			}
			dirs, _ := filepath.Glob(filepath.Join(d.Root, "sandboxes", id, "execs", "*"))
			temporary, _ := filepath.Glob(filepath.Join(d.Root, "sandboxes", id, "execs", "*", "*tmp*"))
			ok := len(running) == 0 && strings.Count(r.Stdout, "sleep") == 0 && len(dirs) == len(list) && len(temporary) == 0
			return ok, fmt.Sprintf("%q run; %d listed, %d directories, %v; %s", running, len(list), len(dirs), temporary, r.Stdout)
		})
	})
}

// TestKill9Flood: a flood of output across the death of the daemon: what the clients received and what is counted is all
// that was written.
func TestKill9Flood(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		rnd := rand.New(rand.NewPCG(7, 7))
		const lines = 4_000_000
		for round := range 4 {
			exec := run(t, d, id, shard.ExecRequest{Command: []string{"seq", strconv.Itoa(numbersFrom), strconv.Itoa(numbersFrom + lines - 1)}, Attach: round%2 == 0})
			seen := make([]bool, lines)
			var last string
			read := func(s *rawSocket) {
				for {
					op, p, err := s.frame()
					if err != nil || op != opBinary {
						return
					}
					if p[0] == 3 {
						last = string(p)
						return
					}
					at, ok := place(string(p[1:]))
					for i := range p[1:] {
						if ok && (at+i)%8 == 7 {
							seen[(at+i)/8] = true
						}
					}
				}
			}
			read1 := make(chan struct{})
			s := open(t, d, id, exec)
			go func() { defer close(read1); read(s) }()
			time.Sleep(time.Duration(rnd.IntN(120)) * time.Millisecond)
			d.Kill9()
			<-read1 // what the daemon had sent is still read
			d.Restart()
			s = open(t, d, id, exec)
			_ = s.conn.SetDeadline(time.Now().Add(time.Minute))
			read(s)
			rec := finished(t, d, id, exec)
			received := 0
			for _, s := range seen {
				if s {
					received += 8
				}
			}
			// One message may have been passed on and not noted when the daemon died.
			sum, written := int64(received)+rec.LostBytes, int64(lines*8)
			if sum < written-32 || sum > written+64<<10+32 || rec.ExitStatus.Code != 0 {
				t.Errorf("round %d: received %d + lost %d = %d, written %d; %q, %+v", round, received, rec.LostBytes, sum, written, last, rec)
			}
			t.Logf("round %d: received %d + lost %d = written%+d", round, received, rec.LostBytes, sum-written)
		}
	})
}

// TestKill9Record: a command that was stored and never started is dropped by the next daemon, one whose output file is
// damaged runs on, and what is no command is swept.
func TestKill9Record(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		dir := filepath.Join(d.Root, "sandboxes", id, "execs")
		exec := run(t, d, id, shard.ExecRequest{Command: script("echo before; read x; echo after; exit 3"), Stdin: true})
		s := open(t, d, id, exec)
		if _, p, err := s.frame(); err != nil || string(p) != "\x01before\n" {
			t.Fatalf("%q, %v", p, err)
		}
		d.Kill9()
		record, err := os.ReadFile(filepath.Join(dir, exec, "exec.json"))
		if err != nil {
			t.Fatal(err)
		}
		write := func(name string, data []byte) {
			t.Helper()
			if err := os.MkdirAll(filepath.Dir(filepath.Join(dir, name)), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), data, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		const never = "00000000deadbeef"
		write(never+"/exec.json", bytes.ReplaceAll(record, []byte(exec), []byte(never)))
		write("00000000cafecafe/exec.json", record[:len(record)/2])
		write("00000000badbad00/other", nil)
		write(exec+"/output", []byte("not ours"))
		d.Restart()
		testenv.Eventually(t, "only the real one is listed", func() (bool, string) {
			list := execs(t, d, id, "").Execs
			return len(list) == 1 && list[0].ID == exec && list[0].State == shard.ExecRunning, fmt.Sprintf("%+v", list)
		})
		s = open(t, d, id, exec)
		s.message("\x00\n")
		out, last, _ := s.all()
		rec := finished(t, d, id, exec)
		// Where the agent had not heard yet that its output was held, not even that was lost.
		lost := int64(len("before\nafter\n") - len(out[1]))
		if !strings.HasSuffix(out[1], "after\n") || !strings.Contains(last, `"code":3`) || rec.LostBytes != lost || rec.Truncated != (lost > 0) {
			t.Errorf("%q %q, %+v", out, last, rec)
		}
		if got := call(t, d, "GET", "/v0/sandboxes/"+id+"/exec/"+never+"?wait=true", nil).code(t); got != shard.CodeNotFound {
			t.Errorf("the one that never started: %s", got)
		}
		if left, _ := filepath.Glob(filepath.Join(dir, "*")); len(left) != 1 {
			t.Errorf("left: %v", left)
		}
		// A sandbox that dies while there is no daemon leaves no commands.
		run(t, d, id, shard.ExecRequest{Command: []string{"yes"}})
		d.Kill9()
		killMachine(t, id)
		d.Restart()
		if s := state(t, d, id); s != shard.StateStopped {
			t.Errorf("it is %s", s)
		}
		if _, err := os.Stat(dir); !os.IsNotExist(err) {
			t.Errorf("its commands are still there: %v", err)
		}
	})
}

package agent_test

import (
	"bytes"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/guest"
)

// reportCPU reports the agent's own processor time per round, which a busy machine does not stretch.
func reportCPU(b *testing.B, x *box) {
	if x.runsc != nil {
		return
	}
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(x.pid) + "/stat")
	x.must(err)
	fields := strings.Fields(string(stat[bytes.LastIndexByte(stat, ')')+1:]))
	user, _ := strconv.Atoi(fields[11])
	system, _ := strconv.Atoi(fields[12])
	b.ReportMetric(float64(user+system)*10/float64(b.N), "agent-cpu-ms/op")
}

// BenchmarkFloor is fork, exec and wait of the same program by this process: what no agent can beat.
func BenchmarkFloor(b *testing.B) {
	busybox, err := exec.LookPath("busybox")
	if err != nil {
		b.Skip("busybox is not installed")
	}
	for b.Loop() {
		if err := exec.Command(busybox, "true").Run(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkPing(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	for b.Loop() {
		x.must(s.Call(x.ctx(), guest.OpPing, nil, nil))
	}
}

func BenchmarkExecTrue(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	for b.Loop() {
		c, k := x.start(s, guest.ExecSpec{Argv: guest.Strings{"/bin/busybox", "true"}})
		if x.end(k); k.exit.Code != 0 {
			b.Fatal(k.exit)
		}
		x.must(c.Forget(x.ctx()))
	}
}

// counter acknowledges at once and keeps nothing.
type counter struct {
	ready chan struct{}
	cmd   *guest.Command
	n     int64
	done  chan guest.Exit
}

func (k *counter) Output(_ byte, p []byte) {
	<-k.ready
	k.n += int64(len(p))
	k.cmd.Ack(len(p))
}
func (k *counter) Exited(e guest.Exit) { k.done <- e }
func (k *counter) Broken(err error)    { close(k.done) }

// BenchmarkOutput moves 256 MiB of a command's output per round.
func BenchmarkOutput(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	const size = 256 << 20
	b.SetBytes(size)
	for b.Loop() {
		k := &counter{ready: make(chan struct{}), done: make(chan guest.Exit, 1)}
		c, err := s.Exec(x.ctx(), x.spec(guest.ExecSpec{Argv: guest.Strings{"dd", "if=/dev/zero", "bs=128k", "count=2048"}}), k)
		x.must(err)
		k.cmd = c
		close(k.ready)
		if exit := <-k.done; exit.Code != 0 || k.n < size {
			b.Fatal(exit, k.n)
		}
	}
	reportCPU(b, x)
}

// BenchmarkInput moves 256 MiB into a command per round.
func BenchmarkInput(b *testing.B) {
	x := newBox(b, false)
	s := x.connect()
	const size = 256 << 20
	b.SetBytes(size)
	chunk := make([]byte, 256<<10)
	for b.Loop() {
		c, k := x.start(s, guest.ExecSpec{Argv: guest.Strings{"dd", "of=/dev/null", "bs=128k"}, Stdin: true})
		for range size / len(chunk) {
			_, err := c.Write(x.ctx(), chunk)
			x.must(err)
		}
		x.must(c.CloseStdin())
		x.end(k)
	}
	reportCPU(b, x)
}

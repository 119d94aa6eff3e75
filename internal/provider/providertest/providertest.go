//go:build linux

// Package providertest is the definition of a provider that works: one suite that every provider runs, with real
// machines on the real kernel. It knows the provider seam and the guest's protocol, no concrete provider; where providers
// may differ, Env says how.
package providertest

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// patience bounds every wait: it is never reached on a machine that works, however busy it is.
const patience = 60 * time.Second

// Env is the host around a provider under test.
type Env struct {
	// Spec describes a new machine whose root holds busybox under all its names, users root and dev (1000:1000), and
	// group staff (50).
	Spec func(t testing.TB, r shard.Resources) provider.Spec
	// Put adds a program to the root of a machine that was not started yet.
	Put func(t testing.TB, spec provider.Spec, name string, body []byte)
	// Reopen makes the provider anew over the same directories, as a restarted daemon does.
	Reopen func(t testing.TB) provider.Provider
	// Traces lists what of a machine is on the host, the files of its root and directory aside.
	Traces func(spec provider.Spec) []string
	// Parts are the processes on the host of a machine that is being paused or resumed, by what they are: "program", which
	// does it and ends, "main" and "helper". What is not there is 0.
	Parts func(spec provider.Spec) map[string]int
	// Injuries are what may befall a machine of this provider.
	Injuries []Injury
	// SharedKernel says that the guest's system calls go to the host's kernel.
	SharedKernel bool
	// ShowsBounds says that a guest sees its bounds on CPU and memory as the machine's size.
	ShowsBounds bool
}

// Injury is something that makes a machine sick from outside.
type Injury struct {
	Name string
	Do   func(t testing.TB, inst provider.Instance)
	// Ends says that the machine then ends by itself; else it must still be possible to kill it.
	Ends bool
}

// Factory makes a provider for one test, or skips the test where the provider's probe says that it does not work.
type Factory func(t *testing.T) (provider.Provider, *Env)

// Run runs the suite.
func Run(t *testing.T, factory Factory) {
	for _, part := range []struct {
		name string
		test func(*testing.T, provider.Provider, *Env)
	}{
		{"Commands", commands},
		{"Streams", streams},
		{"Files", files},
		{"Life", life},
		{"Refusals", refusals},
		{"Neighbours", neighbours},
		{"Recover", recovers},
		{"Pause", pauses},
		{"BrokenPauses", brokenPauses},
		{"Memory", memory},
		{"Processes", processes},
		{"Size", size},
		{"Injuries", injuries},
		{"Descriptors", descriptors},
		{"Trespass", trespass},
	} {
		t.Run(part.name, func(t *testing.T) {
			p, env := factory(t)
			part.test(t, p, env)
		})
	}
}

// box is a started machine with a session.
type box struct {
	testing.TB
	p       provider.Provider
	spec    provider.Spec
	inst    provider.Instance
	token   [guest.TokenSize]byte
	session *guest.Session
}

// start boots a machine, and removes it when the test ends.
func start(t testing.TB, p provider.Provider, spec provider.Spec) *box {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	inst, err := p.Start(ctx, spec)
	if err != nil {
		t.Fatalf("start: %v", err)
	}
	b := &box{TB: t, p: p, spec: spec, inst: inst}
	t.Cleanup(b.remove)
	_, _ = rand.Read(b.token[:])
	b.connect()
	boot := guest.BootArgs{Hostname: spec.Hostname, First: true, Workdir: "/work", Files: map[string]string{"/etc/hostname": spec.Hostname + "\n"}}
	if err := b.session.Call(ctx, guest.OpBoot, boot, nil); err != nil {
		t.Fatalf("boot: %v", err)
	}
	return b
}

// in is the box for a part of its test.
func (b *box) in(t testing.TB) *box {
	part := *b
	part.TB = t
	return &part
}

func (b *box) connect() {
	b.Helper()
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	conn, err := b.inst.Dial(ctx)
	if err != nil {
		b.Fatalf("dial: %v", err)
	}
	if b.session, err = guest.Connect(ctx, conn, b.token); err != nil {
		b.Fatalf("connect: %v", err)
	}
}

// remove destroys the machine; it may be called twice.
func (b *box) remove() {
	b.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	if err := b.p.Destroy(ctx, b.spec); err != nil {
		b.Errorf("destroy: %v", err)
	}
	_ = b.session.Close()
	b.letGo()
}

// letGo is what a daemon does that ends while the machine runs on.
func (b *box) letGo() {
	if err := b.inst.Close(); err != nil {
		b.Errorf("close the instance: %v", err)
	}
}

// ended waits until the machine is gone.
func (b *box) ended() provider.Exit {
	b.Helper()
	select {
	case <-b.inst.Done():
		return b.inst.Exit()
	case <-time.After(patience):
		b.Fatal("the machine does not end")
		return provider.Exit{}
	}
}

// result is what came of a command.
type result struct {
	out, err string
	exit     guest.Exit
}

// collector is a guest.Sink that keeps everything and acknowledges what it has.
type collector struct {
	mu       sync.Mutex
	out, err bytes.Buffer
	all      int
	ack      func(int)
	pending  int
	grown    chan struct{}
	end      chan struct{}
	exit     guest.Exit
	broken   error
}

func newCollector() *collector {
	return &collector{grown: make(chan struct{}, 1), end: make(chan struct{})}
}

func (c *collector) Output(channel byte, p []byte) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.all += len(p)
	if channel == guest.ChannelStderr {
		c.err.Write(p)
	} else {
		c.out.Write(p)
	}
	if c.ack != nil {
		c.ack(len(p))
	} else {
		c.pending += len(p)
	}
	select {
	case c.grown <- struct{}{}:
	default:
	}
}

func (c *collector) Exited(e guest.Exit) { c.exit = e; close(c.end) }
func (c *collector) Broken(err error)    { c.broken = err; close(c.end) }

// follow lets the collector acknowledge to its command.
func (c *collector) follow(cmd *guest.Command) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ack = cmd.Ack
	cmd.Ack(c.pending)
}

func (c *collector) size() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.all
}

func (c *collector) wait(t testing.TB) result {
	t.Helper()
	select {
	case <-c.end:
	case <-time.After(patience):
		t.Fatal("a command does not end")
	}
	if c.broken != nil {
		t.Fatalf("a command's stream broke: %v", c.broken)
	}
	return result{out: c.out.String(), err: c.err.String(), exit: c.exit}
}

var execs atomic.Int64

// begin starts a command.
func (b *box) begin(spec guest.ExecSpec) (*guest.Command, *collector, error) {
	if spec.ID == "" {
		spec.ID = fmt.Sprintf("exec-%d", execs.Add(1))
	}
	if spec.Env == nil {
		spec.Env = guest.Strings{"PATH=/bin:/usr/bin"}
	}
	ctx, cancel := context.WithTimeout(b.Context(), patience)
	defer cancel()
	c := newCollector()
	cmd, err := b.session.Exec(ctx, spec, c)
	if err == nil {
		c.follow(cmd)
	}
	return cmd, c, err
}

// run runs a command to its end, with input when stdin is not nil.
func (b *box) run(spec guest.ExecSpec, stdin io.Reader) result {
	b.Helper()
	spec.Stdin = stdin != nil
	cmd, c, err := b.begin(spec)
	if err != nil {
		b.Fatalf("exec %q: %v", spec.Argv, err)
	}
	if stdin != nil {
		if _, err := io.Copy(writer{b.Context(), cmd}, stdin); err != nil {
			b.Fatalf("write to %q: %v", spec.Argv, err)
		}
		if err := cmd.CloseStdin(); err != nil {
			b.Fatalf("end the input of %q: %v", spec.Argv, err)
		}
	}
	return c.wait(b)
}

type writer struct {
	ctx context.Context
	cmd *guest.Command
}

func (w writer) Write(p []byte) (int, error) { return w.cmd.Write(w.ctx, p) }

// sh runs a script and returns its output without the final line end; the script must succeed.
func (b *box) sh(script string) string {
	b.Helper()
	r := b.run(guest.ExecSpec{Argv: guest.Strings{"sh", "-c", script}}, nil)
	if r.exit != (guest.Exit{}) {
		b.Fatalf("%s: ended with %+v\n%s%s", script, r.exit, r.out, r.err)
	}
	return strings.TrimSuffix(r.out, "\n")
}

// notStarted says with which exit code the agent refused to start a command; 0 for another error.
func notStarted(err error) int {
	if e, ok := errors.AsType[*shard.Error](err); ok && e.Code == shard.CodeCommandNotStarted {
		return e.ExitCode
	}
	return 0
}

package testenv

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// Options of Start. The zero value starts a daemon with its own choice of provider in a lab of its own.
type Options struct {
	// Lab is the network to put the daemon in; nil makes a new one.
	Lab *Lab
	// Provider is the daemon's default provider; empty leaves the choice to it.
	Provider string
	// Args are more arguments for the daemon, behind `daemon`.
	Args []string
	// Env are more variables for the daemon.
	Env []string
	// Root is a data directory to use again; empty makes a new one.
	Root string
}

// Daemon is a real daemon in a private root, as one test or subtest sees it: what goes wrong fails that test.
type Daemon struct {
	*daemon
	t testing.TB
}

// daemon is what the views of one daemon share.
type daemon struct {
	// Root is its data directory: short, since socket paths are bounded.
	Root string

	o     Options
	bin   string
	log   string
	host  []string // the lab's links and rules before the daemon first ran
	marks []string

	mu   sync.Mutex
	cmd  *exec.Cmd
	done chan struct{}
	ids  map[string]bool // every sandbox id that was ever seen, to look for what is left of it
}

// Start starts a daemon and waits until it answers. When the test ends every sandbox is removed, the daemon stopped,
// and the test fails if anything of them is still on the host.
func Start(t testing.TB, o Options) *Daemon {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can make sandboxes: run as root")
	}
	if o.Lab == nil {
		o.Lab = NewLab(t)
	}
	d := &Daemon{t: t, daemon: &daemon{Root: o.Root, o: o, bin: Bin(t), log: filepath.Join(t.TempDir(), "daemon.log"), ids: make(map[string]bool)}}
	if d.Root == "" {
		root, err := os.MkdirTemp("/tmp", "sh")
		if err != nil {
			t.Fatal(err)
		}
		d.Root = root
	}
	d.marks = []string{d.Root + "/", d.Root + " "}
	d.host = d.labState()
	t.Cleanup(d.cleanup)
	d.Restart()
	return d
}

// Restart starts the daemon again, after Kill9 or Stop.
func (d *Daemon) Restart() {
	d.t.Helper()
	if err := d.launch(); err != nil {
		d.t.Fatal(err)
	}
}

func (d *Daemon) launch() error {
	args := append([]string{"--root", d.Root, "daemon", "--insecure-registry", d.o.Lab.Registry()}, d.o.Args...)
	if d.o.Provider != "" {
		args = append(args, "--provider", d.o.Provider)
	}
	logFile, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = logFile.Close() }()
	cmd := d.command(args...)
	cmd.Env = append(cmd.Environ(), d.o.Env...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	d.mu.Lock()
	d.cmd, d.done = cmd, done
	d.mu.Unlock()

	c := d.Client()
	defer c.Close()
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		_, err := c.Version(ctx)
		cancel()
		if err == nil {
			return nil
		}
		select {
		case <-done:
			return fmt.Errorf("the daemon ended before it answered:\n%s", d.Log())
		case <-time.After(5 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("the daemon does not answer within %s: %v\n%s", patience, err, d.Log())
		}
	}
}

// command is the program with arguments, in the daemon's network.
func (d *Daemon) command(args ...string) *exec.Cmd {
	cmd := d.o.Lab.Command(filepath.Join(d.bin, "shard"), args...)
	// A saved connection or a remote of the person who runs the tests must not lead them elsewhere.
	env := slices.DeleteFunc(cmd.Environ(), func(kv string) bool { return strings.HasPrefix(kv, "SHARD_") })
	cmd.Env = append(env, "XDG_CONFIG_HOME="+filepath.Join(d.Root, "no-config"))
	return cmd
}

// Command is the CLI for this daemon, to be started by the test.
func (d *Daemon) Command(args ...string) *exec.Cmd {
	return d.command(append([]string{"--root", d.Root}, args...)...)
}

// Shard runs the CLI to its end.
func (d *Daemon) Shard(args ...string) Result {
	d.t.Helper()
	return d.Feed(nil, args...)
}

// Feed runs the CLI with input.
func (d *Daemon) Feed(stdin io.Reader, args ...string) Result {
	d.t.Helper()
	cmd := d.Command(args...)
	cmd.Stdin = stdin
	r := Run(d.t, cmd)
	d.saw(r.Stdout)
	return r
}

// Must runs the CLI, which must succeed, and returns what it printed without the last newline.
func (d *Daemon) Must(args ...string) string {
	d.t.Helper()
	r := d.Shard(args...)
	if r.Code != 0 {
		d.t.Fatalf("shard %s: exit code %d\n%s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

var anyID = regexp.MustCompile(`\b[a-z]+-[a-z]+-[0-9a-f]{4}\b`)

// saw remembers the ids in a text.
func (d *Daemon) saw(text string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, id := range anyID.FindAllString(text, -1) {
		d.ids[id] = true
	}
}

// Client is a Go client of the daemon.
func (d *Daemon) Client() *client.Client {
	return client.New(client.Options{Dial: client.Unix(filepath.Join(d.Root, "shard.sock")), UserAgent: "testenv"})
}

// Lab is the network that the daemon is in.
func (d *Daemon) Lab() *Lab { return d.o.Lab }

// PID is the daemon's.
func (d *Daemon) PID() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.cmd.Process.Pid
}

// Log is everything the daemon wrote.
func (d *Daemon) Log() string {
	b, _ := os.ReadFile(d.log)
	return string(b)
}

// Kill9 ends the daemon as a crash would.
func (d *Daemon) Kill9() {
	d.mu.Lock()
	cmd, done := d.cmd, d.done
	d.mu.Unlock()
	_ = cmd.Process.Kill()
	<-done
}

// Stop ends the daemon in order.
func (d *Daemon) Stop() {
	d.t.Helper()
	if err := d.stop(); err != nil {
		d.t.Fatal(err)
	}
}

func (d *Daemon) stop() error {
	d.mu.Lock()
	cmd, done := d.cmd, d.done
	d.mu.Unlock()
	_ = cmd.Process.Signal(syscall.SIGTERM)
	select {
	case <-done:
		return nil
	case <-time.After(patience):
		_ = cmd.Process.Kill()
		<-done
		return fmt.Errorf("the daemon did not end within %s of SIGTERM:\n%s", patience, d.Log())
	}
}

// Alive says whether the daemon runs.
func (d *Daemon) Alive() bool {
	d.mu.Lock()
	done := d.done
	d.mu.Unlock()
	select {
	case <-done:
		return false
	default:
		return true
	}
}

// Import puts an image on the daemon under ref, without any registry.
func (d *Daemon) Import(ref string, img v1.Image) {
	d.t.Helper()
	d.Must("image", "import", Archive(d.t, ref, img), ref)
}

// EachProvider runs a test once for each provider (all that this version has, unless some are named), and skips it, with
// the daemon's own reason, for one that does not work on this host.
func (d *Daemon) EachProvider(t *testing.T, run func(t *testing.T, d *Daemon, provider string), names ...string) {
	t.Helper()
	if len(names) == 0 {
		names = []string{"runc", "gvisor"}
	}
	c := d.Client()
	defer c.Close()
	infos, err := c.Providers(t.Context())
	if err != nil {
		t.Fatalf("list the providers: %v", err)
	}
	for _, name := range names {
		t.Run(name, func(t *testing.T) {
			i := slices.IndexFunc(infos, func(p shard.ProviderInfo) bool { return p.Name == name })
			if i < 0 {
				t.Fatalf("the daemon does not know the provider %s", name)
			}
			if !infos[i].Available {
				t.Skipf("provider %s does not work on this host: %s", name, infos[i].Reason)
			}
			run(t, &Daemon{daemon: d.daemon, t: t}, name)
		})
	}
}

// Leftovers is what of the daemon's sandboxes, or with everything also of the daemon, is on this host.
func (d *Daemon) Leftovers(everything bool) Host {
	d.mu.Lock()
	var marks []string
	for id := range d.ids {
		marks = append(marks, id)
	}
	d.mu.Unlock()
	if everything {
		marks = append(marks, d.marks...)
	}
	return Observe(marks...)
}

// labState is what the lab's host has of links and rules.
func (d *Daemon) labState() []string {
	var state []string
	for _, what := range [][]string{{"ip", "-o", "link", "show"}, {"nft", "list", "tables"}, {"ip", "rule"}, {"ip", "-6", "rule"},
		{"ip", "-6", "route", "show"}, {"ip", "-6", "neigh", "show", "nud", "permanent"}} {
		out, err := d.o.Lab.Command(what[0], what[1:]...).Output()
		if err != nil {
			d.t.Logf("%s: %v", strings.Join(what, " "), err)
		}
		for line := range strings.Lines(string(out)) {
			fields := strings.Fields(line)
			if what[1] == "-6" && what[2] != "rule" && !strings.Contains(line, " dev sh") {
				continue // the lab's own
			}
			if what[1] == "-o" && len(fields) > 1 {
				fields = []string{"link", strings.TrimSuffix(fields[1], ":")}
			}
			// The firewall's table has one of two names.
			state = append(state, strings.TrimSuffix(strings.Join(fields, " "), "_"))
		}
	}
	return state
}

// cleanup removes every sandbox, ends the daemon and proves that nothing is left.
func (d *Daemon) cleanup() {
	if !d.Alive() {
		if err := d.launch(); err != nil {
			d.t.Errorf("start the daemon again to clean up: %v", err)
		}
	}
	if d.Alive() {
		d.removeAll()
		if err := d.stop(); err != nil {
			d.t.Error(err)
		}
	}
	d.saw(d.Log())
	if entries, err := os.ReadDir(filepath.Join(d.Root, "sandboxes")); err == nil {
		for _, e := range entries {
			d.saw(e.Name())
			d.t.Errorf("left behind: %s", filepath.Join("sandboxes", e.Name()))
		}
	}
	var left Host
	for deadline := time.Now().Add(patience / 2); ; time.Sleep(100 * time.Millisecond) {
		if left = d.Leftovers(true); left.Empty() || time.Now().After(deadline) {
			break
		}
	}
	if !left.Empty() {
		d.t.Errorf("left on the host after the daemon ended:\n%s", left)
	}
	for _, now := range d.labState() {
		if !slices.Contains(d.host, now) {
			d.t.Errorf("left in the daemon's network: %s", now)
		}
	}
	if d.t.Failed() {
		log := d.Log()
		d.t.Logf("the daemon's log (its end):\n%s", log[max(0, len(log)-16<<10):])
	}
	left.clear()
	if d.o.Root == "" {
		if err := os.RemoveAll(d.Root); err != nil {
			d.t.Errorf("remove the root: %v", err)
		}
	}
}

func (d *Daemon) removeAll() {
	c := d.Client()
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*patience)
	defer cancel()
	list, err := c.AllSandboxes(ctx, true)
	if err != nil {
		d.t.Errorf("list what is to be removed: %v", err)
		return
	}
	var wg sync.WaitGroup
	slots := make(chan struct{}, 4)
	for _, s := range list.Sandboxes {
		d.saw(s.ID)
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			if err := c.Remove(ctx, s.ID, true); err != nil && shard.CodeOf(err) != shard.CodeNotFound {
				d.t.Errorf("remove %s (%s): %v", s.ID, s.State, err)
			}
		})
	}
	wg.Wait()
}

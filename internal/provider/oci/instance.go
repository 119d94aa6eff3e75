//go:build linux

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/provider"
)

const handleVersion = 1

// handle is what a later daemon needs to find the machine. Helpers are processes without which it is of no use.
type handle struct {
	Version  int       `json:"v"`
	Provider string    `json:"provider"`
	Main     process   `json:"main"`
	Helpers  []process `json:"helpers,omitempty"`
}

// Instance is one machine. It implements provider.Instance.
type Instance struct {
	p      *OCI
	spec   provider.Spec
	group  *cgroup.Group
	handle handle

	first    atomic.Pointer[net.UnixConn] // the channel that Start made, until Dial takes it
	inherits []*os.File                   // what the runtime program is given beside the channel

	pidfds  []*os.File
	oom     *cgroup.OOMWatch
	owned   sync.WaitGroup // the goroutines of watch, and of takeBack
	quit    chan struct{}  // closed by Close
	closing sync.Once
	closed  error

	bounds sync.Mutex // held while the group's bounds are changed
	lent   bool       // they are raised; guarded by bounds

	ending atomic.Pointer[string] // why the provider itself ended the machine; the first reason counts
	exit   provider.Exit          // written before done is closed
	done   chan struct{}
}

var _ provider.Instance = (*Instance)(nil)

// Handle implements provider.Instance.
func (i *Instance) Handle() json.RawMessage {
	b, _ := json.Marshal(i.handle) // plain fields: cannot fail
	return b
}

// Dial implements provider.Instance.
func (i *Instance) Dial(ctx context.Context) (net.Conn, error) {
	select {
	case <-i.done:
		return nil, provider.ErrGone
	default:
	}
	if c := i.first.Swap(nil); c != nil {
		return c, nil
	}
	return i.p.flavour.dial(ctx, i)
}

// Done implements provider.Instance.
func (i *Instance) Done() <-chan struct{} { return i.done }

// Exit implements provider.Instance.
func (i *Instance) Exit() provider.Exit {
	<-i.done
	return i.exit
}

// Kill implements provider.Instance.
func (i *Instance) Kill(ctx context.Context) error {
	select {
	case <-i.done:
		return nil
	default:
	}
	i.ending.CompareAndSwap(nil, new("killed"))
	if err := i.group.Kill(ctx); err != nil {
		return fmt.Errorf("kill %s: %w", i.spec.ID, err)
	}
	select {
	case <-i.done:
		return nil
	case <-ctx.Done():
		return fmt.Errorf("kill %s: %w", i.spec.ID, ctx.Err())
	}
}

// Stats implements provider.Instance.
func (i *Instance) Stats(context.Context) (provider.Stats, error) {
	s, err := i.group.Stats()
	return provider.Stats{MemoryBytes: s.MemoryBytes, CPUNanos: s.CPUNanos, PIDs: s.PIDs}, err
}

// Close implements provider.Instance. Done stays as it is.
func (i *Instance) Close() error {
	i.closing.Do(func() {
		var errs []error
		if c := i.first.Swap(nil); c != nil {
			errs = append(errs, c.Close())
		}
		for _, f := range i.pidfds {
			errs = append(errs, f.Close())
		}
		if i.oom != nil {
			errs = append(errs, i.oom.Close())
		}
		if i.quit != nil {
			close(i.quit)
		}
		i.owned.Wait()
		i.closed = errors.Join(errs...)
	})
	return i.closed
}

// start boots the machine in its new control group. The caller undoes.
func (i *Instance) start(ctx context.Context) error {
	agent, err := i.p.placeAgent(i.spec)
	if err != nil {
		return err
	}
	return i.launch(ctx, patience, agent, "run")
}

// launch has the runtime make the machine in its new control group, by the command verb with these arguments, within the time;
// agent becomes PID 1.
// The caller undoes.
func (i *Instance) launch(ctx context.Context, most time.Duration, agent, verb string, more ...string) error {
	ctx, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	p, spec := i.p, i.spec
	oci, err := bundle(p.flavour, spec, agent, i.group.OCIPath())
	if err != nil {
		return err
	}
	dir := filepath.Join(spec.Dir, bundleName)
	if err := writeBundle(dir, oci); err != nil {
		return err
	}
	for _, name := range []string{logName, panicName} {
		if err := os.RemoveAll(filepath.Join(spec.Dir, name)); err != nil {
			return fmt.Errorf("remove an old log: %w", err)
		}
	}
	if err := os.Mkdir(p.stateDir(spec), 0o700); err != nil {
		return fmt.Errorf("make the runtime's directory: %w", err)
	}
	stdin, err := p.flavour.channel(i)
	if err != nil {
		return fmt.Errorf("make the agent's channel: %w", err)
	}
	defer func() { _ = stdin.Close() }()

	args := append([]string{verb, "--detach", "--bundle", dir, "--pid-file", filepath.Join(dir, pidName)}, more...)
	cmd := p.command(ctx, spec, append(args, runtimeID)...)
	// PID 1 inherits these. Its output goes nowhere: a pipe would tie it to this process, and a guest can write to a file
	// without end.
	cmd.Stdin, cmd.ExtraFiles = stdin, i.inherits
	// Inside the group from its first instruction: so Destroy also ends a start that a killed daemon left half done.
	if err := i.group.Start(cmd); err != nil {
		return fmt.Errorf("run the runtime: %w", err)
	}
	if err := cmd.Wait(); err != nil {
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return fmt.Errorf("the runtime failed: %w: %s", err, complaint(spec))
	}
	return i.take(dir)
}

// take finds the machine that the runtime left running, and watches it.
func (i *Instance) take(dir string) error {
	if err := i.find(dir); err != nil {
		return err
	}
	return i.watch()
}

// find fills the handle from what the runtime left.
func (i *Instance) find(dir string) error {
	pid, err := readPID(dir)
	if err != nil {
		return err
	}
	main, err := identify(pid)
	if err != nil {
		return fmt.Errorf("the machine ended at once: %w: %s", err, complaint(i.spec))
	}
	// The number could have been given to another program since; only one of ours is in the group.
	pids, err := i.group.Procs()
	if err == nil && !slices.Contains(pids, pid) {
		err = errNoProcess
	}
	if err != nil {
		return fmt.Errorf("the machine ended at once: look for process %d in its control group: %w: %s", pid, err, complaint(i.spec))
	}
	i.handle = handle{Version: handleVersion, Provider: i.p.flavour.name, Main: main}
	if i.p.flavour.helpers != nil {
		i.handle.Helpers, err = i.p.flavour.helpers(i)
	}
	return err
}

// watch opens the machine's processes and starts the goroutines that follow them. errNoProcess: it has ended.
func (i *Instance) watch() error {
	main, err := i.handle.Main.open()
	if err != nil {
		return err
	}
	i.pidfds = append(i.pidfds, main)
	var helpers []*os.File
	crippled := false
	for _, h := range i.handle.Helpers {
		f, err := h.open()
		if errors.Is(err, errNoProcess) {
			crippled = true
			continue
		}
		if err != nil {
			return errors.Join(err, i.Close())
		}
		i.pidfds = append(i.pidfds, f)
		helpers = append(helpers, f)
	}
	if i.oom, err = i.group.OOM(); err != nil {
		return errors.Join(err, i.Close())
	}
	i.owned.Go(func() { i.follow(main) })
	i.owned.Go(i.followOOM)
	for _, f := range helpers {
		i.owned.Go(func() {
			if wait(f) == nil {
				i.end("a helper process ended")
			}
		})
	}
	if crippled {
		i.owned.Go(func() { i.end("a helper process ended while no daemon ran") })
	}
	return nil
}

// follow waits for the machine's end and closes done when nothing of it is left.
func (i *Instance) follow(main *os.File) {
	if wait(main) != nil {
		return // Close
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	// From here on helpers end by themselves, unless somebody has stopped them.
	i.ending.CompareAndSwap(nil, new("PID 1 ended"))
	if err := i.group.Kill(ctx); err != nil && !errors.Is(err, os.ErrNotExist) {
		i.p.opt.Log.Error("processes are left of a machine that ended", "sandbox", i.spec.ID, "err", err)
	}
	i.exit = provider.Exit{OOM: i.oom.Kills() > 0, Detail: complaint(i.spec)}
	if why := i.ending.Load(); why != nil {
		i.exit.Detail = strings.TrimSpace(*why + " " + i.exit.Detail)
	}
	close(i.done)
}

// ends says whether the machine ends, or has, within settleTime.
func (i *Instance) ends(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	select {
	case <-i.done:
		return true
	case <-ctx.Done():
		return false
	}
}

// followOOM ends the whole machine when the kernel has killed a part of it: a program that lost one of its processes at
// random is worth less than one that starts anew.
func (i *Instance) followOOM() {
	if i.oom.Kills() == 0 {
		if _, ok := <-i.oom.C; !ok {
			return
		}
	}
	i.end("out of memory")
}

// end kills the machine for an inner reason.
func (i *Instance) end(reason string) {
	if !i.ending.CompareAndSwap(nil, &reason) {
		return
	}
	i.p.opt.Log.Info("a machine is being ended", "sandbox", i.spec.ID, "reason", reason)
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	if err := i.group.Kill(ctx); err != nil && !errors.Is(err, os.ErrNotExist) {
		i.p.opt.Log.Error("a machine does not end", "sandbox", i.spec.ID, "err", err)
	}
}

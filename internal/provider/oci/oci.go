//go:build linux

// Package oci is the provider of everything that an OCI runtime isolates: runc, and gVisor through shard-runsc. One
// builder makes the bundle of both; what differs stands in a small flavour.
//
// The daemon owns the control group, the network namespace and the root directory; the runtime only puts shard-init into
// them. A runtime program lives for one start and never again, except that gVisor is asked to hand a fresh channel to
// PID 1 after a daemon restart. Machines are watched by pidfd and ended by control group, never by asking the runtime.
//
// The package must not know images, networks, policies or the engine.
package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/provider"
)

const (
	// runtimeID is the name of every machine in its runtime's own directory. Runtimes take ids as prefixes and build
	// socket paths of them; since each machine has a directory to itself, one short name serves all.
	runtimeID = "box"
	// cleanup bounds what has to be done whatever became of the request.
	cleanup = 60 * time.Second
	// patience bounds the run of a runtime program: to start a machine, or to reach the agent in one.
	patience = 60 * time.Second
	// socketPathMax is the size of a unix socket's address, its final NUL included.
	socketPathMax = 108
	// logTail is how much of a runtime's complaint is kept, in bytes.
	logTail = 2 << 10
)

// Names of the provider's files in Spec.Dir.
const (
	bundleName = "bundle"
	logName    = "runtime.log"
	panicName  = "panic.log"
	socketName = "agent.sock"
	pidName    = "pid"
)

// Options says where the provider's parts are.
type Options struct {
	// Runtime is the runtime program, Init shard-init (static); an empty one makes Probe report what is missing.
	Runtime, Init string
	// RunDir is a private directory (made 0700) for runtime state, one directory for each machine named by its id. At most
	// 64 bytes long: gVisor puts a socket in it.
	RunDir string
	// Shared is a directory (made 0700) for what machines share, on the file system of their directories; with none, each has
	// its own.
	Shared string
	// Cgroups makes the machines' control groups; nil makes Probe report that there are none.
	Cgroups *cgroup.Manager
	// Log takes what fails in the background; nil discards.
	Log *slog.Logger
}

// OCI is a provider.Provider, and what all flavours have in common.
type OCI struct {
	flavour flavour
	opt     Options
	probed  atomic.Pointer[probed]
	agent   agentStore
}

var idPattern = regexp.MustCompile(`^[a-z0-9][a-z0-9_-]{0,63}$`)

// New makes the provider of a flavour, by its name. It is a provider.Pauser if the runtime can save machines.
func New(name string, o Options) (provider.Provider, error) {
	f, ok := flavours[name]
	if !ok {
		return nil, fmt.Errorf("there is no OCI provider %q", name)
	}
	if o.Log == nil {
		o.Log = slog.New(slog.DiscardHandler)
	}
	o.Log = o.Log.With("provider", name)
	if !filepath.IsAbs(o.RunDir) || len(o.RunDir) > 64 {
		return nil, fmt.Errorf("the runtime directory %q must be an absolute path of at most 64 bytes", o.RunDir)
	}
	if err := os.MkdirAll(o.RunDir, 0o700); err != nil {
		return nil, fmt.Errorf("make the runtime directory: %w", err)
	}
	o.clearTrials()
	return (&OCI{flavour: f, opt: o}).whole(), nil
}

// whole is the provider with what only its flavour can do.
func (p *OCI) whole() provider.Provider {
	if p.flavour.pauses {
		return pauser{p}
	}
	return p
}

// Name implements provider.Provider.
func (p *OCI) Name() string { return p.flavour.name }

// MinMemoryMiB implements provider.Bounded.
func (p *OCI) MinMemoryMiB() int64 { return p.flavour.minMemoryMiB }

// SharesLoopback implements provider.Networked.
func (p *OCI) SharesLoopback() bool { return p.flavour.loopback }

// Start implements provider.Provider.
func (p *OCI) Start(ctx context.Context, spec provider.Spec) (provider.Instance, error) {
	return p.make(ctx, spec, func(i *Instance) error { return i.start(ctx) })
}

// make makes a machine by start, in a control group of its own. On failure nothing is left.
func (p *OCI) make(ctx context.Context, spec provider.Spec, start func(*Instance) error) (_ provider.Instance, err error) {
	if err := p.check(spec); err != nil {
		return nil, err
	}
	group, err := p.opt.Cgroups.Create(spec.ID, p.flavour.limits(spec.Resources))
	if err != nil {
		return nil, err // nothing to undo, and a machine of this id that still runs keeps running
	}
	i := &Instance{p: p, spec: spec, group: group, done: make(chan struct{}), quit: make(chan struct{})}
	defer func() {
		if err != nil {
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
			defer cancel()
			err = errors.Join(err, i.Close(), p.Destroy(ctx, spec))
		}
	}()
	if err := start(i); err != nil {
		return nil, fmt.Errorf("start %s: %w", p.flavour.name, err)
	}
	return i, nil
}

// Recover implements provider.Provider. With ErrGone it still returns an Instance, whose Done is closed and whose Exit
// says what the control group knows.
func (p *OCI) Recover(_ context.Context, spec provider.Spec, h json.RawMessage) (provider.Instance, error) {
	if err := p.check(spec); err != nil {
		return nil, err
	}
	var handle handle
	if err := json.Unmarshal(h, &handle); err != nil {
		return nil, fmt.Errorf("read the handle of %s: %w", spec.ID, err)
	}
	if handle.Version != handleVersion || handle.Provider != p.flavour.name {
		return nil, fmt.Errorf("the handle of %s is of version %d for %q, not %d for %q", spec.ID, handle.Version, handle.Provider,
			handleVersion, p.flavour.name)
	}
	i := &Instance{p: p, spec: spec, handle: handle, done: make(chan struct{}), quit: make(chan struct{})}
	group, err := p.opt.Cgroups.Open(spec.ID)
	if errors.Is(err, fs.ErrNotExist) {
		i.exit = provider.Exit{Detail: "the machine ended while no daemon ran, and its control group is gone"}
		close(i.done)
		return i, provider.ErrGone
	}
	if err != nil {
		return nil, err
	}
	i.group = group
	err = i.watch()
	if errors.Is(err, errNoProcess) {
		i.exit.Detail = "the machine ended while no daemon ran"
		if watch, err := group.OOM(); err == nil {
			i.exit.OOM = watch.Kills() > 0
			_ = watch.Close()
		}
		close(i.done)
		return i, provider.ErrGone
	}
	if err != nil {
		return nil, fmt.Errorf("recover %s: %w", spec.ID, err)
	}
	if p.flavour.pauses {
		i.takeBack() // what was lent when the daemon died
	}
	return i, nil
}

// Destroy implements provider.Provider.
func (p *OCI) Destroy(ctx context.Context, spec provider.Spec) error {
	if !idPattern.MatchString(spec.ID) {
		return fmt.Errorf("%q is not the id of a machine", spec.ID)
	}
	var errs []error
	if p.opt.Cgroups != nil {
		errs = append(errs, p.opt.Cgroups.Destroy(ctx, spec.ID))
	}
	errs = append(errs, os.RemoveAll(p.stateDir(spec)))
	if spec.Dir != "" {
		errs = append(errs, os.RemoveAll(filepath.Join(spec.Dir, bundleName)))
		if err := os.Remove(filepath.Join(spec.Dir, socketName)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("destroy %s: %w", spec.ID, err)
	}
	return nil
}

func (p *OCI) check(spec provider.Spec) error {
	switch {
	case p.opt.Cgroups == nil || p.opt.Runtime == "" || p.opt.Init == "":
		return fmt.Errorf("the provider %s is not available on this host", p.flavour.name)
	case !idPattern.MatchString(spec.ID):
		return fmt.Errorf("%q is not the id of a machine", spec.ID)
	case len(p.stateDir(spec))+len("/runsc-"+runtimeID+".sock") >= socketPathMax:
		// gVisor would put its control socket elsewhere, where Destroy does not look.
		return fmt.Errorf("the directory %s is too long a path for a socket", p.stateDir(spec))
	case !filepath.IsAbs(spec.Root) || !filepath.IsAbs(spec.Dir):
		return errors.New("the machine's root and directory must be absolute paths")
	}
	return nil
}

// stateDir is the runtime's own directory for the machine.
func (p *OCI) stateDir(spec provider.Spec) string { return filepath.Join(p.opt.RunDir, spec.ID) }

// command is the runtime with its global flags. It gets an environment of its own, and a session of its own, so that a
// terminal's signals to the daemon stay with the daemon.
func (p *OCI) command(ctx context.Context, spec provider.Spec, args ...string) *exec.Cmd {
	all := append([]string{"--root", p.stateDir(spec), "--log", filepath.Join(spec.Dir, logName)}, p.flavour.flags(spec)...)
	cmd := exec.CommandContext(ctx, p.opt.Runtime, append(all, args...)...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
	cmd.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	return cmd
}

// complaint is the end of the runtime's log, for errors that only the daemon's log shows.
func complaint(spec provider.Spec) string {
	f, err := os.Open(filepath.Join(spec.Dir, logName))
	if err != nil {
		return ""
	}
	defer func() { _ = f.Close() }()
	if info, err := f.Stat(); err == nil && info.Size() > logTail {
		_, _ = f.Seek(-logTail, io.SeekEnd)
	}
	b, _ := io.ReadAll(io.LimitReader(f, logTail))
	return strings.TrimSpace(string(b))
}

// readPID reads what the runtime wrote into its pid file.
func readPID(dir string) (int, error) {
	b, err := os.ReadFile(filepath.Join(dir, pidName))
	if err != nil {
		return 0, fmt.Errorf("read the runtime's pid file: %w", err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(b)))
	if err != nil {
		return 0, fmt.Errorf("read the runtime's pid file: %w", err)
	}
	return pid, nil
}

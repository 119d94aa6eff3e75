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
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/provider"
)

// flavour is what differs between the runtimes.
type flavour struct {
	name string
	// flags are the runtime's global flags.
	flags func(provider.Spec) []string
	// adjust completes the bundle.
	adjust func(*specs.Spec, provider.Spec) error
	limits func(shard.Resources) cgroup.Limits
	// minMemoryMiB: the runtime itself does not fit into less.
	minMemoryMiB int64
	// channel makes the agent's channel and returns the end that becomes PID 1's standard input.
	channel func(*Instance) (*os.File, error)
	// dial makes a channel to a machine that runs.
	dial func(context.Context, *Instance) (net.Conn, error)
	// helpers finds the processes without which the machine is of no use.
	helpers func(*Instance) ([]process, error)
	// loopback: guests use the host's network stack.
	loopback bool
	// pauses: the runtime can save machines.
	pauses bool
	// refuses says why a runtime that describes itself so cannot be used, or "".
	refuses func(version) string
	// install says what to do when the runtime is missing.
	install string
}

var flavours = map[string]flavour{
	shard.ProviderRunc: {
		name:     shard.ProviderRunc,
		flags:    func(provider.Spec) []string { return nil },
		adjust:   adjustRunc,
		limits:   runcLimits,
		channel:  listen,
		dial:     func(ctx context.Context, i *Instance) (net.Conn, error) { return dialSocket(ctx, i.spec.Dir) },
		refuses:  refuseRunc,
		loopback: true,
		install:  "install runc 1.1 or later",
	},
	shard.ProviderGVisor: {
		name:         shard.ProviderGVisor,
		flags:        gvisorFlags,
		adjust:       adjustGVisor,
		limits:       gvisorLimits,
		channel:      pair,
		dial:         attach,
		helpers:      gofer,
		minMemoryMiB: 64,
		pauses:       true,
		refuses:      func(version) string { return "" },
		install:      "install shard-runsc beside shard (make shard-runsc builds it)",
	},
}

func runcLimits(r shard.Resources) cgroup.Limits {
	return cgroup.Limits{MemoryMax: r.MemoryMiB << 20, CPUs: r.VCPUs, PIDs: pidsMax}
}

// listen makes a unix socket in the machine's directory and returns it listening. PID 1 accepts from it, so that any
// later daemon can connect, and the path exists on the host alone.
func listen(i *Instance) (*os.File, error) {
	fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), socketName)
	err = withSocketPath(i.spec.Dir, func(path string) error {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if err := unix.Bind(fd, &unix.SockaddrUnix{Name: path}); err != nil {
			return os.NewSyscallError("bind", err)
		}
		return os.NewSyscallError("listen", unix.Listen(fd, 8))
	})
	if err != nil {
		_ = f.Close()
		return nil, err
	}
	return f, nil
}

func dialSocket(ctx context.Context, dir string) (conn net.Conn, err error) {
	err = withSocketPath(dir, func(path string) error {
		conn, err = new(net.Dialer).DialContext(ctx, "unix", path)
		return err
	})
	return conn, err
}

// withSocketPath calls f with a path of the machine's socket that is short enough for a socket address, wherever dir is.
func withSocketPath(dir string, f func(path string) error) error {
	d, err := os.OpenFile(dir, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return err
	}
	defer func() { _ = d.Close() }()
	return f("/proc/self/fd/" + strconv.Itoa(int(d.Fd())) + "/" + socketName)
}

func gvisorFlags(s provider.Spec) []string {
	return []string{
		"--panic-log", filepath.Join(s.Dir, panicName),
		"--platform=systrap",
		"--network=sandbox",
		"--ignore-cgroups",               // the daemon's
		"--overlay2=none",                // files belong on the sandbox's disk, where they outlive a kill
		"--host-uds=none",                // nothing of the host is reachable by a socket
		"--net-raw",                      // ping; what leaves is judged on the host
		"--gofer-network-namespace=new",  // the default leaves a mount behind
		"--host-settings=ignore",         // advice for operators, computed at every start
		"--sidecar-usage-policy=DEFAULT", // this program is its own sentry and gofer
	}
}

// gvisorLimits leaves room for the sentry beside the guest's memory.
func gvisorLimits(r shard.Resources) cgroup.Limits {
	l := cgroup.Limits{CPUs: r.VCPUs, PIDs: pidsMax}
	if m := r.MemoryMiB; m > 0 {
		l.MemoryHigh, l.MemoryMax = (m+32)<<20, (m+64)<<20
	}
	return l
}

// pair makes two connected sockets: one for PID 1, one for the first Dial. Unlike a socket that the guest accepts from,
// gVisor takes it along into a checkpoint and out again.
func pair(i *Instance) (*os.File, error) {
	host, guest, err := socketpair()
	if err != nil {
		return nil, err
	}
	i.first.Store(host)
	return guest, nil
}

// attach starts the agent's program a second time, in the machine, to hand a fresh socket to PID 1.
func attach(ctx context.Context, i *Instance) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	host, guest, err := socketpair()
	if err != nil {
		return nil, err
	}
	defer func() { _ = guest.Close() }()
	cmd := i.p.command(ctx, i.spec, "exec", "--pass-fd", "3:3", runtimeID, agentPath, "attach")
	cmd.ExtraFiles = []*os.File{guest}
	if err := cmd.Run(); err != nil {
		_ = host.Close()
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		return nil, fmt.Errorf("attach to %s: %w: %s", i.spec.ID, err, complaint(i.spec))
	}
	return host, nil
}

func socketpair() (*net.UnixConn, *os.File, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	host, guest := os.NewFile(uintptr(fds[0]), "host end"), os.NewFile(uintptr(fds[1]), "guest end")
	conn, err := net.FileConn(host)
	if err = errors.Join(err, host.Close()); err != nil {
		_ = guest.Close()
		return nil, nil, err
	}
	return conn.(*net.UnixConn), guest, nil
}

// gofer finds the process that serves the sentry's files.
func gofer(i *Instance) ([]process, error) {
	state, err := i.p.state(i.spec)
	if err != nil || state.GoferPID == 0 {
		return nil, err
	}
	p, err := identify(state.GoferPID)
	if err != nil {
		return nil, fmt.Errorf("the gofer: %w", err)
	}
	return []process{p}, nil
}

// gvisorState is what shard-runsc notes of a machine.
type gvisorState struct {
	GoferPID int `json:"goferPid"`
}

func (p *OCI) state(spec provider.Spec) (state gvisorState, err error) {
	b, err := os.ReadFile(filepath.Join(p.stateDir(spec), runtimeID+"_sandbox:"+runtimeID+".state"))
	if err == nil {
		err = json.Unmarshal(b, &state)
	}
	if err != nil {
		return state, fmt.Errorf("read the runtime's state: %w", err)
	}
	return state, nil
}

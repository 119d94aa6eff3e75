// Package provider is the seam between the engine and the ways of isolating a sandbox. A provider turns a Spec
// into a running machine with shard-init as PID 1 and hands out the byte channel to it; it knows nothing of
// images, networks, policies or clients, and the engine knows no concrete provider.
package provider

import (
	"context"
	"encoding/json"
	"errors"
	"net"

	"github.com/useshards/shard"
)

// Provider is one isolation mechanism on this host.
//
// Life cycle: Start makes an Instance from a Spec; the engine stores Instance.Handle durably; after a restart of the
// daemon Recover turns the handle back into an Instance, or says ErrGone. Destroy frees whatever Start made for an id,
// whether or not it ran, any number of times. Everything a provider creates on the host must be found again by the
// sandbox's id and directory alone, so that Destroy needs no memory.
type Provider interface {
	// Name is the word clients use: runc, gvisor, sysbox, firecracker, vz.
	Name() string
	// Probe says whether the provider works on this host, and if not, why and what to do. It may run the runtime once.
	Probe(ctx context.Context) Report
	// Start boots the machine and returns once shard-init's channel exists (not: answers). On failure nothing is left.
	Start(ctx context.Context, spec Spec) (Instance, error)
	// Recover finds a machine that an earlier daemon started. ErrGone: it no longer runs, and Exit says what is known.
	Recover(ctx context.Context, spec Spec, handle json.RawMessage) (Instance, error)
	// Destroy ends the machine if it still runs and removes every trace on the host except the files in spec.Root and
	// spec.Dir. It is idempotent, goes on after the first failure, and joins the errors.
	Destroy(ctx context.Context, spec Spec) error
}

// Pauser is a provider that can save a machine, its memory included, and go on with it later.
type Pauser interface {
	// Pause saves the machine into the empty directory dir and ends it. commit is called when all is on the disk and the
	// machine stands still; only once it has returned nil is the machine ended. When it or anything before it fails the
	// machine runs on and dir is empty, else the error is ErrLost, or ErrBusy: Settle lets it go on when that is possible.
	// A RefusedError is the doing of the guest, or of the host's memory.
	Pause(ctx context.Context, inst Instance, dir string, commit func() error) error
	// Resume starts the machine that Pause saved into dir, which stays as it is. spec.Root must hold the files as they were.
	// It is otherwise like Start. When it returns the guest runs, and its files are no longer those of dir.
	// A RefusedError is the doing of the host's memory.
	Resume(ctx context.Context, spec Spec, dir string) (Instance, error)
	// Settle finds out what became of a Pause or a Resume that was not finished, most often because its daemon ended, and
	// returns the handle of the machine, which runs, or ErrGone. ErrBusy: a runtime program is still at it, or the machine.
	Settle(ctx context.Context, spec Spec) (json.RawMessage, error)
}

// Forker is a provider that can copy memory while the source runs on.
type Forker interface {
	// Capture saves memory into dir; freeze is called while the source stands still, to copy its disk.
	Capture(ctx context.Context, inst Instance, dir string, freeze func() error) error
}

// Swapper is a provider whose sandboxes can have swap.
type Swapper interface{ Swap() }

// Bounded is a provider whose machines do not come up in less memory.
type Bounded interface{ MinMemoryMiB() int64 }

// Networked is a provider that can let its guests use the host's network stack, in the namespace of Spec.Netns.
type Networked interface {
	// SharesLoopback says that the guest's 127.0.0.1 is that of Spec.Netns, where the host can dial it itself.
	SharesLoopback() bool
}

// Report is the result of a Probe.
type Report struct {
	Available bool
	// Reason says, when not available, why and what to do about it.
	Reason string
	// Version is what the runtime says of itself.
	Version string
}

// Spec is everything a provider needs to know of one sandbox.
type Spec struct {
	// ID is the sandbox's id: unique under the daemon's root, of the form word-word-hhhh.
	ID string
	// Hostname is what the guest calls itself.
	Hostname string
	// Root is the host directory that becomes the guest's /; writable and mounted for as long as the machine runs.
	Root string
	// Dir is a private host directory (0700) for the provider's own files of this sandbox; it outlives the machine.
	Dir string
	// Netns is the path of the network namespace, with eth0 configured and lo up.
	Netns string
	// Resources are the bounds; 0 is none.
	Resources shard.Resources
}

// Instance is one running (or just ended) machine.
type Instance interface {
	// Handle is versioned, opaque JSON that Recover understands.
	Handle() json.RawMessage
	// Dial gives a byte channel to shard-init, on which package guest performs its handshake. The first call after
	// Start takes the channel that Start made; later calls, and the first after Recover, make a new one.
	Dial(ctx context.Context) (net.Conn, error)
	// Done is closed when the machine is gone: PID 1 has ended, for whatever reason.
	Done() <-chan struct{}
	// Exit says how it ended; valid after Done.
	Exit() Exit
	// Kill ends the machine at once and returns when it is gone.
	Kill(ctx context.Context) error
	// Stats reads the usage of the machine, its helpers on the host included.
	Stats(ctx context.Context) (Stats, error)
	// Close frees what this process holds of the machine and ends the watch of it. The machine runs on. Idempotent.
	Close() error
}

// Exit says how a machine ended.
type Exit struct {
	// OOM says that the host ended it for want of memory.
	OOM bool
	// Detail is for the daemon's log.
	Detail string
}

// Stats is the usage of one machine: memory in bytes, CPU time in nanoseconds.
type Stats struct {
	MemoryBytes int64
	CPUNanos    int64
	PIDs        int64
}

// ErrGone says that the machine of a handle no longer runs.
var ErrGone = errors.New("the machine is gone")

// ErrLost says that a pause failed in a way that also ended the machine.
var ErrLost = errors.New("the machine was lost while it was saved")

// ErrBusy says that something begun earlier is not over yet.
var ErrBusy = errors.New("what was begun on the machine earlier is still under way")

// RefusedError says that a pause or a resume was not begun, since it would not have ended well. Reason tells the user.
type RefusedError struct{ Reason string }

func (e *RefusedError) Error() string { return e.Reason }

// ErrForeign says that a machine was saved, or started, by another version of the provider: this one cannot go on with it.
var ErrForeign = errors.New("the machine is of another version of the provider")

// Info is what clients see of p.
func (r Report) Info(p Provider, isDefault bool) shard.ProviderInfo {
	return shard.ProviderInfo{Name: p.Name(), Available: r.Available, Reason: r.Reason, Version: r.Version, Default: isDefault,
		Capabilities: CapabilitiesOf(p)}
}

// CapabilitiesOf derives the public capabilities from what p implements, so that they cannot lie.
func CapabilitiesOf(p Provider) shard.Capabilities {
	_, pauses := p.(Pauser)
	_, forks := p.(Forker)
	_, swaps := p.(Swapper)
	return shard.Capabilities{Create: true, Start: true, Stop: true, Remove: true, Pause: pauses, Resume: pauses, Fork: forks,
		Port: true, Swap: swaps}
}

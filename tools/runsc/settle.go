package main

import (
	"context"
	"strings"
	"time"

	"github.com/google/subcommands"
	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/container"
	"gvisor.dev/gvisor/runsc/flag"
)

// settle makes a sandbox that a "save" or a "restore" left behind run, whatever these were at when they were killed. Neither
// the state file, which is written after the fact, nor any call of the sentry says whether a guest stands still, and to
// resume one that does not is fatal to the sentry; so this looks at the sentry's own goroutines. It waits while the sentry
// still does what it was told. It exits with noGuest where there is none, because a restore did not come so far.
type settle struct{}

const noGuest = 9

// Name implements subcommands.Command.
func (*settle) Name() string { return "settle" }

// Synopsis implements subcommands.Command.
func (*settle) Synopsis() string { return "make a container run that a killed command left behind" }

// Usage implements subcommands.Command.
func (*settle) Usage() string {
	return "settle <container id> - make a container run that a killed command left behind.\n"
}

// SetFlags implements subcommands.Command.
func (*settle) SetFlags(*flag.FlagSet) {}

// FetchSpec implements util.SubCommand.
func (*settle) FetchSpec(conf *config.Config, f *flag.FlagSet) (string, *specs.Spec, error) {
	c, err := load(conf, f)
	if err != nil {
		return "", nil, err
	}
	return c.ID, c.Spec, nil
}

// Execute implements subcommands.Command.
func (*settle) Execute(_ context.Context, f *flag.FlagSet, args ...any) subcommands.ExitStatus {
	if f.NArg() != 1 {
		f.Usage()
		return subcommands.ExitUsageError
	}
	c, err := load(args[0].(*config.Config), f)
	if err != nil {
		return util.Errorf("loading container: %v", err)
	}
	var now activity
	for {
		stacks, err := c.Sandbox.Stacks()
		if err != nil {
			return util.Errorf("settle: %v", err)
		}
		if now = activityOf(stacks); !now.busy {
			break
		}
		time.Sleep(10 * time.Millisecond)
	}
	switch {
	case now.tasks == 0:
		_ = util.Errorf("settle: the container has no processes")
		return exit(noGuest, args)
	case now.tasks == now.stopped:
		c.Status = container.Paused
	case c.Status == container.Running:
		return subcommands.ExitSuccess
	default: // it runs, and only its state file does not know
		c.Status = container.Running
		if err := c.Pause(); err != nil {
			return util.Errorf("settle: %v", err)
		}
	}
	if err := c.Resume(); err != nil {
		return util.Errorf("settle: %v", err)
	}
	return subcommands.ExitSuccess
}

// exit ends a command that has args with an exit code of its own: of a failure runsc makes 128, whatever it was.
func exit(code int, args []any) subcommands.ExitStatus {
	*args[1].(*unix.WaitStatus) = unix.WaitStatus(code << 8)
	return subcommands.ExitSuccess
}

func load(conf *config.Config, f *flag.FlagSet) (*container.Container, error) {
	return container.Load(conf.RootDir, container.FullID{SandboxID: f.Arg(0), ContainerID: f.Arg(0)}, container.LoadOpts{Exact: true})
}

// activity is what a sentry does: how many tasks its guest has, and how many of them stand still; busy says that a call from
// outside is under way, or about to be read, beside ours and those that only wait.
type activity struct {
	tasks, stopped int
	busy           bool
}

// activityOf reads the stacks of a sentry. A guest of which all tasks are stopped is one that was paused: nobody can stop
// its PID 1 otherwise.
func activityOf(stacks string) activity {
	var a activity
	for goroutine := range strings.SplitSeq(stacks, "\n\n") {
		in := func(function string) bool { return strings.Contains(goroutine, function) }
		switch {
		case in("/kernel.(*Task).run("):
			a.tasks++
			if in("/kernel.(*Task).doStop(") {
				a.stopped++
			}
		case in("/urpc.(*Server).handleOne("):
			a.busy = a.busy || !in("/boot.(*debug).Stacks(") && !in("/boot.(*containerManager).Wait")
		}
	}
	return a
}

package main

import (
	"context"
	"fmt"
	"strings"

	"github.com/google/subcommands"
	"gvisor.dev/gvisor/pkg/state/statefile"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/util"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
	"gvisor.dev/gvisor/runsc/sandbox"
)

// save is gVisor's checkpoint command for a caller that wants to know that all is safe before anything ends, and to go on
// when it is not. The stock command ends the sandbox even when it could not write; with --leave-running it lets the guest
// run on behind what was saved, and change files. This one leaves a sandbox that was saved paused, until "resume" or its
// end, and one that could not be saved running. It does not begin what gVisor would not end well: then it exits with refused,
// and its output says why.
type save struct{ cmd.Checkpoint }

const refused = 10

// Name implements subcommands.Command.
func (*save) Name() string { return "save" }

// Synopsis implements subcommands.Command.
func (*save) Synopsis() string { return "pause a container and save its state" }

// Usage implements subcommands.Command.
func (*save) Usage() string {
	return "save --image-path=DIR <container id> - pause a container and save its state.\n"
}

// Execute implements subcommands.Command.
func (s *save) Execute(_ context.Context, f *flag.FlagSet, args ...any) subcommands.ExitStatus {
	if f.NArg() != 1 {
		f.Usage()
		return subcommands.ExitUsageError
	}
	conf := args[0].(*config.Config)
	c, err := load(conf, f)
	if err != nil {
		return util.Errorf("loading container: %v", err)
	}
	if err := c.Pause(); err != nil {
		return util.Errorf("pause: %v", err)
	}
	why, err := unsavable(c, false)
	if err == nil && why == "" {
		// Without compression the pages lie in a file of their own, aligned: the quickest to write and to read.
		err = c.Checkpoint(conf, f.Lookup("image-path").Value.String(), sandbox.CheckpointOpts{Compression: statefile.CompressionLevelNone, Resume: true})
		// The sentry has no descriptor of a pipe or a socket that has a name.
		if err != nil && (strings.Contains(err.Error(), "dead dentry") || strings.Contains(err.Error(), "prepareSaveDead")) {
			why, err = "a program holds something that was deleted and is neither a file nor a directory", nil
		} else if err == nil {
			why, err = unsavable(c, true)
		}
	}
	if err == nil && why == "" {
		return subcommands.ExitSuccess
	}
	if failed := c.Resume(); failed != nil {
		return util.Errorf("save: %v; and resume: %v", err, failed)
	}
	if err != nil {
		return util.Errorf("save: %v", err)
	}
	fmt.Println(why)
	return exit(refused, args)
}

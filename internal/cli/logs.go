package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type logsOptions struct {
	ref, name string
	follow    bool
}

func (a *App) logsCommand() *cobra.Command {
	var o logsOptions
	cmd := &cobra.Command{
		Use:   "logs [options] SANDBOX [NAME]",
		Short: "Print what a named process has written",
		Long: `Print what a named process of a sandbox has written over all its runs, as far as it is kept: the newest 16 MiB at
least. NAME may be left out when there is one process. --follow goes on until the process or the sandbox ends; Ctrl+C
ends it with exit code 130.`,
		Example: `  shard logs web api
  shard logs web -f`,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := laterOptions(cmd, args, true)
			if err != nil {
				return err
			}
			if help, _ := cmd.Flags().GetBool("help"); help {
				return cmd.Help()
			}
			if err := arguments(1, 2, "SANDBOX and NAME")(cmd, args); err != nil {
				return err
			}
			if o.ref = args[0]; len(args) == 2 {
				if o.name = args[1]; o.name == "" {
					return usagef("NAME is empty")
				}
			}
			return a.logs(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeProcesses,
	}
	cmd.Flags().BoolVarP(&o.follow, "follow", "f", false, "go on with what it writes from now on")
	return cmd
}

func (a *App) logs(ctx context.Context, o logsOptions) error {
	err := a.printLog(ctx, o)
	if errors.Is(err, errInterrupted) {
		return &exitError{code: exitInterrupted}
	}
	return err
}

func (a *App) printLog(ctx context.Context, o logsOptions) error {
	c := a.client()
	if o.name == "" {
		list, err := c.Processes(ctx, o.ref)
		if err != nil {
			return err
		}
		if o.name, err = onlyProcess(o.ref, list); err != nil {
			return err
		}
	}
	signal.Ignore(syscall.SIGPIPE)
	log, err := c.ProcessLog(ctx, o.ref, o.name, o.follow)
	if err != nil {
		return err
	}
	defer log.Close()
	_, err = io.Copy(a.Out, log)
	if errors.Is(err, syscall.EPIPE) {
		return nil // whoever read our output has enough
	}
	return err
}

func onlyProcess(ref string, list []shard.Process) (string, error) {
	switch len(list) {
	case 0:
		return "", fmt.Errorf("sandbox %s has no named process: start one with shard run", ref)
	case 1:
		return list[0].Name, nil
	}
	var names []string
	for _, p := range list {
		names = append(names, p.Name)
	}
	return "", usagef("sandbox %s has %d processes: name one of %s", ref, len(list), strings.Join(names, ", "))
}

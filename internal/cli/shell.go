package cli

import (
	"context"
	"errors"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type shellOptions struct {
	ref     string
	workdir string
	user    string
}

func (a *App) shellCommand() *cobra.Command {
	var o shellOptions
	cmd := &cobra.Command{
		Use:   "shell [options] SANDBOX",
		Short: "Open a shell in a running sandbox",
		Long: `Open a shell in a running sandbox, on this terminal: bash if the sandbox has one, else sh. The exit code is the shell's;
127 when the sandbox has no shell or no such working directory.`,
		Example: `  shard shell --workdir /src web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			return a.shell(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeSandboxes(1, running),
	}
	cmd.Flags().StringVar(&o.workdir, "workdir", "", "`DIR` to start in (default the sandbox's)")
	cmd.Flags().StringVar(&o.user, "user", "", "`USER`: name or uid, and :group (default the sandbox's)")
	return cmd
}

func (a *App) shell(ctx context.Context, o shellOptions) error {
	if !isTerminal(a.In) {
		return usagef("stdin is not a terminal: run a script with shard exec -i %s sh", o.ref)
	}
	s := session{App: a, client: a.client(), ref: o.ref}
	var err error
	// To try costs the usual sandbox nothing; to look for bash first would cost every one a round trip.
	for _, program := range []string{"bash", "sh"} {
		err = s.run(ctx, execOptions{ref: o.ref, command: []string{program}, workdir: o.workdir, user: o.user, interactive: true, tty: true})
		if shard.CodeOf(err) != shard.CodeCommandNotStarted {
			return err
		}
	}
	if e, ok := errors.AsType[*exitError](err); ok {
		err = e.err
	}
	return &exitError{exitNotFound, err}
}

package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"
)

func (a *App) startCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "start SANDBOX",
		Short:   "Start a stopped sandbox with the files it kept",
		Example: `  shard start web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.start(cmd.Context(), args[0])
		},
		ValidArgsFunction: a.completeSandboxes(1, stopped),
	}
}

func (a *App) start(ctx context.Context, ref string) error {
	sb, err := a.client().Start(ctx, ref)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.Out, sb.ID)
	return err
}

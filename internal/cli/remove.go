package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type removeOptions struct {
	refs  []string
	force bool
}

func (a *App) removeCommand() *cobra.Command {
	var o removeOptions
	cmd := &cobra.Command{
		Use:     "remove [options] SANDBOX…",
		Aliases: []string{"rm"},
		Short:   "Remove sandboxes and their files",
		Long: `Remove sandboxes and their files. Prints the id of each one that is gone; failures follow at the end, with exit code 1.
With --force, a running or paused one is stopped first, and one that does not exist is no failure.`,
		Example: `  shard remove --force web`,
		Args:    arguments(1, -1, "SANDBOX…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.refs = args
			return a.remove(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeSandboxes(0, anySandbox),
	}
	cmd.Flags().BoolVar(&o.force, "force", false, "stop a running or paused sandbox first; ignore one that does not exist")
	return cmd
}

func (a *App) remove(ctx context.Context, o removeOptions) error {
	c := a.client()
	return a.each(ctx, o.refs, func(ref string) (string, error) {
		id := ref
		if !shard.IsID(ref) { // the answer has no body, and the id is what we print
			sb, err := c.Inspect(ctx, ref)
			switch {
			case err == nil:
				id = sb.ID
			case o.force && shard.CodeOf(err) == shard.CodeNotFound:
				return "", nil
			default:
				return "", err
			}
		}
		err := c.Remove(ctx, id, o.force)
		if o.force && shard.CodeOf(err) == shard.CodeNotFound {
			return "", nil
		}
		return id, err
	})
}

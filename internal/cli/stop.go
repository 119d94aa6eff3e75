package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) stopCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "stop SANDBOX…",
		Short: "Stop sandboxes and keep their files",
		Long: `Stop sandboxes: every process gets TERM, and KILL 30 seconds later; the files stay. A paused one
loses its saved memory, and keeps its files. Prints the id of each one that
stopped; failures follow at the end, with exit code 1.`,
		Example: `  shard stop web db`,
		Args:    arguments(1, -1, "SANDBOX…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.verb(cmd.Context(), args, a.client().Stop)
		},
		ValidArgsFunction: a.completeSandboxes(0, live),
	}
}

// verb does one thing to several sandboxes and prints the id of each.
func (a *App) verb(ctx context.Context, refs []string, do func(context.Context, string) (*shard.Sandbox, error)) error {
	return a.each(ctx, refs, func(ref string) (string, error) {
		sb, err := do(ctx, ref)
		switch {
		case errors.Is(err, errInterrupted):
			return "", fmt.Errorf("%w; the daemon goes on with sandbox %q if it had begun: look with shard list --all", errInterrupted, ref)
		case err != nil:
			return "", err
		}
		return sb.ID, nil
	})
}

// each does one thing to several sandboxes, prints what it returns, goes on after a failure and reports the failures
// in the end. An interrupt ends it at once.
func (a *App) each(ctx context.Context, refs []string, do func(ref string) (string, error)) error {
	f := &failures{}
	for _, ref := range refs {
		text, err := do(ref)
		if errors.Is(err, errInterrupted) {
			f.errs = append(f.errs, err)
			break
		}
		if err != nil {
			f.errs = append(f.errs, err)
			continue
		}
		if text == "" {
			continue
		}
		if _, err := fmt.Fprintln(a.Out, text); err != nil {
			return err
		}
	}
	if len(f.errs) > 0 {
		return f
	}
	return nil
}

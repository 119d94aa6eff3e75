package cli

import (
	"context"
	"encoding/json"
	"errors"
	"io"

	"github.com/spf13/cobra"
)

type watchOptions struct {
	ref, path string
	recursive bool
}

func (a *App) watchCommand() *cobra.Command {
	var o watchOptions
	cmd := &cobra.Command{
		Use:   "watch [options] SANDBOX PATH",
		Short: "Report what changes below a directory of a sandbox",
		Long: `Report what changes below a directory of a running sandbox, one JSON object per line: type (created, modified, deleted,
moved, or overflow when events were dropped), path, from (where a moved entry was), is_dir and time.

It ends with the directory or the sandbox; Ctrl+C ends it with exit code 130.`,
		Example: `  shard watch web /srv
  shard watch --recursive=false web /tmp`,
		Args: arguments(2, 2, "SANDBOX and PATH"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref, o.path = args[0], args[1]
			return a.watch(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeSandboxes(1, running),
	}
	cmd.Flags().BoolVar(&o.recursive, "recursive", true, "watch the directories below too")
	return cmd
}

func (a *App) watch(ctx context.Context, o watchOptions) error {
	err := a.watchEvents(ctx, o)
	if errors.Is(err, errInterrupted) {
		return &exitError{code: exitInterrupted}
	}
	return err
}

func (a *App) watchEvents(ctx context.Context, o watchOptions) error {
	w, err := a.client().Watch(ctx, o.ref, o.path, o.recursive)
	if err != nil {
		return err
	}
	defer w.Close()
	out := json.NewEncoder(a.Out)
	out.SetEscapeHTML(false)
	for {
		e, err := w.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
		if err := out.Encode(e); err != nil {
			return err
		}
	}
}

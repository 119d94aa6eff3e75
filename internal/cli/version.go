package cli

import (
	"context"

	"github.com/spf13/cobra"
)

func (a *App) versionCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "version [options]",
		Short: "Show the versions of this program and of the daemon",
		Long: `Show the versions of this program and of the daemon. Without a daemon, the table shows this program's alone and
--format json fails; shard --version never asks the daemon.`,
		Example: `  shard version --format json`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.version(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) version(ctx context.Context, f format) error {
	daemon, err := a.client().Version(ctx)
	if f == formatJSON {
		if err != nil {
			return err
		}
		return a.printJSON(struct {
			Client string `json:"client"`
			Daemon string `json:"daemon"`
		}{a.Version, daemon.Version})
	}
	version := "-"
	if err == nil {
		version = daemon.Version
	}
	if perr := a.printTable([]string{"PROGRAM", "VERSION"}, []string{"client", a.Version}, []string{"daemon", dash(version)}); perr != nil {
		return perr
	}
	if err != nil {
		a.warn("%s", a.explain(nil, err))
	}
	return nil
}

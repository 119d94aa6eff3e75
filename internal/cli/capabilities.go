package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type capabilitiesOptions struct {
	provider string
	format   format
}

func (a *App) capabilitiesCommand() *cobra.Command {
	var o capabilitiesOptions
	cmd := &cobra.Command{
		Use:     "capabilities [options]",
		Short:   "Show what the daemon's provider can do",
		Example: `  shard capabilities --provider gvisor`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.capabilities(cmd.Context(), o)
		},
	}
	cmd.Flags().StringVar(&o.provider, "provider", "", "isolation `PROVIDER` (default the daemon's)")
	_ = cmd.RegisterFlagCompletionFunc("provider", a.completeProviders)
	formatFlag(cmd, &o.format, formatTable)
	return cmd
}

func (a *App) capabilities(ctx context.Context, o capabilitiesOptions) error {
	c, err := a.client().Capabilities(ctx, o.provider)
	if err != nil {
		return err
	}
	if o.format == formatJSON {
		return a.printJSON(c)
	}
	rows := [][]string{{"CAPABILITY", "SUPPORTED"}}
	for _, row := range capabilityRows(c) {
		rows = append(rows, []string{row.name, yesNo(row.can)})
	}
	return a.printTable(rows...)
}

type capabilityRow struct {
	name string
	can  bool
}

// capabilityRows are the capabilities in the order in which they are shown.
func capabilityRows(c *shard.Capabilities) []capabilityRow {
	return []capabilityRow{{"create", c.Create}, {"start", c.Start}, {"stop", c.Stop}, {"remove", c.Remove}, {"pause", c.Pause}, {"resume", c.Resume},
		{"fork", c.Fork}, {"snapshot", c.Snapshot}, {"port", c.Port}, {"swap", c.Swap}}
}

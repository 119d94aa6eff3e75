package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

// info is the answer of the info command.
type info struct {
	// Provider is what a daemon on this host would use by default, and Reason why, or why there is none.
	Provider  string               `json:"provider"`
	Reason    string               `json:"reason"`
	Providers []shard.ProviderInfo `json:"providers"`
}

func (a *App) infoCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "info [options]",
		Short: "Show what this host can run, without a daemon",
		Long: `Show, for each isolation provider, whether it works on this host, and if not, why and what to do. Needs no daemon;
as root it sees more.`,
		Example: `  sudo shard info`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.info(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) info(ctx context.Context, f format) error {
	if a.Probe == nil {
		return errors.New("this build has no providers: they run on Linux")
	}
	providers, err := a.Probe(ctx)
	if err != nil {
		return err
	}
	if len(providers) == 0 {
		return fmt.Errorf("this user may not look at the host's providers: run %s", SudoCommand(a.root, "info"))
	}
	out := info{Reason: "no provider works on this host", Providers: providers}
	for _, p := range providers {
		if p.Default {
			out.Provider, out.Reason = p.Name, "it works on this host and is preferred to the others that do"
			if !p.Available {
				out.Reason = p.Reason
			}
		}
	}
	if f == formatJSON {
		return a.printJSON(out)
	}
	return a.printTable(providerRows(providers)...)
}

package cli

import "github.com/spf13/cobra"

func (a *App) pauseCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "pause SANDBOX…",
		Short: "Save the memory of sandboxes and let them rest",
		Long: `Pause sandboxes: memory and files are kept on the host's disk, and they use no memory and no processor until they are resumed.
Named processes stand still and go on; commands that run are ended, and connections to forwarded ports are closed. Prints the id of
each one that is paused; failures follow at the end, with exit code 1. Ctrl+C ends the wait, not the pause. Only some providers can:
shard capabilities --provider NAME.`,
		Example: `  shard pause web db
  shard resume web db`,
		Args: arguments(1, -1, "SANDBOX…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.verb(cmd.Context(), args, a.client().Pause)
		},
		ValidArgsFunction: a.completeSandboxes(0, running),
	}
}

func (a *App) resumeCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "resume SANDBOX…",
		Short: "Let paused sandboxes go on where they stood",
		Long: `Resume paused sandboxes: their processes go on where they stood. Prints the id of each one that runs again; failures follow at the end,
with exit code 1.`,
		Example: `  shard resume web db`,
		Args:    arguments(1, -1, "SANDBOX…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.verb(cmd.Context(), args, a.client().Resume)
		},
		ValidArgsFunction: a.completeSandboxes(0, paused),
	}
}

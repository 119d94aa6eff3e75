package cli

import (
	"fmt"

	"github.com/spf13/cobra"
)

func (a *App) killCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "kill [options] SANDBOX NAME",
		Short: "End a named process for good",
		Long: `End a named process of a sandbox and all of its process group, call off its restarts, and print its name when it has
ended: TERM, and KILL 30 seconds later. The sandbox stays up. Only a process with the restart policy always returns, when
the sandbox starts the next time.`,
		Example: `  shard kill web api`,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := laterOptions(cmd, args, true)
			if err != nil {
				return err
			}
			if help, _ := cmd.Flags().GetBool("help"); help {
				return cmd.Help()
			}
			if err := arguments(2, 2, "SANDBOX and NAME")(cmd, args); err != nil {
				return err
			}
			if args[1] == "" {
				return usagef("NAME is empty")
			}
			p, err := a.client().KillProcess(cmd.Context(), args[0], args[1], force)
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.Out, p.Name)
			return err
		},
		ValidArgsFunction: a.completeProcesses,
	}
	cmd.Flags().BoolVar(&force, "force", false, "KILL at once, without the 30 seconds")
	return cmd
}

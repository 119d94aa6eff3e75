package cli

import (
	"context"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) psCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "ps [options] SANDBOX",
		Short: "List the named processes of a sandbox",
		Long: `List the named processes of a sandbox in the order in which they were first run. RESTARTS counts since the run or the
start of the sandbox, and shows the cap if there is one; EXIT is how the latest run ended.`,
		Example: `  shard ps web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.ps(cmd.Context(), args[0], f)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) ps(ctx context.Context, ref string, f format) error {
	list, err := a.client().Processes(ctx, ref)
	if err != nil {
		return err
	}
	if f == formatJSON {
		return a.printJSON(list)
	}
	rows := [][]string{{"NAME", "STATE", "RESTARTS", "EXIT", "POLICY", "COMMAND"}}
	for i := range list {
		p := &list[i]
		restarts := strconv.Itoa(p.Status.Restarts)
		if p.Restart.Retries > 0 {
			restarts += "/" + strconv.Itoa(p.Restart.Retries)
		}
		rows = append(rows, []string{p.Name, p.Status.State, restarts, exitCell(p.Status.Exit), p.Restart.Policy, strings.Join(p.Command, " ")})
	}
	return a.printTable(rows...)
}

func exitCell(e *shard.ExitStatus) string {
	switch {
	case e == nil:
		return "-"
	case e.Signal > 0:
		return fmt.Sprintf("signal %d", e.Signal)
	}
	return strconv.Itoa(e.Code)
}

// completeProcesses offers sandboxes, then the names of the processes of the one given.
func (a *App) completeProcesses(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	switch len(args) {
	case 0:
		return a.sandboxNames(cmd, nil, anySandbox), cobra.ShellCompDirectiveNoFileComp
	case 1:
	default:
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
	defer cancel()
	list, err := a.client().Processes(ctx, args[0])
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, p := range list {
		names = append(names, p.Name+"\t"+p.Status.State)
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

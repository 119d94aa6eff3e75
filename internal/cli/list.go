package cli

import (
	"context"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type listOptions struct {
	all    bool
	quiet  bool
	format format
}

func (a *App) listCommand() *cobra.Command {
	var o listOptions
	cmd := &cobra.Command{
		Use:     "list [options]",
		Aliases: []string{"ls"},
		Short:   "List sandboxes",
		Long: `List sandboxes; stopped ones only with --all. PROCESSES counts the named processes that have not ended, of all.
When the daemon could not read a record, everything else is printed, then what is wrong, and the exit code is 1.`,
		Example: `  shard list --all`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.quiet && cmd.Flags().Changed("format") {
				return usagef("--quiet and --format exclude each other")
			}
			return a.list(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.all, "all", false, "also stopped sandboxes")
	cmd.Flags().BoolVarP(&o.quiet, "quiet", "q", false, "print ids only")
	formatFlag(cmd, &o.format, formatTable)
	return cmd
}

func (a *App) list(ctx context.Context, o listOptions) error {
	answer, err := a.client().AllSandboxes(ctx, true)
	if err != nil {
		return err
	}
	shown := []shard.Sandbox{}
	for _, s := range answer.Sandboxes {
		if o.all || !hidden(&s) {
			shown = append(shown, s)
		}
	}
	switch {
	case o.quiet:
		for i := range shown {
			if _, err := fmt.Fprintln(a.Out, shown[i].ID); err != nil {
				return err
			}
		}
	case o.format == formatJSON:
		err = a.printJSON(shown)
	default:
		err = a.printTable(sandboxRows(shown, time.Now())...)
		if n := len(answer.Sandboxes) - len(shown); n > 0 && err == nil {
			fmt.Fprintf(a.Err, "%d stopped not shown (--all shows them)\n", n)
		}
	}
	if err != nil {
		return err
	}
	return warned(answer.Warnings)
}

// hidden says whether list leaves the sandbox out without --all: a stopped one that is not about to start again.
func hidden(s *shard.Sandbox) bool {
	return s.State == shard.StateStopped && (s.OOM == nil || s.OOM.RestartAt == nil)
}

// warned makes warnings of a list the reason for exit code 1.
func warned(warnings []string) error {
	if len(warnings) == 0 {
		return nil
	}
	f := &failures{}
	for _, w := range warnings {
		f.errs = append(f.errs, fmt.Errorf("%s", w))
	}
	return f
}

func sandboxRows(list []shard.Sandbox, now time.Time) [][]string {
	rows := [][]string{{"ID", "NAME", "IMAGE", "STATE", "UPTIME", "PROCESSES", "POLICY", "PROVIDER"}}
	for i := range list {
		s := &list[i]
		rows = append(rows, []string{s.ID, dash(s.Name), familiar(s.Image), shorten(stateCell(s, now)), uptime(s, now), processCount(s),
			dash(s.Policy), s.Provider})
	}
	return rows
}

// shorten cuts what a column of a list has no room for; inspect has all of it.
func shorten(cell string) string {
	const most = 72
	if runes := []rune(cell); len(runes) > most {
		return string(runes[:most-1]) + "…"
	}
	return cell
}

// stateCell is the state with why it came to it.
func stateCell(s *shard.Sandbox, now time.Time) string {
	text := string(s.State)
	switch {
	case s.State == shard.StateFailed && s.FailedReason != "":
		text += " (" + s.FailedReason + ")"
	case (s.State == shard.StateStopped || s.State == shard.StatePaused) && s.StoppedReason != "":
		text += " (" + s.StoppedReason + ")"
	}
	if s.State == shard.StateStopped && s.OOM != nil && s.OOM.RestartAt != nil {
		if due := s.OOM.RestartAt.Sub(now); due >= time.Second {
			text += ", starts again in " + humanDuration(due)
		} else {
			text += ", starts again now"
		}
	}
	return text
}

func uptime(s *shard.Sandbox, now time.Time) string {
	if s.StartedAt == nil || s.State != shard.StateRunning && s.State != shard.StateUnresponsive {
		return "-"
	}
	return humanDuration(now.Sub(*s.StartedAt))
}

// processCount is how many named processes have not ended, of all.
func processCount(s *shard.Sandbox) string {
	if len(s.Processes) == 0 {
		return "-"
	}
	n := 0
	for _, p := range s.Processes {
		if p.Status.State == "running" || p.Status.State == "restarting" {
			n++
		}
	}
	return fmt.Sprintf("%d/%d", n, len(s.Processes))
}

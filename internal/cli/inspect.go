package cli

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

type inspectOptions struct {
	ref    string
	format format
}

func (a *App) inspectCommand() *cobra.Command {
	var o inspectOptions
	cmd := &cobra.Command{
		Use:     "inspect [options] SANDBOX",
		Short:   "Show everything about a sandbox",
		Example: `  shard inspect --format table web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref = args[0]
			return a.inspect(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	formatFlag(cmd, &o.format, formatJSON)
	return cmd
}

func (a *App) inspect(ctx context.Context, o inspectOptions) error {
	in, err := a.client().Inspect(ctx, o.ref)
	if err != nil {
		return err
	}
	if o.format == formatJSON {
		return a.printJSON(in)
	}
	if err := a.printTable(inspectRows(in, time.Now())...); err != nil || in.Egress == nil {
		return err
	}
	rows := [][]string{{"ID", "RULE", "IMPLIED"}}
	for _, r := range in.Egress.Rules {
		rows = append(rows, []string{r.ID, ruleText(r.Rule), dash(r.Implied)})
	}
	fmt.Fprintln(a.Out)
	return a.printTable(rows...)
}

func inspectRows(in *shard.Inspection, now time.Time) [][]string {
	s := &in.Sandbox
	rows := [][]string{{"FIELD", "VALUE"}}
	add := func(field, value string) {
		if value != "" {
			rows = append(rows, []string{field, value})
		}
	}
	add("id", s.ID)
	add("name", s.Name)
	add("image", s.Image)
	add("digest", s.Digest)
	add("snapshot", s.Snapshot)
	add("forked from", s.ForkedFrom)
	add("provider", s.Provider)
	add("kernel", s.Kernel)
	add("state", stateCell(s, now))
	if s.OOM != nil {
		add("out of memory", fmt.Sprintf("%s, last %s", times(s.OOM.Kills), humanTime(s.OOM.KilledAt)))
	}
	add("memory", humanMiB(s.Resources.MemoryMiB))
	if s.Resources.VCPUs == 0 {
		add("vcpus", "none")
	} else {
		add("vcpus", fmt.Sprint(s.Resources.VCPUs))
	}
	add("disk", humanMiB(s.Resources.DiskMiB))
	add("swap", humanMiB(s.Resources.SwapMiB))
	add("created", humanTime(s.CreatedAt))
	if s.StartedAt != nil {
		add("started", humanTime(*s.StartedAt))
	}
	for _, p := range s.Processes {
		add("process", fmt.Sprintf("%s %s: %s", p.Name, p.Status.State, strings.Join(p.Command, " ")))
	}
	add("secrets", strings.Join(s.Secrets, ", "))
	for _, m := range s.Misuses {
		add("misuse", fmt.Sprintf("%s %s, last %s to %s: %s", m.Secret, times(m.Count), humanTime(m.LastAt), dash(m.Host), m.Reason))
	}
	for _, p := range s.Ports {
		public := ""
		if p.Public {
			public = " public"
		}
		add("port", fmt.Sprintf("%d to %d%s", p.HostPort, p.GuestPort, public))
	}
	add("policy", s.Policy)
	if in.Egress != nil && in.Egress.Missing {
		add("egress", "the policy is missing from the store: nothing can be reached")
	}
	return rows
}

// times says how often something happened.
func times[N int | int64](n N) string {
	if n == 1 {
		return "once"
	}
	return fmt.Sprintf("%d times", n)
}

// ruleText writes a rule as people do: allow suffix:example.com tcp:443.
func ruleText(r shard.Rule) string { return r.Action + " " + policy.Text(r) }

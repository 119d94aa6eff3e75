package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

func (a *App) policyLogsCommand() *cobra.Command {
	var f format
	var follow bool
	cmd := &cobra.Command{
		Use:   "logs [options] SANDBOX",
		Short: "Show what was decided about a sandbox's traffic",
		Long: `Show what was decided about a sandbox's traffic: lookups, web requests, and packets that were refused. Of what is refused
again and again some lines are shown, and the others counted. One JSON object per line; --format table is for people.

With --follow it goes on until the sandbox stops, is paused or is removed; Ctrl+C ends it with exit code 130.`,
		Example: `  shard policy logs --follow --format table web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			err := a.policyLogs(cmd.Context(), args[0], follow, f)
			if errors.Is(err, errInterrupted) {
				return &exitError{code: exitInterrupted}
			}
			return err
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	cmd.Flags().BoolVarP(&follow, "follow", "f", false, "go on with what comes")
	formatFlag(cmd, &f, formatJSON)
	return cmd
}

func (a *App) policyLogs(ctx context.Context, ref string, follow bool, f format) error {
	if !follow {
		decisions, cut, err := a.client().EgressLog(ctx, ref)
		if err != nil {
			return err
		}
		if cut > 0 {
			fmt.Fprintf(a.Err, "note: %d older decisions are left out\n", cut)
		}
		for i := range decisions {
			if err := a.printDecision(&decisions[i], f); err != nil {
				return err
			}
		}
		return nil
	}
	log, err := a.client().FollowEgressLog(ctx, ref)
	if err != nil {
		return err
	}
	defer log.Close()
	for {
		d, err := log.Next()
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err == nil {
			err = a.printDecision(d, f)
		}
		if err != nil {
			return err
		}
	}
}

// printDecision prints one decision as a line, or as JSON.
func (a *App) printDecision(d *shard.EgressDecision, f format) error {
	if f == formatJSON {
		out := json.NewEncoder(a.Out)
		out.SetEscapeHTML(false)
		return out.Encode(d)
	}
	dest := d.Host
	if d.Address != "" {
		if dest != "" {
			dest += " "
		}
		dest += net.JoinHostPort(d.Address, strconv.Itoa(d.Port))
	} else if d.Source == shard.EgressProxy && dest != "" {
		dest = net.JoinHostPort(dest, strconv.Itoa(d.Port))
	}
	why := "rule " + d.Rule
	if d.Protocol != "" {
		dest = d.Protocol + " " + dest
	}
	if d.RuleText != "" {
		why += " (" + d.RuleText + ")"
	}
	if d.Reason != "" {
		why += ": " + d.Reason
	}
	_, err := fmt.Fprintln(a.Out, printable(fmt.Sprintf("%s  %-5s  %-5s  %s  %s", d.Time.Local().Format(time.DateTime), d.Source, d.Verdict, dash(dest), why)))
	return err
}

func (a *App) policyLearnCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "learn [options] SANDBOX",
		Short: "Print the smallest policy that allows what a sandbox tried",
		Long: `Print the smallest policy that allows what a sandbox tried, as far as its log tells: run it with a policy that denies, or
with one that allows only lookups (--allow dns), and read what it needs. It is printed as the command that makes it. Exact names and
addresses alone are in it.`,
		Example: `  shard policy learn web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.policyLearn(cmd.Context(), args[0], f)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) policyLearn(ctx context.Context, ref string, f format) error {
	decisions, cut, err := a.client().EgressLog(ctx, ref)
	if err != nil {
		return err
	}
	rules, never := policy.Learn(decisions)
	if cut > 0 {
		fmt.Fprintf(a.Err, "note: %d older decisions are left out\n", cut)
	}
	if len(never) > 0 {
		fmt.Fprintln(a.Err, printable("note: no rule can open "+strings.Join(never, ", ")))
	}
	if len(rules) > policy.MaxRules {
		fmt.Fprintf(a.Err, "note: these are %d rules, and a policy has at most %d: put names together with suffix:\n", len(rules), policy.MaxRules)
	}
	if f == formatJSON {
		if rules == nil {
			rules = []shard.PolicyRule{}
		}
		return a.printJSON(map[string]any{"rules": rules})
	}
	if len(rules) == 0 {
		_, err := fmt.Fprintln(a.Out, "shard policy create --deny any NAME")
		return err
	}
	line := "shard policy create"
	for _, r := range rules {
		line += fmt.Sprintf(" \\\n  --%s '%s'", r.Action, r.Rule)
	}
	_, err = fmt.Fprintln(a.Out, line+" \\\n  NAME")
	return err
}

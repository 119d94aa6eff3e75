package cli

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
)

func (a *App) policyCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "policy COMMAND",
		Short: "Say what sandboxes may reach on the network",
		Long: `Say what sandboxes may reach on the network. A policy is a list of rules, of which the first that matches decides; what no
rule matches is denied. Private networks are out of reach, whatever the rules, and also without a policy.`,
		Example: `  shard policy create --allow suffix:pypi.org --allow files.pythonhosted.org pip-only`,
		RunE:    groupRun,
	}
	cmd.AddCommand(a.policyCreateCommand(), a.policyShowCommand(), a.policyListCommand(), a.policyRemoveCommand(),
		a.policyAttachCommand(), a.policyDetachCommand(), a.policyCheckCommand(), a.policyLogsCommand(), a.policyLearnCommand())
	return cmd
}

// ruleFlag is --allow or --deny: both append to one list, so that the order on the command line is that of the rules.
type ruleFlag struct {
	action string
	rules  *[]shard.PolicyRule
}

func (f ruleFlag) String() string { return "" }

func (f ruleFlag) Type() string { return "RULE" }

func (f ruleFlag) Set(text string) error {
	if _, err := policy.Parse(f.action, text); err != nil {
		return err
	}
	*f.rules = append(*f.rules, shard.PolicyRule{Action: f.action, Rule: text})
	return nil
}

func (a *App) policyCreateCommand() *cobra.Command {
	var rules []shard.PolicyRule
	cmd := &cobra.Command{
		Use:   "create [--allow RULE]… [--deny RULE]… NAME",
		Short: "Make a policy, or replace all rules of one",
		Long: `Make a policy, or replace all rules of one. The order of the options is the order of the rules. Prints the name. Running
sandboxes that have the policy are kept to the new rules at once.

RULE is DEST [tcp|udp[:PORTS]], in one argument. DEST is an address or a prefix (198.51.100.0/24), a name (example.com: ports
80 and 443 unless others are given), names below one (*.example.com), a name and all below it (suffix:example.com), any, or
dns (lookups of every name). PORTS is a list such as 22,8000-8010.`,
		Example: `  shard policy create --deny any offline
  shard policy create --allow 'suffix:example.com tcp:443' --allow '198.51.100.0/24 tcp:22' api-only`,
		Args: arguments(1, 1, "NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.policyCreate(cmd.Context(), args[0], rules)
		},
		ValidArgsFunction: a.completePolicies(0),
	}
	f := cmd.Flags()
	f.Var(ruleFlag{policy.Allow, &rules}, "allow", "let through what the rule matches; may be repeated")
	f.Var(ruleFlag{policy.Deny, &rules}, "deny", "stop what the rule matches; may be repeated")
	return cmd
}

func (a *App) policyCreate(ctx context.Context, name string, rules []shard.PolicyRule) error {
	p, err := a.client().PutPolicy(ctx, name, rules)
	if err != nil {
		return err
	}
	if p.DNS == shard.DNSClosed {
		fmt.Fprintln(a.Err, "note: with this policy no name can be looked up: no rule allows one, or a rule before it denies all")
	}
	_, err = fmt.Fprintln(a.Out, p.Name)
	return err
}

func (a *App) policyShowCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "show [options] NAME",
		Short:   "Show a policy, and which sandboxes have it",
		Example: `  shard policy show --format table api-only`,
		Args:    arguments(1, 1, "NAME"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.policyShow(cmd.Context(), args[0], f)
		},
		ValidArgsFunction: a.completePolicies(0),
	}
	formatFlag(cmd, &f, formatJSON)
	return cmd
}

func (a *App) policyShow(ctx context.Context, name string, f format) error {
	p, err := a.client().Policy(ctx, name)
	if err != nil {
		return err
	}
	if f == formatJSON {
		return a.printJSON(p)
	}
	if err := a.printTable([]string{"name", p.Name}, []string{"dns", p.DNS}, []string{"holders", dash(strings.Join(p.Holders, ", "))}); err != nil {
		return err
	}
	fmt.Fprintln(a.Out)
	rows := [][]string{{"RULE"}}
	for _, r := range p.Rules {
		rows = append(rows, []string{ruleText(r)})
	}
	return a.printTable(rows...)
}

func (a *App) policyListCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "list [options]",
		Aliases: []string{"ls"},
		Short:   "List policies",
		Example: `  shard policy list`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.policyList(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) policyList(ctx context.Context, f format) error {
	policies, warnings, err := a.client().Policies(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		type row struct {
			Name      string `json:"name"`
			RuleCount int    `json:"rule_count"`
		}
		rows := []row{}
		for _, p := range policies {
			rows = append(rows, row{p.Name, len(p.Rules)})
		}
		err = a.printJSON(rows)
	} else {
		rows := [][]string{{"NAME", "RULES"}}
		for _, p := range policies {
			rows = append(rows, []string{p.Name, fmt.Sprint(len(p.Rules))})
		}
		err = a.printTable(rows...)
	}
	if err != nil {
		return err
	}
	return warned(warnings)
}

func (a *App) policyRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "remove NAME…",
		Aliases: []string{"rm"},
		Short:   "Remove policies that no sandbox has",
		Long:    "Remove policies that no sandbox has. Prints each one that is gone; failures follow at the end, with exit code 1.",
		Example: `  shard policy remove api-only`,
		Args:    arguments(1, -1, "NAME…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := a.client()
			return a.each(cmd.Context(), args, func(name string) (string, error) {
				return name, c.RemovePolicy(cmd.Context(), name)
			})
		},
		ValidArgsFunction: a.completePolicies(0),
	}
}

func (a *App) policyAttachCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "attach SANDBOX POLICY",
		Short: "Give a stopped sandbox a policy",
		Long: `Give a stopped sandbox a policy, in place of the one it had. Prints the sandbox's id. To give a new sandbox one, use
shard create --policy; to change the rules of a running one, change its policy with shard policy create.`,
		Example: `  shard policy attach web api-only`,
		Args:    arguments(2, 2, "SANDBOX and POLICY"),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.client().AttachPolicy(cmd.Context(), args[0], args[1])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.Out, sb.ID)
			return err
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return a.completePolicies(1)(cmd, args, word)
			}
			return a.completeSandboxes(1, stopped)(cmd, args, word)
		},
	}
}

func (a *App) policyDetachCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "detach SANDBOX",
		Short:   "Take a stopped sandbox's policy away",
		Long:    "Take a stopped sandbox's policy away: it can then reach everything but private networks. Prints the sandbox's id.",
		Example: `  shard policy detach web`,
		Args:    arguments(1, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			sb, err := a.client().DetachPolicy(cmd.Context(), args[0])
			if err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.Out, sb.ID)
			return err
		},
		ValidArgsFunction: a.completeSandboxes(1, stopped),
	}
}

func (a *App) policyCheckCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "check [options] POLICY|SANDBOX DEST [PORT]",
		Short: "Say whether something can be reached, and which rule decides",
		Long: `Say whether a policy, or what a sandbox has, lets something be reached, and which rule decides. Nothing is looked up or
dialled. DEST is a name or an address. PORT is N, tcp:N, udp:N or icmp (default tcp:443). The exit code is 0 either way.`,
		Example: `  shard policy check api-only www.example.com 443`,
		Args:    arguments(2, 3, "POLICY or SANDBOX, and DEST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			port := ""
			if len(args) == 3 {
				port = args[2]
			}
			q, err := policy.ParseQuestion(args[1], port)
			if err != nil {
				return err
			}
			return a.policyCheck(cmd.Context(), args[0], q, f)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) > 0 {
				return nil, cobra.ShellCompDirectiveNoFileComp
			}
			names, directive := a.completePolicies(0)(cmd, args, word)
			return append(names, a.sandboxNames(cmd, nil, anySandbox)...), directive
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

// subject is what a check is about: a policy, or a sandbox with the policy it has.
type subject struct {
	Policy  string `json:"policy,omitempty"`
	Sandbox string `json:"sandbox,omitempty"`
}

func (s subject) String() string {
	switch {
	case s.Sandbox == "":
		return "policy " + s.Policy
	case s.Policy == "":
		return "sandbox " + s.Sandbox
	}
	return "sandbox " + s.Sandbox + " with policy " + s.Policy
}

func (a *App) policyCheck(ctx context.Context, ref string, q policy.Question, f format) error {
	who, rules, err := a.rulesOf(ctx, ref)
	if err != nil {
		return err
	}
	x := rules.Explain(q)
	if f == formatTable {
		_, err := fmt.Fprintln(a.Out, printable(who.String()+": "+x.Sentence))
		return err
	}
	verdict := policy.Deny
	if x.Allow {
		verdict = policy.Allow
	}
	return a.printJSON(struct {
		subject
		Destination string `json:"destination"`
		Verdict     string `json:"verdict"`
		Rule        string `json:"rule"`
		RuleText    string `json:"rule_text,omitempty"`
		Explanation string `json:"explanation"`
	}{who, q.String(), verdict, x.Rule, x.Text, x.Sentence})
}

// rulesOf finds the policy of that name, else the rules that the sandbox has.
func (a *App) rulesOf(ctx context.Context, ref string) (subject, *policy.Compiled, error) {
	c := a.client()
	var none *policy.Compiled
	p, err := c.Policy(ctx, ref)
	if err == nil {
		rules, err := policy.Compile(p.Rules)
		return subject{Policy: p.Name}, rules, err
	}
	switch shard.CodeOf(err) {
	case shard.CodeNotFound, shard.CodeInvalidRequest, shard.CodeForbidden: // sandboxes have other names and another scope
	default:
		return subject{}, none, err
	}
	in, inErr := c.Inspect(ctx, ref)
	switch {
	case shard.CodeOf(err) == shard.CodeForbidden && inErr != nil:
		return subject{}, none, errors.Join(err, inErr)
	case shard.CodeOf(inErr) == shard.CodeNotFound:
		return subject{}, none, fmt.Errorf("there is no policy and no sandbox %s", shard.Quote(ref))
	case inErr != nil:
		return subject{}, none, inErr
	}
	rules, err := rulesIn(in)
	return subject{Policy: in.Policy, Sandbox: in.Ref()}, rules, err
}

// rulesIn are the rules that a sandbox has.
func rulesIn(in *shard.Inspection) (*policy.Compiled, error) {
	switch {
	case in.Egress == nil:
		return policy.Unrestricted(), nil
	case in.Egress.Missing:
		return policy.Missing(), nil
	}
	return policy.Compile(policy.Written(in.Egress.Rules))
}

// completePolicies offers the names of policies for the argument at this place.
func (a *App) completePolicies(place int) completion {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) != place {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
		defer cancel()
		policies, _, err := a.client().Policies(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []string
		for _, p := range policies {
			names = append(names, fmt.Sprintf("%s\trules: %d", p.Name, len(p.Rules)))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"golang.org/x/term"

	"github.com/useshards/shard"
)

func (a *App) secretCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "secret COMMAND",
		Short: "Let sandboxes use keys that they cannot read",
		Long: `Let sandboxes use keys that they cannot read. A secret is a value and the hosts that it is for. A sandbox that has it holds a
placeholder; in the headers of its HTTPS requests to these hosts, and nowhere else, the placeholder becomes the value on the
host.`,
		Example: `  shard secret set --dest api.example.com API_TOKEN < token.txt`,
		RunE:    groupRun,
	}
	cmd.AddCommand(a.secretSetCommand(), a.secretListCommand(), a.secretRemoveCommand(), a.secretGrantCommand(), a.secretUngrantCommand(),
		a.secretCheckCommand())
	return cmd
}

func (a *App) secretSetCommand() *cobra.Command {
	var req shard.PutSecretRequest
	cmd := &cobra.Command{
		Use:   "set [options] NAME [VALUE]",
		Short: "Store a secret, or replace its value",
		Long: `Store a secret, or replace its value: of the rest, what is not given stays as it is, and the sandboxes that have it use the new value from
their next request on. Prints the name. Without VALUE it is read from stdin, up to the end (a line end there is dropped), or
asked for when that is a terminal. VALUE on the command line can be seen in process lists and stays in the shell's history.

NAME is also the variable in which a sandbox finds the placeholder: A-Z, 0-9 and _. HOST is a host name, or *. and a domain
for the names one level below it.`,
		Example: `  shard secret set --dest api.example.com API_TOKEN < token.txt
  shard secret set --dest '*.example.com' --placeholder sk-test-0000 --on-misuse stop API_TOKEN < token.txt`,
		Args: func(_ *cobra.Command, args []string) error {
			switch { // no argument is quoted: it may be the value
			case len(args) == 0:
				return usagef("NAME is missing")
			case len(args) > 2:
				return usagef("too many arguments: options come first, then NAME and at most one VALUE")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.secretSet(cmd.Context(), req, args)
		},
		ValidArgsFunction: a.completeSecrets(0),
	}
	f := cmd.Flags()
	f.StringArrayVar(&req.Destinations, "dest", nil, "`HOST` that the value may be sent to; may be repeated; needed the first time (also --destination)")
	f.StringVar(&req.Placeholder, "placeholder", "", "what the sandbox holds instead of the value: `TEXT` of 8 or more letters, digits, _, - and . (default mock-NAME)")
	f.StringVar(&req.OnMisuse, "on-misuse", "", "`WHAT` happens to a sandbox that sends the placeholder elsewhere: none, pause or stop (default none)")
	f.AddFlag(&pflag.Flag{Name: "destination", Value: f.Lookup("dest").Value, Usage: "the same as --dest", Hidden: true})
	_ = cmd.RegisterFlagCompletionFunc("on-misuse", cobra.FixedCompletions([]string{"none", "pause", "stop"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *App) secretSet(ctx context.Context, req shard.PutSecretRequest, args []string) error {
	name := args[0]
	if err := shard.CheckSecretName(name); err != nil {
		return err
	}
	var err error
	if len(args) == 2 && args[1] != "-" {
		req.Value = args[1]
		fmt.Fprintln(a.Err, "warning: a value on the command line can be seen in process lists and stays in the shell's history: give it on stdin")
	} else if req.Value, err = a.readValue(name, len(args) == 2); err != nil {
		return err
	}
	if req.Value == "" {
		return errors.New("the value is empty: give it on stdin, such as with < FILE")
	}
	s, err := a.client().PutSecret(ctx, name, req)
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.Out, s.Name)
	return err
}

// maxValue bounds what is read as a value, in bytes; the daemon says what is too long.
const maxValue = 64 << 10

// readValue reads a value from stdin, or asks for it at a terminal unless stdin was asked for.
func (a *App) readValue(name string, stdin bool) (string, error) {
	if isTerminal(a.In) && !stdin {
		restore, err := a.rawTerminal() // before the prompt: what is typed is never shown
		if err != nil {
			return "", err
		}
		defer restore()
		text, err := term.NewTerminal(struct {
			io.Reader
			io.Writer
		}{a.In, a.Err}, "").ReadPassword(fmt.Sprintf("value of %s (not shown): ", name))
		if errors.Is(err, io.EOF) { // Ctrl+C
			return "", errInterrupted
		}
		return text, err
	}
	data, err := io.ReadAll(io.LimitReader(a.In, maxValue+1))
	if err != nil {
		return "", fmt.Errorf("read the value from stdin: %w", err)
	}
	if len(data) > maxValue {
		return "", fmt.Errorf("the value on stdin has more than %d bytes", maxValue)
	}
	return strings.TrimSuffix(strings.TrimSuffix(string(data), "\n"), "\r"), nil
}

func (a *App) secretListCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "list [options]",
		Aliases: []string{"ls"},
		Short:   "List secrets, without their values",
		Example: `  shard secret list`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.secretList(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) secretList(ctx context.Context, f format) error {
	secrets, warnings, err := a.client().Secrets(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		if secrets == nil {
			secrets = []shard.Secret{}
		}
		err = a.printJSON(secrets)
	} else {
		rows := [][]string{{"NAME", "DESTINATIONS", "PLACEHOLDER", "UPDATED"}}
		for _, s := range secrets {
			rows = append(rows, []string{s.Name, strings.Join(s.Destinations, ", "), s.Placeholder, humanTime(s.UpdatedAt)})
		}
		err = a.printTable(rows...)
	}
	if err != nil {
		return err
	}
	return warned(warnings)
}

func (a *App) secretRemoveCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "remove [--force] NAME…",
		Aliases: []string{"rm"},
		Short:   "Remove secrets",
		Long: `Remove secrets. Prints each one that is gone; failures follow at the end, with exit code 1. One that sandboxes have is removed
with --force only: their placeholder then stands for nothing, and the name is free again when they have been ungranted it.`,
		Example: `  shard secret remove API_TOKEN`,
		Args:    arguments(1, -1, "NAME…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			c := a.client()
			return a.each(cmd.Context(), args, func(name string) (string, error) {
				return name, c.RemoveSecret(cmd.Context(), name, force)
			})
		},
		ValidArgsFunction: a.completeSecrets(0),
	}
	cmd.Flags().BoolVar(&force, "force", false, "also remove a secret that sandboxes have")
	return cmd
}

func (a *App) secretGrantCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "grant SANDBOX NAME",
		Short: "Give a stopped sandbox a secret",
		Long: `Give a stopped sandbox a secret: from its next start on, its commands find the placeholder in the variable NAME. Prints the
sandbox's id. It opens no network: where the sandbox has a policy, that must allow the host. To give a new sandbox one, use
shard create --secret.`,
		Example: `  shard secret grant web API_TOKEN`,
		Args:    arguments(2, 2, "SANDBOX and NAME"),
		RunE: a.changesSandbox(func(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
			return a.client().GrantSecret(ctx, ref, name)
		}),
		ValidArgsFunction: a.completeGrant,
	}
}

func (a *App) secretUngrantCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "ungrant SANDBOX NAME",
		Short:   "Take a secret from a stopped sandbox",
		Long:    "Take a secret from a stopped sandbox. Prints the sandbox's id. The proxy's certificate stays among those that it trusts.",
		Example: `  shard secret ungrant web API_TOKEN`,
		Args:    arguments(2, 2, "SANDBOX and NAME"),
		RunE: a.changesSandbox(func(ctx context.Context, ref, name string) (*shard.Sandbox, error) {
			return a.client().UngrantSecret(ctx, ref, name)
		}),
		ValidArgsFunction: a.completeGrant,
	}
}

// changesSandbox runs a change of a sandbox by a name and prints the sandbox's id.
func (a *App) changesSandbox(change func(ctx context.Context, ref, name string) (*shard.Sandbox, error)) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		sb, err := change(cmd.Context(), args[0], args[1])
		if err != nil {
			return err
		}
		_, err = fmt.Fprintln(a.Out, sb.ID)
		return err
	}
}

func (a *App) completeGrant(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) == 1 {
		return a.completeSecrets(1)(cmd, args, word)
	}
	return a.completeSandboxes(1, stopped)(cmd, args, word)
}

// completeSecrets offers the names of secrets for the argument at this place.
func (a *App) completeSecrets(place int) completion {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if len(args) != place {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
		defer cancel()
		secrets, _, err := a.client().Secrets(ctx)
		if err != nil {
			return nil, cobra.ShellCompDirectiveNoFileComp
		}
		var names []string
		for _, s := range secrets {
			names = append(names, s.Name+"\t"+strings.Join(s.Destinations, ", "))
		}
		return names, cobra.ShellCompDirectiveNoFileComp
	}
}

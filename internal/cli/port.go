package cli

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) portCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "port COMMAND",
		Short:   "Forward ports of this host to ports in sandboxes",
		Example: `  shard port add web 8080:80`,
		RunE:    groupRun,
	}
	cmd.AddCommand(a.portAddCommand(), a.portListCommand(), a.portRemoveCommand(), a.portURLCommand())
	return cmd
}

func (a *App) portAddCommand() *cobra.Command {
	var public bool
	cmd := &cobra.Command{
		Use:   "add [--public] SANDBOX [HOST:]GUEST",
		Short: "Forward a host port, or change its forward",
		Long: `Forward a TCP port of the host to a port of the sandbox's 127.0.0.1; without HOST both have the same number. A forward
that the host port has already is changed, also from public to private. It belongs to the sandbox, listens while that runs,
and is kept when it stops. Prints each interface, address and port of the host at which clients reach it.`,
		Example: `  shard port add web 8080:80`,
		Args: func(cmd *cobra.Command, args []string) error {
			return arguments(2, 2, "SANDBOX [HOST:]GUEST")(cmd, withoutPublic(args))
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			words := withoutPublic(args)
			f, err := parseForward(words[1])
			if err != nil {
				return err
			}
			f.Public = public || len(words) < len(args)
			return a.portAdd(cmd.Context(), words[0], f)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	cmd.Flags().BoolVar(&public, "public", false, "listen on every address of the host (0.0.0.0), not on 127.0.0.1 alone; may stand behind the sandbox")
	return cmd
}

// withoutPublic takes out --public, which may also stand behind the sandbox.
func withoutPublic(args []string) []string {
	return slices.DeleteFunc(slices.Clone(args), func(s string) bool { return s == "--public" })
}

func (a *App) portAdd(ctx context.Context, ref string, f shard.PortForward) error {
	port, err := a.client().PutPort(ctx, ref, f)
	if err != nil {
		return err
	}
	for _, at := range port.ReachableOn {
		if _, err := fmt.Fprintf(a.Out, "%s %s:%d\n", at.Interface, at.Address, port.HostPort); err != nil {
			return err
		}
	}
	if !port.Listening {
		fmt.Fprintln(a.Err, printable(notListening(port)))
	}
	return nil
}

// notListening says why nobody answers on the host port now.
func notListening(p *shard.Port) string {
	if p.Error != "" {
		return "not listening: " + p.Error
	}
	return "not listening while the sandbox does not run"
}

func (a *App) portListCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "list [options] [SANDBOX]",
		Aliases: []string{"ls"},
		Short:   "List the forwards of a sandbox, or of all",
		Example: `  shard port list web`,
		Args:    arguments(0, 1, "SANDBOX"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.portList(cmd.Context(), strings.Join(args, ""), f)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) portList(ctx context.Context, ref string, f format) error {
	ports, err := a.client().AllPorts(ctx, ref)
	if err != nil {
		return err
	}
	if f == formatJSON {
		return a.printJSON(ports)
	}
	rows := [][]string{{"SANDBOX", "HOST", "GUEST", "VISIBILITY", "REACHABLE-ON"}}
	for i := range ports {
		rows = append(rows, portRow(&ports[i]))
	}
	return a.printTable(rows...)
}

func portRow(p *shard.Port) []string {
	name, visibility, reach := p.SandboxName, "private", notListening(p)
	if name == "" {
		name = p.Sandbox
	}
	if p.Public {
		visibility = "public"
	}
	if p.Listening {
		var at []string
		for _, h := range p.ReachableOn {
			at = append(at, fmt.Sprintf("%s %s:%d", h.Interface, h.Address, p.HostPort))
		}
		reach = dash(strings.Join(at, ", "))
	}
	return []string{name, strconv.Itoa(p.HostPort), strconv.Itoa(p.GuestPort), visibility, reach}
}

func (a *App) portRemoveCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "remove SANDBOX HOST",
		Aliases: []string{"rm"},
		Short:   "End the forward of a host port and the connections it carries",
		Example: `  shard port remove web 8080`,
		Args:    arguments(2, 2, "SANDBOX HOST"),
		RunE: func(cmd *cobra.Command, args []string) error {
			host, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || host == 0 {
				return usagef("%s is not a host port: write 1 to %d", shard.Quote(args[1]), shard.MaxPort)
			}
			return a.client().RemovePort(cmd.Context(), args[0], int(host))
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
}

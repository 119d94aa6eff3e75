package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type createOptions struct {
	req                       shard.CreateRequest
	ports                     []string
	memory, vcpus, disk, swap *int64
}

func (a *App) createCommand() *cobra.Command {
	var o createOptions
	cmd := &cobra.Command{
		Use:   "create [options] IMAGE | create [options] --snapshot REF",
		Short: "Make a sandbox from an image and start it",
		Long: `Make a sandbox from an image, or from a snapshot, and wait until it runs. Prints its id.

The sandbox runs no program of its own: start some with exec. It stays until it is removed. An image that is not on the
host is pulled first. Ctrl+C ends only the wait: the daemon goes on, and list shows the sandbox. One whose image could not be had
stays in the list as failed, with the reason, until it is removed or another create takes its name.`,
		Example: `  shard create --name agent --memory 1GiB --vcpus 2 --disk 4GiB python:3.12-slim`,
		Args: func(cmd *cobra.Command, args []string) error {
			if o.req.Snapshot != "" {
				if len(args) > 0 {
					return usagef("give an IMAGE or --snapshot, not both")
				}
				return nil
			}
			return arguments(1, 1, "IMAGE")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				o.req.Image = args[0]
			}
			return a.create(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeImages,
	}
	f := cmd.Flags()
	f.StringVar(&o.req.Name, "name", "", "`NAME` of the sandbox: 1 to 64 of a-z, 0-9, - and _")
	f.StringVar(&o.req.Provider, "provider", "", "isolation `PROVIDER` (default the daemon's; see shard providers)")
	f.StringArrayVar(&o.req.Env, "env", nil, "variable `KEY=VALUE` for every command; may be repeated")
	f.StringArrayVar(&o.req.Secrets, "secret", nil, "`NAME` of a secret to grant; may be repeated")
	f.StringVar(&o.req.Policy, "policy", "", "`NAME` of the network policy")
	f.StringVar(&o.req.Workdir, "workdir", "", "`DIR` in which every command starts (default the image's)")
	f.StringVar(&o.req.User, "user", "", "`USER` of every command: name or uid, and :group (default the image's)")
	f.Var(size{&o.memory}, "memory", "memory bound, such as 512MiB (default none)")
	f.Var(count{&o.vcpus}, "vcpus", "CPU bound; 0 is the host's")
	f.Var(size{&o.disk}, "disk", "disk bound (default 10GiB)")
	f.Var(size{&o.swap}, "swap", "swap, part of the disk; 0 is none (default none)")
	f.StringArrayVar(&o.ports, "port", nil, "forward `[HOST:]GUEST` port from the host's 127.0.0.1; may be repeated")
	f.StringVar(&o.req.Snapshot, "snapshot", "", "start from the snapshot with this id or name, `REF`, not from an image")
	_ = cmd.RegisterFlagCompletionFunc("provider", a.completeProviders)
	_ = cmd.RegisterFlagCompletionFunc("secret", func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.completeSecrets(0)(cmd, nil, word)
	})
	_ = cmd.RegisterFlagCompletionFunc("policy", func(cmd *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
		return a.completePolicies(0)(cmd, nil, word)
	})
	return cmd
}

// count is a whole number of 0 or more; nil when the option was not given.
type count struct{ n **int64 }

func (c count) String() string { return "" }

func (c count) Type() string { return "N" }

func (c count) Set(s string) error {
	n, err := strconv.ParseInt(s, 10, 32)
	if err != nil || n < 0 {
		return errors.New("write a whole number of 0 or more")
	}
	*c.n = &n
	return nil
}

func (a *App) create(ctx context.Context, o createOptions) error {
	if err := checkEnv(o.req.Env); err != nil {
		return err
	}
	for _, p := range o.ports {
		forward, err := parseForward(p)
		if err != nil {
			return usagef("--port %v", err)
		}
		o.req.Ports = append(o.req.Ports, forward)
	}
	if o.memory != nil || o.vcpus != nil || o.disk != nil || o.swap != nil {
		o.req.Resources = &shard.ResourcesRequest{MemoryMiB: o.memory, VCPUs: o.vcpus, DiskMiB: o.disk, SwapMiB: o.swap}
	}
	steps := a.newProgress("pulling")
	sb, err := a.client().Create(ctx, o.req, steps.show)
	steps.close()
	switch {
	case errors.Is(err, errInterrupted):
		return fmt.Errorf("interrupted; the daemon goes on with the create if it had begun: look with shard list --all")
	case err != nil:
		return err
	case sb.State == shard.StateFailed:
		if sb.Name != "" { // the next create of that name takes the record's place
			return fmt.Errorf("sandbox %s could not be created: %s", sb.Name, dash(sb.FailedReason))
		}
		return fmt.Errorf("sandbox %s could not be created: %s; shard remove %s takes the record of it away", sb.ID, dash(sb.FailedReason), sb.ID)
	}
	if sb.Name != "" {
		fmt.Fprintf(a.Err, "created %s (%s)\n", sb.Name, sb.ID)
	} else {
		fmt.Fprintf(a.Err, "created %s\n", sb.ID)
	}
	_, err = fmt.Fprintln(a.Out, sb.ID)
	return err
}

// parseForward reads [HOST:]GUEST; without HOST both are the same port.
func parseForward(s string) (shard.PortForward, error) {
	host, guest, both := strings.Cut(s, ":")
	if !both {
		guest = host
	}
	h, herr := strconv.ParseUint(host, 10, 16)
	g, gerr := strconv.ParseUint(guest, 10, 16)
	if herr != nil || gerr != nil || h == 0 || g == 0 {
		return shard.PortForward{}, usagef("%s: write GUEST or HOST:GUEST, ports from 1 to 65535", shard.Quote(s))
	}
	return shard.PortForward{HostPort: int(h), GuestPort: int(g)}, nil
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) daemonCommand() *cobra.Command {
	var o DaemonOptions
	var storage *int64
	cmd := &cobra.Command{
		Use:   "daemon [options]",
		Short: "Run the daemon on this host, or ask how it is (daemon status)",
		Long: `Run the daemon, which makes and keeps the sandboxes of this host, until it gets SIGINT or SIGTERM. Sandboxes outlive it.
Needs root. One daemon per --root.`,
		Example: `  sudo shard daemon --provider gvisor
  shard daemon status`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return groupRun(cmd, args)
			}
			o.Root = a.root
			if storage != nil {
				return errNoStorage
			}
			return a.daemon(cmd.Context(), o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.Provider, "provider", "", "isolation `PROVIDER` of sandboxes that name none (default the best that works here)")
	f.DurationVar(&o.PullTimeout, "timeout", 30*time.Minute, "`DURATION` that one image pull may take")
	f.StringArrayVar(&o.Insecure, "insecure-registry", nil, "registry `HOST[:PORT]` to speak to without TLS; may be repeated")
	f.StringArrayVar(&o.DNS, "dns", nil, "name server `ADDRESS` for sandboxes; may be repeated (default the host's)")
	f.StringVar(&o.SecretKeyFile, "secret-key-file", "", "`FILE` with the key that encrypts secrets at rest: 64 hexadecimal digits (default none)")
	f.StringVar(&o.Log, "log", "", "file `PATH` to log to (default stderr)")
	f.Var(size{&storage}, "storage-size", "size of the storage image of providers that run virtual machines")
	cmd.AddCommand(a.daemonStatusCommand())
	return cmd
}

func (a *App) daemon(ctx context.Context, o DaemonOptions) error {
	if o.PullTimeout <= 0 {
		return usagef("--timeout must be longer than 0")
	}
	if a.Daemon == nil {
		return errors.New("this build has no daemon: it runs on Linux")
	}
	err := a.Daemon(ctx, o)
	if errors.Is(err, context.Canceled) || errors.Is(err, errInterrupted) {
		return nil // asked to end, and did
	}
	return err
}

func (a *App) daemonStatusCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "status [options]",
		Short:   "Show how the daemon is",
		Long:    "Show how the daemon is. The exit code is 1 when one of its tasks has failed and waits to be tried again.",
		Example: `  shard daemon status`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.daemonStatus(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) daemonStatus(ctx context.Context, f format) error {
	s, err := a.client().Daemon(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		err = a.printJSON(s)
	} else {
		err = a.printTable(daemonRows(s, time.Now())...)
		if len(s.Tasks) > 0 && err == nil {
			rows := [][]string{{"TASK", "STATE", "RESTARTS", "LAST ERROR"}}
			for _, t := range s.Tasks {
				rows = append(rows, []string{t.Name, t.State, strconv.Itoa(t.Restarts), dash(t.LastError)})
			}
			fmt.Fprintln(a.Out)
			err = a.printTable(rows...)
		}
	}
	if err != nil {
		return err
	}
	failed := &failures{}
	for _, t := range s.Tasks {
		if t.State == shard.TaskBackoff {
			failed.errs = append(failed.errs, fmt.Errorf("task %s failed and waits to be tried again: %s", t.Name, dash(t.LastError)))
		}
	}
	if len(failed.errs) > 0 {
		return failed
	}
	return nil
}

func daemonRows(s *shard.DaemonStatus, now time.Time) [][]string {
	var can []string
	for _, c := range []struct {
		name string
		can  bool
	}{{"pause", s.Capabilities.Pause}, {"resume", s.Capabilities.Resume}, {"fork", s.Capabilities.Fork},
		{"port", s.Capabilities.Port}, {"swap", s.Capabilities.Swap}} {
		if c.can {
			can = append(can, c.name)
		}
	}
	rows := [][]string{{"FIELD", "VALUE"}, {"version", s.Version}, {"pid", strconv.Itoa(s.PID)},
		{"started", fmt.Sprintf("%s (%s ago)", humanTime(s.StartedAt), humanDuration(now.Sub(s.StartedAt)))},
		{"socket", s.Socket}, {"provider", s.Provider}, {"capabilities", dash(strings.Join(can, ", "))}}
	if s.Proxy.PlainPort != 0 || s.Proxy.TLSPort != 0 {
		rows = append(rows, []string{"proxy ports", fmt.Sprintf("%d plain, %d TLS", s.Proxy.PlainPort, s.Proxy.TLSPort)})
	}
	if s.Preview != "" {
		rows = append(rows, []string{"previews below", s.Preview})
	}
	return rows
}

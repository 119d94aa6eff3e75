package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/hostcheck"
)

// doctorPatience bounds the questions to the providers and to the daemon.
const doctorPatience = 20 * time.Second

func (a *App) doctorCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "doctor [options]",
		Short: "Check this host for everything that sandboxes need",
		Long: `Check this host for everything that sandboxes need: kernel, control groups, network, disk, providers, clock, DNS and the
daemon. Each check says what to do about what it finds. Changes nothing, needs no daemon (one that is not running is a
warning), and always speaks of this host; as root it sees more. The exit code is 1 when a check failed; a warning is no
failure.`,
		Example: `  sudo shard doctor`,
		Args:    arguments(0, 0, ""),
		// It speaks of this host whatever the environment or a saved connection says.
		PersistentPreRunE: a.localGlobals,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.doctor(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) doctor(ctx context.Context, f format) error {
	checks := a.inspectHost(ctx)
	checks = append(checks, a.checkDaemon(ctx))
	var err error
	if f == formatJSON {
		err = a.printJSON(checks)
	} else {
		err = a.printChecks(checks)
	}
	if err != nil {
		return err
	}
	var failed []string
	for _, c := range checks {
		if c.Status == hostcheck.Fail {
			failed = append(failed, c.Name)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("this host is not ready: %s", strings.Join(failed, ", "))
	}
	return nil
}

// inspectHost is every check that needs no daemon.
func (a *App) inspectHost(ctx context.Context) []hostcheck.Check {
	if runtime.GOOS != "linux" {
		return []hostcheck.Check{{Name: "system", Status: hostcheck.Fail, Found: runtime.GOOS,
			Remedy: "sandboxes run on Linux: use this program with --remote"}}
	}
	return append(hostcheck.Run(ctx, hostcheck.Options{Root: a.root}), a.checkProviders(ctx)...)
}

func (a *App) checkProviders(ctx context.Context) []hostcheck.Check {
	if a.Probe == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, doctorPatience)
	defer cancel()
	providers, err := a.Probe(ctx)
	if err != nil || len(providers) == 0 {
		return []hostcheck.Check{{Name: "providers", Status: hostcheck.Warn, Found: "this user may not look at them", Remedy: "run " + SudoCommand(a.root, "doctor")}}
	}
	var out []hostcheck.Check
	for _, p := range providers {
		c := hostcheck.Check{Name: "provider " + p.Name, Status: hostcheck.OK, Found: "works"}
		if p.Version != "" {
			c.Found += ", version " + p.Version
		}
		if !p.Available {
			c.Status, c.Found, c.Remedy = hostcheck.Warn, "does not work", p.Reason
			if p.Default {
				c.Status = hostcheck.Fail
			}
		}
		out = append(out, c)
	}
	return out
}

func (a *App) checkDaemon(ctx context.Context) hostcheck.Check {
	ctx, cancel := context.WithTimeout(ctx, doctorPatience)
	defer cancel()
	c := a.client()
	defer c.Close()
	v, err := c.Version(ctx)
	if err != nil {
		c := hostcheck.Check{Name: "daemon", Status: hostcheck.Fail, Found: "does not answer", Remedy: a.explain(nil, err)}
		// A host without one can be all right: it may be about to get one, and to this user it may be closed.
		if e, ok := errors.AsType[*client.DialError](err); ok && (errors.Is(e.Err, fs.ErrNotExist) || errors.Is(e.Err, syscall.ECONNREFUSED)) {
			c.Status, c.Found = hostcheck.Warn, "is not running"
		} else if ok && errors.Is(e.Err, fs.ErrPermission) {
			c.Status, c.Found = hostcheck.Warn, "this user may not ask it"
		}
		return c
	}
	if v.Version != a.Version {
		return hostcheck.Check{Name: "daemon", Status: hostcheck.Warn, Found: fmt.Sprintf("answers, version %s; this program is %s", v.Version, a.Version),
			Remedy: "start it again after an upgrade: sandboxes run on meanwhile"}
	}
	return hostcheck.Check{Name: "daemon", Status: hostcheck.OK, Found: "answers, version " + v.Version}
}

func (a *App) printChecks(checks []hostcheck.Check) error {
	rows := [][]string{{"CHECK", "STATUS", "FOUND", "REMEDY"}}
	for _, c := range checks {
		rows = append(rows, []string{c.Name, string(c.Status), c.Found, dash(c.Remedy)})
	}
	return a.printTable(rows...)
}

// localGlobals is checkGlobals for a command that finds out by itself whom it talks to.
func (a *App) localGlobals(*cobra.Command, []string) error {
	return a.checkRoot()
}

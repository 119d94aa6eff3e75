package cli

import (
	"context"
	"errors"
	"fmt"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// exitRunFailed says that run failed in shard itself: any other code but 126, 127 and 130 is the process's.
const exitRunFailed = 125

type runOptions struct {
	ref     string
	command []string
	name    string
	env     []string
	workdir string
	user    string
	restart string
	retries int
	backoff time.Duration
	attach  bool
}

func (a *App) runCommand() *cobra.Command {
	var o runOptions
	cmd := &cobra.Command{
		Use:   "run [options] SANDBOX [options] [--] COMMAND [ARG]…",
		Short: "Start a named process in a running sandbox",
		Long: `Start a named process in a running sandbox, which starts it again as --restart says, and print its name. Options may
also stand behind the sandbox; the command begins at the first word that is none, or behind --.

--attach passes its output on instead, until it has ended for good: the exit code is its own, 128+n when signal n ended it.
Ctrl+C lets go of it, with exit code 0. 126 and 127 say that the command could not be run or is not there, 125 that
anything else failed.`,
		Example: `  shard run web --name api --restart always python -m http.server
  shard run web --restart on-failure --restart-retries 5 --attach -- ./job.sh`,
		RunE: func(cmd *cobra.Command, args []string) error {
			args, err := laterOptions(cmd, args, false)
			if err != nil {
				return &exitError{exitRunFailed, err}
			}
			if help, _ := cmd.Flags().GetBool("help"); help {
				return cmd.Help()
			}
			switch len(args) {
			case 0:
				return &exitError{exitRunFailed, usagef("SANDBOX and COMMAND are missing")}
			case 1:
				return &exitError{exitRunFailed, usagef("COMMAND is missing")}
			}
			o.ref, o.command = args[0], args[1:]
			return runFailed(a.run(cmd.Context(), cmd, o))
		},
		ValidArgsFunction: a.completeSandboxes(1, running),
	}
	cmd.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return &exitError{exitRunFailed, err} })
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "`NAME` of the process: up to 32 of a-z 0-9 . _ - (default the program's)")
	f.StringArrayVarP(&o.env, "env", "e", nil, "variable `KEY=VALUE` for the process; may be repeated")
	f.StringVarP(&o.workdir, "workdir", "w", "", "`DIR` to start in (default the sandbox's)")
	f.StringVarP(&o.user, "user", "u", "", "`USER`: name or uid, and :group (default the sandbox's)")
	f.StringVar(&o.restart, "restart", shard.RestartUnlessStopped, "restart `POLICY`: no, on-failure, always or unless-stopped")
	f.IntVar(&o.retries, "restart-retries", 0, "with on-failure, start it again `N` times in a row at most; 0 is without end")
	f.DurationVar(&o.backoff, "restart-backoff", time.Second, "`DURATION` of the first wait before a restart, at most 1m; each wait is twice the last, up to 1m")
	f.BoolVar(&o.attach, "attach", false, "pass the output on until the process has ended for good")
	_ = cmd.RegisterFlagCompletionFunc("restart", cobra.FixedCompletions([]string{shard.RestartNo, shard.RestartOnFailure,
		shard.RestartAlways, shard.RestartUnlessStopped}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// runFailed gives a failure of ours its own exit code, so that it is not taken for the process's.
func runFailed(err error) error {
	if err == nil {
		return nil
	}
	if _, ok := errors.AsType[*exitError](err); ok {
		return err
	}
	return &exitError{exitRunFailed, err}
}

func (a *App) run(ctx context.Context, cmd *cobra.Command, o runOptions) error {
	req := shard.RunRequest{Command: o.command, Env: o.env, Workdir: o.workdir, User: o.user,
		Restart: &shard.RestartSpec{Policy: o.restart, Retries: o.retries}}
	if cmd.Flags().Changed("name") {
		req.Name = &o.name
	}
	if cmd.Flags().Changed("restart-backoff") {
		if req.Restart.Backoff = o.backoff.Seconds(); o.backoff == 0 {
			return usagef("--restart-backoff must be more than 0")
		}
	}
	if err := shard.CheckRestart(*req.Restart); err != nil {
		return usagef("%v", err)
	}
	if err := checkEnv(o.env); err != nil {
		return err
	}
	c := a.client()
	p, err := c.RunProcess(ctx, o.ref, req)
	switch {
	case errors.Is(err, errInterrupted):
		return &exitError{exitInterrupted, errors.New("interrupted before the process was known to run")}
	case err != nil:
		return notStarted(err)
	case !o.attach:
		_, err := fmt.Fprintln(a.Out, p.Name)
		return err
	}
	return a.attendProcess(ctx, c, o.ref, p.Name)
}

// attendProcess passes a process's output on until it has ended for good, or is let go of.
func (a *App) attendProcess(ctx context.Context, c *client.Client, ref, name string) error {
	signal.Ignore(syscall.SIGPIPE) // a reader of our output that goes away is an error of a write, not our death
	stream, err := c.AttachProcess(ctx, ref, name)
	var p *shard.Process
	if err == nil {
		defer stream.Close()
		p, err = stream.Copy(a.Out)
	}
	switch {
	case errors.Is(err, errInterrupted):
		fmt.Fprintf(a.Err, "detached: the process runs on in %s as %s\n", ref, name)
		return nil
	case errors.Is(err, client.ErrBroken), errors.As(err, new(*client.DialError)):
		return fmt.Errorf("the connection to the daemon broke; the process may run on in %s as %s", ref, name)
	case errors.As(err, new(*client.WriteError)):
		return fmt.Errorf("the output could not be written: %w; the process runs on in %s as %s", err, ref, name)
	case err != nil:
		return err
	case p.Status.State == shard.ProcessStopped:
		return fmt.Errorf("the process ended with its sandbox: %s went down", ref)
	case p.Status.Exit == nil:
		return nil // killed before it ever ended
	}
	if code := codeOf(*p.Status.Exit); code != 0 {
		return &exitError{code: code}
	}
	return nil
}

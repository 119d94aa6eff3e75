package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

type execOptions struct {
	ref         string
	command     []string
	env         []string
	workdir     string
	user        string
	interactive bool
	tty         bool
}

func (a *App) execCommand() *cobra.Command {
	var o execOptions
	cmd := &cobra.Command{
		Use:   "exec [options] SANDBOX COMMAND [ARG]…",
		Short: "Run a command in a running sandbox",
		Long: `Run a command in a running sandbox and pass its output on. The exit code is the command's own; 128+n when signal n
ended it; 126 when it could not be run, 127 when there is no such program; at least 1 when output was lost.

Without -t, Ctrl+C lets go of the command, which runs on, and exits with 130. With -t, Ctrl+C goes to the command.`,
		Example: `  shard exec web ls -l /
  echo '{"n": 3}' | shard exec -i --env MODE=test web python /tmp/main.py`,
		Args: func(cmd *cobra.Command, args []string) error {
			switch {
			case len(args) == 0:
				return usagef("SANDBOX and COMMAND are missing")
			case len(args) > 1 && args[1] == "--":
				args = args[1:]
			case len(args) > 1 && len(args[1]) > 0 && args[1][0] == '-' && cmd.ArgsLenAtDash() < 0:
				return usagef("option %s stands after the sandbox: options come first (for a program of that name write --)", shard.Quote(args[1]))
			}
			if len(args) == 1 {
				return usagef("COMMAND is missing")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ref, o.command = args[0], args[1:]
			if o.command[0] == "--" {
				o.command = o.command[1:]
			}
			return a.exec(cmd.Context(), o)
		},
		ValidArgsFunction: a.completeSandboxes(1, running),
	}
	f := cmd.Flags()
	f.BoolVarP(&o.interactive, "interactive", "i", false, "pass stdin on to the command")
	f.BoolVarP(&o.tty, "tty", "t", false, "give the command a terminal (needs -i)")
	f.StringArrayVar(&o.env, "env", nil, "variable `KEY=VALUE` for the command; may be repeated")
	f.StringVar(&o.workdir, "workdir", "", "`DIR` to start in (default the sandbox's)")
	f.StringVar(&o.user, "user", "", "`USER`: name or uid, and :group (default the sandbox's)")
	return cmd
}

func (a *App) exec(ctx context.Context, o execOptions) error {
	if o.tty && !o.interactive {
		return usagef("--tty needs --interactive: write -it")
	}
	if err := checkEnv(o.env); err != nil {
		return err
	}
	if err := shard.CheckCommand(o.command); err != nil {
		return usagef("%v", err)
	}
	s := session{App: a, client: a.client(), ref: o.ref}
	return s.run(ctx, o)
}

// session is one command between its start and its exit code.
type session struct {
	*App
	client *client.Client
	ref    string
}

// run starts the command and stays with it.
func (s *session) run(ctx context.Context, o execOptions) error {
	req := shard.ExecRequest{Command: o.command, Env: o.env, Workdir: o.workdir, User: o.user, Stdin: o.interactive,
		TTY: o.tty}
	if o.tty {
		req.Size = terminalSize(s.In, s.Out)
	}
	exec, stream, err := s.client.Run(ctx, o.ref, req)
	switch {
	case exec != nil && err != nil:
		return s.ended(ctx, exec.ID, err)
	case errors.Is(err, errInterrupted):
		return &exitError{exitInterrupted, errors.New("interrupted before the command was known to run")}
	case err != nil:
		return notStarted(err)
	}
	defer stream.Close()
	return s.attend(ctx, exec.ID, stream, o)
}

// notStarted gives a command that never ran the exit code that a shell would.
func notStarted(err error) error {
	if e, ok := errors.AsType[*shard.Error](err); ok && e.Code == shard.CodeCommandNotStarted && e.ExitCode > 0 {
		return &exitError{e.ExitCode, err}
	}
	return err
}

// attend connects the terminal with the command until the command has ended or is let go of.
func (s *session) attend(ctx context.Context, id string, stream *client.Stream, o execOptions) error {
	// A reader of our output that goes away is an error of a write, not our death: the terminal must be restored and
	// the command be spoken of.
	signal.Ignore(syscall.SIGPIPE)
	restore := func() {}
	if o.tty {
		raw, err := s.rawTerminal()
		if err != nil {
			return s.letGo(id, err)
		}
		restore = raw
		defer restore()
		stop := s.followSize(ctx, func(ctx context.Context, size shard.Size) {
			_ = s.client.Resize(ctx, s.ref, id, size) // refused only when the command has just ended
		})
		defer stop()
	}
	if o.interactive {
		// Nobody waits for this one: a read of a terminal or a pipe cannot be called off, and the command's end must
		// not wait for input. It ends with the process at the latest.
		go s.feed(stream)
	}
	exit, err := stream.Copy(s.Out, s.Err)
	restore()
	if err != nil {
		return s.ended(ctx, id, err)
	}
	return s.exitOf(exit)
}

// feed passes stdin on until it ends or the stream does.
func (s *session) feed(stream *client.Stream) {
	buf := make([]byte, client.StdinPiece)
	for {
		n, err := s.In.Read(buf)
		if n > 0 {
			if _, werr := stream.Write(buf[:n]); werr != nil {
				return // Copy sees the same and says why
			}
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				s.warn("read stdin: %v: the command sees the end of its input", err)
			}
			_ = stream.CloseStdin()
			return
		}
	}
}

// exitOf is the outcome of a command that ended with its stream complete.
func (s *session) exitOf(exit *shard.ExitMessage) error {
	code := codeOf(exit.ExitStatus)
	switch {
	case exit.Error != "":
		return &exitError{max(code, exitFailure), errors.New(exit.Error)}
	case exit.LostBytes > 0:
		return &exitError{max(code, exitFailure), fmt.Errorf("%d bytes of the command's output were lost; it ended with exit code %d", exit.LostBytes, code)}
	case code != 0:
		return &exitError{code: code}
	}
	return nil
}

func codeOf(s shard.ExitStatus) int {
	if s.Signal > 0 {
		return 128 + s.Signal
	}
	return s.Code
}

// letGo is the outcome when this end cannot go on but the command does.
func (s *session) letGo(id string, err error) error {
	return fmt.Errorf("%w; the command runs on in %s as %s", err, s.ref, id)
}

// ended is the outcome when the stream came to no proper end.
func (s *session) ended(ctx context.Context, id string, err error) error {
	if errors.Is(err, errInterrupted) || ctx.Err() != nil {
		return &exitError{exitInterrupted, fmt.Errorf("detached: the command runs on in %s as %s", s.ref, id)}
	}
	if w, ok := errors.AsType[*client.WriteError](err); ok {
		if errors.Is(w.Err, syscall.EPIPE) {
			return s.letGo(id, errors.New("nobody reads the output any more"))
		}
		return s.letGo(id, fmt.Errorf("the output could not be written: %w", w.Err))
	}
	if _, ok := errors.AsType[*client.DialError](err); ok || errors.Is(err, client.ErrBroken) {
		return s.broken(ctx, id)
	}
	return err
}

// explainWithin bounds the questions that explain a broken stream.
const explainWithin = 5 * time.Second

// broken asks the command's record what became of it.
func (s *session) broken(ctx context.Context, id string) error {
	ctx, cancel := context.WithTimeout(ctx, explainWithin)
	defer cancel()
	rec, err := s.client.GetExec(ctx, s.ref, id)
	switch {
	case err == nil && rec.State == shard.ExecExited:
		code := exitFailure
		if rec.ExitStatus != nil {
			code = codeOf(*rec.ExitStatus)
		}
		return &exitError{max(code, exitFailure), fmt.Errorf("the connection broke and output may be missing; the command ended with exit code %d", code)}
	case err == nil:
		return fmt.Errorf("the connection broke, or this end took no output for 30 s; the command runs on in %s as %s", s.ref, id)
	case errors.As(err, new(*client.DialError)):
		return fmt.Errorf("the daemon went away; the command may run on in %s as %s: look when the daemon is back", s.ref, id)
	case shard.CodeOf(err) != shard.CodeNotFound:
		return fmt.Errorf("the connection to the daemon broke, and what became of the command is not known: %w", err)
	}
	sb, err := s.client.Inspect(ctx, s.ref)
	switch {
	case shard.CodeOf(err) == shard.CodeNotFound:
		return fmt.Errorf("the sandbox %s was removed under the command", s.ref)
	case err != nil || sb.State == shard.StateRunning:
		return fmt.Errorf("the connection broke, and the daemon has no record of the command %s any more", id)
	case sb.StoppedReason != "":
		return fmt.Errorf("the command ended with its sandbox: %s is %s (%s)", s.ref, sb.State, sb.StoppedReason)
	}
	return fmt.Errorf("the command ended with its sandbox: %s is %s", s.ref, sb.State)
}

// Package cli is the command line: one file per command, each an options struct, the flags that fill it, and a run
// function that does the work through package client. It knows terminals, words for people and exit codes. It must not
// know the daemon's packages: what only they can do (run the daemon, probe the host) comes in through App.
package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/signal"
	"regexp"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"time"
	"unicode"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// DefaultRoot is the data directory without --root.
const DefaultRoot = "/var/lib/shard"

// App is everything the command line takes from its process.
type App struct {
	// Version is this program's, such as 0.3.0.
	Version  string
	In       io.Reader
	Out, Err io.Writer
	Getenv   func(string) string
	// Daemon runs the daemon until ctx ends.
	Daemon func(ctx context.Context, o DaemonOptions) error
	// Serve runs shard serve until ctx ends.
	Serve func(ctx context.Context, o ServeOptions) error
	// Probe says what each isolation provider is worth on this host, without a daemon.
	Probe func(ctx context.Context) ([]shard.ProviderInfo, error)

	root string
	// remote is the value of --remote, target whom the command talks to: nil is the daemon's socket.
	remote string
	target *remote
	// restore brings a terminal in raw mode back; whoever ends the process early calls it.
	restore atomic.Pointer[func()]
}

// DaemonOptions are the options of the daemon command.
type DaemonOptions struct {
	Root     string
	Provider string
	// PullTimeout bounds one image pull.
	PullTimeout time.Duration
	// Insecure lists registry hosts that may be spoken to without TLS.
	Insecure []string
	// DNS lists the name servers that sandboxes use; empty is the host's.
	DNS []string
	// SecretKeyFile holds the key that encrypts secrets at rest; "" is none.
	SecretKeyFile string
	// Log is a file; "" is stderr.
	Log string
}

// errNoStorage refuses an option of daemon and setup that says nothing to the providers of this version.
var errNoStorage = errors.New("--storage-size is for providers that run virtual machines: this version has none")

// The exit codes that are not a command's own.
const (
	exitFailure     = 1
	exitNotFound    = 127
	exitInterrupted = 130
)

// usageError is a command line that makes no sense; it ends with a hint at the help: the command's own unless see names another.
type usageError struct{ msg, see string }

func (e *usageError) Error() string { return e.msg }

func usagef(format string, args ...any) error { return &usageError{msg: fmt.Sprintf(format, args...)} }

// exitError ends the program with a code; a nil err prints nothing.
type exitError struct {
	code int
	err  error
}

func (e *exitError) Error() string {
	if e.err == nil {
		return fmt.Sprintf("exit code %d", e.code)
	}
	return e.err.Error()
}

func (e *exitError) Unwrap() error { return e.err }

// errInterrupted is the cause of a context that a signal ended.
var errInterrupted = errors.New("interrupted")

// Main runs the command line and returns the exit code.
func (a *App) Main(ctx context.Context, args []string) int {
	ctx, stop := a.untilSignal(ctx)
	defer stop()
	root := a.rootCommand()
	if slices.Contains(args, cobra.ShellCompRequestCmd) {
		readyToComplete(root)
	}
	root.SetArgs(append([]string{}, args...)) // never nil, which cobra takes for os.Args
	cmd, err := root.ExecuteContextC(ctx)
	if errors.Is(err, pflag.ErrHelp) { // before the name of a command, where cobra has no answer to it
		help(a.Out, named(root, args))
		return 0
	}
	return a.report(cmd, err)
}

// untilSignal ends the context at the first SIGINT or SIGTERM, and the process at a second one.
func (a *App) untilSignal(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(parent)
	signals := make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	done := make(chan struct{})
	go func() {
		select {
		case sig := <-signals:
			if sig == syscall.SIGINT && isTerminal(a.Err) && a.restore.Load() == nil {
				fmt.Fprintln(a.Err) // behind the ^C that the terminal shows
			}
			cancel(errInterrupted)
		case <-done:
			return
		}
		select {
		case <-signals:
			if restore := a.restore.Load(); restore != nil {
				(*restore)()
			}
			os.Exit(exitInterrupted)
		case <-done:
		}
	}()
	return ctx, func() {
		signal.Stop(signals)
		close(done)
		cancel(nil)
	}
}

// report prints an error as one line and gives the exit code for it.
func (a *App) report(cmd *cobra.Command, err error) int {
	if err == nil {
		return 0
	}
	code := exitFailure
	if e, ok := errors.AsType[*exitError](err); ok {
		if code = e.code; e.err == nil {
			return code
		}
	}
	if list, ok := errors.AsType[*failures](err); ok {
		for _, err := range list.errs {
			a.warn("%s", a.explain(cmd, err))
		}
		return code
	}
	a.warn("%s", a.explain(cmd, err))
	return code
}

// warn prints one line on stderr.
func (a *App) warn(format string, args ...any) {
	fmt.Fprintln(a.Err, "shard: "+printable(fmt.Sprintf(format, args...)))
}

// failures are what went wrong with some of several sandboxes: one line each.
type failures struct{ errs []error }

func (f *failures) Error() string { return errors.Join(f.errs...).Error() }

func (f *failures) Unwrap() []error { return f.errs }

// explain turns an error into the words for it.
func (a *App) explain(cmd *cobra.Command, err error) string {
	if msg, ok := flagMessage(cmd, err); ok {
		err = &usageError{msg: msg}
	}
	if e, ok := errors.AsType[*usageError](err); ok {
		see := e.see
		if see == "" && cmd != nil {
			see = cmd.CommandPath()
		}
		return fmt.Sprintf("%s (see %s --help)", e.msg, cmp.Or(see, "shard"))
	}
	if e, ok := errors.AsType[*client.DialError](err); ok {
		return a.unreachable(e)
	}
	if e, ok := errors.AsType[*shard.Error](err); ok {
		switch {
		case len(e.Holders) > 0:
			return fmt.Sprintf("%s (in use by %s)", err, strings.Join(e.Holders, ", "))
		case e.Code == shard.CodeUnauthorized && a.target != nil && a.target.keyFrom != "":
			return fmt.Sprintf("%s: %s (from %s): mint another on that host with shard tokens mint", a.target.url, e.Message, a.target.keyFrom)
		}
	}
	return err.Error()
}

// unreachable says why there is no daemon to talk to, and what to do.
func (a *App) unreachable(e *client.DialError) string {
	if a.target != nil {
		return a.unreachableRemote(e)
	}
	switch {
	case errors.Is(e.Err, fs.ErrNotExist), errors.Is(e.Err, syscall.ECONNREFUSED):
		return fmt.Sprintf("the daemon is not running (no answer at %s): %s", e.Address, a.howToStart())
	case errors.Is(e.Err, fs.ErrPermission):
		return fmt.Sprintf("no permission to talk to the daemon at %s: use sudo, or become a member of the group shard", e.Address)
	}
	return e.Error()
}

// serviceUnit is where setup and `make install` put the daemon's unit.
const serviceUnit = "/etc/systemd/system/shard.service"

// howToStart says how the daemon of this root is started on this host.
func (a *App) howToStart() string {
	by := "`" + SudoCommand(a.root, "daemon") + "`"
	if a.root != DefaultRoot {
		return "start it with " + by
	}
	if _, err := os.Stat(serviceUnit); err == nil {
		return "start it with `sudo systemctl start shard`"
	}
	return "start it with " + by + ", or have it started for good with `sudo shard setup`"
}

// SudoCommand is a command for root to type, on the same root.
func SudoCommand(root, command string) string {
	if root != DefaultRoot {
		command = "--root " + root + " " + command
	}
	return "sudo shard " + command
}

// variable is what may stand alone where KEY=VALUE is meant.
var variable = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_]*$`)

// checkEnv is shard.CheckEnv in the words of the command line. A value is never quoted.
func checkEnv(env []string) error {
	for _, kv := range env {
		if variable.MatchString(kv) {
			return usagef("--env %s has no value: write --env %s=VALUE", kv, kv)
		}
	}
	if err := shard.CheckEnv(env); err != nil {
		return usagef("--env: %s", strings.TrimPrefix(err.Error(), "env "))
	}
	return nil
}

// forms are how values of an option's type are written, where the parser's own words would be those of a programmer.
var forms = map[string]string{"duration": "write a number and a unit, such as 90s, 30m or 24h", "int": "write a whole number", "bool": "write true or false"}

// flagMessage rewords the errors of the flag parser.
func flagMessage(cmd *cobra.Command, err error) (string, bool) {
	if e, ok := errors.AsType[*pflag.NotExistError](err); ok {
		name := e.GetSpecifiedName()
		if cmd != nil && cmd.HasParent() && cmd.Root().Flags().Lookup(name) != nil {
			return fmt.Sprintf("--%s is a global option and stands before the command: shard --%s … %s", name, name,
				strings.TrimPrefix(cmd.CommandPath(), "shard ")), true
		}
		if e.GetSpecifiedShortnames() != "" {
			return fmt.Sprintf("unknown option -%s%s", name, likeOption(cmd, name)), true
		}
		return fmt.Sprintf("unknown option --%s%s", name, likeOption(cmd, name[:min(3, len(name))])), true
	}
	if e, ok := errors.AsType[*pflag.ValueRequiredError](err); ok {
		return fmt.Sprintf("option %s needs a value", optionName(e.GetFlag())), true
	}
	if e, ok := errors.AsType[*pflag.InvalidValueError](err); ok {
		value, why := shard.Quote(e.GetValue()), fmt.Sprint(e.Unwrap())
		if f := e.GetFlag(); f != nil && forms[f.Value.Type()] != "" {
			why = forms[f.Value.Type()]
		}
		return fmt.Sprintf("option %s: %s is not valid: %s", optionName(e.GetFlag()), value, strings.TrimPrefix(why, value+": ")), true
	}
	if e, ok := errors.AsType[*pflag.InvalidSyntaxError](err); ok {
		return fmt.Sprintf("%s is not an option", shard.Quote(e.GetSpecifiedFlag())), true
	}
	return "", false
}

// likeOption asks whether an option of the command was meant that begins as the unknown one does.
func likeOption(cmd *cobra.Command, beginning string) string {
	var like []string
	if cmd != nil {
		cmd.Flags().VisitAll(func(f *pflag.Flag) {
			if strings.HasPrefix(f.Name, beginning) && !f.Hidden && f.Name != "help" {
				like = append(like, "--"+f.Name)
			}
		})
	}
	if len(like) == 0 {
		return ""
	}
	return ": did you mean " + strings.Join(like, " or ") + "?"
}

func optionName(f *pflag.Flag) string {
	if f == nil {
		return "given"
	}
	return "--" + f.Name
}

// printable makes text that came from elsewhere safe for a terminal and one line: control characters show as escapes.
func printable(s string) string {
	if strings.IndexFunc(s, hostile) < 0 {
		return s
	}
	var b strings.Builder
	for _, r := range s {
		switch {
		case r == '\n':
			b.WriteString("; ")
		case hostile(r):
			fmt.Fprintf(&b, `\x%02x`, r)
		default:
			b.WriteRune(r)
		}
	}
	return b.String()
}

func hostile(r rune) bool {
	return unicode.IsControl(r) || r == '\u202e' || r == '\u2066' || r == '\u2067'
}

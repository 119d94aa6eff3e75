package cli

import (
	"fmt"
	"io"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

// rootCommand builds the whole tree. It does nothing that costs time: no files, no network, no terminal.
func (a *App) rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "shard [GLOBAL OPTIONS] COMMAND …",
		Short: "Sandboxes for code that agents write",
		Long:  "Run code that agents write in sandboxes on this host.",
		Example: `  shard create --name web alpine:3.20
  shard exec web echo hello
  shard remove --force web`,
		SilenceErrors:    true,
		SilenceUsage:     true,
		TraverseChildren: true, // global options stand before the command, and only there
		PersistentPreRunE: func(cmd *cobra.Command, _ []string) error {
			return a.checkGlobals(cmd)
		},
	}
	f := root.Flags()
	f.StringVar(&a.root, "root", DefaultRoot, "`DIR` where the daemon keeps its data, an absolute path")
	f.StringVar(&a.remote, "remote", "", "`URL` of a shard serve to talk to instead of this host's daemon; \"\" is this host's, whatever the environment or a saved connection says")
	version := f.Bool("version", false, "print the version of this program")
	root.RunE = func(cmd *cobra.Command, args []string) error {
		if *version {
			fmt.Fprintln(a.Out, "shard", a.Version)
			return nil
		}
		return groupRun(cmd, args)
	}
	for _, g := range []struct {
		title    string
		commands []*cobra.Command
	}{
		{"Sandboxes", []*cobra.Command{a.createCommand(), a.listCommand(), a.inspectCommand(), a.startCommand(), a.stopCommand(), a.pauseCommand(), a.resumeCommand(), a.removeCommand(), a.pruneCommand()}},
		{"In a sandbox", []*cobra.Command{a.execCommand(), a.shellCommand(), a.cpCommand(), a.watchCommand(), a.runCommand(), a.psCommand(), a.logsCommand(), a.killCommand()}},
		{"Network and keys", []*cobra.Command{a.portCommand(), a.policyCommand(), a.secretCommand()}},
		{"Images", []*cobra.Command{a.pullCommand(), a.imageCommand()}},
		{"Host and access", []*cobra.Command{a.setupCommand(), a.doctorCommand(), a.daemonCommand(), a.serveCommand(), a.tokensCommand(),
			a.providersCommand(), a.capabilitiesCommand(), a.infoCommand(), a.versionCommand(), completionCommand()}},
	} {
		root.AddGroup(&cobra.Group{ID: g.title, Title: g.title})
		for _, c := range g.commands {
			c.GroupID = g.title
			root.AddCommand(c)
		}
	}
	root.CompletionOptions.DisableDefaultCmd = true
	root.SetOut(a.Out)
	root.SetErr(a.Err)
	root.SetIn(a.In)
	root.SetHelpCommand(helpCommand())
	root.SetHelpFunc(func(cmd *cobra.Command, args []string) { help(cmd.OutOrStdout(), named(cmd, args)) })
	root.SetUsageFunc(func(cmd *cobra.Command) error { help(cmd.ErrOrStderr(), cmd); return nil })
	strict(root)
	return root
}

// strict makes the options of every command stand before its arguments.
func strict(cmd *cobra.Command) {
	cmd.DisableFlagsInUseLine = true
	cmd.Flags().SetInterspersed(false)
	cmd.Flags().SortFlags = false
	for _, c := range cmd.Commands() {
		strict(c)
	}
}

// laterOptions takes the options of a command that may also stand behind its first argument, and returns the arguments
// alone. With anywhere they may stand between and behind the others too, else only before the second.
func laterOptions(cmd *cobra.Command, args []string, anywhere bool) ([]string, error) {
	if len(args) == 0 {
		return nil, nil
	}
	f := cmd.Flags()
	f.SetInterspersed(anywhere)
	if err := f.Parse(args[1:]); err != nil {
		return nil, err
	}
	return append(args[:1:1], f.Args()...), nil
}

// checkGlobals refuses global options that make no sense, and finds out whom the command talks to.
func (a *App) checkGlobals(cmd *cobra.Command) error {
	if !cmd.HasParent() || cmd.Name() == "completion" || cmd.Name() == cobra.ShellCompRequestCmd {
		return nil // --version, help and completion answer whatever the globals say
	}
	if err := a.checkRoot(); err != nil {
		return err
	}
	return a.useRemote(cmd)
}

func (a *App) checkRoot() error {
	if !filepath.IsAbs(a.root) {
		return &usageError{msg: fmt.Sprintf("--root %s is not an absolute path", shard.Quote(a.root)), see: "shard"}
	}
	a.root = filepath.Clean(a.root)
	return nil
}

// groupRun is what a command that only holds others does: help without arguments, else no such command.
func groupRun(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		help(cmd.OutOrStdout(), cmd)
		return nil
	}
	msg := fmt.Sprintf("there is no command %s", shard.Quote(strings.TrimPrefix(cmd.CommandPath()+" "+args[0], "shard ")))
	if cmd.SuggestionsMinimumDistance <= 0 {
		cmd.SuggestionsMinimumDistance = 2
	}
	if near := cmd.SuggestionsFor(args[0]); len(near) > 0 {
		msg += fmt.Sprintf(": did you mean %s?", strings.Join(near, " or "))
	}
	return &usageError{msg: msg, see: cmd.CommandPath()}
}

// named is the command that a line means whose --help stands before the command's name: shard image --help list.
func named(cmd *cobra.Command, args []string) *cobra.Command {
	if at := slices.IndexFunc(args, func(arg string) bool { return arg == "--help" || arg == "-h" }); at >= 0 {
		cmd, _ = descend(cmd, args[at+1:])
	}
	return cmd
}

// descend follows the names of commands from cmd on, as far as there are such, and returns the words behind them.
func descend(cmd *cobra.Command, words []string) (*cobra.Command, []string) {
	for len(words) > 0 {
		at := slices.IndexFunc(cmd.Commands(), func(c *cobra.Command) bool { return c.Name() == words[0] || c.HasAlias(words[0]) })
		if at < 0 {
			break
		}
		cmd, words = cmd.Commands()[at], words[1:]
	}
	return cmd, words
}

// arguments refuses a number of arguments outside from to to (negative: no bound), and options that came too late.
// names are how the usage line calls them.
func arguments(from, to int, names string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if cmd.ArgsLenAtDash() < 0 {
			for _, arg := range args {
				if len(arg) > 1 && arg[0] == '-' {
					return usagef("option %s stands after an argument: options come first", shard.Quote(arg))
				}
			}
		}
		switch {
		case len(args) < from && len(args) == 0:
			return usagef("%s is missing", names)
		case len(args) < from:
			return usagef("too few arguments: give %s", names)
		case to == 0 && len(args) > 0:
			return usagef("unexpected argument %s", shard.Quote(args[0]))
		case to > 0 && len(args) > to:
			return usagef("unexpected argument %s: give %s", shard.Quote(args[to]), names)
		}
		return nil
	}
}

// helpCommand is `shard help COMMAND…`.
func helpCommand() *cobra.Command {
	return &cobra.Command{
		Use:    "help [COMMAND]…",
		Short:  "Show the help of a command",
		Hidden: true,
		// Help answers whatever the globals say.
		PersistentPreRunE: func(*cobra.Command, []string) error { return nil },
		RunE: func(cmd *cobra.Command, args []string) error {
			found, rest := descend(cmd.Root(), args)
			if len(rest) > 0 {
				return groupRun(found, rest)
			}
			found.InitDefaultHelpFlag()
			help(cmd.OutOrStdout(), found)
			return nil
		},
	}
}

// listCommands prints what the commands of a group do.
func listCommands(w io.Writer, cmd *cobra.Command, title, group string) {
	fmt.Fprintf(w, "\n%s:\n", title)
	for _, c := range cmd.Commands() {
		if c.IsAvailableCommand() && c.GroupID == group {
			fmt.Fprintf(w, "  %-*s  %s\n", c.NamePadding(), c.Name(), c.Short)
		}
	}
}

// help prints a command's help: what it does, how to write it, its options, an example.
func help(w io.Writer, cmd *cobra.Command) {
	text := cmd.Long
	if text == "" {
		text = cmd.Short + "."
	}
	fmt.Fprintf(w, "%s\n\nUsage:\n  %s\n", text, cmd.UseLine())
	for _, g := range cmd.Groups() {
		listCommands(w, cmd, g.Title, g.ID)
	}
	if len(cmd.Groups()) == 0 && cmd.HasAvailableSubCommands() {
		listCommands(w, cmd, "Commands", "")
	}
	if flags := cmd.LocalFlags(); flags.HasAvailableFlags() {
		title := "Options"
		if !cmd.HasParent() {
			title = "Global options, before the command"
		}
		fmt.Fprintf(w, "\n%s:\n%s", title, flags.FlagUsages())
	}
	if cmd.Example != "" {
		fmt.Fprintf(w, "\nExample:\n%s\n", cmd.Example)
	}
	if !cmd.HasParent() {
		fmt.Fprint(w, "\n`shard COMMAND --help` says more about a command.\n")
	}
}

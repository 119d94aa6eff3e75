package cli

import (
	"bytes"
	"context"
	"io"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/useshards/shard"
)

// completeWithin bounds what a press of the tab key may cost.
const completeWithin = time.Second

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

func running(s *shard.Sandbox) bool { return s.State == shard.StateRunning }

func paused(s *shard.Sandbox) bool { return s.State == shard.StatePaused }

func stopped(s *shard.Sandbox) bool { return s.State == shard.StateStopped }

func live(s *shard.Sandbox) bool { return s.State.Live() }

func anySandbox(*shard.Sandbox) bool { return true }

// completeSandboxes offers the names (else ids) of sandboxes for the first most arguments; 0 is all.
func (a *App) completeSandboxes(most int, fit func(*shard.Sandbox) bool) completion {
	return func(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
		if most > 0 && len(args) >= most {
			return nil, cobra.ShellCompDirectiveDefault
		}
		return a.sandboxNames(cmd, args, fit), cobra.ShellCompDirectiveNoFileComp
	}
}

// sandboxNames asks the daemon; without one there is nothing to offer.
func (a *App) sandboxNames(cmd *cobra.Command, given []string, fit func(*shard.Sandbox) bool) []string {
	ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
	defer cancel()
	list, err := a.client().AllSandboxes(ctx, true)
	if err != nil {
		return nil
	}
	taken := map[string]bool{}
	for _, ref := range given {
		taken[ref] = true
	}
	var names []string
	for i := range list.Sandboxes {
		if s := &list.Sandboxes[i]; fit(s) && !taken[s.Ref()] {
			names = append(names, s.Ref()+"\t"+string(s.State)+" "+familiar(s.Image))
		}
	}
	return names
}

// completeCopy offers sandboxes followed by a colon, beside local files.
func (a *App) completeCopy(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 1 || strings.ContainsAny(word, ":/.") {
		return nil, cobra.ShellCompDirectiveDefault
	}
	var names []string
	for _, n := range a.sandboxNames(cmd, nil, running) {
		ref, about, _ := strings.Cut(n, "\t")
		names = append(names, ref+":\t"+about)
	}
	return names, cobra.ShellCompDirectiveNoSpace
}

func (a *App) completeImages(cmd *cobra.Command, args []string, _ string) ([]string, cobra.ShellCompDirective) {
	if len(args) > 0 {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
	defer cancel()
	images, err := a.client().Images(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, img := range images {
		names = append(names, familiar(img.Reference))
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// familiar is the short form of a reference that means the same.
func familiar(ref string) string {
	short := strings.TrimPrefix(ref, "index.docker.io/")
	if short != ref {
		short = strings.TrimPrefix(short, "library/")
	}
	return short
}

func (a *App) completeProviders(cmd *cobra.Command, _ []string, _ string) ([]string, cobra.ShellCompDirective) {
	ctx, cancel := context.WithTimeout(a.completing(cmd), completeWithin)
	defer cancel()
	providers, err := a.client().Providers(ctx)
	if err != nil {
		return nil, cobra.ShellCompDirectiveNoFileComp
	}
	var names []string
	for _, p := range providers {
		if p.Available {
			names = append(names, p.Name)
		}
	}
	return names, cobra.ShellCompDirectiveNoFileComp
}

// readyToComplete makes the commands ready for a press of the tab key: words about options lose the marks that help reads, and
// options behind the sandbox are completed where they may stand there.
func readyToComplete(cmd *cobra.Command) {
	cmd.LocalFlags().VisitAll(func(f *pflag.Flag) { _, f.Usage = pflag.UnquoteUsage(f) })
	cmd.Flags().SetInterspersed(slices.Contains([]string{"run", "logs", "kill"}, cmd.Name()))
	for _, c := range cmd.Commands() {
		readyToComplete(c)
	}
}

// bashCompletion is cobra's script, made to work where the package bash-completion is not there: it takes from that package how to
// part the line into words, which bash itself parts at : and = too.
func bashCompletion(root *cobra.Command, w io.Writer) error {
	var script bytes.Buffer
	if err := root.GenBashCompletionV2(&script, true); err != nil {
		return err
	}
	const theirs = `    _get_comp_words_by_ref "$@" cur prev words cword` + "\n"
	const ours = `    if declare -F _get_comp_words_by_ref >/dev/null 2>&1; then
        _get_comp_words_by_ref "$@" cur prev words cword
        return
    fi
    local line=${COMP_LINE:0:COMP_POINT}
    read -ra words <<<"$line"
    [[ $line == *[[:space:]] ]] && words+=("")
    cword=$((${#words[@]} - 1)) cur=${words[-1]} prev=${words[-2]-}
`
	_, err := io.WriteString(w, strings.Replace(script.String(), theirs, ours, 1))
	return err
}

func completionCommand() *cobra.Command {
	shells := map[string]func(*cobra.Command, io.Writer) error{
		"bash":       bashCompletion,
		"zsh":        (*cobra.Command).GenZshCompletion,
		"fish":       func(root *cobra.Command, w io.Writer) error { return root.GenFishCompletion(w, true) },
		"powershell": (*cobra.Command).GenPowerShellCompletionWithDesc,
	}
	return &cobra.Command{
		Use:   "completion SHELL",
		Short: "Print a script that completes commands in your shell",
		Long: `Print a script for bash, zsh, fish or powershell with which a press of the tab key completes commands, options, and the names of
sandboxes, images and policies. Needs no daemon; completing names asks it.`,
		Example: `  source <(shard completion bash)
  shard completion bash | sudo tee /etc/bash_completion.d/shard >/dev/null
  shard completion zsh >"${fpath[1]}/_shard"
  shard completion fish >~/.config/fish/completions/shard.fish`,
		Args:      arguments(1, 1, "SHELL"),
		ValidArgs: slices.Sorted(maps.Keys(shells)),
		RunE: func(cmd *cobra.Command, args []string) error {
			script, ok := shells[args[0]]
			if !ok {
				return usagef("there is no completion for %s: choose bash, fish, powershell or zsh", shard.Quote(args[0]))
			}
			return script(cmd.Root(), cmd.OutOrStdout())
		},
	}
}

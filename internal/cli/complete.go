package cli

import (
	"context"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

// completeWithin bounds what a press of the tab key may cost.
const completeWithin = time.Second

type completion = func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective)

func running(s *shard.Sandbox) bool { return s.State == shard.StateRunning }

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
			names = append(names, s.Ref()+"\t"+string(s.State)+" "+s.Image)
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

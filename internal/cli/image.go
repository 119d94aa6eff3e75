package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) imageCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "image COMMAND",
		Short:   "List, remove and import images",
		Example: `  shard image list`,
		RunE:    groupRun,
	}
	cmd.AddCommand(a.imageListCommand(), a.imageRemoveCommand(), a.imagePruneCommand(), a.imageImportCommand())
	return cmd
}

func (a *App) imageListCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "list [options]",
		Aliases: []string{"ls"},
		Short:   "List the images on this host",
		Example: `  shard image list --format json`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.imageList(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) imageList(ctx context.Context, f format) error {
	images, err := a.client().Images(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		if images == nil {
			images = []shard.Image{}
		}
		return a.printJSON(images)
	}
	rows := [][]string{{"REFERENCE", "DIGEST", "SIZE", "CREATED"}}
	for _, img := range images {
		reference := img.Reference
		if img.Broken != "" {
			reference += " (broken: " + img.Broken + ")"
		}
		rows = append(rows, []string{reference, shortDigest(img.Digest), humanBytes(img.Size), humanTime(img.Created)})
	}
	return a.printTable(rows...)
}

func (a *App) imageRemoveCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:     "remove [options] IMAGE…",
		Aliases: []string{"rm"},
		Short:   "Remove images from this host",
		Long: `Remove images from this host. Prints each one that is gone; failures follow at the end, with exit code 1.
An image that a sandbox or a snapshot was made from is kept, unless --force is given.`,
		Example: `  shard image remove alpine:3.20`,
		Args:    arguments(1, -1, "IMAGE…"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.imageRemove(cmd.Context(), args, force)
		},
		ValidArgsFunction: a.completeImages,
	}
	cmd.Flags().BoolVar(&force, "force", false, "also an image that is in use")
	return cmd
}

func (a *App) imageRemove(ctx context.Context, refs []string, force bool) error {
	c := a.client()
	return a.each(ctx, refs, func(ref string) (string, error) {
		warnings, err := c.RemoveImage(ctx, ref, force)
		for _, w := range warnings {
			a.warn("%s", w)
		}
		return ref, err
	})
}

func (a *App) imagePruneCommand() *cobra.Command {
	var force bool
	cmd := &cobra.Command{
		Use:   "prune [options]",
		Short: "Remove the images that nothing uses",
		Long: `Remove the images that no sandbox and no snapshot was made from. Prints those that are gone.

On a terminal it asks first, since an image that was imported cannot be pulled again. Elsewhere, as in a script, it does not ask.`,
		Example: `  shard image prune --force`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.imagePrune(cmd.Context(), force)
		},
	}
	cmd.Flags().BoolVar(&force, "force", false, "do not ask")
	return cmd
}

func (a *App) imagePrune(ctx context.Context, force bool) error {
	if !force && isTerminal(a.In) {
		yes, err := a.ask(ctx, "Remove every image that no sandbox and no snapshot was made from? [y/N] ")
		if err != nil || !yes {
			return err
		}
	}
	pruned, err := a.client().PruneImages(ctx)
	if err != nil {
		return err
	}
	if len(pruned.Removed) == 0 && len(pruned.Warnings) == 0 {
		fmt.Fprintln(a.Err, "no unused images")
	}
	for _, ref := range pruned.Removed {
		if _, err := fmt.Fprintln(a.Out, printable(ref)); err != nil {
			return err
		}
	}
	for _, w := range pruned.Warnings {
		a.warn("%s", w)
	}
	return nil
}

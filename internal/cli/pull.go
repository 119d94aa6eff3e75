package cli

import (
	"context"
	"errors"
	"fmt"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) pullCommand() *cobra.Command {
	return &cobra.Command{
		Use:     "pull IMAGE",
		Short:   "Bring an image to this host",
		Long:    "Bring an image to this host. Prints its full reference and its digest, on two lines.",
		Example: `  shard pull python:3.12-slim`,
		Args:    arguments(1, 1, "IMAGE"),
		RunE: func(cmd *cobra.Command, args []string) error {
			return a.pull(cmd.Context(), args[0])
		},
		ValidArgsFunction: a.completeImages,
	}
}

func (a *App) pull(ctx context.Context, ref string) error {
	steps := a.newProgress("pulling")
	img, err := a.client().Pull(ctx, ref, steps.show)
	steps.close()
	if errors.Is(err, errInterrupted) {
		return errors.New("interrupted; the daemon may go on with the pull")
	}
	if err != nil {
		return err
	}
	return a.printImage(img)
}

// printImage prints the two lines that name an image.
func (a *App) printImage(img *shard.Image) error {
	_, err := fmt.Fprintf(a.Out, "%s\n%s\n", img.Reference, img.Digest)
	return err
}

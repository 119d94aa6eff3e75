package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

type pruneOptions struct{ force bool }

func (a *App) pruneCommand() *cobra.Command {
	var o pruneOptions
	cmd := &cobra.Command{
		Use:   "prune [options]",
		Short: "Remove all stopped sandboxes",
		Long: `Remove all stopped sandboxes and their files, after showing them and asking. Prints the ids of those that are gone.
Without a terminal to ask on, --force is needed.`,
		Example: `  shard prune --force`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.prune(cmd.Context(), o)
		},
	}
	cmd.Flags().BoolVar(&o.force, "force", false, "do not ask")
	return cmd
}

func (a *App) prune(ctx context.Context, o pruneOptions) error {
	if !o.force && !isTerminal(a.In) {
		return usagef("stdin is not a terminal to ask on: give --force")
	}
	c := a.client()
	answer, err := c.AllSandboxes(ctx, true)
	if err != nil {
		return err
	}
	var doomed []shard.Sandbox
	var ids []string
	for _, s := range answer.Sandboxes {
		if s.State == shard.StateStopped && hidden(&s) {
			doomed = append(doomed, s)
			ids = append(ids, s.ID)
		}
	}
	for _, w := range answer.Warnings {
		a.warn("%s", w)
	}
	if len(ids) == 0 {
		fmt.Fprintln(a.Err, "no stopped sandboxes")
		return nil
	}
	if !o.force {
		if err := a.printTable(sandboxRows(doomed, time.Now())...); err != nil {
			return err
		}
		question := "Remove this sandbox and its files? [y/N] "
		if len(ids) > 1 {
			question = fmt.Sprintf("Remove these %d sandboxes and their files? [y/N] ", len(ids))
		}
		yes, err := a.ask(ctx, question)
		if err != nil || !yes {
			return err
		}
	}
	return a.each(ctx, ids, func(id string) (string, error) {
		err := c.Remove(ctx, id, false)
		if shard.CodeOf(err) == shard.CodeNotFound {
			return "", nil // somebody else was faster
		}
		return id, err
	})
}

// ask asks a question on the terminal; only y or yes is yes. An interrupt ends the question.
func (a *App) ask(ctx context.Context, question string) (bool, error) {
	fmt.Fprint(a.Err, question)
	type reply struct {
		text string
		err  error
	}
	replies := make(chan reply, 1)
	go func() { // ends with the process when nobody answers: a read of a terminal cannot be called off
		text, err := bufio.NewReader(a.In).ReadString('\n')
		replies <- reply{text, err}
	}()
	select {
	case <-ctx.Done():
		return false, context.Cause(ctx)
	case r := <-replies:
		if r.err != nil && !errors.Is(r.err, io.EOF) {
			return false, fmt.Errorf("read the answer: %w", r.err)
		}
		word := strings.ToLower(strings.TrimSpace(r.text))
		return word == "y" || word == "yes", nil
	}
}

package cli

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

func (a *App) portURLCommand() *cobra.Command {
	good := shard.DefaultLinkLife
	var keyFile string
	cmd := &cobra.Command{
		Use:   "url [options] SANDBOX PORT",
		Short: "Print a link at which a browser reaches a port of a sandbox",
		Long: `Print a signed link to a port of a sandbox, below the preview domain of shard serve. Whoever has it reaches that port of
that sandbox, and nothing else, until it expires. On the daemon's host each link is made with a token of its own, named
preview.SANDBOX.PORT: shard tokens revoke takes the link back. Through SHARD_REMOTE links are made with your API key, and
fall with it.`,
		Example: `  shard port url --expires 8h web 3000`,
		Args:    arguments(2, 2, "SANDBOX PORT"),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return usagef("%s is not a port of a sandbox: write 1 to %d", shard.Quote(args[1]), shard.MaxPort)
			}
			if good < time.Second || good > shard.MaxLinkLife {
				return usagef("--expires must be 1s to %dd", shard.MaxLinkLife/(24*time.Hour))
			}
			return a.portURL(cmd.Context(), args[0], int(port), good, keyFile)
		},
		ValidArgsFunction: a.completeSandboxes(1, anySandbox),
	}
	cmd.Flags().Var(life{&good}, "expires", "`DURATION` for which the link is good, at most 30d")
	signingKeyFlag(cmd, &keyFile)
	return cmd
}

func (a *App) portURL(ctx context.Context, ref string, port int, life time.Duration, keyFile string) error {
	var link *shard.PortLink
	var err error
	if a.target != nil {
		link, err = a.client().LinkPort(ctx, ref, port, life)
	} else {
		link, err = a.signLink(ctx, ref, port, life, keyFile)
	}
	if err != nil {
		return err
	}
	_, err = fmt.Fprintln(a.Out, link.URL)
	return err
}

// signLink makes a link on the daemon's host, where the key is.
func (a *App) signLink(ctx context.Context, ref string, port int, life time.Duration, keyFile string) (*shard.PortLink, error) {
	status, err := a.client().Daemon(ctx)
	if err != nil {
		return nil, err
	}
	if status.Preview == "" {
		return nil, errors.New("the daemon has heard of no shard serve with preview addresses on this host: start one with --preview-domain, and give it a few seconds")
	}
	origin, err := shard.ParsePreviewOrigin(status.Preview)
	if err != nil {
		return nil, err
	}
	sb, err := a.client().Inspect(ctx, ref)
	if err != nil {
		return nil, err
	}
	file, _, err := a.signingKey(keyFile)
	if err != nil {
		return nil, err
	}
	book, err := token.Open(file, false)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, errors.New("shard serve on this host has another signing key than the root's: give --signing-key-file")
	}
	if err != nil {
		return nil, needsOwner(err)
	}
	// Its text is thrown away: the token is there for the link to hang on.
	text, _, err := book.Mint(fmt.Sprintf("preview.%s.%d", sb.ID, port), life, []string{token.LinkScope})
	if err != nil {
		return nil, needsOwner(err)
	}
	grant, err := book.Check(text)
	if err != nil {
		return nil, err
	}
	signed, expires, err := book.SignLink(grant, sb.ID, port, life)
	if err != nil {
		return nil, err
	}
	return shard.NewPortLink(origin, sb.ID, port, signed, expires), nil
}

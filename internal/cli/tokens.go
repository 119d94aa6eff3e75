package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

func (a *App) tokensCommand() *cobra.Command {
	cmd := &cobra.Command{
		Use:     "tokens COMMAND",
		Short:   "Mint, list and revoke the API keys of shard serve",
		Example: `  sudo shard tokens mint --name build-agent --duration 24h`,
		RunE:    groupRun,
	}
	cmd.AddCommand(a.tokensMintCommand(), a.tokensListCommand(), a.tokensRevokeCommand(), a.tokensScopesCommand())
	return cmd
}

func signingKeyFlag(cmd *cobra.Command, file *string) {
	cmd.Flags().StringVar(file, "signing-key-file", "", "`FILE` of the signing key, which must be there, the ledger of tokens beside it (default auth/signing-key below the root)")
}

// signingKey is the file to use, and whether it may be made.
func (a *App) signingKey(file string) (string, bool, error) {
	if file == "" {
		return token.DefaultKeyFile(a.root), true, nil
	}
	if _, err := os.Stat(file); err != nil {
		return "", false, fmt.Errorf("the signing key file: %w", err)
	}
	return file, false, nil
}

type mintOptions struct {
	name     string
	duration time.Duration
	scopes   string
	keyFile  string
	format   format
}

func (a *App) tokensMintCommand() *cobra.Command {
	var o mintOptions
	cmd := &cobra.Command{
		Use:   "mint --name NAME [options]",
		Short: "Make an API key",
		Long: `Make an API key for shard serve and print it, the only time it is ever shown. Without --scopes it can do everything.
Needs no daemon. shard tokens scopes lists the scopes.`,
		Example: `  sudo shard tokens mint --name build-agent --duration 24h --scopes sandbox:read,sandbox:write,exec`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.name == "" {
				return usagef("--name is missing: say who the API key is for")
			}
			if o.duration < 0 {
				return usagef("--duration must not be negative; 0 is for ever")
			}
			return a.tokensMint(o)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "`NAME` of whoever gets it; a name may have several")
	f.Var(life{&o.duration}, "duration", "how long it is good for: `DURATION` such as 90d or 8h, 0 is for ever")
	f.StringVar(&o.scopes, "scopes", shard.ScopeAll, "what it can do: `SCOPES` with commas between them")
	_ = cmd.RegisterFlagCompletionFunc("scopes", completeScopes)
	signingKeyFlag(cmd, &o.keyFile)
	formatFlag(cmd, &o.format, formatJSON)
	return cmd
}

// completeScopes offers the scopes for the last word of a list with commas.
func completeScopes(_ *cobra.Command, _ []string, word string) ([]string, cobra.ShellCompDirective) {
	before := word[:strings.LastIndex(word, ",")+1]
	var lists []string
	for _, s := range shard.Scopes {
		lists = append(lists, before+s.Name)
	}
	return lists, cobra.ShellCompDirectiveNoFileComp
}

func (a *App) tokensMint(o mintOptions) error {
	scopes, err := shard.ParseScopes(o.scopes)
	if err != nil {
		return fmt.Errorf("--scopes: %w", err)
	}
	file, create, err := a.signingKey(o.keyFile)
	if err != nil {
		return err
	}
	book, err := token.Open(file, create)
	if err != nil {
		return needsOwner(err)
	}
	text, r, err := book.Mint(o.name, o.duration, scopes)
	if err != nil {
		return needsOwner(err)
	}
	if o.format == formatTable {
		return a.printTable([]string{"TOKEN", "EXPIRES", "SCOPES"}, []string{text, expires(r), strings.Join(r.Scopes, ",")})
	}
	line, err := json.Marshal(struct {
		Token     string     `json:"token"`
		ExpiresAt *time.Time `json:"expires_at"`
		Scopes    []string   `json:"scopes"`
	}{text, r.ExpiresAt, r.Scopes})
	if err != nil {
		return err
	}
	_, err = fmt.Fprintf(a.Out, "%s\n", line)
	return err
}

// needsOwner says what to do about files of the root that this user may not touch.
func needsOwner(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok && errors.Is(err, fs.ErrPermission) {
		return fmt.Errorf("API keys are kept where this user has no access (%s): use sudo", e.Path)
	}
	return err
}

func expires(r *token.Record) string {
	if r.ExpiresAt == nil {
		return "never"
	}
	return humanTime(*r.ExpiresAt)
}

func (a *App) tokensListCommand() *cobra.Command {
	var keyFile string
	var f format
	cmd := &cobra.Command{
		Use:     "list [options]",
		Aliases: []string{"ls"},
		Short:   "List the API keys that were made, without the keys themselves",
		Example: `  sudo shard tokens list`,
		Args:    arguments(0, 0, ""),
		RunE: func(*cobra.Command, []string) error {
			return a.tokensList(keyFile, f)
		},
	}
	signingKeyFlag(cmd, &keyFile)
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) tokensList(keyFile string, f format) error {
	file, _, err := a.signingKey(keyFile)
	if err != nil {
		return err
	}
	records, warnings, err := token.LedgerOf(file).List()
	if err != nil {
		return needsOwner(err)
	}
	now := time.Now()
	if f == formatJSON {
		type row struct {
			ID        string     `json:"id"`
			Name      string     `json:"name"`
			IssuedAt  time.Time  `json:"issued_at"`
			ExpiresAt *time.Time `json:"expires_at"`
			Scopes    []string   `json:"scopes"`
			Status    string     `json:"status"`
		}
		rows := []row{}
		for _, r := range records {
			rows = append(rows, row{r.ID, r.Name, r.IssuedAt, r.ExpiresAt, r.Scopes, r.Status(now)})
		}
		err = a.printJSON(rows)
	} else {
		rows := [][]string{{"ID", "NAME", "ISSUED", "EXPIRES", "SCOPES", "STATUS"}}
		for i := range records {
			r := &records[i]
			rows = append(rows, []string{r.ID, r.Name, humanTime(r.IssuedAt), expires(r), strings.Join(r.Scopes, ","), r.Status(now)})
		}
		err = a.printTable(rows...)
	}
	if err != nil {
		return err
	}
	return warned(warnings)
}

func (a *App) tokensRevokeCommand() *cobra.Command {
	var keyFile, name string
	cmd := &cobra.Command{
		Use:   "revoke [options] TOKENID | --name NAME",
		Short: "Take back API keys",
		Long: `Take back an API key by its id (shard tokens list), or all that were made for a name. shard serve refuses it at once and
ends what it has open within a second. Prints the id of each key that was active.`,
		Example: `  sudo shard tokens revoke --name build-agent`,
		Args:    arguments(0, 1, "TOKENID"),
		RunE: func(cmd *cobra.Command, args []string) error {
			named := cmd.Flags().Changed("name")
			switch {
			case named && len(args) > 0:
				return usagef("give a token's id or --name, not both")
			case named:
				return a.tokensRevoke(keyFile, "for the name "+shard.Quote(name), func(r *token.Record) bool { return r.Name == name })
			case len(args) == 0:
				return usagef("give a token's id, or --name")
			}
			return a.tokensRevoke(keyFile, "with the id "+shard.Quote(args[0]), func(r *token.Record) bool { return r.ID == args[0] })
		},
	}
	cmd.Flags().StringVar(&name, "name", "", "every API key made for `NAME`")
	signingKeyFlag(cmd, &keyFile)
	return cmd
}

func (a *App) tokensRevoke(keyFile, which string, match func(*token.Record) bool) error {
	file, _, err := a.signingKey(keyFile)
	if err != nil {
		return err
	}
	ids, found, err := token.LedgerOf(file).Revoke(match)
	if err != nil {
		return needsOwner(err)
	}
	if !found {
		return fmt.Errorf("there is no API key %s", which)
	}
	for _, id := range ids {
		if _, err := fmt.Fprintln(a.Out, id); err != nil {
			return err
		}
	}
	return nil
}

func (a *App) tokensScopesCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "scopes [options]",
		Short:   "List what an API key can be allowed to do",
		Example: `  shard tokens scopes`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.tokensScopes(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) tokensScopes(ctx context.Context, f format) error {
	scopes, err := a.client().Scopes(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		return a.printJSON(scopes)
	}
	rows := [][]string{{"SCOPE", "DESCRIPTION"}}
	for _, s := range scopes {
		rows = append(rows, []string{s.Name, s.Description})
	}
	return a.printTable(rows...)
}

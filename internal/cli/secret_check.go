package cli

import (
	"context"
	"fmt"
	"net/url"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/policy"
	"github.com/useshards/shard/internal/secret"
)

func (a *App) secretCheckCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:   "check [options] SANDBOX NAME URL",
		Short: "Say whether a request would get the value, and why",
		Long: `Say whether the placeholder of a secret becomes the value in the headers of a sandbox's request to URL, and why. Nothing is
looked up or dialled. The exit code is 0 either way.`,
		Example: `  shard secret check web API_TOKEN https://api.example.com/v1/models`,
		Args:    arguments(3, 3, "SANDBOX, NAME and URL"),
		RunE: func(cmd *cobra.Command, args []string) error {
			to, err := parseTarget(args[2])
			if err != nil {
				return err
			}
			return a.secretCheck(cmd.Context(), args[0], args[1], to, f)
		},
		ValidArgsFunction: func(cmd *cobra.Command, args []string, word string) ([]string, cobra.ShellCompDirective) {
			if len(args) == 1 {
				return a.completeSecrets(1)(cmd, args, word)
			}
			return a.completeSandboxes(1, anySandbox)(cmd, args, word)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

// target is where a request goes: a URL without what may be private in it.
type target struct{ scheme, host, port string }

func (t target) String() string {
	if t.scheme == "https" && t.port == "443" || t.scheme == "http" && t.port == "80" {
		return t.scheme + "://" + t.host
	}
	return t.scheme + "://" + t.host + ":" + t.port
}

func parseTarget(text string) (target, error) {
	u, err := url.Parse(text)
	if err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http" {
		return target{}, usagef("URL is not one of http or https with a host") // not quoted: it may hold a password
	}
	t := target{scheme: u.Scheme, host: u.Hostname(), port: u.Port()}
	if t.port == "" {
		t.port = map[string]string{"http": "80", "https": "443"}[t.scheme]
	}
	q, err := policy.ParseQuestion(t.host, t.port)
	if err != nil {
		return target{}, err
	}
	if q.Host != "" {
		t.host = q.Host
	}
	return t, nil
}

func (a *App) secretCheck(ctx context.Context, ref, name string, to target, f format) error {
	if err := shard.CheckSecretName(name); err != nil {
		return err
	}
	in, err := a.client().Inspect(ctx, ref)
	if err != nil {
		return err
	}
	secrets, _, err := a.client().Secrets(ctx)
	if err != nil {
		return err
	}
	rules, err := rulesIn(in)
	if err != nil {
		return err
	}
	put, why := judge(in, secrets, rules, name, to)
	if f == formatTable {
		verdict := "the placeholder stays"
		if put {
			verdict = "the value is put in"
		}
		_, err := fmt.Fprintln(a.Out, printable(fmt.Sprintf("%s: %s: %s", to, verdict, why)))
		return err
	}
	return a.printJSON(struct {
		Sandbox     string `json:"sandbox"`
		Secret      string `json:"secret"`
		URL         string `json:"url"`
		PutIn       bool   `json:"put_in"`
		Explanation string `json:"explanation"`
	}{in.Ref(), name, to.String(), put, why})
}

// judge says whether the value of a secret is put into a request, and why.
func judge(in *shard.Inspection, secrets []shard.Secret, rules *policy.Compiled, name string, to target) (put bool, why string) {
	i := slices.IndexFunc(secrets, func(s shard.Secret) bool { return s.Name == name })
	switch {
	case !slices.Contains(in.Secrets, name):
		return false, fmt.Sprintf("sandbox %s does not have secret %s (shard secret grant)", in.Ref(), name)
	case i < 0:
		return false, fmt.Sprintf("there is no secret %s any more, or it cannot be read", name)
	case to.scheme != "https":
		return false, "the request is not encrypted: values go out with https only"
	case to.port != "443":
		return false, "the port is not 443"
	}
	s := secret.Secret{Destinations: secrets[i].Destinations}
	q, err := policy.ParseQuestion(to.host, to.port)
	if err != nil || q.Host == "" || !s.For(to.host) {
		return false, fmt.Sprintf("%s is none of the destinations of secret %s, which are %s", to.host, name, strings.Join(s.Destinations, ", "))
	}
	if x := rules.Explain(q); !x.Allow {
		return false, "the request does not get that far: " + x.Sentence
	}
	return true, fmt.Sprintf("where a header, or the user or password of Basic credentials, holds %s", secrets[i].Placeholder)
}

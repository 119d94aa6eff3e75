package api

import (
	"net/url"

	"github.com/useshards/shard"
)

// parseQuery is url.ParseQuery with our error: a stray % or ; is refused rather than guessed at.
func parseQuery(raw string) (map[string][]string, error) {
	values, err := url.ParseQuery(raw)
	if err != nil {
		return nil, shard.Invalidf("the query is not well formed: write %% as %%25 and ; as %%3B")
	}
	return values, nil
}

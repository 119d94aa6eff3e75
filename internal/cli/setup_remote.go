package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/term"

	"github.com/useshards/shard/internal/durable"
)

// setupRemote sees whether a shard serve answers and takes the key, says what it can do, and saves it if that is wanted.
func (a *App) setupRemote(ctx context.Context, o *setupOptions, asks *asker) error {
	r, err := a.remoteOfSetup(o.remote, asks)
	if err != nil {
		return err
	}
	a.target = r
	if r.url.Scheme == "http" {
		a.warn("warning: %s is not encrypted: whoever is on the way can read the API key and everything else", r.url)
	}
	c := a.client()
	defer c.Close()
	version, err := c.Version(ctx)
	if err != nil {
		return err
	}
	caps, err := c.Capabilities(ctx, "")
	if err != nil {
		return err
	}
	var can []string
	for _, v := range capabilityRows(caps) {
		if v.can {
			can = append(can, v.name)
		}
	}
	fmt.Fprintln(a.Out, printable(fmt.Sprintf("%s answers and takes the key: version %s; its default provider can %s", r.url, version.Version, strings.Join(can, ", "))))
	save := o.save
	if asks.on && !save {
		if save, err = asks.yes(ctx, "Save the connection, with the key in plain text, for all commands of this user?", false); err != nil {
			return err
		}
	}
	if !save {
		return nil
	}
	path, err := a.saveConnection(connection{Remote: r.url.String(), APIKey: r.key})
	if err != nil {
		return err
	}
	fmt.Fprintln(a.Out, printable("saved in "+path))
	return nil
}

func (a *App) remoteOfSetup(address string, asks *asker) (*remote, error) {
	url, err := parseRemote(address)
	if err != nil {
		return nil, fmt.Errorf("--remote %w", err)
	}
	r := &remote{url: url, from: "--remote"}
	if r.key, err = checkKey(a.Getenv("SHARD_API_KEY")); err != nil {
		return nil, fmt.Errorf("SHARD_API_KEY %w", err)
	}
	if r.key == "" {
		// A saved connection that is broken is no reason to stop: it may be what this run repairs.
		if saved, _, err := a.savedConnection(); err == nil && saved.APIKey != "" {
			if own, err := parseRemote(saved.Remote); err == nil && origin(own) == origin(url) {
				r.key = saved.APIKey
			}
		}
	}
	if f, ok := a.In.(*os.File); r.key == "" && asks.on && ok {
		fmt.Fprint(a.Err, "API key (not shown): ")
		text, err := term.ReadPassword(int(f.Fd()))
		fmt.Fprintln(a.Err)
		if err != nil {
			return nil, err
		}
		if r.key, err = checkKey(string(text)); err != nil {
			return nil, fmt.Errorf("the API key %w", err)
		}
	}
	if r.key == "" {
		return nil, fmt.Errorf("there is no API key for %s: set SHARD_API_KEY", url)
	}
	if file := a.Getenv("SHARD_CA_FILE"); file != "" {
		if url.Scheme == "http" {
			return nil, fmt.Errorf("SHARD_CA_FILE is set, but %s is not https: nothing would be checked with it", url)
		}
		if r.roots, err = readRoots(file); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// saveConnection writes the saved connection, whole or not at all, for this user alone.
func (a *App) saveConnection(c connection) (string, error) {
	path := a.connectionFile()
	if path == "" {
		return "", errors.New("this user has no home directory to save the connection in: set HOME or XDG_CONFIG_HOME")
	}
	data, err := json.Marshal(c)
	if err != nil {
		return "", err
	}
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", fmt.Errorf("save the connection: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { // a directory
		return "", fmt.Errorf("save the connection: %w", err)
	}
	if err := durable.WriteFile(path, append(data, '\n'), 0o600); err != nil {
		return "", fmt.Errorf("save the connection: %w", err)
	}
	return path, nil
}

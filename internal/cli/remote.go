package cli

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/useshards/shard/client"
)

// remote is a shard serve to talk to instead of the daemon's socket.
type remote struct {
	url *url.URL
	// from says where the address was found, for messages.
	from string
	key  string
	// keyFrom says where the key was found.
	keyFrom string
	// roots are who may have signed the server's certificate; nil is whom this system trusts.
	roots *x509.CertPool
}

// maxConfig bounds files of the user's that are read whole, in bytes.
const maxConfig = 1 << 20

// localOnly are the commands that speak of the daemon's host and go to no other.
var localOnly = []string{"pull", "info", "daemon status", "tokens mint", "tokens list", "tokens revoke",
	"image list", "image remove", "image prune", "image import"}

// useRemote finds out whom the command talks to, and refuses what does not go together, before anything is dialled.
func (a *App) useRemote(cmd *cobra.Command) error {
	name := strings.TrimPrefix(cmd.CommandPath(), "shard ")
	if name == "daemon" || name == "serve" {
		if address, from := a.givenRemote(cmd.Root()); address != "" {
			return usagef("%s always serves its own host: %s does not go with it", name, from)
		}
		return nil
	}
	if slices.Contains(localOnly, name) {
		address, from := a.givenRemote(cmd.Root())
		if from == "" {
			saved, path, err := a.savedConnection()
			if err != nil {
				return err
			}
			address, from = saved.Remote, "the connection saved in "+path
		}
		if address != "" {
			return fmt.Errorf("%s is about the daemon's own host, and %s leads to another: run it there, or give --remote \"\" for this host", name, from)
		}
		return nil
	}
	r, err := a.findRemote(cmd.Root())
	if err != nil {
		return err
	}
	a.target = r
	if r != nil && r.url.Scheme == "http" {
		a.warn("warning: %s is not encrypted: whoever is on the way can read the API key and everything else", r.url)
	}
	return nil
}

// givenRemote is the address that the command line or the environment gives, and by what. No source means that neither
// says anything.
func (a *App) givenRemote(root *cobra.Command) (address, from string) {
	if root.Flags().Changed("remote") {
		return a.remote, "--remote"
	}
	if address = a.Getenv("SHARD_REMOTE"); address != "" {
		return address, "SHARD_REMOTE"
	}
	return "", ""
}

// findRemote is the remote to use, nil for the local socket.
func (a *App) findRemote(root *cobra.Command) (*remote, error) {
	address, from := a.givenRemote(root)
	if from != "" && address == "" {
		return nil, nil
	}
	key, err := checkKey(a.Getenv("SHARD_API_KEY"))
	if err != nil {
		return nil, fmt.Errorf("SHARD_API_KEY %w", err)
	}
	var saved connection
	if from == "" || key == "" {
		var path string
		if saved, path, err = a.savedConnection(); err != nil {
			return nil, err
		}
		if from == "" {
			address, from = saved.Remote, "the connection saved in "+path
		}
	}
	if address == "" {
		return nil, nil
	}
	r := &remote{from: from, key: key, keyFrom: "SHARD_API_KEY"}
	if r.url, err = parseRemote(address); err != nil {
		return nil, fmt.Errorf("%s %w", from, err)
	}
	if key == "" && saved.APIKey != "" {
		// A saved key is for the server that it was saved for, and for no other.
		if own, err := parseRemote(saved.Remote); err == nil && origin(own) == origin(r.url) {
			r.key, r.keyFrom = saved.APIKey, "the saved connection"
		}
	}
	if r.key == "" {
		return nil, fmt.Errorf("there is no API key for %s: set SHARD_API_KEY to one of that host (shard tokens mint)", r.url)
	}
	if file := a.Getenv("SHARD_CA_FILE"); file != "" {
		if r.url.Scheme == "http" {
			return nil, fmt.Errorf("SHARD_CA_FILE is set, but %s is not https: nothing would be checked with it", r.url)
		}
		if r.roots, err = readRoots(file); err != nil {
			return nil, err
		}
	}
	return r, nil
}

// parseRemote reads the address of a shard serve: http or https, a host, a port or none, and nothing else.
func parseRemote(address string) (*url.URL, error) {
	const want = "must be the URL of shard serve, such as https://shard.example.com:7850"
	u, err := url.Parse(address)
	if err != nil || u.Hostname() == "" || u.Opaque != "" {
		return nil, errors.New(want)
	}
	u.Scheme, u.Host = strings.ToLower(u.Scheme), strings.ToLower(u.Host)
	switch {
	case u.Scheme != "http" && u.Scheme != "https":
		return nil, errors.New(want)
	case u.User != nil:
		return nil, errors.New(want + ", without a user: the API key goes into SHARD_API_KEY")
	case u.Path != "" && u.Path != "/" || u.RawQuery != "" || u.ForceQuery || u.Fragment != "":
		return nil, errors.New(want + ", without a path or a query")
	}
	if port := u.Port(); port != "" || strings.HasSuffix(u.Host, ":") {
		if n, err := strconv.ParseUint(port, 10, 16); err != nil || n == 0 {
			return nil, errors.New(want + ", with a port from 1 to 65535")
		}
	}
	return &url.URL{Scheme: u.Scheme, Host: u.Host}, nil
}

// origin is scheme, host and port, however the address was written.
func origin(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443"}[u.Scheme]
	}
	return u.Scheme + "://" + net.JoinHostPort(u.Hostname(), port)
}

// checkKey trims an API key and refuses one that cannot be sent; the message never shows it.
func checkKey(key string) (string, error) {
	key = strings.TrimSpace(key)
	if strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }) {
		return "", errors.New("has a control character such as a line break, or one beyond ASCII, in it: copy the API key again")
	}
	return key, nil
}

func readRoots(file string) (*x509.CertPool, error) {
	pem, err := readSmall(file)
	if err != nil {
		return nil, fmt.Errorf("read SHARD_CA_FILE: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("SHARD_CA_FILE %s holds no certificate in PEM form", file)
	}
	return roots, nil
}

func readSmall(file string) ([]byte, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, maxConfig+1))
	if err == nil && len(data) > maxConfig {
		err = fmt.Errorf("%s has more than %d bytes", file, maxConfig)
	}
	return data, err
}

// connection is the saved connection, as it lies in the file.
type connection struct {
	Remote string `json:"remote"`
	APIKey string `json:"api_key"`
}

// connectionFile is where the connection is saved; "" when this user has no place for it.
func (a *App) connectionFile() string {
	dir := a.Getenv("XDG_CONFIG_HOME")
	if !filepath.IsAbs(dir) { // which the specification says to ignore
		home := a.Getenv("HOME")
		if !filepath.IsAbs(home) {
			return ""
		}
		dir = filepath.Join(home, ".config")
	}
	return filepath.Join(dir, "shard", "config.json")
}

// savedConnection reads the saved connection; none is the zero value. A file that is wrong in any way is refused, since
// guessing could send the key, or the command, to somewhere else than its owner meant.
func (a *App) savedConnection() (c connection, path string, err error) {
	if path = a.connectionFile(); path == "" {
		return c, "", nil
	}
	info, err := os.Stat(path)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return c, path, nil
	}
	wrong := func(why string) error {
		return fmt.Errorf("the saved connection %s %s: correct or remove it, or give --remote \"\" for this host", path, why)
	}
	switch {
	case err != nil:
		return c, path, fmt.Errorf("read the saved connection: %w", err)
	case !info.Mode().IsRegular():
		return c, path, wrong("is not a file")
	case info.Mode().Perm()&0o022 != 0:
		return c, path, wrong("can be changed by others, who could have it lead anywhere")
	}
	data, err := readSmall(path)
	if err != nil {
		return c, path, fmt.Errorf("read the saved connection: %w", err)
	}
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&c); err != nil {
		return connection{}, path, wrong(`is not a JSON object of "remote" and "api_key" alone`)
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return connection{}, path, wrong("goes on after its JSON object")
	}
	if c.Remote != "" {
		if _, err := parseRemote(c.Remote); err != nil {
			return connection{}, path, wrong("has a remote that " + err.Error())
		}
	}
	if c.APIKey, err = checkKey(c.APIKey); err != nil {
		return connection{}, path, wrong("has an api_key that " + err.Error())
	}
	return c, path, nil
}

// client makes the client of the remote, else of the daemon under the root.
func (a *App) client() *client.Client {
	o := client.Options{Dial: client.Unix(filepath.Join(a.root, "shard.sock")), UserAgent: "shard-cli/" + a.Version}
	if r := a.target; r != nil {
		o.Dial, o.Base, o.Token = client.Remote(r.url, r.roots), r.url, r.key
	}
	return client.New(o)
}

// completing makes ready for the client of a press of the tab key, which no check of the globals comes before.
func (a *App) completing(cmd *cobra.Command) context.Context {
	a.target = nil
	r, err := a.findRemote(cmd.Root())
	if err != nil {
		ctx, cancel := context.WithCancel(cmd.Context())
		cancel()
		return ctx
	}
	a.target = r
	return cmd.Context()
}

// unreachableRemote says why there is no answer from the remote, and what to do.
func (a *App) unreachableRemote(e *client.DialError) string {
	_, unknown := errors.AsType[x509.UnknownAuthorityError](e.Err)
	_, plain := errors.AsType[tls.RecordHeaderError](e.Err)
	switch {
	case errors.As(e.Err, new(*net.DNSError)):
		return fmt.Sprintf("cannot reach %s (from %s): this host does not find that name", e.Address, a.target.from)
	case plain:
		return fmt.Sprintf("%s (from %s) does not speak TLS: is it http:// there?", e.Address, a.target.from)
	case unknown && a.target.roots == nil:
		return fmt.Sprintf("%s has a certificate of an authority that this host does not know: put that authority's certificate (PEM) into a file and set SHARD_CA_FILE to it", e.Address)
	case unknown:
		return fmt.Sprintf("%s has a certificate of another authority than the one in SHARD_CA_FILE", e.Address)
	case errors.Is(e.Err, syscall.ECONNREFUSED):
		return fmt.Sprintf("nobody listens at %s (from %s): is shard serve running there?", e.Address, a.target.from)
	}
	return fmt.Sprintf("cannot reach %s (from %s): %v", e.Address, a.target.from, e.Err)
}

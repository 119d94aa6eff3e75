package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/hostcheck"
	"github.com/useshards/shard/internal/setup"
)

// choice is the value of an option of true or false whose default depends on the host; nil when it was not given.
type choice struct{ value **bool }

func (c choice) String() string { return "" }

func (c choice) Type() string { return "true|false" }

func (c choice) Set(text string) error {
	v, err := strconv.ParseBool(text)
	if err != nil || text != strconv.FormatBool(v) {
		return errors.New("write true or false")
	}
	*c.value = &v
	return nil
}

func given(c *bool, other bool) bool {
	if c == nil {
		return other
	}
	return *c
}

type setupOptions struct {
	local    bool
	remote   string
	provider string
	atBoot   *bool
	storage  *int64
	httpAPI  *bool
	listen   string
	// preview, cert and key are nil when they were not given, "" for none.
	preview, cert, key *string
	replaceKey         bool
	save               bool
	uninstall          bool
	yes                bool
	tree               string // where to install, for tests
}

func (a *App) setupCommand() *cobra.Command {
	var o setupOptions
	cmd := &cobra.Command{
		Use:   "setup [options]",
		Short: "Install shard on this host, or connect to one elsewhere",
		Long: `Install shard on this host: look at it, say what would be done, ask, and then put the programs into /usr/local, make the
data directory, and have systemd start the daemon. A second run checks and repairs, installs a newer version, or changes
the choices; --uninstall takes everything away but the data.

With --http-api true, shard serve runs too, as a user without rights, and its first API key is in /etc/shard/api-key, for root
alone; on an address that others can reach it speaks TLS under an authority of its own, <root>/auth/tls/ca.crt, or with the
certificate in --tls-cert. --preview-domain leads browsers to ports of sandboxes (shard serve --help); what that needs of DNS
and certificates is said at the end. --preview-domain "" and --tls-cert "" take back what an earlier setup was told.

With --remote URL, see whether a shard serve elsewhere answers and takes the key in SHARD_API_KEY; --save has every
command talk to it from now on.

Without a terminal nothing is asked: --local or --remote is needed then, and --yes for what changes something.`,
		Example: `  sudo shard setup
  sudo shard setup --local --http-api true --yes
  sudo shard setup --local --http-api true --preview-domain localhost --yes
  SHARD_API_KEY=… shard setup --remote https://shard.example.com:7850 --save --yes`,
		Args: arguments(0, 0, ""),
		// Whom the other commands talk to is what it is about to decide.
		PersistentPreRunE: a.localGlobals,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.setup(cmd, &o)
		},
	}
	f := cmd.Flags()
	f.BoolVar(&o.local, "local", false, "set up this host")
	f.StringVar(&o.remote, "remote", "", "connect to the shard serve at `URL`")
	f.StringVar(&o.provider, "provider", "", "default `PROVIDER` of new sandboxes (gvisor)")
	f.Var(choice{&o.atBoot}, "start-at-boot", "start the daemon at boot (true)")
	f.Var(size{&o.storage}, "storage-size", "size of the storage image of providers that run virtual machines")
	f.Var(choice{&o.httpAPI}, "http-api", "run shard serve too (false)")
	f.StringVar(&o.listen, "listen", "", "`HOST:PORT` of shard serve (127.0.0.1:7850)")
	f.Var(text{&o.preview}, "preview-domain", "serve ports of sandboxes to browsers below `DOMAIN`; behind a proxy, the origin that browsers see (none)")
	f.Var(text{&o.cert}, "tls-cert", "PEM `FILE` of shard serve's certificate, which its user can read")
	f.Var(text{&o.key}, "tls-key", "PEM `FILE` of the certificate's key")
	f.BoolVar(&o.replaceKey, "replace-api-key", false, "make a new API key and revoke the one that setup made before")
	f.BoolVar(&o.save, "save", false, "save the connection to --remote for this user")
	f.BoolVar(&o.uninstall, "uninstall", false, "take shard off this host; the data stay")
	f.BoolVarP(&o.yes, "yes", "y", false, "do not ask")
	f.StringVar(&o.tree, "tree", "", "install below this directory")
	_ = f.MarkHidden("tree")
	return cmd
}

// setup finds out what is wanted, and asks for what the options do not say.
func (a *App) setup(cmd *cobra.Command, o *setupOptions) error {
	if o.remote == "" && cmd.Root().Flags().Changed("remote") {
		o.remote = a.remote // before the command it means the same
	}
	asks := &asker{app: a, in: bufio.NewReader(a.In), on: !o.yes && isTerminal(a.In) && isTerminal(a.Err)}
	if err := o.check(asks.on); err != nil {
		return err
	}
	ctx := cmd.Context()
	if !o.local && o.remote == "" && !o.uninstall {
		n, err := asks.menu(ctx, "What shall be set up?", "sandboxes on this host", "a connection to a shard serve elsewhere")
		if err != nil {
			return err
		}
		if n == 1 {
			if o.remote, err = asks.line(ctx, "Its URL", ""); err != nil {
				return err
			}
		}
	}
	if o.remote != "" {
		return a.setupRemote(ctx, o, asks)
	}
	return a.setupLocal(ctx, o, asks)
}

// check refuses options that do not go together, and without a terminal those from which not all is known.
func (o *setupOptions) check(terminal bool) error {
	switch {
	case o.local && o.remote != "":
		return usagef("--local and --remote do not go together")
	case o.remote == "" && o.save:
		return usagef("--save is for --remote")
	case o.remote != "" && (o.uninstall || o.provider != "" || o.httpAPI != nil || o.atBoot != nil || o.replaceKey || o.storage != nil || o.serves()):
		return usagef("--remote goes with --save and --yes alone: the other options are about this host")
	case o.storage != nil:
		return errNoStorage
	case !terminal:
		var missing []string
		if !o.local && o.remote == "" && !o.uninstall {
			missing = append(missing, "--local or --remote URL")
		}
		if !o.yes && (o.remote == "" || o.save) { // a look at a server elsewhere changes nothing
			missing = append(missing, "--yes")
		}
		if len(missing) > 0 {
			return usagef("there is no terminal to ask on: give %s", strings.Join(missing, " and "))
		}
	}
	return nil
}

func (a *App) setupLocal(ctx context.Context, o *setupOptions, asks *asker) error {
	if runtime.GOOS != "linux" {
		return errors.New("sandboxes run on Linux: shard setup --remote URL connects this computer to a host that has them")
	}
	self, err := os.Executable()
	if err != nil {
		return err
	}
	if self, err = filepath.EvalSymlinks(self); err != nil {
		return err
	}
	in := &setup.Installer{Tree: o.tree, Self: self, Run: setup.Command,
		Say: func(format string, args ...any) { fmt.Fprintln(a.Out, printable(fmt.Sprintf(format, args...))) }}
	old, err := in.Installed()
	if errors.Is(err, setup.ErrForeign) {
		return fmt.Errorf("shard was installed on this host by hand: %w: remove that unit, and setup will do the rest", err)
	}
	if err != nil {
		return err
	}
	if old != nil && asks.on && !o.uninstall {
		n, err := asks.menu(ctx, "shard is installed here.", "check it, repair it, and install this version ("+a.Version+")", "change how it runs", "uninstall it")
		if err != nil {
			return err
		}
		o.uninstall = n == 2
		if n == 0 {
			asks = &asker{app: a, in: asks.in, confirms: true}
		}
	}
	if o.uninstall {
		return a.uninstall(ctx, in, old, o, asks)
	}
	p, err := a.plan(ctx, o, old, asks)
	if err != nil {
		return err
	}
	return a.install(ctx, in, p, o, asks)
}

// plan is what the options say, over what an earlier setup was told, over the defaults; a terminal is asked between.
func (a *App) plan(ctx context.Context, o *setupOptions, old *setup.Plan, asks *asker) (*setup.Plan, error) {
	p := setup.Plan{Root: a.root, StartAtBoot: true, Listen: "127.0.0.1:7850"}
	if old != nil {
		if old.Root != a.root && a.root != DefaultRoot {
			return nil, fmt.Errorf("shard is installed here with root %s: uninstall it to use another", old.Root)
		}
		p = *old
	}
	if o.provider != "" {
		p.Provider = o.provider
	}
	p.StartAtBoot, p.HTTPAPI = given(o.atBoot, p.StartAtBoot), given(o.httpAPI, p.HTTPAPI)
	o.over(&p)
	var err error
	if asks.on && o.atBoot == nil {
		if p.StartAtBoot, err = asks.yes(ctx, "Start the daemon at boot?", p.StartAtBoot); err != nil {
			return nil, err
		}
	}
	if asks.on && o.httpAPI == nil {
		if p.HTTPAPI, err = asks.yes(ctx, "Serve the API over HTTP too, for programs that have an API key?", p.HTTPAPI); err != nil {
			return nil, err
		}
	}
	if asks.on && p.HTTPAPI && o.listen == "" {
		if p.Listen, err = asks.line(ctx, "Address to listen on", p.Listen); err != nil {
			return nil, err
		}
	}
	if asks.on && p.HTTPAPI && o.preview == nil {
		if p.Preview, err = asks.line(ctx, "Domain of previews, at which browsers reach ports of sandboxes: none, localhost, or one of your own", orNone(p.Preview)); err != nil {
			return nil, err
		}
	}
	if err := o.settleServe(&p); err != nil {
		return nil, err
	}
	if !unitWord(p.Root) {
		return nil, usagef("--root %s: a service needs a path without spaces, quotes, %%, $ and ;", shard.Quote(p.Root))
	}
	if p.Provider != "" {
		if err := shard.CheckProvider(p.Provider); err != nil {
			return nil, usagef("%s", err)
		}
	}
	return &p, nil
}

// install checks the host, shows the plan, asks, and does it: as root itself, else through sudo.
func (a *App) install(ctx context.Context, in *setup.Installer, p *setup.Plan, o *setupOptions, asks *asker) error {
	var failed []string
	for _, c := range a.inspectHost(ctx) {
		_, apt := exec.LookPath("apt-get")
		if c.Name == "ext4" && c.Status == hostcheck.Fail && strings.Contains(c.Remedy, "e2fsprogs") && apt == nil {
			p.Packages = append(p.Packages, "e2fsprogs")
			continue
		}
		if c.Status == hostcheck.OK {
			continue
		}
		fmt.Fprintln(a.Out, printable(fmt.Sprintf("%s: %s: %s", c.Status, c.Name, strings.Join([]string{c.Found, c.Remedy}, ": "))))
		// A provider that is not the one to be used is nobody's concern.
		if provider, ok := strings.CutPrefix(c.Name, "provider "); ok && p.Provider != "" {
			if provider == p.Provider {
				failed = append(failed, c.Name)
			}
		} else if c.Status == hostcheck.Fail {
			failed = append(failed, c.Name)
		}
	}
	if len(failed) > 0 {
		return fmt.Errorf("nothing was changed: this host is not ready (%s)", strings.Join(failed, ", "))
	}
	fmt.Fprintln(a.Out, "To do, where it is not done already:")
	for _, step := range in.Steps(p) {
		fmt.Fprintln(a.Out, " ", step)
	}
	if ok, err := asks.confirm(ctx, "Go ahead?"); err != nil || !ok {
		return orDeclined(err)
	}
	if os.Geteuid() != 0 {
		args := []string{"--local", "--start-at-boot", strconv.FormatBool(p.StartAtBoot), "--http-api", strconv.FormatBool(p.HTTPAPI)}
		if p.HTTPAPI {
			args = append(args, "--listen", p.Listen, "--preview-domain", p.Preview, "--tls-cert", p.CertFile, "--tls-key", p.KeyFile)
		}
		if p.Provider != "" {
			args = append(args, "--provider", p.Provider)
		}
		if p.ReplaceKey {
			args = append(args, "--replace-api-key")
		}
		return a.sudo(ctx, in.Self, args)
	}
	if err := in.Install(ctx, p); err != nil {
		return err
	}
	if in.Systemd() && in.Tree == "" {
		if err := a.awaitServices(ctx, p); err != nil {
			return err
		}
	}
	if in.Systemd() {
		fmt.Fprintln(a.Out, "done: shard create --name web alpine makes a first sandbox, shard doctor checks everything")
	}
	return nil
}

// awaitServices waits until what was started answers: a service that ends at once has been started all the same.
func (a *App) awaitServices(ctx context.Context, p *setup.Plan) error {
	a.root = p.Root
	ctx, cancel := context.WithTimeout(ctx, doctorPatience)
	defer cancel()
	c := a.client()
	defer c.Close()
	if err := persist(ctx, func() error { _, err := c.Version(ctx); return err }); err != nil {
		return fmt.Errorf("the daemon does not answer (journalctl -u shard says more): %s", a.explain(nil, err))
	}
	if !p.HTTPAPI {
		return nil
	}
	err := persist(ctx, func() error {
		conn, err := new(net.Dialer).DialContext(ctx, "tcp", p.Listen)
		if err == nil {
			err = conn.Close()
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("shard serve does not answer at %s (journalctl -u shard-serve says more): %w", p.Listen, err)
	}
	return nil
}

// persist tries until it works or the context ends.
func persist(ctx context.Context, try func() error) error {
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// orDeclined is the error of a question, or that the answer was no.
func orDeclined(err error) error {
	if err == nil {
		err = errors.New("nothing was changed")
	}
	return err
}

// sudo runs setup again as root, with everything decided.
func (a *App) sudo(ctx context.Context, self string, args []string) error {
	sudo, err := exec.LookPath("sudo")
	if err != nil {
		return errors.New("this needs root, and there is no sudo: run it as root")
	}
	cmd := exec.CommandContext(ctx, sudo, append([]string{self, "--root", a.root, "setup", "--yes"}, args...)...)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = a.In, a.Out, a.Err
	err = cmd.Run()
	if e, ok := errors.AsType[*exec.ExitError](err); ok {
		return &exitError{code: max(e.ExitCode(), 1)} // it has said why
	}
	return err
}

func (a *App) uninstall(ctx context.Context, in *setup.Installer, old *setup.Plan, o *setupOptions, asks *asker) error {
	root := a.root
	if old != nil {
		root = old.Root
	}
	if ok, err := asks.confirm(ctx, "Take shard off this host? The data in "+root+" stay."); err != nil || !ok {
		return orDeclined(err)
	}
	if os.Geteuid() != 0 {
		return a.sudo(ctx, in.Self, []string{"--uninstall"})
	}
	return in.Uninstall(ctx, root)
}

// asker asks a person. Off, it asks nothing and takes what it is given.
type asker struct {
	app *App
	in  *bufio.Reader
	on  bool
	// confirms has the last question asked although the others are not.
	confirms bool
}

// line asks for a line; an empty one is the value that is shown.
func (q *asker) line(ctx context.Context, question, value string) (string, error) {
	if value != "" {
		question += " [" + value + "]"
	}
	fmt.Fprint(q.app.Err, question+": ")
	type result struct {
		text string
		err  error
	}
	got := make(chan result, 1)
	go func() { // ends with the input or the process: a read of a terminal cannot be called off
		text, err := q.in.ReadString('\n')
		got <- result{text, err}
	}()
	select {
	case r := <-got:
		if r.err != nil {
			return "", errors.New("the input ended before the answer")
		}
		if text := strings.TrimSpace(r.text); text != "" {
			return text, nil
		}
		return value, nil
	case <-ctx.Done():
		fmt.Fprintln(q.app.Err)
		return "", &exitError{code: exitInterrupted}
	}
}

func (q *asker) yes(ctx context.Context, question string, value bool) (bool, error) {
	for {
		text, err := q.line(ctx, question+" (yes or no)", yesNo(value))
		if err != nil {
			return false, err
		}
		switch strings.ToLower(text) {
		case "y", "yes":
			return true, nil
		case "n", "no":
			return false, nil
		}
	}
}

// confirm is the last question before anything changes.
func (q *asker) confirm(ctx context.Context, question string) (bool, error) {
	if !q.on && !q.confirms {
		return true, nil
	}
	return q.yes(ctx, question, false)
}

func (q *asker) menu(ctx context.Context, question string, items ...string) (int, error) {
	fmt.Fprintln(q.app.Err, question)
	for i, item := range items {
		fmt.Fprintf(q.app.Err, "  %d  %s\n", i+1, item)
	}
	for {
		text, err := q.line(ctx, "Number", "1")
		if err != nil {
			return 0, err
		}
		if n, err := strconv.Atoi(text); err == nil && n >= 1 && n <= len(items) {
			return n - 1, nil
		}
	}
}

// Package setup installs shard on this host and takes it away again: programs, data directory, group and user, systemd
// units, the API key. Each step looks first and says what it did, so that a second run repairs what is wrong and leaves
// the rest alone. It asks nobody anything; the command line does, and hands it a Plan.
package setup

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/hostcheck"
	"github.com/useshards/shard/internal/token"
	"github.com/useshards/shard/packaging"
)

// Where things go.
const (
	prefix  = "/usr/local"
	units   = "/etc/systemd/system"
	KeyFile = "/etc/shard/api-key"
)

// account is the group whose members may use the daemon, and the user that shard serve runs as.
const account = "shard"

// keyName is the name of the API key of setup in the ledger.
const keyName = "setup"

// libexec are the programs that are not for people; those after the first are there or not, as they were built.
var libexec = []string{"shard-init", "shard-runsc", "runc"}

// Plan is what an installation is to be.
type Plan struct {
	// Root is the data directory.
	Root string `json:"root"`
	// Provider is the default of new sandboxes, "" the daemon's choice.
	Provider    string `json:"provider,omitempty"`
	StartAtBoot bool   `json:"start_at_boot"`
	// HTTPAPI is whether shard serve runs too, and Listen its HOST:PORT. TLS is under an authority of its own, or with the
	// certificate in CertFile and KeyFile.
	HTTPAPI  bool   `json:"http_api"`
	Listen   string `json:"listen,omitempty"`
	TLS      bool   `json:"tls,omitempty"`
	CertFile string `json:"tls_cert,omitempty"`
	KeyFile  string `json:"tls_key,omitempty"`
	// Preview is the domain of preview addresses, or the origin at which a proxy serves them; "" is none.
	Preview string `json:"preview_domain,omitempty"`
	// ReplaceKey revokes the API key of an earlier setup.
	ReplaceKey bool `json:"-"`
	// Packages are to be installed with apt-get first.
	Packages []string `json:"-"`
}

// Installer works on one host.
type Installer struct {
	// Tree is where the host's files are; "" is /. Tests install into a directory.
	Tree string
	// Self is the running program, beside which the others are.
	Self string
	// Say is told what each step did.
	Say func(format string, args ...any)
	// Run runs a program of the host.
	Run func(ctx context.Context, name string, args ...string) error
}

// Command is Run on a real host.
func Command(ctx context.Context, name string, args ...string) error {
	out, err := exec.CommandContext(ctx, name, args...).CombinedOutput()
	if err == nil {
		return nil
	}
	if text := strings.TrimSpace(string(out)); text != "" {
		return fmt.Errorf("%s %s: %s", name, strings.Join(args, " "), text)
	}
	return fmt.Errorf("%s %s: %w", name, strings.Join(args, " "), err)
}

func (in *Installer) path(p string) string { return filepath.Join("/", in.Tree, p) }

// marker begins a unit that setup wrote; the plan follows, for the next run.
const marker = "# Written by shard setup, which may write it again. "

// ErrForeign says that somebody else installed shard here.
var ErrForeign = errors.New("it was not shard setup that wrote it")

// Installed is the plan of the installation that is there, nil when there is none.
func (in *Installer) Installed() (*Plan, error) {
	path := in.path(filepath.Join(units, "shard.service"))
	data, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	line, _, _ := strings.Cut(string(data), "\n")
	text, ours := strings.CutPrefix(line, marker)
	var p Plan
	if !ours || json.Unmarshal([]byte(text), &p) != nil {
		return nil, fmt.Errorf("%s is there and %w", path, ErrForeign)
	}
	return &p, nil
}

// Systemd says whether services are started by systemd here. Where they are not, Commands are for whatever does it.
func (in *Installer) Systemd() bool { return hostcheck.Systemd(in.Tree) }

// Commands are the command lines of the services.
func (p *Plan) Commands() []string {
	out := []string{p.daemon()}
	if p.HTTPAPI {
		out = append(out, "runuser -u "+account+" -- "+p.serve())
	}
	return out
}

func (p *Plan) program() string {
	out := prefix + "/bin/shard"
	if p.Root != "/var/lib/shard" {
		out += " --root " + p.Root
	}
	return out
}

func (p *Plan) daemon() string {
	out := p.program() + " daemon"
	if p.Provider != "" {
		out += " --provider " + p.Provider
	}
	return out
}

func (p *Plan) serve() string {
	out := p.program() + " serve --listen " + p.Listen
	if p.CertFile != "" {
		out += " --tls-cert " + p.CertFile + " --tls-key " + p.KeyFile
	} else if p.TLS {
		out += " --tls-self-signed"
	}
	if p.Preview != "" {
		out += " --preview-domain " + p.Preview
	}
	return out
}

// Steps says what Install would do, for people.
func (in *Installer) Steps(p *Plan) []string {
	var out []string
	if len(p.Packages) > 0 {
		out = append(out, "install with apt-get: "+strings.Join(p.Packages, ", "))
	}
	out = append(out, "put the programs into "+prefix+"/bin and "+prefix+"/libexec/shard", "make the data directory "+p.Root)
	if p.HTTPAPI {
		out = append(out, "make the group and the user "+account, "make an API key in "+KeyFile+", unless one is there")
	}
	if p.Preview != "" {
		out = append(out, "lead browsers to ports of sandboxes below "+p.Preview)
	}
	if in.Systemd() {
		out = append(out, "write systemd units and start: "+strings.Join(p.units(), ", ")+map[bool]string{true: " (also at boot)", false: " (not at boot)"}[p.StartAtBoot])
	}
	return out
}

func (p *Plan) units() []string {
	if p.HTTPAPI {
		return []string{"shard.service", "shard-serve.service"}
	}
	return []string{"shard.service"}
}

// Install makes the host be what the plan says.
func (in *Installer) Install(ctx context.Context, p *Plan) error {
	if _, err := in.Installed(); err != nil {
		return err
	}
	pair, err := in.readCertificate(p)
	if err != nil {
		return err
	}
	if len(p.Packages) > 0 {
		if err := in.Run(ctx, "apt-get", append([]string{"-q", "install", "-y", "--no-install-recommends"}, p.Packages...)...); err != nil {
			return err
		}
		in.Say("installed %s", strings.Join(p.Packages, ", "))
	}
	changed, err := in.programs()
	if err != nil {
		return err
	}
	if err := in.dataDir(p.Root); err != nil {
		return err
	}
	if p.HTTPAPI {
		if err := in.httpAPI(ctx, p); err != nil {
			return err
		}
	}
	if err := in.services(ctx, p, changed); err != nil {
		return err
	}
	return in.sayPreviews(p, pair)
}

// programs copies the programs that are beside the running one. Those in place already, which a run of the installed
// program finds, stay.
func (in *Installer) programs() (changed bool, err error) {
	from := filepath.Dir(in.Self)
	for i, name := range append([]string{"shard"}, libexec...) {
		to, mode := in.path(filepath.Join(prefix, "libexec/shard", name)), os.FileMode(0o755)
		source := filepath.Join(from, name)
		if i == 0 {
			to, source = in.path(filepath.Join(prefix, "bin", name)), in.Self
		}
		if source == to {
			continue
		}
		one, err := copyFile(source, to, mode)
		if errors.Is(err, fs.ErrNotExist) && i > 0 {
			if _, there := os.Stat(to); there == nil || i > 1 {
				continue // put there before, or not built: the check of the providers has said what that means
			}
		}
		if err != nil {
			return changed, fmt.Errorf("install %s: %w", to, err)
		}
		changed = changed || one
		in.did(one, "installed", to)
	}
	return changed, nil
}

// did reports one step.
func (in *Installer) did(changed bool, what, thing string) {
	if !changed {
		what = "unchanged:"
	}
	in.Say("%s %s", what, thing)
}

func (in *Installer) dataDir(root string) error {
	path := in.path(root)
	_, err := os.Stat(path)
	missing := errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(path, 0o700); err != nil {
		return err
	}
	in.did(missing, "made", root)
	return nil
}

// httpAPI makes what shard serve needs: its user, who may read the signing key and use the socket, and a first API key.
func (in *Installer) httpAPI(ctx context.Context, p *Plan) error {
	if in.entry("/etc/group") == nil {
		if err := in.Run(ctx, "groupadd", "--system", account); err != nil {
			return err
		}
		in.Say("made group %s: its members may use the daemon", account)
	}
	if in.entry("/etc/passwd") == nil {
		if err := in.Run(ctx, "useradd", "--system", "--gid", account, "--no-create-home", "--home-dir", "/nonexistent", "--shell", "/usr/sbin/nologin", account); err != nil {
			return err
		}
		in.Say("made user %s, as whom shard serve runs", account)
	}
	if err := in.apiKey(p); err != nil {
		return err
	}
	if err := in.share(p.Root, p.TLS && p.CertFile == ""); err != nil {
		return err
	}
	return in.shareCertificate(ctx, p)
}

// entry is the account's line in a file such as /etc/group, nil when there is none.
func (in *Installer) entry(file string) []string {
	data, _ := os.ReadFile(in.path(file))
	for line := range strings.Lines(string(data)) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) > 2 && f[0] == account {
			return f
		}
	}
	return nil
}

// apiKey puts a token into KeyFile, unless one is there and shall stay.
func (in *Installer) apiKey(p *Plan) error {
	book, err := token.Open(token.DefaultKeyFile(in.path(p.Root)), true)
	if err != nil {
		return err
	}
	path := in.path(KeyFile)
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	old = bytes.TrimSpace(old)
	if len(old) > 0 && !p.ReplaceKey {
		if err := os.Chmod(path, 0o600); err != nil {
			return err
		}
		if _, err := book.Check(string(old)); err != nil {
			in.Say("kept %s, but shard serve refuses the key in it: --replace-api-key makes a new one", KeyFile)
			return nil
		}
		in.did(false, "", KeyFile)
		return nil
	}
	text, made, err := book.Mint(keyName, 0, []string{shard.ScopeAll})
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // only the file in it is secret
		return err
	}
	if _, err := writeFile(path, strings.NewReader(text+"\n"), 0o600); err != nil {
		return err
	}
	in.Say("made an API key: it is in %s, for root alone", KeyFile)
	if p.ReplaceKey {
		ids, _, err := token.LedgerOf(token.DefaultKeyFile(in.path(p.Root))).Revoke(func(r *token.Record) bool { return r.Name == keyName && r.ID != made.ID })
		if err != nil {
			return err
		}
		if len(ids) > 0 {
			in.Say("revoked what setup made before: %s", strings.Join(ids, ", "))
		}
	}
	return nil
}

// share lets the user of shard serve read the signing key and the ledger, and with TLS keep its authority.
func (in *Installer) share(root string, tls bool) error {
	group, user := in.entry("/etc/group"), in.entry("/etc/passwd")
	if group == nil || user == nil {
		return fmt.Errorf("group or user %s is not there", account)
	}
	gid, err1 := strconv.Atoi(group[2])
	uid, err2 := strconv.Atoi(user[2])
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	key := token.DefaultKeyFile(in.path(root))
	auth := filepath.Dir(key)
	for path, mode := range map[string]os.FileMode{auth: 0o750 | os.ModeSetgid, key: 0o640, filepath.Join(auth, "serve.tokens"): 0o640} {
		if err := errors.Join(os.Lchown(path, 0, gid), os.Chmod(path, mode)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	if !tls {
		return nil
	}
	dir := filepath.Join(auth, "tls")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return err
	}
	return errors.Join(os.Lchown(dir, uid, gid), os.Chmod(dir, 0o700))
}

// services writes the units, and starts what they say.
func (in *Installer) services(ctx context.Context, p *Plan, programs bool) error {
	if !in.Systemd() {
		in.Say("systemd does not run this host: have these started, the first as root")
		for _, line := range p.Commands() {
			in.Say("  %s", line)
		}
		return nil
	}
	plan, err := json.Marshal(p)
	if err != nil {
		return err
	}
	changed := make(map[string]bool)
	for _, name := range p.units() {
		text := strings.Replace(packaging.Daemon, "@PREFIX@/bin/shard daemon", p.daemon(), 1)
		if name == "shard-serve.service" {
			text = strings.Replace(packaging.Serve, "@PREFIX@/bin/shard serve", p.serve(), 1)
		}
		text = marker + string(plan) + "\n" + strings.NewReplacer("@PREFIX@", prefix, "@ROOT@", p.Root).Replace(text)
		path := filepath.Join(units, name)
		if err := os.MkdirAll(in.path(units), 0o755); err != nil { // as everywhere
			return err
		}
		one, err := writeFile(in.path(path), strings.NewReader(text), 0o644)
		if err != nil {
			return err
		}
		changed[name] = one || programs
		in.did(one, "wrote", path)
	}
	if err := in.Run(ctx, "systemctl", "daemon-reload"); err != nil {
		return err
	}
	if !p.HTTPAPI {
		if err := in.drop(ctx, "shard-serve.service"); err != nil {
			return err
		}
	}
	for _, name := range p.units() {
		boot := "disable"
		if p.StartAtBoot {
			boot = "enable"
		}
		if err := in.Run(ctx, "systemctl", boot, name); err != nil {
			return err
		}
		verb := "start"
		if changed[name] {
			verb = "restart" // sandboxes outlive it
		}
		if err := in.Run(ctx, "systemctl", verb, name); err != nil {
			return fmt.Errorf("%w (journalctl -u %s says more)", err, name)
		}
		in.Say("%s: %sed, and %sd at boot", name, verb, boot)
	}
	return nil
}

// drop ends a service and removes its unit, if it is there.
func (in *Installer) drop(ctx context.Context, name string) error {
	path := in.path(filepath.Join(units, name))
	if _, err := os.Lstat(path); err != nil {
		return nil // not there
	}
	if in.Systemd() {
		if err := in.Run(ctx, "systemctl", "disable", "--now", name); err != nil {
			return err
		}
	}
	if err := os.Remove(path); err != nil {
		return err
	}
	in.Say("removed %s", name)
	return nil
}

// Uninstall ends the services and removes programs and units. Data and the API key stay. While sandboxes remain nothing
// is done: without programs nobody could ever end them.
func (in *Installer) Uninstall(ctx context.Context, root string) error {
	if _, err := in.Installed(); err != nil {
		return err
	}
	entries, err := os.ReadDir(in.path(filepath.Join(root, "sandboxes")))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if len(entries) > 0 {
		return fmt.Errorf("sandboxes remain (%d): remove them first, with shard remove --force", len(entries))
	}
	for _, name := range []string{"shard-serve.service", "shard.service"} {
		if err := in.drop(ctx, name); err != nil {
			return err
		}
	}
	if in.Systemd() {
		if err := in.Run(ctx, "systemctl", "daemon-reload"); err != nil {
			return err
		}
	}
	paths := []string{filepath.Join(prefix, "bin/shard")}
	for _, name := range libexec {
		paths = append(paths, filepath.Join(prefix, "libexec/shard", name))
	}
	for _, path := range paths {
		err := os.Remove(in.path(path))
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
		if err == nil {
			in.Say("removed %s", path)
		}
	}
	// What daemons share stays while another root's has a claim in it.
	claims := in.path("/run/shard/net")
	if left, err := os.ReadDir(claims); err == nil && len(left) == 1 && left[0].Name() == ".lock" {
		_ = os.Remove(filepath.Join(claims, ".lock"))
	}
	for _, dir := range []string{in.path(filepath.Join(prefix, "libexec/shard")), claims, filepath.Dir(claims)} {
		_ = os.Remove(dir) // stays if it holds what is not ours
	}
	in.Say("kept the data in %s", root)
	return nil
}

// copyFile is writeFile of a file.
func copyFile(from, to string, mode os.FileMode) (changed bool, err error) {
	f, err := os.Open(from)
	if err != nil {
		return false, err
	}
	defer f.Close()
	return writeFile(to, f, mode)
}

// writeFile makes path hold what r does, whole or not at all, and says whether it had to.
func writeFile(path string, r io.ReadSeeker, mode os.FileMode) (changed bool, err error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil { // as everywhere below /usr/local and /etc
		return false, err
	}
	if same, err := holds(path, r); err != nil || same {
		if err == nil {
			err = os.Chmod(path, mode)
		}
		return false, err
	}
	if _, err := r.Seek(0, io.SeekStart); err != nil {
		return false, err
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".shard-setup-")
	if err != nil {
		return false, err
	}
	defer os.Remove(f.Name()) // gone after the rename
	_, err = io.Copy(f, r)
	if err := errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return false, err
	}
	return true, os.Rename(f.Name(), path)
}

// holds says whether path is a file with what r has.
func holds(path string, r io.Reader) (bool, error) {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !info.Mode().IsRegular() {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	f, err := os.Open(path)
	if err != nil {
		return false, err
	}
	defer f.Close()
	a, b := make([]byte, 64<<10), make([]byte, 64<<10)
	for {
		n, err1 := io.ReadFull(r, a)
		m, err2 := io.ReadFull(f, b)
		if !bytes.Equal(a[:n], b[:m]) {
			return false, nil
		}
		if err1 != nil || err2 != nil {
			return (err1 == io.EOF || errors.Is(err1, io.ErrUnexpectedEOF)) && (err2 == io.EOF || errors.Is(err2, io.ErrUnexpectedEOF)), nil
		}
	}
}

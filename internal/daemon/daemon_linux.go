// Package daemon puts the parts together: it locks the root, opens the workshops, lets the engine find out what became
// of every sandbox, and then serves the API on the unix socket until it is told to end. Sandboxes outlive it.
package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/api"
	"github.com/useshards/shard/internal/cgroup"
	"github.com/useshards/shard/internal/durable"
	"github.com/useshards/shard/internal/egress"
	"github.com/useshards/shard/internal/engine"
	"github.com/useshards/shard/internal/image"
	"github.com/useshards/shard/internal/netns"
	"github.com/useshards/shard/internal/provider"
	"github.com/useshards/shard/internal/provider/oci"
	"github.com/useshards/shard/internal/rootfs"
	"github.com/useshards/shard/internal/secret"
	"github.com/useshards/shard/internal/store"
)

// MaxRoot is the longest path of a root, in bytes: sockets below it must fit an address.
const MaxRoot = 96

// shutdownTime bounds the wait for requests under way when the daemon ends.
const shutdownTime = 5 * time.Second

// Run runs a daemon until ctx ends. The error is a *shard.Error when the user can do something about it.
func Run(ctx context.Context, o Options) (err error) {
	started := time.Now().UTC()
	ready := readiness()
	if err := o.check(); err != nil {
		return err
	}
	if err := os.MkdirAll(o.Root, 0o700); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not make the root directory %s", o.Root)
	}
	lock, err := store.Lock(filepath.Join(o.Root, "daemon.lock"))
	if errors.Is(err, store.ErrHeld) {
		return shard.Errorf(shard.CodeInUse, "another daemon runs on root %s: stop it, or choose another --root", o.Root)
	}
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "could not lock root %s", o.Root)
	}
	defer lock.Close()
	durable.Sweep(o.Root)
	log := o.Log
	pidFile := filepath.Join(o.Root, "daemon.pid")
	if err := durable.WriteFile(pidFile, []byte(strconv.Itoa(os.Getpid())+"\n"), 0o600); err != nil {
		log.Warn("there is no pid file", "err", err) // on a full disk only a daemon that runs can remove sandboxes
	}
	defer os.Remove(pidFile)
	log.Info("daemon starts", "version", o.Version, "root", o.Root)

	parts, err := open(ctx, o)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, parts.close()) }()

	listener, err := listen(o.Root)
	if err != nil {
		return err
	}
	hall := api.New(api.Config{Engine: parts.engine, Images: parts.images, Version: o.Version, Log: log,
		Status: func() shard.DaemonStatus { return status(o, parts.engine, started) }})
	server := &http.Server{
		Handler:           hall,
		ReadHeaderTimeout: 10 * time.Second,
		IdleTimeout:       2 * time.Minute,
		MaxHeaderBytes:    64 << 10,
		ErrorLog:          slog.NewLogLogger(log.Handler(), slog.LevelDebug),
	}
	served := make(chan error, 1)
	go func() { served <- server.Serve(hall.Count(listener)) }()
	if err := ready(); err != nil {
		log.Warn(err.Error())
	}
	log.Info("daemon listens", "socket", filepath.Join(o.Root, "shard.sock"), "after", time.Since(started).Round(time.Millisecond))
	select {
	case err = <-served:
	case <-ctx.Done():
	}
	_ = os.Remove(filepath.Join(o.Root, "shard.sock"))
	if hostGoesDown(context.WithoutCancel(ctx)) {
		log.Info("the host goes down: sandboxes are ended")
		parts.engine.PowerDown(context.WithoutCancel(ctx))
	} else {
		log.Info("daemon ends; sandboxes run on")
	}
	parts.engine.Close() // ends streams and waits, so that requests can end
	end, cancel := context.WithTimeout(context.WithoutCancel(ctx), shutdownTime)
	defer cancel()
	if server.Shutdown(end) != nil {
		_ = server.Close()
	}
	if errors.Is(err, http.ErrServerClosed) {
		err = nil
	}
	return err
}

// parts are what a daemon opened, to be closed in the reverse order.
type parts struct {
	engine  *engine.Engine
	images  *image.Store
	closers []func() error
}

func (p *parts) close() error {
	var errs []error
	for i := len(p.closers) - 1; i >= 0; i-- {
		errs = append(errs, p.closers[i]())
	}
	return errors.Join(errs...)
}

func open(ctx context.Context, o Options) (_ *parts, err error) {
	p := &parts{}
	defer func() {
		if err != nil {
			err = errors.Join(err, p.close())
		}
	}()
	tag := engine.Tag(o.Root)
	cgroups, err := cgroup.Open("shard-" + tag)
	if err != nil {
		return nil, err
	}
	p.closers = append(p.closers, cgroups.Close)
	p.images, err = image.Open(filepath.Join(o.Root, "images"), image.Options{Insecure: o.Insecure, Timeout: o.PullTimeout, Log: o.Log})
	if err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() error { p.images.Close(); return nil })
	roots, err := rootfs.Open(o.Root, rootfs.Options{Log: o.Log})
	if err != nil {
		return nil, err
	}
	p.closers = append(p.closers, roots.Close)
	network, err := netns.Open(ctx, netns.Config{Dir: filepath.Join(o.Root, "net"), Tag: tag, Log: o.Log})
	if err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() error { return closeHost(network, p.engine, tag) })
	providers, err := providers(cgroups, tag, filepath.Join(o.Root, "programs"), o.Log)
	if err != nil {
		return nil, err
	}
	authority, err := egress.OpenCA(filepath.Join(o.Root, "proxy"))
	if err != nil {
		return nil, err
	}
	secrets, err := openSecrets(o)
	if err != nil {
		return nil, err
	}
	enforcer := egress.Open(egress.Config{Wall: network, CA: authority, Nameservers: o.DNS, Log: o.Log,
		Secrets: secrets.Held, Misused: secrets.Misused,
		Dir: func(id string) string { return filepath.Join(o.Root, "sandboxes", id) }})
	p.closers = append(p.closers, func() error { enforcer.Close(); return nil })
	p.engine, err = engine.Open(ctx, engine.Config{Enforcer: policed{enforcer}, Secrets: secrets, Root: o.Root, Default: o.Provider, Providers: providers, Images: p.images,
		Roots: roots, Net: network, Cgroups: cgroups, Nameservers: o.DNS, Log: o.Log})
	if err != nil {
		return nil, err
	}
	p.closers = append(p.closers, func() error { p.engine.Close(); return nil })
	return p, nil
}

// credential is the name of the host key among the credentials that systemd gives the daemon.
const credential = "secret-key"

// openSecrets opens the store of secrets, with the host key if there is one. From then on this process leaves no core dump
// and can be looked into by root alone.
func openSecrets(o Options) (*secret.Store, error) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("forbid core dumps: %w", err)
	}
	file := o.SecretKeyFile
	if dir := os.Getenv("CREDENTIALS_DIRECTORY"); file == "" && dir != "" {
		if _, err := os.Lstat(filepath.Join(dir, credential)); !errors.Is(err, os.ErrNotExist) {
			file = filepath.Join(dir, credential)
		} else {
			o.Log.Warn("systemd gave credentials, of which none is " + credential + ": secrets are stored without encryption")
		}
	}
	var key *secret.Key
	if file != "" {
		var err error
		if key, err = secret.ReadKey(file); err != nil {
			return nil, shard.Invalidf("%v", err)
		}
	}
	return secret.Open(filepath.Join(o.Root, "secrets"), key, o.Log)
}

// policed is an egress.Enforcer as the engine names its parts.
type policed struct{ *egress.Enforcer }

func (p policed) Decisions(id string) ([]json.RawMessage, int, engine.LiveDecisions, error) {
	newest, cut, live, err := p.Enforcer.Decisions(id)
	if err != nil {
		return nil, 0, nil, err
	}
	return newest, cut, live, nil
}

// closeHost lets go of what the daemon has on the host. Where no sandbox is left to use it, it is taken away.
func closeHost(network *netns.Net, e *engine.Engine, tag string) error {
	if e == nil || !e.Empty() {
		return network.Close()
	}
	ctx, cancel := context.WithTimeout(context.Background(), shutdownTime)
	defer cancel()
	return errors.Join(network.Remove(ctx), os.RemoveAll(filepath.Join("/run/shard", tag)))
}

// providers makes every provider that this system can have, the default of new roots first. shared is theirs, or "".
func providers(cgroups *cgroup.Manager, tag, shared string, log *slog.Logger) ([]provider.Provider, error) {
	programs := oci.FindPrograms()
	var out []provider.Provider
	for _, f := range []struct{ name, runtime string }{{shard.ProviderGVisor, programs.Runsc}, {shard.ProviderRunc, programs.Runc}} {
		p, err := oci.New(f.name, oci.Options{Runtime: f.runtime, Init: programs.Init,
			RunDir: filepath.Join("/run/shard", tag, f.name), Shared: shared, Cgroups: cgroups, Log: log})
		if err != nil {
			return nil, err
		}
		out = append(out, p)
	}
	return out, nil
}

// Probe says what each provider is worth on this host. It needs no daemon.
func Probe(ctx context.Context) []shard.ProviderInfo {
	log := slog.New(slog.DiscardHandler)
	tag := "p" + strconv.Itoa(os.Getpid())
	defer os.Remove(filepath.Join("/run/shard", tag))
	cgroups, err := cgroup.Open("shard-" + tag)
	if err == nil {
		defer cgroups.Close()
	}
	all, err := providers(cgroups, tag, "", log)
	if err != nil {
		return nil
	}
	var out []shard.ProviderInfo
	for _, p := range all {
		out = append(out, p.Probe(ctx).Info(p, p.Name() == shard.ProviderGVisor))
		_ = os.RemoveAll(filepath.Join("/run/shard", tag, p.Name()))
	}
	return out
}

// listen binds the socket. A leftover of a daemon that was killed is replaced: the lock says that none runs.
func listen(root string) (net.Listener, error) {
	path := filepath.Join(root, "shard.sock")
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, shard.Wrap(shard.CodeInternal, err, "could not remove the old socket in root %s", root)
	}
	mask := unix.Umask(0o177)
	l, err := net.Listen("unix", path)
	unix.Umask(mask)
	if err != nil {
		return nil, shard.Wrap(shard.CodeInternal, err, "could not listen on the socket in root %s", root)
	}
	l.(*net.UnixListener).SetUnlinkOnClose(false)
	group, err := user.LookupGroup("shard")
	if err != nil {
		return l, nil // root only
	}
	gid, err := strconv.Atoi(group.Gid)
	if err == nil {
		err = errors.Join(os.Chown(path, 0, gid), os.Chmod(path, 0o660), os.Chown(root, 0, gid), os.Chmod(root, 0o710))
	}
	if err != nil {
		l.Close()
		return nil, shard.Wrap(shard.CodeInternal, err, "could not give the socket to group shard")
	}
	return l, nil
}

// nameservers are those of this host that a sandbox can reach, else public ones. The host's own are often private.
func nameservers() []string {
	var out, six []string // those of IPv4 first: they are there when the host's IPv6 goes
	data, _ := os.ReadFile("/etc/resolv.conf")
	for line := range strings.Lines(string(data)) {
		fields := strings.Fields(line)
		if len(fields) < 2 || fields[0] != "nameserver" {
			continue
		}
		addr, err := netip.ParseAddr(fields[1])
		switch {
		case err != nil || shard.IsUnreachable(addr) || addr.Is4In6():
		case addr.Is4():
			out = append(out, addr.String())
		default:
			six = append(six, addr.String())
		}
	}
	const most = 3 // a C library asks no more
	out = append(out, six...)
	out = out[:min(len(out), most)]
	if len(out) == 0 {
		return []string{"1.1.1.1", "8.8.8.8"}
	}
	return out
}

func status(o Options, e *engine.Engine, started time.Time) shard.DaemonStatus {
	caps, _ := e.Capabilities("")
	return shard.DaemonStatus{
		Version: o.Version, PID: os.Getpid(), StartedAt: started, Socket: filepath.Join(o.Root, "shard.sock"), Provider: o.Provider,
		Capabilities: shard.DaemonCapabilities{Pause: caps.Pause, Resume: caps.Resume, Fork: caps.Fork, Port: caps.Port, Swap: caps.Swap},
		Proxy:        shard.ProxyPorts{PlainPort: egress.PlainPort, TLSPort: egress.TLSPort},
		Tasks:        []shard.DaemonTask{},
	}
}

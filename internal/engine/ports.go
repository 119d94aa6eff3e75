package engine

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	listenRetry = time.Second      // between attempts to listen on a port that was taken
	dialTime    = 30 * time.Second // for the sandbox to take a connection
	// maxConnections of one sandbox; the session lets a few more be on their way out.
	maxConnections = guest.MaxDials - 240
	// reserved descriptors are not for connections: a flood of them must not keep the daemon from its work.
	reserved = 2048
)

// portTable says which sandbox has which host port, running or not, and bounds the connections of all forwards. The lock
// comes after Engine.mu.
type portTable struct {
	mu     sync.Mutex
	owners map[int]portOwner // by host port

	once  sync.Once
	slots chan struct{} // one for each descriptor of a connection

	passing
}

// portOwner is the sandbox that has a host port; ref is what its user calls it.
type portOwner struct{ id, ref string }

// all gives the slots.
func (t *portTable) all() chan struct{} {
	t.once.Do(func() {
		most := 1 << 20
		var limit unix.Rlimit
		if unix.Getrlimit(unix.RLIMIT_NOFILE, &limit) == nil && limit.Cur < uint64(most) {
			most = max(int(limit.Cur)-reserved, int(limit.Cur)/2)
		}
		t.slots = make(chan struct{}, most)
	})
	return t.slots
}

// claim gives host ports to a sandbox, all or none: in_use when another has one.
func (t *portTable) claim(s *shard.Sandbox, ports ...shard.PortForward) error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if err := t.refuse(s.ID, ports); err != nil {
		return err
	}
	if t.owners == nil {
		t.owners = make(map[int]portOwner)
	}
	for _, p := range ports {
		t.owners[p.HostPort] = portOwner{s.ID, s.Ref()}
	}
	return nil
}

// refuse says which of the ports another sandbox than id has. The caller holds mu.
func (t *portTable) refuse(id string, ports []shard.PortForward) error {
	for _, p := range ports {
		if owner, taken := t.owners[p.HostPort]; taken && owner.id != id {
			return shard.Errorf(shard.CodeInUse, "host port %d is forwarded to sandbox %q: remove that forward, or choose another port", p.HostPort, owner.ref)
		}
	}
	return nil
}

// free takes host ports from a sandbox: those given, or all.
func (t *portTable) free(id string, ports ...int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	for port, owner := range t.owners {
		if owner.id == id && (len(ports) == 0 || slices.Contains(ports, port)) {
			delete(t.owners, port)
		}
	}
}

// keep claims what a stored record has. Of two records with one port, which we never write, the first keeps it; the other
// finds the port taken when it starts.
func (t *portTable) keep(s *shard.Sandbox) {
	if s.State == shard.StateFailed {
		return // it will never run
	}
	for _, p := range s.Ports {
		_ = t.claim(s, p)
	}
}

// checkForwards refuses the forwards of a create that cannot be, as far as that can be known now, and sorts them.
func (t *portTable) checkForwards(list []shard.PortForward) ([]shard.PortForward, error) {
	if err := shard.CheckForwards(list); err != nil {
		return nil, err
	}
	t.mu.Lock()
	err := t.refuse("", list) // before the host is asked, which knows of another program only
	t.mu.Unlock()
	if err != nil {
		return nil, err
	}
	for _, p := range list {
		l, err := bind(p)
		if err != nil {
			return nil, err
		}
		_ = l.Close()
	}
	return sortForwards(slices.Clone(list)), nil
}

func sortForwards(list []shard.PortForward) []shard.PortForward {
	slices.SortFunc(list, func(a, b shard.PortForward) int { return cmp.Compare(a.HostPort, b.HostPort) })
	return list
}

// address is what the host listens on.
func address(p shard.PortForward) string {
	if p.Public {
		return "0.0.0.0"
	}
	return "127.0.0.1"
}

// bind listens on a forward's host port.
func bind(p shard.PortForward) (*net.TCPListener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp4", fmt.Sprintf("%s:%d", address(p), p.HostPort))
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return nil, shard.Wrap(shard.CodeInUse, err, "host port %d is taken by another program on this host: stop it, or choose another port", p.HostPort)
	case err != nil:
		return nil, shard.Wrap(shard.CodeInternal, err, "the host does not let the daemon listen on port %d", p.HostPort)
	}
	return l.(*net.TCPListener), nil
}

// forwards are the forwards of one sandbox.
type forwards struct {
	// mu is held over one change at a time, its binds and the write of the record included; it comes before sandbox.put and
	// Engine.mu. A verb that takes the sandbox away passes through it (closePorts) after it has said so in the record.
	mu sync.Mutex
	up bool // the sandbox runs

	state sync.Mutex // guards what follows, for readers that do not wait for a change
	open  map[int]*forward
	slots chan struct{} // one for each connection
	// dials ends what was dialled without a forward; nil while the ports are closed.
	dials    context.Context
	endDials context.CancelFunc
}

// context is that of connections without a forward, nil while there can be none.
func (fs *forwards) context() context.Context {
	fs.state.Lock()
	defer fs.state.Unlock()
	return fs.dials
}

func (fs *forwards) get(port int) *forward {
	fs.state.Lock()
	defer fs.state.Unlock()
	return fs.open[port]
}

func (fs *forwards) set(port int, f *forward) {
	fs.state.Lock()
	defer fs.state.Unlock()
	if f == nil {
		delete(fs.open, port)
		return
	}
	if fs.open == nil {
		fs.open = make(map[int]*forward)
	}
	fs.open[port] = f
}

// openPorts listens on the sandbox's host ports: its machine runs. A port that is taken is tried again.
func (sb *sandbox) openPorts() {
	fs := &sb.forwards
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.up = true
	fs.state.Lock()
	if fs.dials == nil {
		fs.dials, fs.endDials = context.WithCancel(context.Background())
	}
	fs.state.Unlock()
	for _, p := range sb.record().Sandbox.Ports {
		if fs.get(p.HostPort) == nil {
			l, err := bind(p)
			fs.set(p.HostPort, sb.forward(p, l, err))
		}
	}
}

// closePorts ends all listening and every connection: the machine ends, or is suspended.
func (sb *sandbox) closePorts() {
	fs := &sb.forwards
	fs.mu.Lock()
	defer fs.mu.Unlock()
	fs.up = false
	fs.state.Lock()
	open := fs.open
	fs.open = nil
	if fs.endDials != nil {
		fs.endDials()
		fs.dials, fs.endDials = nil, nil
	}
	fs.state.Unlock()
	for _, f := range open {
		f.cancel()
	}
	for _, f := range open {
		f.close()
	}
}

// ListPorts returns the forwards of one sandbox, or of all when ref is empty, by host port.
func (e *Engine) ListPorts(ref string) ([]shard.Port, error) {
	var of []*sandbox
	if ref != "" {
		sb, err := e.find(ref)
		if err != nil {
			return nil, err
		}
		of = append(of, sb)
	} else {
		e.mu.Lock()
		for _, id := range e.ids {
			of = append(of, e.sandboxes[id])
		}
		e.mu.Unlock()
	}
	host := hostAddresses()
	out := []shard.Port{}
	for _, sb := range of {
		rec := sb.record()
		if rec.Sandbox.State == shard.StateFailed {
			continue // it will never run: its host ports are free
		}
		for _, p := range rec.Sandbox.Ports {
			out = append(out, sb.port(p, host))
		}
	}
	slices.SortStableFunc(out, func(a, b shard.Port) int { return cmp.Compare(a.HostPort, b.HostPort) })
	return out, nil
}

// port is a forward as it stands.
func (sb *sandbox) port(p shard.PortForward, host []shard.HostAddress) shard.Port {
	port := shard.Port{Sandbox: sb.id, SandboxName: sb.record().Sandbox.Name, HostPort: p.HostPort, GuestPort: p.GuestPort,
		Public: p.Public, Address: address(p), ReachableOn: []shard.HostAddress{}}
	for _, a := range host {
		if p.Public || a.Address == port.Address {
			port.ReachableOn = append(port.ReachableOn, a)
		}
	}
	if f := sb.forwards.get(p.HostPort); f != nil {
		port.Listening, port.Error = f.status()
	}
	return port
}

// PutPort adds a forward to a sandbox, or changes the one that its host port has.
func (e *Engine) PutPort(ref string, want shard.PortForward) (*shard.Port, error) {
	if err := shard.CheckForwards([]shard.PortForward{want}); err != nil {
		return nil, err
	}
	sb, unlock, err := e.changePorts(ref)
	if err != nil {
		return nil, err
	}
	defer unlock()
	list := sb.record().Sandbox.Ports
	at := slices.IndexFunc(list, func(p shard.PortForward) bool { return p.HostPort == want.HostPort })
	switch {
	case at < 0:
		err = e.addPort(sb, want)
	case list[at] != want:
		err = e.changePort(sb, list[at], want)
	}
	if err != nil {
		return nil, err
	}
	port := sb.port(want, hostAddresses())
	return &port, nil
}

// changePorts takes the lock for a change of the sandbox's forwards.
func (e *Engine) changePorts(ref string) (sb *sandbox, unlock func(), err error) {
	if sb, err = e.find(ref); err != nil {
		return nil, nil, err
	}
	sb.forwards.mu.Lock()
	rec := sb.record()
	switch err := shard.CheckVerb(sb.ref(), rec.Sandbox.State, shard.VerbPort); {
	case err != nil:
		sb.forwards.mu.Unlock()
		return nil, nil, shard.Errorf(shard.CodeOf(err), "sandbox %q is %s: its ports cannot be changed, it can only be inspected and removed", sb.ref(), rec.Sandbox.State)
	case rec.Intent == "remove" || !e.holds(sb):
		sb.forwards.mu.Unlock()
		return nil, nil, notFound("sandbox", ref)
	}
	return sb, sb.forwards.mu.Unlock, nil
}

// setPort stores a forward of the record, or takes it out of it.
func (sb *sandbox) setPort(want shard.PortForward, keep bool) error {
	return sb.update(func(r *record) {
		list := slices.DeleteFunc(slices.Clone(r.Sandbox.Ports), func(p shard.PortForward) bool { return p.HostPort == want.HostPort })
		if keep {
			list = sortForwards(append(list, want))
		}
		r.Sandbox.Ports = list
	})
}

func (e *Engine) addPort(sb *sandbox, want shard.PortForward) error {
	if err := e.ports.claim(&sb.record().Sandbox, want); err != nil {
		return err
	}
	l, err := bind(want)
	if err == nil {
		if err = sb.setPort(want, true); err != nil || !sb.forwards.up {
			_ = l.Close()
		}
	}
	if err != nil {
		e.ports.free(sb.id, want.HostPort)
		return err
	}
	if sb.forwards.up {
		sb.forwards.set(want.HostPort, sb.forward(want, l, nil))
	}
	return nil
}

func (e *Engine) changePort(sb *sandbox, old, want shard.PortForward) error {
	f := sb.forwards.get(want.HostPort)
	if f == nil {
		return sb.setPort(want, true)
	}
	if err := f.change(want); err != nil {
		return err
	}
	if err := sb.setPort(want, true); err != nil {
		return errors.Join(err, f.change(old))
	}
	return nil
}

// RemovePort ends a forward and its connections.
func (e *Engine) RemovePort(ref string, hostPort int) error {
	sb, unlock, err := e.changePorts(ref)
	if err != nil {
		return err
	}
	defer unlock()
	if !slices.ContainsFunc(sb.record().Sandbox.Ports, func(p shard.PortForward) bool { return p.HostPort == hostPort }) {
		return shard.Errorf(shard.CodeNotFound, "sandbox %q has no forward of host port %d", sb.ref(), hostPort)
	}
	if err := sb.setPort(shard.PortForward{HostPort: hostPort}, false); err != nil {
		return err
	}
	if f := sb.forwards.get(hostPort); f != nil {
		f.close()
		sb.forwards.set(hostPort, nil)
	}
	e.ports.free(sb.id, hostPort)
	return nil
}

// hostAddresses are the IPv4 addresses of the host's interfaces that are up. The links to sandboxes are left out: no sandbox
// gets through to the host.
func hostAddresses() []shard.HostAddress {
	var out []shard.HostAddress
	interfaces, _ := net.Interfaces()
	for _, i := range interfaces {
		if i.Flags&net.FlagUp == 0 || sandboxLink(i.Name) {
			continue
		}
		addrs, _ := i.Addrs()
		for _, a := range addrs {
			if ip, ok := a.(*net.IPNet); ok && ip.IP.To4() != nil {
				out = append(out, shard.HostAddress{Interface: i.Name, Address: ip.IP.String()})
			}
		}
	}
	return out
}

// sandboxLink says whether an interface is the host's end of a sandbox's link, of this daemon or another: shTAG-HHHH.
func sandboxLink(name string) bool {
	tag, slot, ok := strings.Cut(name, "-")
	return ok && strings.HasPrefix(tag, "sh") && len(tag) <= 8 && len(slot) == 4 && strings.Trim(slot, "0123456789abcdef") == ""
}

// connections are the slots of one sandbox.
func (fs *forwards) connections() chan struct{} {
	fs.state.Lock()
	defer fs.state.Unlock()
	if fs.slots == nil {
		fs.slots = make(chan struct{}, maxConnections)
	}
	return fs.slots
}

package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/durable"
)

const leaseName = "leases.json" // no sandbox id holds a dot

// Net owns the sandbox networks of one root on this host. Its methods may be called at the same time.
type Net struct {
	cfg    Config
	prefix string
	claim  *claim
	rt     *netlink.Handle
	table  *table
	mtu    int
	way6   atomic.Bool // what IPv6 says
	// failAt makes steps fail, for tests.
	failAt func(step string) error

	// Lock order: turns of boxes by their ids, saving, mu. No I/O under mu.
	mu     sync.Mutex
	leases *leases
	boxes  map[string]*box
	gen    uint64 // counts changes of leases
	closed bool

	saving sync.Mutex // one writer of the lease file
	saved  uint64     // the gen that is on disk; under saving

	ready  chan *link // the pool
	stop   context.CancelFunc
	tasks  sync.WaitGroup
	reaper *reaper
}

// box is the state of one sandbox that has, or is getting, a lease. Whoever holds its turn may read and change it.
type box struct {
	turn chan struct{}
	slot int // -1: no lease yet
	// attached says that namespace, link and the bound element are there.
	attached bool
	// gone is closed when the last teardown has ended; nil when there was none.
	gone <-chan struct{}
}

// link is a finished namespace with its veth pair that nobody uses yet.
type link struct {
	slot int
	ns   *namespace
}

// Open claims an address block, replaces the table in one transaction, and takes up what an earlier daemon left:
// leases stay; attached sandboxes keep their flows, but begin no new ones before Recover; the rest is cleared away.
func Open(ctx context.Context, cfg Config) (_ *Net, err error) {
	if err := cfg.check(); err != nil {
		return nil, err
	}
	if cfg.Dir, err = filepath.Abs(cfg.Dir); err != nil {
		return nil, fmt.Errorf("find the network's directory: %w", err)
	}
	if err := os.MkdirAll(cfg.Dir, 0o700); err != nil {
		return nil, fmt.Errorf("make the network's directory: %w", err)
	}
	if cfg.Dir, err = filepath.EvalSymlinks(cfg.Dir); err != nil {
		return nil, fmt.Errorf("find the network's directory: %w", err)
	}
	n := &Net{cfg: cfg, prefix: "sh" + cfg.Tag + "-", boxes: map[string]*box{}, ready: make(chan *link, max(cfg.Pool-1, 0))}
	if n.rt, err = netlink.NewHandle(unix.NETLINK_ROUTE, unix.NETLINK_NETFILTER); err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	defer func() {
		if err != nil {
			n.rt.Close()
		}
	}()
	if err := n.forwarding(); err != nil {
		return nil, err
	}
	stored, err := n.load()
	if err != nil {
		return nil, err
	}
	busy, err := n.busy()
	if err != nil {
		return nil, err
	}
	if n.claim, err = claimBlock(ctx, cfg.Dir, busy, stored.block); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = n.claim.close()
		}
	}()
	moved := stored.block.IsValid() && stored.block != n.claim.block
	stored.block = n.claim.block
	n.leases = stored
	if hasIPv6() {
		stored.twin = twinBlock(stored.block, cfg.Dir)
	}
	n.table = newTable(cfg.Tag, n.prefix, stored.block, stored.twin)
	n.table.way6 = n.wayOut6()
	n.way6.Store(n.table.way6)
	n.mtu = n.uplinkMTU()
	if err := n.adopt(moved); err != nil {
		n.table.close()
		return nil, err
	}
	if _, err := n.raiseFence(); err != nil {
		n.cfg.Log.Warn("this kernel has no routing rules: should another program remove the sandboxes' nftables table, they are not cut off until it is up again", "err", err)
	}
	n.reaper = startReaper(n)
	background, stop := context.WithCancel(context.Background())
	n.stop = stop
	n.tasks.Go(func() { n.guard(background) })
	if cfg.Pool > 0 {
		n.tasks.Go(func() { n.fill(background) })
	}
	return n, nil
}

// forwarding makes the host pass packets between interfaces, without which no sandbox reaches anything.
func (n *Net) forwarding() error {
	const path = "/proc/sys/net/ipv4/ip_forward"
	v, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("read the host's IPv4 forwarding: %w", err)
	}
	if strings.TrimSpace(string(v)) != "0" {
		return nil
	}
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	if err == nil {
		_, err = f.WriteString("1")
		err = errors.Join(err, f.Close())
	}
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "IPv4 forwarding is off and cannot be turned on: run sysctl -w net.ipv4.ip_forward=1 on the host")
	}
	n.cfg.Log.Warn("turned on IPv4 forwarding (net.ipv4.ip_forward): sandboxes need it")
	return nil
}

// load reads the lease file; none is no leases.
func (n *Net) load() (*leases, error) {
	data, err := os.ReadFile(filepath.Join(n.cfg.Dir, leaseName))
	if errors.Is(err, fs.ErrNotExist) {
		return &leases{byID: map[string]int{}}, nil
	}
	if err != nil {
		return nil, fmt.Errorf("read leases: %w", err)
	}
	return decodeLeases(data)
}

// adopt puts up the table with what still stands and removes what no lease names. moved says that the addresses
// changed, so that nothing which stands is of use.
func (n *Net) adopt(moved bool) error {
	links, err := n.links()
	if err != nil {
		return err
	}
	var entries []entry
	keep := map[string]bool{leaseName: true}
	for id, slot := range n.leases.byID {
		b := &box{turn: make(chan struct{}, 1), slot: slot}
		n.boxes[id] = b
		name := n.iface(slot)
		if links[name] == nil || moved || !isNamespace(n.path(id)) {
			continue
		}
		b.attached = true
		keep[id] = true
		if err := n.equip6(links[name], slot); err != nil {
			return err
		}
		delete(links, name)
		entries = append(entries, n.entry(slot))
	}
	if err := n.table.replace(entries); err != nil {
		return shard.Wrap(shard.CodeInternal, err, "the host's firewall cannot be set up: the kernel needs nftables (nf_tables, nft_ct, nft_masq) and the daemon CAP_NET_ADMIN")
	}
	for _, l := range links {
		if err := n.rt.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("delete leftover %s: %w", l.Attrs().Name, err)
		}
	}
	files, err := os.ReadDir(n.cfg.Dir)
	if err != nil {
		return fmt.Errorf("read the network's directory: %w", err)
	}
	for _, f := range files {
		if !keep[f.Name()] {
			if err := unmountNamespace(n.path(f.Name())); err != nil {
				return err
			}
		}
	}
	return nil
}

func (n *Net) path(id string) string { return filepath.Join(n.cfg.Dir, id) }

func (n *Net) entry(slot int) entry {
	_, addr, _ := n.leases.link(slot)
	_, addr6, _ := n.leases.link6(slot)
	return entry{iface: n.iface(slot), addr: addr, addr6: addr6}
}

func (n *Net) attachment(id string, slot int) Attachment {
	gateway, addr, _ := n.leases.link(slot)
	gateway6, addr6, _ := n.leases.link6(slot)
	return Attachment{Netns: n.path(id), Addr: addr, Gateway: gateway, Addr6: addr6, Gateway6: gateway6, Interface: n.iface(slot)}
}

func (n *Net) fault(step string) error {
	if n.failAt == nil {
		return nil
	}
	return n.failAt(step)
}

// take waits for the turn of id's box and returns it with the way to give it back. create says to begin one.
func (n *Net) take(ctx context.Context, id string, create bool) (*box, func(), error) {
	for {
		n.mu.Lock()
		b := n.boxes[id]
		switch {
		case n.closed:
			n.mu.Unlock()
			return nil, nil, errors.New("the networks are closed")
		case b == nil && !create:
			n.mu.Unlock()
			return nil, func() {}, nil
		case b == nil:
			b = &box{turn: make(chan struct{}, 1), slot: -1}
			n.boxes[id] = b
		}
		n.mu.Unlock()
		select {
		case b.turn <- struct{}{}:
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("wait for the network of %s: %w", id, ctx.Err())
		}
		n.mu.Lock()
		current := n.boxes[id] == b && !n.closed
		n.mu.Unlock()
		giveBack := func() {
			n.mu.Lock()
			if b.slot < 0 && n.boxes[id] == b {
				delete(n.boxes, id)
			}
			n.mu.Unlock()
			<-b.turn
		}
		if current {
			return b, giveBack, nil
		}
		<-b.turn // another released it while we waited
	}
}

// Attach gives id its network: the lease it has or a new one, a namespace, a link, and the way out. All of it is there
// when Attach returns, or nothing but the lease it had before. An attached id stays as it is: between two runs of a
// sandbox belongs a Detach, since the first may have changed its namespace (gVisor takes the addresses off eth0).
func (n *Net) Attach(ctx context.Context, id string) (_ Attachment, err error) {
	if err := shard.CheckRef("sandbox", id); err != nil {
		return Attachment{}, err
	}
	b, giveBack, err := n.take(ctx, id, true)
	if err != nil {
		return Attachment{}, err
	}
	defer giveBack()
	if b.attached {
		return n.attachment(id, b.slot), n.table.open(n.entry(b.slot))
	}
	if b.gone != nil {
		select {
		case <-b.gone:
		case <-ctx.Done():
			return Attachment{}, fmt.Errorf("wait for the old network of %s: %w", id, ctx.Err())
		}
	}
	l, fresh, err := n.obtain(b)
	if err != nil {
		return Attachment{}, err
	}
	saved := make(chan error, 1)
	if fresh {
		n.change(func() { n.leases.assign(id, l.slot) })
		go func() { saved <- n.save() }()
	} else {
		saved <- nil
	}
	err = n.fault("mount")
	if err == nil {
		err = mountNamespace(l.ns, n.path(id))
	}
	if err == nil {
		if err = n.fault("open"); err == nil {
			err = n.table.open(n.entry(l.slot))
		}
	}
	if err = errors.Join(err, <-saved); err == nil {
		l.ns.close()
		b.slot, b.attached = l.slot, true
		return n.attachment(id, l.slot), nil
	}
	err = errors.Join(err, n.table.shut(n.entry(l.slot)))
	if fresh {
		n.change(func() { n.leases.drop(id) })
		err = errors.Join(err, n.save())
	}
	err = errors.Join(err, unmountNamespace(n.path(id)))
	b.gone = n.reaper.bury(corpse{slot: l.slot, ns: l.ns, free: fresh})
	return Attachment{}, fmt.Errorf("attach the network of %s: %w", id, err)
}

// Ready is how many finished links wait in the pool, but for the one that its owner holds.
func (n *Net) Ready() int { return len(n.ready) }

// obtain returns a finished link for the box: of its own slot if it has a lease, else from the pool or a new one.
func (n *Net) obtain(b *box) (l *link, fresh bool, err error) {
	if b.slot >= 0 {
		l, err = n.build(b.slot)
		return l, false, err
	}
	select {
	case l := <-n.ready:
		return l, true, nil
	default:
	}
	l, err = n.buildFresh()
	return l, true, err
}

func (n *Net) buildFresh() (*link, error) {
	n.mu.Lock()
	slot, ok := n.leases.reserve()
	n.mu.Unlock()
	if !ok {
		return nil, shard.Errorf(shard.CodeInternal, "all %d addresses for sandboxes are in use: remove sandboxes that are no longer needed", slotCount)
	}
	l, err := n.build(slot)
	if err != nil {
		n.mu.Lock()
		n.leases.free(slot)
		n.mu.Unlock()
	}
	return l, err
}

func (n *Net) build(slot int) (*link, error) {
	if err := n.fault("namespace"); err != nil {
		return nil, err
	}
	ns, err := newNamespace()
	if err != nil {
		return nil, err
	}
	if err := n.connect(ns, slot); err != nil {
		ns.close()
		return nil, err
	}
	return &link{slot: slot, ns: ns}, nil
}

// change alters the leases and notes that the file is behind.
func (n *Net) change(alter func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	alter()
	n.gen++
}

// save returns once the caller's change is on disk. Many callers share one write.
func (n *Net) save() error {
	n.mu.Lock()
	mine := n.gen
	n.mu.Unlock()
	n.saving.Lock()
	defer n.saving.Unlock()
	if n.saved >= mine {
		return nil
	}
	n.mu.Lock()
	gen := n.gen
	data, err := n.leases.encode()
	n.mu.Unlock()
	if err == nil {
		err = n.fault("save")
	}
	if err == nil {
		err = durable.WriteFile(filepath.Join(n.cfg.Dir, leaseName), data, 0o600)
	}
	if err != nil {
		return fmt.Errorf("write leases: %w", err)
	}
	n.saved = gen
	return nil
}

// Detach takes id's network away but keeps its lease. No packet passes once it returns; namespace and link go in the
// background. What is not attached is no error.
func (n *Net) Detach(ctx context.Context, id string) error {
	b, giveBack, err := n.take(ctx, id, false)
	if err != nil || b == nil {
		return err
	}
	defer giveBack()
	return n.detach(id, b, false)
}

// Release is Detach, and the lease is given back. Unknown ids are no error.
func (n *Net) Release(ctx context.Context, id string) error {
	b, giveBack, err := n.take(ctx, id, false)
	if err != nil || b == nil {
		return err
	}
	defer giveBack()
	return n.detach(id, b, true)
}

// detach needs the box's turn.
func (n *Net) detach(id string, b *box, release bool) error {
	if b.slot < 0 {
		return nil
	}
	if b.attached {
		if err := n.table.shut(n.entry(b.slot)); err != nil {
			return err
		}
		// Here and not by the reaper, so that id can be attached anew at once after a release.
		if err := unmountNamespace(n.path(id)); err != nil {
			return err
		}
		b.attached = false
		b.gone = n.reaper.bury(corpse{slot: b.slot})
	}
	if release {
		n.change(func() { n.leases.drop(id) })
		if err := n.save(); err != nil {
			n.change(func() { n.leases.assign(id, b.slot) })
			return err
		}
		// The slot is free once all that was buried before it is gone.
		b.gone = n.reaper.bury(corpse{slot: b.slot, free: true})
		b.slot = -1
	}
	return nil
}

// Recover opens the way out of the ids, which an earlier daemon attached, again. Those that lost their network meanwhile, as
// all do when the host boots, are returned and left detached.
func (n *Net) Recover(ctx context.Context, ids []string) (lost []string, err error) {
	var entries []entry
	for _, id := range ids {
		b, giveBack, err := n.take(ctx, id, false)
		if err != nil {
			return nil, err
		}
		// The turn is given back before the elements are added: at this time nobody else works on a recovered sandbox,
		// and the verdict of an interface that goes meanwhile is harmless, since it is bound to no address.
		if b == nil || !b.attached {
			lost = append(lost, id)
		} else {
			entries = append(entries, n.entry(b.slot))
		}
		giveBack()
	}
	return lost, n.table.open(entries...)
}

// Sweep releases every sandbox for which keep says no lease and detaches every one for which it says not attached.
func (n *Net) Sweep(ctx context.Context, keep func(id string) (lease, attached bool)) error {
	n.mu.Lock()
	ids := make([]string, 0, len(n.boxes))
	for id := range n.boxes {
		ids = append(ids, id)
	}
	n.mu.Unlock()
	var errs []error
	for _, id := range ids {
		switch lease, attached := keep(id); {
		case !lease:
			errs = append(errs, n.Release(ctx, id))
		case !attached:
			errs = append(errs, n.Detach(ctx, id))
		}
	}
	return errors.Join(errs...)
}

// Close ends the background work and frees what no sandbox uses. Attached sandboxes, leases, the table and the claim
// stay, for the next daemon of this root.
func (n *Net) Close() error {
	if !n.quiesce() {
		return nil
	}
	n.rt.Close()
	n.table.close()
	return n.claim.close()
}

// quiesce refuses new work and waits for what runs; false if that was done before.
func (n *Net) quiesce() bool {
	n.mu.Lock()
	was := n.closed
	n.closed = true
	boxes := make([]*box, 0, len(n.boxes))
	for _, b := range n.boxes {
		boxes = append(boxes, b)
	}
	n.mu.Unlock()
	if was {
		return false
	}
	for _, b := range boxes {
		b.turn <- struct{}{} // wait for its last user
		<-b.turn
	}
	n.stop()
	n.tasks.Wait()
	n.reaper.close()
	return true
}

// Remove takes everything away that the Net made on this host, leases and claim included, and closes it.
func (n *Net) Remove(ctx context.Context) error {
	errs := []error{n.Sweep(ctx, func(string) (bool, bool) { return false, false })}
	if !n.quiesce() {
		return errors.New("the networks are closed")
	}
	errs = append(errs, n.table.remove(), n.removeFence())
	if err := os.Remove(filepath.Join(n.cfg.Dir, leaseName)); !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, err)
	}
	n.rt.Close()
	n.table.close()
	errs = append(errs, n.claim.remove(ctx))
	return errors.Join(errs...)
}

package netns

import (
	"context"
	"fmt"
	"net/netip"
	"sync"
	"time"
)

// fill keeps the pool full: Pool finished links, the last of which waits in its hand. A namespace that was used is
// never used again.
func (n *Net) fill(ctx context.Context) {
	// The pause leaves the processors to the sandbox that just took a link; the long one is for a host that refuses.
	const pause, afterFailure = 25 * time.Millisecond, 2 * time.Second
	defer func() {
		for {
			select {
			case l := <-n.ready:
				n.discard(l)
			default:
				return
			}
		}
	}()
	failing := false
	for {
		wait := pause
		l, err := n.buildFresh()
		if err == nil {
			select {
			case n.ready <- l:
			case <-ctx.Done():
				n.discard(l)
				return
			}
		} else {
			if !failing {
				n.cfg.Log.Warn("cannot prepare networks for sandboxes", "err", err)
			}
			wait = afterFailure
		}
		failing = err != nil
		select {
		case <-ctx.Done():
			return
		case <-time.After(wait):
		}
	}
}

func (n *Net) discard(l *link) { n.reaper.bury(corpse{slot: l.slot, ns: l.ns, free: true}) }

// guard looks after the table and the fence: without them a sandbox would reach what this host reaches. The kernel tells at
// once when another program changes them; the tick is for what it could not tell.
func (n *Net) guard(ctx context.Context) {
	table, rules := make(chan struct{}, 1), make(chan struct{}, 1)
	var told sync.WaitGroup
	defer told.Wait()
	tell := func(what string, watch func() error) {
		told.Go(func() {
			if err := watch(); err != nil {
				n.cfg.Log.Warn("the kernel does not tell when another program removes what keeps sandboxes in; it is looked for each second", "what", what, "err", err)
			}
		})
	}
	tell("nftables table", func() error { return n.table.tableChanges(ctx, table) })
	tell("routing rules", func() error { return ruleChanges(ctx, rules) })
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		touched := false
		select {
		case <-ctx.Done():
			return
		case <-table:
			touched = true
		case <-rules:
		case <-tick.C:
			n.followIPv6(ctx)
		}
		if had, err := n.table.restore(touched, n.forgetFlows); had {
			n.cfg.Log.Error("another program removed or changed the nftables table of the sandboxes; it is up again", "table", n.table.name, "err", err)
		}
		if missing, err := n.raiseFence(); missing {
			n.cfg.Log.Error("another program removed routing rules that keep sandboxes in; they are there again", "err", err)
		}
	}
}

// forgetFlows makes every connection of a sandbox one that has yet to be judged. Those that are allowed go on.
func (n *Net) forgetFlows() error {
	err := n.forget(func(a netip.Addr) bool { return n.leases.block.Contains(a) || n.leases.twin.Contains(a) })
	if err != nil {
		return fmt.Errorf("forget the connections of sandboxes: %w", err)
	}
	return nil
}

// corpse is a link that is to be torn down, with the file of its namespace if that is still open.
type corpse struct {
	slot int
	ns   *namespace
	free bool // give the slot back afterwards
	done chan struct{}
}

// reaper tears networks down one after the other: the kernel takes tens of milliseconds for each.
type reaper struct {
	n       *Net
	mu      sync.Mutex
	queue   []corpse
	closing bool
	wake    chan struct{}
	ended   chan struct{}
}

func startReaper(n *Net) *reaper {
	r := &reaper{n: n, wake: make(chan struct{}, 1), ended: make(chan struct{})}
	go r.run()
	return r
}

// bury hands c over; the channel closes when it is gone.
func (r *reaper) bury(c corpse) <-chan struct{} {
	c.done = make(chan struct{})
	r.mu.Lock()
	r.queue = append(r.queue, c)
	r.mu.Unlock()
	r.signal()
	return c.done
}

func (r *reaper) signal() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// close returns when the queue is empty. Nothing may be buried later.
func (r *reaper) close() {
	r.mu.Lock()
	r.closing = true
	r.mu.Unlock()
	r.signal()
	<-r.ended
}

func (r *reaper) run() {
	defer close(r.ended)
	for range r.wake {
		r.mu.Lock()
		batch, closing := r.queue, r.closing
		r.queue = nil
		r.mu.Unlock()
		if len(batch) > 0 {
			r.n.tearDown(batch)
		}
		if closing {
			return
		}
	}
}

func (n *Net) tearDown(batch []corpse) {
	log := n.cfg.Log
	addrs := map[netip.Addr]bool{}
	clean := make([]bool, len(batch))
	for i, c := range batch {
		err := n.deleteLink(c.slot)
		if c.ns != nil {
			c.ns.close()
		}
		if err != nil {
			log.Error("cannot tear down the network of a sandbox; its address stays out of use until the daemon restarts", "interface", n.iface(c.slot), "err", err)
		}
		clean[i] = err == nil
		_, addr, _ := n.leases.link(c.slot)
		_, addr6, _ := n.leases.link6(c.slot)
		addrs[addr], addrs[addr6] = true, true
	}
	// The next holder of an address must not inherit its flows.
	err := n.forget(func(a netip.Addr) bool { return addrs[a] })
	if err != nil {
		log.Error("cannot forget the connections of removed sandboxes; their addresses stay out of use until the daemon restarts", "err", err)
	}
	n.mu.Lock()
	for i, c := range batch {
		if c.free && clean[i] && err == nil {
			n.leases.free(c.slot)
		}
	}
	n.mu.Unlock()
	for _, c := range batch {
		close(c.done)
	}
}

package hostcheck

import (
	"context"
	"errors"
	"runtime"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func freeSpace(dir string) (int64, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(dir, &s); err != nil {
		return 0, err
	}
	return int64(s.Bavail) * s.Bsize, nil
}

func clockSynced() bool {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	return err == nil && state != unix.TIME_ERROR
}

// tryNetwork makes a pair of links and a table in a network namespace that ends with the thread.
func tryNetwork(ctx context.Context) (what string, err error) {
	type outcome struct {
		what string
		err  error
	}
	done := make(chan outcome, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread dies here, and the namespace with it
		what, err := makeNetwork()
		done <- outcome{what, err}
	}()
	select {
	case o := <-done:
		return o.what, o.err
	case <-ctx.Done():
		return "the network", ctx.Err()
	case <-time.After(10 * time.Second):
		return "the network", errors.New("no answer from the kernel in 10 s")
	}
}

// makeNetwork moves the thread to a new namespace and makes there what a sandbox needs; what could not be made is told with
// the error.
func makeNetwork() (what string, err error) {
	if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
		return "a network namespace", err
	}
	rt, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err == nil {
		defer rt.Close()
		err = rt.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"})
	}
	if err != nil {
		return "a veth pair", err
	}
	nft, err := nftables.New()
	if err == nil {
		t := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "shard"})
		nft.AddChain(&nftables.Chain{Name: "nat", Table: t, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
			Priority: nftables.ChainPriorityNATSource})
		err = nft.Flush()
	}
	return "an nftables table with network address translation", err
}

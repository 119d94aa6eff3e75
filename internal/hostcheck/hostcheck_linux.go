package hostcheck

import (
	"context"
	"fmt"
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
	return int64(s.Bavail) * s.Bsize, nil //nolint:gosec // a disk's size fits
}

func clockSynced() bool {
	var t unix.Timex
	state, err := unix.Adjtimex(&t)
	return err == nil && state != unix.TIME_ERROR
}

// tryNetwork makes a pair of links and a table in a network namespace that ends with the thread.
func tryNetwork(ctx context.Context) (what string, err error) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock: the thread dies here, and the namespace with it
		if err = unix.Unshare(unix.CLONE_NEWNET); err != nil {
			what = "a network namespace"
			return
		}
		var rt *netlink.Handle
		if rt, err = netlink.NewHandle(unix.NETLINK_ROUTE); err == nil {
			defer rt.Close()
			err = rt.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "a"}, PeerName: "b"})
		}
		if err != nil {
			what = "a veth pair"
			return
		}
		var nft *nftables.Conn
		if nft, err = nftables.New(); err == nil {
			t := nft.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "shard"})
			nft.AddChain(&nftables.Chain{Name: "nat", Table: t, Type: nftables.ChainTypeNAT, Hooknum: nftables.ChainHookPostrouting,
				Priority: nftables.ChainPriorityNATSource})
			err = nft.Flush()
		}
		if err != nil {
			what = "an nftables table with network address translation"
		}
	}()
	select {
	case <-done:
		return what, err
	case <-ctx.Done():
		return "the network", ctx.Err()
	case <-time.After(10 * time.Second):
		return "the network", fmt.Errorf("no answer from the kernel in 10 s")
	}
}

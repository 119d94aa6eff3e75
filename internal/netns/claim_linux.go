package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
)

// claimDir is where all roots of this machine write down their blocks: a file per block, named by its first address,
// holding the claimant's directory, flocked while that daemon lives.
const claimDir = "/run/shard/net"

// claim is a root's hold on one address block. It outlives the daemon, since sandboxes do; it is stale once the
// claimant's directory is gone.
type claim struct {
	block netip.Prefix
	path  string
	file  *os.File
}

// claimBlock finds a block that overlaps none of busy and no other root's claim. keep is the block of existing leases.
func claimBlock(ctx context.Context, dir string, busy []netip.Prefix, keep netip.Prefix) (*claim, error) {
	if err := os.MkdirAll(claimDir, 0o755); err != nil {
		return nil, fmt.Errorf("make the directory of address claims: %w", err)
	}
	unlock, err := lockClaims(ctx)
	if err != nil {
		return nil, err
	}
	defer unlock()

	entries, err := os.ReadDir(claimDir)
	if err != nil {
		return nil, fmt.Errorf("read address claims: %w", err)
	}
	want := keep
	var old *claim // ours, but for another block than keep: left by a crash between two claims
	for _, e := range entries {
		addr, err := netip.ParseAddr(e.Name())
		if err != nil || !addr.Is4() {
			continue
		}
		c := &claim{block: netip.PrefixFrom(addr, 16), path: filepath.Join(claimDir, e.Name())}
		mine, err := c.inspect(dir)
		switch {
		case err != nil:
			return nil, err
		case mine && !want.IsValid():
			want = c.block
			old = c
		case mine:
			old = c
		case c.path != "":
			busy = append(busy, c.block)
		}
	}
	block, ok := pickBlock(busy, dir, want)
	if !ok {
		return nil, shard.Errorf(shard.CodeInternal, "no free address block for sandboxes: every /16 of 10.128.0.0/9, 100.64.0.0/10 and "+
			"172.16.0.0/12 overlaps a route of this host or belongs to another shard root; remove a route or an unused root")
	}
	if old != nil && old.block != block {
		if err := os.Remove(old.path); err != nil {
			return nil, fmt.Errorf("remove an old address claim: %w", err)
		}
	}
	return writeClaim(dir, block)
}

// inspect says whether the claim belongs to dir. A claim whose claimant vanished is removed, and its path cleared.
func (c *claim) inspect(dir string) (mine bool, err error) {
	f, err := os.OpenFile(c.path, os.O_RDWR|unix.O_NOFOLLOW, 0)
	if err != nil {
		return false, fmt.Errorf("open an address claim: %w", err)
	}
	defer func() { _ = f.Close() }()
	owner := make([]byte, unix.PathMax)
	n, _ := f.Read(owner)
	claimant := strings.TrimSpace(string(owner[:n]))
	if err := lockSoon(f, claimant == dir); err != nil {
		if claimant == dir {
			return false, shard.Wrap(shard.CodeInUse, err, "the networks of this root belong to another daemon that still runs")
		}
		return false, nil
	}
	if claimant == dir {
		return true, nil
	}
	if _, err := os.Stat(claimant); claimant == "" || errors.Is(err, fs.ErrNotExist) {
		if err := os.Remove(c.path); err != nil {
			return false, fmt.Errorf("remove a stale address claim: %w", err)
		}
		c.path = ""
	}
	return false, nil
}

func writeClaim(dir string, block netip.Prefix) (*claim, error) {
	path := filepath.Join(claimDir, block.Addr().String())
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("claim address block %s: %w", block, err)
	}
	if err := lockSoon(f, true); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("lock the claim of address block %s: %w", block, err)
	}
	if err := errors.Join(f.Truncate(0), func() error { _, err := f.WriteAt([]byte(dir+"\n"), 0); return err }()); err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("write the claim of address block %s: %w", block, err)
	}
	return &claim{block: block, path: path, file: f}, nil
}

// lockSoon takes the lock of a claim. A claim that must be ours is waited for a little: a program that a killed daemon, or
// this one, was just starting holds the lock until it executes.
func lockSoon(f *os.File, ours bool) error {
	for deadline := time.Now().Add(2 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil || !ours || time.Now().After(deadline) {
			return err
		}
	}
}

// lockClaims makes reading and changing the claims one step among all daemons of the machine.
func lockClaims(ctx context.Context) (unlock func(), err error) {
	f, err := os.OpenFile(filepath.Join(claimDir, ".lock"), os.O_RDWR|os.O_CREATE|unix.O_NOFOLLOW, 0o600)
	if err != nil {
		return nil, fmt.Errorf("open the lock of address claims: %w", err)
	}
	for {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = f.Close() }, nil
		}
		select {
		case <-ctx.Done():
			_ = f.Close()
			return nil, fmt.Errorf("wait for the lock of address claims: %w", ctx.Err())
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// close lets go of the claim but leaves it standing for the next daemon of this root.
func (c *claim) close() error { return c.file.Close() }

// remove gives the block back.
func (c *claim) remove(ctx context.Context) error {
	unlock, err := lockClaims(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	return errors.Join(os.Remove(c.path), c.file.Close())
}

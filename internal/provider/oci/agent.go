//go:build linux

package oci

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/provider"
)

// agentName is the file in Spec.Dir that is the machine's shard-init, and the one in Options.Shared that all are links to.
const agentName = "shard-init"

// agentStore has one copy of shard-init for all machines.
type agentStore struct {
	mu    sync.Mutex
	stamp string // of the program that was copied
}

// placeAgent gives the machine a shard-init of its own, and returns its path. What a pause saves must go on with the very program
// that it ran, since gVisor reads programs from their files again: also when shard was installed anew meanwhile.
func (p *OCI) placeAgent(spec provider.Spec) (string, error) {
	if !p.flavour.pauses {
		return p.opt.Init, nil
	}
	own, source := filepath.Join(spec.Dir, agentName), p.opt.Init
	if p.opt.Shared != "" {
		shared, err := p.shareAgent()
		if err != nil {
			return "", err
		}
		source = shared
	}
	if err := os.Remove(own); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("place shard-init: %w", err)
	}
	err := unix.Link(source, own)
	if source == p.opt.Init || errors.Is(err, unix.EXDEV) || errors.Is(err, unix.EMLINK) {
		_ = os.Remove(own) // a link to what may be written over
		err = copyProgram(source, own)
	}
	if err != nil {
		return "", fmt.Errorf("place shard-init: %w", err)
	}
	return own, nil
}

// shareAgent makes sure of the shared copy, which a page cache holds but once, however many machines run it.
func (p *OCI) shareAgent() (string, error) {
	shared := filepath.Join(p.opt.Shared, agentName)
	p.agent.mu.Lock()
	defer p.agent.mu.Unlock()
	stamp := stampOf(p.opt.Init)
	if p.agent.stamp == stamp {
		return shared, nil
	}
	if err := os.MkdirAll(p.opt.Shared, 0o700); err != nil {
		return "", fmt.Errorf("copy shard-init: %w", err)
	}
	fresh := shared + ".new"
	err := copyProgram(p.opt.Init, fresh)
	if err == nil {
		err = os.Rename(fresh, shared)
	}
	if err != nil {
		return "", fmt.Errorf("copy shard-init: %w", errors.Join(err, os.Remove(fresh)))
	}
	p.agent.stamp = stamp
	return shared, nil
}

// copyProgram copies a program, and its bytes are on the disk when it returns.
func copyProgram(from, to string) (err error) {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	out, err := os.OpenFile(to, os.O_CREATE|os.O_TRUNC|os.O_WRONLY, 0o755)
	if err != nil {
		return err
	}
	_, err = io.Copy(out, in)
	return errors.Join(err, out.Sync(), out.Close())
}

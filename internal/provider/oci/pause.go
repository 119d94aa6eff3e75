//go:build linux

package oci

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/provider"
)

const (
	// saveTime bounds a pause: memory goes to the disk at the disk's speed. So does it come back.
	saveTime = 10 * time.Minute
	// settleTime bounds the wait for a machine that is to go on; who waits in vain tries again.
	settleTime = 10 * time.Second
	// exitNoGuest is what "settle" of the runtime program says of a machine without a guest.
	exitNoGuest = 9
	// exitRefused is what "save" says of a machine that it does not begin to save; its output is the reason.
	exitRefused = 10
	// busyName is a file in Spec.Dir that is locked while a pause or a resume is under way: by this program, and by the
	// runtime program at work, which outlives it.
	busyName = "busy"
	// versionName is a file beside what a pause saved: the version of the runtime that did.
	versionName = "version"
	// pagesName is the file that holds nearly all of what a pause saves.
	pagesName = "pages.img"
	// stateName is the file of all else.
	stateName = "checkpoint.img"
)

// pauser is an OCI whose runtime can save machines. It implements provider.Pauser.
type pauser struct{ *OCI }

var _ provider.Pauser = pauser{}

// Pause implements provider.Pauser. The runtime stops the guest, saves it and leaves it stopped; the end is ours.
func (p pauser) Pause(ctx context.Context, inst provider.Instance, dir string, commit func() error) (err error) {
	i, ok := inst.(*Instance)
	if !ok {
		return fmt.Errorf("%T is no machine of this provider", inst)
	}
	busy, err := p.lock(i.spec)
	if err != nil {
		return err
	}
	defer func() { _ = busy.Close() }()
	defer i.takeBack() // once it is settled
	ctx, cancel := context.WithTimeout(ctx, saveTime)
	defer cancel()
	defer func() {
		if err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
		defer cancel()
		unsettled := p.settle(ctx, i.spec, busy) // first: until then it may still write
		err = fmt.Errorf("pause %s: %w", i.spec.ID, errors.Join(err, unsettled, clearDir(dir)))
		switch {
		case unsettled == nil:
		case !errors.Is(unsettled, provider.ErrBusy) && i.ends(ctx): // it answers no more a little before that
			err = fmt.Errorf("%w: %w", provider.ErrLost, err)
		default:
			err = fmt.Errorf("%w: %w", provider.ErrBusy, err)
		}
	}()
	if _, err := os.Stat(filepath.Join(i.spec.Dir, agentName)); err != nil { // it could not be resumed
		return fmt.Errorf("%w: %w", provider.ErrForeign, err)
	}
	if err := p.writeVersion(ctx, dir); err != nil {
		return err
	}
	own, err := ownMemory(i.handle.Main.PID)
	if err != nil {
		return err
	}
	if err := i.lend(saveFactor * own); err != nil {
		return err
	}
	cmd := p.command(ctx, i.spec, "save", "--image-path", dir, runtimeID)
	cmd.ExtraFiles = []*os.File{busy}
	stop := writeBehind(filepath.Join(dir, pagesName))
	why, err := cmd.Output()
	stop()
	if err != nil {
		if exit, failed := errors.AsType[*exec.ExitError](err); failed && exit.ExitCode() == exitRefused {
			return &provider.RefusedError{Reason: strings.TrimSpace(string(why))}
		}
		if ctx.Err() != nil {
			err = ctx.Err()
		}
		if full(dir) { // what the runtime says of it is a text, if anything
			err = errors.Join(err, unix.ENOSPC)
		}
		return fmt.Errorf("the runtime failed: %w: %s", err, complaint(i.spec))
	}
	if err := syncDir(dir); err != nil {
		return err
	}
	if err := commit(); err != nil {
		return err
	}
	i.ending.CompareAndSwap(nil, new("paused"))
	if err := i.Kill(context.WithoutCancel(ctx)); err != nil {
		p.opt.Log.Error("end a machine that was paused", "sandbox", i.spec.ID, "err", err) // Destroy follows
	}
	return nil
}

// Resume implements provider.Pauser.
func (p pauser) Resume(ctx context.Context, spec provider.Spec, dir string) (provider.Instance, error) {
	busy, err := p.lock(spec)
	if err != nil {
		return nil, err
	}
	defer func() { _ = busy.Close() }()
	inst, err := p.make(ctx, spec, func(i *Instance) error {
		var need int64
		for name, factor := range map[string]int64{stateName: loadFactor, pagesName: 1} {
			if info, err := os.Stat(filepath.Join(dir, name)); err == nil {
				need += factor * info.Size()
			}
		}
		defer i.takeBack()
		if err := i.lend(need); err != nil {
			return err
		}
		i.inherits = []*os.File{busy}
		err := i.launch(ctx, saveTime, filepath.Join(spec.Dir, agentName), "restore", "--image-path", dir)
		if exit, failed := errors.AsType[*exec.ExitError](err); failed && !exit.Exited() && p.settle(ctx, spec, busy) == nil {
			return i.take(filepath.Join(spec.Dir, bundleName)) // it was killed when the guest ran, or was about to
		}
		return err
	})
	if err != nil && ctx.Err() == nil && p.foreign(ctx, dir) {
		err = fmt.Errorf("%w: %w", provider.ErrForeign, err)
	}
	return inst, err
}

// Settle implements provider.Pauser.
func (p pauser) Settle(ctx context.Context, spec provider.Spec) (json.RawMessage, error) {
	busy, err := p.lock(spec)
	if err != nil {
		return nil, err
	}
	defer func() { _ = busy.Close() }()
	i := &Instance{p: p.OCI, spec: spec}
	if i.group, err = p.opt.Cgroups.Open(spec.ID); errors.Is(err, fs.ErrNotExist) {
		return nil, provider.ErrGone
	} else if err != nil {
		return nil, err
	}
	err = i.find(filepath.Join(spec.Dir, bundleName))
	if errors.Is(err, errNoProcess) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, strconv.ErrSyntax) { // of a pid file half written
		return nil, fmt.Errorf("%w: %w", provider.ErrGone, err)
	}
	if err == nil {
		err = p.settle(ctx, spec, busy)
	}
	if err != nil {
		return nil, err
	}
	return i.Handle(), nil
}

// lock takes the busy file of a machine, or says ErrBusy.
func (p pauser) lock(spec provider.Spec) (*os.File, error) {
	if err := p.check(spec); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(spec.Dir, busyName), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", spec.ID, err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, provider.ErrBusy
		}
		return nil, fmt.Errorf("lock %s: %w", spec.ID, err)
	}
	return f, nil
}

// settle makes a machine go on that a runtime program has stopped or is restoring, whatever became of that program: then it
// waits while the machine is at it. ErrGone: there is no guest. ErrBusy: it did not do so within settleTime. The caller
// holds the lock, and so does the program.
func (p pauser) settle(ctx context.Context, spec provider.Spec, busy *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, settleTime)
	defer cancel()
	cmd := p.command(ctx, spec, "settle", runtimeID)
	cmd.ExtraFiles = []*os.File{busy}
	err := cmd.Run()
	switch exit, _ := errors.AsType[*exec.ExitError](err); {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		err = errors.Join(provider.ErrBusy, ctx.Err())
	case exit != nil && exit.ExitCode() == exitNoGuest:
		err = provider.ErrGone
	}
	return fmt.Errorf("let the machine go on: %w: %s", err, complaint(spec))
}

func (p pauser) writeVersion(ctx context.Context, dir string) error {
	v := version{}
	if last := p.probed.Load(); last != nil {
		v.number = last.report.Version
	} else {
		var err error
		if v, err = p.version(ctx); err != nil {
			return err
		}
	}
	if err := os.WriteFile(filepath.Join(dir, versionName), []byte(v.number), 0o600); err != nil {
		return fmt.Errorf("write the runtime's version: %w", err)
	}
	return nil
}

// foreign says that another version of the runtime filled dir.
func (p pauser) foreign(ctx context.Context, dir string) bool {
	saved, err := os.ReadFile(filepath.Join(dir, versionName))
	if err != nil {
		return false
	}
	now, err := p.version(ctx)
	return err == nil && strings.TrimSpace(string(saved)) != now.number
}

// full says whether the disk of a directory has next to no room.
func full(dir string) bool {
	var fs unix.Statfs_t
	return unix.Statfs(dir, &fs) == nil && fs.Bavail*uint64(fs.Bsize) < 1<<20
}

// clearDir empties a directory of what was not wholly saved. A machine that could not write may hold its files open: the room
// that they take is free all the same.
func clearDir(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		err = errors.Join(err, os.Truncate(name, 0), os.Remove(name))
	}
	return err
}

// writeBehind has the kernel write a file to the disk while it grows, so that little is left to sync; best effort, since the
// sync follows. stop ends it.
func writeBehind(name string) (stop func()) {
	const often = 10 * time.Millisecond
	end, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		var f *os.File
		for {
			select {
			case <-end:
				if f != nil {
					_ = f.Close()
				}
				return
			case <-time.After(often):
			}
			if f == nil {
				if f, _ = os.Open(name); f == nil {
					continue
				}
			}
			_ = unix.SyncFileRange(int(f.Fd()), 0, 0, unix.SYNC_FILE_RANGE_WRITE)
		}
	}()
	return func() { close(end); <-ended }
}

// syncDir makes the files of a directory root's alone, whatever the runtime did, and writes them and their names to the disk.
func syncDir(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	names := []string{dir, filepath.Dir(dir)}
	for _, e := range entries {
		name := filepath.Join(dir, e.Name())
		if err := os.Chmod(name, 0o600); err != nil {
			return err
		}
		names = append([]string{name}, names...)
	}
	for _, name := range names {
		f, err := os.Open(name)
		if err != nil {
			return err
		}
		err = errors.Join(f.Sync(), f.Close())
		if err != nil {
			return fmt.Errorf("write what was saved to the disk: %w", err)
		}
	}
	return nil
}

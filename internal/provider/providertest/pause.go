//go:build linux

package providertest

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/provider"
)

// pauses follows a machine through pauses that succeed and that fail.
func pauses(t *testing.T, p provider.Provider, env *Env) {
	pauser, can := p.(provider.Pauser)
	if !can {
		t.Skipf("provider %s does not pause", p.Name())
	}
	spec := env.Spec(t, shard.Resources{})
	descriptors := openDescriptors(t)
	b := start(t, p, spec)
	// A program that counts, in a variable that only its memory holds, and writes the count down.
	b.sh("(i=0; while :; do i=$((i+1)); echo $i > /count; sleep 0.01; done) </dev/null >/dev/null 2>&1 &")
	count := func() int {
		t.Helper()
		data, err := os.ReadFile(filepath.Join(spec.Root, "count"))
		if err != nil {
			t.Fatal(err)
		}
		n, _ := strconv.Atoi(strings.TrimSpace(string(data)))
		return n
	}
	quiesce := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), patience)
		defer cancel()
		if err := b.session.Quiesce(ctx); err != nil {
			t.Fatalf("quiesce: %v", err)
		}
		_ = b.session.Close()
	}
	counts := func() {
		t.Helper()
		n := count()
		for deadline := time.Now().Add(patience); count() <= n; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("the program does not count on behind %d", n)
			}
		}
	}

	t.Run("refused", func(t *testing.T) {
		b := b.in(t)
		counts()
		quiesce()
		no := errors.New("no")
		err := pauser.Pause(t.Context(), b.inst, t.TempDir(), func() error {
			n := count()
			time.Sleep(100 * time.Millisecond)
			if now := count(); now != n {
				t.Errorf("the program counted from %d to %d while it was to stand still", n, now)
			}
			if _, err := pauser.Settle(t.Context(), spec); !errors.Is(err, provider.ErrBusy) {
				t.Errorf("settle during a pause: %v", err)
			}
			return no
		})
		if !errors.Is(err, no) || errors.Is(err, provider.ErrLost) {
			t.Fatalf("a pause that was refused: %v", err)
		}
		b.connect()
		counts()
	})
	b.connect()

	t.Run("no room", func(t *testing.T) {
		b := b.in(t)
		quiesce()
		dir := tiny(t)
		err := pauser.Pause(t.Context(), b.inst, dir, func() error {
			t.Error("it was said to be saved")
			return nil
		})
		if left, _ := os.ReadDir(dir); len(left) > 0 {
			t.Errorf("a pause that failed left %v", left)
		}
		if err == nil || errors.Is(err, provider.ErrLost) {
			t.Fatalf("a pause without room: %v", err)
		}
		b.connect()
		counts()
	})
	b.connect()

	saved := t.TempDir()
	for round := range 3 {
		counts()
		quiesce()
		at, dir := 0, filepath.Join(saved, strconv.Itoa(round))
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := pauser.Pause(t.Context(), b.inst, dir, func() error { at = count(); return nil }); err != nil {
			t.Fatalf("pause %d: %v", round, err)
		}
		if exit := b.ended(); exit.OOM {
			t.Error("a paused machine counts as out of memory")
		}
		b.remove()
		if traces := env.Traces(spec); len(traces) != 0 {
			t.Errorf("left on the host by a paused machine: %q", traces)
		}
		if _, err := pauser.Settle(t.Context(), spec); !errors.Is(err, provider.ErrGone) {
			t.Errorf("settle of a paused machine: %v", err)
		}
		if now := count(); now != at {
			t.Errorf("the program counted from %d to %d behind what was saved", at, now)
		}
		inst, err := pauser.Resume(t.Context(), spec, dir)
		if err != nil {
			t.Fatalf("resume %d: %v", round, err)
		}
		b.inst = inst
		b.connect()
		counts()
		if now := count(); now > at+1000 || now <= at {
			t.Errorf("the program counts %d, after %d when it was paused", now, at)
		}
		if got := b.sh("pidof sleep >/dev/null; echo alive"); got != "alive" {
			t.Errorf("a command says %q", got)
		}
		if now, err := pauser.Settle(t.Context(), spec); err != nil || string(now) != string(b.inst.Handle()) {
			t.Errorf("settle of a resumed machine says %s, %v; its handle is %s", now, err, b.inst.Handle())
		}
	}

	t.Run("spoiled", func(t *testing.T) {
		b.remove()
		for _, name := range []string{"checkpoint.img", "pages.img", "pages_meta.img"} {
			if err := os.Truncate(filepath.Join(saved, "2", name), 10); err != nil {
				t.Fatal(err)
			}
			if inst, err := pauser.Resume(t.Context(), spec, filepath.Join(saved, "2")); err == nil {
				_ = inst.Close()
				t.Errorf("resumed with 10 bytes of %s", name)
			}
			if traces := env.Traces(spec); len(traces) != 0 {
				t.Errorf("left on the host by a resume that failed: %q", traces)
			}
			_ = p.Destroy(t.Context(), spec)
			break
		}
		inst, err := pauser.Resume(t.Context(), spec, filepath.Join(saved, "1"))
		if err != nil {
			t.Fatalf("resume from what was resumed from before: %v", err)
		}
		b.inst = inst
		b.connect()
		counts()
	})
	b.remove()
	if now := openDescriptors(t); len(now) > len(descriptors) {
		t.Errorf("open descriptors before: %q\nafter: %q", descriptors, now)
	}
}

// tiny is a directory with room for next to nothing.
func tiny(t testing.TB) string {
	t.Helper()
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil { // the machine may hold a file that could not be written
			t.Error(err)
		}
	})
	return dir
}

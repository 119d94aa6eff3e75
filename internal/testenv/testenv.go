// Package testenv is the hall in which the real programs are tested: it builds them once, starts daemons in private
// roots on a private make-believe network, serves them images, and proves afterwards that nothing is left of them on
// this host. It must not be imported by the product.
package testenv

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// patience bounds every wait of the tests: two busy cores must never fail one.
const patience = 60 * time.Second

// Module is the directory of the source tree.
func Module() string {
	_, file, _, _ := runtime.Caller(0)
	return filepath.Dir(filepath.Dir(filepath.Dir(file)))
}

// workshop is a directory below build/. Several test programs may want to build in it at once: one has it, until it closes it.
type workshop struct {
	dir  string
	lock *os.File
	// ctx bounds the work in it.
	ctx    context.Context
	cancel context.CancelFunc
}

func openWorkshop(name string) (*workshop, error) {
	dir := filepath.Join(Module(), "build", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(dir, ".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		_ = lock.Close()
		return nil, err
	}
	w := &workshop{dir: dir, lock: lock}
	w.ctx, w.cancel = context.WithTimeout(context.Background(), 10*time.Minute)
	return w, nil
}

// Workshop is a directory below build/ that is the caller's alone, whatever other test programs run, until it says done.
func Workshop(t testing.TB, name string) (dir string, done func()) {
	t.Helper()
	w, err := openWorkshop(name)
	if err != nil {
		t.Fatal(err)
	}
	return w.dir, w.close
}

// run runs a program in the workshop and returns what it printed, without space around it.
func (w *workshop) run(name string, args ...string) (string, error) {
	cmd := exec.CommandContext(w.ctx, name, args...)
	cmd.Dir, cmd.Env = w.dir, append(os.Environ(), "CGO_ENABLED=0")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w\n%s", name, err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}

func (w *workshop) close() {
	w.cancel()
	_ = w.lock.Close()
}

var build = sync.OnceValues(func() (string, error) {
	w, err := openWorkshop("test-bin")
	if err != nil {
		return "", err
	}
	defer w.close()
	dir := w.dir
	if _, err := w.run("go", "build", "-C", Module(), "-trimpath", "-o", dir+"/", "./cmd/shard", "./cmd/shard-init"); err != nil {
		return "", fmt.Errorf("build the programs: %w", err)
	}
	// The runtimes take minutes to build and seldom change: take them from bin/. Where one is missing, the provider's
	// probe says so, and what needs it is skipped with that reason.
	for _, name := range []string{"shard-runsc", "runc"} {
		built := filepath.Join(Module(), "bin", name)
		if _, err := os.Stat(built); err != nil {
			continue
		}
		link := filepath.Join(dir, name)
		if at, err := os.Readlink(link); err == nil && at == built {
			continue
		}
		_ = os.Remove(link)
		if err := os.Symlink(built, link); err != nil {
			return "", err
		}
	}
	return dir, nil
})

// Bin is a directory that holds the real programs, built from this source tree.
func Bin(t testing.TB) string {
	t.Helper()
	dir, err := build()
	if err != nil {
		t.Fatal(err)
	}
	return dir
}

// Result is how a program ended.
type Result struct {
	Stdout, Stderr string
	Code           int // 128+n after signal n
}

// Run runs a command to its end. It fails the test only when the command cannot be started or does not end.
func Run(t testing.TB, cmd *exec.Cmd) Result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	if cmd.Stdout == nil {
		cmd.Stdout = &stdout
	}
	if cmd.Stderr == nil {
		cmd.Stderr = &stderr
	}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start %s: %v", cmd.Path, err)
	}
	late := time.AfterFunc(3*patience, func() { _ = cmd.Process.Kill() })
	_ = cmd.Wait()
	if !late.Stop() {
		t.Fatalf("%s did not end within %s\nstdout: %s\nstderr: %s", strings.Join(cmd.Args, " "), 3*patience, &stdout, &stderr)
	}
	code := cmd.ProcessState.ExitCode()
	if ws, ok := cmd.ProcessState.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
		code = 128 + int(ws.Signal())
	}
	return Result{Stdout: stdout.String(), Stderr: stderr.String(), Code: code}
}

// Eventually waits until what it is given says yes, and fails the test with its last words when it never does.
func Eventually(t testing.TB, what string, ok func() (bool, string)) {
	t.Helper()
	deadline := time.Now().Add(patience)
	for pause := time.Millisecond; ; pause = min(2*pause, 200*time.Millisecond) {
		done, last := ok()
		if done {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: not within %s: %s", what, patience, last)
		}
		time.Sleep(pause)
	}
}

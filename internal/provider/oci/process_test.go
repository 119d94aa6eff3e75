//go:build linux

package oci

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

func TestProcess(t *testing.T) {
	cmd := exec.CommandContext(t.Context(), "sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	p, err := identify(cmd.Process.Pid)
	if err != nil {
		t.Fatal(err)
	}
	for name, other := range map[string]process{
		"later":   {PID: p.PID, StartTime: p.StartTime + 1, Boot: p.Boot},
		"reboot":  {PID: p.PID, StartTime: p.StartTime, Boot: "another"},
		"nothing": {},
		"thread":  {PID: -1, StartTime: p.StartTime, Boot: p.Boot},
	} {
		if f, err := other.open(); !errors.Is(err, errNoProcess) {
			t.Errorf("%s: opened %v, %v", name, f, err)
		}
	}
	pidfd, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	given, err := p.open()
	if err != nil {
		t.Fatal(err)
	}
	waited, gaveUp := make(chan error, 1), make(chan error, 1)
	go func() { waited <- wait(pidfd) }()
	go func() { gaveUp <- wait(given) }()
	if err := given.Close(); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, gaveUp); err == nil {
		t.Error("wait says that a process ended when its pidfd was closed")
	}
	select {
	case err := <-waited:
		t.Fatalf("wait says that a process ended that runs: %v", err)
	default:
	}
	if err := cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	if err := receive(t, waited); err != nil {
		t.Errorf("wait: %v", err)
	}
	if _, err := p.open(); !errors.Is(err, errNoProcess) {
		t.Errorf("a zombie counts as a process: %v", err)
	}
	_ = cmd.Wait()
	if _, err := identify(p.PID); !errors.Is(err, errNoProcess) {
		t.Errorf("identify of what is gone: %v", err)
	}
	if err := pidfd.Close(); err != nil {
		t.Error(err)
	}
}

func receive(t *testing.T, c <-chan error) error {
	t.Helper()
	select {
	case err := <-c:
		return err
	case <-time.After(patience):
		t.Fatal("it hangs")
		return nil
	}
}

func FuzzParseStat(f *testing.F) {
	const tail = " S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 4242 20 21"
	f.Add([]byte("7 (sh)" + tail))
	f.Add([]byte("7 (a) S (b) Z)" + tail))
	f.Add([]byte("7 (\n)) " + tail))
	f.Add([]byte("7 (sh) Z"))
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		_, _ = parseStat(b)
		// Whatever a program calls itself, the fields are found behind it.
		if got, err := parseStat([]byte("7 (" + string(b) + ")" + tail)); err != nil || got != 4242 {
			t.Errorf("got %d, %v", got, err)
		}
	})
}

func TestFind(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	write := func(path string, mode os.FileMode) {
		if err := os.WriteFile(path, nil, mode); err != nil {
			t.Fatal(err)
		}
	}
	write(filepath.Join(first, "plain"), 0o644)
	write(filepath.Join(second, "plain"), 0o755)
	write(filepath.Join(first, "both"), 0o755)
	write(filepath.Join(second, "both"), 0o755)
	if err := os.Mkdir(filepath.Join(second, "dir"), 0o755); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{"plain": filepath.Join(second, "plain"), "both": filepath.Join(first, "both"), "dir": "", "none": ""} {
		if got := find([]string{first, second}, name); got != want {
			t.Errorf("%s: found %q, want %q", name, got, want)
		}
	}
	t.Setenv("SHARD_INIT_PATH", "/somewhere/else")
	if got := FindPrograms().Init; got != "/somewhere/else" {
		t.Errorf("shard-init is %q", got)
	}
}

// Package script runs the stories in *.txtar: what a person types, and what the real programs answer.
package script

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/useshards/shard/internal/testenv"
)

// TestScripts runs every story on every provider that works on this host. In a story `shard` is the command line for a
// daemon that has the image busybox, and $P is the provider, which also serves as a prefix of names; a line after [pauses] is for
// those that can pause.
func TestScripts(t *testing.T) {
	d := testenv.Start(t, testenv.Options{})
	d.Import("busybox", testenv.Busybox(t))
	bin := wrap(t, d)
	d.EachProvider(t, func(t *testing.T, _ *testenv.Daemon, provider string) {
		caps, err := d.Client().Capabilities(t.Context(), provider)
		if err != nil {
			t.Fatal(err)
		}
		testscript.Run(t, testscript.Params{
			Dir: ".",
			Setup: func(env *testscript.Env) error {
				env.Setenv("P", provider)
				env.Setenv("PATH", bin+string(os.PathListSeparator)+env.Getenv("PATH"))
				return nil
			},
			Condition: func(word string) (bool, error) {
				if word != "pauses" {
					return false, fmt.Errorf("unknown condition %s", word)
				}
				return caps.Pause, nil
			},
			Cmds:               map[string]func(*testscript.TestScript, bool, []string){"exitcode": exitcode},
			RequireUniqueNames: true,
		})
	})
}

// wrap makes a directory with a `shard` that talks to the daemon.
func wrap(t *testing.T, d *testenv.Daemon) string {
	t.Helper()
	dir := t.TempDir()
	text := fmt.Sprintf("#!/bin/sh\nexec %s --root %s \"$@\"\n", filepath.Join(testenv.Bin(t), "shard"), d.Root)
	if err := os.WriteFile(filepath.Join(dir, "shard"), []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}

// exitcode runs a program, which must end with exactly this code: exitcode 7 shard exec box sh -c 'exit 7'.
func exitcode(ts *testscript.TestScript, neg bool, args []string) {
	if neg || len(args) < 2 {
		ts.Fatalf("usage: exitcode N program [arg…]")
	}
	want, err := strconv.Atoi(args[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(args[1], args[2:]...); err != nil {
		exit, ok := errors.AsType[*exec.ExitError](err)
		if !ok {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d", got, want)
	}
}

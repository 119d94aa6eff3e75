// Package script runs the stories in *.txtar: what a person types, and what the real programs answer.
package script

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"

	"github.com/useshards/shard/internal/testenv"
)

// Run runs every story on the providers that are named, else on every one that works on this host. In a story `shard` is the
// command line that is given, for this daemon, which has the image busybox, and $P is the provider, which also serves as a prefix
// of names; a line after [pauses] is for those that can pause.
func Run(t *testing.T, d *testenv.Daemon, shard []string, providers ...string) {
	t.Helper()
	d.Import("busybox", testenv.Busybox(t))
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "shard"), []byte("#!/bin/sh\nexec "+strings.Join(shard, " ")+" \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	d.EachProvider(t, func(t *testing.T, _ *testenv.Daemon, provider string) {
		caps, err := d.Client().Capabilities(t.Context(), provider)
		if err != nil {
			t.Fatal(err)
		}
		testscript.Run(t, testscript.Params{
			Dir: filepath.Join(testenv.Module(), "test", "script"),
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
	}, providers...)
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

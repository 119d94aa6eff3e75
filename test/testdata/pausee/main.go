// Command pausee makes states of a program that a pause must bear, or refuse, and says what became of them.
//
// "pausee STATE..." returns when the states stand, in processes that go on. Such a process looks at a state when the file
// /check-STATE is there, writes "ok" or what is wrong to /result-STATE, and ends with its last one.
package main

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// state makes one and returns how to look at it. arg is what stands behind a colon.
type state func(arg string) (check func() error)

var all = map[string]state{}

// making is the state that is being made.
var making string

func must[T any](v T, err error) T {
	if err != nil {
		fmt.Printf("%s cannot be made: %v\n", making, err)
		os.Exit(1)
	}
	return v
}

func do(err error) { must(0, err) }

func main() {
	for _, states := range []map[string]state{fileStates, programStates, socketStates} {
		maps.Copy(all, states)
	}
	if len(os.Args) > 2 && os.Args[1] == "hold" {
		hold(os.Args[2:])
		return
	}
	var together []string
	code := 0
	run := func(names ...string) {
		if err := start(names); err != nil {
			fmt.Printf("%v: %v\n", names, err)
			code = 1
		}
	}
	for _, name := range os.Args[1:] {
		if kind, _, _ := strings.Cut(name, ":"); alone[kind] || strings.HasPrefix(name, "ns") {
			run(name)
		} else {
			together = append(together, name)
		}
	}
	if len(together) > 0 {
		run(together...)
	}
	os.Exit(code)
}

// alone are the states that concern the whole process.
var alone = map[string]bool{"cwdgone": true, "deep": true, "deepdeleted": true, "mode0user": true, "seccomp": true, "timers": true, "stopped": true, "zombies": true, "threads": true}

// start starts a process with states, and returns when they stand. Those whose name begins with ns are root in namespaces of
// their own.
func start(names []string) error {
	cmd := exec.Command("/proc/self/exe", append([]string{"hold"}, names...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if strings.HasPrefix(names[0], "ns") {
		cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWUSER | unix.CLONE_NEWNS | unix.CLONE_NEWNET | unix.CLONE_NEWIPC | unix.CLONE_NEWUTS | unix.CLONE_NEWPID
		cmd.SysProcAttr.UidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
		cmd.SysProcAttr.GidMappings = []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}}
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if cmd.Stderr, err = os.Create("/err-" + names[0]); err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	b := make([]byte, 1000)
	n, _ := out.Read(b)
	if said := strings.TrimSpace(string(b[:n])); said != "ready" {
		crash, _ := os.ReadFile("/err-" + names[0])
		return fmt.Errorf("%s %.2000s", said, crash)
	}
	return nil
}

func hold(names []string) {
	do(os.MkdirAll("/s", 0o777))
	checks := map[string]func() error{}
	for _, name := range names {
		making = name
		kind, arg, _ := strings.Cut(name, ":")
		build, known := all[kind]
		if !known {
			do(errors.New("there is no such state"))
		}
		checks[name] = build(arg)
	}
	fmt.Println("ready")
	_ = os.Stdout.Close()
	for ; len(checks) > 0; time.Sleep(20 * time.Millisecond) {
		for name, check := range checks {
			if exists("/check-" + name) {
				tell(name, check)
				delete(checks, name)
			}
		}
	}
}

// tell looks at a state, and tells.
func tell(name string, check func() error) {
	say := "ok"
	done := make(chan error, 1)
	go func() { done <- check() }()
	select {
	case err := <-done:
		if err != nil {
			say = err.Error()
		}
	case <-time.After(20 * time.Second):
		say = "the check hangs"
	}
	_ = os.WriteFile("/result-"+name+".new", []byte(say), 0o644)
	_ = os.Rename("/result-"+name+".new", "/result-"+name)
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

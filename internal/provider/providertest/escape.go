//go:build linux

package providertest

import (
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// descriptors: a command gets three, and none of those it names as its working directory leads to the host
// (CVE-2024-21626).
func descriptors(t *testing.T, p provider.Provider, env *Env) {
	b := start(t, p, env.Spec(t, shard.Resources{}))
	for _, user := range []string{"", "dev"} {
		// The shell's glob opens one more for the directory itself, which is gone when ls looks.
		r := b.run(guest.ExecSpec{User: user, Argv: guest.Strings{"sh", "-c", "for f in /proc/self/fd/*; do [ -e $f ] && echo ${f##*/}; done"}}, nil)
		if r.out != "0\n1\n2\n" {
			t.Errorf("user %q has the descriptors %q %q", user, r.out, r.err)
		}
	}
	// PID 1's own are not to be reached, by root either.
	if got := b.sh("for f in /proc/1/fd/*; do readlink $f; done 2>/dev/null | wc -l"); got != "0" {
		t.Errorf("%s descriptors of PID 1 are visible", got)
	}
	b.sh("ln -s /proc/self/fd/7 /link")
	const climb = "cd .. && cd .. && cd .. && cd .. && cd .. && cd .. && cd .. && cd .. && cd .. && cd .. && [ -e etc/passwd ] && [ -e bin/busybox ] && [ ! -e lib ]"
	dirs := []string{"/link", "/proc/1/cwd", "/proc/1/root"}
	for n := 3; n <= 60; n++ {
		dirs = append(dirs, "/proc/self/fd/"+strconv.Itoa(n))
	}
	for _, dir := range dirs {
		_, sink, err := b.begin(guest.ExecSpec{Workdir: guest.Path(dir), Argv: guest.Strings{"sh", "-c", climb}})
		if err != nil {
			continue // refused
		}
		if r := sink.wait(t); r.exit != (guest.Exit{}) {
			t.Errorf("from %s one climbs to something that is not the machine's root: %+v %s", dir, r.exit, r.err)
		}
	}
}

// views are what a guest must not see or change of the host: each script fails, or prints nothing.
// With own it does not count for a guest with a kernel of its own, whose devices and control groups are nobody else's.
var views = []struct {
	name, script string
	own          bool
}{
	{name: "kernel memory", script: "head -c 16 /proc/kcore"},
	{name: "sysrq", script: "echo h > /proc/sysrq-trigger && echo done"},
	{name: "firmware", script: "ls -A /sys/firmware"},
	{name: "memory device", script: "ls /dev/mem /dev/kmem /dev/port"},
	{name: "memory device of its own", script: "mknod /m c 1 1 && head -c 1 /m | wc -c"},
	{name: "kernel messages device of its own", script: "mknod /k c 1 11 && head -c 1 /k | wc -c"},
	{name: "block devices", script: "find /dev -type b"},
	{name: "block device of its own", script: "for d in 7:0 8:0 253:0 254:0 259:0; do mknod /b b ${d%:*} ${d#*:} && head -c 1 /b | wc -c | grep 1; rm -f /b; done"},
	{name: "fuse, kvm, tun", script: "ls /dev/fuse /dev/kvm /dev/net/tun", own: true},
	{name: "kernel settings", script: "echo 1 > /proc/sys/kernel/panic && echo done"},
	{name: "core handler", script: "echo x > /proc/sys/kernel/core_pattern && echo done"},
	{name: "scheduler's view of the host", script: "cat /proc/sched_debug /proc/timer_list /proc/keys /proc/latency_stats | grep ."},
	{name: "writable sysfs", script: "touch /sys/kernel/x /sys/x && echo done"},
	{name: "hotplug helper", script: "echo x > /sys/kernel/uevent_helper && echo done"},
	{name: "other control groups", script: "find /sys/fs/cgroup -name 'shard*'"},
	{name: "control group of its own", script: "for d in /sys/fs/cgroup /sys/fs/cgroup/memory; do mkdir $d/x && echo done; done", own: true},
	{name: "sockets", script: "find / -xdev -type s"},
	{name: "a writable agent", script: "echo x > /.shard-init && echo done; rm -f /.shard-init && echo done; umount /.shard-init && echo done"},
	{name: "foreign mounts", script: "cut -d' ' -f2 /proc/mounts | grep -vE '^/(proc|sys|dev)(/|$)|^/$|^/\\.shard-init$|^/etc/(hosts|hostname|resolv\\.conf)$'"},
	{name: "mounts", script: "mount -t tmpfs x /tmp && echo done"},
	{name: "namespaces of PID 1", script: "nsenter -t 1 -m true && echo done"},
	{name: "files of PID 1", script: "cat /proc/1/environ /proc/1/mem | head -c 1"},
}

// trespass tries to reach the host's kernel, files and processes from inside, as root.
func trespass(t *testing.T, p provider.Provider, env *Env) {
	spec := env.Spec(t, shard.Resources{})
	env.Put(t, spec, "trespass", buildTrespass(t))
	b := start(t, p, spec)
	for _, v := range views {
		if v.own && !env.SharedKernel {
			continue
		}
		t.Run(v.name, func(t *testing.T) {
			r := b.in(t).run(guest.ExecSpec{Argv: guest.Strings{"sh", "-c", v.script}}, nil)
			if strings.TrimSpace(r.out) != "" && strings.TrimSpace(r.out) != "0" {
				t.Errorf("%s: printed %.300q %.200q", v.script, r.out, r.err)
			}
		})
	}
	t.Run("kernel log", func(t *testing.T) {
		var host unix.Utsname
		if err := unix.Uname(&host); err != nil {
			t.Fatal(err)
		}
		r := b.in(t).run(guest.ExecSpec{Argv: guest.Strings{"dmesg"}}, nil)
		if strings.Contains(r.out, unix.ByteSliceToString(host.Release[:])) || env.SharedKernel && r.out != "" {
			t.Errorf("dmesg printed %.300q", r.out)
		}
	})
	t.Run("processes", func(t *testing.T) {
		pids := strings.Fields(b.in(t).sh("cd /proc && ls -d [0-9]*"))
		if len(pids) == 0 || len(pids) > 8 || pids[0] != "1" {
			t.Errorf("the guest sees the processes %v", pids)
		}
	})
	t.Run("system calls", func(t *testing.T) {
		for _, user := range []string{"", "dev"} {
			r := b.in(t).run(guest.ExecSpec{User: user, Argv: guest.Strings{"/trespass"}}, nil)
			if r.exit != (guest.Exit{}) {
				t.Fatalf("the trespasser ended with %+v: %s", r.exit, r.err)
			}
			for line := range strings.Lines(r.out) {
				name, outcome, _ := strings.Cut(strings.TrimSpace(line), ": ")
				// A guest with a kernel of its own may do to that what it likes.
				name, own := strings.CutSuffix(name, "*")
				if outcome == "allowed" && (env.SharedKernel || !own) {
					t.Errorf("user %q may %s", user, name)
				}
			}
		}
	})
	t.Run("every system call", func(t *testing.T) {
		r := b.in(t).run(guest.ExecSpec{User: "dev", Argv: guest.Strings{"/trespass", "every"}}, nil)
		if r.exit != (guest.Exit{}) {
			t.Errorf("it ended with %+v: %.300s", r.exit, r.err)
		}
	})
	b.sh("true") // it all did no harm
	t.Run("signals to PID 1", func(t *testing.T) {
		if !env.SharedKernel {
			// Not every kernel shields PID 1 from root's signals, as Linux does. Then root can end its own machine, no more.
			_, _, _ = b.begin(guest.ExecSpec{Argv: guest.Strings{"kill", "-KILL", "1"}})
			b.in(t).ended()
			return
		}
		for _, name := range []string{"TERM", "INT", "HUP", "STOP", "TSTP", "SEGV", "BUS", "ABRT", "QUIT", "ILL", "TRAP", "KILL"} {
			b.in(t).sh("kill -" + name + " 1")
			if got := b.in(t).sh("echo fine"); got != "fine" {
				t.Fatalf("after SIG%s to PID 1 the machine says %q", name, got)
			}
		}
	})
}

// buildTrespass compiles the program that tries system calls.
func buildTrespass(t testing.TB) []byte {
	t.Helper()
	_, file, _, _ := runtime.Caller(0)
	out := filepath.Join(t.TempDir(), "trespass")
	cmd := exec.CommandContext(t.Context(), "go", "build", "-trimpath", "-o", out, "./testdata/trespass")
	cmd.Dir = filepath.Dir(file)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
	if text, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("build the trespasser: %v\n%s", err, text)
	}
	b, err := os.ReadFile(out)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

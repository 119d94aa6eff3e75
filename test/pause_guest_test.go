package test

import (
	"bytes"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// pausee makes states of programs; see its source. It is built once.
var pausee = sync.OnceValues(func() ([]byte, error) {
	bin := filepath.Join(testenv.Module(), "build", "test-bin", "pausee")
	cmd := exec.Command("go", "build", "-trimpath", "-ldflags=-s -w", "-o", bin, "./test/testdata/pausee")
	cmd.Dir, cmd.Env = testenv.Module(), append(os.Environ(), "CGO_ENABLED=0")
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%w: %s", err, out)
	}
	return os.ReadFile(bin)
})

// pauseeBox is a sandbox with pausee in it.
func pauseeBox(t *testing.T, d *testenv.Daemon, provider string, options ...string) string {
	t.Helper()
	body, err := pausee()
	if err != nil {
		t.Fatal(err)
	}
	id := box(t, d, provider, options...)
	if r := d.Feed(bytes.NewReader(body), "exec", "-i", id, "sh", "-c", "cat >/bin/pausee; chmod 755 /bin/pausee"); r.Code != 0 {
		t.Fatalf("put the program into the sandbox: %s", r.Stderr)
	}
	return id
}

// makes makes states in a sandbox.
func makes(t *testing.T, d *testenv.Daemon, id string, states ...string) {
	t.Helper()
	if r := d.Shard(append([]string{"exec", id, "pausee"}, states...)...); r.Code != 0 {
		t.Fatalf("make %v: exit code %d\n%s%s", states, r.Code, r.Stdout, r.Stderr)
	}
}

// stand has states looked at, which must be as they were made, and ends them.
func stand(t *testing.T, d *testenv.Daemon, id string, states ...string) {
	t.Helper()
	list := strings.Join(states, " ")
	sh(t, d, id, "for s in "+list+"; do touch /check-$s; done")
	left := states
	testenv.Eventually(t, "the states are looked at", func() (bool, string) {
		found := sh(t, d, id, "cd /; for s in "+strings.Join(left, " ")+"; do echo $s $([ -e result-$s ] && cat result-$s); done")
		left = nil
		for line := range strings.Lines(found) {
			switch state, result, done := strings.Cut(strings.TrimSpace(line), " "); {
			case !done:
				left = append(left, state)
			case result != "ok":
				t.Errorf("%s: %s", state, result)
			}
		}
		return len(left) == 0, strings.Join(left, " ")
	})
}

// TestPauseStates: whatever the programs in a sandbox are at, it goes on behind a resume as it was, or the pause is refused with
// the reason and harms nothing.
func TestPauseStates(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := pauseeBox(t, d, provider)
		var good []string
		for _, states := range []string{ // each line in one process, but for those that need their own
			"deleted deletedsize:8 replaced renamedover renamed deleteddir deletedroparent mode0 linkmoved hardlinkboth hardlinkother deletedmode0 deletedpath",
			"longpath names direct append locks openmany:50 writing churn fifo fifoblocked cwdgone mode0user deepdeleted deep:350",
			"memfd memfdexec shmfile shared shareddeleted sharedpast privatefile exegone sparse hugemap mem:8 maps:300",
			"inotify inotifydeleted epoll signalfd timers stopped zombies procs:5 threads:20 seccomp nsmounts",
			"forking vfork ptrace futex chroot pty sysv mqueue procfd pidfd aio pipes",
			"unixbound unixunlinked unixdgram unixabstract inflight tcploop tcploop6 tcpown tcphalf attach",
			"tcptimewait tcpclosewait tcpbacklog tcpbacklogfull tcpfull tcpbusy synsent udp multicast raw ping netlink bindtodevice reuseport tcpbound tcpmany:20",
		} {
			makes(t, d, id, strings.Fields(states)...)
			good = append(good, strings.Fields(states)...)
		}
		for _, bad := range []struct{ state, reason string }{
			{"deletedsize:1000000", "deleted files of more than 16 MiB"},
			{"deletedfull:17", "deleted files of more than 16 MiB"},
			{"hardlink", "another name"},
			{"longreplaced", "longer than 219 bytes"},
			{"deletedsymlink", "neither a file nor a directory"},
			{"deletedfifo", "neither a file nor a directory"},
			{"nsudp", "a network namespace of its own"},
			{"nslisten", "a network namespace of its own"},
			{"nstcp", "a network namespace of its own"},
		} {
			makes(t, d, id, bad.state)
			refused(t, d.Shard("pause", id), "could not be paused and runs on", bad.reason)
			if s := state(t, d, id); s != shard.StateRunning {
				t.Fatalf("%s: behind a refused pause the sandbox is %s", bad.state, s)
			}
			stand(t, d, id, bad.state)
		}
		pause(t, c, id)
		resume(t, c, id)
		stand(t, d, id, good...)
	})
}

// TestPauseFull: a sandbox that has hardly any memory left is paused and resumed like others, although the runtime needs much for
// that; afterwards it has the bounds that it had.
func TestPauseFull(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := pauseeBox(t, d, provider, "--memory", "128MiB")
		bounds := groupBounds(t, id)
		bounded := func() { // the sentry gives memory back by and by
			t.Helper()
			for end := time.Now().Add(4 * time.Minute); ; time.Sleep(100 * time.Millisecond) {
				now := groupBounds(t, id)
				if now == bounds {
					return
				}
				if time.Now().After(end) {
					t.Fatalf("the bounds were\n%s\nand are\n%s", bounds, now)
				}
			}
		}
		states := []string{"mem:100", "deletedfull:12"}
		makes(t, d, id, states...)
		pause(t, c, id)
		resume(t, c, id)
		bounded()
		stand(t, d, id, states...)
		makes(t, d, id, "deletedfifo")
		refused(t, d.Shard("pause", id), "runs on")
		bounded()
	})
}

// groupBounds are all that bounds a sandbox's control groups.
func groupBounds(t *testing.T, id string) string {
	t.Helper()
	var all strings.Builder
	for _, name := range []string{"memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.soft_limit_in_bytes", "memory.max", "memory.high", "memory.swap.max", "memory.oom.group",
		"cpu.cfs_quota_us", "cpu.cfs_period_us", "cpu.max", "cpu.weight", "cpu.shares", "pids.max"} {
		files, _ := filepath.Glob("/sys/fs/cgroup/*/" + id + "/" + name)
		more, _ := filepath.Glob("/sys/fs/cgroup/*/*/" + id + "/" + name)
		for _, file := range append(files, more...) {
			if text, err := os.ReadFile(file); err == nil {
				fmt.Fprintln(&all, name, strings.TrimSpace(string(text)))
			}
		}
	}
	if !strings.Contains(all.String(), "pids.max") {
		t.Fatalf("sandbox %s has no bounds: %q", id, all.String())
	}
	return all.String()
}

// TestPauseWalls: what keeps a sandbox in is the same behind a resume as behind its start, on the host and inside.
func TestPauseWalls(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		d.Must("policy", "create", "--allow", "web.lab.test tcp:80", "walls-"+provider)
		id := pauseeBox(t, d, provider, "--memory", "256MiB", "--vcpus", "1", "--policy", "walls-"+provider)
		before := walls(t, d, id)
		for round := range 2 {
			pause(t, c, id)
			resume(t, c, id)
			for what, is := range walls(t, d, id) {
				was, now := strings.Split(before[what], "\n"), strings.Split(is, "\n")
				gone := slices.DeleteFunc(slices.Clone(was), func(line string) bool { return slices.Contains(now, line) })
				came := slices.DeleteFunc(slices.Clone(now), func(line string) bool { return slices.Contains(was, line) })
				if is != before[what] {
					t.Errorf("round %d: of %s (%d lines) is gone %q, and came %q", round, what, len(was), gone, came)
				}
			}
		}
		makes(t, d, id, "attach")
		stand(t, d, id, "attach")
	})
}

// walls are, by name, all that bounds a sandbox: its processes on the host, their groups, the firewall, and what root in it sees.
func walls(t *testing.T, d *testenv.Daemon, id string) map[string]string {
	t.Helper()
	all := map[string]string{"control groups": groupBounds(t, id)}
	own := func(name string) string {
		to, _ := os.Readlink("/proc/self/ns/" + name)
		return to
	}
	for _, pid := range testenv.CgroupProcesses("/" + id) {
		proc := "/proc/" + strconv.Itoa(pid)
		argv, _ := os.ReadFile(proc + "/cmdline")
		role, _, _ := strings.Cut(string(argv), "\x00")
		if !strings.HasPrefix(role, "runsc-") { // processes of the guest come and go
			continue
		}
		if all[role] != "" {
			t.Errorf("two processes %s", role)
		}
		var about strings.Builder
		status, _ := os.ReadFile(proc + "/status")
		for line := range strings.Lines(string(status)) {
			switch key, _, _ := strings.Cut(line, ":"); key {
			case "Uid", "Gid", "Groups", "CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Seccomp_filters", "Umask":
				about.WriteString(line)
			}
		}
		for _, name := range []string{"limits", "oom_score_adj", "cgroup"} {
			text, _ := os.ReadFile(proc + "/" + name)
			about.Write(text)
		}
		for _, ns := range []string{"cgroup", "ipc", "mnt", "net", "pid", "user", "uts"} {
			to, err := os.Readlink(proc + "/ns/" + ns)
			fmt.Fprintln(&about, ns, to == own(ns), err)
		}
		mounts, _ := os.ReadFile(proc + "/mounts")
		about.WriteString(regexp.MustCompile(`/fd/\d+|,uuid=on`).ReplaceAllString(string(mounts), "")) // uuid: of a new root
		all[role] = about.String()
	}
	if len(all) != 3 {
		t.Fatalf("processes of the sandbox: %v", all)
	}
	rules, err := d.Lab().Command("nft", "--stateless", "list", "ruleset").Output()
	if err != nil {
		t.Fatal(err)
	}
	lines := slices.Sorted(strings.Lines(regexp.MustCompile(`expires \S+|policy_\w{4}_\d+`).ReplaceAllString(string(rules), ""))) // the number is that of the time it was applied
	all["firewall"] = strings.Join(lines, "")
	all["inside"] = sh(t, d, id, `exec 2>&1
		grep -E '^(Uid|Gid|Groups|Cap|NoNewPrivs|Seccomp)' /proc/self/status; grep -v ' /proc/[0-9]' /proc/mounts
		grep MemTotal /proc/meminfo; nproc; grep -c processor /proc/cpuinfo; ulimit -a; hostname; cat /etc/resolv.conf /etc/hosts
		ip -o addr | sed 's/valid_lft.*//'; ip route; ip -6 route; ip link | grep -o 'link/.*'
		for f in /proc/acpi /proc/kcore /proc/keys /proc/timer_list /proc/sysrq-trigger /sys/firmware /proc/sys/kernel/hostname; do ls -ld $f; head -c 1 $f | wc -c; done | sed 's/[A-Z][a-z][a-z] *[0-9]* [0-9:]*//'
		echo x >/proc/sys/kernel/hostname; echo x >/sys/x; mount -t tmpfs none /mnt; chroot / true; mknod /dev/sdx b 8 0; head -c 1 /dev/sdx; rm -f /dev/sdx
		kill -TERM 1; kill -INT 1; kill -HUP 1; ls /proc/1/fd/; cat /proc/1/environ; head -c 1 /proc/1/mem; ls -la /.shard-init | cut -c1-10; echo x >/.shard-init
		wget -q -T 5 -O - http://denied.lab.test/; nc -w 2 198.18.10.7 7 </dev/null; true`)
	return all
}

// TestPauseOften: many pauses, and many that fail, leave nothing behind: no descriptor of daemon, sentry or gofer, no file, and
// what is saved does not grow.
func TestPauseOften(t *testing.T) {
	t.Parallel()
	d := start(t)
	eachPausing(t, d, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		id := pauseeBox(t, d, provider)
		makes(t, d, id, "tcpbusy", "deleted", "threads:20")
		dir := filepath.Join(d.Root, "sandboxes", id)
		count := func() (now map[string]int) {
			now = map[string]int{"files": len(search(t, dir, ""))}
			for _, pid := range append(testenv.CgroupProcesses("/"+id), d.PID()) {
				argv, _ := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/cmdline")
				role, _, _ := strings.Cut(string(argv), "\x00")
				if fds, err := os.ReadDir("/proc/" + strconv.Itoa(pid) + "/fd"); err == nil && (strings.HasPrefix(role, "runsc-") || pid == d.PID()) {
					now[role] = len(fds)
				}
			}
			return now
		}
		const rounds, slack = 6, 6 // what daemon and guest are just at
		var first map[string]int
		var size int64
		for round := range rounds {
			pause(t, c, id)
			now := diskUse(filepath.Join(dir, "checkpoint"))
			if round == 1 {
				size = now
			}
			if round > 1 && now > size+size/2+4<<20 {
				t.Errorf("round %d: %d bytes are saved, and %d at first", round, now, size)
			}
			resume(t, c, id)
			if round == 1 {
				first = count()
			}
		}
		more := func(what string) {
			testenv.Eventually(t, "no more is open than at first, "+what, func() (bool, string) {
				now := count()
				for of, n := range now {
					if n > first[of]+slack {
						return false, fmt.Sprintf("%v, and at first %v", now, first)
					}
				}
				return true, ""
			})
		}
		more("after many pauses")
		makes(t, d, id, "deletedfifo") // of which the sentry finds out in the middle of a save
		for round := range slack + 2 {
			refused(t, d.Shard("pause", id), "runs on")
			if round == 0 {
				first = count() // with what that program holds
			}
		}
		more("after many that were refused")
		stand(t, d, id, "tcpbusy", "deleted", "threads:20", "deletedfifo")
	})
}

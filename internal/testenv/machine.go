package testenv

import (
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// Machine is a host of its own as far as its programs can tell: systemd is its PID 1, in namespaces of its own, in the
// lab's host network. Its root is this machine's as it was at boot, under a layer in memory that takes what it writes and goes
// with it; /run, /dev and the control groups are its own. The kernel's settings it may read but not change.
type Machine struct {
	t     testing.TB
	lab   *Lab
	dir   string // holds the scripts, the mount point and /var/lib/shard
	mark  string // names its control groups on this host
	outer *exec.Cmd
	done  chan struct{}
}

// machineScript makes the root and boots it until it is switched off. It runs as PID 1 of the machine's outer
// namespaces, so that everything ends with it. $1 is the machine's directory.
const machineScript = `set -eu
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$1/m"
mkdir "$1/m/upper" "$1/m/work" "$1/m/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/m/upper,workdir=$1/m/work" overlay "$1/m/root"
cd "$1/m/root"
rm -rf etc/systemd/system usr/local/bin/shard usr/local/libexec/shard etc/shard
mkdir -p etc/systemd/system var/lib/shard
mount --bind "$1/data" var/lib/shard
# Nothing of this machine's services: units that a bare system pulls in, each for a device or a file system that is not here.
for unit in $(ls lib/systemd/system lib/systemd/system/*.wants); do
	case $unit in
	systemd-journald.service|systemd-journald.socket|systemd-journald-dev-log.socket|systemd-reboot.service|systemd-poweroff.service) ;;
	*.service|*.socket|*.timer|*.path|*.automount|*.mount) ln -sf /dev/null "etc/systemd/system/$unit" ;;
	esac
done
: >etc/fstab
: >etc/machine-id
echo machine >etc/hostname
cat >etc/systemd/system/default.target <<'UNIT'
[Unit]
Requires=basic.target multi-user.target
After=basic.target multi-user.target
AllowIsolate=yes
UNIT
code=129
while [ $code = 129 ]; do
	code=0
	unshare --pid --mount --fork --kill-child sh "$1/boot" "$1" || code=$?
done
exit $code
`

// bootScript mounts what is new at each boot and becomes systemd.
const bootScript = `set -eu
cd "$1/m/root"
mount -t proc proc proc
mount --bind proc/sys proc/sys
mount -o remount,bind,ro proc/sys
mount --bind proc/sys/net proc/sys/net
mount -o remount,bind,rw proc/sys/net
mount -t sysfs sysfs sys
mount -t tmpfs -o mode=755 tmpfs dev
mount -t tmpfs -o mode=755 tmpfs run
mkdir dev/pts dev/shm dev/net
for n in null zero full random urandom tty loop-control net/tun kvm; do
	[ ! -c "/dev/$n" ] || mknod -m 666 "dev/$n" c $(stat -c '0x%t 0x%T' "/dev/$n")
done
# Loop devices are the machine's and everybody's: a node for each that the kernel may hand out.
i=0; while [ $i -lt 256 ]; do mknod "dev/loop$i" b 7 $i; i=$((i+1)); done
mount -t devpts -o newinstance,ptmxmode=0666,mode=620,gid=5 devpts dev/pts
ln -s pts/ptmx dev/ptmx
ln -s /proc/self/fd dev/fd
mount -t tmpfs -o mode=755 tmpfs sys/fs/cgroup
while read -r name type options; do
	mkdir "sys/fs/cgroup/$name"
	mount -t "$type" -o "$options" cgroup "sys/fs/cgroup/$name"
done <"$1/cgroups"
mkdir -p mnt
pivot_root . mnt
umount -l /mnt
mount --make-rshared / # as at every boot: what a helper of systemd mounts must reach services
exec env -i container=shard-test PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
	/lib/systemd/systemd --system --log-target=console --show-status=no </dev/null
`

// Boot starts a machine and waits until its systemd has started everything. It is gone, and everything in it, when the
// test ends, however that is.
func Boot(t testing.TB, l *Lab) *Machine {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("only root can boot a machine in namespaces: run as root")
	}
	for _, program := range []string{"/lib/systemd/systemd", "/usr/bin/systemctl"} {
		if _, err := os.Stat(program); err != nil {
			t.Skipf("systemd is not installed here (make deps installs it): %v", err)
		}
	}
	dir, err := os.MkdirTemp("/tmp", "sysd")
	if err != nil {
		t.Fatal(err)
	}
	m := &Machine{t: t, lab: l, dir: dir, mark: filepath.Base(dir)}
	t.Cleanup(m.off)
	for name, text := range map[string]string{"machine": machineScript, "boot": bootScript, "cgroups": m.cgroups()} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"m", "data"} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
	}
	log, err := os.Create(filepath.Join(dir, "console"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	// First into the groups, which become the roots of what the new cgroup namespace sees.
	m.outer = l.Command("sh", "-c", `for g in /sys/fs/cgroup/*/`+m.mark+`; do echo 0 >"$g/cgroup.procs"; done
		exec unshare --pid --mount --uts --ipc --cgroup --fork --kill-child sh "$0/machine" "$0"`, dir)
	m.outer.Stdout, m.outer.Stderr = log, log
	m.outer.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := m.outer.Start(); err != nil {
		t.Fatal(err)
	}
	m.done = make(chan struct{})
	go func() { _ = m.outer.Wait(); close(m.done) }()
	m.awaitBoot(0)
	return m
}

// cgroups makes the machine's groups on this host, and lists for the boot script what to mount where. A host with the
// unified hierarchy alone has one line.
func (m *Machine) cgroups() string {
	var list strings.Builder
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		m.t.Fatal(err)
	}
	for line := range strings.Lines(string(mounts)) {
		before, after, _ := strings.Cut(strings.TrimSpace(line), " - ")
		f, g := strings.Fields(before), strings.Fields(after)
		at := f[4]
		if filepath.Dir(at) != "/sys/fs/cgroup" || len(g) < 3 || g[0] != "cgroup" && g[0] != "cgroup2" {
			continue
		}
		group := filepath.Join(at, m.mark)
		if err := os.Mkdir(group, 0o755); err != nil {
			m.t.Skipf("this host's control groups cannot be parted: %v", err)
		}
		for _, name := range []string{"cpuset.cpus", "cpuset.mems"} { // a new group of v1 has none, and takes no process
			if data, err := os.ReadFile(filepath.Join(at, name)); err == nil {
				_ = os.WriteFile(filepath.Join(group, name), data, 0o600)
			}
		}
		options := "rw"
		if g[0] == "cgroup" {
			options = strings.TrimPrefix(strings.TrimPrefix(g[2], "rw"), ",")
			if strings.HasPrefix(options, "name=") {
				options = "none," + options
			}
		}
		fmt.Fprintln(&list, filepath.Base(at), g[0], options)
	}
	if list.Len() == 0 {
		m.t.Skip("this host mounts no control groups below /sys/fs/cgroup as version 1 does: the machine's cannot be made beside them")
	}
	return list.String()
}

// init is the machine's PID 1 as this host numbers it, 0 while it has none.
func (m *Machine) init() int {
	for _, pid := range CgroupProcesses(m.mark) {
		if exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid)); err != nil || filepath.Base(exe) != "systemd" {
			continue
		}
		status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
		for line := range strings.Lines(string(status)) {
			if f := strings.Fields(line); len(f) > 1 && f[0] == "NSpid:" && f[len(f)-1] == "1" {
				return pid
			}
		}
	}
	return 0
}

func (m *Machine) awaitBoot(before int) {
	m.t.Helper()
	Eventually(m.t, "the machine boots", func() (bool, string) {
		select {
		case <-m.done:
			m.t.Fatalf("the machine did not boot:\n%s", m.console())
		default:
		}
		if pid := m.init(); pid == 0 || pid == before {
			return false, fmt.Sprintf("no PID 1, but %v\n%s", Observe(m.mark), m.console())
		}
		out, _ := m.Command("systemctl", "is-system-running").CombinedOutput()
		state := strings.TrimSpace(string(out))
		return state == "running" || state == "degraded", state + "\n" + m.console()
	})
}

func (m *Machine) console() string {
	data, _ := os.ReadFile(filepath.Join(m.dir, "console"))
	return string(data)
}

// Reboot switches the machine off and on again, as its own systemctl does, and waits until it is up.
func (m *Machine) Reboot() {
	m.t.Helper()
	before := m.init()
	m.Sh("systemctl reboot")
	m.awaitBoot(before)
}

// Command is a program to run in the machine, outside all of its services.
func (m *Machine) Command(name string, args ...string) *exec.Cmd {
	pid := strconv.Itoa(m.init())
	cmd := exec.Command("nsenter", append([]string{"--target", pid, "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup", "--root", "--wd", "--", name}, args...)...)
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME=/root", "LANG=C.UTF-8"}
	return cmd
}

// Sh runs a script of the shell in the machine to its end.
func (m *Machine) Sh(script string) Result {
	m.t.Helper()
	return Run(m.t, m.Command("sh", "-c", script))
}

// Must is Sh of a script that must succeed; it returns what that printed without the last newline.
func (m *Machine) Must(script string) string {
	m.t.Helper()
	r := m.Sh(script)
	if r.Code != 0 {
		m.t.Fatalf("in the machine: %s: exit code %d\nstdout: %s\nstderr: %s", script, r.Code, r.Stdout, r.Stderr)
	}
	return strings.TrimSuffix(r.Stdout, "\n")
}

// Changed are the files that are not as they were in this machine's root, without what is below /run and the data
// directory.
func (m *Machine) Changed() map[string]bool {
	m.t.Helper()
	out := make(map[string]bool)
	// The outer namespaces' init is the only child of unshare.
	children, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%[1]d/children", m.outer.Process.Pid))
	if err != nil {
		m.t.Fatal(err)
	}
	upper := filepath.Join("/proc", strings.TrimSpace(string(children)), "root", m.dir, "m/upper")
	err = filepath.WalkDir(upper, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if rel, _ := filepath.Rel(upper, path); !d.IsDir() {
			out["/"+rel] = true
		}
		return nil
	})
	if err != nil {
		m.t.Fatal(err)
	}
	return out
}

// off ends the machine and takes away what it had on this host.
func (m *Machine) off() {
	if m.t.Failed() {
		m.t.Logf("the machine's console:\n%s", m.console())
		if m.init() != 0 {
			out, _ := m.Command("timeout", "30", "journalctl", "--no-pager", "-q", "-n", "80").CombinedOutput()
			m.t.Logf("the end of its journal:\n%s", out)
		}
	}
	if m.outer != nil && m.outer.Process != nil {
		_ = m.outer.Process.Kill() // and with it the outer PID 1, and with that everything
		<-m.done
	}
	var left Host
	for deadline := time.Now().Add(patience); ; time.Sleep(50 * time.Millisecond) {
		left = Observe(m.mark)
		if len(left.Processes)+len(left.Loops)+len(left.Mounts) == 0 || time.Now().After(deadline) {
			break
		}
	}
	cgroups := Host{Cgroups: left.Cgroups}
	cgroups.clear()
	if left.Cgroups = Observe(m.mark).Cgroups; !left.Empty() {
		m.t.Errorf("left on the host after the machine was switched off:\n%s", left)
	}
	if err := os.RemoveAll(m.dir); err != nil {
		m.t.Error(err)
	}
}

// Package hostcheck looks at a host and says what of it sandboxes need, what is wrong, and what to do. It changes nothing,
// needs no daemon, and knows nothing of shard's other parts; as root it sees more.
package hostcheck

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Status is how a check came out.
type Status string

// A host with OK and Warn alone can run sandboxes.
const (
	OK   Status = "ok"
	Warn Status = "warn"
	Fail Status = "fail"
)

// Check is one look at the host. Remedy is what to do, empty when all is well.
type Check struct {
	Name   string `json:"name"`
	Status Status `json:"status"`
	Found  string `json:"found"`
	Remedy string `json:"remedy,omitempty"`
}

// Options say what to look at.
type Options struct {
	// Root is the data directory, which need not be there.
	Root string
	// Tree is where the host's /proc, /sys, /dev, /etc and /run are; "" is /. Tests look at made-up hosts.
	Tree string
}

type host struct {
	Options
	euid int
}

// Run makes every check. None takes longer than a few seconds.
func Run(ctx context.Context, o Options) []Check {
	h := &host{Options: o, euid: os.Geteuid()}
	checks := []func(context.Context) Check{h.root, h.kernel, h.overlay, h.loop, h.ext4, h.namespaces, h.network, h.forwarding, h.cgroups,
		h.kvm, h.disk, h.inotify, h.clock, h.dns, h.ipv6, h.systemd, h.group}
	out := make([]Check, len(checks))
	for i, check := range checks {
		out[i] = check(ctx)
	}
	return out
}

func ok(name, format string, args ...any) Check {
	return Check{Name: name, Status: OK, Found: fmt.Sprintf(format, args...)}
}

func warn(name, remedy, format string, args ...any) Check {
	return Check{name, Warn, fmt.Sprintf(format, args...), remedy}
}

func fail(name, remedy, format string, args ...any) Check {
	return Check{name, Fail, fmt.Sprintf(format, args...), remedy}
}

func (h *host) path(p string) string { return filepath.Join("/", h.Tree, p) }

// text is a small file's, without space around it; "" when it cannot be read.
func (h *host) text(p string) string {
	data, err := os.ReadFile(h.path(p))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(data))
}

func (h *host) exists(p string) bool {
	_, err := os.Stat(h.path(p))
	return err == nil
}

func (h *host) root(context.Context) Check {
	if h.euid == 0 {
		return ok("root access", "this is root")
	}
	if path := h.program("sudo"); path != "" {
		return ok("root access", "%s", path)
	}
	return warn("root access", "become root, or install sudo", "this is not root, and there is no sudo")
}

// program finds a program where root would; a user's PATH often lacks sbin.
func (h *host) program(name string) string {
	for _, dir := range append(filepath.SplitList(os.Getenv("PATH")), "/usr/local/sbin", "/usr/sbin", "/sbin", "/usr/bin", "/bin") {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(h.path(path)); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

func (h *host) kernel(context.Context) Check {
	release := h.text("/proc/sys/kernel/osrelease")
	var major, minor int
	if _, err := fmt.Sscanf(release, "%d.%d", &major, &minor); err != nil {
		return warn("kernel", "", "release %q", release)
	}
	if major < 5 || major == 5 && minor < 4 {
		return fail("kernel", "run Linux 5.4 or later", "Linux %s", release)
	}
	return ok("kernel", "Linux %s", release)
}

// filesystem says whether the kernel has a file system, or has a module of it to load.
func (h *host) filesystem(name string) bool {
	for line := range strings.Lines(h.text("/proc/filesystems")) {
		if fields := strings.Fields(line); len(fields) > 0 && fields[len(fields)-1] == name {
			return true
		}
	}
	return h.module(name)
}

func (h *host) module(name string) bool {
	dir := filepath.Join("/lib/modules", h.text("/proc/sys/kernel/osrelease"))
	for _, list := range []string{"modules.builtin", "modules.dep"} {
		for line := range strings.Lines(h.text(filepath.Join(dir, list))) {
			file, _, _ := strings.Cut(line, ":")
			base, _, _ := strings.Cut(filepath.Base(strings.TrimSpace(file)), ".ko")
			if strings.ReplaceAll(base, "-", "_") == name {
				return true
			}
		}
	}
	return false
}

func (h *host) overlay(context.Context) Check {
	if !h.filesystem("overlay") {
		return fail("overlayfs", "load the kernel module: modprobe overlay", "the kernel does not have it")
	}
	return ok("overlayfs", "there")
}

func (h *host) loop(context.Context) Check {
	if !h.exists("/dev/loop-control") {
		return fail("loop devices", "load the kernel module: modprobe loop (in a container, pass /dev/loop-control and the right to use it)", "there is no /dev/loop-control")
	}
	return ok("loop devices", "there")
}

func (h *host) ext4(context.Context) Check {
	var missing []string
	for _, name := range []string{"mkfs.ext4", "e2fsck"} {
		if h.program(name) == "" {
			missing = append(missing, name)
		}
	}
	switch {
	case len(missing) > 0:
		return fail("ext4", "install the package e2fsprogs", "%s not found", strings.Join(missing, " and "))
	case !h.filesystem("ext4"):
		return fail("ext4", "load the kernel module: modprobe ext4", "the kernel does not have it")
	}
	return ok("ext4", "kernel and tools")
}

func (h *host) namespaces(context.Context) Check {
	var missing []string
	for _, name := range []string{"mnt", "net", "pid", "ipc", "uts"} {
		if _, err := os.Lstat(h.path("/proc/self/ns/" + name)); err != nil {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return fail("namespaces", "run a kernel with namespaces", "the kernel lacks %s", strings.Join(missing, ", "))
	}
	return ok("namespaces", "mnt, net, pid, ipc, uts")
}

func (h *host) network(ctx context.Context) Check {
	const remedy = "load the kernel modules: modprobe -a veth nf_tables nft_chain_nat"
	if h.euid == 0 && h.Tree == "" {
		if what, err := tryNetwork(ctx); err != nil {
			return fail("veth and nftables", remedy, "%s: %v", what, err)
		}
		return ok("veth and nftables", "tried, and they work")
	}
	for _, module := range []string{"veth", "nf_tables"} {
		if !h.exists("/sys/module/"+module) && !h.module(module) {
			return warn("veth and nftables", remedy+"; root can try them out", "no sign of %s", module)
		}
	}
	return ok("veth and nftables", "there")
}

func (h *host) forwarding(context.Context) Check {
	if h.text("/proc/sys/net/ipv4/ip_forward") == "1" {
		return ok("IPv4 forwarding", "on")
	}
	return warn("IPv4 forwarding", "the daemon turns it on when it starts; to have it on for good: net.ipv4.ip_forward=1 in /etc/sysctl.d", "off")
}

func (h *host) cgroups(context.Context) Check {
	need := []string{"cpu", "memory", "pids"}
	version, have := "v1", []string(nil)
	if unified := h.text("/sys/fs/cgroup/cgroup.controllers"); unified != "" {
		version, have = "v2", strings.Fields(unified)
	} else {
		for line := range strings.Lines(h.text("/proc/cgroups")) {
			if f := strings.Fields(line); len(f) == 4 && f[3] == "1" {
				have = append(have, f[0])
			}
		}
	}
	var missing []string
	for _, c := range need {
		if !slices.Contains(have, c) {
			missing = append(missing, c)
		}
	}
	switch {
	case len(missing) > 0:
		return fail("cgroups", "turn the controllers on: boot with systemd.unified_cgroup_hierarchy=1 (and cgroup_enable=memory where memory is off)",
			"%s without %s", version, strings.Join(missing, ", "))
	case version == "v1":
		return ok("cgroups", "v1, with %s", strings.Join(need, ", "))
	}
	return ok("cgroups", "v2, with %s", strings.Join(need, ", "))
}

func (h *host) kvm(context.Context) Check {
	f, err := os.OpenFile(h.path("/dev/kvm"), os.O_RDWR, 0)
	switch {
	case err == nil:
		_ = f.Close()
		return ok("KVM", "/dev/kvm opens")
	case errors.Is(err, os.ErrPermission):
		return warn("KVM", "only providers that run virtual machines need it; root can open it", "this user may not open /dev/kvm")
	}
	return warn("KVM", "only providers that run virtual machines need it: turn virtualization on in the firmware, or nested virtualization in the cloud", "there is no /dev/kvm")
}

// What a sandbox writes and the layers of images take space; less than this is soon gone. In bytes.
const (
	spaceNeeded = 1 << 30
	spaceWanted = 10 << 30
)

func (h *host) disk(context.Context) Check {
	dir := h.path(h.Root)
	for !isDir(dir) && dir != "/" {
		dir = filepath.Dir(dir)
	}
	free, err := freeSpace(dir)
	text := fmt.Sprintf("%.1f GiB free for %s", float64(free)/(1<<30), h.Root)
	const remedy = "free space, or choose another --root"
	switch {
	case err != nil:
		return warn("disk space", remedy, "%s: %v", h.Root, err)
	case free < spaceNeeded:
		return fail("disk space", remedy, "%s", text)
	case free < spaceWanted:
		return warn("disk space", remedy, "%s", text)
	}
	return ok("disk space", "%s", text)
}

func isDir(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.IsDir()
}

func (h *host) inotify(context.Context) Check {
	const instances, watches = 128, 65536
	i, err1 := strconv.Atoi(h.text("/proc/sys/fs/inotify/max_user_instances"))
	w, err2 := strconv.Atoi(h.text("/proc/sys/fs/inotify/max_user_watches"))
	if err1 != nil || err2 != nil {
		return warn("inotify", "run a kernel with inotify", "the kernel does not have it: no sandbox on runc can watch files")
	}
	if i < instances || w < watches {
		return warn("inotify", fmt.Sprintf("in /etc/sysctl.d: fs.inotify.max_user_instances=%d and fs.inotify.max_user_watches=%d", 4*instances, 8*watches),
			"%d instances and %d watches for all sandboxes on runc together", i, w)
	}
	return ok("inotify", "%d instances, %d watches", i, w)
}

func (h *host) clock(context.Context) Check {
	// Certificates and tokens are judged by the clock: one before this program's time fails both.
	if now := time.Now(); now.Year() < 2026 {
		return fail("clock", "set the clock: timedatectl set-ntp true", "it says %s", now.Format(time.DateOnly))
	}
	if !clockSynced() {
		return warn("clock", "let something keep it: timedatectl set-ntp true (in a virtual machine the host may do it unseen)", "the kernel does not know it to be synchronized")
	}
	return ok("clock", "synchronized")
}

func (h *host) dns(ctx context.Context) Check {
	var servers []string
	for line := range strings.Lines(h.text("/etc/resolv.conf")) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "nameserver" {
			if _, err := netip.ParseAddr(f[1]); err == nil {
				servers = append(servers, f[1])
			}
		}
	}
	if len(servers) == 0 {
		return warn("DNS", "write nameservers into /etc/resolv.conf", "/etc/resolv.conf names no server")
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	if _, err := net.DefaultResolver.LookupNetIP(ctx, "ip4", "index.docker.io"); err != nil {
		return warn("DNS", "images can only be imported until names resolve: check /etc/resolv.conf and the way to "+servers[0], "index.docker.io does not resolve")
	}
	return ok("DNS", "names resolve")
}

// ipv6 asks the kernel for a way to a public address; nothing is sent.
func (h *host) ipv6(ctx context.Context) Check {
	conn, err := new(net.Dialer).DialContext(ctx, "udp6", "[2001:4860:4860::8888]:53")
	if err == nil {
		_ = conn.Close()
	}
	if err != nil || !conn.LocalAddr().(*net.UDPAddr).IP.IsGlobalUnicast() {
		return ok("IPv6", "this host has no way out over it, so sandboxes have none: IPv4 alone")
	}
	return ok("IPv6", "sandboxes have it, by this host's address")
}

// Systemd says whether it runs the host.
func Systemd(tree string) bool { return isDir(filepath.Join("/", tree, "/run/systemd/system")) }

func (h *host) systemd(context.Context) Check {
	if Systemd(h.Tree) {
		return ok("systemd", "runs this host")
	}
	return warn("systemd", "let whatever starts services here run: shard daemon", "does not run this host")
}

func (h *host) group(context.Context) Check {
	for line := range strings.Lines(h.text("/etc/group")) {
		if f := strings.Split(strings.TrimSpace(line), ":"); len(f) >= 4 && f[0] == "shard" {
			return ok("group shard", "members may use the daemon: %s", strings.ReplaceAll(orNone(f[3]), ",", ", "))
		}
	}
	return ok("group shard", "not there: only root uses the daemon")
}

func orNone(s string) string {
	if s == "" {
		return "none yet"
	}
	return s
}

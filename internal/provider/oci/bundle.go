//go:build linux

package oci

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/useshards/shard/internal/provider"
)

// agentPath is where shard-init stands in the guest.
const agentPath = "/.shard-init"

// pidsMax is the bound on processes and threads of every sandbox.
const pidsMax = 4096

// capabilities are what root in a sandbox keeps: the 14 that container engines agree on.
var capabilities = []string{
	"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
	"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
}

// maskedPaths tell of the host or reach its hardware; readonlyPaths would let root change the host.
var (
	maskedPaths = []string{
		"/proc/acpi", "/proc/asound", "/proc/interrupts", "/proc/kcore", "/proc/keys", "/proc/latency_stats",
		"/proc/sched_debug", "/proc/scsi", "/proc/timer_list", "/proc/timer_stats",
		"/sys/devices/virtual/powercap", "/sys/firmware",
	}
	readonlyPaths = []string{"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)

// bundle describes the machine of one sandbox as an OCI runtime wants it.
func bundle(f flavour, s provider.Spec, agent, cgroupsPath string) (*specs.Spec, error) {
	deny := []string{"nosuid", "noexec", "nodev"}
	files, err := openFiles()
	if err != nil {
		return nil, err
	}
	spec := &specs.Spec{
		Version:  specs.Version,
		Hostname: s.Hostname,
		Root:     &specs.Root{Path: s.Root},
		Process: &specs.Process{
			Args: []string{agentPath},
			Cwd:  "/",
			User: specs.User{Umask: new(uint32(0o022))}, // not the daemon's
			Env:  []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
			Capabilities: &specs.LinuxCapabilities{
				Bounding: capabilities, Effective: capabilities, Permitted: capabilities,
			},
			NoNewPrivileges: true,
			Rlimits: []specs.POSIXRlimit{
				// A crash must not run the host's core handler on the guest's memory.
				{Type: "RLIMIT_CORE", Soft: 0, Hard: 0},
				{Type: "RLIMIT_NOFILE", Soft: min(1024, files), Hard: files},
			},
			// Neither the daemon's protection nor its bias is inherited; when the host itself runs dry, sandboxes go first.
			OOMScoreAdj: new(100),
		},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: deny},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "strictatime", "mode=755", "size=65536k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5",
				terminals}},
			{Destination: "/dev/shm", Type: "tmpfs", Source: "shm", Options: append([]string{"mode=1777", "size=65536k"}, deny...)},
			{Destination: "/dev/mqueue", Type: "mqueue", Source: "mqueue", Options: deny},
			{Destination: "/sys", Type: "sysfs", Source: "sysfs", Options: append([]string{"ro"}, deny...)},
			{Destination: "/sys/fs/cgroup", Type: "cgroup", Source: "cgroup", Options: append([]string{"ro"}, deny...)},
			{Destination: agentPath, Type: "bind", Source: agent, Options: []string{"bind", "ro", "nosuid", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: cgroupsPath,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace}, {Type: specs.MountNamespace}, {Type: specs.UTSNamespace}, {Type: specs.IPCNamespace},
				{Type: specs.CgroupNamespace}, {Type: specs.NetworkNamespace, Path: s.Netns},
			},
			MaskedPaths:   maskedPaths,
			ReadonlyPaths: readonlyPaths,
		},
	}
	return spec, f.adjust(spec, s)
}

// terminals bounds those of one sandbox: a host has some thousands for all.
const terminals = "max=256"

// openFiles is how many files a process in a sandbox may open: no more than the daemon itself may, since a runtime without
// CAP_SYS_RESOURCE cannot raise the limit.
func openFiles() (uint64, error) {
	const most = 524288
	var own unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &own); err != nil {
		return 0, os.NewSyscallError("getrlimit", err)
	}
	return min(most, own.Max), nil
}

// adjustRunc adds what only a kernel shared with the host needs. The bounds are in the cgroup already, which runc joins.
func adjustRunc(spec *specs.Spec, _ provider.Spec) error {
	spec.Linux.Resources = &specs.LinuxResources{Devices: []specs.LinuxDeviceCgroup{{Allow: false, Access: "rwm"}}}
	filter, err := seccomp.GetDefaultProfile(spec)
	if err != nil {
		return fmt.Errorf("make the system call filter: %w", err)
	}
	// The first architecture is the kernel's own; the others would admit its 32-bit system calls, which gVisor does not
	// have either, and cost more time than all the rest of a start.
	filter.Architectures = filter.Architectures[:1]
	spec.Linux.Seccomp = filter
	// On cgroup v1 this is a tmpfs of runc's own, which it leaves writable.
	spec.Linux.ReadonlyPaths = append(slices.Clone(readonlyPaths), "/sys/fs/cgroup")
	return nil
}

// adjustGVisor puts in the bounds that the guest shall see; shard-runsc reads them (tools/runsc/boot.go).
func adjustGVisor(spec *specs.Spec, s provider.Spec) error {
	// Over an empty /tmp gVisor lays a memory file system, whose files would count as memory and be lost at every stop,
	// unless the bundle has a mount there; one of a type that it does not know it then leaves out.
	spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/tmp", Type: "shard-none", Source: "none"})
	spec.Linux.Resources = &specs.LinuxResources{}
	if m := s.Resources.MemoryMiB; m > 0 {
		spec.Linux.Resources.Memory = &specs.LinuxMemory{Limit: new(m << 20)}
	}
	if n := s.Resources.VCPUs; n > 0 {
		const period = 100_000 // µs
		spec.Linux.Resources.CPU = &specs.LinuxCPU{Quota: new(n * period), Period: new(uint64(period))}
	}
	return nil
}

// writeBundle makes the bundle directory anew.
func writeBundle(dir string, spec *specs.Spec) error {
	if err := os.RemoveAll(dir); err != nil {
		return fmt.Errorf("remove the old bundle: %w", err)
	}
	if err := os.Mkdir(dir, 0o700); err != nil {
		return fmt.Errorf("make the bundle: %w", err)
	}
	b, err := json.Marshal(spec)
	if err != nil {
		return fmt.Errorf("encode the bundle: %w", err)
	}
	if err := os.WriteFile(filepath.Join(dir, "config.json"), b, 0o600); err != nil {
		return fmt.Errorf("write the bundle: %w", err)
	}
	return nil
}

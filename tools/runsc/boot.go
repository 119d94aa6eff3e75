package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"strconv"

	specs "github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/config"
	"gvisor.dev/gvisor/runsc/flag"
)

// boot is gVisor's boot command. Stock runsc computes the CPU count and the memory size that the guest sees from the
// cgroup that it manages, and with --ignore-cgroups it shows those of the host; this one reads them from the OCI spec.
type boot struct{ sentrycmd.Boot }

// FetchSpec runs after the flags were parsed and before Execute, which makes it the place to correct them, and to begin what shall
// go on beside it.
func (b *boot) FetchSpec(conf *config.Config, f *flag.FlagSet) (string, *specs.Spec, error) {
	go tidy()
	id, spec, err := b.Boot.FetchSpec(conf, f)
	if err != nil {
		return id, spec, err
	}
	return id, spec, applyBounds(f)
}

// applyBounds sets total-memory and cpu-num from the spec that the parent passes as an open file.
func applyBounds(f *flag.FlagSet) error {
	fd, err := strconv.Atoi(f.Lookup("spec-fd").Value.String())
	if err != nil || fd < 0 {
		return nil // Execute refuses it
	}
	resources, err := readResources(fd)
	if err != nil || resources == nil {
		return err
	}
	if m := resources.Memory; m != nil && m.Limit != nil && *m.Limit > 0 {
		if err := f.Set("total-memory", strconv.FormatInt(*m.Limit, 10)); err != nil {
			return fmt.Errorf("set the guest's memory: %w", err)
		}
	}
	if c := resources.CPU; c != nil && c.Quota != nil && c.Period != nil && *c.Quota > 0 && *c.Period > 0 {
		period := int64(*c.Period)
		for name, value := range map[string]int64{"cpu-num": (*c.Quota + period - 1) / period, "cpu-quota": *c.Quota, "cpu-period": period} {
			if err := f.Set(name, strconv.FormatInt(value, 10)); err != nil {
				return fmt.Errorf("set the guest's CPUs: %w", err)
			}
		}
	}
	return nil
}

// readResources reads linux.resources with pread, so that the file's position stays where Execute expects it.
func readResources(fd int) (*specs.LinuxResources, error) {
	const most = 16 << 20
	var spec struct {
		Linux struct {
			Resources *specs.LinuxResources `json:"resources"`
		} `json:"linux"`
	}
	err := json.NewDecoder(io.NewSectionReader(preader(fd), 0, most)).Decode(&spec)
	if err != nil {
		return nil, fmt.Errorf("read the spec's resources: %w", err)
	}
	return spec.Linux.Resources, nil
}

// preader reads a file descriptor that it does not own; an *os.File would close it when collected.
type preader int

func (p preader) ReadAt(b []byte, off int64) (int, error) {
	n, err := unix.Pread(int(p), b, off)
	switch {
	case err != nil:
		return 0, os.NewSyscallError("pread", err)
	case n < len(b):
		return n, io.EOF
	}
	return n, nil
}

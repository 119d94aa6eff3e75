// Command shard-runsc is gVisor's runsc, built from a pinned module with the commands that the gvisor provider uses and
// nothing else. It differs from stock runsc in four ways: the seccomp programs of the configuration we run are compiled
// beforehand (saves about 30 ms a start); a sandbox sees the bounds of its OCI resources even with --ignore-cgroups,
// because the daemon owns the cgroups; saving one is safe (save.go, settle.go); and the sidecar binaries are not embedded (36 MB instead of 83).
package main

import (
	"gvisor.dev/gvisor/runsc/cli"
	"gvisor.dev/gvisor/runsc/cmd"
	"gvisor.dev/gvisor/runsc/cmd/sentry/sentrycmd"
	"gvisor.dev/gvisor/runsc/cmd/util"

	"github.com/useshards/shard/tools/runsc/precompiled"
)

func main() {
	precompiled.Install()
	const oci, inner = "", "internal use only"
	cli.Run(nil, map[util.SubCommand]string{
		new(cmd.Run):          oci,
		new(cmd.Create):       oci,
		new(cmd.Start):        oci,
		new(cmd.State):        oci,
		new(cmd.Exec):         oci,
		new(cmd.Kill):         oci,
		new(cmd.Wait):         oci,
		new(cmd.List):         oci,
		new(cmd.Delete):       oci,
		new(save):             oci,
		new(settle):           oci,
		new(cmd.Restore):      oci,
		new(cmd.Features):     oci,
		new(boot):             inner,
		new(cmd.Gofer):        inner,
		new(sentrycmd.Umount): inner,
	}, nil)
}

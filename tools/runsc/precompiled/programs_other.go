//go:build !amd64

package precompiled

import "gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"

// No programs were made for this architecture; gVisor compiles them at each start.
const version = "none"

var sentryPrograms, goferPrograms []precompiledseccomp.Program

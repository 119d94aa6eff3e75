// Package precompiled holds the seccomp programs of the sentry and the gofer for the configuration that shard runs:
// systrap, gVisor's own network stack, directfs, no host sockets. gVisor's releases ship such programs; its Go module
// does not, and compiling them takes 27 ms (sentry) and 12 ms (gofer) of every start.
//
// The programs belong to one version of gVisor and one architecture. They are used only when the version linked into the
// program is the one they were made for; any other configuration, version or architecture compiles as before.
package precompiled

import (
	"runtime/debug"
	_ "unsafe" // linkname

	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	sentry "gvisor.dev/gvisor/runsc/boot/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter"
)

//go:generate go test . -run TestPrograms -update

// Module is the path of gVisor's module.
const Module = "gvisor.dev/gvisor"

//go:linkname sentryTable gvisor.dev/gvisor/runsc/boot/filter.precompiledPrograms
var sentryTable map[string]precompiledseccomp.Program

//go:linkname goferTable gvisor.dev/gvisor/runsc/fsgofer/filter.precompiledPrograms
var goferTable map[string]precompiledseccomp.Program

// Install makes the programs known to gVisor's filter packages. It must run before they are asked for one.
func Install() {
	if version == linkedVersion() {
		install()
	}
}

func install() {
	// The first look-up fills the tables (with nothing); what is put in after that stays.
	sentry.GetPrecompiled("")
	gofer.GetPrecompiled("")
	for _, p := range sentryPrograms {
		sentryTable[p.Name] = p
	}
	for _, p := range goferPrograms {
		goferTable[p.Name] = p
	}
}

// linkedVersion is the version of gVisor in this program, or "" when it is unknown or replaced.
func linkedVersion() string {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		return ""
	}
	for _, dep := range info.Deps {
		if dep.Path == Module && dep.Replace == nil {
			return dep.Version
		}
	}
	return ""
}

package precompiled

import (
	"bytes"
	"flag"
	"fmt"
	"go/format"
	"os"
	"regexp"
	"runtime"
	"slices"
	"testing"
	_ "unsafe" // linkname

	"golang.org/x/sys/unix"
	"gvisor.dev/gvisor/pkg/seccomp"
	"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp"
	"gvisor.dev/gvisor/pkg/sentry/platform"
	_ "gvisor.dev/gvisor/pkg/sentry/platform/systrap"
	sentryfilter "gvisor.dev/gvisor/runsc/boot/filter"
	sentry "gvisor.dev/gvisor/runsc/boot/filter/config"
	goferfilter "gvisor.dev/gvisor/runsc/fsgofer/filter"
	gofer "gvisor.dev/gvisor/runsc/fsgofer/filter/config"
)

var update = flag.Bool("update", false, "write the programs of this architecture anew")

//go:linkname sentryRules gvisor.dev/gvisor/runsc/boot/filter/config.rules
func sentryRules(sentry.Options, precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

//go:linkname goferRules gvisor.dev/gvisor/runsc/fsgofer/filter/config.rules
func goferRules(gofer.Options, precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules)

// TestPrograms says that the committed programs are those which the gVisor version in go.mod compiles to, whatever the
// process that compiles them.
func TestPrograms(t *testing.T) {
	file := "programs_" + runtime.GOARCH + ".go"
	have, err := os.ReadFile(file)
	if err != nil && !*update {
		t.Skipf("no programs for this architecture: %v", err)
	}
	want := generate(t)
	if *update {
		if err := os.WriteFile(file, want, 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if !bytes.Equal(have, want) {
		t.Errorf("%s does not belong to the gVisor version in go.mod: run go generate ./precompiled", file)
	}
}

func TestInstall(t *testing.T) {
	install()
	for _, p := range sentryPrograms {
		if _, ok := sentryfilter.GetPrecompiled(p.Name); !ok {
			t.Errorf("the sentry does not find %s", p.Name)
		}
	}
	for _, p := range goferPrograms {
		if _, ok := goferfilter.GetPrecompiled(p.Name); !ok {
			t.Errorf("the gofer does not find %s", p.Name)
		}
	}
}

func generate(t *testing.T) []byte {
	t.Helper()
	mod, err := os.ReadFile("../go.mod")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(regexp.QuoteMeta(Module) + ` (v\S+)`).FindSubmatch(mod)
	if m == nil {
		t.Fatal("go.mod names no version of gVisor")
	}
	var out bytes.Buffer
	fmt.Fprintf(&out, "// Code generated from %s %s by go generate; DO NOT EDIT.\n\npackage precompiled\n\n", Module, m[1])
	fmt.Fprintf(&out, "import \"gvisor.dev/gvisor/pkg/seccomp/precompiledseccomp\"\n\nconst version = %q\n\n", m[1])
	write(&out, "sentryPrograms", compileSentry(t))
	write(&out, "goferPrograms", compileGofer(t))
	src, err := format.Source(out.Bytes())
	if err != nil {
		t.Fatal(err)
	}
	return src
}

func write(out *bytes.Buffer, name string, programs []precompiledseccomp.Program) {
	fmt.Fprintf(out, "var %s = []precompiledseccomp.Program{\n", name)
	for _, p := range programs {
		fmt.Fprintf(out, "{\nName: %q,\nBytecode32: []uint32{", p.Name)
		for i, word := range p.Bytecode32 {
			if i%16 == 0 {
				out.WriteByte('\n')
			}
			fmt.Fprintf(out, "%#x, ", word)
		}
		out.WriteString("\n},\nVarOffsets: map[string][]int{\n")
		var names []string
		for v := range p.VarOffsets {
			names = append(names, v)
		}
		slices.Sort(names)
		for _, v := range names {
			fmt.Fprintf(out, "%q: %#v,\n", v, p.VarOffsets[v])
		}
		out.WriteString("},\n},\n")
	}
	out.WriteString("}\n\n")
}

func compileSentry(t *testing.T) (programs []precompiledseccomp.Program) {
	t.Helper()
	systrap, err := platform.Lookup("systrap")
	if err != nil {
		t.Fatal(err)
	}
	for _, info := range systrap.PrecompiledSeccompInfo() {
		opt := sentry.Options{Platform: info, HostFilesystem: true}
		programs = append(programs, compile(t, opt.ConfigKey(), opt.Vars(), sentry.SeccompOptions(opt),
			func(v precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules) {
				allow, deny := sentryRules(opt, v)
				return withOwnPID(allow, v), deny
			}))
	}
	return programs
}

// withOwnPID makes the one rule that systrap builds from os.Getpid() follow the variable self_pid. As it stands, a program
// compiled beforehand holds the process id of its compiler, and the sentry would die when it kills one of its threads.
func withOwnPID(allow seccomp.SyscallRules, v precompiledseccomp.Values) seccomp.SyscallRules {
	allow = allow.Copy()
	allow.Remove(unix.SYS_RT_TGSIGQUEUEINFO)
	allow.Set(unix.SYS_RT_TGSIGQUEUEINFO, seccomp.PerArg{seccomp.EqualTo(v.GetUint64("self_pid")), seccomp.AnyValue{},
		seccomp.EqualTo(unix.SIGKILL)})
	return allow
}

func compileGofer(t *testing.T) (programs []precompiledseccomp.Program) {
	t.Helper()
	for _, lisafs := range []bool{false, true} {
		opt := gofer.Options{DirectFS: true, LisafsNeeded: lisafs}
		programs = append(programs, compile(t, opt.ConfigKey(), opt.Vars(), seccomp.ProgramOptions{},
			func(v precompiledseccomp.Values) (seccomp.SyscallRules, seccomp.SyscallRules) {
				return goferRules(opt, v)
			}))
	}
	return programs
}

func compile(t *testing.T, key string, vars precompiledseccomp.Values, opts seccomp.ProgramOptions,
	rules func(precompiledseccomp.Values) (allow, deny seccomp.SyscallRules)) precompiledseccomp.Program {
	t.Helper()
	var names []string
	for name := range vars {
		names = append(names, name)
	}
	p, err := precompiledseccomp.Precompile(key, names, func(v precompiledseccomp.Values) *seccomp.Program {
		allow, deny := rules(v)
		return &seccomp.Program{
			RuleSets: []seccomp.RuleSet{{Rules: deny.Copy()}, {Rules: allow.Copy(), Action: seccomp.Allow}},
			Options:  opts,
		}
	})
	if err != nil {
		t.Fatalf("compile %s: %v", key, err)
	}
	return p
}

package netns

import (
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// TestMain runs the whole package in a network and a mount namespace of its own: no packet leaves the machine, and
// whatever way the run ends, the kernel clears everything away.
func TestMain(m *testing.M) {
	const marker = "SHARD_NETNS_TEST_INSIDE"
	if os.Geteuid() != 0 || os.Getenv(marker) != "" {
		if os.Geteuid() == 0 {
			if err := prepare(); err != nil {
				fmt.Fprintln(os.Stderr, "prepare the test's namespaces:", err)
				os.Exit(1)
			}
		}
		os.Exit(m.Run())
	}
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), marker+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET | unix.CLONE_NEWNS, Pdeathsig: unix.SIGKILL}
	runtime.LockOSThread() // the death signal follows the thread that forked
	err := cmd.Run()
	if cmd.ProcessState == nil {
		fmt.Fprintln(os.Stderr, "make the test's namespaces:", err)
		os.Exit(1)
	}
	os.Exit(cmd.ProcessState.ExitCode())
}

func prepare() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return err
	}
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return err
	}
	return netlink.LinkSetUp(lo)
}

// needRoot skips where namespaces cannot be made.
func needRoot(t testing.TB) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes network namespaces")
	}
}

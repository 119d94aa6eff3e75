package daemon

import (
	"context"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strings"
	"time"
)

// readiness gives the function that tells systemd, if that started us, that the socket is there: what starts after the
// daemon finds it. It takes the address out of the environment, which runtimes inherit, and some would answer for us.
func readiness() func() error {
	address := os.Getenv("NOTIFY_SOCKET")
	_ = os.Unsetenv("NOTIFY_SOCKET")
	return func() error {
		if address == "" {
			return nil
		}
		conn, err := net.Dial("unixgram", address)
		if err != nil {
			return fmt.Errorf("tell systemd that the daemon is ready: %w", err)
		}
		defer conn.Close()
		_, err = conn.Write([]byte("READY=1"))
		return err
	}
}

// hostGoesDown says whether systemd is about to switch the host off. What then still runs in a sandbox gets its signals from
// systemd, which waits 90 s for the agent of a container: PID 1 of a namespace does not end at a SIGTERM.
func hostGoesDown(ctx context.Context) bool {
	if _, err := os.Stat("/run/systemd/system"); err != nil {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	state, _ := exec.CommandContext(ctx, "systemctl", "is-system-running").Output() // fails in every state but "running"
	return strings.TrimSpace(string(state)) == "stopping"
}

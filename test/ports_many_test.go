package test

import (
	"fmt"
	"io"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPortsMany: ten thousand connections are open at once, and everything else goes on.
func TestPortsMany(t *testing.T) {
	many := 2000 // beside other tests on two cores
	if os.Getenv("SHARD_TEST_FULL") != "" {
		many = 10000
	}
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = limit.Max // which the daemon inherits
	if err := syscall.Setrlimit(syscall.RLIMIT_NOFILE, &limit); err != nil {
		t.Fatal(err)
	}
	d := ports(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		descriptors := 1
		if provider == "runc" { // two sockets, and two pipes while data waits
			descriptors = 6
		}
		if need := uint64(descriptors*many + 3000); limit.Max < need {
			t.Skipf("this machine allows a process %d descriptors: %d connections need %d", limit.Max, many, need)
		}
		id := box(t, d, provider, "--port", "9500:8000")
		decode[shard.Exec](t, call(t, d, "POST", "/v0/sandboxes/"+id+"/exec", shard.ExecRequest{Command: []string{"sh", "-c", "ulimit -n $(ulimit -Hn); exec netserver 127.0.0.1:8000 2>/log"}}), 201)
		testenv.Eventually(t, "the server listens", func() (bool, string) {
			got, err := ask(t, d, local(9500), "peer")
			return err == nil, fmt.Sprint(got, err)
		})
		began := time.Now()
		conns := make([]net.Conn, many)
		defer func() {
			for _, c := range conns {
				if c != nil {
					_ = c.Close()
				}
			}
		}()
		each := func(what string, do func(i int) error) {
			t.Helper()
			var wg sync.WaitGroup
			next := make(chan int)
			for range 64 {
				wg.Go(func() {
					for i := range next {
						if err := do(i); err != nil {
							t.Errorf("%s %d: %v", what, i, err)
							return
						}
					}
				})
			}
			for i := range many {
				select {
				case next <- i:
				case <-t.Context().Done():
				}
				if t.Failed() {
					break
				}
			}
			close(next)
			wg.Wait()
			if t.Failed() {
				t.FailNow()
			}
		}
		talk := func(i int) error {
			word := fmt.Sprintf("%08d", i)
			if _, err := io.WriteString(conns[i], word); err != nil {
				return err
			}
			got := make([]byte, len(word))
			if _, err := io.ReadFull(conns[i], got); err != nil || string(got) != word {
				return fmt.Errorf("%q came back as %q: %w", word, got, err)
			}
			return nil
		}
		each("connection", func(i int) error {
			c, err := d.Lab().DialFromHost(t.Context(), "tcp4", local(9500))
			if err != nil {
				return err
			}
			conns[i] = c
			_ = c.SetDeadline(time.Now().Add(5 * time.Minute))
			_, err = io.WriteString(c, "echo\n")
			return err
		})
		defer func() {
			if t.Failed() {
				t.Logf("the server's log: %+v", d.Shard("exec", id, "tail", "-20", "/log"))
			}
		}()
		each("echo", talk)
		t.Logf("%d connections opened and used in %s; the daemon's memory: %s", many, time.Since(began).Round(time.Millisecond), rss(d.PID()))
		if got := sh(t, d, id, "echo works"); got != "works" {
			t.Errorf("exec says %q", got)
		}
		began = time.Now()
		each("second echo", talk)
		t.Logf("used again in %s", time.Since(began).Round(time.Millisecond))
	})
}

// rss is a process's resident memory.
func rss(pid int) string {
	status, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	for line := range strings.Lines(string(status)) {
		if value, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			return strings.TrimSpace(value)
		}
	}
	return "?"
}

package main

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// forwards measures a forwarded port beside the same server on the host: bytes both ways, and a connection's first answer.
func (b *bench) forwards(p, id string, target map[string]float64) (err error) {
	server := filepath.Join(b.dir, "netserver")
	build := exec.CommandContext(b.ctx, "go", "build", "-ldflags", "-s -w", "-o", server, "./test/testdata/netserver")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		return fmt.Errorf("build the server: %w\n%s", err, out)
	}
	const port = 7000
	here, err := freePort()
	if err != nil {
		return err
	}
	there, err := freePort()
	if err != nil {
		return err
	}
	asker, err := freePort()
	if err != nil {
		return err
	}
	onHost := exec.CommandContext(b.ctx, server, "127.0.0.1:"+strconv.Itoa(here))
	if err := onHost.Start(); err != nil {
		return err
	}
	defer func() { _ = onHost.Process.Kill(); _ = onHost.Wait() }()
	program, err := os.ReadFile(server)
	if err != nil {
		return err
	}
	mode := fs.FileMode(0o755)
	if err := b.client.PutFile(b.ctx, id, "/netserver", bytes.NewReader(program), int64(len(program)), client.WriteOptions{Mode: &mode}); err != nil {
		return err
	}
	for guest, from := range map[int]int{port: there, port + 1: asker} { // the second asks the first
		if _, err := b.client.Exec(b.ctx, id, shard.ExecRequest{Command: []string{"/netserver", "127.0.0.1:" + strconv.Itoa(guest)}}); err != nil {
			return err
		}
		if _, err := b.client.PutPort(b.ctx, id, shard.PortForward{HostPort: from, GuestPort: guest}); err != nil {
			return err
		}
	}
	for _, at := range []int{here, there, asker} { // until all answer
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
			_, err := ask(at, "peer")
			if err == nil {
				break
			}
			if time.Now().After(deadline) {
				return fmt.Errorf("the server at port %d does not answer: %w", at, err)
			}
		}
	}
	const size = 512 << 20
	n := max(b.o.n/4, 2)
	for _, way := range []struct {
		name string
		move func(at int) error
	}{{"out", download(size)}, {"in", upload(size)}} {
		moved := func(at int) func() (float64, error) { return rate(size, func() error { return way.move(at) }) }
		if err := b.sample(p+" forwarded port, "+way.name, n, target["forward"], "the same server on the host", moved(there), moved(here), "MB/s"); err != nil {
			return err
		}
	}
	return b.connections(p, there, here, asker, port)
}

// connections measures a connection's first answer beside two floors: the same server on the host, and the same connection
// made by another program in the sandbox, which no way from outside can be quicker than.
func (b *bench) connections(p string, there, here, asker, port int) error {
	name := p + " forwarded port, connection and answer"
	host := &row{Name: name, Unit: "ms", What: "the same server on the host"}
	inside := &row{Name: name, Unit: "ms", What: "the same connection inside the sandbox"}
	answer := func(at int) (float64, error) {
		time.Sleep(10 * time.Millisecond) // what went before has come to rest
		return timed(func() error { _, err := ask(at, "peer"); return err })()
	}
	for i := range 5*b.o.n + 1 {
		ours, err := answer(there)
		if err != nil {
			return err
		}
		direct, err := answer(here)
		if err != nil {
			return err
		}
		said, err := ask(asker, "ask "+strconv.Itoa(port))
		if err != nil {
			return err
		}
		within, err := strconv.ParseFloat(said, 64)
		if err != nil {
			return err
		}
		if i == 0 {
			continue
		}
		host.Ours, host.Floor = append(host.Ours, ours), append(host.Floor, direct)
		inside.Ours, inside.Floor = append(inside.Ours, ours), append(inside.Floor, within/1e6)
	}
	for _, w := range []*row{host, inside} {
		b.addRow(w)
		b.over(w, 1)
	}
	return nil
}

// ask sends one line on a new connection and reads the answer, also a line, to its end.
func ask(port int, line string) (string, error) {
	c, err := net.Dial("tcp4", "127.0.0.1:"+strconv.Itoa(port))
	if err != nil {
		return "", err
	}
	defer func() { _ = c.Close() }()
	if _, err := fmt.Fprintln(c, line); err != nil {
		return "", err
	}
	got, err := io.ReadAll(c)
	if err != nil || len(got) == 0 {
		return "", errors.Join(err, errors.New("no answer"))
	}
	return strings.TrimSpace(string(got)), nil
}

func download(size int64) func(port int) error {
	return func(port int) error {
		c, err := net.Dial("tcp4", "127.0.0.1:"+strconv.Itoa(port))
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		if _, err := fmt.Fprintln(c, "source", size); err != nil {
			return err
		}
		var got int64
		for buf := make([]byte, 256<<10); ; {
			n, err := c.Read(buf)
			if got += int64(n); err == io.EOF && got == size {
				return nil
			}
			if err != nil {
				return fmt.Errorf("%d bytes of %d came: %w", got, size, err)
			}
		}
	}
}

func upload(size int64) func(port int) error {
	return func(port int) error {
		c, err := net.DialTCP("tcp4", nil, &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: port})
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		if _, err := fmt.Fprintln(c, "sink"); err != nil {
			return err
		}
		buf := make([]byte, 256<<10)
		for left := size; left > 0; left -= int64(len(buf)) {
			if _, err := c.Write(buf); err != nil {
				return err
			}
		}
		if err := c.CloseWrite(); err != nil {
			return err
		}
		if line, err := bufio.NewReader(c).ReadString('\n'); err != nil || line != strconv.FormatInt(size, 10)+"\n" {
			return fmt.Errorf("the server counted %q of %d bytes: %w", line, size, err)
		}
		return nil
	}
}

// freePort is one that nothing listens on, for as long as nobody takes it.
func freePort() (int, error) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		return 0, err
	}
	defer func() { _ = l.Close() }()
	return l.Addr().(*net.TCPAddr).Port, nil
}

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/rand"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// What the SDKs may add to the raw API, and move at least; sdkBurst commands make one turn of a worker.
const (
	sdkAddsPython, sdkAddsTypeScript = 3, 2 // ms per exec
	sdkRate                          = 200  // MB/s
	sdkBurst                         = 10
	sdkBytes                         = 256 << 20
)

// sdk measures what the SDKs add: the same exchanges through `shard serve` over TLS, by this program's client without
// any comfort (the raw API) and by each SDK in a process of its own, in turn.
func (b *bench) sdk(p string) (err error) {
	server, err := b.serve()
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.close()) }()
	id, err := b.create(p)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, b.remove(id)) }()
	raw := client.New(client.Options{Dial: client.Remote(server.url, server.roots), Base: server.url, Token: server.token, UserAgent: "bench"})
	defer raw.Close()

	var workers []*sdkWorker
	defer func() {
		for _, w := range workers {
			err = errors.Join(err, w.close())
		}
	}()
	for _, w := range []*sdkWorker{
		{name: "Python", face: "sync", adds: sdkAddsPython},
		{name: "Python", face: "async", adds: sdkAddsPython},
		{name: "TypeScript", adds: sdkAddsTypeScript},
	} {
		if err := w.start(b.ctx, server, id); err != nil {
			b.report.note("%s is not measured: %v", w, err)
			continue
		}
		workers = append(workers, w)
	}
	if err := b.sdkExecs(p, id, raw, workers); err != nil {
		return err
	}
	return b.sdkCopies(p, id, raw, workers)
}

// sdkExecs tells the milliseconds that each worker's commands take, and how many of them are beyond the median of the
// raw API in the same turn: turns differ more than the clients do.
func (b *bench) sdkExecs(p, id string, raw *client.Client, workers []*sdkWorker) error {
	exec := timed(func() error { return b.execBy(raw, id, io.Discard, "true") })
	var floors []float64
	ours, added := make([][]float64, len(workers)), make([][]float64, len(workers))
	for turn := range b.o.n + 1 {
		floor := make([]float64, sdkBurst)
		for i := range floor {
			var err error
			if floor[i], err = exec(); err != nil {
				return err
			}
		}
		for i, w := range workers {
			times, err := w.ask("exec %d", sdkBurst)
			if err != nil {
				return err
			}
			if turn == 0 { // it warms
				continue
			}
			ours[i] = append(ours[i], times...)
			for _, v := range times {
				added[i] = append(added[i], v-quantile(floor, 0.5))
			}
		}
		if turn > 0 {
			floors = append(floors, floor...)
		}
	}
	for i, w := range workers {
		b.addRow(&row{Name: fmt.Sprintf("%s exec true, %s", p, w), Unit: "ms", Ours: ours[i], Floor: floors, What: "raw API"})
		b.add(fmt.Sprintf("%s exec true, %s adds", p, w), "ms", w.adds, added[i]...)
	}
	return nil
}

// sdkCopies tells how fast each worker moves one large file.
func (b *bench) sdkCopies(p, id string, raw *client.Client, workers []*sdkWorker) error {
	data := make([]byte, sdkBytes)
	_, _ = rand.Read(data[:1<<20])
	for n := 1 << 20; n < len(data); n *= 2 {
		copy(data[n:], data[:n])
	}
	local, back := filepath.Join(b.dir, "sdk-up"), filepath.Join(b.dir, "sdk-down")
	if err := os.WriteFile(local, data, 0o600); err != nil {
		return err
	}
	put := rate(sdkBytes, func() error {
		f, err := os.Open(local)
		if err != nil {
			return err
		}
		defer func() { _ = f.Close() }()
		return raw.PutFile(b.ctx, id, "/tmp/large", f, sdkBytes, client.WriteOptions{})
	})
	get := rate(sdkBytes, func() error {
		body, _, err := raw.GetFile(b.ctx, id, "/tmp/large")
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		f, err := os.Create(back)
		if err != nil {
			return err
		}
		n, err := io.Copy(f, body)
		if err == nil && n != sdkBytes {
			err = fmt.Errorf("%d bytes came back", n)
		}
		return errors.Join(err, f.Close())
	})
	n := max(b.o.n/4, 2)
	for _, w := range workers {
		move := func(request string) func() (float64, error) {
			return func() (float64, error) {
				seconds, err := w.ask("%s", request)
				if err != nil {
					return 0, err
				}
				return sdkBytes / 1e6 / seconds[0], nil
			}
		}
		if err := b.sample(fmt.Sprintf("%s upload 256 MiB, %s", p, w), n, sdkRate, "raw API", move("upload "+local+" /tmp/large"), put, "MB/s"); err != nil {
			return err
		}
		if err := b.sample(fmt.Sprintf("%s download 256 MiB, %s", p, w), n, sdkRate, "raw API", move("download /tmp/large "+back), get, "MB/s"); err != nil {
			return err
		}
	}
	return nil
}

// sdkServer is a running `shard serve` with TLS, and a token for it.
type sdkServer struct {
	cmd    *exec.Cmd
	url    *url.URL
	token  string
	caFile string
	roots  *x509.CertPool
}

// serve starts `shard serve` on a free port of the loopback and waits until it listens.
func (b *bench) serve() (*sdkServer, error) {
	minted, err := b.cli("tokens", "mint", "--name", "bench")
	if err != nil {
		return nil, err
	}
	var token struct{ Token string }
	if err := json.Unmarshal([]byte(minted), &token); err != nil {
		return nil, fmt.Errorf("read the token: %w", err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	addr := l.Addr().String()
	_ = l.Close()
	s := &sdkServer{url: &url.URL{Scheme: "https", Host: addr}, token: token.Token,
		caFile: filepath.Join(b.root, "auth", "tls", "ca.crt"), roots: x509.NewCertPool()}
	s.cmd = exec.Command(filepath.Join(b.bin, "shard"), "--root", b.root, "serve", "--listen", addr, "--tls-self-signed")
	var said bytes.Buffer
	s.cmd.Stderr = &said
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err := s.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start shard serve: %w", err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		var conn net.Conn
		if conn, err = net.Dial("tcp", addr); err == nil {
			_ = conn.Close()
			break
		}
		if time.Now().After(deadline) || b.ctx.Err() != nil {
			return nil, errors.Join(fmt.Errorf("shard serve does not listen: %w", err), s.close())
		}
	}
	ca, err := os.ReadFile(s.caFile)
	if err == nil && !s.roots.AppendCertsFromPEM(ca) {
		err = errors.New("the CA file holds no certificate")
	}
	if err != nil {
		return nil, errors.Join(err, s.close())
	}
	return s, nil
}

func (s *sdkServer) close() error {
	_ = s.cmd.Process.Signal(syscall.SIGTERM)
	if err := s.cmd.Wait(); err != nil {
		return fmt.Errorf("shard serve: %w", err)
	}
	return nil
}

// sdkWorker is a program that uses an SDK, one line at a time.
type sdkWorker struct {
	name, face string
	adds       float64 // target: ms beyond the raw API

	cmd *exec.Cmd
	in  io.WriteCloser
	out *bufio.Reader
	err bytes.Buffer
}

func (w *sdkWorker) String() string { return strings.TrimSpace(w.name + " " + w.face) }

// command is how to start the worker from the repository's root, where the bench runs.
func (w *sdkWorker) command(ctx context.Context, id string) (*exec.Cmd, error) {
	if w.name == "TypeScript" {
		index, err := filepath.Abs("sdk/typescript/dist/index.js")
		if err != nil {
			return nil, err
		}
		if _, err := os.Stat(index); err != nil {
			return nil, errors.New("it is not built: run sdk/typescript/check")
		}
		return exec.CommandContext(ctx, "node", "bench/sdk/worker.mjs", index, id), nil
	}
	found, _ := filepath.Glob("build/sdk-python/venv-*/ready") // no error: the pattern is right
	if len(found) == 0 {
		return nil, errors.New("it has no environment: run sdk/python/check")
	}
	python := filepath.Join(filepath.Dir(found[len(found)-1]), "bin", "python")
	cmd := exec.CommandContext(ctx, python, "bench/sdk/worker.py", w.face, id)
	cmd.Env = append(os.Environ(), "PYTHONPATH=sdk/python/src", "PYTHONDONTWRITEBYTECODE=1")
	return cmd, nil
}

func (w *sdkWorker) start(ctx context.Context, s *sdkServer, id string) (err error) {
	if w.cmd, err = w.command(ctx, id); err != nil {
		return err
	}
	w.cmd.Env = append(w.cmd.Environ(), "SHARD_REMOTE="+s.url.String(), "SHARD_API_KEY="+s.token, "SHARD_CA_FILE="+s.caFile)
	w.cmd.Stderr = &w.err
	if w.in, err = w.cmd.StdinPipe(); err != nil {
		return err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	w.out = bufio.NewReader(out)
	return w.cmd.Start()
}

// ask sends one line and reads the numbers of its answer.
func (w *sdkWorker) ask(format string, args ...any) ([]float64, error) {
	_, sent := fmt.Fprintf(w.in, format+"\n", args...)
	line, err := w.out.ReadString('\n')
	if err = errors.Join(sent, err); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", w, err, w.err.String())
	}
	var numbers []float64
	for _, field := range strings.Fields(line) {
		v, err := strconv.ParseFloat(field, 64)
		if err != nil {
			return nil, fmt.Errorf("%s: %w", w, err)
		}
		numbers = append(numbers, v)
	}
	if len(numbers) == 0 {
		return nil, fmt.Errorf("%s: it answered nothing", w)
	}
	return numbers, nil
}

// close ends the worker: without a next line it leaves by itself.
func (w *sdkWorker) close() error {
	_ = w.in.Close()
	if err := w.cmd.Wait(); err != nil {
		return fmt.Errorf("%s: %w\n%s", w, err, w.err.String())
	}
	return nil
}

// execBy runs a command through the raw API: a request that starts it, a stream that tells its end.
func (b *bench) execBy(c *client.Client, id string, w io.Writer, command ...string) error {
	e, err := c.Exec(b.ctx, id, shard.ExecRequest{Command: command, Attach: true})
	if err != nil {
		return fmt.Errorf("exec: %w", err)
	}
	s, err := c.Attach(b.ctx, id, e.ID)
	if err != nil {
		return fmt.Errorf("attach: %w", err)
	}
	defer func() { _ = s.Close() }()
	exit, err := s.Copy(w, io.Discard)
	if err != nil {
		return fmt.Errorf("read the output: %w", err)
	}
	if exit.Code != 0 {
		return fmt.Errorf("%s ended with exit code %d", command[0], exit.Code)
	}
	return nil
}

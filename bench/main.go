// Bench measures what each verb costs, on a real daemon in a temporary root, beside the floor on which it stands: the
// bare runtime, a plain process, a plain file, and other container tools where they are installed. Samples of a verb
// and of its floor alternate in one run, because minutes differ more than the things measured. It prints a table and
// writes the samples as JSON, and leaves nothing on the host.
//
//	make bench                               everything
//	make bench BENCH='-n 5 -provider runc'   less of it
//	make bench BENCH=pause                   pause and resume, also of a machine with 256 MiB in use
//	make bench BENCH=sdk                     what the SDKs add to the raw API, and move
//	make bench BENCH=egress                  what the proxy and the resolver add, and how fast rules change
//	make bench BENCH=secrets                 what a secret costs at the proxy
package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

func main() {
	if task := os.Getenv(visitor); task != "" {
		if err := visitNow(task); err != nil {
			fmt.Fprintln(os.Stderr, "bench:", err)
			os.Exit(1)
		}
		return
	}
	n := flag.Int("n", 20, "samples of each `number`")
	out := flag.String("json", "build/bench.json", "`file` for the samples")
	only := flag.String("provider", "", "measure this `provider` alone")
	density := flag.Int("density", 50, "idle `sandboxes` for the memory measurement")
	records := flag.Int("records", 200, "`records` for the list measurement")
	bin := flag.String("bin", "bin", "`directory` of the programs")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	o := options{n: *n, out: *out, only: *only, density: *density, records: *records, bin: *bin, part: flag.Arg(0)}
	if flag.NArg() > 1 || !slices.Contains([]string{"", "pause", "sdk", "secrets", "egress"}, o.part) {
		fmt.Fprintf(os.Stderr, "bench: %s is none of its parts: pause, sdk, secrets, egress, or none for all but sdk\n", flag.Args())
		os.Exit(2)
	}
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

type options struct {
	n, density, records int
	out, only, bin      string
	part                string // this alone; empty is everything but sdk
}

// bench is one run.
type bench struct {
	ctx    context.Context
	o      options
	dir    string // scratch
	root   string // the daemon's
	bin    string
	client *client.Client
	daemon *exec.Cmd
	bare   int // containers of bare runtimes so far
	report report
}

const image = "bench/busybox:latest"

func run(ctx context.Context, o options) (err error) {
	if os.Getuid() != 0 {
		return errors.New("only root can make sandboxes")
	}
	bin, err := filepath.Abs(o.bin)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("/tmp", "shard-bench")
	if err != nil {
		return err
	}
	b := &bench{ctx: ctx, o: o, dir: dir, root: filepath.Join(dir, "r"), bin: bin}
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.start(); err != nil {
		return err
	}
	providers, err := b.client.Providers(ctx)
	if err != nil {
		return fmt.Errorf("list the providers: %w", err)
	}
	b.report.host()
	for _, p := range providers {
		if o.part != "" && o.part != "sdk" && o.part != "pause" || o.only != "" && p.Name != o.only {
			continue
		}
		if !p.Available {
			b.report.note("%s is not measured: %s", p.Name, p.Reason)
			continue
		}
		measure := b.provider
		switch o.part {
		case "sdk":
			measure = b.sdk
		case "pause":
			measure = b.pauses
		}
		if err := measure(p.Name); err != nil {
			return fmt.Errorf("%s: %w", p.Name, err)
		}
	}
	for _, part := range []struct {
		name    string
		measure func() error
	}{{"", b.common}, {"egress", b.egress}, {"secrets", b.secrets}} {
		if o.part != "" && o.part != part.name {
			continue
		}
		if err := part.measure(); err != nil {
			return err
		}
	}
	b.report.table(os.Stdout)
	raw, err := json.MarshalIndent(&b.report, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(o.out), 0o755); err != nil {
		return err
	}
	return os.WriteFile(o.out, append(raw, '\n'), 0o600)
}

// start makes the image's root, starts the daemon and waits for it.
func (b *bench) start() error {
	if err := b.makeRoot(filepath.Join(b.dir, "rootfs")); err != nil {
		return err
	}
	log, err := os.OpenFile(filepath.Join(b.dir, "daemon.log"), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()
	b.daemon = exec.Command(filepath.Join(b.bin, "shard"), "--root", b.root, "daemon")
	b.daemon.Stdout, b.daemon.Stderr = log, log
	b.daemon.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} // Ctrl+C is for us: we end it in order
	if err := b.daemon.Start(); err != nil {
		return fmt.Errorf("start the daemon: %w", err)
	}
	b.client = client.New(client.Options{Dial: client.Unix(filepath.Join(b.root, "shard.sock")), UserAgent: "bench"})
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		if _, err = b.client.Version(b.ctx); err == nil {
			break
		}
		if time.Now().After(deadline) || b.ctx.Err() != nil {
			said, _ := os.ReadFile(log.Name())
			return fmt.Errorf("the daemon does not answer: %w\n%s", err, said)
		}
	}
	_, err = b.cli("image", "import", "--env", "PATH=/bin", filepath.Join(b.dir, "rootfs"), image)
	return err
}

// makeRoot lays out a root of busybox and its names.
func (b *bench) makeRoot(root string) error {
	busybox := "/usr/bin/busybox"
	if _, err := os.Stat(busybox); err != nil {
		busybox = "/bin/busybox"
	}
	names, err := exec.CommandContext(b.ctx, busybox, "--list").Output()
	if err != nil {
		return fmt.Errorf("busybox is missing (make deps): %w", err)
	}
	for _, d := range []string{"bin", "etc", "tmp", "root", "proc", "sys", "dev"} {
		if err := os.MkdirAll(filepath.Join(root, d), 0o755); err != nil {
			return err
		}
	}
	program, err := os.ReadFile(busybox)
	if err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "bin", "busybox"), program, 0o755); err != nil { // a program
		return err
	}
	if err := os.WriteFile(filepath.Join(root, "etc", "passwd"), []byte("root:x:0:0::/root:/bin/sh\n"), 0o600); err != nil {
		return err
	}
	for _, name := range strings.Fields(string(names)) {
		if name != "busybox" {
			if err := os.Symlink("busybox", filepath.Join(root, "bin", name)); err != nil {
				return err
			}
		}
	}
	return nil
}

// cli runs the command line and returns what it printed.
func (b *bench) cli(args ...string) (string, error) {
	cmd := exec.CommandContext(b.ctx, filepath.Join(b.bin, "shard"), append([]string{"--root", b.root}, args...)...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("shard %s: %w: %s", strings.Join(args, " "), err, strings.TrimSpace(stderr.String()))
	}
	return strings.TrimSpace(string(out)), nil
}

// create makes a sandbox.
func (b *bench) create(provider string) (string, error) {
	s, err := b.client.Create(b.ctx, shard.CreateRequest{Image: image, Provider: provider}, nil)
	if err != nil {
		return "", fmt.Errorf("create: %w", err)
	}
	return s.ID, nil
}

func (b *bench) remove(id string) error {
	if err := b.client.Remove(b.ctx, id, true); err != nil {
		return fmt.Errorf("remove: %w", err)
	}
	return nil
}

// exec runs a command through the API and gives its output to w.
func (b *bench) exec(id string, w io.Writer, command ...string) error {
	return b.execBy(b.client, id, w, command...)
}

// close removes everything, whatever happened before.
func (b *bench) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	var errs []error
	if b.client != nil {
		if list, err := b.client.AllSandboxes(ctx, true); err == nil {
			for _, s := range list.Sandboxes {
				errs = append(errs, b.client.Remove(ctx, s.ID, true))
			}
		}
		b.client.Close()
	}
	if b.daemon != nil && b.daemon.Process != nil {
		_ = b.daemon.Process.Signal(syscall.SIGTERM)
		done := make(chan struct{})
		go func() { _ = b.daemon.Wait(); close(done) }()
		select {
		case <-done:
		case <-ctx.Done():
			_ = b.daemon.Process.Kill()
			<-done
			errs = append(errs, errors.New("the daemon did not end"))
		}
	}
	for _, m := range []string{"runsc", "runc"} { // runsc leaves a mount of a namespace in its root
		_ = syscall.Unmount(filepath.Join(b.dir, m, "null-netns"), syscall.MNT_DETACH)
	}
	errs = append(errs, os.RemoveAll(b.dir))
	return errors.Join(errs...)
}

// host describes the machine.
func (r *report) host() {
	release, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	cpu := ""
	if info, err := os.ReadFile("/proc/cpuinfo"); err == nil {
		for line := range strings.Lines(string(info)) {
			if name, ok := strings.CutPrefix(line, "model name"); ok {
				cpu = strings.Trim(name, "\t :\n")
				break
			}
		}
	}
	r.Host = fmt.Sprintf("%d CPUs (%s), Linux %s, %s", runtime.NumCPU(), cpu, strings.TrimSpace(string(release)), runtime.GOARCH)
	r.When = time.Now().UTC().Truncate(time.Second)
}

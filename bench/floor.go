package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// runtimeFloor is a bare OCI runtime with the same root.
type runtimeFloor struct {
	b       *bench
	program string
	flags   []string
	root    string
	bundle  string
	holder  string // a container that stays, for exec
}

// floorOf finds the runtime below a provider; nil when there is none.
func (b *bench) floorOf(provider string) (*runtimeFloor, error) {
	f := &runtimeFloor{b: b}
	switch provider {
	case "runc":
		f.program = filepath.Join(b.bin, "runc")
		if _, err := os.Stat(f.program); err != nil {
			if f.program, err = exec.LookPath("runc"); err != nil {
				return nil, err
			}
		}
	case "gvisor":
		f.program = filepath.Join(b.bin, "shard-runsc")
		f.flags = []string{"--network=none"}
	default:
		return nil, fmt.Errorf("no bare runtime is known for %s", provider)
	}
	name := map[string]string{"runc": "runc", "gvisor": "runsc"}[provider]
	f.root, f.bundle = filepath.Join(b.dir, name), filepath.Join(b.dir, name+"-bundle")
	if err := os.MkdirAll(f.bundle, 0o755); err != nil {
		return nil, err
	}
	return f, f.spec("/bin/sh", "-c", "echo ready; exec cat")
}

// spec writes the bundle's configuration: as little as a runtime wants, so that the floor is low.
func (f *runtimeFloor) spec(args ...string) error {
	type object = map[string]any
	mount := func(at, kind string) object { return object{"destination": at, "type": kind, "source": kind} }
	raw, err := json.Marshal(object{
		"ociVersion": "1.0.2",
		"process":    object{"args": args, "env": []string{"PATH=/bin"}, "cwd": "/", "user": object{"uid": 0, "gid": 0}},
		"root":       object{"path": filepath.Join(f.b.dir, "rootfs"), "readonly": true},
		"mounts":     []object{mount("/proc", "proc"), mount("/dev", "tmpfs")},
		"linux":      object{"namespaces": []object{{"type": "pid"}, {"type": "ipc"}, {"type": "uts"}, {"type": "mount"}, {"type": "network"}}},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(f.bundle, "config.json"), raw, 0o600)
}

func (f *runtimeFloor) command(ctx context.Context, args ...string) *exec.Cmd {
	return exec.CommandContext(ctx, f.program, append(append([]string{"--root", f.root}, f.flags...), args...)...)
}

// run times the bare runtime from its start until PID 1 has said its first word.
func (f *runtimeFloor) run() (float64, error) {
	id := f.id()
	begin := time.Now()
	end, err := f.up(id)
	took := float64(time.Since(begin)) / float64(time.Millisecond)
	if err != nil {
		return 0, err
	}
	return took, end()
}

func (f *runtimeFloor) id() string {
	f.b.bare++
	return fmt.Sprintf("floor-%06d", f.b.bare)
}

// up runs a container in the foreground until it is ready; end ends it.
func (f *runtimeFloor) up(id string) (end func() error, err error) {
	cmd := f.command(f.b.ctx, "run", "--bundle", f.bundle, id)
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var stderr strings.Builder
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != "ready\n" {
		_ = cmd.Wait()
		return nil, fmt.Errorf("%s run says %q: %s", filepath.Base(f.program), line, stderr.String())
	}
	return func() error {
		_ = in.Close() // cat ends, and with it the container
		err := cmd.Wait()
		_ = f.command(context.WithoutCancel(f.b.ctx), "delete", "--force", id).Run()
		return err
	}, nil
}

// exec times the runtime's own exec of true in a container that stays.
func (f *runtimeFloor) exec() (float64, error) {
	return timed(func() error { return f.command(f.b.ctx, "exec", f.holder, "/bin/true").Run() })()
}

// process times fork, exec and wait of the same program on the host.
func (b *bench) process() (float64, error) {
	return timed(exec.CommandContext(b.ctx, filepath.Join(b.dir, "rootfs", "bin", "true")).Run)()
}

// pipe moves bytes from a program on the host through a pipe.
func (b *bench) pipe(n int64) func() (float64, error) {
	return rate(n, func() error {
		cmd := exec.CommandContext(b.ctx, filepath.Join(b.dir, "rootfs", "bin", "dd"), "if=/dev/zero", "bs=64k", "count="+strconv.FormatInt(n>>16, 10))
		out, err := cmd.StdoutPipe()
		if err != nil {
			return err
		}
		if err := cmd.Start(); err != nil {
			return err
		}
		if _, err := io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{out}, make([]byte, 128<<10)); err != nil {
			return err
		}
		return cmd.Wait()
	})
}

// writeFile writes bytes into a file on the host and syncs it.
func (b *bench) writeFile(data []byte) error {
	name := filepath.Join(b.dir, "floor-file")
	f, err := os.OpenFile(name, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(name) }()
	if _, err := f.Write(data); err != nil {
		_ = f.Close()
		return err
	}
	return errors.Join(f.Sync(), f.Close())
}

// engine is another container tool on this host with the same image.
type engine struct {
	b       *bench
	program string
	holder  string
}

// engines are those that are installed and answer.
func (b *bench) engines() []*engine {
	var found []*engine
	for _, program := range []string{"docker", "podman"} {
		if _, err := exec.LookPath(program); err != nil {
			continue
		}
		ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
		err := exec.CommandContext(ctx, program, "info").Run()
		cancel()
		if err != nil {
			b.report.note("%s is installed but does not answer", program)
			continue
		}
		e := &engine{b: b, program: program}
		tar := exec.CommandContext(b.ctx, "tar", "-c", "-C", filepath.Join(b.dir, "rootfs"), ".")
		load := exec.CommandContext(b.ctx, program, "import", "-", "shard-bench")
		pipe, err := tar.StdoutPipe()
		if err != nil {
			continue
		}
		load.Stdin = pipe
		if err := errors.Join(tar.Start(), load.Run(), tar.Wait()); err != nil {
			b.report.note("%s does not import the image: %v", program, err)
			continue
		}
		found = append(found, e)
	}
	return found
}

func (e *engine) run(args ...string) (string, error) {
	var stderr strings.Builder
	cmd := exec.CommandContext(e.b.ctx, e.program, args...)
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s %s: %w: %s", e.program, args[0], err, stderr.String())
	}
	return strings.TrimSpace(string(out)), nil
}

func (e *engine) close() {
	if e.holder != "" {
		_, _ = e.run("rm", "-f", e.holder)
	}
	_, _ = e.run("rmi", "-f", "shard-bench")
}

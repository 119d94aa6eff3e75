package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"
)

// inUse is how much memory, in MiB, the larger of the machines that are paused has filled with what no page has twice.
const inUse = 256

// filling is a script that goes on as then with so much memory in use: a program wants to write all of it at once, and its
// reader takes one byte.
func filling(then string) string {
	return fmt.Sprintf("dd if=/dev/urandom bs=%dM count=1 iflag=fullblock 2>/dev/null | { head -c 1 >/dev/null; %s; }", inUse, then)
}

// pauses measures pause and resume, of an idle machine and of one whose memory is in use, beside what the bare runtime takes to
// save such a machine on the disk and kill it, and to bring it back until its process 1 answers. A provider that cannot pause is passed over.
func (b *bench) pauses(p string) error {
	caps, err := b.client.Capabilities(b.ctx, p)
	if err != nil || !caps.Pause {
		return err
	}
	floor, err := b.floorOf(p)
	if err != nil {
		return err
	}
	const idle, bareIdle = "echo ready; exec sleep 1000000", "echo ready; exec cat"
	for _, m := range []struct {
		name, ours, bare string
		n                int
	}{
		{"idle", idle, bareIdle, b.o.n},
		{fmt.Sprintf("%d MiB in use", inUse), filling(idle), "exec 3<&0; " + filling(bareIdle+" 4<&0 <&3"), max(b.o.n/4, 2)},
	} {
		if err := floor.spec("/bin/sh", "-c", m.bare); err != nil {
			return err
		}
		if err := b.pausesOf(p, m.name, m.ours, m.n, floor); err != nil {
			return fmt.Errorf("%s: %w", m.name, err)
		}
	}
	return nil
}

// pausesOf measures them of a sandbox with a process that says when it is ready.
func (b *bench) pausesOf(p, name, script string, n int, floor *runtimeFloor) error {
	id, err := b.create(p)
	if err != nil {
		return err
	}
	if _, err := b.cli("run", id, "--name", "holder", "sh", "-c", script); err != nil {
		return err
	}
	log, err := b.client.ProcessLog(b.ctx, id, "holder", true)
	if err != nil {
		return err
	}
	_, err = bufio.NewReader(log).ReadString('\n')
	if err := errors.Join(err, log.Close()); err != nil {
		return err
	}
	bare, err := floor.boot("run", "ready\n")
	if err != nil {
		return err
	}
	defer func() { bare.end() }()
	saved := filepath.Join(b.dir, "saved")
	var resumes, bareResumes []float64
	pause := func() (float64, error) {
		took, err := timed(func() error { _, err := b.client.Pause(b.ctx, id); return err })()
		if err != nil {
			return 0, err
		}
		back, err := timed(func() error { _, err := b.client.Resume(b.ctx, id); return err })()
		resumes = append(resumes, back)
		return took, err
	}
	barePause := func() (float64, error) {
		if err := errors.Join(os.RemoveAll(saved), os.Mkdir(saved, 0o700)); err != nil {
			return 0, err
		}
		took, err := timed(func() error { return bare.pause(saved) })()
		bare.end()
		if err != nil {
			return 0, err
		}
		back, err := timed(func() (err error) { bare, err = floor.boot("restore", "", "--image-path", saved); return err })()
		bareResumes = append(bareResumes, back)
		return took, err
	}
	what := filepath.Base(floor.program)
	if err := b.sample(p+" pause, "+name, n, targets[p]["pause, "+name], what+" save, fsync, kill", pause, barePause, "ms"); err != nil {
		return err
	}
	resumed := &row{Name: p + " resume, " + name, Unit: "ms", Target: targets[p]["resume, "+name], Ours: resumes[1:]}
	if len(bareResumes) > 1 {
		resumed.Floor, resumed.What = bareResumes[1:], what+" restore, first answer"
	}
	b.addRow(resumed)
	return b.remove(id)
}

// bareMachine is a container of the bare runtime that answers what it is told, and can be saved.
type bareMachine struct {
	f   *runtimeFloor
	id  string
	cmd *exec.Cmd
	in  io.Closer
	pid int
}

// boot runs or restores a container in the foreground until it has said greeting and answers.
func (f *runtimeFloor) boot(verb, greeting string, more ...string) (_ *bareMachine, err error) {
	m := &bareMachine{f: f, id: f.id()}
	pidFile := filepath.Join(f.bundle, "pid")
	args := append([]string{verb, "--bundle", f.bundle, "--pid-file", pidFile}, more...)
	m.cmd = f.command(f.b.ctx, append(args, m.id)...)
	in, err := m.cmd.StdinPipe()
	if err != nil {
		return m, err
	}
	out, err := m.cmd.StdoutPipe()
	if err != nil {
		return m, err
	}
	m.in = in
	var stderr strings.Builder
	m.cmd.Stderr = &stderr
	if err := m.cmd.Start(); err != nil {
		return m, err
	}
	read := bufio.NewReader(out)
	for _, want := range []string{greeting, "x\n"} {
		if want == "" {
			continue
		}
		if want == "x\n" {
			if _, err := io.WriteString(in, want); err != nil {
				return m, err
			}
		}
		if line, err := read.ReadString('\n'); err != nil || line != want {
			return m, fmt.Errorf("%s %s says %q: %s", filepath.Base(f.program), verb, line, stderr.String())
		}
	}
	raw, err := os.ReadFile(pidFile)
	if err == nil {
		m.pid, err = strconv.Atoi(strings.TrimSpace(string(raw)))
	}
	return m, err
}

// pause saves the machine into dir, where it then survives the host, and kills it.
func (m *bareMachine) pause(dir string) error {
	if out, err := m.f.command(m.f.b.ctx, "save", "--image-path", dir, m.id).CombinedOutput(); err != nil {
		return fmt.Errorf("save: %w: %s", err, out)
	}
	saved, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range saved {
		file, err := os.Open(filepath.Join(dir, e.Name()))
		if err != nil {
			return err
		}
		if err := errors.Join(file.Sync(), file.Close()); err != nil {
			return err
		}
	}
	if err := syscall.Kill(m.pid, syscall.SIGKILL); err != nil {
		return err
	}
	_ = m.cmd.Wait() // it was killed
	return nil
}

// end takes the container away, in whatever state.
func (m *bareMachine) end() {
	if m.cmd.Process == nil {
		return
	}
	_ = m.in.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.f.b.ctx), time.Minute)
	defer cancel()
	_ = m.f.command(ctx, "delete", "--force", m.id).Run()
	if m.cmd.ProcessState == nil {
		_ = m.cmd.Wait()
	}
}

package main

import (
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// targets of the design, in the units of the rows; absent is none.
var targets = map[string]map[string]float64{
	"runc": {"create": 45, "first output": 50, "exec API": 2, "exec CLI": 10, "stop": 30, "start": 45, "remove": 30,
		"output": 800, "put": 400, "get": 400, "forward": 1000, "memory": 1},
	"gvisor": {"create": 140, "first output": 150, "exec API": 8, "exec CLI": 16, "stop": 30, "start": 140, "remove": 30,
		"output": 400, "put": 150, "get": 150, "forward": 200, "memory": 15, "pause, idle": 110, "resume, idle": 170},
}

// provider measures every verb with one provider.
func (b *bench) provider(p string) error {
	target := targets[p]
	floor, err := b.floorOf(p)
	if err != nil {
		b.report.note("%s: no bare runtime beside it: %v", p, err)
	}
	var bare, bareExec func() (float64, error)
	runtimeName := ""
	if floor != nil {
		bare, runtimeName = floor.run, filepath.Base(floor.program)
		floor.holder = floor.id()
		end, err := floor.up(floor.holder)
		if err != nil {
			b.report.note("%s: the bare runtime does not run: %v", p, err)
			bare = nil
		} else {
			bareExec = floor.exec
			defer func() { _ = end() }()
		}
	}
	id, err := b.life(p, target, bare, runtimeName)
	if err != nil {
		return err
	}
	if err := b.commands(p, id, target, bareExec, runtimeName); err != nil {
		return err
	}
	if err := b.files(p, id, target); err != nil {
		return err
	}
	if err := b.forwards(p, id, target); err != nil {
		return err
	}
	if err := b.remove(id); err != nil {
		return err
	}
	if err := b.pauses(p); err != nil {
		return err
	}
	if err := b.parallel(p); err != nil {
		return err
	}
	return b.memory(p, target["memory"])
}

// life measures creates, stops, starts and removes beside the bare runtime, and leaves one sandbox.
func (b *bench) life(p string, target map[string]float64, bare func() (float64, error), runtimeName string) (string, error) {
	var last string
	drop := func() error {
		if last == "" {
			return nil
		}
		id := last
		last = ""
		return b.remove(id)
	}
	create := func() (v float64, err error) {
		if err := drop(); err != nil {
			return 0, err
		}
		return timed(func() error { last, err = b.create(p); return err })()
	}
	if err := b.sample(p+" create → running", b.o.n, target["create"], runtimeName+" run, first word", create, bare, "ms"); err != nil {
		return "", err
	}
	firstOutput := func() (float64, error) {
		if err := drop(); err != nil {
			return 0, err
		}
		return timed(func() (err error) {
			if last, err = b.create(p); err != nil {
				return err
			}
			return b.exec(last, io.Discard, "echo", "x")
		})()
	}
	if err := b.sample(p+" create → first output", b.o.n, target["first output"], runtimeName+" run, first word", firstOutput, bare, "ms"); err != nil {
		return "", err
	}
	id := last
	last = ""
	stopped := timed(func() error { _, err := b.client.Stop(b.ctx, id); return err })
	var starts, removes []float64
	stopStart := func() (float64, error) {
		v, err := stopped()
		if err != nil {
			return 0, err
		}
		begin := time.Now()
		_, err = b.client.Start(b.ctx, id)
		starts = append(starts, float64(time.Since(begin))/float64(time.Millisecond))
		return v, err
	}
	if err := b.sample(p+" stop", b.o.n, target["stop"], "", stopStart, nil, "ms"); err != nil {
		return "", err
	}
	b.add(p+" start", "ms", target["start"], starts[1:]...)
	for range b.o.n {
		victim, err := b.create(p)
		if err != nil {
			return "", err
		}
		v, err := timed(func() error { return b.remove(victim) })()
		if err != nil {
			return "", err
		}
		removes = append(removes, v)
	}
	b.add(p+" remove --force of a running one", "ms", target["remove"], removes...)
	return id, nil
}

// commands measures what runs in a sandbox, and its output.
func (b *bench) commands(p, id string, target map[string]float64, bareExec func() (float64, error), runtimeName string) error {
	if err := b.sample(p+" exec true, API", 5*b.o.n, target["exec API"], "fork+exec+wait", timed(func() error { return b.exec(id, io.Discard, "true") }), b.process, "ms"); err != nil {
		return err
	}
	// A named process is durable when it is answered: beside an exec's start it costs a record, written and synced.
	runs := 0
	process := func() (float64, error) {
		name := fmt.Sprintf("p%d", runs%8)
		runs++
		req := shard.RunRequest{Name: &name, Command: []string{"true"}, Restart: &shard.RestartSpec{Policy: shard.RestartNo}}
		return b.apart(func() error { _, err := b.client.RunProcess(b.ctx, id, req); return err })
	}
	started := func() (float64, error) {
		return b.apart(func() error {
			_, err := b.client.Exec(b.ctx, id, shard.ExecRequest{Command: []string{"true"}})
			return err
		})
	}
	if err := b.sample(p+" process start, API", 5*b.o.n, 0, "the start of an exec", process, started, "ms"); err != nil {
		return err
	}
	b.over(b.report.Rows[len(b.report.Rows)-1], 1)
	cliExec := timed(func() error { _, err := b.cli("exec", id, "true"); return err })
	if err := b.sample(p+" exec true, CLI", b.o.n, target["exec CLI"], runtimeName+" exec", cliExec, bareExec, "ms"); err != nil {
		return err
	}
	const outBytes = 512 << 20
	output := rate(outBytes, func() error {
		return b.exec(id, io.Discard, "dd", "if=/dev/zero", "bs=64k", fmt.Sprintf("count=%d", outBytes>>16))
	})
	return b.sample(p+" exec output", max(b.o.n/4, 2), target["output"], "a pipe on the host", output, b.pipe(outBytes), "MB/s")
}

// apart times f once what went before has come to rest: a program's end costs about as much as its start.
func (b *bench) apart(f func() error) (float64, error) {
	time.Sleep(50 * time.Millisecond)
	return timed(f)()
}

// add records samples that have no floor.
func (b *bench) add(name, unit string, target float64, samples ...float64) {
	b.addRow(&row{Name: name, Unit: unit, Ours: samples, Target: target})
}

func (b *bench) addRow(w *row) {
	b.report.Rows = append(b.report.Rows, w)
	b.report.line(w)
}

// files measures copies in and out.
func (b *bench) files(p, id string, target map[string]float64) error {
	small, large := make([]byte, 1<<20), make([]byte, 200<<20)
	_, _ = rand.Read(small)
	_, _ = rand.Read(large)
	local, back := filepath.Join(b.dir, "small"), filepath.Join(b.dir, "back")
	if err := os.WriteFile(local, small, 0o600); err != nil {
		return err
	}
	in := timed(func() error { _, err := b.cli("cp", local, id+":/small"); return err })
	write := timed(func() error { return b.writeFile(small) })
	if err := b.sample(p+" cp 1 MiB in, CLI", b.o.n, 0, "write+fsync on the host", in, write, "ms"); err != nil {
		return err
	}
	out := timed(func() error { _, err := b.cli("cp", id+":/small", back); return err })
	if err := b.sample(p+" cp 1 MiB out, CLI", b.o.n, 0, "write+fsync on the host", out, write, "ms"); err != nil {
		return err
	}
	put := rate(int64(len(large)), func() error {
		return b.client.PutFile(b.ctx, id, "/large", bytes.NewReader(large), int64(len(large)), client.WriteOptions{})
	})
	writeLarge := rate(int64(len(large)), func() error { return b.writeFile(large) })
	n := max(b.o.n/4, 2)
	if err := b.sample(p+" put 200 MiB, API", n, target["put"], "write+fsync on the host", put, writeLarge, "MB/s"); err != nil {
		return err
	}
	get := rate(int64(len(large)), func() error {
		body, _, err := b.client.GetFile(b.ctx, id, "/large")
		if err != nil {
			return err
		}
		defer func() { _ = body.Close() }()
		got, err := io.Copy(io.Discard, body)
		if err == nil && got != int64(len(large)) {
			err = fmt.Errorf("%d bytes came back", got)
		}
		return err
	})
	if err := b.sample(p+" get 200 MiB, API", n, target["get"], "", get, nil, "MB/s"); err != nil {
		return err
	}
	largeFile := filepath.Join(b.dir, "large")
	if err := os.WriteFile(largeFile, large, 0o600); err != nil {
		return err
	}
	defer func() { _ = os.Remove(largeFile) }()
	cpIn := rate(int64(len(large)), func() error { _, err := b.cli("cp", largeFile, id+":/large2"); return err })
	if err := b.sample(p+" cp 200 MiB in, CLI", n, target["put"], "write+fsync on the host", cpIn, writeLarge, "MB/s"); err != nil {
		return err
	}
	cpOut := rate(int64(len(large)), func() error { _, err := b.cli("cp", id+":/large2", back); return err })
	return b.sample(p+" cp 200 MiB out, CLI", n, target["get"], "write+fsync on the host", cpOut, writeLarge, "MB/s")
}

// parallel measures how many creates per second eight clients get done.
func (b *bench) parallel(p string) error {
	const clients, each = 8, 4
	var mu sync.Mutex
	var ids []string
	var errs []error
	var wg sync.WaitGroup
	begin := time.Now()
	for range clients {
		wg.Go(func() {
			for range each {
				s, err := b.client.Create(b.ctx, shard.CreateRequest{Image: image, Provider: p}, nil)
				mu.Lock()
				if err != nil {
					errs = append(errs, err)
				} else {
					ids = append(ids, s.ID)
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	perSecond := float64(len(ids)) / time.Since(begin).Seconds()
	for _, id := range ids {
		errs = append(errs, b.remove(id))
	}
	b.add(p+" creates, 8 at once", "/s", 0, perSecond)
	return errors.Join(errs...)
}

// memory measures what idle sandboxes take: the proportional share of all their processes, and of the daemon.
func (b *bench) memory(p string, target float64) error {
	daemonBefore := pss(b.daemon.Process.Pid)
	for _, n := range []int{1, b.o.density} {
		var ids []string
		for range n {
			id, err := b.create(p)
			if err != nil {
				return err
			}
			ids = append(ids, id)
		}
		time.Sleep(2 * time.Second)
		var total float64
		for _, id := range ids {
			for _, pid := range processesOf(id) {
				total += pss(pid)
			}
		}
		daemon := pss(b.daemon.Process.Pid)
		b.add(fmt.Sprintf("%s idle memory each, of %d", p, n), "MB", target, (total+max(daemon-daemonBefore, 0))/float64(n))
		if n > 1 {
			b.add(fmt.Sprintf("daemon, with %d %s sandboxes", n, p), "MB", 60, daemon)
		}
		for _, id := range ids {
			if err := b.remove(id); err != nil {
				return err
			}
		}
	}
	return nil
}

// common measures what has no provider.
func (b *bench) common() error {
	nothing := timed(func() error { _, err := b.cli("--version"); return err })
	if err := b.sample("shard --version", b.o.n, 8, "fork+exec+wait", nothing, b.process, "ms"); err != nil {
		return err
	}
	for range b.o.records {
		// Records that fail at once: what is measured is the list.
		if err := b.failedRecord(); err != nil {
			return err
		}
	}
	list := timed(func() error {
		l, err := b.client.Sandboxes(b.ctx, true, client.Page{})
		if err == nil && len(l.Sandboxes) < b.o.records {
			err = fmt.Errorf("%d records", len(l.Sandboxes))
		}
		return err
	})
	if err := b.sample(fmt.Sprintf("list of %d, API", b.o.records), b.o.n, 0, "", list, nil, "ms"); err != nil {
		return err
	}
	cli := timed(func() error { _, err := b.cli("list", "--all"); return err })
	if err := b.sample(fmt.Sprintf("list of %d, CLI", b.o.records), b.o.n, 0, "", cli, nil, "ms"); err != nil {
		return err
	}
	for _, e := range b.engines() {
		if err := b.engine(e); err != nil {
			b.report.note("%s: %v", e.program, err)
		}
		e.close()
	}
	return nil
}

// failedRecord makes one record without a sandbox.
func (b *bench) failedRecord() error {
	s, err := b.client.Create(b.ctx, shard.CreateRequest{Image: "127.0.0.1:1/no/such:image"}, nil)
	if err == nil || s != nil && s.ID != "" {
		return nil
	}
	return fmt.Errorf("make a record: %w", err)
}

// engine measures another tool for comparison.
func (b *bench) engine(e *engine) error {
	run := timed(func() error { _, err := e.run("run", "--rm", "shard-bench", "/bin/echo", "x"); return err })
	if err := b.sample(e.program+" run --rm echo", b.o.n, 0, "", run, nil, "ms"); err != nil {
		return err
	}
	holder, err := e.run("run", "-d", "shard-bench", "/bin/sleep", "100000")
	if err != nil {
		return err
	}
	e.holder = holder
	command := timed(func() error { _, err := e.run("exec", holder, "/bin/true"); return err })
	return b.sample(e.program+" exec true", b.o.n, 0, "", command, nil, "ms")
}

// processesOf are the processes in the control groups of a sandbox.
func processesOf(id string) []int {
	seen := map[int]bool{}
	groups, _ := exec.Command("find", "/sys/fs/cgroup", "-type", "d", "-path", "*"+id+"*").Output()
	for _, group := range strings.Fields(string(groups)) {
		raw, _ := os.ReadFile(filepath.Join(group, "cgroup.procs"))
		for _, field := range strings.Fields(string(raw)) {
			var pid int
			if _, err := fmt.Sscan(field, &pid); err == nil {
				seen[pid] = true
			}
		}
	}
	var pids []int
	for pid := range seen {
		pids = append(pids, pid)
	}
	return pids
}

// pss is the proportional share of memory of a process, in MB.
func pss(pid int) float64 {
	raw, _ := os.ReadFile(fmt.Sprintf("/proc/%d/smaps_rollup", pid))
	for line := range strings.Lines(string(raw)) {
		if rest, ok := strings.CutPrefix(line, "Pss:"); ok {
			var kib float64
			_, _ = fmt.Sscan(rest, &kib)
			return kib * 1024 / 1e6
		}
	}
	return 0
}

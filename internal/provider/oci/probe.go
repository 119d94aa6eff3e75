//go:build linux

package oci

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"

	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

// trialTime bounds the run of a runtime to see whether it works.
const trialTime = 30 * time.Second

// probed is the result of the last probe that found the provider to work, and of which program.
type probed struct {
	report provider.Report
	stamp  string
}

// Probe implements provider.Provider. It boots one empty machine, and remembers success until the program changes.
func (p *OCI) Probe(ctx context.Context) provider.Report {
	name := p.flavour.name
	switch {
	case p.opt.Runtime == "":
		return provider.Report{Reason: fmt.Sprintf("%s is not installed: %s", name, p.flavour.install)}
	case p.opt.Init == "":
		return provider.Report{Reason: "shard-init is missing: install shard again"}
	case p.opt.Cgroups == nil:
		return provider.Report{Reason: "this host has no control groups that the daemon can use: see its log"}
	}
	stamp := stampOf(p.opt.Runtime) + stampOf(p.opt.Init)
	if last := p.probed.Load(); last != nil && last.stamp == stamp {
		return last.report
	}
	ctx, cancel := context.WithTimeout(ctx, trialTime)
	defer cancel()
	version, err := p.version(ctx)
	if err != nil {
		p.opt.Log.Warn("the runtime does not run", "err", err)
		return provider.Report{Reason: fmt.Sprintf("the program of %s does not run: %s", name, p.flavour.install)}
	}
	report := provider.Report{Version: version.number}
	if report.Reason = p.flavour.refuses(version); report.Reason != "" {
		return report
	}
	if err := p.trial(ctx); err != nil {
		p.opt.Log.Warn("a trial machine did not start", "err", err)
		report.Reason = fmt.Sprintf("%s does not start on this host: the daemon's log says why", name)
		return report
	}
	report.Available = true
	p.probed.Store(&probed{report: report, stamp: stamp})
	return report
}

// stampOf changes whenever the program is replaced.
func stampOf(program string) string {
	info, err := os.Stat(program)
	if err != nil {
		return ""
	}
	return fmt.Sprintf("%s %d %d;", program, info.Size(), info.ModTime().UnixNano())
}

// version is what a runtime says of itself.
type version struct {
	number string
	text   []byte
}

var versionPattern = regexp.MustCompile(`(?m)^\S+ version (\S+)`)

func (p *OCI) version(ctx context.Context) (version, error) {
	cmd := exec.CommandContext(ctx, p.opt.Runtime, "--version")
	cmd.Env = []string{}
	out, err := cmd.Output()
	if err != nil {
		return version{}, fmt.Errorf("ask for the version: %w", err)
	}
	m := versionPattern.FindSubmatch(out)
	if m == nil {
		return version{}, errors.New("ask for the version: the answer names none")
	}
	return version{number: string(m[1]), text: out}, nil
}

var runcPattern = regexp.MustCompile(`^(\d+)\.(\d+)`)

// refuseRunc wants 1.1, the first that reports its features and knows the system call filter's errno rules.
func refuseRunc(v version) string {
	m := runcPattern.FindStringSubmatch(v.number)
	if m == nil {
		return "the version of runc is unknown: install runc 1.1 or later"
	}
	major, _ := strconv.Atoi(m[1])
	minor, _ := strconv.Atoi(m[2])
	if major < 1 || major == 1 && minor < 1 {
		return fmt.Sprintf("runc %s is too old: install runc 1.1 or later", v.number)
	}
	if !bytes.Contains(v.text, []byte("libseccomp")) {
		return "this runc cannot filter system calls: install one that is built with libseccomp"
	}
	return ""
}

// The beginnings of names that trials leave in RunDir when their daemon is killed.
const (
	trialDir = "trial-"
	trialID  = "probe-"
)

// clearTrials removes what is left of trials in an earlier daemon, which may have been killed in the middle of one: first
// the machines, which may still be writing, then the files. What stays is in nobody's way.
func (o *Options) clearTrials() {
	entries, err := os.ReadDir(o.RunDir)
	if err != nil {
		o.Log.Warn("look for old trials", "err", err)
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), cleanup)
	defer cancel()
	for _, e := range entries {
		machine := strings.HasPrefix(e.Name(), trialID)
		if !machine && !strings.HasPrefix(e.Name(), trialDir) {
			continue
		}
		if machine && o.Cgroups != nil {
			if err := o.Cgroups.Destroy(ctx, e.Name()); err != nil {
				o.Log.Warn("end an old trial", "err", err)
			}
		}
		for range 20 { // a runtime that was just being started may add a file under our hands
			if err = os.RemoveAll(filepath.Join(o.RunDir, e.Name())); err == nil {
				break
			}
			time.Sleep(25 * time.Millisecond)
		}
		if err != nil {
			o.Log.Warn("remove an old trial", "err", err)
		}
	}
}

// trial boots a machine with an empty root and waits for the agent's answer, then removes it.
func (p *OCI) trial(ctx context.Context) (err error) {
	dir, err := os.MkdirTemp(p.opt.RunDir, trialDir)
	if err != nil {
		return fmt.Errorf("make a directory for the trial: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	var name [6]byte
	_, _ = rand.Read(name[:])
	spec := provider.Spec{ID: trialID + hex.EncodeToString(name[:]), Hostname: "probe", Root: filepath.Join(dir, "root"), Dir: dir}
	if err := os.Mkdir(spec.Root, 0o755); err != nil {
		return fmt.Errorf("make a root for the trial: %w", err)
	}
	started, err := p.Start(ctx, spec)
	if err != nil {
		return err
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanup)
		defer cancel()
		err = errors.Join(err, started.Kill(ctx), started.Close(), p.Destroy(ctx, spec))
	}()
	conn, err := started.Dial(ctx)
	if err != nil {
		return fmt.Errorf("reach the agent: %w", err)
	}
	defer func() { _ = conn.Close() }()
	return hello(ctx, conn)
}

// hello asks the agent for no more than a sign of life.
func hello(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	greeting := make([]byte, len(guest.HostMagic)+guest.TokenSize+guest.EpochSize)
	_, _ = rand.Read(greeting[copy(greeting, guest.HostMagic):])
	if _, err := conn.Write(greeting); err != nil {
		return fmt.Errorf("greet the agent: %w", err)
	}
	answer := make([]byte, len(guest.GuestMagic)+guest.EpochSize)
	if _, err := io.ReadFull(conn, answer); err != nil {
		return fmt.Errorf("wait for the agent's answer: %w", err)
	}
	if !bytes.HasPrefix(answer, []byte(guest.GuestMagic)) {
		return errors.New("the agent's answer is not one")
	}
	return nil
}

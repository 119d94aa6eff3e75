//go:build linux

package oci

import (
	"os"
	"os/exec"
	"path/filepath"
)

// installed is where make install puts the programs that are not for people.
const installed = "/usr/local/libexec/shard"

// Programs are the paths of the programs that providers need; one that is missing is empty.
type Programs struct{ Init, Runsc, Runc string }

// FindPrograms looks beside the running program, then where make install puts them (in ../libexec/shard from there,
// whatever the prefix), and for runc also in PATH.
// SHARD_INIT_PATH, SHARD_RUNSC_PATH and SHARD_RUNC_PATH name other programs, such as the system's own runsc.
func FindPrograms() Programs {
	var dirs []string
	if self, err := os.Executable(); err == nil {
		if real, err := filepath.EvalSymlinks(self); err == nil {
			self = real
		}
		dirs = append(dirs, filepath.Dir(self), filepath.Join(filepath.Dir(self), "../libexec/shard"))
	}
	dirs = append(dirs, installed)
	p := Programs{Init: os.Getenv("SHARD_INIT_PATH"), Runsc: os.Getenv("SHARD_RUNSC_PATH"), Runc: os.Getenv("SHARD_RUNC_PATH")}
	for name, path := range map[string]*string{"shard-init": &p.Init, "shard-runsc": &p.Runsc, "runc": &p.Runc} {
		if *path == "" {
			*path = find(dirs, name)
		}
	}
	if p.Runc == "" {
		if path, err := exec.LookPath("runc"); err == nil {
			p.Runc, _ = filepath.Abs(path)
		}
	}
	return p
}

func find(dirs []string, name string) string {
	for _, dir := range dirs {
		path := filepath.Join(dir, name)
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path
		}
	}
	return ""
}

package agent

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	fileTime = 5 * time.Second  // for file operations that are given up to undo what they made
	killTime = 10 * time.Second // for what got KILL to be gone
	tellTime = 2 * time.Second  // for the last words of processes to go to the host
)

// boot prepares the sandbox's files for a start. Nothing of the guest runs yet, but its files may be of its making.
func (a *agent) boot(r *request) error {
	var args guest.BootArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	_ = unix.Sethostname([]byte(args.Hostname)) // the provider has set it where PID 1 may not
	if !args.First {
		// The guest may have made anything of its files, full disks included. Each command says what that breaks; a sandbox that
		// does not start would keep its files from everybody for good.
		if content, given := args.Files["/etc/resolv.conf"]; given {
			_ = replaceFile("/etc/resolv.conf", content)
		}
		_ = os.MkdirAll(string(args.Workdir), 0o755)
		return nil
	}
	for name, content := range args.Files {
		if err := replaceFile(name, content); err != nil {
			return shard.Wrap(shard.CodeInternal, err, "cannot write %s in the sandbox: %s", name, reason(err))
		}
	}
	if dir := string(args.Workdir); dir != "" {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return shard.Wrap(shard.CodeInvalidRequest, err, "cannot make the workdir %s in the sandbox: %s", shard.Quote(dir), reason(err))
		}
	}
	_, err := lookupUser(args.User)
	return err
}

// replaceFile puts a regular file in the place of whatever name is: a link there, dangling or not, is not followed.
func replaceFile(name, content string) error {
	dir := filepath.Dir(name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for try := 0; ; try++ {
		temp := name + ".shard-" + strconv.Itoa(try)
		fd, err := unix.Open(temp, unix.O_WRONLY|unix.O_CREAT|unix.O_EXCL|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0o644)
		if err == unix.EEXIST && try < 100 {
			continue
		}
		if err != nil {
			return &fs.PathError{Op: "open", Path: temp, Err: err}
		}
		f := os.NewFile(uintptr(fd), temp)
		_, err = f.WriteString(content)
		if err2 := f.Close(); err == nil {
			err = err2
		}
		if err == nil {
			err = os.Rename(temp, name)
		}
		if err != nil {
			os.Remove(temp)
		}
		return err
	}
}

// reason is the last part of err, without the agent's own paths.
func reason(err error) string {
	var errno unix.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// stop ends every process but PID 1: TERM, a time to go, KILL. No command starts any more. Then what the guest wrote
// is brought to its disk.
func (a *agent) stop(r *request) error {
	var args guest.StopArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	grace := min(max(time.Duration(args.GraceMillis)*time.Millisecond, 0), time.Hour)
	a.starting.Lock()
	a.mu.Lock()
	a.stopping = true
	a.mu.Unlock()
	a.starting.Unlock()

	r.s.endFiles(fileTime)
	_ = unix.Kill(-1, unix.SIGTERM)
	if !a.waitAlone(grace, 0) && !a.waitAlone(killTime, unix.SIGKILL) {
		return shard.Errorf(shard.CodeInternal, "processes of the sandbox are still there after KILL")
	}
	a.sup.tell(tellTime)
	// Not sync: with a kernel that is the host's, that would wait for every other sandbox's disk.
	root, err := unix.Open("/", unix.O_RDONLY|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	if err == nil {
		err = unix.Syncfs(root)
		unix.Close(root)
	}
	if err != nil {
		return shard.Wrap(shard.CodeInternal, err, "the sandbox's files could not be brought to disk: %s", err.Error())
	}
	return nil
}

// endFiles gives up the session's file operations, so that they undo what is half made, and waits for them at most for d.
func (s *session) endFiles(d time.Duration) {
	s.mu.Lock()
	var all []*request
	for _, r := range s.streams {
		if _, ok := handlers[r.op]; ok {
			all = append(all, r)
		}
	}
	s.mu.Unlock()
	for _, r := range all {
		r.end()
	}
	for end := time.Now().Add(d); len(s.slot) > 0 && time.Now().Before(end); {
		time.Sleep(time.Millisecond)
	}
}

// waitAlone waits until PID 1 is alone, at most for d, and sends sig again and again to what is left.
func (a *agent) waitAlone(d time.Duration, sig unix.Signal) bool {
	end := time.Now().Add(d)
	pause := time.Millisecond
	for {
		if sig != 0 {
			_ = unix.Kill(-1, sig)
		}
		a.reaper.reap()
		if a.alone() {
			return true
		}
		if time.Now().After(end) {
			return false
		}
		time.Sleep(pause)
		pause = min(2*pause, 20*time.Millisecond)
	}
}

// alone says whether no process but PID 1 is left; kernel threads do not count.
func (a *agent) alone() bool {
	if unix.Kill(-1, 0) == unix.ESRCH {
		return true
	}
	if a.reaper.reap() {
		return false
	}
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return true
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err == nil && pid != 1 && !isKernelThread(pid) {
			return false
		}
	}
	return true
}

func isKernelThread(pid int) bool {
	const kthread = 0x00200000 // PF_KTHREAD
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return true // gone meanwhile
	}
	fields := strings.Fields(string(stat[strings.LastIndexByte(string(stat), ')')+1:]))
	if len(fields) < 7 {
		return false
	}
	flags, _ := strconv.ParseUint(fields[6], 10, 64)
	return flags&kthread != 0
}

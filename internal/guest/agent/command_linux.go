package agent

import (
	"errors"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	maxCommands = 4096 // held at once, ended ones included
	defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
)

// command is one exec, or one run of a process. An exec runs on when the session is lost, and is held until the host
// forgets it.
type command struct {
	id    string
	pid   int
	tty   *os.File // the terminal's master side, nil without one
	in    *inbox   // nil: /dev/null
	input *os.File // where in goes: the pipe, or tty
	out   *output
	// over takes the exit of a process's run; nil for an exec. What is left of a run's process group ends with it.
	over chan guest.Exit
	held bool // stopped by quiesce; guarded by agent.mu
}

// ended is called once by the reaper.
func (c *command) ended(status unix.WaitStatus) {
	exit := guest.Exit{Code: status.ExitStatus()}
	if status.Signaled() {
		exit = guest.Exit{Signal: int(status.Signal())}
	}
	if c.in != nil {
		c.in.close()
		c.input.SetWriteDeadline(time.Unix(1, 0)) // a process left behind may hold a full pipe
	}
	c.out.finish(exit)
	if c.over != nil {
		c.over <- exit // has room
	}
}

// exec starts a command and sends its output.
func (a *agent) exec(r *request) (guest.Done, error) {
	var spec guest.ExecSpec
	if err := r.Args(&spec); err != nil {
		return guest.Done{}, err
	}
	if spec.ID == "" || len(spec.ID) > 128 || len(spec.Argv) == 0 || spec.Argv[0] == "" {
		return guest.Done{}, shard.Invalidf("a command needs an id of at most 128 bytes and a program")
	}
	user, err := lookupUser(spec.User)
	if err != nil {
		return guest.Done{}, err
	}
	c := &command{id: spec.ID, out: newOutput()}
	if err := a.hold(c, r, &spec, user); err != nil {
		return guest.Done{}, err
	}
	return c.serve(r, 0, spec.Tail)
}

// hold starts c and enters it among the commands, unless the session ends or the sandbox stops first.
func (a *agent) hold(c *command, r *request, spec *guest.ExecSpec, user guest.UserHead) error {
	a.starting.RLock()
	defer a.starting.RUnlock()
	select {
	case <-r.gone:
		return errGone
	default:
	}
	a.mu.Lock()
	_, taken := a.commands[c.id]
	var err error
	switch {
	case a.stopping:
		err = shard.Errorf(shard.CodeSandboxNotRunning, "the sandbox is stopping")
	case taken:
		err = shard.Invalidf("the command id %s is taken", shard.Quote(c.id))
	case len(a.commands) >= maxCommands:
		err = shard.Errorf(shard.CodeExecLimit, "shard-init holds %d commands", maxCommands)
	default:
		a.commands[c.id] = nil
	}
	a.mu.Unlock()
	if err != nil {
		return err
	}
	err = a.start(c, r, spec, user)
	a.mu.Lock()
	defer a.mu.Unlock()
	if err != nil {
		delete(a.commands, c.id)
		return err
	}
	a.commands[c.id] = c
	return nil
}

// find returns a command that was started. It waits for those that are being started.
func (a *agent) find(id string) (*command, error) {
	a.starting.Lock()
	defer a.starting.Unlock()
	a.mu.Lock()
	defer a.mu.Unlock()
	if c := a.commands[id]; c != nil {
		return c, nil
	}
	return nil, shard.Errorf(shard.CodeNotFound, "shard-init holds no command %s", shard.Quote(id))
}

// resume attaches the stream to a command that an earlier session started, and lets it go on if that quiesced.
func (a *agent) resume(r *request) (guest.Done, error) {
	var args guest.ResumeArgs
	if err := r.Args(&args); err != nil {
		return guest.Done{}, err
	}
	c, err := a.find(args.ID)
	if err != nil {
		return guest.Done{}, err
	}
	a.mu.Lock()
	held := c.held
	c.held = false
	a.mu.Unlock()
	if held {
		a.reaper.signalAll(c, unix.SIGCONT)
	}
	return c.serve(r, args.Offset, args.Tail)
}

// serve sends the output behind offset, and the exit when all of it was sent. tail is what the host takes beyond the window
// at the end.
func (c *command) serve(r *request, offset int64, tail int) (guest.Done, error) {
	if !c.out.attach(r, offset, min(max(tail, 0), guest.Tail)) {
		return guest.Done{}, shard.Invalidf("the output of command %s at byte %d is not held", shard.Quote(c.id), offset)
	}
	head := guest.ExecHead{PID: c.pid}
	if c.in != nil {
		head.StdinBytes = r.feed(c.in)
	}
	if err := r.Head(head); err != nil {
		return guest.Done{}, err
	}
	return c.out.send(r)
}

// start forks the command with its pipes or terminal.
func (a *agent) start(c *command, r *request, spec *guest.ExecSpec, user guest.UserHead) (err error) {
	dir := string(spec.Workdir)
	if dir == "" {
		dir = "/"
	}
	if err := checkDir(dir); err != nil {
		return err
	}
	var child []int // the command's ends
	var ours, outs []*os.File
	defer func() {
		for _, fd := range child {
			unix.Close(fd)
		}
		if err != nil {
			closeFiles(ours)
		}
	}()
	attr := &syscall.ProcAttr{
		Dir: dir,
		Env: environment(spec, user),
		Sys: &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user.UID, Gid: user.GID, Groups: user.Groups}},
	}
	if spec.TTY {
		master, slave, err := openTerminal(spec.Rows, spec.Cols, user)
		if err != nil {
			return err
		}
		child, ours = []int{slave}, []*os.File{master}
		attr.Files = []uintptr{uintptr(slave), uintptr(slave), uintptr(slave)}
		attr.Sys.Setsid, attr.Sys.Setctty = true, true
		c.tty, c.input = master, master
		outs = ours
	} else {
		attr.Sys.Setpgid = true
		attr.Files = []uintptr{uintptr(a.null), 0, 0}
		for n := range 3 {
			switch {
			case n == 0 && !spec.Stdin:
				continue
			case n == 2 && c.over != nil: // one channel, in the order of writing
				attr.Files[2] = attr.Files[1]
				continue
			}
			end := 0 // we read its output
			if n == 0 {
				end = 1
			}
			mine, theirs, err := pipe(end)
			if err != nil {
				return shard.Wrap(shard.CodeInternal, err, "the sandbox has no descriptors left for a command")
			}
			child, ours = append(child, theirs), append(ours, mine)
			attr.Files[n] = uintptr(theirs)
			if n == 0 {
				c.input = mine
			} else {
				outs = append(outs, mine)
			}
		}
	}
	if spec.Stdin {
		c.in = r.inbox().keep()
	}
	c.out.begin(outs)
	if err := a.launch(c, spec.Argv, dir, attr); err != nil {
		c.out.begin(nil)
		return err
	}
	for i, f := range outs {
		go c.out.follow(f, byte(guest.ChannelStdout+i))
	}
	if spec.Stdin {
		go c.feed()
	}
	return nil
}

// launch finds the program as a shell would, with the command's own PATH and from its own directory, and executes the
// first that can be.
func (a *agent) launch(c *command, argv []string, dir string, attr *syscall.ProcAttr) error {
	name := argv[0]
	candidates := []string{name}
	if !strings.Contains(name, "/") {
		list := defaultPath
		for _, kv := range attr.Env {
			if v, ok := strings.CutPrefix(kv, "PATH="); ok {
				list = v
			}
		}
		candidates = candidates[:0]
		for entry := range strings.SplitSeq(list, ":") {
			if entry == "" {
				entry = "."
			}
			candidates = append(candidates, entry+"/"+name)
		}
	}
	var refused error // why a program that is there was not executed
	for _, candidate := range candidates {
		full := candidate
		if !strings.HasPrefix(full, "/") {
			full = dir + "/" + full
		}
		info, err := os.Stat(full)
		switch {
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			continue
		case err != nil:
			refused = err
			continue
		case info.IsDir():
			refused = unix.EISDIR
			continue
		case !info.Mode().IsRegular() || info.Mode()&0o111 == 0:
			refused = unix.EACCES
			continue
		}
		err = a.reaper.start(c, candidate, argv, attr)
		switch {
		case err == nil:
			return nil
		case errors.Is(err, unix.EACCES):
			refused = err
			continue
		case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
			return notStarted(126, "cannot run %s: its interpreter is missing", shard.Quote(name))
		case errors.Is(err, unix.ENOEXEC):
			return notStarted(126, "cannot run %s: it is neither a program of this machine nor a script with #!", shard.Quote(name))
		case errors.Is(err, unix.E2BIG), errors.Is(err, unix.ENAMETOOLONG): // gVisor says the second
			return notStarted(126, "cannot run %s: its arguments and environment are too large", shard.Quote(name))
		case errors.Is(err, unix.EAGAIN), errors.Is(err, unix.ENOMEM):
			return shard.Wrap(shard.CodeInternal, err, "the sandbox has no room for another process: %s", err.Error())
		}
		return notStarted(126, "cannot run %s: %s", shard.Quote(name), err.Error())
	}
	switch {
	case errors.Is(refused, unix.EISDIR):
		return notStarted(126, "cannot run %s: it is a directory", shard.Quote(name))
	case refused != nil:
		return notStarted(126, "cannot run %s in %s: permission denied", shard.Quote(name), shard.Quote(dir))
	}
	return notStarted(127, "%s was not found in the sandbox", shard.Quote(name))
}

// feed writes the host's input to the command until its EOF, or until the command no longer takes it; what comes
// after that is dropped. A terminal stays open, its readers own it.
func (c *command) feed() {
	f := c.input
	broken, last := false, byte('\n')
	for {
		p, err := c.in.pop()
		if err != nil {
			if c.tty == nil {
				f.Close()
			} else if err != errGone {
				endTerminalInput(f, last)
			}
			return
		}
		if !broken {
			if _, err := f.Write(p); err != nil {
				broken = true
				if c.tty == nil {
					f.Close()
				}
			}
			if len(p) > 0 {
				last = p[len(p)-1]
			}
		}
		c.in.consumed(len(p))
		recycle(p)
	}
}

// environment is the command's, with HOME and TERM when they are missing.
func environment(spec *guest.ExecSpec, user guest.UserHead) []string {
	home, term := false, !spec.TTY
	for _, kv := range spec.Env {
		home = home || strings.HasPrefix(kv, "HOME=")
		term = term || strings.HasPrefix(kv, "TERM=")
	}
	env := []string(spec.Env)
	if !home {
		env = append(env, "HOME="+user.Home)
	}
	if !term {
		env = append(env, "TERM=xterm")
	}
	return env
}

// checkDir refuses a working directory that is none; whether the user may enter it is the kernel's to say.
func checkDir(dir string) error {
	if !strings.HasPrefix(dir, "/") {
		return shard.Invalidf("workdir %s is not valid: give an absolute path", shard.Quote(dir))
	}
	info, err := os.Stat(dir)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENOTDIR):
		return notStarted(126, "workdir %s does not exist in the sandbox", shard.Quote(dir))
	case err != nil:
		return notStarted(126, "workdir %s cannot be entered", shard.Quote(dir))
	case !info.IsDir():
		return notStarted(126, "workdir %s is not a directory", shard.Quote(dir))
	}
	return nil
}

func notStarted(code int, format string, args ...any) error {
	err := shard.Errorf(shard.CodeCommandNotStarted, format, args...)
	err.ExitCode = code
	return err
}

// pipe makes a pipe. The agent's end, fds[mine], can be waited for without a thread.
func pipe(mine int) (ours *os.File, theirs int, err error) {
	var fds [2]int
	if err := unix.Pipe2(fds[:], unix.O_CLOEXEC); err != nil {
		return nil, -1, err
	}
	_ = unix.SetNonblock(fds[mine], true)
	return os.NewFile(uintptr(fds[mine]), "pipe"), fds[1-mine], nil
}

func closeFiles(files []*os.File) {
	for _, f := range files {
		f.Close()
	}
}

package agent

import (
	"crypto/subtle"
	"maps"
	"os"
	"runtime"
	"runtime/debug"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

const (
	helloTime = 5 * time.Second // for a new channel to say hello, and for every step of an attach
	maxHellos = 4               // new channels that may be about to say hello
)

// agent is the state of PID 1.
type agent struct {
	reaper *reaper
	sup    supervisor
	null   int // /dev/null, opened before anything in the sandbox could replace it
	ops    map[string]func(*request) (guest.Done, error)

	// starting is held for reading while a command is started, and for writing to see all that were: it comes before mu.
	starting sync.RWMutex

	mu       sync.Mutex // never held over I/O
	token    [guest.TokenSize]byte
	hasToken bool
	session  *session
	commands map[string]*command // nil while it is being started
	stopping bool

	quiet atomic.Bool // a checkpoint is near: a new channel may take the place of the first at any moment

	install sync.Mutex // held while a session takes the place of another; comes before mu
}

// Main is the program shard-init: PID 1 of a sandbox, or with the argument attach its helper. It returns only from the
// helper.
func Main() {
	if len(os.Args) == 2 && os.Args[1] == "attach" {
		if err := attach(); err != nil {
			os.Stderr.WriteString("shard-init attach: " + err.Error() + "\n")
			os.Exit(1)
		}
		return
	}
	if os.Getpid() != 1 {
		os.Stderr.WriteString("shard-init: runs as PID 1 of a sandbox only\n")
		os.Exit(2)
	}
	debug.SetGCPercent(25)
	runtime.GOMAXPROCS(1) // nearly all time is spent in the kernel: a second one would only be woken for nothing
	if err := run(); err != nil {
		os.Stderr.WriteString("shard-init: " + err.Error() + "\n")
		os.Exit(1)
	}
}

// run is PID 1. It returns only when there never was a channel.
func run() error {
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
	unix.Umask(0o022)
	os.Clearenv()
	swallowSignals()
	closeInherited()

	null, err := unix.Open("/dev/null", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return &os.PathError{Op: "open", Path: "/dev/null", Err: err}
	}
	channel, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return os.NewSyscallError("stdin", err)
	}
	if err := unix.Dup3(null, 0, 0); err != nil {
		return os.NewSyscallError("dup3", err)
	}
	a := &agent{reaper: newReaper(), null: null, commands: map[string]*command{}}
	a.ops = map[string]func(*request) (guest.Done, error){
		guest.OpPing: plain(func(*request) error { return nil }),
		guest.OpBoot: plain(a.boot),
		guest.OpUser: plain(user),
		guest.OpExec: a.exec, guest.OpResume: a.resume, guest.OpExecs: plain(a.execs),
		guest.OpSignal: plain(a.signal), guest.OpResize: plain(a.resize), guest.OpForget: plain(a.forget),
		guest.OpRun: a.run, guest.OpFollow: a.follow, guest.OpStates: plain(a.states), guest.OpKill: plain(a.kill), guest.OpDrop: plain(a.drop),
		guest.OpStop: plain(a.stop), guest.OpQuiesce: plain(a.quiesce), guest.OpWatch: plain(watch), guest.OpDial: plain(dial),
	}
	go a.reaper.run()

	if listens, _ := unix.GetsockoptInt(channel, unix.SOL_SOCKET, unix.SO_ACCEPTCONN); listens == 1 {
		return a.accept(channel, func(fd int) { a.greet(fd, true) })
	}
	if err := a.listenAttach(); err != nil {
		return err
	}
	c, err := newConn(channel)
	if err != nil {
		return os.NewSyscallError("stdin", err)
	}
	c.birth = true
	a.serveBirth(c)
	return nil
}

// closeInherited closes what the runtime left open. Only what is not close-on-exec can have been inherited, so the Go
// runtime's own descriptors stay.
func closeInherited() {
	fds := make([]int, 0, 64)
	if entries, err := os.ReadDir("/proc/self/fd"); err == nil {
		for _, e := range entries {
			if fd, err := strconv.Atoi(e.Name()); err == nil {
				fds = append(fds, fd)
			}
		}
	} else {
		for fd := range 1024 {
			fds = append(fds, fd)
		}
	}
	for _, fd := range fds {
		if flags, err := unix.FcntlInt(uintptr(fd), unix.F_GETFD, 0); fd > 2 && err == nil && flags&unix.FD_CLOEXEC == 0 {
			unix.Close(fd)
		}
	}
}

// accept takes connections for ever; at most maxHellos calls of greet run at once.
func (a *agent) accept(fd int, greet func(fd int)) error {
	if err := unix.SetNonblock(fd, true); err != nil {
		return err
	}
	raw, err := os.NewFile(uintptr(fd), "listener").SyscallConn()
	if err != nil {
		return err
	}
	slots := make(chan struct{}, maxHellos)
	for {
		var conn int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			conn, _, failed = unix.Accept4(int(fd), unix.SOCK_CLOEXEC)
			return failed != unix.EAGAIN
		})
		if err != nil {
			return err
		}
		if failed != nil { // a connection that went away, or no descriptor left: neither may end PID 1
			time.Sleep(10 * time.Millisecond)
			continue
		}
		slots <- struct{}{}
		go func() {
			defer func() { <-slots }()
			greet(conn)
		}()
	}
}

// greet waits for the hello of a new channel, and serves it if the token is right. birth says that the channel comes
// from the socket that PID 1 was born with, which only the host can reach.
func (a *agent) greet(fd int, birth bool) {
	c, err := newConn(fd)
	if err != nil {
		return
	}
	c.f.SetReadDeadline(time.Now().Add(helloTime))
	token, epoch, err := c.readHello()
	if err != nil || !a.trust(token, birth) {
		c.f.Close()
		return
	}
	c.f.SetReadDeadline(time.Time{})
	go func() {
		defer c.f.Close()
		for {
			err := a.serve(c, epoch)
			if err != errHello {
				return
			}
			if token, epoch, err = c.readHello(); err != nil || !a.trust(token, birth) {
				return
			}
		}
	}()
}

// serveBirth serves the connected socket that PID 1 was born with, for ever: a runtime that restores the sandbox puts
// a new socket in its place, so neither its end nor a broken frame nor another session is final.
func (a *agent) serveBirth(c *conn) {
	for {
		token, epoch, err := c.readHello()
		switch {
		case err == nil && a.trust(token, true):
			err = a.serve(c, epoch)
		case err == nil:
			continue
		}
		switch {
		case err == errHello || err == errProtocol:
		case a.quiet.Load():
			time.Sleep(5 * time.Millisecond)
		default:
			time.Sleep(200 * time.Millisecond)
		}
	}
}

// trust says whether token is the sandbox's. The first one that comes by the birth channel sets it.
func (a *agent) trust(token [guest.TokenSize]byte, birth bool) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.hasToken && birth {
		a.token, a.hasToken = token, true
	}
	return a.hasToken && subtle.ConstantTimeCompare(a.token[:], token[:]) == 1
}

// serve runs a session on c in place of the one before.
func (a *agent) serve(c *conn, epoch [guest.EpochSize]byte) error {
	s := newSession(a, c)
	a.quiet.Store(false)
	a.replace(s)
	err := c.begin(s, epoch)
	if err == nil {
		err = s.run()
	}
	s.lose()
	return err
}

func (a *agent) replace(s *session) {
	a.install.Lock()
	defer a.install.Unlock()
	a.mu.Lock()
	old := a.session
	a.session = s
	a.mu.Unlock()
	if old != nil {
		old.lose()
		if old.c != s.c && !old.c.birth {
			old.c.f.SetReadDeadline(time.Unix(1, 0)) // its goroutine closes it
		}
	}
}

// plain makes an operation of a handler that has no exit.
func plain(h handler) func(*request) (guest.Done, error) {
	return func(r *request) (guest.Done, error) { return guest.Done{}, h(r) }
}

// quiesce leaves PID 1 with no channel but its first: a checkpoint cannot hold one that came later. Commands stop until they
// are resumed, so that those which end with this session do nothing any more when the sandbox goes on.
func (a *agent) quiesce(r *request) error {
	if err := checkSockets(); err != nil {
		return err
	}
	c := r.s.c
	a.quiet.Store(true)
	a.starting.Lock()
	a.mu.Lock()
	commands := slices.Collect(maps.Values(a.commands)) // all of them have been started
	a.mu.Unlock()
	for _, cmd := range commands {
		if a.reaper.signalAll(cmd, unix.SIGSTOP) {
			a.mu.Lock()
			cmd.held = true
			a.mu.Unlock()
		}
	}
	a.starting.Unlock()
	if !c.birth {
		r.after = func() { c.f.SetReadDeadline(time.Unix(1, 0)) } // its goroutine closes it
	}
	return r.Head(guest.QuiesceHead{Closes: !c.birth})
}

func user(r *request) error {
	var args guest.UserArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	head, err := lookupUser(args.User)
	if err != nil {
		return err
	}
	return r.Head(head)
}

func (a *agent) execs(r *request) error {
	a.starting.Lock()
	a.mu.Lock()
	head := guest.ExecsHead{Execs: make([]guest.HeldExec, 0, len(a.commands))}
	for id, c := range a.commands {
		head.Execs = append(head.Execs, guest.HeldExec{ID: id, Exit: c.out.done(), Offset: c.out.held()})
	}
	a.mu.Unlock()
	a.starting.Unlock()
	return r.Head(head)
}

func (a *agent) signal(r *request) error {
	var args guest.SignalArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	sig := unix.SIGTERM
	switch args.Signal {
	case "TERM":
	case "KILL":
		sig = unix.SIGKILL
	default:
		return shard.Invalidf("signal %s is not valid: use TERM or KILL", shard.Quote(args.Signal))
	}
	c, err := a.find(args.ID)
	if err != nil {
		return err
	}
	signal := a.reaper.signal
	a.mu.Lock()
	if c.held && sig == unix.SIGKILL {
		signal = a.reaper.signalAll // so that nothing of it stays behind, stopped
	}
	a.mu.Unlock()
	if !signal(c, sig) {
		return shard.Errorf(shard.CodeExecExited, "command %s has ended", shard.Quote(args.ID))
	}
	return nil
}

func (a *agent) resize(r *request) error {
	var args guest.ResizeArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	c, err := a.find(args.ID)
	if err != nil {
		return err
	}
	if c.tty != nil {
		if raw, err2 := c.tty.SyscallConn(); err2 == nil {
			err2 = raw.Control(func(fd uintptr) { err = resizeTerminal(int(fd), args.Rows, args.Cols) })
			if err == nil && err2 == nil {
				return nil
			}
		}
	}
	return shard.Errorf(shard.CodeNotFound, "command %s has no terminal, or has ended", shard.Quote(args.ID))
}

// forget is idempotent: a host that does not know whether it was heard asks again.
func (a *agent) forget(r *request) error {
	var args guest.ForgetArgs
	if err := r.Args(&args); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	c, ok := a.commands[args.ID]
	if ok && (c == nil || c.out.done() == nil) {
		return shard.Errorf(shard.CodeExecRunning, "command %s still runs", shard.Quote(args.ID))
	}
	delete(a.commands, args.ID)
	return nil
}

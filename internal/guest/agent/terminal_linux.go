package agent

import (
	"os"
	"strconv"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// openTerminal makes a terminal of the sandbox's own devpts; its size is set before any program can read it.
func openTerminal(rows, cols uint16, user guest.UserHead) (master *os.File, slave int, err error) {
	wrap := func(err error) error {
		return shard.Wrap(shard.CodeInternal, err, "the sandbox has no terminal to give: %s", err.Error())
	}
	m, err := unix.Open("/dev/ptmx", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return nil, -1, wrap(err)
	}
	master = os.NewFile(uintptr(m), "ptmx")
	s, err := openSlave(m)
	if err != nil {
		master.Close()
		return nil, -1, wrap(err)
	}
	_ = unix.Fchown(s, int(user.UID), -1) // so that the user can open it by name; a devpts may refuse
	if rows != 0 || cols != 0 {
		if err := resizeTerminal(m, rows, cols); err != nil {
			master.Close()
			unix.Close(s)
			return nil, -1, wrap(err)
		}
	}
	return master, s, nil
}

func openSlave(master int) (int, error) {
	if err := unix.IoctlSetPointerInt(master, unix.TIOCSPTLCK, 0); err != nil {
		return -1, err
	}
	const flags = unix.O_RDWR | unix.O_NOCTTY | unix.O_CLOEXEC
	if fd, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(master), unix.TIOCGPTPEER, flags); errno == 0 {
		return int(fd), nil
	}
	n, err := unix.IoctlGetInt(master, unix.TIOCGPTN) // kernels without TIOCGPTPEER have only the name
	if err != nil {
		return -1, err
	}
	return unix.Open("/dev/pts/"+strconv.Itoa(n), flags, 0)
}

func resizeTerminal(fd int, rows, cols uint16) error {
	return unix.IoctlSetWinsize(fd, unix.TIOCSWINSZ, &unix.Winsize{Row: rows, Col: cols})
}

// endTerminalInput types the terminal's end-of-file character: twice behind an unfinished line, which the first one
// only hands over.
func endTerminalInput(f *os.File, last byte) {
	eof := byte(4)
	if raw, err := f.SyscallConn(); err == nil {
		_ = raw.Control(func(fd uintptr) {
			if t, err := unix.IoctlGetTermios(int(fd), unix.TCGETS); err == nil && t.Cc[unix.VEOF] != 0 {
				eof = t.Cc[unix.VEOF]
			}
		})
	}
	typed := []byte{eof, eof}
	if last == '\n' || last == '\r' || last == eof {
		typed = typed[:1]
	}
	_, _ = f.Write(typed)
}

package agent

import (
	"fmt"
	"runtime"
	"sync"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// creds are whose rights a file operation has, and who owns what it makes.
type creds struct {
	uid, gid uint32
	groups   []uint32
}

// credsOf looks a user up as images name them.
func credsOf(user string) (creds, error) {
	head, err := lookupUser(user)
	return credsOfHead(head), err
}

func credsOfHead(h guest.UserHead) creds { return creds{h.UID, h.GID, h.Groups} }

// own are the agent's supplementary groups, which a thread gets back. The first call must be on a thread that has them.
var own = sync.OnceValues(func() ([]uint32, error) {
	groups, err := unix.Getgroups()
	ids := make([]uint32, len(groups))
	for i, g := range groups {
		ids[i] = uint32(g)
	}
	return ids, err
})

// do runs f with the rights of c. It is for system calls on paths, never for waiting: what an open descriptor can do
// does not depend on who uses it, so contents are copied outside of do.
//
// The kernel keeps credentials per thread, so f runs on a thread of its own for as long as it takes. Only the effective
// ids change: the real ones stay root's, so that nobody in the sandbox may signal PID 1, and the saved ones let the
// thread come back. One that cannot come back is never used again: it ends with its goroutine. (setfsuid, made for
// this, is missing in gVisor.)
func (c creds) do(f func() error) error {
	if c.uid == 0 && c.gid == 0 {
		return f()
	}
	groups, err := own()
	if err != nil {
		return fmt.Errorf("read the agent's groups: %w", err)
	}
	result := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		err := c.assume()
		if err == nil {
			err = f()
		} else {
			err = shard.Wrap(shard.CodeInvalidRequest, err, "cannot act as user %d and group %d in the sandbox", c.uid, c.gid)
		}
		if restore(groups) == nil {
			runtime.UnlockOSThread()
		}
		result <- err
	}()
	return <-result
}

func (c creds) assume() error {
	if err := setgroups(c.groups); err != nil {
		return fmt.Errorf("set groups: %w", err)
	}
	if err := effective(unix.SYS_SETRESGID, c.gid); err != nil {
		return fmt.Errorf("set group: %w", err)
	}
	if err := effective(unix.SYS_SETRESUID, c.uid); err != nil {
		return fmt.Errorf("set user: %w", err)
	}
	return nil
}

func restore(groups []uint32) error {
	if err := effective(unix.SYS_SETRESUID, 0); err != nil { // first: it brings the right to do the rest back
		return err
	}
	if err := effective(unix.SYS_SETRESGID, 0); err != nil {
		return err
	}
	return setgroups(groups)
}

// effective sets the effective id of this thread alone; the wrappers of package syscall would set all threads'.
func effective(call uintptr, id uint32) error {
	const keep = ^uintptr(0)
	if _, _, errno := unix.RawSyscall(call, keep, uintptr(id), keep); errno != 0 {
		return errno
	}
	return nil
}

func setgroups(ids []uint32) error {
	_, _, errno := unix.RawSyscall(unix.SYS_SETGROUPS, uintptr(len(ids)), uintptr(unsafe.Pointer(unsafe.SliceData(ids))), 0)
	if errno != 0 {
		return errno
	}
	return nil
}

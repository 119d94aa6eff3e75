package engine

import (
	"context"
	"errors"
	"os"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/useshards/shard/internal/guest"
)

const (
	passBuffer = 64 << 10 // bytes; more was no faster
	// passSmall is what a connection reads at once while the others hold passHeld bytes that nobody takes.
	passSmall = 2 << 10
	passHeld  = 64 << 20
	passLook  = time.Second // how often a connection that is not read is asked whether it was reset
)

var passBuffers = sync.Pool{New: func() any { return new([passBuffer]byte) }}

// passing bounds what all connections hold of what was read and is not written yet.
type passing struct{ held atomic.Int64 }

// buffer gives room for one read, and what frees it.
func (p *passing) buffer() (buf []byte, free func()) {
	if p.held.Add(passBuffer) <= passHeld {
		b := passBuffers.Get().(*[passBuffer]byte)
		return b[:], func() { passBuffers.Put(b); p.held.Add(-passBuffer) }
	}
	p.held.Add(-passBuffer)
	return make([]byte, passSmall), func() {}
}

// pass writes what can be read from one connection to another, until the first ends, and then ends the other's half. It holds
// no memory while there is nothing to read. The end of ctx interrupts it.
func (p *passing) pass(ctx context.Context, to, from guest.Duplex) error {
	raw, err := from.SyscallConn()
	if err != nil {
		return err
	}
	for {
		var buf []byte
		free := func() {}
		var n int
		var failed error
		err := raw.Read(func(fd uintptr) bool {
			buf, free = p.buffer()
			for {
				if n, failed = syscall.Read(int(fd), buf); failed != syscall.EINTR {
					break
				}
			}
			if failed == syscall.EAGAIN {
				free()
				free = func() {}
				return false
			}
			return true
		})
		if err == nil {
			err = failed
		}
		if err == nil && n > 0 {
			err = passOn(ctx, to, raw, buf[:n])
		}
		free()
		if err != nil {
			return err
		}
		if n <= 0 {
			if err := to.CloseWrite(); err != nil && !errors.Is(err, syscall.ENOTCONN) {
				return err
			}
			return nil
		}
	}
}

// passOn writes what was read from a connection, and looks now and then whether that was reset meanwhile.
func passOn(ctx context.Context, to guest.Duplex, from syscall.RawConn, p []byte) error {
	for {
		_ = to.SetWriteDeadline(time.Now().Add(passLook))
		if ctx.Err() != nil { // asked after the deadline is set, which may have undone that of the interruption
			return ctx.Err()
		}
		n, err := to.Write(p)
		if !errors.Is(err, os.ErrDeadlineExceeded) {
			return err
		}
		if p = p[n:]; guest.WasReset(from) {
			return syscall.ECONNRESET
		}
	}
}

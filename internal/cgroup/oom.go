//go:build linux

package cgroup

import (
	"errors"
	"io"
	"os"
	"sync/atomic"
	"time"
)

// OOMWatch tells of the processes of one group that the kernel killed for want of memory.
type OOMWatch struct {
	// C receives when Kills has grown; a receiver that is late finds one value, however many kills there were. It is closed
	// by Close, and when the group is removed.
	C <-chan struct{}

	event   *os.File // blocks in Read until something may have happened
	counter *os.File // holds "oom_kill N"
	kills   atomic.Int64
	closing chan struct{}
	done    chan struct{}
}

// newWatch starts the owner of event and counter. The count that belongs to an event follows it within settle.
func newWatch(event, counter *os.File, eventSize int, settle time.Duration) *OOMWatch {
	c := make(chan struct{}, 1)
	w := &OOMWatch{C: c, event: event, counter: counter, closing: make(chan struct{}), done: make(chan struct{})}
	told := w.Kills()
	go func() {
		defer close(w.done)
		defer close(c)
		buf := make([]byte, eventSize)
		for {
			if _, err := event.Read(buf); err != nil {
				return // Close
			}
			alive := w.awaitKill(told, settle)
			if now := w.kills.Load(); now > told {
				told = now
				select {
				case c <- struct{}{}:
				default:
				}
			}
			if !alive {
				return
			}
		}
	}()
	return w
}

// awaitKill waits until the count is above told, for at most settle; false: the watch has nothing more to see.
func (w *OOMWatch) awaitKill(told int64, settle time.Duration) bool {
	late := time.NewTimer(settle)
	defer late.Stop()
	for {
		alive := w.read()
		if !alive || w.kills.Load() > told {
			return alive
		}
		select {
		case <-w.closing:
			return false
		case <-late.C:
			return true
		case <-time.After(pollEvery):
		}
	}
}

// Kills is how many processes of the group the kernel has killed for want of memory since the group was made. After the
// group has been removed it is what was last read.
func (w *OOMWatch) Kills() int64 {
	w.read()
	return w.kills.Load()
}

// read brings kills up to date; false: the group is gone.
func (w *OOMWatch) read() bool {
	buf := make([]byte, 4096)
	n, err := w.counter.ReadAt(buf, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return false
	}
	kills := keyed(buf[:n], "oom_kill")
	for old := w.kills.Load(); kills > old && !w.kills.CompareAndSwap(old, kills); old = w.kills.Load() {
	}
	return true
}

// Close ends the watch, once, and waits for its goroutine. Kills stays valid.
func (w *OOMWatch) Close() error {
	w.read()
	close(w.closing)
	err := w.event.Close()
	<-w.done
	return errors.Join(err, w.counter.Close())
}

package cli

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"

	"golang.org/x/term"

	"github.com/useshards/shard"
)

// isTerminal says whether a stream of App is a terminal.
func isTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// terminalSize is the size of the first of the streams that is a terminal, nil when none is.
func terminalSize(streams ...any) *shard.Size {
	for _, s := range streams {
		if f, ok := s.(*os.File); ok {
			if cols, rows, err := term.GetSize(int(f.Fd())); err == nil {
				return &shard.Size{Rows: uint16(rows), Cols: uint16(cols)}
			}
		}
	}
	return nil
}

// rawTerminal puts stdin into raw mode, if it is a terminal, and returns what brings it back: safe to call at any time
// and more than once.
func (a *App) rawTerminal() (restore func(), err error) {
	if !isTerminal(a.In) {
		return func() {}, nil
	}
	fd := int(a.In.(*os.File).Fd())
	old, err := term.MakeRaw(fd)
	if err != nil {
		return nil, fmt.Errorf("put the terminal into raw mode: %w", err)
	}
	var once sync.Once
	restore = func() { once.Do(func() { _ = term.Restore(fd, old) }) }
	a.restore.Store(&restore)
	return restore, nil
}

// followSize calls resize with the terminal's size, now and whenever it changes. stop ends it and waits.
func (a *App) followSize(parent context.Context, resize func(context.Context, shard.Size)) (stop func()) {
	ctx, cancel := context.WithCancel(parent)
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, syscall.SIGWINCH)
	var last shard.Size
	if s := terminalSize(a.In, a.Out); s != nil {
		last = *s
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-changed:
			}
			if s := terminalSize(a.In, a.Out); s != nil && *s != last {
				last = *s
				resize(ctx, last)
			}
		}
	})
	return func() {
		signal.Stop(changed)
		cancel()
		wg.Wait()
	}
}

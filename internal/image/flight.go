package image

import (
	"context"
	"sync"
	"time"

	"github.com/useshards/shard"
)

// flight is one pull that any number of callers share. Events are kept as the state they lead to (a layer has one event,
// its latest), so a late or slow caller costs no memory and misses nothing that still matters.
type flight struct {
	cancel context.CancelFunc
	done   chan struct{}
	// img and err are the outcome, valid once done is closed.
	img *Image
	err error

	// waiters is guarded by Store.mu.
	waiters int

	mu      sync.Mutex // innermost: nothing is locked under it
	seq     int
	events  []event
	layer   map[int]int // number of a layer → place in events
	changed chan struct{}
}

type event struct {
	seq int
	at  time.Time
	shard.Progress
}

// layerEvery is how often one layer's bytes are worth an event.
const layerEvery = 100 * time.Millisecond

func newFlight(cancel context.CancelFunc) *flight {
	return &flight{cancel: cancel, done: make(chan struct{}), layer: map[int]int{}, changed: make(chan struct{})}
}

func (f *flight) publish(p shard.Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.seq++
	f.events = append(f.events, event{f.seq, time.Now(), p})
	f.wake()
}

// publishLayer tells how far layer i is. last is set for the final word on it, which is never dropped.
func (f *flight) publishLayer(i int, last bool, p shard.Progress) {
	f.mu.Lock()
	defer f.mu.Unlock()
	at, known := f.layer[i]
	switch {
	case !known:
		at = len(f.events)
		f.layer[i] = at
		f.events = append(f.events, event{})
	case !last && time.Since(f.events[at].at) < layerEvery:
		return
	}
	f.seq++
	f.events[at] = event{f.seq, time.Now(), p}
	f.wake()
}

func (f *flight) wake() {
	close(f.changed)
	f.changed = make(chan struct{})
}

// since gives the events later than seq, the newest seq, and a channel that closes when there are more.
func (f *flight) since(seq int) ([]shard.Progress, int, <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	var news []shard.Progress
	for _, e := range f.events {
		if e.seq > seq {
			news = append(news, e.Progress)
		}
	}
	return news, f.seq, f.changed
}

// join waits in the caller's goroutine for the flight to end, or for ctx, and hands on the progress meanwhile.
func (f *flight) join(ctx context.Context, progress func(shard.Progress)) error {
	for seq := 0; ; {
		news, latest, changed := f.since(seq)
		seq = latest
		if progress != nil {
			for _, p := range news {
				progress(p)
			}
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		default:
		}
		if len(news) > 0 {
			continue
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-changed:
		case <-f.done:
			if _, latest, _ := f.since(seq); latest == seq {
				return nil
			}
		}
	}
}

// keyed is a set of locks by name whose waiters can give up.
type keyed struct {
	mu   sync.Mutex
	held map[string]chan struct{}
}

// lock takes the lock called key, or fails with ctx.
func (k *keyed) lock(ctx context.Context, key string) (unlock func(), err error) {
	for {
		k.mu.Lock()
		ch, busy := k.held[key]
		if !busy {
			ch = make(chan struct{})
			if k.held == nil {
				k.held = map[string]chan struct{}{}
			}
			k.held[key] = ch
			k.mu.Unlock()
			return sync.OnceFunc(func() {
				k.mu.Lock()
				delete(k.held, key)
				k.mu.Unlock()
				close(ch)
			}), nil
		}
		k.mu.Unlock()
		select {
		case <-ch:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

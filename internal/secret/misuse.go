package secret

import (
	"context"
	"sync"
	"time"
)

// Misuse is what a sandbox tried with one placeholder, since it was last told: how often, and the newest case.
type Misuse struct {
	Sandbox, Secret string
	Count           int64
	At              time.Time
	Host, Reason    string
}

// misuses gathers what was tried until somebody takes it: one entry per sandbox and secret, so that no sandbox can fill it.
type misuses struct {
	mu      sync.Mutex
	waiting map[[2]string]*Misuse
	total   int64
	changed chan struct{} // holds one token while something waits
}

// Misused notes that a sandbox sent the placeholder of a secret that it has where the value must not go. It never waits.
func (s *Store) Misused(sandbox, name, host, reason string) {
	m := &s.misuses
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.waiting == nil {
		m.waiting = make(map[[2]string]*Misuse)
	}
	key := [2]string{sandbox, name}
	one := m.waiting[key]
	if one == nil {
		one = &Misuse{Sandbox: sandbox, Secret: name}
		m.waiting[key] = one
	}
	one.Count++
	one.At, one.Host, one.Reason = time.Now().UTC().Truncate(time.Microsecond), host, reason
	m.total++
	select {
	case m.changed <- struct{}{}:
	default:
	}
}

// Misuses waits for what was tried since the last call and takes it. One caller at a time.
func (s *Store) Misuses(ctx context.Context) ([]Misuse, error) {
	m := &s.misuses
	select {
	case <-ctx.Done():
		return nil, ctx.Err()
	case <-m.changed:
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]Misuse, 0, len(m.waiting))
	for _, one := range m.waiting {
		out = append(out, *one)
	}
	m.waiting = nil
	return out, nil
}

// MisuseCount is how many misuses there were since the store was opened.
func (s *Store) MisuseCount() int64 {
	s.misuses.mu.Lock()
	defer s.misuses.mu.Unlock()
	return s.misuses.total
}

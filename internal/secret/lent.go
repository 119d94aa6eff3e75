package secret

import "slices"

// Lend says which secrets a sandbox has, in place of what it had. None takes all away.
func (s *Store) Lend(sandbox string, names []string) {
	if len(names) == 0 {
		s.lent.Delete(sandbox)
		return
	}
	s.lent.Store(sandbox, slices.Clone(names))
}

// Held is what a sandbox may use now, with the values of now: to be asked for each request. A grant whose secret is gone or
// cannot be read is not among them. It never waits.
func (s *Store) Held(sandbox string) []Secret {
	names, ok := s.lent.Load(sandbox)
	if !ok {
		return nil
	}
	byName := *s.byName.Load()
	var out []Secret
	for _, name := range names.([]string) {
		if e := byName[name]; e != nil && e.unreadable == "" {
			out = append(out, e.Secret)
		}
	}
	return out
}

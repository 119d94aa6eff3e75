package engine

// RunningExecs is how many commands run now, in all sandboxes.
func (e *Engine) RunningExecs() int64 { return e.execs.Load() }

// ProviderNames are the providers that a create can ask for.
func (e *Engine) ProviderNames() []string {
	names := make([]string, 0, len(e.Providers))
	for _, p := range e.Providers {
		names = append(names, p.Name())
	}
	return names
}

package engine

// RunningExecs is how many commands run now, in all sandboxes.
func (e *Engine) RunningExecs() int64 { return e.execs.Load() }

// EgressVerdicts counts the egress decisions since the daemon began, by source and verdict.
func (e *Engine) EgressVerdicts() map[[2]string]int64 {
	return e.Enforcer.Verdicts()
}

// SecretMisuses counts the requests since the daemon began that carried a placeholder where its value must not go.
func (e *Engine) SecretMisuses() int64 { return e.Secrets.MisuseCount() }

// PoolLevels is how many disks and networks are ready for the next creates.
func (e *Engine) PoolLevels() (disks, networks int) { return e.Roots.Ready(), e.Net.Ready() }

// ProviderNames are the providers that a create can ask for.
func (e *Engine) ProviderNames() []string {
	names := make([]string, 0, len(e.Providers))
	for _, p := range e.Providers {
		names = append(names, p.Name())
	}
	return names
}

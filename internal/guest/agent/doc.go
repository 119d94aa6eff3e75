// Package agent is shard-init, PID 1 of every sandbox: it starts commands, keeps their output until the host holds it,
// reaps every orphan, and carries out file operations, all for the one host at the other end of its channel. It must
// stay small (no net, net/http or crypto/tls) and must trust nothing in the sandbox: every file, link and process
// there may be hostile, while the agent runs as its root.
package agent

package shard

import "time"

// The bodies of requests and answers that are no records: with these types and the records, api/openapi.json is complete.
// Next is the cursor of the next page, nil at the end; Warnings name entries of the store that could not be read.

// SandboxList is one page of sandboxes.
type SandboxList struct {
	Sandboxes []Sandbox `json:"sandboxes"`
	Next      *string   `json:"next"`
	Warnings  []string  `json:"warnings,omitempty"`
}

// ExecList is one page of a sandbox's commands.
type ExecList struct {
	Execs []Exec  `json:"execs"`
	Next  *string `json:"next"`
}

// ProcessList is every named process of a sandbox, in the order in which they first ran.
type ProcessList struct {
	Processes []Process `json:"processes"`
}

// EntryList is a directory, sorted by name.
type EntryList struct {
	Entries []FileEntry `json:"entries"`
}

// PolicyList is one page of policies.
type PolicyList struct {
	Policies []Policy `json:"policies"`
	Next     *string  `json:"next"`
	Warnings []string `json:"warnings,omitempty"`
}

// ImageList is one page of the images on the host.
type ImageList struct {
	Images   []Image  `json:"images"`
	Next     *string  `json:"next"`
	Warnings []string `json:"warnings,omitempty"`
}

// ProviderList is every provider of the daemon.
type ProviderList struct {
	Providers []ProviderInfo `json:"providers"`
}

// ScopeList is every valid scope, whatever the caller has of them.
type ScopeList struct {
	Scopes []Scope `json:"scopes"`
}

// VersionInfo is the daemon's version, and v0, the version of the API.
type VersionInfo struct {
	Version    string `json:"version"`
	APIVersion string `json:"api_version"`
}

// KillRequest ends a command. Signal is TERM, which it also is when empty, or KILL.
type KillRequest struct {
	Signal string `json:"signal,omitempty"`
}

// KillProcessRequest ends a named process: with TERM and after 30 s KILL, or with Force KILL at once.
type KillProcessRequest struct {
	Force bool `json:"force,omitempty"`
}

// ForkRequest names the copy that a fork makes.
type ForkRequest struct {
	Name string `json:"name,omitempty"`
}

// MkdirRequest makes a directory. Mode is permission bits in octal, 0755 when empty; Parents makes what is missing above
// it, and then a directory that is there already is no error.
type MkdirRequest struct {
	Path    string `json:"path"`
	Mode    string `json:"mode,omitempty"`
	Parents bool   `json:"parents,omitempty"`
	User    string `json:"user,omitempty"`
}

// PutPolicyRequest is the whole list of a policy's rules; none denies everything.
type PutPolicyRequest struct {
	Rules []PolicyRule `json:"rules"`
}

// AttachPolicyRequest names the policy that a sandbox gets.
type AttachPolicyRequest struct {
	Policy string `json:"policy"`
}

// SecretList is one page of secrets, without their values.
type SecretList struct {
	Secrets  []Secret `json:"secrets"`
	Next     *string  `json:"next"`
	Warnings []string `json:"warnings,omitempty"`
}

// PutSecretRequest makes a secret or replaces its value. What is left out stays as it is: a new secret needs destinations,
// and gets the placeholder mock-NAME. OnMisuse is none, pause or stop.
type PutSecretRequest struct {
	Value        string   `json:"value"`
	Destinations []string `json:"destinations,omitempty"`
	Placeholder  string   `json:"placeholder,omitempty"`
	OnMisuse     string   `json:"on_misuse,omitempty"`
}

// PullRequest names the image to pull.
type PullRequest struct {
	Ref string `json:"ref"`
}

// Empty is a body without fields.
type Empty struct{}

// CreateLine is one line of a create that reports its progress: any number of events, then a sandbox or an error.
type CreateLine struct {
	Event   *Progress    `json:"event,omitempty"`
	Sandbox *Sandbox     `json:"sandbox,omitempty"`
	Error   *ErrorDetail `json:"error,omitempty"`
}

// ImageLine is one line of a pull or an import: any number of events, then an image or an error.
type ImageLine struct {
	Event *Progress    `json:"event,omitempty"`
	Image *Image       `json:"image,omitempty"`
	Error *ErrorDetail `json:"error,omitempty"`
}

// RemovedImage is what the removal of an image left undone.
type RemovedImage struct {
	Warnings []string `json:"warnings"`
}

// PrunedImages are the references that a prune removed.
type PrunedImages struct {
	Removed  []string `json:"removed"`
	Warnings []string `json:"warnings"`
}

// The first byte of a message on the stream of a command or a process says what the rest is.
const (
	FrameStdin       = 0x00 // input, of any length; from the client
	FrameStdout      = 0x01
	FrameStderr      = 0x02
	FrameExit        = 0x03 // the end: an ExitMessage, a Process or a LogEnd
	FrameStdinClosed = 0x04 // the end of input; from the client
	FrameError       = 0x05 // the end for another reason: an ErrorBody
)

// ExitMessage is the closing message of an attached command (after the byte 0x03). Error says why it never started.
type ExitMessage struct {
	ExitStatus
	LostBytes int64  `json:"lost_bytes,omitempty"`
	Error     string `json:"error,omitempty"`
}

// LogEnd is the closing message of a followed log (after the byte 0x03): ended, stopped or removed.
type LogEnd struct {
	Reason string `json:"reason"`
}

// DaemonStatus is what the daemon says of itself, on its own host only.
type DaemonStatus struct {
	Version   string    `json:"version"`
	PID       int       `json:"pid"`
	StartedAt time.Time `json:"started_at"`
	Socket    string    `json:"socket"`
	// Provider is the default of new sandboxes, Capabilities what it can do.
	Provider     string             `json:"provider"`
	Capabilities DaemonCapabilities `json:"capabilities"`
	Proxy        ProxyPorts         `json:"proxy"`
	Tasks        []DaemonTask       `json:"tasks"`
	// Preview is the origin below which a shard serve on this host has its preview addresses; empty when there is none.
	Preview string `json:"preview,omitempty"`
}

// DaemonCapabilities are the verbs that not every provider has.
type DaemonCapabilities struct {
	Pause  bool `json:"pause"`
	Resume bool `json:"resume"`
	Fork   bool `json:"fork"`
	Port   bool `json:"port"`
	Swap   bool `json:"swap"`
}

// ProxyPorts are where the egress proxy listens; 0 means that there is none.
type ProxyPorts struct {
	PlainPort int `json:"plain_port"`
	TLSPort   int `json:"tls_port"`
}

// TaskBackoff is the state of a task that failed and waits to be started again.
const TaskBackoff = "backoff"

// DaemonTask is a part of the daemon that is started again when it fails.
type DaemonTask struct {
	Name      string `json:"name"`
	State     string `json:"state"`
	Restarts  int    `json:"restarts"`
	LastError string `json:"last_error,omitempty"`
}

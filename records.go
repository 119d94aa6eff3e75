// Package shard is the vocabulary of the product: records, states and the verbs they allow, error codes,
// names and sizes. Every other package speaks it. It imports the standard library only and does no I/O.
package shard

import "time"

// Sandbox is the public record of one sandbox.
type Sandbox struct {
	ID         string `json:"id"`
	Name       string `json:"name,omitempty"`
	Image      string `json:"image"`
	Digest     string `json:"digest,omitempty"`
	Snapshot   string `json:"snapshot,omitempty"`
	ForkedFrom string `json:"forked_from,omitempty"`
	Provider   string `json:"provider"`
	Kernel     string `json:"kernel,omitempty"`
	State      State  `json:"state"`
	// StoppedReason also says why the daemon itself paused it: for the misuse of a secret.
	StoppedReason string    `json:"stopped_reason,omitempty"`
	FailedReason  string    `json:"failed_reason,omitempty"`
	OOM           *OOM      `json:"oom,omitempty"`
	Resources     Resources `json:"resources"`
	Processes     []Process `json:"processes,omitempty"`
	Secrets       []string  `json:"secrets,omitempty"`
	// Misuses counts what the sandbox tried with placeholders, one entry per secret.
	Misuses   []SecretMisuse `json:"misuses,omitempty"`
	Policy    string         `json:"policy,omitempty"`
	Ports     []PortForward  `json:"ports,omitempty"`
	CreatedAt time.Time      `json:"created_at"`
	StartedAt *time.Time     `json:"started_at,omitempty"`
}

// Ref is how a person names the sandbox: its name, else its id.
func (s *Sandbox) Ref() string {
	if s.Name != "" {
		return s.Name
	}
	return s.ID
}

// Inspection is a Sandbox with its effective egress rules.
type Inspection struct {
	Sandbox
	Egress *Egress `json:"egress,omitempty"`
}

// Egress is what the host enforces for one sandbox. Missing means that the store lost the policy and nothing is reachable.
type Egress struct {
	Rules   []EffectiveRule `json:"rules"`
	Missing bool            `json:"missing,omitempty"`
}

// Resources are the bounds of a sandbox, in MiB and whole CPUs; 0 means no bound, except that a disk is always bounded.
type Resources struct {
	MemoryMiB int64 `json:"memory_mib"`
	VCPUs     int64 `json:"vcpus"`
	DiskMiB   int64 `json:"disk_mib"`
	SwapMiB   int64 `json:"swap_mib"`
}

// OOM counts the times the host ended the sandbox for want of memory.
type OOM struct {
	Kills     int        `json:"kills"`
	KilledAt  time.Time  `json:"killed_at"`
	RestartAt *time.Time `json:"restart_at,omitempty"`
}

// PortForward asks for a host port to be forwarded to the sandbox's 127.0.0.1.
type PortForward struct {
	HostPort  int  `json:"host_port"`
	GuestPort int  `json:"guest_port"`
	Public    bool `json:"public,omitempty"`
}

// ExitStatus is how a program ended. For an exec a death by signal shows as code 128+n and signal 0.
type ExitStatus struct {
	Code   int `json:"code"`
	Signal int `json:"signal"`
}

// Exec is the record of one command.
type Exec struct {
	ID         string      `json:"exec"`
	Sandbox    string      `json:"sandbox"`
	Command    []string    `json:"command"`
	State      ExecState   `json:"state"`
	ExitStatus *ExitStatus `json:"exit_status"`
	StartedAt  time.Time   `json:"started_at"`
	ExitedAt   *time.Time  `json:"exited_at"`
	Truncated  bool        `json:"truncated"`
	LostBytes  int64       `json:"lost_bytes"`
}

// ExecState says whether a command still runs.
type ExecState string

// The states of a command.
const (
	ExecRunning ExecState = "running"
	ExecExited  ExecState = "exited"
)

// Process is a named program under the sandbox's supervisor.
type Process struct {
	Name    string        `json:"name"`
	Command []string      `json:"command"`
	Env     []string      `json:"env,omitempty"`
	Workdir string        `json:"workdir,omitempty"`
	User    string        `json:"user,omitempty"`
	Restart RestartSpec   `json:"restart"`
	Killed  bool          `json:"killed,omitempty"`
	Status  ProcessStatus `json:"status"`
}

// The states of a named process. The host writes ProcessStopped, for a sandbox that went down under the process; the
// supervisor in the sandbox knows the others.
const (
	ProcessRunning    = "running"
	ProcessRestarting = "restarting"
	ProcessExited     = "exited"
	ProcessKilled     = "killed"
	ProcessGaveUp     = "gave-up"
	ProcessStopped    = "stopped"
)

// The restart policies of a named process.
const (
	RestartNo            = "no"
	RestartOnFailure     = "on-failure"
	RestartAlways        = "always"
	RestartUnlessStopped = "unless-stopped"
)

// MaxProcesses is how many named processes a sandbox has at most.
const MaxProcesses = 16

// ProcessStatus is where a named process stands.
type ProcessStatus struct {
	State     string      `json:"state"`
	Restarts  int         `json:"restarts"`
	Exit      *ExitStatus `json:"exit,omitempty"`
	StartedAt *time.Time  `json:"started_at,omitempty"`
}

// Live says whether the process runs or will run again.
func (s *ProcessStatus) Live() bool { return s.State == ProcessRunning || s.State == ProcessRestarting }

// RestartSpec says when the supervisor starts a process again. Backoff is in seconds, 0 to 60.
type RestartSpec struct {
	Policy  string  `json:"policy"`
	Retries int     `json:"retries,omitempty"`
	Backoff float64 `json:"backoff,omitempty"`
}

// Rule is one line of a policy.
type Rule struct {
	Action      string      `json:"action"`
	Destination Destination `json:"destination"`
	Protocol    string      `json:"protocol,omitempty"`
	Ports       []string    `json:"ports,omitempty"`
}

// Destination is what a rule is about: kind is cidr, domain, domain-suffix or group.
type Destination struct {
	Kind  string `json:"kind"`
	Value string `json:"value"`
}

// EffectiveRule is a Rule as enforced, with its position as id and why it is there when nobody wrote it.
type EffectiveRule struct {
	ID      string `json:"id"`
	Implied string `json:"implied,omitempty"`
	Rule
}

// Policy is a named list of egress rules, of which the first that matches decides.
type Policy struct {
	Name  string `json:"name"`
	Rules []Rule `json:"rules"`
}

// PolicyView is a Policy with what follows from it. DNS is open or closed; Holders are the sandboxes that have it.
type PolicyView struct {
	Policy
	DNS     string   `json:"dns"`
	Holders []string `json:"holders,omitempty"`
}

// The values of PolicyView.DNS: whether a sandbox with the policy can look up any name.
const (
	DNSOpen   = "open"
	DNSClosed = "closed"
)

// Secret is what can be seen of a secret: never its value. OnMisuse is pause or stop, and empty where a misuse is only counted.
type Secret struct {
	Name         string    `json:"name"`
	Destinations []string  `json:"destinations"`
	Placeholder  string    `json:"placeholder"`
	OnMisuse     string    `json:"on_misuse,omitempty"`
	UpdatedAt    time.Time `json:"updated_at"`
}

// SecretMisuse counts how often a sandbox sent the placeholder of a secret where its value must not go, and tells the newest
// case: the host that was meant, and why that was none of the secret's.
type SecretMisuse struct {
	Secret string    `json:"secret"`
	Count  int64     `json:"count"`
	LastAt time.Time `json:"last_at"`
	Host   string    `json:"host,omitempty"`
	Reason string    `json:"reason,omitempty"`
}

// PolicyRule is a rule as a person writes it: an action, allow or deny, and `DEST [tcp|udp[:PORTS]]`.
type PolicyRule struct {
	Action string `json:"action"`
	Rule   string `json:"rule"`
}

// Image is the record of an image on the host. Size is in bytes.
type Image struct {
	Reference string    `json:"reference"`
	Digest    string    `json:"digest"`
	Size      int64     `json:"size"`
	Created   time.Time `json:"created"`
	Broken    string    `json:"broken,omitempty"`
}

// StatHeader carries the FileEntry of the path, without its name, in answers of the routes of files and archives.
const StatHeader = "X-Shard-Stat"

// FileEntry describes one path in a sandbox: type is file, dir, symlink or other; mode holds the low twelve bits.
// A name that is not UTF-8 cannot stand in JSON: Name then shows U+FFFD for the odd bytes and NameBytes (base64 in JSON)
// holds the real ones, by which the entry can be addressed.
type FileEntry struct {
	Name      string    `json:"name,omitempty"`
	NameBytes []byte    `json:"name_bytes,omitempty"`
	Type      string    `json:"type"`
	Size      int64     `json:"size"`
	Mode      uint32    `json:"mode"`
	UID       uint32    `json:"uid"`
	GID       uint32    `json:"gid"`
	MTime     time.Time `json:"mtime"`
}

// Size is a terminal's, in character cells.
type Size struct {
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// Capabilities says which verbs a provider supports.
type Capabilities struct {
	Create   bool `json:"create"`
	Start    bool `json:"start"`
	Stop     bool `json:"stop"`
	Remove   bool `json:"remove"`
	Pause    bool `json:"pause"`
	Resume   bool `json:"resume"`
	Fork     bool `json:"fork"`
	Snapshot bool `json:"snapshot"`
	Port     bool `json:"port"`
	Swap     bool `json:"swap"`
}

// ProviderInfo says what one isolation provider is worth on this host.
type ProviderInfo struct {
	Name         string       `json:"name"`
	Available    bool         `json:"available"`
	Reason       string       `json:"reason,omitempty"`
	Default      bool         `json:"default"`
	Version      string       `json:"version,omitempty"`
	Capabilities Capabilities `json:"capabilities"`
}

// CreateRequest asks for a new sandbox: exactly one of Image and Snapshot.
type CreateRequest struct {
	Image     string            `json:"image,omitempty"`
	Snapshot  string            `json:"snapshot,omitempty"`
	Name      string            `json:"name,omitempty"`
	Provider  string            `json:"provider,omitempty"`
	Env       []string          `json:"env,omitempty"`
	Workdir   string            `json:"workdir,omitempty"`
	User      string            `json:"user,omitempty"`
	Secrets   []string          `json:"secrets,omitempty"`
	Policy    string            `json:"policy,omitempty"`
	Ports     []PortForward     `json:"ports,omitempty"`
	Resources *ResourcesRequest `json:"resources,omitempty"`
}

// ResourcesRequest holds the bounds asked for; nil means the default.
type ResourcesRequest struct {
	MemoryMiB *int64 `json:"memory_mib,omitempty"`
	VCPUs     *int64 `json:"vcpus,omitempty"`
	DiskMiB   *int64 `json:"disk_mib,omitempty"`
	SwapMiB   *int64 `json:"swap_mib,omitempty"`
}

// ExecRequest asks for a command in a running sandbox.
type ExecRequest struct {
	Command []string `json:"command"`
	Env     []string `json:"env,omitempty"`
	Workdir string   `json:"workdir,omitempty"`
	User    string   `json:"user,omitempty"`
	Stdin   bool     `json:"stdin,omitempty"`
	TTY     bool     `json:"tty,omitempty"`
	Size    *Size    `json:"size,omitempty"`
	Attach  bool     `json:"attach,omitempty"`
}

// RunRequest asks for a named process in a running sandbox. Name is the base name of the program when nil, Restart is
// unless-stopped when nil.
type RunRequest struct {
	Command []string     `json:"command"`
	Name    *string      `json:"name,omitempty"`
	Env     []string     `json:"env,omitempty"`
	Workdir string       `json:"workdir,omitempty"`
	User    string       `json:"user,omitempty"`
	Restart *RestartSpec `json:"restart,omitempty"`
}

// Progress is one step of a pull, as create and pull report it.
type Progress struct {
	// Status is cached, pulling, layer, unpacking, unpacked, building or pulled.
	Status    string `json:"status"`
	Reference string `json:"reference,omitempty"`
	Digest    string `json:"digest,omitempty"`
	// Layers counts the image's layers in pulling and unpacking; Layer is the number of one, from 1, in unpacked.
	Layers int `json:"layers,omitempty"`
	Layer  int `json:"layer,omitempty"`
	// Bytes is the compressed size of the image in pulling, and what has arrived of the layer in layer.
	Bytes int64 `json:"bytes,omitempty"`
	// Present says that the host had the layer already.
	Present bool `json:"present,omitempty"`
}

// ErrorBody is the body of every refusal.
type ErrorBody struct {
	Error ErrorDetail `json:"error"`
}

// ErrorDetail is Error on the wire.
type ErrorDetail struct {
	Code     Code     `json:"code"`
	Message  string   `json:"message"`
	Holders  []string `json:"holders,omitempty"`
	ExitCode int      `json:"exit_code,omitempty"`
}

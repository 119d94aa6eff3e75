// Package guest is the protocol with shard-init, the agent that is PID 1 in every sandbox, and its host side, Session.
// It knows byte channels, frames and the agent's operations; it knows no provider, no record and no client.
// Everything that arrives from the guest is hostile: bounded, checked, never trusted to be in order.
//
// # Channel
//
// One reliable byte channel. Either side may be behind: the host may connect before the guest is up, and a channel may
// still hold bytes of an earlier session. So a session begins with a hello on which both sides synchronise:
//
//	host → agent   magic "shardA1\n" | token [32] | epoch [16]
//	agent → host   magic "shardG1\n" | epoch [16]
//
// Each side drops bytes until the magic it waits for (the host: until magic and its own epoch). PID 1 is born with the
// channel as its stdin: a connected socket, or a listening one whose connections are channels. More channels come from
// the program's second mode, "shard-init attach". The first hello that the agent ever sees on what it was born with sets
// the token; one with another token is refused by closing the channel. A new session replaces the one before; commands
// run on. A connected socket that PID 1 was born with is never closed, only listened to for the next hello: a runtime
// that restores a checkpoint may have put another in its place.
//
// # Frames
//
//	length uint32 (of the payload, ≤ MaxPayload) | type uint8 | stream uint32 | payload     all big endian
//
// The host opens streams with ids it never reuses within a session. Frame types and their direction (h host, g guest):
//
//	Open   h→g  JSON Open: an operation and its arguments
//	Head   g→h  JSON Head: the first answer, exactly one per Open, before any Data
//	Data   both bytes; on the stream of an exec, guest → host, the first byte is the channel (1 stdout or tty, 2 stderr)
//	Credit both uint32: the receiver has consumed so many bytes of Data, the sender may send as many more
//	EOF    both no more Data in this direction; from the guest on the stream of a dial only
//	Done   g→h  JSON Done: the last frame of the stream; the id is free
//	Reset  h→g  the host gives the stream up; the agent ends the operation (an exec runs on) and answers Done
//
// Flow control: each direction of each stream starts with Window bytes. A sender never has more than Window bytes
// (payload of Data, the channel byte not counted) beyond what was credited; a peer that does ends the session. A dial
// starts with DialWindow instead, and grows up to Window.
//
// # Exec and reconnect
//
// The bytes of an exec's output are counted over both channels together, in the order in which the agent read them.
// Credit on an exec's stream means "the host holds these bytes durably": until then the agent keeps them, so that
// after a new session OpResume with the count of bytes the host holds continues exactly there. While Window bytes are
// unacknowledged the agent does not read the program's pipes, and the program waits as on any full pipe. When a
// command has ended, the agent keeps its exit until OpForget. Nobody waits any more then: the host takes Tail bytes more, as
// it says in the arguments, so that it learns of the end however slowly its client reads.
//
// # Processes
//
// A named process is supervised by the agent, which starts it again as its policy says, with or without a host to look.
// Its output, stdout and stderr together as channel 1, is one stream over all its runs, and goes the way of an exec's: run
// begins it, follow continues it after a new session, behind the given count of bytes, or behind what the agent still
// holds if that is more. The stream of processes tells how each process stands, then every change; a state that the host
// did not take before the next one came is left out. Sequence numbers grow with each change of any process.
//
// Done of an exec comes after all that the command itself wrote. Processes that it left behind with its pipes are heard
// until they are silent for 200 ms, for 2 s at most.
package guest

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/useshards/shard"
)

// Sizes, in bytes.
const (
	// MaxPayload bounds one frame; MaxOpen is the bound of an Open, which carries a command and its environment;
	// a Data frame carries at most MaxData (and the channel byte).
	MaxPayload = 256 << 10
	MaxOpen    = 4 << 20
	MaxData    = 64 << 10
	// Window is the initial credit of each direction of each stream.
	Window = 1 << 20
	// Tail is what the host takes of an exec's output beyond Window once the command has ended: what lies in its pipes.
	Tail = 1 << 20
	// Pieces is how many pieces of an exec's output, each of one channel, the agent has under way at most, twice as many after
	// its end. So their heads take no more than a known room where the host holds them.
	Pieces = 8 << 10
	// TokenSize and EpochSize are those of the hello.
	TokenSize = 32
	EpochSize = 16
)

// Magic strings of the hello.
const (
	HostMagic  = "shardA1\n"
	GuestMagic = "shardG1\n"
)

// Type is the kind of a frame.
type Type uint8

// The frame types.
const (
	TypeOpen   Type = 1
	TypeHead   Type = 2
	TypeData   Type = 3
	TypeCredit Type = 4
	TypeEOF    Type = 5
	TypeDone   Type = 6
	TypeReset  Type = 7
)

// The channels of an exec's output.
const (
	ChannelStdout = 1
	ChannelStderr = 2
)

// Operations. The argument and head types stand beside each; "–" is none.
const (
	OpPing   = "ping"   // – → –
	OpBoot   = "boot"   // BootArgs → –         once per start, before anything else
	OpUser   = "user"   // UserArgs → UserHead  looks a user up
	OpExec   = "exec"   // ExecSpec → ExecHead  starts a command; stdin by Data, output by Data, Done with Exit
	OpResume = "resume" // ResumeArgs → ExecHead  attaches to a command again after a new session
	OpExecs  = "execs"  // – → ExecsHead        the commands the agent holds
	OpSignal = "signal" // SignalArgs → –
	OpResize = "resize" // ResizeArgs → –
	OpForget = "forget" // ForgetArgs → –       the host has the exit durably
	OpRun    = "run"    // ProcessSpec → ExecHead  starts a named process, output by Data, Done when it is dropped or replaced
	OpFollow = "follow" // ResumeArgs → ExecHead  a process's output in a new session
	OpStates = "states" // – → StatesHead, then Data: one JSON ProcessState per line
	OpKill   = "kill"   // KillArgs → –           ends a process for good; its state tells when it has ended
	OpDrop   = "drop"   // ForgetArgs → –         forgets a process, and ends it with KILL if it runs
	OpStop   = "stop"   // StopArgs → –         TERM to all, wait, KILL, sync; answers when only PID 1 is left

	OpDial = "dial" // DialArgs → –           connects to a port of 127.0.0.1; Data both ways, EOF from each side, Done after both

	OpQuiesce = "quiesce" // – → QuiesceHead    before a checkpoint: the agent holds no channel but its first, and commands stop until resume; unsupported: it would break something

	OpPut    = "put"    // PutArgs → –           then Data host→guest until EOF, then Done
	OpGet    = "get"    // PathArgs → shard.FileEntry, then Data guest→host until Done
	OpStat   = "stat"   // PathArgs → shard.FileEntry (lstat)
	OpList   = "list"   // PathArgs → –, then Data: one JSON shard.FileEntry per line, sorted by name
	OpMkdir  = "mkdir"  // MkdirArgs → –
	OpRemove = "remove" // RemoveArgs → –
	OpUntar  = "untar"  // UntarArgs → –, then Data host→guest (tar) until EOF, then Done
	OpTar    = "tar"    // PathArgs → shard.FileEntry, then Data guest→host (tar) until Done
	OpWatch  = "watch"  // WatchArgs → –, then Data: one JSON shard.FileEvent per line; Done when the directory is gone
)

// Open is the payload of TypeOpen.
type Open struct {
	Op   string          `json:"op"`
	Args json.RawMessage `json:"args,omitempty"` // JSON of the operation's argument type
}

// Head is the payload of TypeHead. Err set means that the operation was refused; Done follows at once.
type Head struct {
	Err  *Failure        `json:"err,omitempty"`
	Body json.RawMessage `json:"body,omitempty"` // JSON of the operation's head type
}

// Done is the payload of TypeDone.
type Done struct {
	Err  *Failure `json:"err,omitempty"`
	Exit *Exit    `json:"exit,omitempty"` // exec and resume
}

// Failure is why the agent refused or failed. Code is one of shard's codes (invalid_request, not_found,
// command_not_started, internal …); the host replaces a code it does not know by internal and bounds the message.
type Failure struct {
	Code     string `json:"code"`
	Message  string `json:"message"`
	ExitCode int    `json:"exit_code,omitempty"` // command_not_started: 126 or 127
}

// Exit is how a command ended: code as wait status gives it (0–255), signal when one killed it.
type Exit struct {
	Code   int `json:"code"`
	Signal int `json:"signal"`
}

// Path is a guest path: any bytes but NUL. JSON text cannot carry bytes that are not UTF-8, so those, and %, travel
// as %XX.
type Path string

// MarshalText implements encoding.TextMarshaler.
func (p Path) MarshalText() ([]byte, error) {
	const digits = "0123456789ABCDEF"
	out := make([]byte, 0, len(p)+8)
	for i := 0; i < len(p); {
		r, n := utf8.DecodeRuneInString(string(p[i:]))
		if p[i] == '%' || r == utf8.RuneError && n == 1 {
			out = append(out, '%', digits[p[i]>>4], digits[p[i]&15])
		} else {
			out = append(out, p[i:i+n]...)
		}
		i += n
	}
	return out, nil
}

// UnmarshalText implements encoding.TextUnmarshaler.
func (p *Path) UnmarshalText(text []byte) error {
	out := make([]byte, 0, len(text))
	for i := 0; i < len(text); i++ {
		if text[i] != '%' {
			out = append(out, text[i])
			continue
		}
		if i+2 >= len(text) {
			return errPath
		}
		b, err := strconv.ParseUint(string(text[i+1:i+3]), 16, 8)
		if err != nil {
			return errPath
		}
		out = append(out, byte(b))
		i += 2
	}
	*p = Path(out)
	return nil
}

var errPath = errors.New("a path holds a broken % escape")

// Strings are arguments or environment entries: any bytes but NUL. They travel as base64 of each followed by NUL.
type Strings []string

// MarshalJSON implements json.Marshaler.
func (s Strings) MarshalJSON() ([]byte, error) {
	var block []byte
	for _, e := range s {
		if strings.IndexByte(e, 0) >= 0 {
			return nil, errNUL
		}
		block = append(append(block, e...), 0)
	}
	out := make([]byte, base64.StdEncoding.EncodedLen(len(block))+2)
	base64.StdEncoding.Encode(out[1:], block)
	out[0], out[len(out)-1] = '"', '"'
	return out, nil
}

// UnmarshalJSON implements json.Unmarshaler.
func (s *Strings) UnmarshalJSON(text []byte) error {
	var block []byte
	if err := json.Unmarshal(text, &block); err != nil {
		return err
	}
	*s = nil
	if len(block) == 0 {
		return nil
	}
	if block[len(block)-1] != 0 {
		return errNUL
	}
	*s = strings.Split(string(block[:len(block)-1]), "\x00")
	return nil
}

var errNUL = errors.New("an argument or environment entry holds a NUL byte, or a list of them is cut")

// BootArgs prepares the guest. Files is keyed by absolute guest path (/etc/hostname, /etc/hosts, /etc/resolv.conf).
// First says that this is the first start of these files: only then hosts and hostname are written; resolv.conf always.
// Workdir is made (0755, owned by root) when it is missing. User must exist.
type BootArgs struct {
	Hostname string            `json:"hostname"`
	Files    map[string]string `json:"files,omitempty"`
	First    bool              `json:"first,omitempty"`
	User     string            `json:"user,omitempty"`
	Workdir  Path              `json:"workdir,omitempty"`
}

// UserArgs names a user as images do: name, uid, or either with :group or :gid. Empty is root.
type UserArgs struct {
	User string `json:"user"`
}

// UserHead is a looked-up user.
type UserHead struct {
	UID    uint32   `json:"uid"`
	GID    uint32   `json:"gid"`
	Groups []uint32 `json:"groups,omitempty"`
	Home   string   `json:"home"`
}

// ExecSpec is a command to start. ID is the host's, unique among the commands the agent holds. Env is complete but for
// HOME and TERM, which the agent adds when they are missing (HOME from the guest's passwd, TERM=xterm for a tty).
type ExecSpec struct {
	ID      string  `json:"id"`
	Argv    Strings `json:"argv"`
	Env     Strings `json:"env,omitempty"`
	Workdir Path    `json:"workdir,omitempty"` // default /
	User    string  `json:"user,omitempty"`
	Stdin   bool    `json:"stdin,omitempty"` // false: /dev/null
	TTY     bool    `json:"tty,omitempty"`
	Rows    uint16  `json:"rows,omitempty"`
	Cols    uint16  `json:"cols,omitempty"`
	Tail    int     `json:"tail,omitempty"` // bytes beyond Window that the host takes after the end
}

// ExecHead answers exec and resume. StdinBytes is how much input the agent has taken so far.
type ExecHead struct {
	PID        int   `json:"pid"`
	StdinBytes int64 `json:"stdin_bytes"`
	// Offset is where a process's output goes on.
	Offset int64 `json:"offset,omitempty"`
}

// ResumeArgs continues a command's output behind the first Offset bytes.
type ResumeArgs struct {
	ID     string `json:"id"`
	Offset int64  `json:"offset"`
	Tail   int    `json:"tail,omitempty"` // as in ExecSpec
}

// ExecsHead lists the commands the agent holds, ended ones that were not forgotten included.
type ExecsHead struct {
	Execs []HeldExec `json:"execs"`
}

// HeldExec is one command of ExecsHead. Offset is where the output that the agent still holds begins: the least that
// resume takes.
type HeldExec struct {
	ID     string `json:"id"`
	Exit   *Exit  `json:"exit,omitempty"`
	Offset int64  `json:"offset,omitempty"`
}

// SignalArgs sends TERM or KILL to a command's process group.
type SignalArgs struct {
	ID     string `json:"id"`
	Signal string `json:"signal"`
}

// ResizeArgs sets a command's terminal size.
type ResizeArgs struct {
	ID   string `json:"id"`
	Rows uint16 `json:"rows"`
	Cols uint16 `json:"cols"`
}

// ForgetArgs drops an ended command.
type ForgetArgs struct {
	ID string `json:"id"`
}

// ProcessSpec is a named process to start and to supervise. ID is the host's, new for each run of a name; a process of
// the same name that has ended is forgotten. Env is complete but for HOME.
type ProcessSpec struct {
	ID      string            `json:"id"`
	Name    string            `json:"name"`
	Argv    Strings           `json:"argv"`
	Env     Strings           `json:"env,omitempty"`
	Workdir Path              `json:"workdir,omitempty"` // default /
	User    string            `json:"user,omitempty"`
	Restart shard.RestartSpec `json:"restart"`
	// Keep makes a program that cannot be started a run that failed, to be tried again, instead of a refusal.
	Keep bool `json:"keep,omitempty"`
}

// StatesHead lists the processes that the agent holds, by id.
type StatesHead struct {
	Held []string `json:"held"`
}

// ProcessState is how a process stands. Start and End are offsets in its output: where its latest run begins and, when it
// waits for the next or is over, where that run ended.
type ProcessState struct {
	Seq       uint64    `json:"seq"`
	ID        string    `json:"id"`
	State     string    `json:"state"` // of shard's process states, never stopped
	Restarts  int       `json:"restarts"`
	Killed    bool      `json:"killed,omitempty"`
	Exit      *Exit     `json:"exit,omitempty"` // of the latest run that ended
	StartedAt time.Time `json:"started_at"`
	Start     int64     `json:"start"`
	End       int64     `json:"end,omitempty"`
}

// KillArgs ends a process: TERM to its group and KILL after GraceMillis, or KILL at once when that is 0.
type KillArgs struct {
	ID          string `json:"id"`
	GraceMillis int64  `json:"grace_ms"`
}

// StopArgs ends everything but PID 1. GraceMillis is the time between TERM and KILL.
type StopArgs struct {
	GraceMillis int64 `json:"grace_ms"`
}

// QuiesceHead answers quiesce. Closes says that this channel is not the one that PID 1 was born with: the agent closes
// it behind the Done.
type QuiesceHead struct {
	Closes bool `json:"closes,omitempty"`
}

// PathArgs names one absolute path.
type PathArgs struct {
	Path Path `json:"path"`
}

// PutArgs describes a file to write: temporary name in the target's directory, fsync, rename. Size is exact: fewer
// bytes before EOF fail the write. Mode is permission bits, 0644 when nil.
type PutArgs struct {
	Path    Path    `json:"path"`
	Size    int64   `json:"size"`
	Mode    *uint32 `json:"mode,omitempty"`
	User    string  `json:"user,omitempty"`
	Parents bool    `json:"parents,omitempty"`
}

// MkdirArgs describes a directory to make. Mode is permission bits, 0755 when nil, and ignores the umask.
type MkdirArgs struct {
	Path    Path    `json:"path"`
	Mode    *uint32 `json:"mode,omitempty"`
	User    string  `json:"user,omitempty"`
	Parents bool    `json:"parents,omitempty"`
}

// RemoveArgs names what to remove; User is whose rights count.
type RemoveArgs struct {
	Path      Path   `json:"path"`
	Recursive bool   `json:"recursive,omitempty"`
	User      string `json:"user,omitempty"`
}

// UntarArgs says where a tar goes and who owns every entry.
type UntarArgs struct {
	Path Path   `json:"path"`
	User string `json:"user,omitempty"`
}

// WatchArgs names a directory to watch, and with Recursive all below it. The head comes once nothing is missed any more.
type WatchArgs struct {
	Path      Path `json:"path"`
	Recursive bool `json:"recursive,omitempty"`
}

package shard

// State is where a sandbox stands.
type State string

// The states of a sandbox.
const (
	StatePending      State = "pending"
	StateCreated      State = "created"
	StateRunning      State = "running"
	StatePaused       State = "paused"
	StateUnresponsive State = "unresponsive"
	StateStopped      State = "stopped"
	StateFailed       State = "failed"
)

// States lists every state, for tests and tables.
var States = []State{StatePending, StateCreated, StateRunning, StatePaused, StateUnresponsive, StateStopped, StateFailed}

// Live says whether the sandbox may hold processes or memory.
func (s State) Live() bool {
	return s == StateRunning || s == StatePaused || s == StateUnresponsive || s == StatePending
}

// Verb is something a client asks of a sandbox.
type Verb string

// The verbs. VerbExec stands for exec, run and every file route; VerbGrant for secret and policy changes.
const (
	VerbGet      Verb = "get"
	VerbStart    Verb = "start"
	VerbStop     Verb = "stop"
	VerbPause    Verb = "pause"
	VerbResume   Verb = "resume"
	VerbFork     Verb = "fork"
	VerbExec     Verb = "exec"
	VerbKill     Verb = "kill"
	VerbSnapshot Verb = "snapshot"
	VerbGrant    Verb = "grant"
	VerbPort     Verb = "port"
	VerbRemove   Verb = "remove"
	VerbForce    Verb = "remove --force"
)

// Verbs lists every verb, for tests and tables.
var Verbs = []Verb{VerbGet, VerbStart, VerbStop, VerbPause, VerbResume, VerbFork, VerbExec, VerbKill, VerbSnapshot,
	VerbGrant, VerbPort, VerbRemove, VerbForce}

// refusals holds, for each verb, the code by which a state refuses it; a state that is absent allows it.
var refusals = map[Verb]map[State]Code{
	VerbGet: {},
	VerbStart: {StatePending: CodeSandboxNotStopped, StateRunning: CodeSandboxNotStopped, StatePaused: CodeSandboxNotStopped,
		StateUnresponsive: CodeSandboxNotStopped, StateCreated: CodeSandboxNotStopped, StateFailed: CodeSandboxFailed},
	VerbStop:  {StateStopped: CodeSandboxNotRunning, StateCreated: CodeSandboxNotRunning, StateFailed: CodeSandboxFailed},
	VerbPause: onlyRunning,
	VerbFork:  onlyRunning,
	VerbExec:  onlyRunning,
	VerbKill:  onlyRunning,
	VerbResume: {StatePending: CodeSandboxNotPaused, StateRunning: CodeSandboxNotPaused, StateUnresponsive: CodeSandboxNotPaused,
		StateStopped: CodeSandboxNotPaused, StateCreated: CodeSandboxNotPaused, StateFailed: CodeSandboxFailed},
	VerbSnapshot: {StatePending: CodeSandboxNotStopped, StateRunning: CodeSandboxNotStopped, StatePaused: CodeSandboxNotStopped,
		StateUnresponsive: CodeSandboxNotStopped, StateCreated: CodeSandboxNotStopped, StateFailed: CodeSandboxFailed},
	VerbGrant: {StatePending: CodeSandboxLive, StateRunning: CodeSandboxLive, StatePaused: CodeSandboxLive,
		StateUnresponsive: CodeSandboxLive, StateFailed: CodeSandboxFailed},
	VerbPort: {StateFailed: CodeSandboxFailed},
	VerbRemove: {StateRunning: CodeSandboxNotStopped, StatePaused: CodeSandboxNotStopped,
		StateUnresponsive: CodeSandboxNotStopped},
	VerbForce: {},
}

var onlyRunning = map[State]Code{StatePending: CodeSandboxNotRunning, StatePaused: CodeSandboxNotRunning,
	StateUnresponsive: CodeSandboxNotRunning, StateStopped: CodeSandboxNotRunning, StateCreated: CodeSandboxNotRunning,
	StateFailed: CodeSandboxFailed}

// advice says what to do about a refused verb, where the state does not say it.
var advice = map[Code]string{
	CodeSandboxNotRunning: "start it first",
	CodeSandboxNotStopped: "stop it first",
	CodeSandboxNotPaused:  "only a paused one can be resumed",
	CodeSandboxLive:       "stop it first",
	CodeSandboxFailed:     "it can only be inspected and removed",
}

// CheckVerb says whether a sandbox in this state allows the verb, and with which code it refuses.
// ref names the sandbox in the message.
func CheckVerb(ref string, state State, verb Verb) error {
	code, refused := refusals[verb][state]
	if !refused {
		return nil
	}
	switch {
	case verb == VerbStop && state == StateStopped:
		return Errorf(code, "sandbox %q is stopped already", ref)
	case verb == VerbStart && state == StateRunning:
		return Errorf(code, "sandbox %q is running already", ref)
	case verb == VerbPause && state == StatePaused:
		return Errorf(code, "sandbox %q is paused already", ref)
	case verb == VerbRemove && state == StatePaused:
		return Errorf(code, "sandbox %q is paused: resume it, stop it, which gives up its saved memory, or remove it with force", ref)
	case verb == VerbRemove:
		return Errorf(code, "sandbox %q is %s: stop it first, or remove it with force", ref, state)
	case code == CodeSandboxFailed:
	case state == StatePending || state == StateCreated:
		return Errorf(code, "sandbox %q is %s: wait until it runs (inspect shows when)", ref, state)
	case state == StatePaused && (code == CodeSandboxNotRunning || verb == VerbStart):
		return Errorf(code, "sandbox %q is paused: resume it first", ref)
	case state == StateUnresponsive && code == CodeSandboxNotRunning:
		return Errorf(code, "sandbox %q does not respond: wait until it does, or stop it", ref)
	}
	return Errorf(code, "sandbox %q is %s: %s", ref, state, advice[code])
}

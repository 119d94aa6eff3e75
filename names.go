package shard

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"unicode/utf8"
)

// The two lists of 64 words that ids are made of. Never change them: ids are kept for ever.
var (
	adjectives = strings.Fields(`amber ample apt azure bold brave brisk bright calm candid clear clever cosy crisp curious daring
		deft eager early easy fair fast fine firm fleet fond frank free fresh gentle glad golden good grand happy hardy honest
		jolly keen kind lively loyal lucid lucky mellow merry mild neat noble plain proud quick quiet rapid ready sharp silent
		smooth snug steady sunny swift tidy warm`)
	nouns = strings.Fields(`acorn anchor badger basin beacon birch bison brook canyon cedar cliff clover comet coral crane creek
		delta dune eagle ember falcon fern finch fjord forest garnet glade grove harbor hawk hazel heron island ivy jasper lagoon
		lark laurel lemur lynx maple marsh meadow mesa nectar oak orchid otter owl pebble pine plover prairie quartz raven reef
		ridge river robin sparrow spruce thicket tulip willow`)
)

var (
	// Compiled when first asked: every start of the command line would pay for them.
	idPattern         = pattern(`^[a-z]+-[a-z]+-[0-9a-f]{4}$`)
	namePattern       = pattern(`^[a-z0-9_-]{1,64}$`)
	processPattern    = pattern(`^[a-z0-9][a-z0-9_.-]{0,31}$`)
	policyNamePattern = pattern(`^[a-z0-9][a-z0-9-]{0,63}$`)
	secretNamePattern = pattern(`^[A-Z_][A-Z0-9_]{0,127}$`)
)

func pattern(expr string) func(string) bool {
	compile := sync.OnceValue(func() *regexp.Regexp { return regexp.MustCompile(expr) })
	return func(s string) bool { return compile().MatchString(s) }
}

// The providers of this version. gVisor is the default: it isolates, and works on every Linux host. runc isolates nothing
// and is never picked.
const (
	ProviderGVisor = "gvisor"
	ProviderRunc   = "runc"
)

// CheckProvider refuses the name of a provider that this version does not have.
func CheckProvider(name string) error {
	if name != ProviderGVisor && name != ProviderRunc {
		return Invalidf("there is no provider %s: choose %s or %s", Quote(name), ProviderGVisor, ProviderRunc)
	}
	return nil
}

// MinPrefix is the shortest id prefix that may stand for a sandbox or snapshot, in characters.
const MinPrefix = 4

// NewID makes a random id of the form word-word-hhhh, about 28 bits: the caller must check that it is free.
func NewID() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails since Go 1.24
	return adjectives[b[0]%64] + "-" + nouns[b[1]%64] + "-" + hex.EncodeToString(b[2:])
}

// IsID says whether s has the form of a generated id.
func IsID(s string) bool { return idPattern(s) }

// CheckName refuses a name that a sandbox or snapshot cannot have. what is "sandbox" or "snapshot".
func CheckName(what, name string) error {
	if !namePattern(name) {
		return Invalidf("%s name %s is not valid: use 1 to 64 of a-z, 0-9, - and _", what, Quote(name))
	}
	if IsID(name) {
		return Invalidf("%s name %q has the form of a generated id: choose another", what, name)
	}
	return nil
}

// CheckRef refuses a reference that no sandbox or snapshot could have, so that it never becomes part of a path.
func CheckRef(what, ref string) error {
	if !namePattern(ref) {
		return Invalidf("%s is not a %s id or name: use 1 to 64 of a-z, 0-9, - and _", Quote(ref), what)
	}
	return nil
}

// CheckProcessName refuses a name that a supervised process cannot have.
func CheckProcessName(name string) error {
	if !processPattern(name) {
		return Invalidf("process name %s is not valid: up to 32 of a-z, 0-9, . _ and -, beginning with a letter or digit", Quote(name))
	}
	return nil
}

// CheckRestart refuses a restart policy that no process can have.
func CheckRestart(r RestartSpec) error {
	switch r.Policy {
	case RestartNo, RestartOnFailure, RestartAlways, RestartUnlessStopped:
	default:
		return Invalidf("restart policy %s is not valid: write no, on-failure, always or unless-stopped", Quote(r.Policy))
	}
	switch {
	case r.Retries < 0:
		return Invalidf("restart retries must be 0 (no cap) or more")
	case r.Retries > 0 && r.Policy != RestartOnFailure:
		return Invalidf("restart retries go with the policy on-failure only, not with %s", r.Policy)
	case !(r.Backoff >= 0 && r.Backoff <= 60):
		return Invalidf("restart backoff must be 0 to 60 seconds")
	}
	return nil
}

// CheckPolicyName refuses a name that a policy cannot have.
func CheckPolicyName(name string) error {
	if !policyNamePattern(name) {
		return Invalidf("policy name %s is not valid: up to 64 of a-z, 0-9 and -, beginning with a letter or digit", Quote(name))
	}
	return nil
}

// CheckSecretName refuses a name that a secret cannot have.
func CheckSecretName(name string) error {
	if !secretNamePattern(name) {
		return Invalidf("secret name %s is not valid: up to 128 of A-Z, 0-9 and _, not beginning with a digit", Quote(name))
	}
	return nil
}

// CheckEnv refuses an environment entry that is not KEY=VALUE. The message names the key, never the value.
func CheckEnv(env []string) error {
	for i, kv := range env {
		key, _, ok := strings.Cut(kv, "=")
		switch {
		case !ok || key == "":
			return Invalidf("env entry %d is not KEY=VALUE with a key", i+1)
		case strings.ContainsRune(kv, 0):
			return Invalidf("env entry %s holds a NUL byte", Quote(key))
		case !utf8.ValidString(kv):
			return Invalidf("env entry %s is not UTF-8, and the API carries text only", Quote(key))
		}
	}
	return nil
}

// CheckCommand refuses a command that cannot be given to execve.
func CheckCommand(command []string) error {
	if len(command) == 0 {
		return Invalidf("command is empty: give at least the program")
	}
	if command[0] == "" {
		return Invalidf("the program's name is empty")
	}
	for i, arg := range command {
		if strings.ContainsRune(arg, 0) {
			return Invalidf("argument %d holds a NUL byte", i)
		}
		if !utf8.ValidString(arg) {
			return Invalidf("argument %d is not UTF-8, and the API carries text only: pass such bytes on stdin or in a file", i)
		}
	}
	return nil
}

// MergeEnv returns base with each of overrides put in: in place where the key exists, else at the end.
func MergeEnv(base []string, overrides ...string) []string {
	out := append([]string(nil), base...)
	at := make(map[string]int, len(out))
	for i, kv := range out {
		key, _, _ := strings.Cut(kv, "=")
		at[key] = i
	}
	for _, kv := range overrides {
		key, _, _ := strings.Cut(kv, "=")
		if i, ok := at[key]; ok {
			out[i] = kv
			continue
		}
		at[key] = len(out)
		out = append(out, kv)
	}
	return out
}

// Quote quotes a string that a client sent for use in a message: escaped and cut at 80 bytes.
func Quote(s string) string {
	const most = 80
	if len(s) > most {
		return fmt.Sprintf("%q…", s[:most])
	}
	return fmt.Sprintf("%q", s)
}

package shard_test

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/useshards/shard"

// room is what one package may import. Ours lists our own packages by their path below the module ("" is the root);
// nil theirs means the standard library alone, else each entry is an import path or a prefix ending in "/".
type room struct {
	ours   []string
	theirs []string
}

// house is the import table of ARCHITECTURE.md: arrows point down only. A new package needs a line here, and a line
// there that says what the room is for.
var house = map[string]room{
	"": {},

	"cmd/shard":      {ours: []string{"", "internal/cli", "internal/daemon", "internal/gate"}},
	"internal/cli":   {ours: []string{"", "client", "internal/durable", "internal/hostcheck", "internal/hostfs", "internal/policy", "internal/secret", "internal/setup", "internal/token"}, theirs: []string{"github.com/spf13/", "github.com/vbauerster/mpb/", "golang.org/x/net/publicsuffix", "golang.org/x/term", "golang.org/x/sys/"}},
	"client":         {ours: []string{""}, theirs: []string{"github.com/coder/websocket", "golang.org/x/sys/"}},
	"cmd/shard-init": {ours: []string{"internal/guest/agent"}},

	"internal/gate":  {ours: []string{"", "internal/durable", "internal/token"}},
	"internal/token": {ours: []string{"", "internal/durable"}, theirs: []string{"github.com/golang-jwt/jwt/v5", "golang.org/x/sys/"}},

	"internal/daemon": {ours: []string{"", "internal/api", "internal/engine", "internal/store", "internal/image",
		"internal/rootfs", "internal/netns", "internal/egress", "internal/cgroup", "internal/provider", "internal/provider/oci", "internal/secret", "internal/durable"},
		theirs: []string{"golang.org/x/"}},
	"internal/api": {ours: []string{"", "internal/engine", "internal/guest", "internal/image"}, theirs: []string{"github.com/coder/websocket", "golang.org/x/"}},
	"internal/engine": {ours: []string{"", "internal/store", "internal/stream", "internal/image", "internal/rootfs", "internal/netns",
		"internal/cgroup", "internal/provider", "internal/guest", "internal/policy", "internal/secret"}, theirs: []string{"golang.org/x/"}},
	"internal/policy": {ours: []string{""}, theirs: []string{"golang.org/x/net/idna"}},
	"internal/egress": {ours: []string{"", "internal/durable", "internal/policy", "internal/netns", "internal/secret"}, theirs: []string{"github.com/miekg/dns", "github.com/vishvananda/", "golang.org/x/"}},
	"internal/secret": {ours: []string{"", "internal/durable", "internal/policy"}, theirs: []string{"golang.org/x/net/publicsuffix", "github.com/klauspost/compress/", "github.com/andybalholm/brotli"}},
	"internal/store":  {ours: []string{"internal/durable"}, theirs: []string{"golang.org/x/sys/"}},
	"internal/stream": {},

	"internal/image":  {ours: []string{"", "internal/durable"}, theirs: []string{"github.com/google/go-containerregistry/", "github.com/klauspost/compress/", "golang.org/x/"}},
	"internal/rootfs": {ours: []string{""}, theirs: []string{"golang.org/x/"}},
	"internal/netns":  {ours: []string{"", "internal/durable"}, theirs: []string{"github.com/vishvananda/", "github.com/google/nftables", "github.com/google/nftables/", "github.com/mdlayher/", "golang.org/x/"}},
	"internal/cgroup": {theirs: []string{"golang.org/x/"}},

	"internal/provider": {ours: []string{""}},
	"internal/provider/oci": {ours: []string{"", "internal/provider", "internal/guest", "internal/cgroup"},
		theirs: []string{"github.com/opencontainers/", "github.com/moby/profiles/seccomp", "golang.org/x/"}},
	"internal/provider/providertest": {ours: []string{"", "internal/provider", "internal/guest"}, theirs: []string{"golang.org/x/"}},

	"internal/guest":       {ours: []string{""}, theirs: []string{"golang.org/x/"}},
	"internal/guest/agent": {ours: []string{"", "internal/guest", "internal/tarstream"}, theirs: []string{"golang.org/x/sys/"}},

	"internal/setup":     {ours: []string{"", "internal/hostcheck", "internal/token", "packaging"}},
	"packaging":          {},
	"internal/hostcheck": {theirs: []string{"github.com/vishvananda/", "github.com/google/nftables", "golang.org/x/sys/"}},
	"internal/hostfs":    {ours: []string{"", "internal/tarstream"}, theirs: []string{"golang.org/x/sys/"}},
	"internal/durable":   {},
	"internal/tarstream": {ours: []string{""}, theirs: []string{"golang.org/x/sys/"}},

	"internal/testenv": {ours: []string{"", "client"}, theirs: []string{"github.com/google/go-containerregistry/", "github.com/vishvananda/",
		"github.com/miekg/dns", "golang.org/x/"}},
	"bench":       {ours: []string{"", "client", "internal/testenv", "internal/egress", "internal/policy", "internal/secret"}, theirs: []string{"github.com/klauspost/compress/", "golang.org/x/"}},
	"test":        {},
	"test/script": {ours: []string{"internal/testenv"}, theirs: []string{"github.com/rogpeppe/go-internal/testscript"}},

	"tools/openapi": {ours: []string{""}},
	"tools/report":  {},
}

// bans hold for everything that a package links, however indirectly.
var bans = []struct {
	pkg, banned, why string
}{
	{"", "os/exec", "the vocabulary does no I/O"},
	{"", "net", "the vocabulary does no I/O"},
	{"cmd/shard-init", "net/http", "the agent is resident in every sandbox: it must stay small, and it serves no HTTP"},
	{"cmd/shard-init", "crypto/tls", "the agent is resident in every sandbox, and its channel needs no TLS"},
	{"cmd/shard-init", "golang.org/x/net/", "the agent is resident in every sandbox and must stay small"},
	{"internal/guest", "net/http", "what the host speaks with the agent is not HTTP"},
	{"client", module + "/internal/engine", "the client must not pull the daemon into other programs"},
	{"internal/cli", module + "/internal/engine", "commands speak to the client; the daemon is reached by its socket"},
}

type listed struct {
	ImportPath string
	Standard   bool
	Imports    []string
	Deps       []string
}

// list asks the go command for packages as they are built for Linux.
func list(t *testing.T, args ...string) []listed {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "go", append([]string{"list", "-json=ImportPath,Standard,Imports,Deps"}, args...)...)
	cmd.Env = append(cmd.Environ(), "GOOS=linux")
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("go list: %v\n%s", err, stderr.String())
	}
	var all []listed
	for dec := json.NewDecoder(bytes.NewReader(out)); ; {
		var p listed
		if err := dec.Decode(&p); errors.Is(err, io.EOF) {
			return all
		} else if err != nil {
			t.Fatalf("go list wrote what is not JSON: %v", err)
		}
		all = append(all, p)
	}
}

// TestHouse checks that each package imports only what its room may, and that nothing is built without a room.
func TestHouse(t *testing.T) {
	standard := map[string]bool{"C": true}
	for _, p := range list(t, "std") {
		standard[p.ImportPath] = true
	}
	for _, p := range list(t, "./...") {
		name := strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")
		may, ok := house[name]
		if !ok {
			t.Errorf("package %s has no line in the table of arch_test.go: say there what it may import, and in ARCHITECTURE.md what it is for", p.ImportPath)
			continue
		}
		for _, imported := range p.Imports {
			if standard[imported] {
				continue
			}
			if ours, found := strings.CutPrefix(imported, module); found {
				if ours = strings.TrimPrefix(ours, "/"); !slices.Contains(may.ours, ours) {
					t.Errorf("%s imports %s: the table of ARCHITECTURE.md does not allow it", p.ImportPath, imported)
				}
				continue
			}
			if !slices.ContainsFunc(may.theirs, func(allowed string) bool {
				return imported == allowed || strings.HasSuffix(allowed, "/") && strings.HasPrefix(imported, allowed)
			}) {
				t.Errorf("%s imports %s: the table in arch_test.go does not allow it", p.ImportPath, imported)
			}
		}
	}
}

// TestBans checks what packages link indirectly.
func TestBans(t *testing.T) {
	packages := make(map[string]listed)
	for _, p := range list(t, "./...") {
		packages[strings.TrimPrefix(strings.TrimPrefix(p.ImportPath, module), "/")] = p
	}
	for _, ban := range bans {
		p, ok := packages[ban.pkg]
		if !ok {
			t.Errorf("the table of bans names %q, which is not a package", ban.pkg)
			continue
		}
		for _, dep := range p.Deps {
			if dep == ban.banned || strings.HasSuffix(ban.banned, "/") && strings.HasPrefix(dep, ban.banned) {
				t.Errorf("%s links %s: %s", p.ImportPath, dep, ban.why)
			}
		}
	}
}

package main

import (
	"reflect"

	"github.com/useshards/shard"
)

// operation is what the route table does not say of a route.
type operation struct {
	id      string
	tag     string
	summary string
	text    string
	// request is the type of the JSON body, or the media type of another; optional bodies may be left out.
	request      reflect.Type
	requestMedia string
	optional     bool
	// answers are those of success, by status. A nil body is none.
	status int
	answer reflect.Type
	media  string // of an answer that is no JSON
	// lines is the type of one line where the answer comes as JSON lines: always, or when the request asks with linesWhen.
	lines     reflect.Type
	linesWhen string
	// stream says what an upgraded request carries.
	stream string
	// stat says that the answer has the header X-Shard-Stat.
	stat bool
}

func of[T any]() reflect.Type { return reflect.TypeFor[T]() }

const (
	tagSandboxes = "Sandboxes"
	tagExec      = "Commands"
	tagProcesses = "Named processes"
	tagPorts     = "Ports"
	tagFiles     = "Files"
	tagPolicies  = "Egress policies"
	tagSecrets   = "Secrets"
	tagHost      = "Host"
	tagImages    = "Images"
)

var tags = []string{tagSandboxes, tagExec, tagProcesses, tagPorts, tagFiles, tagPolicies, tagSecrets, tagHost, tagImages}

const outputStream = "Binary messages, the first byte of which says what the rest is: %s. The server then closes with code 1000. " +
	"A last message 0x05 with a JSON ErrorBody says that the stream failed. A client may leave at any time, which ends nothing else."

// operations has an entry for each route, by Route.Name.
var operations = map[string]operation{
	"GET /v0/version": {id: "getVersion", tag: tagHost, summary: "The daemon's version", status: 200, answer: of[shard.VersionInfo]()},
	"GET /v0/capabilities": {id: "getCapabilities", tag: tagHost, summary: "What a provider can do", status: 200,
		answer: of[shard.Capabilities]()},
	"GET /v0/providers": {id: "listProviders", tag: tagHost, summary: "What each provider is worth on the host", status: 200,
		answer: of[shard.ProviderList]()},
	"GET /v0/scopes": {id: "listScopes", tag: tagHost, summary: "Every valid scope", text: "Not those of the caller.", status: 200,
		answer: of[shard.ScopeList]()},
	"GET /metrics": {id: "getMetrics", tag: tagHost, summary: "Metrics in Prometheus' text format",
		text:   "Requests by route and status, their latency, sandboxes by provider and state, commands, streams, bytes, and the daemon's own memory, goroutines and descriptors.",
		status: 200, media: "text/plain"},

	"GET /v0/sandboxes": {id: "listSandboxes", tag: tagSandboxes, summary: "List sandboxes", text: "Stopped ones are left out unless `all` is true.",
		status: 200, answer: of[shard.SandboxList]()},
	"POST /v0/sandboxes": {id: "createSandbox", tag: tagSandboxes, summary: "Create a sandbox",
		text: "Of an image that is on the host the answer holds a sandbox that runs, of another one that is `pending`; with `wait=true` the answer " +
			"comes when that is over. A record that is `failed` stays until it is removed, or until the next create of its name, which takes its place. Use of secrets, a policy or ports needs `secret:*`, `policy:*` or `port:write` too.",
		request: of[shard.CreateRequest](), status: 201, answer: of[shard.Sandbox](), lines: of[shard.CreateLine](),
		linesWhen: "with `Accept: application/x-ndjson` and `wait=true`"},
	"GET /v0/sandboxes/{id}": {id: "inspectSandbox", tag: tagSandboxes, summary: "Inspect a sandbox",
		text: "With `wait=true` the answer comes when the sandbox is no longer `pending`.", status: 200, answer: of[shard.Inspection]()},
	"DELETE /v0/sandboxes/{id}": {id: "removeSandbox", tag: tagSandboxes, summary: "Remove a sandbox and its files",
		text: "One that runs is removed with `force=true` only.", status: 204},
	"POST /v0/sandboxes/{id}/start": {id: "startSandbox", tag: tagSandboxes, summary: "Start a stopped sandbox", request: of[shard.Empty](),
		optional: true, status: 200, answer: of[shard.Sandbox]()},
	"POST /v0/sandboxes/{id}/stop": {id: "stopSandbox", tag: tagSandboxes, summary: "Stop a sandbox and keep its files",
		text: "TERM to all, KILL after 30 s. A paused one loses its saved memory, and keeps its files.", request: of[shard.Empty](), optional: true, status: 200, answer: of[shard.Sandbox]()},
	"POST /v0/sandboxes/{id}/pause": {id: "pauseSandbox", tag: tagSandboxes, summary: "Pause a sandbox: its memory goes to disk",
		text: "It then uses no memory and no processor. Named processes go on at the resume; commands that run end, and connections to ports are closed. " +
			"Takes as long as the memory takes to be written, up to 10 minutes, and goes on when the client hangs up. After a failure the sandbox runs on, " +
			"or is `failed` where it was lost. `unsupported`: the provider cannot, or not what programs hold open right now, which the message names. One that is paused already is `sandbox_not_running` too: its `state` tells.",
		request: of[shard.Empty](), optional: true, status: 200, answer: of[shard.Sandbox]()},
	"POST /v0/sandboxes/{id}/resume": {id: "resumeSandbox", tag: tagSandboxes, summary: "Resume a paused sandbox",
		text:    "It keeps its addresses and `started_at`. When that fails it stays paused. Where what was saved is missing: `no_checkpoint`; where another version of the runtime saved it: `unsupported`. A stop and a start bring back its files alone.",
		request: of[shard.Empty](), optional: true, status: 200, answer: of[shard.Sandbox]()},
	"POST /v0/sandboxes/{id}/fork": {id: "forkSandbox", tag: tagSandboxes, summary: "Copy a running sandbox with its memory",
		text:    "A source with secrets or a policy needs `secret:*` or `policy:*` too.",
		request: of[shard.ForkRequest](), optional: true, status: 201, answer: of[shard.Sandbox]()},

	"POST /v0/sandboxes/{id}/exec": {id: "exec", tag: tagExec, summary: "Run a command", text: "201 means that it runs.",
		request: of[shard.ExecRequest](), status: 201, answer: of[shard.Exec]()},
	"GET /v0/sandboxes/{id}/exec": {id: "listExecs", tag: tagExec, summary: "List the commands of a sandbox", status: 200,
		answer: of[shard.ExecList]()},
	"GET /v0/sandboxes/{id}/exec/{exec}": {id: "getExec", tag: tagExec, summary: "The record of a command; its output as a stream",
		text: "With `wait=true` the answer comes when the command has ended.", status: 200, answer: of[shard.Exec](),
		stream: "Binary messages of a byte and a payload of at most 1 MiB. From the client: 0x00 input, 0x04 the end of input. From the server: " +
			"0x01 stdout (with a terminal, all), 0x02 stderr, first what is held and then what comes; last 0x03 with a JSON ExitMessage, or 0x05 with a JSON " +
			"ErrorBody. One client at a time. A client that takes nothing for 30 s is cut. The command runs on whoever leaves."},
	"DELETE /v0/sandboxes/{id}/exec/{exec}": {id: "deleteExec", tag: tagExec, summary: "Forget a command that has ended", status: 204},
	"POST /v0/sandboxes/{id}/exec/{exec}/kill": {id: "killExec", tag: tagExec, summary: "Signal a command", request: of[shard.KillRequest](),
		optional: true, status: 204},
	"POST /v0/sandboxes/{id}/exec/{exec}/resize": {id: "resizeExec", tag: tagExec, summary: "Tell a command the size of its terminal",
		request: of[shard.Size](), optional: true, status: 204},

	"POST /v0/sandboxes/{id}/processes": {id: "runProcess", tag: tagProcesses, summary: "Run a named process",
		request: of[shard.RunRequest](), status: 201, answer: of[shard.Process]()},
	"GET /v0/sandboxes/{id}/processes": {id: "listProcesses", tag: tagProcesses, summary: "List the named processes of a sandbox", status: 200,
		answer: of[shard.ProcessList]()},
	"GET /v0/sandboxes/{id}/processes/{name}": {id: "getProcess", tag: tagProcesses, summary: "The record of a named process", status: 200,
		answer: of[shard.Process]()},
	"GET /v0/sandboxes/{id}/processes/{name}/attach": {id: "attachProcess", tag: tagProcesses, summary: "Wait for the end of a named process",
		text: "The answer comes when nothing will start it again.", status: 200, answer: of[shard.Process](),
		stream: stream("0x01 output since the current run began, at the end 0x03 with the Process as JSON")},
	"POST /v0/sandboxes/{id}/processes/{name}/kill": {id: "killProcess", tag: tagProcesses, summary: "End a named process",
		text: "The answer comes when it has ended.", request: of[shard.KillProcessRequest](), optional: true, status: 200, answer: of[shard.Process]()},
	"GET /v0/sandboxes/{id}/processes/{name}/logs": {id: "processLogs", tag: tagProcesses, summary: "The log of a named process",
		text: "With `follow=true` it goes on until the process or the sandbox ends.", status: 200, media: "text/plain",
		stream: stream("0x01 the log and then what comes, at the end 0x03 with a JSON LogEnd") + " Needs `follow=true`."},

	"GET /v0/ports":                {id: "listAllPorts", tag: tagPorts, summary: "List the forwards of every sandbox", status: 200, answer: of[shard.PortList]()},
	"GET /v0/sandboxes/{id}/ports": {id: "listPorts", tag: tagPorts, summary: "List the forwards of a sandbox", status: 200, answer: of[shard.PortList]()},
	"PUT /v0/sandboxes/{id}/ports/{host_port}": {id: "putPort", tag: tagPorts, summary: "Forward a host port, or change its forward",
		text:    "It is kept until it is removed, and listens while the sandbox runs. The same again changes nothing.",
		request: of[shard.PortRequest](), status: 200, answer: of[shard.Port]()},
	"DELETE /v0/sandboxes/{id}/ports/{host_port}": {id: "removePort", tag: tagPorts, summary: "End a forward and its connections", status: 204},
	"POST /v0/sandboxes/{id}/links/{guest_port}": {id: "linkPort", tag: tagPorts, summary: "Sign a link to a port of a sandbox",
		text: "Whoever has the URL reaches that port of that sandbox with a browser until the link expires, or the API key that asked for it is revoked or expires. " +
			"`shard serve --preview-domain` answers this itself; without preview addresses, and on the daemon's socket, it is refused with `unsupported`.",
		status: 201, answer: of[shard.PortLink]()},
	"GET /v0/sandboxes/{id}/dial/{guest_port}": {id: "dialPort", tag: tagPorts, summary: "Connect to a port of a sandbox",
		text:   "With `Connection: Upgrade` and `Upgrade: tcp`. After the 101 the connection is the guest's, each half up to its end. A client sends nothing before.",
		status: 101},

	"PUT /v0/sandboxes/{id}/files": {id: "writeFile", tag: tagFiles, summary: "Write a file", text: "Needs a Content-Length.",
		requestMedia: "application/octet-stream", status: 204},
	"GET /v0/sandboxes/{id}/files": {id: "readFile", tag: tagFiles, summary: "Read a file",
		text: "A fault after the first byte cuts the connection.", status: 200, media: "application/octet-stream", stat: true},
	"HEAD /v0/sandboxes/{id}/files": {id: "statFile", tag: tagFiles, summary: "Look at a path without reading it",
		text: "Errors have a status only.", status: 200, stat: true},
	"DELETE /v0/sandboxes/{id}/files": {id: "removeFile", tag: tagFiles, summary: "Remove a path", status: 204},
	"GET /v0/sandboxes/{id}/ls": {id: "listDirectory", tag: tagFiles, summary: "List a directory", text: "The JSON is left unfinished when the listing is cut.",
		status: 200, answer: of[shard.EntryList]()},
	"POST /v0/sandboxes/{id}/mkdir": {id: "makeDirectory", tag: tagFiles, summary: "Make a directory", request: of[shard.MkdirRequest](), status: 204},
	"GET /v0/sandboxes/{id}/watch": {id: "watchFiles", tag: tagFiles, summary: "Watch a directory", text: "Nothing is missed from the head of the answer on.",
		status: 200, lines: of[shard.FileEvent](), stream: "Text messages, each a JSON FileEvent. The close says why the watch ended."},
	"GET /v0/sandboxes/{id}/egress-log": {id: "egressLog", tag: tagSandboxes, summary: "What was decided about a sandbox's traffic",
		text:   "The newest 10,000, oldest first; `Shard-Egress-Cut` counts what was left out. Followed, it goes on until the sandbox stops or is paused.",
		status: 200, answer: of[[]shard.EgressDecision](), lines: of[shard.EgressDecision](), linesWhen: "with `follow=true`", stream: "Text messages, each a JSON EgressDecision. The close says why the log ended. Needs `follow=true`."},
	"PUT /v0/sandboxes/{id}/archive": {id: "unpackArchive", tag: tagFiles, summary: "Unpack a tar into a directory",
		text: "What would leave the directory, devices and hard links to nothing are refused.", requestMedia: "application/x-tar", status: 204},
	"GET /v0/sandboxes/{id}/archive": {id: "packArchive", tag: tagFiles, summary: "Pack a path into a tar", status: 200, media: "application/x-tar", stat: true},

	"PUT /v0/sandboxes/{id}/policy": {id: "attachPolicy", tag: tagPolicies, summary: "Attach a policy to a stopped sandbox",
		request: of[shard.AttachPolicyRequest](), status: 200, answer: of[shard.Sandbox]()},
	"DELETE /v0/sandboxes/{id}/policy": {id: "detachPolicy", tag: tagPolicies, summary: "Detach the policy of a stopped sandbox", status: 200,
		answer: of[shard.Sandbox]()},
	"GET /v0/policies": {id: "listPolicies", tag: tagPolicies, summary: "List policies", status: 200, answer: of[shard.PolicyList]()},
	"GET /v0/policies/{name}": {id: "getPolicy", tag: tagPolicies, summary: "A policy, and what follows from it", status: 200,
		answer: of[shard.PolicyView]()},
	"PUT /v0/policies/{name}": {id: "putPolicy", tag: tagPolicies, summary: "Set the rules of a policy", request: of[shard.PutPolicyRequest](), status: 200,
		answer: of[shard.PolicyView]()},
	"DELETE /v0/policies/{name}": {id: "removePolicy", tag: tagPolicies, summary: "Remove a policy that no sandbox has", status: 204},

	"POST /v0/sandboxes/{id}/secrets/{name}": {id: "grantSecret", tag: tagSecrets, summary: "Grant a secret to a stopped sandbox",
		text: "From its next start on, its commands have the placeholder in the variable of that name. A secret that it has already is no error.", status: 200, answer: of[shard.Sandbox]()},
	"DELETE /v0/sandboxes/{id}/secrets/{name}": {id: "ungrantSecret", tag: tagSecrets, summary: "Take a secret from a stopped sandbox", status: 200,
		answer: of[shard.Sandbox]()},
	"GET /v0/secrets": {id: "listSecrets", tag: tagSecrets, summary: "List secrets, without their values", status: 200, answer: of[shard.SecretList]()},
	"PUT /v0/secrets/{name}": {id: "putSecret", tag: tagSecrets, summary: "Set a secret, or replace its value",
		text:    "The next request of a sandbox that has it gets the new value. `in_use` names the sandboxes that keep its placeholder from changing.",
		request: of[shard.PutSecretRequest](), status: 200, answer: of[shard.Secret]()},
	"DELETE /v0/secrets/{name}": {id: "removeSecret", tag: tagSecrets, summary: "Remove a secret",
		text: "One that sandboxes have is removed with `force=true` only: they keep the grant, and the placeholder stands for nothing.", status: 204},

	"GET /v0/daemon": {id: "getDaemon", tag: tagHost, summary: "What the daemon says of itself", status: 200, answer: of[shard.DaemonStatus]()},
	"PUT /v0/daemon/preview": {id: "announcePreview", tag: tagHost, summary: "Say under which origin preview addresses are served",
		text: "`shard serve` does this every few seconds; the daemon forgets it 15 s after the last time.", request: of[shard.PreviewRequest](), status: 204},
	"GET /v0/images": {id: "listImages", tag: tagImages, summary: "List the images on the host", status: 200, answer: of[shard.ImageList]()},
	"POST /v0/images/pull": {id: "pullImage", tag: tagImages, summary: "Pull an image", request: of[shard.PullRequest](), status: 200,
		lines: of[shard.ImageLine]()},
	"POST /v0/images/import": {id: "importImage", tag: tagImages, summary: "Make an image of a tar",
		text: "An archive of an image, or of a root file system, which needs `ref` to name it.", requestMedia: "application/x-tar", status: 200, lines: of[shard.ImageLine]()},
	"POST /v0/images/prune": {id: "pruneImages", tag: tagImages, summary: "Remove every image that nothing needs", request: of[shard.Empty](), optional: true,
		status: 200, answer: of[shard.PrunedImages]()},
	"DELETE /v0/images/{ref...}": {id: "removeImage", tag: tagImages, summary: "Remove an image",
		text: "The slashes of the reference stand in the path as they are.", status: 200, answer: of[shard.RemovedImage]()},
}

// parameters are the query parameters, wherever they occur.
var parameters = map[string]struct {
	schema   object
	text     string
	required bool
}{
	"all":       {schema: object{"type": "boolean"}, text: "show stopped sandboxes too"},
	"cursor":    {schema: object{"type": "string"}, text: "`next` of the page before"},
	"env":       {schema: object{"type": "array", "items": object{"type": "string"}}, text: "a variable, KEY=VALUE; may be repeated"},
	"expires":   {schema: object{"type": "integer", "minimum": 1, "maximum": 2592000}, text: "seconds that the link is good for; without it 3600"},
	"follow":    {schema: object{"type": "boolean"}, text: "go on with what comes"},
	"force":     {schema: object{"type": "boolean"}, text: "also when it is in use"},
	"limit":     {schema: object{"type": "integer", "minimum": 1}, text: "the longest page; without it, all"},
	"mode":      {schema: object{"type": "string", "pattern": "^[0-7]*$"}, text: "permission bits in octal, at most 0777"},
	"parents":   {schema: object{"type": "boolean"}, text: "make what is missing above"},
	"path":      {schema: object{"type": "string", "pattern": "^/"}, text: "absolute path in the sandbox", required: true},
	"provider":  {schema: object{"type": "string"}, text: "another than the default one"},
	"recursive": {schema: object{"type": "boolean"}, text: "with everything below"},
	"ref":       {schema: object{"type": "string"}, text: "name of the image"},
	"user":      {schema: object{"type": "string"}, text: "name or id of the user that acts and owns; without it, the sandbox's"},
	"wait":      {schema: object{"type": "boolean"}, text: "answer at the end"},
	"workdir":   {schema: object{"type": "string"}, text: "working directory of commands"},
}

// segments are the parameters of paths.
var segments = map[string]string{
	"id":         "id or name of a sandbox, or the beginning of an id that fits one only",
	"exec":       "id of a command",
	"guest_port": "port of the sandbox's 127.0.0.1, 1 to 65535",
	"host_port":  "port of the host, 1 to 65535",
	"name":       "name of the thing",
	"ref":        "reference of an image, slashes included",
}

package test

import (
	"bytes"
	"encoding/json"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/google/jsonschema-go/jsonschema"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// document is api/openapi.json, as a client reads it.
type document struct {
	Paths      map[string]map[string]documented `json:"paths"`
	Components struct {
		Schemas   map[string]*jsonschema.Schema `json:"schemas"`
		Responses map[string]response           `json:"responses"`
	} `json:"components"`
}

type documented struct {
	Responses map[string]response `json:"responses"`
}

type response struct {
	Ref     string `json:"$ref"`
	Content map[string]struct {
		Schema *jsonschema.Schema `json:"schema"`
		Line   *jsonschema.Schema `json:"x-shard-line"`
	} `json:"content"`
}

func readDocument(t *testing.T) *document {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(testenv.Module(), "api", "openapi.json"))
	if err != nil {
		t.Fatal(err)
	}
	data = bytes.ReplaceAll(data, []byte("#/components/schemas/"), []byte("#/$defs/"))
	var d document
	if err := json.Unmarshal(data, &d); err != nil {
		t.Fatal(err)
	}
	return &d
}

// validate says what is wrong with a JSON text by a schema of the document.
func (d *document) validate(schema *jsonschema.Schema, text []byte) error {
	root := *schema
	root.Defs = d.Components.Schemas
	resolved, err := root.Resolve(nil)
	if err != nil {
		return err
	}
	var v any
	if err := json.Unmarshal(text, &v); err != nil {
		return err
	}
	return resolved.Validate(v)
}

// check compares an answer with what the document says of the request's route. It returns the route's name.
func (d *document) check(t *testing.T, method, path string, a answer) string {
	t.Helper()
	raw, _, _ := strings.Cut(path, "?")
	route, _ := shard.MatchRoute(method, raw)
	if route == nil {
		t.Fatalf("%s %s is no route", method, path)
	}
	if a.Header.Get("X-Request-Id") == "" {
		t.Errorf("%s: the answer has no X-Request-Id", route.Name())
	}
	r, ok := d.Paths[strings.ReplaceAll(route.Path, "...}", "}")][strings.ToLower(method)].Responses[strconv.Itoa(a.Status)]
	if !ok {
		t.Errorf("%s answers %d, which the document does not know: %s", route.Name(), a.Status, a.Body)
		return route.Name()
	}
	if name, isRef := strings.CutPrefix(r.Ref, "#/components/responses/"); isRef {
		r = d.Components.Responses[name]
	}
	if method == http.MethodHead {
		return route.Name()
	}
	media, _, _ := strings.Cut(a.Header.Get("Content-Type"), ";")
	if len(r.Content) == 0 {
		if len(a.Body) > 0 {
			t.Errorf("%s: the document knows no body, there is one: %s", route.Name(), a.Body)
		}
		return route.Name()
	}
	content, ok := r.Content[media]
	if !ok {
		t.Errorf("%s answers with %q, which the document does not know", route.Name(), media)
		return route.Name()
	}
	switch media {
	case "application/json":
		if err := d.validate(content.Schema, a.Body); err != nil {
			t.Errorf("%s: %v: %s", route.Name(), err, a.Body)
		}
	case "application/x-ndjson":
		for line := range bytes.Lines(a.Body) {
			if err := d.validate(content.Line, line); err != nil {
				t.Errorf("%s: %v: %s", route.Name(), err, line)
			}
		}
	}
	return route.Name()
}

// TestOpenAPI asks every route of a real daemon, and finds each answer as api/openapi.json describes it. Then the metrics
// have counted, and neither they nor the log hold what was run.
func TestOpenAPI(t *testing.T) {
	const secret = "never-in-a-log"
	doc := readDocument(t)
	d := start(t, testenv.Options{Env: []string{"SHARD_LOG_LEVEL=debug"}})
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		succeeded := make(map[string]bool)
		ask := func(method, path string, body any, header ...string) answer {
			t.Helper()
			a := call(t, d, method, path, body, header...)
			name := doc.check(t, method, path, a)
			if a.Status < 400 {
				succeeded[name] = true
			}
			return a
		}
		for _, path := range []string{"/v0/version", "/v0/capabilities", "/v0/capabilities?provider=nothing", "/v0/providers", "/v0/scopes", "/v0/daemon",
			"/v0/images", "/v0/images?limit=x", "/v0/policies", "/v0/sandboxes?all=true&limit=1", "/v0/sandboxes/nobody", "/v0/sandboxes?cursor=%21"} {
			ask("GET", path, nil)
		}
		caps := decode[shard.Capabilities](t, ask("GET", "/v0/capabilities?provider="+provider, nil), 200)
		ask("PUT", "/v0/policies/web-"+provider, shard.PutPolicyRequest{Rules: []shard.PolicyRule{{Action: "allow", Rule: "1.1.1.1 tcp:443"}}})
		ask("GET", "/v0/policies/web-"+provider, nil)
		ask("DELETE", "/v0/policies/web-"+provider, nil)
		ask("DELETE", "/v0/policies/web-"+provider, nil)
		ask("POST", "/v0/images/pull", shard.PullRequest{Ref: "127.0.0.1:1/nothing"})
		ask("DELETE", "/v0/images/not/there:1", nil)

		created := ask("POST", "/v0/sandboxes?wait=true", shard.CreateRequest{Image: image, Name: "box-" + provider, Provider: provider,
			Env: []string{"KEY=" + secret}}, "Accept", "application/x-ndjson")
		id := regexp.MustCompile(`[a-z]+-[a-z]+-[0-9a-f]{4}`).FindString(string(created.Body))
		if id == "" {
			t.Fatalf("no sandbox: %s", created.Body)
		}
		at := "/v0/sandboxes/" + id
		ask("POST", "/v0/sandboxes", shard.CreateRequest{Image: image, Name: "box-" + provider})
		ask("GET", at+"?wait=true", nil)
		for _, verb := range []string{"start", "pause", "pause", "resume", "resume", "fork"} {
			ask("POST", at+"/"+verb, shard.Empty{})
		}
		x := decode[shard.Exec](t, ask("POST", at+"/exec", shard.ExecRequest{Command: []string{"sh", "-c", "read a; : " + secret}, Stdin: true}), 201)
		ask("GET", at+"/exec", nil)
		ask("DELETE", at+"/exec/"+x.ID, nil)
		ask("POST", at+"/exec/"+x.ID+"/resize", shard.Size{Rows: 1, Cols: 1})
		ask("POST", at+"/exec/"+x.ID+"/kill", shard.KillRequest{Signal: "KILL"})
		ask("GET", at+"/exec/"+x.ID+"?wait=true", nil)
		ask("DELETE", at+"/exec/"+x.ID, nil)
		ask("POST", at+"/exec", shard.ExecRequest{Command: []string{"/" + secret}})
		tty := decode[shard.Exec](t, ask("POST", at+"/exec", shard.ExecRequest{Command: []string{"sleep", "600"}, Stdin: true, TTY: true}), 201)
		ask("POST", at+"/exec/"+tty.ID+"/resize", shard.Size{Rows: 1, Cols: 1})

		ask("POST", at+"/processes", shard.RunRequest{Command: []string{"sh", "-c", "echo up; exec sleep 600; : " + secret}, Name: p("web")})
		ask("GET", at+"/processes", nil)
		ask("GET", at+"/processes/web", nil)
		ask("GET", at+"/processes/nobody", nil)
		ask("POST", at+"/processes/web/kill", shard.KillProcessRequest{Force: true})
		ask("GET", at+"/processes/web/attach", nil)
		ask("GET", at+"/processes/web/logs", nil)

		ask("PUT", at+"/files?path=/tmp/f&mode=600&parents=true", "hello")
		ask("PUT", at+"/files?path=/etc/ssl/certs/ca-certificates.crt&parents=true", "no certificates yet")
		ask("GET", at+"/files?path=/tmp/f", nil)
		ask("HEAD", at+"/files?path=/tmp/f", nil)
		ask("GET", at+"/ls?path=/tmp", nil)
		ask("GET", at+"/ls?path=/nothing", nil)
		ask("GET", at+"/watch?path=/nothing", nil)
		ask("POST", at+"/mkdir", shard.MkdirRequest{Path: "/tmp/dir", Mode: "0700"})
		tar := ask("GET", at+"/archive?path=/tmp/f", nil)
		ask("PUT", at+"/archive?path=/tmp/dir", tar.Body)
		ask("DELETE", at+"/files?path=/tmp/dir&recursive=true", nil)

		ask("PUT", at+"/ports/18080", map[string]any{"guest_port": 80})
		ask("PUT", at+"/ports/0", map[string]any{"guest_port": 80})
		ask("GET", at+"/ports", nil)
		ask("GET", "/v0/ports", nil)
		ask("GET", at+"/dial/80", nil)
		ask("POST", at+"/links/80", nil)
		ask("PUT", "/v0/daemon/preview", shard.PreviewRequest{Origin: "https://preview.example.com"})
		ask("PUT", "/v0/daemon/preview", shard.PreviewRequest{Origin: "no origin"})
		ask("DELETE", at+"/ports/18080", nil)
		ask("GET", at+"/egress-log", nil)

		ask("DELETE", at, nil)
		ask("POST", at+"/stop", nil)
		ask("PUT", at+"/policy", shard.AttachPolicyRequest{Policy: "nothing"})
		ask("DELETE", at+"/policy", nil)
		ask("PUT", "/v0/secrets/KEY", shard.PutSecretRequest{Value: secret})
		ask("PUT", "/v0/secrets/KEY", shard.PutSecretRequest{Value: secret, Destinations: []string{"api.example.com"}})
		ask("PUT", "/v0/secrets/API_KEY", shard.PutSecretRequest{Value: secret, Destinations: []string{"api.example.com", "*.example.org"}, OnMisuse: "stop"})
		ask("POST", at+"/secrets/KEY", nil) // a variable of that name is there
		ask("POST", at+"/secrets/API_KEY", nil)
		ask("DELETE", "/v0/secrets/API_KEY", nil)
		ask("GET", "/v0/secrets", nil)
		ask("DELETE", at+"/secrets/API_KEY", nil)
		ask("DELETE", "/v0/secrets/API_KEY?force=true", nil)
		ask("DELETE", "/v0/secrets/KEY", nil)
		ask("POST", at+"/start", nil)
		ask("GET", "/v0/sandboxes", nil)
		metrics := string(ask("GET", "/metrics", nil).Body)
		ask("DELETE", at+"?force=true", nil)
		ask("POST", "/v0/images/prune", shard.Empty{})
		ask("POST", "/v0/images/import?ref="+image, "no tar")
		d.Import(image, testenv.Busybox(t))

		for i := range shard.Routes {
			name := shard.Routes[i].Name()
			if pauses := strings.HasSuffix(name, "/pause") || strings.HasSuffix(name, "/resume"); pauses && succeeded[name] != caps.Pause {
				t.Errorf("%s succeeded: %t, and the provider can pause: %t", name, succeeded[name], caps.Pause)
			}
			// No provider of this version can fork; the others are tested where there is something to attach, pull or watch.
			if !succeeded[name] && !regexp.MustCompile(`/(pause|resume|fork|watch|import|pull|policy|links/\{guest_port\}|dial/\{guest_port\}|images/\{ref\.\.\.\})$`).MatchString(name) {
				t.Errorf("%s never succeeded", name)
			}
		}
		for _, want := range []string{
			`shard_http_requests_total{method="POST",route="/v0/sandboxes/{id}/exec",status="201"} `,
			`shard_http_request_duration_seconds_bucket{method="GET",route="/v0/version",le="+Inf"}`,
			`shard_sandboxes{provider="` + provider + `",state="running"} 1`,
			"process_open_fds", "go_goroutines", "shard_socket_transmit_bytes_total",
		} {
			if !strings.Contains(metrics, want) {
				t.Errorf("the metrics do not say %s:\n%s", want, metrics)
			}
		}
		exposition(t, metrics)
		if strings.Contains(metrics, secret) || strings.Contains(metrics, id) {
			t.Errorf("the metrics hold what is nobody's business:\n%s", metrics)
		}
	})
	log := d.Log()
	if strings.Contains(log, secret) {
		t.Errorf("the log holds a command line:\n%s", log)
	}
	if !strings.Contains(log, `"msg":"request"`) {
		t.Error("the log has no line per request")
	}
}

// exposition checks the text format: a family's head, then its samples, none of them twice.
func exposition(t *testing.T, text string) {
	t.Helper()
	sample := regexp.MustCompile(`^([a-z_]+?)(_bucket|_sum|_count)?(\{([a-z]+="[^"\\]*",?)*\})? [0-9.e+-]+$`)
	seen, family := make(map[string]bool), ""
	for line := range strings.Lines(text) {
		line = strings.TrimSuffix(line, "\n")
		if rest, ok := strings.CutPrefix(line, "# TYPE "); ok {
			family, _, _ = strings.Cut(rest, " ")
			continue
		}
		if strings.HasPrefix(line, "# HELP ") {
			continue
		}
		series, _, _ := strings.Cut(line, " ")
		if i := strings.LastIndexByte(line, ' '); i > 0 {
			series = line[:i]
		}
		if !sample.MatchString(line) || !strings.HasPrefix(line, family) || seen[series] {
			t.Errorf("not in Prometheus' format: %s", line)
		}
		seen[series] = true
	}
}

// Package api is the hall: it turns requests of the /v0 API into calls of the engine and their results into answers.
// It checks the form of everything a client sends, maps errors to codes and statuses, and logs each failure once. It
// knows no provider, no network and no file format.
package api

import (
	"context"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/engine"
	"github.com/useshards/shard/internal/image"
)

// maxBody bounds a JSON body, in bytes.
const maxBody = 1 << 20

// idle is how long a client may send or take nothing while a file or an archive moves.
const idle = 60 * time.Second

// requestIDHeader carries the id under which the daemon's log knows a request.
const requestIDHeader = "X-Request-Id"

// Config is what the API serves.
type Config struct {
	Engine *engine.Engine
	Images *image.Store
	// Version is the daemon's.
	Version string
	// Status is the answer of /v0/daemon.
	Status func() shard.DaemonStatus
	Log    *slog.Logger
}

// API serves the routes of shard.Routes.
type API struct {
	Config
	handlers map[string]func(*call) error
	recorder *recorder
	previews previews
}

// New makes the handler. It panics when a route has no handler or a handler no route: a test of any kind shows it.
func New(cfg Config) *API {
	a := &API{Config: cfg, recorder: newRecorder()}
	a.handlers = map[string]func(*call) error{
		"GET /v0/version":                                a.version,
		"GET /v0/capabilities":                           a.capabilities,
		"GET /v0/providers":                              a.providers,
		"GET /metrics":                                   a.metrics,
		"GET /v0/scopes":                                 a.scopes,
		"GET /v0/sandboxes":                              a.list,
		"POST /v0/sandboxes":                             a.create,
		"GET /v0/sandboxes/{id}":                         a.inspect,
		"DELETE /v0/sandboxes/{id}":                      a.remove,
		"POST /v0/sandboxes/{id}/start":                  a.start,
		"POST /v0/sandboxes/{id}/stop":                   a.stop,
		"POST /v0/sandboxes/{id}/pause":                  a.pause,
		"POST /v0/sandboxes/{id}/resume":                 a.resume,
		"POST /v0/sandboxes/{id}/fork":                   a.fork,
		"POST /v0/sandboxes/{id}/exec":                   a.exec,
		"GET /v0/sandboxes/{id}/exec":                    a.listExecs,
		"GET /v0/sandboxes/{id}/exec/{exec}":             a.getExec,
		"DELETE /v0/sandboxes/{id}/exec/{exec}":          a.deleteExec,
		"POST /v0/sandboxes/{id}/exec/{exec}/kill":       a.killExec,
		"POST /v0/sandboxes/{id}/exec/{exec}/resize":     a.resizeExec,
		"POST /v0/sandboxes/{id}/processes":              a.runProcess,
		"GET /v0/sandboxes/{id}/processes":               a.listProcesses,
		"GET /v0/sandboxes/{id}/processes/{name}":        a.getProcess,
		"GET /v0/sandboxes/{id}/processes/{name}/attach": a.attachProcess,
		"POST /v0/sandboxes/{id}/processes/{name}/kill":  a.killProcess,
		"GET /v0/sandboxes/{id}/processes/{name}/logs":   a.processLogs,
		"GET /v0/ports":                                  a.allPorts,
		"GET /v0/sandboxes/{id}/ports":                   a.ports,
		"PUT /v0/sandboxes/{id}/ports/{host_port}":       a.putPort,
		"DELETE /v0/sandboxes/{id}/ports/{host_port}":    a.removePort,
		"POST /v0/sandboxes/{id}/links/{guest_port}":     a.link,
		"GET /v0/sandboxes/{id}/dial/{guest_port}":       a.dial,
		"PUT /v0/sandboxes/{id}/files":                   a.putFile,
		"GET /v0/sandboxes/{id}/files":                   a.getFile,
		"HEAD /v0/sandboxes/{id}/files":                  a.statFile,
		"DELETE /v0/sandboxes/{id}/files":                a.removeFile,
		"GET /v0/sandboxes/{id}/ls":                      a.listDir,
		"POST /v0/sandboxes/{id}/mkdir":                  a.mkdir,
		"GET /v0/sandboxes/{id}/watch":                   a.watch,
		"GET /v0/sandboxes/{id}/egress-log":              a.egressLog,
		"PUT /v0/sandboxes/{id}/archive":                 a.putArchive,
		"GET /v0/sandboxes/{id}/archive":                 a.getArchive,
		"PUT /v0/sandboxes/{id}/policy":                  a.attachPolicy,
		"DELETE /v0/sandboxes/{id}/policy":               a.detachPolicy,
		"GET /v0/policies":                               a.listPolicies,
		"GET /v0/policies/{name}":                        a.getPolicy,
		"PUT /v0/policies/{name}":                        a.putPolicy,
		"DELETE /v0/policies/{name}":                     a.removePolicy,
		"GET /v0/secrets":                                a.listSecrets,
		"PUT /v0/secrets/{name}":                         a.putSecret,
		"DELETE /v0/secrets/{name}":                      a.removeSecret,
		"POST /v0/sandboxes/{id}/secrets/{name}":         a.grantSecret,
		"DELETE /v0/sandboxes/{id}/secrets/{name}":       a.ungrantSecret,
		"GET /v0/daemon":                                 a.daemon,
		"PUT /v0/daemon/preview":                         a.putPreview,
		"GET /v0/images":                                 a.listImages,
		"POST /v0/images/pull":                           a.pullImage,
		"POST /v0/images/import":                         a.importImage,
		"POST /v0/images/prune":                          a.pruneImages,
		"DELETE /v0/images/{ref...}":                     a.removeImage,
	}
	for i := range shard.Routes {
		if a.handlers[shard.Routes[i].Name()] == nil {
			panic("no handler for " + shard.Routes[i].Name())
		}
	}
	if len(a.handlers) != len(shard.Routes) {
		panic("a handler has no route")
	}
	return a
}

// call is one request under way.
type call struct {
	w      http.ResponseWriter
	r      *http.Request
	params map[string]string
	query  map[string][]string
	sent   bool // the status is out
}

// ServeHTTP implements http.Handler.
func (a *API) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	began := time.Now()
	answer := &statusWriter{ResponseWriter: w}
	c := &call{w: answer, r: r}
	id := rand.Text()[:10]
	w.Header().Set(requestIDHeader, id)
	name := "unknown route"
	defer func() {
		p := recover()
		took := time.Since(began)
		a.recorder.observe(name, answer.status, took)
		a.Log.Debug("request", "request", id, "route", name, "status", answer.status, "took", took, "cut", p != nil)
		if p != nil {
			if p != http.ErrAbortHandler { // a panic value, compared as net/http does
				a.Log.Error("panic", "request", id, "route", name, "panic", fmt.Sprint(p))
			}
			panic(http.ErrAbortHandler)
		}
	}()
	route, params := shard.MatchRoute(r.Method, r.URL.EscapedPath())
	if route == nil {
		a.fail(c, id, name, shard.Errorf(shard.CodeNotFound, "there is no route %s %s", shard.Quote(r.Method), shard.Quote(r.URL.Path)))
		return
	}
	name = route.Name()
	c.params = params
	err := c.admits(route)
	if err == nil {
		err = c.parseQuery(route)
	}
	if err == nil && route.Stream && upgrades(r) {
		err = checkUpgrade(r)
		a.recorder.streams.Add(1)
		defer a.recorder.streams.Add(-1)
	}
	if err == nil {
		err = a.handlers[name](c)
	}
	if err != nil {
		a.fail(c, id, name, err)
	}
}

// fail answers with an error, or cuts the connection when an answer is already under way.
func (a *API) fail(c *call, id, route string, err error) {
	public := publicError(err)
	_, registry := errors.AsType[*image.RegistryError](err)
	switch status := public.Code.Status(); {
	case errors.Is(err, context.Canceled) && c.r.Context().Err() != nil:
		a.Log.Debug("request given up by the client", "request", id, "route", route)
	case status >= 500 && !registry:
		a.Log.Error("request failed", "request", id, "route", route, "code", public.Code, "err", err)
	case public.Code == shard.CodeCommandNotStarted: // its text names the program, and no command line is for the log
		a.Log.Debug("request refused", "request", id, "route", route, "code", public.Code)
	default:
		a.Log.Debug("request refused", "request", id, "route", route, "code", public.Code, "err", err)
	}
	if c.sent {
		panic(http.ErrAbortHandler)
	}
	if c.r.ContentLength == 0 || c.r.Header.Get("Expect") != "" { // who waits to be asked for the body gets none started
		_ = c.json(public.Code.Status(), shard.ErrorBody{Error: public})
		return
	}
	// Many clients send all of a body before they read. A connection that is closed under them ends in a broken pipe instead
	// of the answer, so something of the body is taken, however little of it there is a use for.
	rc := http.NewResponseController(c.w)
	_ = rc.EnableFullDuplex() // else net/http takes it before the answer leaves, without end
	_ = rc.SetReadDeadline(time.Now().Add(drainTime))
	if c.r.ContentLength > maxDrain || public.Code == shard.CodeBodyTooLarge {
		c.w.Header().Set("Connection", "close")
	}
	_ = c.json(public.Code.Status(), shard.ErrorBody{Error: public})
	_ = rc.Flush()
	_, _ = io.CopyN(io.Discard, c.r.Body, maxDrain)
}

// How much of the body of a request that was refused is taken, and how long that may last.
const (
	maxDrain  = 16 << 20
	drainTime = 5 * time.Second
)

// publicError is what a client may see of err.
func publicError(err error) shard.ErrorDetail {
	e, ok := errors.AsType[*shard.Error](err)
	switch short := shortage(err); {
	case ok && e.Code == shard.CodeInternal && short != "" && !strings.HasSuffix(e.Message, "?"):
		return shard.ErrorDetail{Code: e.Code, Message: e.Message + ": " + short}
	case ok:
	case short != "":
		return shard.ErrorDetail{Code: shard.CodeInternal, Message: short}
	default:
		return shard.ErrorDetail{Code: shard.CodeInternal, Message: "internal error: the daemon's log says more"}
	}
	return shard.ErrorDetail{Code: e.Code, Message: e.Message, Holders: e.Holders, ExitCode: e.ExitCode}
}

// shortage says what the host lacks, when that is why something failed.
func shortage(err error) string {
	switch {
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return "the host's disk is full: make room there, for example by removing sandboxes or images"
	case errors.Is(err, syscall.EROFS):
		return "the host's disk has become read-only: see the host's kernel log"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return "the daemon has too many files open: try again later, or raise its limit"
	}
	return ""
}

// json answers with a status and a body.
func (c *call) json(status int, body any) error {
	data, err := json.Marshal(body)
	if err != nil {
		return fmt.Errorf("encode the answer: %w", err)
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.w.Header().Set("Content-Length", strconv.Itoa(len(data)+1))
	c.sent = true
	c.w.WriteHeader(status)
	_, _ = c.w.Write(append(data, '\n')) // a client that has gone is no failure of ours
	return nil
}

func (c *call) noContent() error {
	c.sent = true
	c.w.WriteHeader(http.StatusNoContent)
	return nil
}

// parseQuery takes the parameters that the route knows and refuses others.
func (c *call) parseQuery(route *shard.Route) error {
	values, err := parseQuery(c.r.URL.RawQuery)
	if err != nil {
		return err
	}
	for name, v := range values {
		if !slices.Contains(route.Query, name) {
			return shard.Invalidf("query parameter %s is not known here", shard.Quote(name))
		}
		if len(v) > 1 && name != "env" {
			return shard.Invalidf("query parameter %s is given twice", shard.Quote(name))
		}
	}
	c.query = values
	return nil
}

func (c *call) param(name string) string { return c.params[name] }

// text is a query parameter, "" when absent.
func (c *call) text(name string) string {
	if v := c.query[name]; len(v) > 0 {
		return v[0]
	}
	return ""
}

// flag is a boolean query parameter.
func (c *call) flag(name string) (bool, error) {
	switch v := c.query[name]; {
	case len(v) == 0 || v[0] == "false":
		return false, nil
	case v[0] == "true":
		return true, nil
	}
	return false, shard.Invalidf("query parameter %s must be true or false", name)
}

// follows reads whether a log is followed, which is the only form a WebSocket has.
func (c *call) follows() (bool, error) {
	follow, err := c.flag("follow")
	if err == nil && !follow && upgrades(c.r) {
		return false, shard.Invalidf("a WebSocket carries a log that is followed: add follow=true")
	}
	return follow, err
}

// body decodes a JSON body into v, whose type is the whole schema: an unknown field is refused by name.
func (c *call) body(v any, optional bool) error {
	data, err := io.ReadAll(http.MaxBytesReader(c.w, c.r.Body, maxBody))
	if err != nil {
		if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
			return shard.Errorf(shard.CodeBodyTooLarge, "the body is larger than %d bytes", maxBody)
		}
		return shard.Invalidf("the body could not be read")
	}
	if len(strings.TrimSpace(string(data))) == 0 {
		if optional {
			return nil
		}
		return shard.Invalidf("the body is empty: send a JSON object")
	}
	if strings.TrimSpace(string(data))[0] != '{' {
		return shard.Invalidf("the body is not a JSON object")
	}
	if !isText(data) {
		return shard.Invalidf("the body holds text that is not Unicode: bytes that are no UTF-8, or half of a surrogate pair (\\ud800 to \\udfff)")
	}
	if err := exactKeys(json.NewDecoder(strings.NewReader(string(data))), reflect.TypeOf(v), ""); err != nil {
		return err
	}
	dec := json.NewDecoder(strings.NewReader(string(data)))
	dec.DisallowUnknownFields()
	if err := dec.Decode(v); err != nil {
		return badJSON(err)
	}
	if _, err := dec.Token(); err != io.EOF {
		return shard.Invalidf("the body goes on after the JSON object")
	}
	return nil
}

// badJSON names what is wrong with a body, and never a value in it.
func badJSON(err error) error {
	if e, ok := errors.AsType[*json.UnmarshalTypeError](err); ok {
		field := e.Field
		if field == "" {
			field = "the body"
		}
		return shard.Invalidf("%s must be a JSON %s", field, jsonType(e.Type.Kind().String()))
	}
	if name, ok := strings.CutPrefix(err.Error(), "json: unknown field "); ok {
		if unquoted, e := strconv.Unquote(name); e == nil {
			name = unquoted
		}
		return shard.Invalidf("field %s is not known here", shard.Quote(name))
	}
	return shard.Invalidf("the body is not valid JSON")
}

func jsonType(kind string) string {
	switch {
	case strings.HasPrefix(kind, "int"), strings.HasPrefix(kind, "uint"):
		return "integer in range"
	case strings.HasPrefix(kind, "float"):
		return "number"
	case kind == "slice":
		return "array"
	case kind == "struct", kind == "map":
		return "object"
	case kind == "bool":
		return "boolean"
	}
	return kind
}

// empty refuses a body that holds anything; {} passes.
func (c *call) empty() error { return c.body(&struct{}{}, true) }

// page cuts a sorted list to what limit and cursor ask for. key gives an item's key, by which the list is sorted; the
// cursor is the key of the last item of the page before, so that an item removed meanwhile breaks nothing.
func page[T any](c *call, items []T, key func(T) string) (out []T, next *string, err error) {
	if v, given := c.query["cursor"]; given {
		after, err := base64.RawURLEncoding.DecodeString(v[0])
		if err != nil || len(after) == 0 {
			return nil, nil, shard.Invalidf("the cursor is not one that this API gave: leave it out to begin again")
		}
		at, found := slices.BinarySearchFunc(items, string(after), func(item T, k string) int { return strings.Compare(key(item), k) })
		if found {
			at++
		}
		items = items[at:]
	}
	if v, given := c.query["limit"]; given {
		n, err := strconv.Atoi(v[0])
		if err != nil || n < 1 {
			return nil, nil, shard.Invalidf("limit must be a whole number from 1")
		}
		if n < len(items) {
			cursor := base64.RawURLEncoding.EncodeToString([]byte(key(items[n-1])))
			return items[:n], &cursor, nil
		}
	}
	if items == nil {
		items = []T{}
	}
	return items, nil, nil
}

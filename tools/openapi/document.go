package main

import (
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

func stream(messages string) string { return fmt.Sprintf(outputStream, messages) }

// description is everything that the document and the page are made of.
type description struct {
	schemas *schemas
	paths   object
	byCode  map[int][]string
}

func describe(c comments) (*description, error) {
	d := &description{schemas: newSchemas(c), paths: object{}, byCode: make(map[int][]string)}
	for _, code := range shard.Codes() {
		d.byCode[code.Status()] = append(d.byCode[code.Status()], string(code))
	}
	left := maps.Clone(operations)
	used := make(map[string]bool)
	for i := range shard.Routes {
		r := &shard.Routes[i]
		op, ok := left[r.Name()]
		if !ok {
			return nil, fmt.Errorf("route %s has no entry in tools/openapi/operations.go", r.Name())
		}
		delete(left, r.Name())
		for _, q := range r.Query {
			used[q] = true
		}
		if r.Stream != (op.stream != "") {
			return nil, fmt.Errorf("route %s: routes.go and operations.go do not agree on whether it is a stream", r.Name())
		}
		described, err := d.operation(r, &op)
		if err != nil {
			return nil, fmt.Errorf("route %s: %w", r.Name(), err)
		}
		path := strings.ReplaceAll(r.Path, "...}", "}")
		if d.paths[path] == nil {
			d.paths[path] = object{}
		}
		d.paths[path].(object)[strings.ToLower(r.Method)] = described
	}
	for _, t := range []reflect.Type{of[shard.ErrorBody](), of[shard.ExitMessage](), of[shard.LogEnd]()} {
		if _, err := d.schemas.of(t); err != nil {
			return nil, err
		}
	}
	for name := range parameters {
		if !used[name] {
			return nil, fmt.Errorf("no route has the parameter %s", name)
		}
	}
	switch {
	case len(left) > 0:
		return nil, fmt.Errorf("there are no such routes: %s", strings.Join(slices.Sorted(maps.Keys(left)), ", "))
	case len(d.schemas.unused) > 0:
		return nil, fmt.Errorf("there are facts about what is nowhere in the API: %s", strings.Join(slices.Sorted(maps.Keys(d.schemas.unused)), ", "))
	}
	return d, nil
}

func (d *description) operation(r *shard.Route, op *operation) (object, error) {
	out := object{"operationId": op.id, "tags": []any{op.tag}, "summary": op.summary}
	text := op.text
	if op.stream != "" {
		text += "\n\nUpgraded to a WebSocket: " + op.stream
	}
	if r.Local {
		text += "\n\nOn the daemon's socket only: shard serve answers 403."
	}
	if text = strings.TrimSpace(text); text != "" {
		out["description"] = text
	}
	if r.Scope != "" {
		out["security"] = []any{object{"token": []any{r.Scope}}}
	}
	if r.Local {
		out["security"], out["x-shard-local"] = []any{}, true
	}
	params, err := d.parameters(r)
	if err != nil {
		return nil, err
	}
	if len(params) > 0 {
		out["parameters"] = params
	}
	if op.request != nil || op.requestMedia != "" {
		content := object{}
		if op.requestMedia != "" {
			content[op.requestMedia] = object{"schema": object{}}
		} else {
			schema, err := d.schemas.of(op.request)
			if err != nil {
				return nil, err
			}
			content["application/json"] = object{"schema": schema}
		}
		out["requestBody"] = object{"required": !op.optional, "content": content}
	}
	responses, err := d.responses(r, op)
	if err != nil {
		return nil, err
	}
	out["responses"] = responses
	return out, nil
}

func (d *description) parameters(r *shard.Route) ([]any, error) {
	var out []any
	for _, part := range strings.Split(r.Path, "/") {
		name, ok := strings.CutPrefix(part, "{")
		if !ok {
			continue
		}
		name = strings.TrimSuffix(strings.TrimSuffix(name, "}"), "...")
		text := segments[name]
		if text == "" {
			return nil, fmt.Errorf("parameter {%s} has no entry in operations.go", name)
		}
		out = append(out, object{"name": name, "in": "path", "required": true, "description": text, "schema": object{"type": "string", "minLength": 1}})
	}
	for _, name := range r.Query {
		p, ok := parameters[name]
		if !ok {
			return nil, fmt.Errorf("query parameter %s has no entry in operations.go", name)
		}
		param := object{"name": name, "in": "query", "description": p.text, "schema": p.schema}
		if p.required {
			param["required"] = true
		}
		out = append(out, param)
	}
	return out, nil
}

func (d *description) responses(r *shard.Route, op *operation) (object, error) {
	success := object{"description": op.summary + "."}
	headers := object{"X-Request-Id": object{"$ref": "#/components/headers/X-Request-Id"}}
	if op.stat {
		headers[shard.StatHeader] = object{"description": "A JSON FileEntry without a name.", "schema": object{"type": "string"}}
		if _, err := d.schemas.of(of[shard.FileEntry]()); err != nil {
			return nil, err
		}
	}
	success["headers"] = headers
	content := object{}
	if op.answer != nil {
		schema, err := d.schemas.of(op.answer)
		if err != nil {
			return nil, err
		}
		content["application/json"] = object{"schema": schema}
	}
	if op.media != "" {
		content[op.media] = object{"schema": object{}}
	}
	if op.lines != nil {
		schema, err := d.schemas.of(op.lines)
		if err != nil {
			return nil, err
		}
		text := "One " + op.lines.Name() + " per line."
		if op.linesWhen != "" {
			text = "One " + op.lines.Name() + " per line, " + op.linesWhen + "."
		}
		content["application/x-ndjson"] = object{"schema": object{"description": text}, "x-shard-line": schema}
	}
	if len(content) > 0 {
		success["content"] = content
	}
	out := object{strconv.Itoa(op.status): success}
	if op.stream != "" {
		out["101"] = object{"description": "The WebSocket is open."}
	}
	for _, status := range d.refusals(r, op) {
		out[strconv.Itoa(status)] = object{"$ref": "#/components/responses/" + strconv.Itoa(status)}
	}
	return out, nil
}

// refusals are the statuses of errors that a route can have.
func (d *description) refusals(r *shard.Route, op *operation) []int {
	out := []int{400, 403, 500}
	if !r.Local {
		out = append(out, 401, 502)
	}
	if strings.Contains(r.Path, "{") || strings.HasPrefix(r.Path, "/v0/sandboxes") && op.request != nil || op.id == "getCapabilities" {
		out = append(out, 404)
	}
	if strings.Contains(r.Path, "{") || r.Method != http.MethodGet {
		out = append(out, 409, 504)
	}
	if op.request != nil {
		out = append(out, 413)
	}
	if op.request == of[shard.ExecRequest]() || op.request == of[shard.RunRequest]() {
		out = append(out, 422, 429)
	}
	if op.id == "watchFiles" {
		out = append(out, 429)
	}
	if strings.HasPrefix(r.Path, "/v0/images/") {
		out = append(out, 404)
	}
	return out
}

func (d *description) document() object {
	responses := object{}
	for status, codes := range d.byCode {
		responses[strconv.Itoa(status)] = d.refusal(strings.Join(codes, ", "))
	}
	responses["502"] = d.refusal("internal: shard serve cannot reach the daemon")
	var list []any
	for _, tag := range tags {
		list = append(list, object{"name": tag})
	}
	return object{
		"openapi": "3.1.0",
		"info": object{"title": "shard", "version": "v0", "license": object{"name": "Apache License 2.0", "identifier": "Apache-2.0"},
			"description": "Sandboxes for code that agents write. The daemon serves this API on its unix socket, where everything is allowed, and shard serve to a network, for " +
				"holders of a token. Every object is closed: a field or a parameter that is not listed is refused. A client must tolerate codes of errors that it does not know."},
		"servers": []any{object{"url": "http://127.0.0.1:7850", "description": "shard serve"}},
		"tags":    list,
		"paths":   d.paths,
		"components": object{
			"schemas":   d.schemas.named,
			"responses": responses,
			"headers":   object{"X-Request-Id": object{"description": "Under which the daemon's log knows the request.", "schema": object{"type": "string"}}},
			"securitySchemes": object{"token": object{"type": "http", "scheme": "bearer", "bearerFormat": "JWT",
				"description": "A token of `shard tokens mint`. The names beside a route are the scopes that it needs; `*` covers all."}},
		},
		"security": []any{object{"token": []any{}}},
	}
}

func (d *description) refusal(text string) object {
	return object{"description": text, "headers": object{"X-Request-Id": object{"$ref": "#/components/headers/X-Request-Id"}},
		"content": object{"application/json": object{"schema": object{"$ref": "#/components/schemas/ErrorBody"}}}}
}

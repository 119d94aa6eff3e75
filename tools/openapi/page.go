package main

import (
	"bytes"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/useshards/shard"
)

// page is the reference for people.
func (d *description) page() []byte {
	var w bytes.Buffer
	fmt.Fprint(&w, `<!-- Written by make gen from the routes and the types: change those. -->
# API reference

HTTP/1.1 on the daemon's unix socket (`+"`<root>/shard.sock`"+`), where a caller may do everything, and through `+"`shard serve`"+`, where a
token (`+"`Authorization: Bearer …`"+`) needs the scope named beside a route. The same as OpenAPI 3.1: [api/openapi.json](../api/openapi.json).

Requests and answers are JSON unless said otherwise. An unknown field or query parameter is refused (400). Every refusal has the body
[ErrorBody](#errorbody); a body of more than 1 MiB of JSON is one of 413. Every answer names the request in `+"`X-Request-Id`"+`, as the daemon's log does.
Lists come whole unless `+"`limit`"+` is given; `+"`next`"+` is then the `+"`cursor`"+` of the next page, null at the end.
`)
	for _, tag := range tags {
		fmt.Fprintf(&w, "\n## %s\n", tag)
		for i := range shard.Routes {
			if op := operations[shard.Routes[i].Name()]; op.tag == tag {
				operationText(&w, &shard.Routes[i], &op)
			}
		}
	}
	fmt.Fprint(&w, "\n## Error codes\n\n| Status | Codes |\n| --- | --- |\n")
	for _, status := range slices.Sorted(maps.Keys(d.byCode)) {
		fmt.Fprintf(&w, "| %d | `%s` |\n", status, strings.Join(d.byCode[status], "`, `"))
	}
	fmt.Fprint(&w, "\nshard serve answers 502 `internal` when the daemon does not.\n\n## Types\n")
	for _, name := range slices.Sorted(maps.Keys(d.schemas.named)) {
		typeText(&w, name, d.schemas.named[name].(object))
	}
	return w.Bytes()
}

func operationText(w *bytes.Buffer, r *shard.Route, op *operation) {
	fmt.Fprintf(w, "\n### %s\n\n`%s %s`", op.summary, r.Method, r.Path)
	switch {
	case r.Local:
		fmt.Fprint(w, " · on the socket only")
	case r.Scope == "":
		fmt.Fprint(w, " · any token")
	default:
		fmt.Fprintf(w, " · scope `%s`", r.Scope)
	}
	fmt.Fprint(w, "\n\n")
	if op.text != "" {
		fmt.Fprintf(w, "%s\n\n", op.text)
	}
	for _, q := range r.Query {
		p := parameters[q]
		must := ""
		if p.required {
			must = ", required"
		}
		fmt.Fprintf(w, "- query `%s` (%s%s): %s\n", q, p.schema["type"], must, p.text)
	}
	switch {
	case op.request == of[shard.Empty]():
	case op.request != nil:
		fmt.Fprintf(w, "- body: %s%s\n", link(op.request.Name()), map[bool]string{true: ", may be left out"}[op.optional])
	case op.requestMedia != "":
		fmt.Fprintf(w, "- body: %s\n", op.requestMedia)
	}
	var answers []string
	if op.answer != nil {
		answers = append(answers, linkType(op.answer))
	}
	if op.media != "" {
		answers = append(answers, op.media)
	}
	if op.lines != nil {
		text := "application/x-ndjson, one " + link(op.lines.Name()) + " per line"
		if op.linesWhen != "" {
			text += " (" + op.linesWhen + ")"
		}
		answers = append(answers, text)
	}
	fmt.Fprintf(w, "- answer: %d", op.status)
	if len(answers) > 0 {
		fmt.Fprintf(w, ", %s", strings.Join(answers, "; or "))
	}
	if op.stat {
		fmt.Fprintf(w, ", `%s`: a %s as JSON", shard.StatHeader, link("FileEntry"))
	}
	fmt.Fprint(w, "\n")
	if op.stream != "" {
		fmt.Fprintf(w, "- upgraded to a WebSocket: %s\n", op.stream)
	}
}

func linkType(t reflect.Type) string {
	if t.Kind() == reflect.Slice {
		return "array of " + linkType(t.Elem())
	}
	return link(t.Name())
}

func link(name string) string { return "[" + name + "](#" + strings.ToLower(name) + ")" }

func typeText(w *bytes.Buffer, name string, schema object) {
	fmt.Fprintf(w, "\n### %s\n", name)
	if text, _ := schema["description"].(string); text != "" {
		fmt.Fprintf(w, "\n%s\n", text)
	}
	properties, _ := schema["properties"].(object)
	if len(properties) == 0 {
		return
	}
	required, _ := schema["required"].([]any)
	fmt.Fprint(w, "\n| Field | Type | |\n| --- | --- | --- |\n")
	for _, field := range slices.Sorted(maps.Keys(properties)) {
		p := properties[field].(object)
		kind := kindOf(p)
		if !slices.Contains(required, any(field)) {
			kind += ", optional"
		}
		text, _ := p["description"].(string)
		fmt.Fprintf(w, "| `%s` | %s | %s |\n", field, kind, strings.ReplaceAll(text, "|", `\|`))
	}
}

func kindOf(p object) string {
	if ref, ok := p["$ref"].(string); ok {
		return link(ref[strings.LastIndexByte(ref, '/')+1:])
	}
	if any, ok := p["anyOf"].([]any); ok {
		return kindOf(any[0].(object)) + " or null"
	}
	if items, ok := p["items"].(object); ok {
		return "array of " + kindOf(items)
	}
	kind, _ := p["type"].(string)
	if enum, ok := p["enum"].([]any); ok {
		var words []string
		for _, v := range enum {
			words = append(words, fmt.Sprintf("`%v`", v))
		}
		return kind + ": " + strings.Join(words, ", ")
	}
	if format, _ := p["format"].(string); format != "" && format != "int64" {
		kind += " (" + format + ")"
	}
	return kind
}

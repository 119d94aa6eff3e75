package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"strings"
	"time"

	"github.com/useshards/shard"
)

// object is a JSON object; encoding/json writes its keys sorted, so that the same input gives the same file.
type object = map[string]any

// comments are the doc comments of the root package's types ("Exec") and of their fields ("Exec.ID").
type comments map[string]string

func readComments(dir string) (comments, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.go"))
	if err != nil {
		return nil, err
	}
	out := make(comments)
	for _, file := range files {
		f, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.ParseComments)
		if err != nil {
			return nil, err
		}
		if f.Name.Name != "shard" {
			continue
		}
		for _, d := range f.Decls {
			gen, ok := d.(*ast.GenDecl)
			if !ok || gen.Tok != token.TYPE {
				continue
			}
			for _, spec := range gen.Specs {
				t := spec.(*ast.TypeSpec) // what else a type declaration holds
				out[t.Name.Name] = flow(gen.Doc.Text())
				s, ok := t.Type.(*ast.StructType)
				if !ok {
					continue
				}
				for _, field := range s.Fields.List {
					for _, name := range field.Names {
						out[t.Name.Name+"."+name.Name] = flow(field.Doc.Text())
					}
				}
			}
		}
	}
	return out, nil
}

// flow makes one line of a comment.
func flow(text string) string { return strings.Join(strings.Fields(text), " ") }

// facts are what a Go type cannot say: enumerations, patterns and bounds, by type or by field.
var facts = map[string]object{
	"State":               {"enum": anys(shard.States)},
	"ExecState":           {"enum": anys([]shard.ExecState{shard.ExecRunning, shard.ExecExited})},
	"Code":                {"enum": anys(shard.Codes())},
	"KillRequest.Signal":  {"enum": []any{"", "TERM", "KILL"}},
	"RestartSpec.Policy":  {"enum": []any{shard.RestartNo, shard.RestartOnFailure, shard.RestartAlways, shard.RestartUnlessStopped}},
	"RestartSpec.Retries": {"minimum": 0},
	"RestartSpec.Backoff": {"minimum": 0, "maximum": 60},
	"ProcessStatus.State": {"enum": []any{shard.ProcessRunning, shard.ProcessRestarting, shard.ProcessExited, shard.ProcessKilled,
		shard.ProcessGaveUp, shard.ProcessStopped}},
	"PortForward.HostPort":       {"minimum": 1, "maximum": shard.MaxPort},
	"PortForward.GuestPort":      {"minimum": 1, "maximum": shard.MaxPort},
	"PortRequest.GuestPort":      {"minimum": 1, "maximum": shard.MaxPort},
	"Port.Address":               {"enum": []any{"127.0.0.1", "0.0.0.0"}},
	"FileEntry.Type":             {"enum": []any{"file", "dir", "symlink", "other"}},
	"FileEntry.Mode":             {"maximum": 4095},
	"FileEvent.Type":             {"enum": []any{shard.FileCreated, shard.FileModified, shard.FileDeleted, shard.FileMoved, shard.FileOverflow}},
	"Progress.Status":            {"enum": []any{"cached", "pulling", "layer", "unpacking", "unpacked", "building", "pulled"}},
	"Rule.Action":                {"enum": []any{"allow", "deny"}},
	"Rule.Protocol":              {"enum": []any{"tcp", "udp"}},
	"PolicyRule.Action":          {"enum": []any{"allow", "deny"}},
	"Destination.Kind":           {"enum": []any{"cidr", "domain", "domain-suffix", "group"}},
	"EffectiveRule.Implied":      {"enum": []any{"dns", "dns-rule"}},
	"PolicyView.DNS":             {"enum": []any{shard.DNSOpen, shard.DNSClosed}},
	"MkdirRequest.Mode":          {"pattern": "^[0-7]*$"},
	"ExecRequest.Command":        {"minItems": 1},
	"RunRequest.Command":         {"minItems": 1},
	"ResourcesRequest.MemoryMiB": {"minimum": 0, "maximum": shard.MaxMemoryMiB},
	"ResourcesRequest.VCPUs":     {"minimum": 0},
	"ResourcesRequest.DiskMiB":   {"minimum": 0, "maximum": shard.MaxDiskMiB},
	"ResourcesRequest.SwapMiB":   {"minimum": 0, "maximum": shard.MaxDiskMiB},
	"LogEnd.Reason":              {"enum": []any{"ended", "stopped", "removed"}},
}

func anys[T ~string](list []T) []any {
	out := make([]any, len(list))
	for i, v := range list {
		out[i] = string(v)
	}
	return out
}

// schemas turns Go types into JSON Schema, a named struct into an entry of components.
type schemas struct {
	comments comments
	named    object
	unused   map[string]bool // facts about nothing
}

func newSchemas(c comments) *schemas {
	s := &schemas{comments: c, named: object{}, unused: make(map[string]bool)}
	for name := range facts {
		s.unused[name] = true
	}
	return s
}

func (s *schemas) apply(to object, name string) {
	for k, v := range facts[name] {
		to[k] = v
	}
	delete(s.unused, name)
}

// of is the schema of a type; structs are referred to.
func (s *schemas) of(t reflect.Type) (object, error) {
	switch {
	case t == reflect.TypeFor[time.Time]():
		return object{"type": "string", "format": "date-time"}, nil
	case t == reflect.TypeFor[[]byte]():
		return object{"type": "string", "contentEncoding": "base64"}, nil
	}
	var out object
	switch t.Kind() {
	case reflect.Pointer:
		return s.of(t.Elem())
	case reflect.String:
		out = object{"type": "string"}
	case reflect.Bool:
		out = object{"type": "boolean"}
	case reflect.Float64:
		out = object{"type": "number"}
	case reflect.Int, reflect.Int64:
		out = object{"type": "integer", "format": "int64"}
	case reflect.Uint16:
		out = object{"type": "integer", "minimum": 0, "maximum": 1<<16 - 1}
	case reflect.Uint32:
		out = object{"type": "integer", "minimum": 0, "maximum": 1<<32 - 1}
	case reflect.Slice:
		items, err := s.of(t.Elem())
		if err != nil {
			return nil, err
		}
		return object{"type": "array", "items": items}, nil
	case reflect.Struct:
		return s.refer(t)
	default:
		return nil, fmt.Errorf("type %s has no schema", t)
	}
	if t.PkgPath() != "" {
		s.apply(out, t.Name())
	}
	return out, nil
}

func (s *schemas) refer(t reflect.Type) (object, error) {
	name := t.Name()
	if name == "" || t.PkgPath() != reflect.TypeFor[shard.Sandbox]().PkgPath() {
		return nil, fmt.Errorf("%s is not a named type of the vocabulary", t)
	}
	ref := object{"$ref": "#/components/schemas/" + name}
	if s.named[name] != nil {
		return ref, nil
	}
	out := object{"type": "object", "additionalProperties": false}
	s.named[name] = out // before its fields, which may refer to it
	properties, required := object{}, []any{}
	if err := s.fields(t, properties, &required); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	if text := s.comments[name]; text != "" {
		out["description"] = text
	}
	if len(properties) > 0 {
		out["properties"] = properties
	}
	if len(required) > 0 {
		out["required"] = required
	}
	return ref, nil
}

// fields adds the fields as encoding/json sees them: those of an embedded struct are the outer one's.
func (s *schemas) fields(t reflect.Type, properties object, required *[]any) error {
	for f := range t.Fields() {
		if f.Anonymous {
			if err := s.fields(f.Type, properties, required); err != nil {
				return err
			}
			continue
		}
		name, options, _ := strings.Cut(f.Tag.Get("json"), ",")
		if name == "" {
			return fmt.Errorf("field %s has no name in JSON", f.Name)
		}
		schema, err := s.of(f.Type)
		if err != nil {
			return err
		}
		s.apply(schema, t.Name()+"."+f.Name)
		if f.Type.Kind() == reflect.Pointer && options != "omitempty" {
			schema = object{"anyOf": []any{schema, object{"type": "null"}}}
		}
		if text := s.comments[t.Name()+"."+f.Name]; text != "" {
			schema["description"] = text
		}
		properties[name] = schema
		if options != "omitempty" {
			*required = append(*required, name)
		}
	}
	return nil
}

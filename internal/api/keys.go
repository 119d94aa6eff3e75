package api

import (
	"encoding/json"
	"reflect"
	"strconv"
	"strings"
	"unicode/utf16"
	"unicode/utf8"

	"github.com/useshards/shard"
)

// exactKeys refuses what encoding/json forgives: a field's name in another case, a field given twice, and null, which is of no
// type that a field may have. It reads the value of the field name, which is decoded into t; anything else that is wrong
// with it is left to the decoder.
func exactKeys(dec *json.Decoder, t reflect.Type, name string) error {
	tok, err := dec.Token()
	if err != nil {
		return nil
	}
	if tok == nil {
		return shard.Invalidf("field %s must not be null, nor hold one: leave it out", shard.Quote(name))
	}
	for t != nil && t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch tok {
	case json.Delim('['):
		var elem reflect.Type
		if t != nil && t.Kind() == reflect.Slice {
			elem = t.Elem()
		}
		for dec.More() {
			if err := exactKeys(dec, elem, name); err != nil {
				return err
			}
		}
		_, _ = dec.Token()
	case json.Delim('{'):
		seen := make(map[string]bool)
		for dec.More() {
			key, err := dec.Token()
			name, isString := key.(string)
			if err != nil || !isString {
				return nil
			}
			if seen[name] {
				return shard.Invalidf("field %s is given twice", shard.Quote(name))
			}
			seen[name] = true
			field, known := fieldOf(t, name)
			if !known {
				return shard.Invalidf("field %s is not known here", shard.Quote(name))
			}
			if err := exactKeys(dec, field, name); err != nil {
				return err
			}
		}
		_, _ = dec.Token()
	}
	return nil
}

// fieldOf finds the type of a field by its exact name. Where no struct is expected any name will do.
func fieldOf(t reflect.Type, name string) (reflect.Type, bool) {
	if t == nil || t.Kind() != reflect.Struct {
		return nil, true
	}
	for _, f := range reflect.VisibleFields(t) {
		if tag, _, _ := strings.Cut(f.Tag.Get("json"), ","); tag == name {
			return f.Type, true
		}
	}
	return nil, false
}

// isText says whether the strings of a JSON text are what encoding/json makes of them: what is no UTF-8, and an escaped half of a
// surrogate pair, it replaces without a word.
func isText(data []byte) bool {
	if !utf8.Valid(data) {
		return false
	}
	for i := 0; i < len(data); i++ {
		if data[i] != '\\' {
			continue
		}
		i++ // whatever it escapes, a backslash too
		if first := escaped(data[i-1:]); utf16.IsSurrogate(first) {
			if utf16.DecodeRune(first, escaped(data[i+5:])) == utf8.RuneError {
				return false
			}
			i += 10
		}
	}
	return true
}

// escaped is what data begins with as \uXXXX, or -1.
func escaped(data []byte) rune {
	if len(data) < 6 || data[0] != '\\' || data[1] != 'u' {
		return -1
	}
	n, err := strconv.ParseUint(string(data[2:6]), 16, 16)
	if err != nil {
		return -1
	}
	return rune(n)
}

package secret

import (
	"fmt"
	"io"
	"log/slog"
)

// Redacted is how every value prints.
const Redacted = "[redacted]"

// Value is the value of a secret. However it is printed, logged or encoded, it shows as redacted: what it holds is behind
// a pointer, which also reflection does not follow when a Value is an unexported field.
type Value struct{ hidden *string }

// NewValue hides s.
func NewValue(s string) Value { return Value{&s} }

// Reveal is the value itself: for a request to one of the secret's destinations, for looking for it in the answer, and for
// the store.
func (v Value) Reveal() string {
	if v.hidden == nil {
		return ""
	}
	return *v.hidden
}

// String and the methods below print as Redacted.
func (v Value) String() string { return Redacted }

// Format covers every verb of fmt.
func (v Value) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, Redacted) }

// GoString is for %#v.
func (v Value) GoString() string { return Redacted }

// MarshalText is for encoders of text.
func (v Value) MarshalText() ([]byte, error) { return []byte(Redacted), nil }

// MarshalJSON is for JSON.
func (v Value) MarshalJSON() ([]byte, error) { return []byte(`"` + Redacted + `"`), nil }

// LogValue is for slog.
func (v Value) LogValue() slog.Value { return slog.StringValue(Redacted) }

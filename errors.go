package shard

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"unicode"
	"unicode/utf8"
)

// Code is the machine-readable name of a refusal. Clients match on it; the set is closed.
type Code string

// The codes of the API.
const (
	CodeInvalidRequest    Code = "invalid_request"
	CodeUnauthorized      Code = "unauthorized"
	CodeForbidden         Code = "forbidden"
	CodeNotFound          Code = "not_found"
	CodeNoProcess         Code = "no_process"
	CodeSandboxNotRunning Code = "sandbox_not_running"
	CodeSandboxNotStopped Code = "sandbox_not_stopped"
	CodeSandboxNotPaused  Code = "sandbox_not_paused"
	CodeSandboxLive       Code = "sandbox_live"
	CodeSandboxFailed     Code = "sandbox_failed"
	CodeNoCheckpoint      Code = "no_checkpoint"
	CodeUnsupported       Code = "unsupported"
	CodeInUse             Code = "in_use"
	CodeNameTaken         Code = "name_taken"
	CodeExecExited        Code = "exec_exited"
	CodeExecRunning       Code = "exec_running"
	CodeProcessLimit      Code = "process_limit"
	CodeBodyTooLarge      Code = "body_too_large"
	CodeCommandNotStarted Code = "command_not_started"
	CodeExecLimit         Code = "exec_limit"
	CodeInternal          Code = "internal"
	CodeTimeout           Code = "timeout"
)

// statusOf is the HTTP status of each code.
var statusOf = map[Code]int{
	CodeInvalidRequest: 400, CodeUnauthorized: 401, CodeForbidden: 403, CodeNotFound: 404, CodeNoProcess: 404,
	CodeSandboxNotRunning: 409, CodeSandboxNotStopped: 409, CodeSandboxNotPaused: 409, CodeSandboxLive: 409,
	CodeSandboxFailed: 409, CodeNoCheckpoint: 409, CodeUnsupported: 409, CodeInUse: 409, CodeNameTaken: 409,
	CodeExecExited: 409, CodeExecRunning: 409, CodeProcessLimit: 409, CodeBodyTooLarge: 413,
	CodeCommandNotStarted: 422, CodeExecLimit: 429, CodeInternal: 500, CodeTimeout: 504,
}

// Status is the HTTP status that carries the code; an unknown code counts as 500.
func (c Code) Status() int {
	if s, ok := statusOf[c]; ok {
		return s
	}
	return 500
}

// Codes is every code, in order of the alphabet.
func Codes() []Code { return slices.Sorted(maps.Keys(statusOf)) }

// Error is a refusal or a failure with a text that is safe to show to any client, and a private cause
// that only the daemon's log may show.
type Error struct {
	Code    Code
	Message string
	// Holders names what keeps an object in use (in_use only).
	Holders []string
	// ExitCode is 126 or 127 with command_not_started, else 0.
	ExitCode int
	// Err is the cause. It may hold host paths; it never reaches a client.
	Err error
}

func (e *Error) Error() string {
	if e.Err != nil {
		return e.Message + ": " + e.Err.Error()
	}
	return e.Message
}

func (e *Error) Unwrap() error { return e.Err }

// Errorf makes an Error whose text is public, and which has no cause: Wrap keeps one.
func Errorf(code Code, format string, args ...any) *Error {
	return &Error{Code: code, Message: oneLine(fmt.Errorf(format, args...).Error())}
}

// Wrap makes an Error with a public text and a private cause.
func Wrap(code Code, cause error, format string, args ...any) *Error {
	return &Error{Code: code, Message: oneLine(fmt.Sprintf(format, args...)), Err: cause}
}

// maxMessage bounds the text of an Error, in bytes.
const maxMessage = 4096

// oneLine keeps a message one line that any terminal and any log can show: part of it may come from a registry, a certificate or
// a sandbox.
func oneLine(s string) string {
	s = strings.Map(func(r rune) rune {
		if r == utf8.RuneError || !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
	if len(s) > maxMessage {
		s = strings.ToValidUTF8(s[:maxMessage-len("…")], "") + "…"
	}
	return s
}

// Invalidf is Errorf with invalid_request, the most common refusal.
func Invalidf(format string, args ...any) *Error { return Errorf(CodeInvalidRequest, format, args...) }

// CodeOf is the code that err carries, CodeInternal when it carries none, and "" for nil.
func CodeOf(err error) Code {
	if err == nil {
		return ""
	}
	if e, ok := errors.AsType[*Error](err); ok {
		return e.Code
	}
	return CodeInternal
}

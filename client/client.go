// Package client is the Go client of shard's API: typed calls over HTTP, progress as it arrives, and the streams of
// commands. It knows the wire and the records of package shard. It must not know the daemon's packages, terminals or
// anything that a person reads.
//
// A refusal by the daemon is a *shard.Error, whatever its code; the daemon not being there is a *DialError; everything
// else is the transport's. Unknown fields and unknown codes are kept or ignored, never an error.
package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/useshards/shard"
)

// maxAnswer bounds a JSON answer, in bytes: far above any real list, far below what would hurt.
const maxAnswer = 256 << 20

// Options says whom a Client talks to. The zero value talks to nobody: set Dial.
type Options struct {
	// Dial opens a connection to the daemon; Unix makes one for a socket, Remote one for shard serve.
	Dial func(ctx context.Context) (net.Conn, error)
	// Base is the URL of shard serve, scheme and host; nil is the socket's daemon, which takes any.
	Base *url.URL
	// Token is sent as the bearer token of every request, to whom Dial leads and nobody else: redirects are not followed.
	Token string
	// UserAgent is sent with every request.
	UserAgent string
}

// Client speaks to one daemon. It is safe for concurrent use.
type Client struct {
	http *http.Client
	dial func(ctx context.Context) (net.Conn, error)
	base string
	// header goes with every request.
	header http.Header
}

// New makes a Client. It does not connect.
func New(o Options) *Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) { return o.Dial(ctx) }
	transport := &http.Transport{
		DialContext:            dial,
		DialTLSContext:         dial, // Dial has done TLS
		DisableCompression:     true,
		MaxIdleConns:           4,
		MaxIdleConnsPerHost:    4,
		IdleConnTimeout:        90 * time.Second,
		MaxResponseHeaderBytes: 64 << 10,
		ReadBufferSize:         64 << 10,
		WriteBufferSize:        64 << 10,
	}
	base, header := "http://shard", http.Header{}
	if o.Base != nil {
		base = (&url.URL{Scheme: o.Base.Scheme, Host: o.Base.Host}).String()
	}
	if o.UserAgent != "" {
		header.Set("User-Agent", o.UserAgent)
	}
	if o.Token != "" {
		header.Set("Authorization", "Bearer "+o.Token)
	}
	return &Client{
		http: &http.Client{
			Transport:     transport,
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		dial:   o.Dial,
		base:   base,
		header: header,
	}
}

// Close lets go of idle connections.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// DialError says that the daemon could not be reached. Err tells why: errors.Is with fs.ErrNotExist,
// syscall.ECONNREFUSED (nobody listens) or fs.ErrPermission.
type DialError struct {
	// Address is the socket, or the URL of shard serve.
	Address string
	Err     error
}

func (e *DialError) Error() string {
	return fmt.Sprintf("cannot reach the daemon at %s: %v", e.Address, e.Err)
}

func (e *DialError) Unwrap() error { return e.Err }

// ErrBroken says that an answer ended before its end: the daemon went away or the connection was cut.
var ErrBroken = errors.New("the daemon ended the connection before its answer was complete")

// call is one request: path is escaped already.
type call struct {
	method, path string
	query        url.Values
	accept       string
	// body is sent as JSON when it is not nil and not an io.Reader.
	body        any
	contentType string
	// size is the Content-Length of an io.Reader body; negative is unknown (chunked).
	size int64
}

// send performs the request and returns an answer with a status below 300; any other becomes an error.
func (c *Client) send(ctx context.Context, k call) (*http.Response, error) {
	req, err := c.request(ctx, k)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, transportError(ctx, err)
	}
	if resp.StatusCode >= 300 {
		defer resp.Body.Close()
		return nil, refusal(resp)
	}
	return resp, nil
}

func (c *Client) request(ctx context.Context, k call) (*http.Request, error) {
	target := c.base + k.path
	if len(k.query) > 0 {
		target += "?" + k.query.Encode()
	}
	var body io.Reader
	contentType, size := k.contentType, k.size
	switch b := k.body.(type) {
	case nil:
	case io.Reader:
		body = b
	default:
		if !isText(reflect.ValueOf(b)) {
			return nil, shard.Invalidf("the request holds text that is not UTF-8, and the API carries text only")
		}
		raw, err := json.Marshal(b)
		if err != nil {
			return nil, fmt.Errorf("encode the request: %w", err)
		}
		body, contentType, size = bytes.NewReader(raw), "application/json", int64(len(raw))
	}
	req, err := http.NewRequestWithContext(ctx, k.method, target, body)
	if err != nil {
		return nil, fmt.Errorf("make the request: %w", err)
	}
	req.Header = c.header.Clone()
	if body != nil {
		req.ContentLength = size
		if size == 0 {
			req.Body = http.NoBody // else net/http takes 0 for "unknown" and sends the body chunked
		}
	}
	if contentType != "" {
		req.Header.Set("Content-Type", contentType)
	}
	if k.accept != "" {
		req.Header.Set("Accept", k.accept)
	}
	return req, nil
}

// isText says whether all strings in a body are what encoding/json would make of them: bytes that are no UTF-8 it replaces without
// a word.
func isText(v reflect.Value) bool {
	switch v.Kind() {
	case reflect.String:
		return utf8.ValidString(v.String())
	case reflect.Pointer, reflect.Interface:
		return v.IsNil() || isText(v.Elem())
	case reflect.Struct:
		for _, field := range v.Fields() {
			if !isText(field) {
				return false
			}
		}
	case reflect.Slice:
		for i := range v.Len() {
			if !isText(v.Index(i)) {
				return false
			}
		}
	case reflect.Map:
		for key, value := range v.Seq2() {
			if !isText(key) || !isText(value) {
				return false
			}
		}
	}
	return true
}

// do sends the request and decodes a JSON answer into out; a nil out drops the answer.
func (c *Client) do(ctx context.Context, k call, out any) error {
	resp, err := c.send(ctx, k)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	body := io.LimitReader(resp.Body, maxAnswer)
	if out == nil {
		_, err = io.Copy(io.Discard, body)
		return transportError(ctx, err)
	}
	raw, err := io.ReadAll(body) // to the end, so that the connection can be used again
	if err != nil {
		return transportError(ctx, err)
	}
	if err := json.Unmarshal(raw, out); err != nil {
		return fmt.Errorf("read the daemon's answer to %s %s: %w", k.method, k.path, err)
	}
	return nil
}

// transportError makes what net/http says of a failed exchange fit to be told: the cause without the URL.
func transportError(ctx context.Context, err error) error {
	if err == nil {
		return nil
	}
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	if e, ok := errors.AsType[*DialError](err); ok {
		return e
	}
	if e, ok := errors.AsType[*shard.Error](err); ok {
		return e
	}
	if e, ok := errors.AsType[*url.Error](err); ok {
		err = e.Err
	}
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return ErrBroken
	}
	return fmt.Errorf("%w: %w", ErrBroken, err)
}

// refusal turns an answer with an error status into the error it carries.
func refusal(resp *http.Response) error {
	raw, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if len(raw) == 0 {
		if err == nil && resp.Request != nil && resp.Request.Method == http.MethodHead {
			return &shard.Error{Code: codeOfStatus(resp.StatusCode), Message: strings.ToLower(http.StatusText(resp.StatusCode))}
		}
		return &shard.Error{Code: codeOfStatus(resp.StatusCode), Message: "the daemon answered " + resp.Status}
	}
	var body shard.ErrorBody
	err = json.Unmarshal(raw, &body)
	if _, odd := errors.AsType[*json.UnmarshalTypeError](err); odd {
		err = nil // a field of another kind is left out, and the rest counts
	}
	if err != nil || body.Error.Code == "" {
		const most = 512
		return &shard.Error{Code: codeOfStatus(resp.StatusCode),
			Message: fmt.Sprintf("the daemon answered %s: %q", resp.Status, raw[:min(len(raw), most)])}
	}
	return detailError(body.Error)
}

// body is an answer that is read as it comes, with errors fit to be told.
type body struct {
	ctx context.Context
	io.ReadCloser
}

func (b *body) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		err = transportError(b.ctx, err)
	}
	return n, err
}

func detailError(d shard.ErrorDetail) error {
	return &shard.Error{Code: d.Code, Message: d.Message, Holders: d.Holders, ExitCode: d.ExitCode}
}

// codeOfStatus is the code that a status without a body most likely means.
func codeOfStatus(status int) shard.Code {
	switch status {
	case http.StatusBadRequest:
		return shard.CodeInvalidRequest
	case http.StatusUnauthorized:
		return shard.CodeUnauthorized
	case http.StatusForbidden:
		return shard.CodeForbidden
	case http.StatusNotFound:
		return shard.CodeNotFound
	case http.StatusConflict:
		// Only file routes have HEAD, and of the 409 codes they know these two; this is the likelier.
		return shard.CodeSandboxNotRunning
	case http.StatusRequestEntityTooLarge:
		return shard.CodeBodyTooLarge
	case http.StatusGatewayTimeout:
		return shard.CodeTimeout
	}
	return shard.CodeInternal
}

// Page asks for part of a list: at most Limit entries after Cursor. The zero value is the whole list.
type Page struct {
	Limit  int
	Cursor string
}

func (p Page) query() url.Values {
	q := url.Values{}
	if p.Limit > 0 {
		q.Set("limit", strconv.Itoa(p.Limit))
	}
	if p.Cursor != "" {
		q.Set("cursor", p.Cursor)
	}
	return q
}

// setTrue asks for what name stands for; a parameter that is not there is false.
func setTrue(q url.Values, name string, on bool) {
	if on {
		q.Set(name, "true")
	}
}

// walk calls get for page after page until the list has no next one.
func walk(get func(Page) (next *string, err error)) error {
	var p Page
	for {
		next, err := get(p)
		if err != nil || next == nil || *next == "" {
			return err
		}
		if *next == p.Cursor {
			return fmt.Errorf("the daemon's list does not advance past %q", p.Cursor)
		}
		p.Cursor = *next
	}
}

// sandboxPath is the path of a sandbox's route; segments are escaped.
func sandboxPath(ref string, segments ...string) string {
	path := "/v0/sandboxes/" + segment(ref)
	for _, s := range segments {
		path += "/" + segment(s)
	}
	return path
}

// segment is a name as part of a path. "." and ".." are escaped too, so that nothing on the way takes them for a step.
func segment(name string) string {
	if name == "." || name == ".." {
		return strings.ReplaceAll(name, ".", "%2E")
	}
	return url.PathEscape(name)
}

package client

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"io/fs"
	"net/http"
	"net/url"

	"github.com/useshards/shard"
)

// WriteOptions says how a file or directory is made. The zero value: the daemon's default mode (0644 for a file, 0755
// for a directory), the sandbox's user, and no missing parents made.
type WriteOptions struct {
	// Mode holds permission bits up to 0777; nil is the default.
	Mode    *fs.FileMode
	User    string
	Parents bool
}

func (o WriteOptions) query(path string) url.Values {
	q := url.Values{"path": {path}}
	if o.Mode != nil {
		q.Set("mode", octal(*o.Mode))
	}
	if o.User != "" {
		q.Set("user", o.User)
	}
	setTrue(q, "parents", o.Parents)
	return q
}

func octal(m fs.FileMode) string { return fmt.Sprintf("%04o", m.Perm()) }

// PutFile writes size bytes of body to path, which appears complete or not at all. A body of another length fails.
func (c *Client) PutFile(ctx context.Context, ref, path string, body io.Reader, size int64, o WriteOptions) error {
	return c.do(ctx, call{method: http.MethodPut, path: sandboxPath(ref, "files"), query: o.query(path), body: body,
		contentType: "application/octet-stream", size: size}, nil)
}

// GetFile opens a regular file for reading. A read that fails means that the file was cut: only io.EOF is its end.
func (c *Client) GetFile(ctx context.Context, ref, path string) (io.ReadCloser, *shard.FileEntry, error) {
	return c.download(ctx, ref, "files", path)
}

// GetArchive opens path as a tar whose top entry is named after its base name.
func (c *Client) GetArchive(ctx context.Context, ref, path string) (io.ReadCloser, *shard.FileEntry, error) {
	return c.download(ctx, ref, "archive", path)
}

func (c *Client) download(ctx context.Context, ref, route, path string) (io.ReadCloser, *shard.FileEntry, error) {
	resp, err := c.send(ctx, call{method: http.MethodGet, path: sandboxPath(ref, route), query: url.Values{"path": {path}}})
	if err != nil {
		return nil, nil, err
	}
	entry, err := statOf(resp)
	if err != nil {
		resp.Body.Close()
		return nil, nil, err
	}
	return &body{ctx, resp.Body}, entry, nil
}

// Stat describes path itself, not what a link points to.
func (c *Client) Stat(ctx context.Context, ref, path string) (*shard.FileEntry, error) {
	resp, err := c.send(ctx, call{method: http.MethodHead, path: sandboxPath(ref, "files"), query: url.Values{"path": {path}}})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	return statOf(resp)
}

func statOf(resp *http.Response) (*shard.FileEntry, error) {
	var e shard.FileEntry
	if err := json.Unmarshal([]byte(resp.Header.Get(shard.StatHeader)), &e); err != nil {
		return nil, fmt.Errorf("read the %s header of the daemon's answer: %w", shard.StatHeader, err)
	}
	return &e, nil
}

// RemoveFile deletes path; a directory with content only when recursive.
func (c *Client) RemoveFile(ctx context.Context, ref, path string, recursive bool) error {
	q := url.Values{"path": {path}}
	setTrue(q, "recursive", recursive)
	return c.do(ctx, call{method: http.MethodDelete, path: sandboxPath(ref, "files"), query: q}, nil)
}

// ListDir describes the entries of a directory, sorted by name.
func (c *Client) ListDir(ctx context.Context, ref, path string) ([]shard.FileEntry, error) {
	var out shard.EntryList
	err := c.do(ctx, call{method: http.MethodGet, path: sandboxPath(ref, "ls"), query: url.Values{"path": {path}}}, &out)
	return out.Entries, err
}

// Mkdir makes a directory.
func (c *Client) Mkdir(ctx context.Context, ref, path string, o WriteOptions) error {
	body := shard.MkdirRequest{Path: path, Parents: o.Parents, User: o.User}
	if o.Mode != nil {
		body.Mode = octal(*o.Mode)
	}
	return c.do(ctx, call{method: http.MethodPost, path: sandboxPath(ref, "mkdir"), body: body}, nil)
}

// PutArchive unpacks a tar into the directory path; user owns every entry, "" is the sandbox's user.
func (c *Client) PutArchive(ctx context.Context, ref, path, user string, tar io.Reader) error {
	q := url.Values{"path": {path}}
	if user != "" {
		q.Set("user", user)
	}
	return c.do(ctx, call{method: http.MethodPut, path: sandboxPath(ref, "archive"), query: q, body: tar,
		contentType: "application/x-tar", size: -1}, nil)
}

package api

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"strconv"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
)

// path is the file that a request is about.
func (c *call) path() (string, error) {
	if _, given := c.query["path"]; !given {
		return "", shard.Invalidf("query parameter path is missing")
	}
	return c.text("path"), nil
}

// mode reads permission bits in octal; nil when absent.
func mode(text string) (*uint32, error) {
	if text == "" {
		return nil, nil
	}
	n, err := strconv.ParseUint(text, 8, 32)
	if err != nil || n > 0o777 {
		return nil, shard.Invalidf("mode %s is not octal permission bits up to 0777", shard.Quote(text))
	}
	m := uint32(n)
	return &m, nil
}

// upload is the body of an upload. Whoever reads it sets a deadline before each read: a client may send nothing for a minute.
func (c *call) upload() *upload {
	return &upload{deadline: http.NewResponseController(c.w), r: c.r.Body}
}

type deadline interface{ SetReadDeadline(time.Time) error }

type upload struct {
	deadline
	r io.Reader
}

func (u *upload) Read(b []byte) (int, error) {
	n, err := u.r.Read(b)
	switch {
	case err == nil:
	case err == io.EOF:
		// The server goes on reading, to see whether the client is still there while the sandbox finishes.
		_ = u.SetReadDeadline(time.Time{})
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = shard.Errorf(shard.CodeTimeout, "nothing of the body arrived for %s: the transfer was ended", idle)
	default:
		err = shard.Wrap(shard.CodeInvalidRequest, err, "the body ended before it was whole")
	}
	return n, err
}

// reader is an upload for those who set no deadlines.
func (c *call) reader() io.Reader { return patient{c.upload()} }

type patient struct{ *upload }

func (p patient) Read(b []byte) (int, error) {
	_ = p.SetReadDeadline(time.Now().Add(idle))
	return p.upload.Read(b)
}

// stream answers with the bytes of r, of which the client must take some every minute. A fault before the first of them is the
// answer; a later one cuts the connection, so that what the client has never looks whole.
func (c *call) stream(media string, entry shard.FileEntry, r io.Reader) error {
	entry.Name = ""
	stat, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	buf := make([]byte, 256<<10)
	n, err := r.Read(buf)
	if n == 0 && err != nil && err != io.EOF {
		return err
	}
	c.w.Header().Set("Content-Type", media)
	c.w.Header().Set(shard.StatHeader, string(stat))
	c.sent = true
	c.w.WriteHeader(200)
	rc := http.NewResponseController(c.w)
	for ; ; n, err = r.Read(buf) {
		if n > 0 {
			_ = rc.SetWriteDeadline(time.Now().Add(idle))
			if _, err := c.w.Write(buf[:n]); err != nil {
				panic(http.ErrAbortHandler)
			}
		}
		switch {
		case err == io.EOF:
			_ = rc.SetWriteDeadline(time.Time{})
			return nil
		case err != nil:
			return err // the answer is under way: fail cuts it
		}
	}
}

func (a *API) putFile(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	if n := c.r.ContentLength; n < 0 || n == 0 && c.r.Header.Get("Content-Length") == "" {
		return shard.Invalidf("the request has no Content-Length: say how long the file is")
	}
	if _, given := c.query["mode"]; given && c.text("mode") == "" {
		return shard.Invalidf("query parameter mode is empty: give octal permission bits, or leave it out")
	}
	m, err := mode(c.text("mode"))
	if err != nil {
		return err
	}
	parents, err := c.flag("parents")
	if err != nil {
		return err
	}
	if err := a.Engine.PutFile(c.r.Context(), c.param("id"), guest.PutArgs{Path: guest.Path(path), Size: c.r.ContentLength, Mode: m,
		User: c.text("user"), Parents: parents}, c.upload()); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) getFile(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	entry, r, err := a.Engine.GetFile(c.r.Context(), c.param("id"), path)
	if err != nil {
		return err
	}
	defer r.Close()
	return c.stream("application/octet-stream", entry, r)
}

func (a *API) statFile(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	entry, err := a.Engine.StatFile(c.r.Context(), c.param("id"), path)
	if err != nil {
		return err
	}
	entry.Name = ""
	stat, err := json.Marshal(entry)
	if err != nil {
		return err
	}
	c.w.Header().Set(shard.StatHeader, string(stat))
	c.sent = true
	c.w.WriteHeader(200)
	return nil
}

func (a *API) removeFile(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	recursive, err := c.flag("recursive")
	if err != nil {
		return err
	}
	if err := a.Engine.RemoveFile(c.r.Context(), c.param("id"), path, recursive); err != nil {
		return err
	}
	return c.noContent()
}

// listDir writes the entries as they come. When the listing is cut, the JSON is left unfinished.
func (a *API) listDir(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	separator := ""
	rc := http.NewResponseController(c.w)
	defer func() { _ = rc.SetWriteDeadline(time.Time{}) }()
	err = a.Engine.ListDir(c.r.Context(), c.param("id"), path, func(entry shard.FileEntry) error {
		data, err := json.Marshal(entry)
		if err != nil {
			return err
		}
		c.beginList()
		_ = rc.SetWriteDeadline(time.Now().Add(idle))
		_, err = c.w.Write([]byte(separator + string(data)))
		separator = ","
		return err
	})
	if err != nil {
		return err
	}
	c.beginList()
	_, _ = io.WriteString(c.w, "]}\n")
	return nil
}

func (c *call) beginList() {
	if c.sent {
		return
	}
	c.w.Header().Set("Content-Type", "application/json")
	c.sent = true
	c.w.WriteHeader(200)
	_, _ = io.WriteString(c.w, `{"entries":[`)
}

func (a *API) mkdir(c *call) error {
	var req shard.MkdirRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	m, err := mode(req.Mode)
	if err != nil {
		return err
	}
	if err := a.Engine.Mkdir(c.r.Context(), c.param("id"), guest.MkdirArgs{Path: guest.Path(req.Path), Mode: m, User: req.User,
		Parents: req.Parents}); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) putArchive(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	if err := a.Engine.PutArchive(c.r.Context(), c.param("id"), path, c.text("user"), c.upload()); err != nil {
		return err
	}
	return c.noContent()
}

func (a *API) getArchive(c *call) error {
	path, err := c.path()
	if err != nil {
		return err
	}
	entry, r, err := a.Engine.GetArchive(c.r.Context(), c.param("id"), path)
	if err != nil {
		return err
	}
	defer r.Close()
	return c.stream("application/x-tar", entry, r)
}

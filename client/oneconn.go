package client

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"net"
	"net/http"
	"time"
)

// oneConn is a RoundTripper for a short request and the upgrade after it on one connection, which net/http never does:
// its pool keeps upgrades apart. It saves an exec a second connect, and the pool's goroutines.
type oneConn struct {
	dial func(ctx context.Context) (net.Conn, error)
	conn net.Conn
	br   *bufio.Reader
}

// RoundTrip reads the whole answer of a plain request; after a 101 the connection belongs to the answer's body.
func (o *oneConn) RoundTrip(req *http.Request) (resp *http.Response, err error) {
	ctx := req.Context()
	if o.conn == nil {
		if o.conn, err = o.dial(ctx); err != nil {
			return nil, err
		}
		o.br = bufio.NewReaderSize(o.conn, 64<<10)
	}
	conn := o.conn // it may belong to the answer by the time that ctx ends
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			_ = conn.Close()
			resp, o.conn = nil, nil
		}
	}()
	if err := req.Write(conn); err != nil {
		return nil, err
	}
	if resp, err = http.ReadResponse(o.br, req); err != nil {
		return nil, err
	}
	if resp.StatusCode == http.StatusSwitchingProtocols {
		resp.Body = &upgraded{o.br, o.conn}
		o.conn = nil
		return resp, nil
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer))
	if err != nil {
		return nil, err
	}
	resp.Body = io.NopCloser(bytes.NewReader(body))
	if resp.Close {
		o.close()
	}
	return resp, nil
}

func (o *oneConn) close() {
	if o.conn != nil {
		_ = o.conn.Close()
		o.conn = nil
	}
}

// upgraded is a connection whose first bytes may have been read ahead.
type upgraded struct {
	br *bufio.Reader
	net.Conn
}

func (u *upgraded) Read(p []byte) (int, error) { return u.br.Read(p) }

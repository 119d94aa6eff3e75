package client

import (
	"context"
	"net"
)

// Unix returns a Dial for the unix socket at path, of any length.
func Unix(path string) func(context.Context) (net.Conn, error) {
	return func(ctx context.Context) (net.Conn, error) {
		conn, err := dialUnix(ctx, path)
		if err != nil {
			return nil, &DialError{Address: path, Err: err}
		}
		return conn, nil
	}
}

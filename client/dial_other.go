//go:build !linux

package client

import (
	"context"
	"net"
)

// dialUnix connects to the socket at path.
func dialUnix(ctx context.Context, path string) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", path)
}

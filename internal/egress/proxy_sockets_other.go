//go:build !linux

package egress

import (
	"errors"
	"net"
	"net/netip"
)

// Sandboxes are kept to policies on Linux only.
func reachable(netip.Addr) error                  { return errors.ErrUnsupported }
func tune(net.Conn)                               {}
func originalDestination(net.Conn) (a netip.Addr) { return a }
func connections() int                            { return maxConns }

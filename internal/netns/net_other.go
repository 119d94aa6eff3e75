//go:build !linux

package netns

import (
	"context"
	"net"
	"net/netip"
	"time"

	"github.com/useshards/shard"
)

// Net exists on Linux only.
type Net struct{}

func unsupported() error {
	return shard.Errorf(shard.CodeUnsupported, "network namespaces need Linux")
}

// Open says that this system has no network namespaces.
func Open(context.Context, Config) (*Net, error) { return nil, unsupported() }

func (*Net) Attach(context.Context, string) (Attachment, error)  { return Attachment{}, unsupported() }
func (*Net) Detach(context.Context, string) error                { return unsupported() }
func (*Net) Release(context.Context, string) error               { return unsupported() }
func (*Net) Recover(context.Context, []string) ([]string, error) { return nil, unsupported() }
func (*Net) Remove(context.Context) error                        { return unsupported() }
func (*Net) Close() error                                        { return nil }

// IPv6 says that there is none.
func (*Net) IPv6() bool { return false }

// Sweep exists on Linux only.
func (*Net) Sweep(context.Context, func(id string) (lease, attached bool)) error {
	return unsupported()
}

func (*Net) Attachment(context.Context, string) (Attachment, bool, error) {
	return Attachment{}, false, unsupported()
}

// DialLoopback exists on Linux only.
func (*Net) DialLoopback(context.Context, string, int) (*net.TCPConn, error) {
	return nil, unsupported()
}

func (*Net) Restrict(context.Context, ...Restriction) error { return unsupported() }

func (*Net) Feed(context.Context, string, []int, []netip.Addr, time.Time) error { return unsupported() }
func (*Net) Drops(context.Context, func(Drop)) error                            { return unsupported() }

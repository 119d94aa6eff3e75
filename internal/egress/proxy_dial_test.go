package egress

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"
)

// TestConnect: addresses of one family in turn, those of the other beside them after a while or once the first have failed, and
// what comes too late is closed.
func TestConnect(t *testing.T) {
	four, other4, six := netip.MustParseAddr("203.0.113.1"), netip.MustParseAddr("203.0.113.2"), netip.MustParseAddr("2001:db8::1")
	refused := errors.New("refused")
	at := listenLocal(t).Addr().String()
	works := func(ctx context.Context) (net.Conn, error) { return new(net.Dialer).DialContext(ctx, "tcp", at) }
	hangs := func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
	fails := func(context.Context) (net.Conn, error) { return nil, refused }
	late := func(ctx context.Context) (net.Conn, error) { <-ctx.Done(); return works(context.WithoutCancel(ctx)) }
	for what, c := range map[string]struct {
		addrs  []netip.Addr
		dial   map[netip.Addr]func(context.Context) (net.Conn, error)
		dialed []netip.Addr
		err    error
	}{
		"one":                        {[]netip.Addr{six}, map[netip.Addr]func(context.Context) (net.Conn, error){six: works}, []netip.Addr{six}, nil},
		"the first":                  {[]netip.Addr{four, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: works}, []netip.Addr{four}, nil},
		"the second of a family":     {[]netip.Addr{four, other4, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: fails, other4: works}, []netip.Addr{four, other4}, nil},
		"the other family":           {[]netip.Addr{four, other4, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: fails, other4: fails, six: works}, []netip.Addr{four, other4, six}, nil},
		"beside one that hangs":      {[]netip.Addr{four, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: hangs, six: works}, []netip.Addr{four, six}, nil},
		"before one that is late":    {[]netip.Addr{four, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: late, six: works}, []netip.Addr{four, six}, nil},
		"none":                       {[]netip.Addr{four, six}, map[netip.Addr]func(context.Context) (net.Conn, error){four: fails, six: fails}, []netip.Addr{four, six}, refused},
		"IPv6 first where it stands": {[]netip.Addr{six, four}, map[netip.Addr]func(context.Context) (net.Conn, error){six: works}, []netip.Addr{six}, nil},
	} {
		var mu sync.Mutex
		var dialed []netip.Addr
		p := &Proxy{o: ProxyOptions{Dial: func(ctx context.Context, to netip.AddrPort) (net.Conn, error) {
			mu.Lock()
			dialed = append(dialed, to.Addr())
			mu.Unlock()
			if dial := c.dial[to.Addr()]; dial != nil {
				return dial(ctx)
			}
			return hangs(ctx) // a busy machine may come to it
		}}}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		conn, err := p.connect(ctx, c.addrs, 443)
		cancel()
		if conn != nil {
			_ = conn.Close()
		}
		if !errors.Is(err, c.err) || (err == nil) != (conn != nil) || slices.ContainsFunc(c.dialed, func(a netip.Addr) bool { return !slices.Contains(dialed, a) }) {
			t.Errorf("%s: %v; dialled %v", what, err, dialed)
		}
	}
}

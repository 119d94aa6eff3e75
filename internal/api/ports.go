package api

import (
	"fmt"
	"strconv"

	"github.com/useshards/shard"
)

func (a *API) allPorts(c *call) error { return a.sendPorts(c, "") }

func (a *API) ports(c *call) error { return a.sendPorts(c, c.param("id")) }

func (a *API) sendPorts(c *call, ref string) error {
	ports, err := a.Engine.ListPorts(ref)
	if err != nil {
		return err
	}
	// Padded, so that the order of the keys is that of the ports.
	items, next, err := page(c, ports, func(p shard.Port) string { return fmt.Sprintf("%05d", p.HostPort) })
	if err != nil {
		return err
	}
	return c.json(200, shard.PortList{Ports: items, Next: next})
}

func (a *API) putPort(c *call) error {
	host, err := c.hostPort()
	if err != nil {
		return err
	}
	var req shard.PortRequest
	if err := c.body(&req, false); err != nil {
		return err
	}
	port, err := a.Engine.PutPort(c.param("id"), shard.PortForward{HostPort: host, GuestPort: req.GuestPort, Public: req.Public})
	if err != nil {
		return err
	}
	return c.json(200, port)
}

func (a *API) removePort(c *call) error {
	host, err := c.hostPort()
	if err != nil {
		return err
	}
	if err := a.Engine.RemovePort(c.param("id"), host); err != nil {
		return err
	}
	return c.noContent()
}

// hostPort is the port in the path.
func (c *call) hostPort() (int, error) { return c.port("host port", "host_port") }

func (c *call) port(what, param string) (int, error) {
	text := c.param(param)
	port, err := strconv.ParseUint(text, 10, 31)
	if err != nil || port < 1 || port > shard.MaxPort {
		return 0, shard.Invalidf("%s %s is not a port: use 1 to %d", what, shard.Quote(text), shard.MaxPort)
	}
	return int(port), nil
}

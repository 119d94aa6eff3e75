package shard

// Port is a forward as it stands: what was asked for, and whether the host listens.
type Port struct {
	Sandbox     string `json:"sandbox"`
	SandboxName string `json:"sandbox_name,omitempty"`
	HostPort    int    `json:"host_port"`
	GuestPort   int    `json:"guest_port"`
	Public      bool   `json:"public"`
	// Address is what the host listens on: 127.0.0.1, or 0.0.0.0 for a public forward.
	Address   string `json:"address"`
	Listening bool   `json:"listening"`
	// Error says why the host does not listen although the sandbox runs.
	Error string `json:"error,omitempty"`
	// ReachableOn are the host's addresses at which the forward answers while it listens.
	ReachableOn []HostAddress `json:"reachable_on"`
}

// HostAddress is one IPv4 address of the host.
type HostAddress struct {
	Interface string `json:"interface"`
	Address   string `json:"address"`
}

// PortList is a page of forwards, in the order of their host ports.
type PortList struct {
	Ports []Port  `json:"ports"`
	Next  *string `json:"next"`
}

// PortRequest asks for a forward of the host port in the path.
type PortRequest struct {
	GuestPort int  `json:"guest_port"`
	Public    bool `json:"public,omitempty"`
}

// MaxPort is the highest port.
const MaxPort = 65535

// CheckForwards refuses ports that are none, and a host port that is named twice.
func CheckForwards(list []PortForward) error {
	taken := make(map[int]bool, len(list))
	for _, p := range list {
		for _, f := range []struct {
			name string
			port int
		}{{"host port", p.HostPort}, {"guest port", p.GuestPort}} {
			if f.port < 1 || f.port > MaxPort {
				return Invalidf("%s %d is not a port: use 1 to %d", f.name, f.port, MaxPort)
			}
		}
		if taken[p.HostPort] {
			return Invalidf("host port %d is named twice", p.HostPort)
		}
		taken[p.HostPort] = true
	}
	return nil
}

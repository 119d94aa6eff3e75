package test

import (
	"net"
	"strconv"
	"strings"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestPortsOfTheHost: what the host listens on itself, on all its addresses, a policed sandbox cannot have. The refusal names the
// port, nothing is left, and without the other program it works.
func TestPortsOfTheHost(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.Must("policy", "create", "--allow", "any", "all")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		for _, port := range []int{30080, 30443, 30053} {
			l := d.Lab().ListenHost("tcp", net.JoinHostPort("0.0.0.0", strconv.Itoa(port)))
			a := call(t, d, "POST", "/v0/sandboxes", shard.CreateRequest{Image: image, Provider: provider, Policy: "all", Name: "policed"})
			if a.Status != 409 || a.code(t) != shard.CodeInUse || !strings.Contains(string(a.Body), "port "+strconv.Itoa(port)) {
				t.Errorf("with port %d taken: %d %s", port, a.Status, a.Body)
			}
			_ = l.Close()
		}
		s := decode[shard.Sandbox](t, call(t, d, "POST", "/v0/sandboxes", shard.CreateRequest{Image: image, Provider: provider, Policy: "all", Name: "policed"}), 201)
		d.Must("remove", "--force", s.ID)
	})
}

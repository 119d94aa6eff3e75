package test

import (
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
)

// barrage sends datagrams and asks for connections, to every address given and without a rest, until it is killed.
const barrage = `
import socket, sys, time
udp = []
for a in sys.argv[1:]:
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    s.setblocking(False)
    udp.append((s, (a, 7000)))
print("begun", flush=True)
while True:
    for s, a in udp:
        try:
            s.sendto(b"?", a)
        except OSError:
            pass
        c = socket.socket()
        c.setblocking(False)
        try:
            c.connect(a)
        except OSError:
            pass
        c.close()
    time.sleep(0.0005)
`

// TestFlush: sandboxes with and without a policy send all the time where they may not, while the host's firewall is flushed,
// in whole and in part, with a daemon and without one. Nothing ever arrives; what is allowed works again after.
func TestFlush(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--dns", testenv.LabDNSAddr}})
	d.Must("image", "import", testenv.PythonArchive(t), testenv.PythonRef)
	private := []*testenv.Canary{lab.CanaryInWorld("10.1.2.3:7000"), lab.CanaryInWorld("192.168.7.7:7000"), lab.CanaryInWorld("169.254.169.254:7000")}
	public := lab.CanaryInWorld("203.0.113.9:7000") // forbidden by the policy
	for _, c := range append(private, public) {
		c.Control()
	}
	lab.Name("open.test", testenv.LabWebAddr)
	nft := func(args ...string) string {
		t.Helper()
		out, _ := lab.Command("nft", args...).CombinedOutput()
		return string(out)
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		free := box(t, d, provider, testenv.PythonRef)
		id, _ := policied(t, d, provider, "allow open.test", "deny any")
		begin := func(box string, addrs ...string) {
			t.Helper()
			cmd := d.Command(append([]string{"exec", box, "python3", "-c", barrage}, addrs...)...)
			out, err := cmd.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
			if _, err := out.Read(make([]byte, 16)); err != nil {
				t.Fatal(err)
			}
		}
		begin(free, "10.1.2.3", "192.168.7.7", "169.254.169.254")
		begin(id, "10.1.2.3", "192.168.7.7", "169.254.169.254", "203.0.113.9")
		table := func() string {
			for line := range strings.Lines(nft("list", "tables")) {
				if name, ok := strings.CutPrefix(strings.TrimSpace(line), "table inet "); ok {
					return name
				}
			}
			return "none"
		}
		attack := func() {
			for i := range 50 {
				switch i % 4 {
				case 0:
					nft("flush", "ruleset")
				case 1:
					nft("delete", "table", "inet", table())
				case 2:
					nft("flush", "table", "inet", table())
				default:
					nft("flush", "chain", "inet", table(), []string{"raw", "forward", "out_of", "fence_in"}[i/4%4])
				}
			}
		}
		quiet := func(when string) {
			t.Helper()
			for _, c := range append(private, public) {
				if hits := c.Hits(); len(hits) > 0 {
					t.Errorf("%s: %s was reached %d times: %s", when, c.Addr, len(hits), hits[0])
				}
			}
		}
		works := func(when string) {
			t.Helper()
			testenv.Eventually(t, when+": what is allowed", func() (bool, string) {
				got := fetch(t, d, free, "http://web.lab.test/"+provider) + fetch(t, d, id, "http://open.test/"+provider)
				return strings.Count(got, "GET http") == 2, got
			})
		}
		works("at first")
		attack()
		works("after the attack")
		quiet("with a daemon")
		d.Kill9()
		nft("flush", "ruleset")
		for _, c := range append(private, public) {
			c.Control() // forgets a packet that was between two chains when they went
		}
		attack()
		time.Sleep(300 * time.Millisecond) // while they send
		quiet("without a daemon")
		d.Restart()
		works("with the next daemon")
		quiet("with the next daemon")
	})
	rules, err := lab.Command("ip", "rule").Output()
	if err != nil || strings.Count(string(rules), "blackhole") != 1 {
		t.Errorf("rules of the host's routing with one daemon: %s, %v", rules, err)
	}
}

package test

import (
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestMetrics: after real work the pools are full and egress is counted, and every metric that docs/operate.md names is
// there, and no other.
func TestMetrics(t *testing.T) {
	t.Parallel()
	d := start(t)
	var provider string
	d.EachProvider(t, func(_ *testing.T, _ *testenv.Daemon, name string) { provider = name })
	if provider == "" {
		t.Skip("no provider works here")
	}
	d.Must("policy", "create", "--allow", "web.lab.test", "web")
	id := box(t, d, provider, "--policy", "web")
	d.Must("exec", id, "wget", "-q", "-O", "/dev/null", "http://web.lab.test/")
	for _, refused := range []string{"nslookup other.lab.test", "wget -q -T 2 -O /dev/null http://" + testenv.LabWebAddr + "/", "nc -w 1 " + testenv.LabEchoAddr + " 7"} {
		if r := d.Shard("exec", id, "sh", "-c", refused+" </dev/null"); r.Code == 0 {
			t.Errorf("%s is not refused", refused)
		}
	}
	if out := d.Must("exec", id, "sh", "-c", `printf 'GET / HTTP/1.0\r\nHost: other.lab.test\r\n\r\n' | nc -w 10 web.lab.test 80`); !strings.Contains(out, " 403 ") {
		t.Errorf("another host's page by the address of the one that is allowed: %s", out)
	}
	text := ""
	for _, sample := range []string{`shard_pool_ready{kind="disk"}`, `shard_pool_ready{kind="network"}`,
		`shard_egress_decisions_total{source="dns",verdict="allow"}`, `shard_egress_decisions_total{source="dns",verdict="deny"}`,
		`shard_egress_decisions_total{source="proxy",verdict="allow"}`, `shard_egress_decisions_total{source="proxy",verdict="deny"}`,
		`shard_egress_decisions_total{source="host",verdict="deny"}`} {
		testenv.Eventually(t, sample+" is more than 0", func() (bool, string) {
			text = string(call(t, d, "GET", "/metrics", nil).Body)
			for line := range strings.Lines(text) {
				if value, ok := strings.CutPrefix(strings.TrimSpace(line), sample+" "); ok {
					n, err := strconv.ParseFloat(value, 64)
					return err == nil && n > 0, line
				}
			}
			return false, text
		})
	}

	page, err := os.ReadFile(filepath.Join(testenv.Module(), "docs", "operate.md"))
	if err != nil {
		t.Fatal(err)
	}
	named := make(map[string]bool)
	for line := range strings.Lines(string(page)) {
		if first, _, isRow := strings.Cut(strings.TrimPrefix(line, "| "), " | "); isRow && strings.HasPrefix(line, "| `") {
			for _, name := range regexp.MustCompile("`((?:shard|go|process)_[a-z_]+)").FindAllStringSubmatch(first, -1) {
				named[name[1]] = true
			}
		}
	}
	said := make(map[string]bool)
	for _, name := range regexp.MustCompile(`(?m)^# TYPE (\S+) `).FindAllStringSubmatch(text, -1) {
		said[name[1]] = true
		if !named[name[1]] {
			t.Errorf("docs/operate.md does not name %s", name[1])
		}
	}
	for name := range named {
		if !said[name] {
			t.Errorf("docs/operate.md names %s, and /metrics does not have it", name)
		}
	}
}

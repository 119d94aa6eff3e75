package test

import (
	"os"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestDamagedRecordHasAWayOut: a sandbox that runs on without a readable record is named by every verb, with what to do, and
// removed whole by force; the daemon's cleanup proves that nothing of it is left.
func TestDamagedRecordHasAWayOut(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		d.Stop()
		if err := os.WriteFile(recordFile(d, id), []byte("{"), 0o600); err != nil {
			t.Fatal(err)
		}
		d.Restart()
		for _, verb := range [][]string{{"inspect", id}, {"exec", id, "true"}, {"stop", id}, {"remove", id}} {
			if r := d.Shard(verb...); r.Code != 1 || !strings.Contains(r.Stderr, "cannot be read") || !strings.Contains(r.Stderr, "force") {
				t.Errorf("%s: exit code %d\n%s%s", verb, r.Code, r.Stdout, r.Stderr)
			}
		}
		d.Must("remove", "--force", id)
		if r := d.Shard("list", "--all"); r.Code != 0 || strings.Contains(r.Stdout+r.Stderr, id) {
			t.Errorf("after the removal: exit code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
		}
	})
}

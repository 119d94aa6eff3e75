package test

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
	"github.com/useshards/shard/internal/testenv"
)

// lending is what there is of a secret: its value in the store, "" where it has none, and whether the sandbox has it.
type lending struct {
	value string
	given bool
}

// TestKill9Secrets: wherever in a change of secrets the daemon dies, what it answered holds, and what it did not answer is as
// it was or as it was asked. Store, record, environment and what a host gets agree, and the next daemon goes on.
func TestKill9Secrets(t *testing.T) {
	t.Parallel()
	d := labDaemon(t, testenv.Options{})
	got := &arrivals{}
	d.Lab().Web().Handle("dest.lab.test/", got)
	const ref = "test/go-client:latest"
	d.Import(ref, testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, testenv.BusyboxEntries(t)...), testenv.Layer(t,
		testenv.Entry{Name: trustFile[1:], Body: string(d.Lab().CA())}, testenv.Entry{Name: "bin/get-go", Mode: 0o755, Body: string(testenv.GoClient(t))})))
	const rounds = 20
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		name := "TOKEN_" + strings.ToUpper(provider)
		mock := "mock-" + name
		id := box(t, d, provider, ref)
		var now lending
		for round := range rounds {
			fresh := fmt.Sprintf("value-%d-of-%s", round, provider)
			op, next := "", now
			for next == now {
				op = []string{"set", "grant", "ungrant", "remove"}[rand.IntN(4)]
				next = now.after(op, fresh)
			}
			if op == "grant" || op == "ungrant" {
				d.Must("stop", id)
			}
			c := d.Client()
			answered := make(chan error, 1)
			go func() { answered <- change(t, c, op, id, name, fresh) }()
			delay := rand.N(6 * time.Millisecond)
			if op == "grant" { // mounts a disk
				delay *= 10
			}
			if rand.IntN(2) == 0 {
				delay = time.Minute // right behind the answer
			}
			var err error
			select {
			case err = <-answered:
				d.Kill9()
			case <-time.After(delay):
				d.Kill9()
				err = <-answered
			}
			t.Logf("round %d: %s, killed after %s: %v", round, op, delay, err)
			c.Close()
			d.Restart()

			could := []lending{now, next}
			if _, answer := errors.AsType[*shard.Error](err); answer {
				t.Fatalf("round %d: %s with %+v is refused: %v", round, op, now, err)
			} else if err == nil {
				could = []lending{next}
			}
			seen := lending{stored(t, d, name), slices.Contains(inspect(t, d, id).Secrets, name)}
			if !slices.Contains(could, seen) {
				t.Fatalf("round %d: %s, answered with %v, killed: there is %+v, want one of %+v", round, op, err, seen, could)
			}
			now = seen
			if list := d.Must("secret", "list"); strings.Contains(list, name) != (now.value != "") {
				t.Errorf("round %d: %s: %+v is listed as %s", round, op, now, list)
			}
			if state(t, d, id) == shard.StateStopped {
				d.Must("start", id)
			}
			env, arrives := "none", mock
			if now.given {
				env = mock
				if now.value != "" {
					arrives = now.value
				}
			}
			got.take()
			out := sh(t, d, id, "echo ${"+name+"-none}; get-go https://dest.lab.test/ 'Key: "+mock+"'")
			if all := got.take(); !strings.HasPrefix(out, env+"\necho "+mock+" ") || len(all) != 1 || all[0].Header.Get("Key") != arrives {
				t.Errorf("round %d: %s: with %+v the sandbox has %q, the host %+v", round, op, now, out, all)
			}
		}
	})
}

// after is what a change makes of it; the same where it is refused.
func (l lending) after(op, value string) lending {
	switch {
	case op == "set" && (l.value != "" || !l.given): // what was removed is not set again while sandboxes have it
		return lending{value, l.given}
	case op == "remove":
		return lending{"", l.given}
	case op == "grant" && l.value != "":
		return lending{l.value, true}
	case op == "ungrant":
		return lending{l.value, false}
	}
	return l
}

func change(t *testing.T, c *client.Client, op, id, name, value string) (err error) {
	switch op {
	case "set":
		_, err = c.PutSecret(t.Context(), name, shard.PutSecretRequest{Value: value, Destinations: []string{"dest.lab.test"}})
	case "remove":
		err = c.RemoveSecret(t.Context(), name, true)
	case "grant":
		_, err = c.GrantSecret(t.Context(), id, name)
	case "ungrant":
		_, err = c.UngrantSecret(t.Context(), id, name)
	}
	return err
}

// stored is the value of a secret on the disk, "" where there is none.
func stored(t *testing.T, d *testenv.Daemon, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(d.Root, "secrets", name))
	if errors.Is(err, fs.ErrNotExist) {
		return ""
	}
	var file struct{ Record struct{ Value string } }
	if err := errors.Join(err, json.Unmarshal(data, &file)); err != nil || file.Record.Value == "" {
		t.Fatalf("the file of %s: %v: %s", name, err, data)
	}
	return file.Record.Value
}

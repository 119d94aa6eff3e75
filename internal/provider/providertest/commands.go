//go:build linux

package providertest

import (
	"bytes"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"sync"
	"testing"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/guest"
	"github.com/useshards/shard/internal/provider"
)

func commands(t *testing.T, p provider.Provider, env *Env) {
	b := start(t, p, env.Spec(t, shard.Resources{}))
	sh := func(script string) guest.Strings { return guest.Strings{"sh", "-c", script} }
	for _, c := range []struct {
		name string
		spec guest.ExecSpec
		out  string
		exit guest.Exit
		not  int // exit code with which it is not started
	}{
		{name: "output", spec: guest.ExecSpec{Argv: sh("echo out; echo err >&2")}, out: "out\n"},
		{name: "exit code", spec: guest.ExecSpec{Argv: sh("exit 3")}, exit: guest.Exit{Code: 3}},
		{name: "exit code 255", spec: guest.ExecSpec{Argv: sh("exit 255")}, exit: guest.Exit{Code: 255}},
		{name: "signal", spec: guest.ExecSpec{Argv: sh("kill -TERM $$")}, exit: guest.Exit{Signal: 15}},
		{name: "kill", spec: guest.ExecSpec{Argv: sh("kill -KILL $$")}, exit: guest.Exit{Signal: 9}},
		{name: "missing", spec: guest.ExecSpec{Argv: guest.Strings{"no-such-program"}}, not: 127},
		{name: "missing path", spec: guest.ExecSpec{Argv: guest.Strings{"/bin/no-such-program"}}, not: 127},
		{name: "not executable", spec: guest.ExecSpec{Argv: guest.Strings{"/etc/passwd"}}, not: 126},
		{name: "root", spec: guest.ExecSpec{Argv: sh("id -u; id -g; echo $HOME")}, out: "0\n0\n/root\n"},
		{name: "user by name", spec: guest.ExecSpec{User: "dev", Argv: sh("id -u; id -g; echo $HOME")}, out: "1000\n1000\n/home/dev\n"},
		{name: "user and group", spec: guest.ExecSpec{User: "1000:staff", Argv: sh("id -u; id -g")}, out: "1000\n50\n"},
		{name: "groups", spec: guest.ExecSpec{User: "dev", Argv: sh("id -G")}, out: "1000 50\n"},
		{name: "workdir", spec: guest.ExecSpec{Workdir: "/home/dev", Argv: sh("pwd")}, out: "/home/dev\n"},
		{name: "boot's workdir", spec: guest.ExecSpec{Workdir: "/work", Argv: sh("pwd")}, out: "/work\n"},
		{name: "env", spec: guest.ExecSpec{Env: guest.Strings{"PATH=/bin", "A=b c", "E="}, Argv: sh(`printf '%s|%s|%s' "$A" "$E" "${NONE-none}"`)}, out: "b c||none"},
		{name: "hostname", spec: guest.ExecSpec{Argv: sh("hostname; cat /etc/hostname")}, out: b.spec.Hostname + "\n" + b.spec.Hostname + "\n"},
		{name: "no terminal", spec: guest.ExecSpec{Argv: sh("[ -t 0 ] || [ -t 1 ] || echo none")}, out: "none\n"},
		{name: "terminal", spec: guest.ExecSpec{TTY: true, Rows: 33, Cols: 101, Argv: sh("[ -t 0 ] && [ -t 1 ] && stty size")}, out: "33 101\r\n"},
		{name: "empty input", spec: guest.ExecSpec{Argv: sh("wc -c")}, out: "0\n"},
		{name: "broken pipe", spec: guest.ExecSpec{Argv: sh("yes | head -n 1")}, out: "y\n"},
		{name: "early end of a reader", spec: guest.ExecSpec{Argv: sh("seq 1 200000 | grep -m 1 7 >/dev/null; echo over")}, out: "over\n"},
		{name: "devices", spec: guest.ExecSpec{Argv: sh("head -c 3 /dev/zero | wc -c; echo x >/dev/null; head -c 2 /dev/urandom | wc -c; [ -d /dev/shm ] && echo shm")}, out: "3\n2\nshm\n"},
		{name: "loopback", spec: guest.ExecSpec{Argv: sh("ping -c 1 -w 20 127.0.0.1 >/dev/null && echo up")}, out: "up\n"},
		{name: "shared memory", spec: guest.ExecSpec{Argv: sh("df -m /dev/shm | awk 'END { print $2 }'; stat -c %a /dev/shm")}, out: "64\n1777\n"},
		{name: "one file system", spec: guest.ExecSpec{Argv: sh("echo x > /tmp/a && ln /tmp/a /home/a && mv /tmp/a /root/b && cat /root/b")}, out: "x\n"},
		{name: "umask", spec: guest.ExecSpec{Argv: sh("umask")}, out: "0022\n"},
		{name: "no core", spec: guest.ExecSpec{Argv: sh("ulimit -c")}, out: "0\n"},
		{name: "no new privileges", spec: guest.ExecSpec{User: "dev", Argv: sh("sed -n 's/^NoNewPrivs:[^0-9]*//p; s/^CapEff:[^0-9]*//p' /proc/self/status")}, out: "0000000000000000\n1\n"},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, sink, err := b.begin(c.spec)
			if c.not != 0 {
				if got := notStarted(err); got != c.not {
					t.Fatalf("got %v, want command_not_started with %d", err, c.not)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			r := sink.wait(t)
			if r.exit != c.exit {
				t.Errorf("ended with %+v, want %+v\n%s%s", r.exit, c.exit, r.out, r.err)
			}
			if c.out != "" && r.out != c.out {
				t.Errorf("printed %q, want %q (errors %q)", r.out, c.out, r.err)
			}
		})
	}
	t.Run("signal from outside", func(t *testing.T) {
		cmd, sink, err := b.begin(guest.ExecSpec{Argv: guest.Strings{"sleep", "1000"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := cmd.Signal(t.Context(), "TERM"); err != nil {
			t.Fatal(err)
		}
		if r := sink.wait(t); r.exit.Signal != 15 {
			t.Errorf("ended with %+v", r.exit)
		}
	})
}

func streams(t *testing.T, p provider.Provider, env *Env) {
	b := start(t, p, env.Spec(t, shard.Resources{}))
	t.Run("output", func(t *testing.T) {
		const lines = 870_000 // about 6 MB
		var want bytes.Buffer
		for n := 1; n <= lines; n++ {
			fmt.Fprintln(&want, n)
		}
		r := b.in(t).run(guest.ExecSpec{Argv: guest.Strings{"seq", "1", fmt.Sprint(lines)}}, nil)
		if r.out != want.String() {
			t.Errorf("got %d bytes that are not the %d written", len(r.out), want.Len())
		}
	})
	t.Run("input", func(t *testing.T) {
		data := make([]byte, 6_000_000)
		_, _ = rand.NewChaCha8([32]byte{1}).Read(data)
		r := b.in(t).run(guest.ExecSpec{Argv: guest.Strings{"sha256sum"}}, bytes.NewReader(data))
		if want := fmt.Sprintf("%x", sha256.Sum256(data)); !strings.HasPrefix(r.out, want) {
			t.Errorf("the guest got other input: %s", r.out)
		}
	})
	t.Run("both", func(t *testing.T) {
		data := make([]byte, 3_000_000)
		_, _ = rand.NewChaCha8([32]byte{2}).Read(data)
		if r := b.in(t).run(guest.ExecSpec{Argv: guest.Strings{"cat"}}, bytes.NewReader(data)); r.out != string(data) {
			t.Errorf("cat gave %d bytes that are not the %d written", len(r.out), len(data))
		}
	})
	t.Run("parallel", func(t *testing.T) {
		var all sync.WaitGroup
		for n := range 32 {
			all.Go(func() {
				_, sink, err := b.begin(guest.ExecSpec{Argv: guest.Strings{"sh", "-c", fmt.Sprintf("seq %d %d; exit %d", n, n+1000, n)}})
				if err != nil {
					t.Error(err)
					return
				}
				<-sink.end
				var want strings.Builder
				for line := n; line <= n+1000; line++ {
					fmt.Fprintln(&want, line)
				}
				if sink.broken != nil || sink.exit.Code != n || sink.out.String() != want.String() {
					t.Errorf("command %d: %v, %+v, %d bytes", n, sink.broken, sink.exit, sink.out.Len())
				}
			})
		}
		all.Wait()
	})
}

func files(t *testing.T, p provider.Provider, env *Env) {
	b := start(t, p, env.Spec(t, shard.Resources{}))
	data := make([]byte, 1_500_000)
	_, _ = rand.NewChaCha8([32]byte{3}).Read(data)
	put, err := b.session.Open(t.Context(), guest.OpPut, guest.PutArgs{Path: "/home/dev/new/data", Size: int64(len(data)), User: "dev", Parents: true}, nil)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := put.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := put.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if err := put.Finish(); err != nil {
		t.Fatal(err)
	}
	if got := b.sh("stat -c '%u %a %s' /home/dev/new/data"); got != fmt.Sprintf("1000 644 %d", len(data)) {
		t.Errorf("the guest sees %q", got)
	}
	var entry shard.FileEntry
	get, err := b.session.Open(t.Context(), guest.OpGet, guest.PathArgs{Path: "/home/dev/new/data"}, &entry)
	if err != nil {
		t.Fatal(err)
	}
	got, err := io.ReadAll(get)
	if err != nil || !bytes.Equal(got, data) {
		t.Errorf("read %d bytes that are not the %d written: %v", len(got), len(data), err)
	}
	_ = get.Close()
	err = b.session.Call(t.Context(), guest.OpStat, guest.PathArgs{Path: "/no/such/file"}, nil)
	if shard.CodeOf(err) != shard.CodeNotFound {
		t.Errorf("stat of what is not there: %v", err)
	}
}

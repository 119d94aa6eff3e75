package test

import (
	"fmt"
	"net/url"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestCase109: out of memory ends the whole sandbox and says so; the daemon starts it again with its files.
func TestCase109(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--memory", "64MiB")
		sh(t, d, id, "echo kept >/kept; sync")
		first := *inspect(t, d, id).StartedAt
		// awk doubles a string until the bound is far behind.
		eat := d.Command("exec", id, "awk", `BEGIN { s = "0123456789abcdef"; while (1) s = s s }`)
		begin := time.Now()
		r := testenv.Run(t, eat)
		if r.Code == 0 {
			t.Errorf("the command ended with exit code 0: %+v", r)
		}
		t.Logf("the command ended after %s with exit code %d: %s", time.Since(begin).Round(time.Millisecond), r.Code, strings.TrimSpace(r.Stderr))
		var got *shard.Inspection
		testenv.Eventually(t, "the record tells of the kill", func() (bool, string) {
			got = inspect(t, d, id)
			return got.OOM != nil && got.OOM.Kills >= 1, fmt.Sprintf("%+v", got)
		})
		if got.State == shard.StateStopped && !strings.Contains(got.StoppedReason, "ran out of memory") {
			t.Errorf("the reason is %q", got.StoppedReason)
		}
		testenv.Eventually(t, "the daemon starts it again", func() (bool, string) {
			got = inspect(t, d, id)
			return got.State == shard.StateRunning && got.StartedAt.After(first), fmt.Sprintf("%+v", got)
		})
		if got := sh(t, d, id, "cat /kept"); got != "kept" {
			t.Errorf("after the restart: %q", got)
		}
		// A second kill soon after waits longer; meanwhile it is listed, and stop calls the start off.
		_ = testenv.Run(t, d.Command("exec", id, "awk", `BEGIN { s = "0123456789abcdef"; while (1) s = s s }`))
		testenv.Eventually(t, "a restart is due", func() (bool, string) {
			got = inspect(t, d, id)
			return got.State == shard.StateStopped && got.OOM != nil && got.OOM.RestartAt != nil, fmt.Sprintf("%+v", got)
		})
		if out := d.Must("list"); !strings.Contains(out, id) {
			t.Errorf("list hides a sandbox whose restart is due: %q", out)
		}
		d.Must("stop", id)
		if got := inspect(t, d, id); got.State != shard.StateStopped || got.OOM != nil && got.OOM.RestartAt != nil {
			t.Errorf("stop did not call the restart off: %+v", got)
		}
		d.Must("remove", id)
	})
}

// TestCase116: the number of processes is bounded, and the host and other sandboxes do not notice.
func TestCase116(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id, other := box(t, d, provider), box(t, d, provider)
		r := d.Shard("exec", id, "sh", "-c", `i=0; while [ $i -lt 4500 ]; do sleep 300 & i=$((i+1)); done 2>&1; echo "all 4500"`)
		if provider == "runc" && strings.Contains(r.Stdout, "all 4500") {
			t.Errorf("4500 processes were started: the documented bound is 4096")
		}
		if got := sh(t, d, other, "echo quick"); got != "quick" {
			t.Errorf("another sandbox: %q", got)
		}
		d.Must("list")
		begin := time.Now()
		d.Must("remove", "--force", id)
		if took := time.Since(begin); took > 100*time.Second {
			t.Errorf("removal took %s", took)
		}
	}, "runc")
}

// TestCase157: no host folder is reachable through a descriptor, and commands inherit none but 0, 1 and 2.
func TestCase157(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		sh(t, d, id, "echo here >/marker-of-the-sandbox")
		for fd := 3; fd <= 40; fd++ {
			r := d.Shard("exec", "--workdir", fmt.Sprintf("/proc/self/fd/%d", fd), id, "sh", "-c", "pwd -P; ls -d $(pwd -P)/marker-of-the-sandbox /marker-of-the-sandbox; ls / | sort | head -40; stat -f / . | head -2")
			if r.Code == 126 || r.Code == 127 || r.Code == 1 {
				continue
			}
			if !strings.Contains(r.Stdout, "/marker-of-the-sandbox") {
				t.Errorf("descriptor %d as the folder: %+v", fd, r)
			}
		}
		for _, link := range []string{"/proc/self/fd/7", "/proc/self/fd/8/../../..", "/proc/1/root/../.."} {
			sh(t, d, id, "rm -f /l; ln -s "+link+" /l")
			if r := d.Shard("exec", "--workdir", "/l", id, "sh", "-c", "ls marker-of-the-sandbox 2>/dev/null || pwd -P"); r.Code == 0 && strings.Contains(r.Stdout, "..") {
				t.Errorf("workdir by a link to %s: %+v", link, r)
			}
		}
		// ls itself opens one for the directory it reads.
		if got := sh(t, d, id, "ls /proc/self/fd | sort -n | tr '\\n' ' '"); got != "0 1 2 3" && strings.TrimSpace(got) != "0 1 2 3" {
			t.Errorf("a command holds the descriptors %q", got)
		}
		if got := sh(t, d, id, `for f in /proc/self/fd/*; do readlink $f; done | grep -v -e pipe: -e socket: -e /dev/null -e ^/proc -e 'host:\[' || true`); got != "" {
			t.Errorf("a command's descriptors lead to %q", got)
		}
	})
}

// TestCase160: user numbers that overflow, or look like names, never become root.
func TestCase160(t *testing.T) {
	t.Parallel()
	d := start(t)
	entries := testenv.BusyboxEntries(t)
	for i := range entries {
		if entries[i].Name == "etc/passwd" {
			entries[i].Body += "5000000000:x:0:0::/:/bin/sh\n0x1:x:0:0::/:/bin/sh\n"
		}
	}
	d.Import("test/users:latest", testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, entries...)))
	bad := []string{"2147483648", "4294967295", "4294967296", "5000000000", "-1", "0x1", " 1000", "1000:99999999999", "1000:-1", "root:4294967296"}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "test/users:latest")
		for _, user := range bad {
			r := d.Shard("exec", "--user="+user, id, "id", "-u")
			if r.Code == 0 && strings.TrimSpace(r.Stdout) == "0" {
				t.Errorf("exec as %q ran as root", user)
			}
			if r.Code == 0 && user != "5000000000" && user != "0x1" && user != "2147483648" {
				t.Errorf("exec as %q ran as %s", user, r.Stdout)
			}
			a := call(t, d, "PUT", "/v0/sandboxes/"+id+"/files?path=/tmp/"+url.PathEscape("f"+user)+"&user="+url.QueryEscape(user), "x")
			if a.Status < 300 {
				if got := sh(t, d, id, "stat -c %u '/tmp/f"+user+"'"); got == "0" {
					t.Errorf("a file written as %q belongs to root", user)
				}
			}
			if c := d.Shard("create", "--provider", provider, "--user="+user, "test/users:latest"); c.Code == 0 {
				other := strings.TrimSpace(c.Stdout)
				if got := d.Shard("exec", other, "id", "-u"); strings.TrimSpace(got.Stdout) == "0" {
					t.Errorf("a sandbox made for user %q runs commands as root", user)
				}
				d.Must("remove", "--force", other)
			}
		}
		for user, want := range map[string]string{"": "0", "root": "0", "0": "0", "dev": "1000", "1234": "1234", "dev:nogroup": "1000", "12:34": "12"} {
			if r := d.Shard("exec", "--user="+user, id, "id", "-u"); strings.TrimSpace(r.Stdout) != want {
				t.Errorf("exec as %q: %+v, want uid %s", user, r, want)
			}
		}
		if got := strings.TrimSpace(d.Shard("exec", "--user=dev", id, "id", "-G").Stdout); !slices.Contains(strings.Fields(got), "50") {
			t.Errorf("dev's groups are %q, want 50 among them", got)
		}
	})
}

// TestCase161: what the sandbox can see of the host.
func TestCase161(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		secret := box(t, d, provider, "--name", "neighbour-"+provider, "--env", "NEIGHBOURS_SECRET=4711")
		id := box(t, d, provider)
		for what, script := range map[string]string{
			"kernel memory":          "head -c 16 /proc/kcore",
			"physical memory":        "head -c 16 /dev/mem",
			"sysrq":                  "echo h >/proc/sysrq-trigger",
			"the kernel log":         "head -c 16 /dev/kmsg",
			"a block device":         "head -c 16 /dev/vda || head -c 16 /dev/sda || head -c 16 /dev/loop0",
			"a new device":           "mknod /tmp/d b 7 0 && head -c 16 /tmp/d",
			"firmware":               "ls /sys/firmware | grep .",
			"a module":               "insmod /etc/passwd",
			"a kernel setting":       "echo 1 >/proc/sys/kernel/panic",
			"the host's mounts":      "mount -t proc proc /tmp && grep -q " + d.Root + " /tmp/1/mountinfo",
			"the daemon's socket":    "ls " + d.Root + "/shard.sock",
			"other sandboxes":        "cat /proc/*/environ 2>/dev/null | grep NEIGHBOURS_SECRET=4711",
			"the host's processes":   "ps | grep '[s]hard --root'",
			"the daemon's directory": "cat /proc/*/mountinfo /proc/mounts | grep '" + d.Root + "'",
		} {
			if provider == "gvisor" && what == "sysrq" || provider == "gvisor" && what == "a kernel setting" {
				continue // gVisor's own kernel: nothing of the host is behind these files
			}
			r := d.Shard("exec", id, "sh", "-c", script)
			if r.Code == 0 {
				t.Errorf("%s: %.300q", what, r.Stdout)
			}
		}
		if got := d.Must("exec", id, "ps", "-o", "args"); strings.TrimSpace(got) != "COMMAND\n/.shard-init\nps -o args" {
			t.Errorf("the sandbox sees the processes %q", got)
		}
		host, _ := os.Hostname()
		if got := sh(t, d, id, "hostname"); got == host || got != id {
			t.Errorf("the sandbox's hostname is %q", got)
		}
		d.Must("remove", "--force", secret)
	})
}

// TestCase165: a sick gVisor sandbox. The rest of it is TestKilledSandbox and TestPipes.
func TestCase165(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		if got := sh(t, d, id, "dmesg 2>/dev/null | head -3; uname -r"); got == "" {
			t.Error("uname says nothing")
		}
		for range 3 {
			killMachine(t, id)
			testenv.Eventually(t, "the record says stopped", func() (bool, string) {
				s := state(t, d, id)
				return s == shard.StateStopped, string(s)
			})
			d.Must("start", id)
			if got := sh(t, d, id, "echo again"); got != "again" {
				t.Errorf("after the start: %q", got)
			}
		}
	}, "gvisor")
}

// TestCase166: sixty sandboxes of one image, made in parallel, have each exactly their own settings.
func TestCase166(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		c := connect(t, d)
		const n = 60
		var wg sync.WaitGroup
		slots := make(chan struct{}, 8)
		for i := range n {
			wg.Go(func() {
				slots <- struct{}{}
				defer func() { <-slots }()
				user := 2000 + i
				s, err := c.Create(t.Context(), shard.CreateRequest{Image: image, Provider: provider, Name: fmt.Sprintf("m%d", i),
					Env: []string{fmt.Sprintf("MINE=%d", i)}, User: strconv.Itoa(user), Workdir: fmt.Sprintf("/w%d", i)}, nil)
				if err != nil {
					t.Errorf("create %d: %v", i, err)
					return
				}
				r := d.Shard("exec", s.ID, "sh", "-c", "echo $MINE $(id -u) $(pwd) $(hostname); env | grep -c ^MINE=")
				if want := fmt.Sprintf("%d %d /w%d m%d\n1\n", i, user, i, i); r.Stdout != want {
					t.Errorf("sandbox %d says %q, want %q (%s)", i, r.Stdout, want, r.Stderr)
				}
				if err := c.Remove(t.Context(), s.ID, true); err != nil {
					t.Errorf("remove %d: %v", i, err)
				}
			})
		}
		wg.Wait()
	})
}

// TestCase169: what one sandbox did to its files is not in the next, nor in one that runs beside it.
func TestCase169(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		const look = "sha256sum /bin/busybox /etc/passwd /etc/group; ls / | sort; ls -la /bin | wc -l"
		b := box(t, d, provider)
		before := sh(t, d, b, look)
		a := box(t, d, provider)
		sh(t, d, a, `echo x >>/etc/passwd; mkdir /keep; cp /bin/busybox /keep/busybox; K=/keep/busybox; echo evil >/etc/group; : >/var/trunc; ln /bin/busybox /bin/hard; rm -f /bin/ls; $K touch /new; $K dd if=/dev/zero of=/bin/busybox bs=1 count=16 conv=notrunc 2>/dev/null; true`)
		if got := sh(t, d, b, look); got != before {
			t.Errorf("a sandbox beside it changed: %q, was %q", got, before)
		}
		c := box(t, d, provider)
		if got := sh(t, d, c, look); got != before {
			t.Errorf("the next sandbox differs: %q, want %q", got, before)
		}
		d.Must("stop", b)
		d.Must("start", b)
		if got := sh(t, d, b, look); got != before {
			t.Errorf("after stop and start: %q, want %q", got, before)
		}
		if r := d.Shard("exec", a, "/keep/busybox", "cat", "/etc/group"); r.Stdout != "evil\n" {
			t.Errorf("the first sandbox lost its own: %+v", r)
		}
	})
}

// TestCase118: the CPU bound holds.
func TestCase118(t *testing.T) {
	t.Parallel()
	d := start(t)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--vcpus", "1")
		sh(t, d, id, "for i in 1 2 3 4; do (while :; do :; done) >/dev/null 2>&1 & done; sleep 1")
		used := func() time.Duration { return testenv.CPUTime(testenv.CgroupProcesses(id)) }
		begin, before := time.Now(), used()
		time.Sleep(4 * time.Second)
		share := float64(used()-before) / float64(time.Since(begin))
		t.Logf("four busy loops used %.2f CPUs", share)
		if share > 1.35 {
			t.Errorf("a sandbox with one CPU used %.2f", share)
		}
		if got := sh(t, d, id, "echo answers"); got != "answers" {
			t.Errorf("while busy: %q", got)
		}
	})
}

// TestCase047: settings of images, and poor images.
func TestCase047(t *testing.T) {
	t.Parallel()
	d := start(t)
	busybox := testenv.BusyboxEntries(t)
	config := func(change func(*v1.Config)) v1.Config { c := testenv.BusyboxConfig(); change(&c); return c }
	images := map[string]v1.Image{
		"user":     testenv.Image(t, config(func(c *v1.Config) { c.User = "1000" }), testenv.Layer(t, busybox...)),
		"group":    testenv.Image(t, config(func(c *v1.Config) { c.User = "dev:staff" }), testenv.Layer(t, busybox...)),
		"baduser":  testenv.Image(t, config(func(c *v1.Config) { c.User = "nosuch" }), testenv.Layer(t, busybox...)),
		"workdir":  testenv.Image(t, config(func(c *v1.Config) { c.WorkingDir = "/made/up" }), testenv.Layer(t, busybox...)),
		"env":      testenv.Image(t, config(func(c *v1.Config) { c.Env = append(c.Env, "A=b=c d") }), testenv.Layer(t, busybox...)),
		"resolv":   testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(slices.Clone(busybox), testenv.Entry{Name: "etc/resolv.conf", Link: "/run/nowhere/resolv.conf"})...)),
		"scratch":  testenv.Image(t, v1.Config{}, testenv.Layer(t, static(t))),
		"nothing":  testenv.Image(t, v1.Config{}),
		"hostlink": testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(slices.Clone(busybox), testenv.Entry{Name: "etc/hosts", Link: "/../../../../../../tmp/shard-escape"})...)),
	}
	for name, img := range images {
		d.Import("test/"+name+":latest", img)
	}
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		of := func(name string) string { return "test/" + name + ":latest" }
		if got := sh(t, d, box(t, d, provider, of("user")), "id -u; echo $HOME"); got != "1000\n/home/dev" {
			t.Errorf("USER 1000: %q", got)
		}
		if got := sh(t, d, box(t, d, provider, of("group")), "id -u; id -g"); got != "1000\n50" {
			t.Errorf("USER dev:staff: %q", got)
		}
		refused(t, d.Shard("create", "--provider", provider, of("baduser")), "nosuch")
		if got := sh(t, d, box(t, d, provider, of("workdir")), "pwd"); got != "/made/up" {
			t.Errorf("WORKDIR: %q", got)
		}
		if got := sh(t, d, box(t, d, provider, of("env")), `echo "$A"`); got != "b=c d" {
			t.Errorf("ENV: %q", got)
		}
		if r := d.Shard("create", "--provider", provider, of("resolv")); r.Code == 0 {
			id := strings.TrimSpace(r.Stdout)
			if got := sh(t, d, id, "cat /etc/resolv.conf | grep -c nameserver"); got == "0" {
				t.Error("a dangling resolv.conf left the sandbox without a resolver")
			}
			d.Must("remove", "--force", id)
		}
		scratch := box(t, d, provider, of("scratch"))
		if out := d.Must("exec", scratch, "/busybox", "echo", "from scratch"); out != "from scratch" {
			t.Errorf("a scratch image: %q", out)
		}
		if r := d.Shard("exec", scratch, "/bin/sh", "-c", "true"); r.Code != 127 {
			t.Errorf("a shell in a scratch image: %+v", r)
		}
		nothing := box(t, d, provider, of("nothing"))
		if r := d.Shard("exec", nothing, "true"); r.Code != 127 {
			t.Errorf("a command in an empty image: %+v", r)
		}
		if r := d.Shard("create", "--provider", provider, of("hostlink")); r.Code == 0 {
			d.Must("remove", "--force", strings.TrimSpace(r.Stdout))
		}
		if _, err := os.Lstat("/tmp/shard-escape"); err == nil {
			_ = os.Remove("/tmp/shard-escape")
			t.Error("a link in the image's /etc was followed on the host")
		}
	})
}

// static is busybox as the only file of an image.
func static(t *testing.T) testenv.Entry {
	t.Helper()
	for _, e := range testenv.BusyboxEntries(t) {
		if e.Name == "bin/busybox" {
			e.Name = "busybox" // by any other name it does not know what to do
			return e
		}
	}
	t.Fatal("no busybox")
	return testenv.Entry{}
}

package test

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestSystemd installs shard with `shard setup` on a machine that systemd runs, lives with its units through restarts,
// a crash, repairs and a reboot, and takes it away again.
func TestSystemd(t *testing.T) {
	built, archive := testenv.Bin(t)+"/shard", testenv.Archive(t, image, testenv.Busybox(t))
	lab := testenv.NewLab(t)
	m := testenv.Boot(t, lab)
	setup := built + " setup --local --yes "
	clean := shardOf(m)

	// A host that is ready but has no shard is no failure.
	if r := m.Sh(built + " doctor"); r.Code != 0 || !regexp.MustCompile(`(?m)^daemon +warn`).MatchString(r.Stdout) {
		t.Errorf("shard doctor before setup: exit code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
	if r := m.Sh(built + " setup"); r.Code != 1 || !strings.Contains(r.Stderr, "--local or --remote URL and --yes") {
		t.Errorf("setup without a terminal and options: %+v", r)
	}

	m.Must(setup + "--provider runc --start-at-boot true --http-api true --listen " + testenv.LabHostAddr + ":7850 --replace-api-key --preview-domain preview.test")
	for what, want := range map[string]string{
		"systemctl is-active shard shard-serve":                                "active\nactive",
		"systemctl is-enabled shard shard-serve":                               "enabled\nenabled",
		"stat -c '%a %U %G' /var/lib/shard/shard.sock":                         "660 root shard",
		"stat -c '%a %U %G' /var/lib/shard":                                    "710 root shard",
		"stat -c '%a %U' /etc/shard/api-key":                                   "600 root",
		"systemd-analyze verify /etc/systemd/system/shard*.service 2>&1":       "",
		"systemctl show -p KillMode -p Restart --value shard":                  "on-failure\nprocess",
		"ps -o user= -C shard":                                                 "root\nshard",
		"runuser -u shard -- shard list --format json":                         "[]",
		"shard capabilities --format json >/dev/null; shard doctor >/dev/null": "",
	} {
		if got := m.Must(what); got != want {
			t.Errorf("%s: %q, not %q", what, got, want)
		}
	}
	if r := m.Sh("runuser -u nobody -- shard list"); r.Code != 1 || !strings.Contains(r.Stderr, "group shard") {
		t.Errorf("list as a stranger: %+v", r)
	}
	if got := m.Must(`grep -h '^CapEff\|^NoNewPrivs' /proc/$(systemctl show -p MainPID --value shard-serve)/status`); !regexp.MustCompile(`0{16}\nNoNewPrivs:\s1`).MatchString(got) {
		t.Errorf("shard serve has rights: %s", got)
	}

	key := m.Must("cat /etc/shard/api-key")
	world := visitor(t, lab, m)
	ask := overTLS(t, world)
	if code, body := ask("Bearer " + key); code != 200 || !strings.Contains(body, `"sandboxes"`) {
		t.Errorf("the HTTP API answers the key of setup with %d: %s", code, body)
	}
	if code, _ := ask(""); code != 401 {
		t.Errorf("the HTTP API answers without a key: %d", code)
	}
	if code, _ := ask("Bearer " + key[:len(key)-1]); code != 401 {
		t.Errorf("the HTTP API takes a key cut short: %d", code)
	}

	m.Must("shard image import " + archive + " " + image)

	// What runs in sandboxes does not notice that the daemon is stopped, started, killed or upgraded.
	var boxes []string
	for _, provider := range []string{"runc", "gvisor"} {
		if r := m.Sh("shard create --provider " + provider + " --name " + provider + " " + image); r.Code != 0 {
			if strings.Contains(r.Stderr, "does not work") || strings.Contains(r.Stderr, "is not available") {
				t.Logf("without %s: %s", provider, r.Stderr)
				continue
			}
			t.Fatalf("create on %s: %+v", provider, r)
		}
		boxes = append(boxes, provider)
		m.Must("shard run --name clock " + provider + " sh -c 'i=0; while :; do i=$((i+1)); echo $i >/tmp/i; sleep 0.1; done'")
		m.Must("shard exec " + provider + " sh -c 'echo mine >/root/file'")
	}
	if len(boxes) == 0 {
		t.Fatal("no provider works in the machine")
	}
	// Previews are served as setup was told. shard serve tells the daemon where, in its own time.
	m.Must("shard exec " + boxes[0] + " sh -c 'mkdir /www; echo served >/www/index.html'; shard run --name web " + boxes[0] + " httpd -f -p 127.0.0.1:8000 -h /www")
	testenv.Eventually(t, "a preview answers", func() (bool, string) {
		r := m.Sh("shard port url " + boxes[0] + " 8000")
		if r.Code != 0 || !strings.Contains(r.Stdout, ".preview.test:7850/?shard-link=") {
			return false, r.Stdout + r.Stderr
		}
		resp, err := world.Get(strings.TrimSpace(r.Stdout))
		if err != nil {
			return false, err.Error()
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return err == nil && string(body) == "served\n", resp.Status + " " + string(body)
	})
	pid := func() string { return m.Must("systemctl show -p MainPID --value shard") }
	alive := func(after string) {
		t.Helper()
		for _, box := range boxes {
			var ps string
			testenv.Eventually(t, "the clock of "+box+" runs on after "+after, func() (bool, string) {
				r := m.Sh("a=$(shard exec " + box + " cat /tmp/i) && sleep 0.3 && b=$(shard exec " + box + " cat /tmp/i) && [ $b -gt $a ]")
				return r.Code == 0, r.Stderr
			})
			if ps = m.Must("shard ps " + box); !regexp.MustCompile(`(?m)^clock +running `).MatchString(ps) {
				t.Errorf("%s after %s: %s", box, after, ps)
			}
		}
	}
	alive("its start")
	first := pid()
	m.Must("systemctl restart shard")
	alive("systemctl restart")
	if second := pid(); second == first {
		t.Error("systemctl restart did not restart the daemon")
	}
	m.Must("systemctl stop shard shard-serve; systemctl start shard shard-serve")
	alive("systemctl stop and start")
	killed := pid()
	m.Must("kill -9 " + killed)
	testenv.Eventually(t, "systemd starts the daemon again", func() (bool, string) {
		r := m.Sh("systemctl show -p MainPID -p ActiveState -p NRestarts shard; shard version")
		return r.Code == 0 && !strings.Contains(r.Stdout, "MainPID="+killed+"\n") && strings.Contains(r.Stdout, "NRestarts=1"), r.Stdout + r.Stderr
	})
	alive("a kill -9 of the daemon")

	// A second run finds nothing to do, and then repairs what was broken meanwhile, under sandboxes that live on.
	before, key2 := pid(), ""
	if out := m.Must(setup); strings.Contains(out, "installed /") || strings.Contains(out, "wrote ") || strings.Contains(out, "restarted") || pid() != before {
		t.Errorf("a second setup did something:\n%s", out)
	}
	m.Must("systemctl stop shard-serve; rm /usr/local/libexec/shard/shard-init; chmod 644 /etc/shard/api-key; " +
		"chown root:root /var/lib/shard/auth/signing-key; sed -i s/KillMode=process/KillMode=mixed/ /etc/systemd/system/shard.service")
	m.Must(setup)
	alive("a repair")
	if got := m.Must("systemctl is-active shard shard-serve; stat -c %a /etc/shard/api-key; systemctl show -p KillMode --value shard; ls /usr/local/libexec/shard/shard-init"); got !=
		"active\nactive\n600\nprocess\n/usr/local/libexec/shard/shard-init" {
		t.Errorf("after the repair: %s", got)
	}
	if key2 = m.Must("cat /etc/shard/api-key"); key2 != key {
		t.Error("a repair made another API key")
	}
	if code, body := ask("Bearer " + key); code != 200 {
		t.Errorf("after the repair the HTTP API answers with %d: %s", code, body)
	}
	m.Must(setup + "--start-at-boot false --http-api false")
	if got := m.Sh("systemctl is-enabled shard; systemctl is-active shard shard-serve; ls /etc/systemd/system/shard*").Stdout; got !=
		"disabled\nactive\ninactive\n/etc/systemd/system/shard.service\n" {
		t.Errorf("without the HTTP API and not at boot: %s", got)
	}
	m.Must(setup + "--start-at-boot true --http-api true --replace-api-key --listen " + testenv.LabHostAddr + ":7850")
	if key2 = m.Must("cat /etc/shard/api-key"); key2 == key {
		t.Error("--replace-api-key kept the key")
	}
	if code, _ := ask("Bearer " + key); code != 401 {
		t.Errorf("the replaced key still opens: %d", code)
	}
	if code, _ := ask("Bearer " + key2); code != 200 {
		t.Errorf("the new key does not open: %d", code)
	}
	// A certificate of the host's own, once the user of shard serve can read it.
	m.Must("cd /etc/ssl; openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=preview -addext 'subjectAltName=DNS:*.preview.test' -keyout p.key -out p.crt; chmod 600 p.key")
	files := "--tls-cert /etc/ssl/p.crt --tls-key /etc/ssl/p.key --preview-domain preview.test"
	if r := m.Sh(setup + files); r.Code != 1 || !strings.Contains(r.Stderr, "user shard, as whom shard serve runs, cannot read /etc/ssl/p.key") {
		t.Errorf("a key that shard serve cannot read: %+v", r)
	}
	m.Must("chgrp shard /etc/ssl/p.key; chmod 640 /etc/ssl/p.key; " + setup + files)
	served := "openssl s_client -connect " + testenv.LabHostAddr + ":7850 -servername 1-x.preview.test </dev/null 2>&1 | grep -c 'CN = preview\\|CN=preview'"
	if r := m.Sh(served); r.Code != 0 {
		t.Errorf("the host's own certificate is not served: %+v", r)
	}
	m.Must(setup + "--tls-cert '' --preview-domain ''; rm /etc/ssl/p.key /etc/ssl/p.crt")
	if r := m.Sh(served + "; grep -c 'preview\\|p.key' /etc/systemd/system/shard-serve.service"); r.Stdout != "0\n0\n" {
		t.Errorf("the choices are not taken back: %+v", r)
	}
	alive("changes of the choices")

	if r := m.Sh("shard setup --uninstall --yes"); r.Code != 1 || !strings.Contains(r.Stderr, fmt.Sprintf("sandboxes remain (%d)", len(boxes))) {
		t.Errorf("uninstall over sandboxes: %+v", r)
	}
	alive("a refused uninstall")

	// A reboot ends what ran and keeps the files. It does not wait for sandboxes in vain, and what was supervised returns.
	m.Must("shard create --name still --provider " + boxes[0] + " " + image)
	if slices.Contains(boxes, "gvisor") { // and what was paused does not notice
		m.Must("shard create --name asleep --provider gvisor " + image + " && shard run --name count asleep sh -c '" + counting + "'")
		m.Must("until shard exec asleep test -s /count; do :; done; shard pause asleep")
	}
	m.Reboot()
	testenv.Eventually(t, "shard is up after the boot", func() (bool, string) {
		r := m.Sh("shard version && systemctl is-active shard-serve")
		return r.Code == 0, r.Stdout + r.Stderr
	})
	alive("a reboot")
	if got := m.Must("shard list --all --format json | grep -c '\"state\": \"stopped\"'"); got != "1" {
		t.Errorf("%s sandboxes are stopped after a reboot:\n%s", got, m.Must("shard list --all"))
	}
	if errs := m.Sh(`journalctl -b -q -o cat -u shard | grep '"level":"ERROR"'`); errs.Stdout != "" {
		t.Errorf("a reboot is an error in the daemon's log:\n%s", errs.Stdout)
	}
	m.Must("shard start still")
	for _, box := range boxes {
		if got := m.Must("shard exec " + box + " cat /root/file"); got != "mine" {
			t.Errorf("%s's file after a reboot: %q", box, got)
		}
	}
	if slices.Contains(boxes, "gvisor") {
		m.Must("shard resume asleep && n=$(shard exec asleep sh -c 'wc -l </count') && until [ $(shard exec asleep sh -c 'wc -l </count') -gt $n ]; do :; done")
		m.Must(`shard exec asleep awk '$1 != NR { print "where " NR " should come there is " $1; exit 1 }' /count`)
		boxes = append(boxes, "asleep")
	}
	m.Must("shard remove --force still " + strings.Join(boxes, " "))
	if code, _ := ask("Bearer " + key2); code != 200 {
		t.Errorf("the HTTP API after a reboot: %d", code)
	}
	m.Must("shard setup --uninstall --yes")
	if now := shardOf(m); now != clean {
		t.Errorf("before setup:\n%s\nafter uninstall:\n%s", clean, now)
	}
	if got := m.Must("ls /var/lib/shard/images /var/lib/shard/auth/signing-key | wc -l"); got == "0" {
		t.Error("uninstall took the data")
	}
}

// shardOf is what of shard a machine has, but for the data, the key and the account, which stay.
func shardOf(m *testenv.Machine) string {
	var files []string
	for path := range m.Changed() {
		if strings.Contains(path, "shard") && path != "/etc/shard/api-key" || strings.HasPrefix(path, "/usr/local/") {
			files = append(files, path)
		}
	}
	slices.Sort(files)
	return strings.Join(files, "\n") + "\n" + m.Must(`pgrep -a '^(shard|runc)' || true
		systemctl list-units --all --plain --no-legend 'shard*'
		cat /proc/mounts | grep -v '^overlay / ' | grep -e shard -e overlay | grep -v ' /var/lib/shard ext4 '
		find /sys/fs/cgroup /run -name '*shard*'
		ip -o link | cut -d: -f2; ip rule; nft list tables; ls /run/netns 2>/dev/null || true`)
}

// visitor is a client in the world that trusts the authority that setup made, and finds every name at the machine.
func visitor(t *testing.T, lab *testenv.Lab, m *testenv.Machine) *http.Client {
	t.Helper()
	trust := x509.NewCertPool()
	testenv.Eventually(t, "there is an authority", func() (bool, string) {
		r := m.Sh("cat /var/lib/shard/auth/tls/ca.crt")
		return r.Code == 0 && trust.AppendCertsFromPEM([]byte(r.Stdout)), r.Stderr
	})
	return &http.Client{Jar: newJar(), Transport: &http.Transport{DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: trust},
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return lab.DialFromWorld(ctx, network, testenv.LabHostAddr+":7850")
		}}}
}

// overTLS asks the machine's HTTP API for its sandboxes.
func overTLS(t *testing.T, c *http.Client) func(authorization string) (int, string) {
	t.Helper()
	return func(authorization string) (code int, body string) {
		t.Helper()
		testenv.Eventually(t, "the HTTP API answers", func() (bool, string) {
			req, err := http.NewRequestWithContext(t.Context(), "GET", "https://"+testenv.LabHostAddr+":7850/v0/sandboxes?all=true", nil)
			if err != nil {
				t.Fatal(err)
			}
			if authorization != "" {
				req.Header.Set("Authorization", authorization)
			}
			r, err := c.Do(req)
			if err != nil {
				return false, err.Error()
			}
			defer r.Body.Close()
			data, err := io.ReadAll(r.Body)
			code, body = r.StatusCode, string(data)
			return err == nil, fmt.Sprint(err)
		})
		return code, body
	}
}

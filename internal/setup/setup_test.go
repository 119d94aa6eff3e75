package setup

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// host is a directory that stands for one; it keeps what was run, and makes the accounts that were asked for.
type host struct {
	t    *testing.T
	tree string
	ran  []string
	said []string
}

func newHost(t *testing.T, systemd bool) *host {
	if os.Geteuid() != 0 {
		t.Skip("files are given to another user: run as root")
	}
	h := &host{t: t, tree: t.TempDir()}
	h.write("etc/group", "root:x:0:\n")
	h.write("etc/passwd", "root:x:0:0:root:/root:/bin/sh\n")
	for _, name := range []string{"shard", "shard-init", "shard-runsc"} {
		h.write("build/"+name, name+" 1")
	}
	if systemd {
		h.write("run/systemd/system/x", "")
	}
	return h
}

func (h *host) path(p string) string { return filepath.Join(h.tree, p) }

func (h *host) write(p, text string) {
	h.t.Helper()
	if err := os.MkdirAll(filepath.Dir(h.path(p)), 0o755); err != nil {
		h.t.Fatal(err)
	}
	if err := os.WriteFile(h.path(p), []byte(text), 0o755); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) read(p string) string {
	h.t.Helper()
	data, err := os.ReadFile(h.path(p))
	if err != nil {
		h.t.Fatal(err)
	}
	return string(data)
}

func (h *host) installer() *Installer {
	h.ran, h.said = nil, nil
	return &Installer{Tree: h.tree, Self: h.path("build/shard"),
		Say: func(format string, args ...any) { h.said = append(h.said, fmt.Sprintf(format, args...)) },
		Run: func(_ context.Context, name string, args ...string) error {
			h.ran = append(h.ran, name+" "+strings.Join(args, " "))
			if name == "groupadd" {
				h.write("etc/group", h.read("etc/group")+"shard:x:990:\n")
			}
			if name == "useradd" {
				h.write("etc/passwd", h.read("etc/passwd")+"shard:x:991:990::/nonexistent:/usr/sbin/nologin\n")
			}
			return nil
		}}
}

func (h *host) install(p Plan) {
	h.t.Helper()
	if err := h.installer().Install(h.t.Context(), &p); err != nil {
		h.t.Fatal(err)
	}
}

func (h *host) mode(p string) string {
	h.t.Helper()
	info, err := os.Stat(h.path(p))
	if err != nil {
		h.t.Fatal(err)
	}
	return info.Mode().String()
}

var plan = Plan{Root: "/var/lib/shard", StartAtBoot: true, HTTPAPI: true, Listen: "127.0.0.1:7850"}

func TestInstallTwice(t *testing.T) {
	h := newHost(t, true)
	h.install(plan)
	for p, mode := range map[string]string{"usr/local/bin/shard": "-rwxr-xr-x", "usr/local/libexec/shard/shard-init": "-rwxr-xr-x",
		"var/lib/shard": "drwx------", "etc/shard/api-key": "-rw-------", "var/lib/shard/auth": "dgrwxr-x---",
		"var/lib/shard/auth/signing-key": "-rw-r-----", "var/lib/shard/auth/serve.tokens": "-rw-r-----", "etc/systemd/system/shard.service": "-rw-r--r--"} {
		if got := h.mode(p); got != mode {
			t.Errorf("%s has mode %s, want %s", p, got, mode)
		}
	}
	for _, want := range []string{"ExecStart=/usr/local/bin/shard daemon\n", "KillMode=process\n"} {
		if !strings.Contains(h.read("etc/systemd/system/shard.service"), want) {
			t.Errorf("the daemon's unit lacks %q", want)
		}
	}
	serve := h.read("etc/systemd/system/shard-serve.service")
	if !strings.Contains(serve, "ExecStart=/usr/local/bin/shard serve --listen 127.0.0.1:7850\n") || strings.Contains(serve, "@") && strings.Contains(serve, "@ROOT@") {
		t.Errorf("the unit of shard serve:\n%s", serve)
	}
	for _, want := range []string{"groupadd --system shard", "systemctl daemon-reload", "systemctl enable shard.service", "systemctl restart shard-serve.service"} {
		if !slices.Contains(h.ran, want) {
			t.Errorf("%q was not run: %q", want, h.ran)
		}
	}
	key := h.read("etc/shard/api-key")

	h.install(plan)
	if h.read("etc/shard/api-key") != key {
		t.Error("the second run made another key")
	}
	for _, line := range h.ran {
		if strings.Contains(line, "restart") || strings.HasPrefix(line, "groupadd") || strings.HasPrefix(line, "useradd") {
			t.Errorf("the second run did %q", line)
		}
	}
	for _, line := range h.said {
		if strings.HasPrefix(line, "installed") || strings.HasPrefix(line, "wrote") || strings.Contains(line, strings.TrimSpace(key)) {
			t.Errorf("the second run said %q", line)
		}
	}

	// Another version and a new key.
	h.write("build/shard", "shard 2")
	replace := plan
	replace.ReplaceKey = true
	h.install(replace)
	if h.read("usr/local/bin/shard") != "shard 2" || !slices.Contains(h.ran, "systemctl restart shard.service") {
		t.Errorf("the upgrade did not happen: %q", h.ran)
	}
	if h.read("etc/shard/api-key") == key || strings.Count(h.read("var/lib/shard/auth/serve.tokens"), "revoked_at") != 1 {
		t.Errorf("the key was not replaced: %s", h.read("var/lib/shard/auth/serve.tokens"))
	}

	// A damaged installation is repaired.
	_ = os.Remove(h.path("usr/local/libexec/shard/shard-init"))
	_ = os.Chmod(h.path("etc/shard/api-key"), 0o644)
	h.install(plan)
	if h.read("usr/local/libexec/shard/shard-init") != "shard-init 1" || h.mode("etc/shard/api-key") != "-rw-------" {
		t.Error("not repaired")
	}

	// Without the HTTP API.
	off := plan
	off.HTTPAPI = false
	h.install(off)
	if _, err := os.Stat(h.path("etc/systemd/system/shard-serve.service")); err == nil || !slices.Contains(h.ran, "systemctl disable --now shard-serve.service") {
		t.Errorf("shard serve is still there: %q", h.ran)
	}
	if p, err := h.installer().Installed(); err != nil || p.HTTPAPI || p.Root != plan.Root {
		t.Errorf("%+v %v", p, err)
	}
}

func TestUninstall(t *testing.T) {
	h := newHost(t, true)
	h.install(plan)
	h.write("var/lib/shard/sandboxes/red-box-0001/sandbox.json", "{}")
	if err := h.installer().Uninstall(t.Context(), plan.Root); err == nil || !strings.Contains(err.Error(), "sandboxes remain") || len(h.ran) > 0 {
		t.Fatalf("%v %q", err, h.ran)
	}
	if err := os.RemoveAll(h.path("var/lib/shard/sandboxes/red-box-0001")); err != nil {
		t.Fatal(err)
	}
	if err := h.installer().Uninstall(t.Context(), plan.Root); err != nil {
		t.Fatal(err)
	}
	for _, p := range []string{"usr/local/bin/shard", "usr/local/libexec/shard", "etc/systemd/system/shard.service", "etc/systemd/system/shard-serve.service"} {
		if _, err := os.Lstat(h.path(p)); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", p, err)
		}
	}
	h.mode("var/lib/shard/auth/signing-key")
	h.mode("etc/shard/api-key")
	if err := h.installer().Uninstall(t.Context(), plan.Root); err != nil {
		t.Errorf("a second time: %v", err)
	}
}

func TestByHand(t *testing.T) {
	h := newHost(t, true)
	h.write("etc/systemd/system/shard.service", "[Unit]\n")
	if err := h.installer().Install(t.Context(), &plan); !errors.Is(err, ErrForeign) {
		t.Errorf("install: %v", err)
	}
	if err := h.installer().Uninstall(t.Context(), plan.Root); !errors.Is(err, ErrForeign) {
		t.Errorf("uninstall: %v", err)
	}
	if _, err := os.Lstat(h.path("usr/local/bin/shard")); err == nil {
		t.Error("something was installed")
	}
}

func TestWithoutSystemd(t *testing.T) {
	h := newHost(t, false)
	tls := plan
	tls.Root, tls.Listen, tls.TLS, tls.Provider = "/srv/shard", "0.0.0.0:7850", true, "runc"
	h.install(tls)
	said := strings.Join(h.said, "\n")
	for _, want := range []string{"systemd does not run this host", "/usr/local/bin/shard --root /srv/shard daemon --provider runc",
		"runuser -u shard -- /usr/local/bin/shard --root /srv/shard serve --listen 0.0.0.0:7850 --tls-self-signed"} {
		if !strings.Contains(said, want) {
			t.Errorf("it did not say %q:\n%s", want, said)
		}
	}
	if slices.ContainsFunc(h.ran, func(s string) bool { return strings.HasPrefix(s, "systemctl") }) {
		t.Errorf("ran %q", h.ran)
	}
	if got := h.mode("srv/shard/auth/tls"); got != "drwx------" {
		t.Error(got)
	}
}

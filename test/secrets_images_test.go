package test

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/testenv"
)

// TestSecretTrustFiles: wherever distributions keep the certificates that they trust, behind whatever links, in directories
// that nobody may write, for users who are not root and without a shell, a static client trusts the proxy and the world.
func TestSecretTrustFiles(t *testing.T) {
	t.Parallel()
	d := labDaemon(t, testenv.Options{})
	got := &arrivals{}
	d.Lab().Web().Handle("dest.lab.test/", got)
	const value, ref = "sk-076-0123456789", "test/layout:latest"
	setSecret(t, d, value, "--dest", "dest.lab.test", "API_TOKEN")
	trusted := string(d.Lab().CA())
	client := testenv.Layer(t, testenv.Entry{Name: "bin/"}, testenv.Entry{Name: "bin/get-go", Mode: 0o755, Body: string(testenv.GoClient(t))})
	busybox := testenv.Layer(t, testenv.BusyboxEntries(t)...)
	file := func(name string) testenv.Entry { return testenv.Entry{Name: name, Body: trusted} }
	link := func(name, to string) testenv.Entry { return testenv.Entry{Name: name, Link: to} }
	for _, l := range []struct {
		name, user string
		paths      string // all names of the file, where there is a shell to look
		entries    []testenv.Entry
	}{
		{"Alpine", "", "/etc/ssl/certs/ca-certificates.crt /etc/ssl/cert.pem", []testenv.Entry{
			file("etc/ssl/certs/ca-certificates.crt"), link("etc/ssl/cert.pem", "certs/ca-certificates.crt")}},
		{"Fedora", "", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem /etc/pki/tls/certs/ca-bundle.crt /etc/pki/tls/cert.pem /etc/ssl/certs/ca-bundle.crt", []testenv.Entry{
			{Name: "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem", Body: trusted, Mode: 0o444},
			link("etc/pki/tls/certs/ca-bundle.crt", "/etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem"),
			{Name: "etc/pki/ca-trust/source/anchors/"},
			link("etc/pki/tls/cert.pem", "certs/ca-bundle.crt"), link("etc/ssl/certs", "../pki/tls/certs")}},
		{"openSUSE", "", "/var/lib/ca-certificates/ca-bundle.pem /etc/ssl/ca-bundle.pem", []testenv.Entry{
			file("var/lib/ca-certificates/ca-bundle.pem"), {Name: "var/lib/ca-certificates/pem/", Mode: 0o555}, {Name: "etc/pki/trust/anchors/", Mode: 0o555},
			link("etc/ssl/ca-bundle.pem", "/var/lib/ca-certificates/ca-bundle.pem"), link("etc/ssl/certs", "/var/lib/ca-certificates/pem")}},
		{"Nix", "", "/nix/store/cacert/etc/ca-bundle.crt /etc/ssl/certs/ca-certificates.crt /etc/ssl/certs/ca-bundle.crt", []testenv.Entry{
			{Name: "nix/store/cacert/etc/ca-bundle.crt", Body: trusted, Mode: 0o444}, {Name: "nix/store/cacert/etc/", Mode: 0o555},
			link("etc/ssl/certs/ca-certificates.crt", "/nix/store/cacert/etc/ca-bundle.crt"), link("etc/ssl/certs/ca-bundle.crt", "/nix/store/cacert/etc/ca-bundle.crt")}},
		{"a link to nowhere before it", "", "/etc/ssl/cert.pem", []testenv.Entry{
			link("etc/ssl/certs/ca-certificates.crt", "/run/host/ca-certificates.crt"), file("etc/ssl/cert.pem")}},
		{"an etc that nobody may write", "1000:1000", "/etc/ssl/certs/ca-certificates.crt /usr/share/ssl/certs/ca-certificates.crt", []testenv.Entry{
			link("etc/ssl", "/usr/share/ssl"), {Name: "usr/share/ssl/certs/ca-certificates.crt", Body: trusted, Mode: 0o444},
			{Name: "usr/share/ssl/certs/", Mode: 0o555}, {Name: "usr/share/ssl/", Mode: 0o555}, {Name: "etc/", Mode: 0o555}}},
		{"distroless", "65532:65532", "", []testenv.Entry{
			{Name: "etc/passwd", Body: "root:x:0:0:root:/root:/sbin/nologin\nnonroot:x:65532:65532::/home/nonroot:/sbin/nologin\n"},
			{Name: "home/nonroot/", UID: 65532, GID: 65532}, {Name: "tmp/", Mode: 0o1777}, file("etc/ssl/certs/ca-certificates.crt")}},
	} {
		t.Run(l.name, func(t *testing.T) {
			layers := []v1.Layer{client, testenv.Layer(t, l.entries...)}
			if l.paths != "" {
				layers = append([]v1.Layer{busybox}, layers...)
			}
			d.Import(ref, testenv.Image(t, v1.Config{Env: []string{"PATH=/bin"}, User: l.user, Cmd: []string{"/bin/get-go"}}, layers...))
			d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
				id := box(t, d, provider, "--secret", "API_TOKEN", ref)
				got.take()
				asks := func(when string, before ...string) {
					t.Helper()
					command := append([]string{"exec", id}, append(before, "/bin/get-go")...)
					r := d.Shard(append(command, "https://dest.lab.test/", "Key: mock-API_TOKEN")...)
					if all := got.take(); r.Code != 0 || len(all) != 1 || all[0].Header.Get("Key") != value {
						t.Errorf("%s, the destination: %+v, %+v", when, r, all)
					}
					if r := d.Shard(append(command, "https://other.lab.test/")...); !strings.HasPrefix(r.Stdout, "GET https other.lab.test / from ") {
						t.Errorf("%s, another host: %+v", when, r)
					}
				}
				asks("at first")
				if l.paths == "" {
					return
				}
				if l.name != "openSUSE" { // the file's own name is none that Go looks for
					asks("without the variable", "env", "-u", "SSL_CERT_FILE")
				}
				d.Must("stop", id)
				d.Must("start", id)
				asks("after a start")
				want := strings.TrimSuffix(strings.Repeat("2\n", len(strings.Fields(l.paths))), "\n")
				if out := sh(t, d, id, "for f in "+l.paths+"; do grep -c BEGIN $f; done"); out != want {
					t.Errorf("certificates by each name: %q, want %q", out, want)
				}
				// Where a tool of the image makes the file anew, it finds the proxy's certificate.
				anchors := sh(t, d, id, "cd /; ls usr/local/share/ca-certificates/* etc/pki/ca-trust/source/anchors/* etc/pki/trust/anchors/* 2>/dev/null || :")
				if wantAnchor := map[string]string{"Fedora": "etc/pki/ca-trust/source/anchors/shard-proxy.crt", "openSUSE": "etc/pki/trust/anchors/shard-proxy.crt"}[l.name]; anchors != wantAnchor {
					t.Errorf("anchors: %q, want %q", anchors, wantAnchor)
				} else if anchors != "" {
					if out := sh(t, d, id, "stat -c '%a %u:%g' /"+anchors+"; tail -n 5 $SSL_CERT_FILE >/tmp/last; tail -n 5 /"+anchors+" | cmp - /tmp/last"); out != "644 0:0" {
						t.Errorf("the anchor: %q", out)
					}
				}
				mode := "644"
				for _, e := range l.entries {
					if e.Body != "" && e.Mode != 0 {
						mode = fmt.Sprintf("%o", e.Mode)
					}
				}
				if out := sh(t, d, id, "stat -L -c '%a %u:%g' $SSL_CERT_FILE"); out != mode+" 0:0" {
					t.Errorf("the trust file is %s, was %s 0:0", out, mode)
				}
			})
		})
	}
}

// TestSecretHostileImages: whatever an image has in the place of its trust file, nothing outside of the sandbox is read or
// written, nothing waits for it, and a refusal says what is wrong.
func TestSecretHostileImages(t *testing.T) {
	t.Parallel()
	d := start(t)
	setSecret(t, d, "sk-076-0123456789", "--dest", "dest.lab.test", "API_TOKEN")
	canary := filepath.Join(t.TempDir(), "canary")
	const content = "the host's own"
	if err := os.WriteFile(canary, []byte(content), 0o666); err != nil {
		t.Fatal(err)
	}
	of := func(kind byte) testenv.Entry {
		return testenv.Entry{Header: &tar.Header{Name: trustFile[1:], Typeflag: kind, Mode: 0o666, Devmajor: 1, Devminor: 5}}
	}
	link := func(to string) testenv.Entry { return testenv.Entry{Name: trustFile[1:], Link: to} }
	const none, noFile = "ca-certificates", "is no file of at most 8 MiB"
	refusals := map[string]struct {
		entries []testenv.Entry
		word    string
	}{
		"a link to the host's file":        {[]testenv.Entry{link(canary)}, none},
		"a link that climbs":               {[]testenv.Entry{link(strings.Repeat("../", 30) + canary[1:])}, none},
		"a link through PID 1":             {[]testenv.Entry{link("/proc/1/root" + canary)}, none},
		"a link through the reader":        {[]testenv.Entry{link("/proc/self/root" + canary)}, none},
		"a link through a file descriptor": {[]testenv.Entry{link("/proc/self/fd/0")}, none},
		"a link to a device":               {[]testenv.Entry{link("/dev/zero")}, none},
		"a device":                         {[]testenv.Entry{of(tar.TypeChar)}, none},
		"a directory of links":             {[]testenv.Entry{{Name: "etc/ssl", Link: "/proc/1/root" + filepath.Dir(canary)}, {Name: "etc/pki", Link: "/proc/1/cwd"}}, none},
		"a pipe":                           {[]testenv.Entry{of(tar.TypeFifo)}, noFile},
		"a directory":                      {[]testenv.Entry{{Name: trustFile[1:] + "/"}}, noFile},
		"a link to itself":                 {[]testenv.Entry{link(trustFile)}, noFile},
		"more than anybody trusts":         {[]testenv.Entry{{Name: trustFile[1:], Body: strings.Repeat("\n", 8<<20+1)}}, noFile},
	}
	base := testenv.Layer(t, testenv.BusyboxEntries(t)...)
	const ref = "test/hostile:latest"
	for what, c := range refusals {
		d.Import(ref, testenv.Image(t, testenv.BusyboxConfig(), base, testenv.Layer(t, c.entries...)))
		a := call(t, d, http.MethodPost, "/v0/sandboxes?wait=true", shard.CreateRequest{Image: ref, Secrets: []string{"API_TOKEN"}})
		if a.code(t) != shard.CodeInvalidRequest || !strings.Contains(string(a.Body), c.word) {
			t.Errorf("%s: %d %s", what, a.Status, a.Body)
		}
	}
	if left := d.Must("list", "--all", "--quiet"); left != "" {
		t.Errorf("refused creates left %s", left)
	}
	d.Import(ref, testenv.Image(t, testenv.BusyboxConfig(), base, testenv.Layer(t,
		testenv.Entry{Header: &tar.Header{Name: trustFile[1:], Typeflag: tar.TypeLink, Linkname: "etc/passwd"}},
		testenv.Entry{Name: "usr/local/share/ca-certificates", Link: filepath.Dir(canary)},
		testenv.Entry{Name: "etc/pki/trust/anchors/shard-proxy.crt", Link: canary})))
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		// Two names for one file: only what is trusted changes.
		id := box(t, d, provider, "--secret", "API_TOKEN", ref)
		if out := sh(t, d, id, "grep -c CERTIFICATE /etc/passwd "+trustFile+" || :; stat -c %h "+trustFile); out != "/etc/passwd:0\n"+trustFile+":2\n1" {
			t.Errorf("two names for one file: %q", out)
		}
		// What the guest puts there holds a start up, which says what to do, until the secret is taken away.
		for _, hostile := range []string{"mkdir -p ${f%/*}/.shard-new/x; echo x >$f", "ln -s /proc/1/root" + canary + " $f", "ln -s " + canary + " $f", "mkfifo $f", "mkdir $f", "truncate -s 1000G $f"} {
			sh(t, d, id, "f="+trustFile+"; rm -rf $f; "+hostile)
			d.Must("stop", id)
			refused(t, d.Shard("start", id), "certificate")
			d.Must("secret", "ungrant", id, "API_TOKEN")
			d.Must("start", id)
			sh(t, d, id, "rm -rf /etc/ssl/certs/* /etc/ssl/certs/.shard-new; echo mine >"+trustFile)
			d.Must("stop", id)
			d.Must("secret", "grant", id, "API_TOKEN")
			d.Must("start", id)
		}
	})
	beside, err := os.ReadDir(filepath.Dir(canary))
	if now, err2 := os.ReadFile(canary); errors.Join(err, err2) != nil || string(now) != content || len(beside) != 1 {
		t.Errorf("the host's file: %q, %v, beside %v", now, errors.Join(err, err2), beside)
	}
}

// TestSecretImages tries real images, whose archives (`docker save`, or OCI) SHARD_TEST_IMAGES names, parted by colons: with
// every client that is found in each, the value arrives at its destination, and another host is reached and gets the placeholder.
func TestSecretImages(t *testing.T) {
	archives := filepath.SplitList(os.Getenv("SHARD_TEST_IMAGES"))
	if len(archives) == 0 {
		t.Skip("SHARD_TEST_IMAGES names no archives of images: set it to a.tar:b.tar")
	}
	t.Parallel()
	d := labDaemon(t, testenv.Options{})
	d.Lab().ServePackages()
	got := &arrivals{}
	d.Lab().Web().Handle("dest.lab.test/", got)
	d.Lab().Web().Handle("other.lab.test/", got)
	const value, mock = "sk-076-0123456789", "mock-API_TOKEN"
	setSecret(t, d, value, "--dest", "dest.lab.test", "--dest", testenv.LabAPT, "--dest", testenv.LabGit, "API_TOKEN")
	// A shell for images that have none, and a client for those without any.
	dir := t.TempDir()
	shell, getGo := filepath.Join(dir, "busybox"), filepath.Join(dir, "get-go")
	entries := testenv.BusyboxEntries(t)
	at := slices.IndexFunc(entries, func(e testenv.Entry) bool { return e.Name == "bin/busybox" })
	for path, body := range map[string][]byte{shell: []byte(entries[at].Body), getGo: testenv.GoClient(t)} {
		if err := os.WriteFile(path, body, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i, archive := range archives {
		t.Run(filepath.Base(archive), func(t *testing.T) {
			ref := fmt.Sprintf("test/real-%d:latest", i)
			d.Must("image", "import", archive, ref)
			d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
				id := box(t, d, provider, "--secret", "API_TOKEN", ref)
				d.Must("cp", shell, id+":/busybox-test")
				d.Must("cp", getGo, id+":/get-go")
				sh, bare := []string{"/bin/sh", "-c"}, d.Shard("exec", id, "/bin/sh", "-c", ":").Code != 0
				if bare {
					sh = []string{"/busybox-test", "sh", "-c"}
				}
				run := func(script string) testenv.Result {
					return d.Shard(append([]string{"exec", id}, append(sh, script)...)...)
				}
				has := func(name string) bool { return run("command -v "+name).Code == 0 && (!bare || name == "/get-go") }
				world := d.Feed(bytes.NewReader(d.Lab().CA()), "exec", "-i", "--user", "0", id, "/busybox-test", "sh", "-c", "cat >>$SSL_CERT_FILE")
				if world.Code != 0 {
					t.Fatalf("trust the lab: %+v", world)
				}
				var ran []string
				type client struct{ name, script string }
				asks := func(c client) {
					t.Helper()
					for host, key := range map[string]string{"dest.lab.test": value, "other.lab.test": mock} {
						r := run("export h=" + host + "; " + c.script)
						if all := got.take(); r.Code != 0 || len(all) != 1 || all[0].Header.Get("Key") != key || !strings.HasPrefix(r.Stdout, "echo "+mock+" ") {
							t.Errorf("%s to %s: %+v, %+v", c.name, host, r, all)
						}
					}
				}
				for _, c := range []client{
					{"/get-go", `/get-go https://$h/ "Key: $API_TOKEN"`},
					{"curl", `curl -sS --fail -H "Key: $API_TOKEN" https://$h/`},
					{"wget", `wget -q -O - --header "Key: $API_TOKEN" https://$h/`},
					{"python3", `python3 -c 'import os,urllib.request as u; print(u.urlopen(u.Request("https://%s/" % os.environ["h"], headers={"Key": os.environ["API_TOKEN"]})).read().decode())'`},
					{"node", `node -e 'fetch("https://" + process.env.h + "/", {headers: {Key: process.env.API_TOKEN}}).then(async r => console.log(await r.text()))'`},
				} {
					if !has(c.name) {
						continue
					}
					ran = append(ran, c.name)
					asks(c)
				}
				for _, c := range []struct{ name, host, script string }{
					{"apt-get", testenv.LabAPT, `echo "deb [trusted=yes] https://user:$API_TOKEN@$h lab main" >/tmp/lab.list
						o="-o Dir::Etc::SourceList=/tmp/lab.list -o Dir::Etc::SourceParts=- -o Dir::State::Lists=/tmp/lists -o APT::Sandbox::User=root"
						mkdir -p /tmp/lists/partial; apt-get -qq $o update`},
					{"git", testenv.LabGit, `rm -rf /tmp/p; git clone -q https://user:$API_TOKEN@$h/private/project.git /tmp/p`},
					// Not an index of its kind: what is asked for says enough.
					{"apk", "dest.lab.test", `apk update --no-cache --repositories-file /dev/null -X "https://user:$API_TOKEN@$h/"; :`},
				} {
					if !has(c.name) {
						continue
					}
					ran = append(ran, c.name)
					for host, password := range map[string]string{c.host: value, strings.Replace("other-"+c.host, "-dest", "", 1): mock} {
						r := run("export h=" + host + "; " + c.script)
						logins := d.Lab().Logins(host)
						for _, a := range got.take() {
							logins = append(logins, a.Header.Get("Authorization"))
						}
						if r.Code != 0 || len(logins) == 0 || slices.ContainsFunc(logins, func(l string) bool { return l != basicLogin("user", password) }) {
							t.Errorf("%s to %s: %+v, %q", c.name, host, r, logins)
						}
					}
				}
				if has("update-ca-certificates") {
					ran = append(ran, "update-ca-certificates")
					anew := d.Feed(bytes.NewReader(d.Lab().CA()), "exec", "-i", "--user", "0", id, "/bin/sh", "-c", "cat >/usr/local/share/ca-certificates/lab.crt; echo >$SSL_CERT_FILE; update-ca-certificates")
					if anew.Code != 0 {
						t.Errorf("update-ca-certificates: %+v", anew)
					}
					asks(client{"/get-go behind update-ca-certificates", `/get-go https://$h/ "Key: $API_TOKEN"`})
					if has("java") { // the distribution's, whose store is made by that too
						ran = append(ran, "java")
						d.Must("cp", filepath.Join(testenv.Module(), "internal/testenv/testdata/clients/Get.java"), id+":/tmp/Get.java")
						asks(client{"java", `java /tmp/Get.java https://$h/ "Key: $API_TOKEN"`})
					}
				}
				t.Logf("%s: %s", provider, strings.Join(ran, ", "))
			})
		})
	}
}

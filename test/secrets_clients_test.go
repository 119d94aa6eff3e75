package test

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestSecretClients is cases 73, 76 and 84: what agents use trusts the proxy and still the world, gives credentials as Basic,
// and follows redirects.
func TestSecretClients(t *testing.T) {
	t.Parallel()
	archive := testenv.ClientsArchive(t)
	d := labDaemon(t, testenv.Options{})
	lab := d.Lab()
	lab.ServePackages()
	got := &arrivals{}
	lab.Web().Handle("dest.lab.test/", got)
	lab.Web().Handle("evil.lab.test/", got)
	lab.Web().HandleFunc("dest.lab.test/away", func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "https://evil.lab.test/caught", http.StatusFound)
	})
	d.Must("image", "import", archive, testenv.ClientsRef)
	const value, mock = "sk-073/0123456789+", "mock-API_TOKEN"
	destinations := []string{"--dest", "dest.lab.test"}
	for _, host := range []string{testenv.LabGit, testenv.LabPyPI, testenv.LabNPM, testenv.LabCargo, testenv.LabAPT} {
		destinations = append(destinations, "--dest", host)
	}
	setSecret(t, d, value, append(destinations, "API_TOKEN")...)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--secret", "API_TOKEN", testenv.ClientsRef)
		got.take()
		as := func(t *testing.T, user, script string) testenv.Result {
			t.Helper()
			return d.Shard("exec", "--user", user, id, "sh", "-ec", script)
		}
		// trusts checks a client as a user who is not root: the value arrives at its destination, and other hosts are reached.
		trusts := func(t *testing.T, name, prelude string) {
			t.Helper()
			r := as(t, "1000:1000", fmt.Sprintf(`%s; get-%s https://dest.lab.test/ "Key: $API_TOKEN"; get-%[2]s https://other.lab.test/`, prelude, name))
			all := got.take()
			if len(all) != 1 || all[0].Header.Get("Key") != value || !strings.HasPrefix(r.Stdout, "echo "+mock+" ") || !strings.Contains(r.Stdout, "GET https other.lab.test / from ") {
				t.Errorf("get-%s: %+v, %+v", name, r, all)
			}
		}
		// distrusts checks that one which docs/secrets.md says to need help does.
		distrusts := func(t *testing.T, command string) {
			t.Helper()
			if r := as(t, "0", command+` https://dest.lab.test/`); r.Code == 0 || len(got.take()) != 0 {
				t.Errorf("%s trusts the proxy unaided: say so in docs/secrets.md", command)
			}
		}

		// Java has stores of its own: a distribution's, one of a Java that was unpacked somewhere, and a user's.
		distrusts(t, "get-java")
		sh(t, d, id, `set -e; bin=$(dirname $(readlink -f $(command -v java))); mkdir -p /opt/java; cp -rL $bin $bin/../conf $bin/../lib /opt/java; test ! -L /opt/java/lib/security/cacerts`)
		const unpacked, user = "export JAVA_HOME=/opt/java PATH=/opt/java/bin:$PATH", "export HOME=/tmp/home; mkdir -p ~"
		recipe, world := sample(t, "secrets.md", "keytool -importcert -cacerts"), "keytool -importcert -storepass changeit -noprompt -alias lab -file /tmp/lab.pem "
		sh(t, d, id, "set -e; "+recipe)
		distrusts(t, unpacked+"; get-java")
		if r := as(t, "1000:1000", unpacked+"; "+user+"\n"+sample(t, "secrets.md", "-Djavax.net.ssl.trustStore")); r.Code != 0 {
			t.Errorf("a store of one's own: %+v", r)
		}
		d.TrustLab(id) // the world
		if r := as(t, "1000:1000", world+"-keystore /tmp/home/cacerts"); r.Code != 0 {
			t.Errorf("the world in a store of one's own: %+v", r)
		}
		trusts(t, "java", unpacked+"; export JAVA_TOOL_OPTIONS=-Djavax.net.ssl.trustStore=/tmp/home/cacerts")
		sh(t, d, id, "set -e; head -n -$(wc -l </tmp/lab.pem) $SSL_CERT_FILE >/tmp/before; export SSL_CERT_FILE=/tmp/before; "+unpacked+"\n"+recipe+"\n"+world+"-cacerts")
		trusts(t, "java", unpacked)

		for _, name := range slices.Concat(testenv.ClientNames, testenv.OtherClientNames) {
			trusts(t, name, ":")
		}
		if r := as(t, "0", `get-curl https://dest.lab.test/ "Key: $API_TOKEN"`); r.Code != 0 || got.take()[0].Header.Get("Key") != value {
			t.Errorf("as root: %+v", r)
		}
		sh(t, d, id, `curl -sS -u "user:$API_TOKEN" https://dest.lab.test/; curl -sS "https://user:$API_TOKEN@dest.lab.test/"`)
		if all := got.take(); len(all) != 2 || all[0].Header.Get("Authorization") != basicLogin("user", value) || all[1].Header.Get("Authorization") != basicLogin("user", value) {
			t.Errorf("Basic: %+v", all)
		}
		sh(t, d, id, `curl -sS -L --location-trusted -H "Key: $API_TOKEN" -u "user:$API_TOKEN" https://dest.lab.test/away`)
		if all := got.take(); len(all) != 1 || all[0].Host != "evil.lab.test" || all[0].Header.Get("Key") != mock || all[0].Header.Get("Authorization") != basicLogin("user", mock) {
			t.Errorf("after a redirect: %+v", all)
		}

		// Package managers log in with the value at its destination, and with the placeholder at another host.
		manager := func(t *testing.T, host, script, out string, login func(password string) string) {
			t.Helper()
			for host, password := range map[string]string{host: value, "other-" + host: mock} {
				script := "set -e; host=" + host + "; rm -rf /root/work; mkdir -p /root/work; cd /root/work\n" + script
				if got, logins := sh(t, d, id, script), lab.Logins(host); got != out || !slices.Equal(logins, []string{login(password)}) {
					t.Errorf("%s: %q, %q", host, got, logins)
				}
			}
		}
		manager(t, testenv.LabGit, `git clone -q "https://x:$API_TOKEN@$host/private/project.git"; cat project/README`, "hello",
			func(password string) string { return basicLogin("x", password) })
		manager(t, testenv.LabPyPI, `pip install -q --disable-pip-version-check --no-cache-dir --root-user-action=ignore --target . --index-url "https://u:$API_TOKEN@$host/simple/" labpackage
			cat labpackage.py`, "answer = 42", func(password string) string { return basicLogin("u", password) })
		manager(t, testenv.LabNPM, `npm install --silent --no-audit --no-fund --no-update-notifier "--//$host/:_authToken=$API_TOKEN" --registry https://$host/ lab-package >&2
			cat node_modules/lab-package/index.js`, "module.exports = 42;", func(password string) string { return "Bearer " + password })
		manager(t, testenv.LabAPT, `echo "deb [trusted=yes] https://$host lab main" >/etc/apt/sources.list.d/lab.list
			echo "machine $host login user password $API_TOKEN" >/etc/apt/auth.conf.d/lab.conf
			apt-get -qq -o APT::Sandbox::User=root update; apt-get -qq -o APT::Sandbox::User=root download lab-package; cat lab-package_1.0_all.deb`,
			"nobody who only downloads it looks into it", func(password string) string { return basicLogin("user", password) })
		// What a package does that brings authorities: the proxy stays trusted.
		sh(t, d, id, `(cd /usr/share/ca-certificates; find . -name '*.crt' | cut -c3-) >/etc/ca-certificates.conf; cp /tmp/lab.pem /usr/local/share/ca-certificates/lab.crt
			echo >$SSL_CERT_FILE; update-ca-certificates --fresh --hooksdir /nowhere >&2`)
		trusts(t, "curl", ":")
		has := func(t *testing.T, what string) {
			t.Helper()
			if why := d.Shard("exec", id, "cat", testenv.Missing+what); why.Code == 0 {
				t.Skipf("not in the image of clients: %s: %s", what, why.Stdout)
			}
		}
		t.Run("PyPI", func(t *testing.T) { // with a list of authorities of their own
			has(t, "pypi")
			for _, name := range []string{"requests", "httpx"} {
				trusts(t, name, "export PYTHONPATH="+testenv.PyPI+`; python3 -c 'import certifi, `+name+`; assert all("/pypi/" in m.__file__ for m in (certifi, `+name+`))'`)
			}
		})
		t.Run("Rust", func(t *testing.T) {
			has(t, "rust")
			trusts(t, "rust", ":")
			distrusts(t, "get-rust --built-in")
			manager(t, testenv.LabCargo, `mkdir src; touch src/lib.rs; export CARGO_REGISTRIES_LAB_INDEX=sparse+https://$host/index/ CARGO_REGISTRIES_LAB_TOKEN=$API_TOKEN
				printf '[package]\nname = "work"\nversion = "0.0.0"\nedition = "2021"\n[dependencies]\nlab-package = { version = "1", registry = "lab" }\n' >Cargo.toml
				export CARGO_REGISTRIES_LAB_CREDENTIAL_PROVIDER=cargo:token; cargo vendor -q vendor >/dev/null; cat vendor/lab-package/src/lib.rs`,
				"pub const ANSWER: i32 = 42;", func(password string) string { return password })
		})
		t.Run("Rust with OpenSSL", func(t *testing.T) {
			has(t, "rust")
			has(t, "native-tls")
			trusts(t, "rust-native", ":")
		})
		// The places of Fedora and its kin, and the tool that makes the trust file anew there, as their update-ca-trust runs it: for
		// that the proxy's certificate lies among the anchors.
		sh(t, d, id, `set -e; p=/etc/pki/ca-trust; mkdir -p $p/source/anchors $p/extracted/pem /etc/pki/tls/certs /usr/share/pki/ca-trust-source/anchors
			cat /usr/share/ca-certificates/mozilla/*.crt | tee $p/extracted/pem/tls-ca-bundle.pem >/usr/share/pki/ca-trust-source/anchors/world.pem; cp /tmp/lab.pem $p/source/anchors/lab.pem
			ln -s $p/extracted/pem/tls-ca-bundle.pem /etc/pki/tls/certs/ca-bundle.crt; ln -s certs/ca-bundle.crt /etc/pki/tls/cert.pem
			rm -rf /etc/ssl/certs /usr/local/share/ca-certificates; ln -s ../pki/tls/certs /etc/ssl/certs
			sed -i "s,^x-init-reserved:.*,x-init-reserved: paths='$p/source:/usr/share/pki/ca-trust-source'," /usr/share/p11-kit/modules/p11-kit-trust.module`)
		d.Must("stop", id)
		d.Must("start", id)
		sh(t, d, id, `set -e; echo >$SSL_CERT_FILE; trust extract --overwrite --comment --format=pem-bundle --filter=ca-anchors --purpose=server-auth /etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem
			test $(grep -c BEGIN $SSL_CERT_FILE) -gt 100`)
		for _, name := range []string{"curl", "urllib", "ruby"} {
			trusts(t, name, ":")
		}
	})
}

// basicLogin is the header of HTTP's Basic authentication.
func basicLogin(user, password string) string {
	return "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password))
}

// sample is the block of code in a page of docs/ that holds some words.
func sample(t *testing.T, page, words string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(testenv.Module(), "docs", page))
	if err != nil {
		t.Fatal(err)
	}
	for i, block := range strings.Split(string(text), "```") {
		if i%2 == 1 && strings.Contains(block, words) {
			return strings.TrimSpace(block)
		}
	}
	t.Fatalf("docs/%s has no sample with %q", page, words)
	return ""
}

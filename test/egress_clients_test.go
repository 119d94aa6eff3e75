package test

import (
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestClients: what agents use works through the resolver and the proxy under a policy of names, TLS untouched, and is told
// what it may not.
func TestClients(t *testing.T) {
	t.Parallel()
	lab := testenv.NewLab(t)
	lab.ServePackages()
	lab.Name("other.lab.test", testenv.LabWebAddr)
	archive := testenv.ClientsArchive(t)
	d := testenv.Start(t, testenv.Options{Lab: lab, Args: []string{"--dns", testenv.LabDNSAddr}})
	d.Must("image", "import", archive, testenv.ClientsRef)
	put(t, d, "clients", "allow web.lab.test", "allow "+testenv.LabGit, "allow "+testenv.LabPyPI, "allow "+testenv.LabNPM, "allow dns")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider, "--policy", "clients", testenv.ClientsRef)
		d.TrustLab(id)
		for _, name := range testenv.ClientNames {
			for _, c := range []struct{ url, want string }{
				{"http://web.lab.test/" + name, "GET http web.lab.test /" + name + " from "},
				{"https://web.lab.test/" + name, "GET https web.lab.test /" + name + " from "},
				{"http://other.lab.test/", ""},
				{"https://other.lab.test/", ""},
			} {
				r := d.Shard("exec", id, "get-"+name, c.url)
				if ok := r.Code == 0; ok != (c.want != "") || !strings.Contains(r.Stdout, c.want) {
					t.Errorf("get-%s %s: exit code %d\n%s%s", name, c.url, r.Code, r.Stdout, r.Stderr)
				}
				if name == "curl" && c.url == "http://other.lab.test/" && !strings.Contains(r.Stdout, `"host":"other.lab.test"`) {
					t.Errorf("the refusal does not say what of: %q", r.Stdout)
				}
			}
		}
		for _, c := range []struct{ what, script, want string }{
			{"git", `cd /root; git clone -q https://` + testenv.LabGit + `/project.git; cd project; cat README
				echo more >>README; git -c user.name=a -c user.email=a@lab.test commit -q -a -m ` + provider + `; git push -q origin HEAD:` + provider + `
				git ls-remote --heads origin ` + provider + ` | cut -f2`, "hello\nrefs/heads/" + provider},
			{"pip", `pip install -q --disable-pip-version-check --no-cache-dir --root-user-action=ignore --target /root/pip --index-url https://` + testenv.LabPyPI + `/simple/ labpackage
				PYTHONPATH=/root/pip python3 -c 'import labpackage; print(labpackage.answer)'`, "42"},
			{"npm", `mkdir -p /root/npm; cd /root/npm; npm install --silent --no-audit --no-fund --no-update-notifier --cafile /etc/ssl/certs/ca-certificates.crt --registry https://` + testenv.LabNPM + `/ lab-package
				node -p 'require("lab-package")'`, "42"},
		} {
			if got := sh(t, d, id, "set -e; "+c.script); !strings.HasSuffix(got, c.want) {
				t.Errorf("%s: %q, want %q", c.what, got, c.want)
			}
		}
	})
}

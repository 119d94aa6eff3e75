package cli_test

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// TestSetupWithoutATerminal: everything that is missing is named at once, and what does not go together is refused.
func TestSetupWithoutATerminal(t *testing.T) {
	for args, want := range map[string]string{
		"":                          "give --local or --remote URL and --yes",
		"--local":                   "give --yes",
		"--yes":                     "give --local or --remote URL",
		"--uninstall":               "give --yes",
		"--local --remote http://x": "do not go together",
		"--local --save --yes":      "--save is for --remote",
		"--remote http://x --listen 127.0.0.1:1 --yes":                    "--remote goes with",
		"--local --yes --http-api maybe":                                  "write true or false",
		"--local --yes --listen 127.0.0.1:1":                              "are for --http-api true",
		"--local --yes --http-api true --listen x":                        "is not HOST:PORT",
		"--local --yes --http-api true --listen a%b:1":                    "is not HOST:PORT",
		"--local --yes --preview-domain localhost":                        "are for --http-api true",
		"--local --yes --http-api true --preview-domain 127.0.0.1":        "below which there are no names",
		"--local --yes --http-api true --preview-domain a_b.test":         "write it in ASCII",
		"--local --yes --http-api true --preview-domain https://a.test/x": "is not the origin of preview addresses",
		"--local --yes --http-api true --preview-domain com":              "others register names in",
		"--local --yes --http-api true --preview-domain https://Co.Uk":    "others register names in",
		"--local --yes --http-api true --tls-cert /etc/x":                 "go together",
		"--local --yes --http-api true --tls-cert x --tls-key y":          "needs a path from / on",
		"--local --yes --http-api true --tls-cert /x --tls-key /a%b":      "needs a path from / on",
		"--remote http://x --preview-domain localhost --yes":              "--remote goes with",
		"--local --yes --provider docker":                                 "choose gvisor or runc",
		"--local --yes --storage-size 1GiB":                               "this version has none",
		"--remote ftp://x --yes":                                          "must be the URL of shard serve",
		"--remote https://x --yes":                                        "set SHARD_API_KEY",
	} {
		r := newPlace(t).run(append([]string{"setup"}, strings.Fields(args)...)...)
		if r.code != 1 || !strings.Contains(r.errs, want) {
			t.Errorf("setup %s: %d %q, want %q", args, r.code, r.errs, want)
		}
	}
}

func TestSetupRemote(t *testing.T) {
	const key = "secret-key"
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Header.Get("Authorization") != "Bearer "+key:
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = w.Write([]byte(`{"error":{"code":"unauthorized","message":"the API key is not valid"}}`))
		case r.URL.Path == "/v0/version":
			_, _ = w.Write([]byte(`{"version":"9.9","api_version":"v0"}`))
		default:
			_, _ = w.Write([]byte(`{"create":true,"start":true,"stop":true,"remove":true,"pause":false,"resume":false,"fork":true,"snapshot":false,"port":false,"swap":false}`))
		}
	}))
	defer s.Close()
	p := newPlace(t)
	p.vars["SHARD_API_KEY"] = "another"
	if r := p.run("setup", "--remote", s.URL, "--save", "--yes"); r.code != 1 || !strings.Contains(r.errs, "the API key is not valid") {
		t.Errorf("a wrong key: %+v", r)
	}
	file := filepath.Join(p.vars["HOME"], ".config", "shard", "config.json")
	if _, err := os.Stat(file); err == nil {
		t.Error("a connection that does not work was saved")
	}
	p.vars["SHARD_API_KEY"] = key
	r := p.run("setup", "--remote", s.URL, "--save", "--yes")
	if r.code != 0 || !strings.Contains(r.out, "version 9.9; its default provider can create, start, stop, remove, fork") || strings.Contains(r.out+r.errs, key) {
		t.Errorf("%+v", r)
	}
	for path, mode := range map[string]os.FileMode{file: 0o600, filepath.Dir(file): 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != mode {
			t.Errorf("%s: %v %v", path, info, err)
		}
	}
	// The saved connection is used, and a second run keeps its key.
	delete(p.vars, "SHARD_API_KEY")
	if r := p.run("capabilities"); r.code != 0 || !strings.Contains(r.out, "fork") {
		t.Errorf("%+v", r)
	}
	if r := p.run("setup", "--remote", s.URL, "--yes"); r.code != 0 {
		t.Errorf("%+v", r)
	}
}

// TestDoctor: what it finds depends on the host, but it says it in both forms, and a daemon that is not there is no failure.
func TestDoctor(t *testing.T) {
	p := newPlace(t)
	p.vars["SHARD_REMOTE"] = "http://127.0.0.1:1" // it speaks of this host all the same
	for _, format := range []string{"table", "json"} {
		r := p.run("--root", t.TempDir(), "doctor", "--format", format)
		if !strings.Contains(r.out, "is not running") || strings.Contains(r.errs, "daemon") || r.code != 0 && !strings.Contains(r.errs, "not ready") {
			t.Errorf("%+v", r)
		}
	}
}

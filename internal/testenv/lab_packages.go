package testenv

import (
	"archive/tar"
	"archive/zip"
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"strings"
)

// The hosts of ServePackages.
const (
	LabGit  = "git.lab.test"  // https://git.lab.test/project.git, one commit with the file README; pushes are taken
	LabPyPI = "pypi.lab.test" // https://pypi.lab.test/simple/, with labpackage 1.0, whose module says `answer = 42`
	LabNPM  = "npm.lab.test"  // https://npm.lab.test/, with lab-package 1.0.0, whose module is the number 42
)

// ServePackages adds what package managers talk to, over HTTP and HTTPS, at LabWebAddr.
func (l *Lab) ServePackages() {
	l.t.Helper()
	for _, name := range []string{LabGit, LabPyPI, LabNPM} {
		l.Name(name, LabWebAddr)
	}
	l.serveGit()
	l.servePyPI()
	l.serveNPM()
}

// serveGit is the smart protocol, by git itself.
func (l *Lab) serveGit() {
	l.t.Helper()
	dir := l.t.TempDir()
	cmd := exec.CommandContext(l.t.Context(), "sh", "-ec", `git init -q -b main work; cd work; echo hello >README; git add README
		git -c user.name=lab -c user.email=lab@lab.test commit -q -m first; cd ..; git clone -q --bare work project.git
		git -C project.git config http.receivepack true; git --exec-path`)
	cmd.Dir = dir
	cmd.Env = append(cmd.Environ(), "HOME="+dir, "GIT_CONFIG_NOSYSTEM=1")
	out, err := cmd.Output()
	if err != nil {
		l.t.Fatalf("make a git repository: %v", err)
	}
	l.web.mux.Handle(LabGit+"/", &cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(out)), "git-http-backend"), Dir: dir, Stderr: io.Discard,
		Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1"},
	})
}

// servePyPI is a simple index (PEP 503) with one wheel.
func (l *Lab) servePyPI() {
	l.t.Helper()
	const info = "labpackage-1.0.dist-info/"
	var wheel bytes.Buffer
	z := zip.NewWriter(&wheel)
	var record strings.Builder
	for _, f := range [][2]string{
		{"labpackage.py", "answer = 42\n"},
		{info + "METADATA", "Metadata-Version: 2.1\nName: labpackage\nVersion: 1.0\n"},
		{info + "WHEEL", "Wheel-Version: 1.0\nGenerator: lab\nRoot-Is-Purelib: true\nTag: py3-none-any\n"},
		{info + "RECORD", ""},
	} {
		name, body := f[0], f[1]
		if body == "" {
			body = record.String() + name + ",,\n"
		}
		digest := sha256.Sum256([]byte(body))
		_, _ = fmt.Fprintf(&record, "%s,sha256=%s,%d\n", name, base64.RawURLEncoding.EncodeToString(digest[:]), len(body))
		w, err := z.Create(name)
		if err == nil {
			_, err = io.WriteString(w, body)
		}
		if err != nil {
			l.t.Fatal(err)
		}
	}
	if err := z.Close(); err != nil {
		l.t.Fatal(err)
	}
	const file = "labpackage-1.0-py3-none-any.whl"
	l.web.mux.HandleFunc(LabPyPI+"/simple/labpackage/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, "<!DOCTYPE html><html><body><a href=\"/files/%s#sha256=%x\">%s</a></body></html>", file, sha256.Sum256(wheel.Bytes()), file)
	})
	l.web.mux.HandleFunc(LabPyPI+"/files/"+file, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(wheel.Bytes()) })
	l.web.mux.Handle(LabPyPI+"/", http.NotFoundHandler())
}

// serveNPM is a registry with one package.
func (l *Lab) serveNPM() {
	l.t.Helper()
	var tgz bytes.Buffer
	z := gzip.NewWriter(&tgz)
	w := tar.NewWriter(z)
	for _, f := range [][2]string{
		{"package/package.json", `{"name":"lab-package","version":"1.0.0","main":"index.js"}`}, {"package/index.js", "module.exports = 42;\n"},
	} {
		if err := w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(f[1])), Typeflag: tar.TypeReg}); err != nil {
			l.t.Fatal(err)
		}
		if _, err := io.WriteString(w, f[1]); err != nil {
			l.t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		l.t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		l.t.Fatal(err)
	}
	digest := sha512.Sum512(tgz.Bytes())
	l.web.mux.HandleFunc(LabNPM+"/lab-package", func(w http.ResponseWriter, r *http.Request) {
		scheme := "http"
		if r.TLS != nil {
			scheme = "https"
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{
			"name": "lab-package", "dist-tags": map[string]string{"latest": "1.0.0"},
			"versions": map[string]any{"1.0.0": map[string]any{"name": "lab-package", "version": "1.0.0", "main": "index.js",
				"dist": map[string]string{"tarball": scheme + "://" + r.Host + "/lab-package/-/lab-package-1.0.0.tgz",
					"integrity": "sha512-" + base64.StdEncoding.EncodeToString(digest[:])}}},
		})
	})
	l.web.mux.HandleFunc(LabNPM+"/lab-package/-/", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(tgz.Bytes()) })
	l.web.mux.Handle(LabNPM+"/", http.NotFoundHandler())
}

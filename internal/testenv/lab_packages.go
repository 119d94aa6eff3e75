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
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/cgi"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"time"
)

// The hosts of ServePackages.
const (
	LabGit  = "git.lab.test"  // https://git.lab.test/project.git, one commit with the file README; pushes are taken; /private/project.git for any login
	LabPyPI = "pypi.lab.test" // https://pypi.lab.test/simple/, with labpackage 1.0, whose module says `answer = 42`
	LabNPM  = "npm.lab.test"  // https://npm.lab.test/, with lab-package 1.0.0, whose module is the number 42

	LabCargo = "cargo.lab.test" // sparse+https://cargo.lab.test/index/, for any token, with lab-package 1.0.0, whose ANSWER is 42
	LabAPT   = "apt.lab.test"   // https://apt.lab.test lab main, unsigned, with lab-package 1.0, which cannot be installed
)

// ServePackages adds what package managers talk to, over HTTP and HTTPS, at LabWebAddr. Each host has a twin, other-HOST.
func (l *Lab) ServePackages() {
	l.t.Helper()
	for host, serve := range map[string]func() http.Handler{LabGit: l.gitHost, LabPyPI: l.pypiHost, LabNPM: l.npmHost, LabCargo: l.cargoHost, LabAPT: l.aptHost} {
		packages := serve()
		for _, host := range []string{host, "other-" + host} {
			l.Name(host, LabWebAddr)
			l.web.mux.HandleFunc(host+"/", func(w http.ResponseWriter, r *http.Request) {
				if login := r.Header.Get("Authorization"); login != "" {
					l.mu.Lock()
					l.logins[host] = append(l.logins[host], login)
					l.mu.Unlock()
				}
				packages.ServeHTTP(w, r)
			})
		}
	}
}

// Logins are the Authorization headers that a host of ServePackages got since the last call, each once.
func (l *Lab) Logins(host string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	all := l.logins[host]
	delete(l.logins, host)
	slices.Sort(all)
	return slices.Compact(all)
}

// gitHost is the smart protocol, by git itself.
func (l *Lab) gitHost() http.Handler {
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
	public := &cgi.Handler{
		Path: filepath.Join(strings.TrimSpace(string(out)), "git-http-backend"), Dir: dir, Stderr: io.Discard,
		Env: []string{"GIT_PROJECT_ROOT=" + dir, "GIT_HTTP_EXPORT_ALL=1", "HOME=" + dir, "GIT_CONFIG_NOSYSTEM=1"},
	}
	mux := http.NewServeMux()
	mux.Handle("/", public)
	mux.HandleFunc("/private/", func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" {
			w.Header().Set("WWW-Authenticate", "Basic") // else git does not log in
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		http.StripPrefix("/private", public).ServeHTTP(w, r)
	})
	return mux
}

// pypiHost is a simple index (PEP 503) with one wheel.
func (l *Lab) pypiHost() http.Handler {
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
	mux := http.NewServeMux()
	mux.HandleFunc("/simple/labpackage/", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		_, _ = fmt.Fprintf(w, "<!DOCTYPE html><html><body><a href=\"/files/%s#sha256=%x\">%s</a></body></html>", file, sha256.Sum256(wheel.Bytes()), file)
	})
	mux.HandleFunc("/files/"+file, func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(wheel.Bytes()) })
	return mux
}

// tgz is a compressed archive of files, as name and content.
func (l *Lab) tgz(files ...[2]string) []byte {
	l.t.Helper()
	var out bytes.Buffer
	z := gzip.NewWriter(&out)
	w := tar.NewWriter(z)
	for _, f := range files {
		if err := w.WriteHeader(&tar.Header{Name: f[0], Mode: 0o644, Size: int64(len(f[1])), Typeflag: tar.TypeReg}); err != nil {
			l.t.Fatal(err)
		}
		if _, err := io.WriteString(w, f[1]); err != nil {
			l.t.Fatal(err)
		}
	}
	if err := errors.Join(w.Close(), z.Close()); err != nil {
		l.t.Fatal(err)
	}
	return out.Bytes()
}

// npmHost is a registry with one package.
func (l *Lab) npmHost() http.Handler {
	l.t.Helper()
	tgz := l.tgz([2]string{"package/package.json", `{"name":"lab-package","version":"1.0.0","main":"index.js"}`}, [2]string{"package/index.js", "module.exports = 42;\n"})
	digest := sha512.Sum512(tgz)
	mux := http.NewServeMux()
	mux.HandleFunc("/lab-package", func(w http.ResponseWriter, r *http.Request) {
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
	mux.HandleFunc("/lab-package/-/", func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(tgz) })
	return mux
}

// cargoHost is a sparse index and its downloads.
func (l *Lab) cargoHost() http.Handler {
	l.t.Helper()
	crate := l.tgz([2]string{"lab-package-1.0.0/Cargo.toml", "[package]\nname = \"lab-package\"\nversion = \"1.0.0\"\nedition = \"2021\"\n"},
		[2]string{"lab-package-1.0.0/src/lib.rs", "pub const ANSWER: i32 = 42;\n"})
	files := map[string]string{
		"/index/la/b-/lab-package":       fmt.Sprintf(`{"name":"lab-package","vers":"1.0.0","deps":[],"cksum":"%x","features":{},"yanked":false}`+"\n", sha256.Sum256(crate)),
		"/dl/lab-package/1.0.0/download": string(crate),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") == "" {
			w.Header().Set("WWW-Authenticate", "Cargo") // else cargo sends its token nowhere
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		if r.URL.Path == "/index/config.json" {
			_, _ = io.WriteString(w, `{"dl":"https://`+r.Host+`/dl","auth-required":true}`)
			return
		}
		serveFile(w, r, files)
	})
}

// aptHost is a repository with one package.
func (l *Lab) aptHost() http.Handler {
	const deb = "nobody who only downloads it looks into it\n"
	packages := fmt.Sprintf("Package: lab-package\nVersion: 1.0\nArchitecture: all\nMaintainer: lab <lab@lab.test>\nDescription: a package\n"+
		"Filename: pool/lab-package.deb\nSize: %d\nSHA256: %x\n", len(deb), sha256.Sum256([]byte(deb)))
	index := "main/binary-" + runtime.GOARCH + "/Packages"
	files := map[string]string{
		"/dists/lab/" + index: packages, "/pool/lab-package.deb": deb,
		"/dists/lab/Release": fmt.Sprintf("Suite: lab\nComponents: main\nArchitectures: %s\nDate: %s\nSHA256:\n %x %d %s\n", runtime.GOARCH,
			time.Now().UTC().Format(time.RFC1123), sha256.Sum256([]byte(packages)), len(packages), index),
	}
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) { serveFile(w, r, files) })
}

func serveFile(w http.ResponseWriter, r *http.Request, files map[string]string) {
	content, ok := files[r.URL.Path]
	if !ok {
		http.NotFound(w, r)
		return
	}
	_, _ = io.WriteString(w, content)
}

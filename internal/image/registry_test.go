package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/useshards/shard"
)

// dockerConfig makes the Docker configuration of the test.
func dockerConfig(t *testing.T, config string) string {
	t.Helper()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "config.json"), []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	t.Setenv("DOCKER_CONFIG", dir)
	t.Setenv("HOME", dir)
	return dir
}

func basicOnly(user, password string) func(w http.ResponseWriter, r *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if u, p, ok := r.BasicAuth(); ok && u == user && p == password {
			return false
		}
		w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
		w.WriteHeader(http.StatusUnauthorized)
		return true
	}
}

func TestCredentials(t *testing.T) {
	r := newRegistry(t)
	ref := r.push(t, "private/app", "1", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "f"})))
	const secret = "s3cr3t-passw0rd"
	r.misbehave(basicOnly("ann", secret))

	refused := func(t *testing.T) {
		t.Helper()
		_, err := newStore(t, r).Pull(context.Background(), ref, nil)
		wantCode(t, err, shard.CodeNotFound, r.host, "refused access to private/app", "docker login "+r.host)
		if strings.Contains(err.Error(), secret) {
			t.Error("the password is in the error")
		}
	}
	t.Run("none", func(t *testing.T) {
		dockerConfig(t, `{}`)
		refused(t)
	})
	t.Run("wrong", func(t *testing.T) {
		dockerConfig(t, fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, base64.StdEncoding.EncodeToString([]byte("ann:"+secret+"x"))))
		refused(t)
	})
	t.Run("file", func(t *testing.T) {
		dockerConfig(t, fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, base64.StdEncoding.EncodeToString([]byte("ann:"+secret))))
		pull(t, newStore(t, r), ref)
	})
	t.Run("helper", func(t *testing.T) {
		dir := dockerConfig(t, fmt.Sprintf(`{"credHelpers":{%q:"shardtest"}}`, r.host))
		script := fmt.Sprintf("#!/bin/sh\n[ \"$1\" = get ] && cat >/dev/null && printf '{\"ServerURL\":\"x\",\"Username\":\"ann\",\"Secret\":\"%s\"}'\n", secret)
		if err := os.WriteFile(filepath.Join(dir, "docker-credential-shardtest"), []byte(script), 0o755); err != nil {
			t.Fatal(err)
		}
		t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
		pull(t, newStore(t, r), ref)
	})
	t.Run("helper missing", func(t *testing.T) {
		dockerConfig(t, fmt.Sprintf(`{"credHelpers":{%q:"nosuchhelper"}}`, r.host))
		_, err := newStore(t, r).Pull(context.Background(), ref, nil)
		wantCode(t, err, shard.CodeInternal, r.host, "credential helper")
	})
	t.Run("token", func(t *testing.T) {
		dockerConfig(t, fmt.Sprintf(`{"auths":{%q:{"auth":%q}}}`, r.host, base64.StdEncoding.EncodeToString([]byte("ann:"+secret))))
		r.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if req.URL.Path == "/token" {
				if u, p, _ := req.BasicAuth(); u != "ann" || p != secret || req.URL.Query().Get("scope") != "repository:private/app:pull" {
					w.WriteHeader(http.StatusUnauthorized)
					return true
				}
				_ = json.NewEncoder(w).Encode(map[string]string{"token": "tok"})
				return true
			}
			if req.Header.Get("Authorization") == "Bearer tok" {
				return false
			}
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test",scope="repository:private/app:pull"`, r.host))
			w.WriteHeader(http.StatusUnauthorized)
			return true
		})
		pull(t, newStore(t, r), ref)
	})
}

// Under systemd there is no HOME, and credentials are found by it.
func TestHome(t *testing.T) {
	t.Setenv("HOME", "")
	newStore(t, nil)
	if os.Getenv("HOME") == "" {
		t.Error("no HOME")
	}
}

func TestRegistryFailures(t *testing.T) {
	dockerConfig(t, `{}`)
	s := newStore(t, nil)
	plain := newRegistry(t)
	_, err := s.Pull(context.Background(), plain.push(t, "a", "1", makeImage(t, runtime.GOARCH, v1.Config{})), nil)
	wantCode(t, err, shard.CodeInternal, "--insecure-registry "+plain.host)

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed := l.Addr().String()
	l.Close()
	_, err = openStore(t, t.TempDir(), Options{Insecure: []string{closed}}).Pull(context.Background(), closed+"/a", nil)
	wantCode(t, err, shard.CodeInternal, "could not reach registry "+closed, "connection refused")
	_, err = s.Pull(context.Background(), "nosuch.invalid/a", nil)
	wantCode(t, err, shard.CodeInternal, "could not reach registry nosuch.invalid", "host name")

	secure := httptest.NewUnstartedServer(plain)
	secure.Config.ErrorLog = log.New(io.Discard, "", 0)
	secure.StartTLS()
	defer secure.Close()
	host := strings.TrimPrefix(secure.URL, "https://")
	_, err = s.Pull(context.Background(), host+"/a:1", nil)
	wantCode(t, err, shard.CodeInternal, "certificate", host)
	pull(t, openStore(t, t.TempDir(), Options{Insecure: []string{"127.0.0.1"}}), host+"/a:1")

	down := newRegistry(t)
	for status, words := range map[int]string{http.StatusTooManyRequests: "allows no more pulls", http.StatusServiceUnavailable: "answered 503", http.StatusForbidden: "docker login"} {
		down.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if req.URL.Path == "/v2/" {
				return false
			}
			http.Error(w, "internal detail", status)
			return true
		})
		_, err = newStore(t, down).Pull(context.Background(), down.host+"/a", nil)
		if text := publicText(err); !strings.Contains(text, words) || strings.Contains(text, "detail") {
			t.Errorf("%d: %s", status, text)
		}
	}

	// A secure blob must not come over a redirect to plain HTTP, nor from a metadata service; signatures stay private.
	target := newRegistry(t)
	for _, to := range []string{target.URL + "/x?sig=SIGNATURE", "http://169.254.169.254/latest?sig=SIGNATURE"} {
		plain.misbehave(func(w http.ResponseWriter, req *http.Request) bool {
			if !strings.Contains(req.URL.Path, "/blobs/") {
				return false
			}
			http.Redirect(w, req, to, http.StatusTemporaryRedirect)
			return true
		})
		_, err = newStore(t, plain).Pull(context.Background(), plain.host+"/a:1", nil)
		if err == nil || strings.Contains(err.Error(), "SIGNATURE") || strings.Contains(publicText(err), to) {
			t.Errorf("redirect to %s: %v", to, err)
		}
	}
}

// The proxy of the environment carries the traffic. It is read once per process, hence a process for it.
func TestProxy(t *testing.T) {
	if os.Getenv("SHARD_TEST_PROXY") != "" {
		dockerConfig(t, `{}`)
		s := openStore(t, t.TempDir(), Options{Insecure: []string{"registry.test"}})
		pull(t, s, "registry.test/app:1")
		return
	}
	r := newRegistry(t)
	r.push(t, "app", "1", makeImage(t, runtime.GOARCH, v1.Config{}, plainLayer(t, e{name: "f"})))
	proxied := 0
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if req.Method == http.MethodConnect || req.URL.Host != "registry.test" {
			http.Error(w, "no", http.StatusBadGateway)
			return
		}
		proxied++
		r.ServeHTTP(w, req)
	}))
	defer proxy.Close()
	cmd := exec.Command(os.Args[0], "-test.run=^TestProxy$", "-test.v")
	cmd.Env = append(os.Environ(), "SHARD_TEST_PROXY=1", "HTTP_PROXY="+proxy.URL, "HTTPS_PROXY="+proxy.URL, "NO_PROXY=")
	if out, err := cmd.CombinedOutput(); err != nil || proxied == 0 {
		t.Errorf("%v, %d requests through the proxy:\n%s", err, proxied, out)
	}
}

func TestParseReference(t *testing.T) {
	d := digestOf(nil)
	for in, want := range map[string]string{
		"alpine":                      "index.docker.io/library/alpine:latest",
		"python:3.12-slim":            "index.docker.io/library/python:3.12-slim",
		"docker.io/library/alpine":    "index.docker.io/library/alpine:latest",
		"a/b":                         "index.docker.io/a/b:latest",
		"ghcr.io/o/r:v1":              "ghcr.io/o/r:v1",
		"localhost:5000/x":            "localhost:5000/x:latest",
		"[::1]:5000/x:y":              "[::1]:5000/x:y",
		"alpine@" + d:                 "index.docker.io/library/alpine@" + d,
		"alpine:3@" + d:               "index.docker.io/library/alpine@" + d,
		"r.test/a__b/c-d.e/f--g:T_1.": "r.test/a__b/c-d.e/f--g:T_1.",
	} {
		got, err := ParseReference(in)
		if err != nil || got != want {
			t.Errorf("%s: %s %v, want %s", in, got, err, want)
		}
		if again, err := ParseReference(got); err != nil || again != got {
			t.Errorf("%s is not stable: %s %v", got, again, err)
		}
	}
	for in, hint := range map[string]string{"": "name:tag", "https://x/y": "scheme", "Alpine": "lower case", "a b": "name:tag", " a": "name:tag", "a@sha256:12": "64 hex",
		"a:": "", "a/../b": "", "../a": "", "a//b": "", "/a": "", "a:b:c": "", "a@" + d + "x": "", "x.test/": "", "a\x00b": "", "é": "", "h.test:99999999/a": "",
		strings.Repeat("a", 600): "", "a:" + strings.Repeat("t", 129): "", "a@md5:d41d8cd98f00b204e9800998ecf8427e": "sha256"} {
		got, err := ParseReference(in)
		if shard.CodeOf(err) != shard.CodeInvalidRequest || !strings.Contains(err.Error(), hint) {
			t.Errorf("%q: %s %v", in, got, err)
		}
	}
}

func FuzzParseReference(f *testing.F) {
	for _, s := range []string{"alpine", "a/b:c", "[::1]:5/x", "x@" + digestOf(nil), "a:b@c", "..", "A", "a/../../b", "%2e%2e/x"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, in string) {
		full, err := ParseReference(in)
		if err != nil {
			if shard.CodeOf(err) != shard.CodeInvalidRequest {
				t.Fatal(err)
			}
			return
		}
		if again, err := ParseReference(full); err != nil || again != full {
			t.Fatalf("%q → %q → %q, %v", in, full, again, err)
		}
		file := fileName(full)
		if strings.ContainsAny(file, "/\x00") || len(file) > 255 || strings.HasPrefix(file, ".") {
			t.Fatalf("%q has the file name %q", full, file)
		}
		if back, ok := refOfFile(file); ok && back != full {
			t.Fatalf("file %q reads back as %q", file, back)
		}
	})
}

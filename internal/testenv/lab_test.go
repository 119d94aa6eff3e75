package testenv

import (
	"context"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestLab walks through the lab as a daemon in its host sees it, twice at the same time.
func TestLab(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	for _, name := range []string{"one", "two"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			walk(t)
		})
	}
}

func walk(t *testing.T) {
	l := NewLab(t)
	shell := func(script string) string {
		t.Helper()
		out, err := l.Command("sh", "-c", script).CombinedOutput()
		if err != nil {
			t.Fatalf("%s: %v\n%s", script, err, out)
		}
		return strings.TrimSpace(string(out))
	}
	own, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		t.Fatal(err)
	}
	if there := shell("readlink /proc/self/ns/net"); there == own {
		t.Fatal("the command ran in this machine's own network")
	}
	if mounts := shell("readlink /proc/self/ns/mnt"); mounts == "" || mounts != mustReadlink(t, "/proc/self/ns/mnt") {
		t.Error("the command does not share this machine's mounts")
	}

	// Names resolve for a program that knows nothing of the lab.
	if got := shell("getent ahostsv4 web.lab.test | awk '{print $1; exit}'"); got != LabWebAddr {
		t.Errorf("web.lab.test is %q in the host, want %s", got, LabWebAddr)
	}
	if got := shell("getent ahostsv4 nowhere.lab.test || echo none"); got != "none" {
		t.Errorf("nowhere.lab.test is %q", got)
	}
	l.Name("shop.lab.test", LabWebAddr)
	for _, url := range []string{"http://web.lab.test/x", "https://web.lab.test/x", "https://shop.lab.test/x"} {
		resp, err := l.Client().Get(url)
		if err != nil {
			t.Fatal(err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		scheme, rest, _ := strings.Cut(url, "://")
		host, _, _ := strings.Cut(rest, "/")
		if want := "GET " + scheme + " " + host + " /x from " + LabHostAddr + "\n"; err != nil || string(body) != want {
			t.Errorf("%s says %q, %v; want %q", url, body, err, want)
		}
	}

	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	for _, network := range []string{"tcp", "udp"} {
		c, err := l.DialFromHost(ctx, network, "echo.lab.test:7")
		if err != nil {
			t.Fatal(err)
		}
		back := make([]byte, 4)
		_ = c.SetDeadline(time.Now().Add(30 * time.Second))
		if _, err := io.WriteString(c, "ping"); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(c, back); err != nil || string(back) != "ping" {
			t.Errorf("%s echo: %q, %v", network, back, err)
		}
		_ = c.Close()
	}

	image := Image(t, v1.Config{}, Layer(t, Entry{Name: "hello", Body: "world"}))
	ref := l.Push("some/image:tag", image)
	if want := l.Registry() + "/some/image:tag"; ref != want {
		t.Errorf("pushed as %s, want %s", ref, want)
	}
	digest, err := image.Digest()
	if err != nil {
		t.Fatal(err)
	}
	resp, err := l.Client().Get("http://" + l.Registry() + "/v2/some/image/manifests/tag")
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if got := resp.Header.Get("Docker-Content-Digest"); got != digest.String() {
		t.Errorf("the registry has %s, want %s", got, digest)
	}

	for _, c := range []*Canary{
		l.CanaryInWorld("10.1.2.3:8080"), l.CanaryInWorld("169.254.169.254:80"), l.CanaryInWorld("198.19.5.5:443"),
		l.CanaryOnHost("192.168.1.1:22"), l.CanaryOnHost("127.0.0.1:9999"), l.CanaryOnHost(net.JoinHostPort(LabHostAddr, "0")),
	} {
		c.Control()
		if hits := c.Hits(); len(hits) != 0 {
			t.Errorf("%s has hits: %v", c.Addr, hits)
		}
		if err := l.ask("tcp", c.Addr); err != nil || len(c.Hits()) != 1 {
			t.Errorf("%s: %v, hits %v", c.Addr, err, c.Hits())
		}
	}

	// No way out: the host has one route, to the world, which has none but back.
	if routes := shell("ip -4 route show default"); strings.Count(routes, "\n") != 0 || !strings.Contains(routes, labGateway) {
		t.Errorf("default routes of the host: %q", routes)
	}
	if links := shell("ip -o link show | wc -l"); links != "2" {
		t.Errorf("the host has %s links, want lo and eth0", links)
	}
	if questions := l.Questions(); len(questions) == 0 {
		t.Error("DNS noted no question")
	}
}

func mustReadlink(t *testing.T, path string) string {
	t.Helper()
	s, err := os.Readlink(path)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestLabLeavesNothing: descriptors and links are back where they were when a lab has ended.
func TestLabLeavesNothing(t *testing.T) {
	count := func() (n int) {
		for _, pattern := range []string{"/proc/self/fd/*", "/sys/class/net/*"} {
			found, _ := filepath.Glob(pattern)
			n += len(found)
		}
		return n
	}
	t.Run("warm", func(t *testing.T) { NewLab(t) })
	before := count()
	for range 3 {
		t.Run("lab", func(t *testing.T) { NewLab(t).CanaryInWorld("10.1.2.3:80").Control() })
	}
	for deadline := time.Now().Add(20 * time.Second); count() > before; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors and links, %d before", count(), before)
		}
	}
}

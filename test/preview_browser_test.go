package test

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard/internal/testenv"
)

// TestPreviewBrowser: a browser uses a development server (Vite, with its hot reload) and a WebSocket in a sandbox as if both
// ran beside it: at *.localhost without TLS, and at a domain with it. SHARD_SCREENSHOT=FILE keeps a picture of the page.
func TestPreviewBrowser(t *testing.T) {
	t.Parallel()
	program := chromium(t)
	layer := viteLayer(t)
	d := testenv.Start(t, testenv.Options{})
	img := testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(testenv.BusyboxEntries(t), webserverEntry(t))...), testenv.Layer(t, layer...))
	d.Import(image, img)
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		id := box(t, d, provider)
		d.Must("run", id, "--name", "echo", "webserver", "127.0.0.1:8000")
		d.Must("run", id, "--name", "vite", "--workdir", "/app", "node", "node_modules/vite/bin/vite.js", "--host", "127.0.0.1")
		for _, args := range [][]string{{"--preview-domain", "localhost"}, {"--preview-domain", "preview.test", "--tls-self-signed"}} {
			t.Run(args[1], func(t *testing.T) {
				g := serveGate(t, d, args...)
				sh(t, d, id, `echo "export const message = 'loaded'" >/app/src/message.js`)
				p := openPage(t, program)
				link := d.Must("port", "url", id, "5173")
				testenv.Eventually(t, "the page loads", func() (bool, string) {
					p.do("Page.navigate", map[string]any{"url": link}, nil)
					text := ""
					for range 20 {
						if text = p.text(); strings.Contains(text, "Module loaded") && strings.Contains(text, "echo: hello through shard") {
							return true, ""
						}
						time.Sleep(250 * time.Millisecond)
					}
					return false, text + d.Shard("logs", id, "vite").Stdout
				})
				if text := p.text(); !strings.Contains(text, fmt.Sprintf("Address 5173-%s.%s:%s", id, args[1], g.port)) || p.eval("location.search") != "" || p.eval("document.cookie") != "" {
					t.Errorf("%s, %s, %s", text, p.eval("location.href"), p.eval("document.cookie"))
				}
				p.eval("window.same = 'page'")
				testenv.Eventually(t, "the change arrives", func() (bool, string) {
					// Vite watches the file from some time on.
					sh(t, d, id, `echo "export const message = 'changed'" >/app/src/message.js`)
					text := p.text()
					return strings.Contains(text, "Module changed") && strings.Contains(text, "Hot reload updated"), text
				})
				if p.eval("window.same") != "page" {
					t.Error("the page was loaded anew: hot reload does not work")
				}
				if file := os.Getenv("SHARD_SCREENSHOT"); file != "" {
					var shot struct{ Data string }
					p.do("Page.captureScreenshot", map[string]any{"format": "png"}, &shot)
					png, err := base64.StdEncoding.DecodeString(shot.Data)
					if err != nil || os.WriteFile(file, png, 0o600) != nil {
						t.Errorf("no picture: %v", err)
					}
				}
			})
		}
	}, "gvisor")
}

// chromium is the path of a browser without a window.
func chromium(t *testing.T) string {
	t.Helper()
	for _, name := range []string{"chromium-headless-shell", "chromium", "google-chrome"} {
		if at, err := exec.LookPath(name); err == nil {
			return at
		}
	}
	t.Skip("there is no Chromium: make deps BROWSER=1")
	return ""
}

// viteLayer is Node from this machine, with the libraries it needs, and the page in testdata with Vite from the registry.
func viteLayer(t *testing.T) []testenv.Entry {
	t.Helper()
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("there is no Node: install nodejs and npm")
	}
	project := filepath.Join(testenv.Module(), "test/testdata/vite")
	cache, done := testenv.Workshop(t, "vite")
	defer done()
	lock, err := os.ReadFile(filepath.Join(project, "package-lock.json"))
	if err != nil {
		t.Fatal(err)
	}
	if have, _ := os.ReadFile(filepath.Join(cache, "installed")); string(have) != string(lock) {
		for _, name := range []string{"package.json", "package-lock.json"} {
			data, err := os.ReadFile(filepath.Join(project, name))
			if err == nil {
				err = os.WriteFile(filepath.Join(cache, name), data, 0o600)
			}
			if err != nil {
				t.Fatal(err)
			}
		}
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		npm := exec.CommandContext(ctx, "npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund")
		npm.Dir = cache
		if out, err := npm.CombinedOutput(); err != nil {
			t.Skipf("npm does not get Vite here: %v\n%s", err, out)
		}
		if err := os.WriteFile(filepath.Join(cache, "installed"), lock, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(path, name string) testenv.Entry {
		info, err := os.Stat(path)
		if err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return testenv.Entry{Name: name, Body: string(data), Mode: int64(info.Mode().Perm())}
	}
	entries := []testenv.Entry{read(node, "usr/bin/node"), {Name: "app/"}}
	native, _ := filepath.Glob(filepath.Join(cache, "node_modules/@rollup/*/*.node"))
	libraries, err := exec.Command("ldd", append(native, node)...).Output()
	if err != nil {
		t.Skipf("the libraries of %s: %v", node, err)
	}
	seen := make(map[string]bool)
	for _, word := range strings.Fields(string(libraries)) {
		if name := strings.TrimPrefix(word, "/"); name != word && !strings.HasSuffix(word, ":") && !seen[name] {
			seen[name] = true
			entries = append(entries, read(word, name))
		}
	}
	for _, from := range []string{project, cache} {
		err := filepath.WalkDir(from, func(path string, e fs.DirEntry, err error) error {
			rel, _ := filepath.Rel(from, path)
			if err != nil || e.IsDir() || !e.Type().IsRegular() || from == cache && !strings.HasPrefix(rel, "node_modules/") {
				return err
			}
			entries = append(entries, read(path, filepath.Join("app", rel)))
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	}
	return entries
}

// tab is a page of a real browser, driven by its debugging protocol.
type tab struct {
	t       *testing.T
	ws      *websocket.Conn
	session string
	last    int
}

// openPage starts the browser, which finds *.localhost by itself and *.preview.test on this machine.
func openPage(t *testing.T, program string) *tab {
	t.Helper()
	cmd := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", "--user-data-dir="+t.TempDir(), "--window-size=760,420",
		"--host-resolver-rules=MAP *.preview.test 127.0.0.1", "--ignore-certificate-errors", "--no-proxy-server", "about:blank")
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	stderr, err := cmd.StderrPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	at, ended := make(chan string, 1), make(chan struct{})
	go func() {
		defer close(ended)
		for lines := bufio.NewScanner(stderr); lines.Scan(); {
			if url, ok := strings.CutPrefix(lines.Text(), "DevTools listening on "); ok {
				at <- url
			}
		}
		_ = cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
		<-ended
	})
	p := &tab{t: t}
	select {
	case url := <-at:
		if p.ws, _, err = websocket.Dial(t.Context(), url, nil); err != nil {
			t.Fatal(err)
		}
	case <-ended:
		t.Skipf("%s does not run here", program)
	case <-time.After(time.Minute):
		t.Fatal("the browser does not start")
	}
	t.Cleanup(func() { _ = p.ws.CloseNow() })
	p.ws.SetReadLimit(64 << 20)
	var target struct{ TargetID string }
	p.do("Target.createTarget", map[string]any{"url": "about:blank"}, &target)
	var attached struct{ SessionID string }
	p.do("Target.attachToTarget", map[string]any{"targetId": target.TargetID, "flatten": true}, &attached)
	p.session = attached.SessionID
	return p
}

// do has the browser carry out a method, and decodes its result.
func (p *tab) do(method string, params, out any) {
	p.t.Helper()
	ctx, cancel := context.WithTimeout(p.t.Context(), time.Minute)
	defer cancel()
	p.last++
	message := map[string]any{"id": p.last, "method": method, "params": params}
	if p.session != "" {
		message["sessionId"] = p.session
	}
	data, err := json.Marshal(message)
	if err == nil {
		err = p.ws.Write(ctx, websocket.MessageText, data)
	}
	for err == nil {
		if _, data, err = p.ws.Read(ctx); err != nil {
			break
		}
		var answer struct {
			ID     int
			Result json.RawMessage
			Error  *struct{ Message string }
		}
		if err = json.Unmarshal(data, &answer); err != nil || answer.ID != p.last {
			continue
		}
		if answer.Error != nil {
			p.t.Fatalf("%s: %s", method, answer.Error.Message)
		}
		if out != nil {
			err = json.Unmarshal(answer.Result, out)
		}
		break
	}
	if err != nil {
		p.t.Fatalf("%s: %v", method, err)
	}
}

// eval is what an expression gives in the page, as text.
func (p *tab) eval(expression string) string {
	p.t.Helper()
	var out struct{ Result struct{ Value any } }
	p.do("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true}, &out)
	if out.Result.Value == nil {
		return ""
	}
	return fmt.Sprint(out.Result.Value)
}

// text is what a person reads on the page.
func (p *tab) text() string { return p.eval("document.body ? document.body.innerText : ''") }

package test

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/useshards/shard/internal/testenv"
)

// TestPreviewServers: on gVisor, the default, development servers as they come, with their own notions of hosts, origins, cookies and tokens, do in a
// browser through a preview what they are for.
func TestPreviewServers(t *testing.T) {
	t.Parallel()
	program := chromium(t)
	type server struct {
		name, port string
		command    []string
		use        func(t *testing.T, d *testenv.Daemon, p *tab, id, link string)
	}
	d := testenv.Start(t, testenv.Options{})
	g := serveGate(t, d, "--preview-domain", "preview.test", "--tls-self-signed")
	for _, c := range []struct {
		runtime string
		ref     string
		archive func(testing.TB) string
		servers []server
	}{
		{"python", testenv.PythonServersRef, testenv.PythonServersArchive, []server{
			{"jupyter", "8888", []string{"-w", "/root", "python3", "-m", "jupyterlab", "--no-browser", "--allow-root", "--IdentityProvider.token=letmein", "--LabApp.expose_app_in_browser=True"}, useJupyter},
			{"streamlit", "8501", []string{"-w", "/root", "python3", "-m", "streamlit", "run", "app.py", "--server.headless", "true", "--browser.gatherUsageStats", "false"}, useStreamlit},
		}},
		{"node", testenv.NextRef, testenv.NextArchive, []server{
			{"next", "3000", []string{"-w", "/app", "-e", "NEXT_TELEMETRY_DISABLED=1", "node", "node_modules/next/dist/bin/next", "dev"}, useNext},
		}},
	} {
		t.Run(c.runtime, func(t *testing.T) {
			archive := c.archive(t)
			d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
				d.Must("image", "import", archive, c.ref)
				for _, s := range c.servers {
					t.Run(s.name, func(t *testing.T) {
						id := box(t, d, provider, "--memory", "2GiB", c.ref)
						d.Must(append([]string{"run", id, "--name", "server"}, s.command...)...)
						p := openPage(t, program)
						s.use(t, d, p, id, d.Must("port", "url", id, s.port))
						if at := fmt.Sprintf("https://%s-%s.preview.test:%s/", s.port, id, g.port); !strings.HasPrefix(p.eval("location.href"), at) {
							t.Errorf("the page ends at %s", p.eval("location.href"))
						}
					})
				}
			}, "gvisor")
		})
	}
}

// open loads a page until it shows a text: its server begins to listen in its own time.
func (p *tab) open(d *testenv.Daemon, id, link, text string) {
	p.t.Helper()
	testenv.Eventually(p.t, "the page loads", func() (bool, string) {
		p.do("Page.navigate", map[string]any{"url": link}, nil)
		shown := ""
		for range 120 {
			if shown = p.text(); strings.Contains(shown, text) {
				return true, ""
			}
			if strings.Contains(shown, "Nothing listens on port") {
				break
			}
			time.Sleep(250 * time.Millisecond)
		}
		return false, shown + d.Shard("logs", id, "server").Stdout
	})
}

// shows waits for a text on the page.
func (p *tab) shows(text string) {
	p.t.Helper()
	testenv.Eventually(p.t, "the page shows "+text, func() (bool, string) {
		shown := p.text()
		return strings.Contains(shown, text), shown
	})
}

// has waits for an expression that is true in the page.
func (p *tab) has(expression string) {
	p.t.Helper()
	testenv.Eventually(p.t, expression, func() (bool, string) { return p.eval("!!("+expression+")") == "true", p.text() })
}

// useJupyter opens a notebook with the server's own token, runs its cell in a kernel, and saves what that said.
func useJupyter(t *testing.T, d *testenv.Daemon, p *tab, id, link string) {
	p.open(d, id, strings.Replace(link, "/?", "/lab/tree/cell.ipynb?token=letmein&", 1), "Python 3 (ipykernel)")
	p.has(`(w => w && w.context && w.context.isReady && w.sessionContext.isReady)(jupyterapp.shell.currentWidget)`)
	p.eval(`void jupyterapp.commands.execute('notebook:run-all-cells')`)
	p.shows("answer 42")
	p.eval(`void jupyterapp.commands.execute('docmanager:save')`)
	testenv.Eventually(t, "the notebook is saved", func() (bool, string) {
		saved := sh(t, d, id, "cat /root/cell.ipynb")
		return strings.Contains(saved, "answer 42"), saved
	})
}

// useStreamlit presses a button of the page and gives it a file.
func useStreamlit(t *testing.T, d *testenv.Daemon, p *tab, id, link string) {
	p.open(d, id, link, "Counted 0")
	// Its parts come one after the other.
	button := `[...document.querySelectorAll('button')].find(b => b.innerText == 'more')`
	p.has(button)
	p.eval(button + ".click()")
	p.shows("Counted 1")
	file := filepath.Join(t.TempDir(), "file.bin")
	if err := os.WriteFile(file, make([]byte, 3<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	const files = "document.querySelector('input[type=file]')"
	p.has(files)
	var input struct{ Result struct{ ObjectID string } }
	p.do("Runtime.evaluate", map[string]any{"expression": files}, &input)
	p.do("DOM.setFileInputFiles", map[string]any{"files": []string{file}, "objectId": input.Result.ObjectID}, nil)
	p.shows(fmt.Sprintf("Uploaded %d bytes", 3<<20))
}

// useNext changes a module under the page, which must not be loaded anew for it.
func useNext(t *testing.T, d *testenv.Daemon, p *tab, id, link string) {
	p.open(d, id, link, "Message loaded")
	p.shows("Address 3000-" + id + ".preview.test")
	p.eval("window.same = 'page'")
	testenv.Eventually(t, "the change arrives", func() (bool, string) {
		sh(t, d, id, `echo "export const message = 'changed'" >/app/app/message.js`)
		for range 20 {
			if strings.Contains(p.text(), "Message changed") {
				return true, ""
			}
			time.Sleep(100 * time.Millisecond)
		}
		return false, p.text() + d.Shard("logs", id, "server").Stdout
	})
	if p.eval("window.same") != "page" {
		t.Error("the page was loaded anew: hot reload does not work")
	}
}

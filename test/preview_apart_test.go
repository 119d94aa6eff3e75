package test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

// TestPreviewApart: in one browser that has links to two sandboxes, a page of one can do nothing to the other: no request with the
// visitor's cookie gets there, no frame, no service worker; and no page learns a link. A page may use what is its own.
func TestPreviewApart(t *testing.T) {
	t.Parallel()
	program := chromium(t)
	d := testenv.Start(t, testenv.Options{})
	d.Import(image, testenv.Image(t, testenv.BusyboxConfig(), testenv.Layer(t, append(testenv.BusyboxEntries(t), webserverEntry(t))...)))
	g := serveGate(t, d, "--preview-domain", "preview.test", "--tls-self-signed")
	d.EachProvider(t, func(t *testing.T, d *testenv.Daemon, provider string) {
		evil, good := box(t, d, provider), box(t, d, provider)
		d.Must("run", evil, "--name", "web", "webserver", "127.0.0.1:8000", "evil")
		d.Must("run", good, "--name", "web", "webserver", "127.0.0.1:8000", "good")
		d.Must("run", good, "--name", "more", "webserver", "127.0.0.1:8001", "more")
		at := func(port int, id string) string {
			return fmt.Sprintf("https://%d-%s.preview.test:%s", port, id, g.port)
		}
		p := openPage(t, program)
		visit := func(id, port string) {
			t.Helper()
			p.open(d, id, strings.Replace(d.Must("port", "url", id, port), "/?", "/page?", 1), "page of")
		}
		visit(good, "8001")
		visit(good, "8000")
		// A page's own: a form although the page sends no referrer, events, a WebSocket, another port of the same sandbox.
		p.eval("document.querySelector('button').click()")
		p.shows("page of good, POST")
		for script, want := range map[string]string{
			`new Promise(ok => { const e = new EventSource('/events'); e.onmessage = m => { e.close(); ok(m.data) } })`:                                                             "first",
			`new Promise((ok, no) => { const w = new WebSocket('wss://' + location.host + '/echo'); w.onopen = () => w.send('x'); w.onmessage = m => ok(m.data); w.onerror = no })`: "x",
			`fetch('` + at(8001, good) + `/shared', {credentials: 'include'}).then(r => r.text())`:                                                                                  "shared with http://localhost:8000",
			`JSON.stringify(performance.getEntries()).includes('shard-link') + document.referrer + document.cookie`:                                                                 "false",
		} {
			if got := p.await(script); got != want {
				t.Errorf("%s: %q, want %q", script, got, want)
			}
		}

		visit(evil, "8000")
		there := at(8000, good)
		for script, want := range map[string]string{
			`fetch('` + there + `/hit', {credentials: 'include', mode: 'no-cors'}).then(() => 'sent', () => 'failed')`:                                                                                                                                                                              "sent",
			`fetch('` + there + `/shared', {credentials: 'include'}).then(r => r.text(), () => 'failed')`:                                                                                                                                                                                           "failed",
			`new Promise(ok => { const w = new WebSocket('` + strings.Replace(there, "https", "wss", 1) + `/echo'); w.onopen = () => ok('open'); w.onerror = () => ok('failed') })`:                                                                                                                 "failed",
			`new Promise(ok => { const i = new Image(); i.onload = i.onerror = () => ok('done'); i.src = '` + there + `/hit' })`:                                                                                                                                                                    "done",
			`new Promise(ok => { const f = document.createElement('iframe'); f.onload = () => ok('done'); f.src = '` + there + `/hit'; document.body.append(f) })`:                                                                                                                                  "done",
			`new Promise(ok => { const f = document.createElement('form'), i = document.createElement('iframe'); i.name = f.target = 'x'; f.method = 'post'; f.action = '` + there + `/hit'; document.body.append(i, f); i.onload = () => { if (f.sent) ok('done') }; f.sent = true; f.submit() })`: "done",
			`navigator.sendBeacon('` + there + `/hit', 'x')`:                                                    "true",
			`navigator.serviceWorker.register('` + there + `/sw.js').then(() => 'registered', () => 'refused')`: "refused",
			`import('` + there + `/sw.js').then(() => 'read', () => 'refused')`:                                 "refused",
		} {
			if got := p.await(script); got != want {
				t.Errorf("%s: %q, want %q", script, got, want)
			}
		}
		// Cookies of our name, and of the other sandbox's, for all below the domain.
		p.eval(`for (let i = 0; i < 20; i++) document.cookie = (i ? 'session' + i : '__Host-shard-preview') + '=evil; domain=preview.test; path=/; secure'`)
		// Its service worker has its own pages, and no other's.
		if got := p.await(`navigator.serviceWorker.register('/sw.js').then(() => navigator.serviceWorker.ready).then(() => 'ready')`); got != "ready" {
			t.Errorf("the service worker is %q", got)
		}
		p.open(d, evil, at(8000, evil)+"/page", "worker of evil")
		p.open(d, good, at(8000, good)+"/page", "page of good, GET")
		if got := p.await(`fetch('/hits').then(r => r.text())`); got != "0" {
			t.Errorf("%s requests of the other sandbox's page arrived", got)
		}
		// What it left behind meets nobody: its address is never another's.
		d.Must("remove", "--force", evil)
		p.open(d, good, at(8000, good)+"/page", "page of good, GET")
	}, "gvisor")
}

// await is what the promise of an expression gives in the page, as text.
func (p *tab) await(expression string) string {
	p.t.Helper()
	var out struct {
		Result           struct{ Value any }
		ExceptionDetails *struct{ Text string }
	}
	p.do("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &out)
	if out.ExceptionDetails != nil {
		return out.ExceptionDetails.Text
	}
	return fmt.Sprint(out.Result.Value)
}

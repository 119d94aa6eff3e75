package gate

import (
	"fmt"
	"html"
	"net/http"
	"strconv"
	"strings"

	"github.com/useshards/shard"
)

// page is an answer of the gate itself to a browser: what is wrong, and what to do.
type page struct {
	status      int
	title, text string
}

func needsLink(v *visit) *page {
	return &page{status: http.StatusUnauthorized, title: "This address needs a link",
		text: fmt.Sprintf("Whoever runs the sandbox makes one with: shard port url %s %d. One that you had has expired, or was taken back.", v.ref, v.port)}
}

// pageOf is what a browser sees of an error, whose text is for everybody when it is a *shard.Error.
func pageOf(err error, v *visit) *page {
	public := refusalOf(err)
	if public == nil {
		return &page{status: http.StatusBadGateway, title: "The program broke off",
			text: fmt.Sprintf("What listens on port %d of sandbox %s did not give a whole answer.", v.port, v.ref)}
	}
	p := &page{status: public.Code.Status(), title: "This does not work", text: public.Message + "."}
	switch public.Code {
	case shard.CodeNotFound:
		p.title = "There is no such sandbox"
	case shard.CodeNoProcess:
		p.status, p.title = http.StatusBadGateway, fmt.Sprintf("Nothing listens on port %d", v.port)
		p.text = "Start the server in the sandbox, on 127.0.0.1 or 0.0.0.0, and load this page again."
	case shard.CodeExecLimit:
		p.status, p.title = http.StatusServiceUnavailable, "There are too many connections"
	case shard.CodeInternal:
		p.status, p.title = http.StatusBadGateway, "The daemon does not answer"
	default:
		if p.status == http.StatusConflict {
			p.status, p.title = http.StatusServiceUnavailable, "The sandbox is not running"
		}
	}
	return p
}

// send answers, and ends the connection: who is refused does not keep one.
func (p *page) send(w http.ResponseWriter, r *http.Request) {
	h := w.Header()
	h.Set("Connection", "close")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
	if p.status == http.StatusUnauthorized {
		h.Set("WWW-Authenticate", "Bearer")
	}
	body := p.title + ": " + p.text + "\n"
	h.Set("Content-Type", "text/plain; charset=utf-8")
	if strings.Contains(r.Header.Get("Accept"), "text/html") {
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("Content-Security-Policy", "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'")
		body = `<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>` + html.EscapeString(p.title) +
			`</title><style>body{font:1rem/1.5 system-ui,sans-serif;max-width:36rem;margin:15vh auto;padding:0 1rem;color:#222;background:#fff}` +
			`h1{font-size:1.3rem}p{overflow-wrap:anywhere}small{color:#777}</style><h1>` + html.EscapeString(p.title) + `</h1><p>` +
			html.EscapeString(p.text) + `</p><small>shard · ` + strconv.Itoa(p.status) + `</small></html>` + "\n"
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	w.WriteHeader(p.status)
	_, _ = w.Write([]byte(body))
}

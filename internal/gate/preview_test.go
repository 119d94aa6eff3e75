package gate

import (
	"bufio"
	"context"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/token"
)

// TestPreviewLink: a link opens one port of one sandbox, in one browser, until it ends; and nothing else does.
func TestPreviewLink(t *testing.T) {
	r := newPreviewRig(t, Options{})
	key := r.mint(0, "port:write")
	l, got := r.link(key, "web", "3000", "?expires=600")
	if l == nil {
		t.Fatalf("%+v", got)
	}
	if d := time.Until(l.ExpiresAt); l.Sandbox != web || l.GuestPort != 3000 || d > 601*time.Second || d < 500*time.Second || !strings.HasPrefix(l.URL, r.at("3000-"+web)+"/?shard-link=") {
		t.Errorf("%+v", l)
	}
	b := r.browser()
	resp, _ := r.get(b, "GET", strings.Replace(l.URL, "/?", "//evil.test/a%2Fb?x=1&", 1)+"&y=[2]")
	set := resp.Header.Get("Set-Cookie")
	if resp.StatusCode != 303 || resp.Header.Get("Location") != r.at("3000-"+web)+"//evil.test/a%2Fb?x=1&y=[2]" || resp.Header.Get("Referrer-Policy") != "no-referrer" {
		t.Errorf("%d %v", resp.StatusCode, resp.Header)
	}
	for _, want := range []string{"__Host-shard-preview=", "; Path=/", "; HttpOnly", "; Secure", "; SameSite=Lax", "; Expires="} {
		if !strings.Contains(set, want) {
			t.Errorf("the cookie has no %q: %s", want, set)
		}
	}
	if strings.Contains(strings.ToLower(set), "domain") || r.dials.Load() != 0 {
		t.Errorf("%s, %d dials", set, r.dials.Load())
	}
	cookie := "Cookie: " + r.cookie(l.URL)
	for i := range 3 {
		resp, body := r.get(b, "GET", r.at("3000-"+web)+"/hello%20there?[a]={b}", cookie, "X-Forwarded-Host: evil", "X-Shard-Scopes: *")
		var s saw
		if err := json.Unmarshal([]byte(body), &s); err != nil || resp.StatusCode != 200 || resp.Close {
			t.Fatalf("%d %s", resp.StatusCode, body)
		}
		if s.Host != "localhost:3000" || s.URI != "/hello%20there?[a]={b}" || s.Header["Cookie"] != nil || s.Header["X-Shard-Scopes"] != nil || s.Header["X-Forwarded-Host"] != nil || s.Header["X-Forwarded-For"] != nil {
			t.Errorf("visit %d: %+v", i, s)
		}
	}
	if n := r.dials.Load(); n != 1 {
		t.Errorf("three requests dialled %d times", n)
	}
	signed := strings.TrimPrefix(cookie, "Cookie: __Host-shard-preview=")
	forged := signed[:len(signed)-4] + "AAAA"
	elsewhere := strings.Replace(signed, web, other, 1)
	for what, c := range map[string]struct {
		url    string
		header []string
		status int
	}{
		"no cookie":                {r.at("3000-" + web), nil, 401},
		"no sandbox":               {r.at("3000-calm-crane-0003"), nil, 401},
		"another port":             {r.at("3001-" + web), []string{cookie}, 401},
		"another sandbox":          {r.at("3000-" + other), []string{cookie}, 401},
		"the sandbox's name":       {r.at("3000-web"), []string{cookie}, 401},
		"a prefix of the id":       {r.at("3000-amber-otter"), []string{cookie}, 401},
		"a forged signature":       {r.at("3000-" + web), []string{"Cookie: __Host-shard-preview=" + forged}, 401},
		"a changed sandbox":        {r.at("3000-" + other), []string{"Cookie: __Host-shard-preview=" + elsewhere}, 401},
		"the plain cookie's name":  {r.at("3000-" + web), []string{"Cookie: shard-preview=" + signed}, 401},
		"a planted cookie besides": {r.at("3000-" + web), []string{"Cookie: __Host-shard-preview=x; a=b", cookie}, 200},
		"a link to another port":   {r.at("3001-"+web) + "/?shard-link=" + signed, nil, 403},
		"a link by name":           {r.at("3000-web") + "/?shard-link=" + signed, nil, 403},
		"many planted cookies":     {r.at("3000-" + web), []string{"Cookie: " + strings.Repeat("__Host-shard-preview="+elsewhere+"; ", 150) + "a=b", cookie}, 200},
		"a link elsewhere":         {r.at("3000-"+other) + "/?shard-link=" + signed, nil, 403},
		"a forged link":            {r.at("3000-"+web) + "/?shard-link=" + forged, nil, 401},
		"two links":                {r.at("3000-"+web) + "/?shard-link=" + signed + "&shard-link=" + forged, nil, 401},
		"the API's token":          {r.at("3000-" + web), []string{"Cookie: __Host-shard-preview=" + key}, 401},
		"a link as an API key":     {r.at("3000-" + web), []string{"Authorization: Bearer " + signed}, 401},
	} {
		if resp, body := r.get(r.browser(), "GET", c.url, append(c.header, "Accept: text/html")...); resp.StatusCode != c.status || c.status != 200 && !strings.Contains(body, "<h1>") {
			t.Errorf("%s: %d %s", what, resp.StatusCode, body)
		}
	}
	if resp, _ := r.get(b, "POST", l.URL); resp.StatusCode != 400 {
		t.Errorf("a link by POST: %d", resp.StatusCode)
	}
	if got := r.ask("GET", "/v0/version", signed); got != nil && got.status == 200 {
		t.Error("the API takes a link for a key")
	}
	// What cannot be linked.
	narrow, short := r.mint(0, "port:read", "exec"), r.mint(time.Hour, "*")
	for _, c := range []struct {
		key, ref, port, query string
		code                  shard.Code
	}{{narrow, "web", "3000", "", shard.CodeForbidden}, {key, "nosuch", "3000", "", shard.CodeNotFound}, {key, "web", "0", "", shard.CodeInvalidRequest},
		{key, "web", "65536", "", shard.CodeInvalidRequest}, {key, "web", "3000", "?expires=0", shard.CodeInvalidRequest}, {key, "web", "3000", "?expires=9999999", shard.CodeInvalidRequest},
		{key, "web", "3000", "?expires=1&expires=2", shard.CodeInvalidRequest}, {key, "web", "3000", "?for=1", shard.CodeInvalidRequest}} {
		if l, got := r.link(c.key, c.ref, c.port, c.query); l != nil || got == nil || got.code != c.code {
			t.Errorf("%+v: %+v", c, got)
		}
	}
	if l, _ := r.link(short, web, "3000", "?expires=86400"); l == nil || time.Until(l.ExpiresAt) > time.Hour+time.Second {
		t.Errorf("a link outlives its key: %+v", l)
	}
}

// TestPreviewEnds: a link's end, and the revocation of what it hangs on, end what is open.
func TestPreviewEnds(t *testing.T) {
	r := newPreviewRig(t, Options{})
	for _, how := range []string{"expires", "is revoked"} {
		key, query := r.mint(0, "port:write"), "?expires=3"
		if how == "is revoked" {
			query = ""
		}
		l, _ := r.link(key, "web", "3000", query)
		cookie := "Cookie: " + r.cookie(l.URL)
		req, _ := http.NewRequestWithContext(t.Context(), "GET", r.at("3000-"+web)+"/events", nil)
		req.Header.Set("Cookie", strings.TrimPrefix(cookie, "Cookie: "))
		resp, err := r.browser().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer resp.Body.Close()
		lines := bufio.NewReader(resp.Body)
		if line, err := lines.ReadString('\n'); err != nil || line != "data: first\n" {
			t.Fatalf("%q %v", line, err)
		}
		ws := r.socket(cookie, "")
		if err := r.echo(ws, "hello"); err != nil {
			t.Fatal(err)
		}
		if how == "is revoked" {
			grant, err := r.book.Check(key)
			if err != nil {
				t.Fatal(err)
			}
			if _, _, err := r.book.Revoke(func(rec *token.Record) bool { return rec.ID == grant.ID }); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := io.Copy(io.Discard, lines); err == nil {
			t.Errorf("events of a link that %s end as if they were whole", how)
		}
		r.ends(ws)
		if resp, body := r.get(r.browser(), "GET", r.at("3000-"+web), cookie); resp.StatusCode != 401 {
			t.Errorf("a link that %s: %d %s", how, resp.StatusCode, body)
		}
		if resp, _ := r.get(r.browser(), "GET", l.URL); resp.StatusCode != 401 {
			t.Errorf("opening a link that %s: %d", how, resp.StatusCode)
		}
	}
}

// socket opens the echo of the sandbox's program.
func (r *previewRig) socket(cookie, origin string) *websocket.Conn {
	r.t.Helper()
	ws, resp, err := r.trySocket(cookie, origin)
	if err != nil {
		r.t.Fatalf("%v %v", err, resp)
	}
	return ws
}

func (r *previewRig) trySocket(cookie, origin string) (*websocket.Conn, *http.Response, error) {
	ctx, cancel := context.WithTimeout(r.t.Context(), wait)
	defer cancel()
	h := http.Header{"Cookie": {strings.TrimPrefix(cookie, "Cookie: ")}}
	if origin != "" {
		h.Set("Origin", origin)
	}
	ws, resp, err := websocket.Dial(ctx, r.at("3000-"+web)+"/echo", &websocket.DialOptions{HTTPClient: r.browser(), HTTPHeader: h})
	if err == nil {
		r.t.Cleanup(func() { _ = ws.CloseNow() })
	}
	return ws, resp, err
}

// TestPreviewKey: an API key reaches what is forwarded, if it may forward, and no sandbox ever sees it.
func TestPreviewKey(t *testing.T) {
	r := newPreviewRig(t, Options{})
	key, narrow := "Authorization: Bearer "+r.mint(0, "port:write"), "Authorization: Bearer "+r.mint(0, "port:read", "exec")
	for _, c := range []struct {
		label, header string
		status        int
	}{{"3000-" + web, key, 200}, {"3000-web", key, 200}, {"3001-" + web, key, 403}, {"3000-" + other, key, 403}, {"3000-amber-otter", key, 404}, {"3000-nosuch", key, 404},
		{"3000-" + web, narrow, 403}, {"3000-" + web, "Authorization: Bearer nonsense", 401}, {"3000-" + web, "Authorization: Basic eDp5", 401}} {
		resp, body := r.get(r.browser(), "GET", r.at(c.label)+"/", c.header)
		if resp.StatusCode != c.status || strings.Contains(body, "Bearer") {
			t.Errorf("%s with %.30s: %d %s", c.label, c.header, resp.StatusCode, body)
		}
	}
	l, _ := r.link(strings.TrimPrefix(key, "Authorization: Bearer "), "web", "3000", "")
	cookie := "Cookie: theme=dark; " + r.cookie(l.URL) + "; session=a b"
	text := strings.TrimPrefix(key, "Authorization: Bearer ")
	for header, seen := range map[string]string{key: "", narrow: "", "Authorization: token of-the-app": "token of-the-app", "Authorization: Bearer  " + text: "",
		"Authorization: Key a=b " + text: "", "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("me:"+text)): ""} {
		_, body := r.get(r.browser(), "GET", r.at("3000-"+web)+"/", cookie, header)
		var s saw
		if err := json.Unmarshal([]byte(body), &s); err != nil || s.Header.Get("Authorization") != seen || s.Header.Get("Cookie") != "theme=dark; session=a b" {
			t.Errorf("%.30s: %s", header, body)
		}
	}
}

// TestPreviewEarly: what a program says before its answer does not reach the browser, unjudged as it is.
func TestPreviewEarly(t *testing.T) {
	r := newPreviewRig(t, Options{})
	l, _ := r.link(r.mint(0, "port:write"), "web", "3000", "")
	early := 0
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(int, textproto.MIMEHeader) error { early++; return nil }})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, r.at("3000-"+web)+"/early", nil)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Cookie", r.cookie(l.URL))
	resp, err := r.browser().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "late" || early > 0 || len(resp.Header.Values("Set-Cookie")) > 0 {
		t.Errorf("%q, %v, %d early answers, %v", body, err, early, resp.Header)
	}
}

// TestPreviewPages: the pages of other sandboxes and sites cannot use a visitor's cookie, and servers see one origin.
func TestPreviewPages(t *testing.T) {
	r := newPreviewRig(t, Options{AllowOrigins: []string{"https://app.test"}})
	l, _ := r.link(r.mint(0, "port:write"), "web", "3000", "")
	cookie := "Cookie: " + r.cookie(l.URL)
	own, sibling, neighbour := r.at("3000-"+web), r.at("8000-"+web), r.at("3000-"+other)
	for _, c := range []struct {
		headers []string
		status  int
		origin  string
	}{
		{[]string{"Origin: " + own}, 200, "http://localhost:3000"},
		{[]string{"Origin: " + sibling}, 200, "http://localhost:8000"},
		{[]string{"Origin: " + neighbour}, 403, ""},
		{[]string{"Origin: null"}, 403, ""},
		{[]string{"Origin: null", "Sec-Fetch-Site: same-origin"}, 200, "null"},
		{[]string{"Origin: null", "Sec-Fetch-Site: same-site"}, 403, ""},
		{[]string{"Origin: null", "Origin: null", "Sec-Fetch-Site: same-origin"}, 403, ""},
		{[]string{"Origin: https://app.test"}, 403, ""},
		{[]string{"Origin: " + strings.Replace(own, "https", "http", 1)}, 403, ""},
		{[]string{"Origin: " + strings.TrimSuffix(own, r.port()) + "1"}, 403, ""},
		{[]string{"Origin: " + own, "Origin: " + neighbour}, 403, ""},
		{[]string{"Sec-Fetch-Site: same-origin"}, 200, ""},
		{[]string{"Sec-Fetch-Site: none"}, 200, ""},
		{[]string{"Referer: " + own + "/page"}, 200, ""},
		{[]string{"Referer: " + neighbour + "/page"}, 403, ""},
		{[]string{"Referer: https://elsewhere.test/"}, 200, ""},
		{[]string{"Sec-Fetch-Site: cross-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: document"}, 200, ""},
		{[]string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: navigate", "Sec-Fetch-Dest: iframe"}, 403, ""},
		{[]string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image"}, 403, ""},
		{[]string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Sec-Fetch-Dest: image", "Referer: " + sibling + "/x"}, 200, ""},
		{[]string{"Sec-Fetch-Site: same-site", "Sec-Fetch-Mode: no-cors", "Referer: " + neighbour + "/"}, 403, ""},
	} {
		resp, body := r.get(r.browser(), "GET", own+"/", append(c.headers, cookie)...)
		var s saw
		_ = json.Unmarshal([]byte(body), &s)
		if resp.StatusCode != c.status || s.Header.Get("Origin") != c.origin {
			t.Errorf("%v: %d, the sandbox sees %q", c.headers, resp.StatusCode, s.Header.Get("Origin"))
		}
	}
	_, body := r.get(r.browser(), "GET", own+"/", cookie, "Referer: "+own+"/a?b=c")
	if !strings.Contains(body, `"Referer":["http://localhost:3000/a?b=c"]`) {
		t.Errorf("the referer: %s", body)
	}
	if err := r.echo(r.socket(cookie, own), "from a page"); err != nil {
		t.Error(err)
	}
	if _, resp, err := r.trySocket(cookie, neighbour); err == nil || resp == nil || resp.StatusCode != 403 {
		t.Errorf("a neighbour's WebSocket: %v", err)
	}
	// The way back.
	for to, want := range map[string]string{"http://localhost:3000/x?y#z": own + "/x?y#z", "http://127.0.0.1:8000": sibling, "https://localhost/": r.at("443-"+web) + "/", "/relative": "/relative",
		"//localhost:3000/x": own + "/x", "HTTP://LOCALHOST:3000": own, "http://[::1]/": r.at("80-"+web) + "/", "http://[::1]:3000/": own + "/", "//example.com/": "//example.com/", "/a//localhost:3000": "/a//localhost:3000",
		"https://example.com/localhost:3000": "https://example.com/localhost:3000", "http://localhost.example.com:3000/": "http://localhost.example.com:3000/"} {
		resp, _ := r.get(r.browser(), "GET", own+"/redirect?to="+url.QueryEscape(to), cookie, "Origin: "+sibling)
		if got := resp.Header.Get("Location"); got != want || resp.Header.Get("Access-Control-Allow-Origin") != sibling {
			t.Errorf("%s becomes %s, %s", to, got, resp.Header.Get("Access-Control-Allow-Origin"))
		}
	}
	resp, _ := r.get(r.browser(), "GET", own+"/cookies", cookie)
	if got := strings.Join(resp.Header["Set-Cookie"], " | "); got != "plain=1; Path=/ | wide=1; Secure | odd=1;HttpOnly" || resp.Header["Clear-Site-Data"] != nil || resp.Header["Alt-Svc"] != nil {
		t.Errorf("%s %v", got, resp.Header)
	}
}

// TestPreviewHosts: what is below the domain never reaches the API, and no other name reaches a sandbox, whatever way it is
// written and on whatever connection.
func TestPreviewHosts(t *testing.T) {
	r := newPreviewRig(t, Options{AllowHosts: []string{"api.preview.test"}})
	key := r.mint(0, "*")
	l, _ := r.link(key, "web", "3000", "")
	cookie := r.cookie(l.URL)
	label := "3000-" + web + ".preview.test"
	api := func(s string) bool { return strings.HasPrefix(s, `{"error"`) || s == "0" }
	for host, want := range map[string]int{
		label: 200, label + ":" + r.port(): 200, label + ":1": 200, strings.ToUpper(label): 200,
		label + ".": 421, label + ":x": 421, label + ":": 421, label + ":123456": 421, "x." + label: 421, "03000-" + web + ".preview.test": 421, "+3000-" + web + ".preview.test": 421,
		"3000_" + web + ".preview.test": 421, "0-" + web + ".preview.test": 421, "65536-" + web + ".preview.test": 421, "3000-.preview.test": 421, "foo.preview.test": 421, ".preview.test": 421,
		"3000-" + web + "\u3002preview.test": 403, "3000-" + web + ".preview\uff0etest": 403, "evilpreview.test": 403, "preview.test": 403, "3000-" + web: 403, label + ".evil.test": 403,
	} {
		conn := r.tls(label)
		got := r.raw(conn, "GET /v0/version HTTP/1.1\r\nHost: "+host+"\r\nCookie: "+cookie+"\r\nAuthorization: Bearer "+key+"\r\n\r\n")
		if got == nil || got.status != want || (want == 403) != api(got.body) {
			t.Errorf("Host %q: %+v, want %d", host, got, want)
		}
		conn.Close()
	}
	for _, host := range []string{"localhost", "127.0.0.1", "api.preview.test"} {
		if got := r.raw(r.tls(label), "GET /v0/version HTTP/1.1\r\nHost: "+host+"\r\nAuthorization: Bearer "+key+"\r\n\r\n"); got == nil || got.status != 200 || got.body != "0" {
			t.Errorf("the API at %s: %+v", host, got)
		}
	}
	// A connection that began with a preview stays with previews, and each request is judged.
	for _, second := range []struct {
		text   string
		status int
	}{
		{"GET /v0/version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + key + "\r\n\r\n", 421},
		{"GET /v0/version HTTP/1.1\r\nHost: api.preview.test\r\nAuthorization: Bearer " + key + "\r\n\r\n", 421},
		{"GET https://localhost/v0/version HTTP/1.1\r\nHost: " + label + "\r\nCookie: " + cookie + "\r\n\r\n", 400},
		{"GET https://" + label + "/ HTTP/1.1\r\nHost: " + label + "\r\nCookie: " + cookie + "\r\n\r\n", 400},
		{"OPTIONS * HTTP/1.1\r\nHost: " + label + "\r\nCookie: " + cookie + "\r\n\r\n", 400},
		{"CONNECT " + label + ":443 HTTP/1.1\r\nHost: " + label + "\r\nCookie: " + cookie + "\r\n\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: " + label + "\r\nHost: localhost\r\nCookie: " + cookie + "\r\n\r\n", 400},
		{"GET / HTTP/1.1\r\nHost: 3000-" + other + ".preview.test\r\nCookie: " + cookie + "\r\n\r\n", 401},
		{"GET / HTTP/1.1\r\nHost: " + label + "\r\n\r\n", 401},
		{"GET / HTTP/1.1\r\nHost: " + label + "\r\nCookie: " + cookie + "\r\n\r\n", 200},
	} {
		conn := r.tls(label)
		br := bufio.NewReader(conn)
		fmt.Fprintf(conn, "GET / HTTP/1.1\r\nHost: %s\r\nCookie: %s\r\n\r\n", label, cookie)
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_, _ = io.WriteString(conn, second.text)
		if resp, err = http.ReadResponse(br, nil); err != nil || resp.StatusCode != second.status {
			t.Errorf("%q: %v %v", second.text, resp, err)
		}
		conn.Close()
	}
}

// tls is a connection to the gate under a name.
func (r *previewRig) tls(name string) net.Conn {
	r.t.Helper()
	return tls.Client(r.dial("127.0.0.1"), &tls.Config{RootCAs: r.roots, ServerName: name})
}

// TestPreviewSmuggling: what two parsers could read in two ways reaches no sandbox as it is.
func TestPreviewSmuggling(t *testing.T) {
	r := newPreviewRig(t, Options{})
	l, _ := r.link(r.mint(0, "port:write"), "web", "3000", "")
	cookie := r.cookie(l.URL)
	label := "3000-" + web + ".preview.test"
	lines := "Host: " + label + "\r\nCookie: " + cookie + "\r\n"
	for _, text := range []string{
		"POST / HTTP/1.1\r\n" + lines + "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /x HTTP/1.1\r\n\r\n",
		"POST / HTTP/1.1\r\n" + lines + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!",
		"POST / HTTP/1.1\r\n" + lines + "Content-Length: +5\r\n\r\nhello",
		"POST / HTTP/1.1\r\n" + lines + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n",
		"POST / HTTP/1.1\r\n" + lines + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n",
		"GET / HTTP/1.1\r\n" + lines + "X: a\nEvil: b\r\n\r\n",
		"GET / HTTP/1.1\r\n" + lines + "X: a\r\n folded\r\n\r\n",
		"GET / HTTP/1.1\r\n" + lines + "\r\nGET /x HTTP/1.1\r\n" + lines + "\r\n",
		"GET / HTTP/1.1\r\n" + lines + "Host: localhost\r\n\r\n", "GET / HTTP/1.1\r\nHost: localhost\r\n" + lines + "\r\n",
		"GET /\x00 HTTP/1.1\r\n" + lines + "\r\n", "GET /a b HTTP/1.1\r\n" + lines + "\r\n", "GET / HTTP/1.0\r\n" + lines + "\r\n", "GET https://" + label + "/ HTTP/1.1\r\n" + lines + "\r\n",
	} {
		if got := r.raw(r.tls(label), text); got == nil || got.status != 400 {
			t.Errorf("first on a connection, %q: %+v", text, got)
		}
	}
	if n := r.dials.Load(); n != 0 {
		t.Errorf("%d of them were passed on", n)
	}
	// Later on a connection net/http reads them: it refuses, or passes on one request whose end is beyond doubt.
	for text, status := range map[string]int{
		"POST / HTTP/1.1\r\n" + lines + "Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello!": 400,
		"POST / HTTP/1.1\r\n" + lines + "Content-Length: +5\r\n\r\nhello":                      400,
		"POST / HTTP/1.1\r\n" + lines + "Transfer-Encoding: xchunked\r\n\r\n0\r\n\r\n":         501,
		"POST / HTTP/1.1\r\n" + lines + "Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n":         400,
		"GET / HTTP/1.1\r\n" + lines + "Evil\x00: b\r\n\r\n":                                   400,
	} {
		conn := r.tls(label)
		br := bufio.NewReader(conn)
		_, _ = io.WriteString(conn, "GET / HTTP/1.1\r\n"+lines+"\r\n")
		resp, err := http.ReadResponse(br, nil)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_, _ = io.WriteString(conn, text)
		if resp, err = http.ReadResponse(br, nil); err != nil || resp.StatusCode != status {
			t.Errorf("later, %q: %v %v", text, resp, err)
		}
		conn.Close()
	}
}

// TestPreviewBodies: answers are passed on as the program gave them, parts and compressed ones too, and uploads when they are taken.
func TestPreviewBodies(t *testing.T) {
	r := newPreviewRig(t, Options{})
	l, _ := r.link(r.mint(0, "port:write"), "web", "3000", "")
	cookie := "Cookie: " + r.cookie(l.URL)
	resp, body := r.get(r.browser(), "GET", r.at("3000-"+web)+"/file", cookie, "Range: bytes=2-4")
	if resp.StatusCode != 206 || body != "234" || resp.Header.Get("Content-Range") != "bytes 2-4/10" {
		t.Errorf("a part: %d %s %v", resp.StatusCode, body, resp.Header)
	}
	resp, body = r.get(r.browser(), "GET", r.at("3000-"+web)+"/zip", cookie, "Accept-Encoding: gzip, br, zstd")
	if body != string(zipped) || resp.Header.Get("Content-Encoding") != "gzip, br, zstd" || resp.Header.Get("Content-Security-Policy") != "frame-ancestors 'self'" {
		t.Errorf("a compressed answer: %q %v", body, resp.Header)
	}
	// A client that waits for a word before it sends a body gets one.
	conn := r.tls("3000-" + web + ".preview.test")
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(wait))
	br := bufio.NewReader(conn)
	fmt.Fprintf(conn, "POST / HTTP/1.1\r\nHost: 3000-%s.preview.test\r\n%s\r\nExpect: 100-continue\r\nContent-Length: 5\r\n\r\n", web, cookie)
	if line, err := br.ReadString('\n'); err != nil || !strings.HasPrefix(line, "HTTP/1.1 100 ") {
		t.Fatalf("it waits for %q, %v", line, err)
	}
	_, _ = br.ReadString('\n')
	_, _ = io.WriteString(conn, "hello")
	resp, err := http.ReadResponse(br, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var s saw
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil || s.Body != 5 || s.Header["Expect"] != nil {
		t.Errorf("%v %+v", err, s)
	}
}

// TestPreviewFailures: a person sees what is wrong, and half an answer never looks whole.
func TestPreviewFailures(t *testing.T) {
	r := newPreviewRig(t, Options{})
	key := r.mint(0, "port:write")
	l, _ := r.link(key, "web", "3000", "")
	cookie := "Cookie: " + r.cookie(l.URL)
	if l, _ := r.link(key, "web", "3001", ""); l != nil {
		resp, body := r.get(r.browser(), "GET", r.at("3001-"+web)+"/", "Cookie: "+r.cookie(l.URL), "Accept: text/html,*/*")
		if resp.StatusCode != 502 || !strings.Contains(body, "Nothing listens on port 3001") || resp.Header.Get("Content-Type") != "text/html; charset=utf-8" {
			t.Errorf("%d %s", resp.StatusCode, body)
		}
	}
	req, _ := http.NewRequestWithContext(t.Context(), "GET", r.at("3000-"+web)+"/cut", nil)
	req.Header.Set("Cookie", strings.TrimPrefix(cookie, "Cookie: "))
	if resp, err := r.browser().Do(req); err == nil {
		if _, err = io.ReadAll(resp.Body); err == nil {
			t.Error("an answer that was cut looks whole")
		}
		resp.Body.Close()
	}
	if resp, body := r.get(r.browser(), "GET", r.at("3000-"+web)+"/big", cookie); len(body) != 32<<20 || resp.StatusCode != 200 {
		t.Errorf("a big answer has %d bytes", len(body))
	}
	req, _ = http.NewRequestWithContext(t.Context(), "POST", r.at("3000-"+web)+"/", io.LimitReader(zeroes{}, 32<<20))
	req.Header.Set("Cookie", strings.TrimPrefix(cookie, "Cookie: "))
	resp, err := r.browser().Do(req)
	if err != nil {
		t.Fatal(err)
	}
	var s saw
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil || s.Body != 32<<20 {
		t.Errorf("%v %+v", err, s)
	}
	resp.Body.Close()
	r.down.Store(true)
	r.guest.CloseClientConnections()
	if resp, body := r.get(r.browser(), "GET", r.at("3000-"+web)+"/", cookie); resp.StatusCode != 503 || !strings.Contains(body, "is stopped") {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	// Streams end at once when the gate does.
	r.down.Store(false)
	ws := r.socket(cookie, "")
	r.stop()
	r.ends(ws)
}

// TestPreviewOptions: the domain is one, and is heard of by the daemon.
func TestPreviewOptions(t *testing.T) {
	for _, bad := range []string{"127.0.0.1", "[::1]", "bücher.test", "a..b", "-a.test", "http://", "ftp://a.test", "https://a.test/x", "a.test:0", "a b"} {
		root := t.TempDir()
		if g, err := Listen(Options{Root: root, Listen: "127.0.0.1:0", Preview: bad, Log: newRig(t, Options{}).gate.o.Log}); err == nil {
			g.listener.Close()
			t.Errorf("%q is taken for a domain", bad)
		}
	}
	for preview, want := range map[string]string{"localhost": "http://localhost:PORT", "Preview.Test": "http://preview.test:PORT", "https://preview.test": "https://preview.test", "https://preview.test:443": "https://preview.test", "p.test:8443": "http://p.test:8443"} {
		r := newRig(t, Options{Preview: preview})
		_, port, _ := net.SplitHostPort(r.addr())
		want = strings.Replace(want, "PORT", port, 1)
		if got := r.gate.preview.origin.String(); got != want {
			t.Errorf("%s is seen at %s, want %s", preview, got, want)
		}
		deadline := time.Now().Add(wait)
		for {
			reqs := r.requests()
			if len(reqs) > 0 && reqs[0].Method+" "+reqs[0].URL.Path == "PUT /v0/daemon/preview" {
				break
			}
			if time.Now().After(deadline) {
				t.Fatal("the daemon does not hear of previews")
			}
			time.Sleep(10 * time.Millisecond)
		}
		r.stop()
		reqs := r.requests()
		if last := reqs[len(reqs)-1]; last.Method+" "+last.URL.Path != "PUT /v0/daemon/preview" || len(reqs) < 2 {
			t.Errorf("the daemon does not hear that there are no more: %d requests, the last %s %s", len(reqs), last.Method, last.URL.Path)
		}
	}
}

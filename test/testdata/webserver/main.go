// Command webserver is the HTTP server in the sandbox that the tests of previews talk to: webserver ADDRESS [NAME].
package main

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"sync/atomic"

	"github.com/coder/websocket"
)

func main() {
	name := ""
	if len(os.Args) > 2 {
		name = os.Args[2]
	}
	http.HandleFunc("/saw", func(w http.ResponseWriter, r *http.Request) {
		_ = json.NewEncoder(w).Encode(map[string]any{"host": r.Host, "uri": r.RequestURI, "header": r.Header, "remote": r.RemoteAddr})
	})
	// The bytes of a download are told by their seed.
	http.HandleFunc("/download", func(w http.ResponseWriter, r *http.Request) {
		n, _ := strconv.ParseInt(r.FormValue("n"), 10, 64)
		_, _ = io.CopyN(w, rand.NewChaCha8([32]byte{1}), n)
	})
	http.HandleFunc("/upload", func(w http.ResponseWriter, r *http.Request) {
		sum := sha256.New()
		n, err := io.Copy(sum, r.Body)
		fmt.Fprint(w, n, " ", hex.EncodeToString(sum.Sum(nil)), " ", err)
	})
	http.HandleFunc("/events", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, "data: first\n\n")
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	})
	http.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) {
		ws, err := websocket.Accept(w, r, nil) // which compares Origin with Host
		if err != nil {
			return
		}
		defer ws.CloseNow()
		ws.SetReadLimit(1 << 20)
		for {
			kind, data, err := ws.Read(context.Background())
			if err != nil || ws.Write(context.Background(), kind, data) != nil {
				return
			}
		}
	})
	// The page of a sandbox and its service worker, which answers for the page from then on and remembers where it was asked for.
	http.HandleFunc("/page", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/html")
		w.Header().Set("Referrer-Policy", "no-referrer")
		fmt.Fprintf(w, `<!doctype html><title>page</title><p>page of %s, %s</p><form method="post" action="/page?sent"><button>send</button></form>`, name, r.Method)
	})
	http.HandleFunc("/sw.js", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/javascript")
		fmt.Fprintf(w, `self.addEventListener('activate', e => e.waitUntil(clients.claim()))
self.addEventListener('fetch', e => { if (e.request.mode == 'navigate') e.respondWith(new Response('worker of %s', {headers: {'Content-Type': 'text/html'}})) })`, name)
	})
	// Pages of other origins may read this one, with credentials.
	http.HandleFunc("/shared", func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Access-Control-Allow-Origin", r.Header.Get("Origin"))
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		fmt.Fprint(w, "shared with ", r.Header.Get("Origin"))
	})
	var hits atomic.Int64
	http.HandleFunc("/hit", func(http.ResponseWriter, *http.Request) { hits.Add(1) })
	http.HandleFunc("/hits", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprint(w, hits.Load()) })
	fmt.Fprintln(os.Stderr, http.ListenAndServe(os.Args[1], nil)) // only the tests talk to it
	os.Exit(1)
}

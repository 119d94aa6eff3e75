// Command webserver is the HTTP server in the sandbox that the tests of previews talk to.
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

	"github.com/coder/websocket"
)

func main() {
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
	fmt.Fprintln(os.Stderr, http.ListenAndServe(os.Args[1], nil)) //nolint:gosec // only the tests talk to it
	os.Exit(1)
}

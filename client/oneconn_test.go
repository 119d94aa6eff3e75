package client_test

import (
	"context"
	"encoding/json"
	"net"
	"net/http"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/useshards/shard"
	"github.com/useshards/shard/client"
)

// counted is a connection that is counted until it is closed.
type counted struct {
	net.Conn
	open   *atomic.Int32
	closed atomic.Bool
}

func (c *counted) Close() error {
	if c.closed.CompareAndSwap(false, true) {
		c.open.Add(-1)
	}
	return c.Conn.Close()
}

// TestRunCancelledAtAnyMoment: whenever a caller gives up, before, in or after the handshake, no connection stays open.
func TestRunCancelledAtAnyMoment(t *testing.T) {
	mux := http.NewServeMux()
	mux.HandleFunc("POST /v0/sandboxes/{id}/exec", func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusCreated)
		_ = json.NewEncoder(w).Encode(shard.Exec{ID: "e1", State: shard.ExecRunning})
	})
	mux.HandleFunc("GET /v0/sandboxes/{id}/exec/{exec}", func(w http.ResponseWriter, r *http.Request) {
		if ws, err := websocket.Accept(w, r, nil); err == nil {
			_, _, _ = ws.Read(context.Background())
		}
	})
	socket := filepath.Join(t.TempDir(), "shard.sock")
	l, err := net.Listen("unix", socket)
	if err != nil {
		t.Fatal(err)
	}
	server := &http.Server{Handler: mux, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(l) }()
	t.Cleanup(func() { _ = server.Close() })
	var open atomic.Int32
	c := client.New(client.Options{Dial: func(ctx context.Context) (net.Conn, error) {
		conn, err := client.Unix(socket)(ctx)
		if err != nil {
			return nil, err
		}
		open.Add(1)
		return &counted{Conn: conn, open: &open}, nil
	}})
	defer c.Close()
	worked := 0
	for i := range 400 {
		ctx, cancel := context.WithCancel(t.Context())
		timer := time.AfterFunc(time.Duration(i%100)*20*time.Microsecond, cancel)
		_, s, err := c.Run(ctx, "box", shard.ExecRequest{Command: []string{"true"}})
		if err == nil {
			worked++
			_ = s.Close()
		}
		timer.Stop()
		cancel()
	}
	for deadline := time.Now().Add(time.Minute); open.Load() > 0; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("%d connections stay open (%d of the calls succeeded)", open.Load(), worked)
		}
	}
}

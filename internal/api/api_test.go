package api

import (
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/useshards/shard"
)

// ask sends a request that fails before it reaches the engine.
func ask(method, target, body string) (int, shard.ErrorDetail) {
	a := New(Config{Log: slog.New(slog.DiscardHandler)})
	w := httptest.NewRecorder()
	r := httptest.NewRequest(method, target, strings.NewReader(body))
	a.ServeHTTP(w, r)
	var e shard.ErrorBody
	data, _ := io.ReadAll(w.Body)
	_ = json.Unmarshal(data, &e)
	return w.Code, e.Error
}

func TestRefusals(t *testing.T) {
	for _, c := range []struct {
		method, target, body string
		status               int
		code                 shard.Code
		says                 string
	}{
		{"GET", "/v0/nothing", "", 404, "not_found", "no route"},
		{"GET", "/v0/sandboxes?colour=red", "", 400, "invalid_request", "colour"},
		{"GET", "/v0/sandboxes?all=yes", "", 400, "invalid_request", "all must be true or false"},
		{"GET", "/v0/sandboxes?all=true&all=true", "", 400, "invalid_request", "twice"},
		{"GET", "/v0/sandboxes?%zz", "", 400, "invalid_request", "query"},
		{"POST", "/v0/sandboxes", "", 400, "invalid_request", "empty"},
		{"POST", "/v0/sandboxes", "[]", 400, "invalid_request", "object"},
		{"POST", "/v0/sandboxes", "{", 400, "invalid_request", "not valid JSON"},
		{"POST", "/v0/sandboxes", "{}{}", 400, "invalid_request", "goes on"},
		{"POST", "/v0/sandboxes", `{"colour":"SECRET"}`, 400, "invalid_request", `"colour"`},
		{"POST", "/v0/sandboxes", `{"IMAGE":"x"}`, 400, "invalid_request", `"IMAGE"`},
		{"POST", "/v0/sandboxes", `{"image":"x","image":"y"}`, 400, "invalid_request", "twice"},
		{"POST", "/v0/sandboxes", `{"image":"x","resources":{"VCPUS":1}}`, 400, "invalid_request", `"VCPUS"`},
		{"POST", "/v0/sandboxes", `{"image":null}`, 400, "invalid_request", `"image" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":"x","name":null}`, 400, "invalid_request", `"name" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":"x","env":[null]}`, 400, "invalid_request", `"env" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":"x","resources":null}`, 400, "invalid_request", `"resources" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":"x","resources":{"memory_mib":null}}`, 400, "invalid_request", `"memory_mib" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":"x","ports":[{"guest_port":null}]}`, 400, "invalid_request", `"guest_port" must not be null`},
		{"POST", "/v0/sandboxes/a/exec", `{"command":["x"],"size":null}`, 400, "invalid_request", `"size" must not be null`},
		{"POST", "/v0/sandboxes/a/processes", `{"command":["x"],"restart":{"policy":"no","backoff":null}}`, 400, "invalid_request", `"backoff" must not be null`},
		{"PUT", "/v0/secrets/A", `{"value":"SECRET\ud800","destinations":["a.example"]}`, 400, "invalid_request", "not Unicode"},
		{"PUT", "/v0/secrets/A", `{"value":"SECRET\udc00\ud800","destinations":["a.example"]}`, 400, "invalid_request", "not Unicode"},
		{"PUT", "/v0/secrets/A", `{"value":"SECRET\ud83d`, 400, "invalid_request", "not Unicode"},
		{"PUT", "/v0/secrets/A", "{\"value\":\"SECRET\xe9\"}", 400, "invalid_request", "not Unicode"},
		{"PUT", "/v0/secrets/A", `{"colour":"\ud83d\ude00"}`, 400, "invalid_request", "colour"},
		{"PUT", "/v0/secrets/A", `{"colour":"\\ud800"}`, 400, "invalid_request", "colour"},
		{"POST", "/v0/sandboxes", `{"env":["A=\ud83d\ud83d\ude00"]}`, 400, "invalid_request", "not Unicode"},
		{"POST", "/v0/sandboxes/a/exec", `{"command":["\uDFFF"]}`, 400, "invalid_request", "not Unicode"},
		{"PUT", "/v0/policies/a", `{"rules":null}`, 400, "invalid_request", `"rules" must not be null`},
		{"POST", "/v0/sandboxes", `{"image":7}`, 400, "invalid_request", "image must be a JSON string"},
		{"POST", "/v0/sandboxes", `{"resources":{"memory_mib":1.5}}`, 400, "invalid_request", "memory_mib must be a JSON integer"},
		{"POST", "/v0/sandboxes", `{"resources":{"memory_mib":99999999999999999999}}`, 400, "invalid_request", "memory_mib"},
		{"POST", "/v0/sandboxes", strings.Repeat(`{"image":`, 100_000), 400, "invalid_request", ""},
		{"POST", "/v0/sandboxes", `{"image":"` + strings.Repeat("x", 2<<20) + `"}`, 413, "body_too_large", ""},
		{"POST", "/v0/sandboxes/web/stop", `{"grace":3}`, 400, "invalid_request", "grace"},
		{"PUT", "/v0/sandboxes/web/files", "x", 400, "invalid_request", "path"},
		{"PUT", "/v0/sandboxes/web/files?path=/x&mode=999", "x", 400, "invalid_request", "mode"},
		{"PUT", "/v0/sandboxes/web/files?path=/x&mode=4755", "x", 400, "invalid_request", "mode"},
		{"POST", "/v0/sandboxes/web/exec/abc/kill", `{"signal":"HUP"}`, 400, "invalid_request", "TERM or KILL"},
		{"POST", "/v0/sandboxes/web/exec/abc/resize", `{"rows":70000}`, 400, "invalid_request", "rows"},
	} {
		status, e := ask(c.method, c.target, c.body)
		if status != c.status || e.Code != c.code || !strings.Contains(e.Message, c.says) {
			t.Errorf("%s %s %.40s: %d %+v", c.method, c.target, c.body, status, e)
		}
		if strings.Contains(e.Message, "SECRET") {
			t.Errorf("a value is in the message: %s", e.Message)
		}
	}
}

// TestPages: whatever the limit, and whatever is removed between two pages, every item that stays is seen once, in order.
func TestPages(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items := rapid.SliceOfNDistinct(rapid.StringMatching(`[a-z:/.]{1,8}`), 0, 30, rapid.ID).Draw(t, "items")
		slices.Sort(items)
		limit := rapid.SampledFrom([]string{"1", "2", "7", "100"}).Draw(t, "limit")
		stay := slices.Clone(items)
		var got []string
		query := map[string][]string{"limit": {limit}}
		for {
			out, next, err := page(&call{query: query}, stay, func(s string) string { return s })
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, out...)
			if next == nil {
				break
			}
			query["cursor"] = []string{*next}
			if len(stay) > 0 && rapid.Bool().Draw(t, "remove") {
				i := rapid.IntRange(0, len(stay)-1).Draw(t, "which")
				stay = slices.Delete(stay, i, i+1)
			}
		}
		if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) {
			t.Fatalf("out of order or twice: %q", got)
		}
		for _, s := range stay {
			if !slices.Contains(got, s) {
				t.Fatalf("%q was left out of %q", s, got)
			}
		}
	})
	for _, bad := range []map[string][]string{{"limit": {"0"}}, {"limit": {"-1"}}, {"limit": {"x"}}, {"cursor": {""}}, {"cursor": {"%"}}} {
		if _, _, err := page(&call{query: bad}, []string{"a"}, func(s string) string { return s }); shard.CodeOf(err) != shard.CodeInvalidRequest {
			t.Errorf("%v: %v", bad, err)
		}
	}
}

func TestUpgradeNeedsBothHeaders(t *testing.T) {
	r := httptest.NewRequest(http.MethodGet, "/", nil)
	r.Header.Set("Upgrade", "WebSocket")
	if upgrades(r) {
		t.Error("without Connection")
	}
	r.Header.Set("Connection", "keep-alive, Upgrade")
	if !upgrades(r) {
		t.Error("with both")
	}
}

func FuzzBody(f *testing.F) {
	f.Add(`{"image":"alpine","resources":{"memory_mib":1}}`)
	f.Fuzz(func(t *testing.T, body string) {
		c := &call{w: httptest.NewRecorder(), r: httptest.NewRequest("POST", "/", strings.NewReader(body))}
		var req shard.CreateRequest
		if err := c.body(&req, false); err != nil && shard.CodeOf(err) == shard.CodeInternal {
			t.Fatalf("%q: %v", body, err)
		}
	})
}

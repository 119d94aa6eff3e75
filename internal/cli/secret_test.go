package cli_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/creack/pty"
	"github.com/google/go-cmp/cmp"

	"github.com/useshards/shard"
)

func TestSecret(t *testing.T) {
	d := start(t)
	var body string
	list := `{"secrets":[{"name":"A_KEY","destinations":["api.example.com","*.example.org"],"placeholder":"mock-A_KEY","updated_at":"2026-01-02T03:04:05Z"}],"next":null`
	d.mux.HandleFunc("PUT /v0/secrets/{name}", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		body = string(b)
		_, _ = io.WriteString(w, `{"name":"`+r.PathValue("name")+`","destinations":["a.example"],"placeholder":"x","updated_at":"2026-01-02T03:04:05Z"}`)
	})
	d.answer("GET /v0/secrets", 200, list+`,"warnings":["secret BAD cannot be read: it is damaged"]}`)
	d.answer("DELETE /v0/secrets/A_KEY", 409, `{"error":{"code":"in_use","message":"secret A_KEY is in use","holders":["sec"]}}`)
	d.answer("DELETE /v0/secrets/OLD", 204, "")
	d.answer("POST /v0/sandboxes/web/secrets/A_KEY", 200, `{"id":"bold-fern-0001"}`)
	d.answer("DELETE /v0/sandboxes/web/secrets/A_KEY", 200, `{"id":"bold-fern-0001"}`)
	d.answer("GET /v0/sandboxes/web", 200, `{"id":"bold-fern-0001","name":"web","secrets":["A_KEY","GONE"],"policy":"p","egress":{"rules":[
		{"id":"1","action":"deny","destination":{"kind":"domain","value":"closed.example.org"}},{"id":"2","action":"allow","destination":{"kind":"group","value":"any"}}]},
		"misuses":[{"secret":"A_KEY","count":3,"last_at":"2026-01-02T03:04:05Z","host":"evil.example","reason":"plain HTTP"}]}`)
	d.refuse("GET /v0/sandboxes/{id}", 404, shard.CodeNotFound, "there is no sandbox")

	const warning = "warning: a value on the command line can be seen in process lists and stays in the shell's history: give it on stdin\n"
	for _, tc := range []struct {
		args, stdin string
		want        result
		body        string
	}{
		{"set --dest a.example A_KEY VALUE", "", result{out: "A_KEY\n", errs: warning}, `{"value":"VALUE","destinations":["a.example"]}`},
		{"set --dest a.example --destination b.example --placeholder x-placeholder --on-misuse stop A_KEY -", "VALUE\r\n", result{out: "A_KEY\n"},
			`{"value":"VALUE","destinations":["a.example","b.example"],"placeholder":"x-placeholder","on_misuse":"stop"}`},
		{"set A_KEY", "VALUE", result{out: "A_KEY\n"}, `{"value":"VALUE"}`},
		{"set A_KEY", " VALUE \n\n", result{out: "A_KEY\n"}, `{"value":" VALUE \n"}`},
		{"set A_KEY", "", result{errs: "shard: the value is empty: give it on stdin, such as with < FILE\n", code: 1}, ""},
		{"set A_KEY", strings.Repeat("x", 100_000), result{errs: "shard: the value on stdin has more than 65536 bytes\n", code: 1}, ""},
		{"set a_key", "VALUE", result{errs: "shard: secret name \"a_key\" is not valid: up to 128 of A-Z, 0-9 and _, not beginning with a digit\n", code: 1}, ""},
		{"list", "", result{out: "NAME    DESTINATIONS                     PLACEHOLDER   UPDATED\nA_KEY   api.example.com, *.example.org   mock-A_KEY    2026-01-02 03:04:05\n",
			errs: "shard: secret BAD cannot be read: it is damaged\n", code: 1}, ""},
		{"remove OLD A_KEY", "", result{out: "OLD\n", errs: "shard: secret A_KEY is in use (in use by sec)\n", code: 1}, ""},
		{"grant web A_KEY", "", result{out: "bold-fern-0001\n"}, ""},
		{"ungrant web A_KEY", "", result{out: "bold-fern-0001\n"}, ""},
		{"check web A_KEY https://API.example.com/x", "", result{out: "https://api.example.com: the value is put in: where a header, or the user or password of Basic credentials, holds mock-A_KEY\n"}, ""},
		{"check web A_KEY https://x.example.org:443", "", result{out: "https://x.example.org: the value is put in: where a header, or the user or password of Basic credentials, holds mock-A_KEY\n"}, ""},
		{"check web A_KEY http://api.example.com:443/", "", result{out: "http://api.example.com:443: the placeholder stays: the request is not encrypted: values go out with https only\n"}, ""},
		{"check web A_KEY https://api.example.com:8443/", "", result{out: "https://api.example.com:8443: the placeholder stays: the port is not 443\n"}, ""},
		{"check web A_KEY https://user:pw@a.b.example.org/", "", result{out: "https://a.b.example.org: the placeholder stays: a.b.example.org is none of the destinations of secret A_KEY, which are api.example.com, *.example.org\n"}, ""},
		{"check web B_KEY https://api.example.com/", "", result{out: "https://api.example.com: the placeholder stays: sandbox web does not have secret B_KEY (shard secret grant)\n"}, ""},
		{"check web GONE https://api.example.com/", "", result{out: "https://api.example.com: the placeholder stays: there is no secret GONE any more, or it cannot be read\n"}, ""},
		{"check --format json web A_KEY https://192.0.2.1/", "", result{out: "{\n  \"sandbox\": \"web\",\n  \"secret\": \"A_KEY\",\n  \"url\": \"https://192.0.2.1\",\n  \"put_in\": false,\n" +
			"  \"explanation\": \"192.0.2.1 is none of the destinations of secret A_KEY, which are api.example.com, *.example.org\"\n}\n"}, ""},
	} {
		body = ""
		got := runApp(t, newApp(strings.NewReader(tc.stdin), nil, nil), append([]string{"--root", d.root, "secret"}, strings.Fields(tc.args)...)...)
		if diff := cmp.Diff(tc.want, got, cmp.AllowUnexported(result{})); diff != "" {
			t.Errorf("%s: %s", tc.args, diff)
		}
		if body != tc.body {
			t.Errorf("%s sent %s, want %s", tc.args, body, tc.body)
		}
	}
	for args, word := range map[string]string{
		"check web A_KEY https://closed.example.org/": "does not get that far", "check web A_KEY ftp://user:hidden@api.example.com/": "URL is not",
		"set": "NAME is missing", "set A_KEY hidden --dest a.example": "too many arguments", "check nobody A_KEY https://a.example/": "there is no sandbox",
	} {
		got := runApp(t, newApp(strings.NewReader(""), nil, nil), append([]string{"--root", d.root, "secret"}, strings.Fields(args)...)...)
		if all := got.out + got.errs; !strings.Contains(all, word) || strings.Contains(all, "hidden") {
			t.Errorf("%s: %+v", args, got)
		}
	}
	if got := run(t, d, "inspect", "--format", "table", "web"); !strings.Contains(got.out, "misuse    A_KEY 3 times, last 2026-01-02 03:04:05 to evil.example: plain HTTP\n") {
		t.Errorf("got %+v", got)
	}
}

// TestSecretPrompt: at a terminal the value is asked for, and not shown.
func TestSecretPrompt(t *testing.T) {
	d := start(t)
	sent := make(chan string, 1)
	d.mux.HandleFunc("PUT /v0/secrets/A_KEY", func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		sent <- string(b)
		_, _ = io.WriteString(w, `{"name":"A_KEY","destinations":["a.example"],"placeholder":"x","updated_at":"2026-01-02T03:04:05Z"}`)
	})
	terminal, err := pty.Start(command(t, d, "secret", "set", "--dest", "a.example", "A_KEY"))
	if err != nil {
		t.Fatal(err)
	}
	defer terminal.Close()
	shown := ""
	for !strings.Contains(shown, "value of A_KEY (not shown): ") {
		b := make([]byte, 1024)
		n, err := terminal.Read(b)
		if err != nil {
			t.Fatalf("%v: %q", err, shown)
		}
		shown += string(b[:n])
	}
	if _, err := io.WriteString(terminal, "typed-value\r"); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(terminal) // EIO at the end
	if got := <-sent; got != `{"value":"typed-value","destinations":["a.example"]}` {
		t.Errorf("sent %s", got)
	}
	if strings.Contains(shown+string(rest), "typed-value") || !strings.Contains(string(rest), "A_KEY") {
		t.Errorf("the terminal shows %q", shown+string(rest))
	}
}

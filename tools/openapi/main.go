// Command openapi writes api/openapi.json and docs/api.md from the route table, the Go types of the bodies and their
// comments, so that none of them can say something else than the daemon does. With -check it writes nothing and fails
// when a file is not what it would write. It runs in the root of the source tree.
package main

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"path/filepath"
)

func main() {
	check := flag.Bool("check", false, "only compare")
	flag.Parse()
	if err := run(*check); err != nil {
		fmt.Fprintln(os.Stderr, "openapi:", err)
		os.Exit(1)
	}
}

func run(check bool) error {
	comments, err := readComments(".")
	if err != nil {
		return err
	}
	d, err := describe(comments)
	if err != nil {
		return err
	}
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	enc.SetIndent("", "  ")
	if err := enc.Encode(d.document()); err != nil {
		return err
	}
	for path, want := range map[string][]byte{filepath.Join("api", "openapi.json"): text.Bytes(), filepath.Join("docs", "api.md"): d.page()} {
		if !check {
			if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
				return err
			}
			if err := os.WriteFile(path, want, 0o644); err != nil { // documentation is for everyone
				return err
			}
			continue
		}
		have, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		if !bytes.Equal(have, want) {
			return fmt.Errorf("%s is not what the routes and types say: run make gen and look at what changed", path)
		}
	}
	return nil
}

// Command get-go is Go's net/http in the image of clients.
package main

import (
	"fmt"
	"io"
	"net/http"
	"os"
	"strings"
	"time"
)

func main() {
	if err := get(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func get(args []string) error {
	r, err := http.NewRequest(http.MethodGet, args[0], nil)
	if err != nil {
		return err
	}
	if len(args) > 1 {
		name, value, _ := strings.Cut(args[1], ": ")
		r.Header.Set(name, value)
	}
	resp, err := (&http.Client{Timeout: time.Minute}).Do(r)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if _, err := io.Copy(os.Stdout, resp.Body); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("status %s", resp.Status)
	}
	return nil
}

// Report reads what `go test -json` writes and tells a person what matters: the output of what failed, each skip with
// its reason, what took long, and last a line that counts. It exits 1 when something failed or nothing ran.
//
//	go test -json ./... | go run ./tools/report
package main

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"
)

// event is one line of `go test -json`.
type event struct {
	Action     string
	Package    string
	ImportPath string // of a build's output
	Test       string
	Elapsed    float64
	Output     string
}

// outcome is how one test, or with an empty name one package, ended.
type outcome struct {
	pkg, test string
	action    string
	elapsed   time.Duration
	output    []string
	parent    bool // it has subtests, which are counted instead
	ran       bool // false for what only a name with a slash suggests
}

func main() {
	if err := report(os.Stdin, os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

func report(r io.Reader, w io.Writer) error {
	tests := make(map[string]*outcome)
	get := func(pkg, test string) *outcome {
		key := pkg + " " + test
		if tests[key] == nil {
			tests[key] = &outcome{pkg: pkg, test: test}
		}
		return tests[key]
	}
	lines := bufio.NewReaderSize(r, 1<<20)
	for {
		line, err := lines.ReadString('\n')
		if err != nil && line == "" {
			break
		}
		var e event
		if json.Unmarshal([]byte(line), &e) != nil {
			fmt.Fprint(w, line) // not go test's: somebody should see it
			continue
		}
		pkg := e.Package
		if pkg == "" {
			pkg, _, _ = strings.Cut(e.ImportPath, " ")
		}
		o := get(pkg, e.Test)
		o.ran = true
		for i, c := range e.Test {
			if c == '/' {
				get(pkg, e.Test[:i]).parent = true
			}
		}
		switch e.Action {
		case "output", "build-output":
			o.output = append(o.output, e.Output)
		case "pass", "fail", "skip", "build-fail":
			o.action, o.elapsed = strings.TrimPrefix(e.Action, "build-"), time.Duration(e.Elapsed*float64(time.Second))
			if e.Test == "" && e.Action != "skip" {
				fmt.Fprintf(w, "%-4s %6.1fs  %s\n", o.action, e.Elapsed, pkg)
			}
		}
	}
	return tell(w, tests)
}

// tell prints the report.
func tell(w io.Writer, tests map[string]*outcome) error {
	all := make([]*outcome, 0, len(tests))
	for _, o := range tests {
		if o.ran {
			all = append(all, o)
		}
	}
	slices.SortFunc(all, func(a, b *outcome) int { return strings.Compare(a.pkg+"\x00"+a.test, b.pkg+"\x00"+b.test) })
	var passed, failed, skipped int
	broken := make(map[string]bool) // packages and tests below which a failure was counted
	for _, o := range slices.Backward(all) {
		if o.action == "" && o.test != "" {
			o.action = "fail" // it began and never ended: a crash or a time-out
		}
		if o.action != "fail" || broken[o.pkg+"\x00"+o.test] && o.test == "" {
			continue
		}
		if !broken[o.pkg+"\x00"+o.test] {
			failed++
		}
		for name := o.test; name != ""; {
			i := max(strings.LastIndexByte(name, '/'), 0)
			name = name[:i]
			broken[o.pkg+"\x00"+name] = true
		}
		fmt.Fprintf(w, "\n=== failed: %s %s\n%s", o.pkg, o.test, strings.Join(o.output, ""))
	}
	fmt.Fprintln(w)
	for _, o := range all {
		if o.test == "" || o.parent && o.action != "skip" {
			continue
		}
		switch o.action {
		case "pass":
			passed++
		case "skip":
			skipped++
			fmt.Fprintf(w, "skipped: %s %s: %s\n", o.pkg, o.test, reason(o.output))
		}
	}
	slow := slices.Clone(all)
	slices.SortStableFunc(slow, func(a, b *outcome) int { return int(b.elapsed - a.elapsed) })
	slow = slices.DeleteFunc(slow, func(o *outcome) bool { return o.test == "" || o.elapsed < 5*time.Second })
	for _, o := range slow[:min(len(slow), 10)] {
		fmt.Fprintf(w, "slow: %6.1fs  %s %s\n", o.elapsed.Seconds(), o.pkg, o.test)
	}
	fmt.Fprintf(w, "%d passed, %d failed, %d skipped\n", passed, failed, skipped)
	if failed > 0 {
		return fmt.Errorf("%d tests failed", failed)
	}
	if passed == 0 {
		return fmt.Errorf("no test ran")
	}
	return nil
}

// reason is what a skipped test said, without go test's own lines.
func reason(output []string) string {
	var said []string
	for _, line := range output {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "===") || strings.HasPrefix(line, "---") {
			continue
		}
		if _, after, ok := strings.Cut(line, ".go:"); ok {
			_, line, _ = strings.Cut(after, ": ")
		}
		said = append(said, line)
	}
	return strings.Join(said, " ")
}

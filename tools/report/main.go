// Report reads what `go test -json` writes and tells a person what matters: the output of what failed, each skip with
// its reason, what took long, and last a line that counts. It exits 1 when something failed or nothing ran.
//
// With -again N, up to N failed tests run once more, one at a time: real kernels on a busy host make some fail that are not
// broken. What passes then is reported as flaky, with what it said when it failed; it is a fault still, of the test or of
// what it tests. A test that fails twice has failed.
//
//	go test -json ./... | go run ./tools/report -again 5
package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
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
	again := flag.Int("again", 0, "run up to this `number` of failed tests once more")
	flag.Parse()
	if err := report(os.Stdin, os.Stdout, *again, goTest); err != nil {
		fmt.Fprintln(os.Stderr, "report:", err)
		os.Exit(1)
	}
}

// outcomes are those of tests and packages, by "package test".
type outcomes map[string]*outcome

func (all outcomes) get(pkg, test string) *outcome {
	key := pkg + " " + test
	if all[key] == nil {
		all[key] = &outcome{pkg: pkg, test: test}
	}
	return all[key]
}

func report(r io.Reader, w io.Writer, again int, run func(pkg, test string) io.Reader) error {
	all := read(r, w)
	flaky(w, all, again, run)
	return tell(w, all)
}

// goTest runs one test by itself.
func goTest(pkg, test string) io.Reader {
	cmd := exec.Command("go", "test", "-json", "-count=1", "-timeout", "15m", "-run", "^"+regexp.QuoteMeta(test)+"$", pkg)
	out, _ := cmd.Output() // what it says tells whether it passed
	return bytes.NewReader(out)
}

// flaky runs failed tests again, when they are few, and puts the new outcome in the place of the old one where they pass.
func flaky(w io.Writer, all outcomes, most int, run func(pkg, test string) io.Reader) {
	top := make(map[string][]string) // package → its failed tests
	var count int
	for _, o := range all {
		o.settle()
		if o.action == "fail" && o.test != "" && !strings.Contains(o.test, "/") {
			top[o.pkg] = append(top[o.pkg], o.test)
			count++
		}
	}
	if count > most {
		return
	}
	for pkg, tests := range top {
		healed := 0
		for _, test := range tests {
			fresh := read(run(pkg, test), io.Discard)
			if o := fresh[pkg+" "+test]; o == nil || o.action != "pass" {
				continue
			}
			healed++
			fmt.Fprintf(w, "\n=== flaky: %s %s failed, and passed when it ran again by itself; of its failure:\n", pkg, test)
			for key, o := range all {
				if o.pkg != pkg || o.test != test && !strings.HasPrefix(o.test, test+"/") {
					continue
				}
				if o.action == "fail" {
					fmt.Fprint(w, strings.Join(o.output, ""))
				}
				delete(all, key)
			}
			for key, o := range fresh {
				if o.test != "" {
					all[key] = o
				}
			}
		}
		if o := all.get(pkg, ""); healed == len(tests) && !o.crashed() {
			o.action = "pass"
		}
	}
}

// settle calls what began and never ended a failure: a crash or a time-out.
func (o *outcome) settle() {
	if o.ran && o.action == "" && o.test != "" {
		o.action = "fail"
	}
}

// crashed says that a package failed by more than the failure of tests: what did not get its turn was not tested.
func (o *outcome) crashed() bool {
	return slices.ContainsFunc(o.output, func(line string) bool {
		return strings.HasPrefix(line, "panic:") || strings.HasPrefix(line, "fatal error:") || strings.HasPrefix(line, "signal:")
	})
}

// read gathers the outcomes, and shows how each package ended.
func read(r io.Reader, w io.Writer) outcomes {
	tests := make(outcomes)
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
		o := tests.get(pkg, e.Test)
		o.ran = true
		for i, c := range e.Test {
			if c == '/' {
				tests.get(pkg, e.Test[:i]).parent = true
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
	return tests
}

// tell prints the report.
func tell(w io.Writer, tests outcomes) error {
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
		o.settle()
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

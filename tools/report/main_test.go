package main

import (
	"io"
	"strings"
	"testing"
)

func TestReport(t *testing.T) {
	for name, c := range map[string]struct {
		in   []string
		last string
		has  []string
		fail bool
	}{
		"all kinds": {in: []string{
			`{"Action":"run","Package":"p","Test":"A"}`,
			`{"Action":"pass","Package":"p","Test":"A","Elapsed":0.1}`,
			`{"Action":"output","Package":"p","Test":"B/x","Output":"    b_test.go:7: no kernel for it\n"}`,
			`{"Action":"skip","Package":"p","Test":"B/x"}`,
			`{"Action":"pass","Package":"p","Test":"B/y"}`,
			`{"Action":"pass","Package":"p","Test":"B"}`,
			`{"Action":"output","Package":"p","Test":"C/z","Output":"it broke\n"}`,
			`{"Action":"fail","Package":"p","Test":"C/z"}`,
			`{"Action":"fail","Package":"p","Test":"C"}`,
			`{"Action":"fail","Package":"p"}`,
		}, last: "2 passed, 1 failed, 1 skipped", has: []string{"p B/x: no kernel for it", "it broke"}, fail: true},
		"a build that fails": {in: []string{
			`{"ImportPath":"p [p.test]","Action":"build-output","Output":"syntax error\n"}`,
			`{"ImportPath":"p [p.test]","Action":"build-fail"}`,
			`{"Action":"fail","Package":"p"}`,
		}, last: "0 passed, 1 failed, 0 skipped", has: []string{"syntax error"}, fail: true},
		"a name with a slash": {in: []string{
			`{"Action":"run","Package":"p","Test":"A/b/c"}`,
			`{"Action":"pass","Package":"p","Test":"A/b/c"}`,
			`{"Action":"pass","Package":"p","Test":"A"}`,
			`{"Action":"pass","Package":"p"}`,
		}, last: "1 passed, 0 failed, 0 skipped"},
		"a crash": {in: []string{
			`{"Action":"run","Package":"p","Test":"A"}`,
			`{"Action":"fail","Package":"p"}`,
		}, last: "0 passed, 1 failed, 0 skipped", fail: true},
		"nothing": {in: nil, last: "0 passed, 0 failed, 0 skipped", fail: true},
		"a skipped parent": {in: []string{
			`{"Action":"pass","Package":"p","Test":"A"}`,
			`{"Action":"skip","Package":"p","Test":"B"}`,
			`{"Action":"pass","Package":"p"}`,
		}, last: "1 passed, 0 failed, 1 skipped"},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := report(strings.NewReader(strings.Join(c.in, "\n")+"\n"), &out, 0, nil)
			if (err != nil) != c.fail {
				t.Errorf("error %v", err)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := lines[len(lines)-1]; got != c.last {
				t.Errorf("the last line is %q, want %q", got, c.last)
			}
			for _, want := range c.has {
				if !strings.Contains(out.String(), want) {
					t.Errorf("%q is missing in\n%s", want, out.String())
				}
			}
		})
	}
}

// TestAgain: a test that passes alone is told as flaky and counted as passed; what fails twice, crashes, or is one of many has failed.
func TestAgain(t *testing.T) {
	const failed = `{"Action":"run","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"A/y"}
{"Action":"output","Package":"p","Test":"A/x","Output":"too late\n"}
{"Action":"fail","Package":"p","Test":"A/x"}
{"Action":"fail","Package":"p","Test":"A"}
{"Action":"pass","Package":"p","Test":"B"}
{"Action":"fail","Package":"p"}
`
	const healed = `{"Action":"pass","Package":"p","Test":"A/x"}
{"Action":"pass","Package":"p","Test":"A/y"}
{"Action":"pass","Package":"p","Test":"A"}
{"Action":"pass","Package":"p"}
`
	for name, c := range map[string]struct {
		in, again string
		most      int
		last      string
		fail      bool
	}{
		"it passes":      {in: failed, again: healed, most: 1, last: "3 passed, 0 failed, 0 skipped"},
		"it fails twice": {in: failed, again: failed, most: 1, last: "2 passed, 1 failed, 0 skipped", fail: true},
		"too many":       {in: failed, again: healed, last: "2 passed, 1 failed, 0 skipped", fail: true},
		"nothing ran":    {in: failed, most: 1, last: "2 passed, 1 failed, 0 skipped", fail: true},
		"a crash": {in: strings.Replace(failed, `{"Action":"fail","Package":"p"}`, `{"Action":"output","Package":"p","Output":"panic: x\n"}
{"Action":"fail","Package":"p"}`, 1), again: healed, most: 1, last: "3 passed, 1 failed, 0 skipped", fail: true},
	} {
		t.Run(name, func(t *testing.T) {
			var out strings.Builder
			err := report(strings.NewReader(c.in), &out, c.most, func(pkg, test string) io.Reader {
				if pkg != "p" || test != "A" {
					t.Errorf("%s %s is run again", pkg, test)
				}
				return strings.NewReader(c.again)
			})
			if (err != nil) != c.fail {
				t.Errorf("error %v", err)
			}
			lines := strings.Split(strings.TrimSpace(out.String()), "\n")
			if got := lines[len(lines)-1]; got != c.last {
				t.Errorf("the last line is %q, want %q\n%s", got, c.last, out.String())
			}
			if !strings.Contains(out.String(), "too late") {
				t.Error("the failure is not shown")
			}
		})
	}
}

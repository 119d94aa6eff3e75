//go:build linux

package rootfs

import "testing"

func TestUnescape(t *testing.T) {
	for in, want := range map[string]string{`/a\040b`: "/a b", `\134`: `\`, `/a\12`: `/a\12`, `\999x`: `\999x`, "": ""} {
		if got := unescape(in); got != want {
			t.Errorf("unescape(%q) = %q, want %q", in, got, want)
		}
	}
}

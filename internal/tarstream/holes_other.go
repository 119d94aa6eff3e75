//go:build !linux

package tarstream

import "io"

// Contents reads an open file. Only Linux is asked where its holes are.
func Contents(r io.Reader, _ int, _, _ int64) io.Reader { return r }

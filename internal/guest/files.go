package guest

import (
	"strings"

	"github.com/useshards/shard"
)

// CheckPath refuses what no file operation takes as a path in a sandbox. Everything else is the sandbox's kernel's to
// resolve, "..", links and doubled slashes included, so it can never leave the sandbox.
func CheckPath(path string) error {
	switch {
	case path == "":
		return shard.Invalidf("the path is empty: give an absolute path in the sandbox")
	case len(path) > 4096:
		return shard.Invalidf("the path is %d bytes long: at most 4096 are possible", len(path))
	case path[0] != '/':
		return shard.Invalidf("the path %s is not absolute: begin it with /", shard.Quote(path))
	case strings.IndexByte(path, 0) >= 0:
		return shard.Invalidf("the path %s holds a NUL", shard.Quote(path))
	}
	return nil
}

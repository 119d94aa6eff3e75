// Package script runs the stories in *.txtar: what a person types, and what the real programs answer.
package script

import (
	"path/filepath"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

func TestScripts(t *testing.T) {
	d := testenv.Start(t, testenv.Options{})
	d.Stories(t, []string{filepath.Join(testenv.Bin(t), "shard"), "--root", d.Root})
}

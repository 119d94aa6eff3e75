package script

import (
	"path/filepath"
	"testing"

	"github.com/useshards/shard/internal/testenv"
)

func TestScripts(t *testing.T) {
	d := testenv.Start(t, testenv.Options{})
	Run(t, d, []string{filepath.Join(testenv.Bin(t), "shard"), "--root", d.Root})
}

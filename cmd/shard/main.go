// Command shard is the command line and, as `shard daemon`, the daemon.
package main

import (
	"context"
	"os"

	"github.com/useshards/shard/internal/cli"
)

// version is set by the linker.
var version = "dev"

func main() {
	app := &cli.App{
		Version: version,
		In:      os.Stdin,
		Out:     os.Stdout,
		Err:     os.Stderr,
		Getenv:  os.Getenv,
		Daemon:  runDaemon,
		Probe:   probe,
	}
	os.Exit(app.Main(context.Background(), os.Args[1:]))
}

// Command shard is the command line, as `shard daemon` the daemon, and as `shard serve` its door to a network.
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
		Serve:   serve,
		Probe:   probe,
	}
	os.Exit(app.Main(context.Background(), os.Args[1:]))
}

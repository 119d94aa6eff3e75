package main

import (
	"context"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cli"
)

// The seam to internal/daemon, which the command line must not import.
var (
	runDaemon func(context.Context, cli.DaemonOptions) error
	probe     func(context.Context) ([]shard.ProviderInfo, error)
)

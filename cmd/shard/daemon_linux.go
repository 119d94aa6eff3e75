package main

import (
	"context"
	"errors"
	"io"
	stdlog "log"
	"os"
	"os/signal"
	"syscall"

	"github.com/useshards/shard"
	"github.com/useshards/shard/internal/cli"
	"github.com/useshards/shard/internal/daemon"
)

func init() {
	runDaemon = func(ctx context.Context, o cli.DaemonOptions) error {
		if os.Geteuid() != 0 {
			return errors.New("the daemon needs root: run " + cli.SudoCommand(o.Root, "daemon"))
		}
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		log, closeLog, err := logger(o.Log)
		if err != nil {
			return err
		}
		defer closeLog()
		// net/http quotes there what hosts send unasked, in which the value of a secret may be.
		stdlog.SetOutput(io.Discard)
		return daemon.Run(ctx, daemon.Options{Root: o.Root, Provider: o.Provider, PullTimeout: o.PullTimeout, Insecure: o.Insecure,
			DNS: o.DNS, SecretKeyFile: o.SecretKeyFile, Version: version, Log: log})
	}
	probe = func(ctx context.Context) ([]shard.ProviderInfo, error) { return daemon.Probe(ctx), nil }
}

package main

import (
	"context"
	"errors"
	"log/slog"
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
			return errors.New("the daemon needs root: run sudo shard daemon")
		}
		ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
		defer stop()
		log, closeLog, err := logger(o.Log)
		if err != nil {
			return err
		}
		defer closeLog()
		return daemon.Run(ctx, daemon.Options{Root: o.Root, Provider: o.Provider, PullTimeout: o.PullTimeout, Insecure: o.Insecure,
			DNS: o.DNS, Version: version, Log: log})
	}
	probe = func(ctx context.Context, _ string) ([]shard.ProviderInfo, error) { return daemon.Probe(ctx), nil }
}

// logger writes text for a person at a terminal, else JSON. SHARD_LOG_LEVEL=debug shows refused requests too.
func logger(path string) (*slog.Logger, func(), error) {
	out, done := os.Stderr, func() {}
	if path != "" {
		f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
		if err != nil {
			return nil, nil, err
		}
		out, done = f, func() { _ = f.Close() }
	}
	options := &slog.HandlerOptions{Level: slog.LevelInfo}
	if os.Getenv("SHARD_LOG_LEVEL") == "debug" {
		options.Level = slog.LevelDebug
	}
	if info, err := out.Stat(); err == nil && info.Mode()&os.ModeCharDevice != 0 {
		return slog.New(slog.NewTextHandler(out, options)), done, nil
	}
	return slog.New(slog.NewJSONHandler(out, options)), done, nil
}

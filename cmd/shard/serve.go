package main

import (
	"context"
	"log/slog"
	"os"

	"github.com/useshards/shard/internal/cli"
	"github.com/useshards/shard/internal/gate"
)

// serve is the seam to internal/gate, which the command line must not import.
func serve(ctx context.Context, o cli.ServeOptions) error {
	log, closeLog, err := logger("")
	if err != nil {
		return err
	}
	defer closeLog()
	return gate.Run(ctx, gate.Options{Root: o.Root, Listen: o.Listen, SigningKey: o.SigningKey, CertFile: o.CertFile, KeyFile: o.KeyFile,
		SelfSigned: o.SelfSigned, Insecure: o.Insecure, AllowHosts: o.AllowHosts, AllowOrigins: o.AllowOrigins, Preview: o.Preview, Log: log})
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

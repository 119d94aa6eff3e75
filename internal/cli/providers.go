package cli

import (
	"context"

	"github.com/spf13/cobra"

	"github.com/useshards/shard"
)

func (a *App) providersCommand() *cobra.Command {
	var f format
	cmd := &cobra.Command{
		Use:     "providers [options]",
		Short:   "List the isolation providers of the daemon",
		Long:    "List the isolation providers that the daemon knows, and whether each works on its host.",
		Example: `  shard providers`,
		Args:    arguments(0, 0, ""),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.providers(cmd.Context(), f)
		},
	}
	formatFlag(cmd, &f, formatTable)
	return cmd
}

func (a *App) providers(ctx context.Context, f format) error {
	list, err := a.client().Providers(ctx)
	if err != nil {
		return err
	}
	if f == formatJSON {
		if list == nil {
			list = []shard.ProviderInfo{}
		}
		return a.printJSON(list)
	}
	return a.printTable(providerRows(list)...)
}

func providerRows(list []shard.ProviderInfo) [][]string {
	rows := [][]string{{"PROVIDER", "AVAILABLE", "DEFAULT", "VERSION", "REASON"}}
	for _, p := range list {
		rows = append(rows, []string{p.Name, yesNo(p.Available), yesNo(p.Default), dash(p.Version), dash(p.Reason)})
	}
	return rows
}

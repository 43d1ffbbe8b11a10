// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/worker"
	"github.com/tenantd/tenantd/worker/config"
)

func (c *cli) runCommand() *cobra.Command {
	return &cobra.Command{
		Use:   "run",
		Short: "Run until SIGTERM",
		Long: `Run takes the address, forwards connections and keeps the tunnel until SIGTERM.
At SIGHUP it starts a new process from the same file, which takes over with the
configuration as it is then, and lets its own connections end for a while. So a
new binary or a new configuration costs nobody a connection.`,
		Example:           "  tenant-proxy run --config /etc/tenant-proxy/config.yaml",
		Args:              cobra.NoArgs,
		ValidArgsFunction: cobra.NoFileCompletions,
		RunE:              c.do(c.run),
	}
}

func (c *cli) run(ctx context.Context) error {
	// Before anything can replace the file.
	program, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find out which program this is: %w", err)
	}
	predecessor, inherited := takeOver()
	defer predecessor.Close()
	file, err := config.Load(c.config)
	if err != nil {
		return err
	}
	var level slog.Level
	if err := level.UnmarshalText([]byte(file.LogLevel)); err != nil {
		return fmt.Errorf("read logLevel: %w", err)
	}
	log := slog.New(slog.NewTextHandler(c.err, &slog.HandlerOptions{Level: level}))
	w, err := worker.New(worker.Config{File: file, Inherited: inherited, Logger: log})
	if err != nil {
		return err
	}

	hangups := make(chan os.Signal, 1)
	signal.Notify(hangups, syscall.SIGHUP)
	defer signal.Stop(hangups)
	ended := make(chan error, 1)
	go func() { ended <- w.Run(ctx) }()
	ready := w.Ready()
	for {
		select {
		case err := <-ended:
			return err
		case <-ready:
			predecessor.Release()
			ready = nil
		case <-hangups:
			log.Info("starting a new process to take over", "program", program)
			pid, err := replace(ctx, w, program)
			if err != nil {
				log.Error("going on: no new process took over", "error", err)
				continue
			}
			log.Info("a new process accepts", "pid", pid)
			w.Drain()
			return <-ended
		}
	}
}

// replace has a new process take over from w.
func replace(ctx context.Context, w *worker.Worker, program string) (pid int, err error) {
	sockets, err := w.Sockets()
	if err != nil {
		return 0, err
	}
	defer sockets.Close()
	return handOver(ctx, program, os.Args[1:], sockets)
}

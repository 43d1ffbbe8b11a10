// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command tenant-proxy is the worker's side of tenantd: it brings the connections
// of a worker's pods to their tenant's API server, and the API server's to the
// worker.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"runtime/debug"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"github.com/tenantd/tenantd/worker/config"
)

// The exit codes, as those of tenantctl.
const (
	exitDone   = 0
	exitFailed = 1
	exitUsage  = 2
)

// gcPercent is lower than Go's 100: what lives is many small connections, so
// collecting sooner costs little and saves memory. GOGC overrides it.
const gcPercent = 50

func main() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(gcPercent)
	}
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal ends what is under way; a second one ends the process.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], os.Stdout, os.Stderr))
}

// cli is one run of tenant-proxy.
type cli struct {
	out, err io.Writer

	config  string // --config
	started bool   // the command line was understood
}

// run carries out one command line and returns its exit code.
func run(ctx context.Context, args []string, out, errOut io.Writer) int {
	c := &cli{out: out, err: errOut}
	root := c.command()
	root.SetArgs(args)
	root.SetOut(out)
	root.SetErr(errOut)
	cmd, err := root.ExecuteContextC(ctx)
	switch {
	case err == nil:
		return exitDone
	case errors.Is(err, errSaid):
		return exitFailed
	}
	code := exitFailed
	if !c.started {
		code = exitUsage
		err = fmt.Errorf(`%w; see "%s --help"`, err, cmd.CommandPath())
	}
	for line := range strings.Lines(err.Error()) {
		fmt.Fprintf(errOut, "tenant-proxy: %s\n", strings.TrimRight(line, "\n"))
	}
	return code
}

// errSaid is for a failure that standard output tells already.
var errSaid = errors.New("failed")

func (c *cli) command() *cobra.Command {
	root := &cobra.Command{
		Use:   "tenant-proxy",
		Short: "Bring a worker's pods to their tenant's API server",
		Long: `tenant-proxy runs on each worker of a tenant of tenantd. It owns an address on
the machine where the cluster's pods find their API server, forwards their
connections byte for byte to one of the hosts, and runs the agent of the tunnel
by which the API server reaches the worker.

Exit codes:
  0  done
  1  failed
  2  bad usage`,
		Example: `  tenant-proxy check
  tenant-proxy status
  tenant-proxy adopt-kubelet`,
		SilenceErrors: true,
		SilenceUsage:  true,
	}
	root.PersistentFlags().StringVar(&c.config, "config", config.DefaultPath, "configuration file")
	must(root.MarkPersistentFlagFilename("config", "yaml"))
	root.AddCommand(
		c.runCommand(),
		c.installCommand(),
		c.uninstallCommand(),
		c.checkCommand(),
		c.statusCommand(),
		c.adoptCommand(),
		c.versionCommand(),
	)
	return root
}

// do marks the end of reading the command line: an error before it is about usage.
func (c *cli) do(f func(ctx context.Context) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		c.started = true
		return f(cmd.Context())
	}
}

// must is for the set-up of commands, which fails only if it names a flag wrongly.
func must(err error) {
	if err != nil {
		panic(err)
	}
}

// outputFlag adds -o, and refuses what is no format before anything is done.
func outputFlag(cmd *cobra.Command, format *string) {
	cmd.Flags().StringVarP(format, "output", "o", "", "output format: json")
	must(cmd.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"json"}, cobra.ShellCompDirectiveNoFileComp)))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if *format != "" && *format != "json" {
			return fmt.Errorf("invalid argument %q for -o: must be json", *format)
		}
		return nil
	}
}

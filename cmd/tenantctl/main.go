// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command tenantctl adds, removes and shows the Kubernetes clusters of a tenantd
// installation and hands out the credentials for them. It is a thin client of the
// system plane, which is a Kubernetes API: what it does can be done with kubectl.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"

	"golang.org/x/term"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	// The first signal ends what is under way; a second one ends the process.
	context.AfterFunc(ctx, stop)
	os.Exit(run(ctx, os.Args[1:], streams{
		in: os.Stdin, out: os.Stdout, err: os.Stderr,
		inIsTerminal:  term.IsTerminal(int(os.Stdin.Fd())),
		errIsTerminal: term.IsTerminal(int(os.Stderr.Fd())),
	}))
}

// streams are what tenantctl reads and writes: results go to out, progress and
// errors to err.
type streams struct {
	in       io.Reader
	out, err io.Writer

	inIsTerminal, errIsTerminal bool
}

// run carries out one command line and returns its exit code.
func run(ctx context.Context, args []string, s streams) int {
	c := &cli{streams: s}
	root := c.command()
	root.SetArgs(args)
	root.SetIn(s.in)
	root.SetOut(s.out)
	root.SetErr(s.err)
	cmd, err := root.ExecuteContextC(ctx)
	if err == nil {
		return exitDone
	}
	if !c.started {
		err = failure{exitUsage, fmt.Errorf(`%w; see "%s --help"`, err, cmd.CommandPath())}
	}
	code, text := c.explain(err)
	fmt.Fprintf(s.err, "tenantctl: %s\n", oneLine(text))
	return code
}

// oneLine joins the lines of an error, which a server may have written.
func oneLine(text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			lines = append(lines, line)
		}
	}
	return strings.Join(lines, "; ")
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Command bench measures what a tenant of tenantd costs beside the same control
// plane made of upstream's programs as separate processes, in one run on one
// machine. `make bench` runs it; docs/benchmarks.md says what it measures and why so.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// defaultTenants is the least for which a difference per tenant is well above
	// the noise of a garbage-collected heap.
	defaultTenants = 5
	// defaultPause outlasts what a control plane does after its first answer.
	defaultPause = 15 * time.Second
	// defaultSettle lets Go's scavenger return what starting had needed.
	defaultSettle = 45 * time.Second
	// defaultIdle holds several periods of nearly everything that an idle control
	// plane does: leases, polls and bookmarks come every few seconds.
	defaultIdle = time.Minute
	// defaultPatience is far more than a start takes on a busy machine.
	defaultPatience = 3 * time.Minute
)

// config is what the flags set.
type config struct {
	bin      string // directory of the programs
	output   string // file for the results
	tenants  int    // on each side
	pause    time.Duration
	settle   time.Duration
	idle     time.Duration
	patience time.Duration
	election bool // of upstream's controllers and scheduler
}

func (c config) validate() error {
	if c.tenants < 2 {
		return fmt.Errorf("--tenants %d: what a further tenant costs needs at least 2", c.tenants)
	}
	if c.pause < 0 || c.settle < 0 {
		return errors.New("--pause and --settle must not be negative")
	}
	if c.idle < time.Second || c.patience < time.Second {
		return errors.New("--idle and --patience must be at least 1s")
	}
	return nil
}

func main() {
	// A second signal changes nothing: the first one starts a clean-up that ends by itself.
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM, syscall.SIGHUP)
	defer stop()
	if err := newCommand().ExecuteContext(ctx); err != nil {
		if ctx.Err() != nil {
			err = fmt.Errorf("stopped by a signal, no result is written (%w)", err)
		}
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

func newCommand() *cobra.Command {
	var cfg config
	cmd := &cobra.Command{
		Use:   "bench",
		Short: "Measure what a tenant costs, beside upstream's programs as separate processes",
		Long: `Bench adds tenants to a tenantd and, in turn, starts sets of kube-apiserver,
kube-controller-manager and kube-scheduler on an etcd that they share. It compares
resident memory and idle CPU per tenant and the time until a tenant is usable.

It uses loopback and a directory under $TMPDIR only, and stops and removes
everything when it ends. $GOGC and $GOMEMLIMIT reach both sides.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if err := cfg.validate(); err != nil {
				return err
			}
			return run(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.tenants, "tenants", defaultTenants, "tenants on each side, at least 2")
	f.DurationVar(&cfg.pause, "pause", defaultPause, "wait after each addition, so that the next one has the machine to itself")
	f.DurationVar(&cfg.settle, "settle", defaultSettle, "wait before memory is compared: with one tenant on each side, and with all")
	f.DurationVar(&cfg.idle, "idle", defaultIdle, "how long CPU is measured while nothing is asked for")
	f.DurationVar(&cfg.patience, "patience", defaultPatience, "give up when a tenant is not usable after this time")
	f.BoolVar(&cfg.election, "leader-elect", true, "upstream's controllers and scheduler elect a leader, their default; without, they start sooner")
	binFlag(f, &cfg.bin, "tenantd, kube-apiserver, kube-controller-manager and kube-scheduler")
	outputFlag(f, &cfg.output)
	cmd.AddCommand(newNeighbourCommand(), newFloodCommand(), newServingCommand(), newChurnCommand(), newScaleCommand(), newSleepCommand(), newRouterCommand(), newBackendCommand(), newForwarderCommand())
	return cmd
}

// binFlag is where the programs are that a command runs.
func binFlag(f *pflag.FlagSet, bin *string, programs string) {
	f.StringVar(bin, "bin", "bin", "directory of "+programs)
}

// outputFlag is where a command writes what it has found.
func outputFlag(f *pflag.FlagSet, output *string) {
	f.StringVar(output, "output", filepath.Join("bench", "results.json"), "file for the results")
}

// side is one of the two ways to run control planes.
type side interface {
	// add adds the i-th tenant and returns how long it took until a client with a
	// certificate could read its default service account.
	add(ctx context.Context, i int) (time.Duration, error)
	// processes are all processes that run now.
	processes() []*process
	// close stops them and waits for their end.
	close() error
}

// sample is the memory of both sides with so many tenants each.
type sample struct {
	tenants      int
	ours, theirs memory
}

// measurements are what a run found.
type measurements struct {
	goVersion          string
	samples            []sample // with 0 to N tenants
	oursAdd, theirsAdd []time.Duration
	idle               cpuTimes // during config.idle
	storeMemory        memory   // of this process, which runs their etcd
	// others is how many cores the rest of the machine took during the run: the
	// figures are worth as much as this is small.
	others float64
}

func run(ctx context.Context, cfg config, stdout, progress io.Writer) (err error) {
	bin, err := findPrograms(cfg.bin)
	if err != nil {
		return err
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return fmt.Errorf("make a directory for the run: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()

	m := measurements{goVersion: bin.goVersion}
	fmt.Fprintf(progress, "%s; load average: %s\n", machine(bin.goVersion), loadAverage())
	ours, err := startHost(ctx, bin, dir, cfg.patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	theirs, err := newUpstream(ctx, bin, dir, cfg.election, cfg.patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.close()) }()

	if err := m.measure(ctx, cfg, ours, theirs, progress); err != nil {
		return err
	}
	rows := m.results(cfg)
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return m.print(stdout, cfg, rows)
}

// measure takes turns: both sides meet the same machine, and each start finds it at rest.
func (m *measurements) measure(ctx context.Context, cfg config, ours, theirs side, progress io.Writer) (err error) {
	began := time.Now()
	beganCPU, err := readCPUTimes(ours, theirs)
	if err != nil {
		return err
	}
	if err := wait(ctx, cfg.pause, ours, theirs); err != nil {
		return err
	}
	if err := m.sample(0, ours, theirs); err != nil {
		return err
	}
	for i := 1; i <= cfg.tenants; i++ {
		for _, turn := range []struct {
			side  side
			times *[]time.Duration
		}{{ours, &m.oursAdd}, {theirs, &m.theirsAdd}} {
			took, err := turn.side.add(ctx, i)
			if err != nil {
				return fmt.Errorf("add tenant %d: %w", i, err)
			}
			*turn.times = append(*turn.times, took)
			if err := wait(ctx, cfg.pause, ours, theirs); err != nil {
				return err
			}
		}
		if i == 1 || i == cfg.tenants {
			if err := wait(ctx, cfg.settle, ours, theirs); err != nil {
				return err
			}
		}
		if err := m.sample(i, ours, theirs); err != nil {
			return err
		}
		now := m.samples[i]
		fmt.Fprintf(progress, "tenant %d of %d: usable after %.2f s / %.2f s, resident in all %.0f MB / %.0f MB (ours / theirs)\n",
			i, cfg.tenants, m.oursAdd[i-1].Seconds(), m.theirsAdd[i-1].Seconds(), megabytes(now.ours.rss), megabytes(now.theirs.rss))
	}

	fmt.Fprintf(progress, "measuring CPU for %s\n", cfg.idle)
	before, err := readCPUTimes(ours, theirs)
	if err != nil {
		return err
	}
	if err := wait(ctx, cfg.idle, ours, theirs); err != nil {
		return err
	}
	after, err := readCPUTimes(ours, theirs)
	if err != nil {
		return err
	}
	m.idle = after.since(before)
	m.others = after.since(beganCPU).others().Seconds() / time.Since(began).Seconds()
	m.storeMemory, err = memoryOf(os.Getpid())
	return err
}

func (m *measurements) sample(tenants int, ours, theirs side) (err error) {
	s := sample{tenants: tenants}
	if s.ours, err = memoryOf(pids(ours)...); err != nil {
		return err
	}
	if s.theirs, err = memoryOf(pids(theirs)...); err != nil {
		return err
	}
	m.samples = append(m.samples, s)
	return nil
}

// cpuTimes are CPU times since some moment in the past.
type cpuTimes struct {
	ours, theirs time.Duration
	store        time.Duration // of this process, which runs their etcd
	machine      time.Duration // of everything
}

func readCPUTimes(ours, theirs side) (t cpuTimes, err error) {
	if t.ours, err = cpuTime(pids(ours)...); err != nil {
		return t, err
	}
	if t.theirs, err = cpuTime(pids(theirs)...); err != nil {
		return t, err
	}
	if t.store, err = cpuTime(os.Getpid()); err != nil {
		return t, err
	}
	t.machine, err = machineCPUTime()
	return t, err
}

// since is what was used between before and t.
func (t cpuTimes) since(before cpuTimes) cpuTimes {
	return cpuTimes{t.ours - before.ours, t.theirs - before.theirs, t.store - before.store, t.machine - before.machine}
}

// others is what neither side used.
func (t cpuTimes) others() time.Duration {
	return max(0, t.machine-t.ours-t.theirs-t.store)
}

// wait does nothing for d, and fails if a process has ended meanwhile.
func wait(ctx context.Context, d time.Duration, sides ...side) error {
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-time.After(d):
	}
	for _, s := range sides {
		for _, p := range s.processes() {
			if err := p.ended(); err != nil {
				return err
			}
		}
	}
	return nil
}

func pids(s side) []int {
	var ids []int
	for _, p := range s.processes() {
		ids = append(ids, p.cmd.Process.Pid)
	}
	return ids
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"syscall"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// defaultRouterRounds have a median and show the spread.
	defaultRouterRounds = 5
	// defaultRouterRound is a few thousand connections.
	defaultRouterRound = 3 * time.Second
	// defaultIdleConns is what the goal speaks of.
	defaultIdleConns = 10000
	// defaultClients keep both cores of a small machine busy.
	defaultClients = 32
	// defaultStreams do too.
	defaultStreams = 2
	// spareDescriptors are what a proxy has open besides connections.
	spareDescriptors = 100
)

// routerConfig is what the flags of bench router set.
type routerConfig struct {
	output, profile  string
	rounds           int
	round, settle    time.Duration
	idle             int
	clients, streams int
	beside, measures []string
}

func newRouterCommand() *cobra.Command {
	var cfg routerConfig
	cmd := &cobra.Command{
		Use:   "router",
		Short: "Measure the router alone, beside HAProxy and nginx",
		Long: `Router measures a client that reaches one TLS server by our router, to a tenant of
the same host or of another, and by HAProxy and nginx, which pass TLS through by the
name in the ClientHello: new connections, bytes, round trips on an open connection, and
memory with many idle ones. The ways take turns.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.rounds < 1 || cfg.round < time.Second/10 || cfg.clients < 1 || cfg.streams < 1 || cfg.idle < 0 || cfg.settle < 0 {
				return errors.New("--rounds, --clients and --streams must be at least 1, --round at least 100ms, --idle and --settle not negative")
			}
			return runRouter(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.rounds, "rounds", defaultRouterRounds, "turns of each way")
	f.DurationVar(&cfg.round, "round", defaultRouterRound, "length of each measurement in a turn")
	f.DurationVar(&cfg.settle, "settle", 10*time.Second, "how long connections are idle when memory is read")
	f.IntVar(&cfg.idle, "idle", defaultIdleConns, "idle connections; fewer when no proxy could have so many descriptors; 0 for none")
	f.IntVar(&cfg.clients, "clients", defaultClients, "clients that make connections at a time")
	f.IntVar(&cfg.streams, "streams", defaultStreams, "connections that move bytes at a time")
	f.StringSliceVar(&cfg.beside, "beside", []string{wayHAProxy, wayNginx}, "what is measured besides ours: haproxy, nginx")
	f.StringSliceVar(&cfg.measures, "only", []string{"idle", "connects", "download", "upload", "trips"}, "what is measured")
	f.StringVar(&cfg.profile, "profile", "", "directory for CPU profiles of our programs")
	outputFlag(f, &cfg.output)
	return cmd
}

// routerFigures are what was measured of one way, by round.
type routerFigures struct {
	connects, connectCPU  []float64 // per second, µs of the way's processes
	download, downloadCPU []float64 // GB/s, ms of the way's processes per GB
	upload, uploadCPU     []float64
	trips                 []float64 // µs, p50 of a round
	memory, memoryOfFront []float64 // MB with idle connections
}

func runRouter(ctx context.Context, cfg routerConfig, stdout, progress io.Writer) (err error) {
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return fmt.Errorf("make a directory for the run: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	if cfg.idle, err = idleConnections(cfg.idle, progress); err != nil {
		return err
	}
	if cfg.profile != "" {
		if cfg.profile, err = filepath.Abs(cfg.profile); err != nil {
			return fmt.Errorf("find the directory for profiles: %w", err)
		}
	}
	all, err := newWays(dir, max(cfg.idle, 1000)+spareDescriptors/4, cfg.profile)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, all.stop()) }()
	for _, name := range append([]string{wayPlain, wayLocal, wayForward}, cfg.beside...) {
		if err := all.start(ctx, name); err != nil {
			return err
		}
	}
	if err := all.startSpinners(); err != nil {
		return err
	}
	fmt.Fprintf(progress, "%s; load average: %s\n", machine(runtime.Version()), loadAverage())

	figures := map[string]*routerFigures{}
	for _, w := range all.all {
		figures[w.name] = new(routerFigures)
	}
	busy, err := watchMachine(all.processes())
	if err != nil {
		return err
	}
	if err := measureRouter(ctx, cfg, all, figures, progress); err != nil {
		return err
	}
	others, err := busy()
	if err != nil {
		return err
	}
	where := fmt.Sprintf("; %s, the rest of the machine took %.2f cores", machine(runtime.Version()), others)
	rows := routerRows(cfg, figures, where)
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return printRouter(stdout, cfg, figures, rows, where)
}

// idleConnections is how many idle connections there can be: a proxy needs two
// descriptors for each.
func idleConnections(wanted int, progress io.Writer) (int, error) {
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil {
		return 0, fmt.Errorf("read the limit of open files: %w", err)
	}
	if most := (int(min(limit.Max, 1<<20)) - spareDescriptors) / 2; wanted > most {
		fmt.Fprintf(progress, "the limit of open files (ulimit -Hn %d) leaves room for %d idle connections, not %d\n", limit.Max, most, wanted)
		return most, nil
	}
	return wanted, nil
}

func measureRouter(ctx context.Context, cfg routerConfig, all *ways, figures map[string]*routerFigures, progress io.Writer) error {
	measured := func(what string) bool { return slices.Contains(cfg.measures, what) }
	if cfg.idle > 0 && measured("idle") { // first, before traffic has left its traces
		for _, w := range all.all {
			if err := w.measureIdle(ctx, cfg, figures[w.name]); err != nil {
				return fmt.Errorf("%s: %w", w.name, err)
			}
			fmt.Fprintf(progress, "%s: %.1f MB more with %d idle connections, of it %.1f MB in front of the server\n",
				w.name, figures[w.name].memory[0], cfg.idle, figures[w.name].memoryOfFront[0])
		}
	}
	for round := range cfg.rounds {
		for _, step := range []struct {
			name    string
			measure func(*way, context.Context, routerConfig, *routerFigures) error
			awake   bool // with processors that do not sleep
		}{
			{"connects", (*way).measureConnects, false},
			{"download", (*way).measureDownload, false},
			{"upload", (*way).measureUpload, false},
			{"trips", (*way).measureTrips, true},
		} {
			if !measured(step.name) {
				continue
			}
			turns := slices.Clone(all.all)
			if round%2 == 1 { // so that a machine that slows down does so for all
				slices.Reverse(turns)
			}
			if step.awake {
				if err := all.awake(syscall.SIGCONT); err != nil {
					return err
				}
			}
			for _, w := range turns {
				if err := step.measure(w, ctx, cfg, figures[w.name]); err != nil {
					return fmt.Errorf("%s: %w", w.name, err)
				}
				for _, p := range w.processes {
					if err := p.ended(); err != nil {
						return err
					}
				}
			}
			if step.awake {
				if err := all.awake(syscall.SIGSTOP); err != nil {
					return err
				}
			}
		}
		fmt.Fprintf(progress, "round %d of %d done\n", round+1, cfg.rounds)
	}
	return nil
}

// using runs what and returns the CPU time that the way's processes took for it.
func (w *way) using(what func() error) (used, took time.Duration, err error) {
	pids, err := w.pids()
	if err != nil {
		return 0, 0, err
	}
	before, err := cpuTime(pids...)
	if err != nil {
		return 0, 0, err
	}
	began := time.Now()
	if err := what(); err != nil {
		return 0, 0, err
	}
	took = time.Since(began)
	after, err := cpuTime(pids...)
	return after - before, took, err
}

func (w *way) measureConnects(ctx context.Context, cfg routerConfig, to *routerFigures) error {
	var made int64
	used, took, err := w.using(func() (err error) {
		made, err = w.wire.connects(ctx, cfg.round, cfg.clients)
		return err
	})
	if err == nil && made == 0 {
		return fmt.Errorf("no connection was made in %s: give it a longer --round", cfg.round)
	}
	if err == nil {
		to.connects = append(to.connects, float64(made)/took.Seconds())
		to.connectCPU = append(to.connectCPU, float64(used.Microseconds())/float64(made))
	}
	return err
}

func (w *way) measureDownload(ctx context.Context, cfg routerConfig, to *routerFigures) error {
	return w.measureStream(ctx, cfg, wantDownload, &to.download, &to.downloadCPU)
}

func (w *way) measureUpload(ctx context.Context, cfg routerConfig, to *routerFigures) error {
	return w.measureStream(ctx, cfg, wantUpload, &to.upload, &to.uploadCPU)
}

func (w *way) measureStream(ctx context.Context, cfg routerConfig, want byte, speed, cpu *[]float64) error {
	var moved int64
	used, took, err := w.using(func() (err error) {
		moved, err = w.wire.stream(ctx, want, cfg.round, cfg.streams)
		return err
	})
	if err == nil {
		gigabytes := float64(moved) / 1e9
		*speed = append(*speed, gigabytes/took.Seconds())
		*cpu = append(*cpu, ms(used)/gigabytes)
	}
	return err
}

func (w *way) measureTrips(ctx context.Context, cfg routerConfig, to *routerFigures) error {
	times, err := w.wire.roundTrips(ctx, cfg.round/3) // there are tens of thousands in a second
	if err == nil {
		to.trips = append(to.trips, ms(quantile(times, 0.5))*1000)
	}
	return err
}

// measureIdle leaves out what the programs have without connections: ours links
// much that a proxy does not, and is there once.
func (w *way) measureIdle(ctx context.Context, cfg routerConfig, to *routerFigures) error {
	allBefore, frontBefore, err := w.memory()
	if err != nil {
		return err
	}
	closed, err := w.wire.open(ctx, cfg.idle, cfg.clients)
	if err != nil {
		return err
	}
	defer closed()
	if !pause(ctx, cfg.settle) {
		return context.Cause(ctx)
	}
	all, front, err := w.memory()
	to.memory = append(to.memory, megabytes(all.rss-allBefore.rss))
	to.memoryOfFront = append(to.memoryOfFront, megabytes(front.rss-frontBefore.rss))
	return err
}

// memory is that of all processes of the way, and of what is in front of the server.
func (w *way) memory() (all, front memory, err error) {
	pids, err := w.pids()
	if err != nil {
		return all, front, err
	}
	if all, err = memoryOf(pids...); err != nil || w.front == nil {
		return all, front, err
	}
	if pids, err = descendants([]*process{w.front}); err != nil {
		return all, front, err
	}
	front, err = memoryOf(pids...)
	return all, front, err
}

// spread is a median and what it is the median of.
type spread struct{ median, low, high float64 }

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{}
	}
	sorted := slices.Sorted(slices.Values(values))
	middle := len(sorted) / 2
	s := spread{median: sorted[middle], low: sorted[0], high: sorted[len(sorted)-1]}
	if len(sorted)%2 == 0 {
		s.median = (sorted[middle-1] + sorted[middle]) / 2
	}
	return s
}

func (s spread) String() string { return fmt.Sprintf("%.4g to %.4g", s.low, s.high) }

// added is what each round has beyond the same round of another way.
func added(values, base []float64) []float64 {
	var more []float64
	for i := range min(len(values), len(base)) {
		more = append(more, values[i]-base[i])
	}
	return more
}

// routerRows compares each of our ways with each of theirs.
func routerRows(cfg routerConfig, figures map[string]*routerFigures, where string) (rows []results.Row) {
	plain := figures[wayPlain]
	for _, pair := range []struct{ name, ours, theirs string }{
		{"router to a local tenant", wayLocal, wayHAProxy},
		{"router to a local tenant", wayLocal, wayNginx},
		{"router to another host's tenant", wayForward, wayHAProxy},
	} {
		ours, theirs := figures[pair.ours], figures[pair.theirs]
		if theirs == nil {
			continue
		}
		add := func(what, unit string, row func(name, unit string, ours, theirs float64, note string) results.Row, a, b, without []float64, note string) {
			if len(a) == 0 || len(b) == 0 {
				return
			}
			if len(without) > 0 {
				note += fmt.Sprintf("; a plain listener has %.4g", spreadOf(without).median)
			}
			x, y := spreadOf(a), spreadOf(b)
			rows = append(rows, row(fmt.Sprintf("%s: %s, beside %s", pair.name, what, pair.theirs), unit, x.median, y.median,
				fmt.Sprintf("%s; median of %d, ours %s, theirs %s%s", note, len(a), x, y, where)))
		}
		add("new TLS connections", "1/s", results.Higher, ours.connects, theirs.connects, plain.connects,
			fmt.Sprintf("handshake and a first answer, %d clients on the same machine", cfg.clients))
		add("CPU for a new TLS connection", "µs", results.Lower, ours.connectCPU, theirs.connectCPU, plain.connectCPU,
			"of router or proxy and of the server")
		add("download", "GB/s", results.Higher, ours.download, theirs.download, plain.download,
			fmt.Sprintf("TLS, %d connections, the client on the same machine", cfg.streams))
		add("CPU for a download", "ms/GB", results.Lower, ours.downloadCPU, theirs.downloadCPU, plain.downloadCPU,
			"of router or proxy and of the server")
		add("upload", "GB/s", results.Higher, ours.upload, theirs.upload, plain.upload,
			fmt.Sprintf("TLS, %d connections, the client on the same machine", cfg.streams))
		add("CPU for an upload", "ms/GB", results.Lower, ours.uploadCPU, theirs.uploadCPU, plain.uploadCPU,
			"of router or proxy and of the server")
		add("added round trip", "µs", results.Lower, added(ours.trips, plain.trips), added(theirs.trips, plain.trips), plain.trips,
			fmt.Sprintf("p50 on an open TLS connection, %d bytes, beyond that by a plain listener, with processors that do not sleep", pingSize))
		add("memory for idle connections", "MB", results.Lower, ours.memory, theirs.memory, plain.memory,
			fmt.Sprintf("VmRSS of router or proxy and of the server beyond that without connections, %d connections, after %s", cfg.idle, cfg.settle))
	}
	return rows
}

func printRouter(w io.Writer, cfg routerConfig, figures map[string]*routerFigures, rows []results.Row, where string) error {
	fmt.Fprintf(w, "medians of %d rounds of %s%s\n\n", cfg.rounds, cfg.round, where)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(t, "way\tconn/s\tCPU µs\tdown GB/s\tCPU ms/GB\tup GB/s\tCPU ms/GB\tround trip µs\tidle MB\tfront's MB\t")
	for _, name := range []string{wayPlain, wayLocal, wayForward, wayHAProxy, wayNginx} {
		f := figures[name]
		if f == nil {
			continue
		}
		fmt.Fprint(t, name, "\t")
		for _, values := range [][]float64{f.connects, f.connectCPU, f.download, f.downloadCPU, f.upload, f.uploadCPU, f.trips, f.memory, f.memoryOfFront} {
			fmt.Fprintf(t, "%.4g\t", spreadOf(values).median)
		}
		fmt.Fprintln(t)
	}
	_ = t.Flush()
	fmt.Fprintln(w)
	return printRows(w, rows)
}

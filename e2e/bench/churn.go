// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// warmUps are added and removed before the first look: the first tenants leave
	// caches that all later ones share.
	warmUps = 2
	// heapLooks, a second apart, hold a moment after a collection, when the heap has
	// nothing but what is live. Tenantd collects when it has been quiet for 20 s, and
	// for a minute.
	heapLooks = 30
	// defaultHistory is longer than an API server keeps what it has watched (75 s:
	// cacher.DefaultEventFreshDuration). After it the next changes push that out.
	defaultHistory = 80 * time.Second
	// separateSets of upstream's programs are stopped for comparison.
	separateSets = 3
)

// churnConfig is what the flags of bench churn set.
type churnConfig struct {
	bin, output string
	tenants     int
	history     time.Duration
}

func newChurnCommand() *cobra.Command {
	var cfg churnConfig
	cmd := &cobra.Command{
		Use:   "churn",
		Short: "See what is left of tenants that were added and removed",
		Long: `Churn adds tenants to a tenantd and removes them, one after the other, and compares its
goroutines, its live heap and the keys in its etcd with those before. It also says how
long a tenant takes to end, beside a set of upstream's programs.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.tenants < 1 || cfg.history < 0 {
				return errors.New("--tenants must be at least 1, and --history not negative")
			}
			return runChurn(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.tenants, "tenants", 100, "tenants that are added and removed")
	f.DurationVar(&cfg.history, "history", defaultHistory, "wait before the last tenant that comes and goes before each look, and after it")
	binFlag(f, &cfg.bin, "tenantd and upstream's programs")
	outputFlag(f, &cfg.output)
	return cmd
}

// leftovers is what a host without tenants has.
type leftovers struct {
	goroutines int64
	heap       int64 // bytes, live
	keys       int64 // of tenants, the system plane's not among them
	memory     memory
}

func runChurn(ctx context.Context, cfg churnConfig, stdout, progress io.Writer) (err error) {
	h, bin, err := startAlone(ctx, cfg.bin, defaultPatience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	addAndRemove := func(i int) (time.Duration, error) {
		name := fmt.Sprintf("churn-%d", i)
		if _, err := h.tenant(ctx, name); err != nil {
			return 0, err
		}
		began := time.Now()
		err := h.remove(ctx, name)
		return time.Since(began), err
	}
	for i := range warmUps {
		if _, err := addAndRemove(-1 - i); err != nil {
			return err
		}
	}
	// look has the changes of before forgotten, and looks.
	look := func(last int) (l leftovers, err error) {
		if err := wait(ctx, cfg.history, h); err != nil {
			return l, err
		}
		if _, err := addAndRemove(last); err != nil {
			return l, err
		}
		return h.leftovers(ctx, max(cfg.history, defaultPause))
	}
	before, err := look(-1 - warmUps)
	if err != nil {
		return err
	}
	var ends []time.Duration
	for i := range cfg.tenants {
		took, err := addAndRemove(i)
		if err != nil {
			return err
		}
		ends = append(ends, took)
		if (i+1)%10 == 0 {
			fmt.Fprintf(progress, "%d of %d added and removed\n", i+1, cfg.tenants)
		}
	}
	after, err := look(cfg.tenants)
	if err != nil {
		return err
	}
	where := fmt.Sprintf("%d tenants added and removed; theirs is the same before, after %d for warming up; each %s and one tenant later; %s", cfg.tenants, warmUps+1, cfg.history, machine(bin.goVersion))
	rows := []results.Row{
		results.Lower("after removing all: goroutines", "", float64(after.goroutines), float64(before.goroutines), where),
		results.Lower("after removing all: live heap", "MB", megabytes(after.heap), megabytes(before.heap), where),
		results.Lower("after removing all: resident memory", "MB", megabytes(after.memory.rss), megabytes(before.memory.rss), where),
		results.Lower("after removing all: keys in etcd", "", float64(after.keys), float64(before.keys), where),
	}
	// Kept and shown already, since on a busy machine upstream's programs may give up.
	if err := errors.Join(results.Write(cfg.output, rows), printRows(progress, rows)); err != nil {
		return err
	}
	separate, err := separateEnds(ctx, bin, h.dir)
	if err != nil {
		return err
	}
	rows = append(rows,
		results.Lower("removal of a tenant, p50", "s", quantile(ends, 0.5).Seconds(), quantile(separate, 0.5).Seconds(), fmt.Sprintf(
			"until the Tenant is gone, and with it all its keys; theirs: SIGTERM to a set until all have ended, whose keys stay; %d and %d samples; %s",
			len(ends), len(separate), machine(bin.goVersion))),
		results.Lower("removal of a tenant, p99", "s", quantile(ends, 0.99).Seconds(), quantile(separate, 0.99).Seconds(), "as above"),
	)
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return printRows(stdout, rows)
}

// separateEnds is how long sets of upstream's programs take to stop.
func separateEnds(ctx context.Context, bin programs, dir string) (ends []time.Duration, err error) {
	theirs, err := newUpstream(ctx, bin, dir, false, defaultPatience)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, theirs.close()) }()
	for i := range separateSets {
		if _, err := theirs.add(ctx, i+1); err != nil {
			return nil, err
		}
		began := time.Now()
		if err := stopAll(theirs.running); err != nil {
			return nil, err
		}
		ends = append(ends, time.Since(began))
		theirs.running = nil
	}
	return ends, nil
}

// leftovers looks when the host has rested.
func (h *host) leftovers(ctx context.Context, rest time.Duration) (l leftovers, err error) {
	if err := wait(ctx, rest, h); err != nil {
		return l, err
	}
	if l.keys, err = h.keys(ctx); err != nil {
		return l, err
	}
	for range heapLooks {
		if err := wait(ctx, time.Second, h); err != nil {
			return l, err
		}
		goroutines, heap, err := h.metrics(ctx)
		if err != nil {
			return l, err
		}
		if l.heap == 0 || heap < l.heap {
			l.heap = heap
		}
		if l.goroutines == 0 || goroutines < l.goroutines { // one that serves this request comes and goes
			l.goroutines = goroutines
		}
	}
	l.memory, err = memoryOf(pids(h)...)
	return l, err
}

// metrics are the host's own figures.
func (h *host) metrics(ctx context.Context) (goroutines, heap int64, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+h.health+"/metrics", nil)
	if err != nil {
		return 0, 0, err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return 0, 0, fmt.Errorf("read metrics: %w", err)
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return 0, 0, fmt.Errorf("read metrics: %w", err)
	}
	figures := map[string]int64{}
	for line := range strings.Lines(string(text)) {
		name, value, _ := strings.Cut(strings.TrimSpace(line), " ")
		if name == "go_goroutines" || name == "go_gc_heap_live_bytes" {
			figure, err := strconv.ParseFloat(value, 64)
			if err != nil {
				return 0, 0, fmt.Errorf("read metric %s: %w", name, err)
			}
			figures[name] = int64(figure)
		}
	}
	if len(figures) != 2 {
		return 0, 0, errors.New("read metrics: go_goroutines or go_gc_heap_live_bytes is not among them")
	}
	return figures["go_goroutines"], figures["go_gc_heap_live_bytes"], nil
}

// keys counts those of tenants in the host's etcd, and has etcd forget what was there
// before: a host keeps five to ten minutes of history for watchers, and each key in it
// has its place in memory.
func (h *host) keys(ctx context.Context) (int64, error) {
	client, err := clientv3.New(clientv3.Config{
		Endpoints: []string{"unix://" + filepath.Join(h.data, "run", "etcd.sock")}, DialTimeout: callPatience, Logger: zap.NewNop(),
	})
	if err != nil {
		return 0, fmt.Errorf("connect to the host's etcd: %w", err)
	}
	defer client.Close()
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	var counts [2]int64
	var revision int64
	for i, prefix := range []string{"/tenants/", "/tenants/system/"} {
		answer, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
		if err != nil {
			return 0, fmt.Errorf("count keys below %s: %w", prefix, err)
		}
		counts[i], revision = answer.Count, answer.Header.Revision
	}
	if _, err := client.Compact(ctx, revision, clientv3.WithCompactPhysical()); err != nil {
		return 0, fmt.Errorf("compact the host's etcd: %w", err)
	}
	return counts[0] - counts[1], nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/bench/results"
)

// scaleConfig is what the flags of bench scale set.
type scaleConfig struct {
	bin, output            string
	tenants, atOnce, burst int
	settle, patience       time.Duration
}

func newScaleCommand() *cobra.Command {
	var cfg scaleConfig
	cmd := &cobra.Command{
		Use:   "scale",
		Short: "Fill one host with tenants, and start it again",
		Long: `Scale adds many tenants to one tenantd, and more of them all at once, reads its memory,
and starts it again: how long until a tenant answers, until the one that somebody asks for
does, and until all do. There is nothing to compare with: goals are in the notes.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.tenants < 1 || cfg.atOnce < 1 || cfg.burst < 0 || cfg.settle < 0 || cfg.patience < time.Second {
				return errors.New("--tenants and --at-once must be at least 1, --burst and --settle not negative, --patience at least 1s")
			}
			return runScale(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.tenants, "tenants", 100, "tenants on the host")
	f.IntVar(&cfg.atOnce, "at-once", 4, "as many are being added at a time")
	f.IntVar(&cfg.burst, "burst", 20, "further ones that are added all at once, and removed again; 0 for none")
	f.DurationVar(&cfg.settle, "settle", defaultSettle, "wait before memory is read")
	f.DurationVar(&cfg.patience, "patience", 10*time.Minute, "give up when a tenant is not usable after this time")
	binFlag(f, &cfg.bin, "tenantd and upstream's programs")
	outputFlag(f, &cfg.output)
	return cmd
}

func runScale(ctx context.Context, cfg scaleConfig, stdout, progress io.Writer) (err error) {
	h, bin, err := startAlone(ctx, cfg.bin, cfg.patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()

	where := fmt.Sprintf("%d tenants; %s", cfg.tenants, machine(bin.goVersion))
	var rows []results.Row
	row := func(name, unit string, value float64, note string) {
		rows = append(rows, results.Lower(name, unit, value, 0, note+"; "+where))
		fmt.Fprintf(progress, "%s: %s %s\n", name, figure(unit, value), unit)
	}
	before, err := cpuTime(pids(h)...)
	if err != nil {
		return err
	}
	busy, err := watchMachine(h.processes())
	if err != nil {
		return err
	}
	admins, _, took, err := h.addMany(ctx, "many", cfg.tenants, cfg.atOnce)
	if err != nil {
		return err
	}
	others, err := busy()
	if err != nil {
		return err
	}
	row("many tenants: all added and usable", "s", took.Seconds(), fmt.Sprintf("%d at a time, the rest of the machine took %.2f cores; the goal for 100 is 150 s", cfg.atOnce, others))
	if err := h.allReady(ctx, cfg.tenants); err != nil {
		return err
	}
	after, err := cpuTime(pids(h)...)
	if err != nil {
		return err
	}
	row("many tenants: CPU for each that is added", "s", (after-before).Seconds()/float64(cfg.tenants), "until all are ready, with the host's own and that of being asked all the time whether they are usable")
	if cfg.burst > 0 {
		_, times, _, err := h.addMany(ctx, "burst", cfg.burst, cfg.burst)
		if err != nil {
			return err
		}
		row("tenants added at once: usable, p50", "s", quantile(times, 0.5).Seconds(), fmt.Sprintf("%d at once, beside those that are there", cfg.burst))
		row("tenants added at once: usable, p99", "s", quantile(times, 0.99).Seconds(), fmt.Sprintf("%d at once, beside those that are there", cfg.burst))
		for i := range cfg.burst {
			if err := h.remove(ctx, fmt.Sprintf("burst-%d", i)); err != nil {
				return err
			}
		}
	}
	if err := wait(ctx, cfg.settle, h); err != nil {
		return err
	}
	m, err := memoryOf(pids(h)...)
	if err != nil {
		return err
	}
	row("many tenants: resident memory in all", "MB", megabytes(m.rss), "VmRSS, with system plane and etcd; the goal for 100 is 6000 MB")

	began := time.Now()
	if err := h.stop(); err != nil {
		return err
	}
	row("many tenants: the host stops", "s", time.Since(began).Seconds(), "from SIGTERM")
	if err := h.restart(ctx, admins[len(admins)-1], cfg.tenants, row); err != nil {
		return err
	}
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return printRows(stdout, rows)
}

// addMany adds tenants, so many at a time, and returns their administrators'
// access, how long each took, and all.
func (h *host) addMany(ctx context.Context, prefix string, n, atOnce int) (admins []*rest.Config, times []time.Duration, took time.Duration, err error) {
	admins, times = make([]*rest.Config, n), make([]time.Duration, n)
	began := time.Now()
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(atOnce)
	for i := range n {
		all.Go(func() error {
			start := time.Now()
			kubeconfig, err := h.tenant(ctx, fmt.Sprintf("%s-%d", prefix, i))
			if err != nil {
				return err
			}
			times[i] = time.Since(start)
			admins[i], err = clientcmd.RESTConfigFromKubeConfig(kubeconfig)
			return err
		})
	}
	err = all.Wait()
	return admins, times, time.Since(began), err
}

// allReady waits until so many tenants say that they are.
func (h *host) allReady(ctx context.Context, n int) error {
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		ready, err := h.readyTenants(ctx)
		if err == nil && ready < n {
			pause(ctx, 10*pollInterval) // a list of all of them is no light request
			err = fmt.Errorf("%d of %d tenants are ready", ready, n)
		}
		return err
	})
	if err != nil {
		return fmt.Errorf("wait for the tenants: %w", err)
	}
	return nil
}

// stop ends the process in order, for start.
func (h *host) stop() error {
	h.plane.client.CloseIdleConnections()
	return stopAll(h.processes())
}

// restart starts the host again, and has one client ask for one tenant, the last
// that would otherwise be started.
func (h *host) restart(ctx context.Context, asked *rest.Config, tenants int, row func(name, unit string, value float64, note string)) error {
	began := time.Now()
	if err := h.start(); err != nil {
		return err
	}
	var answered time.Duration
	var asking sync.WaitGroup
	var failed error
	asking.Go(func() {
		failed = usable(ctx, asked, h.patience, h.processes())
		answered = time.Since(began)
	})
	defer asking.Wait()
	var first time.Duration
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		ready, err := h.readyTenants(ctx)
		if err != nil {
			return err
		}
		if ready > 0 && first == 0 {
			first = time.Since(began)
		}
		if ready < tenants {
			pause(ctx, 10*pollInterval) // a list of all of them is no light request
			return fmt.Errorf("%d of %d tenants are ready", ready, tenants)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait for the tenants after a restart: %w", err)
	}
	all := time.Since(began)
	asking.Wait()
	if failed != nil {
		return fmt.Errorf("use a tenant after a restart: %w", failed)
	}
	row("restart: a tenant that somebody asks for answers", "s", answered.Seconds(), "asked for from the start on, the last one added; from the start of the process")
	row("restart: the first tenant is ready", "s", min(first, answered).Seconds(), "from the start of the process; the goal for 100 is 5 s")
	row("restart: all tenants are ready", "s", all.Seconds(), "from the start of the process; the goal for 100 is 120 s")
	return nil
}

// readyTenants is how many say that they are.
func (h *host) readyTenants(ctx context.Context) (ready int, err error) {
	var list v1alpha1.TenantList
	if err := h.plane.call(ctx, http.MethodGet, tenants, nil, &list); err != nil {
		return 0, err
	}
	for _, t := range list.Items {
		if t.Status.Phase == v1alpha1.TenantReady {
			ready++
		}
	}
	return ready, nil
}

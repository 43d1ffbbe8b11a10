// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/bench/results"
)

// sleepConfig is what the flags of bench sleep set.
type sleepConfig struct {
	bin, output            string
	tenants, used, awake   int
	atOnce, rounds         int
	settle, idle, patience time.Duration
}

func newSleepCommand() *cobra.Command {
	var cfg sleepConfig
	cmd := &cobra.Command{
		Use:   "sleep",
		Short: "See what tenants cost that are asleep, and how soon they wake",
		Long: `Sleep fills one tenantd with tenants that are asleep, some that never ran and some that
did, and compares its memory and CPU time with those before. It wakes one after the other by
a connection, beside a start of a set of upstream's programs, which is what there is without
sleep; then it has some awake beside all others, and starts the host again.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.tenants < 1 || cfg.used < 1 || cfg.rounds < 1 || cfg.atOnce < 1 || cfg.awake < 0 || cfg.awake > cfg.used {
				return errors.New("--tenants, --used, --at-once and --rounds must be at least 1, --awake not negative and at most --used")
			}
			if cfg.settle < 0 || cfg.idle < time.Second || cfg.patience < time.Second {
				return errors.New("--settle must not be negative, --idle and --patience at least 1s")
			}
			return runSleep(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.tenants, "tenants", 100, "tenants that never ran")
	f.IntVar(&cfg.used, "used", 10, "further tenants that ran before they fell asleep")
	f.IntVar(&cfg.awake, "awake", 5, "as many of these are awake in the end, beside all others")
	f.IntVar(&cfg.atOnce, "at-once", 4, "as many tenants run at a time before they fall asleep")
	f.IntVar(&cfg.rounds, "rounds", 20, "wakes on our side, starts on theirs")
	f.DurationVar(&cfg.settle, "settle", defaultSettle, "wait before memory is read; history of etcd is there for 5m")
	f.DurationVar(&cfg.idle, "idle", defaultIdle, "how long CPU is measured while nothing is asked for")
	f.DurationVar(&cfg.patience, "patience", defaultPatience, "give up when a tenant is not usable after this time")
	binFlag(f, &cfg.bin, "tenantd and upstream's programs")
	outputFlag(f, &cfg.output)
	return cmd
}

func runSleep(ctx context.Context, cfg sleepConfig, stdout, progress io.Writer) (err error) {
	h, bin, err := startAlone(ctx, cfg.bin, cfg.patience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	where := machine(bin.goVersion)
	var rows []results.Row
	row := func(name, unit string, ours, theirs float64, note string) {
		rows = append(rows, results.Lower(name, unit, ours, theirs, note+"; "+where))
		fmt.Fprintf(progress, "%s: %.3g %s (%s)\n", name, ours, unit, note)
	}

	// The first tenants leave what all later ones share, and a heap with room in it for as
	// many as ran at a time.
	first := max(warmUps, cfg.atOnce)
	if _, err := h.useAndSleep(ctx, "warm-up", first, cfg.atOnce); err != nil {
		return err
	}
	empty, err := h.atRest(ctx, cfg)
	if err != nil {
		return err
	}
	if err := h.addAsleep(ctx, cfg.tenants); err != nil {
		return err
	}
	fresh, err := h.atRest(ctx, cfg)
	if err != nil {
		return err
	}
	admins, err := h.useAndSleep(ctx, "used", cfg.used, cfg.atOnce)
	if err != nil {
		return err
	}
	all, err := h.atRest(ctx, cfg)
	if err != nil {
		return err
	}
	each := func(from, to int64, n int) float64 { return 1000 * megabytes(to-from) / float64(n) }
	const memoryNote = "%d of them; the goal is 200 kB; without pages of files, which are those of etcd's data and of the program: %.1f kB"
	row("asleep, never ran: resident memory per tenant", "kB", each(empty.memory.rss, fresh.memory.rss, cfg.tenants), 0,
		fmt.Sprintf(memoryNote, cfg.tenants, each(empty.anonymous, fresh.anonymous, cfg.tenants)))
	row("asleep, ran before: resident memory per tenant", "kB", each(fresh.memory.rss, all.memory.rss, cfg.used), 0,
		fmt.Sprintf(memoryNote, cfg.used, each(fresh.anonymous, all.anonymous, cfg.used)))
	row("asleep: idle CPU per tenant", "mCPU", (all.cpu-empty.cpu).Seconds()/cfg.idle.Seconds()*1000/float64(cfg.tenants+cfg.used), 0,
		fmt.Sprintf("%d of them over %s, beyond that of the host with %d, %.1f mCPU", cfg.tenants+cfg.used, cfg.idle, first, empty.cpu.Seconds()/cfg.idle.Seconds()*1000))

	wakes, starts, err := h.wakes(ctx, cfg, bin, admins, progress)
	if err != nil {
		return err
	}
	for _, quantiles := range []struct {
		name string
		q    float64
	}{{"p50", 0.5}, {"p99", 0.99}} {
		row("wake: first answer, "+quantiles.name, "s", quantile(wakes, quantiles.q).Seconds(), quantile(starts, quantiles.q).Seconds(), fmt.Sprintf(
			"from dialling a tenant that is asleep; theirs from the start of a set's processes, on data that is there; %d rounds; the goal for p50 is 1.5 s", cfg.rounds))
	}

	most := fmt.Sprintf("%d tenants, %d of them awake", cfg.tenants+cfg.used+first, cfg.awake)
	for _, admin := range admins[:cfg.awake] {
		if err := usable(ctx, admin, h.patience, h.processes()); err != nil {
			return fmt.Errorf("wake a tenant: %w", err)
		}
	}
	end, err := h.atRest(ctx, cfg)
	if err != nil {
		return err
	}
	row("most asleep: resident memory in all", "MB", megabytes(end.memory.rss), 0, most)
	row("most asleep: idle CPU in all", "mCPU", end.cpu.Seconds()/cfg.idle.Seconds()*1000, 0, most)
	if err := h.stop(); err != nil {
		return err
	}
	began := time.Now()
	if err := h.start(); err != nil {
		return err
	}
	if err := usable(ctx, admins[len(admins)-1], h.patience, h.processes()); err != nil {
		return fmt.Errorf("wake a tenant after a restart: %w", err)
	}
	row("most asleep: one that is asleep answers after a restart", "s", time.Since(began).Seconds(), 0, "from the start of the process; "+most)
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return printRows(stdout, rows)
}

// repose is what a host takes when nobody asks for anything.
type repose struct {
	memory    memory
	anonymous int64         // of its resident memory what is no page of a file
	cpu       time.Duration // over sleepConfig.idle
}

func (h *host) atRest(ctx context.Context, cfg sleepConfig) (r repose, err error) {
	if err := wait(ctx, cfg.settle, h); err != nil {
		return r, err
	}
	before, err := cpuTime(pids(h)...)
	if err != nil {
		return r, err
	}
	if err := wait(ctx, cfg.idle, h); err != nil {
		return r, err
	}
	after, err := cpuTime(pids(h)...)
	if err != nil {
		return r, err
	}
	r.cpu = after - before
	if r.memory, err = memoryOf(pids(h)...); err != nil {
		return r, err
	}
	r.anonymous, err = procField(fmt.Sprintf("/proc/%d/status", h.process.cmd.Process.Pid), "RssAnon")
	return r, err
}

// addAsleep adds tenants that are asleep from the start.
func (h *host) addAsleep(ctx context.Context, n int) error {
	all, each := errgroup.WithContext(ctx)
	all.SetLimit(8)
	for i := range n {
		all.Go(func() error {
			name := fmt.Sprintf("fresh-%d", i)
			tenant := newTenant(name, v1alpha1.TenantSpec{})
			tenant.Annotations = map[string]string{v1alpha1.RequestAnnotation: v1alpha1.RequestSleep}
			if err := h.plane.call(each, http.MethodPost, tenants, tenant, nil); err != nil {
				return fmt.Errorf("create Tenant %s: %w", name, err)
			}
			return h.awaitAsleep(each, name)
		})
	}
	return all.Wait()
}

// useAndSleep adds tenants, so many at a time, and has each sleep when it has been
// used. It returns their administrators' access.
func (h *host) useAndSleep(ctx context.Context, prefix string, n, atOnce int) ([]*rest.Config, error) {
	admins := make([]*rest.Config, n)
	all, each := errgroup.WithContext(ctx)
	all.SetLimit(atOnce)
	for i := range n {
		all.Go(func() error {
			name := fmt.Sprintf("%s-%d", prefix, i)
			kubeconfig, err := h.tenant(each, name)
			if err != nil {
				return err
			}
			if admins[i], err = clientcmd.RESTConfigFromKubeConfig(kubeconfig); err != nil {
				return fmt.Errorf("read the kubeconfig of %s: %w", name, err)
			}
			return h.sleep(each, name)
		})
	}
	return admins, all.Wait()
}

// sleep puts a tenant to sleep, when it is ready.
func (h *host) sleep(ctx context.Context, name string) error {
	request := map[string]any{"metadata": map[string]any{"annotations": map[string]string{v1alpha1.RequestAnnotation: v1alpha1.RequestSleep}}}
	if err := h.plane.call(ctx, http.MethodPatch, tenants+"/"+name, request, nil); err != nil {
		return fmt.Errorf("ask Tenant %s to sleep: %w", name, err)
	}
	return h.awaitAsleep(ctx, name)
}

func (h *host) awaitAsleep(ctx context.Context, name string) error {
	err := poll(ctx, h.patience, h.processes(), func(ctx context.Context) error {
		var tenant v1alpha1.Tenant
		if err := h.plane.call(ctx, http.MethodGet, tenants+"/"+name, nil, &tenant); err != nil {
			return err
		}
		if tenant.Status.Phase != v1alpha1.TenantAsleep {
			return fmt.Errorf("it is %s", tenant.Status.Phase)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("wait until Tenant %s sleeps: %w", name, err)
	}
	return nil
}

// wakes takes turns: a tenant of ours is woken by a connection, a set of theirs is
// started, both until they answer a first request.
func (h *host) wakes(ctx context.Context, cfg sleepConfig, bin programs, admins []*rest.Config, progress io.Writer) (ours, theirs []time.Duration, err error) {
	separate, err := newUpstream(ctx, bin, h.dir, false, cfg.patience)
	if err != nil {
		return nil, nil, err
	}
	defer func() { err = errors.Join(err, separate.close()) }()
	set, err := separate.prepare(1)
	if err != nil {
		return nil, nil, err
	}
	for round := -1; round < cfg.rounds; round++ { // the first one writes what is there for the others
		began := time.Now()
		if err := separate.start(ctx, set); err != nil {
			return nil, nil, err
		}
		start := time.Since(began)
		if err := wait(ctx, defaultPause/3, h, separate); err != nil {
			return nil, nil, err
		}
		if err := stopAll(separate.running); err != nil {
			return nil, nil, err
		}
		separate.running = nil
		if round < 0 {
			continue
		}
		which := round % len(admins)
		began = time.Now()
		if err := usable(ctx, admins[which], h.patience, h.processes()); err != nil {
			return nil, nil, fmt.Errorf("wake a tenant: %w", err)
		}
		wake := time.Since(began)
		if err := wait(ctx, defaultPause/3, h); err != nil {
			return nil, nil, err
		}
		if err := h.sleep(ctx, fmt.Sprintf("used-%d", which)); err != nil {
			return nil, nil, err
		}
		fmt.Fprintf(progress, "round %d: awake after %.2f s, theirs started after %.2f s\n", round+1, wake.Seconds(), start.Seconds())
		ours, theirs = append(ours, wake), append(theirs, start)
	}
	return ours, theirs, nil
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// defaultRounds and defaultRound: of some hundred requests in a round the slowest
	// hundredth is a handful, and there are so many rounds that a few of them, in which
	// the machine's other users had the processors, do not decide.
	defaultRounds = 12
	defaultRound  = 6 * time.Second
	// victimPause is between two requests of the victim: it is a user, not a load.
	victimPause = 10 * time.Millisecond
	// floodWarmUp is for the TLS handshakes of the flood's connections, which the
	// limits on connections are for.
	floodWarmUp = 2 * time.Second
	// victimObjects are what the victim lists.
	victimObjects = 50
)

// neighbourConfig is what the flags of bench neighbour set.
type neighbourConfig struct {
	bin, output string
	rounds      int
	round       time.Duration
	floods      []string
}

func newNeighbourCommand() *cobra.Command {
	var cfg neighbourConfig
	cmd := &cobra.Command{
		Use:   "neighbour",
		Short: "Measure how a tenant fares while another one is flooded",
		Long: `Neighbour asks one tenant for this and that, in turn while nobody asks for anything
else and while a second tenant is flooded: by an administrator within its limits, by one
who ignores them, and by strangers. The flood is made by a process of the lowest
priority, since it would come from other machines.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.rounds < 1 || cfg.round < time.Second {
				return errors.New("--rounds must be at least 1, and --round at least 1s")
			}
			return runNeighbour(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.rounds, "rounds", defaultRounds, "quiet and flooded rounds of each kind, in turns")
	f.DurationVar(&cfg.round, "round", defaultRound, "length of a round")
	f.StringSliceVar(&cfg.floods, "floods", []string{"within", "over", "strangers"}, "kinds of floods")
	binFlag(f, &cfg.bin, "tenantd and upstream's programs")
	outputFlag(f, &cfg.output)
	return cmd
}

func runNeighbour(ctx context.Context, cfg neighbourConfig, stdout, progress io.Writer) (err error) {
	self, err := os.Executable()
	if err != nil {
		return fmt.Errorf("find this program: %w", err)
	}
	h, bin, err := startAlone(ctx, cfg.bin, defaultPatience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, h.close()) }()
	victim, err := h.victim(ctx)
	if err != nil {
		return err
	}
	kubeconfig, err := h.tenant(ctx, "flooded")
	if err != nil {
		return err
	}
	file := filepath.Join(h.dir, "flooded.kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		return fmt.Errorf("write the flood's kubeconfig: %w", err)
	}
	if err := seed(ctx, kubeconfig); err != nil {
		return err
	}
	if err := wait(ctx, defaultPause, h); err != nil { // what starting left to do
		return err
	}

	var rows []results.Row
	for _, kind := range cfg.floods {
		var quiet, flooded rounds
		for range cfg.rounds {
			times, err := victim.measure(ctx, cfg.round)
			if err != nil {
				return fmt.Errorf("the victim, while it was quiet: %w", err)
			}
			quiet.add(times)
			flood, err := startProcess(h.dir, "flood-"+kind, "nice", "-n", "19", self, "flood", "--kubeconfig", file, "--kind", kind)
			if err != nil {
				return err
			}
			if err := wait(ctx, floodWarmUp, h); err != nil {
				return errors.Join(err, stopAll([]*process{flood}))
			}
			times, err = victim.measure(ctx, cfg.round)
			ended := flood.ended()
			if stopped := stopAll([]*process{flood}); err == nil {
				err = errors.Join(ended, stopped)
			}
			if err != nil {
				return fmt.Errorf("the victim beside the flood %q: %w", kind, err)
			}
			flooded.add(times)
			fmt.Fprintf(progress, "%s: victim's p50 %.2f ms quiet, %.2f ms flooded; p99 %.2f ms and %.2f ms; %d and %d requests so far; flood: %s\n", kind,
				ms(quiet.p50[len(quiet.p50)-1]), ms(flooded.p50[len(flooded.p50)-1]), ms(quiet.p99[len(quiet.p99)-1]), ms(flooded.p99[len(flooded.p99)-1]),
				quiet.requests, flooded.requests, flood.tail())
			if err := wait(ctx, time.Second, h); err != nil {
				return err
			}
		}
		rows = append(rows, results.Lower("beside a flooded tenant ("+kind+"), p99", "ms", ms(quantile(flooded.p99, 0.5)), ms(quantile(quiet.p99, 0.5)), fmt.Sprintf(
			"a victim's get, list, create and delete, every %s; theirs is the same while nobody else asks for anything; the goal is a ratio of at least 0.5; medians of the p99 of %d rounds of %s (%s flooded, %s quiet), p50 %.1f and %.1f ms; %d requests flooded; %s",
			victimPause, cfg.rounds, cfg.round, flooded.spread(), quiet.spread(), ms(quantile(flooded.p50, 0.5)), ms(quantile(quiet.p50, 0.5)), flooded.requests, machine(bin.goVersion))))
	}
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	for _, r := range rows {
		fmt.Fprintf(stdout, "%s: %.1f %s, quiet %.1f\n", r.Name, r.Ours, r.Unit, r.Theirs)
	}
	return nil
}

// rounds are the quantiles of each of several rounds.
type rounds struct {
	p50, p99 []time.Duration
	requests int
}

func (r *rounds) add(times []time.Duration) {
	r.p50, r.p99 = append(r.p50, quantile(times, 0.5)), append(r.p99, quantile(times, 0.99))
	r.requests += len(times)
}

// spread is the least and the largest p99.
func (r *rounds) spread() string {
	return fmt.Sprintf("%.1f to %.1f", ms(slices.Min(r.p99)), ms(slices.Max(r.p99)))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }

// user is the administrator of the tenant that is measured.
type user struct{ api *api }

// victim adds the tenant that is measured.
func (h *host) victim(ctx context.Context) (*user, error) {
	kubeconfig, err := h.tenant(ctx, "victim")
	if err != nil {
		return nil, err
	}
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("read the victim's kubeconfig: %w", err)
	}
	u := &user{}
	if u.api, err = newAPI(cfg); err != nil {
		return nil, err
	}
	for i := range victimObjects {
		if err := u.api.call(ctx, http.MethodPost, configMaps, configMap(fmt.Sprintf("object-%d", i), 500), nil); err != nil {
			return nil, fmt.Errorf("fill the victim: %w", err)
		}
	}
	return u, nil
}

const configMaps = "/api/v1/namespaces/default/configmaps"

func configMap(name string, size int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{Name: name},
		Data:       map[string]string{"content": strings.Repeat("x", size)},
	}
}

// measure asks for this and that for a while and returns how long each answer took.
// A single one that fails is an error: a neighbour's flood must not be felt.
func (u *user) measure(ctx context.Context, during time.Duration) ([]time.Duration, error) {
	var times []time.Duration
	end := time.Now().Add(during)
	for i := 0; i%5 != 0 || time.Now().Before(end); i++ { // what is created is deleted
		method, path, body := http.MethodGet, configMaps+"/object-1", any(nil)
		switch i % 5 {
		case 1:
			path = configMaps
		case 2:
			method, path, body = http.MethodPost, configMaps, configMap("measured", 500)
		case 3:
			method, path = http.MethodDelete, configMaps+"/measured"
		}
		began := time.Now()
		if err := u.api.call(ctx, method, path, body, nil); err != nil {
			return nil, err
		}
		times = append(times, time.Since(began))
		if !pause(ctx, victimPause) {
			return nil, context.Cause(ctx)
		}
	}
	return times, nil
}

func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

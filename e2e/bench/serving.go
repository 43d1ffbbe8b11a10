// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
	"github.com/tenantd/tenantd/e2e/bench/results"
)

const (
	// listed is how many objects the list that is measured has.
	listed = 1000
	// objectSize is that of a ConfigMap's content.
	objectSize = 500
	// customObjects are applied at once.
	customObjects = 100
	// unlimited is beyond what one machine can ask for.
	unlimited = 100000
)

// servingConfig is what the flags of bench api set.
type servingConfig struct {
	bin, output       string
	rounds            int
	round             time.Duration
	clients, watchers int
	skipApply         bool
}

func newServingCommand() *cobra.Command {
	var cfg servingConfig
	cmd := &cobra.Command{
		Use:   "api",
		Short: "Measure an API server through the port, beside a separate kube-apiserver",
		Long: `Api asks a tenant through tenantd's port, and in turn a kube-apiserver on its own port
with an etcd of the same configuration: get, list of 1,000, create, update, watch by many,
and kubectl apply of a definition and 100 objects of it. The tenant's limits on requests
are raised, since what is compared is the work and not the limit.`,
		Args:          cobra.NoArgs,
		SilenceUsage:  true,
		SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if cfg.rounds < 1 || cfg.round < time.Second/10 || cfg.clients < 1 || cfg.watchers < 1 {
				return errors.New("--rounds, --clients and --watchers must be at least 1, --round at least 100ms")
			}
			return runServing(cmd.Context(), cfg, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.IntVar(&cfg.rounds, "rounds", 5, "turns of each side")
	f.DurationVar(&cfg.round, "round", 3*time.Second, "length of each measurement in a turn")
	f.IntVar(&cfg.clients, "clients", 8, "clients, each with a connection of its own, that wait for an answer before they ask again")
	f.IntVar(&cfg.watchers, "watchers", 100, "watches that get each event, each with a connection of its own")
	f.BoolVar(&cfg.skipApply, "without-kubectl", false, "leave kubectl apply out")
	binFlag(f, &cfg.bin, "tenantd, kubectl and upstream's programs")
	outputFlag(f, &cfg.output)
	return cmd
}

// served is what one side answered to one kind of request.
type served struct {
	perSecond []float64 // by round
	times     []time.Duration
	// cpu is what server, etcd and clients used for one of what perSecond counts, by round.
	cpu []time.Duration
}

// server is one side.
type server struct {
	name       string
	config     *rest.Config
	kubeconfig string // file
	pids       []int  // whose CPU time counts: the side's, and the benchmark's, in which the clients are and their etcd
	clients    []*api
	figures    map[string]*served
	created    int
}

// The kinds of requests, in the order in which they are measured.
const (
	kindGet     = "get"
	kindList    = "list of 1,000"
	kindCreate  = "create"
	kindUpdate  = "update"
	kindWatch   = "event to all watchers"
	kindDefine  = "kubectl apply of a definition"
	kindObjects = "kubectl apply of 100 objects"
)

func kinds() []string {
	return []string{kindGet, kindList, kindCreate, kindUpdate, kindWatch, kindDefine, kindObjects}
}

func runServing(ctx context.Context, cfg servingConfig, stdout, progress io.Writer) (err error) {
	bin, err := findPrograms(cfg.bin)
	if err != nil {
		return err
	}
	kubectl, err := filepath.Abs(filepath.Join(cfg.bin, "kubectl"))
	if err != nil {
		return fmt.Errorf("find kubectl: %w", err)
	}
	if _, err := os.Stat(kubectl); err != nil && !cfg.skipApply {
		return fmt.Errorf("%w: build it with `make bin/kubectl`, or use --without-kubectl", err)
	}
	dir, err := os.MkdirTemp("", "bench")
	if err != nil {
		return fmt.Errorf("make a directory for the run: %w", err)
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	fmt.Fprintf(progress, "%s; load average: %s\n", machine(bin.goVersion), loadAverage())

	ours, err := startHost(ctx, bin, dir, defaultPatience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, ours.close()) }()
	theirs, err := newUpstream(ctx, bin, dir, false, defaultPatience)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, theirs.close()) }()

	kubeconfig, err := ours.limitedTenant(ctx, "served", v1alpha1.TenantLimits{RequestsInFlight: unlimited, RequestsPerSecond: unlimited})
	if err != nil {
		return err
	}
	file := filepath.Join(dir, "served.kubeconfig")
	if err := os.WriteFile(file, kubeconfig, 0o600); err != nil {
		return fmt.Errorf("write the tenant's kubeconfig: %w", err)
	}
	config, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return fmt.Errorf("read the tenant's kubeconfig: %w", err)
	}
	separate, _, err := theirs.set(ctx, 1)
	if err != nil {
		return err
	}
	servers := []*server{
		{name: "ours", config: config, kubeconfig: file},
		{name: "theirs", config: separate, kubeconfig: filepath.Join(dir, "upstream-1", "admin.kubeconfig")},
	}
	for i, processes := range [][]*process{ours.processes(), theirs.processes()} {
		s := servers[i]
		if s.pids, err = descendants(processes); err != nil {
			return err
		}
		s.pids = append(s.pids, os.Getpid())
		if err := s.prepare(ctx, cfg.clients); err != nil {
			return fmt.Errorf("prepare %s: %w", s.name, err)
		}
		defer s.close()
	}
	busy, err := watchMachine(append(ours.processes(), theirs.processes()...))
	if err != nil {
		return err
	}
	if err := wait(ctx, defaultPause/3, ours, theirs); err != nil { // what starting left to do
		return err
	}
	for round := range cfg.rounds {
		turns := slices.Clone(servers)
		if round%2 == 1 {
			slices.Reverse(turns)
		}
		for _, kind := range kinds() {
			for _, s := range turns {
				if err := s.measure(ctx, cfg, kind, kubectl, dir); err != nil {
					return fmt.Errorf("%s: %s: %w", s.name, kind, err)
				}
			}
		}
		for _, s := range servers {
			if err := s.tidy(ctx); err != nil {
				return fmt.Errorf("tidy up %s: %w", s.name, err)
			}
		}
		fmt.Fprintf(progress, "round %d of %d done\n", round+1, cfg.rounds)
	}
	others, err := busy()
	if err != nil {
		return err
	}
	rows := servingRows(cfg, servers[0], servers[1], fmt.Sprintf("; %s, the rest of the machine took %.2f cores", machine(bin.goVersion), others))
	if err := results.Write(cfg.output, rows); err != nil {
		return err
	}
	return printRows(stdout, rows)
}

// prepare connects the clients and creates what is listed.
func (s *server) prepare(ctx context.Context, clients int) error {
	s.figures = map[string]*served{}
	for _, kind := range kinds() {
		s.figures[kind] = new(served)
	}
	for range clients {
		a, err := newAPI(s.config)
		if err != nil {
			return err
		}
		s.clients = append(s.clients, a)
	}
	return s.each(ctx, listed, func(ctx context.Context, a *api, i int) error {
		return a.call(ctx, http.MethodPost, configMaps, configMap(fmt.Sprintf("object-%d", i), objectSize), nil)
	})
}

func (s *server) close() {
	for _, a := range s.clients {
		a.client.CloseIdleConnections()
	}
}

// each does n things, shared out among the clients.
func (s *server) each(ctx context.Context, n int, do func(ctx context.Context, a *api, i int) error) error {
	all, ctx := errgroup.WithContext(ctx)
	for c, a := range s.clients {
		all.Go(func() error {
			for i := c; i < n; i += len(s.clients) {
				if err := do(ctx, a, i); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return all.Wait()
}

// busily has all clients ask until the round is over.
func (s *server) busily(ctx context.Context, cfg servingConfig, kind string, ask func(ctx context.Context, a *api, client, i int) error) error {
	f := s.figures[kind]
	var mu sync.Mutex
	used, err := cpuTime(s.pids...)
	if err != nil {
		return err
	}
	began, asked := time.Now(), 0
	all, ctx := errgroup.WithContext(ctx)
	for c, a := range s.clients {
		all.Go(func() error {
			var times []time.Duration
			for i := 0; time.Since(began) < cfg.round; i++ {
				before := time.Now()
				if err := ask(ctx, a, c, i); err != nil {
					return err
				}
				times = append(times, time.Since(before))
			}
			mu.Lock()
			defer mu.Unlock()
			asked += len(times)
			f.times = append(f.times, times...)
			return nil
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	return s.note(f, asked, began, used)
}

// note adds a round in which n things were done since began, when s had used so much.
func (s *server) note(f *served, n int, began time.Time, used time.Duration) error {
	f.perSecond = append(f.perSecond, float64(n)/time.Since(began).Seconds())
	now, err := cpuTime(s.pids...)
	if err != nil {
		return err
	}
	f.cpu = append(f.cpu, (now-used)/time.Duration(max(n, 1)))
	return nil
}

func (s *server) measure(ctx context.Context, cfg servingConfig, kind, kubectl, dir string) error {
	if cfg.skipApply && (kind == kindDefine || kind == kindObjects) {
		return nil
	}
	switch kind {
	case kindGet:
		return s.busily(ctx, cfg, kind, func(ctx context.Context, a *api, client, i int) error {
			return a.call(ctx, http.MethodGet, fmt.Sprintf("%s/object-%d", configMaps, (client+i)%listed), nil, nil)
		})
	case kindList:
		return s.busily(ctx, cfg, kind, func(ctx context.Context, a *api, _, _ int) error {
			return a.call(ctx, http.MethodGet, configMaps, nil, nil)
		})
	case kindCreate:
		s.created++
		return s.busily(ctx, cfg, kind, func(ctx context.Context, a *api, client, i int) error {
			object := configMap(fmt.Sprintf("created-%d-%d-%d", s.created, client, i), objectSize)
			object.Labels = map[string]string{"bench": "created"}
			return a.call(ctx, http.MethodPost, configMaps, object, nil)
		})
	case kindUpdate:
		return s.busily(ctx, cfg, kind, func(ctx context.Context, a *api, client, i int) error {
			object := configMap(fmt.Sprintf("object-%d", client), objectSize)
			object.Data["round"] = fmt.Sprint(s.created, i) // or nothing is written
			return a.call(ctx, http.MethodPut, configMaps+"/"+object.Name, object, nil)
		})
	case kindWatch:
		return s.watch(ctx, cfg)
	case kindDefine:
		return s.apply(ctx, kubectl, filepath.Join(dir, s.name+"-definition.json"), kind, definition(s.created))
	default:
		return s.apply(ctx, kubectl, filepath.Join(dir, s.name+"-objects.json"), kind, objects(s.created))
	}
}

// tidy deletes what a round has created, so that the next one finds as much.
func (s *server) tidy(ctx context.Context) error {
	if err := s.clients[0].call(ctx, http.MethodDelete, configMaps+"?labelSelector=bench%3Dcreated", nil, nil); err != nil {
		return err
	}
	err := s.clients[0].call(ctx, http.MethodDelete, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/"+plural(s.created)+"."+customGroup, nil, nil)
	if isStatus(err, http.StatusNotFound) { // without kubectl
		err = nil
	}
	return err
}

// watch writes, one after the other, what many watch, and measures how long it takes
// until all of them have it.
func (s *server) watch(ctx context.Context, cfg servingConfig) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	const name = "watched"
	var version struct {
		Metadata struct{ ResourceVersion string }
	}
	object := configMap(name, objectSize)
	object.Labels = map[string]string{"bench": "created"}
	if err := s.clients[0].call(ctx, http.MethodPost, configMaps, object, &version); err != nil {
		return err
	}
	arrived := make(chan error, cfg.watchers)
	var watching sync.WaitGroup
	defer watching.Wait()
	defer cancel()
	for range cfg.watchers {
		a, err := newAPI(s.config)
		if err != nil {
			return err
		}
		defer a.client.CloseIdleConnections()
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, a.base+configMaps+"?watch=true&fieldSelector=metadata.name%3D"+name+
			"&resourceVersion="+version.Metadata.ResourceVersion, nil)
		if err != nil {
			return err
		}
		resp, err := a.client.Do(req)
		if err != nil {
			return fmt.Errorf("watch: %w", err)
		}
		if resp.StatusCode != http.StatusOK {
			_ = resp.Body.Close()
			return fmt.Errorf("watch: %s", resp.Status)
		}
		watching.Go(func() {
			defer resp.Body.Close()
			for lines := bufio.NewReaderSize(resp.Body, 4<<10); ; {
				line, err := lines.ReadString('\n')
				if err == nil && !strings.Contains(line, `"MODIFIED"`) {
					err = fmt.Errorf("watch: %.300s", line)
				}
				select {
				case arrived <- err:
				case <-ctx.Done():
					return
				}
				if err != nil {
					return
				}
			}
		})
	}
	f := s.figures[kindWatch]
	used, err := cpuTime(s.pids...)
	if err != nil {
		return err
	}
	began, events := time.Now(), 0
	for ; time.Since(began) < cfg.round; events++ {
		object.Data["event"] = fmt.Sprint(events)
		before := time.Now()
		if err := s.clients[0].call(ctx, http.MethodPut, configMaps+"/"+name, object, nil); err != nil {
			return err
		}
		for range cfg.watchers {
			select {
			case err := <-arrived:
				if err != nil {
					return err
				}
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(callPatience):
				return errors.New("a watcher did not get the event")
			}
		}
		f.times = append(f.times, time.Since(before))
	}
	return s.note(f, events*cfg.watchers, began, used)
}

// apply has kubectl apply a file, and waits until a definition can be used.
func (s *server) apply(ctx context.Context, kubectl, file, kind string, what any) error {
	text, err := json.Marshal(what)
	if err != nil {
		return fmt.Errorf("encode: %w", err)
	}
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return fmt.Errorf("write what kubectl applies: %w", err)
	}
	began := time.Now()
	cmd := exec.CommandContext(ctx, kubectl, "--kubeconfig", s.kubeconfig, "--cache-dir", filepath.Join(filepath.Dir(file), s.name+"-cache"), "apply", "-f", file)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply: %w: %.300s", err, out)
	}
	took := time.Since(began)
	f := s.figures[kind]
	f.times = append(f.times, took)
	if kind == kindObjects {
		return nil
	}
	err = poll(ctx, defaultPatience, nil, func(ctx context.Context) error {
		return s.clients[0].call(ctx, http.MethodGet, "/apis/"+customGroup+"/v1/"+plural(s.created), nil, nil)
	})
	if err == nil && !pause(ctx, defined) {
		err = context.Cause(ctx)
	}
	return err
}

// defined is how long a definition is left alone before objects of it are created: an
// API server sleeps 2 s in creates of what was established less than 2 s ago, in
// whole seconds (apiextensions-apiserver, customresource_handler.go), which would be
// felt by the side whose turn comes sooner.
const defined = 3 * time.Second

const customGroup = "bench.example.com"

func plural(round int) string { return fmt.Sprintf("gadget%ds", round) }

type object = map[string]any

// definition is that of the round's own kind, so that no round finds the one before.
func definition(round int) any {
	kind := fmt.Sprintf("Gadget%d", round)
	return object{
		"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition",
		"metadata": object{"name": plural(round) + "." + customGroup},
		"spec": object{
			"group": customGroup, "scope": "Namespaced",
			"names": object{"kind": kind, "plural": plural(round), "singular": strings.ToLower(kind)},
			"versions": []object{{"name": "v1", "served": true, "storage": true, "schema": object{"openAPIV3Schema": object{
				"type": "object", "properties": object{"spec": object{"type": "object", "properties": object{
					"colour": object{"type": "string"}, "size": object{"type": "integer"},
				}}},
			}}}},
		},
	}
}

func objects(round int) any {
	var items []object
	for i := range customObjects {
		items = append(items, object{
			"apiVersion": customGroup + "/v1", "kind": fmt.Sprintf("Gadget%d", round),
			"metadata": object{"name": fmt.Sprintf("gadget-%d", i), "namespace": "default"},
			"spec":     object{"colour": "blue", "size": i},
		})
	}
	return object{"apiVersion": "v1", "kind": "List", "items": items}
}

func servingRows(cfg servingConfig, ours, theirs *server, where string) (rows []results.Row) {
	for _, kind := range kinds() {
		a, b := ours.figures[kind], theirs.figures[kind]
		if len(a.times) == 0 || len(b.times) == 0 {
			continue
		}
		samples := fmt.Sprintf("%d and %d samples in %d rounds", len(a.times), len(b.times), cfg.rounds)
		if len(a.perSecond) > 0 {
			x, y := spreadOf(a.perSecond), spreadOf(b.perSecond)
			what := fmt.Sprintf("%d clients", cfg.clients)
			if kind == kindWatch {
				what = fmt.Sprintf("%d watchers, one writer", cfg.watchers)
			}
			rows = append(rows, results.Higher("API through the port: "+kind, "1/s", x.median, y.median,
				fmt.Sprintf("%s; median of %d, ours %s, theirs %s%s", what, len(a.perSecond), x, y, where)))
			rows = append(rows, results.Lower("API through the port: "+kind+", CPU", "ms", ms(quantile(a.cpu, 0.5)), ms(quantile(b.cpu, 0.5)),
				"user and system time of server, etcd and clients for each; median"+where))
		}
		rows = append(rows, results.Lower("API through the port: "+kind+", p50", "ms", ms(quantile(a.times, 0.5)), ms(quantile(b.times, 0.5)), samples+where))
		if len(a.times) > cfg.rounds { // or it is the largest of a few
			rows = append(rows, results.Lower("API through the port: "+kind+", p99", "ms", ms(quantile(a.times, 0.99)), ms(quantile(b.times, 0.99)), samples+where))
		}
	}
	return rows
}

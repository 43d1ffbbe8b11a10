// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/time/rate"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
)

const (
	// floodObjects of floodObjectSize are what the flooded tenant has: a list of them
	// is some megabytes.
	floodObjects    = 1000
	floodObjectSize = 2000
	// floodConns is the number of connections, and of clients that each wait for
	// their answer before they ask again.
	floodConns = 100
	// floodWithin keeps requests below the default limit of 500 a second.
	floodWithin = 480
)

// seed fills the tenant that is to be flooded.
func seed(ctx context.Context, kubeconfig []byte) error {
	cfg, err := clientcmd.RESTConfigFromKubeConfig(kubeconfig)
	if err != nil {
		return fmt.Errorf("read the flooded tenant's kubeconfig: %w", err)
	}
	a, err := newAPI(cfg)
	if err != nil {
		return err
	}
	defer a.client.CloseIdleConnections()
	every := rate.NewLimiter(floodWithin/2, 1)
	for i := range floodObjects {
		if err := every.Wait(ctx); err != nil {
			return err
		}
		if err := a.call(ctx, http.MethodPost, configMaps, configMap(fmt.Sprintf("object-%d", i), floodObjectSize), nil); err != nil {
			return fmt.Errorf("fill the tenant that is to be flooded: %w", err)
		}
	}
	return nil
}

func newFloodCommand() *cobra.Command {
	var kubeconfig, kind string
	cmd := &cobra.Command{
		Use:    "flood",
		Short:  "Flood a tenant until told to stop (bench neighbour starts it)",
		Hidden: true, Args: cobra.NoArgs, SilenceUsage: true, SilenceErrors: true,
		RunE: func(cmd *cobra.Command, _ []string) error {
			cfg, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
			if err != nil {
				return fmt.Errorf("read kubeconfig: %w", err)
			}
			return runFlood(cmd.Context(), cfg, kind, cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&kubeconfig, "kubeconfig", "", "of the tenant")
	cmd.Flags().StringVar(&kind, "kind", "over", "within its limits, over them, or strangers")
	return cmd
}

// runFlood asks for everything on many connections until ctx is done, and says
// what it was answered.
func runFlood(ctx context.Context, cfg *rest.Config, kind string, out io.Writer) error {
	limiter := rate.NewLimiter(rate.Inf, 0)
	switch kind {
	case "within":
		limiter = rate.NewLimiter(floodWithin, 1)
	case "over":
	case "strangers":
		cfg = rest.AnonymousClientConfig(cfg)
	default:
		return fmt.Errorf("--kind %s: there are within, over and strangers", kind)
	}
	var served, refused, failed atomic.Int64
	var last atomic.Value
	var clients sync.WaitGroup
	for i := range floodConns {
		a, err := newAPI(cfg)
		if err != nil {
			return err
		}
		clients.Go(func() {
			for n := i; limiter.Wait(ctx) == nil; n++ {
				status, err := floodOnce(ctx, a, i, n)
				switch {
				case err != nil:
					last.Store(err.Error())
					failed.Add(1)
				case status == http.StatusTooManyRequests:
					refused.Add(1)
				default:
					served.Add(1)
				}
				if ctx.Err() != nil {
					return
				}
			}
		})
	}
	began := time.Now()
	clients.Wait()
	seconds := time.Since(began).Seconds()
	_, err := fmt.Fprintf(out, "%.0f served, %.0f refused, %.1f failed each second (%v)\n", float64(served.Load())/seconds, float64(refused.Load())/seconds, float64(failed.Load())/seconds, last.Load())
	return err
}

// floodOnce makes the n-th request of a client: of twenty ten get, three list, six
// write and one watches for a moment.
func floodOnce(ctx context.Context, a *api, client, n int) (status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, callPatience)
	defer cancel()
	method, path, body := http.MethodGet, fmt.Sprintf("%s/object-%d", configMaps, n%floodObjects), io.Reader(nil)
	own := fmt.Sprintf("flood-%d", client)
	switch n % 20 {
	case 1, 8, 15:
		path = configMaps
	case 2, 9, 16:
		text, err := json.Marshal(configMap(own, floodObjectSize))
		if err != nil {
			return 0, err
		}
		method, path, body = http.MethodPost, configMaps, strings.NewReader(string(text))
	case 3, 10, 17:
		method, path = http.MethodDelete, configMaps+"/"+own
	case 5:
		path = configMaps + "?watch=true&timeoutSeconds=1"
	}
	req, err := http.NewRequestWithContext(ctx, method, a.base+path, body)
	if err != nil {
		return 0, err
	}
	req.Header.Set("Content-Type", "application/json")
	resp, err := a.client.Do(req)
	if err != nil {
		return 0, err
	}
	defer resp.Body.Close()
	if _, err := io.Copy(io.Discard, resp.Body); err != nil && !errors.Is(err, context.Canceled) {
		return 0, err
	}
	return resp.StatusCode, nil
}

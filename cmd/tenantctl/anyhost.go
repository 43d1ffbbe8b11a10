// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/tenantd/tenantd/api/v1alpha1"
)

// probeTimeout is what a host has to say that it is ready: a host that is frozen takes
// connections, and would be waited for until requestTimeout.
const probeTimeout = 3 * time.Second

// otherHosts are the hosts that a kubeconfig lists beside its server; none if it does
// not list any.
func otherHosts(file string) ([]string, error) {
	config, err := clientcmd.LoadFromFile(file)
	if err != nil {
		return nil, err
	}
	current := config.Contexts[config.CurrentContext]
	if current == nil || config.Clusters[current.Cluster] == nil {
		return nil, nil
	}
	cluster := config.Clusters[current.Cluster]
	extension, ok := cluster.Extensions[v1alpha1.HostsExtension].(*runtime.Unknown)
	if !ok {
		return nil, nil
	}
	listed, err := v1alpha1.ParseKubeconfigHosts(extension.Raw)
	if err != nil {
		return nil, err
	}
	server, err := url.Parse(cluster.Server)
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(listed, func(address string) bool { return address == server.Host }), nil
}

// anyHost sends requests to a host of the system plane that answers: to the server
// that they are for, or else to the first of others that does. TLS is about the name
// of the plane in any case.
type anyHost struct {
	// Constant after construction.
	next   http.RoundTripper
	cli    *cli
	others []string

	mu   sync.Mutex // guards what follows
	host string     // that has answered; empty when none is known
}

// RoundTrip implements http.RoundTripper.
func (a *anyHost) RoundTrip(r *http.Request) (*http.Response, error) {
	host := a.choose(r)
	if host != r.URL.Host {
		r = r.Clone(r.Context())
		r.URL.Host = host
	}
	resp, err := a.next.RoundTrip(r)
	if err != nil {
		a.mu.Lock()
		a.host = "" // the next request looks again
		a.mu.Unlock()
	}
	return resp, err
}

// choose returns a host that answers or, without one, the server, whose error is as
// good as any.
func (a *anyHost) choose(r *http.Request) string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.host != "" {
		return a.host
	}
	var first error
	for _, host := range append([]string{r.URL.Host}, a.others...) {
		to := url.URL{Scheme: r.URL.Scheme, Host: host}
		err := a.probe(r.Context(), to)
		if err == nil {
			if first != nil {
				fmt.Fprintf(a.cli.err, "the host at %s does not answer (%v); asking the one at %s\n", r.URL.Host, first, host)
				a.cli.server = to.String()
			}
			a.host = host
			return host
		}
		if first = cmp.Or(first, err); r.Context().Err() != nil {
			break
		}
	}
	return r.URL.Host
}

// probe asks a host whether its system plane is ready.
func (a *anyHost) probe(ctx context.Context, to url.URL) error {
	ctx, cancel := context.WithTimeout(ctx, probeTimeout)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, to.JoinPath("/readyz").String(), nil)
	if err != nil {
		return err
	}
	resp, err := a.next.RoundTrip(r)
	switch {
	case ctx.Err() != nil:
		return fmt.Errorf("nothing within %s", probeTimeout)
	case err != nil:
		return err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // for the connection's next use
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("it is not ready: %s", resp.Status)
	}
	return nil
}

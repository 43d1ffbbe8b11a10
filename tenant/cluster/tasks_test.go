// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func TestTasks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		var mu sync.Mutex // guards began
		var began []time.Duration
		start := time.Now()
		proceed := make(chan error)
		tasks := newTasks(func(ctx context.Context, name string) error {
			mu.Lock()
			began = append(began, time.Since(start))
			mu.Unlock()
			select {
			case err := <-proceed:
				return err
			case <-ctx.Done():
				return ctx.Err()
			}
		}, func(string, error, time.Duration) {})
		expect := func(what string, want ...time.Duration) {
			t.Helper()
			synctest.Wait()
			mu.Lock()
			defer mu.Unlock()
			if !slices.Equal(began, want) {
				t.Fatalf("%s: began at %v, want %v", what, began, want)
			}
		}

		tasks.mark("a")
		expect("before the start")
		ended := make(chan struct{})
		go func() {
			tasks.start(ctx)
			close(ended)
		}()
		expect("marked before the start", 0)
		tasks.mark("a")
		tasks.mark("a")
		expect("marked while it runs", 0)
		proceed <- nil
		expect("once more for all marks", 0, 0)
		proceed <- errors.New("broken")
		time.Sleep(minRetry)
		expect("after a failure", 0, 0, minRetry)
		proceed <- errors.New("broken")
		time.Sleep(2*minRetry - 1)
		expect("the pause grows", 0, 0, minRetry)
		time.Sleep(time.Nanosecond)
		expect("the pause grows", 0, 0, minRetry, 3*minRetry)
		proceed <- nil
		time.Sleep(time.Hour)
		expect("nothing to do", 0, 0, minRetry, 3*minRetry)
		tasks.mark("a")
		expect("marked again", 0, 0, minRetry, 3*minRetry, time.Hour+3*minRetry)
		cancel()
		<-ended
		tasks.mark("a")
		expect("after the end", 0, 0, minRetry, 3*minRetry, time.Hour+3*minRetry)
	})
}

func TestReserved(t *testing.T) {
	r, err := newReserved(&Config{
		Hostname: "Acme.k8s.test", KonnectivityHostname: "tunnel.k8s.test", DNSDomain: "cluster.local", ServiceCIDR: "10.96.0.0/16",
		WorkerVIP: DefaultWorkerVIP(), CertSANs: []string{"api.test", "192.0.2.7"},
	})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{
		"acme.k8s.test": true, "tunnel.k8s.test": true, "api.test": true, "kubernetes": true, "kubernetes.default": true, "kubernetes.default.svc": true,
		"kubernetes.default.svc.cluster.local": true, "webhook.acme.svc": true, "localhost": true, "a.localhost": true, "cluster.local": true,
		"worker.acme.k8s.test": false, "worker": false, "svc.test": false, "kubernetes.test": false, "local": false,
	} {
		if got := r.name(name); got != want {
			t.Errorf("%s is reserved: %v, want %v", name, got, want)
		}
	}
}

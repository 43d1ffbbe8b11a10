// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage/cacher/progress"
	testingclock "k8s.io/utils/clock/testing"
)

// TestProgressIsAskedForSoon runs upstream's loop, so it notices when upstream
// changes the period that the clock replaces.
func TestProgressIsAskedForSoon(t *testing.T) {
	fake := testingclock.NewFakeClock(time.Unix(0, 0))
	asked := make(chan struct{})
	requester := progress.NewConditionalProgressRequester(func(context.Context) error {
		asked <- struct{}{}
		return nil
	}, &cacheClock{WithTicker: fake}, nil)
	stop := make(chan struct{})
	ran := make(chan struct{})
	go func() {
		defer close(ran)
		requester.Run(stop)
	}()
	defer func() {
		close(stop)
		<-ran
	}()
	requester.Add()
	defer requester.Remove()

	for range 3 { // the first timer is made, the others are reset
		for !fake.HasWaiters() {
			time.Sleep(time.Millisecond)
		}
		fake.Step(progressPeriod)
		select {
		case <-asked:
		case <-t.Context().Done():
		case <-time.After(10 * time.Second):
			t.Fatalf("etcd was not asked for progress within %v", progressPeriod)
		}
	}
}

func TestBookmarksAreForClients(t *testing.T) {
	fake := testingclock.NewFakeClock(time.Unix(0, 0))
	ticks := &cacheClock{WithTicker: fake}
	fake.Step(2 * settlingTime)
	const upstream = bookmarkPeriod + bookmarkPeriod/8 // with jitter
	timer := ticks.NewTimer(upstream)
	looks := func(what string, want bool) { // whether the cache looks after bookmarks as soon as upstream's
		t.Helper()
		fake.Step(upstream)
		got := false
		select {
		case <-timer.C():
			got = true
			timer.Reset(upstream)
		default:
		}
		if got != want {
			t.Errorf("%s: the cache looks after bookmarks: %t", what, got)
		}
	}
	looks("nobody watches", false)
	for _, client := range []bool{false, true} {
		w, err := ticks.watch(client, func() (watch.Interface, error) { return watch.NewFake(), nil })
		if err != nil {
			t.Fatal(err)
		}
		looks("a watch begins", true)
		looks("a watch has begun", true)
		fake.Step(settlingTime)
		<-timer.C()
		timer.Reset(upstream)
		looks("a watch goes on", client)
		w.Stop()
		w.Stop()    // is allowed
		if client { // the last look has been planned before
			looks("the client has left", true)
		}
		looks("nobody watches any more", false)
	}
}

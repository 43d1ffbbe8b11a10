// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"testing"
	"time"

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
	}, progressClock{fake}, nil)
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

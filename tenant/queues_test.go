// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"bytes"
	"runtime/pprof"
	"strings"
	"testing"

	"k8s.io/client-go/util/workqueue"
)

// A queue that has a name has no goroutine that does nothing but count.
func TestQueuesDoNotTick(t *testing.T) {
	queue := workqueue.NewTypedWithConfig(workqueue.TypedQueueConfig[string]{Name: "test"})
	defer queue.ShutDown()
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		t.Fatal(err)
	}
	if strings.Contains(profile.String(), "updateUnfinishedWorkLoop") {
		t.Error("a work queue keeps metrics")
	}
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

// Package queues leaves client-go's work queues without metrics.
//
// A queue with metrics wakes up twice a second to bring two of them up to date, and a
// control plane has a hundred queues. The metrics are the process's and not one
// tenant's, so nobody is shown them.
//
// The provider of metrics is set once per process, by an init of component-base, and a
// queue does without only if the provider is client-go's own, which has no exported
// name. So it is set to what it is before anybody else can: packages are initialized
// in the order of their import paths, as far as what they import permits, and this one
// imports nothing but the queues.
package queues

import (
	_ "unsafe" // for go:linkname

	"k8s.io/client-go/util/workqueue"
)

//go:linkname provider k8s.io/client-go/util/workqueue.globalMetricsProvider
var provider workqueue.MetricsProvider

func init() {
	if provider != nil {
		workqueue.SetProvider(provider)
	}
}

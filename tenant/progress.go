// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"time"

	"k8s.io/utils/clock"
)

const (
	// upstreamProgressPeriod is how often a watch cache asks etcd at most how far it is
	// while lists wait for that (progressRequestPeriod in apiserver's
	// pkg/storage/cacher/progress).
	upstreamProgressPeriod = 100 * time.Millisecond
	// progressPeriod takes its place. A consistent list waits until its cache has seen
	// the revision that etcd is at. Upstream's API server is mostly alone with its
	// etcd, so few lists find that revision moved without an event for them. Here every
	// other tenant's write moves it, and a list would wait for up to 100 ms beside them.
	progressPeriod = 5 * time.Millisecond
)

// progressClock is a watch cache's clock. It shortens one period, which upstream has
// no option for.
type progressClock struct{ clock.WithTicker }

// NewTimer implements clock.Clock.
func (c progressClock) NewTimer(d time.Duration) clock.Timer {
	if d != upstreamProgressPeriod {
		return c.WithTicker.NewTimer(d)
	}
	return progressTimer{c.WithTicker.NewTimer(progressPeriod)}
}

type progressTimer struct{ clock.Timer }

// Reset implements clock.Timer.
func (t progressTimer) Reset(d time.Duration) bool { return t.Timer.Reset(min(d, progressPeriod)) }

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/watch"
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

	// bookmarkPeriod, and up to a quarter more, is how often a watch cache looks whether
	// a watch wants a bookmark (dispatchEvents in apiserver's pkg/storage/cacher).
	bookmarkPeriod = time.Second
	// unwatchedPeriod takes its place while no client watches, and settlingTime after
	// any watch has begun, which may wait for the bookmark that ends its initial list.
	// Of a hundred thousand such looks an hour in an idle control plane, none had
	// anybody to tell but informers, which resume without bookmarks.
	unwatchedPeriod = time.Minute
	settlingTime    = 30 * time.Second
)

// cacheClock is a watch cache's clock. It changes two periods, which upstream has no
// option for. It is safe for concurrent use.
type cacheClock struct {
	clock.WithTicker

	mu        sync.Mutex  // guards what follows
	clients   int         // that watch
	began     time.Time   // the last watch
	bookmarks clock.Timer // nil before the cache has asked for it
}

// NewTimer implements clock.Clock.
func (c *cacheClock) NewTimer(d time.Duration) clock.Timer {
	switch {
	case d == upstreamProgressPeriod:
		return progressTimer{c.WithTicker.NewTimer(progressPeriod)}
	case bookmarkPeriod <= d && d <= bookmarkPeriod+bookmarkPeriod/4:
		c.mu.Lock()
		defer c.mu.Unlock()
		c.bookmarks = c.WithTicker.NewTimer(c.untilBookmarks(d))
		return bookmarkTimer{c.bookmarks, c}
	}
	return c.WithTicker.NewTimer(d)
}

// untilBookmarks is when to look next if upstream would in d. c.mu is held.
func (c *cacheClock) untilBookmarks(d time.Duration) time.Duration {
	if c.clients > 0 || c.Since(c.began) < settlingTime {
		return d
	}
	return unwatchedPeriod
}

// watch begins a watch. A client's has the cache look after bookmarks until it is
// stopped.
func (c *cacheClock) watch(client bool, begin func() (watch.Interface, error)) (watch.Interface, error) {
	c.settle(client)
	w, err := begin()
	if !client {
		return w, err
	}
	stopped := sync.OnceFunc(func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.clients--
	})
	if err != nil {
		stopped()
		return nil, err
	}
	return clientWatch{w, stopped}, nil
}

// settle notes that a watch begins.
func (c *cacheClock) settle(client bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	slow := c.untilBookmarks(bookmarkPeriod) != bookmarkPeriod
	c.began = c.Now()
	if client {
		c.clients++
	}
	if slow && c.bookmarks != nil {
		c.bookmarks.Reset(bookmarkPeriod)
	}
}

// clientWatch is a watch that says when it is over.
type clientWatch struct {
	watch.Interface
	stopped func()
}

// Stop implements watch.Interface.
func (w clientWatch) Stop() {
	w.Interface.Stop()
	w.stopped()
}

type progressTimer struct{ clock.Timer }

// Reset implements clock.Timer.
func (t progressTimer) Reset(d time.Duration) bool { return t.Timer.Reset(min(d, progressPeriod)) }

type bookmarkTimer struct {
	clock.Timer
	clock *cacheClock
}

// Reset implements clock.Timer.
func (t bookmarkTimer) Reset(d time.Duration) bool {
	t.clock.mu.Lock()
	defer t.clock.mu.Unlock()
	return t.Timer.Reset(t.clock.untilBookmarks(d))
}

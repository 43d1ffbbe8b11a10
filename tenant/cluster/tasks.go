// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"context"
	"sync"
	"time"
)

const (
	// minRetry is the first pause after a failure. Short: at a first start the
	// namespaces that objects go to appear within milliseconds.
	minRetry = 20 * time.Millisecond
	// maxRetry is the longest. A tenant can make writes fail for as long as it
	// likes, with an admission webhook for example, and this bounds what that costs.
	maxRetry = 30 * time.Second
)

// tasks runs pieces of work that have names: one of a name at a time, again if it
// was marked meanwhile, and again until it succeeds. Nothing runs, not even a
// timer, while nothing is marked: client-go's work queues tick twice a second
// each, which adds up over hundreds of tenants.
type tasks struct {
	run    func(ctx context.Context, name string) error
	failed func(name string, err error, retry time.Duration)

	wg sync.WaitGroup

	mu     sync.Mutex      // guards what follows
	ctx    context.Context // of the work; nil before start
	closed bool
	marked map[string]bool // what is waiting or running → whether it is to run once more
}

func newTasks(run func(context.Context, string) error, failed func(string, error, time.Duration)) *tasks {
	return &tasks{run: run, failed: failed, marked: map[string]bool{}}
}

// mark has the work of that name run soon, or as soon as start is called.
func (t *tasks) mark(name string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	if _, running := t.marked[name]; running {
		t.marked[name] = true
		return
	}
	t.marked[name] = false
	if t.ctx != nil {
		t.wg.Go(func() { t.work(name) })
	}
}

// start runs what is marked, now and later, until ctx is done, and returns when
// all work has ended.
func (t *tasks) start(ctx context.Context) {
	t.mu.Lock()
	t.ctx = ctx
	for name := range t.marked {
		t.wg.Go(func() { t.work(name) })
	}
	t.mu.Unlock()

	<-ctx.Done()
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.wg.Wait()
}

func (t *tasks) work(name string) {
	for retry := minRetry; ; {
		t.mu.Lock()
		t.marked[name] = false
		t.mu.Unlock()
		err := t.run(t.ctx, name)
		if t.ctx.Err() != nil {
			return
		}
		if err == nil {
			retry = minRetry
			if t.done(name) {
				return
			}
			continue
		}
		t.failed(name, err, retry)
		select {
		case <-t.ctx.Done():
			return
		case <-time.After(retry):
		}
		retry = min(2*retry, maxRetry)
	}
}

// done forgets the work of that name, unless it has been marked again.
func (t *tasks) done(name string) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.marked[name] {
		return false
	}
	delete(t.marked, name)
	return true
}

// Copyright The tenantd Authors.
// SPDX-License-Identifier: Apache-2.0

package tenant

import (
	"context"
	"slices"
	"sync"
)

// turns are handed out in order, but first to those that somebody waits for.
type turns struct {
	mu      sync.Mutex // guards what follows, and every turn
	free    int
	held    int     // nobody gets one while it is above 0
	waiting []*turn // hurried ones in front; empty while some are free and not held
}

// turn is one place in the order.
type turn struct {
	hurried bool
	ready   chan struct{} // closed when it has come
}

// acquire waits for a turn, which the returned function gives back.
func (q *turns) acquire(ctx context.Context, t *turn) (release func(), err error) {
	q.mu.Lock()
	if q.free > 0 && q.held == 0 {
		q.free--
		q.mu.Unlock()
		return sync.OnceFunc(q.next), nil
	}
	t.ready = make(chan struct{})
	q.enqueue(t)
	q.mu.Unlock()
	select {
	case <-t.ready:
		return sync.OnceFunc(q.next), nil
	case <-ctx.Done():
	}
	q.mu.Lock()
	i := slices.Index(q.waiting, t)
	if i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
	}
	q.mu.Unlock()
	if i < 0 { // it came in this moment
		q.next()
	}
	return nil, ctx.Err()
}

// hurry lets t go before all that nobody waits for, now or when it comes.
func (q *turns) hurry(t *turn) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if t.hurried {
		return
	}
	t.hurried = true
	if i := slices.Index(q.waiting, t); i >= 0 {
		q.waiting = slices.Delete(q.waiting, i, i+1)
		q.enqueue(t)
	}
}

// enqueue puts t behind its like. Its caller has mu.
func (q *turns) enqueue(t *turn) {
	at := len(q.waiting)
	if t.hurried {
		if i := slices.IndexFunc(q.waiting, func(other *turn) bool { return !other.hurried }); i >= 0 {
			at = i
		}
	}
	q.waiting = slices.Insert(q.waiting, at, t)
}

// hold keeps all that wait or come from getting a turn, until it is released: so their
// order can be settled first.
func (q *turns) hold() (release func()) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.held++
	return sync.OnceFunc(func() {
		q.mu.Lock()
		defer q.mu.Unlock()
		q.held--
		q.handOut()
	})
}

// next gives a turn back.
func (q *turns) next() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.free++
	q.handOut()
}

// handOut gives what is free to those that wait. Its caller has mu.
func (q *turns) handOut() {
	for q.held == 0 && q.free > 0 && len(q.waiting) > 0 {
		q.free--
		close(q.waiting[0].ready)
		q.waiting = slices.Delete(q.waiting, 0, 1)
	}
}
